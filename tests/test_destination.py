"""Which memory may be written, what fits an entry, casts, and overlap."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from dlpack_loader import dlpack
from dlpack_loader.destination import Memory, Target, check_overlaps, memory_of_dlpack, transfer_into
from dlpack_loader.dtype import BY_CODE, DTYPES, DType
from dlpack_loader.errors import (
    DestinationBufferError,
    DestinationError,
    DestinationTypeError,
    MissingDependencyError,
    UnsupportedError,
)
from dlpack_loader.framework import describer
from dlpack_loader.header import Entry
from dlpack_loader.load import load_into
from dlpack_loader.reader import safe_open
from dlpack_loader.runtime.arrays import numpy_dtype
from tests.files import write_raw
from tests.strategies import Array, Layout, LegacyProducer, Producer, layouts, shapes


def entry(code: str = "F32", shape: tuple[int, ...] = (2, 3)) -> Entry:
    return Entry("w", code, shape, "m.safetensors", 100, int(np.prod(shape)) * BY_CODE[code].bits // 8)


def memory(destination: Any) -> Memory:
    return describer(None)(destination)


def into(destination: Any, of: Entry, **options: Any) -> Any:
    return transfer_into(memory(destination), of, 0, of.name, **options)


# Facts of memory


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_numpys_attributes_say_what_its_dlpack_says(data: st.DataObject) -> None:
    dtype = np.dtype(data.draw(st.sampled_from(["bool", "int8", "u2", "f2", "f4", "f8", "c8", "c16", "u8"])))
    layout = data.draw(shapes(4, 4).flatmap(lambda shape: layouts(shape, dtype.itemsize)))
    array = layout.view(np.zeros(layout.nbytes, np.uint8), dtype)
    _same(memory(array), memory_of_dlpack(Producer(array), None))


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_torchs_attributes_say_what_its_dlpack_says(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.bool, torch.uint8, torch.bfloat16, torch.float8_e5m2, torch.complex128]))
    shape = data.draw(shapes(4, 4))
    grown = [size + data.draw(st.integers(0, 2)) for size in shape]
    steps = [data.draw(st.integers(1, 3)) for _ in shape]
    kept = tuple(slice(more - size, None, step) for size, more, step in zip(shape, grown, steps, strict=True))
    tensor = torch.empty(grown, dtype=dtype)[kept].permute(data.draw(st.permutations(range(len(shape)))))
    _same(memory(tensor), memory_of_dlpack(tensor, None))


def _same(one: Memory, other: Memory) -> None:
    assert (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
    assert (one.strides is None) == (other.strides is None)
    if one.nbytes:
        assert one.pointer == other.pointer
        assert one.extent() == other.extent()
        steps = zip(one.shape, one.byte_strides(), other.byte_strides(), strict=True)
        assert all(size == 1 or have == want for size, have, want in steps)


def test_memory_keeps_its_owner() -> None:
    array = np.zeros(3)
    before = sys.getrefcount(array)
    taken = memory_of_dlpack(Producer(array), None)
    assert sys.getrefcount(array) == before + 1  # the capsule's; the Producer is gone
    del taken
    assert sys.getrefcount(array) == before


def test_extents() -> None:
    array = np.zeros((4, 6), np.uint16)
    base = array.ctypes.data
    assert memory(array).extent() == (base, base + 48)
    assert memory(array[1:3, ::2]).extent() == (base + 12, base + 34)
    assert memory(array[::-1, ::-1]).extent() == (base, base + 48)
    assert memory(array[:, 2]).extent() == (base + 4, base + 42)


# Refusals of objects


def _freed() -> torch.Tensor:
    tensor = torch.zeros(100)
    tensor.untyped_storage().resize_(0)
    return tensor


def _freed_with_an_offset() -> torch.Tensor:
    tensor = torch.zeros(100)[50:]
    tensor.untyped_storage().resize_(0)
    return tensor


def _shrunk() -> torch.Tensor:
    tensor = torch.zeros(4, 6)[:, ::2]
    tensor.untyped_storage().resize_(4 * 22)  # one element short: 23 are spanned
    return tensor


def _shrunk_with_an_offset() -> torch.Tensor:
    tensor = torch.zeros(100)[50:]
    tensor.untyped_storage().resize_(4 * 99)
    return tensor


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


class Wrapper(TwoTensor):
    """A wrapper subclass: it has a shape, and no memory of its own."""


def _wrapper() -> torch.Tensor:
    tensor: torch.Tensor = Wrapper(torch.zeros(3), torch.zeros(3))
    return tensor


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


class JaxArray:
    """Looks like a JAX array to whoever asks for its type."""

    def __dlpack__(self, **keywords: Any) -> Any:
        raise AssertionError("was asked")


JaxArray.__module__ = "jaxlib._jax"

IMAGINARY = torch.zeros(3, dtype=torch.complex64).conj().imag


def _flagged(flag: int) -> Producer:
    def patch(managed: dlpack._ManagedVersioned) -> None:
        managed.flags = flag

    return Producer(np.zeros(3), patch)


def _nowhere() -> Producer:
    def patch(managed: dlpack._ManagedVersioned) -> None:
        managed.tensor.data = None
        managed.tensor.byte_offset = 64

    return Producer(np.zeros(3), patch)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str, str]] = {
    "read-only array": (
        lambda: _read_only(np.zeros(3)),
        DestinationBufferError,
        "the array is read-only",
        "Pass a writable copy of it",
    ),
    "read-only capsule": (
        lambda: Producer(_read_only(np.zeros(3))),
        DestinationBufferError,
        "the destination is read-only",
        "Pass a writable copy of it",
    ),
    "copied": (lambda: _flagged(2), DestinationBufferError, "was copied by its producer", "Pass the original memory"),
    "padded": (lambda: _flagged(4), DestinationBufferError, "pads its sub-byte elements", "Pass packed memory"),
    "no address": (_nowhere, DestinationBufferError, "has bytes but no address", ""),
    "no dlpack": (object, DestinationTypeError, "object has no __dlpack__", "Pass a tensor or array"),
    "jax": (JaxArray, DestinationTypeError, "JAX arrays are immutable", "jax.dlpack.from_dlpack"),
    "requires grad": (
        lambda: torch.zeros(3, requires_grad=True),
        DestinationTypeError,
        "the tensor requires grad",
        "Pass tensor.detach()",
    ),
    "parameter": (
        lambda: torch.nn.Parameter(torch.zeros(3)),
        DestinationTypeError,
        "the tensor requires grad",
        "Pass tensor.detach()",
    ),
    "negative": (lambda: IMAGINARY, DestinationBufferError, "lazy negative or conjugate view", "resolve_neg()"),
    "conjugate": (
        lambda: torch.zeros(3, dtype=torch.complex64).conj(),
        DestinationBufferError,
        "lazy negative or conjugate view",
        "resolve_conj()",
    ),
    "meta": (lambda: torch.empty(3, device="meta"), DestinationBufferError, "a meta tensor has no memory", "to_empty"),
    "fake": (_fake, DestinationTypeError, "a FakeTensor wraps other tensors", "Pass the tensors inside it"),
    "wrapper": (_wrapper, DestinationTypeError, "a Wrapper wraps other tensors", "Pass the tensors inside it"),
    "sparse": (
        lambda: torch.eye(3).to_sparse(),
        DestinationTypeError,
        "a tensor of layout torch.sparse_coo has no memory of its own",
        "Pass a strided tensor",
    ),
    "freed": (_freed, DestinationBufferError, "storage was freed, shrunk or never allocated", "Allocate it first"),
    "freed, with an offset": (_freed_with_an_offset, DestinationBufferError, "storage was freed, shrunk", ""),
    "shrunk": (_shrunk, DestinationBufferError, "storage was freed, shrunk", ""),
    "shrunk, with an offset": (_shrunk_with_an_offset, DestinationBufferError, "storage was freed, shrunk", ""),
    "zero tensor": (lambda: torch._efficientzerotensor(3), DestinationBufferError, "storage was freed", ""),
    "byte order": (
        lambda: np.zeros(3, np.dtype("f4").newbyteorder()),
        DestinationTypeError,
        "byte order is not this machine's",
        "newbyteorder('=')",
    ),
    "masked": (lambda: np.ma.zeros(3), DestinationTypeError, "a masked array has a mask", "Pass array.data"),
    "unpacked F4": (
        lambda: np.zeros(3, ml_dtypes.float4_e2m1fn),
        DestinationTypeError,
        "float4_e2m1fn keeps one element in a byte",
        "reinterpret=True",
    ),
    "odd strides": (
        lambda: np.zeros(3, [("a", "u1"), ("b", "f4")])["b"],
        DestinationBufferError,
        "strides are not multiples of its itemsize",
        "",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_be_written_is_refused(case: str) -> None:
    make, kind, text, hint = REFUSED[case]
    destination = make()
    with pytest.raises(DestinationError) as caught:
        memory(destination)
    assert type(caught.value) is kind
    assert isinstance(caught.value, ValueError)
    assert text in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("flag", [1, 2, 4, None])
def test_a_refused_capsule_is_given_back_at_once(flag: int | None) -> None:
    producer = _nowhere() if flag is None else _flagged(flag)
    array = producer.array
    before = sys.getrefcount(array)
    with pytest.raises(DestinationBufferError) as caught:
        memory(producer)
    assert (
        sys.getrefcount(array) == before
    )  # though the error, and all that was at hand when it was raised, still lives
    assert caught.value.dirty == ()


def test_a_nested_tensor_is_refused() -> None:
    with warnings.catch_warnings(action="ignore"):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(DestinationTypeError, match="has no memory of its own"):
        memory(nested)


def test_a_tensor_inside_vmap_is_refused() -> None:
    def inside(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(DestinationTypeError, match="has no memory of its own"):
            memory(tensor)
        return tensor

    torch.vmap(inside)(torch.ones(3, 2))


def test_other_devices_are_refused() -> None:
    class Elsewhere:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 8, 0

        def __dlpack__(self, **keywords: object) -> object:
            raise AssertionError("it was exported")

    with pytest.raises(UnsupportedError, match="destinations on Metal are not served"):
        memory_of_dlpack(Elsewhere(), None)


@pytest.mark.parametrize("device", [(1, 0), (1, 3), (3, 0), (11, 0)])
def test_host_memory_of_every_kind_is_served(device: tuple[int, int]) -> None:
    pinned = Memory(1 << 20, (2, 32, 1), (2, 3), None, device, None, 24)
    assert transfer_into(pinned, entry(), 0, "w").run == 24


class Named(torch.Tensor):
    """A subclass with memory, and nothing of its own in the way."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3).as_subclass(Named),
        torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False),
        torch.nn.Buffer(torch.zeros(2, 3)),
        torch.zeros(3, 2).T,
        torch.zeros(4, 6)[1:3, ::2],
        np.zeros((2, 3), np.float32).view(np.matrix),
        LegacyProducer(np.zeros((2, 3), np.float32)),
    ],
)
def test_ordinary_memory_is_accepted(tensor: Any) -> None:
    assert into(tensor, entry()).written == 24


