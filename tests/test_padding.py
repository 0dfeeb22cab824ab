"""Destinations that are larger than their tensors: what a tensor leaves of them is kept or zeroed, and nothing else is.

Every way that bytes take is tested against NumPy, with guard bytes around and between the elements.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlpack_loader import LoadReport, Pending, Target, load_into, safe_open
from dlpack_loader.dtype import BY_CODE, uint_of_bits
from dlpack_loader.errors import (
    DestinationBufferError,
    DestinationError,
    DestinationTypeError,
    DeviceError,
    FileChangedError,
    LoaderError,
    OptionError,
    StorageError,
    StrictError,
)
from dlpack_loader.runtime import host
from dlpack_loader.runtime.cuda import CudaDevice
from dlpack_loader.runtime.files import Files
from dlpack_loader.stream import OwnedStream
from tests.contract import DATA, Piece, piece, write
from tests.device_room import F32
from tests.emulation import DeviceMemory, Driver, Mode
from tests.files import save, write_raw
from tests.strategies import Layout, basic_indices, layouts, shapes
from tests.test_kvikio import take

GUARD = 0xA5
PADDINGS: tuple[Literal["keep", "zero"], ...] = ("keep", "zero")
WAYS: dict[str, tuple[Literal["cuda", "hip"] | None, dict[str, Any]]] = {
    "host": (None, {"backend": "pread"}),
    "ring-cuda": ("cuda", {"backend": "pread"}),
    "ring-hip": ("hip", {"backend": "pread"}),
    "kvikio-compat": ("cuda", {"backend": "kvikio"}),
    "kvikio-gds": ("cuda", {"backend": "kvikio"}),
    "hipfile": ("hip", {"backend": "hipfile"}),
}


class Place:
    """A destination in memory that is all guard bytes, and what it is to hold."""

    def __init__(self, driver: Driver | None, layout: Layout, code: str) -> None:
        self.layout = layout
        itemsize = layout.itemsize
        self.dtype = np.dtype(f"u{itemsize}")
        self.block = np.full(layout.nbytes, GUARD, np.uint8)
        self.wanted = self.block.copy()
        view = layout.view(self.block, self.dtype)
        self.memory: DeviceMemory | None = None
        if driver is None:
            self.tensor: Any = view
            return
        self.memory = driver.memory(0, max(layout.nbytes, 1))
        self.memory.fill(GUARD)
        offset = view.__array_interface__["data"][0] - self.block.__array_interface__["data"][0]
        strides = tuple(step // itemsize for step in view.strides)
        self.tensor = self.memory.tensor(layout.shape, uint_of_bits(8 * itemsize), byte_offset=offset, strides=strides)

    def want(self, part: np.ndarray[Any, Any], padding: str | None) -> None:
        view = self.layout.view(self.wanted, self.dtype)
        if padding == "zero":
            view[...] = 0
        view[tuple(map(slice, part.shape))] = part

    def read(self) -> bytes:
        return self.block.tobytes() if self.memory is None else self.memory.read(0, self.layout.nbytes)

    def check(self) -> None:
        assert self.read() == self.wanted.tobytes()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    vendor, options = WAYS[request.param]
    if vendor is not None:
        driver.vendor, driver.mode = vendor, Mode.DEFERRED
    way = Way(None if vendor is None else driver, options)
    if options["backend"] != "kvikio":
        yield way
        return
    importlib.import_module("dlpack_loader.backend.kvikio")
    defaults = importlib.import_module("kvikio").defaults
    before = defaults.get("compat_mode")
    take(monkeypatch, "gds" if request.param == "kvikio-gds" else "compat")
    yield way
    defaults.set({"compat_mode": before})


class Way:
    """A way that bytes take to a destination."""

    def __init__(self, driver: Driver | None, options: dict[str, Any]) -> None:
        self.driver, self.options = driver, options

    def place(self, layout: Layout, code: str = "U8") -> Place:
        return Place(self.driver, layout, code)

    def load(self, path: Path | list[Path], destinations: Any, **options: Any) -> LoadReport:
        report = load_into(path, destinations, **{**self.options, **options})
        assert isinstance(report, LoadReport)
        return report


def plain(shape: tuple[int, ...], itemsize: int = 1, steps: tuple[int, ...] | None = None, before: int = 5) -> Layout:
    return Layout(shape, itemsize, tuple(range(len(shape))), steps or (1,) * len(shape), before, 7)


def array(one: Piece) -> np.ndarray[Any, Any]:
    return np.frombuffer(one.data, f"u{one.element_bytes}").reshape(one.held_shape)


# What is asked for


@pytest.mark.parametrize("padding", ["", "Zero", "fill", 0, True, False, b"keep", ["zero"], np.zeros(2)], ids=repr)
def test_a_padding_that_makes_no_sense(padding: Any) -> None:
    with pytest.raises(OptionError, match="padding is None") as caught:
        Target(np.zeros(3), padding=padding)
    assert isinstance(caught.value, ValueError)


def test_without_padding_the_shapes_are_equal(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"x": piece("U8", 3, 4)})
    with pytest.raises(DestinationError, match=r"gives shape \[3, 4\] and the destination 'x' has \[4, 4\]"):
        load_into(path, {"x": Target(np.zeros((4, 4), np.uint8))})


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (4, 3), (12,), (3, 4, 1), (1, 3, 4), ()])
def test_a_padded_destination_is_nowhere_smaller(tmp_path: Path, padding: Any, shape: tuple[int, ...]) -> None:
    path = write(tmp_path / "m.safetensors", {"x": piece("U8", 3, 4)})
    destination = np.full(shape, GUARD, np.uint8)
    with pytest.raises(DestinationError, match=r"shape \[3, 4\] and the padded destination 'x' has \[") as caught:
        load_into(path, {"x": Target(destination, padding=padding)})
    assert (caught.value.tensor, caught.value.file) == ("x", str(path))
    assert caught.value.hint is not None
    assert (destination == GUARD).all()


# Where the bytes go


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(
    ("shape", "larger"),
    [
        ((3, 4), (3, 4)),
        ((3, 4), (5, 4)),
        ((3, 4), (3, 9)),
        ((3, 4), (4, 5)),
        ((0, 4), (2, 4)),
        ((3, 0), (3, 2)),
        ((0, 0), (2, 2)),
        ((3, 0), (4, 0)),
        ((1, 1, 1), (2, 3, 2)),
        ((2, 3, 4), (2, 4, 4)),
        ((2, 3, 4), (3, 4, 5)),
        ((), ()),
        ((7,), (19,)),
    ],
    ids=str,
)
def test_the_rest_is_kept_or_zeroed(
    way: Way, tmp_path: Path, padding: str, shape: tuple[int, ...], larger: tuple[int, ...]
) -> None:
    one = piece("I32", *shape, at=40)
    path = write(tmp_path / "m.safetensors", {"w": piece("U8", 3), "x": one})
    place = way.place(plain(larger, 4))
    place.want(array(one), padding)
    target = Target(place.tensor, reinterpret=True, padding=padding)  # type: ignore[arg-type]
    report = way.load(path, {"x": target}, strict=False)
    place.check()
    rest = 4 * (prod(larger) - prod(shape))
    assert report.bytes_zeroed == (rest if padding == "zero" else 0)
    assert report.bytes_written == 4 * prod(shape)
    assert report.filled == ("x",)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, tuple[int, ...], Any, Layout, str]:
    code = draw(st.sampled_from(["U8", "U16", "I32", "F64"]))
    shape = draw(shapes(max_dims=3, max_size=4))
    index = draw(st.just(...) | basic_indices(shape))
    part = np.empty(shape, np.uint8)[index].shape
    larger = tuple(size + draw(st.sampled_from([0, 0, 1, 2, 3])) for size in part)
    return code, shape, index, draw(layouts(larger, BY_CODE[code].bits // 8)), draw(st.sampled_from(PADDINGS))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=st.lists(cases(), min_size=1, max_size=3), staging=st.sampled_from([40_000, 1 << 20]))
def test_any_part_in_any_place(way: Way, tmp_path: Path, case: list[Any], staging: int) -> None:
    """Against NumPy: any index, any strides, negative ones too, and guard bytes between elements."""
    pieces = {f"t{k}": piece(code, *shape, at=977 * k) for k, (code, shape, *_) in enumerate(case)}
    path = write(tmp_path / "m.safetensors", pieces)
    places, targets, zeroed = [], {}, 0
    for (name, one), (code, _, index, layout, padding) in zip(pieces.items(), case, strict=True):
        place = way.place(layout, code)
        part = array(one)[index]
        place.want(part, padding)
        if padding == "zero":
            zeroed += layout.itemsize * (prod(layout.shape) - part.size)
        targets[name] = Target(place.tensor, index, reinterpret=True, padding=padding)
        places.append(place)
    report = way.load(path, targets, staging_bytes=staging)
    for place in places:
        place.check()
    assert report.bytes_zeroed == zeroed


@pytest.mark.parametrize("padding", PADDINGS)
def test_large_padded_rows(way: Way, tmp_path: Path, padding: Any) -> None:
    """A vocabulary of which the last rows are no word, in several reads; and columns, which lie in every row."""
    one, two = piece("U16", 3000, 300), piece("U16", 600, 500, at=9)
    path = write(tmp_path / "m.safetensors", {"odd": piece("U8", 1), "x": one, "y": two})
    rows, columns = way.place(plain((3072, 300), 2)), way.place(plain((600, 512), 2))
    rows.want(array(one), padding)
    columns.want(array(two), padding)
    targets = {"x": Target(rows.tensor, padding=padding), "y": Target(columns.tensor, padding=padding)}
    report = way.load(path, targets, strict=False, staging_bytes=400_000, threads=3)
    rows.check()
    columns.check()
    assert report.bytes_written == len(one.data) + len(two.data)
    if way.driver is not None and padding == "zero":  # one call each
        assert way.driver.count("cuMemsetD2D8Async", "hipMemset2DAsync") == 2
        fills = [operation.nbytes for operation in way.driver.executed() if operation.kind == "fill"]
        assert fills == [2 * 72 * 300, 2 * 600 * 12]
    if way.driver is not None:
        assert way.driver.seen().failed == way.driver.seen().pageable == 0


@pytest.mark.parametrize("padding", [None, *PADDINGS])
def test_a_part_without_elements_and_with_steps(way: Way, tmp_path: Path, padding: Any) -> None:
    """There is nothing to decide how to read, and nothing to divide by its size."""
    path = write(tmp_path / "m.safetensors", {"x": piece("U8", 4, 4000)})
    place = way.place(plain((2, 0) if padding is None else (2, 3)))
    place.want(np.empty((2, 0), np.uint8), padding)
    report = way.load(path, {"x": Target(place.tensor, np.s_[::2, 4:4], padding=padding)})
    place.check()
    assert (report.bytes_read, report.bytes_written) == (0, 0)


def test_what_is_one_run_of_memory_is_zeroed_as_one(driver: Driver, tmp_path: Path) -> None:
    """Whatever its dimensions are called: the columns of a transposed matrix lie one after the other."""
    one = piece("U16", 5, 30)
    path = write(tmp_path / "m.safetensors", {"x": one})
    place = Place(driver, Layout((5, 40), 2, (1, 0), (1, 1), 4, 4), "U16")
    place.want(array(one), "zero")
    load_into(path, {"x": Target(place.tensor, padding="zero")})
    place.check()
    assert [operation.nbytes for operation in driver.executed() if operation.kind == "fill"] == [2 * 5 * 10]


def test_torch_views(tmp_path: Path) -> None:
    """Transposed, with an offset, in bfloat16: as a framework has them."""
    tensors = {"x": torch.arange(12.0).reshape(3, 4).bfloat16()}
    save(tmp_path / "m.safetensors", tensors)
    base = torch.full((9, 10), 7.0, dtype=torch.bfloat16)
    wanted = base.clone()
    wanted[2:8, 1:6].T[...] = 0
    wanted[2:8, 1:6].T[:3, :4] = tensors["x"]
    load_into(tmp_path / "m.safetensors", {"x": Target(base[2:8, 1:6].T, padding="zero")})
    assert torch.equal(base, wanted)


def test_a_cast_into_a_corner(tmp_path: Path) -> None:
    values = torch.arange(12.0).reshape(3, 4)
    save(tmp_path / "m.safetensors", {"x": values})
    destination = torch.full((4, 6), 7.0, dtype=torch.float64)
    wanted = torch.zeros(4, 6, dtype=torch.float64)
    wanted[:3, :2] = values[:, ::2]
    target = Target(destination, np.s_[:, ::2], padding="zero")
    with pytest.raises(DestinationTypeError, match="F32 and the destination 'x' has F64"):
        load_into(tmp_path / "m.safetensors", {"x": target})
    assert destination.unique().tolist() == [7]
    load_into(tmp_path / "m.safetensors", {"x": target}, cast=True)
    assert torch.equal(destination, wanted)


def test_one_tensor_into_several_and_one_destination_by_read_into(tmp_path: Path) -> None:
    one = piece("U8", 3, 4)
    path = write(tmp_path / "m.safetensors", {"x": one})
    top, whole, exact = np.full((2, 5), 9, np.uint8), np.full((4, 4), 9, np.uint8), np.full((3, 4), 9, np.uint8)
    targets = [Target(top, np.s_[:1], padding="zero"), Target(whole, padding="keep"), exact]
    assert load_into(path, {"x": targets}).bytes_zeroed == 6
    assert (top[:1, :4] == array(one)[:1]).all()
    assert (top[1:] == 0).all()
    assert (top[:, 4:] == 0).all()
    assert (whole[:3] == exact).all()
    assert (exact == array(one)).all()
    assert (whole[3:] == 9).all()
    with safe_open(path, "np") as reader:
        whole[...] = 9
        assert reader.read_into("x", Target(whole, np.s_[1:], padding="zero")).bytes_zeroed == 8
    assert (whole == [*array(one)[1:].tolist(), [0] * 4, [0] * 4]).all()


# Dtypes of less than a byte


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("reinterpret", [False, True])
@pytest.mark.parametrize(("code", "unit"), [("F4", 1), ("F6_E2M3", 3), ("F6_E3M2", 3)])
def test_sub_byte_dtypes_are_padded_by_groups(
    way: Way, tmp_path: Path, code: str, unit: int, reinterpret: bool, padding: Any
) -> None:
    one = piece(code, 3, 8)
    path = write(tmp_path / "m.safetensors", {"x": one})
    width = one.held_shape[1]
    place = way.place(plain((4, width + 2 * unit)))
    place.want(np.frombuffer(one.data, np.uint8).reshape(3, width), padding)
    if code == "F4" and not reinterpret:
        if way.driver is None:
            place.tensor = torch.from_numpy(place.tensor).view(torch.float4_e2m1fn_x2)
        else:
            place.tensor.dtype = BY_CODE["F4"].dlpack
    way.load(path, {"x": Target(place.tensor, reinterpret=reinterpret, padding=padding)})
    place.check()


@pytest.mark.parametrize(
    ("code", "shape", "larger"),
    [
        ("F6_E2M3", (3, 8), (3, 7)),  # a byte more than the tensor
        ("F6_E2M3", (3, 8), (4, 8)),
        ("F6_E3M2", (8,), (11,)),
        ("F6_E3M2", (2, 2), (4,)),  # a row ends inside of a byte: it can be had whole only
        ("F4", (2, 3), (4,)),
    ],
    ids=str,
)
def test_padding_that_ends_inside_of_a_group(
    tmp_path: Path, code: str, shape: tuple[int, ...], larger: tuple[int, ...]
) -> None:
    path = write_raw(
        tmp_path / "m.safetensors",
        {"x": {"dtype": code, "shape": shape, "data_offsets": [0, prod(shape) * BY_CODE[code].bits // 8]}},
        bytes(prod(shape) * BY_CODE[code].bits // 8),
    )
    destination = np.full(larger, GUARD, np.uint8)
    with pytest.raises(DestinationError, match=f"the last dimension of {code} is padded by groups of") as caught:
        load_into(path, {"x": Target(destination, reinterpret=True, padding="zero")})
    assert caught.value.tensor == "x"
    assert (destination == GUARD).all()


# Destinations that meet


def overlapping(padding: Any, other: Any) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    base = np.full((6, 4), GUARD, np.uint8)
    return {"x": Target(base[:4], padding=padding), "y": Target(base[3:], padding=other)}, base


def test_what_is_zeroed_counts_as_written_and_what_is_kept_does_not(tmp_path: Path) -> None:
    one, two = piece("U8", 3, 4), piece("U8", 3, 4, at=50)
    path = write(tmp_path / "m.safetensors", {"x": one, "y": two})
    for other in (None, "keep", "zero"):
        targets, base = overlapping("zero", other)
        with pytest.raises(DestinationBufferError, match="'x' and 'y' overlap in memory"):
            load_into(path, targets)
        assert (base == GUARD).all()
        targets, base = overlapping("keep", other)
        load_into(path, targets)
        assert (base[:3] == array(one)).all()
        assert (base[3:] == array(two)).all()
    base = np.full((3, 8), GUARD, np.uint8)  # side by side in the columns of one matrix
    load_into(path, {"x": Target(base[:, :5], padding="keep"), "y": base[:, 4:]})
    assert (base == np.concatenate([array(one), array(two)], axis=1)).all()
    with pytest.raises(DestinationBufferError, match="overlap in memory"):
        load_into(path, {"x": Target(base[:, :5], padding="zero"), "y": base[:, 4:]})


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("shape", [(3,), (1,)])
def test_an_expanded_destination_is_refused(tmp_path: Path, padding: Any, shape: tuple[int, ...]) -> None:
    """Also where only its first element would be written: the rest could be neither kept nor zeroed."""
    path = write(tmp_path / "m.safetensors", {"x": piece("U8", *shape)})
    base = torch.full((1,), 7, dtype=torch.uint8)
    with pytest.raises(DestinationBufferError, match="share memory"):
        load_into(path, {"x": Target(base.expand(4), padding=padding)})
    assert base.item() == 7


def test_tied_weights_that_are_padded(tmp_path: Path) -> None:
    one, two = piece("U8", 3, 4), piece("U8", 3, 4, at=50)
    both = write(tmp_path / "both.safetensors", {"a": one, "b": two})
    first = write(tmp_path / "first.safetensors", {"a": one})
    for padding in PADDINGS:
        for path in (both, first):
            base = np.full((5, 4), GUARD, np.uint8)
            report = load_into(path, {name: Target(base, padding=padding) for name in "ab"})
            assert (report.filled, report.aliases) == (("a",), {"b": "a"})
            assert (base[:3] == array(one)).all()
            assert (base[3:] == (0 if padding == "zero" else GUARD)).all()
            assert report.bytes_zeroed == (8 if padding == "zero" else 0)
    base, last = np.full((5, 4), GUARD, np.uint8), np.full((4, 4), GUARD, np.uint8)
    third = write(tmp_path / "third.safetensors", {"a": one, "b": two, "c": one})  # what follows moves up by one
    load_into(
        third, {"a": Target(base, padding="keep"), "b": Target(base, padding="keep"), "c": Target(last, padding="zero")}
    )
    assert (last[3:] == 0).all()
    assert (base[3:] == GUARD).all()
    base = np.full((5, 4), GUARD, np.uint8)
    mixed = {"a": Target(base, padding="keep"), "b": Target(base, padding="zero")}
    with pytest.raises(DestinationBufferError, match="overlap in memory"):
        load_into(both, mixed)
    other = write(tmp_path / "other.safetensors", {"a": one, "b": piece("U8", 4, 3)})
    for padding in PADDINGS:  # of one size, in other places
        with pytest.raises(DestinationBufferError, match="overlap in memory"):
            load_into(other, {name: Target(base, padding=padding) for name in "ab"})
    assert (base == GUARD).all()


# What goes wrong


def load_and_wait(path: list[Path], destinations: Any, **options: Any) -> None:
    result = load_into(path, destinations, **options)
    assert isinstance(result, Pending)
    result.wait()


def targets_of(way: Way, names: str = "abc", padding: Any = "zero") -> tuple[dict[str, Place], dict[str, Target]]:
    places = {name: way.place(plain((5, 300_000))) for name in names}
    return places, {name: Target(place.tensor, padding=padding) for name, place in places.items()}


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """A file, and a read, for each tensor."""
    return [
        write(tmp_path / f"{name}.safetensors", {name: piece("U8", 4, 300_000, at=k)}) for k, name in enumerate("abc")
    ]


def break_second_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    whole = host.read_at

    def fail(fd: int, offset: int, pieces: Any, enough: int) -> int:
        reads.append(offset)
        if len(reads) == 2:
            raise OSError(5, "Input/output error")
        return whole(fd, offset, pieces, enough)

    monkeypatch.setattr(host, "read_at", fail)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("vendor", [None, "cuda", "hip"])
def test_a_failure_names_what_was_zeroed(
    driver: Driver, three: list[Path], monkeypatch: pytest.MonkeyPatch, vendor: Any, padding: Any
) -> None:
    if vendor is not None:
        driver.vendor, driver.mode = vendor, Mode.DEFERRED
    way = Way(driver if vendor else None, {"backend": "pread"})
    places, targets = targets_of(way, padding=padding)
    break_second_read(monkeypatch)
    with pytest.raises(StorageError, match="Input/output error") as caught:
        way.load(three, targets, threads=1, direct_io=False)
    assert caught.value.dirty == (("b", "c") if padding == "zero" else ("b",))
    places["a"].want(array(piece("U8", 4, 300_000)), padding)
    places["a"].check()
    rest = b"\0" if padding == "zero" else bytes([GUARD])
    assert places["c"].read() == bytes([GUARD]) * (5 + 1_200_000) + rest * 300_000 + bytes([GUARD]) * 7
    assert places["b"].read()[1_200_005:] == rest * 300_000 + bytes([GUARD]) * 7


def test_zeroing_that_fails(driver: Driver, three: list[Path]) -> None:
    way = Way(driver, {"backend": "pread"})
    driver.vendor = "cuda"
    places, targets = targets_of(way)
    before = driver.live()
    driver.fault("cuMemsetD2D8Async", 2, error=719)
    with pytest.raises(DeviceError, match="cuMemsetD2D8Async failed") as caught:
        way.load(three, targets)
    assert caught.value.dirty == ("a", "b")
    assert driver.count("cuMemcpyHtoDAsync", "cuMemHostAlloc") == 0
    places["c"].check()
    del caught
    assert driver.live() == before


def test_zeroing_of_what_has_no_tensor_bytes(driver: Driver, tmp_path: Path) -> None:
    """There is no read that could end it: it is complete with the zeros, and dirty without them."""
    path = write(tmp_path / "m.safetensors", {"x": piece("U8", 0, 4), "y": piece("U8", 3, 4)})
    way = Way(driver, {"backend": "pread"})
    for nth, dirty in ((1, ("x",)), (2, ("y",))):
        driver.fault("cuMemsetD2D8Async", nth, error=719)
        places = {name: way.place(plain((4, 4))) for name in "xy"}
        with pytest.raises(DeviceError) as caught:
            way.load(path, {name: Target(place.tensor, padding="zero") for name, place in places.items()})
        assert caught.value.dirty == dirty


@pytest.mark.parametrize("fault", ["shape", "dtype", "strict", "overlap", "stream", "backend"])
@pytest.mark.parametrize("wait", [True, False])
def test_nothing_is_zeroed_when_one_destination_is_wrong(
    driver: Driver, three: list[Path], fault: str, wait: bool
) -> None:
    driver.vendor = "cuda"
    on_device, on_host = Way(driver, {}), Way(None, {})
    places, targets = targets_of(on_device, "ab")
    others, more = targets_of(on_host, "c")
    kind: type[LoaderError] = DestinationError
    options: dict[str, Any] = {"wait": wait}
    destinations: dict[str, Any] = {**targets, **more}
    if fault == "shape":
        destinations["c"] = Target(np.zeros((5, 299_999), np.uint8), padding="zero")
    elif fault == "dtype":
        destinations["c"] = Target(np.zeros((5, 300_000), np.int8), padding="zero")
    elif fault == "strict":
        destinations["d"], kind = np.zeros(3), StrictError
    elif fault == "overlap":
        destinations["c"] = [more["c"], more["c"]]
    elif fault == "stream":
        options["stream"], kind = object(), OptionError
    else:
        options["backend"], kind = "hipfile", OptionError
    with pytest.raises(kind):
        load_and_wait(three, destinations, **options)
    for place in (*places.values(), *others.values()):
        place.check()
    assert driver.count("cuMemsetD2D8Async", "cuMemcpyHtoDAsync") == 0


def test_nothing_is_zeroed_where_a_file_was_replaced(way: Way, tmp_path: Path) -> None:
    """Of two files the second: a first read would find that out too late."""
    paths = [write(tmp_path / f"{name}.safetensors", {name: piece("U8", 4, 300_000)}) for name in "ab"]
    places, targets = targets_of(way, "ab")
    with safe_open(paths, "np", backend=way.options["backend"]) as reader:
        os.truncate(paths[1], paths[1].stat().st_size - 1)
        with pytest.raises(FileChangedError) as caught:
            reader.load_into(targets)
    assert caught.value.dirty == ()
    for place in places.values():
        place.check()


def test_an_interrupt_while_it_is_read(three: list[Path]) -> None:
    way = Way(None, {"backend": "pread"})
    _, targets = targets_of(way)

    def progress(done: int, total: int) -> None:
        assert total == 3_600_000  # what is zeroed is not read
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        way.load(three, targets, threads=1, progress=progress)
    (note,) = caught.value.__notes__
    assert note == "The transfer was ended early; load again before use: b, c"


# Order


def without(monkeypatch: pytest.MonkeyPatch, owner: type, *names: str) -> None:
    for name in names:
        monkeypatch.setattr(owner, name, lambda *arguments: None)


@pytest.fixture
def padded(driver: Driver, tmp_path: Path) -> tuple[Path, DeviceMemory]:
    """Three numbers, for a destination of sixteen."""
    save(tmp_path / "m.safetensors", {"x": torch.tensor([1.0, 2.0, 3.0])})
    memory = driver.memory(0, 64)
    memory.fill(GUARD)
    driver.mode = Mode.DEFERRED
    return tmp_path / "m.safetensors", memory


WANTED = np.array([1, 2, 3] + [0] * 13, np.float32).tobytes()


@pytest.mark.parametrize("waits", [True, False])
def test_zeros_are_there_when_a_load_returns(
    driver: Driver, padded: tuple[Path, DeviceMemory], monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    path, memory = padded
    if not waits:
        without(monkeypatch, CudaDevice, "synchronize_stream", "synchronize_event", "free_pinned")
        without(monkeypatch, OwnedStream, "close")
    load_into(path, {"x": Target(memory.tensor((16,), F32), padding="zero")})
    assert (memory.read() == WANTED) == waits
    assert (memory.read(12) == bytes(52)) == waits


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_zeros_come_after_pending_work(
    driver: Driver, padded: tuple[Path, DeviceMemory], monkeypatch: pytest.MonkeyPatch, waits: bool, named: bool
) -> None:
    """Of the memory's producer, or of a stream that the caller names."""
    path, memory = padded
    stream = driver.stream()
    stream.write(memory, b"\x77" * 64)
    if not waits:
        without(monkeypatch, CudaDevice, "wait")
    tensor = memory.tensor((16,), F32, stream=stream if waits and not named else None)
    load_into(path, {"x": Target(tensor, padding="zero")}, stream=stream if named else None)
    stream.synchronize()
    assert (memory.read() == WANTED) == waits
    assert (memory.read(12) == bytes(52)) == waits


