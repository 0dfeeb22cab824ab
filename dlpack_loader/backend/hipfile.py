"""Positioned reads into ROCm device memory by hipFile: straight from storage where it can, else by its own copies.

hipFile decides for each request, and does not tell. Its fast path takes whole pages of a file that can be opened with
``O_DIRECT``, so a long read is cut into its whole pages and the bytes before and after them. What is offered in that
way counts as direct; every other byte counts as compat, which hipFile copies through host memory of its own.

Reads are synchronous, on the transfer's threads. ``read_async`` would bring nothing and is not used: a load that does
not wait has threads of its own already, hipFile performs such reads on threads as well, and it makes one error of all
that they end with. The order is kept on the host: a worker waits for the load's stream, and with it for the producers'
pending work, before its first read, and a read is complete when it returns.

Buffers are not registered, which hipFile leaves to the caller and which only saves it a look-up: the application may
have registered the same memory, and a second registration is an error.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import hipfile

from dlpack_loader.backend import BackendInfo
from dlpack_loader.bounds import Bounds
from dlpack_loader.destination import Memory
from dlpack_loader.errors import DestinationBufferError, DeviceError, StorageError, UnsupportedError, storage_error
from dlpack_loader.reads import Read, Runs, Scatter
from dlpack_loader.runtime.files import Files
from dlpack_loader.runtime.source import truncated
from dlpack_loader.stream import OwnedStream

__all__ = ["HipfileBackend", "probe"]

_DIRECT_FROM = ("ext4", "xfs")
_PAGE = 4096
_LONG = 1 << 16
"""Reads of at least this many bytes are cut at pages; for shorter ones the fast path is not worth three requests."""

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)


def probe() -> tuple[bool, str]:
    """Say whether direct reads are possible here, and why; the file system and the file's layout matter as well."""
    if _is_set("HIPFILE_FORCE_COMPAT_MODE"):
        return False, "HIPFILE_FORCE_COMPAT_MODE makes hipFile go through host memory"
    try:
        with _driver():
            return True, "hipFile reads whole pages straight from storage where file system and alignment allow it"
    except DeviceError as error:
        return False, error.message


