"""Zero-copy tensors over private mappings of a file: the page cache is the tensor's memory until it is written.

Each tensor has a mapping of its own, so keeping one keeps nothing else. The mapping is copy-on-write: a write never
reaches the file. Reads happen when pages are first touched; if the file is truncated while a tensor lives, touching
the lost part ends the process with SIGBUS, as it does with every mapped file. ``pread`` has no such hazard.
"""

from __future__ import annotations

import errno
import threading
from typing import Any

from dlpack_loader.backend import BackendInfo
from dlpack_loader.errors import UnsupportedError, storage_error
from dlpack_loader.header import Entry
from dlpack_loader.runtime.arrays import map_array
from dlpack_loader.runtime.files import Files

__all__ = ["MIN_BYTES", "MmapBackend"]

MIN_BYTES = 1 << 16
"""Smaller tensors are read into memory of their own: a mapping costs more than copying them, and there are only so
many mappings."""

_ALIGNMENT = 8
"""Of the first byte, for every dtype of the format; a multiple of the itemsize is enough for smaller ones."""


class MmapBackend:
    """Makes tensors over mapped pages, and counts those that were read instead."""

    def __init__(self, files: Files, *, named: bool) -> None:
        self._named = named
        self._files = files
        self._lock = threading.Lock()
        self._copies: dict[str, int] = {}

    def view(self, entry: Entry, offset: int, nbytes: int, itemsize: int) -> Any | None:
        """Map a range of an entry, or return None when it is to be read into fresh memory.

        Returns
        -------
        numpy.ndarray or None
            Of uint8, one dimension, writable. None where the range is small or misaligned for its dtype, or where the
            file system or the process has no mapping to give; ``info`` says which.

        Raises
        ------
        UnsupportedError
            There is no mapping to be had, and the caller named this backend.
        FileChangedError
            The file is not as its header was read: touching pages beyond its end would end the process.
        """
        if nbytes < MIN_BYTES:
            return self._copied(f"are smaller than {MIN_BYTES:,} bytes")
        if offset % min(itemsize, _ALIGNMENT):
            return self._copied("start at an address that their dtype does not allow")
        with self._files.use(entry.file) as fd:
            try:
                array = map_array(fd, offset, nbytes)
            except OSError as error:
                if error.errno not in (errno.ENODEV, errno.ENOMEM, errno.EACCES, errno.EPERM):
                    raise storage_error(error.errno, error.strerror, file=entry.file, tensor=entry.name) from None
                if self._named:
                    raise UnsupportedError(
                        f"the range can't be mapped: {error.strerror}",
                        tensor=entry.name,
                        file=entry.file,
                        hint='Use backend="pread", or "auto", which then reads',
                    ) from None
                return self._copied(f"could not be mapped ({error.strerror})")
        return array

    def info(self) -> BackendInfo:
        """Say what is mapped and what was copied, and why."""
        reason = "tensors on the CPU are views of private mappings"
        with self._lock:
            copies = dict(self._copies)
        if copies:
            counted = (f"{count} that {why}" for why, count in copies.items())
            reason += f"; read into memory of their own: {', '.join(counted)}"
        return BackendInfo("mmap", True, reason)

    def _copied(self, why: str) -> Any | None:
        with self._lock:
            self._copies[why] = self._copies.get(why, 0) + 1
        return None
