"""ROCm devices through the pinned ring, by AMD's own binding of HIP over the emulated driver."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dlpack_loader
from dlpack_loader import Target, safe_open
from dlpack_loader.errors import DeviceError, OptionError
from dlpack_loader.runtime import host
from dlpack_loader.runtime.device import ROCM, open_device
from dlpack_loader.stream import OwnedStream, handle_of
from tests.device_room import F32, GUARD, Room, check_a_read_that_fails, pinned_peak
from tests.emulation import Driver, Mode
from tests.files import raw_bytes, save, state

load_into: Any = functools.partial(dlpack_loader.load_into, backend="pread")

Saved = tuple[Path, dict[str, torch.Tensor]]


@pytest.fixture
def hip(driver: Driver) -> Driver:
    driver.vendor = "hip"
    return driver


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    path = tmp_path / "m.safetensors"
    return path, save(path, state(width=96))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("staging", [12_288, 100_000, 64 << 20])
def test_every_tensor_arrives(hip: Driver, saved: Saved, mode: Mode, staging: int) -> None:
    path, tensors = saved
    room = Room(hip, tensors)
    hip.mode = mode
    report = load_into(path, room.tensors, staging_bytes=staging)
    room.check(tensors)
    assert report.filled == tuple(sorted(tensors))
    assert report.bytes_written == report.staged_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert report.direct_bytes == 0
    assert "hip:0 is filled through pinned memory" in report.reason
    assert pinned_peak(hip) <= staging
    assert hip.seen().pageable == hip.seen().failed == 0


def test_nothing_is_left_behind(hip: Driver, saved: Saved) -> None:
    path, tensors = saved
    room = Room(hip, tensors, device=1)
    before, current = hip.live(), hip.current_device("hip")
    for _ in range(3):
        load_into(path, room.tensors)
    gc.collect()
    assert hip.live() == before
    assert hip.current_device("hip") == current == 0
    assert all(tensor.releases == [1, 1, 1] for tensor in room.tensors.values())
    assert hip.count("hipDeviceSynchronize") == 0
    assert not any(hip.context(device).uses for device in (0, 2))
    assert not any(name.startswith("cu") for name in hip.calls())


def test_the_producer_is_waited_for(hip: Driver, saved: Saved) -> None:
    path, tensors = saved
    hip.mode = Mode.DEFERRED
    stream = hip.stream(0)
    room = Room(hip, tensors, stream=stream)
    room.disturb(stream)
    load_into(path, room.tensors)
    stream.synchronize()
    room.check(tensors)


@pytest.mark.parametrize("default", [False, True])
def test_the_callers_stream_is_waited_for(hip: Driver, saved: Saved, default: bool) -> None:
    path, tensors = saved
    hip.mode = Mode.DEFERRED
    stream = hip.null_stream(1) if default else hip.stream(1)
    room = Room(hip, tensors, device=1)
    room.disturb(stream)
    load_into(path, room.tensors, stream=0 if default else stream.handle)
    stream.synchronize()
    room.check(tensors)


def test_without_the_wait_the_callers_work_comes_last(
    hip: Driver, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tensors = saved
    hip.mode = Mode.DEFERRED
    stream = hip.null_stream(0)
    room = Room(hip, tensors)
    room.disturb(stream)
    monkeypatch.setattr(OwnedStream, "follow", lambda self, stream: None)
    load_into(path, room.tensors, stream=0)
    stream.synchronize()
    with pytest.raises(AssertionError):
        room.check(tensors)


def test_streams_of_rocm(hip: Driver, saved: Saved) -> None:
    path, tensors = saved
    room = Room(hip, tensors)
    for stream in (1, 2):
        with pytest.raises(OptionError, match=f"stream {stream} has no meaning on ROCm"):
            load_into(path, room.tensors, stream=stream)
    for wrong in (-1, True, False, "stream", 1.5, object()):
        with pytest.raises(OptionError, match="not a stream"):
            load_into(path, room.tensors, stream=wrong)
    assert hip.executed() == []

    class Framework:
        def __init__(self, handle: int) -> None:
            self.cuda_stream = handle

    class Protocol(Framework):
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.cuda_stream

    assert [handle_of(stream, ROCM) for stream in (0, 77, Framework(0), Framework(77), Protocol(0), Protocol(77))] == [
        0, 77, 0, 77, 0, 77,
    ]  # fmt: skip
    load_into(path, room.tensors, stream=Framework(0))
    room.check(tensors)


def test_producers_get_a_handle(hip: Driver, saved: Saved) -> None:
    path, tensors = saved
    room = Room(hip, tensors)
    load_into(path, room.tensors)
    handles = {stream for tensor in room.tensors.values() for stream in tensor.streams}
    assert len(handles) == 1
    assert all(isinstance(stream, int) and stream > 2 for stream in handles)


def test_two_devices_and_the_host_in_one_call(hip: Driver, saved: Saved) -> None:
    path, tensors = saved
    names = sorted(tensors)
    first = Room(hip, {name: tensors[name] for name in names[::3]}, device=2)
    second = Room(hip, {name: tensors[name] for name in names[1::3]}, device=1)
    third = {name: torch.zeros_like(tensors[name]) for name in names[2::3]}
    report = load_into(path, {**first.tensors, **second.tensors, **third}, staging_bytes=1 << 20)
    first.check({name: tensors[name] for name in names[::3]})
    second.check({name: tensors[name] for name in names[1::3]})
    assert all(torch.equal(third[name], tensors[name]) for name in third)
    assert "hip:1" in report.reason
    assert "hip:2" in report.reason
    assert pinned_peak(hip) <= 1 << 20
    assert hip.context(0).uses == 0


def test_both_vendors_in_one_call(hip: Driver, saved: Saved) -> None:
    path, tensors = saved
    names = sorted(tensors)
    red = Room(hip, {name: tensors[name] for name in names[::2]}, device=1)
    hip.vendor = "cuda"
    green = Room(hip, {name: tensors[name] for name in names[1::2]}, device=2)
    load_into(path, {**red.tensors, **green.tensors})
    red.check({name: tensors[name] for name in names[::2]})
    green.check({name: tensors[name] for name in names[1::2]})


@pytest.mark.parametrize("index", [np.s_[::-1], np.s_[:, 3:50], np.s_[::3, ::2], np.s_[:, 7]], ids=repr)
@pytest.mark.parametrize("staging", [12_288, 1 << 20])
def test_slices_and_casts(hip: Driver, saved: Saved, index: Any, staging: int) -> None:
    path, tensors = saved
    wanted = tensors["layers.0.mlp.up"].numpy()[index]
    hip.mode = Mode.DEFERRED
    memory = hip.memory(0, wanted.nbytes * 2)
    with safe_open(path, backend="pread", staging_bytes=staging) as reader:
        reader.read_into("layers.0.mlp.up", memory.tensor(wanted.shape, F32), index)
        assert memory.read()[: wanted.nbytes] == wanted.tobytes()
        double = memory.tensor(wanted.shape, (2, 64, 1))
        reader.load_into({"layers.0.mlp.up": Target(double, index)}, strict=False, cast=True)
        assert memory.read() == wanted.astype(np.float64).tobytes()
    assert pinned_peak(hip) <= staging


def test_strided_destinations(hip: Driver, saved: Saved) -> None:
    path, tensors = saved
    table = tensors["layers.0.mlp.up"]  # 384 x 96
    memory = hip.memory(0, 384 * 200 * 4)
    memory.fill(0)
    hip.mode = Mode.DEFERRED
    inside = memory.tensor((384, 96), F32, offset=4 * 50, strides=(200, 1))
    load_into(path, {"layers.0.mlp.up": inside}, strict=False, staging_bytes=50_000)
    wanted = np.zeros((384, 200), np.float32)
    wanted[:, 50:146] = table.numpy()
    assert memory.read() == wanted.tobytes()
    assert hip.count("hipMemcpy2DAsync") > 0
    memory.fill(0)
    turned = memory.tensor((384, 96), F32, strides=(1, 384))
    load_into(path, {"layers.0.mlp.up": turned}, strict=False, staging_bytes=50_000)
    assert memory.read()[: table.nbytes] == table.numpy().T.tobytes()


def test_a_tensor_much_larger_than_the_ring(hip: Driver, tmp_path: Path) -> None:
    data = torch.randint(0, 255, (100 * (120 << 10),), dtype=torch.uint8)
    save(tmp_path / "m.safetensors", {"x": data})
    memory = hip.memory(0, data.nbytes)
    hip.mode = Mode.DEFERRED
    load_into(tmp_path / "m.safetensors", {"x": memory.tensor((data.nbytes,), (1, 8, 1))}, staging_bytes=120 << 10)
    assert memory.read() == raw_bytes(data)
    assert pinned_peak(hip) <= 120 << 10


def test_a_read_that_fails_drains_and_names_the_damage(
    hip: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_a_read_that_fails(hip, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("function", "error", "name"),
    [
        ("hipInit", 100, "hipErrorNoDevice"),
        ("hipRuntimeGetVersion", 1, "hipErrorInvalidValue"),
        ("hipDeviceGet", 101, "hipErrorInvalidDevice"),
        ("hipGetDevice", 3, "hipErrorNotInitialized"),
        ("hipSetDevice", 101, "hipErrorInvalidDevice"),
        ("hipHostMalloc", 2, "hipErrorOutOfMemory"),
        ("hipStreamCreateWithFlags", 2, "hipErrorOutOfMemory"),
        ("hipEventCreateWithFlags", 2, "hipErrorOutOfMemory"),
        ("hipMemcpyHtoDAsync", 719, "hipErrorLaunchFailure"),
        ("hipEventRecord", 400, "hipErrorInvalidHandle"),
    ],
)
def test_a_call_that_fails_is_typed_and_leaves_nothing(
    hip: Driver, saved: Saved, function: str, error: int, name: str
) -> None:
    path, tensors = saved
    room = Room(hip, tensors)
    before = hip.live()
    fault = hip.fault(function, error=error)
    with pytest.raises(DeviceError, match=rf"{function} failed: {name} \({error}\)") as caught:
        load_into(path, room.tensors)
    assert caught.value.status == name
    assert fault.fired == 1
    del caught
    gc.collect()
    after = hip.live()
    assert (after.pinned_bytes, after.streams, after.pending) == (before.pinned_bytes, before.streams, before.pending)
    assert all(set(tensor.releases) <= {1} for tensor in room.tensors.values())


def test_a_status_that_the_binding_has_no_name_for(hip: Driver, saved: Saved) -> None:
    path, tensors = saved
    room = Room(hip, tensors)
    hip.fault("hipHostMalloc", error=54321)
    with pytest.raises(DeviceError, match="hipHostMalloc failed: 54321"):
        load_into(path, room.tensors)


def test_an_old_or_failing_runtime(hip: Driver, saved: Saved) -> None:
    path, tensors = saved
    room = Room(hip, tensors)
    hip.configure(hip_version=50731921)
    with pytest.raises(DeviceError, match=r"HIP is of version 5\.7, and 6\.0 is needed. Update ROCm"):
        load_into(path, room.tensors)
    hip.configure(hip_version=70200000, init_error=100)
    with pytest.raises(DeviceError, match=r"hipInit failed: hipErrorNoDevice .*Check that the driver is installed"):
        load_into(path, room.tensors)


def test_without_the_library(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libamdhip64.so").write_bytes(b"")
    code = """
        from dlpack_loader.errors import DeviceError
        from dlpack_loader.runtime.device import open_device
        try:
            open_device((10, 0))
        except DeviceError as error:
            assert "libamdhip64" in str(error) and error.hint, error
        else:
            raise AssertionError
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env={"ROCM_PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def test_the_device_itself(hip: Driver) -> None:
    with pytest.raises(DeviceError, match="hipErrorInvalidDevice"):
        open_device((ROCM, 3))
    device = open_device((ROCM, 2))
    importlib.import_module("rocm.bindings.hip").hipSetDevice(1)
    hip.mode = Mode.DEFERRED
    with contextlib.suppress(KeyError), device.current():
        assert hip.current_device("hip") == 2
        raise KeyError
    assert hip.current_device("hip") == 1
    with device.current():
        stream, event = device.create_stream(), device.create_event()
        pinned, memory = device.allocate_pinned(4096), hip.memory(2, 4096)
        assert pinned % 4096 == 0
        assert device.is_done(event)
        device.copy(memory.pointer, pinned, 4096, stream)
        device.record(event, stream)
        assert not device.is_done(event)
        device.synchronize_event(event)
        assert device.is_done(event)
        hip.fault("hipEventQuery", error=400)
        with pytest.raises(DeviceError, match="hipEventQuery failed: hipErrorInvalidHandle"):
            device.is_done(event)
        device.free_pinned(pinned)
        device.destroy_event(event)
        device.destroy_stream(stream)
    device.close()


@pytest.mark.parametrize("status", ["active", "invalidated"])
def test_a_capturing_stream_is_refused(hip: Driver, saved: Saved, status: Any) -> None:
    path, tensors = saved
    room = Room(hip, tensors)
    stream = hip.stream(0)
    stream.capture(status)
    with pytest.raises(DeviceError, match="capturing a graph"):
        load_into(path, room.tensors, stream=stream.handle)
    assert hip.seen().captured == 0


def test_a_plan_touches_no_device(hip: Driver, saved: Saved) -> None:
    path, tensors = saved
    room = Room(hip, tensors)
    for tensor in room.tensors.values():
        tensor.any_current_device = True
    calls = hip.calls()
    with safe_open(path) as reader:
        plan = reader.plan(room.tensors)
    assert plan.totals.bytes_written == sum(tensor.nbytes for tensor in tensors.values())
    assert hip.calls() == calls
    assert all(tensor.streams == [-1] for tensor in room.tensors.values())


def test_guards_and_offsets_of_one_memory(hip: Driver, saved: Saved) -> None:
    path, tensors = saved
    whole = hip.memory(0, sum(tensor.nbytes + GUARD for tensor in tensors.values()))
    whole.fill(0x5A)
    wanted, destinations = bytearray(whole.read()), {}
    at = GUARD // 2
    room = Room(hip, tensors)
    for name, tensor in tensors.items():
        destinations[name] = whole.tensor(tuple(tensor.shape), room.tensors[name].dtype, byte_offset=at)
        wanted[at : at + tensor.nbytes] = raw_bytes(tensor)
        at += tensor.nbytes + GUARD
    load_into(path, destinations, staging_bytes=30_000)
    assert whole.read() == bytes(wanted)


def test_a_pending_load(hip: Driver, saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tensors = saved
    room = Room(hip, tensors)
    before = hip.live()
    gate = threading.Event()
    whole = host.read_at

    def slow(fd: int, offset: int, pieces: Any, enough: int) -> int:
        gate.wait(30)
        return whole(fd, offset, pieces, enough)

    monkeypatch.setattr(host, "read_at", slow)
    hip.mode = Mode.DEFERRED
    pending = load_into(path, dict(room.tensors), wait=False)
    assert not pending.done()
    gate.set()
    pending.wait()
    room.check(tensors)
    del pending
    gc.collect()
    assert hip.live() == before


def test_memory_that_is_the_hosts_too_bounds_the_staging(
    hip: Driver, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tensors = saved
    monkeypatch.setattr(host, "available_memory", lambda: 16 * 50_000)
    hip.configure(integrated=True)
    room = Room(hip, tensors)
    load_into(path, room.tensors)
    room.check(tensors)
    assert 0 < pinned_peak(hip) <= 50_000
