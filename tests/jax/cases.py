"""What ``framework="jax"`` does, on eight virtual devices of the CPU; run by ``test_jax`` in a process of its own.

JAX starts threads, and Python warns of a fork in a process that has threads; other tests fork.
"""

from __future__ import annotations

import gc
import os
import pickle
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.flax
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.numpy import save_file

from dlpack_loader import flatten, load_file, load_into, making, safe_open, unflatten
from dlpack_loader.backend import BackendInfo
from dlpack_loader.destination import Memory
from dlpack_loader.dtype import BY_CODE, DTYPES, DType
from dlpack_loader.errors import (
    DestinationTypeError,
    DeviceError,
    MisalignedSelectionError,
    MissingDependencyError,
    OptionError,
    StorageError,
    UnsupportedError,
)
from dlpack_loader.filling import fill, plan_of
from dlpack_loader.framework import Allocation
from dlpack_loader.framework import jax as for_jax
from dlpack_loader.header import Entry
from dlpack_loader.runtime.arrays import numpy_dtype
from dlpack_loader.transfer import LoadReport
from tests.emulation import Driver
from tests.files import write_raw
from tests.strategies import unpack

P = PartitionSpec
WIDE = ("F64", "I64", "U64")
DEVICES: list[Any] = jax.devices()
ROWS = NamedSharding(Mesh(np.array(DEVICES), ("x",)), P("x"))
GRID = Mesh(np.array(DEVICES).reshape(2, 4), ("a", "b"))


def test_there_are_eight_devices() -> None:
    assert len(DEVICES) == 8


# What is made


