"""Device memory through KvikIO, the real one, over the emulated driver: its compatibility mode, and emulated GDS."""

from __future__ import annotations

import errno
import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from dlpack_loader import LoadReport, Target, load_file, load_into, load_model, safe_open
from dlpack_loader.dtype import DTYPES
from dlpack_loader.errors import (
    DestinationError,
    DeviceError,
    FileChangedError,
    LoaderError,
    MissingDependencyError,
    OptionError,
    StorageError,
    TruncatedError,
    UnsupportedError,
)
from dlpack_loader.runtime.device import CUDA, open_device
from dlpack_loader.stream import OwnedStream
from tests.device_room import F32, GUARD, Room
from tests.emulation import Driver, Mode
from tests.files import raw_bytes, save, state, write_raw

Saved = tuple[Path, dict[str, torch.Tensor]]
Path_ = Literal["compat", "gds"]
U8 = (1, 8, 1)
DEVICE_WIDE = ("cuCtxSynchronize", "cuCtxSynchronize_v2", "cuDeviceReset")


def kvikio() -> Any:
    """KvikIO, imported when it is used: it loads a real libcufile where the emulated one isn't loaded yet."""
    return importlib.import_module("kvikio")


def backend() -> Any:
    return importlib.import_module("dlpack_loader.backend.kvikio")


def take(patch: pytest.MonkeyPatch, path: Path_, *, lenient: bool = False) -> None:
    """Let KvikIO read in compatibility mode, or through cuFile with a driver of GPUDirect Storage."""
    mode = kvikio().CompatMode.ON if path == "compat" else kvikio().CompatMode.OFF
    kvikio().defaults.set({"compat_mode": mode})
    facts = {"is_gds_available": True, "allow_compat_mode": lenient}
    patch.setattr(
        kvikio().cufile_driver, "get", facts.__getitem__
    )  # the emulated driver says of itself that it is none


@pytest.fixture(autouse=True)
def settings(driver: Driver) -> Iterator[None]:
    """KvikIO's settings are the process's: they are put back, and a load never changes them."""
    backend()
    names = ("compat_mode", "num_threads", "task_size", "gds_threshold", "bounce_buffer_size")
    before = {name: kvikio().defaults.get(name) for name in names}
    yield
    after = {name: kvikio().defaults.get(name) for name in names}
    kvikio().defaults.set({"compat_mode": before["compat_mode"]})
    assert {**after, "compat_mode": None} == {**before, "compat_mode": None}


