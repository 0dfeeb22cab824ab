"""Tensors made from entries: views of mapped pages where that serves, fresh memory that is read into elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dlpack_loader.backend import (
    Backend,
    BackendInfo,
    Mapper,
    filling_backend,
    is_small,
    mapping_backend,
    read_small,
)
from dlpack_loader.bounds import Bounds
from dlpack_loader.destination import Memory, transfer_into, wanted_shape
from dlpack_loader.dtype import BY_CODE, DType
from dlpack_loader.errors import UnsupportedError
from dlpack_loader.framework import Allocation, Framework
from dlpack_loader.header import Entry
from dlpack_loader.plan import Plan
from dlpack_loader.progress import Progress
from dlpack_loader.reads import Transfer
from dlpack_loader.runtime.files import Files
from dlpack_loader.selection import Selection, select
from dlpack_loader.transfer import run

__all__ = ["Access", "Maker"]


@dataclass(frozen=True, slots=True)
class Access:
    """How the files of an open checkpoint are read."""

    files: Files
    bounds: Bounds
    progress: Progress | None
    direct_io: bool | None

    def perform(self, plan: Plan, memories: Sequence[Memory]) -> Backend:
        """Perform a plan and return the backend that did, with its counts."""
        backend = filling_backend(self.files, memories, self.bounds, direct_io=self.direct_io)
        run(plan, backend, self.progress)
        return backend


class Maker:
    """Makes tensors of one framework."""

    def __init__(self, access: Access, framework: Framework, *, maps: bool) -> None:
        self._access = access
        self._framework = framework
        self._mapper: Mapper | None = mapping_backend(access.files) if maps else None

    def info(self) -> BackendInfo:
        """Say where the tensors come from."""
        if self._mapper is not None:
            return self._mapper.info()
        return BackendInfo("pread", True, "tensors are read into memory of their own, as the caller named it")

    def make(self, wanted: Sequence[tuple[Entry, Any]]) -> list[Any]:
        """Make a tensor for each entry and index; what has to be read is read together, in the order of the files.

        Raises
        ------
        SelectionError, MisalignedSelectionError
            An index does not suit its entry.
        UnsupportedError
            The framework has no tensor for an entry.
        StorageError
            It could not be read; nothing is handed out.
        """
        values: list[Any] = []
        fresh: list[Allocation] = []
        transfers: list[Transfer] = []
        for entry, index in wanted:
            dtype = BY_CODE[entry.dtype]
            selection = select(index, dtype, entry.shape, tensor=entry.name)
            value = self._view(entry, dtype, selection)
            if value is None:
                allocation = self._allocate(entry, dtype, selection)
                transfers.append(transfer_into(allocation.memory, entry, len(fresh), entry.name, index))
                fresh.append(allocation)
                value = allocation.value
            values.append(value)
        if fresh:
            self._read(fresh, transfers)
        return values

    def _view(self, entry: Entry, dtype: DType, selection: Selection) -> Any | None:
        """View a contiguous selection of an entry, or return None when it is to be read."""
        if self._mapper is None or not selection.contiguous:
            return None
        itemsize = dtype.dlpack[1] * dtype.dlpack[2] // 8
        array = self._mapper.view(entry, entry.offset + selection.offset, selection.nbytes, itemsize)
        if array is None:
            return None
        return self._framework.wrap(array, dtype, wanted_shape(dtype, selection))

    def _allocate(self, entry: Entry, dtype: DType, selection: Selection) -> Allocation:
        if dtype.code == "F4" and entry.shape[-1] % 2:
            raise UnsupportedError(
                f"f4_x2 dtype requires that the last dim be divisible by 2: got {list(entry.shape)}",
                tensor=entry.name,
                file=entry.file,
                hint="Read its bytes with read_into(name, Target(uint8_destination, reinterpret=True))",
            )
        try:
            return self._framework.empty(dtype, selection.shape, selection.unit)
        except (TypeError, ValueError) as error:  # a header may name sizes that no framework can count
            raise UnsupportedError(
                f"no tensor can be made of shape {list(entry.shape)}: {str(error).splitlines()[0]}",
                tensor=entry.name,
                file=entry.file,
            ) from error

    def _read(self, fresh: Sequence[Allocation], transfers: Sequence[Transfer]) -> None:
        """Read into memory that was allocated for it."""
        access, only = self._access, transfers[0]
        if len(fresh) == 1 and is_small(only) and access.progress is None:
            read_small(access.files, fresh[0].memory, only)
        else:
            plan = Plan.make(transfers, [transfer.name for transfer in transfers], access.bounds)
            access.perform(plan, [allocation.memory for allocation in fresh])
        for allocation in fresh:
            if allocation.finish is not None:
                allocation.finish()