@pytest.fixture(scope="module")
def every_dtype(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Every dtype in several shapes, at addresses of the file that suit no dtype."""
    numbers = np.random.default_rng(11)
    header: dict[str, Any] = {"odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}
    contents = {"odd": b"abc"}
    end = 3
    for dtype in DTYPES:
        for kind, shape in (("matrix", (16, 24)), ("none", (0, 8)), ("scalar", ()), ("large", (8, 40_000))):
            if kind == "scalar" and dtype.group > 1:
                continue
            nbytes = int(np.prod(shape, dtype=int)) * dtype.bits // 8
            raw = numbers.integers(0, 2 if dtype.code == "BOOL" else 256, nbytes, np.uint8).tobytes()
            name = f"{dtype.code}.{kind}"
            header[name] = {"dtype": dtype.code, "shape": shape, "data_offsets": [end, end + nbytes]}
            contents[name] = raw
            end += nbytes
    return write_raw(tmp_path_factory.mktemp("dtypes") / "m.safetensors", header, b"".join(contents.values())), contents


def shown(dtype: DType, raw: bytes) -> bytes:
    """The bytes of JAX's elements, as NumPy shows them."""
    return unpack(raw, 4).astype(np.uint8).tobytes() if dtype.code == "F4" else raw


def expected(dtype: DType) -> np.dtype[Any]:
    return np.dtype(np.uint8) if dtype.numpy is None else numpy_dtype(dtype.dlpack)


PLACES = {"cpu": "cpu", "cpu:5": "cpu:5", "spread": NamedSharding(Mesh(np.array(DEVICES[4:6]), ("x",)), P(None, "x"))}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.code)
def test_every_dtype(every_dtype: tuple[Path, dict[str, bytes]], dtype: DType, place: str) -> None:
    path, contents = every_dtype
    kinds = ["matrix", "none", "large", *(["scalar"] if dtype.group == 1 and place != "spread" else [])]
    with jax.enable_x64(dtype.code in WIDE), safe_open(path, "jax", PLACES[place]) as reader:
        arrays = reader.get_tensors([f"{dtype.code}.{kind}" for kind in kinds])
        for name, array in arrays.items():
            assert isinstance(array, jax.Array)
            assert array.dtype == expected(dtype)
            shape = reader.entry(name).shape
            if dtype.numpy is None:
                shape = (*shape[:-1], shape[-1] * 6 // 8)
            assert array.shape == shape
            assert np.asarray(array).tobytes() == shown(dtype, contents[name])
            wanted = {"cpu": DEVICES[:1], "cpu:5": DEVICES[5:6], "spread": DEVICES[4:6]}[place]
            assert array.sharding.device_set == set(wanted)
            assert array.committed


def test_flax_is_another_name(every_dtype: tuple[Path, dict[str, bytes]]) -> None:
    with safe_open(every_dtype[0], "flax") as reader:
        assert np.asarray(reader.get_tensor("odd")).tobytes() == b"abc"


@pytest.mark.parametrize("code", WIDE)
def test_wide_dtypes_are_not_narrowed(every_dtype: tuple[Path, dict[str, bytes]], code: str) -> None:
    path, contents = every_dtype
    with safe_open(path, "jax") as reader:
        for call in (reader.get_tensor, lambda name: reader.get_slice(name)[:2], lambda name: reader.get_tensors()):
            with pytest.raises(UnsupportedError, match="64-bit dtypes are switched off") as caught:
                call(f"{code}.matrix")
            assert caught.value.tensor is not None
            assert caught.value.tensor.split(".")[0] in WIDE
            assert 'jax.config.update("jax_enable_x64", True)' in str(caught.value)
        with jax.enable_x64(True):
            array = reader.get_tensor(f"{code}.matrix")
        assert (array.dtype, np.asarray(array).tobytes()) == (expected(BY_CODE[code]), contents[f"{code}.matrix"])


def test_the_first_f4_of_a_byte_is_in_its_low_bits(tmp_path: Path) -> None:
    header = {"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    path = write_raw(tmp_path / "m.safetensors", header, b"\x21\xf7")
    assert load_file(path, "jax")["w"].astype(jnp.float32).tolist() == [0.5, 1.0, 6.0, -6.0]


def test_slices(every_dtype: tuple[Path, dict[str, bytes]]) -> None:
    path, contents = every_dtype
    whole = np.frombuffer(contents["BF16.matrix"], ml_dtypes.bfloat16).reshape(16, 24)
    with safe_open(path, "jax", "cpu:2") as reader:
        for index in (np.s_[::-2, 4:], np.s_[::-1], np.s_[3], np.s_[..., 5], np.s_[3, 4], np.s_[:0], np.s_[2:4]):
            part = reader.get_slice("BF16.matrix")[index]
            assert part.shape == whole[index].shape
            assert np.asarray(part).tobytes() == whole[index].tobytes()
            assert part.devices() == {DEVICES[2]}


# Whose memory it is


class Made:
    """The memory that was allocated for arrays: addresses, and whether it is still there."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pointers: list[int] = []
        self.blocks: list[weakref.ref[Any]] = []
        self._empty = for_jax.empty
        patch.setattr(for_jax, "empty", self.empty)

    def empty(self, *wanted: Any) -> Allocation:
        made = self._empty(*wanted)
        assert isinstance(made.memory, Memory)
        self.pointers.append(made.memory.pointer)
        block = made.value
        while block.base is not None:
            block = block.base
        assert block.nbytes < made.memory.nbytes + 64
        self.blocks.append(weakref.ref(block))
        return made

    def alive(self) -> int:
        gc.collect()
        return sum(block() is not None for block in self.blocks)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


def pointers(array: Any) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.code != "F4"], ids=lambda dtype: dtype.code)
def test_the_memory_that_was_read_into_is_the_arrays(
    every_dtype: tuple[Path, dict[str, bytes]], made: Made, dtype: DType
) -> None:
    with jax.enable_x64(dtype.code in WIDE), safe_open(every_dtype[0], "jax", "cpu:1") as reader:
        for kind in ("matrix", "large"):
            made.pointers.clear()
            array = reader.get_tensor(f"{dtype.code}.{kind}")
            assert made.pointers == [array.unsafe_buffer_pointer()]
            assert array.unsafe_buffer_pointer() % 64 == 0


def test_f4_is_copied_and_its_bytes_are_let_go(every_dtype: tuple[Path, dict[str, bytes]], made: Made) -> None:
    with safe_open(every_dtype[0], "jax") as reader:
        array = reader.get_tensor("F4.large").block_until_ready()
    assert array.unsafe_buffer_pointer() not in made.pointers
    assert made.alive() == 0


def test_pieces_are_not_copied_and_replicas_share_one(tmp_path: Path, made: Made) -> None:
    save_file({"w": np.arange(64, dtype=np.float32).reshape(8, 8)}, tmp_path / "m.safetensors")
    rows = load_file(tmp_path / "m.safetensors", "jax", NamedSharding(GRID, P("a")))["w"]
    assert len(made.pointers) == 2
    assert sorted(pointers(rows)) == sorted(made.pointers * 4)
    whole = load_file(tmp_path / "m.safetensors", "jax", NamedSharding(GRID, P()))["w"]
    assert pointers(whole) == made.pointers[2:] * 8


def test_an_array_keeps_its_own_memory_and_no_more(tmp_path: Path, made: Made) -> None:
    tensors: dict[str, Any] = {f"w{k}": np.full((100, 100), k, np.float32) for k in range(5)}
    save_file(tensors, tmp_path / "m.safetensors")
    arrays = load_file(tmp_path / "m.safetensors", "jax")
    assert made.alive() == 5
    kept = arrays["w3"]
    del arrays
    assert made.alive() == 1
    row = kept[50]  # a copy, as everything that JAX computes
    assert np.array_equal(np.asarray(kept), tensors["w3"])
    kept.delete()
    assert made.alive() == 0
    assert row.tolist() == [3.0] * 100


def test_a_view_of_numpys_keeps_the_memory(tmp_path: Path, made: Made) -> None:
    save_file({"w": np.ones(1000, np.float32)}, tmp_path / "m.safetensors")
    view = np.asarray(load_file(tmp_path / "m.safetensors", "jax")["w"])
    assert view.ctypes.data == made.pointers[0]
    assert made.alive() == 1
    assert not view.flags.writeable
    del view
    assert made.alive() == 0


def test_a_donated_array_does_not_change_its_replicas(tmp_path: Path) -> None:
    save_file({"w": np.ones(1000, np.float32)}, tmp_path / "m.safetensors")
    array = load_file(tmp_path / "m.safetensors", "jax", NamedSharding(GRID, P()))["w"]
    replicas = [np.asarray(shard.data) for shard in array.addressable_shards]
    grow: Any = jax.jit(lambda value: value + 1, donate_argnums=0)
    grown = grow(array).block_until_ready()
    assert np.array_equal(np.asarray(grown), np.full(1000, 2.0))
    assert all((replica == 1).all() for replica in replicas)


def test_the_file_may_change_later(tmp_path: Path) -> None:
    """Even where its tensors are large and aligned, so that another framework would have mapped them."""
    raw = np.ones((1 << 20) // 4, np.float32).tobytes()
    header = b'{"w":{"dtype":"F32","shape":[262144],"data_offsets":[0,1048576]}}'
    path = write_raw(tmp_path / "m.safetensors", header.ljust(120), raw)
    array = load_file(path, "jax")["w"]
    with path.open("r+b") as file:
        file.seek(128)
        file.write(b"\0" * len(raw))
    assert np.asarray(array).tobytes() == raw


# Where it goes


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    numbers = np.random.default_rng(2)
    tensors: dict[str, Any] = {
        "b": numbers.standard_normal(48).astype(np.float32),
        "cube": numbers.standard_normal((8, 16, 24)).astype(np.float16),
        "w": numbers.standard_normal((64, 48)).astype(np.float32),
        "half": numbers.standard_normal((16, 32)).astype(ml_dtypes.bfloat16),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors", tensors


@pytest.mark.parametrize(
    ("device", "number"),
    [
        ("cpu", 0),
        ("cpu:0", 0),
        ("cpu:3", 3),
        (6, 6),
        (np.int64(2), 2),
        (torch.device("cpu"), 0),
        (DEVICES[4], 4),
        (SingleDeviceSharding(DEVICES[7]), 7),
    ],
    ids=repr,
)
def test_spellings_of_devices(weights: tuple[Path, dict[str, Any]], device: Any, number: int) -> None:
    for array in load_file(weights[0], "jax", device).values():
        assert array.devices() == {DEVICES[number]}
        assert array.sharding == SingleDeviceSharding(DEVICES[number])


def test_a_bare_name_is_the_default_device(weights: tuple[Path, dict[str, Any]]) -> None:
    with jax.default_device(DEVICES[5]):
        assert load_file(weights[0], "jax", "cpu")["b"].devices() == {DEVICES[5]}
        assert load_file(weights[0], "jax", "cpu:0")["b"].devices() == {DEVICES[0]}
    assert load_file(weights[0], "jax", "cpu")["b"].devices() == {DEVICES[0]}


@pytest.mark.parametrize(
    ("device", "kind", "text"),
    [
        ("nonsense", OptionError, "Device nonsense is not supported for framework jax"),
        ("cpu:", OptionError, "is not supported"),
        ("cpu3", OptionError, "is not supported"),
        ("meta", OptionError, "is not supported"),
        ("", OptionError, "is not supported"),
        (None, OptionError, "Device None is not supported"),
        (True, OptionError, "Device True is not supported"),
        (1.5, OptionError, "Device 1.5 is not supported"),
        (-1, OptionError, "Device -1 is not supported"),
        (P("x"), OptionError, "is not supported"),
        (GRID, OptionError, r"Device Mesh\(.* is not supported for framework jax"),
        (NamedSharding(GRID.abstract_mesh, P("a")), OptionError, "has no devices to load to"),
        ({"w": NamedSharding(GRID.abstract_mesh, P())}, OptionError, "has no devices to load to"),
        ("cpu:8", OptionError, "there is no device cpu:8: JAX has 8 in this process"),
        (8, OptionError, "there is no device 8"),
        ({"w": "nonsense"}, OptionError, "Device nonsense"),
        ("cuda", DeviceError, "JAX finds no device for 'cuda': Unknown backend"),
        ("cuda:1", DeviceError, 'or load with device="cpu"'),
        ("gpu", DeviceError, "JAX finds no device for 'gpu'"),
        ("rocm:0", DeviceError, "JAX finds no device for 'rocm:0'"),
    ],
    ids=repr,
)
def test_devices_that_there_are_not(
    weights: tuple[Path, dict[str, Any]], device: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        safe_open(weights[0], "jax", device)


def test_a_mapping_from_names(weights: tuple[Path, dict[str, Any]]) -> None:
    path, tensors = weights
    places = {"w": ROWS, "b": "cpu:2", "cube": DEVICES[1], "another": ROWS}
    with safe_open(path, "jax", places) as reader:
        arrays = reader.get_tensors(["w", "b", "cube"])
        assert arrays["w"].sharding == ROWS
        assert arrays["b"].devices() == {DEVICES[2]}
        assert arrays["cube"].devices() == {DEVICES[1]}
        assert all(np.array_equal(np.asarray(array), tensors[name]) for name, array in arrays.items())
        with pytest.raises(OptionError, match="the mapping of devices does not name this tensor") as caught:
            reader.get_tensors()
        assert caught.value.tensor == "half"


def test_a_function_of_the_entry(weights: tuple[Path, dict[str, Any]]) -> None:
    path, tensors = weights
    asked = []

    def choose(entry: Entry) -> Any:
        asked.append(entry.name)
        return ROWS if len(entry.shape) == 2 else "cpu:4"

    arrays = load_file(path, "jax", choose)
    assert sorted(asked) == sorted(tensors)  # each once
    assert [name for name, array in arrays.items() if array.sharding == ROWS] == ["half", "w"]
    assert all(np.array_equal(np.asarray(array), tensors[name]) for name, array in arrays.items())
    with pytest.raises(OptionError, match="Device None is not supported") as caught:
        load_file(path, "jax", lambda entry: None)
    assert caught.value.tensor == "b"


SPECS = [P(), P("a"), P("b"), P(None, "b"), P("b", "a"), P("a", "b"), P(("a", "b")), P(None, ("b", "a")), P(None, "a")]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_result_is_that_of_flax_and_device_put(weights: tuple[Path, dict[str, Any]], spec: Any) -> None:
    path, _ = weights
    sharding, whole = NamedSharding(GRID, spec), NamedSharding(GRID, P())
    ours = load_file(path, "jax", lambda entry: sharding if len(entry.shape) > 1 else whole)
    theirs = {
        name: jax.device_put(array, sharding if array.ndim > 1 else whole)
        for name, array in safetensors.flax.load_file(path).items()
    }
    assert list(ours) == sorted(theirs)
    for name, array in ours.items():
        other = theirs[name]
        assert (array.dtype, array.shape, array.sharding) == (other.dtype, other.shape, other.sharding)
        assert array.committed
        assert np.array_equal(np.asarray(array), np.asarray(other))
        for mine, their in zip(array.addressable_shards, other.addressable_shards, strict=True):
            assert (mine.device, mine.index, mine.replica_id) == (their.device, their.index, their.replica_id)
            assert np.array_equal(np.asarray(mine.data), np.asarray(their.data))


def test_a_mesh_in_another_order(weights: tuple[Path, dict[str, Any]]) -> None:
    path, tensors = weights
    sharding = NamedSharding(Mesh(np.array([DEVICES[k] for k in (5, 2, 7, 0)]), ("x",)), P(None, "x"))
    array = load_file(path, "jax", {"w": sharding, **dict.fromkeys(("b", "cube", "half"), "cpu")})["w"]
    assert np.array_equal(np.asarray(array), tensors["w"])
    assert array.sharding == sharding
    last = next(shard for shard in array.addressable_shards if shard.device == DEVICES[0])
    assert np.array_equal(np.asarray(last.data), tensors["w"][:, 36:])


def test_computing_with_what_was_loaded(weights: tuple[Path, dict[str, Any]]) -> None:
    path, tensors = weights
    arrays = load_file(path, "jax", lambda entry: NamedSharding(GRID, P("a", "b") if entry.name == "w" else P()))
    product = jax.jit(lambda w, b: w @ b)(arrays["w"], arrays["b"])
    assert np.allclose(np.asarray(product), tensors["w"] @ tensors["b"], rtol=1e-4, atol=1e-4)


def test_slices_are_spread_by_their_own_shape(weights: tuple[Path, dict[str, Any]]) -> None:
    path, tensors = weights
    with safe_open(path, "jax", NamedSharding(GRID, P("a", "b"))) as reader:
        for name, index in (
            ("w", np.s_[::-2, 8:]),
            ("w", np.s_[4:60:7, ::12]),
            ("cube", np.s_[3]),
            ("cube", np.s_[:, -1, ::3]),
            ("cube", np.s_[..., 2:10, 5]),
        ):
            part = reader.get_slice(name)[index]
            assert np.array_equal(np.asarray(part), tensors[name][index])
            assert part.sharding == NamedSharding(GRID, P("a", "b"))


def test_a_slice_of_fewer_dimensions_than_its_sharding(weights: tuple[Path, dict[str, Any]]) -> None:
    with safe_open(weights[0], "jax", ROWS) as reader:
        part = reader.get_slice("w")
        with pytest.raises(OptionError, match=r"a shape of \[\] can't be spread by .*: it is for more dimensions"):
            part[3, 4]


@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "b"), P(("b", "a")), P("b", "a")], ids=str)
def test_as_device_put_spreads_them(weights: tuple[Path, dict[str, Any]], spec: Any) -> None:
    """With an axis of one device in the mesh, and copied by pickle too."""
    mesh = Mesh(np.array(DEVICES)[[3, 1, 0, 2, 7, 6, 5, 4]].reshape(2, 1, 4), ("a", "one", "b"))
    sharding = NamedSharding(mesh, spec)
    path, tensors = weights
    with safe_open(path, "jax", sharding) as reader:
        array = reader.get_tensor("w")
    wanted = jax.device_put(tensors["w"], sharding)
    assert (array.sharding, array.committed) == (wanted.sharding, wanted.committed)
    for ours, theirs in zip(array.addressable_shards, wanted.addressable_shards, strict=True):
        assert (ours.device, ours.index, ours.replica_id) == (theirs.device, theirs.index, theirs.replica_id)
        assert np.array_equal(np.asarray(ours.data), np.asarray(theirs.data))
    assert np.array_equal(np.asarray(pickle.loads(pickle.dumps(array))), tensors["w"])


@pytest.mark.parametrize(
    ("name", "spec"), [("b", P("a", "b")), ("w", P("a", None, "b")), ("rest", P("a"))], ids=["rank", "more", "uneven"]
)
def test_shapes_that_a_sharding_does_not_suit(tmp_path: Path, name: str, spec: Any) -> None:
    shapes = {"b": (8,), "w": (8, 8), "rest": (9, 2)}
    save_file({key: np.zeros(shape, np.float32) for key, shape in shapes.items()}, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", "jax", NamedSharding(GRID, spec)) as reader:
        with pytest.raises(OptionError, match="can't be spread by NamedSharding") as caught:
            reader.get_tensor(name)
        assert caught.value.tensor == name
        assert list(shapes[name]) == list(reader.entry(name).shape)


def test_sub_bytes_are_cut_where_a_byte_ends(tmp_path: Path) -> None:
    raw = np.random.default_rng(1).integers(0, 256, 48, np.uint8).tobytes()
    header = {
        "f4": {"dtype": "F4", "shape": [2, 24], "data_offsets": [0, 24]},
        "f6": {"dtype": "F6_E2M3", "shape": [2, 16], "data_offsets": [24, 48]},
    }
    path = write_raw(tmp_path / "m.safetensors", header, raw)
    four = load_file(path, "jax", NamedSharding(GRID, P("a", "b")))
    assert np.asarray(four["f4"]).tobytes() == unpack(raw[:24], 4).astype(np.uint8).tobytes()
    assert (four["f6"].shape, np.asarray(four["f6"]).tobytes()) == ((2, 12), raw[24:])
    assert [shard.data.shape for shard in four["f4"].addressable_shards] == [(1, 6)] * 8
    assert [shard.data.shape for shard in four["f6"].addressable_shards] == [(1, 3)] * 8
    with safe_open(path, "jax", NamedSharding(Mesh(np.array(DEVICES), ("x",)), P(None, "x"))) as reader:
        for name in ("f4", "f6"):  # 24 F4 by 8 are 3, and 16 F6 are 2
            with pytest.raises(MisalignedSelectionError, match="begins or ends inside a byte") as caught:
                reader.get_tensor(name)
            assert caught.value.tensor == name


def test_other_kinds_of_host_memory(weights: tuple[Path, dict[str, Any]]) -> None:
    path, tensors = weights
    sharding = NamedSharding(ROWS.mesh, P("x"), memory_kind="pinned_host")
    array = load_file(path, "jax", sharding)["w"]
    assert array.sharding.memory_kind == "pinned_host"
    assert np.array_equal(np.asarray(array), tensors["w"])


# What is read


class Reports:
    """The reports of the loads that made arrays, and what each planned."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reports: list[LoadReport] = []
        self._fill = fill
        patch.setattr(making, "fill", self.fill)

    def fill(self, *wanted: Any) -> LoadReport:
        self.reports.append(self._fill(*wanted))
        return self.reports[-1]


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[LoadReport]:
    return Reports(monkeypatch).reports


def bytes_of_the_process() -> int:
    """Bytes that this process has read by system calls, as Linux counts them."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(facts["rchar"])


SHAPE = (2048, 1024)
NBYTES = 2048 * 1024 * 4


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("matrix") / "m.safetensors"
    whole = np.random.default_rng(4).standard_normal(SHAPE).astype(np.float32)
    save_file({"w": whole}, path)
    return path, whole


@pytest.mark.parametrize(
    ("sharding", "most"),
    [
        (ROWS, 1.05),
        (NamedSharding(GRID, P("b")), 1.05),  # on two devices each, and read once
        (NamedSharding(GRID, P("a")), 1.05),
        (NamedSharding(GRID, P()), 1.05),
        (NamedSharding(ROWS.mesh, P(None, "x")), 2.0),
        (NamedSharding(GRID, P(None, "b")), 2.0),
        (NamedSharding(GRID, P(None, "a")), 2.0),
        (NamedSharding(GRID, P("a", "b")), 2.0),
        (NamedSharding(GRID, P("b", "a")), 2.0),
    ],
    ids=lambda value: str(getattr(value, "spec", value)),
)
@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="this system does not count what a process reads")
def test_no_more_is_read_than_the_devices_need(
    matrix: tuple[Path, Any], reports: list[LoadReport], sharding: Any, most: float
) -> None:
    """Of the whole file, since all eight devices are of this process; each part of it once, but for steps."""
    path, whole = matrix
    before = bytes_of_the_process()
    array = load_file(path, "jax", sharding)["w"]
    counted = bytes_of_the_process() - before
    assert np.array_equal(np.asarray(array), whole)
    (report,) = reports
    assert report.bytes_written == NBYTES
    assert report.bytes_read <= most * NBYTES
    assert counted <= most * NBYTES + (1 << 16)  # the header, and what the interpreter reads


@pytest.mark.parametrize(("spec", "most"), [(P("x"), 1.05), (P(None, "x"), 2.0)], ids=["rows", "columns"])
@pytest.mark.parametrize("k", [0, 3, 7])
def test_one_device_reads_its_shard(
    matrix: tuple[Path, Any], reports: list[LoadReport], spec: Any, most: float, k: int
) -> None:
    path, whole = matrix
    index = NamedSharding(ROWS.mesh, spec).addressable_devices_indices_map(SHAPE)[DEVICES[k]]
    with safe_open(path, "jax", DEVICES[k]) as reader:
        part = reader.get_slice("w")[index]
    assert np.array_equal(np.asarray(part), whole[index])
    assert reports[0].bytes_written == NBYTES // 8
    assert reports[0].bytes_read <= most * NBYTES / 8


def test_neighbours_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of a tensor, and of the next one, by one request where they are neighbours in the file."""
    save_file({f"w{k}": np.full((8, 64), k, np.float32) for k in range(20)}, tmp_path / "m.safetensors")
    plans = []

    def filling(access: Any, found: Any, *rest: Any) -> LoadReport:
        plans.append(plan_of(found, access.bounds))
        return fill(access, found, *rest)

    monkeypatch.setattr(making, "fill", filling)
    arrays = load_file(tmp_path / "m.safetensors", "jax", ROWS)
    assert all((np.asarray(arrays[f"w{k}"]) == k).all() for k in range(20))
    (plan,) = plans
    assert (len(plan.transfers), plan.totals.reads, plan.totals.staged_bytes) == (160, 1, 0)


def test_what_served_is_said(weights: tuple[Path, dict[str, Any]]) -> None:
    with safe_open(weights[0], "jax", ROWS) as reader:
        assert "nothing was read yet" in reader.backend_info().reason
        reader.get_tensor("w")
        assert reader.backend_info() == BackendInfo("pread", True, "positioned reads through the page cache")


# What is refused, and what goes wrong


def test_arrays_are_no_destinations(weights: tuple[Path, dict[str, Any]]) -> None:
    path, tensors = weights
    array = jnp.zeros((64, 48), jnp.float32)
    with pytest.raises(DestinationTypeError, match="JAX arrays are immutable and cannot be destinations"):
        load_into(path, {"w": array}, strict=False)
    with safe_open(path, "jax") as reader:
        with pytest.raises(DestinationTypeError, match="immutable"):
            reader.read_into("w", array)
        buffer = np.zeros((64, 48), np.float32)
        reader.read_into("w", buffer)  # others are filled, whatever the framework of the reader
    assert np.array_equal(buffer, tensors["w"])
    assert not array.any()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend": "mmap"}, "this framework's arrays never change"),
        ({"backend": "kvikio"}, "fills the memory of a device"),
        ({"stream": 1}, "takes no stream"),
    ],
    ids=["mmap", "kvikio", "stream"],
)
def test_options_that_do_not_fit(weights: tuple[Path, dict[str, Any]], options: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        load_file(weights[0], "jax", **options)


def test_options_that_do(weights: tuple[Path, dict[str, Any]]) -> None:
    path, tensors = weights
    told: list[tuple[int, int]] = []
    arrays = load_file(
        path,
        "jax",
        ROWS.mesh.devices.flat[0],
        backend="pread",
        threads=1,
        staging_bytes=4096,
        direct_io=False,
        progress=lambda done, total: told.append((done, total)),
    )
    assert all(np.array_equal(np.asarray(arrays[name]), tensors[name]) for name in tensors)
    assert told[-1][0] == told[-1][1] == sum(array.nbytes for array in tensors.values())


def test_a_file_that_was_cut_hands_nothing_out(matrix: tuple[Path, Any], tmp_path: Path, made: Made) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(matrix[0].read_bytes())
    with safe_open(path, "jax", ROWS) as reader:
        os.truncate(path, NBYTES // 2)
        with pytest.raises(StorageError):
            reader.get_tensors()
    assert made.blocks
    assert made.alive() == 0


def test_shapes_that_only_zeros_have(tmp_path: Path) -> None:
    header = {"w": {"dtype": "U8", "shape": [1 << 62, 0], "data_offsets": [0, 0]}}
    path = write_raw(tmp_path / "m.safetensors", header, b"")
    assert load_file(path, "jax")["w"].shape == (1 << 62, 0)
    header = {"w": {"dtype": "U8", "shape": [1 << 63, 0], "data_offsets": [0, 0]}}
    path = write_raw(tmp_path / "m.safetensors", header, b"")
    with pytest.raises(UnsupportedError, match="no tensor can be made of shape") as caught:
        load_file(path, "jax")
    assert caught.value.tensor == "w"


def test_a_dtype_that_this_jax_lacks(every_dtype: tuple[Path, dict[str, bytes]], monkeypatch: Any) -> None:
    monkeypatch.delattr(jnp, "float8_e8m0fnu")
    with safe_open(every_dtype[0], "jax") as reader:
        with pytest.raises(UnsupportedError, match="has no dtype float8_e8m0fnu for F8_E8M0") as caught:
            reader.get_tensor("F8_E8M0.matrix")
        assert caught.value.tensor == "F8_E8M0.matrix"


def test_a_jax_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from dlpack_loader import framework

    monkeypatch.delitem(sys.modules, "dlpack_loader.framework.jax")
    monkeypatch.delattr(framework, "jax")
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(MissingDependencyError, match="framework 'jax' needs the package jax") as caught:
        safe_open("nothing", "jax")
    assert caught.value.hint == "pip install jax"
    monkeypatch.undo()


# Trees


def test_a_tree_of_what_was_loaded(tmp_path: Path) -> None:
    names = ("embed", "layers.0.q", "layers.0.k", "layers.1.q", "layers.1.k")
    save_file({name: np.full(4, k, np.float32) for k, name in enumerate(names)}, tmp_path / "m.safetensors")
    arrays = load_file(tmp_path / "m.safetensors", "jax")
    tree = unflatten(arrays)
    assert len(jax.tree.leaves(tree)) == 5
    doubled = jax.jit(lambda tree: jax.tree.map(lambda leaf: 2 * leaf, tree))(tree)
    assert doubled["layers"]["1"]["q"].tolist() == [6.0] * 4
    assert flatten(doubled).keys() == arrays.keys()
    assert flatten(tree)["layers.0.k"] is arrays["layers.0.k"]


# Devices, as far as they can be shown without one


class Lender:
    """In the place of CuPy or torch on a device: its memory is torch's on the host, which JAX imports as it would."""

    def __init__(self, lacks: tuple[str, ...]) -> None:
        self.lacks = lacks
        self.made: list[torch.Tensor] = []

    def empty(self, dtype: DType, shape: tuple[int, ...], unit: int, device: tuple[int, int]) -> Allocation:
        assert device in ((2, 0), (2, 1))
        if dtype.code in self.lacks:
            raise UnsupportedError(f"no dtype for {dtype.code}")
        block = torch.empty(shape, dtype=getattr(torch, str(dtype.torch)))
        # XLA copies memory that is not aligned; a GPU's always is.
        while block.data_ptr() % 64:
            self.made.append(block)
            block = torch.empty(shape, dtype=block.dtype)
        self.made.append(block)
        return Allocation(block, raw=block.reshape(-1).view(torch.uint8))


@pytest.fixture
def lent(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Lender:
    lender = Lender(())
    monkeypatch.setattr(for_jax, "_lender", lambda device: lender)
    monkeypatch.setattr(for_jax, "_memory_device", lambda device: (2, device.id % 2))
    return lender


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.code)
def test_memory_that_another_framework_lends(
    every_dtype: tuple[Path, dict[str, bytes]], lent: Lender, dtype: DType
) -> None:
    path, contents = every_dtype
    kinds = ["matrix", "none", *([] if dtype.group > 1 else ["scalar"])]
    with jax.enable_x64(dtype.code in WIDE), safe_open(path, "jax", "cpu") as reader:
        for name in (f"{dtype.code}.{kind}" for kind in kinds):
            array = reader.get_tensor(name)
            assert array.dtype == expected(dtype)
            assert np.asarray(array).tobytes() == shown(dtype, contents[name])
            if contents[name] and dtype.code != "F4":
                assert array.unsafe_buffer_pointer() == lent.made[-1].data_ptr()


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.extension], ids=lambda dtype: dtype.code)
def test_a_lender_that_lacks_the_dtype(every_dtype: tuple[Path, dict[str, bytes]], lent: Lender, dtype: DType) -> None:
    path, contents = every_dtype
    lent.lacks = (dtype.code,)
    with safe_open(path, "jax", "cpu") as reader:
        for name in (f"{dtype.code}.{kind}" for kind in ("matrix", "none")):
            array = reader.get_tensor(name)
            assert array.dtype == expected(dtype)
            assert np.asarray(array).tobytes() == shown(dtype, contents[name])
    assert all(tensor.dtype == torch.uint8 for tensor in lent.made)


def test_one_range_for_several_devices_is_read_once_and_copied(
    weights: tuple[Path, dict[str, Any]], lent: Lender, reports: list[LoadReport]
) -> None:
    path, tensors = weights
    with safe_open(path, "jax", NamedSharding(GRID, P("a"))) as reader:
        array = reader.get_tensor("w")
    assert np.array_equal(np.asarray(array), tensors["w"])
    assert len({shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}) == 8
    assert reports[0].bytes_read == tensors["w"].nbytes


def test_no_framework_to_lend_memory() -> None:
    with pytest.raises(MissingDependencyError, match="made over memory of CuPy or of torch, and neither") as caught:
        for_jax.empty(BY_CODE["F32"], (2,), 4, (2, 0))
    assert "is built without CUDA" in caught.value.message
    assert "framework 'cupy' needs the package cupy" in caught.value.message
    assert 'device="cpu"' in str(caught.value.hint)
