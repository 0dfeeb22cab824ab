"""Tensors made from entries: views of mapped pages where that serves, fresh memory that is read into elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from dlpack_loader.backend import BackendInfo, Mapper, check_host, is_small, mapping_backend, read_small
from dlpack_loader.destination import Memory, transfer_into, wanted_shape
from dlpack_loader.dtype import BY_CODE, DType
from dlpack_loader.errors import LoaderError, OptionError, UnsupportedError
from dlpack_loader.filling import Access, fill
from dlpack_loader.framework import HOST, Allocation, Framework, describer
from dlpack_loader.header import Entry
from dlpack_loader.matching import Match
from dlpack_loader.selection import Selection, select
from dlpack_loader.stream import Streams

__all__ = ["Maker"]


class _Part(NamedTuple):
    """A tensor to be made: an entry, or a part of one."""

    entry: Entry
    index: Any
    dtype: DType
    selection: Selection


class Maker:
    """Makes tensors of one framework on one device.

    Parameters
    ----------
    device
        As the framework resolved it.
    backend
        "auto" and "mmap" map tensors, on the host only.
    stream
        Of the caller's, or None: what a load on the device waits for, beside the framework's current stream.

    Raises
    ------
    OptionError
        The backend makes no tensors there.
    """

    def __init__(
        self, access: Access, framework: Framework, device: tuple[int, int], *, backend: str, stream: object
    ) -> None:
        on_host = device == HOST
        if backend == "mmap" and not on_host:
            raise OptionError(
                "backend 'mmap' makes tensors in host memory only", hint='Use backend="auto" to load to a device'
            )
        self._access = access
        self._framework = framework
        self._device = device
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
        if self._device == HOST:
            return BackendInfo("pread", True, "tensors are read into memory of their own, as the caller named it")
        return BackendInfo("auto", False, "nothing was read yet; tensors are made by the framework on its device")

    def make(self, wanted: Sequence[tuple[Entry, Any]]) -> list[Any]:
        """Make a tensor for each entry and index; what has to be read is read together, in the order of the files.

        On return all bytes are there, for any reader on any stream.

        Raises
        ------
        SelectionError, MisalignedSelectionError
            An index does not suit its entry.
        OptionError
            The backend that was named does not serve the host.
        UnsupportedError
            The framework has no tensor for an entry.
        DeviceError
            The device's driver failed; nothing is handed out.
        StorageError
            It could not be read; nothing is handed out.
        """
        parts = []
        for entry, index in wanted:
            dtype = BY_CODE[entry.dtype]
            if dtype.code == "F4" and entry.shape[-1] % 2:
                raise UnsupportedError(
                    f"f4_x2 dtype requires that the last dim be divisible by 2: got {list(entry.shape)}",
                    tensor=entry.name,
                    file=entry.file,
                    hint="Read its bytes with read_into(name, Target(uint8_destination, reinterpret=True))",
                )
            parts.append(_Part(entry, index, dtype, select(index, dtype, entry.shape, tensor=entry.name)))
        values = [self._view(part) for part in parts]
        missing = [number for number, value in enumerate(values) if value is None]
        if missing:
            for number, value in zip(missing, self._read([parts[number] for number in missing]), strict=True):
                values[number] = value
        return values

    def _view(self, part: _Part) -> Any | None:
        """View a contiguous selection of an entry, or return None when it is to be read."""
        entry, _, dtype, selection = part
        if self._mapper is None or not selection.contiguous:
            return None
        itemsize = dtype.dlpack[1] * dtype.dlpack[2] // 8
        array = self._mapper.view(entry, entry.offset + selection.offset, selection.nbytes, itemsize)
        if array is None:
            return None
        return self._framework.wrap(array, dtype, wanted_shape(dtype, selection))

    def _read(self, parts: Sequence[_Part]) -> list[Any]:
        """Read into memory that is allocated for it."""
        with Streams(self._stream) as streams:
            fresh, memories = self._allocate(parts, streams)
            found = Match(
                transfers=[
                    transfer_into(memory, part.entry, number, part.entry.name, part.index)
                    for number, (part, memory) in enumerate(zip(parts, memories, strict=True))
                ],
                names=[part.entry.name for part in parts],
                memories=memories,
            )
            first = found.transfers[0]
            if len(parts) == 1 and memories[0].on_host and is_small(first) and self._access.progress is None:
                read_small(self._access.files, memories[0], first)
            else:
                report = fill(self._access, found, streams, time.perf_counter())
                if self._device != HOST:
                    self._filled = report.info()
        for allocation in fresh:
            if allocation.finish is not None:
                allocation.finish()
        return [allocation.value for allocation in fresh]

    def _allocate(self, parts: Sequence[_Part], streams: Streams) -> tuple[list[Allocation], list[Memory]]:
        if self._device == HOST:
            check_host(self._access.backend)
            fresh = [self._empty(part) for part in parts]
            return fresh, [allocation.memory for allocation in fresh if allocation.memory is not None]
        # The device is current already, so that a framework that goes back to where it was makes no context there.
        with streams.of(self._device).device.current():
            fresh = [self._empty(part) for part in parts]
        # Exported once all are allocated: what our stream waits for comes after the last use of every block.
        describe = describer(streams)
        memories = [
            msgspec.structs.replace(
                describe(allocation.raw), dtype=part.dtype.dlpack, shape=wanted_shape(part.dtype, part.selection)
            )
            for part, allocation in zip(parts, fresh, strict=True)
        ]
        return fresh, memories

    def _empty(self, part: _Part) -> Allocation:
        entry, _, dtype, selection = part
        try:
            return self._framework.empty(dtype, selection.shape, selection.unit, self._device)
        except UnsupportedError as error:
            error.tensor, error.file = entry.name, entry.file
            raise
        except (TypeError, ValueError, RuntimeError) as error:  # sizes that no framework can count, or no machine hold
            if isinstance(error, LoaderError):
                raise
            raise UnsupportedError(
                f"no tensor can be made of shape {list(entry.shape)}: {str(error).splitlines()[0]}",
                tensor=entry.name,
                file=entry.file,
            ) from error
