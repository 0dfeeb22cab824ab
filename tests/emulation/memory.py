"""Memory and streams that a test makes, as a framework would have them."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Literal

from tests.emulation.library import check
from tests.emulation.tensor import DeviceTensor

if TYPE_CHECKING:
    from tests.emulation.driver import Driver

__all__ = ["DeviceMemory", "Stream"]

_PINNED = 2


class DeviceMemory:
    """Memory on a device: freed by ``free``, by garbage collection or by ``Driver.reset``."""

    def __init__(self, driver: Driver, device: int, nbytes: int, kind: int, vendor: Literal["cuda", "hip"]) -> None:
        pointer = ctypes.c_uint64()
        check(driver.core.allocate(kind, device, nbytes, ctypes.byref(pointer)), f"memory of {nbytes} bytes")
        self.driver, self.device, self.nbytes, self.vendor = driver, device, nbytes, vendor
        self.pointer = pointer.value
        self._free = weakref.finalize(self, driver.core.free, pointer.value, kind == _PINNED)

    def read(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Its bytes as they are now: nothing that is queued runs for this."""
        return self.driver.read(self.pointer + offset, self.nbytes - offset if nbytes is None else nbytes)

    def write(self, data: bytes, offset: int = 0) -> None:
        """Write now."""
        self.driver.write(self.pointer + offset, data)

    def fill(self, value: int) -> None:
        """Write one byte everywhere, such as a guard's."""
        self.write(bytes([value]) * self.nbytes)

    def free(self) -> None:
        """Give it back; doing it twice is fine."""
        self._free()

    def tensor(
        self,
        shape: tuple[int, ...],
        dtype: tuple[int, int, int] = (1, 8, 1),
        *,
        offset: int = 0,
        strides: tuple[int, ...] | None = None,
        byte_offset: int = 0,
        stream: Stream | None = None,
        flags: int = 0,
        versioned: bool = True,
    ) -> DeviceTensor:
        """A DLPack producer over it; see ``DeviceTensor``."""
        return DeviceTensor(
            self, shape, dtype, offset=offset, strides=strides, byte_offset=byte_offset, stream=stream, flags=flags,
            versioned=versioned,
        )  # fmt: skip


class Stream:
    """A stream, with the CUDA stream protocol."""

    def __init__(self, driver: Driver, device: int, handle: int) -> None:
        self.driver, self.device, self.handle = driver, device, handle
        self._destroy = weakref.finalize(self, driver.core.stream_destroy, handle) if handle > 2 else None

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol's version and the handle."""
        return (0, self.handle)

    def write(self, memory: DeviceMemory, data: bytes, offset: int = 0) -> None:
        """Queue a write, as a framework's kernel would be: it runs when the mode lets it."""
        code = self.driver.core.stream_write(self.handle, self.device, memory.pointer + offset, data, len(data))
        check(code, "stream write")

    @property
    def pending(self) -> int:
        """Number of operations that are queued and did not run."""
        return int(self.driver.core.stream_pending(self.handle, self.device))

    def synchronize(self) -> None:
        """Run what is queued, and what that depends on."""
        check(self.driver.core.stream_synchronize(self.handle, self.device), "stream synchronize")

    def hold(self) -> None:
        """Run nothing from here, whatever the mode, until it is let go."""
        check(self.driver.core.stream_hold(self.handle, self.device, True), "hold")

    def let_go(self) -> None:
        """Run again."""
        check(self.driver.core.stream_hold(self.handle, self.device, False), "let go")

    def capture(self, status: Literal["none", "active", "invalidated"]) -> None:
        """Say that a graph is being captured from this stream."""
        number = ("none", "active", "invalidated").index(status)
        check(self.driver.core.stream_set_capture(self.handle, self.device, number), "capture")

    def free(self) -> None:
        """Destroy it; doing it twice is fine, and what is queued still runs."""
        if self._destroy is not None:
            self._destroy()
