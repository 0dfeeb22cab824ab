"""Destinations: DLPack objects become validated memory, and memory plus an entry becomes a transfer.

Everything that the header can decide is decided here, for one destination at a time and before any byte is written:
device, dtype, shape, strides, whether the memory may be written at all. Overlap is a matter between destinations and
is checked for all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, Literal, NoReturn

import msgspec

from dlpack_loader import dlpack
from dlpack_loader.dtype import BY_CODE, DTYPES, DLDataType, DType, dtype_of_dlpack, uint_of_bits
from dlpack_loader.errors import (
    DestinationBufferError,
    DestinationError,
    DestinationTypeError,
    OptionError,
    UnsupportedError,
)
from dlpack_loader.header import Entry
from dlpack_loader.reads import Transfer
from dlpack_loader.runtime.device import CUDA, CUDA_MANAGED, ROCM
from dlpack_loader.selection import Selection, Stored, byte_strides, select
from dlpack_loader.stream import Streams

__all__ = ["Memory", "Target", "check_overlaps", "memory_of_dlpack", "overlaps_itself", "transfer_into", "wanted_shape"]

_CPU = (1, 0)
_HOST_DEVICES = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost
_WHOLE = MappingProxyType({dtype.code: dtype.dlpack for dtype in DTYPES if dtype.group == 1})
_SERVED_DEVICES = (CUDA, CUDA_MANAGED, ROCM)
_DEVICE_NAMES = {8: "Metal", 14: "oneAPI"}


@dataclass(frozen=True, slots=True)
class Target:
    """A destination plus the part of the entry that fills it.

    Parameters
    ----------
    destination
        Any object with ``__dlpack__``, on a device that this version writes to.
    index
        A NumPy-style basic index into the entry, in elements of the header's shape; the destination has the shape of
        ``tensor[index]``.
    reinterpret
        Accept a destination of unsigned integers of the entry's width: the bits are moved as they are. For frameworks
        that lack the entry's dtype, such as NumPy arrays of uint16 for BF16.
    padding
        None: the destination has exactly the shape of ``tensor[index]``. ``"keep"`` and ``"zero"``: it may be larger,
        in any dimension; the tensor fills its leading corner. The rest stays as it is, or becomes zero.

    Raises
    ------
    OptionError
        A padding that is none of these.

    Examples
    --------
    >>> import numpy as np
    >>> fused = np.zeros((6, 4), np.float32)
    >>> Target(fused[:3], index=np.s_[0:3]).index
    slice(0, 3, None)
    >>> Target(fused, padding="zero").padding
    'zero'
    """

    destination: Any
    index: Any = ...
    reinterpret: bool = False
    padding: Literal["keep", "zero"] | None = None

    def __post_init__(self) -> None:
        padding: object = self.padding
        if padding is not None and not (isinstance(padding, str) and padding in ("keep", "zero")):
            raise OptionError(f'padding is None, "keep" or "zero", not {padding!r}')


class Memory(msgspec.Struct, gc=False):
    """Where a destination's bytes are. Borrowed: ``owner`` keeps them alive."""

    pointer: int
    dtype: DLDataType
    shape: tuple[int, ...]
    """In elements of ``dtype``."""
    strides: tuple[int, ...] | None
    """In elements; None is C-contiguous."""
    device: tuple[int, int]
    """DLPack device type and number."""
    owner: object
    nbytes: int
    """Bytes of all elements."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype[1] * self.dtype[2] // 8

    @property
    def on_host(self) -> bool:
        """Whether the host may write it."""
        return self.device[0] in _HOST_DEVICES

    def byte_strides(self) -> tuple[int, ...]:
        """Return the bytes between neighbours, one for each dimension."""
        if self.strides is None:
            return byte_strides(self.shape, self.itemsize)
        return tuple(stride * self.itemsize for stride in self.strides)

    def extent(self) -> tuple[int, int]:
        """Return the first address of the memory and the one after its last."""
        if self.strides is None or not self.nbytes:
            return self.pointer, self.pointer + self.nbytes
        low = high = self.pointer
        for size, stride in zip(self.shape, self.byte_strides(), strict=True):
            reach = (size - 1) * stride
            low, high = low + min(0, reach), high + max(0, reach)
        return low, high + self.itemsize


def memory_of_dlpack(destination: Any, streams: Streams | None) -> Memory:
    """Take a destination through DLPack and check that its memory may be written.

    Parameters
    ----------
    streams
        The load's streams: a producer makes the one of its device wait for its pending work. None asks for the facts
        only, for memory that nothing will be written to.

    Raises
    ------
    DestinationTypeError
        No ``__dlpack__``; a JAX array, which must not be changed and cannot say so.
    DestinationBufferError
        Read-only, copied or padded memory, or a null pointer.
    """
    module = type(destination).__module__
    if module.partition(".")[0] in ("jax", "jaxlib"):
        raise DestinationTypeError(
            "JAX arrays are immutable and cannot be destinations",
            hint="Fill a NumPy or torch buffer and pass it to jax.dlpack.from_dlpack",
        )
    capsule = _take(destination, streams)
    flags = capsule.flags
    for flag, what, hint in (
        (dlpack.READ_ONLY, "is read-only", "Pass a writable copy of it"),
        (dlpack.IS_COPIED, "was copied by its producer, so writing would not reach it", "Pass the original memory"),
        (dlpack.SUBBYTE_PADDED, "pads its sub-byte elements to whole bytes", "Pass packed memory, or its uint8 bytes"),
    ):
        if flags & flag:
            capsule.release()
            raise DestinationBufferError(f"the destination {what}", hint=hint)
    strides = capsule.strides
    if strides is not None and _is_compact(capsule.shape, strides):
        strides = None
    nbytes = prod(capsule.shape) * capsule.dtype[1] * capsule.dtype[2] // 8
    if not capsule.pointer and nbytes:
        capsule.release()
        raise DestinationBufferError("the destination has bytes but no address: a fake or unallocated tensor")
    return Memory(capsule.pointer, capsule.dtype, capsule.shape, strides, capsule.device, capsule, nbytes)


def _take(destination: Any, streams: Streams | None) -> dlpack.Capsule:
    where = getattr(destination, "__dlpack_device__", None)
    kind, ordinal = map(int, where()) if where is not None else _CPU
    if kind in _HOST_DEVICES:
        return dlpack.take(destination, stream=None)
    if kind not in _SERVED_DEVICES:
        device = _DEVICE_NAMES.get(kind, f"DLPack device type {kind}")
        raise UnsupportedError(
            f"destinations on {device} are not served",
            hint="Pass memory of the host, of CUDA or of ROCm, or a torch tensor",
        )
    if streams is None:
        return dlpack.take(destination, stream=-1)
    owned = streams.of((kind, ordinal))
    with owned.device.current():  # producers record an event on a stream of their current device
        return dlpack.take(destination, stream=owned.handle)


def _is_compact(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether strides (in elements) are those of C order, not looking at dimensions of size 1 or at empty tensors."""
    if 0 in shape:
        return True
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def overlaps_itself(memory: Memory) -> bool:
    """Whether elements may share memory: true unless every dimension steps past all that lies inside it."""
    span = memory.itemsize
    steps = map(abs, memory.byte_strides())
    for stride, size in sorted(zip(steps, memory.shape, strict=True)):
        if size > 1:
            if stride < span:
                return True
            span += stride * (size - 1)
    return False


