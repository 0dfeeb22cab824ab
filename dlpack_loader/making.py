"""Tensors made from entries: views of mapped pages where that serves, fresh memory that is read into elsewhere.

A tensor that a framework spreads over devices is made of pieces: each is memory of its own, filled by the same plan as
all the others, and the framework joins them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from dlpack_loader.backend import BackendInfo, Mapper, check_host, is_small, mapping_backend, read_small
from dlpack_loader.destination import Memory, wanted_shape
from dlpack_loader.dtype import BY_CODE, DType
from dlpack_loader.errors import LoaderError, MisalignedSelectionError, OptionError, UnsupportedError
from dlpack_loader.filling import Access, fill
from dlpack_loader.framework import HOST, Allocation, Framework, Piece, Place, Spread, describer
from dlpack_loader.header import Entry
from dlpack_loader.matching import Match
from dlpack_loader.reads import Transfer
from dlpack_loader.selection import Selection, byte_strides, select
from dlpack_loader.stream import Streams

__all__ = ["Maker"]


class _Part(NamedTuple):
    """Memory to be made and filled: a selection of an entry."""

    entry: Entry
    dtype: DType
    selection: Selection
    device: tuple[int, int]


class _Tensor(NamedTuple):
    """A tensor to be made, of one part or of several."""

    entry: Entry
    parts: tuple[_Part, ...]
    shape: tuple[int, ...]
    """The one that its memory would have in one piece."""
    spread: Spread | None


class Maker:
    """Makes tensors of one framework on one device, or wherever a layout of the framework says.

    Parameters
    ----------
    place
        As the framework resolved it.
    backend
        "auto" and "mmap" map tensors, on the host only.
    stream
        Of the caller's, or None: what a load on the device waits for, beside the framework's current stream.

    Raises
    ------
    OptionError
        The backend makes no tensors there, or there is no stream.
    """

    def __init__(self, access: Access, framework: Framework, place: Place, *, backend: str, stream: object) -> None:
        on_host = place == HOST
        if callable(place):
            if backend == "mmap":
                raise OptionError(
                    "backend 'mmap' makes views of a file, which show what is written to it later, and this "
                    "framework's arrays never change",
                    hint='Use backend="pread" or "auto", which read into memory of their own',
                )
            if stream is not None:
                raise OptionError("this framework orders its own work and takes no stream", hint="Pass stream=None")
        elif backend == "mmap" and not on_host:
            raise OptionError(
                "backend 'mmap' makes tensors in host memory only", hint='Use backend="auto" to load to a device'
            )
        self._access = access
        self._framework = framework
        self._place = place
        self._stream = stream
        maps = on_host and backend in ("auto", "mmap")
        self._mapper: Mapper | None = mapping_backend(access.files, named=backend == "mmap") if maps else None
        self._filled: BackendInfo | None = None

    def info(self) -> BackendInfo:
        """Say where the tensors come from."""
        if self._mapper is not None:
            return self._mapper.info()
        if self._filled is not None:
            return self._filled
        if self._place == HOST:
            return BackendInfo("pread", True, "tensors are read into memory of their own, as the caller named it")
        return BackendInfo("auto", False, "nothing was read yet; tensors are made by the framework on its device")

    def make(self, wanted: Sequence[tuple[Entry, Any]]) -> list[Any]:
        """Make a tensor for each entry and index; what has to be read is read together, in the order of the files.

        On return all bytes are there, for any reader on any stream.

        Raises
        ------
        SelectionError, MisalignedSelectionError
            An index does not suit its entry, or a piece of it ends inside a byte.
        OptionError
            The backend that was named does not serve the host, or the layout does not serve an entry.
        UnsupportedError
            The framework has no tensor for an entry.
        DeviceError
            The device's driver failed; nothing is handed out.
        StorageError
            It could not be read; nothing is handed out.
        """
        tensors = [self._tensor(entry, index) for entry, index in wanted]
        values = [self._view(tensor) for tensor in tensors]
        missing = [number for number, value in enumerate(values) if value is None]
        if missing:
            filled = iter(self._read([part for number in missing for part in tensors[number].parts]))
            for number in missing:
                tensor = tensors[number]
                pieces = [next(filled) for _ in tensor.parts]
                values[number] = pieces[0] if tensor.spread is None else _join(tensor, pieces)
        return values

    def _tensor(self, entry: Entry, index: Any) -> _Tensor:
        """Decide which parts a tensor is made of."""
        dtype = BY_CODE[entry.dtype]
        if dtype.code == "F4" and entry.shape[-1] % 2:
            raise UnsupportedError(
                f"f4_x2 dtype requires that the last dim be divisible by 2: got {list(entry.shape)}",
                tensor=entry.name,
                file=entry.file,
                hint="Read its bytes with read_into(name, Target(uint8_destination, reinterpret=True))",
            )
        selection = select(index, dtype, entry.shape, tensor=entry.name)
        shape = wanted_shape(dtype, selection)
        if not callable(self._place):
            return _Tensor(entry, (_Part(entry, dtype, selection, self._place),), shape, None)
        spread = self._place(entry, dtype, _elements(dtype, selection))
        parts = tuple(
            _Part(entry, dtype, _crop(selection, dtype, piece, entry), piece.device) for piece in spread.pieces
        )
        return _Tensor(entry, parts, shape, spread)

    def _view(self, tensor: _Tensor) -> Any | None:
        """View a contiguous selection of an entry, or return None when it is to be read."""
        if self._mapper is None:
            return None
        entry, dtype, selection, _ = tensor.parts[0]
        if not selection.contiguous:
            return None
        itemsize = dtype.dlpack[1] * dtype.dlpack[2] // 8
        array = self._mapper.view(entry, entry.offset + selection.offset, selection.nbytes, itemsize)
        if array is None:
            return None
        return self._framework.wrap(array, dtype, tensor.shape)

    def _read(self, parts: Sequence[_Part]) -> list[Any]:
        """Read into memory that is allocated for it."""
        if not parts:  # of tensors that lie on devices of other processes only
            return []
        with Streams(self._stream) as streams:
            fresh, memories = self._allocate(parts, streams)
            found = Match(
                transfers=[
                    _transfer(part, memory, number)
                    for number, (part, memory) in enumerate(zip(parts, memories, strict=True))
                ],
                names=[part.entry.name for part in parts],
                memories=memories,
            )
            first = found.transfers[0]
            small = len(parts) == 1 and self._place == HOST and is_small(first)
            if small and self._access.progress is None:
                read_small(self._access.files, memories[0], first)
            else:
                report = fill(self._access, found, streams, time.perf_counter())
                if self._place != HOST:
                    self._filled = report.info()
        for allocation in fresh:
            if allocation.finish is not None:
                allocation.finish()
        return [allocation.value for allocation in fresh]

    def _allocate(self, parts: Sequence[_Part], streams: Streams) -> tuple[list[Allocation], list[Memory]]:
        """Allocate for each part, device by device."""
        fresh: dict[int, Allocation] = {}
        for device in dict.fromkeys(part.device for part in parts):
            numbers = [number for number, part in enumerate(parts) if part.device == device]
            if device == HOST:
                check_host(self._access.backend)
                fresh.update((number, self._empty(parts[number])) for number in numbers)
                continue
            # It is current already, so that a framework that goes back to where it was makes no context there.
            with streams.of(device).device.current():
                fresh.update((number, self._empty(parts[number])) for number in numbers)
        # Exported once all are allocated: what our stream waits for comes after the last use of every block.
        describe = describer(streams)
        memories = [_memory(parts[number], fresh[number], describe) for number in range(len(parts))]
        return [fresh[number] for number in range(len(parts))], memories

    def _empty(self, part: _Part) -> Allocation:
        entry, dtype, selection, device = part
        try:
            return self._framework.empty(dtype, selection.shape, selection.unit, device)
        except UnsupportedError as error:
            error.tensor, error.file = entry.name, entry.file
            raise
        except LoaderError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:  # sizes that no framework can count, or no machine hold
            raise _impossible(entry, error) from error


def _join(tensor: _Tensor, pieces: Sequence[Any]) -> Any:
    assert tensor.spread is not None
    try:
        return tensor.spread.join(tensor.shape, pieces)
    except LoaderError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise _impossible(tensor.entry, error) from error


def _impossible(entry: Entry, error: Exception) -> UnsupportedError:
    reason = str(error).splitlines() or [type(error).__name__]
    return UnsupportedError(
        f"no tensor can be made of shape {list(entry.shape)}: {reason[0]}",
        tensor=entry.name,
        file=entry.file,
    )


def _elements(dtype: DType, selection: Selection) -> tuple[int, ...]:
    """Return the elements in each dimension of a selection; bytes, where its units are none of whole elements."""
    if dtype.group == 1 or selection.unit != dtype.group_bytes or not selection.shape:
        return selection.shape
    return (*selection.shape[:-1], selection.shape[-1] * dtype.group)


def _crop(selection: Selection, dtype: DType, piece: Piece, entry: Entry) -> Selection:
    """Return the part of a selection that one piece holds."""
    offset = selection.offset
    shape: list[int] = []
    elements = _elements(dtype, selection)
    for (begin, end), size, units, stride in zip(piece.box, elements, selection.shape, selection.strides, strict=True):
        each = size // units if units else 1
        if begin % each or end % each:
            raise MisalignedSelectionError(
                f"a piece of {list(elements)} elements begins or ends inside a byte",
                tensor=entry.name,
                file=entry.file,
                hint=f"{entry.dtype} can be cut in the last dimension at multiples of {each} elements",
            )
        offset += begin // each * stride
        shape.append((end - begin) // each)
    return Selection(offset, tuple(shape), selection.strides, selection.unit)


def _transfer(part: _Part, memory: Memory, number: int) -> Transfer:
    """Return the transfer that fills the memory of a part, which the framework allocated as it was asked to."""
    entry, dtype, selection, _ = part
    shape = wanted_shape(dtype, selection)
    assert (memory.dtype, memory.shape, memory.strides) == (dtype.dlpack, shape, None), (memory, shape)
    if not selection.offset and selection.nbytes == entry.nbytes:
        return Transfer(entry.name, entry.file, entry.offset, number, entry.nbytes, (), None, entry.nbytes)
    return Transfer.strided(
        entry.name,
        entry.file,
        entry.offset + selection.offset,
        number,
        shape=selection.shape,
        source=selection.strides,
        target=byte_strides(selection.shape, selection.unit),
        unit=selection.unit,
        written=selection.nbytes,
    )


def _memory(part: _Part, allocation: Allocation, describe: Any) -> Memory:
    if allocation.memory is not None:
        return allocation.memory
    memory: Memory = describe(allocation.raw)
    shape = wanted_shape(part.dtype, part.selection)
    return msgspec.structs.replace(memory, dtype=part.dtype.dlpack, shape=shape)
