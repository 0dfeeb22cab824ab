"""The ways in which the same tensors get into the same destinations: ours, and those of safetensors."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlpack_loader.bench.results import Unusable
from dlpack_loader.checkpoint import Checkpoint
from dlpack_loader.doctor import State as Tried
from dlpack_loader.doctor import attempt
from dlpack_loader.errors import LoaderError
from dlpack_loader.header import Entry
from dlpack_loader.load import load_into
from dlpack_loader.reader import safe_open

__all__ = ["Room", "Way", "find_ways", "framework_for"]

_LIBRARIES = {"cuda": "kvikio", "hip": "hipfile"}


@dataclass(frozen=True, slots=True)
class Room:
    """The destinations of every run, and whose they are."""

    framework: str | None
    """``"torch"``, ``"numpy"`` or ``"cupy"``; None for memory that the caller gave."""
    device: str
    """As that framework spells it."""
    kind: str
    """``"host"``, ``"cuda"`` or ``"hip"``."""
    destinations: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Way:
    """One way of loading."""

    name: str
    call: str
    run: Callable[[], object]
    ours: bool = True
    default: bool = False


def framework_for(device: str) -> tuple[str, list[Unusable]]:
    """Choose whose memory is to be filled on a device: torch's where it works, else NumPy's or CuPy's.

    Each is imported in a process of its own first, so a broken one is passed over.
    """
    refused: list[Unusable] = []
    for name in ("torch", "numpy" if device == "cpu" else "cupy"):
        tried = attempt(name)
        if tried.state is Tried.WORKED:
            return name, refused
        refused.append(Unusable(f"{name} tensors", tried.why, f"dlpack-loader doctor says more about {name}"))
    return ("numpy" if device == "cpu" else "torch"), refused


def find_ways(
    source: Any, checkpoint: Checkpoint, entries: Sequence[Entry], room: Room, *, whole: bool
) -> tuple[list[Way], list[Unusable]]:
    """List the ways that may work here, and those that can't."""
    names = [entry.name for entry in entries]
    ways: list[Way] = []
    unusable: list[Unusable] = []
    on_host = room.kind == "host"
    given = dict(room.destinations)

    def filled(**options: Any) -> Callable[[], object]:
        return lambda: load_into(source, given, strict=False, **options)

    paths = dict.fromkeys(entry.file for entry in entries)
    local = all(os.major(shard.identity[0]) != 0 for shard in checkpoint.shards if shard.path in paths)
    pinned = "" if on_host else ", pinned memory"
    pread = "load_into(source, destinations, {})".format
    direct, why, remedy = _try_library(room.kind)
    ways.append(
        Way(
            f"pread, O_DIRECT{pinned}",
            pread('backend="pread", direct_io=True'),
            filled(backend="pread", direct_io=True),
            default=local and not direct,
        )
    )
    ways.append(
        Way(
            f"pread, page cache{pinned}",
            pread('backend="pread", direct_io=False'),
            filled(backend="pread", direct_io=False),
            default=not local and not direct,
        )
    )
    library = _LIBRARIES.get(room.kind)
    if library is not None:
        if why is None:
            ways.append(Way(library, pread(f'backend="{library}"'), filled(backend=library), default=direct))
        else:
            unusable.append(Unusable(library, why, remedy))
    if room.framework is None:
        unusable.append(Unusable("safetensors", "it fills tensors of a framework only, and the memory was given"))
        return ways, unusable
    if on_host:
        ways.append(Way("mmap, copied", 'safe_open(source, backend="mmap")', _mapped(source, names, room)))
    ways.append(
        Way("safetensors safe_open", "safetensors.safe_open, tensor by tensor", _their_loop(entries, room), ours=False)
    )
    if whole:
        ways.append(Way("safetensors load_file", "safetensors' load_file", _their_file(entries, room), ours=False))
    else:
        unusable.append(Unusable("safetensors load_file", "it reads whole files, and this is a sample"))
    return ways, unusable


def _try_library(kind: str) -> tuple[bool, str | None, str | None]:
    """Say whether a device's storage library reads directly, or why it can't be used at all and what to do."""
    library = _LIBRARIES.get(kind)
    if library is None:
        return False, None, None
    tried = attempt(library)
    if tried.state is not Tried.WORKED:
        return False, tried.why, "dlpack-loader doctor says more"
    return bool(tried.facts["direct"]), None, None


def _copier(room: Room) -> Callable[[Any, Any], object]:
    """Return what copies a tensor into a destination, of the framework at hand."""
    if room.framework == "torch":
        return lambda target, value: target.copy_(value)
    module = importlib.import_module(str(room.framework))

    def copy(target: Any, value: Any) -> None:
        module.copyto(target, value)

    return copy


def _waiter(room: Room) -> Callable[[], object]:
    """Return what waits for the copies that a framework has under way on the device."""
    if room.kind == "host":
        return lambda: None
    module = importlib.import_module(str(room.framework))
    if room.framework == "torch":
        return lambda: module.cuda.synchronize(room.device)
    return lambda: module.cuda.Device().synchronize()


def _mapped(source: Any, names: Sequence[str], room: Room) -> Callable[[], object]:
    copy = _copier(room)

    def run() -> None:
        with safe_open(source, str(room.framework), room.device, backend="mmap") as reader:
            for name, tensor in reader.get_tensors(names).items():
                copy(room.destinations[name], tensor)

    return run


def _theirs(room: Room) -> tuple[str, dict[str, Any]]:
    """Return safetensors' name of the framework, and the arguments for the device."""
    if room.framework == "torch":
        return "pt", {"device": room.device}
    return ("np" if room.framework == "numpy" else str(room.framework)), {}


def _their_loop(entries: Sequence[Entry], room: Room) -> Callable[[], object]:
    copy, wait = _copier(room), _waiter(room)
    framework, where = _theirs(room)
    by_file: dict[str, list[str]] = {}
    for entry in entries:
        by_file.setdefault(entry.file, []).append(entry.name)

    def run() -> None:
        import safetensors

        for path, names in by_file.items():
            with safetensors.safe_open(path, framework, **where) as file:
                for name in names:
                    copy(room.destinations[name], file.get_tensor(name))
        wait()

    return run


def _their_file(entries: Sequence[Entry], room: Room) -> Callable[[], object]:
    copy, wait = _copier(room), _waiter(room)
    _, where = _theirs(room)
    paths = dict.fromkeys(entry.file for entry in entries)
    wanted = {entry.name for entry in entries}

    def run() -> None:
        module = importlib.import_module(f"safetensors.{room.framework}")
        for path in paths:
            for name, tensor in module.load_file(path, **where).items():
                if name in wanted:
                    copy(room.destinations[name], tensor)
        wait()

    return run


def explain(error: BaseException) -> tuple[str, str | None]:
    """Say in one line what a way failed with, and what to do."""
    if isinstance(error, LoaderError):
        return error.message, error.hint
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__, None
