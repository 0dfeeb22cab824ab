"""Devices that have neither CUDA nor HIP, through torch: ``mps``, ``xpu``, and what registers itself as torch's own.

torch copies here, so its rules hold. A device whose module in torch has streams and events gets a stream of the load's
own and copies that do not block. On any other, and on ``mps``, each copy blocks until it is done: torch's copies to
``mps`` that do not block have been seen to bring wrong bytes, and its calls from several threads at once to end the
process, so there they also come one at a time.

Tensors on such devices need not have an address: on ``mps`` it is a handle. An address here is of 128 bits: the upper
half says which storage, the lower half which byte of it. So storages never meet, and views of one storage do.

Pinned memory is torch's, which keeps what is freed for its next user. Devices without streams get page-aligned host
memory that is not pinned.

The tests run this over a device of torch that is written in Python. It was not run on hardware, ``mps`` and ``xpu``
included.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from dlpack_loader.errors import DeviceError, LoaderError, OptionError, UnsupportedError
from dlpack_loader.runtime.device import EXTENSION, HPU, MAIA, METAL, MTIA, ONE_API

__all__ = ["TorchDevice", "address_of", "device_of", "kind_of", "module_of", "open_device"]

_SHIFT = 64
_OFFSET = (1 << _SHIFT) - 1

_NEEDED = ("Stream", "Event", "current_stream", "stream")
"""What a device's module in torch has where it has streams."""


def kind_of(name: str) -> int | None:
    """Return the number of a device type by torch's name for it, or None where its tensors are not served."""
    return _kinds().get(name)


def device_of(device: tuple[int, int]) -> torch.device:
    """Return torch's device of a number of :func:`kind_of` and an index."""
    return torch.device(next(name for name, kind in _kinds().items() if kind == device[0]), device[1])


def _kinds() -> dict[str, int]:
    own = torch._C._get_privateuse1_backend_name()  # noqa: SLF001 - the only way to learn it
    return {own: EXTENSION, "mps": METAL, "xpu": ONE_API, "maia": MAIA, "hpu": HPU, "mtia": MTIA}


def module_of(name: str) -> Any | None:
    """Return torch's module for a device type, or None where this torch has none or sees no device."""
    module = getattr(torch, name, None)
    for asked in ("is_available", "device_count"):
        if hasattr(module, asked):
            return module if getattr(module, asked)() else None
    return module


def address_of(storage: torch.UntypedStorage, offset: int) -> int:
    """Return the address of a byte of a storage."""
    return (storage.data_ptr() << _SHIFT) + offset


def open_device(kind: int, ordinal: int) -> TorchDevice:
    """Open a device by its number and index."""
    return TorchDevice(device_of((kind, ordinal)))


