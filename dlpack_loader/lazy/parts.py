"""Reading strided parts of entries into torch tensors: straight there, by way of the staging, or block by block.

How a part reaches a destination:

*direct*
    dtypes are equal and the pieces that are contiguous on both sides are long, or all of it is: the plan reads them
    straight into the destination.
*staged*
    Strides: ranges of the file are read into the bounded staging and copied with strides. Another dtype: blocks are
    read and torch converts each into its place, so that every value is rounded as torch rounds.
*materialized*
    An operation wanted the values: the part that it was given, and no more, is read into a new tensor.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from dlpack_loader.backend import is_small, read_small
from dlpack_loader.destination import Memory, overlaps_itself
from dlpack_loader.dtype import BY_CODE
from dlpack_loader.errors import DestinationError, LoaderError, OptionError, UnsupportedError
from dlpack_loader.filling import Access, fill
from dlpack_loader.framework import describer
from dlpack_loader.framework import torch as torch_framework
from dlpack_loader.header import Entry
from dlpack_loader.lazy.deferred import Deferred
from dlpack_loader.matching import Match
from dlpack_loader.plan import is_staged
from dlpack_loader.reads import Transfer
from dlpack_loader.runtime.files import Files, Hold, lock_of_process
from dlpack_loader.runtime.host import ScratchPool
from dlpack_loader.selection import stored_shape
from dlpack_loader.stream import Streams
from dlpack_loader.transfer import LoadReport

__all__ = ["LazyReport", "Part", "PartReader"]

_MAX_BLOCK = 16 << 20
"""Most bytes of a block that is converted; small enough to stay in the processor's cache for a part."""

Kind = Literal["direct", "staged", "materialized"]


@dataclass(frozen=True, slots=True)
class LazyReport:
    """What was read through the lazy tensors of a reader."""

    direct: int = 0
    """Copies whose bytes were planned straight into the destination."""
    staged: int = 0
    """Copies that went by way of the staging: short pieces, strides or another dtype."""
    materialized: int = 0
    """Parts that were read into a tensor of their own, because an operation wanted the values."""
    bytes_read: int = 0
    """Bytes asked of the storage."""
    bytes_written: int = 0
    """Bytes written into destinations and into materialized tensors."""
    direct_bytes: int = 0
    """Of the bytes read: straight into destinations."""
    compat_bytes: int = 0
    """Of the bytes read: through host memory of a storage library, in its compatibility mode."""
    staged_bytes: int = 0
    """Of the bytes read: through host memory of ours, which cold files and devices without direct storage need too."""

    def _repr_html_(self) -> str:
        from dlpack_loader.html import lazy_report_html

        return lazy_report_html(self)

    def __str__(self) -> str:
        return (
            f"{self.direct} direct, {self.staged} staged, {self.materialized} materialized; "
            f"{self.bytes_read:,} bytes read ({self.direct_bytes:,} direct, {self.compat_bytes:,} in compatibility "
            f"mode, {self.staged_bytes:,} staged) for {self.bytes_written:,} written"
        )


