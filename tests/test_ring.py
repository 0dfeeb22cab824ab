"""Device memory through the pinned ring, by the real CUDA binding over the emulated driver."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlpack_loader import Target, load_into, safe_open
from dlpack_loader.errors import (
    DestinationError,
    DeviceError,
    OptionError,
    UnsupportedError,
)
from dlpack_loader.runtime import host
from tests.device_room import F32, GUARD, Room, check_a_read_that_fails, pinned_peak
from tests.emulation import Driver, Mode
from tests.files import raw_bytes, save, state


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    path = tmp_path / "m.safetensors"
    return path, save(path, state(width=96))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("staging", [12_288, 100_000, 64 << 20])
def test_every_tensor_arrives(
    driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]], mode: Mode, staging: int
) -> None:
    path, tensors = saved
    room = Room(driver, tensors)
    driver.mode = mode
    report = load_into(path, room.tensors, staging_bytes=staging)
    room.check(tensors)
    assert report.filled == tuple(sorted(tensors))
    assert report.bytes_written == report.staged_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert report.direct_bytes == 0
    assert "cuda:0 is filled through pinned memory" in report.reason
    assert pinned_peak(driver) <= staging
    assert driver.seen().pageable == 0
    assert driver.seen().failed == 0


def test_nothing_is_left_behind(driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    room = Room(driver, tensors)
    before = driver.live()
    for _ in range(3):
        load_into(path, room.tensors)
    gc.collect()
    assert driver.live() == before
    assert all(releases == [1, 1, 1] for releases in (tensor.releases for tensor in room.tensors.values()))
    assert driver.count("cuCtxSynchronize", "cuCtxSynchronize_v2", "cuDeviceReset") == 0
    assert not any(driver.context(device).made for device in (1, 2))


def test_the_producer_is_waited_for(driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    driver.mode = Mode.DEFERRED
    stream = driver.stream(0)
    room = Room(driver, tensors, stream=stream)
    room.disturb(stream)
    load_into(path, room.tensors)
    stream.synchronize()
    room.check(tensors)


def test_the_callers_stream_is_waited_for(driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    driver.mode = Mode.DEFERRED
    stream = driver.stream(0)
    room = Room(driver, tensors)
    room.disturb(stream)
    load_into(path, room.tensors, stream=stream)
    stream.synchronize()
    room.check(tensors)
    assert driver.live().streams >= 1


def test_several_devices_and_the_host_in_one_call(driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    names = sorted(tensors)
    first = Room(driver, {name: tensors[name] for name in names[::3]}, device=2)
    second = Room(driver, {name: tensors[name] for name in names[1::3]}, device=1)
    third = {name: torch.zeros_like(tensors[name]) for name in names[2::3]}
    report = load_into(path, {**first.tensors, **second.tensors, **third}, staging_bytes=1 << 20)
    first.check({name: tensors[name] for name in names[::3]})
    second.check({name: tensors[name] for name in names[1::3]})
    assert all(torch.equal(third[name], tensors[name]) for name in third)
    assert "cuda:1" in report.reason
    assert "cuda:2" in report.reason
    assert pinned_peak(driver) <= 1 << 20
    assert driver.context(0).uses == 0


INDICES = [np.s_[::-1], np.s_[:, 3:50], np.s_[::3, ::2], np.s_[5], np.s_[:, 7], np.s_[10:20], np.s_[..., ::-5]]


@pytest.mark.parametrize("index", INDICES, ids=repr)
@pytest.mark.parametrize("staging", [12_288, 1 << 20])
def test_slices_and_casts(
    driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]], index: Any, staging: int
) -> None:
    path, tensors = saved
    wanted = tensors["layers.0.mlp.up"].numpy()[index]
    driver.mode = Mode.DEFERRED
    memory = driver.memory(0, wanted.nbytes * 2)
    with safe_open(path, staging_bytes=staging) as reader:
        reader.read_into("layers.0.mlp.up", memory.tensor(wanted.shape, F32), index)
        assert memory.read()[: wanted.nbytes] == wanted.tobytes()
        double = memory.tensor(wanted.shape, (2, 64, 1))
        reader.load_into({"layers.0.mlp.up": Target(double, index)}, strict=False, cast=True)
        assert memory.read() == wanted.astype(np.float64).tobytes()
    assert pinned_peak(driver) <= staging


def test_strided_destinations(driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    table = tensors["layers.0.mlp.up"]  # 384 x 96
    memory = driver.memory(0, 384 * 200 * 4)
    memory.fill(0)
    inside = memory.tensor((384, 96), F32, offset=4 * 50, strides=(200, 1))
    load_into(path, {"layers.0.mlp.up": inside}, strict=False, staging_bytes=50_000)
    wanted = np.zeros((384, 200), np.float32)
    wanted[:, 50:146] = table.numpy()
    assert memory.read() == wanted.tobytes()
    memory.fill(0)
    turned = memory.tensor((384, 96), F32, strides=(1, 384))
    load_into(path, {"layers.0.mlp.up": turned}, strict=False, staging_bytes=50_000)
    assert memory.read()[: table.nbytes] == table.numpy().T.tobytes()


def test_a_tensor_much_larger_than_the_ring(driver: Driver, tmp_path: Path) -> None:
    data = torch.randint(0, 255, (100 * (120 << 10),), dtype=torch.uint8)
    save(tmp_path / "m.safetensors", {"x": data})
    memory = driver.memory(0, data.nbytes)
    driver.mode = Mode.DEFERRED
    load_into(tmp_path / "m.safetensors", {"x": memory.tensor((data.nbytes,), (1, 8, 1))}, staging_bytes=120 << 10)
    assert memory.read() == raw_bytes(data)
    assert pinned_peak(driver) <= 120 << 10


def test_memory_that_is_the_hosts_too_bounds_the_staging(
    driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an integrated GPU, pinned memory is taken from what the tensors need."""
    path, tensors = saved
    monkeypatch.setattr(host, "available_memory", lambda: 16 * 50_000)
    for integrated in (False, True):
        driver.reset()
        driver.configure(integrated=integrated)
        room = Room(driver, tensors)
        load_into(path, room.tensors)
        room.check(tensors)
        assert pinned_peak(driver) > 0
        assert (pinned_peak(driver) <= 50_000) == integrated
    real = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")]
    monkeypatch.undo()
    assert abs((host.available_memory() or 0) - int(real[0].split()[1]) * 1024) < 1 << 30


