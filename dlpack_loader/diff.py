"""What two checkpoints differ in: tensors that only one has, dtypes, shapes, bytes, metadata.

Tensors are paired by name, whatever file they are in, so a checkpoint that was cut into other shards is equal to the
one that it was. Bytes are compared as bits: NaN equals the same NaN, and -0.0 is not 0.0. Both sides are read in
pieces into two buffers of a bounded size, and a tensor that was found to differ is read no further. What both sides
take from the same place of the same file is known to be equal without being read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as _replace
from enum import StrEnum
from typing import NamedTuple

from dlpack_loader.backend import host_backend
from dlpack_loader.bounds import Bounds
from dlpack_loader.checkpoint import Checkpoint, Source, open_checkpoint
from dlpack_loader.destination import Memory
from dlpack_loader.dtype import BITS, UINT8
from dlpack_loader.framework import framework_named
from dlpack_loader.header import Entry
from dlpack_loader.plan import Plan
from dlpack_loader.progress import Progress, reporting
from dlpack_loader.reader import DEFAULT_STAGING_BYTES, make_bounds
from dlpack_loader.reads import Transfer
from dlpack_loader.runtime import host
from dlpack_loader.runtime.files import Files
from dlpack_loader.transfer import run

__all__ = ["Change", "Comparison", "Kind", "MetadataChange", "compare"]

_HOST = (1, 0)
_BLOCK = 1 << 20
"""Bytes that are compared at a time, which bounds what NumPy allocates for it."""
_LEAST = 1 << 12


class Kind(StrEnum):
    """Ways in which a tensor changes."""

    REMOVED = "removed"
    ADDED = "added"
    DTYPE = "dtype"
    SHAPE = "shape"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Change:
    """One tensor that differs."""

    name: str
    kinds: tuple[Kind, ...]
    """Both dtype and shape may change; bytes are compared only where neither does."""
    before: Entry | None
    """None where it was added."""
    after: Entry | None
    """None where it was removed."""
    first: int | None = None
    """The first byte in the tensor that differs."""
    differing: int | None = None
    """With ``count``: elements that differ; bytes for dtypes below a byte."""


@dataclass(frozen=True, slots=True)
class MetadataChange:
    """One key of ``__metadata__`` that differs; None where a side lacks it."""

    key: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two checkpoints differ in."""

    changes: tuple[Change, ...]
    """By name."""
    metadata: tuple[MetadataChange, ...]
    equal: int
    """Tensors that are the same on both sides."""
    bytes_read: int
    """Of both sides together."""
    bytes_shared: int
    """Of one side: in the same place of the same file on both, and so not read."""
    seconds: float

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.changes and not self.metadata


def compare(
    before: Source,
    after: Source,
    *,
    choose: Callable[[str], bool] | None = None,
    count: bool = False,
    metadata: bool = True,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    threads: int | None = None,
    progress: Progress | None = None,
    direct_io: bool | None = None,
) -> Comparison:
    """Compare two checkpoints, tensor by tensor.

    Parameters
    ----------
    before, after
        Files, sequences of files, directories or indexes.
    choose
        Tells of a name whether to look at it; by default every one.
    count
        Read differing tensors to their end, and count what differs.
    metadata
        Compare ``__metadata__`` too.
    staging_bytes
        Bound on host memory: both buffers, and what reading around the page cache takes.
    threads, progress, direct_io
        As for :func:`dlpack_loader.safe_open`.

    Raises
    ------
    LoaderError
        One of them can't be opened or read, or NumPy can't be imported.

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> from safetensors.numpy import save_file
    >>> old, new = (os.path.join(tempfile.mkdtemp(), "m.safetensors") for _ in range(2))
    >>> save_file({"a": np.zeros(4, np.float32), "b": np.zeros(2)}, old)
    >>> save_file({"a": np.array([0, 0, 1, 0], np.float32), "c": np.zeros(2)}, new)
    >>> for change in compare(old, new, count=True).changes:
    ...     print(change.name, *change.kinds, change.first, change.differing)
    a bytes 10 1
    b removed None None
    c added None None
    """
    begin = time.perf_counter()
    bounds = make_bounds(staging_bytes, threads)
    sides = _Side(open_checkpoint(before)), _Side(open_checkpoint(after))
    try:
        changes, pairs, equal, shared = _match(sides[0].checkpoint, sides[1].checkpoint, choose)
        if pairs:
            framework_named("np")  # which compares them: refused now, with the remedy, where it does not work
        comparer = _Comparer(sides, pairs, bounds, count=count, direct_io=direct_io)
        total = 2 * sum(pair.before.nbytes for pair in pairs)
        with reporting(progress, lambda: total) as report:
            for done in comparer.run():
                if report is not None:
                    report(done)
            if report is not None:
                report(total)  # what needed no reading is done as well
    finally:
        for side in sides:
            side.files.close()
    changes += comparer.changes()
    return Comparison(
        changes=tuple(sorted(changes, key=lambda change: change.name)),
        metadata=_metadata(*(side.checkpoint.metadata() or {} for side in sides)) if metadata else (),
        equal=equal + len(pairs) - len(comparer.first),
        bytes_read=comparer.bytes_read,
        bytes_shared=shared,
        seconds=time.perf_counter() - begin,
    )


