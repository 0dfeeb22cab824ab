"""Copies of lazy tensors collected and read together: one plan, in the order of the files, several reads at a time.

A weight loader copies one tensor after the other, and between two of them the storage is idle. Here a copy is noted,
with its destination checked, and all of them are read at the end. Torch can't tell the difference: an operation that
touches memory with a copy still to come makes all of them happen first, and so does handing out such memory.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dlpack_loader.destination import Memory
from dlpack_loader.filling import Access, fill
from dlpack_loader.framework import describer
from dlpack_loader.matching import Match
from dlpack_loader.reads import Transfer
from dlpack_loader.runtime.files import Hold
from dlpack_loader.stream import Streams
from dlpack_loader.transfer import LoadReport

__all__ = ["Deferred", "Watch", "WatchExports"]

_EXPORTS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *("numpy", "tolist", "data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_", "apply_"),
        *("map_", "__repr__", "__format__", "__array__", "__dlpack__", "__deepcopy__", "__reduce_ex__"),
        "__cuda_array_interface__",
    )
    if hasattr(torch.Tensor, name)
)
"""What hands out the memory of a tensor, or its values, past torch's dispatcher."""

_ADDRESSED = ("cpu", "cuda")
"""Types of torch's devices whose tensors say their address."""


@dataclass(slots=True)
class _Extents:
    """Ranges of addresses that have no byte in common, sorted."""

    lows: list[int] = field(default_factory=list)
    highs: list[int] = field(default_factory=list)

    def meets(self, low: int, high: int) -> bool:
        after = bisect_right(self.lows, low)
        return (after > 0 and self.highs[after - 1] > low) or (after < len(self.lows) and self.lows[after] < high)

    def add(self, low: int, high: int) -> None:
        at = bisect_right(self.lows, low)
        self.lows.insert(at, low)
        self.highs.insert(at, high)


class Deferred:
    """Copies that are still to be made, all by one thread.

    Parameters
    ----------
    done
        Called with each transfer made and the report of all.
    """

    def __init__(self, access: Access, done: Callable[[list[Transfer], LoadReport], None]) -> None:
        self._access = access
        self._done = done
        self._transfers: list[Transfer] = []
        self._memories: list[Memory] = []
        self._destinations: list[torch.Tensor] = []
        self._holds: list[Hold] = []
        self._streams: dict[Any, torch.Tensor] = {}
        """Streams of torch that were current when a copy was noted, each with one of its destinations."""
        self._extents: dict[torch.device, _Extents] = {}

    def add(self, transfer: Transfer, memory: Memory, destination: torch.Tensor, hold: Hold) -> None:
        """Note a copy; those that were noted are made first where one writes what this one does."""
        low, high = memory.extent()
        extents = self._extents.get(destination.device)
        if extents is not None and extents.meets(low, high):
            self.flush()
            extents = None
        if extents is None:
            extents = self._extents[destination.device] = _Extents()
        extents.add(low, high)
        self._transfers.append(msgspec.structs.replace(transfer, destination=len(self._memories)))
        self._memories.append(memory)
        self._destinations.append(destination)
        self._holds.append(hold)
        stream = _current_stream(destination.device)
        if stream is not None:
            self._streams[stream] = destination

    def settle(self, values: list[torch.Tensor]) -> None:
        """Make the copies if one of them writes to any of these tensors."""
        if self._transfers and any(map(self._concerns, values)):
            self.flush()

    def flush(self) -> None:
        """Make the copies."""
        transfers, destinations = self._transfers, self._destinations
        kept = self._memories, self._holds  # until all is read
        noted = self._streams
        self._transfers, self._memories, self._destinations, self._holds = [], [], [], []
        self._streams, self._extents = {}, {}
        if not transfers:
            return
        begin = time.perf_counter()
        with Streams() as streams:
            describe = describer(streams)
            # Each copy comes after the work of the stream that was current when it was noted.
            for stream, destination in noted.items():
                if stream != _current_stream(destination.device):
                    with _module(destination.device).stream(stream):
                        describe(destination)
            # Anew: after what their producers have enqueued by now, and where their storage was moved to.
            memories = list(map(describe, destinations))
            # No objects: torch has counted each write when the copy was noted.
            found = Match(transfers, [transfer.name for transfer in transfers], memories)
            report = fill(self._access, found, streams, begin)
        del kept
        self._done(transfers, report)

    def _concerns(self, value: torch.Tensor) -> bool:
        if value.is_meta:
            return False
        if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return True  # it has others inside
        extents = self._extents.get(value.device)
        if extents is None:
            return False
        if value.device.type not in _ADDRESSED:
            return True
        try:
            low = value.data_ptr()
            reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        except RuntimeError:  # layouts without an address
            return True
        return value.numel() > 0 and extents.meets(low, low + (1 + reach) * value.itemsize)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees this thread's operations of torch, and makes the copies before one touches memory that they write.

    Parameters
    ----------
    is_noted
        Whether an operation is a copy that is about to be noted.
    ignored
        Tensors without memory.
    """

    def __init__(
        self, deferred: Deferred, is_noted: Callable[[Any, tuple[Any, ...]], bool], ignored: type[torch.Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._deferred = deferred
        self._is_noted = is_noted
        self._ignored = ignored

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare the wrapper that keeps torch.compile out of here: it imports the compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let the operation happen, after what it depends on."""
        kwargs = kwargs or {}
        if func.is_view:
            if _is_composite(func):  # it may copy; where autograd is off nothing else takes it apart
                with self:
                    return func.decompose(*args, **kwargs)
        elif not self._is_noted(func, args):
            self._deferred.settle(_tensors((*args, *kwargs.values()), self._ignored))
        return func(*args, **kwargs)


class WatchExports(TorchFunctionMode):
    """Makes the copies before this thread hands out memory that they write, as an address, an array or a pickle."""

    def __init__(self, deferred: Deferred, ignored: type[torch.Tensor]) -> None:
        super().__init__()
        self._deferred = deferred
        self._ignored = ignored

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let the call happen, after what it depends on."""
        if func in _EXPORTS:
            self._deferred.settle(_tensors(args, self._ignored))
        return func(*args, **(kwargs or {}))


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type, None)


def _current_stream(device: torch.device) -> Any | None:
    """Return the stream that torch's operations on a device go to; None where there are no streams."""
    module = None if device.type == "cpu" else _module(device)
    if not (hasattr(module, "current_stream") and hasattr(module, "stream")):
        return None
    return module.current_stream(device)  # type: ignore[union-attr]


def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")  # noqa: SLF001


def _tensors(given: tuple[Any, ...], ignored: type[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors among arguments: operators take them alone, or in lists."""
    nested = (inner for value in given if isinstance(value, (list, tuple)) for inner in value)
    return [value for value in (*given, *nested) if isinstance(value, torch.Tensor) and not isinstance(value, ignored)]
