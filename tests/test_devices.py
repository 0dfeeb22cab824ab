"""Tensors that the reader makes on a device: torch's spellings of devices, and the whole path over the emulated driver.

torch's CPU build makes no CUDA tensor, so a framework of this file, whose tensors are on the emulated devices, stands
where torch and CuPy do.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from dlpack_loader import framework, load_file, making, safe_open
from dlpack_loader.backend import BackendInfo
from dlpack_loader.dtype import BY_CODE, DTYPES, DType
from dlpack_loader.errors import DeviceError, OptionError, SelectionError, StorageError, UnsupportedError
from dlpack_loader.framework import HOST, Allocation, describer
from dlpack_loader.framework import torch as for_torch
from dlpack_loader.runtime import host
from dlpack_loader.stream import Streams
from tests.emulation import DeviceTensor, Driver, Mode, Stream
from tests.files import raw_bytes, save, state, write_raw

GUARD = 64


class Emulated:
    """A framework: what the reader needs of one, and no more. Its tensors are bytes between guard bytes."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.made: list[DeviceTensor] = []
        self.stream: Stream | None = None
        self.fails_at = -1

    def resolve_device(self, device: object) -> tuple[int, int]:
        return (2, int(str(device).removeprefix("cuda:")))

    def empty(self, dtype: DType, shape: tuple[int, ...], unit: int, device: tuple[int, int]) -> Allocation:
        assert self.driver.current_device("cuda") == device[1]
        if len(self.made) == self.fails_at:
            raise MemoryError("out of device memory")
        nbytes = prod(shape) * unit
        memory = self.driver.memory(device[1], nbytes + 2 * GUARD)
        memory.fill(0xA5)
        tensor = memory.tensor((nbytes,), offset=GUARD, stream=self.stream)
        if self.stream is not None:  # what the block's last user had still to do, as a caching allocator allows
            self.stream.write(memory, b"\x77" * nbytes, GUARD)
        self.made.append(tensor)
        return Allocation(tensor, raw=tensor)

    def wrap(self, array: Any, dtype: DType, shape: tuple[int, ...]) -> NoReturn:
        raise AssertionError("mapped pages are in host memory")

    def describe(self, value: Any) -> None:
        return None

    def wrote(self, values: Iterable[Any]) -> None:
        return None


