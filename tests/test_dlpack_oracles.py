"""Two other readers and producers of DLPack, ``cuda.core`` and ``tvm_ffi``, agree with ours.

Both run over the emulated driver as they are: ``cuda.core`` is NVIDIA's own and speaks to the driver, ``tvm_ffi`` reads
and writes capsules in C++ and speaks to nobody.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import tvm_ffi
from cuda.core import Buffer, Device, LegacyPinnedMemoryResource
from cuda.core.utils import StridedMemoryView
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlpack_loader import Pending, Target, dlpack, load_into
from dlpack_loader.dtype import DTYPES
from dlpack_loader.errors import DestinationBufferError, OptionError
from dlpack_loader.runtime.cuda import CudaDevice
from dlpack_loader.runtime.device import open_device
from dlpack_loader.stream import OwnedStream
from tests.device_room import GUARD, Room
from tests.emulation import DeviceMemory, DeviceTensor, Driver, Mode
from tests.files import raw_bytes, save
from tests.strategies import layouts, shapes

ROOM = 1 << 16
WHOLE = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}

NUMPY: dict[tuple[int, int, int], str] = {
    (0, 8, 1): "int8", (0, 16, 1): "int16", (0, 32, 1): "int32", (0, 64, 1): "int64",
    (1, 8, 1): "uint8", (1, 16, 1): "uint16", (1, 32, 1): "uint32", (1, 64, 1): "uint64",
    (2, 16, 1): "float16", (2, 32, 1): "float32", (2, 64, 1): "float64", (4, 16, 1): "bfloat16",
    (5, 64, 1): "complex64", (5, 128, 1): "complex128", (6, 8, 1): "bool",
}  # fmt: skip
"""What ``cuda.core`` has a NumPy dtype for: no F8, F6 or F4."""

COMPLEX = 5
"""The code that ``tvm_ffi`` has no name for."""

TRIPLES = sorted({dtype.dlpack for dtype in DTYPES} | set(NUMPY))


@pytest.fixture
def memory(driver: Driver) -> DeviceMemory:
    """Memory on the second device."""
    return driver.memory(1, ROOM)


@pytest.fixture(autouse=True)
def current(driver: Driver) -> Iterator[None]:
    """The second device, current: both take it from there, as every other consumer does."""
    device = open_device((2, 1))
    with device.current():
        yield
    device.close()


def placed(data: st.DataObject, memory: DeviceMemory, triples: list[tuple[int, int, int]]) -> DeviceTensor:
    """A tensor somewhere in the middle of the memory, with any strides."""
    shape = data.draw(shapes(4, 4))
    strides = None
    if data.draw(st.booleans()):
        strides = tuple(data.draw(st.lists(st.integers(-20, 20), min_size=len(shape), max_size=len(shape))))
    return memory.tensor(
        shape,
        data.draw(st.sampled_from(triples)),
        offset=ROOM // 2 + data.draw(st.integers(0, 300)),
        byte_offset=data.draw(st.sampled_from([0, 0, 8, 256])),
        strides=strides,
        flags=data.draw(st.sampled_from([0, 0, dlpack.READ_ONLY])),
        versioned=data.draw(st.booleans()),
    )


def stepped(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> list[tuple[int, int]]:
    """Strides of dimensions that are stepped through, None being C order."""
    if 0 in shape:
        return []
    if strides is None:
        strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return [(axis, stride) for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)) if size > 1]


def take(producer: Any) -> dlpack.Capsule:
    return dlpack.take(producer, stream=-1)


# Readers: the same object, read by both


@given(st.data())
@settings(max_examples=150, **WHOLE)  # type: ignore[arg-type]
def test_cuda_core_reads_what_we_read(memory: DeviceMemory, data: st.DataObject) -> None:
    tensor = placed(data, memory, list(NUMPY))
    if tensor.flags & dlpack.READ_ONLY and not tensor.versioned:
        with pytest.raises(BufferError):  # a capsule of before DLPack 1.0 can't say it
            StridedMemoryView.from_dlpack(tensor, stream_ptr=-1)
        with pytest.raises(DestinationBufferError, match="refuses to export"):
            take(tensor)
        return
    theirs = StridedMemoryView.from_dlpack(tensor, stream_ptr=-1)
    ours = take(tensor)
    assert ours.pointer == theirs.ptr or 0 in ours.shape
    assert ours.shape == theirs.shape
    assert stepped(ours.shape, ours.strides) == stepped(theirs.shape, theirs.strides)
    assert NUMPY[ours.dtype] == theirs.dtype.name
    assert ours.device == (2, theirs.device_id)
    assert theirs.is_device_accessible
    assert (ours.flags & dlpack.READ_ONLY != 0) == theirs.readonly
    assert (ours.version is not None) == tensor.versioned
    ours.release()
    del theirs
    assert tensor.releases == [1, 1]


@given(st.data())
@settings(max_examples=150, **WHOLE)  # type: ignore[arg-type]
def test_tvm_reads_what_we_read_and_we_read_what_it_exports(memory: DeviceMemory, data: st.DataObject) -> None:
    """Its tensors keep the capsule that they were made from: that one's deleter is called when both are done."""
    tensor = placed(data, memory, [triple for triple in TRIPLES if triple[0] != COMPLEX])
    if tensor.flags & dlpack.READ_ONLY:
        with pytest.raises(BufferError):  # it asks for capsules that can't say it
            tvm_ffi.from_dlpack(tensor)
        return
    theirs = tvm_ffi.from_dlpack(tensor)
    again = take(theirs)
    for ours in (take(tensor), again):
        assert ours.pointer == theirs.data_ptr() or 0 in ours.shape
        assert ours.shape == tuple(theirs.shape)
        assert stepped(ours.shape, ours.strides) == stepped(ours.shape, tuple(theirs.strides))
        assert ours.dtype == (theirs.dtype.type_code, theirs.dtype.bits, theirs.dtype.lanes)
        assert ours.device == (theirs.device.dlpack_device_type(), theirs.device.index)
        assert ours.flags == 0
    assert again.version is not None
    del theirs, ours
    assert tensor.releases == [0, 1]
    again.release()
    assert tensor.releases == [1, 1]


