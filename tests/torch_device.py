"""A device of torch's own that is written in Python here, and its memory for checkpoints to be loaded into.

Its name is ``emu``. torch dispatches to it as to any other (its key is PrivateUse1): tensors, views and storages are
torch's own, and ``torch.emu`` has streams and events as ``torch.xpu`` has. Memory, streams and events are those of the
emulated driver, so the host can't touch the memory, and copies run late. What torch does not let Python register is
pinned memory: where a check wants it, ``torch.empty(pin_memory=True)`` is a double that takes it from the driver, in
powers of two as torch's allocator does.

A device can be registered once and for the life of a process: ``Backend(driver, folder).register()`` does it.
"""

from __future__ import annotations

import ctypes
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch

from tests.emulation import Driver
from tests.emulation import Stream as Queue
from tests.files import raw_bytes

__all__ = ["Backend", "EmuStream", "Guarded", "pinning", "raw", "without_streams"]

GUARD = 64


class Backend:
    """The device's module in torch, and what it runs on."""

    def __init__(self, driver: Driver, folder: Path) -> None:
        from dlpack_loader.runtime.cuda import open_device  # once the driver is there

        self.driver, self.folder = driver, folder
        self.cuda = open_device(0)
        self.at_once = self.most_at_once = 0
        self.fails_at = -1
        self.copies: list[bool] = []
        """Of each copy, whether it was one that does not block."""
        self.local = threading.local()
        self.first = driver.stream(0)
        self.kept: dict[int, Any] = {}

    def path(self, name: str = "m.safetensors") -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder)) / name

    # What torch asks of a device's module

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    # Streams and events, as torch.xpu has them

    @property
    def Stream(self) -> Callable[..., EmuStream]:  # noqa: N802
        self._if_streamed("Stream")
        return lambda device=None: EmuStream(self, self.driver.stream(0))

    @property
    def Event(self) -> Callable[[], EmuEvent]:  # noqa: N802
        self._if_streamed("Event")
        return lambda: EmuEvent(self)

    @property
    def current_stream(self) -> Callable[..., EmuStream]:
        self._if_streamed("current_stream")
        return lambda device=None: getattr(self.local, "stream", None) or EmuStream(self, self.first)

    @property
    def stream(self) -> Callable[[EmuStream], Any]:
        self._if_streamed("stream")
        return self._using

    @contextmanager
    def _using(self, stream: EmuStream) -> Iterator[None]:
        before = getattr(self.local, "stream", None)
        self.local.stream = stream
        try:
            yield
        finally:
            self.local.stream = before

    streamed: ClassVar[bool] = True

    def _if_streamed(self, name: str) -> None:
        if not Backend.streamed:
            raise AttributeError(name)

    # What its kernels do

    def queue(self) -> Queue:
        """What is current for them."""
        stream: EmuStream | None = getattr(self.local, "stream", None)
        return self.first if stream is None else stream.queue

    def allocate(self, nbytes: int) -> Any:
        memory = self.driver.memory(0, max(nbytes, 1))
        storage = torch._C._construct_storage_from_data_pointer(memory.pointer, torch.device("emu", 0), nbytes)
        weakref.finalize(storage, memory.free).atexit = False
        return storage

    def copy(self, source: torch.Tensor, target: torch.Tensor, *, blocks: bool) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if not blocks or source.is_cpu:
                self.copies.append(not blocks)
            if self.fails_at == len(self.copies):
                raise RuntimeError("the device is lost")
            if source.is_cpu:
                source = source.to(target.dtype).contiguous()  # what copies between devices are asked to do too
                at = source.data_ptr()
                with self.cuda.current():
                    for there, nbytes in runs(target):
                        self.cuda.copy(there, at, nbytes, self.queue().handle)
                        at += nbytes
                    if blocks:
                        self.queue().synchronize()
            else:
                self.queue().synchronize()
                bits = bytearray(b"".join(self.driver.read(there, nbytes) for there, nbytes in runs(source)))
                target.view(torch.uint8).copy_(
                    torch.frombuffer(bits, dtype=torch.uint8).view(target.view(torch.uint8).shape)
                )
        finally:
            self.at_once -= 1

    def fill(self, tensor: torch.Tensor, byte: int) -> None:
        """Enqueue a kernel that sets every byte of a tensor."""
        for there, nbytes in runs(tensor):
            code = self.driver.core.stream_write(self.queue().handle, 0, there, bytes([byte]) * nbytes, nbytes)
            assert code == 0

    def register(self) -> None:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

        _setup_privateuseone_for_python_backend("emu", self)
        library = torch.library.Library("aten", "IMPL")
        self.kept[0] = library

        def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: Any = None, *_: Any, **__: Any) -> Any:
            dtype = dtype or torch.get_default_dtype()
            span = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
            bare = torch._C._acc.create_empty_tensor((0,), dtype)
            return bare.set_(self.allocate(span * dtype.itemsize), 0, list(size), list(stride))

        def empty(size: Sequence[int], *, dtype: Any = None, **_: Any) -> Any:
            return empty_strided(size, [prod(max(n, 1) for n in size[k + 1 :]) for k in range(len(size))], dtype)

        def whole(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
            return tensor.set_(storage, 0, [storage.nbytes() // tensor.itemsize], [1])

        def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            self.copy(source, target, blocks=not (non_blocking and Backend.streamed))
            return target

        def zero(tensor: torch.Tensor) -> torch.Tensor:
            self.fill(tensor, 0)
            return tensor

        for name, function in (
            ("empty_strided", empty_strided),
            ("empty.memory_format", empty),
            ("set_.source_Storage", whole),
            ("_copy_from", copy_from),
            ("zero_", zero),
        ):
            library.impl(name, function, "PrivateUse1")
        # Views touch no memory: the CPU's kernels make them.
        for name in ("set_.source_Storage_storage_offset", "as_strided", "view", "_reshape_alias"):
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, _of_the_cpu(operator), "PrivateUse1")


def _of_the_cpu(operator: Any) -> Callable[..., Any]:
    return lambda *arguments: operator._op_dk(torch._C.DispatchKey.CPU, *arguments)


class EmuStream:
    def __init__(self, backend: Backend, queue: Queue) -> None:
        self.backend, self.queue = backend, queue
        self.device = torch.device("emu", 0)

    def wait_event(self, event: EmuEvent) -> None:
        with self.backend.cuda.current():
            self.backend.cuda.wait(self.queue.handle, event.handle)

    def wait_stream(self, stream: EmuStream) -> None:
        event = EmuEvent(self.backend)
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.queue.synchronize()


class EmuEvent:
    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        with backend.cuda.current():
            self.handle = backend.cuda.create_event()
        weakref.finalize(self, _destroy, backend.cuda, self.handle)

    def record(self, stream: EmuStream) -> None:
        with self.backend.cuda.current():
            self.backend.cuda.record(self.handle, stream.queue.handle)

    def synchronize(self) -> None:
        with self.backend.cuda.current():
            self.backend.cuda.synchronize_event(self.handle)

    def query(self) -> bool:
        with self.backend.cuda.current():
            return self.backend.cuda.is_done(self.handle)


def _destroy(cuda: Any, event: int) -> None:
    with cuda.current():
        cuda.destroy_event(event)


def runs(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """The contiguous pieces of a tensor, by address."""
    if tensor.is_contiguous():
        if tensor.nbytes:
            yield tensor.data_ptr(), tensor.nbytes
        return
    for k in range(tensor.shape[0]):
        yield from runs(tensor[k])


@contextmanager
def without_streams() -> Iterator[None]:
    """As on a device whose module has none, ``mps`` for one."""
    Backend.streamed = False
    try:
        yield
    finally:
        Backend.streamed = True


@contextmanager
def pinning(driver: Driver) -> Iterator[None]:
    """A double of torch's pinned memory."""
    whole, told = torch.empty, torch.Tensor.is_pinned
    pinned: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if not pin_memory:
            return whole(*size, **options)
        nbytes = size[0]
        memory = driver.memory(0, 1 << (nbytes - 1).bit_length(), kind="pinned")
        made = torch.frombuffer((ctypes.c_char * nbytes).from_address(memory.pointer), dtype=torch.uint8)
        weakref.finalize(made, memory.free)
        pinned.add(made)
        return made

    with (
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: tensor in pinned or told(tensor)),
    ):
        yield


# Its memory, as a check sees it


def raw(backend: Backend, tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor as they are now: nothing that is queued runs for this."""
    return b"".join(backend.driver.read(there, nbytes) for there, nbytes in runs(tensor))


class Guarded:
    """Tensors like others, each in the middle of guard bytes, so that each has an offset into its storage."""

    def __init__(self, backend: Backend, like: dict[str, torch.Tensor]) -> None:
        self.backend = backend
        self.tensors: dict[str, torch.Tensor] = {}
        self.around: dict[str, torch.Tensor] = {}
        for name, tensor in like.items():
            around = torch.empty(tensor.nbytes + 2 * GUARD, dtype=torch.uint8, device="emu")
            backend.driver.write(around.data_ptr(), b"\xa5" * around.nbytes)
            self.around[name] = around
            self.tensors[name] = around[GUARD:-GUARD].view(tensor.dtype).view(tensor.shape)

    def disturb(self) -> None:
        """Enqueue kernels that write every tensor."""
        for tensor in self.tensors.values():
            self.backend.fill(tensor, 0x77)

    def right(self, wanted: dict[str, torch.Tensor]) -> bool:
        return all(raw(self.backend, self.tensors[name]) == raw_bytes(tensor) for name, tensor in wanted.items())

    def check(self, wanted: dict[str, torch.Tensor]) -> None:
        for name, tensor in wanted.items():
            bits = raw(self.backend, self.around[name])
            assert bits[GUARD:-GUARD] == raw_bytes(tensor), name
            assert set(bits[:GUARD] + bits[-GUARD:]) == {0xA5}, name
