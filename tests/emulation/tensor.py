"""A DLPack producer over emulated memory that follows the protocol to the letter.

NumPy's own deleter and capsule destructor do the releasing: a Python callback there would break the consumer that frees
while an exception is pending. A counting deleter of ``libemulation.so`` stands before it.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulation.library import check

if TYPE_CHECKING:
    from tests.emulation.memory import DeviceMemory, Stream

__all__ = ["DeviceTensor"]

_CUDA, _ROCM = 2, 10
_READ_ONLY = 1


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Legacy(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class _Carrier(np.ndarray[Any, Any]):
    """An array of one byte whose deleter, NumPy's, lets go of what really is exported."""

    keeps: object


class DeviceTensor:
    """A tensor on a device.

    Parameters
    ----------
    memory
        Where it is; an export keeps it alive.
    shape, strides
        In elements. No strides are C order.
    dtype
        DLPack's (code, bits, lanes).
    offset
        Bytes from the memory's start to where the tensor's pointer points.
    byte_offset
        Bytes from there to the first element, told by the capsule's field of that name.
    stream
        The producer's own stream, whose work so far an export makes the consumer's stream wait for.
    flags
        Of the capsule: 1 is read-only, 2 a copy, 4 sub-byte padded.
    versioned
        False is a producer of before DLPack 1.0, which does not know ``max_version``, ``dl_device`` and ``copy``.

    Attributes
    ----------
    streams
        What each export was asked to order, as it came.
    any_current_device
        Export even where the tensor's device is not the current one. PyTorch refuses that, and so does this.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        shape: tuple[int, ...],
        dtype: tuple[int, int, int],
        *,
        offset: int = 0,
        strides: tuple[int, ...] | None = None,
        byte_offset: int = 0,
        stream: Stream | None = None,
        flags: int = 0,
        versioned: bool = True,
    ) -> None:
        self.memory, self.shape, self.dtype, self.stream, self.flags = memory, shape, dtype, stream, flags
        self.pointer, self.byte_offset, self.versioned = memory.pointer + offset, byte_offset, versioned
        steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        self.strides = tuple(steps) if strides is None else strides
        self.device_type = _CUDA if memory.vendor == "cuda" else _ROCM
        self.any_current_device = False
        self.streams: list[object] = []
        self._exports: list[int] = []

    @property
    def exports(self) -> int:
        """How often it was exported."""
        return len(self._exports)

    @property
    def releases(self) -> list[int]:
        """How often each export's deleter was called, by consumer or by capsule; 1 is right once all is over."""
        return [self.memory.driver.core.export_calls(export) for export in self._exports]

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device type and number."""
        return (self.device_type, self.memory.device)

    def __dlpack__(self, *, stream: object = None, **versioned: Any) -> object:
        """Export, after making the consumer's stream wait for the producer's."""
        if not self.versioned and versioned:
            raise TypeError(f"__dlpack__() got an unexpected keyword argument {next(iter(versioned))!r}")
        return self._export(stream, **versioned)

    def _export(
        self,
        stream: object,
        *,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        if dl_device is not None and tuple(map(int, dl_device)) != self.__dlpack_device__():
            raise BufferError(f"can't be exported to device {dl_device}")
        if copy:
            raise BufferError("can't be copied")
        versioned = max_version is not None and max_version[0] >= 1
        if self.flags & _READ_ONLY and not versioned:
            raise BufferError("a read-only tensor needs DLPack 1.0")
        consumer = self._consumer(stream)
        self.streams.append(stream)
        if self.stream is not None and consumer is not None:
            own, core = self.stream, self.memory.driver.core
            check(core.order(own.handle, own.device, consumer, self.memory.device), "order")
        return self._capsule(versioned)

    def _consumer(self, stream: object) -> int | None:
        """The consumer's stream as a handle, None for no order, or an error for what the protocol forbids."""
        driver, device = self.memory.driver, self.memory.device
        if stream is not None and type(stream) is not int:
            raise TypeError(f"stream must be an int or None, not {type(stream).__name__}")
        if not self.any_current_device and (current := driver.current_device(self.memory.vendor)) != device:
            raise BufferError(f"can't export a tensor of device {device} while device {current} is current")
        if stream is None:
            return 0
        assert isinstance(stream, int)
        if stream == -1:
            return None
        if stream < -1:
            raise BufferError(f"stream {stream} is none")
        if self.device_type == _CUDA and stream == 0:
            raise BufferError("stream 0 is ambiguous on CUDA: pass 1, 2 or a handle")
        if self.device_type == _ROCM and stream in {1, 2}:
            raise BufferError(f"stream {stream} is not supported on ROCm: pass 0 or a handle")
        if driver.core.stream_device(stream, device) < 0:
            raise BufferError(f"stream {stream:#x} does not exist")
        return stream

    def _capsule(self, versioned: bool) -> object:
        ndim = len(self.shape)
        carrier = np.empty((1,) * ndim, np.uint8).view(_Carrier)
        carrier.keeps = self
        capsule = np.ndarray.__dlpack__(carrier, max_version=(1, 0) if versioned else None)
        structure = _Versioned if versioned else _Legacy
        address = _pointer_of(capsule, b"dltensor_versioned" if versioned else b"dltensor")
        managed = structure.from_address(address)
        if isinstance(managed, _Versioned):
            managed.minor, managed.flags = 1, self.flags
        tensor = managed.tensor
        tensor.data = None if 0 in self.shape else self.pointer
        tensor.device_type, tensor.device_id = self.__dlpack_device__()
        tensor.code, tensor.bits, tensor.lanes = self.dtype
        tensor.byte_offset = self.byte_offset
        for axis in range(ndim):
            tensor.shape[axis], tensor.strides[axis] = self.shape[axis], self.strides[axis]
        deleter = ctypes.c_void_p.from_address(address + structure.deleter.offset)
        self._exports.append(self.memory.driver.core.export(address, ctypes.byref(deleter)))
        return capsule
