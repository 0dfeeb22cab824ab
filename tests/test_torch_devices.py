"""Devices that torch serves with neither CUDA nor HIP, over a device of torch's own that is written in Python.

A device can be registered once and for the life of a process, so one process runs every check, and tells. ``mps`` and
``xpu`` themselves are on no machine that runs this.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from dlpack_loader import Pending, Target, load_file, load_into, load_model, safe_open
from dlpack_loader.dtype import BY_CODE, DTYPES
from dlpack_loader.errors import (
    DestinationBufferError,
    DestinationTypeError,
    DeviceError,
    LoaderError,
    OptionError,
    UnsupportedError,
)
from dlpack_loader.framework import torch as for_torch
from dlpack_loader.runtime import torch as runtime
from dlpack_loader.runtime.device import METAL, OF_TORCH, ONE_API
from dlpack_loader.runtime.torch import TorchDevice
from dlpack_loader.stream import OwnedStream
from tests.emulation import Driver, Mode
from tests.files import raw_bytes, save, write_raw
from tests.torch_device import Backend, EmuStream, Guarded, pinning, raw, without_streams

CHECKS: dict[str, Callable[[Backend], None]] = {}


def check(function: Callable[[Backend], None]) -> Callable[[Backend], None]:
    CHECKS[function.__name__] = function
    return function


# What a check works with


def every_dtype(backend: Backend) -> tuple[Path, dict[str, torch.Tensor]]:
    tensors = {}
    for dtype in DTYPES:
        kind = getattr(torch, dtype.torch or "", None)
        if dtype.group == 1 and kind is not None:
            bits = torch.randint(0, 2 if dtype.code == "BOOL" else 255, (5 * 40 * dtype.bits // 8,), dtype=torch.uint8)
            tensors[dtype.code] = bits.view(kind).view(5, 40)
            tensors[f"{dtype.code}.scalar"] = bits[: dtype.bits // 8].clone().view(kind).view(())
            tensors[f"{dtype.code}.none"] = torch.empty(0, 3, dtype=kind)
    path = backend.path()
    return path, save(path, tensors)


def two(backend: Backend) -> tuple[Path, dict[str, torch.Tensor]]:
    """A tensor that takes each slot of a small ring many times, and a small one."""
    path = backend.path()
    tensors = {"x": torch.randint(0, 255, (400_000,), dtype=torch.uint8), "y": torch.arange(100.0)}
    return path, save(path, tensors)


@contextmanager
def raises(kind: type[BaseException], text: str) -> Iterator[None]:
    with pytest.raises(kind, match=text):
        yield


# The bytes


@check
def every_dtype_comes_into_existing_tensors(backend: Backend) -> None:
    path, tensors = every_dtype(backend)
    for mode in Mode:
        backend.driver.mode = mode
        for how in (ExitStack, without_streams, lambda: pinning(backend.driver)):
            room = Guarded(backend, tensors)
            with how():
                report = load_into(path, room.tensors)
            room.check(tensors)
            assert report.staged_bytes == report.bytes_read > 0
            pinned = how not in (ExitStack, without_streams)
            assert f"emu:0 is filled through {'pinned' if pinned else 'pageable'} memory" in report.reason
            assert (report.backend, report.bytes_written) == ("pread", sum(t.nbytes for t in tensors.values()))
    assert backend.driver.seen().failed == 0


@check
def every_dtype_comes_in_new_tensors(backend: Backend) -> None:
    numbers = np.random.default_rng(7)
    header: dict[str, Any] = {}
    contents: dict[str, bytes] = {}
    end = 0
    for dtype in DTYPES:
        nbytes = 3 * 8 * dtype.bits // 8
        contents[dtype.code] = numbers.bytes(nbytes)
        header[dtype.code] = {"dtype": dtype.code, "shape": (3, 8), "data_offsets": [end, end + nbytes]}
        end += nbytes
    path = write_raw(backend.path(), header, b"".join(contents.values()))
    backend.driver.mode = Mode.DEFERRED
    for device in ("emu", "emu:0", 0, torch.device("emu"), torch.device("emu", 0)):
        made = load_file(path, device=device)
        assert {str(tensor.device) for tensor in made.values()} == {"emu:0"}
        assert {name: raw(backend, tensor) for name, tensor in made.items()} == contents
        for code, tensor in made.items():
            wanted = BY_CODE[code].torch
            assert tensor.dtype == (getattr(torch, wanted) if wanted else torch.uint8), code
    with safe_open(path, device="emu") as reader:
        assert "nothing was read yet" in reader.backend_info().reason
        assert (
            raw(backend, reader.get_slice("F32")[::2, 3:5])
            == np.frombuffer(contents["F32"], "f4").reshape(3, 8)[::2, 3:5].tobytes()
        )
        assert "emu:0" in reader.backend_info().reason


@check
def views_of_every_kind_are_filled(backend: Backend) -> None:
    value = torch.arange(24 * 30, dtype=torch.float32).view(24, 30)
    path = backend.path()
    save(path, {"x": value})
    for how in (ExitStack, without_streams):
        for staging in (12_288, 64 << 20):
            places = {
                "transposed": torch.empty(30, 24, device="emu").t(),
                "stepped": torch.empty(48, 90, device="emu")[::2, ::3],
                "columns": torch.empty(24, 100, device="emu")[:, 11:41],
                "slab": torch.empty(24, 3, 30, device="emu")[:, 1],
            }
            bases = {name: place._base for name, place in places.items()}
            for base in bases.values():
                assert base is not None
                backend.driver.write(base.data_ptr(), b"\xa5" * base.nbytes)
            columns = torch.empty(24, 7, device="emu")
            reals = torch.empty(24, 30, dtype=torch.float64, device="emu")
            backend.driver.mode = Mode.DEFERRED
            with how():
                load_into(path, {"x": list(places.values())}, staging_bytes=staging)
                load_into(path, {"x": Target(columns, index=np.s_[::-1, 2:9])}, staging_bytes=staging)
                load_into(path, {"x": reals}, cast=True, staging_bytes=staging)
            for name, place in places.items():
                assert raw(backend, place) == raw_bytes(value), name
                base = bases[name]
                assert base is not None
                left = raw(backend, base).count(b"\xa5\xa5\xa5\xa5")
                assert left >= (base.nbytes - value.nbytes) // 4, name
            assert raw(backend, columns) == raw_bytes(value.flip(0)[:, 2:9])
            assert raw(backend, reals) == raw_bytes(value.double())
    assert backend.driver.seen().failed == 0


@check
def margins_are_zeroed(backend: Backend) -> None:
    value = torch.arange(1.0, 13.0).view(3, 4)
    path = backend.path()
    save(path, {"x": value})
    backend.driver.mode = Mode.DEFERRED
    for how in (ExitStack, without_streams):
        larger = torch.empty(5, 7, device="emu")
        backend.driver.write(larger.data_ptr(), b"\xa5" * larger.nbytes)
        with how():
            load_into(path, {"x": Target(larger, padding="zero")})
        wanted = torch.zeros(5, 7)
        wanted[:3, :4] = value
        assert raw(backend, larger) == raw_bytes(wanted)
    nothing_to_read = backend.path()
    save(nothing_to_read, {"x": torch.empty(0, 4)})
    with without_streams():
        larger = torch.empty(5, 7, device="emu")
        backend.driver.write(larger.data_ptr(), b"\xa5" * larger.nbytes)
        load_into(nothing_to_read, {"x": Target(larger, padding="zero")})
        assert not any(raw(backend, larger))


@check
def a_model_is_filled_in_place(backend: Backend) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(10, 4)
            self.head = torch.nn.Linear(4, 10, bias=False)
            self.register_buffer("steps", torch.arange(3))
            self.head.weight = self.embed.weight

    module = Tied().to_empty(device="emu")
    module.head.weight = module.embed.weight
    weight = torch.randn(10, 4)
    path = backend.path()
    save(path, {"embed.weight": weight, "steps": torch.arange(7, 10)})
    pointer, version = module.embed.weight.data_ptr(), module.embed.weight._version
    report = load_model(module, path)
    assert report.aliases == {"head.weight": "embed.weight"}
    assert (module.embed.weight.data_ptr(), module.embed.weight._version) == (pointer, version + 1)
    assert raw(backend, module.head.weight.detach()) == raw_bytes(weight)
    assert module.get_buffer("steps").tolist() == [7, 8, 9]


@check
def a_reader_fills_one_tensor(backend: Backend) -> None:
    path, tensors = two(backend)
    place = torch.empty(100, device="emu")
    with safe_open(path) as reader:
        reader.read_into("y", place)
        reader.read_into("x", (part := torch.empty(5, dtype=torch.uint8, device="emu")), np.s_[7:12])
        plan = reader.plan({"y": place}, strict=False)
    assert raw(backend, place) == raw_bytes(tensors["y"])
    assert raw(backend, part) == raw_bytes(tensors["x"][7:12])
    assert plan.totals.bytes_read == 400


# Bounds


@check
def pinned_memory_stays_within_the_bound(backend: Backend) -> None:
    path = backend.path()
    tensors = save(path, {"x": torch.randint(0, 255, (100 * 60_000,), dtype=torch.uint8)})
    backend.driver.mode = Mode.DEFERRED
    for staging in (12_288, 60_000, 100_000, 1 << 20):
        for threads in (1, 3):
            backend.driver.reset()
            backend.driver.mode = Mode.DEFERRED
            backend.first = backend.driver.stream(0)
            room = Guarded(backend, tensors)
            before = backend.driver.live().pinned_bytes
            with pinning(backend.driver):
                load_into(path, room.tensors, staging_bytes=staging, threads=threads)
            room.check(tensors)
            # Two thirds of it are for slots, and one for what is picked from.
            assert 0 < backend.driver.seen().pinned_peak - before <= 2 * staging // 3
            assert backend.driver.live().pinned_bytes == before
            assert backend.driver.seen().pageable == 0


@check
def copies_do_not_block_where_there_are_streams(backend: Backend) -> None:
    path, tensors = two(backend)
    for how, wanted in ((ExitStack, {True}), (without_streams, {False})):
        backend.copies.clear()
        with how():
            load_into(path, Guarded(backend, tensors).tensors)
        assert set(backend.copies) == wanted


@check
def copies_that_block_come_one_at_a_time(backend: Backend) -> None:
    path, tensors = two(backend)
    backend.driver.fault("cuMemcpyHtoDAsync", times=None, sleep=0.002)
    most = {}
    for how in (ExitStack, without_streams):
        backend.most_at_once = 0
        room = Guarded(backend, tensors)
        with how():
            load_into(path, room.tensors, staging_bytes=120_000, threads=4)
        room.check(tensors)
        most[how] = backend.most_at_once
    assert most[without_streams] == 1 < most[ExitStack]


# Order; each wait is shown to be needed by taking it out


def nothing(owner: Any, *names: str) -> ExitStack:
    taken = ExitStack()
    for name in names:
        taken.enter_context(mock.patch.object(owner, name, return_value=None))
    return taken


@check
def work_on_the_current_stream_is_waited_for(backend: Backend) -> None:
    path, tensors = two(backend)
    for waits in (True, False):
        room = Guarded(backend, tensors)
        backend.driver.mode = Mode.DEFERRED
        with torch.emu.stream(torch.emu.Stream()):  # type: ignore[attr-defined]
            room.disturb()
            with ExitStack() if waits else nothing(EmuStream, "wait_stream"):
                load_into(path, room.tensors)
            torch.emu.current_stream().synchronize()  # type: ignore[attr-defined]
        assert room.right(tensors) == waits


@check
def what_an_allocation_had_pending_is_waited_for(backend: Backend) -> None:
    """torch may hand out memory that its current stream still writes to."""
    path, tensors = two(backend)
    whole = torch.empty

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        made = whole(*size, **options)
        if made.device.type == "emu":
            backend.fill(made, 0x77)
        return made

    for waits in (True, False):
        backend.driver.mode = Mode.DEFERRED
        with mock.patch.object(torch, "empty", empty), ExitStack() if waits else nothing(EmuStream, "wait_stream"):
            made = load_file(path, device="emu")
        backend.first.synchronize()
        assert all(raw(backend, made[name]) == raw_bytes(tensor) for name, tensor in tensors.items()) == waits


@check
def a_slot_is_filled_again_only_after_its_copies(backend: Backend) -> None:
    path, tensors = two(backend)
    for waits in (True, False):
        room = Guarded(backend, tensors)
        backend.driver.mode = Mode.DEFERRED
        # What is pinned is kept, or the copies would fail.
        with (
            pinning(backend.driver),
            ExitStack() if waits else nothing(TorchDevice, "synchronize_event", "free_pinned"),
        ):
            load_into(path, room.tensors, staging_bytes=60_000, threads=1)
        assert room.right(tensors) == waits


@check
def a_load_returns_only_after_its_copies(backend: Backend) -> None:
    path, tensors = two(backend)
    for waits in (True, False):
        room = Guarded(backend, tensors)
        backend.driver.mode = Mode.DEFERRED
        taken = ("synchronize_event", "synchronize_stream", "free_pinned")
        with pinning(backend.driver), ExitStack() if waits else nothing(TorchDevice, *taken):
            load_into(path, room.tensors)
        assert room.right(tensors) == waits


@check
def a_stream_of_the_callers_is_followed(backend: Backend) -> None:
    path, tensors = two(backend)
    for waits in (True, False):
        room = Guarded(backend, tensors)
        backend.driver.mode = Mode.DEFERRED
        named = torch.emu.Stream()  # type: ignore[attr-defined]
        with torch.emu.stream(named):  # type: ignore[attr-defined]
            room.disturb()
        with ExitStack() if waits else nothing(TorchDevice, "wait"):
            load_into(path, room.tensors, stream=named)
        named.synchronize()
        assert room.right(tensors) == waits
        with safe_open(path, device="emu", stream=named) as reader:
            assert raw(backend, reader.get_tensor("y")) == raw_bytes(tensors["y"])


@check
def another_stream_waits_for_a_pending_load(backend: Backend) -> None:
    path, tensors = two(backend)
    whole = OwnedStream.synchronize
    for waits in (True, False):
        room = Guarded(backend, tensors)
        backend.driver.mode = Mode.DEFERRED
        other, gate = torch.emu.Stream(), threading.Event()  # type: ignore[attr-defined]

        def slow(owned: OwnedStream, gate: threading.Event = gate) -> None:
            gate.wait(30)
            whole(owned)

        with (
            pinning(backend.driver),
            mock.patch.object(OwnedStream, "synchronize", slow),
            nothing(TorchDevice, "synchronize_event", "free_pinned"),
        ):
            pending = load_into(path, room.tensors, wait=False)
            if waits:
                pending.wait_on(other)
            else:
                pending._streams._published.wait()
            assert not pending.done()
            other.synchronize()
            assert room.right(tensors) == waits
            gate.set()
            pending.wait()
        assert room.right(tensors)


@check
def streams_that_are_none_are_refused(backend: Backend) -> None:
    path, tensors = two(backend)
    room = Guarded(backend, tensors)
    other = EmuStream(backend, backend.first)
    other.device = torch.device("cpu")
    for wrong in (3, "s", backend.first, other):
        with raises(OptionError, r"not a stream of emu:0: .* Pass a torch.emu.Stream"):
            load_into(path, room.tensors, stream=wrong)
    with without_streams():
        with raises(UnsupportedError, r"torch has no streams on emu:0.*call wait\(\)"):
            load_into(path, room.tensors, stream=EmuStream(backend, backend.first))
        pending = load_into(path, room.tensors, wait=False)
        assert isinstance(pending, Pending)
        pending.wait()
    room.check(tensors)


@check
def nothing_is_loaded_into_a_graph(backend: Backend) -> None:
    path, tensors = two(backend)
    room = Guarded(backend, tensors)
    with mock.patch.object(Backend, "is_current_stream_capturing", create=True, return_value=True):
        with raises(DeviceError, "capturing a graph"):
            load_into(path, room.tensors)
        with raises(DeviceError, "capturing a graph"):
            load_file(path, device="emu")
    named = torch.emu.Stream()  # type: ignore[attr-defined]
    of_it = lambda backend: backend.current_stream().queue is named.queue  # noqa: E731
    with mock.patch.object(Backend, "is_current_stream_capturing", of_it, create=True):
        with raises(DeviceError, "capturing a graph"):
            load_into(path, room.tensors, stream=named)
        load_into(path, room.tensors)
    room.check(tensors)


@check
def no_device_is_synchronized(backend: Backend) -> None:
    path, tensors = two(backend)
    load_into(path, Guarded(backend, tensors).tensors)
    load_file(path, device="emu")
    assert backend.driver.count("cuCtxSynchronize", "cuDeviceReset", "cuDevicePrimaryCtxReset") == 0


# Lifetimes


@check
def memory_is_held_until_the_copies_are_done(backend: Backend) -> None:
    """The caller forgets its tensors while they are loaded."""
    path, tensors = two(backend)
    gc.collect()
    before = backend.driver.live().device_bytes
    backend.driver.mode = Mode.DEFERRED
    gate = threading.Event()
    whole = OwnedStream.synchronize

    def slow(owned: OwnedStream) -> None:
        gate.wait(30)
        whole(owned)

    with mock.patch.object(OwnedStream, "synchronize", slow):
        places = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="emu") for name, tensor in tensors.items()}
        pending = load_into(path, places, wait=False)
        del places
        gc.collect()
        assert backend.driver.live().device_bytes > before
        gate.set()
        pending.wait()
    del pending
    gc.collect()
    assert backend.driver.live().device_bytes == before
    assert backend.driver.seen().failed == 0


@check
def many_loads_leave_nothing(backend: Backend) -> None:
    path = backend.path()
    tensors = save(path, {"x": torch.arange(64.0), "y": torch.ones(3)})
    room = Guarded(backend, tensors)

    def state() -> tuple[Any, ...]:
        gc.collect()
        return backend.driver.live(), threading.active_count(), len(os.listdir("/proc/self/fd"))

    with safe_open(path, device="emu", staging_bytes=50_000) as reader:
        reader.load_into(room.tensors)
        before = state()
        for _ in range(300):
            reader.load_into(room.tensors)
            reader.get_tensors()
        assert state() == before


@check
def threads_share_a_reader(backend: Backend) -> None:
    path, tensors = every_dtype(backend)
    backend.driver.mode = Mode.LATE
    backend.driver.configure(delay_us=200)
    wrong: list[str] = []

    def read(names: list[str]) -> None:
        wrong.extend(name for name in names if raw(backend, reader.get_tensor(name)) != raw_bytes(tensors[name]))

    with safe_open(path, device="emu", threads=2) as reader:
        helpers = [threading.Thread(target=read, args=(list(tensors)[k::4],)) for k in range(4)]
        for helper in helpers:
            helper.start()
        for helper in helpers:
            helper.join()
    assert not wrong


@check
def a_copy_that_fails_is_drained(backend: Backend) -> None:
    path, tensors = two(backend)
    for how in (ExitStack, without_streams):
        room = Guarded(backend, tensors)
        gc.collect()
        before = backend.driver.live()
        backend.driver.mode = Mode.DEFERRED
        backend.copies.clear()
        backend.fails_at = 3
        try:
            with (
                how(),
                pytest.raises(DeviceError, match=r"torch's copy_ failed on emu:0: the device is lost") as caught,
            ):
                load_into(path, room.tensors, staging_bytes=60_000, threads=1)
        finally:
            backend.fails_at = -1
        assert caught.value.dirty == ("x",)
        del caught
        gc.collect()
        assert backend.driver.live() == before
        assert backend.driver.live().pending == 0


# What is refused


@check
def what_has_no_memory_is_refused(backend: Backend) -> None:
    path = backend.path()
    save(path, {"x": torch.arange(12.0).view(3, 4)})
    plain = torch.empty(3, 4, device="emu")
    bare = torch._C._acc.create_empty_tensor((3, 4), torch.float32)
    complex_path = backend.path()
    save(complex_path, {"x": torch.zeros(3, dtype=torch.complex64)})
    with raises(DestinationBufferError, "storage was freed, shrunk or never allocated"):
        load_into(path, {"x": bare})
    with raises(DestinationBufferError, "lazy negative or conjugate view"):
        load_into(complex_path, {"x": torch.empty(3, dtype=torch.complex64, device="emu").conj()})
    with raises(DestinationTypeError, "requires grad"):
        load_into(path, {"x": torch.empty(3, 4, device="emu").requires_grad_()})
    with raises(DestinationBufferError, "elements of the destination 'x' share memory"):
        load_into(path, {"x": torch.empty(1, 4, device="emu").expand(3, 4)})
    with raises(LoaderError, r"the checkpoint gives shape \[3, 4\]"):
        load_into(path, {"x": torch.empty(4, 3, device="emu")})
    with raises(DestinationTypeError, "the checkpoint has F32"):
        load_into(path, {"x": torch.empty(3, 4, dtype=torch.int32, device="emu")})
    backend.driver.write(plain.data_ptr(), b"\xa5" * plain.nbytes)
    with raises(UnsupportedError, "GPU-direct reads into emu:0 are not possible"):
        load_into(path, {"x": plain}, require_direct=True)
    with raises(OptionError, "backend 'kvikio' does not serve emu:0"):
        load_into(path, {"x": plain}, backend="kvikio")
    with raises(OptionError, "'mmap' makes tensors in host memory only"):
        safe_open(path, device="emu", backend="mmap")
    with raises(OptionError, "there is no device emu:1: this process sees 1"):
        safe_open(path, device="emu:1")
    assert set(raw(backend, plain)) == {0xA5}


@check
def lazy_tensors_are_read_into_it(backend: Backend) -> None:
    path = backend.path()
    tensors = save(path, {"x": torch.arange(80.0).reshape(8, 10), "y": torch.arange(8.0).bfloat16()})
    for mode in Mode:
        backend.driver.mode = mode
        base = torch.empty(9, 10, device="emu")
        columns, wide = torch.empty(8, 3, device="emu"), torch.empty(8, dtype=torch.float32, device="emu")
        with safe_open(path) as reader:
            base[:8].copy_(reader.lazy("x"))
            columns.copy_(reader.lazy("x")[:, 2:5])
            wide.copy_(reader.lazy("y"))
            moved = reader.lazy("x")[2:4].to("emu")
            report = reader.lazy_report()
            assert (report.direct, report.staged, report.materialized) == (2, 2, 0)
            later = torch.empty(8, 10, device="emu")
            with reader.deferring():
                later.copy_(reader.lazy("x"))
        assert raw(backend, base)[:320] == raw(backend, later) == raw_bytes(tensors["x"])
        assert raw(backend, columns) == raw_bytes(tensors["x"][:, 2:5])
        assert raw(backend, wide) == raw_bytes(tensors["y"].float())
        assert raw(backend, moved) == raw_bytes(tensors["x"][2:4])
    assert backend.driver.seen().failed == 0


@check
def deferred_copies_come_after_the_work_of_their_stream(backend: Backend) -> None:
    """That is the stream that was current when the copy was noted, and not the one that is current at the end."""
    path, tensors = two(backend)
    backend.driver.mode = Mode.DEFERRED
    room = Guarded(backend, tensors)
    streams = [torch.emu.Stream(), torch.emu.Stream()]  # type: ignore[attr-defined]
    with safe_open(path) as reader, reader.deferring():
        for (name, place), stream in zip(room.tensors.items(), streams, strict=True):
            with torch.emu.stream(stream):  # type: ignore[attr-defined]
                backend.fill(place, 0x77)
                place.copy_(reader.lazy(name))
    for stream in streams:
        stream.synchronize()
    room.check(tensors)
    assert backend.driver.count("cuCtxSynchronize") == 0


@check
def parts_of_one_storage_may_not_overlap(backend: Backend) -> None:
    path = backend.path()
    tensors = save(path, {"x": torch.arange(8.0), "y": torch.arange(8.0, 16.0)})
    base = torch.empty(16, device="emu")
    load_into(path, {"x": base[:8], "y": base[8:]})
    assert raw(backend, base) == raw_bytes(torch.arange(16.0))
    with raises(DestinationBufferError, "the destinations 'x' and 'y' overlap in memory"):
        load_into(path, {"x": base[:8], "y": base[7:15]})
    with raises(DestinationBufferError, "overlap in memory"):
        load_into(path, {"x": base[::2], "y": base[1:9]})
    load_into(path, {"x": base[::2], "y": base[1::2]})
    assert raw(backend, base) == raw_bytes(torch.stack([tensors["x"], tensors["y"]], 1))
    columns = torch.empty(8, 2, device="emu")
    load_into(path, {"x": columns[:, 0], "y": columns[:, 1]})
    assert raw(backend, columns) == raw_bytes(torch.stack([tensors["x"], tensors["y"]], 1))


@check
def producers_that_are_not_torch_are_refused(backend: Backend) -> None:
    path = backend.path()
    save(path, {"x": torch.arange(4.0)})

    class Elsewhere:
        def __init__(self, kind: int) -> None:
            self.kind = kind

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.kind, 0

        def __dlpack__(self, **_: Any) -> object:
            raise AssertionError("was asked for an address that nobody can use")

    for kind in OF_TORCH:
        with raises(UnsupportedError, "are not served.*or a torch tensor"):
            load_into(path, {"x": Elsewhere(kind)})


@check
def modes_of_torch(backend: Backend) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    path, tensors = two(backend)
    room = Guarded(backend, tensors)
    with torch.inference_mode():
        load_into(path, room.tensors, staging_bytes=120_000, threads=4)
        made = load_file(path, device="emu")
    room.check(tensors)
    assert raw(backend, made["x"]) == raw_bytes(tensors["x"])
    with torch.device("meta"):
        load_into(path, room.tensors)
        assert load_file(path, device="emu")["x"].device == torch.device("emu", 0)
    with FakeTensorMode(), raises(LoaderError, "FakeTensor"):
        load_into(path, room.tensors)


# The process that runs them, and what it tells


def run_checks(libraries: Path, folder: Path) -> None:
    driver = Driver.load(libraries)
    backend = Backend(driver, folder)
    backend.register()
    outcome = {}
    for name, function in CHECKS.items():
        driver.reset()
        backend.first = driver.stream(0)
        try:
            function(backend)
            outcome[name] = ""
        except BaseException:
            outcome[name] = traceback.format_exc()
        gc.collect()
    (folder / "outcome.json").write_text(json.dumps(outcome))


@pytest.fixture(scope="module")
def outcome(emulation_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("torch_devices")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.test_torch_devices", str(emulation_folder), str(folder)],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "ROCM_PATH": str(emulation_folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found: dict[str, str] = json.loads((folder / "outcome.json").read_text())
    return found


@pytest.mark.parametrize("name", list(CHECKS))
def test_a_device_of_torch(outcome: dict[str, str], name: str) -> None:
    assert not outcome[name], outcome[name]


# What can be told without one


@pytest.mark.parametrize(
    ("device", "wanted"), [("xpu", (ONE_API, 1)), ("xpu:0", (ONE_API, 0)), ("mps", (METAL, 0)), ("mps:0", (METAL, 0))]
)
def test_spellings(monkeypatch: pytest.MonkeyPatch, device: str, wanted: tuple[int, int]) -> None:
    """torch's CPU build has their modules."""
    for module, count in ((torch.xpu, 2), (torch.mps, 1)):
        monkeypatch.setattr(module, "is_available", lambda: True)
        monkeypatch.setattr(module, "device_count", lambda count=count: count)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 1)
    assert for_torch.resolve_device(device) == wanted
    assert runtime.device_of(wanted) == torch.device(device.partition(":")[0], wanted[1])
    with pytest.raises(OptionError, match="there is no device xpu:2: this process sees 2"):
        for_torch.resolve_device("xpu:2")


def test_which_devices_have_streams() -> None:
    assert TorchDevice(torch.device("xpu", 0))._streamed
    on_metal = TorchDevice(torch.device("mps", 0))
    assert (on_metal._streamed, on_metal.pinned, on_metal.unified, on_metal.kind) == (False, False, True, "mps")


if __name__ == "__main__":
    run_checks(Path(sys.argv[1]), Path(sys.argv[2]))
