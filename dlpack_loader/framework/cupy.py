"""CuPy: arrays on CUDA and ROCm devices, with ml_dtypes for BF16.

CuPy has no F8, F6 or F4. Their bits come as unsigned integers where they are asked for: fill ``cupy.empty(shape,
cupy.uint8)`` through ``Target(array, reinterpret=True)``, F4 with half the last dimension and F6 with three quarters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import cupy

from dlpack_loader.destination import Memory
from dlpack_loader.dtype import DType
from dlpack_loader.errors import DestinationBufferError, DeviceError, OptionError, UnsupportedError
from dlpack_loader.framework import Allocation
from dlpack_loader.runtime.arrays import numpy_dtype
from dlpack_loader.runtime.device import CUDA, ROCM

__all__ = ["describe", "empty", "resolve_device", "wrap", "wrote"]


def resolve_device(device: object) -> tuple[int, int]:
    """Accept a number, "cuda", "cuda:N", ``cupy.cuda.Device`` and ``torch.device``; a bare "cuda" is the current one.

    "cpu" is refused, although it is the default of ``safe_open``: an array of another kind would be a surprise.
    """
    if isinstance(device, cupy.cuda.Device):
        device = device.id
    number = device
    if isinstance(device, bool) or not isinstance(device, int):
        found = re.fullmatch(r"cuda(?::(0|[1-9][0-9]{0,8}))?", str(device))
        if found is None:
            raise OptionError(
                f"Device {device} is not supported for framework cupy",
                hint='Use device="cuda", "cuda:N" or N; for host memory, framework="np"',
            )
        number = None if found[1] is None else int(found[1])
    try:
        count = cupy.cuda.runtime.getDeviceCount()
        if number is None:
            number = cupy.cuda.runtime.getDevice()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(
            f"CuPy finds no device or no driver that it can use: {error}",
            hint="Check the driver and CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES on ROCm)",
        ) from error
    if not isinstance(number, int) or not 0 <= number < count:
        raise OptionError(f"there is no device cuda:{number}: this process sees {count}, numbered from 0")
    return (ROCM if cupy.cuda.runtime.is_hip else CUDA), number


def empty(dtype: DType, shape: tuple[int, ...], _unit: int, device: tuple[int, int]) -> Allocation:
    """Allocate an array on a device."""
    if dtype.numpy is None or (dtype.extension and dtype.code != "BF16"):
        _refuse_dtype(dtype)
    _refuse_capture()
    target = numpy_dtype(dtype.dlpack)
    with cupy.cuda.Device(device[1]):
        try:
            value = cupy.empty(shape, target)
        except (TypeError, ValueError):
            if dtype.extension:  # before CuPy 14
                _refuse_dtype(dtype)
            raise
        return Allocation(value, raw=value.reshape(-1).view(cupy.uint8))


def _refuse_dtype(dtype: DType) -> None:
    raise UnsupportedError(
        f"CuPy {cupy.__version__} has no dtype for {dtype.code}",
        hint="Have its bits in unsigned integers, with read_into(name, Target(cupy.empty(shape, "
        f"cupy.uint{max(dtype.bits, 8)}), reinterpret=True))",
    )


def wrap(array: Any, dtype: DType, shape: tuple[int, ...]) -> None:
    """View nothing: mapped bytes are in host memory."""


def describe(value: Any) -> Memory | None:
    """Check what CuPy's export passes over, and leave the rest to DLPack, which orders our stream after CuPy's."""
    if isinstance(value, cupy.ndarray):
        if any(stride % value.itemsize for stride in value.strides):
            raise DestinationBufferError("the array's strides are not multiples of its itemsize")
        _refuse_capture()
    return None


def _refuse_capture() -> None:
    """Refuse while CuPy's current stream captures: the export would make our stream a part of the graph."""
    if cupy.cuda.get_current_stream().is_capturing():
        raise DeviceError(
            "CuPy's current stream is capturing a graph, which a load from storage can't be part of",
            hint="Load before the capture begins or after it ends",
        )


def wrote(values: Iterable[Any]) -> None:
    """Do nothing: arrays keep no record of writes."""