def test_empty_tensors_need_no_memory() -> None:
    freed = torch.zeros(10)[10:]
    freed.untyped_storage().resize_(0)
    assert into(freed, entry("F32", (0,))).written == 0


# What fits an entry

PLAIN = [dtype for dtype in DTYPES if dtype.group == 1]


def blank(dtype: DType, shape: tuple[int, ...] = (2, 3)) -> Array:
    return np.zeros(shape, numpy_dtype(dtype.dlpack))


@pytest.mark.parametrize(("want", "have"), list(itertools.permutations(PLAIN, 2)), ids=lambda dtype: dtype.code)
def test_every_wrong_dtype_is_refused_with_the_way_out(want: DType, have: DType) -> None:
    of = entry(want.code)
    with pytest.raises(DestinationTypeError) as caught:
        into(blank(have), of)
    error = caught.value
    assert isinstance(error, TypeError)
    assert error.message == f"the checkpoint has {want.code} and the destination 'w' has {have.code}"
    assert (error.tensor, error.file) == ("w", "m.safetensors")
    if have.code == f"U{want.bits}":
        assert error.hint == "To receive the bits as they are, pass Target(destination, reinterpret=True)"
        assert into(blank(have), of, reinterpret=True).cast is None
    elif want.floating and have.floating:
        assert error.hint == "Pass a destination of the checkpoint's dtype, or cast=True"
    else:
        assert error.hint == "Pass a destination of the checkpoint's dtype"
    if have.code != f"U{want.bits}":
        with pytest.raises(DestinationTypeError, match="the checkpoint has"):
            into(blank(have), of, reinterpret=True)


