"""torch: tensors of the CPU, of CUDA and ROCm devices and of torch's others, allocated, wrapped and named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from dlpack_loader.destination import Memory
from dlpack_loader.dtype import DTYPES, DLDataType, DType
from dlpack_loader.errors import (
    DestinationBufferError,
    DestinationTypeError,
    DeviceError,
    OptionError,
    UnsupportedError,
)
from dlpack_loader.framework import HOST, Allocation
from dlpack_loader.runtime.device import CUDA, OF_TORCH, ROCM
from dlpack_loader.runtime.torch import address_of, device_of, kind_of, module_of

__all__ = ["describe", "empty", "resolve_device", "torch_dtype", "wrap", "wrote"]

_DLPACK: dict[torch.dtype, DLDataType] = {
    getattr(torch, d.torch): d.dlpack for d in DTYPES if d.torch and hasattr(torch, d.torch)
} | {torch.complex128: (5, 128, 1), torch.complex32: (5, 32, 1)}
_COMPLEX = 5  # kDLComplex: the only dtypes that can be conjugate views
_OPAQUE = 3  # kDLOpaqueHandle: a dtype that equals none of the format's

# What marks a class whose tensors have no memory of their own: fakes, functional and other wrappers.
_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__


def resolve_device(device: object) -> tuple[int, int]:
    """Accept torch's devices, and the number of an accelerator; a bare "cuda" is the current device, "xpu" likewise."""
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise OptionError(f"device {device!r} is invalid")
    try:
        if isinstance(device, int) and torch.cuda.is_available():
            named = torch.device("cuda", device)
        else:
            named = torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        if isinstance(device, int) and device >= 0:
            raise UnsupportedError(
                f"device {device} is the number of an accelerator, and torch has none here: {reason}",
                hint='Load with device="cpu"',
            ) from None
        raise OptionError(f"device {device} is invalid: {reason}") from None
    if named.type == "cpu":
        return HOST
    if named.type == "meta":
        raise OptionError("device meta is invalid", hint="Use get_tensor_meta to know a tensor without reading it")
    if named.type != "cuda":
        return _elsewhere(named)
    return (ROCM if torch.version.hip else CUDA), _cuda_number(named.index)


def _elsewhere(named: torch.device) -> tuple[int, int]:
    """Return the numbers of a device that has neither CUDA nor HIP."""
    kind, module = kind_of(named.type), module_of(named.type)
    if kind is None or module is None:
        raise UnsupportedError(
            f"torch {torch.__version__} has no tensors with memory on {named.type} here, so a load goes to the host "
            f"and not to device {str(named)!r}",
            hint='Load with device="cpu", or install what torch needs for that device',
        )
    number: int | None = named.index
    if number is None:
        number = module.current_device() if hasattr(module, "current_device") else 0
    count = module.device_count() if hasattr(module, "device_count") else 1
    if number >= count:
        raise OptionError(f"there is no device {named.type}:{number}: this process sees {count}, numbered from 0")
    return kind, number


def _cuda_number(number: int | None) -> int:
    if not (torch.version.cuda or torch.version.hip):
        raise UnsupportedError(
            f"torch {torch.__version__} is built without CUDA",
            hint='Install a build of torch with CUDA or ROCm, or load with device="cpu"',
        )
    if not torch.cuda.is_available():
        raise DeviceError(
            f"torch {torch.__version__} finds no CUDA device or no driver that it can use",
            hint="Check the driver and CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES on ROCm)",
        )
    if number is None:
        return torch.cuda.current_device()
    if number >= (count := torch.cuda.device_count()):
        raise OptionError(f"there is no device cuda:{number}: this process sees {count}, numbered from 0")
    return number


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's dtype for one of the format's; F6 has none and comes as bytes."""
    if dtype.torch is None:
        return torch.uint8
    found = getattr(torch, dtype.torch, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedError(
            f"torch {torch.__version__} has no dtype {dtype.torch} for {dtype.code}", hint="Update torch"
        )
    return found


def empty(dtype: DType, shape: tuple[int, ...], unit: int, device: tuple[int, int] = HOST) -> Allocation:
    """Allocate a tensor; F4 comes as torch's packed pairs, F6 as its bytes in uint8."""
    target = torch_dtype(dtype)
    if dtype.torch is None and unit > 1:
        shape = (*shape[:-1], shape[-1] * unit)
    # The device is named, so that `with torch.device("meta")` and a default device do not redirect it.
    where = torch.device("cpu") if device == HOST else _device(device)
    if device != HOST:
        _refuse_capture(where.type)
    value = torch.empty(shape, dtype=target, device=where)
    if type(value) is not torch.Tensor:
        _refuse_mode(type(value).__name__)
    if device != HOST:
        return Allocation(value, raw=value.reshape(-1).view(torch.uint8))
    return Allocation(value, Memory(value.data_ptr(), _DLPACK[target], shape, None, HOST, value, value.nbytes))


