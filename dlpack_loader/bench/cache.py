"""The page cache of a checkpoint's files: filling it, dropping it, and seeing whether that worked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence

from dlpack_loader.checkpoint import Shard
from dlpack_loader.header import Entry
from dlpack_loader.runtime import host
from dlpack_loader.runtime.files import Files

__all__ = ["PageCache"]

_CHUNK = 4 << 20
_PROBES = 256
_APART = 128 << 10
"""Bytes between two probes at least: to look at a page that is not cached makes the system read it."""


class PageCache:
    """The cached pages of some tensors. Files are opened for reading only."""

    def __init__(self, shards: Iterable[Shard], entries: Sequence[Entry]) -> None:
        self._files = Files({shard.path: shard for shard in shards})
        self._entries = entries
        self._paths = list(dict.fromkeys(entry.file for entry in entries))

    def fill(self) -> None:
        """Read every byte through the page cache, into memory that is used again for each piece."""
        scratch = host.Scratch()
        address = scratch.address(_CHUNK)
        for entry in self._entries:
            with self._files.use(entry.file) as fd:
                for start in range(0, entry.nbytes, _CHUNK):
                    size = min(_CHUNK, entry.nbytes - start)
                    host.read_at(fd, entry.offset + start, host.vector(address, size), size)

    def drop(self) -> bool:
        """Ask the system to forget the files' pages; return whether it takes such a wish."""
        if not hasattr(os, "posix_fadvise"):
            return False
        for path in self._paths:
            with self._files.use(path) as fd:
                with contextlib.suppress(OSError):
                    os.fsync(fd)  # pages that somebody else wrote are kept until they are on the storage
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return True

    def resident(self) -> float | None:
        """Return the part of the pages that is cached, by a sample of them; None where the system does not tell."""
        total = sum(entry.nbytes for entry in self._entries)
        step = max(_APART, total // _PROBES)
        found = probes = at = 0
        wanted = min(step, total) // 2
        for entry in self._entries:
            with self._files.use(entry.file) as fd:
                while wanted < at + entry.nbytes:
                    there = host.is_resident(fd, entry.offset + wanted - at)
                    if there is None:
                        return None
                    found, probes, wanted = found + there, probes + 1, wanted + step
            at += entry.nbytes
        return found / probes if probes else 1.0

    def close(self) -> None:
        """Close the files."""
        self._files.close()
