"""The emulated driver itself: that each mistake it is there to show does show, and that the real bindings run over it.

It proves ordering, bounds and lifetimes of what runs over it, not a vendor's behaviour.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlpack_loader.dlpack import take
from dlpack_loader.errors import DestinationBufferError
from tests.emulation import DeviceMemory, DeviceTensor, Driver, Mode, build
from tests.emulation.library import EmulationError

ROOT = Path(__file__).parents[1]
OLD, NEW = b"old!", b"new!"
NON_BLOCKING = 1


class CudaError(Exception):
    """A call of the real bindings that failed; ``code`` is its number."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Cuda:
    """NVIDIA's bindings with errors raised: ``cuda.cuMemAlloc(n)``."""

    def __init__(self) -> None:
        self.module: Any = importlib.import_module("cuda.bindings.driver")

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.module, name)

        def call(*arguments: object) -> Any:
            code, *results = function(*arguments)
            if int(code):
                raise CudaError(int(code))
            return results[0] if len(results) == 1 else tuple(results)

        return call


@pytest.fixture
def cuda(driver: Driver) -> Iterator[Cuda]:
    """The bindings, with device 0 current."""
    bindings = Cuda()
    bindings.cuInit(0)
    with current(bindings, 0):
        yield bindings


@contextlib.contextmanager
def current(cuda: Cuda, device: int) -> Iterator[None]:
    cuda.cuCtxPushCurrent(cuda.cuDevicePrimaryCtxRetain(device))
    yield
    cuda.cuCtxPopCurrent()


@contextlib.contextmanager
def fails(code: int) -> Iterator[None]:
    with pytest.raises(CudaError) as caught:
        yield
    assert caught.value.code == code


