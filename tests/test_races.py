"""Order between streams, each wait shown to be needed: with the wait taken out, the same test sees wrong bytes.

Copies run late here, only when somebody waits for something that depends on them, so a race that would be lost once in
a thousand times on hardware is lost every time.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dlpack_loader import Pending, load_into, safe_open
from dlpack_loader.destination import Memory
from dlpack_loader.errors import DeviceError
from dlpack_loader.runtime.cuda import CudaDevice
from dlpack_loader.stream import OwnedStream
from tests.device_room import Room, pinned_peak
from tests.emulation import Driver, Live, Mode
from tests.files import raw_bytes, save

Data = tuple[Path, dict[str, torch.Tensor]]


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """A tensor that takes each slot of a small ring many times."""
    tensors = {"x": torch.randint(0, 255, (400_000,), dtype=torch.uint8), "y": torch.arange(100.0)}
    path = tmp_path / "m.safetensors"
    return path, save(path, tensors)


def is_right(room: Room, tensors: dict[str, torch.Tensor]) -> bool:
    return all(raw_bytes(tensor) in room.memories[name].read() for name, tensor in tensors.items())


def without(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    monkeypatch.setattr(owner, name, lambda *arguments: None)


@pytest.mark.parametrize("waits", [True, False])
def test_a_slot_is_filled_again_only_after_its_copies(
    driver: Driver, data: Data, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    path, tensors = data
    room = Room(driver, tensors)
    driver.mode = Mode.DEFERRED
    if not waits:  # what is pinned is kept, or the copies would fail
        without(monkeypatch, CudaDevice, "synchronize_event")
        without(monkeypatch, CudaDevice, "free_pinned")
    load_into(path, room.tensors, staging_bytes=60_000, threads=1)
    assert is_right(room, tensors) == waits
    assert not waits or pinned_peak(driver) <= 60_000


@pytest.mark.parametrize("waits", [True, False])
def test_a_load_returns_only_after_its_copies(
    driver: Driver, data: Data, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    path, tensors = data
    room = Room(driver, tensors)
    driver.mode = Mode.DEFERRED
    if not waits:  # neither for the stream nor for the slots; what is pinned is kept, or the copies would fail
        without(monkeypatch, CudaDevice, "synchronize_stream")
        without(monkeypatch, CudaDevice, "synchronize_event")
        without(monkeypatch, CudaDevice, "free_pinned")
        without(monkeypatch, OwnedStream, "close")
    load_into(path, room.tensors)
    assert is_right(room, tensors) == waits


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_of_the_callers_is_followed(
    driver: Driver, data: Data, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    path, tensors = data
    room = Room(driver, tensors)
    stream = driver.stream(0)
    driver.mode = Mode.DEFERRED
    room.disturb(stream)
    if not waits:
        without(monkeypatch, CudaDevice, "wait")
    load_into(path, room.tensors, stream=stream)
    stream.synchronize()
    assert is_right(room, tensors) == waits


@pytest.mark.parametrize("waits", [True, False])
def test_the_producers_work_is_followed(
    driver: Driver, data: Data, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    path, tensors = data
    stream = driver.stream(0)
    room = Room(driver, tensors, stream=stream)
    driver.mode = Mode.DEFERRED
    room.disturb(stream)
    if not waits:
        for tensor in room.tensors.values():
            tensor.stream = None  # as if it had been exported without our stream
    load_into(path, room.tensors)
    stream.synchronize()
    assert is_right(room, tensors) == waits


@pytest.mark.parametrize("waits", [True, False])
def test_another_stream_waits_for_a_pending_load(
    driver: Driver, data: Data, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """The host is not through with the load, and work on the other stream sees complete data all the same."""
    path, tensors = data
    room = Room(driver, tensors)
    stream = driver.stream(0)
    driver.mode = Mode.DEFERRED
    gate = threading.Event()
    whole = OwnedStream.synchronize

    def slow(owned: OwnedStream) -> None:
        gate.wait(30)
        whole(owned)

    monkeypatch.setattr(OwnedStream, "synchronize", slow)
    without(monkeypatch, CudaDevice, "synchronize_event")  # the slots are large enough; nobody else may run the copies
    without(monkeypatch, CudaDevice, "free_pinned")
    pending = load_into(path, room.tensors, wait=False)
    assert isinstance(pending, Pending)
    if waits:
        pending.wait_on(stream)
    else:
        pending._streams._published.wait()
    assert not pending.done()
    stream.synchronize()
    assert is_right(room, tensors) == waits
    gate.set()
    pending.wait()
    assert is_right(room, tensors)


def test_waiting_on_a_load_that_is_over_or_failed(driver: Driver, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tensors = data
    room = Room(driver, tensors)
    pending = load_into(path, room.tensors, wait=False)
    pending.wait()
    pending.wait_on(driver.stream(0))
    driver.fault("cuMemcpyHtoDAsync", error=719)
    failing = load_into(path, room.tensors, wait=False)
    failing.wait_on(driver.stream(0))
    with pytest.raises(RuntimeError, match="cuMemcpyHtoDAsync failed"):
        failing.wait()


def test_a_pending_load_is_awaited(driver: Driver, data: Data) -> None:
    path, tensors = data
    room = Room(driver, tensors)

    async def work() -> tuple[str, ...]:
        pending = load_into(path, room.tensors, wait=False)
        return (await pending).filled

    assert asyncio.run(work()) == ("x", "y")
    assert is_right(room, tensors)


@pytest.mark.parametrize("held", [True, False])
def test_what_is_borrowed_is_held_until_the_copies_are_done(
    driver: Driver, data: Data, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """The caller forgets its tensors while they are loaded; freed memory is never written."""
    path, tensors = data
    room = Room(driver, tensors)
    driver.mode = Mode.DEFERRED
    if not held:
        monkeypatch.setattr("dlpack_loader.destination.Memory", _forgetful)
    gate = threading.Event()
    whole_synchronize = OwnedStream.synchronize

    def slow(owned: OwnedStream) -> None:
        gate.wait(30)
        whole_synchronize(owned)

    monkeypatch.setattr(OwnedStream, "synchronize", slow)
    before = {name: tensor.exports for name, tensor in room.tensors.items()}
    pending = load_into(path, dict(room.tensors), wait=False)
    exported = list(room.tensors.values())
    gc.collect()
    released = any(sum(tensor.releases) for tensor in exported)
    assert released == (not held)
    gate.set()
    pending.wait()
    del pending
    gc.collect()
    assert all(tensor.releases == [1] * (before[name] + 1) for name, tensor in room.tensors.items())


def _forgetful(*arguments: Any) -> Memory:
    memory = Memory(*arguments)
    memory.owner = None
    return memory


def test_thousands_of_loads_leave_nothing(driver: Driver, tmp_path: Path) -> None:
    """10,000 in all: by one reader, by readers of their own, in the background, and of loads that fail."""
    tensors = save(tmp_path / "m.safetensors", {"x": torch.arange(64.0), "y": torch.ones(3)})
    room = Room(driver, tensors)
    small: dict[str, Any] = {"staging_bytes": 50_000, "threads": 2}

    def state() -> tuple[Live, int, list[str]]:
        gc.collect()
        return driver.live(), threading.active_count(), sorted(os.listdir("/proc/self/fd"))

    with safe_open(tmp_path / "m.safetensors", **small) as reader:

        def in_the_background() -> None:
            reader.load_into(room.tensors, wait=False).wait()  # type: ignore[union-attr]

        def failing() -> None:
            driver.fault("cuMemcpyHtoDAsync", error=719)
            with pytest.raises(DeviceError, match="cuMemcpyHtoDAsync failed"):
                reader.load_into(room.tensors)

        ways: list[tuple[Callable[[], object], int]] = [
            (lambda: reader.load_into(room.tensors), 8_000),
            (lambda: load_into(tmp_path / "m.safetensors", room.tensors, **small), 800),
            (in_the_background, 800),
            (failing, 400),
        ]
        for load, _ in ways:
            load()
        before = state()
        for load, times in ways:
            for _ in range(times):
                load()
        assert state() == before
        reader.load_into(room.tensors)
    room.check(tensors)
    for tensor in room.tensors.values():
        assert tensor.exports > 10_000
        assert set(tensor.releases) == {1}
