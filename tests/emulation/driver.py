"""The tests' side of the emulation: loading it, how it behaves, what it saw, and memory and streams on it."""

from __future__ import annotations

import ctypes
import enum
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, TypedDict, Unpack

from tests.emulation.library import Core, EmulationError, check, open_library, present
from tests.emulation.memory import DeviceMemory, Stream

__all__ = ["Allocation", "Context", "Driver", "Fault", "Live", "Mode", "Operation", "Seen"]

# Behind libemulation.so, in the order of what needs what.
_LIBRARIES = ("libcuda.so.1", "libcufile.so.0", "libamdhip64.so", "libhipfile.so")
# Faults of these may be given as what a read reports.
_READS = {"cuFileRead", "cuFileReadAsync", "hipFileRead", "hipFileReadAsync"}
_KINDS = ("device", "managed", "pinned", "registered")
_OPERATIONS = ("copy", "fill", "host", "wait", "mark")


class Mode(enum.IntEnum):
    """When queued operations run."""

    EAGER = 0
    """By the call that queues them."""
    DEFERRED = 1
    """By whoever synchronises on something that depends on them; queries run nothing, but see ``patience``."""
    LATE = 2
    """By a background thread, ``delay_us`` after they were queued."""


class Settings(TypedDict, total=False):
    """What ``Driver.configure`` takes; ``Driver.reset`` puts back the values in parentheses."""

    devices: int
    """How many there are, at most 16 (3)."""
    memory: int
    """Bytes of each (16 GiB)."""
    cuda_version: int
    """What ``cuDriverGetVersion`` says (13000)."""
    hip_version: int
    """What ``hipDriverGetVersion`` says (70200000)."""
    init_error: int
    """What ``cuInit``, and any HIP call, returns (0)."""
    delay_us: int
    """``Mode.LATE``: how long an operation waits (20000)."""
    seed: int
    """``Mode.LATE``: which of the streams that could run goes first; 0 is the longest waiting (0)."""
    patience: int
    """``Mode.DEFERRED``: after how many queries that said "not ready" the next one runs what it asks for (1000)."""
    hold_timeout_ms: int
    """How long a wait for a held stream lasts before it fails with 702 (10000)."""
    strict_alignment: bool
    """File reads that are not aligned to 4 KiB, in file, size or memory, fail with ``EINVAL`` (no)."""
    read_limit: int
    """Most bytes of one file read, which is short beyond; 0 is what the vendor has (0)."""
    async_supported: bool
    """File reads on a stream work; otherwise they fail with 5038 (yes)."""
    integrated: bool
    """The devices' memory is the host's, as it is on an integrated GPU (no)."""
    async_limit: int
    """Most file reads outstanding on streams, beyond which they fail with 5030; 0 is any number (0)."""


class Live(NamedTuple):
    """What exists now. Compare one from before with one from after."""

    device_bytes: int
    managed_bytes: int
    pinned_bytes: int
    registered_bytes: int
    allocations: int
    streams: int
    events: int
    contexts: int
    files: int
    buffers: int
    file_drivers: int
    pending: int
    """Operations that are queued and did not run."""


class Seen(NamedTuple):
    """What happened since the last ``Driver.reset``."""

    device_peak: int
    pinned_peak: int
    pending_peak: int
    captured: int
    """Operations that a capturing stream swallowed."""
    pageable: int
    """Asynchronous copies with memory that is not pinned: a driver stages those, and may block."""
    failed: int
    """Operations that failed when they ran, such as a copy into memory that was freed since."""
    released_twice: int
    """Calls of DLPack deleters beyond the first."""


class Context(NamedTuple):
    """A device's contexts since the last ``Driver.reset``; memory and streams of ``Driver`` do not count as uses."""

    live: bool
    made: int
    """How often one came into being."""
    uses: int
    """How often one was retained, pushed, made or, with HIP, used for anything."""
    retained: int


class Allocation(NamedTuple):
    """What an address lies in."""

    base: int
    nbytes: int
    device: int
    kind: str
    """"device", "managed", "pinned" or "registered"."""


class Operation(NamedTuple):
    """One that ran."""

    kind: str
    """"copy", "fill", "host" (functions and file reads), "wait" or "mark" (an event)."""
    device: int
    """Of the stream."""
    stream: int
    target: int
    source: int
    nbytes: int