def run(folder: Path, code: str, *, without: str = "") -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with the driver loaded."""
    load = f"driver = Driver.load(Path({str(folder)!r}), without=[{without!r}])"
    start = f"from pathlib import Path\nfrom tests.emulation import *\n{load}\n"
    return subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def slot(cuda: Cuda, driver: Driver, data: bytes) -> int:
    """Pinned memory with some bytes."""
    pointer = int(cuda.cuMemHostAlloc(len(data), 0))
    driver.write(pointer, data)
    return pointer


# Building and loading


def test_built_once(tmp_path: Path) -> None:
    first = build(tmp_path)
    made = (first / "lib/libcuda.so.1").stat().st_mtime_ns
    assert build(tmp_path) == first
    assert (first / "lib/libcuda.so.1").stat().st_mtime_ns == made
    assert list(tmp_path.iterdir()) == [first]


def test_no_compiler(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="needs a C compiler"):
        build(tmp_path, "no-such-compiler")


def test_library_that_is_left_out(emulation_folder: Path) -> None:
    code = "import pytest\nwith pytest.raises(ImportError, match='libhipfile'):\n    import hipfile"
    done = run(emulation_folder, code, without="libhipfile.so")
    assert not done.returncode, done.stderr


def test_loaded_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Driver.load(driver.folder) is driver
    monkeypatch.setattr(Driver, "_loaded", None)
    with pytest.raises(EmulationError, match=r"another libcuda\.so\.1 is loaded"):
        Driver.load(driver.folder)


# Modes


@pytest.mark.parametrize("mode", Mode)
def test_bindings(driver: Driver, cuda: Cuda, mode: Mode) -> None:
    driver.mode = mode
    data = os.urandom(1 << 16)
    source, target = slot(cuda, driver, data), int(cuda.cuMemAlloc(len(data)))
    back, stream, event = slot(cuda, driver, bytes(len(data))), cuda.cuStreamCreate(NON_BLOCKING), cuda.cuEventCreate(2)
    other = cuda.cuStreamCreate(NON_BLOCKING)
    cuda.cuMemcpyHtoDAsync(target, source, len(data), stream)
    cuda.cuEventRecord(event, stream)
    cuda.cuStreamWaitEvent(other, event, 0)
    cuda.cuMemcpyDtoHAsync(back, target, len(data), other)
    cuda.cuStreamSynchronize(other)
    assert driver.read(target, len(data)) == data == ctypes.string_at(back, len(data))
    assert [operation.kind for operation in driver.executed()] == ["copy", "mark", "wait", "copy"]
    cuda.cuEventDestroy(event)
    for each in (stream, other):
        cuda.cuStreamDestroy(each)
    for host in (source, back):
        cuda.cuMemFreeHost(host)
    cuda.cuMemFree(target)
    assert driver.seen().failed == driver.seen().pageable == 0


def test_deferred_reads_the_source_when_it_runs(driver: Driver, cuda: Cuda) -> None:
    driver.mode = Mode.DEFERRED
    memory, stream = driver.memory(0, 4), driver.stream()
    source = slot(cuda, driver, OLD)
    cuda.cuMemcpyHtoDAsync(memory.pointer, source, 4, stream.handle)
    assert (memory.read(), stream.pending) == (bytes(4), 1)
    driver.write(source, NEW)  # a slot that is used again too early
    stream.synchronize()
    assert (memory.read(), stream.pending) == (NEW, 0)
    cuda.cuMemFreeHost(source)


def test_deferred_runs_only_what_is_needed(driver: Driver, cuda: Cuda) -> None:
    driver.mode = Mode.DEFERRED
    memory, event = driver.memory(0, 12), cuda.cuEventCreate(2)
    first, second, third = driver.stream(), driver.stream(), driver.stream(1)
    first.write(memory, b"1111", 0)
    cuda.cuEventRecord(event, first.handle)
    first.write(memory, b"more", 0)
    second.write(memory, b"2222", 4)
    cuda.cuStreamWaitEvent(third.handle, event, 0)  # on another device, too
    third.write(memory, b"3333", 8)
    third.synchronize()
    assert memory.read() == b"1111" + bytes(4) + b"3333"
    assert (first.pending, second.pending) == (1, 1)
    cuda.cuEventDestroy(event)


def test_a_missing_wait_shows(driver: Driver, cuda: Cuda) -> None:
    driver.mode = Mode.DEFERRED
    source, target, event = driver.memory(0, 4), driver.memory(0, 4), cuda.cuEventCreate(2)
    producer, consumer = driver.stream(), driver.stream()
    producer.write(source, NEW)
    cuda.cuEventRecord(event, producer.handle)
    cuda.cuMemcpyDtoDAsync(target.pointer, source.pointer, 4, consumer.handle)
    consumer.synchronize()
    assert target.read() == bytes(4)
    cuda.cuStreamWaitEvent(consumer.handle, event, 0)
    cuda.cuMemcpyDtoDAsync(target.pointer, source.pointer, 4, consumer.handle)
    consumer.synchronize()
    assert target.read() == NEW
    cuda.cuEventDestroy(event)


def test_an_event_is_its_last_record_when_it_is_waited_for(driver: Driver, cuda: Cuda) -> None:
    driver.mode = Mode.DEFERRED
    memory, event = driver.memory(0, 8), cuda.cuEventCreate(2)
    producer, early, late = driver.stream(), driver.stream(), driver.stream()
    cuda.cuStreamWaitEvent(early.handle, event, 0)  # never recorded: nothing to wait for
    producer.write(memory, b"1111", 0)
    cuda.cuEventRecord(event, producer.handle)
    cuda.cuStreamWaitEvent(early.handle, event, 0)
    producer.write(memory, b"2222", 4)
    cuda.cuEventRecord(event, producer.handle)
    cuda.cuStreamWaitEvent(late.handle, event, 0)
    early.synchronize()
    assert memory.read() == b"1111" + bytes(4)
    late.synchronize()
    assert memory.read() == b"11112222"
    cuda.cuEventDestroy(event)


def test_queries_tell_the_truth(driver: Driver, cuda: Cuda) -> None:
    driver.mode = Mode.DEFERRED
    driver.configure(patience=5)
    memory, stream, event = driver.memory(0, 4), driver.stream(), cuda.cuEventCreate(2)
    cuda.cuEventQuery(event)
    cuda.cuStreamQuery(stream.handle)
    stream.write(memory, NEW)
    cuda.cuEventRecord(event, stream.handle)
    for _ in range(4):
        with fails(600):
            cuda.cuEventQuery(event)
        with fails(600):
            cuda.cuStreamQuery(stream.handle)
    assert memory.read() == bytes(4)
    cuda.cuEventQuery(event)  # asked often enough: a caller that polls comes to an end
    cuda.cuStreamQuery(stream.handle)
    assert memory.read() == NEW
    cuda.cuEventDestroy(event)


def test_late_runs_by_itself(driver: Driver, cuda: Cuda) -> None:
    driver.mode = Mode.LATE
    driver.configure(delay_us=30000)
    memory, stream, event = driver.memory(0, 4), driver.stream(), cuda.cuEventCreate(2)
    stream.write(memory, NEW)
    cuda.cuEventRecord(event, stream.handle)
    assert memory.read() == bytes(4)
    with fails(600):
        cuda.cuEventQuery(event)
    end = time.monotonic() + 10
    while stream.pending and time.monotonic() < end:
        time.sleep(0.005)
    assert memory.read() == NEW
    cuda.cuEventQuery(event)
    stream.write(memory, OLD)
    cuda.cuStreamSynchronize(stream.handle)
    assert memory.read() == OLD
    cuda.cuEventDestroy(event)


@pytest.mark.parametrize("seed", range(1, 6))
def test_late_out_of_step(driver: Driver, seed: int) -> None:
    driver.mode = Mode.LATE
    driver.configure(delay_us=10000, seed=seed)
    memory, streams = driver.memory(0, 64), [driver.stream() for _ in range(4)]
    for step in range(4):
        for number, stream in enumerate(streams):
            stream.write(memory, bytes([step]), 8 * number)
    for stream in streams:
        stream.synchronize()
    ran = [operation.stream for operation in driver.executed()]
    assert sorted(ran) == sorted(stream.handle for stream in streams for _ in range(4))
    for number in range(4):  # whatever the order among streams, each is in order
        targets = [op.target for op in driver.executed() if op.stream == streams[number].handle]
        assert targets == [memory.pointer + 8 * number] * 4
        assert memory.read(8 * number, 1) == b"\x03"


@pytest.mark.parametrize("mode", Mode)
def test_held(driver: Driver, cuda: Cuda, mode: Mode) -> None:
    driver.mode = mode
    driver.configure(hold_timeout_ms=50, delay_us=0)
    memory, stream, other, event = driver.memory(0, 8), driver.stream(), driver.stream(), cuda.cuEventCreate(2)
    stream.hold()
    stream.write(memory, OLD)
    cuda.cuEventRecord(event, stream.handle)
    cuda.cuStreamWaitEvent(other.handle, event, 0)
    other.write(memory, NEW, 4)
    with fails(702):  # rather than for ever
        cuda.cuStreamSynchronize(other.handle)
    with fails(600):
        cuda.cuStreamQuery(stream.handle)
    assert memory.read() == bytes(8)
    driver.configure(hold_timeout_ms=10000)
    timer = threading.Timer(0.05, stream.let_go)
    timer.start()
    cuda.cuStreamSynchronize(other.handle)
    timer.join()
    assert memory.read() == OLD + NEW
    cuda.cuEventDestroy(event)


@pytest.mark.parametrize("mode", Mode)
def test_threads(driver: Driver, cuda: Cuda, mode: Mode) -> None:
    """Each copies through two slots of its own, and waits before it uses one again."""
    driver.mode = mode
    driver.configure(delay_us=100, seed=7)
    size, steps = 512, 40
    memory = driver.memory(0, 4 * steps * size)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with current(cuda, 0):
                stream = driver.stream()
                slots = [(slot(cuda, driver, bytes(size)), cuda.cuEventCreate(2)) for _ in range(2)]
                for step in range(steps):
                    pointer, event = slots[step % 2]
                    cuda.cuEventSynchronize(event)
                    driver.write(pointer, bytes([number * steps + step]) * size)
                    target = memory.pointer + (number * steps + step) * size
                    cuda.cuMemcpyHtoDAsync(target, pointer, size, stream.handle)
                    cuda.cuEventRecord(event, stream.handle)
                stream.synchronize()
                for pointer, event in slots:
                    cuda.cuMemFreeHost(pointer)
                    cuda.cuEventDestroy(event)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert memory.read() == b"".join(bytes([step]) * size for step in range(4 * steps))
    assert driver.seen().failed == driver.live().pending == 0


def test_null_stream(driver: Driver, cuda: Cuda) -> None:
    driver.mode = Mode.DEFERRED
    memory = driver.memory(0, 16)
    blocking, free, null = driver.stream(blocking=True), driver.stream(), driver.null_stream()
    blocking.write(memory, b"1111", 0)
    free.write(memory, b"2222", 4)
    null.write(memory, b"3333", 8)
    null.synchronize()  # comes after the blocking stream, and has nothing to do with the other
    assert memory.read() == b"1111" + bytes(4) + b"3333" + bytes(4)
    null.write(memory, b"4444", 8)
    blocking.write(memory, b"5555", 12)
    blocking.synchronize()
    assert memory.read() == b"1111" + bytes(4) + b"44445555"
    cuda.cuMemsetD8Async(memory.pointer, 7, 16, 2)  # the thread's own stream is another one
    assert memory.read(8, 4) == b"4444"
    done = threading.Thread(target=lambda: driver.core.stream_synchronize(2, 0))
    done.start()
    done.join()
    assert memory.read(8, 4) == b"4444"
    cuda.cuStreamSynchronize(2)
    assert memory.read() == bytes([7]) * 16


def test_host_functions_and_failures(driver: Driver, cuda: Cuda) -> None:
    driver.mode = Mode.DEFERRED
    ran: list[int] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda argument: ran.append(argument or 0))
    memory, stream, event = driver.memory(0, 4), driver.stream(), cuda.cuEventCreate(2)
    cuda.cuLaunchHostFunc(stream.handle, cuda.module.CUhostFn(_ptr=ctypes.addressof(function)), 5)
    assert not ran
    stream.synchronize()
    assert ran == [5]
    cuda.cuEventRecord(event, stream.handle)
    stream.write(memory, NEW)
    memory.free()
    cuda.cuEventSynchronize(event)  # from before
    with fails(700):
        cuda.cuStreamSynchronize(stream.handle)
    with fails(700):  # it stays
        cuda.cuStreamQuery(stream.handle)
    assert driver.seen().failed == 1
    cuda.cuEventDestroy(event)


# Memory


def test_addresses_are_never_reused(driver: Driver, cuda: Cuda) -> None:
    seen: set[int] = set()
    for _ in range(100):
        device, pinned = int(cuda.cuMemAlloc(100)), int(cuda.cuMemHostAlloc(100, 0))
        assert device not in seen
        assert pinned not in seen
        assert pinned % mmap.PAGESIZE == 0
        seen |= {device, pinned}
        cuda.cuMemFree(device)
        cuda.cuMemFreeHost(pinned)
        for again in (cuda.cuMemFree, cuda.cuMemFreeHost):
            with fails(1):
                again(device)
    stream = driver.stream()
    for pointer in seen:
        assert driver.find(pointer) is None
        with fails(1):
            cuda.cuMemcpyAsync(pointer, pointer, 4, stream.handle)


def test_bounds(driver: Driver, cuda: Cuda) -> None:
    memory, stream = driver.memory(0, 1000), driver.stream()
    source = slot(cuda, driver, bytes(2000))
    cuda.cuMemcpyHtoDAsync(memory.pointer + 10, source, 990, stream.handle)
    cuda.cuMemcpyHtoDAsync(memory.pointer, source, 0, stream.handle)
    for offset, size in ((10, 991), (-1, 10), (1000, 1), (4096, 1)):
        with fails(1):
            cuda.cuMemcpyHtoDAsync(memory.pointer + offset, source, size, stream.handle)
    with fails(1):
        cuda.cuMemcpyHtoDAsync(memory.pointer, source + 1500, 501, stream.handle)
    with fails(1):
        cuda.cuMemcpyHtoDAsync(source, source, 10, stream.handle)  # not a device's
    cuda.cuMemFreeHost(source)


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_rows_are_set_when_their_turn_comes(driver: Driver, cuda: Cuda, vendor: Any) -> None:
    driver.vendor, driver.mode = vendor, Mode.DEFERRED
    hip: Any = importlib.import_module("rocm.bindings.hip")
    memory, stream = driver.memory(0, 100), driver.stream()

    def fill(offset: int, pitch: int, width: int, rows: int) -> int:
        function = cuda.module.cuMemsetD2D8Async if vendor == "cuda" else hip.hipMemset2DAsync
        return int(function(memory.pointer + offset, pitch, 7, width, rows, stream.handle)[0])

    assert fill(3, 10, 4, 9) == fill(95, 1, 5, 1) == fill(0, 10, 0, 9) == fill(0, 10, 4, 0) == 0
    assert memory.read() == bytes(100)
    assert (
        fill(7, 10, 4, 10) == fill(-1, 10, 4, 1) == fill(0, 3, 4, 2) == 1
    )  # past the end, before it, rows that overlap
    stream.synchronize()
    wanted = bytearray(100)
    for row in range(9):
        wanted[10 * row + 3 : 10 * row + 7] = bytes([7]) * 4
    wanted[95:] = bytes([7]) * 5
    assert memory.read() == wanted
    kinds = [(operation.kind, operation.nbytes) for operation in driver.executed()]
    assert kinds == [("fill", 36), ("fill", 5)]
    assert driver.count("cuMemsetD2D8Async", "hipMemset2DAsync") == 7
    memory.free()


def test_the_host_cannot_touch_it(driver: Driver, emulation_folder: Path, tmp_path: Path) -> None:
    memory = driver.memory(0, 4096)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.read.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    with path.open("rb") as file:
        assert libc.read(file.fileno(), memory.pointer, 4096) == -1
    assert ctypes.get_errno() == errno.EFAULT
    for touch in ("ctypes.string_at(pointer, 1)", "ctypes.memset(pointer, 0, 1)"):
        for kind, free in (("device", ""), ("pinned", "memory.free()"), ("pinned", "pointer += 4096")):
            code = f"""
            import ctypes
            memory = driver.memory(0, 4096, kind={kind!r})
            pointer = memory.pointer
            {free}
            {touch}
            """
            assert run(emulation_folder, code).returncode == -signal.SIGSEGV


def test_counted(driver: Driver, cuda: Cuda) -> None:
    before = driver.live()
    device, managed = cuda.cuMemAlloc(1000), cuda.cuMemAllocManaged(10, 1)
    first, second = cuda.cuMemHostAlloc(300, 0), cuda.cuMemAllocHost(200)
    buffer = ctypes.create_string_buffer(64)
    cuda.cuMemHostRegister(ctypes.addressof(buffer), 64, 0)
    with fails(712):
        cuda.cuMemHostRegister(ctypes.addressof(buffer) + 10, 5, 0)
    stream, event = cuda.cuStreamCreate(0), cuda.cuEventCreate(0)
    live = driver.live()
    assert [now - then for now, then in zip(live, before, strict=True)][:7] == [1000, 10, 500, 64, 5, 1, 1]
    assert cuda.cuMemGetInfo() == ((16 << 30) - driver.core.device_bytes(0), 16 << 30)
    assert tuple(map(int, cuda.cuMemGetAddressRange(int(device) + 10))) == (int(device), 1000)
    cuda.cuMemFreeHost(first)
    cuda.cuMemFreeHost(second)
    assert driver.seen().pinned_peak == before.pinned_bytes + 500
    cuda.cuMemHostUnregister(ctypes.addressof(buffer))
    with fails(713):
        cuda.cuMemHostUnregister(ctypes.addressof(buffer))
    cuda.cuMemFree(device)
    cuda.cuMemFree(managed)
    cuda.cuStreamDestroy(stream)
    cuda.cuEventDestroy(event)
    for stale in (lambda: cuda.cuStreamSynchronize(stream), lambda: cuda.cuEventQuery(event)):
        with fails(400):
            stale()
    assert driver.live() == before


def test_out_of_memory(driver: Driver, cuda: Cuda) -> None:
    free, _ = cuda.cuMemGetInfo()
    driver.configure(memory=(16 << 30) - free + 1000)
    memory = driver.memory(0, 600)
    with fails(2):
        cuda.cuMemAlloc(401)
    memory.free()
    cuda.cuMemFree(cuda.cuMemAlloc(1000))


def test_pointer_facts(driver: Driver, cuda: Cuda) -> None:
    attribute = cuda.module.CUpointer_attribute
    asked = [
        getattr(attribute, f"CU_POINTER_ATTRIBUTE_{name}") for name in ("MEMORY_TYPE", "DEVICE_ORDINAL", "IS_MANAGED")
    ]
    for kind, facts in (("device", [2, 2, False]), ("managed", [2, 2, True]), ("pinned", [1, 2, False])):
        memory = driver.memory(2, 100, kind=kind)  # type: ignore[arg-type]
        assert cuda.cuPointerGetAttributes(3, asked, memory.pointer + 99) == facts
        found = driver.find(memory.pointer + 99)
        assert found is not None
        assert found == (memory.pointer, 100, 2, kind)
        assert int(cuda.cuPointerGetAttribute(asked[0], memory.pointer)) == facts[0]
    assert cuda.cuPointerGetAttributes(3, asked, memory.pointer + 100) == [0, -2, False]
    with fails(1):
        cuda.cuPointerGetAttribute(asked[0], memory.pointer + 100)


# Copies


def test_strided_copies(driver: Driver, cuda: Cuda) -> None:
    driver.mode = Mode.DEFERRED
    rows = bytes(range(60))
    source, memory, stream = slot(cuda, driver, rows), driver.memory(0, 100), driver.stream()
    memory.fill(0xEE)
    copy = cuda.module.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = cuda.module.CUmemorytype.CU_MEMORYTYPE_HOST
    copy.srcHost, copy.srcPitch, copy.srcXInBytes, copy.srcY = source, 10, 2, 1
    copy.dstMemoryType = cuda.module.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstDevice, copy.dstPitch, copy.dstXInBytes = memory.pointer, 25, 3
    copy.WidthInBytes, copy.Height = 4, 4
    cuda.cuMemcpy2DAsync(copy, stream.handle)
    assert memory.read() == b"\xee" * 100
    stream.synchronize()
    expected = bytearray(b"\xee" * 100)
    for row in range(4):
        expected[25 * row + 3 : 25 * row + 7] = rows[10 * (row + 1) + 2 : 10 * (row + 1) + 6]
    assert memory.read() == expected
    copy.Height = 5  # its last row is over the end
    with fails(1):
        cuda.cuMemcpy2DAsync(copy, stream.handle)
    copy.Height, copy.dstPitch = 2, 3
    with fails(1):
        cuda.cuMemcpy2DAsync(copy, stream.handle)
    cuda.cuMemFreeHost(source)


def test_batches(driver: Driver, cuda: Cuda) -> None:
    driver.mode = Mode.DEFERRED
    source, memory, stream = slot(cuda, driver, OLD + OLD), driver.memory(0, 8), driver.stream()
    in_order, now = cuda.module.CUmemcpyAttributes(), cuda.module.CUmemcpyAttributes()
    in_order.srcAccessOrder, now.srcAccessOrder = (cuda.module.CUmemcpySrcAccessOrder(number) for number in (1, 2))
    pointer = cuda.module.CUdeviceptr
    targets, sources = ([pointer(base), pointer(base + 4)] for base in (memory.pointer, source))
    batch = (targets, sources, [4, 4], 2, [in_order, now], [0, 1], 2)
    cuda.cuMemcpyBatchAsync(*batch, stream.handle)
    driver.write(source, NEW + NEW)
    stream.synchronize()
    assert memory.read() == NEW + OLD
    with fails(1):
        cuda.cuMemcpyBatchAsync(*batch, 0)
    cuda.cuMemFreeHost(source)


def test_memory_that_is_not_pinned(driver: Driver, cuda: Cuda) -> None:
    driver.mode = Mode.DEFERRED
    source, memory, stream = ctypes.create_string_buffer(OLD, 4), driver.memory(0, 4), driver.stream()
    cuda.cuMemcpyHtoDAsync(memory.pointer, ctypes.addressof(source), 4, stream.handle)
    source.raw = NEW  # as a driver does, it was read before the call returned
    back = ctypes.create_string_buffer(4)
    cuda.cuMemcpyDtoHAsync(ctypes.addressof(back), memory.pointer, 4, stream.handle)
    assert back.raw == OLD
    assert driver.seen().pageable == 2
    cuda.cuMemcpyHtoD(memory.pointer, NEW, 4)
    data = bytearray(4)
    cuda.cuMemcpyDtoH(data, memory.pointer, 4)
    assert data == NEW
    assert driver.seen().pageable == 2


# Contexts


def test_calls_need_a_context(driver: Driver, cuda: Cuda) -> None:
    codes: list[int] = []

    def other_thread() -> None:
        for function, *arguments in ((cuda.cuMemAlloc, 4), (cuda.cuStreamCreate, 0), (cuda.cuStreamSynchronize, 0)):
            with pytest.raises(CudaError) as caught:
                function(*arguments)
            codes.append(caught.value.code)

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert codes == [201] * 3


def test_which_devices_were_used(driver: Driver, cuda: Cuda) -> None:
    memory = driver.memory(2, 4)
    event = cuda.cuEventCreate(2)
    assert driver.context(2).uses == 0
    assert driver.context(0).uses > 0
    with current(cuda, 1):
        assert int(cuda.cuCtxGetDevice()) == 1
        with fails(400):  # of different devices
            cuda.cuEventRecord(event, 0)
        cuda.cuMemcpyHtoDAsync(memory.pointer, NEW, 4, 0)
    assert int(cuda.cuCtxGetDevice()) == 0
    assert driver.context(1).uses == 2
    assert driver.context(2).uses == 0
    assert driver.count("cuCtxSynchronize", "hipDeviceSynchronize") == 0
    cuda.cuCtxSynchronize()
    assert driver.count("cuCtxSynchronize") == 1
    cuda.cuEventDestroy(event)


def test_fresh_process(emulation_folder: Path) -> None:
    done = run(
        emulation_folder,
        """
        import os
        from cuda.bindings import driver as cuda
        assert int(cuda.cuDeviceGetCount()[0]) == 3  # not initialised
        driver.configure(init_error=100)
        assert int(cuda.cuInit(0)[0]) == 100
        driver.configure(init_error=0, devices=0)
        assert int(cuda.cuInit(0)[0]) == 100
        driver.configure(devices=5, cuda_version=11000)
        assert int(cuda.cuInit(0)[0]) == 0
        assert cuda.cuDeviceGetCount()[1] == 5
        assert cuda.cuDriverGetVersion()[1] == 11000
        assert not any(driver.context(device).live for device in range(5))
        context = cuda.cuDevicePrimaryCtxRetain(4)[1]
        cuda.cuCtxPushCurrent(context)
        pointer = cuda.cuMemAlloc(10)[1]
        stream = cuda.cuStreamCreate(0)[1]
        assert [driver.context(device).made for device in range(5)] == [0, 0, 0, 0, 1]
        cuda.cuDevicePrimaryCtxRelease(4)
        assert int(cuda.cuMemAlloc(10)[0]) == 709
        assert driver.find(int(pointer)) is None
        assert int(cuda.cuStreamSynchronize(stream)[0]) == 400
        assert driver.live() == (0,) * 12
        child = os.fork()
        if not child:
            os._exit(int(cuda.cuDeviceGetCount()[0]))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        """,
    )
    assert not done.returncode, done.stderr


# Graph capture


def test_capture(driver: Driver, cuda: Cuda) -> None:
    memory, free, blocking = driver.memory(0, 4), driver.stream(), driver.stream(blocking=True)
    assert int(cuda.cuStreamIsCapturing(free.handle)) == 0
    free.capture("active")
    assert int(cuda.cuStreamIsCapturing(free.handle)) == 1
    assert cuda.cuStreamGetCaptureInfo(free.handle)[:1] == (1,)
    assert int(cuda.cuStreamIsCapturing(0)) == 0
    cuda.cuMemcpyHtoDAsync(memory.pointer, NEW, 4, free.handle)
    assert (memory.read(), driver.seen().captured) == (bytes(4), 1)
    for spoils in (cuda.cuStreamSynchronize, cuda.cuStreamQuery):
        with fails(900):
            spoils(free.handle)
    assert int(cuda.cuStreamIsCapturing(free.handle)) == 2
    with fails(901):
        cuda.cuMemcpyHtoDAsync(memory.pointer, NEW, 4, free.handle)
    blocking.capture("active")
    with fails(906):
        cuda.cuStreamIsCapturing(0)
    driver.reset()
    assert int(cuda.cuStreamIsCapturing(0)) == 0


# Faults and counters


def test_faults(driver: Driver, cuda: Cuda) -> None:
    second = driver.fault("cuMemHostAlloc", 2, error=2)
    pointers = [cuda.cuMemHostAlloc(4096, 0)]
    with fails(2):
        cuda.cuMemHostAlloc(4096, 0)
    pointers.append(cuda.cuMemHostAlloc(4096, 0))
    assert second.fired == 1
    always = driver.fault("cuMemAlloc", times=None, error=2)
    for _ in range(3):
        with fails(2):
            cuda.cuMemAlloc(10)
    assert always.fired == 3
    driver.clear_faults()
    cuda.cuMemFree(cuda.cuMemAlloc(10))
    driver.fault("cuDeviceGetCount", sleep=0.1)
    began = time.monotonic()
    assert cuda.cuDeviceGetCount() == 3
    assert time.monotonic() - began >= 0.1
    assert driver.count("cuMemAlloc", "cuMemHostAlloc") == 7
    assert driver.calls()["cuMemFree"] == 1
    for pointer in pointers:
        cuda.cuMemFreeHost(pointer)
    driver.reset()
    assert driver.calls() == {}


def test_faults_that_are_none(driver: Driver) -> None:
    with pytest.raises(EmulationError, match="cuMemAllocate is not emulated"):
        driver.fault("cuMemAllocate", error=2)
    with pytest.raises(EmulationError, match="cuMemAlloc is no read"):
        driver.fault("cuMemAlloc", errno=errno.EIO)
    with pytest.raises(EmulationError):
        driver.configure(devices=17)


def test_error_names(cuda: Cuda) -> None:
    for code in (1, 2, 3, 100, 201, 400, 600, 700, 709, 900, 906):
        number = cuda.module.CUresult(code)
        assert cuda.cuGetErrorName(number) == number.name.encode()
        assert cuda.cuGetErrorString(number)
    assert cuda.cuDeviceGetName(64, 1).rstrip(b"\0 ") == b"Emulated CUDA device 1"


# DLPack


def test_tensor(driver: Driver, cuda: Cuda) -> None:
    memory = driver.memory(0, 1000)
    tensor = memory.tensor((2, 3), (2, 16, 1), offset=64, strides=(8, 2), byte_offset=6)
    stream = driver.stream()
    capsule = take(tensor, stream=stream.handle)
    assert (capsule.pointer, capsule.device) == (memory.pointer + 70, (2, 0))
    assert (capsule.shape, capsule.strides, capsule.dtype) == ((2, 3), (8, 2), (2, 16, 1))
    assert (tensor.exports, tensor.releases, tensor.streams) == (1, [0], [stream.handle])
    capsule.release()
    capsule.release()
    assert tensor.releases == [1]
    scalar = take(memory.tensor((), (0, 64, 1)), stream=-1)
    assert (scalar.shape, scalar.pointer) == ((), memory.pointer)
    assert take(memory.tensor((0, 4)), stream=1).pointer == 0
    assert take(memory.tensor((4,), versioned=False), stream=2).version is None
    assert take(memory.tensor((4,), flags=1), stream=1).flags == 1


def test_tensor_is_held_by_its_exports(driver: Driver, cuda: Cuda) -> None:
    memory = driver.memory(0, 100)
    pointer = memory.pointer
    capsule = take(memory.tensor((100,)), stream=1)
    del memory
    gc.collect()
    assert driver.find(pointer)
    capsule.release()
    gc.collect()
    assert driver.find(pointer) is None


def test_capsule_that_nobody_takes(driver: Driver, cuda: Cuda) -> None:
    tensor = driver.memory(0, 100).tensor((100,))
    for version in (None, (1, 0)):
        tensor.__dlpack__(stream=1, max_version=version)
    gc.collect()
    assert tensor.releases == [1, 1]


def test_deleter_that_is_called_twice(driver: Driver, cuda: Cuda) -> None:
    tensor = driver.memory(0, 100).tensor((100,))
    capsule = take(tensor, stream=1)
    callback, (address, deleter) = ctypes.CFUNCTYPE(None, ctypes.c_void_p), capsule._release.peek()[2]  # type: ignore[index]
    callback(deleter)(address)
    capsule.release()
    assert tensor.releases == [2]
    assert driver.seen().released_twice == 1


def test_tensor_orders_the_consumer(driver: Driver, cuda: Cuda) -> None:
    driver.mode = Mode.DEFERRED
    memory, producer = driver.memory(0, 4), driver.stream()
    tensor = memory.tensor((4,), stream=producer)
    producer.write(memory, NEW)
    unordered, consumer = driver.stream(), driver.stream()
    take(tensor, stream=-1)
    unordered.synchronize()
    assert memory.read() == bytes(4)
    take(tensor, stream=consumer.handle)
    producer.write(memory, b"more")
    consumer.synchronize()
    assert memory.read() == NEW
    assert driver.count("cuEventRecord", "cuStreamWaitEvent") == 0  # the producer's own are not counted


@pytest.mark.parametrize(
    ("vendor", "good", "bad"),
    [("cuda", (None, -1, 1, 2), (0, -2, 3, 0x520000000008)), ("hip", (None, -1, 0), (1, 2, -2, 3))],
)
def test_stream_values(driver: Driver, cuda: Cuda, vendor: Any, good: tuple[Any, ...], bad: tuple[int, ...]) -> None:
    driver.vendor = vendor
    tensor = driver.memory(0, 4).tensor((4,))
    assert tensor.__dlpack_device__() == ({"cuda": 2, "hip": 10}[vendor], 0)
    for stream in good:
        tensor.__dlpack__(stream=stream)
    for stream in bad:
        with pytest.raises(BufferError, match="stream"):
            tensor.__dlpack__(stream=stream)
    with pytest.raises(TypeError, match="stream"):
        tensor.__dlpack__(stream=driver.stream())


def test_exports_that_are_refused(driver: Driver, cuda: Cuda) -> None:
    tensor = driver.memory(1, 4).tensor((4,))
    with pytest.raises(DestinationBufferError, match="device 1 while device 0 is current"):
        take(tensor, stream=1)
    with current(cuda, 1):
        tensor.__dlpack__(stream=1, dl_device=(2, 1), copy=False)
        for refused in ({"copy": True}, {"dl_device": (1, 0)}):
            with pytest.raises(BufferError):
                tensor.__dlpack__(stream=1, **refused)
        with pytest.raises(BufferError):
            tensor.memory.tensor((4,), flags=1).__dlpack__(stream=1)
        with pytest.raises(TypeError):
            tensor.memory.tensor((4,), versioned=False).__dlpack__(stream=1, max_version=(1, 0))
    tensor.any_current_device = True
    take(tensor, stream=1)


def test_stream_protocol(driver: Driver) -> None:
    stream = driver.stream(1)
    assert stream.__cuda_stream__() == (0, stream.handle)
    assert stream.handle > 2


# cuFile through KvikIO


class ArrayInterface:
    """What KvikIO takes for device memory."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.nbytes,), "typestr": "|u1", "data": (memory.pointer, False), "version": 3,
        }  # fmt: skip


