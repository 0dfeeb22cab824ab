"""Tensors of torch and NumPy in each of the 22 dtypes, their devices, and torch's record of writes."""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dlpack_loader.backend.mmap import MIN_BYTES
from dlpack_loader.destination import Target, memory_of_dlpack
from dlpack_loader.dtype import BY_CODE, DTYPES, DType
from dlpack_loader.errors import DestinationTypeError, MissingDependencyError, OptionError, UnsupportedError
from dlpack_loader.framework import HOST, describer, framework_named
from dlpack_loader.framework import numpy as for_numpy
from dlpack_loader.framework import torch as for_torch
from dlpack_loader.load import load_file, load_into
from dlpack_loader.reader import safe_open
from dlpack_loader.runtime.arrays import numpy_dtype
from tests.files import save, write_raw
from tests.strategies import Array, unpack

FRAMEWORKS = ("pt", "np")
LARGE = (9, 1 << 15)  # at least MIN_BYTES in every dtype, and not a whole number of pages


def shape_of(name: str) -> tuple[int, ...]:
    return {"small": (3, 8), "large": LARGE, "scalar": (), "none": (0, 8)}[name]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Every dtype as a small tensor, a large one, an empty one and, where it has whole bytes, a scalar."""
    numbers = np.random.default_rng(3)
    header: dict[str, Any] = {}
    contents: dict[str, bytes] = {}
    end = 0
    # Widest first, so that each tensor lies where its dtype allows a view; the JSON is padded to that end.
    for dtype in sorted(DTYPES, key=lambda dtype: -dtype.bits):
        for kind in ("large", "small", "none", "scalar"):
            if kind == "scalar" and dtype.group > 1:
                continue
            nbytes = int(np.prod(shape_of(kind), dtype=int)) * dtype.bits // 8
            name = f"{dtype.code}.{kind}"
            contents[name] = numbers.integers(0, 2 if dtype.code == "BOOL" else 256, nbytes, np.uint8).tobytes()
            header[name] = {"dtype": dtype.code, "shape": shape_of(kind), "data_offsets": [end, end + nbytes]}
            end += nbytes
    raw = _padded(header)
    path = tmp_path_factory.mktemp("dtypes") / "m.safetensors"
    return write_raw(path, raw, b"".join(contents.values())), contents


def _padded(header: dict[str, Any]) -> bytes:
    raw = json.dumps(header).encode()
    return raw + b" " * (-len(raw) % 8)


def shown_bytes(value: Any) -> bytes:
    """The bytes of a contiguous tensor of any dtype."""
    if isinstance(value, torch.Tensor):
        assert value.is_contiguous()
        return ctypes.string_at(value.data_ptr(), value.nbytes) if value.nbytes else b""
    assert value.flags.c_contiguous
    return bytes(value.tobytes())


def expected_shape(framework: str, dtype: DType, shape: tuple[int, ...]) -> tuple[int, ...]:
    if dtype.code == "F4" and framework == "pt":
        return (*shape[:-1], shape[-1] // 2)
    if dtype.code.startswith("F6_"):
        return (*shape[:-1], shape[-1] * 6 // 8)
    return shape


def expected_bytes(framework: str, dtype: DType, raw: bytes) -> bytes:
    if dtype.code == "F4" and framework == "np":
        return unpack(raw, 4).astype(np.uint8).tobytes()
    return raw


def expected_dtype(framework: str, dtype: DType) -> Any:
    if framework == "pt":
        return getattr(torch, dtype.torch or "uint8")
    return np.dtype(np.uint8) if dtype.numpy is None else numpy_dtype(dtype.dlpack)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.code)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("backend", ["mmap", "pread", "auto"])
def test_every_dtype(checkpoint: tuple[Path, dict[str, bytes]], backend: str, framework: str, dtype: DType) -> None:
    path, contents = checkpoint
    with safe_open(path, framework, backend=backend) as reader:
        for name, raw in contents.items():
            code, kind = name.split(".")
            if code == dtype.code:
                value = reader.get_tensor(name)
                assert value.dtype == expected_dtype(framework, dtype)
                assert tuple(value.shape) == expected_shape(framework, dtype, shape_of(kind))
                assert shown_bytes(value) == expected_bytes(framework, dtype, raw)
        assert len(contents[f"{dtype.code}.large"]) > MIN_BYTES


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_large_tensors_are_mapped(checkpoint: tuple[Path, dict[str, bytes]], framework: str) -> None:
    """All of them: F4 for NumPy is the one that has to be unpacked."""
    path, contents = checkpoint
    with safe_open(path, framework, backend="mmap") as reader:
        values = [reader.get_tensor(name) for name in contents if name.endswith(".large")]
        assert len(values) == 22
        assert reader.backend_info().reason == "tensors on the CPU are views of private mappings"


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.code)
def test_every_dtype_in_slices(checkpoint: tuple[Path, dict[str, bytes]], framework: str, dtype: DType) -> None:
    path, contents = checkpoint
    raw = np.frombuffer(contents[f"{dtype.code}.small"], np.uint8).reshape(3, -1)
    half = raw.shape[1] // 2
    with safe_open(path, framework) as reader:
        part = reader.get_slice(f"{dtype.code}.small")[::-2, 4:]
    assert tuple(part.shape) == expected_shape(framework, dtype, (2, 4))
    assert part.dtype == expected_dtype(framework, dtype)
    assert shown_bytes(part) == expected_bytes(framework, dtype, raw[::-2, half:].tobytes())


def test_f4_is_unpacked_over_itself_in_pieces(tmp_path: Path) -> None:
    """More than the pieces of 1 MiB that are unpacked at a time, and not a whole number of them."""
    packed = np.random.default_rng(5).integers(0, 256, (3, 1_100_007), np.uint8)
    header = {"w": {"dtype": "F4", "shape": [3, 2 * 1_100_007], "data_offsets": [0, packed.size]}}
    path = write_raw(tmp_path / "m.safetensors", header, packed.tobytes())
    value = load_file(path, "np")["w"].view(np.uint8)
    expected = np.empty((3, 2 * 1_100_007), np.uint8)
    expected[:, 0::2] = packed & 0x0F
    expected[:, 1::2] = packed >> 4
    assert np.array_equal(value, expected)


def test_the_first_f4_of_a_byte_is_in_its_low_bits(tmp_path: Path) -> None:
    header = {"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    path = write_raw(tmp_path / "m.safetensors", header, b"\x21\xf7")
    value = load_file(path, "np")["w"]
    assert value.astype(np.float32).tolist() == [0.5, 1.0, 6.0, -6.0]
    packed = load_file(path, "pt")["w"]
    assert (packed.dtype, packed.shape, packed.view(torch.uint8).tolist()) == (
        torch.float4_e2m1fn_x2,
        (2,),
        [0x21, 0xF7],
    )


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_f4_that_ends_inside_a_pair_is_refused(tmp_path: Path, framework: str) -> None:
    header = {"w": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}
    path = write_raw(tmp_path / "m.safetensors", header, b"\x21\x43\x65")
    with safe_open(path, framework) as reader:
        with pytest.raises(UnsupportedError, match="requires that the last dim be divisible by 2"):
            reader.get_tensor("w")
        packed = np.zeros(3, np.uint8)
        reader.read_into("w", Target(packed, reinterpret=True))
    assert packed.tolist() == [0x21, 0x43, 0x65]


@pytest.mark.parametrize("code", [dtype.code for dtype in DTYPES])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_made_can_be_filled_again(checkpoint: tuple[Path, dict[str, bytes]], framework: str, code: str) -> None:
    """A tensor that the reader makes is a destination for the same entry, F4 of NumPy apart, which is unpacked."""
    path, contents = checkpoint
    name = f"{code}.small"
    with safe_open(path, framework) as reader:
        value = reader.get_tensor(name)
        if (framework, code) == ("np", "F4"):
            with pytest.raises(DestinationTypeError, match="keeps one element in a byte"):
                reader.read_into(name, value)
            return
        ctypes.memset(value.data_ptr() if framework == "pt" else value.ctypes.data, 1, value.nbytes)
        reader.read_into(name, value)
    assert shown_bytes(value) == contents[name]


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES if dtype.torch and dtype.code != "F4"], ids=lambda dtype: dtype.code
)
def test_torch_memory_is_named_as_its_dlpack_names_it(dtype: DType) -> None:
    tensor = torch.zeros(2, 3, dtype=getattr(torch, str(dtype.torch)))
    assert describer(None)(tensor).dtype == memory_of_dlpack(tensor, None).dtype == dtype.dlpack


# What torch knows of a write


def test_a_write_counts_in_the_tensors_version(tmp_path: Path) -> None:
    tensors = save(tmp_path / "m.safetensors", {"a": torch.ones(3), "b": torch.ones(4)})
    base = torch.zeros(6)
    destinations = {"a": base[:3], "b": torch.zeros(4)}
    before = base._version
    load_into(tmp_path / "m.safetensors", destinations)
    assert base._version > before
    assert destinations["b"]._version > 0
    assert torch.equal(base[:3], tensors["a"])


def test_autograd_notices_that_a_saved_tensor_was_written(tmp_path: Path) -> None:
    save(tmp_path / "m.safetensors", {"w": torch.ones(3)})
    weight, factor = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    product = (weight * factor).sum()
    load_into(tmp_path / "m.safetensors", {"w": factor})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_tensors_without_destination_keep_their_version(tmp_path: Path) -> None:
    save(tmp_path / "m.safetensors", {"a": torch.ones(3)})
    other = torch.zeros(3)
    load_into(tmp_path / "m.safetensors", {"a": torch.zeros(3), "x": other}, strict=False)
    assert other._version == 0


def test_inference_tensors_are_filled(tmp_path: Path) -> None:
    tensors = save(tmp_path / "m.safetensors", {"a": torch.ones(3), "b": torch.ones(4)})
    with torch.inference_mode():
        inference = torch.zeros(3)
    normal = torch.zeros(4)
    load_into(tmp_path / "m.safetensors", {"a": inference, "b": normal})
    assert torch.equal(inference, tensors["a"])
    assert normal._version > 0
    with torch.inference_mode():
        load_into(tmp_path / "m.safetensors", {"a": torch.zeros(3), "b": normal})
    assert torch.equal(normal, tensors["b"])


def test_a_torch_that_counts_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = torch.autograd.graph.increment_version

    def one(tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(type(tensor))
        count(tensor)

    monkeypatch.setattr(torch.autograd.graph, "increment_version", one)
    save(tmp_path / "m.safetensors", {"a": torch.ones(3), "b": torch.ones(4)})
    destinations = {"a": torch.zeros(3), "b": torch.zeros(4)}
    load_into(tmp_path / "m.safetensors", destinations)
    assert all(tensor._version == 1 for tensor in destinations.values())


def test_arrays_and_tensors_in_one_load(tmp_path: Path) -> None:
    tensors = save(tmp_path / "m.safetensors", {"a": torch.ones(3), "b": torch.ones(4)})
    destinations: dict[str, Any] = {"a": np.zeros(3, np.float32), "b": torch.zeros(4)}
    load_into(tmp_path / "m.safetensors", destinations)
    assert np.array_equal(destinations["a"], tensors["a"].numpy())
    assert destinations["b"]._version > 0


# Where tensors are made


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_a_default_device_does_not_redirect(checkpoint: tuple[Path, dict[str, bytes]], backend: str) -> None:
    path, contents = checkpoint
    with torch.device("meta"), safe_open(path, "pt", backend=backend) as reader:
        for name in ("F32.small", "F32.large", "F6_E2M3.large", "F32.none", "F32.scalar"):
            value = reader.get_tensor(name)
            assert value.device.type == "cpu"
            assert shown_bytes(value) == contents[name]


def test_a_default_dtype_does_not_redirect(checkpoint: tuple[Path, dict[str, bytes]]) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert load_file(checkpoint[0])["F32.small"].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("name", ["F32.small", "F32.large", "F6_E2M3.large"])
def test_fake_tensors_are_never_filled(checkpoint: tuple[Path, dict[str, bytes]], backend: str, name: str) -> None:
    with (
        FakeTensorMode(),
        safe_open(checkpoint[0], "pt", backend=backend) as reader,
        pytest.raises(UnsupportedError, match="torch makes a FakeTensor here, which has no memory"),
    ):
        reader.get_tensor(name)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_spellings_of_the_cpu(device: Any) -> None:
    assert for_torch.resolve_device(device) == for_numpy.resolve_device(device) == HOST


@pytest.mark.parametrize(
    ("device", "kind", "text"),
    [
        ("meta", OptionError, "device meta is invalid"),
        ("nonsense", OptionError, "device nonsense is invalid"),
        (None, OptionError, "device None is invalid"),
        (True, OptionError, "device True is invalid"),
        (1.5, OptionError, "device 1.5 is invalid"),
        ("mps", UnsupportedError, "not to device 'mps'"),
    ],
)
def test_other_devices_of_torch(device: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        for_torch.resolve_device(device)
    with pytest.raises(OptionError, match=f"Device {device} is not supported for framework numpy"):
        for_numpy.resolve_device(device)


# Which frameworks there are


@pytest.mark.parametrize(("names", "module"), [(("pt", "torch", "pytorch"), for_torch), (("np", "numpy"), for_numpy)])
def test_names_of_frameworks(names: tuple[str, ...], module: Any) -> None:
    assert all(framework_named(name) is module for name in names)


@pytest.mark.parametrize("name", ["", "PT", "keras", None, torch, ["pt"]])
def test_frameworks_that_there_are_not(name: Any) -> None:
    with pytest.raises(OptionError, match=r"is invalid\. Use one of pt, torch, pytorch, np, numpy, cupy"):
        framework_named(name)


@pytest.mark.parametrize("name", ["mlx", "tf", "paddle"])
def test_frameworks_of_later(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"framework '{name}' is not served by this version"):
        framework_named(name)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make torch impossible to import, as on a machine without it."""
    monkeypatch.delitem(sys.modules, "dlpack_loader.framework.torch")
    monkeypatch.setitem(sys.modules, "torch", None)
    package = importlib.import_module("dlpack_loader.framework")
    monkeypatch.delattr(package, "torch")
    yield
    monkeypatch.undo()


@pytest.mark.usefixtures("no_torch")
def test_a_framework_that_is_not_installed() -> None:
    with pytest.raises(MissingDependencyError, match="framework 'pt' needs the package torch") as caught:
        framework_named("pt")
    assert isinstance(caught.value, ImportError)
    assert caught.value.hint == "pip install torch"


@pytest.mark.usefixtures("no_torch")
def test_arrays_are_filled_without_torch(checkpoint: tuple[Path, dict[str, bytes]]) -> None:
    path, contents = checkpoint
    array: Array = np.zeros((3, 8), np.float32)
    load_into(path, {"F32.small": array}, strict=False)
    assert array.tobytes() == contents["F32.small"]


def test_a_dtype_that_this_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    with pytest.raises(UnsupportedError, match="has no dtype float8_e8m0fnu for F8_E8M0"):
        for_torch.empty(BY_CODE["F8_E8M0"], (2,), 1)
