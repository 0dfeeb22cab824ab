"""What a benchmark loads: as much of the checkpoint as memory and time allow, into destinations that are made once."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dlpack_loader.bench.ways import Room
from dlpack_loader.checkpoint import Checkpoint, Source
from dlpack_loader.doctor import usable_memory
from dlpack_loader.errors import DeviceError, LoaderError, OptionError, UnsupportedError
from dlpack_loader.header import Entry
from dlpack_loader.reader import safe_open
from dlpack_loader.runtime import host
from dlpack_loader.runtime.device import CUDA, CUDA_MANAGED, ROCM
from dlpack_loader.runtime.files import Files

__all__ = ["contents", "make_room", "pick", "room_of", "wanted_bytes"]

_SHARE = 4
"""Of the memory available, one part is loaded: destinations, page cache, what load_file makes, and one to spare."""
_PROBE_BYTES = 64 << 20
_WAYS, _ROUNDS = 5, 4
"""About as many runs have to fit into the time."""
_LOOKED_AT = 64
_HEAD = 4096
"""So many tensors are looked at after a trial, so many bytes of each."""

_KINDS = {CUDA: "cuda", CUDA_MANAGED: "cuda", ROCM: "hip"}


def pick(
    checkpoint: Checkpoint,
    entries: list[Entry],
    framework: str,
    device: str,
    seconds: float,
    most_bytes: int | None,
    notes: list[str],
) -> list[Entry]:
    """Choose the tensors that memory and time allow, evenly over the checkpoint; say so where these are not all."""
    total = sum(entry.nbytes for entry in entries)
    memory = most_bytes if most_bytes is not None else _memory(framework, device)
    pace = _pace(checkpoint, entries)
    in_time = max(1, int(pace * seconds / (_WAYS * _ROUNDS)))
    most = min(memory, in_time)
    if total <= most:
        return entries
    step = -(-total // most)
    chosen: list[Entry] = []
    left = most
    for entry in entries[::step]:
        if entry.nbytes <= left:
            chosen.append(entry)
            left -= entry.nbytes
    if not chosen:
        smallest = min(entries, key=lambda entry: entry.nbytes)
        if smallest.nbytes > memory:
            raise OptionError(
                f"the smallest tensor takes {smallest.nbytes:,} bytes, and {memory:,} may be used",
                tensor=smallest.name,
                hint="Free memory, or choose smaller tensors" if most_bytes is None else "Allow more",
            )
        chosen = [smallest]
    loaded = sum(entry.nbytes for entry in chosen)
    if in_time < memory:
        why = f"what {seconds:g} s allow at {pace / 1e6:,.0f} MB/s"
    else:
        why = "the memory that may be used" if most_bytes is None else "the bound that was given"
    notes.append(f"a sample: {len(chosen):,} of {len(entries):,} tensors, {loaded:,} of {total:,} bytes, within {why}")
    return chosen


def _memory(framework: str, device: str) -> int:
    """Return the bytes that may be loaded."""
    room = usable_memory()
    most = (room if room is not None else 4 << 30) // _SHARE
    if framework == "torch" and device != "cpu":
        torch: Any = importlib.import_module("torch")
        with contextlib.suppress(AssertionError, RuntimeError, ValueError):  # making tensors says better what is wrong
            most = min(most, torch.cuda.mem_get_info(device)[0] // 2)
    return max(1, most)


def _pace(checkpoint: Checkpoint, entries: Sequence[Entry]) -> float:
    """Read a little of what is not cached, in one go as loads do it; return the bytes in a second."""
    files = Files({shard.path: shard for shard in checkpoint.shards})
    entry = max(entries, key=lambda entry: entry.nbytes)
    mates = [other for other in entries if other.file == entry.file]  # a small tensor tells of the clock alone
    end = max(other.offset + other.nbytes for other in mates)
    start = max(min(other.offset for other in mates), min(entry.offset, end - _PROBE_BYTES))
    size = min(end - start, _PROBE_BYTES)
    chunk = min(size, 4 << 20)
    scratch = host.Scratch()
    address = scratch.address(chunk)
    try:
        with files.use(entry.file) as fd:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, start, size, os.POSIX_FADV_DONTNEED)
            begin = time.perf_counter()
            for done in range(0, size, chunk):
                part = min(chunk, size - done)
                host.read_at(fd, start + done, host.vector(address, part), part)
            took = time.perf_counter() - begin
    finally:
        files.close()
    # A short read says more about the machine's clock than about its storage.
    return max(size / max(took, 1e-4), 1e6)


def make_room(source: Source, entries: Sequence[Entry], framework: str, device: str) -> Room:
    """Make the destinations, filled once."""
    try:
        with safe_open(source, framework, device, backend="pread") as reader:
            tensors = reader.get_tensors([entry.name for entry in entries])
    except LoaderError as error:
        if isinstance(error, (DeviceError, UnsupportedError)):
            hint = "dlpack-loader doctor says what stands in the way"
            error.hint = f"{error.hint}; {hint}" if error.hint else hint
        raise
    return Room(framework, device, room_of(tensors).kind, tensors)


def room_of(destinations: Mapping[str, Any]) -> Room:
    """Describe destinations that the caller gave."""
    first = next(iter(destinations.values()))
    number, ordinal = getattr(first, "destination", first).__dlpack_device__()  # of a Target, what it has
    kind = _KINDS.get(int(number), "host")
    return Room(None, "cpu" if kind == "host" else f"{kind}:{ordinal}", kind, destinations)


def wanted_bytes(checkpoint: Checkpoint, entries: Sequence[Entry]) -> dict[str, bytes]:
    """Read the first bytes of some tensors in the plainest way."""
    files = Files({shard.path: shard for shard in checkpoint.shards})
    found: dict[str, bytes] = {}
    try:
        for entry in _looked_at(entries):
            with files.use(entry.file) as fd:
                os.lseek(fd, entry.offset, os.SEEK_SET)
                found[entry.name] = os.read(fd, min(_HEAD, entry.nbytes))
    finally:
        files.close()
    return found


def contents(room: Room, entries: Sequence[Entry], *, clear: bool = False) -> dict[str, bytes]:
    """Return the first bytes of some destinations, or zero them; nothing for memory that the caller gave."""
    if room.framework is None:
        return {}
    found: dict[str, bytes] = {}
    for entry in _looked_at(entries):
        value = room.destinations[entry.name]
        if room.framework == "torch":
            torch: Any = importlib.import_module("torch")
            head = value.reshape(-1).view(torch.uint8)[:_HEAD]
        else:
            numpy: Any = importlib.import_module(room.framework)
            head = value.reshape(-1).view(numpy.uint8)[:_HEAD]
        if head.nbytes != min(_HEAD, entry.nbytes):
            continue  # unpacked: NumPy's arrays of F4 have an element a byte
        if clear:
            head[:] = 0
        found[entry.name] = head.tobytes() if room.framework == "numpy" else _host_bytes(head)
    return found


def _host_bytes(head: Any) -> bytes:
    """Return the bytes of a small tensor on any device."""
    moved = head.cpu().numpy() if hasattr(head, "cpu") else head.get()
    content: bytes = moved.tobytes()
    return content


def _looked_at(entries: Sequence[Entry]) -> Sequence[Entry]:
    return entries[:: max(1, len(entries) // _LOOKED_AT)]