@pytest.fixture(scope="module")
def payload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("payload") / "file"
    path.write_bytes(os.urandom(3 << 20))
    return path


@pytest.fixture
def kvikio(driver: Driver) -> Iterator[Any]:
    module = importlib.import_module("kvikio")
    defaults = importlib.import_module("kvikio.defaults")
    before = defaults.get("compat_mode")
    yield module
    defaults.set({"compat_mode": before})


def kvikio_mode(kvikio: Any, *, direct: bool) -> None:
    mode = kvikio.CompatMode.OFF if direct else kvikio.CompatMode.ON
    importlib.import_module("kvikio.defaults").set({"compat_mode": mode})


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("direct", [False, True])
def test_kvikio(driver: Driver, kvikio: Any, payload: Path, mode: Mode, direct: bool) -> None:
    kvikio_mode(kvikio, direct=direct)
    driver.mode = mode
    memory, size = driver.memory(1, 2 << 20), (2 << 20) - 77
    monitor = kvikio.SummaryMonitor()
    with kvikio.CuFile(payload) as file:
        assert file.pread(ArrayInterface(memory), size, 4099).get() == size
    assert memory.read(0, size) == payload.read_bytes()[4099 : 4099 + size]
    assert memory.read(size) == bytes(77)
    assert monitor.get().by_backend["GDS" if direct else "POSIX"]["bytes_transferred"] == size
    assert driver.count("cuFileRead") == direct
    assert (driver.seen().failed, driver.seen().pageable) == (0, 0)
    assert driver.live().files == driver.live().pending == 0


