"""CuPy, by a double of the names that the loader uses of it, whose arrays are on the emulated devices.

Real CuPy needs the CUDA runtime, which does not run over the emulated driver; the GPU script runs it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import ml_dtypes
import numpy as np
import pytest
import torch

from dlpack_loader import Target, framework, load_file, load_into, safe_open
from dlpack_loader.dtype import BY_CODE, DTYPES
from dlpack_loader.errors import (
    DestinationBufferError,
    DeviceError,
    MissingDependencyError,
    OptionError,
    UnsupportedError,
)
from tests.emulation import DeviceMemory, DeviceTensor, Driver, Mode, Stream
from tests.files import write_raw

NATIVE = [dtype for dtype in DTYPES if (dtype.numpy and not dtype.extension) or dtype.code == "BF16"]
LACKING = [dtype for dtype in DTYPES if dtype not in NATIVE]


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


class Double:
    """What the loader uses of CuPy."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.count = 3
        self.capturing = False
        self.bfloat16 = True
        self.stream: Stream | None = None
        self.switches: list[int] = []
        self.module = ModuleType("cupy")
        self.module.__dict__.update(
            __version__="14.2.0",
            ndarray=Array,
            empty=self.empty,
            uint8=np.uint8,
            uint16=np.uint16,
            cuda=SimpleNamespace(
                Device=type("Device", (Device,), {"double": self}),
                get_current_stream=lambda: SimpleNamespace(is_capturing=lambda: self.capturing),
                runtime=SimpleNamespace(
                    CUDARuntimeError=CUDARuntimeError,
                    getDeviceCount=self.devices,
                    getDevice=self.current,
                    is_hip=False,
                ),
            ),
        )

    def devices(self) -> int:
        if not self.count:
            raise CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")
        return self.count

    def current(self) -> int:
        return self.driver.current_device("cuda") or 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        kind = np.dtype(dtype)
        if kind.kind == "V" and not self.bfloat16:
            raise ValueError(f"Unsupported dtype {kind}")
        memory = self.driver.memory(self.current(), max(1, prod(shape) * kind.itemsize))
        memory.fill(0xA5)
        if self.stream is not None:
            self.stream.write(memory, b"\x77" * memory.nbytes)
        return Array(self, memory, shape, kind)


class Device:
    """As ``cupy.cuda.Device``: without a number it is the current one."""

    double: Double

    def __init__(self, number: int | None = None) -> None:
        self.id = self.double.current() if number is None else number

    def __enter__(self) -> Self:
        assert self.double.current() == self.id  # so that nothing is switched, and no context made by going back
        self.double.switches.append(self.id)
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Array:
    """As ``cupy.ndarray``."""

    def __init__(self, double: Double, memory: DeviceMemory, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.double, self.memory, self.shape, self.dtype = double, memory, shape, dtype
        self.itemsize = dtype.itemsize
        self.strides = tuple(prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape)))

    def reshape(self, size: int) -> Array:
        assert size == -1
        return Array(self.double, self.memory, (prod(self.shape),), self.dtype)

    def view(self, dtype: Any) -> Array:
        kind = np.dtype(dtype)
        shape = (*self.shape[:-1], self.shape[-1] * self.itemsize // kind.itemsize)
        return Array(self.double, self.memory, shape, kind)

    def bytes(self) -> bytes:
        """Its bytes as they are now."""
        return self.memory.read()[: prod(self.shape) * self.itemsize]

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.memory.device)

    def __dlpack__(self, **options: Any) -> object:
        code = {"u": 1, "i": 0, "f": 2, "c": 5, "b": 6, "V": 4}[self.dtype.kind]
        triple = (code, self.itemsize * 8, 1)
        return DeviceTensor(self.memory, self.shape, triple, stream=self.double.stream).__dlpack__(**options)


