"""Filling the same destinations again and again, as when weights of a live model are refreshed.

What a load works out before it reads is kept for the next one: the headers of files, and which bytes go where. That is
most of the time of a load of many small tensors and next to nothing of a load of a few large ones. Nothing is taken on
trust: a file that was rewritten is read anew, and destinations are asked for their memory each time.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, overload

import msgspec

from dlpack_loader.backend import check_fills, check_name
from dlpack_loader.checkpoint import Checkpoint, Shard, Source, open_checkpoint, read_shard
from dlpack_loader.destination import Memory, Target
from dlpack_loader.errors import DestinationTypeError, LoaderError
from dlpack_loader.filling import Access, fill
from dlpack_loader.framework import describer
from dlpack_loader.load import module_tensors
from dlpack_loader.matching import Match, match
from dlpack_loader.progress import Progress
from dlpack_loader.reader import DEFAULT_STAGING_BYTES, check_flags, make_bounds
from dlpack_loader.runtime.files import Files
from dlpack_loader.stream import Streams
from dlpack_loader.transfer import LoadReport, Pending

__all__ = ["Refresher"]

_SETTLED = 2_000_000_000
"""Nanoseconds after which another write shows in the modification time on every file system in use (FAT's is 2 s)."""


class _Headers:
    """Headers of files read before, by path. A file is known by inode, size and modification time."""

    def __init__(self) -> None:
        self._shards: dict[str, Shard] = {}
        self._named: dict[str, Shard] = {}
        self._settled: dict[str, bool] = {}
        self._lock = threading.Lock()

    def read(self, path: str) -> Shard | LoaderError:
        """Read the header of a file, or return it where the file is certainly as it was."""
        with self._lock:
            known, settled = self._shards.get(path), self._settled.get(path, False)
            like = known or self._named.get(os.path.basename(path))
        if known is not None and settled:
            try:
                if Shard.identify(os.stat(path)) == known.identity:
                    return known
            except OSError:
                pass  # reading it says what is wrong
        now = time.time_ns()
        shard = read_shard(path, keep=True, like=like.header if like else None)
        if isinstance(shard, Shard):
            with self._lock:
                self._shards[path] = self._named[os.path.basename(path)] = shard
                # Written a moment ago, it could be written once more without a change of its time.
                self._settled[path] = now - shard.identity[3] > _SETTLED
        return shard

    def keep(self, checkpoint: Checkpoint) -> None:
        """Forget the files of other checkpoints."""
        kept = {shard.path for shard in checkpoint.shards}
        with self._lock:
            self._shards = {path: shard for path, shard in self._shards.items() if path in kept}
            self._named = {os.path.basename(path): shard for path, shard in self._shards.items()}
            self._settled = {path: settled for path, settled in self._settled.items() if path in kept}


class _Last(NamedTuple):
    """What the last load rests on."""

    checkpoint: Checkpoint
    destinations: dict[str, Any]
    found: Match
    aliases: dict[str, tuple[object, ...]]
    """The facts of the memory of each name that another one's transfer fills."""


class Refresher:
    """Fills the same destinations from one checkpoint after the other, faster than ``load_into`` from the second on.

    The result of each load is that of :func:`dlpack_loader.load_into`: everything is checked before the first byte is
    written, and pointers do not change. One load at a time; threads have to take turns.

    Parameters
    ----------
    destinations
        A mapping as for :func:`dlpack_loader.load_into`, of which a copy is kept, or a ``torch.nn.Module``.
    strict, cast, backend, staging_bytes, threads, progress, direct_io, require_direct
        As for :func:`dlpack_loader.load_into`.

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> from safetensors.numpy import save_file
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> weight = np.zeros(2, np.float32)
    >>> refresher = Refresher({"weight": weight})
    >>> for step in (1.0, 2.0):
    ...     save_file({"weight": np.full(2, step, np.float32)}, path)
    ...     report = refresher.load(path)
    ...     print(weight)
    [1. 1.]
    [2. 2.]
    """

    def __init__(
        self,
        destinations: Any,
        *,
        strict: bool = True,
        cast: bool = False,
        backend: str = "auto",
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        threads: int | None = None,
        progress: Progress | None = None,
        direct_io: bool | None = None,
        require_direct: bool = False,
    ) -> None:
        self._bounds = make_bounds(staging_bytes, threads)
        check_fills(check_name(backend))
        check_flags(progress, direct_io)
        if isinstance(destinations, Mapping):
            destinations = {
                name: tuple(item) if isinstance(item, list) else item for name, item in destinations.items()
            }
        elif not callable(getattr(destinations, "state_dict", None)):
            raise DestinationTypeError(
                f"destinations are a mapping from names or a module, not {type(destinations).__name__}",
                hint="For a resolver, which decides anew each time, use load_into",
            )
        self._destinations = destinations
        self._strict = strict
        self._cast = cast
        self._backend = backend
        self._progress = progress
        self._direct_io = direct_io
        self._require_direct = require_direct
        self._headers = _Headers()
        self._last: _Last | None = None

    @overload
    def load(self, source: Source, *, stream: object = None, wait: Literal[True] = True) -> LoadReport: ...

    @overload
    def load(self, source: Source, *, stream: object = None, wait: Literal[False]) -> Pending: ...

    def load(self, source: Source, *, stream: object = None, wait: bool = True) -> LoadReport | Pending:
        """Fill the destinations from a checkpoint; parameters and errors are those of ``load_into``."""
        begin = time.perf_counter()
        checkpoint = open_checkpoint(source, self._headers.read)
        access = Access(
            Files({shard.path: shard for shard in checkpoint.shards}),
            self._bounds,
            progress=self._progress,
            direct_io=self._direct_io,
            backend=self._backend,
            require_direct=self._require_direct,
        )
        with Streams(stream) as streams:
            found = self._match(checkpoint, streams)
            streams.check()
            if wait:
                return fill(access, found, streams, begin)
            kept = streams.detach()
        return Pending(lambda: fill(access, found, kept, begin), kept)

    def _match(self, checkpoint: Checkpoint, streams: Streams) -> Match:
        destinations = self._destinations
        if not isinstance(destinations, dict):
            destinations = module_tensors(destinations)
        found = self._again(checkpoint, destinations, streams)
        if found is None:
            self._last = None
            found = match(checkpoint, destinations, strict=self._strict, cast=self._cast, streams=streams)
        self._last = _Last(checkpoint, destinations, found, _alias_facts(found, destinations))
        self._headers.keep(checkpoint)
        return found

    def _again(self, checkpoint: Checkpoint, destinations: dict[str, Any], streams: Streams) -> Match | None:
        """Return the last match, for the files at hand, if every fact that it rests on is as it was."""
        last = self._last
        if last is None or not checkpoint.same_layout(last.checkpoint):
            return None
        if last.destinations.keys() != destinations.keys():
            return None
        found, objects = last.found, last.found.objects
        if last.destinations is not destinations:  # a module gives new objects for its tensors each time
            objects = [destinations[name] for name in found.names]
        try:
            memories = list(map(describer(streams), objects))
            aliases = _alias_facts(found, destinations)
        except LoaderError:
            return None  # matching them anew says whose fault it is
        for number, memory in enumerate(memories):
            if _facts(memory) != _facts(found.wholes.get(number, found.memories[number])):
                return None
            if number in found.wholes:
                memories[number] = found.memories[number]
        if aliases != last.aliases:
            return None
        transfers = found.transfers
        paths = {old.path: new.path for old, new in zip(last.checkpoint.shards, checkpoint.shards, strict=True)}
        if any(old != new for old, new in paths.items()):
            transfers = [msgspec.structs.replace(each, file=paths[each.file]) for each in transfers]
        return dataclasses.replace(found, memories=memories, objects=objects, transfers=transfers)


def _alias_facts(found: Match, destinations: dict[str, Any]) -> dict[str, tuple[object, ...]]:
    describe = describer(None)
    facts: dict[str, tuple[object, ...]] = {}
    for name in found.aliases:
        item = destinations[name]
        parts = item if isinstance(item, (list, tuple)) else (item,)
        facts[name] = tuple(_facts(describe(part.destination if isinstance(part, Target) else part)) for part in parts)
    return facts


def _facts(memory: Memory) -> tuple[object, ...]:
    return memory.pointer, memory.dtype, memory.shape, memory.strides, memory.device