def test_kvikio_on_a_stream(driver: Driver, cuda: Cuda, kvikio: Any, payload: Path) -> None:
    kvikio_mode(kvikio, direct=True)
    driver.mode = Mode.DEFERRED
    memory, stream, size = driver.memory(0, 1 << 20), driver.stream(), 1000
    with kvikio.CuFile(payload) as file:
        future = file.raw_read_async(ArrayInterface(memory), stream.handle, size, 123, 456)
        assert (stream.pending, memory.read()) == (1, bytes(1 << 20))
        assert future.check_bytes_done() == size
        assert memory.read(456, size) == payload.read_bytes()[123 : 123 + size]
        for asked, done in (({"count": 10}, 10), ({"count": -5011}, -5011), ({"errno": errno.EIO}, -1)):
            driver.fault("cuFileReadAsync", **asked)
            future = file.raw_read_async(ArrayInterface(memory), stream.handle, size, 123, 456)
            if done >= 0:
                assert future.check_bytes_done() == done
            else:
                with pytest.raises(RuntimeError):
                    future.check_bytes_done()


def test_kvikio_faults(driver: Driver, cuda: Cuda, kvikio: Any, payload: Path) -> None:
    kvikio_mode(kvikio, direct=True)
    memory = driver.memory(0, 1 << 20)
    target = ArrayInterface(memory)
    driver.fault("cuFileHandleRegister", error=5027)
    with pytest.raises(RuntimeError, match=r"(?i)not registered"):
        kvikio.CuFile(payload)
    driver.fault("cuFileBufRegister", error=5016)
    with pytest.raises(RuntimeError):
        kvikio.memory_register(target)
    kvikio.memory_register(target)
    assert driver.live().buffers == 1
    kvikio.memory_deregister(target)
    with kvikio.CuFile(payload) as file:
        for fault in ({"count": -5011}, {"errno": errno.EIO}, {"error": 5030}):
            driver.fault("cuFileRead", **fault)
            with pytest.raises(RuntimeError):
                file.pread(target, 1 << 20, 0).get()
        driver.fault("cuFileRead", count=1000)
        assert file.pread(target, 1 << 20, 0).get() == 1000
        driver.fault("cuFileRead", sleep=0.1)
        began = time.monotonic()
        assert file.pread(target, 1 << 20, (3 << 20) - 5000).get() == 5000  # short at the file's end
        assert time.monotonic() - began >= 0.1
        driver.configure(strict_alignment=True)
        assert file.pread(target, 1 << 16, 4096).get() == 1 << 16
        with pytest.raises(RuntimeError):
            file.pread(target, 1 << 16, 4097).get()


