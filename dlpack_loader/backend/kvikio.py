"""Reads straight into CUDA memory by KvikIO: GPUDirect Storage through cuFile, or KvikIO's own copies through the host.

Each worker reads by ``CuFile.raw_read``, on its own thread and within the load's own bounds, rather than by ``pread``:

- ``pread`` runs on KvikIO's pool, which has one thread until somebody changes that for the whole process, and which
  hangs in a forked child. It also sends whatever is below a threshold of the process through the host, even where
  there is GPUDirect Storage. Nothing of KvikIO's that is global to the process is changed here.
- ``raw_read`` returns when the bytes are there. File and view are on the worker's stack until then, on errors too, so
  nothing is ever left under way that would have to be drained.

``raw_read_async`` is not used. Its reads are ordered on a stream only with a configuration file of cuFile's, block
otherwise, can be several hundred at most, and tell their byte counts only by a wait for the stream; a load with
``wait=False`` has a thread of its own already. Nothing is registered either: KvikIO registers the whole allocation
around an address (with torch, a segment with other tensors) and can't say that somebody else did already; cuFile reads
into memory that is not registered.

Order: KvikIO waits for the NULL stream only, so a worker waits on the host for the load's own stream, which the
producers' pending work precedes, before its first read. After a read there is nothing to wait for.

Offsets, sizes and addresses may be unaligned; cuFile takes care of heads and tails. In compatibility mode each read
under way has a bounce buffer of KvikIO's (16 MiB, pinned, kept for later ones), so there are as many at a time as fit
into the load's staging bytes, and one in any case.
"""

from __future__ import annotations

import errno
import os
import platform
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from kvikio import CompatMode, CuFile, SummaryMonitor, cufile_driver, defaults

from dlpack_loader.backend import BackendInfo
from dlpack_loader.bounds import Bounds
from dlpack_loader.checkpoint import Shard
from dlpack_loader.destination import Memory
from dlpack_loader.errors import DeviceError, FileChangedError, LoaderError, storage_error
from dlpack_loader.reads import Gather, Read, Scatter
from dlpack_loader.runtime.device import CUDA
from dlpack_loader.runtime.files import Files
from dlpack_loader.runtime.host import LINUX, file_size
from dlpack_loader.runtime.source import truncated
from dlpack_loader.stream import OwnedStream

__all__ = ["KvikioBackend", "probe"]

_MOST_READS = 64  # at a time: cuFile has about 128 places in all
_CODES = {os.strerror(code): code for code in errno.errorcode}


def probe() -> tuple[bool, str]:
    """Say whether KvikIO reads by GPUDirect Storage in this process, and why or why not.

    cuFile may still copy through the host for a file system that it doesn't serve, where its configuration allows that;
    nobody is told, so the reason says when it does.
    """
    if defaults.is_compat_mode_preferred():
        return False, f"KvikIO would run in compatibility mode: {_why_compatible()}"
    try:
        loaded, lenient = (cufile_driver.get(name) for name in ("is_gds_available", "allow_compat_mode"))
    except RuntimeError as error:
        return False, f"the driver of cuFile can't be opened: {_said(error)}"
    if not loaded:
        return False, "cuFile would copy through the host: the kernel module nvidia-fs is not loaded"
    caveat = "; cuFile may copy through the host for a file system that it does not serve (allow_compat_mode is on)"
    return True, "KvikIO has GPUDirect Storage" + (caveat if lenient else "")


def _why_compatible() -> str:
    if defaults.get("compat_mode") == CompatMode.ON:
        return "it is switched on, by KVIKIO_COMPAT_MODE or kvikio.defaults"
    if "microsoft" in platform.release().lower():
        return "this is the Windows Subsystem for Linux"
    if not os.access("/run/udev", os.R_OK):
        return "/run/udev can't be read, as in a container that is not given it"
    return "libcufile can't be loaded"


