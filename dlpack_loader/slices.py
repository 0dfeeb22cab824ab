"""A tensor of an open checkpoint that is read by indexing, with the calls of safetensors' slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlpack_loader.header import Entry

__all__ = ["Slice"]


class Slice:
    """A tensor that is read by indexing; made by ``Reader.get_slice``.

    Indices are NumPy's basic ones for every framework: integers, slices of any sign and step, ``...``. They count
    elements of the header's shape; F4 and F6 can be cut where a byte ends.
    """

    __slots__ = ("_entry", "_select")

    def __init__(self, select: Callable[[Entry, Any], Any], entry: Entry) -> None:
        self._select = select
        self._entry = entry

    def get_shape(self) -> list[int]:
        """Return the tensor's shape, in elements."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """Return the tensor's dtype code."""
        return self._entry.dtype

    def __getitem__(self, index: Any) -> Any:
        return self._select(self._entry, index)

    def __len__(self) -> int:
        if not self._entry.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._entry.shape[0]

    def __repr__(self) -> str:
        return f"<Slice of {self._entry.name!r}, {self._entry.dtype}, {list(self._entry.shape)}>"
