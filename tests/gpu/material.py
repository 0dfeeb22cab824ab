"""What the GPU tests and the measurements have in common: a file of every dtype, checks of it, disturbed streams.

The checks return the names of what was wrong. They take any device of torch's, so that they run on the CPU as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dlpack_loader
from dlpack_loader import Target
from dlpack_loader.dtype import BY_CODE, DTYPES
from dlpack_loader.errors import UnsupportedError
from tests.files import write_raw

__all__ = ["bits_of", "every_dtype", "resolver", "wrong_of_cupy", "wrong_of_order", "wrong_of_torch"]

_SHAPES = {"small": (3, 8), "large": (37, 65_536), "none": (0, 8), "scalar": ()}
_CYCLES = 20_000_000  # of the GPU's clock: some ten milliseconds


def every_dtype(folder: Path) -> tuple[Path, dict[str, bytes]]:
    """Write a file with every dtype in every shape that it has; return the bytes of each tensor too."""
    numbers = np.random.default_rng(11)
    header: dict[str, Any] = {}
    contents: dict[str, bytes] = {}
    end = 0
    for dtype in DTYPES:
        for kind, shape in _SHAPES.items():
            if kind == "scalar" and dtype.group > 1:
                continue
            nbytes = prod(shape) * dtype.bits // 8
            name = f"{dtype.code}.{kind}"
            contents[name] = numbers.bytes(nbytes)
            header[name] = {"dtype": dtype.code, "shape": shape, "data_offsets": [end, end + nbytes]}
            end += nbytes
    return write_raw(folder / "dtypes.safetensors", header, b"".join(contents.values())), contents


def bits_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor of torch, on any device."""
    return tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def wrong_of_torch(path: Path, contents: Mapping[str, bytes], device: Any, **options: Any) -> list[str]:
    """Load every dtype through torch: together, one by one, and slices."""
    loaded = dlpack_loader.load_file(path, "pt", device, **options)
    wrong = [name for name, raw in contents.items() if bits_of(loaded[name]) != raw]
    with dlpack_loader.safe_open(path, "pt", device, **options) as reader:
        for name, raw in contents.items():
            if bits_of(reader.get_tensor(name)) != raw:
                wrong.append(f"{name} alone")
            if name.endswith("small") and bits_of(reader.get_slice(name)[::-2, 4:]) != _half(raw):
                wrong.append(f"{name} in a slice")
    return wrong


def _half(raw: bytes) -> bytes:
    rows = np.frombuffer(raw, np.uint8).reshape(3, -1)
    return rows[::-2, rows.shape[1] // 2 :].tobytes()


def resolver(make: Callable[[tuple[int, ...], str], Any]) -> tuple[Callable[[Any], Target], dict[str, Any]]:
    """A resolver that makes arrays of unsigned integers for the bits of every entry, and what it made by name."""
    made: dict[str, Any] = {}

    def resolve(entry: Any) -> Target:
        dtype = BY_CODE[entry.dtype]
        width = max(dtype.bits // 8, 1)
        shape = entry.shape if dtype.bits >= 8 else (*entry.shape[:-1], entry.shape[-1] * dtype.bits // 8)
        made[entry.name] = make(shape, f"uint{8 * width}")
        return Target(made[entry.name], reinterpret=True)

    return resolve, made


def wrong_of_cupy(path: Path, contents: Mapping[str, bytes], device: Any) -> list[str]:
    """Load what CuPy has dtypes for, and everything as unsigned integers."""
    import cupy

    def bits(array: Any) -> bytes:
        return bytes(cupy.asnumpy(array.reshape(-1).view(cupy.uint8)).tobytes())

    wrong = []
    with dlpack_loader.safe_open(path, "cupy", device) as reader:
        for name, raw in contents.items():
            dtype = BY_CODE[name.partition(".")[0]]
            if dtype.numpy and not dtype.extension and bits(reader.get_tensor(name)) != raw:
                wrong.append(name)
        try:
            if bits(reader.get_tensor("BF16.large")) != contents["BF16.large"]:
                wrong.append("BF16.large")
        except UnsupportedError:
            if int(cupy.__version__.partition(".")[0]) >= 14:
                raise
        resolve, made = resolver(lambda shape, dtype: cupy.empty(shape, dtype))
        reader.load_into(resolve)
    return wrong + [f"{name} as bits" for name, raw in contents.items() if bits(made[name]) != raw]


def wrong_of_order(path: Path, contents: Mapping[str, bytes], device: torch.device, rounds: int) -> list[str]:
    """Load while kernels are pending on the current stream, and read on another stream at once.

    Into tensors that are there, with and without ``wait``; and into new ones, whose blocks were freed while kernels
    that write to them were pending, as torch's allocator allows.
    """
    names = ["F32.large", "BF16.large", "U8.large"]
    wanted = {name: torch.frombuffer(bytearray(contents[name]), dtype=torch.uint8).to(device) for name in names}
    shapes = {name: dlpack_loader.safe_open(path).entry(name).shape for name in names}
    dtypes = {name: getattr(torch, str(BY_CODE[name.partition(".")[0]].torch)) for name in names}
    wrong: list[str] = []
    on_gpu = device.type == "cuda"

    def disturb(tensors: Mapping[str, torch.Tensor]) -> None:
        if on_gpu:
            torch.cuda._sleep(_CYCLES)  # what is enqueued next has not run when the load begins
        for tensor in tensors.values():
            tensor.view(torch.uint8).fill_(0x77)

    def compare(tensors: Mapping[str, torch.Tensor], what: str) -> None:
        with torch.cuda.stream(torch.cuda.Stream(device) if on_gpu else None):
            read = {name: tensor.reshape(-1).view(torch.uint8).clone() for name, tensor in tensors.items()}
            wrong.extend(f"{name} {what}" for name in names if not torch.equal(read[name], wanted[name]))

    if on_gpu:
        torch.cuda.synchronize(device)
    for number in range(rounds):
        with torch.cuda.stream(torch.cuda.Stream(device) if on_gpu and number % 2 else None):
            there = {name: torch.empty(shapes[name], dtype=dtypes[name], device=device) for name in names}
            disturb(there)
            if number % 3:
                dlpack_loader.load_into(path, there, strict=False)
                compare(there, "in place")
            else:
                dlpack_loader.load_into(path, there, strict=False, wait=False).wait()
                compare(there, "in place, pending")
            disturb(there)
            del there  # the blocks go back to the allocator with writes pending
            with dlpack_loader.safe_open(path, "pt", device) as reader:
                compare(reader.get_tensors(names), "made")
    return wrong
