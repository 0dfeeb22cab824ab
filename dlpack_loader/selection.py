"""NumPy's basic indexing of a tensor in a file: an index becomes an offset, counts and byte strides. Pure.

Positions are counted in the units that the format can cut: elements, or groups of them for sub-byte dtypes (two F4 in
one byte, four F6 in three).
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any, NamedTuple, NoReturn

from dlpack_loader.dtype import DType
from dlpack_loader.errors import MisalignedSelectionError, SelectionError

__all__ = ["Selection", "Stored", "byte_strides", "select", "stored_shape"]


class Stored(NamedTuple):
    """A tensor's shape in the units that it can be cut in, and the bytes of one unit."""

    shape: tuple[int, ...]
    unit: int


class Selection(NamedTuple):
    """The chosen part of a tensor: a strided view of its bytes in the file."""

    offset: int
    """Byte of the first selected unit, relative to the tensor's first."""
    shape: tuple[int, ...]
    """Selected units in each dimension that the index keeps."""
    strides: tuple[int, ...]
    """Bytes between neighbours in the file; negative where a step is."""
    unit: int
    """Bytes of one unit."""

    @property
    def nbytes(self) -> int:
        """Bytes selected."""
        return prod(self.shape) * self.unit

    @property
    def contiguous(self) -> bool:
        """Whether the bytes are one range of the file, in order."""
        steps = byte_strides(self.shape, self.unit)
        return all(size == 1 or have == want for size, have, want in zip(self.shape, self.strides, steps, strict=True))


def stored_shape(dtype: DType, shape: tuple[int, ...]) -> Stored:
    """Return a tensor's shape in units that the format can cut.

    For F4 and F6 the last dimension is counted in groups; where it is not a whole number of groups, the tensor can
    only be had whole and its stored shape is its bytes.
    """
    if dtype.group == 1:
        return Stored(shape, dtype.bits // 8)
    if shape and shape[-1] % dtype.group == 0:
        return Stored((*shape[:-1], shape[-1] // dtype.group), dtype.group_bytes)
    return Stored((prod(shape) * dtype.bits // 8,), 1)


def byte_strides(shape: tuple[int, ...], unit: int) -> tuple[int, ...]:
    """Return the bytes between neighbours of a C-contiguous array, one for each dimension."""
    strides = []
    step = unit
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def select(index: Any, dtype: DType, shape: tuple[int, ...], *, tensor: str | None = None) -> Selection:
    """Apply a NumPy-style basic index to a tensor of a header.

    Parameters
    ----------
    index
        Integers, slices (any sign and step), one ``...``, or a tuple of these, in elements of the header's shape.
        An empty list selects nothing of the first dimension, as it does in NumPy.

    Raises
    ------
    SelectionError
        Not a basic index, too many indices, or an integer out of bounds.
    MisalignedSelectionError
        F4 or F6, and the index cuts a byte or takes the last dimension with a step.
    """
    stored = stored_shape(dtype, shape)
    if index is ...:
        return Selection(0, stored.shape, byte_strides(stored.shape, stored.unit), stored.unit)
    items = _expand(index, len(shape), tensor)
    if dtype.group > 1 and shape and shape[-1] % dtype.group:
        for item, size in zip(items, shape, strict=True):
            if not isinstance(item, slice) or _slice(item, size, tensor) != (0, 1, size):
                _misaligned(dtype, tensor)
        return Selection(0, stored.shape, (1,), 1)
    offset = 0
    counts: list[int] = []
    strides: list[int] = []
    last = len(shape) - 1
    for axis, (item, size, stride) in enumerate(
        zip(items, shape, byte_strides(stored.shape, stored.unit), strict=True)
    ):
        group = dtype.group if axis == last else 1
        if not isinstance(item, slice):
            if group > 1:
                _misaligned(dtype, tensor)
            offset += _integer(item, axis, size, tensor) * stride
            continue
        start, step, count = _slice(item, size, tensor)
        if start % group or count % group or (step != 1 and group > 1):
            _misaligned(dtype, tensor)
        offset += start // group * stride
        counts.append(count // group)
        strides.append(stride * step)
    return Selection(offset, tuple(counts), tuple(strides), stored.unit)


def _expand(index: Any, ndim: int, tensor: str | None) -> list[Any]:
    if isinstance(index, list):
        if index:
            raise SelectionError("Non empty lists are not implemented", tensor=tensor, hint="Use integers and slices")
        index = slice(0, 0)
    items = list(index) if isinstance(index, tuple) else [index]
    dots = sum(item is Ellipsis for item in items)
    if dots > 1:
        raise SelectionError("Only one ellipsis (...) is allowed in slice index", tensor=tensor)
    if not dots:
        items.append(Ellipsis)
    missing = ndim - (len(items) - 1)
    if any(item is None for item in items):
        raise SelectionError(
            "np.newaxis (None) is not served", tensor=tensor, hint="Index first, then add the axis to the result"
        )
    if missing < 0:
        raise SelectionError(f"{len(items) - 1} indices for a tensor of {ndim} dimensions", tensor=tensor)
    at = next(k for k, item in enumerate(items) if item is Ellipsis)
    items[at : at + 1] = [slice(None)] * missing
    return items


def _slice(item: slice, size: int, tensor: str | None) -> tuple[int, int, int]:
    """Return start, step and count; an empty or single choice has step 1."""
    try:
        start, stop, step = item.indices(size)
    except ValueError:
        raise SelectionError("slice step cannot be zero", tensor=tensor) from None
    except TypeError:
        raise SelectionError(f"slice bounds must be integers or None: {item}", tensor=tensor) from None
    count = max(0, -((start - stop) // step))  # len(range(...)) has no room for the sizes that a header may give
    if count <= 1:
        return (start if count else 0), 1, count
    return start, step, count


def _integer(item: Any, axis: int, size: int, tensor: str | None) -> int:
    if not _is_integer(item):
        raise SelectionError(
            f"Unsupported slice index at position {axis}: {type(item).__name__}",
            tensor=tensor,
            hint="Use integers, slices and one ellipsis; index the loaded tensor for anything else",
        )
    position = operator.index(item)
    if not -size <= position < size:
        raise SelectionError(f"Invalid index {item} for dimension {axis} of size {size}", tensor=tensor)
    return position % size


def _is_integer(item: Any) -> bool:
    """Whether it picks one position, as in NumPy: arrays of one number and truth values mean something else there."""
    return (
        hasattr(item, "__index__")
        and getattr(item, "shape", ()) == ()
        and not isinstance(item, bool)
        and "bool" not in str(getattr(item, "dtype", ""))
    )


def _misaligned(dtype: DType, tensor: str | None) -> NoReturn:
    raise MisalignedSelectionError(
        "The slice is slicing for subbytes dtypes, and the slice does not end up at a byte boundary, this is invalid.",
        tensor=tensor,
        hint=f"{dtype.code} can be cut in the last dimension at multiples of {dtype.group} elements, with step 1",
    )
