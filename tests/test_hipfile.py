"""Reads into ROCm memory by the real hipFile binding over the emulated driver."""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import random
import subprocess
import threading
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from dlpack_loader import load_into
from dlpack_loader.bounds import Bounds
from dlpack_loader.checkpoint import open_checkpoint
from dlpack_loader.dtype import DTYPES
from dlpack_loader.errors import (
    DestinationBufferError,
    DeviceError,
    LoaderError,
    StorageError,
    TruncatedError,
    UnsupportedError,
)
from dlpack_loader.matching import Match, match
from dlpack_loader.plan import Plan
from dlpack_loader.reads import Axis, Gather, Runs, Scatter, Segment
from dlpack_loader.runtime.files import Files
from dlpack_loader.runtime.hip import HipDevice
from dlpack_loader.stream import Streams
from dlpack_loader.transfer import run
from tests.device_room import GUARD, Room
from tests.emulation import DeviceTensor, Driver, Mode
from tests.files import raw_bytes, save, state, write_raw

U8 = (1, 8, 1)
DATA = random.Random(7).randbytes(1 << 20)


@pytest.fixture
def hip(driver: Driver) -> Driver:
    driver.vendor = "hip"
    return driver


def hipfile() -> Any:
    """The backend's module, which can be imported once the emulation is loaded."""
    return importlib.import_module("dlpack_loader.backend.hipfile")


