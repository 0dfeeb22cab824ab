"""What a benchmark measured, and what follows from it. Pure data and arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Advice", "Benchmark", "Measured", "State", "Unusable", "advise", "tell_apart"]

_ENOUGH = 3
"""Runs from which on two ways can be told apart at all."""
_LEAST_BYTES = 1 << 20
"""Below that a run is mostly the opening of files, and says nothing of how fast they are read."""


class State(StrEnum):
    """Where the file is when a run begins."""

    WARM = "warm"
    """In the page cache."""
    COLD = "cold"
    """On the storage."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One way of loading, in one state, over all rounds."""

    way: str
    ours: bool
    default: bool
    """Whether it is what a load does by itself here."""
    call: str
    """How to ask for it."""
    state: State
    nbytes: int
    """Bytes that each run loaded."""
    seconds: tuple[float, ...]
    """Of each run."""
    cpu_seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)

    @property
    def cpu_median(self) -> float:
        """The median of the CPU seconds, of all threads together."""
        return statistics.median(self.cpu_seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of the seconds; the extremes where there are fewer than three runs."""
        if len(self.seconds) < _ENOUGH:
            return min(self.seconds), max(self.seconds)
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def rate(self) -> float:
        """Bytes in a second, by the median."""
        return self.nbytes / self.median if self.median else 0.0


@dataclass(frozen=True, slots=True)
class Unusable:
    """One way that could not be measured here."""

    way: str
    why: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """What to choose in one state."""

    state: State
    way: str
    """The best of this package's."""
    call: str
    default: bool
    """Whether that is what happens anyway."""
    over_default: float | None
    """How many times as fast as the default; None where it is the default, or the default was not measured."""
    rival: str | None
    """The fastest way of safetensors."""
    over_rival: float | None
    """How many times as fast as that; below 1 it is slower."""
    certain: bool
    """Whether the difference to the rival is beyond what runs of one way differ by."""
    enough: bool
    """Whether so much was loaded that the runs tell of reading, and not of opening files."""
    text: str


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What was measured."""

    source: str
    device: str
    framework: str | None
    """Whose memory was filled; None for memory that the caller gave."""
    tensors: int
    nbytes: int
    whole: bool
    """Whether that is the whole checkpoint."""
    measured: tuple[Measured, ...]
    unusable: tuple[Unusable, ...]
    notes: tuple[str, ...]
    """What limits what the numbers say: a sample, fewer rounds, a file that can't be made cold."""
    advice: tuple[Advice, ...]


def tell_apart(one: Measured, other: Measured) -> bool:
    """Whether the runs of two ways differ by more than runs of one way do: their quartiles do not overlap."""
    if min(len(one.seconds), len(other.seconds)) < _ENOUGH:
        return False
    return one.spread[1] < other.spread[0] or other.spread[1] < one.spread[0]


def advise(measured: Sequence[Measured]) -> tuple[Advice, ...]:
    """Say for each state what to choose, and how much that is worth."""
    advice = []
    for state in State:
        ours = [item for item in measured if item.state is state and item.ours]
        theirs = [item for item in measured if item.state is state and not item.ours]
        if ours:
            advice.append(_advise(state, ours, theirs))
    return tuple(advice)


def _advise(state: State, ours: Sequence[Measured], theirs: Sequence[Measured]) -> Advice:
    best = min(ours, key=lambda item: item.median)
    default = next((item for item in ours if item.default), None)
    if default is not None and not tell_apart(best, default):
        best = default
    rival = min(theirs, key=lambda item: item.median, default=None)
    over_default = default.median / best.median if default is not None and best is not default else None
    over_rival = rival.median / best.median if rival is not None else None
    certain = rival is not None and tell_apart(best, rival)
    is_default = best is default
    ours_text = best.way + (", which is what happens by itself" if is_default else f": {best.call}")
    beaten = certain and over_rival is not None and over_rival < 1
    parts = [f"{state}: {ours_text}"]
    if rival is not None and over_rival and beaten:
        parts = [f"{state}: {rival.way}, {1 / over_rival:.2f} x as fast as the best of this package, {ours_text}"]
    if over_default is not None:
        over = f"{over_default:.2f} x as fast as what happens by itself"
        parts.append(f"{best.way} is {over}" if beaten else over)
    if rival is not None and over_rival is not None and not beaten:
        if min(len(best.seconds), len(rival.seconds)) < _ENOUGH:
            parts.append(
                f"{over_rival:.2f} x as fast as the best of safetensors, {rival.way}, by too few runs to be certain"
            )
        elif certain:
            parts.append(f"{over_rival:.2f} x as fast as the best of safetensors, {rival.way}")
        else:
            parts.append(f"not to be told apart from the best of safetensors, {rival.way} ({over_rival:.2f} x)")
    enough = len(best.seconds) >= _ENOUGH
    equals = [item.way for item in ours if enough and item is not best and not tell_apart(item, best)]
    if equals:
        parts.append(f"{f'{best.way} is ' if beaten else ''}within noise of {', '.join(equals)}")
    big = best.nbytes >= _LEAST_BYTES
    if not big:
        few = f"{best.nbytes:,} bytes are too few to tell"
        parts = [f"{state}: whichever you like", f"{few}: a run is mostly the opening of files"]
    return Advice(
        state,
        best.way,
        best.call,
        is_default,
        over_default,
        rival.way if rival is not None else None,
        over_rival,
        certain,
        big,
        "; ".join(parts),
    )