class Moved(NamedTuple):
    """Bytes read, by the way that they took."""

    direct: int = 0
    compat: int = 0
    staged: int = 0

    @classmethod
    def by(cls, report: LoadReport) -> Moved:
        """Return those of a load."""
        return cls(report.direct_bytes, report.compat_bytes, report.staged_bytes)

    def __add__(self, other: tuple[int, ...]) -> Moved:  # type: ignore[override] # a sum, not a longer tuple
        return Moved(*(one + more for one, more in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class Part:
    """A strided part of an entry, as torch sees it."""

    entry: Entry
    view: torch.Tensor
    """A meta tensor: shape, strides and offset, in elements, within the entry; dtype, which a view may have changed."""
    hold: Hold
    """Keeps the file open."""

    def with_view(self, view: torch.Tensor) -> Part:
        """Return another part of the same entry."""
        return Part(self.entry, view, self.hold)

    def span(self) -> int:
        """Return the bytes from the first of the part in the file to its last."""
        view = self.view
        reach = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
        return (1 + reach) * view.itemsize if view.numel() else 0


class PartReader:
    """What the lazy tensors of one reader have in common: how to read, and what was read. Threads may share it."""

    def __init__(self, access: Access) -> None:
        # A block that is converted takes one half of the budget, reading it the other.
        half = replace(access.bounds, staging_bytes=max(1, access.bounds.staging_bytes // 2))
        self._access = replace(access, progress=None, scratch=ScratchPool())
        self._block_access = replace(self._access, bounds=half)
        self._block_bytes = min(half.staging_bytes, _MAX_BLOCK)
        self._holds: weakref.WeakValueDictionary[str, Hold] = weakref.WeakValueDictionary()
        self._locks: dict[int, threading.Lock] = {}
        self._local = threading.local()
        self._counts: Counter[Kind] = Counter()
        self._moved = Moved()
        self._written = 0

    def part(self, entry: Entry) -> Part:
        """Return the whole of an entry, in torch's dtype and shape for it."""
        dtype = BY_CODE[entry.dtype]
        target = torch_framework.torch_dtype(dtype)
        shape = entry.shape
        if dtype.group > 1:
            stored = stored_shape(dtype, shape)
            if dtype.code == "F4" and shape[-1] % dtype.group:
                raise UnsupportedError(
                    f"f4_x2 dtype requires that the last dim be divisible by 2: got {list(shape)}",
                    tensor=entry.name,
                    file=entry.file,
                    hint="Read its bytes with read_into(name, Target(uint8_destination, reinterpret=True))",
                )
            shape = (*stored.shape[:-1], stored.shape[-1] * (stored.unit // target.itemsize))
        return Part(entry, torch.empty(shape, dtype=target, device="meta"), self._hold(entry.file))

    def report(self) -> LazyReport:
        """Return the sums so far."""
        with lock_of_process(self._locks):
            counts, moved, written = self._counts, self._moved, self._written
            return LazyReport(
                direct=counts["direct"],
                staged=counts["staged"],
                materialized=counts["materialized"],
                bytes_read=sum(moved),
                bytes_written=written,
                direct_bytes=moved.direct,
                compat_bytes=moved.compat,
                staged_bytes=moved.staged,
            )

    def copy(self, part: Part, destination: torch.Tensor, kind: Kind | None = None, *, is_new: bool = False) -> None:
        """Do what ``destination.copy_`` of the part means: broadcast, convert, in torch's way.

        Parameters
        ----------
        destination
            A plain tensor. A meta tensor has no memory, and nothing is read for it.
        kind
            Of the report; None says how the bytes went.
        is_new
            Nobody has the destination yet, so a failure leaves nothing dirty.

        Raises
        ------
        DestinationError
            Its shape is none that the part's can be broadcast to.
        StorageError
            It could not be read; the destination may have been written in part.
        """
        view = part.view
        if view.shape != destination.shape:
            try:
                view = view.expand(destination.shape)
            except RuntimeError:
                raise DestinationError(
                    f"the part has shape {list(view.shape)} and the destination {list(destination.shape)}",
                    tensor=part.entry.name,
                    file=part.entry.file,
                ) from None
        if destination.is_meta or not view.numel():
            return
        if _repeated_axis(destination) is not None:
            destination.copy_(torch.zeros(()))  # torch says what is wrong with it, and writes nothing
        part = part.with_view(view)
        deferred: Deferred | None = getattr(self._local, "deferred", None)
        if deferred is not None:
            if kind is None and view.dtype == destination.dtype and _repeated_axis(view) is None:
                found = _describe(part, destination, None)
                if found is not None:
                    deferred.add(*found, destination.detach(), part.hold)
                    return
            deferred.settle([destination])
        try:
            how, moved = self._fill(part, destination)
        except LoaderError as error:
            error.tensor = error.tensor or part.entry.name
            if is_new:
                error.dirty = ()
            raise
        self._count(kind or how, moved, destination.nbytes)

    def settle(self, values: list[torch.Tensor]) -> None:
        """Make this thread's deferred copies if one of them writes to any of these tensors."""
        deferred: Deferred | None = getattr(self._local, "deferred", None)
        if deferred is not None:
            deferred.settle(values)

    @contextmanager
    def deferring(self) -> Iterator[Deferred]:
        """Note the copies of this thread, and make them when the context is left without an error."""
        if getattr(self._local, "deferred", None) is not None:
            raise OptionError("copies of this reader are deferred already", hint="Leave the one context first")
        deferred = self._local.deferred = Deferred(self._access, self._count_all)
        try:
            yield deferred
            deferred.flush()
        finally:
            self._local.deferred = None

    def materialize(self, part: Part, layout: torch.memory_format | None = None) -> torch.Tensor:
        """Read a part into a new tensor of the CPU."""
        value = torch.empty_like(part.view, device="cpu", memory_format=layout or torch.preserve_format)
        self.copy(part, value, "materialized", is_new=True)
        return value

    def _fill(self, part: Part, destination: torch.Tensor) -> tuple[Kind, Moved]:
        """Read a part into a tensor of its shape, now."""
        view = part.view
        axis = _repeated_axis(view)
        if axis is not None:  # the same values again and again: read once, repeated by torch
            first = destination.narrow(axis, 0, 1)
            read = self._fill(part.with_view(view.narrow(axis, 0, 1)), first)
            destination.narrow(axis, 1, view.shape[axis] - 1).copy_(first)
            return read
        if view.dtype == destination.dtype and (found := self._read(part, destination, self._access)) is not None:
            return found
        if self._access.require_direct and not destination.is_cpu:
            raise UnsupportedError(
                "another dtype, or memory that can't be written directly, and require_direct asks for direct reads",
                tensor=part.entry.name,
                file=part.entry.file,
                hint="Pass a destination of the checkpoint's dtype, or leave out require_direct",
            )
        return "staged", self._convert(part, destination)

    def _read(self, part: Part, destination: torch.Tensor, access: Access) -> tuple[Kind, Moved] | None:
        """Read a part into a tensor of its shape and dtype; None where that memory is none that we write."""
        begin = time.perf_counter()
        with Streams() as streams:
            found = _describe(part, destination, streams)
            if found is None:
                return None
            transfer, memory = found
            if memory.on_host and is_small(transfer):
                try:
                    read_small(access.files, memory, transfer)
                except LoaderError as error:
                    error.dirty = (transfer.name,)
                    raise
                return "direct", Moved(direct=transfer.run)
            match = Match([transfer], [part.entry.name], [memory])  # torch counts the write by itself
            report = fill(access, match, streams, begin)
            return self._kind(transfer), Moved.by(report)

    def _kind(self, transfer: Transfer) -> Kind:
        return "staged" if is_staged(transfer, self._access.bounds) else "direct"

    def _convert(self, part: Part, destination: torch.Tensor) -> Moved:
        """Read blocks, and let torch bring each to its place."""
        moved = Moved()
        dtype = part.view.dtype
        # One for all blocks: the allocator would not always find the last one's place again.
        buffer = torch.empty(max(1, min(self._block_bytes, part.view.nbytes) // dtype.itemsize), dtype=dtype)
        for block, place in _blocks(part, destination, self._block_bytes):
            staging = buffer.as_strided(block.view.shape, torch.empty_like(block.view).stride())
            try:
                found = self._read(block, staging, self._block_access)
            except LoaderError as error:
                error.dirty = (part.entry.name,) if sum(moved) else ()  # the blocks before this one are there
                raise
            assert found is not None  # a tensor of our own can be read into
            place.copy_(staging)
            moved += Moved(0, found[1].compat, found[1].direct + found[1].staged)
        return moved

    def _count_all(self, transfers: list[Transfer], report: LoadReport) -> None:
        with lock_of_process(self._locks):
            self._counts.update(map(self._kind, transfers))
            self._moved += Moved.by(report)
            self._written += report.bytes_written

    def _count(self, kind: Kind, moved: Moved, written: int) -> None:
        with lock_of_process(self._locks):
            self._counts[kind] += 1
            self._moved += moved
            self._written += written

    def _hold(self, path: str) -> Hold:
        with lock_of_process(self._locks):
            hold = self._holds.get(path)
            if hold is None:
                files: Files = self._access.files
                hold = self._holds[path] = files.hold(path)
            return hold


def _describe(part: Part, destination: torch.Tensor, streams: Streams | None) -> tuple[Transfer, Memory] | None:
    plain = destination.detach()  # the caller's right to write is torch's matter, which comes before this
    try:
        memory = torch_framework.describe(plain) if plain.is_cpu else None
        if memory is None:
            memory = describer(streams)(plain)
    except (DestinationError, UnsupportedError):  # a conjugate view, say, or a device that torch alone knows
        return None
    if memory.strides is not None and overlaps_itself(memory):
        return None  # torch says what is wrong with it
    return _transfer(part, memory), memory


def _transfer(part: Part, memory: Memory) -> Transfer:
    """Return the transfer of a part into memory of its shape, with the file's longest stride outermost."""
    view, item = part.view, part.view.itemsize
    offset = part.entry.offset + int(view.storage_offset()) * item
    if memory.strides is None and view.is_contiguous():
        return Transfer(part.entry.name, part.entry.file, offset, 0, memory.nbytes, (), None, memory.nbytes)
    shape, steps, targets = memory.shape, view.stride(), memory.byte_strides()
    order = sorted(range(view.ndim), key=lambda axis: (-steps[axis], -targets[axis]))
    return Transfer.strided(
        part.entry.name,
        part.entry.file,
        offset,
        0,
        shape=tuple(shape[axis] for axis in order),
        source=tuple(steps[axis] * item for axis in order),
        target=tuple(targets[axis] for axis in order),
        unit=item,
        written=memory.nbytes,
    )


def _repeated_axis(view: torch.Tensor) -> int | None:
    """Return the first dimension whose positions are all the same memory."""
    for axis, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if size > 1 and stride == 0:
            return axis
    return None


def _blocks(part: Part, destination: torch.Tensor, limit: int) -> Iterator[tuple[Part, torch.Tensor]]:
    """Cut a part and its destination alike until no block has, or spans in the file, more than ``limit`` bytes."""
    view = part.view
    span = part.span()
    if max(span, view.nbytes) <= limit or view.numel() == 1:
        yield part, destination
        return
    axis = max((axis for axis in range(view.ndim) if view.shape[axis] > 1), key=lambda axis: view.stride()[axis])
    size = view.shape[axis]
    step = view.stride()[axis] * view.itemsize
    inner = span - (size - 1) * step
    # Windows that overlap have more bytes than they span.
    count = max(1, min((limit - inner) // step + 1, limit // (view.nbytes // size)))
    for start in range(0, size, count):
        length = min(count, size - start)
        yield from _blocks(
            part.with_view(view.narrow(axis, start, length)), destination.narrow(axis, start, length), limit
        )