def test_kvikio_out_of_pinned_memory(emulation_folder: Path, payload: Path) -> None:
    """In a process of its own: KvikIO keeps what it has."""
    done = run(
        emulation_folder,
        f"""
        import kvikio, kvikio.defaults
        kvikio.defaults.set({{"compat_mode": kvikio.CompatMode.ON}})
        memory = driver.memory(0, 1 << 20)
        class Target:
            __cuda_array_interface__ = dict(shape=(1 << 20,), typestr="|u1", data=(memory.pointer, False), version=3)
        fault = driver.fault("cuMemHostAlloc", error=2)
        file = kvikio.CuFile({str(payload)!r})
        try:
            file.pread(Target(), 1 << 20).get()
        except RuntimeError as error:
            assert "OUT_OF_MEMORY" in str(error), error
        assert fault.fired == 1
        assert file.pread(Target(), 1 << 20).get() == 1 << 20
        assert driver.seen().pinned_peak == 16 << 20
        """,
    )
    assert not done.returncode, done.stderr


# hipFile and HIP


@pytest.fixture
def hipfile(driver: Driver) -> Any:
    driver.vendor = "hip"
    return importlib.import_module("hipfile")


def test_hipfile(driver: Driver, hipfile: Any, payload: Path) -> None:
    driver.configure(read_limit=4096)
    memory = driver.memory(1, 10000)
    with hipfile.Driver(), hipfile.FileHandle(payload, os.O_RDONLY) as file:
        assert (driver.live().file_drivers, driver.live().files) == (1, 1)
        with hipfile.Buffer(memory.pointer, 10000, 0) as buffer:
            assert driver.live().buffers == 1
            assert file.read(buffer, 5000, 3, 7) == 4096  # the most of one read
            assert memory.read() == bytes(7) + payload.read_bytes()[3:4099] + bytes(10000 - 4103)
            assert file.read(buffer, 5000, (3 << 20) - 10, 0) == 10
            assert file.read(buffer, 5000, 3 << 20, 0) == 0
            with pytest.raises(hipfile.HipFileException):  # over the end of the memory
                file.read(buffer, 100, 0, 9950)
            driver.fault("hipFileRead", errno=errno.EIO)
            with pytest.raises(OSError, match="Input/output"):
                file.read(buffer, 100, 0, 0)
            driver.fault("hipFileRead", count=-5011)
            with pytest.raises(hipfile.HipFileException):
                file.read(buffer, 100, 0, 0)
        driver.fault("hipFileBufRegister", error=5016)
        with pytest.raises(hipfile.HipFileException):
            hipfile.Buffer(memory.pointer, 100, 0).register()
    driver.fault("hipFileDriverOpen", error=5009)
    with pytest.raises(hipfile.HipFileException):
        hipfile.Driver().open()
    driver.fault("hipFileHandleRegister", error=5027)
    with pytest.raises(hipfile.HipFileException):
        hipfile.FileHandle(payload, os.O_RDONLY).open()
    assert driver.live()[8:11] == (0, 0, 0)


