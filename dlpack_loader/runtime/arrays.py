"""Arrays over memory that others own: mapped pages, strided copies, casts, overlap. NumPy does the work."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import numpy as np

from dlpack_loader.dtype import DLDataType, dtype_of_dlpack
from dlpack_loader.errors import MissingDependencyError, UnsupportedError
from dlpack_loader.reads import Axis
from dlpack_loader.runtime import host

__all__ = ["BYTE", "array_at", "copy_strided", "map_array", "numpy_dtype", "shares_memory", "zero_strided"]

BYTE = np.dtype(np.uint8)

_MAX_AXES = 30
_OVERLAP_WORK: Any = 100_000  # NumPy's stubs know its two special values only


class _Mapping:
    """Owner of mapped pages; NumPy keeps it alive through ``base``."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = _interface(address, (nbytes,), None, "|u1")


def map_array(fd: int, offset: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Map a range of a file copy-on-write: writes stay in this process and never reach the file.

    The mapping covers this range only, needs no descriptor once made, and goes with the last reference to the array.

    Raises
    ------
    OSError
        The file system has no mmap (ENODEV), or the process has no mapping left (ENOMEM).
    """
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    skip = offset - start
    length = nbytes + skip
    if not host.LINUX:
        mapped = mmap.mmap(fd, length, access=mmap.ACCESS_COPY, offset=start)
        return np.frombuffer(mapped, np.uint8)[skip:]
    address = host.map_private(fd, start, length)
    owner = _Mapping(address + skip, nbytes)
    # Not at interpreter exit: other threads may still be reading, and the system unmaps everything anyway.
    weakref.finalize(owner, host.unmap, address, length).atexit = False
    return np.asarray(owner)


def numpy_dtype(triple: DLDataType) -> np.dtype[Any]:
    """Return the NumPy dtype of a DLPack triple; dtypes that NumPy lacks come from ml_dtypes.

    Raises
    ------
    MissingDependencyError
        ml_dtypes is needed and not installed.
    """
    dtype = dtype_of_dlpack(triple)
    if dtype is None or dtype.numpy is None:
        raise UnsupportedError(f"NumPy has no dtype for DLPack's {triple}")
    if not dtype.extension:
        return np.dtype(dtype.numpy)
    try:
        import ml_dtypes
    except ImportError:
        raise MissingDependencyError(
            f"{dtype.code} needs the package ml_dtypes, which is not installed", hint="pip install ml_dtypes"
        ) from None
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.numpy))
    return found


class _At:
    __slots__ = ("__array_interface__",)
    __array_interface__: dict[str, Any]


def _interface(address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, typestr: str) -> dict[str, Any]:
    return {"data": (address, False), "shape": shape, "strides": strides, "typestr": typestr, "version": 3}


def array_at(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """View memory as an array; the caller keeps the memory alive. Strides are in bytes."""
    holder = _At()
    if dtype.isbuiltin == 1:
        holder.__array_interface__ = _interface(address, shape, strides, dtype.str)
        return np.asarray(holder)
    holder.__array_interface__ = _interface(address, shape, strides, f"|V{dtype.itemsize}")
    return np.asarray(holder).view(dtype)


def copy_strided(
    target: int,
    source: int,
    axes: tuple[Axis, ...],
    unit: int,
    cast: tuple[DLDataType, DLDataType] | None,
) -> None:
    """Copy units that lie evenly spaced on both sides; with ``cast``, from one dtype to another.

    Parameters
    ----------
    target, source
        Addresses of the first unit.
    unit
        Bytes of a unit at the source; at the target too, without a cast.
    """
    if len(axes) > _MAX_AXES:
        for i in range(axes[0].steps):
            copy_strided(target + axes[0].target * i, source + axes[0].source * i, axes[1:], unit, cast)
        return
    shape = tuple(axis.steps for axis in axes)
    from_strides = tuple(axis.source for axis in axes)
    to_strides = tuple(axis.target for axis in axes)
    if cast is not None:
        origin, goal = map(numpy_dtype, cast)
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(
                array_at(target, shape, to_strides, goal),
                array_at(source, shape, from_strides, origin),
                casting="unsafe",
            )
        return
    dtype = np.dtype(f"u{unit}") if unit in (1, 2, 4, 8) else None
    if dtype is None:
        shape, from_strides, to_strides = (*shape, unit), (*from_strides, 1), (*to_strides, 1)
        dtype = BYTE
    np.copyto(array_at(target, shape, to_strides, dtype), array_at(source, shape, from_strides, dtype))


def zero_strided(target: int, axes: tuple[tuple[int, int], ...], run: int) -> None:
    """Zero runs that lie evenly spaced.

    Parameters
    ----------
    target
        Address of the first run.
    axes
        Positions, and bytes from one to the next, outermost first.
    run
        Bytes of a run.
    """
    if len(axes) > _MAX_AXES:
        steps, stride = axes[0]
        for i in range(steps):
            zero_strided(target + stride * i, axes[1:], run)
        return
    shape = tuple(steps for steps, _ in axes)
    strides = tuple(stride for _, stride in axes)
    array_at(target, (*shape, run), (*strides, 1), BYTE)[...] = 0


def shares_memory(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Whether two arrays have a byte in common; undecided within a bound of work counts as yes."""
    try:
        return bool(np.shares_memory(one, other, max_work=_OVERLAP_WORK))
    except np.exceptions.TooHardError:
        return True
