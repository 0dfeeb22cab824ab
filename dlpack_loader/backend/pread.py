"""Positioned reads into host memory: ``preadv`` straight into the destinations, buffered or with O_DIRECT.

Whether a read goes through the page cache is decided for each read by what is there. Pages that are resident are
copied from the cache. A large range that is not resident is read with O_DIRECT into the worker's page-aligned staging
and copied from there, which costs less than filling the page cache on the way; the cache is left as it was. Whatever
refuses O_DIRECT (tmpfs, some overlays, network disks) is read buffered, and the backend's ``reason`` says so.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from dlpack_loader.backend import SMALL_BYTES, BackendInfo
from dlpack_loader.bounds import Bounds
from dlpack_loader.destination import Memory
from dlpack_loader.errors import StorageError, TruncatedError, storage_error
from dlpack_loader.reads import Gather, Read, Runs, Scatter, Transfer
from dlpack_loader.runtime import host
from dlpack_loader.runtime.arrays import copy_strided
from dlpack_loader.runtime.files import Files

__all__ = ["PreadBackend", "read_small"]

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)


class PreadBackend:
    """Reads of one transfer into host memory."""

    def __init__(self, files: Files, memories: Sequence[Memory], bounds: Bounds, *, direct_io: bool | None) -> None:
        self.files = files
        self.pointers = [memory.pointer for memory in memories]
        self.bounds = bounds
        self.direct_io = direct_io
        self.direct_bytes = 0
        self.staged_bytes = 0
        self.uncached_bytes = 0
        self.refused: dict[str, str] = {}
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
                self.uncached_bytes += worker.uncached_bytes

    def wants_direct_io(self, path: str) -> bool:
        """Whether large cold ranges of that file are to be read with O_DIRECT."""
        if self.direct_io is False or not _O_DIRECT or not host.LINUX or path in self.refused:
            return False
        if self.bounds.scratch_bytes < SMALL_BYTES + 2 * host.ALIGNMENT:
            return False
        # Without a block device behind it (network, memory, FUSE), caching is the file system's own business.
        return self.direct_io is True or os.major(self.files.shard(path).identity[0]) != 0

    def refuse_direct_io(self, path: str, error: OSError) -> None:
        """Note that a file can't be read with O_DIRECT; the transfer goes on buffered."""
        self.refused.setdefault(path, error.strerror or str(error))

    def info(self) -> BackendInfo:
        """Say how the bytes came."""
        if self.uncached_bytes:
            reason = f"{self.uncached_bytes:,} bytes were not in the page cache and came by O_DIRECT"
        else:
            reason = "host destinations are filled by positioned reads through the page cache"
        if self.refused:
            why = ", ".join(sorted(set(self.refused.values())))
            reason += f"; O_DIRECT was refused for {len(self.refused)} file(s) ({why}), read buffered"
        return BackendInfo("pread", self.staged_bytes == 0, reason)


class _Worker:
    def __init__(self, backend: PreadBackend) -> None:
        self._backend = backend
        self._pointers = backend.pointers
        self._scratch = host.Scratch()
        self._path = ""
        self._fd = -1
        self._direct_fd: int | None = None
        aligned = backend.bounds.scratch_bytes // host.ALIGNMENT * host.ALIGNMENT
        self._capacity = min(aligned, backend.bounds.chunk_bytes + 2 * host.ALIGNMENT)
        self.direct_bytes = 0
        self.staged_bytes = 0
        self.uncached_bytes = 0

    def read(self, read: Read, /) -> None:
        if read.file != self._path:
            self._switch(read.file)
        try:
            if isinstance(read, Scatter):
                self._scatter(read)
            elif isinstance(read, Runs):
                self._runs(read)
            else:
                self._gather(read)
        except StorageError:
            raise
        except OSError as error:
            raise storage_error(error.errno, error.strerror, file=read.file, offset=read.offset) from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._direct_fd is not None:
            os.close(self._direct_fd)
            self._direct_fd = None

    def _switch(self, path: str) -> None:
        self.close()
        self._path = ""
        self._fd = self._backend.files.another(path)
        self._path = path

    def _scatter(self, read: Scatter) -> None:
        pointers = self._pointers
        words = [word for part in read.segments for word in (pointers[part.destination] + part.offset, part.nbytes)]
        pieces = host.vector(*words)
        if not self._is_cold(read):
            self._exactly(read.offset, pieces, read.nbytes)
            self.direct_bytes += read.nbytes
            return
        at, end = read.offset, read.offset + read.nbytes
        while at < end:
            source, size = self._load_uncached(at, end)
            pieces = _spread(source, size, pieces)
            at += size
        self.staged_bytes += read.nbytes

    def _runs(self, read: Runs) -> None:
        size, axis = read.size, read.axis
        offset, address = read.offset, self._pointers[read.destination] + read.at
        for _ in range(axis.steps):
            self._exactly(offset, host.vector(address, size), size)
            offset += axis.source
            address += axis.target
        self.direct_bytes += read.nbytes

    def _gather(self, read: Gather) -> None:
        fits = read.nbytes + 2 * host.ALIGNMENT <= self._capacity
        if fits and self._is_cold(read):
            source, _ = self._load_uncached(read.offset, read.offset + read.nbytes)
        else:
            source = self._scratch.address(read.nbytes)
            self._exactly(read.offset, host.vector(source, read.nbytes), read.nbytes)
        target = self._pointers[read.destination] + read.at
        copy_strided(target, source + read.origin, read.axes, read.unit, read.cast)
        self.staged_bytes += read.nbytes

    def _exactly(self, offset: int, pieces: host.Vector, nbytes: int) -> None:
        got = host.read_at(self._fd, offset, pieces, nbytes)
        if got < nbytes:
            _truncated(self._path, offset + got)

    def _is_cold(self, read: Scatter | Gather) -> bool:
        """Whether to read around the page cache: large, allowed, and its second half not resident."""
        if read.nbytes < SMALL_BYTES or not self._backend.wants_direct_io(self._path):
            return False
        probes = (read.offset + part * (read.nbytes - 1) // 4 for part in (2, 3, 4))
        return all(host.is_resident(self._fd, probe) is False for probe in probes)

    def _load_uncached(self, at: int, end: int) -> tuple[int, int]:
        """Read from ``at`` towards ``end`` into the staging; return the address of the first byte, and how many."""
        start = at - at % host.ALIGNMENT
        stop = min(end + -end % host.ALIGNMENT, start + self._capacity)
        address = self._scratch.address(stop - start)
        wanted = min(end, stop) - start
        try:
            if self._direct_fd is None:
                self._direct_fd = self._backend.files.another(self._path, _O_DIRECT)
            got = host.read_at(self._direct_fd, start, host.vector(address, stop - start), wanted)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._backend.refuse_direct_io(self._path, error)
            got = host.read_at(self._fd, start, host.vector(address, wanted), wanted)
        else:
            self.uncached_bytes += wanted
        if got < wanted:
            _truncated(self._path, start + got)
        return address + (at - start), wanted - (at - start)


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
        _truncated(path, transfer.offset + got, transfer.name)


def _truncated(path: str, offset: int, tensor: str | None = None) -> NoReturn:
    raise TruncatedError(
        "the file ends before the bytes that its header promises",
        file=path,
        tensor=tensor,
        offset=offset,
        hint="It was cut off while it was being read; get it again",
    )


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
