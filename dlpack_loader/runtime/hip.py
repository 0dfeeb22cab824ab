"""ROCm through AMD's own binding of HIP. Nothing of a framework is used.

HIP has a current device for each thread where CUDA has a stack of contexts: its context calls are deprecated, and
``hipSetDevice`` neither waits for a device nor makes anything on it. What a call creates belongs to the device that is
current then.

``hipHostFree`` waits for the whole device, as HIP documents it, and so does every other way to unpin memory. The ring
frees its slots when it has waited for its own copies; other work on the device may make that last longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rocm.bindings import hip

from dlpack_loader.errors import DeviceError

__all__ = ["HipDevice", "open_device"]

_OLDEST = 60_000_000
"""HIP 6.0: the last that changed the library's interface."""

_NON_BLOCKING = 1  # hipStreamNonBlocking
_DISABLE_TIMING = 2  # hipEventDisableTiming
_PORTABLE = 1  # hipHostMallocPortable: pinned for every device
_HOST_TO_DEVICE = hip.hipMemcpyKind.hipMemcpyHostToDevice
_INTEGRATED = hip.hipDeviceAttribute_t.hipDeviceAttributeIntegrated
_NOT_READY = 600  # hipErrorNotReady


def open_device(ordinal: int) -> HipDevice:
    """Initialise HIP and look up a device."""
    _call(hip.hipInit, 0)
    version = _call(hip.hipRuntimeGetVersion)
    if version < _OLDEST:
        raise DeviceError(
            f"HIP is of version {version // 10_000_000}.{version % 10_000_000 // 100_000}, and 6.0 is needed",
            hint="Update ROCm",
        )
    return HipDevice(ordinal)


class HipDevice:
    """One ROCm device."""

    kind = "hip"

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        _call(hip.hipDeviceGet, ordinal)  # says now that there is no such device
        self.unified = _call(hip.hipDeviceGetAttribute, _INTEGRATED, ordinal) != 0

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device this thread's current one, and restore what was."""
        before = _call(hip.hipGetDevice)
        _call(hip.hipSetDevice, self.ordinal)
        try:
            yield
        finally:
            _call(hip.hipSetDevice, before)

    def allocate_pinned(self, nbytes: int) -> int:
        """Allocate page-locked host memory."""
        return int(_call(hip.hipHostMalloc, nbytes, _PORTABLE))

    def free_pinned(self, address: int) -> None:
        """Free it."""
        _call(hip.hipHostFree, address)

    def create_stream(self) -> int:
        """Create a non-blocking stream."""
        return int(_call(hip.hipStreamCreateWithFlags, _NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        """Destroy it."""
        _call(hip.hipStreamDestroy, stream)

    def synchronize_stream(self, stream: int) -> None:
        """Wait for one stream."""
        _call(hip.hipStreamSynchronize, stream)

    def is_capturing(self, stream: int) -> bool:
        """Whether a graph is being captured."""
        return int(_call(hip.hipStreamIsCapturing, stream)) != 0

    def create_event(self) -> int:
        """Create an event without timing."""
        return int(_call(hip.hipEventCreateWithFlags, _DISABLE_TIMING))

    def destroy_event(self, event: int) -> None:
        """Destroy it."""
        _call(hip.hipEventDestroy, event)

    def record(self, event: int, stream: int) -> None:
        """Record the event on the stream."""
        _call(hip.hipEventRecord, event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Make the stream wait for the event."""
        _call(hip.hipStreamWaitEvent, stream, event, 0)

    def synchronize_event(self, event: int) -> None:
        """Wait for the event on the host."""
        _call(hip.hipEventSynchronize, event)

    def is_done(self, event: int) -> bool:
        """Whether the event has happened."""
        status = hip.hipEventQuery(event)[0]
        if int(status) == _NOT_READY:
            return False
        _check(status, "hipEventQuery")
        return True

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy to the device."""
        _call(hip.hipMemcpyHtoDAsync, target, source, nbytes, stream)

    def copy_rows(self, target: int, pitch: int, source: int, width: int, rows: int, stream: int) -> None:
        """Enqueue a copy of packed rows to rows ``pitch`` bytes apart."""
        _call(hip.hipMemcpy2DAsync, target, pitch, source, width, width, rows, _HOST_TO_DEVICE, stream)

    def zero_rows(self, target: int, pitch: int, width: int, rows: int, stream: int) -> None:
        """Enqueue zeros into rows ``pitch`` bytes apart."""
        _call(hip.hipMemset2DAsync, target, pitch, 0, width, rows, stream)

    def close(self) -> None:
        """Nothing is held: a device's context is HIP's own."""


def _call(function: Callable[..., tuple[Any, ...]], *arguments: object) -> Any:
    """Call HIP, which takes handles and addresses as integers; return its result, or raise DeviceError."""
    try:
        status, *results = function(*arguments)
    except (RuntimeError, ValueError) as error:  # no library, none of that function, a status that has no name
        raise DeviceError(f"{function.__name__} failed: {error}") from error
    _check(status, function.__name__)
    return results[0] if results else None


def _check(status: Any, name: str) -> None:
    if int(status) != 0:
        raise DeviceError(f"{name} failed: {status.name} ({int(status)})", status=status.name)
