"""CUDA through NVIDIA's own binding of the driver. Nothing of the CUDA runtime or of a framework is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver

from dlpack_loader.errors import DeviceError

__all__ = ["CudaDevice", "open_device"]

_OLDEST = 12000
"""CUDA 12.0: the driver that the binding's calls below are in."""

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for every context
_INTEGRATED = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED
_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE
_NOT_READY = 600  # CUDA_ERROR_NOT_READY


def open_device(ordinal: int) -> CudaDevice:
    """Initialise the driver and retain a device's primary context."""
    try:
        _call(driver.cuInit, 0)
        version = _call(driver.cuDriverGetVersion)
    except (RuntimeError, OSError, ImportError) as error:
        if isinstance(error, DeviceError):
            raise
        raise DeviceError(f"the CUDA driver can't be loaded: {error}") from error
    if version < _OLDEST:
        raise DeviceError(
            f"the CUDA driver is of version {version // 1000}.{version % 1000 // 10}, and 12.0 is needed",
            hint="Update the driver",
        )
    return CudaDevice(ordinal)


class CudaDevice:
    """One CUDA device and its primary context."""

    kind = "cuda"

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._device = _call(driver.cuDeviceGet, ordinal)
        self.unified = _call(driver.cuDeviceGetAttribute, _INTEGRATED, self._device) != 0
        self._context = _call(driver.cuDevicePrimaryCtxRetain, self._device)
        self._open = True

    @contextmanager
    def current(self) -> Iterator[None]:
        """Push the primary context on this thread, and pop it."""
        _call(driver.cuCtxPushCurrent, self._context)
        try:
            yield
        finally:
            _call(driver.cuCtxPopCurrent)

    def allocate_pinned(self, nbytes: int) -> int:
        """Allocate page-locked host memory."""
        return int(_call(driver.cuMemHostAlloc, nbytes, _PORTABLE))

    def free_pinned(self, address: int) -> None:
        """Free it."""
        _call(driver.cuMemFreeHost, address)

    def create_stream(self) -> int:
        """Create a non-blocking stream."""
        return int(_call(driver.cuStreamCreate, _NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        """Destroy it."""
        _call(driver.cuStreamDestroy, stream)

    def synchronize_stream(self, stream: int) -> None:
        """Wait for one stream."""
        _call(driver.cuStreamSynchronize, stream)

    def is_capturing(self, stream: int) -> bool:
        """Whether a graph is being captured."""
        return int(_call(driver.cuStreamIsCapturing, stream)) != 0

    def create_event(self) -> int:
        """Create an event without timing."""
        return int(_call(driver.cuEventCreate, _DISABLE_TIMING))

    def destroy_event(self, event: int) -> None:
        """Destroy it."""
        _call(driver.cuEventDestroy, event)

    def record(self, event: int, stream: int) -> None:
        """Record the event on the stream."""
        _call(driver.cuEventRecord, event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Make the stream wait for the event."""
        _call(driver.cuStreamWaitEvent, stream, event, 0)

    def synchronize_event(self, event: int) -> None:
        """Wait for the event on the host."""
        _call(driver.cuEventSynchronize, event)

    def is_done(self, event: int) -> bool:
        """Whether the event has happened."""
        status = driver.cuEventQuery(event)[0]
        if int(status) == _NOT_READY:
            return False
        _check(status, "cuEventQuery")
        return True

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy to the device."""
        _call(driver.cuMemcpyHtoDAsync, target, source, nbytes, stream)

    def copy_rows(self, target: int, pitch: int, source: int, width: int, rows: int, stream: int) -> None:
        """Enqueue a copy of packed rows to rows ``pitch`` bytes apart."""
        shape = driver.CUDA_MEMCPY2D()
        shape.srcMemoryType = driver.CUmemorytype(_HOST)
        shape.srcHost, shape.srcPitch = source, width
        shape.dstMemoryType = driver.CUmemorytype(_DEVICE)
        shape.dstDevice, shape.dstPitch = target, pitch
        shape.WidthInBytes, shape.Height = width, rows
        _call(driver.cuMemcpy2DAsync, shape, stream)

    def zero_rows(self, target: int, pitch: int, width: int, rows: int, stream: int) -> None:
        """Enqueue zeros into rows ``pitch`` bytes apart."""
        _call(driver.cuMemsetD2D8Async, target, pitch, 0, width, rows, stream)

    def close(self) -> None:
        """Release the primary context."""
        if self._open:
            self._open = False
            _call(driver.cuDevicePrimaryCtxRelease, self._device)


def _call(function: Callable[..., tuple[Any, ...]], *arguments: object) -> Any:
    """Call the driver; return its result, or raise DeviceError with its own name for the fault."""
    status, *results = function(*arguments)
    _check(status, function.__name__)
    return results[0] if results else None


def _check(status: Any, name: str) -> None:
    if int(status) == 0:
        return
    label = getattr(status, "name", str(status))
    raise DeviceError(f"{name} failed: {label} ({int(status)})", status=label)
