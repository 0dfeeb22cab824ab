"""Backends move byte ranges of files into destinations. This file holds what they have in common, and their registry.

A backend is made for one transfer. Each of the transfer's threads asks it for a worker, which is used by that thread
alone, and calls ``read`` until the plan is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from dlpack_loader.bounds import Bounds
from dlpack_loader.destination import Memory
from dlpack_loader.errors import OptionError
from dlpack_loader.header import Entry
from dlpack_loader.reads import Read, Transfer
from dlpack_loader.runtime.files import Files

__all__ = [
    "NAMES",
    "SMALL_BYTES",
    "Backend",
    "BackendInfo",
    "Mapper",
    "Worker",
    "check_fills",
    "check_name",
    "filling_backend",
    "is_small",
    "mapping_backend",
    "read_small",
]

NAMES = ("auto", "mmap", "pread")
"""What ``backend=`` takes."""

SMALL_BYTES = 1 << 20
"""Reads below this are made through the page cache, whatever is in it."""


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


class Backend(Protocol):
    """Reads for one transfer."""

    direct_bytes: int
    """Bytes read straight into destinations, once the workers are closed."""
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


def mapping_backend(files: Files) -> Mapper:
    """Make the backend that maps tensors."""
    mapper: Mapper = import_module("dlpack_loader.backend.mmap").MmapBackend(files)
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


def filling_backend(files: Files, memories: Sequence[Memory], bounds: Bounds, *, direct_io: bool | None) -> Backend:
    """Make the backend that fills host destinations."""
    backend: Backend = import_module("dlpack_loader.backend.pread").PreadBackend(
        files, memories, bounds, direct_io=direct_io
    )
    return backend


def is_small(transfer: Transfer) -> bool:
    """Whether a transfer is one short read, for which a plan and workers would cost more than it."""
    return not transfer.axes and transfer.cast is None and 0 < transfer.run < SMALL_BYTES


def read_small(files: Files, memory: Memory, transfer: Transfer) -> None:
    """Perform a transfer that ``is_small`` by the calling thread alone."""
    import_module("dlpack_loader.backend.pread").read_small(files, memory, transfer)