def wanted_shape(dtype: DType, selection: Selection | Stored) -> tuple[int, ...]:
    """Return the shape that a destination of an entry's own DLPack dtype has for a selection."""
    per_unit = selection.unit * 8 // (dtype.dlpack[1] * dtype.dlpack[2])
    if per_unit == 1:
        return selection.shape
    return (*selection.shape[:-1], selection.shape[-1] * per_unit)  # F6: bytes, three to a unit


def transfer_into(
    memory: Memory,
    entry: Entry,
    number: int,
    name: str,
    index: Any = ...,
    reinterpret: bool = False,
    cast: bool = False,
) -> Transfer:
    """Check a destination against the header and return the transfer that fills it.

    Raises
    ------
    DestinationTypeError
        Its dtype is not the entry's, and no permitted cast or reinterpretation makes it so.
    DestinationBufferError
        It is on a device that is not served, or its elements overlap one another.
    DestinationError
        Its shape is not the selection's.
    SelectionError, MisalignedSelectionError
        The index does not suit the entry.
    """
    if (
        index is ...
        and memory.shape == entry.shape
        and memory.strides is None
        and memory.dtype == _WHOLE.get(entry.dtype)
    ):  # the usual case, said shortly: everything that is checked below holds
        return Transfer(name, entry.file, entry.offset, number, entry.nbytes, (), None, entry.nbytes)

    dtype = BY_CODE[entry.dtype]
    selection = select(index, dtype, entry.shape, tensor=entry.name)
    conversion = _conversion(memory.dtype, dtype, entry, name, reinterpret=reinterpret, cast=cast)
    wanted = wanted_shape(dtype, selection)
    if memory.shape != wanted:
        _wrong_shape(memory.shape, wanted, entry, name)
    target = memory.byte_strides()
    if memory.strides is not None and overlaps_itself(memory):
        raise DestinationBufferError(
            f"elements of the destination {name!r} share memory, as an expanded tensor's do",
            hint="Pass the tensor that was expanded, or a contiguous copy",
        )
    shape, source, unit = selection.shape, selection.strides, selection.unit
    if wanted != shape:  # F6 as bytes: steps of one unit become steps of one byte
        shape, source, unit = (*shape, unit), (*source, 1), 1
        target = (*target[:-1], selection.unit * target[-1], target[-1])
    return Transfer.strided(
        name,
        entry.file,
        entry.offset + selection.offset,
        number,
        shape=shape,
        source=source,
        target=target,
        unit=unit,
        written=memory.nbytes,
        cast=conversion,
    )


