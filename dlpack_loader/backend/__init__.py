"""Backends move byte ranges of files into destinations. This file holds what they have in common, and their registry.

A backend is made for one transfer. Each of the transfer's threads asks it for a worker, which is used by that thread
alone, and calls ``read`` until the plan is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from dlpack_loader.bounds import Bounds
from dlpack_loader.destination import Memory
from dlpack_loader.errors import MissingDependencyError, OptionError, UnsupportedError
from dlpack_loader.header import Entry
from dlpack_loader.reads import Gather, Read, Runs, Scatter, Transfer
from dlpack_loader.runtime.device import CUDA, ROCM
from dlpack_loader.runtime.files import Files
from dlpack_loader.runtime.host import ScratchPool
from dlpack_loader.runtime.source import SMALL_BYTES, Source
from dlpack_loader.stream import OwnedStream

__all__ = [
    "NAMES",
    "Backend",
    "BackendInfo",
    "ByKind",
    "Mapper",
    "Worker",
    "check_fills",
    "check_host",
    "check_name",
    "device_backend",
    "device_bounds",
    "direct_backend",
    "host_backend",
    "is_small",
    "mapping_backend",
    "perform",
    "read_small",
]

NAMES = ("auto", "mmap", "pread", "kvikio", "hipfile")
"""What ``backend=`` takes."""

_DIRECT = {CUDA: "kvikio", ROCM: "hipfile"}
"""The storage library of each type of device."""

_TITLES = {"kvikio": "KvikIO", "hipfile": "hipFile"}
_PACKAGES = {"kvikio": "kvikio-cu13 (or kvikio-cu12, for CUDA 12)", "hipfile": "hipfile"}


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """The backend really used, and why."""

    name: str
    direct: bool
    """Whether every byte goes from storage to its destination without a host copy that we make."""
    reason: str


class Worker(Protocol):
    """Reads for one thread."""

    def read(self, read: Read, /) -> None:
        """Perform one read completely: every byte that it names is in its destination on return.

        Raises
        ------
        StorageError
            The operating system's error, with its class; TruncatedError where the file ends too early. Parts of the
            read's destinations may have been written.
        """


class ByKind(Protocol):
    """A worker that reads through the operating system, with a method for each kind of read."""

    source: Source

    def scatter(self, read: Scatter, /) -> None:
        """Read one range to its destinations."""

    def runs(self, read: Runs, /) -> None:
        """Read equal pieces to their places."""

    def gather(self, read: Gather, /) -> None:
        """Read one range and copy from it."""


def perform(worker: ByKind, read: Read) -> None:
    """Perform one read by the worker's own means, with the operating system's errors as the package's."""
    try:
        worker.source.open(read.file)
        if isinstance(read, Scatter):
            worker.scatter(read)
        elif isinstance(read, Runs):
            worker.runs(read)
        else:
            worker.gather(read)
    except OSError as error:
        raise worker.source.mapped(error, read.offset) from error


class Backend(Protocol):
    """Reads for one transfer."""

    direct_bytes: int
    """Bytes read straight into destinations, once the workers are closed."""
    compat_bytes: int
    """Bytes that a storage library copied through host memory of its own, once the workers are closed."""
    staged_bytes: int
    """Bytes read through staging, once the workers are closed."""

    def worker(self) -> AbstractContextManager[Worker]:
        """Make a worker for the calling thread; leaving it gives back what it held."""

    def info(self) -> BackendInfo:
        """Say what was used, and why."""


class Mapper(Protocol):
    """Makes tensors over mapped pages."""

    def view(self, entry: Entry, offset: int, nbytes: int, itemsize: int, /) -> Any | None:
        """Map a range of an entry as a NumPy array of uint8, or return None when it is to be read instead."""

    def info(self) -> BackendInfo:
        """Say what was used, and why."""


def check_name(name: object) -> str:
    """Return a backend's name, or raise OptionError."""
    if not isinstance(name, str) or name not in NAMES:
        expected = ", ".join(f'"{known}"' for known in NAMES)
        raise OptionError(f"backend {name!r} is invalid (expected one of: {expected})")
    return name


def mapping_backend(files: Files, *, named: bool) -> Mapper:
    """Make the backend that maps tensors; one that was named raises where there is no mapping to be had."""
    mapper: Mapper = import_module("dlpack_loader.backend.mmap").MmapBackend(files, named=named)
    return mapper