class HipfileBackend:
    """Reads of one transfer into the memory of one ROCm device.

    Parameters
    ----------
    bounds
        ``scratch_bytes`` bounds a request, and so what hipFile buffers for it.
    stream
        The load's own stream on the device: what is on it when a worker is made is waited for.
    """

    def __init__(self, files: Files, memories: Sequence[Memory], bounds: Bounds, stream: OwnedStream) -> None:
        self.files = files
        self.memories = memories
        self.most = max(_PAGE, min(bounds.chunk_bytes, bounds.scratch_bytes) // _PAGE * _PAGE)
        self.stream = stream
        self.direct_bytes = 0
        self.compat_bytes = 0
        self.staged_bytes = 0
        self._lock = threading.Lock()

    @contextmanager
    def worker(self) -> Iterator[_Worker]:
        """Make a worker, with the device current on its thread and hipFile's driver open."""
        device = self.stream.device
        with device.current(), _driver():
            device.synchronize_stream(self.stream.handle)
            worker = _Worker(self)
            try:
                yield worker
            finally:
                worker.close()
                with self._lock:
                    self.direct_bytes += worker.direct_bytes
                    self.compat_bytes += worker.compat_bytes

    def fallback(self, path: str) -> str | None:
        """Say why hipFile copies through host memory for a file, or return None when it need not."""
        system = _file_system(self.files.shard(path).identity[0])
        if system in _DIRECT_FROM or _is_set("HIPFILE_UNSUPPORTED_FILE_SYSTEMS"):
            return None
        return f"{path} is on {system}, and hipFile reads directly from {' and '.join(_DIRECT_FROM)} only"

    def info(self) -> BackendInfo:
        """Say how the bytes came."""
        reason = (
            f"hip:{self.stream.device.ordinal} is filled by hipFile: {self.direct_bytes:,} bytes in whole pages, which "
            f"it reads directly where it can, and {self.compat_bytes:,} through host memory of its own"
        )
        return BackendInfo("hipfile", self.direct_bytes > 0 and self.compat_bytes == 0, reason)


class _Worker:
    def __init__(self, backend: HipfileBackend) -> None:
        self._files = backend.files
        self._memories = backend.memories
        self._most = backend.most
        self._path = ""
        self._handle: hipfile.FileHandle | None = None
        self._takes_pages = False
        self.direct_bytes = 0
        self.compat_bytes = 0

    def read(self, read: Read, /) -> None:
        if not isinstance(read, Scatter | Runs):
            raise UnsupportedError(
                "hipFile reads contiguous pieces only", file=read.file, offset=read.offset, hint='Use backend="pread"'
            )
        self._open(read.file)
        offset = read.offset
        if isinstance(read, Runs):
            for i in range(read.axis.steps):
                at = read.at + read.axis.target * i
                self._fill(read.destination, at, offset + read.axis.source * i, read.size)
            return
        for part in read.segments:
            self._fill(part.destination, part.offset, offset, part.nbytes)
            offset += part.nbytes

    def close(self) -> None:
        """Close the file; nothing reads from it any more."""
        self._path = ""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()

    def _open(self, path: str) -> None:
        """Turn to a file, the very one whose header was read; the one before is closed."""
        if path == self._path:
            return
        self.close()
        with self._files.use(path) as fd, _translated("hipFileHandleRegister", path, None):
            try:
                self._handle = _open_handle(fd, _O_DIRECT)
                self._takes_pages = _O_DIRECT != 0 and not _is_set("HIPFILE_FORCE_COMPAT_MODE")
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._handle = _open_handle(fd, 0)
                self._takes_pages = False
        self._path = path

    def _fill(self, destination: int, at: int, offset: int, nbytes: int) -> None:
        """Read a range to a place in a destination, in requests of a bounded size."""
        memory = self._memories[destination]
        low, high = memory.extent()
        at += memory.pointer - low
        if at < 0 or at + nbytes > high - low:  # hipFile looks at the whole allocation only
            raise DestinationBufferError(
                "a read reaches outside of its destination's memory", file=self._path, offset=offset
            )
        buffer = hipfile.Buffer(low, high - low, 0)
        end = offset + nbytes
        paged = self._takes_pages and nbytes >= _LONG
        first, last = (offset + -offset % _PAGE, end - end % _PAGE) if paged else (end, end)
        while offset < end:
            stop = min(offset + self._most, next(cut for cut in (first, last, end) if cut > offset))
            self._request(buffer, at, offset, stop - offset)
            if first <= offset < last:
                self.direct_bytes += stop - offset
            else:
                self.compat_bytes += stop - offset
            at, offset = at + stop - offset, stop

    def _request(self, buffer: hipfile.Buffer, at: int, offset: int, nbytes: int) -> None:
        """Read a range completely: hipFile's reads may be short."""
        assert self._handle is not None
        end = offset + nbytes
        while offset < end:
            with _translated("hipFileRead", self._path, offset):
                got = self._handle.read(buffer, end - offset, offset, at)
            if got == 0:
                truncated(self._path, offset)
            at, offset = at + got, offset + got


def _open_handle(fd: int, flags: int) -> hipfile.FileHandle:
    handle = hipfile.FileHandle(f"/proc/self/fd/{fd}", os.O_RDONLY | flags)
    handle.open()
    return handle


def _is_set(name: str) -> bool:
    """Whether a switch in the environment is on, as hipFile reads it."""
    return os.environ.get(name, "").lower() == "true"


def _file_system(device: int) -> str:
    """Return the type of the file system that is mounted from a device, such as "xfs"."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            mount, _, source = line.partition(" - ")
            if mount.split()[2] == wanted:
                return source.split()[0]
    return "an unknown file system"


@contextmanager
def _driver() -> Iterator[None]:
    """Open hipFile's driver, which counts, and close it."""
    driver = hipfile.Driver()
    with _translated("hipFileDriverOpen"):
        driver.open()
    try:
        yield
    finally:
        with _translated("hipFileDriverClose"):
            driver.close()


@contextmanager
def _translated(call: str, file: str | None = None, offset: int | None = None) -> Iterator[None]:
    """Turn hipFile's errors and the operating system's into the package's."""
    try:
        yield
    except hipfile.HipFileException as error:
        number = error.hipfile_err
        name = hipfile.OpError(number).name if number in list(hipfile.OpError) else str(number)
        raise DeviceError(
            f"{call} failed: {name} ({error})",
            status=name,
            file=file,
            offset=offset,
            hint='backend="pread" goes through pinned memory instead',
        ) from error
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error.errno, error.strerror, file=file, offset=offset) from error