class _Side:
    """One of the two checkpoints."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.files = Files({shard.path: shard for shard in checkpoint.shards})


class _Pair(NamedTuple):
    """A tensor whose bytes are to be compared."""

    before: Entry
    after: Entry


class _Piece(NamedTuple):
    """A range of a tensor, and its place in both buffers."""

    pair: int
    start: int
    nbytes: int
    at: int


def _match(
    before: Checkpoint, after: Checkpoint, choose: Callable[[str], bool] | None
) -> tuple[list[Change], list[_Pair], int, int]:
    """Decide from the headers alone what can be; return the changes, the pairs to read, and what is equal unread."""
    places = [{shard.path: shard.identity[:2] for shard in checkpoint.shards} for checkpoint in (before, after)]
    changes: list[Change] = []
    pairs: list[_Pair] = []
    equal = shared = 0
    names = before.offset_keys() + [name for name in after.offset_keys() if name not in before]
    for name in filter(choose, names) if choose is not None else names:
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            changes.append(Change(name, (Kind.ADDED if old is None else Kind.REMOVED,), old, new))
            continue
        kinds = (Kind.DTYPE,) * (old.dtype != new.dtype) + (Kind.SHAPE,) * (old.shape != new.shape)
        if kinds:
            changes.append(Change(name, kinds, old, new))
        elif not old.nbytes or (places[0][old.file], old.offset) == (places[1][new.file], new.offset):
            equal, shared = equal + 1, shared + old.nbytes
        else:
            pairs.append(_Pair(old, new))
    return changes, pairs, equal, shared


def _metadata(before: dict[str, str], after: dict[str, str]) -> tuple[MetadataChange, ...]:
    keys = sorted(before.keys() | after.keys())
    changes = (MetadataChange(key, before.get(key), after.get(key)) for key in keys)
    return tuple(change for change in changes if change.before != change.after)


class _Comparer:
    """Reads pairs in pieces and compares them."""

    def __init__(
        self, sides: tuple[_Side, _Side], pairs: Sequence[_Pair], bounds: Bounds, *, count: bool, direct_io: bool | None
    ) -> None:
        self._sides = sides
        self._pairs = pairs
        self._count = count
        self._direct_io = direct_io
        # Three quarters are buffers of what is compared; reading around the page cache has the rest.
        self._room = max(_LEAST, bounds.staging_bytes * 3 // 8 // _LEAST * _LEAST)
        self._bounds = _replace(bounds, staging_bytes=max(1, bounds.staging_bytes // 4))
        self._buffers = host.Scratch(), host.Scratch()
        self.first: dict[int, int] = {}
        """For each pair that differs, its first differing byte."""
        self._differing: dict[int, int] = {}
        self.bytes_read = 0

    def run(self) -> Iterator[int]:
        """Compare everything; yield after each batch the bytes that are done with, of both sides together."""
        batch: list[_Piece] = []
        used = done = 0
        for number, (old, _) in enumerate(self._pairs):
            start = 0
            while start < old.nbytes and (self._count or number not in self.first):
                size = min(old.nbytes - start, self._room - used)
                batch.append(_Piece(number, start, size, used))
                start += size
                used += -(-size // 8) * 8  # elements stay aligned
                if used >= self._room:
                    done += self._perform(batch)
                    yield done
                    batch, used = [], 0
        if batch:
            yield done + self._perform(batch)

    def changes(self) -> list[Change]:
        """Return what was found."""
        return [
            Change(
                self._pairs[number].before.name,
                (Kind.BYTES,),
                *self._pairs[number],
                first=first,
                differing=self._differing[number] if self._count else None,
            )
            for number, first in self.first.items()
        ]

    def _perform(self, batch: Sequence[_Piece]) -> int:
        """Read a batch on both sides and compare it; return the bytes that were read."""
        room = batch[-1].at + batch[-1].nbytes
        addresses = [buffer.address(max(room, self._room)) for buffer in self._buffers]
        for which, address in enumerate(addresses):
            self._read(which, address, batch)
        for piece in batch:
            if self._count or piece.pair not in self.first:
                self._judge(piece, *(address + piece.at for address in addresses))
        nbytes = 2 * sum(piece.nbytes for piece in batch)
        self.bytes_read += nbytes
        return nbytes

    def _read(self, which: int, address: int, batch: Sequence[_Piece]) -> None:
        """Read a batch's pieces of one side, through the backend that fills host memory."""
        buffer, files = self._buffers[which], self._sides[which].files
        entries = [self._pairs[piece.pair][which] for piece in batch]
        memories = [
            Memory(address + piece.at, UINT8, (piece.nbytes,), None, _HOST, buffer, piece.nbytes) for piece in batch
        ]
        transfers = [
            Transfer(entry.name, entry.file, entry.offset + piece.start, k, piece.nbytes, written=piece.nbytes)
            for k, (entry, piece) in enumerate(zip(entries, batch, strict=True))
        ]
        plan = Plan.make(transfers, [entry.name for entry in entries], self._bounds)
        run(plan, host_backend(files, memories, self._bounds, direct_io=self._direct_io))

    def _judge(self, piece: _Piece, one: int, other: int) -> None:
        """Compare a piece, block by block; without counting, up to the first difference."""
        import numpy as np

        from dlpack_loader.runtime.arrays import BYTE, array_at

        bits = BITS[self._pairs[piece.pair].before.dtype]
        unit = bits // 8 if bits % 8 == 0 else 1
        for at in range(0, piece.nbytes, _BLOCK):
            size = min(_BLOCK, piece.nbytes - at)
            left, right = (array_at(address + at, (size,), None, BYTE) for address in (one, other))
            whole = size // 8 * 8
            if np.array_equal(left[:whole].view(np.uint64), right[:whole].view(np.uint64)) and np.array_equal(
                left[whole:], right[whole:]
            ):
                continue
            unequal = left != right
            self.first.setdefault(piece.pair, piece.start + at + int(unequal.argmax()))
            if not self._count:
                return
            found = int(np.count_nonzero(unequal.reshape(-1, unit).any(axis=1)))
            self._differing[piece.pair] = self._differing.get(piece.pair, 0) + found
