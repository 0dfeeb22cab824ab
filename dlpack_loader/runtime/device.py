"""What the loader needs of a device: pinned memory, copies, streams and events. One small protocol for every vendor.

Only the primary context of one device is used, and it is current on a thread just between ``current``'s enter and
exit: nothing is created on another device, and what the caller had current is current again afterwards. Nothing here
waits for a whole device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol

from dlpack_loader.errors import DeviceError, MissingDependencyError, UnsupportedError

__all__ = [
    "CUDA", "CUDA_MANAGED", "EXTENSION", "HPU", "MAIA", "METAL", "MTIA", "OF_TORCH", "ONE_API", "ROCM", "Device",
    "StorageDevice", "open_device",
]  # fmt: skip

CUDA = 2
CUDA_MANAGED = 13
ROCM = 10
"""DLPack device types."""

METAL = 8
EXTENSION = 12
ONE_API = 14
MAIA = 17
"""More of them: devices that are served through torch."""
HPU = 1 << 16
MTIA = HPU + 1
"""Devices of torch that DLPack has no number for; these are ours."""

OF_TORCH = frozenset({METAL, EXTENSION, ONE_API, MAIA, HPU, MTIA})
"""Devices whose memory is known to torch only."""

_MODULES = {
    CUDA: ("cuda", "cuda-bindings"),
    CUDA_MANAGED: ("cuda", "cuda-bindings"),
    ROCM: ("hip", "rocm-bindings-hip"),
}


class Device(Protocol):
    """One device. Handles and addresses are plain integers; all calls but ``close`` want ``current``."""

    kind: str
    """``"cuda"``, ``"hip"``, or torch's name of a device type."""
    ordinal: int
    unified: bool
    """Whether its memory is the host's memory, as on integrated GPUs: what is pinned is missing there too."""

    def current(self) -> AbstractContextManager[None]:
        """Make the device's primary context current on this thread, and restore what was."""

    def allocate_pinned(self, nbytes: int) -> int:
        """Allocate page-locked, page-aligned host memory."""

    def free_pinned(self, address: int) -> None:
        """Free it."""

    def create_stream(self) -> int:
        """Create a stream that does not wait for the legacy default stream."""

    def destroy_stream(self, stream: int) -> None:
        """Destroy it; work on it goes on."""

    def synchronize_stream(self, stream: int) -> None:
        """Wait on the host for everything on one stream."""

    def is_capturing(self, stream: int) -> bool:
        """Whether a graph is being captured from the stream."""

    def create_event(self) -> int:
        """Create an event without timing."""

    def destroy_event(self, event: int) -> None:
        """Destroy it."""

    def record(self, event: int, stream: int) -> None:
        """Mark the work that is on the stream now."""

    def wait(self, stream: int, event: int) -> None:
        """Make later work on the stream wait for the event, without waiting on the host."""

    def synchronize_event(self, event: int) -> None:
        """Wait on the host for the event."""

    def is_done(self, event: int) -> bool:
        """Whether the event has happened; never waits."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from pinned host memory to the device."""

    def copy_rows(self, target: int, pitch: int, source: int, width: int, rows: int, stream: int) -> None:
        """Enqueue a copy of packed rows to rows that lie ``pitch`` bytes apart on the device."""

    def zero_rows(self, target: int, pitch: int, width: int, rows: int, stream: int) -> None:
        """Enqueue zeros into rows that lie ``pitch`` bytes apart on the device; what is between them is left."""

    def close(self) -> None:
        """Give back the context."""


class StorageDevice(Device, Protocol):
    """A device whose addresses say which storage they are in, and whose streams are objects: those of ``OF_TORCH``."""

    def adopt(self, storage: Any, stream: int, /) -> None:
        """Know a storage until ``close``, and make a stream of ours wait for what the framework's current one has."""

    def number_of(self, stream: Any, /) -> int:
        """Return the handle that stands for a stream object of the caller's, until ``close``.

        Raises
        ------
        OptionError, UnsupportedError
            It is no stream of this device; the device has none.
        """


def open_device(device: tuple[int, int]) -> Device:
    """Open the device of a DLPack type and number.

    Raises
    ------
    UnsupportedError
        No runtime serves that type of device.
    MissingDependencyError
        The package that talks to its driver is not installed.
    DeviceError
        The driver is absent, too old, or failed.
    """
    kind, ordinal = device
    if kind in OF_TORCH:
        through_torch: Device = import_module("dlpack_loader.runtime.torch").open_device(kind, ordinal)
        return through_torch
    if kind not in _MODULES:
        raise UnsupportedError(
            f"no device runtime serves DLPack device type {kind}",
            hint="Pass memory of the host or of a CUDA or ROCm device",
        )
    name, package = _MODULES[kind]
    try:
        module = import_module(f"dlpack_loader.runtime.{name}")
    except ImportError as error:
        raise MissingDependencyError(
            f"destinations on a {name} device need the package {package}, which is not installed",
            hint=f"pip install {package}",
        ) from error
    try:
        opened: Device = module.open_device(ordinal)
    except DeviceError as error:
        error.hint = error.hint or "Check that the driver is installed and that the device is visible to this process"
        raise
    return opened