def test_a_budget_that_no_slot_fits_into(driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    room = Room(driver, tensors)
    with pytest.raises(OptionError, match="too small for destinations on a device"):
        load_into(path, room.tensors, staging_bytes=12_287)
    assert pinned_peak(driver) == 0


def test_a_read_that_fails_drains_and_names_the_damage(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_a_read_that_fails(driver, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("cuMemHostAlloc", 2),
        ("cuStreamCreate", 2),
        ("cuEventCreate", 2),
        ("cuMemcpyHtoDAsync", 719),
        ("cuEventRecord", 400),
        ("cuDevicePrimaryCtxRetain", 2),
        ("cuCtxPushCurrent", 201),
    ],
)
def test_a_driver_call_that_fails_is_typed_and_leaves_nothing(
    driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]], function: str, error: int
) -> None:
    path, tensors = saved
    room = Room(driver, tensors)
    before = driver.live()
    fault = driver.fault(function, error=error)
    with pytest.raises(DeviceError, match=f"{function} failed"):
        load_into(path, room.tensors)
    assert fault.fired == 1
    gc.collect()
    after = driver.live()
    assert (after.pinned_bytes, after.streams, after.pending) == (before.pinned_bytes, before.streams, before.pending)
    assert all(set(tensor.releases) <= {1} for tensor in room.tensors.values())


def test_an_old_or_failing_driver(driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    room = Room(driver, tensors)
    driver.configure(cuda_version=11080)
    with pytest.raises(DeviceError, match=r"version 11\.8, and 12\.0 is needed"):
        load_into(path, room.tensors)
    driver.configure(cuda_version=13000, init_error=100)
    with pytest.raises(DeviceError, match="cuInit failed"):
        load_into(path, room.tensors)


def test_a_capturing_stream_is_refused(driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    room = Room(driver, tensors)
    stream = driver.stream(0)
    stream.capture("active")
    with pytest.raises(DeviceError, match="capturing a graph"):
        load_into(path, room.tensors, stream=stream)
    assert driver.seen().captured == 0


def test_streams_that_are_none(driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    room = Room(driver, tensors)
    for stream in (0, -1, True, "stream", 1.5, object()):
        with pytest.raises(OptionError):
            load_into(path, room.tensors, stream=stream)
    load_into(path, room.tensors, stream=1)
    load_into(path, room.tensors, stream=2)
    room.check(tensors)


def test_checks_come_before_anything_is_enqueued(driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    room = Room(driver, tensors)
    wrong = driver.memory(0, 4).tensor((), (0, 32, 1))
    with pytest.raises(DestinationError):
        load_into(path, {**room.tensors, "scale": wrong})
    half = room.memories["layers.0.q"].tensor((96, 96), F32, offset=GUARD + 4)
    with pytest.raises(DestinationError, match="overlap"):
        load_into(path, {"layers.0.q": room.tensors["layers.0.q"], "layers.1.q": half}, strict=False)
    assert driver.executed() == []
    assert pinned_peak(driver) == 0


def test_a_plan_touches_no_device(driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    room = Room(driver, tensors)
    for tensor in room.tensors.values():
        tensor.any_current_device = True
    calls = driver.calls()
    with safe_open(path) as reader:
        plan = reader.plan(room.tensors)
    assert plan.totals.bytes_written == sum(tensor.nbytes for tensor in tensors.values())
    assert driver.calls() == calls
    assert all(tensor.streams == [-1] for tensor in room.tensors.values())


def test_other_devices_are_refused(driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    room = Room(driver, tensors)
    for tensor in room.tensors.values():
        tensor.device_type = 14
    with pytest.raises(UnsupportedError, match="oneAPI"):
        load_into(path, room.tensors)


def test_a_pending_load(
    driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tensors = saved
    room = Room(driver, tensors)
    before = driver.live()
    gate = threading.Event()
    whole = host.read_at

    def slow(fd: int, offset: int, pieces: Any, enough: int) -> int:
        gate.wait(30)
        return whole(fd, offset, pieces, enough)

    monkeypatch.setattr(host, "read_at", slow)
    driver.mode = Mode.DEFERRED
    pending = load_into(path, dict(room.tensors), wait=False)
    assert not pending.done()
    gate.set()
    pending.wait()
    room.check(tensors)
    del pending
    gc.collect()
    assert driver.live() == before
