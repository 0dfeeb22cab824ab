"""Positioned reads into device memory, by way of a bounded ring of pinned host memory.

Each worker has two slots. It reads a range of a file into one, enqueues copies from there to the destinations on the
load's stream, and records the slot's event; a slot is filled again only after its event has happened. So one slot is
read into while the other is copied from, and pinned memory never exceeds the budget, however large a tensor is.

This is the way where there is no GPU-direct storage (compatibility mode): the same destinations, bounds and checks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dlpack_loader.backend import BackendInfo, perform
from dlpack_loader.bounds import Bounds
from dlpack_loader.destination import Memory
from dlpack_loader.errors import OptionError
from dlpack_loader.reads import Axis, Gather, Read, Runs, Scatter
from dlpack_loader.runtime import host
from dlpack_loader.runtime.arrays import copy_strided
from dlpack_loader.runtime.files import Files
from dlpack_loader.runtime.source import SMALL_BYTES, CachePolicy, Source
from dlpack_loader.stream import OwnedStream

__all__ = ["RingBackend", "ring_bounds"]

_SLOTS = 2
_SHARES = _SLOTS + 1  # and as much pageable memory, for ranges that are picked from
_MIN_SLOT = 4096


def ring_bounds(bounds: Bounds) -> Bounds:
    """Divide a budget among the workers' slots; a read then fits into one.

    Raises
    ------
    OptionError
        The budget is too small for a single worker.
    """
    threads = min(bounds.threads, bounds.staging_bytes // (_SHARES * _MIN_SLOT))
    if threads == 0:
        raise OptionError(
            f"staging_bytes of {bounds.staging_bytes:,} is too small for destinations on a device",
            hint=f"Allow at least {_SHARES * _MIN_SLOT:,} bytes",
        )
    slot = bounds.staging_bytes // (_SHARES * threads) // host.ALIGNMENT * host.ALIGNMENT
    room = slot - 2 * host.ALIGNMENT if slot > SMALL_BYTES + 2 * host.ALIGNMENT else slot
    return Bounds(
        staging_bytes=slot * threads,
        threads=threads,
        chunk_bytes=min(bounds.chunk_bytes, room),
        over_read=bounds.over_read,
    )


@dataclass(slots=True)
class _Slot:
    address: int
    event: int
    marked: bool = True
    """Whether the event marks the last copy from it; between a copy and its mark only the stream tells."""


class RingBackend:
    """Reads of one transfer into the memory of one device.

    Parameters
    ----------
    bounds
        Of :func:`ring_bounds`: ``scratch_bytes`` is one slot.
    stream
        The load's own stream on the device; the caller synchronises it or makes others wait for it.
    """

    def __init__(
        self, files: Files, memories: Sequence[Memory], bounds: Bounds, stream: OwnedStream, *, direct_io: bool | None
    ) -> None:
        self.memories = memories  # kept: a worker may outlive the call that an interrupt ended
        self.pointers = [memory.pointer for memory in memories]
        self.bounds = bounds
        self.stream = stream
        self.policy = CachePolicy(files, direct_io)
        self.direct_bytes = 0
        self.compat_bytes = 0
        self.staged_bytes = 0
        self._uncached_bytes = 0
        self._lock = threading.Lock()

    @contextmanager
    def worker(self) -> Iterator[_Worker]:
        """Make a worker, with the device current on its thread; its copies are complete when it is left."""
        with self.stream.device.current():
            worker = _Worker(self)
            try:
                yield worker
            finally:
                worker.close()
                with self._lock:
                    self.staged_bytes += worker.staged_bytes
                    self._uncached_bytes += worker.source.uncached_bytes

    def info(self) -> BackendInfo:
        """Say how the bytes came."""
        device = self.stream.device
        how = self.policy.explain(self._uncached_bytes)
        slots = "pinned" if getattr(device, "pinned", True) else "pageable"  # torch can't pin for every device
        return BackendInfo("pread", False, f"{device.kind}:{device.ordinal} is filled through {slots} memory; {how}")


class _Worker:
    def __init__(self, backend: RingBackend) -> None:
        self._pointers = backend.pointers
        self._device = backend.stream.device
        self._stream = backend.stream.handle
        self._size = backend.bounds.scratch_bytes
        self._slots: list[_Slot] = []
        self._turn = 0
        self._scratch = host.Scratch()
        self.source = Source(backend.policy)
        self.staged_bytes = 0

    def read(self, read: Read, /) -> None:
        perform(self, read)
        self.staged_bytes += read.nbytes

    def close(self) -> None:
        """Wait for the copies from the slots, then free them; a slot is not freed while it may be read from."""
        self.source.close()
        slots, self._slots = self._slots, []
        if not all(slot.marked for slot in slots):  # a fault came between a copy and its mark
            self._device.synchronize_stream(self._stream)
        for slot in slots:
            self._device.synchronize_event(slot.event)
            self._device.destroy_event(slot.event)
            self._device.free_pinned(slot.address)

    def scatter(self, read: Scatter) -> None:
        slot = self._take()
        source = self._fill(slot, read.offset, read.nbytes)
        for part in read.segments:
            self._copy(self._pointers[part.destination] + part.offset, source, part.nbytes)
            source += part.nbytes
        self._give(slot)

    def runs(self, read: Runs) -> None:
        slot = self._take()
        size, axis = read.size, read.axis
        for i in range(axis.steps):
            self.source.read(read.offset + axis.source * i, host.vector(slot.address + size * i, size), size)
        self._spread(self._pointers[read.destination] + read.at, slot.address, (axis,), size)
        self._give(slot)

    def gather(self, read: Gather) -> None:
        source = self._scratch.address(max(read.nbytes, 1))
        self.source.read(read.offset, host.vector(source, read.nbytes), read.nbytes)
        item = read.unit if read.cast is None else read.cast[1][1] * read.cast[1][2] // 8
        target = self._pointers[read.destination] + read.at
        for axes, there, here in _parts(read.axes, source + read.origin, target, item, self._size):
            slot = self._take()
            packed = _packed(axes, item)
            copy_strided(slot.address, there, packed, read.unit, read.cast)
            self._spread(here, slot.address, axes, item)
            self._give(slot)

    def _take(self) -> _Slot:
        """Return a slot that nothing is copied from any more."""
        if len(self._slots) < _SLOTS:
            slot = _Slot(self._device.allocate_pinned(self._size), self._device.create_event())
            self._slots.append(slot)
        else:
            slot = self._slots[self._turn]
            self._turn = (self._turn + 1) % _SLOTS
            self._device.synchronize_event(slot.event)
        slot.marked = False
        return slot

    def _give(self, slot: _Slot) -> None:
        """Mark the copies from a slot, so that it is not filled again before they are done."""
        self._device.record(slot.event, self._stream)
        slot.marked = True

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        self._device.copy(target, source, nbytes, self._stream)

    def _fill(self, slot: _Slot, offset: int, nbytes: int) -> int:
        """Read a range into a slot; return the address of its first byte."""
        if self.source.is_cold(offset, nbytes, self._size) and nbytes + 2 * host.ALIGNMENT <= self._size:
            return self.source.read_around(offset, offset + nbytes, slot.address, self._size)[0]
        self.source.read(offset, host.vector(slot.address, nbytes), nbytes)
        return slot.address

    def _spread(self, target: int, source: int, axes: tuple[Axis, ...], width: int) -> None:
        """Copy packed items to where the axes put them on the device."""
        while axes and (axes[-1].target == width or axes[-1].steps == 1):
            width *= axes[-1].steps
            axes = axes[:-1]
        if not axes:
            self._copy(target, source, width)
            return
        first, inner = axes[0], axes[1:]
        if not inner and first.target > width:
            self._device.copy_rows(target, first.target, source, width, first.steps, self._stream)
            return
        size = width
        for axis in inner:
            size *= axis.steps
        for i in range(first.steps):
            self._spread(target + first.target * i, source + size * i, inner, width)


def _packed(axes: tuple[Axis, ...], item: int) -> tuple[Axis, ...]:
    """Return the axes with their items one after the other at the target."""
    packed: list[Axis] = []
    step = item
    for axis in reversed(axes):
        packed.append(Axis(axis.steps, axis.source, step))
        step *= axis.steps
    return tuple(reversed(packed))


def _parts(
    axes: tuple[Axis, ...], source: int, target: int, item: int, limit: int
) -> Iterator[tuple[tuple[Axis, ...], int, int]]:
    """Cut axes into parts whose items fit into ``limit`` bytes; yield each with its first source and target."""
    if not axes:
        yield (), source, target
        return
    first, inner = axes[0], axes[1:]
    size = item
    for axis in inner:
        size *= axis.steps
    if size > limit:
        for i in range(first.steps):
            yield from _parts(inner, source + first.source * i, target + first.target * i, item, limit)
        return
    together = limit // size
    for start in range(0, first.steps, together):
        count = min(together, first.steps - start)
        part = (Axis(count, first.source, first.target), *inner)
        yield part, source + first.source * start, target + first.target * start