@pytest.mark.parametrize("waits", [True, False])
def test_another_stream_waits_for_the_zeros_of_a_pending_load(
    driver: Driver, padded: tuple[Path, DeviceMemory], monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    path, memory = padded
    stream, gate = driver.stream(), threading.Event()
    whole = OwnedStream.synchronize

    def slow(owned: OwnedStream) -> None:
        gate.wait(30)
        whole(owned)

    monkeypatch.setattr(OwnedStream, "synchronize", slow)
    without(monkeypatch, CudaDevice, "synchronize_event", "free_pinned")
    pending = load_into(path, {"x": Target(memory.tensor((16,), F32), padding="zero")}, wait=False)
    assert isinstance(pending, Pending)
    if waits:
        pending.wait_on(stream)
    else:
        pending._streams._published.wait()
    stream.synchronize()
    assert (memory.read(12) == bytes(52)) == waits
    gate.set()
    assert pending.wait().bytes_zeroed == 52
    assert memory.read() == WANTED


def test_zeros_are_written_on_the_memorys_device_alone(driver: Driver, padded: tuple[Path, DeviceMemory]) -> None:
    path, _ = padded
    memory, before = driver.memory(1, 64), driver.live()
    load_into(path, {"x": Target(memory.tensor((16,), F32), padding="zero")})
    assert memory.read() == WANTED
    assert driver.context(0).uses == driver.context(2).uses == 0
    assert {operation.device for operation in driver.executed()} == {1}
    assert driver.live() == before


# What is told


def test_a_plan_says_what_is_zeroed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And making it touches neither the files nor the destinations."""
    path = write(tmp_path / "m.safetensors", {"x": piece("U8", 3, 4), "y": piece("U8", 3, 4)})
    base, other = np.full((5, 6), GUARD, np.uint8), np.full((4, 4), GUARD, np.uint8)
    with safe_open(path, "np") as reader:

        def use(files: Files, path: str) -> None:
            raise AssertionError("a file was opened")

        monkeypatch.setattr(Files, "use", use)
        plan = reader.plan({"x": Target(base, padding="zero"), "y": Target(other, padding="keep")})
        assert plan.totals.bytes_zeroed == 18
        assert plan.totals.bytes_written == 24
        assert plan.explain().splitlines()[-1] == "  zeroed    18 bytes, which no tensor fills, of x"
        kept = reader.plan({"x": Target(base, padding="keep"), "y": Target(other, padding="keep")})
        assert kept.totals.bytes_zeroed == 0
        assert "zeroed" not in kept.explain()
    assert (base == GUARD).all()
    assert (other == GUARD).all()


def test_a_plan_for_a_device_touches_none(driver: Driver, tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"x": piece("F32", 3)})
    tensor = driver.memory(0, 64).tensor((16,), F32)
    tensor.any_current_device = True
    with safe_open(path, "np") as reader:
        plan = reader.plan({"x": Target(tensor, padding="zero")})
    assert plan.totals.bytes_zeroed == 52
    assert driver.count("cuMemsetD2D8Async", "cuStreamCreate") == 0


def test_a_report_says_what_was_zeroed(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"x": piece("U8", 3, 4)})
    report = load_into(path, {"x": Target(np.zeros((500, 4), np.uint8), padding="zero")})
    assert report.bytes_zeroed == 1988
    assert "\n  zeroed    1,988 bytes of padding\n" in str(report)
    report = load_into(path, {"x": Target(np.zeros((500, 4), np.uint8), padding="keep")})
    assert report.bytes_zeroed == 0
    assert "zeroed" not in str(report)


def test_the_data_is_not_zero() -> None:
    assert bytes(16) not in DATA[:4_000_000]