@given(st.data())
@settings(max_examples=100, **WHOLE)  # type: ignore[arg-type]
def test_all_three_read_an_array_of_the_host(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(set(NUMPY.values()) - {"bfloat16"})))
    layout = data.draw(layouts(data.draw(shapes(4, 4)), np.dtype(name).itemsize))
    array = layout.view(np.zeros(layout.nbytes, np.uint8), np.dtype(name))
    array.flags.writeable = data.draw(st.booleans())
    before = sys.getrefcount(array)
    view = StridedMemoryView.from_dlpack(array, stream_ptr=-1)
    ours = dlpack.take(array, stream=None)
    assert ours.pointer == view.ptr or not array.size
    assert (ours.shape, NUMPY[ours.dtype]) == (view.shape, view.dtype.name)
    assert stepped(ours.shape, ours.strides) == stepped(view.shape, view.strides)
    assert (ours.device, view.is_device_accessible) == ((1, 0), False)
    assert (ours.flags & dlpack.READ_ONLY != 0) == view.readonly == (not array.flags.writeable)
    ours.release()
    del view
    if array.flags.writeable and array.size:
        tensor = tvm_ffi.from_dlpack(array)
        again = dlpack.take(tensor, stream=None)
        assert again.pointer == array.ctypes.data
        assert stepped(again.shape, again.strides) == stepped(
            array.shape, tuple(stride // array.itemsize for stride in array.strides)
        )
        del tensor
        again.release()
    assert sys.getrefcount(array) == before


def test_what_cuda_core_has_no_name_for(memory: DeviceMemory) -> None:
    """Where the oracle says nothing: it refuses these dtypes and devices, and we take them."""
    for triple in set(TRIPLES) - set(NUMPY):
        tensor = memory.tensor((2, 4), triple)
        with pytest.raises((TypeError, NotImplementedError)):
            _ = StridedMemoryView.from_dlpack(tensor, stream_ptr=-1).dtype
        assert take(tensor).dtype == triple
        assert tensor.releases == [1, 1]


# Producers: what they export, filled


TENSORS = {"x": torch.arange(600, dtype=torch.float32).view(20, 30), "y": torch.arange(9, dtype=torch.int16)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path / "m.safetensors", TENSORS)
    return tmp_path / "m.safetensors"


def test_tvms_tensors_of_the_host_are_filled(path: Path) -> None:
    arrays = {
        name: np.zeros(tensor.shape, str(tensor.dtype).removeprefix("torch.")) for name, tensor in TENSORS.items()
    }
    before = [sys.getrefcount(array) for array in arrays.values()]
    report = load_into(path, {name: tvm_ffi.from_dlpack(array) for name, array in arrays.items()})
    gc.collect()
    assert report.direct_bytes == report.bytes_read > 0
    assert all(np.array_equal(arrays[name], tensor) for name, tensor in TENSORS.items())
    assert [sys.getrefcount(array) for array in arrays.values()] == before


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_tvms_tensors_of_a_device_are_filled(
    driver: Driver, path: Path, vendor: Literal["cuda", "hip"], mode: Mode
) -> None:
    driver.vendor = vendor
    room = Room(driver, TENSORS, device=1)
    for tensor in room.tensors.values():
        tensor.any_current_device = True  # this test holds a CUDA context, which is no HIP device
    theirs = {name: tvm_ffi.from_dlpack(tensor) for name, tensor in room.tensors.items()}
    assert {tuple(map(int, tensor.__dlpack_device__())) for tensor in theirs.values()} == {
        (2 if vendor == "cuda" else 10, 1)
    }
    driver.mode = mode
    load_into(path, theirs)
    room.check(TENSORS)
    assert [tensor.releases for tensor in room.tensors.values()] == [[0], [0]]
    del theirs
    gc.collect()
    assert [tensor.releases for tensor in room.tensors.values()] == [[1], [1]]


def test_parts_of_tvms_tensors_are_filled(driver: Driver, path: Path) -> None:
    memory = driver.memory(1, 4096)
    memory.fill(0xA5)
    columns = memory.tensor((20, 5), (2, 32, 1), strides=(9, 1), offset=16)
    load_into(path, {"x": Target(tvm_ffi.from_dlpack(columns), index=np.s_[::-1, 4:9])}, strict=False)
    rows = np.frombuffer(memory.read(16, 20 * 36), np.float32).reshape(20, 9)
    assert np.array_equal(rows[:, :5], TENSORS["x"].numpy()[::-1, 4:9])
    assert set(rows[:, 5:].tobytes()) == set(memory.read(0, 16)) == {0xA5}


def buffers(device: Device) -> Iterator[Callable[[int], Any]]:
    """Memory of ``cuda.core``: on the device, and pinned on the host."""
    yield lambda nbytes: device.memory_resource.allocate(nbytes, stream=device.default_stream)
    yield LegacyPinnedMemoryResource().allocate


def test_cuda_cores_buffers_are_filled(driver: Driver, path: Path) -> None:
    device = Device(1)
    device.set_current()
    before = driver.live()
    for kind, allocate in zip((2, 3), buffers(device), strict=True):
        buffer = allocate(TENSORS["x"].nbytes)
        assert buffer.__dlpack_device__()[0] == kind
        capsule = take(buffer) if kind == 2 else dlpack.take(buffer, stream=None)
        assert (capsule.pointer, capsule.shape) == (int(buffer.handle), (buffer.size,))
        capsule.release()
        data = torch.randint(-128, 127, (buffer.size,), dtype=torch.int8)
        save(path, {"x": data})
        load_into(path, {"x": buffer})
        assert driver.read(int(buffer.handle), buffer.size) == raw_bytes(data)
        buffer.close()
    gc.collect()
    after = driver.live()
    assert (after.device_bytes, after.pinned_bytes) == (before.device_bytes, before.pinned_bytes)


def test_views_of_cuda_core_are_filled_unless_read_only(driver: Driver, path: Path) -> None:
    room = Room(driver, TENSORS, device=1)
    load_into(path, {name: StridedMemoryView.from_dlpack(t, stream_ptr=-1) for name, t in room.tensors.items()})
    room.check(TENSORS)
    fixed = Room(driver, TENSORS, device=1, flags=dlpack.READ_ONLY)
    views = {name: StridedMemoryView.from_dlpack(t, stream_ptr=-1) for name, t in fixed.tensors.items()}
    with pytest.raises(DestinationBufferError, match="is read-only"):
        load_into(path, views)
    gc.collect()  # the error's frames, first: a view that the collector clears forgets its capsule, in cuda.core 1.2
    del views
    assert [tensor.releases for tensor in room.tensors.values()] == [[1], [1]]
    assert [tensor.releases for tensor in fixed.tensors.values()] == [[1], [1]]


# Streams of cuda.core; it writes and reads on them itself. Without the wait, the same test sees wrong bytes.


def over(tensor: DeviceTensor, nbytes: int) -> Buffer:
    return Buffer.from_handle(tensor.pointer, nbytes, owner=tensor)


@pytest.mark.parametrize("waits", [True, False])
def test_cuda_cores_stream_is_followed(
    driver: Driver, path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    device = Device(1)
    device.set_current()
    stream = device.create_stream()
    room = Room(driver, TENSORS, device=1)
    driver.mode = Mode.DEFERRED
    for name, tensor in room.tensors.items():
        over(tensor, TENSORS[name].nbytes).fill(0x77, stream=stream)
    if not waits:
        monkeypatch.setattr(CudaDevice, "wait", lambda *arguments: None)
    load_into(path, room.tensors, stream=stream)
    stream.sync()
    if waits:
        room.check(TENSORS)
    else:
        assert set(room.memories["x"].read(GUARD, TENSORS["x"].nbytes)) == {0x77}
    with pytest.raises(OptionError, match="not a stream"):
        load_into(path, room.tensors, stream=device)


@pytest.mark.parametrize("waits", [True, False])
def test_cuda_cores_stream_is_led(driver: Driver, path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """The host is not through with the load, and what ``cuda.core`` copies back on its own stream is complete."""
    device = Device(1)
    device.set_current()
    stream = device.create_stream()
    room = Room(driver, TENSORS, device=1)
    pinned = LegacyPinnedMemoryResource()
    back = {name: pinned.allocate(tensor.nbytes) for name, tensor in TENSORS.items()}
    driver.mode = Mode.DEFERRED
    gate = threading.Event()
    whole = OwnedStream.synchronize

    def slow(owned: OwnedStream) -> None:
        gate.wait(30)
        whole(owned)

    monkeypatch.setattr(OwnedStream, "synchronize", slow)
    for name in ("synchronize_event", "free_pinned"):  # nobody else may run the copies, or free what they read
        monkeypatch.setattr(CudaDevice, name, lambda *arguments: None)
    pending = load_into(path, room.tensors, wait=False)
    assert isinstance(pending, Pending)
    if waits:
        pending.wait_on(stream)
    else:
        pending._streams._published.wait()
    for name, tensor in room.tensors.items():
        over(tensor, back[name].size).copy_to(back[name], stream=stream)
    stream.sync()
    right = [driver.read(int(back[name].handle), value.nbytes) == raw_bytes(value) for name, value in TENSORS.items()]
    gate.set()
    pending.wait()
    for buffer in back.values():
        buffer.close()
    assert right == [waits, waits]