class KvikioBackend:
    """Reads of one transfer into the memory of one CUDA device; contiguous ones only.

    Parameters
    ----------
    stream
        The load's own stream on the device. Its device is open, so the driver is initialised, which KvikIO never does
        and without which it takes addresses on the device for the host's.
    """

    def __init__(self, files: Files, memories: Sequence[Memory], bounds: Bounds, stream: OwnedStream) -> None:
        self.files = files
        self.memories = memories
        self.pointers = [memory.pointer for memory in memories]
        self.stream = stream
        self.staged_bytes = 0
        self.compat_bytes = 0
        self.direct_bytes = 0
        self._direct, self._why = probe()
        fitting = max(1, bounds.staging_bytes // int(defaults.get("bounce_buffer_size")))
        self.room = threading.BoundedSemaphore(_MOST_READS if self._direct else min(fitting, _MOST_READS))
        self._lock = threading.Lock()
        self._monitor: SummaryMonitor | None = None
        self._bytes = 0

    @contextmanager
    def worker(self) -> Iterator[_Worker]:
        """Make a worker, with the device current on its thread, after all that precedes the load on its stream."""
        with self._lock:
            self._monitor = self._monitor or SummaryMonitor()
        self.stream.synchronize()
        with self.stream.device.current():
            worker = _Worker(self)
            try:
                yield worker
            finally:
                worker.close()
                self._count(worker.nbytes)

    def info(self) -> BackendInfo:
        """Say how the bytes came."""
        device = f"{self.stream.device.kind}:{self.stream.device.ordinal}"
        if not self._direct:
            return BackendInfo("kvikio", False, f"{device} is filled by KvikIO without GPUDirect Storage: {self._why}")
        if self.compat_bytes:
            fell = f"{self.compat_bytes:,} bytes came through its compatibility mode"
            return BackendInfo("kvikio", False, f"{device} is filled by KvikIO; {fell}")
        return BackendInfo("kvikio", True, f"{device} is filled from storage directly: {self._why}")

    def fallback(self, path: str) -> str | None:
        """Say why a file would not be read directly, or return None; a read of no bytes shows which way it takes."""
        if not self._direct:
            return self._why
        device = self.stream.device
        address = next((memory.pointer for memory in self.memories if memory.device == (CUDA, device.ordinal)), 0)
        try:
            with device.current(), closing(open_file(self.files, path)) as file, SummaryMonitor() as monitor:
                file.raw_read(_View(address, 0), 0, 0)
                through_host = _through_host(monitor, "num_ops")
        except (DeviceError, RuntimeError) as error:
            return f"cuFile refuses {path!r}: {_said(error)}"
        return f"cuFile does not serve the file system of {path!r}" if through_host else None

    def _count(self, nbytes: int) -> None:
        """Count what a worker read.

        KvikIO counts for the whole process: what others read through the host meanwhile makes less appear as direct
        than was, never more.
        """
        with self._lock:
            assert self._monitor is not None
            self._bytes += nbytes
            indirect = _through_host(self._monitor, "bytes_transferred") if self._direct else self._bytes
            self.compat_bytes = min(self._bytes, indirect)
            self.direct_bytes = self._bytes - self.compat_bytes


class _View:
    """Device memory as KvikIO takes it: bytes."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


class _Worker:
    def __init__(self, backend: KvikioBackend) -> None:
        self._backend = backend
        self._path = ""
        self._file: CuFile | None = None
        self.nbytes = 0

    def read(self, read: Read, /) -> None:
        assert not isinstance(read, Gather)  # these go through the ring
        file, pointers = self._open(read.file), self._backend.pointers
        if isinstance(read, Scatter):
            offset = read.offset
            for part in read.segments:
                self._fill(file, pointers[part.destination] + part.offset, part.nbytes, offset)
                offset += part.nbytes
        else:
            address = pointers[read.destination] + read.at
            for i in range(read.axis.steps):
                self._fill(file, address + read.axis.target * i, read.size, read.offset + read.axis.source * i)
        self.nbytes += read.nbytes

    def close(self) -> None:
        file, self._file, self._path = self._file, None, ""
        if file is not None:
            file.close()

    def _open(self, path: str) -> CuFile:
        if self._file is None or path != self._path:
            self.close()
            self._file, self._path = open_file(self._backend.files, path), path
        return self._file

    def _fill(self, file: CuFile, address: int, nbytes: int, offset: int) -> None:
        """Read a range into the device; short reads are continued."""
        while nbytes:
            try:
                with self._backend.room:
                    got = file.raw_read(_View(address, nbytes), nbytes, offset)
            except RuntimeError as error:
                if file_size(file.fileno()) < offset + nbytes:
                    truncated(self._path, max(offset, file_size(file.fileno())))
                raise _mapped(error, self._path, offset) from error
            if not got:
                if file_size(file.fileno()) <= offset:
                    truncated(self._path, offset)
                raise storage_error(errno.EIO, "cuFile reads no bytes", file=self._path, offset=offset)
            address, nbytes, offset = address + got, nbytes - got, offset + got


def open_file(files: Files, path: str) -> CuFile:
    """Open the very file whose header was read."""
    with files.use(path) as fd:
        proc = f"/proc/self/fd/{fd}"
        try:
            file = CuFile(proc if LINUX and os.path.exists(proc) else path, "r")
        except RuntimeError as error:
            raise _mapped(error, path, None) from error
    if Shard.identify(os.fstat(file.fileno())) != files.shard(path).identity:
        file.close()
        raise FileChangedError(
            "the file was replaced or rewritten after its header was read", file=path, hint="Open the checkpoint again"
        )
    return file


def _mapped(error: RuntimeError, path: str, offset: int | None) -> LoaderError:
    """Return the package's error for KvikIO's, which has nothing but a text."""
    text = str(error)
    said = _said(error)
    code = _CODES.get(said)
    if text.startswith("cuFile error"):
        if code is None:
            return DeviceError(f"cuFile failed: {said}", file=path, offset=offset, status=said)
        # A read that failed in the system says -1, which KvikIO takes for the errno 1.
        reported = None if code == errno.EPERM else code
        said = "cuFile failed in the operating system" if reported is None else said
        return storage_error(reported, said, file=path, offset=offset)
    if code is None and ("CUDA" in text or "libcuda" in text):
        return DeviceError(f"KvikIO failed: {text}", file=path, offset=offset)
    return storage_error(code, said if code else text, file=path, offset=offset)


def _said(error: RuntimeError) -> str:
    """Return what is behind KvikIO's place in its own sources."""
    if isinstance(error, LoaderError):
        return error.message
    return str(error).rpartition(": ")[2].strip()


def _through_host(monitor: SummaryMonitor, field: str) -> int:
    return sum(int(totals[field]) for name, totals in monitor.get().by_backend.items() if name != "GDS")
