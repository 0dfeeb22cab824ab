"""Positioned reads into host memory: ``preadv`` straight into the destinations, or around the page cache."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dlpack_loader.backend import BackendInfo, perform
from dlpack_loader.bounds import Bounds
from dlpack_loader.destination import Memory
from dlpack_loader.errors import StorageError, storage_error
from dlpack_loader.reads import Gather, Read, Runs, Scatter, Transfer
from dlpack_loader.runtime import host
from dlpack_loader.runtime.arrays import copy_strided
from dlpack_loader.runtime.files import Files
from dlpack_loader.runtime.source import CachePolicy, Source, truncated

__all__ = ["PreadBackend", "read_small"]


class PreadBackend:
    """Reads of one transfer into host memory."""

    def __init__(
        self,
        files: Files,
        memories: Sequence[Memory],
        bounds: Bounds,
        *,
        direct_io: bool | None,
        scratch: host.ScratchPool | None = None,
    ) -> None:
        self.memories = memories  # kept: a worker may outlive the call that an interrupt ended
        self.pointers = [memory.pointer for memory in memories]
        self.bounds = bounds
        self.policy = CachePolicy(files, direct_io)
        self.scratch = scratch or host.ScratchPool()
        self.direct_bytes = 0
        self.compat_bytes = 0
        self.staged_bytes = 0
        self._uncached_bytes = 0
        self._lock = threading.Lock()

    @contextmanager
    def worker(self) -> Iterator[_Worker]:
        """Make a worker with descriptors and staging of its own."""
        worker = _Worker(self)
        try:
            yield worker
        finally:
            worker.close()
            with self._lock:
                self.direct_bytes += worker.direct_bytes
                self.staged_bytes += worker.staged_bytes
                self._uncached_bytes += worker.source.uncached_bytes

    def info(self) -> BackendInfo:
        """Say how the bytes came."""
        return BackendInfo("pread", self.staged_bytes == 0, self.policy.explain(self._uncached_bytes))


class _Worker:
    def __init__(self, backend: PreadBackend) -> None:
        self._pointers = backend.pointers
        self._pool = backend.scratch
        self._scratch = self._pool.take()
        self.source = Source(backend.policy)
        aligned = backend.bounds.scratch_bytes // host.ALIGNMENT * host.ALIGNMENT
        self._capacity = min(aligned, backend.bounds.chunk_bytes + 2 * host.ALIGNMENT)
        self.direct_bytes = 0
        self.staged_bytes = 0

    def read(self, read: Read, /) -> None:
        perform(self, read)

    def close(self) -> None:
        self.source.close()
        self._pool.give(self._scratch)

    def scatter(self, read: Scatter) -> None:
        pointers = self._pointers
        words = [word for part in read.segments for word in (pointers[part.destination] + part.offset, part.nbytes)]
        pieces = host.vector(*words)
        if not self.source.is_cold(read.offset, read.nbytes, self._capacity):
            self.source.read(read.offset, pieces, read.nbytes)
            self.direct_bytes += read.nbytes
            return
        at, end = read.offset, read.offset + read.nbytes
        while at < end:
            source, size = self.source.read_around(at, end, self._scratch.address(self._capacity), self._capacity)
            pieces = _spread(source, size, pieces)
            at += size
        self.staged_bytes += read.nbytes

    def runs(self, read: Runs) -> None:
        size, axis = read.size, read.axis
        offset, address = read.offset, self._pointers[read.destination] + read.at
        for _ in range(axis.steps):
            self.source.read(offset, host.vector(address, size), size)
            offset += axis.source
            address += axis.target
        self.direct_bytes += read.nbytes

    def gather(self, read: Gather) -> None:
        end = read.offset + read.nbytes
        fits = read.nbytes + 2 * host.ALIGNMENT <= self._capacity
        if fits and self.source.is_cold(read.offset, read.nbytes, self._capacity):
            address = self._scratch.address(self._capacity)
            source, _ = self.source.read_around(read.offset, end, address, self._capacity)
        else:
            source = self._scratch.address(read.nbytes)
            self.source.read(read.offset, host.vector(source, read.nbytes), read.nbytes)
        target = self._pointers[read.destination] + read.at
        copy_strided(target, source + read.origin, read.axes, read.unit, read.cast)
        self.staged_bytes += read.nbytes


def read_small(files: Files, memory: Memory, transfer: Transfer) -> None:
    """Perform a small contiguous transfer by the calling thread alone, through the page cache.

    Raises
    ------
    StorageError
        As for a worker's reads; the memory may have been written in part.
    """
    nbytes, path = transfer.run, transfer.file
    try:
        with files.use(path) as fd:
            got = host.read_at(fd, transfer.offset, host.vector(memory.pointer, nbytes), nbytes)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(
            error.errno, error.strerror, file=path, tensor=transfer.name, offset=transfer.offset
        ) from error
    if got < nbytes:
        truncated(path, transfer.offset + got, transfer.name)


def _spread(source: int, nbytes: int, pieces: host.Vector) -> host.Vector:
    """Copy staged bytes into the first of the pieces; return what is left of them."""
    taken = nbytes
    for address, size in zip(pieces[::2], pieces[1::2], strict=True):
        if not taken:
            break
        part = min(size, taken)
        host.move(address, source, part)
        source, taken = source + part, taken - part
    return host.after(pieces, nbytes)