def _conversion(
    have: DLDataType, want: DType, entry: Entry, name: str, *, reinterpret: bool, cast: bool
) -> tuple[DLDataType, DLDataType] | None:
    if have == want.dlpack:
        return None
    bits = want.dlpack[1] * want.dlpack[2]
    if reinterpret and have == uint_of_bits(bits):
        return None
    other = dtype_of_dlpack(have)
    if cast and other is not None and _castable(want, other):
        from dlpack_loader.runtime.arrays import numpy_dtype  # NumPy is imported when it is needed

        numpy_dtype(want.dlpack)  # says now, before anything is written, when ml_dtypes is missing
        numpy_dtype(have)
        return want.dlpack, have
    shown = other.code if other else f"DLPack {have}"
    if cast:
        hint = "A cast goes between floating-point dtypes of whole bytes, from F8_E8M0 to wider ones only"
    elif have == uint_of_bits(bits):
        hint = "To receive the bits as they are, pass Target(destination, reinterpret=True)"
    elif want.floating and other is not None and other.floating:
        hint = "Pass a destination of the checkpoint's dtype, or cast=True"
    else:
        hint = "Pass a destination of the checkpoint's dtype"
    raise DestinationTypeError(
        f"the checkpoint has {want.code} and the destination {name!r} has {shown}",
        tensor=entry.name,
        file=entry.file,
        hint=hint,
    )


def _castable(origin: DType, goal: DType) -> bool:
    """Whether a cast goes there: F8_E8M0 has no sign and no zero, and ml_dtypes converts it to wider dtypes only."""
    return (
        origin.floating
        and goal.floating
        and origin.group == goal.group == 1
        and goal.code != "F8_E8M0"
        and (origin.code != "F8_E8M0" or goal.bits > 8)
    )


def _wrong_shape(have: tuple[int, ...], want: tuple[int, ...], entry: Entry, name: str) -> NoReturn:
    raise DestinationError(
        f"the checkpoint gives shape {list(want)} and the destination {name!r} has {list(have)}",
        tensor=entry.name,
        file=entry.file,
        hint="Pass one of that shape, or a Target: with an index for a part, with padding for one that is larger",
    )


def check_overlaps(memories: Sequence[Memory], names: Sequence[str]) -> None:
    """Refuse destinations that share a byte: what they would hold depends on the order of the reads.

    Raises
    ------
    DestinationBufferError
        Names both.
    """
    lows = [memory.pointer for memory in memories]
    highs = [memory.pointer + memory.nbytes for memory in memories]
    for k, memory in enumerate(memories):
        if memory.strides is not None:
            lows[k], highs[k] = memory.extent()
    reach: list[tuple[int, int]] = []  # destinations whose memory may extend past the one at hand, by last address
    furthest = 0
    for k in sorted(range(len(memories)), key=lows.__getitem__):
        low, high = lows[k], highs[k]
        if low == high:
            continue
        if low < furthest:
            reach = [(end, other) for end, other in reach if end > low]
            for _, other in reach:
                if _touch(memories[k], memories[other]):
                    raise DestinationBufferError(
                        f"the destinations {names[other]!r} and {names[k]!r} overlap in memory",
                        hint="Give each its own memory, or load only one of the two",
                    )
            reach.append((high, k))
        else:
            reach = [(high, k)]
        furthest = max(furthest, high)


def _side_by_side(one: Memory, other: Memory) -> bool:
    """Whether two are parts of the columns of one matrix that don't meet: the usual way to share an extent."""
    steps = one.byte_strides()
    if one.strides is None or one.strides != other.strides or min(steps) <= 0:
        return False
    row = max(steps)
    axis = steps.index(row)
    widths = [
        memory.itemsize
        + sum((size - 1) * step for k, (size, step) in enumerate(zip(memory.shape, steps, strict=True)) if k != axis)
        for memory in (one, other)
    ]
    apart = (other.pointer - one.pointer) % row
    return widths[0] <= apart and apart + widths[1] <= row


def _touch(one: Memory, other: Memory) -> bool:
    if one.device != other.device:
        return False
    if one.strides is None and other.strides is None:
        return True  # their extents intersect
    if _side_by_side(one, other):
        return False
    from dlpack_loader.runtime import arrays  # NumPy is imported when it is needed

    before = min(memory.extent()[0] for memory in (one, other)) - 1  # a device's addresses may be too long for NumPy
    views = [
        arrays.array_at(
            memory.pointer - before, (*memory.shape, memory.itemsize), (*memory.byte_strides(), 1), arrays.BYTE
        )
        for memory in (one, other)
    ]
    return arrays.shares_memory(*views)
