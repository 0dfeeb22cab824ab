"""Regions of memory: the corner of a destination that a tensor fills, the rest of it, and what lies within what."""

from __future__ import annotations

from math import prod
from typing import Any

from dlpack_loader.destination import Memory, overlaps_itself, wanted_shape
from dlpack_loader.dtype import BY_CODE
from dlpack_loader.errors import DestinationBufferError, DestinationError
from dlpack_loader.header import Entry
from dlpack_loader.reads import Margin
from dlpack_loader.selection import select

__all__ = ["contains", "corner_of", "margins_of"]


def corner_of(memory: Memory, entry: Entry, name: str, index: Any = ...) -> Memory:
    """Return the leading corner of a padded destination that a part of an entry fills.

    Returns
    -------
    Memory
        With the shape of the part; ``memory`` itself where that is its shape already.

    Raises
    ------
    DestinationError
        The destination is smaller than the part, or of other dimensions, or it is larger by what the dtype can't be
        cut into.
    DestinationBufferError
        Its elements overlap one another.
    SelectionError, MisalignedSelectionError
        The index does not suit the entry.
    """
    dtype = BY_CODE[entry.dtype]
    selection = select(index, dtype, entry.shape, tensor=entry.name)
    wanted = wanted_shape(dtype, selection)
    have = memory.shape
    if have == wanted:
        return memory
    if len(have) != len(wanted) or any(size < least for size, least in zip(have, wanted, strict=True)):
        raise DestinationError(
            f"the checkpoint gives shape {list(wanted)} and the padded destination {name!r} has {list(have)}",
            tensor=entry.name,
            file=entry.file,
            hint="It has as many dimensions as the tensor, and none of them is smaller",
        )
    if dtype.group > 1:
        last = entry.shape[-1] if entry.shape else 1
        per_unit = selection.unit * 8 // (dtype.dlpack[1] * dtype.dlpack[2])
        if last % dtype.group or have[-1] % per_unit:
            cuts = f"groups of {dtype.group} elements, {dtype.group_bytes} byte(s) each"
            raise DestinationError(
                f"the last dimension of {dtype.code} is padded by {cuts}; the tensor has {last} elements there, and "
                f"the destination {name!r} {have[-1]} byte(s)",
                tensor=entry.name,
                file=entry.file,
                hint="Pass a destination that ends where a group does",
            )
    if memory.nbytes and overlaps_itself(memory):
        raise DestinationBufferError(
            f"elements of the destination {name!r} share memory, as an expanded tensor's do",
            tensor=entry.name,
            file=entry.file,
            hint="Pass the tensor that was expanded, or a contiguous copy",
        )
    nbytes = prod(wanted) * memory.itemsize
    strides = memory.strides
    if not nbytes:
        strides = None  # as any memory without elements
    elif strides is None:
        strides = tuple(step // memory.itemsize for step in memory.byte_strides())
    return Memory(memory.pointer, memory.dtype, wanted, strides, memory.device, memory.owner, nbytes)


def margins_of(memory: Memory, corner: Memory, destination: int) -> tuple[Margin, ...]:
    """Return what is left of a padded destination beside its corner, as boxes that don't meet.

    There is one box for each dimension in which the two differ, and they are cut so that a box that can be one run of
    memory is one.
    """
    steps = memory.byte_strides()
    order = sorted(range(len(steps)), key=lambda axis: -abs(steps[axis]))  # outermost in memory first
    margins = []
    for place, axis in enumerate(order):
        spare = memory.shape[axis] - corner.shape[axis]
        shape = (
            *(corner.shape[other] for other in order[:place]),
            spare,
            *(memory.shape[other] for other in order[place + 1 :]),
        )
        if 0 in shape:
            continue
        at = corner.shape[axis] * steps[axis]
        at += sum(min(0, (size - 1) * steps[other]) for size, other in zip(shape, order, strict=True))
        margins.append(
            Margin.strided(
                destination,
                at,
                shape=shape,
                steps=tuple(abs(steps[other]) for other in order),
                unit=memory.itemsize,
            )
        )
    return tuple(margins)


def contains(outer: Memory, inner: Memory) -> bool:
    """Whether every byte of one memory belongs to another one's elements; memory without bytes lies within none.

    True is certain. False may be said of views that can't be made by slicing the other one.
    """
    if outer.device != inner.device or not inner.nbytes:
        return False
    low, high = outer.extent()
    first, last = inner.extent()
    if first < low or last > high:
        return False
    if outer.strides is None:
        return True
    steps = sorted(
        ((abs(step), size) for step, size in zip(outer.byte_strides(), outer.shape, strict=True)), reverse=True
    )
    box = Margin.strided(
        0, 0, shape=tuple(size for _, size in steps), steps=tuple(step for step, _ in steps), unit=outer.itemsize
    )
    # Any distance is so many steps of each axis and so many bytes. Where the steps of all distances together stay
    # within each axis, every sum of them is a place that the axes lead to.
    sizes = [*(size for size, _ in box.axes), box.run]
    used = _steps(first - low, box)
    for step, size in zip(inner.byte_strides(), inner.shape, strict=True):
        used = [have + (size - 1) * more for have, more in zip(used, _steps(abs(step), box), strict=True)]
    used[-1] += inner.itemsize - 1
    return all(have < size for have, size in zip(used, sizes, strict=True))


def _steps(distance: int, box: Margin) -> list[int]:
    """Say how many steps of each axis a distance is, the longest first, and how many bytes are left."""
    steps = []
    for _, step in box.axes:
        steps.append(distance // step)
        distance %= step
    return [*steps, distance]
