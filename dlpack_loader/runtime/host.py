"""Host memory and files, as the operating system gives them: addresses, positioned reads, mappings.

One place decides how a range of a file reaches an address. On 64-bit Linux it is ``preadv`` with many buffers a call;
anywhere else it is a seek and a read on a descriptor that nobody else uses. Both release the GIL while they wait.
"""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import os
import sys
from array import array
from typing import TypeAlias

__all__ = [
    "ALIGNMENT",
    "LINUX",
    "Scratch",
    "ScratchPool",
    "Vector",
    "after",
    "available_memory",
    "file_size",
    "is_resident",
    "map_private",
    "move",
    "read_at",
    "unmap",
    "vector",
]

LINUX = sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8
"""Whether the Linux calls below are used; elsewhere the portable ones are."""

ALIGNMENT = 4096
"""What O_DIRECT wants of offsets, addresses and lengths on every file system in use; a finer one is never needed."""

Vector: TypeAlias = "array[int]"
"""Pieces of memory, each an address and a number of bytes: the layout of an array of ``struct iovec``."""

_RWF_NOWAIT = 8  # of <linux/fs.h>; Python has it only where it was built on a system that has
_PORTABLE_READ = 0x7FFF0000  # below INT_MAX: what read(2) and Windows' _read move at most

if LINUX:
    _libc = ctypes.CDLL(None, use_errno=True)
    _preadv = _libc.preadv
    _preadv.restype = ctypes.c_ssize_t
    _preadv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    _pread = _libc.pread
    _pread.restype = ctypes.c_ssize_t
    _pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
    _preadv2 = getattr(ctypes.PyDLL(None, use_errno=True), "preadv2", None)
    if _preadv2 is not None:
        _preadv2.restype = ctypes.c_ssize_t
        _preadv2.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int)
    _mmap = _libc.mmap
    _mmap.restype = ctypes.c_void_p
    _mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
    )  # fmt: skip
    _munmap = _libc.munmap
    _munmap.restype = ctypes.c_int
    _munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def vector(*words: int) -> Vector:
    """Make a vector of an address and a size, another address and its size, ..."""
    return array("Q", words)


def read_at(fd: int, offset: int, pieces: Vector, enough: int) -> int:
    """Read consecutive bytes of a file into consecutive pieces of memory.

    Parameters
    ----------
    enough
        Bytes after which a short read need not be continued: all of the pieces, or less where they were made larger
        than what is wanted for the sake of alignment.

    Returns
    -------
    int
        Bytes read: fewer than ``enough`` only where the file ends.

    Raises
    ------
    OSError
        What the operating system said; interrupted and short reads are continued.
    """
    return (_read_linux if LINUX else _read_portable)(fd, offset, pieces, enough)


def _read_linux(fd: int, offset: int, pieces: Vector, enough: int) -> int:
    done = 0
    while done < enough:
        if len(pieces) == 2:
            count = _pread(fd, pieces[0], pieces[1], offset + done)
        else:
            count = _preadv(fd, pieces.buffer_info()[0], len(pieces) // 2, offset + done)
        if count > 0:
            done += count
            if done < enough:
                pieces = after(pieces, count)
        elif count == 0:
            break
        else:
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
    return done


def _read_portable(fd: int, offset: int, pieces: Vector, enough: int) -> int:
    os.lseek(fd, offset, os.SEEK_SET)
    done = 0
    with io.FileIO(fd, "rb", closefd=False) as file:
        for address, size in zip(pieces[::2], pieces[1::2], strict=True):
            buffer = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
            at = 0
            while at < size and done + at < enough:
                count = file.readinto(buffer[at : at + _PORTABLE_READ])
                if not count:
                    return done + at
                at += count
            done += at
    return done


def after(pieces: Vector, count: int) -> Vector:
    """Return what is left of the pieces when ``count`` bytes are there."""
    for k in range(1, len(pieces), 2):
        size = pieces[k]
        if count < size:
            return vector(pieces[k - 1] + count, size - count) + pieces[k + 1 :]
        count -= size
    return vector()


def is_resident(fd: int, offset: int) -> bool | None:
    """Say whether the page at that offset is in the page cache; None where the system can't tell."""
    if not LINUX or _preadv2 is None:
        return None
    # A read of one byte that may not wait. It keeps the GIL, which costs less than handing it over and back.
    byte = ctypes.c_char()
    piece = vector(ctypes.addressof(byte), 1)
    count = _preadv2(fd, piece.buffer_info()[0], 1, offset, _RWF_NOWAIT)
    if count < 0 and ctypes.get_errno() == errno.EAGAIN:
        return False
    return True if count == 1 else None


def move(target: int, source: int, nbytes: int) -> None:
    """Copy bytes from one address to another, with the GIL released."""
    ctypes.memmove(target, source, nbytes)


class Scratch:
    """Page-aligned memory of one worker, made when first needed, given back to the system with its last reference."""

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = None
        self._address = 0
        self.size = 0

    def address(self, nbytes: int) -> int:
        """Return the address of at least that many bytes; what an earlier call returned is no longer valid."""
        if nbytes > self.size:
            self._mapping = mmap.mmap(-1, nbytes)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
            self.size = nbytes
        return self._address


class ScratchPool:
    """Scratch that is kept from one transfer to the next, so that its pages are not asked for each time."""

    def __init__(self) -> None:
        self._idle: list[Scratch] = []

    def take(self) -> Scratch:
        """Return one that nobody uses."""
        try:
            return self._idle.pop()
        except IndexError:
            return Scratch()

    def give(self, scratch: Scratch) -> None:
        """Keep one for the next that asks."""
        self._idle.append(scratch)


def available_memory() -> int | None:
    """Return the bytes that can be allocated without swapping, or None where the system does not tell."""
    try:
        with open("/proc/meminfo", "rb") as file:
            for line in file:
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def file_size(fd: int) -> int:
    """Return a file's size in bytes, now."""
    return os.fstat(fd).st_size


def map_private(fd: int, offset: int, nbytes: int) -> int:
    """Map pages of a file copy-on-write and return their address; ``offset`` is a multiple of the page size.

    Raises
    ------
    OSError
        The file system has no mmap (ENODEV), or the process has no mapping left (ENOMEM).
    """
    address: int | None = _mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, offset)
    if address in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    assert address is not None
    return address


def unmap(address: int, nbytes: int) -> None:
    """Undo ``map_private``."""
    _munmap(address, nbytes)