class Fault:
    """Something that goes wrong on purpose."""

    def __init__(self, core: Core, handle: int) -> None:
        self._core, self._handle = core, handle

    @property
    def fired(self) -> int:
        """How often it did."""
        return int(self._core.fired(self._handle))


class Driver:
    """The emulated driver of this process."""

    _loaded: ClassVar[Driver | None] = None

    def __init__(self, folder: Path, libraries: dict[str, ctypes.CDLL]) -> None:
        self.folder = folder
        self.vendor: Literal["cuda", "hip"] = "cuda"
        """Whose devices the tensors of new memory say they are on."""
        self.core = Core(libraries["libemulation.so"])
        self._libraries = libraries
        self._mine: weakref.WeakSet[DeviceMemory | Stream] = weakref.WeakSet()
        self._retained: set[int] = set()

    @classmethod
    def load(cls, folder: Path, *, without: Collection[str] = ()) -> Driver:
        """Load the libraries that were built into a folder, before anything else looks for them.

        A second call returns the first one's driver.

        Parameters
        ----------
        without
            Names of libraries to leave out, such as ``libcufile.so.0``.

        Raises
        ------
        EmulationError
            A library of that name is loaded already, such as a real libcuda.
        """
        if Driver._loaded is not None:
            return Driver._loaded
        wanted = [name for name in _LIBRARIES if name not in without]
        if there := [name for name in wanted if present(name)]:
            raise EmulationError(f"another {there[0]} is loaded already; load the emulation in a process of its own")
        libraries = {name: open_library(folder / "lib" / name) for name in ("libemulation.so", *wanted)}
        Driver._loaded = cls(folder, libraries)
        return Driver._loaded

    # How it behaves

    @property
    def mode(self) -> Mode:
        """When queued operations run; what is queued already keeps the mode that it was queued in."""
        return Mode(self._get("mode"))

    @mode.setter
    def mode(self, mode: Mode) -> None:
        check(self.core.set(b"mode", mode), "mode")

    def configure(self, **settings: Unpack[Settings]) -> None:
        """Change settings."""
        for name, value in settings.items():
            assert isinstance(value, int)
            check(self.core.set(name.encode(), value), f"{name}={value}")

    def fault(
        self,
        function: str,
        nth: int = 1,
        *,
        times: int | None = 1,
        error: int = 0,
        errno: int = 0,
        count: int | None = None,
        sleep: float = 0.0,
    ) -> Fault:
        """Let the nth call from now on go wrong.

        Parameters
        ----------
        function
            Its name as the headers have it: ``cuMemAlloc``, not ``cuMemAlloc_v2``.
        times
            For how many calls from that one on; None is for ever.
        error
            The number that the call returns, instead of doing anything. cuFile and hipFile calls return numbers below
            5000 as a driver error, and reads return it negated.
        errno
            A read returns -1 with this ``errno``.
        count
            Most bytes of a read, which is short then. A negative one is returned as it is, with nothing read.
            For reads on a stream, ``errno`` and ``count`` show when the read runs, ``error`` when it is submitted.
        sleep
            Seconds before anything is done.
        """
        if not any(self._has(function + suffix) for suffix in ("", "_v2", "_v3", "_v4")):
            raise EmulationError(f"{function} is not emulated")
        if (errno or count is not None) and function not in _READS:
            raise EmulationError(f"{function} is no read")
        handle = self.core.fault(
            function.encode(), nth, -1 if times is None else times, error, errno, count is not None, count or 0,
            int(sleep * 1e6),
        )  # fmt: skip
        return Fault(self.core, handle)

    def clear_faults(self) -> None:
        """Let everything go well again."""
        self.core.faultless()

    def reset(self) -> None:
        """As new, between tests: settings, faults, counters, peaks, held and capturing streams.

        Queued work runs, and memory and streams of this object are given back. What the tested code holds stays, and so
        do contexts, since libraries keep streams and pinned memory for the life of a process.
        """
        devices = self._get("devices")
        self.core.reset()
        for device in range(max(devices, self._get("devices"))):
            self.core.device_synchronize(device)
        for owned in list(self._mine):
            owned.free()
        self.vendor = "cuda"
        self.core.reset()

    # What it saw

    def calls(self) -> dict[str, int]:
        """How often each function was called since the last reset, by its name in the headers."""
        name, count, found = ctypes.c_char_p(), ctypes.c_long(), {}
        number = 0
        while self.core.function(number, ctypes.byref(name), ctypes.byref(count)):
            if count.value and name.value:
                found[name.value.decode()] = count.value
            number += 1
        return found

    def count(self, *functions: str) -> int:
        """How often these functions were called."""
        calls = self.calls()
        return sum(calls.get(function, 0) for function in functions)

    def live(self) -> Live:
        """What exists now."""
        return Live(*(self._get(name) for name in Live._fields))

    def seen(self) -> Seen:
        """What happened since the last reset."""
        return Seen(*(self._get(name) for name in Seen._fields))

    def context(self, device: int) -> Context:
        """A device's contexts."""
        made, uses, retained = ctypes.c_long(), ctypes.c_long(), ctypes.c_long()
        live = self.core.context(device, ctypes.byref(made), ctypes.byref(uses), ctypes.byref(retained))
        return Context(live, made.value, uses.value, retained.value)

    def executed(self) -> list[Operation]:
        """The operations that ran since the last reset, in the order in which they did."""
        kind, device, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        target, source, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        fields = [ctypes.byref(field) for field in (kind, device, stream, target, source, size)]
        found: list[Operation] = []
        while self.core.executed(len(found), *fields):
            found.append(
                Operation(
                    _OPERATIONS[kind.value], device.value, stream.value or 0, target.value, source.value, size.value
                )
            )
        return found

    def find(self, pointer: int) -> Allocation | None:
        """The live memory that an address lies in, host memory only if it is pinned or registered."""
        base, size, device, kind = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int(), ctypes.c_int()
        if not self.core.find(pointer, *(ctypes.byref(field) for field in (base, size, device, kind))):
            return None
        return Allocation(base.value, size.value, device.value, _KINDS[kind.value])

    # Memory and streams

    def memory(
        self, device: int, nbytes: int, *, kind: Literal["device", "managed", "pinned"] = "device"
    ) -> DeviceMemory:
        """Memory as a framework would have it: on a device whose primary context is live. Its bytes are zero."""
        self._retain(device)
        memory = DeviceMemory(self, device, nbytes, _KINDS.index(kind), self.vendor)
        self._mine.add(memory)
        return memory

    def read(self, pointer: int, nbytes: int) -> bytes:
        """The bytes at an address, as they are now: nothing that is queued runs for this."""
        target = ctypes.create_string_buffer(nbytes)
        check(self.core.read(pointer, target, nbytes), f"read {nbytes} bytes at {pointer:#x}")
        return target.raw

    def write(self, pointer: int, data: bytes) -> None:
        """Write to an address now."""
        check(self.core.write(pointer, data, len(data)), f"write {len(data)} bytes at {pointer:#x}")

    def stream(self, device: int = 0, *, blocking: bool = False) -> Stream:
        """A stream; a blocking one is in order with the device's NULL stream."""
        self._retain(device)
        handle = ctypes.c_void_p()
        check(self.core.stream_create(device, blocking, ctypes.byref(handle)), "stream")
        stream = Stream(self, device, handle.value or 0)
        self._mine.add(stream)
        return stream

    def null_stream(self, device: int = 0) -> Stream:
        """A device's NULL stream, as the legacy handle 1."""
        self._retain(device)
        return Stream(self, device, 1)

    def current_device(self, vendor: Literal["cuda", "hip"]) -> int | None:
        """The calling thread's current device."""
        device = self.core.device_current(vendor == "hip")
        return None if device < 0 else device

    def _retain(self, device: int) -> None:
        if device not in self._retained:
            check(self.core.context_retain(device), f"device {device}")
            self._retained.add(device)

    def _get(self, name: str) -> int:
        value = ctypes.c_long()
        check(self.core.get(name.encode(), ctypes.byref(value)), name)
        return value.value

    def _has(self, function: str) -> bool:
        return any(hasattr(library, function) for library in self._libraries.values())
