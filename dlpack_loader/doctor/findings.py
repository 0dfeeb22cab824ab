"""What a doctor finds: facts, how good they are, what they mean for loading, and what to do. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Device", "Examination", "Finding", "Level"]


class Level(StrEnum):
    """How good a fact is."""

    OK = "ok"
    NOTE = "note"
    """Loading works; it could be faster, or reach more."""
    PROBLEM = "problem"
    """Something that is there does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about the machine."""

    key: str
    """What it is about, for programs: ``"cuda.driver"``, ``"storage.direct_io"``. Keys stay the same."""
    level: Level
    value: str
    """What was found."""
    meaning: str
    """What that means for loading."""
    remedy: str | None = None
    """What to do about it; None where nothing has to be done."""
    blocking: bool = False
    """Whether nothing at all can be loaded because of it."""

    @property
    def group(self) -> str:
        """The part of the key that several findings share."""
        return self.key.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Device:
    """One device that its driver knows."""

    kind: str
    """``"cuda"`` or ``"hip"``."""
    ordinal: int
    name: str
    nbytes: int
    """Its memory."""
    arch: str
    """Compute capability, such as ``"9.0"``, or AMD's name, such as ``"gfx942"``; empty where it is not told."""
    unified: bool
    """Whether its memory is the host's."""


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything that was found."""

    path: str
    """Where the storage was examined."""
    findings: tuple[Finding, ...]
    devices: tuple[Device, ...]

    @property
    def can_load(self) -> bool:
        """Whether loading is possible at all: nothing that was found makes it impossible."""
        return not any(finding.blocking for finding in self.findings)

    def count(self, level: Level) -> int:
        """Return how many findings are of a level."""
        return sum(finding.level is level for finding in self.findings)

    def finding(self, key: str) -> Finding:
        """Return the finding of a key; KeyError when there is none."""
        for finding in self.findings:
            if finding.key == key:
                return finding
        raise KeyError(key)