def test_hipfile_on_a_stream(driver: Driver, hipfile: Any, payload: Path) -> None:
    driver.mode = Mode.DEFERRED
    memory, stream = driver.memory(0, 1000), driver.stream()
    with hipfile.Driver(), hipfile.FileHandle(payload, os.O_RDONLY) as file:
        buffer = hipfile.Buffer(memory.pointer, 1000, 0)
        with hipfile.Stream(stream.handle) as registered:
            read = file.read_async(buffer, 500, 10, 20, registered.handle)
            assert (read.bytes_done, memory.read()) == (0, bytes(1000))
            stream.synchronize()
            assert (read.bytes_done, memory.read(20, 500)) == (500, payload.read_bytes()[10:510])
        assert hipfile.supports_async()
        driver.configure(async_supported=False)
        assert not hipfile.supports_async()
        with pytest.raises(hipfile.HipFileException):
            file.read_async(buffer, 500, 10, 20, stream.handle)


def hip_call(result: tuple[Any, ...]) -> Any:
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else result[1:]


@pytest.mark.parametrize("mode", Mode)
def test_hip(driver: Driver, mode: Mode) -> None:
    hip: Any = importlib.import_module("rocm.bindings.hip")
    driver.vendor, driver.mode, before = "hip", mode, driver.live()
    assert hip_call(hip.hipGetDeviceCount()) == 3
    hip_call(hip.hipSetDevice(2))
    assert driver.context(2).uses == 0  # saying which is no use of it
    stream, event = hip_call(hip.hipStreamCreateWithFlags(1)), hip_call(hip.hipEventCreateWithFlags(2))
    source, target = hip_call(hip.hipHostMalloc(4096, 0)), hip_call(hip.hipMalloc(4096))
    assert driver.context(2).uses > 0
    assert driver.context(0).uses == driver.context(1).uses == 0
    host, device = int(source), int(target)
    driver.write(host, bytes(range(256)) * 16)
    kind = hip.hipMemcpyKind.hipMemcpyHostToDevice
    hip_call(hip.hipMemcpy2DAsync(device, 8, host, 16, 8, 100, kind, stream))
    hip_call(hip.hipEventRecord(event, stream))
    hip_call(hip.hipStreamWaitEvent(None, event, 0))
    hip_call(hip.hipMemcpyAsync(device + 2048, host, 100, kind, None))
    hip_call(hip.hipStreamSynchronize(None))
    hip_call(hip.hipEventQuery(event))
    assert driver.read(device, 800) == b"".join(bytes(range(256))[16 * (row % 16) :][:8] for row in range(100))
    assert driver.read(device + 2048, 100) == bytes(range(100))
    assert int(hip.hipMemcpyAsync(host, device, 100, kind, stream)[0]) == 21  # the other way round
    attributes = hip_call(hip.hipPointerGetAttributes(device))
    assert (int(attributes.type), attributes.device, attributes.isManaged) == (2, 2, 0)
    assert int(hip.hipPointerGetAttributes(id(hip))[0]) == 1
    assert int(hip_call(hip.hipStreamIsCapturing(stream))) == 0
    for function, thing in (
        (hip.hipStreamDestroy, stream), (hip.hipEventDestroy, event), (hip.hipHostFree, source), (hip.hipFree, target),
    ):  # fmt: skip
        hip_call(function(thing))
    assert driver.live()[:7] == before[:7]
    driver.configure(init_error=100)
    assert int(hip.hipGetDeviceCount()[0]) == 100
    driver.configure(init_error=0)
    hip_call(hip.hipSetDevice(0))


def test_hip_tensor(driver: Driver) -> None:
    driver.vendor = "hip"
    tensor: DeviceTensor = driver.memory(0, 4).tensor((4,))
    assert take(tensor, stream=0).device == (10, 0)
