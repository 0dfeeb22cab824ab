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
from dlpack_loader.reads import Read
from dlpack_loader.runtime.files import Files

__all__ = [
    "FILLING",
    "NAMES",
    "Backend",
    "BackendInfo",
    "Mapper",
    "Worker",
    "check_name",
    "mapping_backend",
    "open_backend",
]

NAMES = ("auto", "mmap", "pread")
"""What ``backend=`` takes."""

FILLING = ("pread",)
"""Those that fill destinations; ``mmap`` makes tensors of its own."""


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


def open_backend(
    name: str, files: Files, memories: Sequence[Memory], bounds: Bounds, *, direct_io: bool | None
) -> Backend:
    """Make the backend that fills destinations.

    Raises
    ------
    OptionError
        No such backend, or one that does not fill destinations.
    """
    if check_name(name) == "auto":
        name = "pread"
    if name not in FILLING:
        raise OptionError(
            f"backend {name!r} makes tensors of its own and cannot fill a destination",
            hint='Use backend="pread" or "auto" to fill destinations',
        )
    module = import_module("dlpack_loader.backend.pread")
    backend: Backend = module.PreadBackend(files, memories, bounds, direct_io=direct_io)
    return backend