def _device(device: tuple[int, int]) -> torch.device:
    return device_of(device) if device[0] in OF_TORCH else torch.device("cuda", device[1])


def wrap(array: Any, dtype: DType, shape: tuple[int, ...]) -> torch.Tensor | None:
    """View mapped bytes as a tensor that keeps them alive."""
    target = torch_dtype(dtype)
    try:
        return torch.frombuffer(array, dtype=target).reshape(shape)
    except AssertionError:  # what FakeTensorMode says of memory that is real
        _refuse_mode("FakeTensor")


def _refuse_mode(kind: str) -> NoReturn:
    raise UnsupportedError(f"torch makes a {kind} here, which has no memory", hint="Leave the FakeTensorMode first")


def describe(value: Any) -> Memory | None:
    """Name the memory of a torch tensor, as ``Tensor.__dlpack__`` would, and check that it may be written."""
    if not isinstance(value, torch.Tensor):
        return None
    if value.is_meta:
        raise DestinationBufferError(
            "a meta tensor has no memory", hint='Allocate it first, e.g. module.to_empty(device="cpu")'
        )
    if value.requires_grad:
        raise DestinationTypeError(
            "the tensor requires grad, and filling it would bypass autograd", hint="Pass tensor.detach()"
        )
    if type(value) is not torch.Tensor and type(value).__torch_dispatch__ != _PLAIN_DISPATCH:
        raise DestinationTypeError(
            f"a {type(value).__name__} wraps other tensors and has no memory of its own",
            hint="Pass the tensors inside it",
        )
    device = HOST
    if not value.is_cpu:
        if value.is_neg() or value.is_conj():
            _refuse_lazy()
        if value.is_cuda:
            _refuse_capture("cuda")
            return None  # through DLPack, which orders our stream after torch's
        device = _place_of(value)
    try:
        pointer, storage = value.data_ptr(), value.untyped_storage()
        stored = storage.nbytes()
        shape = tuple(value.shape)  # torch.Size would stay with the garbage collector, which drops plain tuples
    except RuntimeError as error:  # sparse, nested and other layouts
        raise DestinationTypeError(
            f"a tensor of layout {value.layout} has no memory of its own: {error}", hint="Pass a strided tensor"
        ) from None
    dtype = _DLPACK.get(value.dtype)
    if dtype is None:
        dtype = (_OPAQUE, value.element_size() * 8, 1)
    offset, nbytes, strides = value.storage_offset(), value.nbytes, None
    needed = nbytes
    if not value.is_contiguous():
        strides = value.stride()
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        needed = nbytes and value.itemsize * (1 + reach)
    if needed and (not pointer or needed + (offset and offset * value.itemsize) > stored):
        raise DestinationBufferError(
            "the tensor's storage was freed, shrunk or never allocated", hint="Allocate it first"
        )
    if value.is_neg() or (dtype[0] == _COMPLEX and value.is_conj()):
        _refuse_lazy()
    if device is not HOST:
        pointer = address_of(storage, int(offset) * value.itemsize)
    return Memory(pointer, dtype, shape, strides, device, storage, nbytes)


def _place_of(value: torch.Tensor) -> tuple[int, int]:
    kind = kind_of(value.device.type)
    if kind is None:
        raise UnsupportedError(
            f"destinations on {value.device.type} are not served", hint="Load to the host and copy from there"
        )
    _refuse_capture(value.device.type)
    return kind, value.device.index or 0


def _refuse_capture(kind: str) -> None:
    """Refuse while torch's current stream captures: the load would make our stream a part of the graph."""
    module: Any = getattr(torch, kind, None)
    if hasattr(module, "is_current_stream_capturing") and module.is_current_stream_capturing():
        raise DeviceError(
            "torch's current stream is capturing a graph, which a load from storage can't be part of",
            hint="Load before the capture begins or after it ends",
        )


def _refuse_lazy() -> NoReturn:
    raise DestinationBufferError(
        "the tensor is a lazy negative or conjugate view: its memory is not what it shows",
        hint="Pass the tensor that it was made from, or tensor.resolve_neg().resolve_conj()",
    )


def wrote(values: Iterable[Any]) -> None:
    """Count a write in each tensor's version, so that autograd notices one that it had saved."""
    # Inference tensors keep no version; torch passes over them.
    written = [value for value in values if isinstance(value, torch.Tensor)]
    try:
        torch.autograd.graph.increment_version(written)
    except (RuntimeError, TypeError):  # older releases take one tensor at a time
        for value in written:
            torch.autograd.graph.increment_version(value)
