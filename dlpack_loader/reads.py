"""Transfers, and the bounded reads that one transfer is cut into. Pure data.

Which read serves which part:

``Scatter``
    One range of the file goes to one or several contiguous destinations, in order. Neighbours in the file share a
    read. *Direct*: the storage writes into the destinations.
``Runs``
    Equal pieces at a constant distance, each read by itself straight into its destination. *Direct*.
``Gather``
    One range of the file is read into the staging buffer and copied from there with strides, or with a cast. *Staged*.
    Used where pieces are small and lie close: at most ``Bounds.over_read`` bytes are read for each byte wanted, except
    that pieces under 64 bytes are read together over gaps of up to 1 KiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import msgspec

from dlpack_loader.bounds import Bounds
from dlpack_loader.dtype import DLDataType

__all__ = [
    "MAX_SEGMENTS",
    "Axis",
    "Gather",
    "Margin",
    "Read",
    "Runs",
    "Scatter",
    "Segment",
    "Transfer",
    "strided_reads",
]

MAX_SEGMENTS = 1024
"""Buffers that one ``preadv`` takes (IOV_MAX on Linux)."""

_TINY_RUN = 64
_TINY_GAP = 1024
"""Runs shorter than the one are read together over gaps up to the other, however little of it is wanted: a request
takes about as long as copying a few KiB."""

_DIRECT_RUN = 1 << 16
"""Contiguous pieces of at least this many bytes are read by themselves rather than through the staging buffer."""


class Axis(NamedTuple):
    """Equal steps through the file and through the destination."""

    steps: int
    """Positions."""
    source: int
    """Bytes from one position to the next in the file; may be negative."""
    target: int
    """Bytes from one position to the next in the destination."""


class Segment(msgspec.Struct, frozen=True, gc=False):
    """Consecutive bytes of a read that go to consecutive bytes of one destination."""

    destination: int
    offset: int
    nbytes: int


class Scatter(msgspec.Struct, frozen=True, gc=False):
    """Read one range straight into its destinations, in order."""

    file: str
    offset: int
    nbytes: int
    segments: tuple[Segment, ...]


class Runs(msgspec.Struct, frozen=True, gc=False):
    """Read ``count`` pieces of ``size`` bytes, each straight into its place in one destination."""

    file: str
    offset: int
    destination: int
    at: int
    size: int
    axis: Axis

    @property
    def nbytes(self) -> int:
        """Bytes read."""
        return self.size * self.axis.steps


class Gather(msgspec.Struct, frozen=True, gc=False):
    """Read one range into the staging buffer, then copy the wanted units from there, with strides and cast."""

    file: str
    offset: int
    nbytes: int
    origin: int
    """Byte of the first wanted unit in the staging buffer."""
    destination: int
    at: int
    """Byte of its place in the destination."""
    axes: tuple[Axis, ...]
    unit: int
    """Bytes of one unit in the file."""
    cast: tuple[DLDataType, DLDataType] | None
    """From and to, or None for a copy of bits."""


Read = Scatter | Runs | Gather


class Transfer(msgspec.Struct, frozen=True, gc=False):
    """One tensor, or a part of one, on its way into one destination."""

    name: str
    file: str
    offset: int
    """Absolute offset in the file of the first wanted byte."""
    destination: int
    """Number of the destination."""
    run: int
    """Bytes that are contiguous on both sides."""
    axes: tuple[Axis, ...] = ()
    """Steps from run to run, outermost first; empty for a plain copy."""
    cast: tuple[DLDataType, DLDataType] | None = None
    written: int = 0
    """Bytes written into the destination."""

    def extent(self) -> tuple[int, int]:
        """Return the first offset in the file that is wanted and the one after the last."""
        low = high = self.offset
        for axis in self.axes:
            reach = axis.source * (axis.steps - 1)
            low, high = low + min(0, reach), high + max(0, reach)
        return low, high + self.run

    @classmethod
    def strided(
        cls,
        name: str,
        file: str,
        offset: int,
        destination: int,
        *,
        shape: tuple[int, ...],
        source: tuple[int, ...],
        target: tuple[int, ...],
        unit: int,
        written: int,
        cast: tuple[DLDataType, DLDataType] | None = None,
    ) -> Transfer:
        """Make the transfer of a strided part: dimensions that step evenly on both sides become one.

        Parameters
        ----------
        shape
            Units in each dimension.
        source, target
            Byte strides in the file and in the destination.
        unit
            Bytes of one unit in the file.
        """
        axes = _merged(shape, source, target)
        run = unit
        if axes and cast is None and axes[-1].source == unit and axes[-1].target == unit:
            run *= axes.pop().steps
        return cls(name, file, offset, destination, run, tuple(axes), cast, written)


class Margin(msgspec.Struct, frozen=True, gc=False):
    """A part of a destination that is larger than its tensor, to be zeroed: equal runs that lie evenly spaced."""

    destination: int
    """Number of the destination."""
    at: int
    """Bytes from the destination's first element to the first of the run that lies lowest; may be negative."""
    run: int
    """Bytes that are contiguous."""
    axes: tuple[tuple[int, int], ...] = ()
    """Positions, and bytes from one to the next, outermost first; empty for one run."""

    @property
    def nbytes(self) -> int:
        """Bytes zeroed."""
        return self.run * prod(steps for steps, _ in self.axes)

    @classmethod
    def strided(cls, destination: int, at: int, *, shape: tuple[int, ...], steps: tuple[int, ...], unit: int) -> Margin:
        """Make the margin of a box of elements: dimensions that step evenly become one.

        Parameters
        ----------
        shape
            Elements in each dimension.
        steps
            Bytes between neighbours; none is negative.
        unit
            Bytes of one element.
        """
        axes = [(axis.steps, axis.target) for axis in _merged(shape, steps, steps)]
        run = unit
        if axes and axes[-1][1] == unit:
            run *= axes.pop()[0]
        return cls(destination, at, run, tuple(axes))