def check_fills(name: str) -> None:
    """Refuse a named backend that can't fill destinations.

    Raises
    ------
    OptionError
        It makes tensors of its own.
    """
    if name == "mmap":
        raise OptionError(
            "backend 'mmap' makes tensors of its own and cannot fill a destination",
            hint='Use backend="pread" or "auto" to fill destinations',
        )


def host_backend(
    files: Files,
    memories: Sequence[Memory],
    bounds: Bounds,
    *,
    direct_io: bool | None,
    scratch: ScratchPool | None = None,
) -> Backend:
    """Make the backend that fills host destinations; a pool keeps its staging for the next one."""
    module = import_module("dlpack_loader.backend.pread")
    backend: Backend = module.PreadBackend(files, memories, bounds, direct_io=direct_io, scratch=scratch)
    return backend


def check_host(name: str) -> None:
    """Refuse a named backend that can't fill host memory.

    Raises
    ------
    OptionError
        It fills the memory of a device only.
    """
    if name in _DIRECT.values():
        raise OptionError(
            f"backend {name!r} fills the memory of a device, and a destination is in host memory",
            hint='Use backend="pread" or "auto" for it, in a call of its own or for all',
        )


def device_backend(
    files: Files, memories: Sequence[Memory], bounds: Bounds, stream: OwnedStream, *, direct_io: bool | None
) -> Backend:
    """Make the backend that fills destinations on one device, within bounds of ``device_bounds``."""
    module = import_module("dlpack_loader.backend.ring")
    backend: Backend = module.RingBackend(files, memories, bounds, stream, direct_io=direct_io)
    return backend


def direct_backend(
    name: str,
    files: Files,
    memories: Sequence[Memory],
    bounds: Bounds,
    stream: OwnedStream,
    *,
    device: tuple[int, int],
    paths: Iterable[str],
    require_direct: bool,
) -> tuple[Backend | None, str]:
    """Make the backend of a device's storage library, for contiguous transfers, or say why there is to be none.

    Parameters
    ----------
    name
        What the caller asked for: ``"auto"`` takes the library only where it reads GPU-direct, from each of ``paths``.
    require_direct
        Refuse everything else.

    Returns
    -------
    tuple
        The backend, or None where ``device_backend`` is to serve; and why.

    Raises
    ------
    OptionError, MissingDependencyError, UnsupportedError
        What was named can't serve, or not as it is required.
    """
    library = _DIRECT.get(device[0])
    where = f"{stream.device.kind}:{stream.device.ordinal}"
    if name != library and name in _DIRECT.values():
        raise OptionError(f"backend {name!r} does not serve {where}", hint='Use backend="auto" or "pread"')
    backend: Backend | None = None
    direct = False
    if name == "pread":
        why = "" if not require_direct else "backend 'pread' goes through pinned host memory"
    elif library is None:
        why = f"no library reads from storage into memory of DLPack device type {device[0]}"
    else:
        try:
            module = _import_library(library)
        except MissingDependencyError as error:
            if name == library:
                raise
            why = error.message
        else:
            direct, why = module.probe()
            if direct or name == library:
                backend = getattr(module, f"{library.capitalize()}Backend")(files, memories, bounds, stream)
            if (direct and name != library) or require_direct:
                fallback = getattr(backend, "fallback", None)  # what a library can tell of one file
                falls = next(filter(None, map(fallback, paths)), None) if fallback is not None else None
                direct, why = direct and falls is None, falls or why
    if require_direct and not direct:
        raise UnsupportedError(
            f"GPU-direct reads into {where} are not possible: {why}",
            hint="Change that, or leave out require_direct to read it another way",
        )
    return (backend if direct or name == library else None), why


def _import_library(library: str) -> Any:
    try:
        return import_module(f"dlpack_loader.backend.{library}")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == library
        raise MissingDependencyError(
            f"{_TITLES[library]} is not installed" if missing else f"{_TITLES[library]} can't be loaded: {error}",
            hint=f'Install {_PACKAGES[library]}, or use backend="pread"',
        ) from error


def device_bounds(bounds: Bounds) -> Bounds:
    """Divide a budget for destinations on a device."""
    divided: Bounds = import_module("dlpack_loader.backend.ring").ring_bounds(bounds)
    return divided


def is_small(transfer: Transfer) -> bool:
    """Whether a transfer is one short read, for which a plan and workers would cost more than it."""
    return not transfer.axes and transfer.cast is None and 0 < transfer.run < SMALL_BYTES


def read_small(files: Files, memory: Memory, transfer: Transfer) -> None:
    """Perform a transfer that ``is_small`` by the calling thread alone."""
    import_module("dlpack_loader.backend.pread").read_small(files, memory, transfer)