class Load:
    """One load of one device by a backend of its own, from the taking of the destinations to the streams' end."""

    def __init__(self, path: Path, destinations: dict[str, DeviceTensor], bounds: Bounds, stream: Any = None) -> None:
        checkpoint = open_checkpoint(path)
        self.files = Files({shard.path: shard for shard in checkpoint.shards})
        self.streams = Streams(stream)
        self.found: Match = match(checkpoint, destinations, strict=True, cast=False, streams=self.streams)
        self.owned = self.streams.of(self.found.memories[0].device)
        self.backend = hipfile().HipfileBackend(self.files, self.found.memories, bounds, self.owned)
        self.plan = Plan.make(self.found.transfers, self.found.names, bounds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.streams.close()
        self.files.close()

    def run(self) -> Any:
        run(self.plan, self.backend)
        return self.backend


def load(path: Path, destinations: dict[str, DeviceTensor], bounds: Bounds | None = None) -> Any:
    with Load(path, destinations, bounds or Bounds()) as loading:
        return loading.run()


def direct_file(path: Path) -> bool:
    """Whether the file system lets it be opened with O_DIRECT, as hipFile wants it."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def write(path: Path, data: bytes, padding: int = 0) -> int:
    """Write a file with one tensor of bytes and return the offset of its data."""
    header = json.dumps({"x": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    write_raw(path, header + b" " * padding, data)
    return 8 + len(header) + padding


def one(hip: Driver, nbytes: int, offset: int = GUARD, **options: Any) -> tuple[Any, DeviceTensor]:
    """A tensor of bytes between guard bytes."""
    memory = hip.memory(0, nbytes + offset + GUARD)
    memory.fill(0xA5)
    return memory, memory.tensor((nbytes,), U8, offset=offset, **options)


def check(memory: Any, data: bytes, offset: int = GUARD) -> None:
    raw = memory.read()
    assert raw[offset : offset + len(data)] == data
    assert set(raw[:offset] + raw[offset + len(data) :]) == {0xA5}


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("chunk", [1000, 4096, 70_000, 4 << 20])
def test_every_tensor_arrives(hip: Driver, tmp_path: Path, mode: Mode, chunk: int) -> None:
    path = tmp_path / "m.safetensors"
    tensors = save(path, state(width=96))
    room = Room(hip, tensors, device=1)
    before, hip.mode = hip.live(), mode
    backend = load(path, room.tensors, Bounds(chunk_bytes=chunk))
    room.check(tensors)
    assert backend.direct_bytes + backend.compat_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert backend.staged_bytes == hip.seen().failed == 0
    assert hip.seen().pinned_peak == hip.live().pinned_bytes  # none of ours
    assert hip.live() == before
    assert all(tensor.releases == [] or set(tensor.releases) <= {0, 1} for tensor in room.tensors.values())
    assert hip.count("hipDeviceSynchronize", "hipFileReadAsync", "hipFileBufRegister") == 0
    assert not any(hip.context(device).uses for device in (0, 2))
    assert hip.current_device("hip") == 0
    del backend
    gc.collect()
    assert all(tensor.releases == [1] for tensor in room.tensors.values())


@pytest.mark.parametrize("shape", [(4, 24), (), (0, 8)])
def test_every_dtype(hip: Driver, tmp_path: Path, shape: tuple[int, ...]) -> None:
    entries: dict[str, dict[str, Any]] = {}
    at = 0
    wanted = [dtype for dtype in DTYPES if shape or dtype.group == 1]
    for dtype in sorted(wanted, key=lambda dtype: -dtype.bits):
        count = 1
        for size in shape:
            count *= size
        nbytes = count * dtype.bits // 8
        entries[dtype.code] = {"dtype": dtype.code, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    path, data = tmp_path / "m.safetensors", DATA[:at]
    write_raw(path, entries, data)
    memory = hip.memory(0, at + (len(entries) + 1) * GUARD)
    memory.fill(0xA5)
    expected, destinations, place = bytearray(memory.read()), {}, GUARD
    for dtype in wanted:
        begin, end = entries[dtype.code]["data_offsets"]
        bits = dtype.dlpack[1] * dtype.dlpack[2]
        inner = (*shape[:-1], shape[-1] * dtype.bits // bits) if shape else ()
        destinations[dtype.code] = memory.tensor(inner, dtype.dlpack, byte_offset=place)
        expected[place : place + end - begin] = data[begin:end]
        place += end - begin + GUARD
    load(path, destinations, Bounds(chunk_bytes=100))
    assert memory.read() == bytes(expected)


@pytest.mark.parametrize("residue", [0, 1, 7, 8, 511, 512, 2048, 4089, 4095])
@pytest.mark.parametrize("offset", [GUARD, 4096, 4099])
def test_every_header_length(hip: Driver, tmp_path: Path, residue: int, offset: int) -> None:
    path = tmp_path / "m.safetensors"
    begin = write(path, DATA[:200_000])
    begin = write(path, DATA[:200_000], padding=(residue - begin) % 4096)
    assert begin % 4096 == residue
    memory, tensor = one(hip, 200_000, offset)
    backend = load(path, {"x": tensor}, Bounds(chunk_bytes=1 << 17))
    check(memory, DATA[:200_000], offset)
    assert backend.direct_bytes + backend.compat_bytes == 200_000
    whole_pages = (begin + 200_000) // 4096 * 4096 - (begin + -begin % 4096)
    assert backend.direct_bytes == (whole_pages if direct_file(path) else 0)


def test_pages_and_the_bytes_around_them(hip: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    begin = write(path, DATA[:70_000], padding=5)
    memory, tensor = one(hip, 70_000)
    backend = load(path, {"x": tensor})
    check(memory, DATA[:70_000])
    if direct_file(path):
        assert hip.count("hipFileRead") == 3
        assert 0 < backend.compat_bytes < 8192
        assert f"{backend.direct_bytes:,} bytes in whole pages" in backend.info().reason
    assert (backend.info().name, backend.info().direct) == ("hipfile", False)
    monkeypatch.setenv("HIPFILE_FORCE_COMPAT_MODE", "True")
    backend = load(path, {"x": tensor})
    assert (backend.direct_bytes, backend.compat_bytes) == (0, 70_000)
    assert begin % 4096


def test_a_file_system_that_refuses_direct_reads(hip: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    write(path, DATA)
    memory, tensor = one(hip, len(DATA))
    whole = os.open

    def refuse(name: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return whole(name, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    backend = load(path, {"x": tensor})
    check(memory, DATA)
    assert (backend.direct_bytes, backend.compat_bytes) == (0, len(DATA))


@pytest.mark.parametrize("limit", [1000, 4096, 70_001])
def test_short_reads(hip: Driver, tmp_path: Path, limit: int) -> None:
    path = tmp_path / "m.safetensors"
    write(path, DATA)
    memory, tensor = one(hip, len(DATA))
    hip.configure(read_limit=limit)
    load(path, {"x": tensor}, Bounds(threads=3))
    check(memory, DATA)
    assert hip.count("hipFileRead") >= len(DATA) // limit


def test_requests_stay_within_the_budget(hip: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    write(path, DATA)
    memory, tensor = one(hip, len(DATA))
    load(path, {"x": tensor}, Bounds(staging_bytes=4 * 10_000, threads=4))
    check(memory, DATA)
    assert len(DATA) // 8192 <= hip.count("hipFileRead") <= len(DATA) // 8192 + 8


def test_destinations_with_steps(hip: Driver, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    data = torch.arange(3 * 40_000, dtype=torch.int64).reshape(3, 40_000)
    save(path, {"x": data})
    memory = hip.memory(0, 3 * 400_000)
    memory.fill(0xA5)
    expected = bytearray(memory.read())
    tensor = memory.tensor((3, 40_000), (0, 64, 1), offset=80_000, strides=(50_000, 1))
    for row in range(3):
        at = 80_000 + row * 400_000
        expected[at : at + 320_000] = raw_bytes(data[row])
    with Load(path, {"x": tensor}, Bounds(chunk_bytes=100_000)) as loading:
        assert all(isinstance(read, Runs) for read in loading.plan.reads())
        loading.run()
    assert memory.read() == bytes(expected)


def test_what_it_refuses(hip: Driver, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write(path, DATA)
    _, tensor = one(hip, len(DATA))
    name = str(path)
    with Load(path, {"x": tensor}, Bounds()) as loading, loading.backend.worker() as worker:
        with pytest.raises(UnsupportedError, match="contiguous pieces only"):
            worker.read(Gather(name, 0, 8, 0, 0, 0, (Axis(2, 4, 4),), 2, None))
        for at, nbytes in ((-1, 10), (len(DATA) - 9, 10), (0, len(DATA) + 1), (len(DATA), 1)):
            with pytest.raises(DestinationBufferError, match="outside of its destination's memory"):
                worker.read(Scatter(name, 0, nbytes, (Segment(0, at, nbytes),)))
        with pytest.raises(DestinationBufferError):
            worker.read(Runs(name, 0, 0, 8, 16, Axis(2, 16, -16)))
    assert hip.count("hipFileRead") == 1  # the first of the runs


def test_a_file_that_ends_early(hip: Driver, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    begin = write(path, DATA)
    _, tensor = one(hip, len(DATA))
    with Load(path, {"x": tensor}, Bounds(threads=1, chunk_bytes=1 << 18)) as loading:
        hip.fault("hipFileRead", nth=4, count=0)
        with pytest.raises(TruncatedError, match="the file ends before") as caught:
            loading.run()
        assert (caught.value.file, caught.value.tensor, caught.value.dirty) == (str(path), "x", ("x",))
        with loading.backend.worker() as worker:
            first, *_, last, _ = loading.plan.reads()
            worker.read(first)
            os.truncate(path, begin + 900_000)
            with pytest.raises(TruncatedError) as caught:
                worker.read(last)
        assert caught.value.offset == begin + 900_000
    assert hip.live().files == hip.live().file_drivers == 0


READ_FAULTS: list[tuple[dict[str, int], type[LoaderError], str]] = [
    ({"errno": errno.EIO}, StorageError, "Input/output error"),
    ({"errno": errno.ENODEV}, StorageError, "No such device"),
    ({"count": -5011}, DeviceError, "hipFileRead failed: HIP_DRIVER_ERROR"),
    ({"count": -5027}, DeviceError, "hipFileRead failed: HANDLE_NOT_REGISTERED"),
    ({"count": -5999}, DeviceError, "hipFileRead failed: 5999"),
]


@pytest.mark.parametrize(("fault", "error", "text"), READ_FAULTS)
@pytest.mark.parametrize("threads", [1, 4])
def test_a_read_that_fails_in_the_middle(
    hip: Driver, tmp_path: Path, fault: dict[str, Any], error: type[LoaderError], text: str, threads: int
) -> None:
    path = tmp_path / "m.safetensors"
    tensors = {"a": torch.zeros(300_000, dtype=torch.uint8), "b": torch.ones(1 << 20, dtype=torch.uint8)}
    save(path, tensors)
    room = Room(hip, tensors)
    before = hip.live()
    descriptors = len(os.listdir("/proc/self/fd"))
    hip.fault("hipFileRead", nth=6, **fault)
    with (
        pytest.raises(error, match=text) as caught,
        Load(path, room.tensors, Bounds(threads=threads, chunk_bytes=1 << 17)) as loading,
    ):
        loading.run()
    assert caught.value.file == str(path)
    assert caught.value.offset
    assert caught.value.tensor in ("a", "b")
    assert caught.value.tensor in caught.value.dirty
    if isinstance(caught.value, StorageError):
        assert caught.value.errno == fault["errno"]
    del caught, loading
    gc.collect()
    assert hip.live() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert all(tensor.releases == [1] for tensor in room.tensors.values())
    assert threading.active_count() == 1 or not any("dlpack" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("function", "code", "name"),
    [
        ("hipFileDriverOpen", 5009, "DEVICE_NOT_SUPPORTED"),
        ("hipFileHandleRegister", 5027, "HANDLE_NOT_REGISTERED"),
        ("hipFileDriverClose", 5006, "DRIVER_CLOSING"),
        ("hipFileDriverOpen", 999, "HIP_DRIVER_ERROR"),
    ],
)
def test_a_call_that_fails_is_typed_and_leaves_nothing(
    hip: Driver, tmp_path: Path, function: str, code: int, name: str
) -> None:
    path = tmp_path / "m.safetensors"
    write(path, DATA)
    _, tensor = one(hip, len(DATA))
    before = hip.live()
    fault = hip.fault(function, error=code)
    with (
        pytest.raises(DeviceError, match=f'{function} failed: {name}.*backend="pread"') as caught,
        Load(path, {"x": tensor}, Bounds(threads=2)) as loading,
    ):
        loading.run()
    assert fault.fired == 1
    assert caught.value.status == name
    del caught, loading
    gc.collect()
    if function == "hipFileDriverClose":  # it stayed open
        importlib.import_module("hipfile").Driver().close()
    assert hip.live() == before
    assert tensor.releases == [1]


def test_the_producer_is_waited_for(hip: Driver, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = save(path, state(width=96))
    hip.mode = Mode.DEFERRED
    stream = hip.stream(0)
    room = Room(hip, tensors, stream=stream)
    room.disturb(stream)
    load(path, room.tensors)
    stream.synchronize()
    room.check(tensors)


def test_the_callers_stream_is_waited_for(hip: Driver, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = save(path, state(width=96))
    hip.mode = Mode.DEFERRED
    stream = hip.null_stream(0)
    room = Room(hip, tensors)
    room.disturb(stream)
    with Load(path, room.tensors, Bounds(), stream=0) as loading:
        loading.run()
    stream.synchronize()
    room.check(tensors)


@pytest.mark.parametrize("borrowed", [False, True])
def test_without_the_wait_pending_work_comes_last(
    hip: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, borrowed: bool
) -> None:
    path = tmp_path / "m.safetensors"
    tensors = save(path, state(width=96))
    hip.mode = Mode.DEFERRED
    stream = hip.stream(0)
    room = Room(hip, tensors, stream=None if borrowed else stream)
    room.disturb(stream)
    monkeypatch.setattr(HipDevice, "synchronize_stream", lambda self, stream: None)
    with Load(path, room.tensors, Bounds(), stream=stream.handle if borrowed else None) as loading:
        loading.run()
    stream.synchronize()
    with pytest.raises(AssertionError):
        room.check(tensors)


def test_the_very_file_whose_header_was_read(hip: Driver, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write(path, DATA)
    memory, tensor = one(hip, len(DATA))
    with Load(path, {"x": tensor}, Bounds()) as loading:
        with loading.files.use(str(path)):
            pass
        path.rename(tmp_path / "old")
        write(path, bytes(len(DATA)))
        loading.run()
    check(memory, DATA)


def test_through_the_public_functions(hip: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPFILE_UNSUPPORTED_FILE_SYSTEMS", "true")
    path = tmp_path / "m.safetensors"
    tensors = save(path, state(width=96))
    room = Room(hip, tensors, device=2)
    before, hip.mode = hip.live(), Mode.DEFERRED
    for backend in ("hipfile", "auto"):
        report = load_into(path, room.tensors, backend=backend)
        room.check(tensors)
        assert report.backend == "hipfile"
        assert report.direct_bytes + report.compat_bytes == report.bytes_read == report.bytes_written
        assert "hip:2 is filled by hipFile" in report.reason
    pending = load_into(path, dict(room.tensors), backend="hipfile", wait=False)
    pending.wait()
    room.check(tensors)
    del pending
    gc.collect()
    assert hip.live() == before
    table = tensors["layers.0.mlp.up"]  # 384 x 96, and another one that is turned: it is staged
    memory = hip.memory(2, 2 * table.nbytes)
    turned = memory.tensor((384, 96), (2, 32, 1), strides=(1, 384))
    straight = memory.tensor((384, 96), (2, 32, 1), offset=table.nbytes)
    both = {"layers.0.mlp.up": turned, "layers.1.mlp.up": straight}
    report = load_into(path, both, strict=False, backend="hipfile")
    assert memory.read() == raw_bytes(table.T) + raw_bytes(tensors["layers.1.mlp.up"])
    assert report.backend == "hipfile+pread"
    assert report.staged_bytes == table.nbytes


def test_the_probe(hip: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = hip.live()
    assert hipfile().probe()[0]
    hip.fault("hipFileDriverOpen", error=5007)
    assert hipfile().probe() == (False, "hipFileDriverOpen failed: PLATFORM_NOT_SUPPORTED (5007 - hipFile error)")
    monkeypatch.setenv("HIPFILE_FORCE_COMPAT_MODE", "true")
    assert not hipfile().probe()[0]
    assert hip.live() == before


def test_file_systems(hip: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    write(path, DATA[:10])
    _, tensor = one(hip, 10)
    module = "dlpack_loader.backend.hipfile._file_system"
    with Load(path, {"x": tensor}, Bounds()) as loading:
        fallback = loading.backend.fallback
        assert (fallback(str(path)) is None) == (_type_of(tmp_path) in ("ext4", "xfs"))
        for kind in ("ext4", "xfs"):
            monkeypatch.setattr(module, lambda device, kind=kind: kind)
            assert fallback(str(path)) is None
        monkeypatch.setattr(module, lambda device: "nfs4")
        assert fallback(str(path)) == f"{path} is on nfs4, and hipFile reads directly from ext4 and xfs only"
        monkeypatch.setenv("HIPFILE_UNSUPPORTED_FILE_SYSTEMS", "true")
        assert fallback(str(path)) is None


def _type_of(folder: Path) -> str:
    done = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=True)
    return done.stdout.strip().replace("ext2/ext3", "ext4")
