"""NumPy: host arrays, with ml_dtypes for the dtypes that NumPy itself lacks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from dlpack_loader.destination import Memory
from dlpack_loader.dtype import DTYPES, UINT8, DLDataType, DType
from dlpack_loader.errors import DestinationBufferError, DestinationTypeError, OptionError
from dlpack_loader.framework import HOST, Allocation
from dlpack_loader.runtime.arrays import numpy_dtype

__all__ = ["describe", "empty", "resolve_device", "wrap", "wrote"]

_UNPACK_BYTES = 1 << 20
_BY_NAME: dict[str, DLDataType] = {d.numpy: d.dlpack for d in DTYPES if d.numpy is not None and d.code != "F4"} | {
    "complex128": (5, 128, 1)
}
_OPAQUE = 3  # kDLOpaqueHandle: a dtype that equals none of the format's


def resolve_device(device: object) -> tuple[int, int]:
    """Accept the CPU only."""
    kind = getattr(device, "type", device)
    if kind != "cpu" and device != "cpu:0":
        raise OptionError(f"Device {device} is not supported for framework numpy", hint='Use device="cpu"')
    return HOST


def empty(dtype: DType, shape: tuple[int, ...], unit: int, _device: tuple[int, int] = HOST) -> Allocation:
    """Allocate an array; F6 comes as its bytes in uint8, F4 with one element in each byte, as ml_dtypes has it."""
    if dtype.code == "F4":
        return _empty_f4(dtype, shape)
    if dtype.numpy is None:
        shape = (*shape[:-1], shape[-1] * unit) if shape else shape
        value = np.empty(shape, np.uint8)
        return Allocation(value, Memory(_address(value), UINT8, shape, None, HOST, value, value.nbytes))
    value = np.empty(shape, numpy_dtype(dtype.dlpack))
    return Allocation(value, Memory(_address(value), dtype.dlpack, shape, None, HOST, value, value.nbytes))


def _empty_f4(dtype: DType, shape: tuple[int, ...]) -> Allocation:
    """Allocate for F4: the packed bytes are read into the second half and spread over the whole from there."""
    value = np.empty((*shape[:-1], shape[-1] * 2), numpy_dtype(dtype.dlpack))
    flat = value.reshape(-1).view(np.uint8)
    packed = flat[flat.size // 2 :]
    memory = Memory(_address(packed), dtype.dlpack, shape, None, HOST, value, packed.nbytes)
    return Allocation(value, memory, finish=partial(_unpack_f4, flat, packed))


def _unpack_f4(flat: np.ndarray[Any, Any], packed: np.ndarray[Any, Any]) -> None:
    # Front to back, in pieces: what is written has been read already, since 2 i never passes size / 2 + i.
    for start in range(0, packed.size, _UNPACK_BYTES):
        piece = packed[start : start + _UNPACK_BYTES].copy()
        at = flat[2 * start : 2 * (start + piece.size)]
        at[0::2] = piece & 0x0F  # the first element of a pair is in the low bits
        at[1::2] = piece >> 4


def wrap(array: Any, dtype: DType, shape: tuple[int, ...]) -> np.ndarray[Any, Any] | None:
    """View mapped bytes as an array that keeps them alive; F4 has to be unpacked, so it can't be viewed."""
    if dtype.code == "F4":
        return None
    target = np.dtype(np.uint8) if dtype.numpy is None else numpy_dtype(dtype.dlpack)
    viewed: np.ndarray[Any, Any] = array.view(target).reshape(shape)
    return viewed


def describe(value: Any) -> Memory | None:
    """Name the memory of an array and check that it may be written; ml_dtypes' arrays are known by their names."""
    if not isinstance(value, np.ndarray):
        return None
    dtype = value.dtype
    if not value.flags.writeable:
        raise DestinationBufferError("the array is read-only", hint="Pass a writable copy of it")
    if isinstance(value, np.ma.MaskedArray):
        raise DestinationTypeError("a masked array has a mask that would be ignored", hint="Pass array.data")
    if dtype.name == "float4_e2m1fn":
        raise DestinationTypeError(
            "ml_dtypes' float4_e2m1fn keeps one element in a byte, and F4 is packed by two",
            hint="Read with get_tensor, or pass its bytes as Target(uint8_array, reinterpret=True)",
        )
    if not dtype.isnative:
        raise DestinationTypeError(
            "the array's byte order is not this machine's", hint="Pass an array of dtype.newbyteorder('=')"
        )
    strides: tuple[int, ...] | None = None
    if not value.flags.c_contiguous:
        if any(stride % dtype.itemsize for stride in value.strides):
            raise DestinationBufferError("the array's strides are not multiples of its itemsize")
        strides = tuple(stride // dtype.itemsize for stride in value.strides)
    triple = _BY_NAME.get(dtype.name) or (_OPAQUE, dtype.itemsize * 8 % 256, 1)
    return Memory(_address(value), triple, value.shape, strides, HOST, value, value.nbytes)


def wrote(values: Iterable[Any]) -> None:
    """Do nothing: arrays keep no record of writes."""


def _address(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