class TorchDevice:
    """One device of torch. Streams, events and memory are known here by numbers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.kind, self.ordinal = device.type, device.index
        self.unified = device.type == "mps"
        self._module = getattr(torch, device.type)
        self._streamed = device.type != "mps" and all(hasattr(self._module, name) for name in _NEEDED)
        self._objects: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self._storages: dict[int, torch.Tensor] = {}
        self._slots: dict[int, torch.Tensor] = {}
        self._turn = threading.Lock()
        self.pinned = self._streamed and self._can_pin()
        """Whether ``allocate_pinned`` pins."""
        self.rounds_pinned = self.pinned
        """Whether what it pins takes a power of two bytes, as torch's allocator does."""

    def current(self) -> AbstractContextManager[None]:
        """Make the device torch's current one of its type on this thread."""
        if not hasattr(self._module, "device"):
            return nullcontext()
        chosen: AbstractContextManager[None] = self._module.device(self.ordinal)
        return chosen

    # Storages and streams of the caller's

    def adopt(self, storage: Any, stream: int) -> None:
        """Know a storage until ``close``, and make a stream wait for what torch's current one has now."""
        key, known = storage.data_ptr(), self._storages.get(storage.data_ptr())
        if known is None or known.nbytes < storage.nbytes():
            with self._calls("set_"), torch.inference_mode(mode=False):
                view = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            self._storages[key] = _plain(view)
        if self._streamed:
            with self._calls("wait_stream"):
                self._objects[stream].wait_stream(self._module.current_stream(self._device))

    def number_of(self, stream: Any) -> int:
        """Return a number for a stream object of the caller's."""
        if not self._streamed:
            raise UnsupportedError(
                f"torch has no streams on {self._device}, or none that a load can use",
                hint="Pass stream=None, and call wait() on a pending load",
            )
        if getattr(stream, "device", None) != self._device or not hasattr(stream, "wait_event"):
            raise OptionError(
                f"not a stream of {self._device}: {stream!r}", hint=f"Pass a torch.{self.kind}.Stream of that device"
            )
        return self._enter(stream)

    # The protocol of dlpack_loader.runtime.device.Device

    def allocate_pinned(self, nbytes: int) -> int:
        """Allocate host memory for torch to copy from, pinned where ``pinned`` says so."""
        if self.pinned:
            with self._calls("empty(pin_memory=True)"), torch.inference_mode(mode=False):
                memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        else:
            with torch.inference_mode(mode=False):
                memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        address = _plain(memory).data_ptr()
        self._slots[address] = memory
        return address

    def free_pinned(self, address: int) -> None:
        """Let it go."""
        del self._slots[address]

    def create_stream(self) -> int:
        """Create a stream; 0 stands for the one queue of a device without."""
        if not self._streamed:
            return 0
        with self._calls("Stream"):
            return self._enter(self._module.Stream(device=self._device))

    def destroy_stream(self, stream: int) -> None:
        """Let it go; torch keeps streams in a pool."""
        self._objects.pop(stream, None)

    def synchronize_stream(self, stream: int) -> None:
        """Wait for one stream; copies without one are done already."""
        if self._streamed:
            with self._calls("Stream.synchronize"):
                self._objects[stream].synchronize()

    def is_capturing(self, stream: int) -> bool:
        """Whether a graph is being captured, where torch can tell."""
        tells = getattr(self._module, "is_current_stream_capturing", None)
        if tells is None or not self._streamed:
            return False
        with self._on(stream):
            return bool(tells())

    def create_event(self) -> int:
        """Create an event; torch makes its own when it is recorded."""
        return self._enter(None)

    def destroy_event(self, event: int) -> None:
        """Let it go."""
        self._objects.pop(event, None)

    def record(self, event: int, stream: int) -> None:
        """Record the event on the stream."""
        if self._streamed:
            with self._calls("Event.record"):
                made = self._objects[event]
                if made is None:
                    made = self._objects[event] = self._module.Event()
                made.record(self._objects[stream])

    def wait(self, stream: int, event: int) -> None:
        """Make the stream wait for the event."""
        made = self._objects[event]
        if made is not None:
            with self._calls("Stream.wait_event"):
                self._objects[stream].wait_event(made)

    def synchronize_event(self, event: int) -> None:
        """Wait for the event on the host."""
        made = self._objects[event]
        if made is not None:
            with self._calls("Event.synchronize"):
                made.synchronize()

    def is_done(self, event: int) -> bool:
        """Whether the event has happened."""
        made = self._objects[event]
        if made is None:
            return True
        with self._calls("Event.query"):
            return bool(made.query())

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy to the device."""
        storage, offset = self._storages[target >> _SHIFT], target & _OFFSET
        with self._on(stream):
            storage[offset : offset + nbytes].copy_(self._staged(source, nbytes), non_blocking=self._streamed)

    def copy_rows(self, target: int, pitch: int, source: int, width: int, rows: int, stream: int) -> None:
        """Copy packed rows to rows ``pitch`` bytes apart."""
        storage, offset = self._storages[target >> _SHIFT], target & _OFFSET
        with self._on(stream):
            lines = storage.as_strided((rows, width), (pitch, 1), offset)
            lines.copy_(self._staged(source, rows * width).view(rows, width), non_blocking=self._streamed)

    def zero_rows(self, target: int, pitch: int, width: int, rows: int, stream: int) -> None:
        """Put zeros into rows ``pitch`` bytes apart."""
        storage, offset = self._storages[target >> _SHIFT], target & _OFFSET
        with self._on(stream):
            storage.as_strided((rows, width), (pitch, 1), offset).zero_()
            if not self._streamed:  # that does not block; a copy does, and comes after it
                storage[offset : offset + 1].copy_(torch.zeros(1, dtype=torch.uint8, device="cpu"))

    def close(self) -> None:
        """Let go of storages, streams and events."""
        self._storages.clear()
        self._objects.clear()

    def _enter(self, value: Any) -> int:
        number = next(self._numbers)
        self._objects[number] = value
        return number

    def _can_pin(self) -> bool:
        try:
            return _plain(torch.empty(1, dtype=torch.uint8, device="cpu", pin_memory=True)).is_pinned()
        except RuntimeError as error:  # no allocator of pinned memory is registered for this device
            if isinstance(error, LoaderError):
                raise
            return False

    def _staged(self, source: int, nbytes: int) -> torch.Tensor:
        for address, memory in list(self._slots.items()):
            if address <= source < address + memory.nbytes:
                return memory[source - address : source - address + nbytes]
        raise AssertionError(f"no slot has the address {source:#x}")

    @contextmanager
    def _on(self, stream: int) -> Iterator[None]:
        with self._calls("copy_"), self._module.stream(self._objects[stream]) if self._streamed else self._turn:
            yield

    @contextmanager
    def _calls(self, name: str) -> Iterator[None]:
        """Make torch's errors ours."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, LoaderError):
                raise
            raise DeviceError(f"torch's {name} failed on {self._device}: {str(error).splitlines()[0]}") from error


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has memory, or say that it has none."""
    if type(tensor) is not torch.Tensor:
        raise UnsupportedError(
            f"torch makes a {type(tensor).__name__} here, which has no memory", hint="Leave the FakeTensorMode first"
        )
    return tensor
