"""What a context read, and the options that it reads with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from dlpack_loader.backend import check_fills, check_name
from dlpack_loader.bounds import Bounds
from dlpack_loader.reader import check_flags, make_bounds

if TYPE_CHECKING:
    from dlpack_loader.lazy import LazyReport

__all__ = ["Options", "Report"]


@dataclass(frozen=True, slots=True)
class Options:
    """How a context opens files, checked when it begins."""

    backend: str
    bounds: Bounds
    direct_io: bool | None
    require_direct: bool

    @classmethod
    def make(
        cls, backend: str, staging_bytes: int, threads: int | None, direct_io: bool | None, require_direct: bool
    ) -> Options:
        """Check what was given.

        Raises
        ------
        OptionError
            It makes no sense, or the backend fills no memory.
        """
        check_fills(check_name(backend))
        check_flags(None, direct_io)
        return cls(backend, make_bounds(staging_bytes, threads), direct_io, require_direct)

    def to_open(self, readers: int = 1) -> dict[str, Any]:
        """Return arguments of ``safe_open`` for each of so many readers that share the bounds."""
        return {
            "backend": self.backend,
            "staging_bytes": max(1, self.bounds.staging_bytes // readers),
            "threads": max(1, self.bounds.threads // readers),
            "direct_io": self.direct_io,
            "require_direct": self.require_direct,
        }


class Report:
    """What a context has read through this package, so far; it stays after the context was left."""

    def __init__(self) -> None:
        self._files: list[str] = []
        self._passed_on: list[str] = []
        self._made: list[int] = []  # appending is one step for all threads
        self._reports: list[Callable[[], LazyReport]] = []

    @property
    def files(self) -> tuple[str, ...]:
        """Files opened, each once, in the order in which they were first opened."""
        return tuple(dict.fromkeys(self._files))

    @property
    def passed_on(self) -> tuple[str, ...]:
        """Files that were left to safetensors itself, because their tensors are of a framework that we lack."""
        return tuple(dict.fromkeys(self._passed_on))

    @property
    def reads(self) -> LazyReport:
        """What was read into tensors of the host's: sums over all files.

        Tensors made for it are not counted: on the CPU they are mapped, and read when touched.
        """
        from dlpack_loader.lazy import LazyReport

        reports = [report() for report in list(self._reports)]
        return LazyReport(**{each.name: sum(getattr(one, each.name) for one in reports) for each in fields(LazyReport)})

    @property
    def mapped(self) -> int:
        """Tensors that transformers left on the CPU as they are: mapped, or below 64 KiB read, and not in ``reads``."""
        return sum(self._made)

    def opened(self, file: str, reads: Callable[[], LazyReport] | None = None) -> None:
        """Note a file, and where to ask what is read of it."""
        self._files.append(file)
        if reads is not None:
            self._reports.append(reads)

    def made(self, count: int) -> None:
        """Note tensors that needed no memory beside their mapping."""
        self._made.append(count)

    def left(self, file: str) -> None:
        """Note a file that was left to safetensors."""
        self._passed_on.append(file)

    def __str__(self) -> str:
        passed = f", {len(self.passed_on)} left to safetensors" if self.passed_on else ""
        mapped = f"{self.mapped} mapped, " if self.mapped else ""
        return f"{len(self.files)} files{passed}: {mapped}{self.reads}"
