"""Where a worker's bytes come from: descriptors of its own, through the page cache or around it.

Whether a read goes through the page cache is decided for each read by what is there. Pages that are resident are
copied from the cache. A large range that is not resident is read with O_DIRECT into page-aligned memory, which costs
less than filling the page cache on the way; the cache is left as it was. Whatever refuses O_DIRECT (tmpfs, some
overlays, network disks) is read buffered, and the policy remembers why.
"""

from __future__ import annotations

import errno
import os
from typing import NoReturn

from dlpack_loader.errors import StorageError, TruncatedError, storage_error
from dlpack_loader.runtime import host
from dlpack_loader.runtime.files import Files

__all__ = ["SMALL_BYTES", "CachePolicy", "Source", "truncated"]

SMALL_BYTES = 1 << 20
"""Reads below this are made through the page cache, whatever is in it."""

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)


class CachePolicy:
    """Whether one transfer reads around the page cache; shared by its workers."""

    def __init__(self, files: Files, wanted: bool | None) -> None:
        self.files = files
        self._wanted = wanted
        self._refused: dict[str, str] = {}

    def bypasses(self, path: str) -> bool:
        """Whether large cold ranges of that file are to be read with O_DIRECT."""
        if self._wanted is False or not _O_DIRECT or not host.LINUX or path in self._refused:
            return False
        # Without a block device behind it (network, memory, FUSE), caching is the file system's own business.
        return self._wanted is True or os.major(self.files.shard(path).identity[0]) != 0

    def refuse(self, path: str, error: OSError) -> None:
        """Note that a file can't be read with O_DIRECT; the transfer goes on buffered."""
        self._refused.setdefault(path, error.strerror or str(error))

    def explain(self, uncached: int) -> str:
        """Say how the bytes came, given how many came by O_DIRECT."""
        reason = (
            f"{uncached:,} bytes were not in the page cache and came by O_DIRECT"
            if uncached
            else "positioned reads through the page cache"
        )
        if self._refused:
            why = ", ".join(sorted(set(self._refused.values())))
            reason += f"; O_DIRECT was refused for {len(self._refused)} file(s) ({why}), read buffered"
        return reason


class Source:
    """Reads of one worker, one file at a time."""

    def __init__(self, policy: CachePolicy) -> None:
        self._policy = policy
        self._path = ""
        self._fd = -1
        self._direct_fd: int | None = None
        self.uncached_bytes = 0

    def open(self, path: str) -> None:
        """Turn to a file; the one before is closed."""
        if path != self._path:
            self.close()
            self._fd = self._policy.files.another(path)
            self._path = path

    def close(self) -> None:
        """Close the descriptors."""
        self._path = ""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._direct_fd is not None:
            os.close(self._direct_fd)
            self._direct_fd = None

    def read(self, offset: int, pieces: host.Vector, nbytes: int) -> None:
        """Read a range into consecutive pieces of memory, through the page cache.

        Raises
        ------
        TruncatedError
            The file ends before the range does.
        OSError
            What the operating system said.
        """
        got = host.read_at(self._fd, offset, pieces, nbytes)
        if got < nbytes:
            truncated(self._path, offset + got)

    def is_cold(self, offset: int, nbytes: int, capacity: int) -> bool:
        """Whether to read around the page cache: large, allowed, and its second half not resident.

        Parameters
        ----------
        capacity
            Bytes of the page-aligned memory that is at hand for it.
        """
        if nbytes < SMALL_BYTES or capacity < SMALL_BYTES or not self._policy.bypasses(self._path):
            return False
        probes = (offset + part * (nbytes - 1) // 4 for part in (2, 3, 4))
        return all(host.is_resident(self._fd, probe) is False for probe in probes)

    def read_around(self, at: int, end: int, address: int, capacity: int) -> tuple[int, int]:
        """Read from ``at`` towards ``end`` into page-aligned memory, as far as it reaches.

        Returns
        -------
        tuple
            The address of the byte at ``at``, and how many bytes from there are valid.
        """
        start = at - at % host.ALIGNMENT
        stop = min(end + -end % host.ALIGNMENT, start + capacity // host.ALIGNMENT * host.ALIGNMENT)
        wanted = min(end, stop) - start
        fd = self._open_direct()
        try:
            if fd is None:
                got = host.read_at(self._fd, start, host.vector(address, wanted), wanted)
            else:
                got = host.read_at(fd, start, host.vector(address, stop - start), wanted)
                self.uncached_bytes += wanted
        except OSError as error:
            if fd is None or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._policy.refuse(self._path, error)
            got = host.read_at(self._fd, start, host.vector(address, wanted), wanted)
        if got < wanted:
            truncated(self._path, start + got)
        return address + (at - start), wanted - (at - start)

    def _open_direct(self) -> int | None:
        """Return a descriptor with O_DIRECT, or None where there is none to be had, for whatever reason."""
        if self._direct_fd is None and self._policy.bypasses(self._path):
            try:
                self._direct_fd = self._policy.files.another(self._path, _O_DIRECT)
            except OSError as error:
                self._policy.refuse(self._path, error)
        return self._direct_fd

    def mapped(self, error: OSError, offset: int) -> StorageError:
        """Return the package's error for an operating system's."""
        if isinstance(error, StorageError):
            return error
        return storage_error(error.errno, error.strerror, file=self._path, offset=offset)


def truncated(path: str, offset: int, tensor: str | None = None) -> NoReturn:
    """Raise the error of a file that ends too early."""
    raise TruncatedError(
        "the file ends before the bytes that its header promises",
        file=path,
        tensor=tensor,
        offset=offset,
        hint="It was cut off while it was being read; get it again",
    )