@pytest.fixture(params=["compat", "gds"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path_:
    taken: Path_ = request.param
    take(monkeypatch, taken)
    return taken


@pytest.fixture
def gds(monkeypatch: pytest.MonkeyPatch) -> None:
    take(monkeypatch, "gds")


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    file = tmp_path / "m.safetensors"
    return file, save(file, state(width=96))


def free_buffers() -> None:
    """Free the pinned memory that KvikIO keeps for the process."""
    device = open_device((CUDA, 0))
    with device.current():
        kvikio().bounce_buffer_free()
    device.close()


def through(path: Path_, report: LoadReport) -> int:
    """The bytes that came on that way, which has to be the only one."""
    wanted, other = (report.direct_bytes, report.compat_bytes) if path == "gds" else (report.compat_bytes, 0)
    assert (other, report.staged_bytes, report.bytes_read) == (0, 0, wanted)
    return wanted


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("threads", [1, 5])
def test_every_tensor_arrives(driver: Driver, saved: Saved, path: Path_, mode: Mode, threads: int) -> None:
    file, tensors = saved
    room = Room(driver, tensors)
    driver.mode = mode
    report = load_into(file, room.tensors, backend="kvikio", threads=threads)
    room.check(tensors)
    assert report.filled == tuple(sorted(tensors))
    assert through(path, report) == report.bytes_written == sum(tensor.nbytes for tensor in tensors.values())
    assert report.backend == "kvikio"
    assert ("cuda:0 is filled from storage directly" in report.reason) == (path == "gds")
    assert ("in compatibility mode" in str(report)) == (path == "compat")
    assert report.info().direct == (path == "gds")
    assert (driver.count("cuFileRead") > 0) == (path == "gds")
    assert (driver.seen().failed, driver.seen().pageable) == (0, 0)


def test_every_dtype(driver: Driver, tmp_path: Path, path: Path_) -> None:
    entries: dict[str, Any] = {}
    data, at = os.urandom(8 * 24 * len(DTYPES)), 0
    for dtype in DTYPES:
        size = 8 * 24 * dtype.bits // 8
        entries[dtype.code] = {"dtype": dtype.code, "shape": [8, 24], "data_offsets": [at, at + size]}
        at += size
    data = data.ljust(at, b"x")[:at]
    file = write_raw(tmp_path / "m.safetensors", entries, data)
    with safe_open(file, backend="kvikio") as reader:
        for dtype in DTYPES:
            begin, end = entries[dtype.code]["data_offsets"]
            memory = driver.memory(0, end - begin + 2 * GUARD)
            memory.fill(0xA5)
            element = dtype.dlpack[1] * dtype.dlpack[2] // 8
            shape = (8, (end - begin) // 8 // element)
            through(path, reader.read_into(dtype.code, memory.tensor(shape, dtype.dlpack, offset=GUARD)))
            assert memory.read() == b"\xa5" * GUARD + data[begin:end] + b"\xa5" * GUARD, dtype.code


@pytest.mark.parametrize("extra", [0, 1, 7, 8, 63, 511, 512, 2048, 4000, 4088, 4095])
def test_any_header_length(driver: Driver, tmp_path: Path, path: Path_, extra: int) -> None:
    """The data begins anywhere in a page, and the tensors' memory too."""
    sizes = (5000, 1, 4096, 70_001)
    at, data = 0, os.urandom(sum(sizes))
    entries: dict[str, Any] = {}
    for number, size in enumerate(sizes):
        entries[str(number)] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    header = str(entries).replace("'", '"').encode()
    header += b" " * ((extra - 8 - len(header)) % 4096)
    file = write_raw(tmp_path / "m.safetensors", header, data)
    assert (os.path.getsize(file) - at) % 4096 == extra
    memory = driver.memory(0, at + 2 * GUARD + len(sizes))
    memory.fill(0xA5)
    places: dict[str, Any] = {}
    wanted, offset = b"\xa5" * GUARD, GUARD
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        places[name] = memory.tensor((end - begin,), U8, offset=offset)
        wanted += data[begin:end] + b"\xa5"
        offset += end - begin + 1
    assert through(path, load_into(file, places, backend="kvikio")) == at
    assert memory.read() == wanted + b"\xa5" * GUARD


@pytest.mark.parametrize("nbytes", [(4 << 20) - 1, 4 << 20, (9 << 20) + 12_345])
def test_tensors_shorter_and_longer_than_a_chunk(driver: Driver, tmp_path: Path, path: Path_, nbytes: int) -> None:
    data = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    save(tmp_path / "m.safetensors", {"x": data})
    room = Room(driver, {"x": data})
    driver.configure(read_limit=1 << 20)  # short reads, which are continued
    assert through(path, load_into(tmp_path / "m.safetensors", room.tensors, backend="kvikio")) == nbytes
    room.check({"x": data})


def test_long_runs_of_a_selection_are_direct(driver: Driver, tmp_path: Path, path: Path_) -> None:
    data = torch.randn(6, 40_000)
    save(tmp_path / "m.safetensors", {"x": data})
    memory = driver.memory(0, 3 * 160_000)
    target = Target(memory.tensor((3, 40_000), F32), np.s_[::-2])
    assert through(path, load_into(tmp_path / "m.safetensors", {"x": target}, backend="kvikio")) == 480_000
    assert memory.read() == data.numpy()[::-2].tobytes()


def test_what_needs_staging_goes_through_the_ring(driver: Driver, saved: Saved, path: Path_) -> None:
    file, tensors = saved
    table = tensors["layers.0.mlp.up"]
    room = Room(driver, {"layers.0.q": tensors["layers.0.q"]})
    memory = driver.memory(0, table.nbytes)
    destinations = {**room.tensors, "layers.0.mlp.up": memory.tensor((384, 96), F32, strides=(1, 384))}
    report = load_into(file, destinations, strict=False, backend="kvikio")
    room.check({"layers.0.q": tensors["layers.0.q"]})
    assert memory.read() == table.numpy().T.tobytes()
    assert report.backend == "kvikio+pread"
    assert "1 tensor(s) with strides or a cast can't be read directly" in report.reason
    assert (report.direct_bytes + report.compat_bytes, report.staged_bytes) == (96 * 96 * 4, table.nbytes)
    assert report.bytes_read == report.bytes_written
    del destinations["layers.0.q"]
    alone = load_into(file, destinations, strict=False, backend="kvikio")
    assert (alone.backend, alone.staged_bytes) == ("pread", table.nbytes)
    empty = driver.memory(0, 8).tensor((0, 2), F32, strides=(9, 2))
    load_into(file, {"layers.0.q": Target(empty, np.s_[5:5, ::50])}, strict=False, backend="kvikio")
    if path == "gds":
        with pytest.raises(UnsupportedError, match="require_direct asks for reads without") as caught:
            load_into(file, destinations, strict=False, require_direct=True)
        assert caught.value.tensor == "layers.0.mlp.up"


# Order


@pytest.mark.parametrize("given", [False, True], ids=["producer", "caller"])
def test_pending_work_is_waited_for(
    driver: Driver, saved: Saved, path: Path_, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, tensors = saved
    driver.mode = Mode.DEFERRED
    stream = driver.stream(0)
    room = Room(driver, tensors, stream=None if given else stream)

    def load() -> None:
        room.disturb(stream)
        load_into(file, room.tensors, backend="kvikio", stream=stream if given else None)
        stream.synchronize()

    load()
    room.check(tensors)
    monkeypatch.setattr(OwnedStream, "synchronize", lambda self: None)  # the wait before reading is what does it
    load()
    with pytest.raises(AssertionError):
        room.check(tensors)


def test_a_pending_load_on_another_device_alone(driver: Driver, saved: Saved, path: Path_) -> None:
    file, tensors = saved
    room = Room(driver, tensors, device=2)
    pending = load_into(file, dict(room.tensors), backend="kvikio", wait=False)
    through(path, pending.wait())
    room.check(tensors)
    assert [driver.context(device).uses for device in (0, 1)] == [0, 0]
    assert driver.count(*DEVICE_WIDE) == 0


def test_several_devices(driver: Driver, saved: Saved, path: Path_) -> None:
    file, tensors = saved
    names = sorted(tensors)
    rooms = [Room(driver, {name: tensors[name] for name in names[k::2]}, device=k + 1) for k in (0, 1)]
    report = load_into(file, {**rooms[0].tensors, **rooms[1].tensors}, backend="kvikio")
    for k, room in enumerate(rooms):
        room.check({name: tensors[name] for name in names[k::2]})
    through(path, report)
    assert "cuda:1" in report.reason
    assert "cuda:2" in report.reason
    assert driver.context(0).uses == 0


# What is left behind


def test_nothing_is_left_behind(driver: Driver, saved: Saved, path: Path_) -> None:
    file, tensors = saved
    room = Room(driver, tensors)
    for _ in range(3):  # KvikIO keeps bounce buffers and a stream for each thread that reads at the same time
        load_into(file, room.tensors, backend="kvikio", threads=1)
    gc.collect()
    before = driver.live(), len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(20):
        load_into(file, room.tensors, backend="kvikio", threads=1)
    gc.collect()
    assert (driver.live(), len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert driver.live().files == driver.live().buffers == 0
    assert all(set(tensor.releases) == {1} and tensor.exports == 23 for tensor in room.tensors.values())
    assert driver.count("cuFileBufRegister", *DEVICE_WIDE) == 0


@pytest.mark.parametrize("staging", [1, 40 << 20])
def test_bounce_buffers_are_bounded(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging: int
) -> None:
    take(monkeypatch, "compat")
    data = torch.randint(0, 255, (20 << 20,), dtype=torch.uint8)
    save(tmp_path / "m.safetensors", {"x": data})
    room = Room(driver, {"x": data})
    free_buffers()
    kept = driver.live().pinned_bytes  # by tests before this one
    report = load_into(tmp_path / "m.safetensors", room.tensors, backend="kvikio", staging_bytes=staging, threads=8)
    through("compat", report)
    room.check({"x": data})
    assert 0 < driver.live().pinned_bytes - kept <= max(1, staging // (16 << 20)) * (16 << 20)


# Faults


@pytest.mark.parametrize(
    ("fault", "kind", "code", "text"),
    [
        ({"errno": errno.EIO}, StorageError, None, "cuFile failed in the operating system"),
        ({"count": -5011}, DeviceError, None, "cuFile failed: CUDA Driver API error"),
        ({"error": 5030}, DeviceError, None, "cuFile failed: internal error"),
        ({"error": 201}, DeviceError, None, "cuFile failed: Unknown error 201"),
        ({"count": 0}, StorageError, errno.EIO, "reads no bytes"),
    ],
)
@pytest.mark.usefixtures("gds")
def test_a_read_that_fails_in_the_middle(
    driver: Driver, tmp_path: Path, fault: dict[str, int], kind: type[LoaderError], code: int | None, text: str
) -> None:
    file = tmp_path / "m.safetensors"
    data = {"b": torch.ones(30 << 20, dtype=torch.uint8)}
    save(file, data)
    room = Room(driver, data)
    load_into(file, room.tensors, backend="kvikio", threads=3)
    gc.collect()
    before, descriptors = driver.live(), len(os.listdir("/proc/self/fd"))
    fired = driver.fault("cuFileRead", 4, **fault)
    driver.fault("cuFileRead", 5, times=None, sleep=0.05)
    with pytest.raises(kind, match=text) as caught:
        load_into(file, room.tensors, backend="kvikio", threads=3)
    assert fired.fired == 1
    assert caught.value.dirty == ("b",)
    assert (caught.value.file, caught.value.tensor) == (str(file), "b")
    assert caught.value.offset is not None
    assert getattr(caught.value, "errno", None) == code
    del caught
    gc.collect()
    assert driver.live() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert room.tensors["b"].releases == [1, 1]


def test_a_short_read_is_continued(driver: Driver, saved: Saved, gds: None) -> None:
    file, tensors = saved
    room = Room(driver, tensors)
    fired = driver.fault("cuFileRead", 2, times=5, count=3)
    through("gds", load_into(file, room.tensors, backend="kvikio"))
    assert fired.fired == 5
    room.check(tensors)


def test_a_file_that_is_cut_off(driver: Driver, tmp_path: Path, path: Path_, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.safetensors"
    data = {"a": torch.zeros(10, dtype=torch.uint8), "b": torch.ones(9 << 20, dtype=torch.uint8)}
    save(file, data)
    room = Room(driver, data)
    opened = backend().open_file

    def cut(*arguments: Any) -> Any:
        handle = opened(*arguments)
        os.truncate(file, 5 << 20)
        return handle

    with safe_open(file, backend="kvikio", threads=1) as reader:
        with monkeypatch.context() as patch:
            patch.setattr("dlpack_loader.backend.kvikio.open_file", cut)
            with pytest.raises(TruncatedError) as caught:
                reader.load_into(room.tensors)
        assert (caught.value.tensor, caught.value.dirty) == ("b", ("b",))
        assert caught.value.offset == 5 << 20 or path == "compat"
        with pytest.raises(FileChangedError):
            reader.load_into(room.tensors)


def test_a_file_that_is_replaced(driver: Driver, saved: Saved, path: Path_) -> None:
    file, tensors = saved
    room = Room(driver, tensors)
    with safe_open(file, backend="kvikio") as reader:
        save(file.with_suffix(".new"), tensors)
        os.replace(file.with_suffix(".new"), file)
        with pytest.raises(FileChangedError):
            reader.load_into(room.tensors)
    assert driver.count("cuFileRead") == 0


@pytest.mark.usefixtures("gds")
def test_a_handle_that_is_refused(driver: Driver, saved: Saved) -> None:
    """As on an overlay file system, although the probe passed."""
    file, tensors = saved
    room = Room(driver, tensors)
    driver.fault("cuFileHandleRegister", error=5027)
    with pytest.raises(DeviceError, match="file descriptor is not registered"):
        load_into(file, room.tensors, backend="kvikio", threads=1)
    driver.fault("cuFileHandleRegister", error=5027)
    with pytest.raises(UnsupportedError, match="cuFile refuses"):
        load_into(file, room.tensors, require_direct=True)
    driver.fault("cuFileHandleRegister", error=5027)
    report = load_into(file, room.tensors)
    room.check(tensors)
    assert (report.backend, report.direct_bytes) == ("pread", 0)
    assert "not GPU-direct: cuFile refuses" in report.reason
    assert driver.live().files == 0


def test_errors_of_compatibility_mode(driver: Driver, saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    file, tensors = saved
    take(monkeypatch, "compat")
    room = Room(driver, tensors)
    free_buffers()
    driver.fault("cuMemHostAlloc", error=2)
    with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
        load_into(file, room.tensors, backend="kvikio", threads=1)
    for text, kind, code in (
        (
            "Unable to open file. Linux system/library function call error at: x:1: Permission denied",
            PermissionError,
            13,
        ),
        ("KvikIO failure at: x:1: POSIX error on pread: Input/output error", StorageError, errno.EIO),
        ("KvikIO failure at: x:1: something else", StorageError, None),
    ):
        error = backend()._mapped(RuntimeError(text), "f", 7)
        assert isinstance(error, kind)
        assert isinstance(error, StorageError)
        assert (error.errno, error.file, error.offset) == (code, "f", 7)


# Which backend, and why


def test_auto_without_kvikio(driver: Driver, saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    file, tensors = saved
    room = Room(driver, tensors)
    monkeypatch.delitem(sys.modules, "dlpack_loader.backend.kvikio")
    monkeypatch.setitem(sys.modules, "kvikio", None)
    report = load_into(file, room.tensors)
    room.check(tensors)
    assert (report.backend, report.staged_bytes) == ("pread", report.bytes_read)
    assert "not GPU-direct: KvikIO is not installed" in report.reason
    with pytest.raises(MissingDependencyError, match=r"KvikIO is not installed.*kvikio-cu13"):
        load_into(file, room.tensors, backend="kvikio")
    with pytest.raises(UnsupportedError, match=r"GPU-direct reads into cuda:0 are not possible: KvikIO is not inst"):
        load_into(file, room.tensors, require_direct=True)


def test_auto_with_a_kvikio_that_cannot_be_loaded(
    driver: Driver, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, tensors = saved
    monkeypatch.delitem(sys.modules, "dlpack_loader.backend.kvikio")
    monkeypatch.delattr("kvikio.SummaryMonitor")  # as before 26.10
    report = load_into(file, Room(driver, tensors).tensors)
    assert "not GPU-direct: KvikIO can't be loaded: cannot import name 'SummaryMonitor'" in report.reason


def test_auto_in_compatibility_mode(driver: Driver, saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    file, tensors = saved
    room = Room(driver, tensors)
    take(monkeypatch, "compat")
    report = load_into(file, room.tensors)
    assert (report.backend, report.staged_bytes, report.compat_bytes) == ("pread", report.bytes_read, 0)
    assert "not GPU-direct: KvikIO would run in compatibility mode: it is switched on" in report.reason
    for name in ("auto", "kvikio"):
        with pytest.raises(
            UnsupportedError, match=r"it is switched on, by KVIKIO_COMPAT_MODE.*leave out require_direct"
        ):
            load_into(file, room.tensors, backend=name, require_direct=True)


def test_auto_with_gds(driver: Driver, saved: Saved, gds: None) -> None:
    file, tensors = saved
    room = Room(driver, tensors)
    with safe_open(file, "np", require_direct=True) as reader:
        report = reader.load_into(room.tensors)
        assert isinstance(report, LoadReport)
        assert reader.backend_info() == report.info()
    room.check(tensors)
    assert report.backend == "kvikio"
    assert through("gds", report) == report.bytes_written
    assert report.info().direct


def test_auto_where_a_file_falls_back(driver: Driver, saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """KvikIO may find only when it opens a file that cuFile does not serve it, and says nothing."""
    file, tensors = saved
    room = Room(driver, tensors)
    take(monkeypatch, "compat")
    monkeypatch.setattr(kvikio().defaults, "is_compat_mode_preferred", lambda: False)
    assert "cuFile does not serve the file system of" in load_into(file, room.tensors).reason
    with pytest.raises(UnsupportedError, match="does not serve the file system"):
        load_into(file, room.tensors, require_direct=True, backend="kvikio")
    report = load_into(file, room.tensors, backend="kvikio")
    through("compat", report)
    assert "came through its compatibility mode" in report.reason
    assert not report.info().direct


def test_reasons_of_the_probe(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    kvikio().defaults.set({"compat_mode": kvikio().CompatMode.OFF})
    assert backend().probe() == (False, "cuFile would copy through the host: the kernel module nvidia-fs is not loaded")
    take(monkeypatch, "gds", lenient=True)
    direct, reason = backend().probe()
    assert direct
    assert "allow_compat_mode is on" in reason

    def fail(name: str) -> bool:
        raise RuntimeError("cuFile error at: x:1: nvidia-fs driver is not loaded")

    monkeypatch.setattr(kvikio().cufile_driver, "get", fail)
    assert backend().probe() == (False, "the driver of cuFile can't be opened: nvidia-fs driver is not loaded")
    kvikio().defaults.set({"compat_mode": kvikio().CompatMode.AUTO})
    monkeypatch.setattr(kvikio().defaults, "is_compat_mode_preferred", lambda: True)
    monkeypatch.setattr(backend().platform, "release", lambda: "5.15.90.1-microsoft-standard-WSL2")
    assert "Windows Subsystem" in backend().probe()[1]
    monkeypatch.setattr(backend().platform, "release", lambda: "6.8.0")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "/run/udev can't be read" in backend().probe()[1]
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    assert "libcufile can't be loaded" in backend().probe()[1]


def test_what_a_named_backend_does_not_serve(driver: Driver, saved: Saved, path: Path_) -> None:
    file, tensors = saved
    host = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    room = Room(driver, {"scale": tensors["scale"]})
    for destinations in (host, {**host, **room.tensors}):
        with pytest.raises(OptionError, match=r"a destination is in host memory.*pread"):
            load_into(file, destinations, backend="kvikio")
    with pytest.raises(OptionError, match="'hipfile' does not serve cuda:0"):
        load_into(file, room.tensors, backend="hipfile", strict=False)
    with pytest.raises(UnsupportedError, match="backend 'pread' goes through pinned"):
        load_into(file, room.tensors, backend="pread", strict=False, require_direct=True)
    with pytest.raises(DestinationError):
        load_into(file, {"scale": room.memories["scale"].tensor((2,), F32)}, backend="kvikio", strict=False)
    assert all(not tensor.any() for tensor in host.values())
    assert set(room.memories["scale"].read()) == {0xA5}
    assert driver.count("cuFileHandleRegister", "cuFileRead") == 0
    report = load_into(file, room.tensors, backend="pread", strict=False)
    assert "GPU-direct" not in report.reason


def test_require_direct_means_devices_only(saved: Saved, tmp_path: Path) -> None:
    file, tensors = saved
    module = torch.nn.Linear(4, 4)
    save(tmp_path / "l.safetensors", module.state_dict())
    assert load_model(module, tmp_path / "l.safetensors", require_direct=True).compat_bytes == 0
    loaded = load_file(file, require_direct=True)
    assert all(raw_bytes(loaded[name]) == raw_bytes(tensor) for name, tensor in tensors.items())
    with pytest.raises(OptionError, match="options of its own"), safe_open(file) as reader:
        load_into(reader, {}, require_direct=True)