@pytest.fixture
def cupy(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    double = Double(driver)
    monkeypatch.setitem(sys.modules, "cupy", double.module)
    monkeypatch.delitem(sys.modules, "dlpack_loader.framework.cupy", raising=False)
    module = importlib.import_module("dlpack_loader.framework.cupy")
    monkeypatch.setitem(sys.modules, "dlpack_loader.framework.cupy", module)
    monkeypatch.setattr(framework, "cupy", module, raising=False)
    yield double
    monkeypatch.undo()
    sys.modules.pop("dlpack_loader.framework.cupy", None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Every dtype as a tensor of (3, 8)."""
    numbers = np.random.default_rng(9)
    header: dict[str, Any] = {}
    contents: dict[str, bytes] = {}
    end = 0
    for dtype in DTYPES:
        contents[dtype.code] = numbers.bytes(3 * dtype.bits)
        header[dtype.code] = {"dtype": dtype.code, "shape": (3, 8), "data_offsets": [end, end + 3 * dtype.bits]}
        end += 3 * dtype.bits
    path = tmp_path_factory.mktemp("cupy") / "m.safetensors"
    return write_raw(path, header, b"".join(contents.values())), contents


# Arrays


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("dtype", NATIVE, ids=lambda dtype: dtype.code)
def test_the_dtypes_that_cupy_has(
    cupy: Double, driver: Driver, checkpoint: tuple[Path, dict[str, bytes]], dtype: Any, mode: Mode
) -> None:
    path, contents = checkpoint
    driver.mode = mode
    cupy.stream = driver.stream(1)
    with safe_open(path, "cupy", "cuda:1") as reader:
        value = reader.get_tensor(dtype.code)
        part = reader.get_slice(dtype.code)[::-2, 3:]
        none = reader.get_slice(dtype.code)[:0]
        scalar = reader.get_slice(dtype.code)[1, 2]
    assert isinstance(value, Array)
    expected = np.frombuffer(contents[dtype.code], f"V{dtype.bits // 8}").reshape(3, 8)
    assert value.dtype == np.dtype(getattr(ml_dtypes, str(dtype.numpy)) if dtype.extension else dtype.numpy)
    assert (value.shape, part.shape, none.shape, scalar.shape) == ((3, 8), (2, 5), (0, 8), ())
    assert (value.bytes(), part.bytes(), none.bytes()) == (expected.tobytes(), expected[::-2, 3:].tobytes(), b"")
    assert scalar.bytes() == expected[1, 2].tobytes()


@pytest.mark.parametrize("dtype", LACKING, ids=lambda dtype: dtype.code)
def test_the_dtypes_that_cupy_lacks(cupy: Double, checkpoint: tuple[Path, dict[str, bytes]], dtype: Any) -> None:
    path, contents = checkpoint
    with safe_open(path, "cupy", 0) as reader:
        with pytest.raises(UnsupportedError, match=f"CuPy 14.2.0 has no dtype for {dtype.code} .*cupy.uint8") as caught:
            reader.get_tensor(dtype.code)
        assert (caught.value.tensor, caught.value.file) == (dtype.code, str(path))
        bits: Any = cupy.empty((3, dtype.bits), np.uint8)
        reader.read_into(dtype.code, Target(bits, reinterpret=True))
    assert bits.bytes() == contents[dtype.code]


def test_bits_on_request_for_a_whole_checkpoint(cupy: Double, checkpoint: tuple[Path, dict[str, bytes]]) -> None:
    path, contents = checkpoint
    made: dict[str, Array] = {}

    def resolve(entry: Any) -> Target:
        width = max(BY_CODE[entry.dtype].bits // 8, 1)
        made[entry.name] = cupy.empty((3, entry.nbytes // 3 // width), f"u{width}")
        return Target(made[entry.name], reinterpret=True)

    load_into(path, resolve)
    assert {name: array.bytes() for name, array in made.items()} == contents


def test_a_cupy_without_bfloat16(cupy: Double, checkpoint: tuple[Path, dict[str, bytes]]) -> None:
    cupy.bfloat16 = False
    with safe_open(checkpoint[0], "cupy", 0) as reader:
        with pytest.raises(UnsupportedError, match=r"has no dtype for BF16 .*cupy.uint16"):
            reader.get_tensor("BF16")
        bits: Any = cupy.empty((3, 8), np.uint16)
        reader.read_into("BF16", Target(bits, reinterpret=True))
    assert bits.bytes() == checkpoint[1]["BF16"]


def test_one_array_that_cupy_lacks_stops_the_load_before_it_reads(
    cupy: Double, driver: Driver, checkpoint: tuple[Path, dict[str, bytes]]
) -> None:
    with pytest.raises(UnsupportedError, match="has no dtype for F4"):
        load_file(checkpoint[0], "cupy", "cuda")
    assert driver.executed() == []


# Devices


@pytest.mark.parametrize(
    ("device", "number"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2), (1, 1), (torch.device("cuda", 1), 1)]
)
def test_spellings_of_a_device(
    cupy: Double, driver: Driver, checkpoint: tuple[Path, dict[str, bytes]], device: Any, number: int
) -> None:
    with safe_open(checkpoint[0], "cupy", device) as reader:
        value = reader.get_tensor("F32")
    assert value.memory.device == number
    assert cupy.switches == [number]
    assert [driver.context(other).uses for other in range(3) if other != number] == [0, 0]


def test_a_device_object_and_the_current_device(
    cupy: Double, driver: Driver, checkpoint: tuple[Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = cupy.module.cuda.Device
    assert framework.framework_named("cupy").resolve_device(device(2)) == (2, 2)
    monkeypatch.setattr(cupy.module.cuda.runtime, "getDevice", lambda: 1)
    assert framework.framework_named("cupy").resolve_device("cuda") == (2, 1)
    monkeypatch.setattr(cupy.module.cuda.runtime, "is_hip", True)
    assert framework.framework_named("cupy").resolve_device(0) == (10, 0)


@pytest.mark.parametrize("device", ["cpu", "gpu", "cuda:", "cuda:-1", "cuda:01", "cuda:x", "CUDA", None, True, 1.5])
def test_spellings_of_no_device(cupy: Double, checkpoint: tuple[Path, dict[str, bytes]], device: Any) -> None:
    with pytest.raises(OptionError, match=rf"Device {device} is not supported for framework cupy.*device=.cuda."):
        safe_open(checkpoint[0], "cupy", device)


def test_the_default_device_is_no_device_of_cupy(cupy: Double, checkpoint: tuple[Path, dict[str, bytes]]) -> None:
    with pytest.raises(OptionError, match=r'Device cpu is not supported for framework cupy\. Use device="cuda"'):
        load_file(checkpoint[0], "cupy")


@pytest.mark.parametrize("device", [3, -1, "cuda:3", "cuda:999999999"])
def test_devices_that_there_are_not(cupy: Double, checkpoint: tuple[Path, dict[str, bytes]], device: Any) -> None:
    with pytest.raises(OptionError, match="this process sees 3, numbered from 0"):
        safe_open(checkpoint[0], "cupy", device)


def test_no_driver(cupy: Double, checkpoint: tuple[Path, dict[str, bytes]]) -> None:
    cupy.count = 0
    for device in ("cuda", "cuda:0", 0):
        with pytest.raises(DeviceError, match=r"cudaErrorInsufficientDriver.*CUDA_VISIBLE_DEVICES"):
            safe_open(checkpoint[0], "cupy", device)


# What is refused


def test_captures(cupy: Double, driver: Driver, checkpoint: tuple[Path, dict[str, bytes]]) -> None:
    array = cupy.empty((3, 8), np.float32)
    with safe_open(checkpoint[0], "cupy", 0) as reader:
        cupy.capturing = True
        with pytest.raises(DeviceError, match="CuPy's current stream is capturing"):
            reader.get_tensor("F32")
        with pytest.raises(DeviceError, match="CuPy's current stream is capturing"):
            reader.read_into("F32", array)
    assert driver.executed() == []


def test_strides_that_an_export_would_round(cupy: Double, checkpoint: tuple[Path, dict[str, bytes]]) -> None:
    array = cupy.empty((3, 8), np.float32)
    array.strides = (33, 4)
    with (
        safe_open(checkpoint[0], "np") as reader,
        pytest.raises(DestinationBufferError, match="not multiples of its itemsize"),
    ):
        reader.read_into("F32", array)


def test_arrays_are_destinations(cupy: Double, driver: Driver, checkpoint: tuple[Path, dict[str, bytes]]) -> None:
    path, contents = checkpoint
    driver.mode = Mode.DEFERRED
    cupy.stream = driver.stream(0)
    arrays: dict[str, Any] = {code: cupy.empty((3, 8), BY_CODE[code].numpy) for code in ("F32", "I64", "BOOL")}
    load_into(path, arrays, strict=False)
    assert all(array.bytes() == contents[code] for code, array in arrays.items())


def test_cupy_that_is_not_installed(checkpoint: tuple[Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dlpack_loader.framework.cupy", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingDependencyError, match=r"needs the package cupy, which is not installed.*cupy-cuda13x"):
        safe_open(checkpoint[0], "cupy", "cuda")
