"""``select`` against NumPy's own basic indexing, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlpack_loader.dtype import BY_CODE
from dlpack_loader.errors import MisalignedSelectionError, SelectionError
from dlpack_loader.selection import Selection, byte_strides, select, stored_shape
from tests.strategies import Array, basic_indices, shapes, slices, unpack

F32 = BY_CODE["F32"]


def cases(max_dims: int, max_size: int) -> st.SearchStrategy[tuple[tuple[int, ...], Any]]:
    return shapes(max_dims, max_size).flatmap(lambda shape: st.tuples(st.just(shape), basic_indices(shape)))


def content(nbytes: int) -> bytes:
    """Bytes of which neighbours differ, so that a wrong offset shows."""
    return (np.arange(nbytes, dtype=np.uint64) * 2654435761 >> 7).astype(np.uint8).tobytes()


def positions(selection: Selection) -> Array:
    """Byte offset of each selected unit, by offset, shape and strides alone."""
    at = np.full(selection.shape, selection.offset)
    for axis, (size, stride) in enumerate(zip(selection.shape, selection.strides, strict=True)):
        at += (np.arange(size) * stride).reshape(-1, *(1,) * (len(selection.shape) - axis - 1))
    return at


def taken(selection: Selection, raw: bytes) -> Array:
    """The selected units as NumPy sees them through offset, shape and strides."""
    at = positions(selection)
    assert not at.size or (at.min() >= 0 and at.max() + selection.unit <= len(raw))
    if not at.size:
        return np.empty(selection.shape, f"V{selection.unit}")
    units = np.ndarray((*selection.shape, selection.unit), np.uint8, raw, selection.offset, (*selection.strides, 1))
    return np.ascontiguousarray(units).view(f"V{selection.unit}").reshape(selection.shape)


@given(cases(6, 4), st.sampled_from(["U8", "BF16", "F32", "C64"]))
@settings(max_examples=250, deadline=None)
def test_selection_is_numpys(case: tuple[tuple[int, ...], Any], code: str) -> None:
    shape, index = case
    dtype = BY_CODE[code]
    tensor = np.frombuffer(content(int(np.prod(shape)) * dtype.bits // 8), f"V{dtype.bits // 8}").reshape(shape)
    expected = np.asarray(tensor[index])
    selection = select(index, dtype, shape)
    assert selection.shape == expected.shape
    assert selection.unit == dtype.bits // 8
    assert selection.nbytes == expected.nbytes
    assert taken(selection, tensor.tobytes()).tobytes() == expected.tobytes()


@given(cases(4, 3))
@settings(max_examples=80, deadline=None)
def test_contiguous_means_one_range_in_order(case: tuple[tuple[int, ...], Any]) -> None:
    shape, index = case
    selection = select(index, F32, shape)
    at = positions(selection).reshape(-1)
    if at.size:
        assert selection.contiguous == bool((at == selection.offset + 4 * np.arange(at.size)).all())


@pytest.mark.parametrize(
    ("index", "shape"),
    [
        ((), (2, 3)),
        (..., (2, 3)),
        ((..., 0), (2,)),
        ((0, 1, ...), ()),
        ([], (0, 3)),
        (slice(None, None, 10**30), (1, 3)),
        (slice(10**30, -(10**30), -1), (2, 3)),
        (slice(np.int64(1), np.uint8(9)), (1, 3)),
        (np.int64(-1), (3,)),
        (np.array(1), (3,)),
        (torch.tensor(1), (3,)),
    ],
)
def test_indices_that_are_served(index: Any, shape: tuple[int, ...]) -> None:
    assert select(index, F32, (2, 3)).shape == shape


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (None, "np.newaxis (None) is not served"),
        ((0, None), "np.newaxis (None) is not served"),
        (True, "Unsupported slice index at position 0: bool"),
        ((0, np.True_), "Unsupported slice index at position 1: bool"),
        (np.array(True), "Unsupported slice index at position 0: ndarray"),
        (torch.tensor(True), "Unsupported slice index at position 0: Tensor"),
        (np.array([1]), "Unsupported slice index at position 0: ndarray"),
        (torch.tensor([1]), "Unsupported slice index at position 0: Tensor"),
        (torch.tensor([0, 1]), "Unsupported slice index at position 0: Tensor"),
        (1.0, "Unsupported slice index at position 0: float"),
        (np.float32(1), "Unsupported slice index at position 0: float32"),
        ("0", "Unsupported slice index at position 0: str"),
        ((0, [1]), "Unsupported slice index at position 1: list"),
        ([0, 1], "Non empty lists are not implemented"),
        ((..., ...), "Only one ellipsis (...) is allowed in slice index"),
        ((0, 0, 0), "3 indices for a tensor of 2 dimensions"),
        ((0, 0, ..., 0), "3 indices for a tensor of 2 dimensions"),
        (2, "Invalid index 2 for dimension 0 of size 2"),
        ((0, -4), "Invalid index -4 for dimension 1 of size 3"),
        (10**30, f"Invalid index {10**30} for dimension 0 of size 2"),
        (slice(None, None, 0), "slice step cannot be zero"),
        (slice(0.0, 1), "slice bounds must be integers or None: slice(0.0, 1, None)"),
    ],
)
def test_indices_that_are_refused(index: Any, text: str) -> None:
    with pytest.raises(SelectionError) as caught:
        select(index, F32, (2, 3), tensor="weight")
    assert isinstance(caught.value, IndexError)
    assert caught.value.message == text
    assert "tensor 'weight'" in str(caught.value)


def test_scalars_have_no_dimension_to_index() -> None:
    assert select(..., F32, ()) == Selection(0, (), (), 4)
    assert select((), F32, ()) == Selection(0, (), (), 4)
    parts: list[Any] = [0, slice(None), []]
    for index in parts:
        with pytest.raises(SelectionError, match="1 indices for a tensor of 0 dimensions"):
            select(index, F32, ())


def test_an_integer_into_nothing_is_out_of_bounds() -> None:
    with pytest.raises(SelectionError, match="Invalid index 0 for dimension 1 of size 0"):
        select((0, 0), F32, (3, 0))


def test_sizes_beyond_a_machine_word() -> None:
    assert select(..., F32, (0, 2**64 - 1)).shape == (0, 2**64 - 1)
    assert select(np.s_[:, ::-3], F32, (0, 2**63)).shape == (0, -(-(2**63) // 3))


def in_groups(size: int, item: slice | int, group: int) -> bool:
    """Whether the elements that an index takes from one dimension are whole groups, in order."""
    if isinstance(item, int):
        return False
    chosen = np.arange(size)[item]
    if chosen.size % group:
        return False
    groups = chosen.reshape(-1, group)
    return bool((groups[:, 0] % group == 0).all() and (np.diff(chosen) == 1).all())


@given(
    st.sampled_from(["F4", "F6_E2M3", "F6_E3M2"]),
    shapes(2, 3),
    st.integers(0, 4),
    st.data(),
)
@settings(max_examples=150, deadline=None)
def test_groups_of_sub_byte_dtypes(code: str, lead: tuple[int, ...], groups: int, data: st.DataObject) -> None:
    dtype = BY_CODE[code]
    shape = (*lead, groups * dtype.group)
    raw = content(int(np.prod(shape)) * dtype.bits // 8)
    elements = unpack(raw, dtype.bits).reshape(shape)
    outer = data.draw(st.tuples(*(slices(size) for size in lead)), label="outer")
    last = data.draw(
        slices(shape[-1]) | slices(groups).map(lambda s: _times(s, dtype.group)) | st.integers(-1, 0), label="last"
    )
    if not in_groups(shape[-1], last, dtype.group):
        with pytest.raises(MisalignedSelectionError, match="does not end up at a byte boundary"):
            select((*outer, last), dtype, shape)
        return
    selection = select((*outer, last), dtype, shape)
    expected = elements[(*outer, last)]
    assert selection.unit == dtype.group_bytes
    assert selection.shape == (*expected.shape[:-1], expected.shape[-1] // dtype.group)
    assert np.array_equal(unpack(taken(selection, raw).tobytes(), dtype.bits).reshape(expected.shape), expected)


def _times(item: slice, group: int) -> slice:
    """Count a slice of groups in elements; its step is left out."""
    start, stop = (None if bound is None else bound * group for bound in (item.start, item.stop))
    return slice(start, stop)


@pytest.mark.parametrize(
    ("code", "shape", "nbytes"), [("F4", (2, 3), 3), ("F4", (0, 3), 0), ("F6_E2M3", (2, 2), 3), ("F6_E3M2", (4, 5), 15)]
)
def test_last_dimensions_that_end_inside_a_byte_come_whole(code: str, shape: tuple[int, int], nbytes: int) -> None:
    dtype = BY_CODE[code]
    whole: list[Any] = [..., (), slice(None), np.s_[:, ::1], np.s_[-9:9, 0:9]]
    for index in whole:
        assert select(index, dtype, shape) == Selection(0, (nbytes,), (1,), 1)
    parts: list[Any] = [np.s_[..., :1], np.s_[:, ::-1], (slice(None), 0)]
    if nbytes:
        parts += [0, np.s_[1:]]
    for index in parts:
        with pytest.raises(MisalignedSelectionError) as caught:
            select(index, dtype, shape, tensor="scales")
        assert isinstance(caught.value, ValueError)
        assert f"{code} can be cut in the last dimension at multiples of {dtype.group} elements" in str(caught.value)


def test_stored_shape_counts_what_can_be_cut() -> None:
    assert stored_shape(BY_CODE["BF16"], (2, 3)) == ((2, 3), 2)
    assert stored_shape(BY_CODE["F4"], (3, 8)) == ((3, 4), 1)
    assert stored_shape(BY_CODE["F4"], (2, 3)) == ((3,), 1)
    assert stored_shape(BY_CODE["F6_E2M3"], (3, 8)) == ((3, 2), 3)


@given(shapes(4, 4))
@settings(max_examples=50, deadline=None)
def test_byte_strides_are_those_of_c_order(shape: tuple[int, ...]) -> None:
    expected = np.zeros(shape, np.float32).strides
    for size, have, want in zip(shape, byte_strides(shape, 4), expected, strict=True):
        assert have == want or size == 1 or 0 in shape
