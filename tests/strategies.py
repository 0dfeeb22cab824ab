"""Hypothesis strategies for shapes, indices and views, and producers of DLPack memory that can be told what to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from hypothesis import strategies as st

from dlpack_loader import dlpack

Array: TypeAlias = "np.ndarray[Any, Any]"


def shapes(max_dims: int = 4, max_size: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 0 and more dimensions, with sizes of 0 and 1 among them."""
    sizes = st.integers(0, max_size) | st.integers(1, max_size) | st.just(1)
    return st.lists(sizes, max_size=max_dims).map(tuple)


def slices(size: int) -> st.SearchStrategy[slice]:
    """Slices of any sign and step, in range and out of it."""
    bound = st.none() | st.integers(-2 * size - 2, 2 * size + 2)
    step = st.none() | st.integers(1, size + 2) | st.integers(-size - 2, -1)
    return st.builds(slice, bound, bound, step)


def picks(size: int) -> st.SearchStrategy[slice | int]:
    """Slices, and integers in range."""
    return slices(size) | st.integers(-size, size - 1) if size else slices(size)


@st.composite
def basic_indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """Indices that NumPy calls basic: integers, slices, an ellipsis, a tuple of them or one alone, an empty list."""
    if shape and draw(st.integers(0, 30)) == 0:
        return []
    items: list[Any] = [draw(picks(size)) for size in shape[: draw(st.integers(0, len(shape)))]]
    if draw(st.booleans()):
        # What lies after the ellipsis counts from the last dimension.
        keep = draw(st.integers(0, len(items)))
        tail = [draw(picks(size)) for size in shape[len(shape) - (len(items) - keep) :]]
        items = [*items[:keep], ..., *tail] if keep < len(items) else [*items, ...]
    if len(items) == 1 and draw(st.booleans()):
        return items[0]
    return tuple(items)


class Layout:
    """A view of some shape inside a block of bytes, with room around it and between its elements.

    Parameters
    ----------
    shape, itemsize
        Of the view.
    order
        Its dimensions from the outermost to the innermost in memory.
    steps
        For each dimension, elements from one position to the next; negative to run backwards.
    before, after
        Bytes of the block in front of the view's memory and behind it; ``before`` may put it at an odd address.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        order: tuple[int, ...],
        steps: tuple[int, ...],
        before: int,
        after: int,
    ) -> None:
        self.shape, self.itemsize, self.order, self.steps, self.before = shape, itemsize, order, steps, before
        self._grid = tuple(shape[axis] * abs(steps[axis]) for axis in order)
        self._span = int(np.prod(self._grid, dtype=int)) * itemsize
        self.nbytes = before + self._span + after

    def __repr__(self) -> str:
        return f"Layout({self.shape}, {self.itemsize}, {self.order}, {self.steps}, {self.before})"

    def view(self, block: Array, dtype: np.dtype[Any]) -> Array:
        """Show the view in a block of ``nbytes`` bytes."""
        grid = block[self.before : self.before + self._span].view(dtype).reshape(self._grid)
        # The ellipsis keeps a view of no dimensions a view.
        steps: Any = (*(slice(None, None, self.steps[axis]) for axis in self.order), ...)
        view: Array = grid[steps].transpose(sorted(range(len(self.order)), key=self.order.__getitem__))
        return view


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], itemsize: int) -> Layout:
    """Contiguous, transposed, stepped and reversed places for a shape."""
    before, after = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    if draw(st.booleans()):
        return Layout(shape, itemsize, tuple(range(len(shape))), (1,) * len(shape), before, after)
    order = tuple(draw(st.permutations(range(len(shape)))))
    steps = tuple(draw(st.sampled_from([1, 1, 2, 3, -1, -2])) for _ in shape)
    return Layout(shape, itemsize, order, steps, before, after)


def unpack(raw: bytes, bits: int) -> Array:
    """Elements of a packed sub-byte dtype, the first in the lowest bits."""
    each = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little").reshape(-1, bits)
    elements: Array = each @ (1 << np.arange(bits))
    return elements


class Producer:
    """An array behind ``__dlpack__`` only; ``patch`` may change what its capsule says."""

    def __init__(self, array: Any, patch: Callable[[dlpack._ManagedVersioned], None] | None = None) -> None:
        self.array = array
        self.patch = patch
        self.keywords: list[dict[str, Any]] = []

    def __dlpack__(self, **keywords: Any) -> Any:
        self.keywords.append(keywords)
        capsule = self.array.__dlpack__(max_version=keywords["max_version"])
        if self.patch is not None:
            self.patch(dlpack._ManagedVersioned.from_address(dlpack._get_pointer(capsule, b"dltensor_versioned")))
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class LegacyProducer:
    """A producer of before DLPack 1.0: it knows ``stream`` only, and cannot say that memory is read-only."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.keywords: list[dict[str, Any]] = []

    def __dlpack__(self, stream: int | None = None) -> Any:
        self.keywords.append({"stream": stream})
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0