def permitted(want: DType, have: DType) -> bool:
    """Written out again from the rule: floats of whole bytes, F8_E8M0 only as a source and only to wider ones."""
    floats = {"F16", "BF16", "F32", "F64", "F8_E5M2", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
    if want.code == "F8_E8M0":
        return have.code in {"F16", "BF16", "F32", "F64"}
    return want.code in floats and have.code in floats


@pytest.mark.parametrize(("want", "have"), list(itertools.permutations(PLAIN, 2)), ids=lambda dtype: dtype.code)
def test_casts_are_between_floats(want: DType, have: DType) -> None:
    if permitted(want, have):
        assert into(blank(have), entry(want.code), cast=True).cast == (want.dlpack, have.dlpack)
        assert np.can_cast(numpy_dtype(want.dlpack), numpy_dtype(have.dlpack), "unsafe")
    else:
        with pytest.raises(DestinationTypeError) as caught:
            into(blank(have), entry(want.code), cast=True)
        assert "A cast goes between floating-point dtypes of whole bytes" in str(caught.value)


@pytest.mark.parametrize("code", ["F4", "F6_E2M3"])
def test_sub_byte_dtypes_are_not_cast(code: str) -> None:
    of = entry(code, (2, 8))
    with pytest.raises(DestinationTypeError, match="A cast goes between"):
        into(np.zeros((2, 8), np.float32), of, cast=True)
    with pytest.raises(DestinationTypeError, match="A cast goes between"):
        into(torch.zeros(2, 3, dtype=torch.float4_e2m1fn_x2), entry("F32"), cast=True)


@pytest.mark.parametrize(
    "array",
    [np.zeros((2, 3), "c16"), np.zeros((2, 3), np.longdouble), np.zeros((2, 3), "M8[s]"), np.zeros((2, 3), "O")],
)
@pytest.mark.parametrize("options", [{}, {"cast": True}, {"reinterpret": True}])
def test_dtypes_that_the_format_lacks(array: Array, options: dict[str, bool]) -> None:
    for code in ("F64", "I64", "C64"):
        with pytest.raises(DestinationTypeError, match="the destination 'w' has DLPack"):
            into(array, entry(code), **options)


def test_torch_dtypes_that_the_format_lacks() -> None:
    with warnings.catch_warnings(action="ignore"):
        quantized = torch.quantize_per_tensor(torch.ones(2, 3), 1.0, 0, torch.quint8)
        halves = torch.zeros(2, 3, dtype=torch.complex32)
    for tensor in (quantized, halves):
        with pytest.raises(DestinationTypeError, match="the destination 'w' has DLPack"):
            into(tensor, entry("U8"))


@pytest.mark.parametrize(
    ("code", "shape", "index", "wrong"),
    [
        ("F32", (2, 3), ..., (3, 2)),
        ("F32", (2, 3), ..., (6,)),
        ("F32", (), ..., (1,)),
        ("F32", (2, 3), np.s_[0], (1, 3)),
        ("F4", (2, 8), ..., (2, 8)),
        ("F6_E2M3", (2, 8), ..., (2, 8)),
    ],
)
def test_wrong_shapes(code: str, shape: tuple[int, ...], index: Any, wrong: tuple[int, ...]) -> None:
    right = {"F4": [2, 4], "F6_E2M3": [2, 6]}.get(code) or list(np.zeros(shape)[index].shape)
    array = np.zeros(wrong, np.float32 if code == "F32" else np.uint8)
    with pytest.raises(DestinationError) as caught:
        into(array, entry(code, shape), index=index, reinterpret=True)
    assert type(caught.value) is DestinationError
    assert caught.value.message == f"the checkpoint gives shape {right} and the destination 'w' has {list(wrong)}"


@pytest.mark.parametrize(
    "array",
    [
        torch.zeros(1, 3).expand(2, 3),
        torch.zeros(10).as_strided((2, 3), (2, 1)),
        np.lib.stride_tricks.as_strided(np.zeros(10, np.float32), (2, 3), (0, 4)),
        np.lib.stride_tricks.as_strided(np.zeros(10, np.float32), (2, 3), (4, 4)),
        np.lib.stride_tricks.as_strided(np.zeros(10, np.float32)[9:], (2, 3), (-8, -4)),
    ],
)
def test_memory_that_folds_onto_itself(array: Any) -> None:
    with pytest.raises(DestinationBufferError, match="elements of the destination 'w' share memory"):
        into(array, entry())


def test_expanding_one_element_is_no_fold() -> None:
    assert into(torch.zeros(1, 3).as_strided((1, 3), (0, 1)), entry("F32", (1, 3))).written == 12


def one_file(path: Path, code: str, shape: tuple[int, ...], data: bytes) -> Path:
    return write_raw(path, {"w": {"dtype": code, "shape": shape, "data_offsets": [0, len(data)]}}, data)


@pytest.mark.parametrize(
    ("code", "shape", "destination"),
    [
        ("BF16", (3, 5), np.zeros((3, 5), np.uint16)),
        ("F8_E4M3", (3, 5), np.zeros((3, 5), np.uint8)),
        ("BOOL", (3, 5), np.zeros((3, 5), np.uint8)),
        ("C64", (3, 5), np.zeros((3, 5), np.uint64)),
        ("F4", (3, 10), np.zeros((3, 5), np.uint8)),
        ("F4", (2, 3), np.zeros(3, np.uint8)),
        ("F6_E3M2", (3, 8), np.zeros((3, 6), np.uint8)),
        ("F4", (3, 10), torch.zeros(3, 5, dtype=torch.uint8)),
        ("BF16", (5, 3), np.zeros((3, 5), np.uint16).T),
        ("F6_E3M2", (3, 8), np.zeros((6, 3), np.uint8).T),
    ],
)
def test_bits_can_be_had_as_they_are(tmp_path: Path, code: str, shape: tuple[int, ...], destination: Any) -> None:
    data = bytes(range(1, 1 + int(np.prod(shape)) * BY_CODE[code].bits // 8))
    path = one_file(tmp_path / "m.safetensors", code, shape, data)
    load_into(path, {"w": Target(destination, reinterpret=True)})
    assert np.asarray(destination).tobytes() == data


# Casts

TORCH = {dtype.code: getattr(torch, str(dtype.torch)) for dtype in DTYPES if dtype.group == 1}
FLOATS = [dtype for dtype in PLAIN if dtype.floating]


def samples(dtype: DType) -> Array:
    """Every value of 8 and 16 bits; for wider ones those, what lies between them, and their neighbours."""
    if dtype.bits == 8:
        return np.arange(256, dtype=np.uint8)
    if dtype.bits == 16:
        return np.arange(1 << 16, dtype=np.uint16)
    finest = np.concatenate(
        [np.arange(256, dtype=np.uint8).view(blank(other).dtype).astype("f4") for other in FLOATS if other.bits == 8]
        + [
            np.arange(0, 1 << 16, 7, dtype=np.uint16).view(blank(BY_CODE[code]).dtype).astype("f4")
            for code in ("F16", "BF16")
        ]
    )
    values = np.unique(finest[np.isfinite(finest)]).astype("f8")
    ties = (values[1:] + values[:-1]) / 2
    with np.errstate(over="ignore"):
        some = np.concatenate([values, ties]).astype(f"f{dtype.bits // 8}")
    every = np.concatenate(
        [some, np.nextafter(some, np.inf), np.nextafter(some, -np.inf), [np.inf, -np.inf, np.nan, -0.0]]
    )
    bits: Array = every.astype(some.dtype).view(f"u{dtype.bits // 8}")
    return bits


def doubles(bits: Array, dtype: DType) -> Array:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return bits.view(blank(dtype).dtype).astype(np.float64)


@pytest.mark.parametrize("want", FLOATS, ids=lambda dtype: dtype.code)
def test_casts_are_torchs(want: DType, tmp_path: Path) -> None:
    """Bit for bit, NaN apart (which only stays one), with two differences that are NumPy's and ml_dtypes' own.

    F8_E4M3, which has no infinity: beyond its range torch gives the largest number and we give NaN. F64 to F16: torch
    rounds twice, by way of F32, and we give the nearest.
    """
    bits = samples(want)
    path = one_file(tmp_path / "m.safetensors", want.code, bits.shape, bits.tobytes())
    source = torch.from_numpy(bits).view(TORCH[want.code])
    exact = doubles(bits, want)
    for have in FLOATS:
        if have is want or not permitted(want, have):
            continue
        destination = torch.empty(bits.shape, dtype=TORCH[have.code])
        load_into(path, {"w": destination}, cast=True)
        ours, theirs = (
            tensor.view(getattr(torch, f"uint{have.bits}")).numpy()
            for tensor in (destination, source.to(TORCH[have.code]))
        )
        values, others = doubles(ours, have), doubles(theirs, have)
        differ = (ours != theirs) & ~(np.isnan(values) & np.isnan(others))
        if have.code == "F8_E4M3":
            beyond = np.abs(exact) > 464  # 448 is the largest; from halfway to the next it is out of range
            assert np.isnan(values[beyond]).all()
            assert (np.abs(others[beyond]) == 448).all()
            differ &= ~beyond
        if (want.code, have.code) == ("F64", "F16"):
            assert differ.any()
            for value, near, far in zip(exact[differ], values[differ], others[differ], strict=True):
                assert abs(Fraction(near) - Fraction(value)) < abs(Fraction(far) - Fraction(value))
            continue
        assert not differ.any(), (have.code, exact[differ][:5], values[differ][:5], others[differ][:5])


def test_a_cast_without_ml_dtypes_is_refused_before_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = one_file(tmp_path / "m.safetensors", "BF16", (2,), b"\x80\x3f\x00\x40")
    destination = np.full(2, 7, np.float32)
    load_into(path, {"w": destination}, cast=True)
    assert destination.tolist() == [1, 2]
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    destination[:] = 7
    with pytest.raises(MissingDependencyError, match="BF16 needs the package ml_dtypes") as caught:
        load_into(path, {"w": destination}, cast=True)
    assert isinstance(caught.value, ImportError)
    assert caught.value.tensor == "w"
    assert destination.tolist() == [7, 7]
    with safe_open(path, "np") as reader, pytest.raises(MissingDependencyError, match="pip install ml_dtypes"):
        reader.get_tensor("w")


# Overlap


def overlap(*arrays: Any) -> bool:
    names = [f"d{number}" for number in range(len(arrays))]
    try:
        check_overlaps([memory(array) for array in arrays], names)
    except DestinationBufferError:
        return True
    return False


GRID = np.zeros((6, 8), np.float32)


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ((GRID[:3], GRID[3:]), False),
        ((GRID[:3], GRID[2:]), True),
        ((GRID, GRID), True),
        ((GRID[3:], GRID[0], GRID[1:4]), True),
        ((GRID[:, ::2], GRID[:, 1::2]), False),
        ((GRID[:, :4], GRID[:, 4:]), False),
        ((GRID[:, :5], GRID[:, 4:]), True),
        ((GRID[:, ::2], GRID[0, 2:3]), True),
        ((GRID[:, ::2], GRID[0, 1:2]), False),
        ((GRID[::-1, ::2], GRID.T[1::2]), False),
        ((GRID[::-1, ::2], GRID.T[2:3]), True),
        ((*GRID.T,), False),
        ((*GRID.T, GRID[5, 7:]), True),
        ((GRID[2:2], GRID), False),
        ((GRID[:, 3:3], GRID), False),
        ((GRID, GRID.view(np.uint8)[1:2, 5:6]), True),
        ((torch.from_numpy(GRID)[:, 1::2], GRID[:, ::2]), False),
        ((torch.from_numpy(GRID), GRID[5, 7:]), True),
        # A long one, then short ones that end before the next begins.
        ((GRID[:, ::4], GRID[0:2, 1], GRID[2:4, 1], GRID[4, 4:5]), True),
        ((GRID[:, ::4], GRID[0, 1:2], GRID[1, 1:2], GRID[4, 4:5]), True),
        ((), False),
    ],
)
def test_overlap(arrays: tuple[Any, ...], expected: bool) -> None:
    assert overlap(*arrays) is expected
    assert overlap(*arrays[::-1]) is expected


def test_overlap_names_both() -> None:
    with pytest.raises(BufferError, match="the destinations 'a' and 'b' overlap in memory"):
        check_overlaps([memory(GRID[:2]), memory(GRID[1:])], ["a", "b"])


def test_equal_addresses_on_two_devices_do_not_overlap() -> None:
    one = Memory(1 << 20, (2, 32, 1), (4,), None, (1, 0), None, 16)
    other = Memory(1 << 20, (2, 32, 1), (4,), None, (2, 0), None, 16)
    check_overlaps([one, other], ["a", "b"])


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_overlap_is_a_byte_in_common(data: st.DataObject) -> None:
    block = np.zeros(4 * 60, np.uint8)
    arrays = []
    for _ in range(data.draw(st.integers(2, 3))):
        shape = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
        steps = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
        order = data.draw(st.permutations([0, 1]))
        layout = Layout(shape, 2, tuple(order), steps, data.draw(st.integers(0, 60)), 0)
        arrays.append((layout, layout.view(block, np.dtype("u2"))))
    counts = np.zeros(block.size, np.uint8)
    for layout, _ in arrays:
        mark = np.zeros_like(block)
        layout.view(mark, np.dtype("u2"))[...] = 0x0101
        counts += mark
    assert overlap(*(array for _, array in arrays)) is bool((counts > 1).any())


# Nothing but the view is written


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_guard_bytes_stay(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    layout = data.draw(shapes(3, 4).flatmap(lambda shape: layouts(shape, 4)))
    numbers = np.arange(int(np.prod(layout.shape)), dtype=np.float32).reshape(layout.shape)
    path = one_file(tmp_path_factory.mktemp("guard") / "m.safetensors", "F32", layout.shape, numbers.tobytes())
    block = np.full(layout.nbytes, 0xA5, np.uint8)
    expected = block.copy()
    layout.view(expected, np.dtype("f4"))[...] = numbers
    view = layout.view(block, np.dtype("f4"))
    load_into(path, {"w": data.draw(st.sampled_from([view, Producer(view), LegacyProducer(view)]))})
    assert block.tobytes() == expected.tobytes()
