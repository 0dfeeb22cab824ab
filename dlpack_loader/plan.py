"""The plan: transfers and bounds become a validated, bounded list of reads. Pure data.

Making a plan does no I/O and touches no device. A plan keeps one small record for each transfer; its reads are made
one by one when asked for, so a plan is as small for a tensor of a terabyte as for one of a kilobyte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from dlpack_loader.bounds import Bounds
from dlpack_loader.errors import few
from dlpack_loader.reads import MAX_SEGMENTS, Gather, Margin, Read, Runs, Scatter, Segment, Transfer, strided_reads

__all__ = ["Plan", "PlanTotals", "is_staged"]


@dataclass(frozen=True, slots=True)
class PlanTotals:
    """A plan in numbers."""

    reads: int
    """Requests to the storage."""
    bytes_read: int
    """Bytes that they ask for."""
    bytes_written: int
    """Bytes that land in destinations."""
    direct_bytes: int
    """Bytes read straight into destinations."""
    staged_bytes: int
    """Bytes read through the staging buffer."""
    peak_staging: int
    """Most bytes of staging in use at a time, for all workers together."""
    bytes_zeroed: int = 0
    """Bytes of padded destinations that no tensor fills, and that become zero."""

    def _repr_html_(self) -> str:
        from dlpack_loader.html import totals_html

        return totals_html(self)


@dataclass(frozen=True)
class Plan:
    """The validated, bounded reads that fill a set of destinations."""

    transfers: tuple[Transfer, ...]
    """In the order of the bytes in the files."""
    names: tuple[str, ...]
    """Name of each destination, by number."""
    bounds: Bounds = field(default_factory=Bounds)
    margins: tuple[Margin, ...] = ()
    """What is zeroed, before the first read; no read writes there."""

    @classmethod
    def make(
        cls, transfers: Iterable[Transfer], names: Iterable[str], bounds: Bounds, margins: Iterable[Margin] = ()
    ) -> Plan:
        """Order the transfers; those without bytes need no read and drop out."""
        wanted = [transfer for transfer in transfers if transfer.written]
        wanted.sort(key=lambda transfer: (transfer.file, transfer.offset))
        return cls(tuple(wanted), tuple(names), bounds, tuple(margins))

    def reads(self) -> Iterator[Read]:
        """Make the reads, transfer by transfer, none longer than the bounds allow; a unit to be cast is read whole."""
        chunk = self.bounds.chunk_bytes
        file, begin, at = "", 0, -1
        segments: list[Segment] = []
        for transfer in self.transfers:
            if transfer.axes or transfer.cast:
                if segments:
                    yield Scatter(file, begin, at - begin, tuple(segments))
                    segments = []
                yield from strided_reads(transfer, self.bounds)
                continue
            offset, rest, done = transfer.offset, transfer.run, 0
            if segments and (offset != at or transfer.file != file or len(segments) == MAX_SEGMENTS):
                yield Scatter(file, begin, at - begin, tuple(segments))
                segments = []
            if not segments:
                file, begin = transfer.file, offset
            while rest:
                # A long tensor is cut at multiples of the chunk in the file, so that neighbouring reads share no page.
                limit = begin - begin % chunk + chunk
                size = min(rest, limit - offset)
                if size:
                    segments.append(Segment(transfer.destination, done, size))
                    offset, rest, done = offset + size, rest - size, done + size
                if rest:
                    yield Scatter(file, begin, offset - begin, tuple(segments))
                    segments, begin = [], offset
            at = offset
        if segments:
            yield Scatter(file, begin, at - begin, tuple(segments))

    @cached_property
    def totals(self) -> PlanTotals:
        """Count what the plan will do, by making its reads without performing them."""
        reads = gathers = direct = staged = peak = 0
        for read in self.reads():
            reads += read.axis.steps if isinstance(read, Runs) else 1
            if isinstance(read, Gather):
                gathers += 1
                staged += read.nbytes
                peak = max(peak, read.nbytes)
            else:
                direct += read.nbytes
        written = sum(transfer.written for transfer in self.transfers)
        return PlanTotals(
            reads,
            direct + staged,
            written,
            direct,
            staged,
            peak * min(self.bounds.threads, gathers),
            sum(margin.nbytes for margin in self.margins),
        )

    def _repr_html_(self) -> str:
        from dlpack_loader.html import plan_html

        return plan_html(self, is_staged)

    def explain(self) -> str:
        """Describe what will happen: reads, bytes, what is direct and what is staged, and the peak of staging."""
        totals = self.totals
        files = len({transfer.file for transfer in self.transfers})
        lines = [
            f"{len(self.transfers)} transfers into {len(self.names)} destinations from {files} file(s)",
            f"  reads     {totals.reads:,} of up to {self.bounds.chunk_bytes:,} bytes, {self.bounds.threads} at a time",
            f"  read      {totals.bytes_read:,} bytes for {totals.bytes_written:,} written"
            + (f" ({totals.bytes_read / totals.bytes_written:.2f} x)" if totals.bytes_written else ""),
            f"  direct    {totals.direct_bytes:,} bytes, from storage into the destination",
            f"  staged    {totals.staged_bytes:,} bytes, through host memory of ours: pieces, strides or a cast",
            f"  staging   {totals.peak_staging:,} bytes at the peak, {self.bounds.staging_bytes:,} if files are cold",
        ]
        staged = [transfer.name for transfer in self.transfers if is_staged(transfer, self.bounds)]
        if staged:
            lines.append(f"  these are {few(staged, 5)}")
        if self.margins:
            padded = list(dict.fromkeys(self.names[margin.destination] for margin in self.margins))
            lines.append(f"  zeroed    {totals.bytes_zeroed:,} bytes, which no tensor fills, of {few(padded, 5)}")
        return "\n".join(lines)


def is_staged(transfer: Transfer, bounds: Bounds) -> bool:
    """Whether a transfer goes through the staging buffer: its reads are all direct, or none is."""
    if not transfer.written or (not transfer.axes and not transfer.cast):
        return False
    return isinstance(next(strided_reads(transfer, bounds), None), Gather)