@pytest.fixture
def emulated(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Emulated:
    made = Emulated(driver)
    monkeypatch.setitem(sys.modules, "dlpack_loader.framework.emulated", made)
    monkeypatch.setattr(framework, "_ALIASES", {**framework._ALIASES, "emulated": "emulated"})
    return made


def shown(tensor: DeviceTensor) -> bytes:
    """The bytes of a tensor as they are now; nothing that is queued runs for this. Its guards must be whole."""
    raw = tensor.memory.read()
    assert set(raw[:GUARD] + raw[-GUARD:]) == {0xA5}
    return raw[GUARD:-GUARD]


def pinned_peak(driver: Driver) -> int:
    return driver.seen().pinned_peak - driver.live().pinned_bytes


SHAPES = {"small": (3, 8), "large": (9, 4096), "none": (0, 8), "scalar": ()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Every dtype in every shape that it has."""
    numbers = np.random.default_rng(7)
    header: dict[str, Any] = {}
    contents: dict[str, bytes] = {}
    end = 0
    for dtype in DTYPES:
        for kind, shape in SHAPES.items():
            if kind == "scalar" and dtype.group > 1:
                continue
            nbytes = prod(shape) * dtype.bits // 8
            contents[f"{dtype.code}.{kind}"] = numbers.bytes(nbytes)
            header[f"{dtype.code}.{kind}"] = {"dtype": dtype.code, "shape": shape, "data_offsets": [end, end + nbytes]}
            end += nbytes
    path = tmp_path_factory.mktemp("devices") / "m.safetensors"
    return write_raw(path, header, b"".join(contents.values())), contents


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    path = tmp_path / "m.safetensors"
    return path, save(path, state(width=96))


# The bytes


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("code", [dtype.code for dtype in DTYPES])
def test_every_dtype(
    emulated: Emulated, driver: Driver, checkpoint: tuple[Path, dict[str, bytes]], code: str, mode: Mode
) -> None:
    path, contents = checkpoint
    driver.mode = mode
    with safe_open(path, "emulated", "cuda:1") as reader:
        for name in (name for name in contents if name.startswith(f"{code}.")):
            assert shown(reader.get_tensor(name)) == contents[name], name
    assert driver.seen().failed == driver.seen().pageable == 0


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("staging", [12_288, 64 << 20])
def test_all_at_once(
    emulated: Emulated, driver: Driver, checkpoint: tuple[Path, dict[str, bytes]], staging: int, mode: Mode
) -> None:
    path, contents = checkpoint
    driver.mode = mode
    loaded = load_file(path, "emulated", 2, staging_bytes=staging)
    assert {name: shown(tensor) for name, tensor in loaded.items()} == contents
    with safe_open(path, "emulated", "cuda:2", staging_bytes=staging) as reader:
        some = reader.get_tensors(["F4.large", "F6_E2M3.small", "F32.scalar", "F4.large"])
    assert all(shown(tensor) == contents[name] for name, tensor in some.items())
    assert pinned_peak(driver) <= staging


INDICES = [
    np.s_[...], np.s_[5], np.s_[-1], np.s_[10:20], np.s_[20:10], np.s_[::-1], np.s_[::7], np.s_[:, 3:50], np.s_[:, 7],
    np.s_[::3, ::2], np.s_[..., ::-5], np.s_[4, 9], np.s_[:0, ::2], np.s_[100:3:-9, 90:1:-4],
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=repr)
@pytest.mark.parametrize("staging", [12_288, 1 << 20])
def test_slices(
    emulated: Emulated, driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]], index: Any, staging: int
) -> None:
    path, tensors = saved
    driver.mode = Mode.DEFERRED
    with safe_open(path, "emulated", 0, staging_bytes=staging) as reader:
        part = reader.get_slice("layers.0.mlp.up")[index]
        with pytest.raises(SelectionError):
            reader.get_slice("layers.0.mlp.up")[400]
    assert shown(part) == tensors["layers.0.mlp.up"].numpy()[index].tobytes()
    assert len(emulated.made) == 1


@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "BF16", "C64", "BOOL"])
def test_slices_of_every_size_of_unit(emulated: Emulated, checkpoint: tuple[Path, dict[str, bytes]], code: str) -> None:
    path, contents = checkpoint
    raw = np.frombuffer(contents[f"{code}.small"], np.uint8).reshape(3, -1)
    with safe_open(path, "emulated", 0) as reader:
        part = reader.get_slice(f"{code}.small")[::-2, 4:]
    assert shown(part) == raw[::-2, raw.shape[1] // 2 :].tobytes()


def test_a_tensor_much_larger_than_the_ring(emulated: Emulated, driver: Driver, tmp_path: Path) -> None:
    data = torch.randint(0, 255, (100 * 60_000,), dtype=torch.uint8)
    save(tmp_path / "m.safetensors", {"x": data})
    driver.mode = Mode.DEFERRED
    assert shown(load_file(tmp_path / "m.safetensors", "emulated", 1, staging_bytes=60_000)["x"]) == raw_bytes(data)
    assert pinned_peak(driver) <= 60_000


# Order


def late(path: Path, emulated: Emulated, driver: Driver, **options: Any) -> dict[str, bytes]:
    """Load while every block's last user has a write pending; return what is there at the end."""
    driver.mode = Mode.DEFERRED
    emulated.stream = driver.stream(1)
    tensors = load_file(path, "emulated", "cuda:1", **options)
    loaded = {name: shown(tensor) for name, tensor in tensors.items()}  # complete, for a reader that waits for nothing
    emulated.stream.synchronize()
    assert all(shown(tensor) == loaded[name] for name, tensor in tensors.items())  # and nothing is written after
    return loaded


def test_the_frameworks_pending_work_is_waited_for(
    emulated: Emulated, driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    path, tensors = saved
    loaded = late(path, emulated, driver)
    assert loaded == {name: raw_bytes(tensor) for name, tensor in tensors.items()}
    assert driver.count("cuCtxSynchronize", "cuCtxSynchronize_v2", "cuDeviceReset") == 0


def test_without_that_wait_it_goes_wrong(
    emulated: Emulated,
    driver: Driver,
    saved: tuple[Path, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unordered(streams: Streams | None) -> Any:
        describe = describer(None)

        def describing(value: DeviceTensor) -> Any:
            value.any_current_device = True
            return describe(value)

        return describing

    monkeypatch.setattr(making, "describer", unordered)
    with pytest.raises(AssertionError):
        late(saved[0], emulated, driver)


def test_a_stream_that_the_caller_names_is_waited_for(
    emulated: Emulated, driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    path, tensors = saved
    driver.mode = Mode.DEFERRED
    named = driver.stream(1)
    marker = driver.memory(1, 8)
    with safe_open(path, "emulated", 1, stream=named) as reader:
        named.write(marker, b"finished")
        assert shown(reader.get_tensor("layers.0.q")) == raw_bytes(tensors["layers.0.q"])
        assert marker.read() == b"finished"
        named.capture("active")
        with pytest.raises(DeviceError, match="capturing a graph"):
            reader.get_tensor("layers.0.q")
    with pytest.raises(OptionError, match="host memory has no stream"):
        safe_open(path, "np", stream=named)


# What is touched, and what is left


def test_no_other_device_is_touched_and_nothing_is_left(
    emulated: Emulated, driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    path, _ = saved
    driver.memory(1, 1)  # the framework's context lives on
    before, threads, files = driver.live(), threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        loaded = load_file(path, "emulated", "cuda:1")
        with safe_open(path, "emulated", "cuda:1") as reader:
            part = reader.get_slice("layers.0.mlp.up")[::2, 5:]
        assert part.memory.device == 1
        made, emulated.made = emulated.made, []
        gc.collect()
        assert all(tensor.releases == [1] for tensor in made)
        del loaded, part, made
    gc.collect()
    assert driver.live() == before
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)
    assert driver.current_device("cuda") is None
    assert driver.context(0).uses == driver.context(2).uses == 0


def test_threads_share_a_reader(
    emulated: Emulated, driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    path, tensors = saved
    driver.mode = Mode.LATE
    driver.configure(delay_us=200)
    wrong: list[str] = []

    def read(name: str) -> None:
        if shown(reader.get_tensor(name)) != raw_bytes(tensors[name]):
            wrong.append(name)

    with safe_open(path, "emulated", 1, threads=2) as reader:
        helpers = [threading.Thread(target=read, args=(name,)) for name in tensors]
        for helper in helpers:
            helper.start()
        for helper in helpers:
            helper.join()
    assert not wrong


def settle(driver: Driver, emulated: Emulated) -> Any:
    emulated.made.clear()
    gc.collect()
    return driver.live()


def test_a_read_that_fails_drains_and_hands_nothing_out(
    emulated: Emulated, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "m.safetensors", {"a": torch.zeros(10), "b": torch.ones(1 << 18)})
    driver.memory(1, 1)
    before = settle(driver, emulated)
    driver.mode = Mode.DEFERRED
    calls: list[int] = []
    whole = host.read_at

    def fail(fd: int, offset: int, pieces: Any, enough: int) -> int:
        calls.append(offset)
        if len(calls) == 4:
            raise OSError(5, "Input/output error")
        return whole(fd, offset, pieces, enough)

    monkeypatch.setattr(host, "read_at", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        load_file(tmp_path / "m.safetensors", "emulated", 1, staging_bytes=300_000, threads=1)
    assert len(calls) == 4
    assert driver.live().pending == 0
    assert settle(driver, emulated) == before
    assert driver.seen().failed == 0


@pytest.mark.parametrize(
    ("function", "error"),
    [("cuStreamCreate", 2), ("cuMemHostAlloc", 2), ("cuMemcpyHtoDAsync", 719), ("cuCtxPushCurrent", 201)],
)
def test_a_driver_call_that_fails_hands_nothing_out(
    emulated: Emulated, driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]], function: str, error: int
) -> None:
    driver.memory(1, 1)
    before = settle(driver, emulated)
    driver.fault(function, error=error)
    with pytest.raises(DeviceError, match=f"{function} failed"):
        load_file(saved[0], "emulated", 1)
    after = settle(driver, emulated)
    assert after._replace(contexts=0, events=0) == before._replace(contexts=0, events=0)


def test_memory_that_runs_out_hands_nothing_out(
    emulated: Emulated, driver: Driver, saved: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    driver.memory(1, 1)
    before = settle(driver, emulated)
    emulated.fails_at = 4
    with pytest.raises(MemoryError, match="out of device memory"):
        load_file(saved[0], "emulated", 1)
    assert settle(driver, emulated) == before
    assert driver.executed() == []


def test_what_a_device_reader_says(emulated: Emulated, saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, _ = saved
    with pytest.raises(OptionError, match="'mmap' makes tensors in host memory only"):
        safe_open(path, "emulated", 1, backend="mmap")
    with safe_open(path, backend="kvikio") as onto_host, pytest.raises(OptionError, match="in host memory"):
        onto_host.get_tensor("scale")
    with safe_open(path, "emulated", 1) as reader:
        assert "nothing was read yet" in reader.backend_info().reason
        reader.get_tensor("layers.0.q")
        info = reader.backend_info()
    assert isinstance(info, BackendInfo)
    assert not info.direct
    assert "cuda:1" in info.reason


# How torch's devices are spelled


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A torch that is built with CUDA and sees two devices, the second one current."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return monkeypatch


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_spellings_of_the_cpu(device: Any) -> None:
    assert for_torch.resolve_device(device) == HOST


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("device", "number"),
    [("cuda", 1), (torch.device("cuda"), 1), ("cuda:0", 0), ("cuda:1", 1), (torch.device("cuda", 0), 0), (0, 0)],
)
def test_spellings_of_a_device(device: Any, number: int) -> None:
    assert for_torch.resolve_device(device) == (2, number)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("device", [2, "cuda:2", torch.device("cuda", 7)])
def test_devices_that_there_are_not(device: Any) -> None:
    with pytest.raises(OptionError, match=r"there is no device cuda:\d: this process sees 2"):
        for_torch.resolve_device(device)


def test_rocm_has_the_same_spellings(cuda: pytest.MonkeyPatch) -> None:
    cuda.setattr(torch.version, "hip", "7.2")
    assert for_torch.resolve_device("cuda:1") == (10, 1)


@pytest.mark.parametrize(
    ("device", "kind", "text"),
    [
        ("meta", OptionError, "device meta is invalid"),
        ("nonsense", OptionError, "device nonsense is invalid"),
        ("cuda:-1", OptionError, "device cuda:-1 is invalid"),
        ("cuda:01", OptionError, "device cuda:01 is invalid"),
        (-1, OptionError, "device -1 is invalid"),
        (None, OptionError, "device None is invalid"),
        (True, OptionError, "device True is invalid"),
        (1.5, OptionError, "device 1.5 is invalid"),
        ("mps", UnsupportedError, "no tensors with memory on mps here, .* and not to device 'mps'"),
        ("xpu:0", UnsupportedError, "not to device 'xpu:0'"),
        (torch.device("hpu", 1), UnsupportedError, "not to device 'hpu:1'"),
    ],
)
@pytest.mark.usefixtures("cuda")
def test_spellings_of_nothing_that_is_served(device: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        for_torch.resolve_device(device)


def test_a_torch_without_cuda(cuda: pytest.MonkeyPatch) -> None:
    cuda.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no driver that it can use") as missing:
        for_torch.resolve_device("cuda")
    assert "CUDA_VISIBLE_DEVICES" in str(missing.value)
    cuda.setattr(torch.version, "cuda", None)
    with pytest.raises(UnsupportedError, match=r'built without CUDA.*load with device="cpu"'):
        for_torch.resolve_device("cuda:0")


@pytest.mark.skipif(bool(torch.version.cuda or torch.version.hip), reason="torch is built for accelerators")
def test_a_number_without_an_accelerator() -> None:
    with pytest.raises(UnsupportedError, match="device 0 is the number of an accelerator, and torch has none here"):
        for_torch.resolve_device(0)


# What torch allocates


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.code)
def test_torch_allocates_there_only(cuda: pytest.MonkeyPatch, dtype: DType) -> None:
    """torch's CPU build allocates in host memory what the call asks a device for."""
    asked: list[Any] = []
    allocate = torch.empty

    def empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        asked.append(device)
        return allocate(shape, dtype=dtype)

    cuda.setattr(torch, "empty", empty)
    for shape in ((2, 4), (0, 4), ()):
        if dtype.group == 1 or shape:
            made = for_torch.empty(dtype, shape, dtype.group_bytes, (2, 1))
            assert made.memory is None
            assert (made.raw.dtype, made.raw.ndim) == (torch.uint8, 1)
            assert made.raw.nbytes == made.value.nbytes == prod(shape) * dtype.group_bytes
            assert made.raw.data_ptr() == made.value.data_ptr()
    assert set(asked) == {torch.device("cuda", 1)}


def test_nothing_is_allocated_during_a_capture(cuda: pytest.MonkeyPatch) -> None:
    cuda.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(DeviceError, match="capturing a graph"):
        for_torch.empty(BY_CODE["F32"], (2,), 4, (2, 0))