def _merged(shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]) -> list[Axis]:
    """Return the axes of a box, outermost first; those that step evenly on both sides become one."""
    axes: list[Axis] = []
    for axis in map(Axis, shape, source, target):
        if axis.steps == 1:
            continue
        outer = axes[-1] if axes else None
        if outer and outer.source == axis.steps * axis.source and outer.target == axis.steps * axis.target:
            axes[-1] = Axis(outer.steps * axis.steps, axis.source, axis.target)
        else:
            axes.append(axis)
    return axes


def strided_reads(transfer: Transfer, bounds: Bounds) -> Iterator[Runs | Gather]:
    """Make the reads of a transfer that is not a plain copy, in order."""
    bound = max(min(bounds.chunk_bytes, bounds.scratch_bytes), transfer.run if transfer.cast else 1)
    yield from _cut(transfer, bounds, bound, transfer.axes, transfer.offset, 0)


def _cut(
    transfer: Transfer, bounds: Bounds, bound: int, axes: tuple[Axis, ...], offset: int, at: int
) -> Iterator[Runs | Gather]:
    """Cut the positions that ``axes`` step through, from ``offset`` in the file and ``at`` in the destination."""
    run = transfer.run
    if not axes:  # one run: a cast of a scalar, or what is left when nothing could be grouped
        if transfer.cast:
            yield Gather(transfer.file, offset, run, 0, transfer.destination, at, (), run, transfer.cast)
        else:
            yield from _pieces(transfer, bounds, Axis(1, 0, 0), offset, at)
        return
    first, inner = axes[0], axes[1:]
    if transfer.cast is None and not inner and run >= _DIRECT_RUN:
        yield from _pieces(transfer, bounds, first, offset, at)
        return
    if not _dense(axes, run, bounds.over_read):
        if not inner and transfer.cast is None:
            yield from _pieces(transfer, bounds, first, offset, at)
            return
    elif transfer.cast is not None or run < _DIRECT_RUN:
        span = run + sum(abs(axis.source) * (axis.steps - 1) for axis in inner)
        if span <= bound:
            together = 1 + (bound - span) // abs(first.source)
            below = sum(min(0, axis.source * (axis.steps - 1)) for axis in inner)
            for start in range(0, first.steps, together):
                count = min(together, first.steps - start)
                reach = first.source * (count - 1)
                low = below + min(0, reach)
                yield Gather(
                    transfer.file,
                    offset + first.source * start + low,
                    span + abs(reach),
                    -low,
                    transfer.destination,
                    at + first.target * start,
                    (Axis(count, first.source, first.target), *inner),
                    run,
                    transfer.cast,
                )
            return
    for i in range(first.steps):
        yield from _cut(transfer, bounds, bound, inner, offset + first.source * i, at + first.target * i)


def _dense(axes: tuple[Axis, ...], run: int, over_read: float) -> bool:
    """Whether reading the gaps along with the runs is worth it, at every level.

    It is where at most ``over_read`` bytes are read for each byte wanted; and for tiny runs where the gaps are short,
    since a request of its own for each costs more than the bytes between them.
    """
    span = wanted = run
    for axis in reversed(axes):
        through = span + _TINY_GAP if run < _TINY_RUN else 0
        if abs(axis.source) > max(wanted * over_read, through):
            return False
        span += abs(axis.source) * (axis.steps - 1)
        wanted *= axis.steps
    return True


def _pieces(transfer: Transfer, bounds: Bounds, axis: Axis, offset: int, at: int) -> Iterator[Runs]:
    """Direct reads of equal runs, in groups that are one worker's share; a run longer than the bound is cut."""
    chunk = bounds.chunk_bytes
    if transfer.run > chunk:
        for i in range(axis.steps):
            for done in range(0, transfer.run, chunk):
                size = min(chunk, transfer.run - done)
                start, place = offset + axis.source * i + done, at + axis.target * i + done
                yield Runs(transfer.file, start, transfer.destination, place, size, Axis(1, 0, 0))
        return
    share = max(1, min(MAX_SEGMENTS, chunk // transfer.run))
    for first in range(0, axis.steps, share):
        count = min(share, axis.steps - first)
        start, place = offset + axis.source * first, at + axis.target * first
        part = Axis(count, axis.source, axis.target)
        yield Runs(transfer.file, start, transfer.destination, place, transfer.run, part)
