"""Which destination is filled from which entry: names or a resolver, strictness, aliases; checks before any write."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, repeat
from typing import Any

import msgspec

from dlpack_loader.checkpoint import Checkpoint
from dlpack_loader.destination import Memory, Target, check_overlaps, transfer_into
from dlpack_loader.errors import DestinationTypeError, DeviceError, LoaderError, StrictError, few
from dlpack_loader.framework import describer
from dlpack_loader.header import Entry
from dlpack_loader.reads import Margin, Transfer
from dlpack_loader.region import contains, corner_of, margins_of
from dlpack_loader.stream import Streams

__all__ = ["Destinations", "Match", "Resolver", "match", "match_one"]

Resolver = Callable[[Entry], Any]
"""Entry -> a destination, a Target, a list of either, or None to leave the tensor alone."""

Destinations = Mapping[str, Any] | Resolver
"""Name -> a destination, a Target or a list of either; or a resolver."""


@dataclass(slots=True)
class Match:
    """Destinations with their memory, and the transfers that fill them."""

    transfers: list[Transfer] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """Tensor name of each destination, by number."""
    memories: list[Memory] = field(default_factory=list)
    """What a tensor fills of each destination."""
    objects: list[Any] = field(default_factory=list)
    """What the caller passed, by number."""
    unfilled: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    declined: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    wholes: dict[int, Memory] = field(default_factory=dict)
    """Destinations that are larger than that, by number."""
    margins: dict[int, tuple[Margin, ...]] = field(default_factory=dict)
    """What is to be zeroed of those that are to be zeroed, by number."""


def match(
    checkpoint: Checkpoint, destinations: Destinations, *, strict: bool, cast: bool, streams: Streams | None
) -> Match:
    """Pair destinations with entries and check every pair.

    Two names for one whole memory (tied weights) are one destination: it is filled once, from the first of its names
    that the checkpoint has, in sorted order; the others are in ``aliases``. So is a destination without a tensor that
    lies within the memory of one that is filled, as a view does. A resolver that returns one memory for two tensors is
    refused.

    Raises
    ------
    StrictError
        ``strict``, and a destination has no tensor or a tensor no destination.
    DestinationError, UnsupportedError, SelectionError
        Destinations do not fit their entries, or two overlap. Of several faults the first is raised; its message names
        the others.
    """
    result = Match()
    rest = _Rest()
    problems = _place(_pair(checkpoint, destinations, result), rest, result, cast=cast, streams=streams)
    _adopt_orphans(rest, result, streams)
    if strict and (result.unfilled or result.unexpected):
        raise _strict_error(result, problems)
    _finish(problems, result)
    return result


def match_one(entry: Entry, destination: Any, *, streams: Streams | None) -> Match:
    """Pair one entry with its destination and check the pair; the rest of the checkpoint does not matter."""
    result = Match()
    _finish(
        _place(_Pairs([entry.name], [entry], [destination], tied=False), _Rest(), result, cast=False, streams=streams),
        result,
    )
    return result


def _place(pairs: _Pairs, rest: _Rest, result: Match, *, cast: bool, streams: Streams | None) -> list[LoaderError]:
    """Make the transfers of the pairs; return what is wrong with any, and note in ``rest`` what gets no transfer."""
    describe = describer(streams)
    if pairs.plain():
        try:
            result.memories = list(map(describe, pairs.items))
            result.transfers = list(
                map(
                    transfer_into,
                    result.memories,
                    pairs.found,
                    count(),
                    pairs.names,
                    repeat(...),
                    repeat(False),
                    repeat(cast),
                )
            )
        except DeviceError:
            raise  # no fault of one destination
        except LoaderError:
            result.memories = []  # once more, one by one, to name every fault
        else:
            result.names, result.objects = pairs.names, pairs.items
            if pairs.tied:
                _merge_aliases(set(), result)
            return []
    problems: list[LoaderError] = []
    partial: set[int] = set()
    for name, entry, item in zip(pairs.names, pairs.found, pairs.items, strict=True):
        if entry is None:
            rest.orphans.append((name, item))
            continue
        parts = item if isinstance(item, (list, tuple)) else (item,)
        if not parts:
            problems.append(DestinationTypeError("the list of destinations is empty", tensor=name))
        for part in parts:
            target = part if isinstance(part, Target) else Target(part)
            number = len(result.memories)
            whole = None
            try:
                whole = memory = describe(target.destination)
                if target.padding is not None:
                    memory = corner_of(whole, entry, name, target.index)
                transfer = transfer_into(memory, entry, number, name, target.index, target.reinterpret, cast)
            except DeviceError:
                raise
            except LoaderError as error:
                error.tensor = error.tensor or name
                problems.append(error)
                if whole is not None:
                    rest.misfits.append(whole)
                continue
            if target.index is not ...:
                partial.add(number)
            if memory is not whole:
                result.wholes[number] = whole
                if target.padding == "zero":
                    result.margins[number] = margins_of(whole, memory, number)
            result.transfers.append(transfer)
            result.names.append(name)
            result.memories.append(memory)
            result.objects.append(target.destination)
    if pairs.tied:
        _merge_aliases(partial, result)
    return problems


def _finish(problems: list[LoaderError], result: Match) -> None:
    """Raise what is wrong with any pair, and refuse destinations that overlap."""
    if problems:
        first = problems[0]
        if len(problems) > 1:
            rest = ", ".join(repr(problem.tensor) for problem in problems[1:9])
            more = f" and {len(problems) - 9} more" if len(problems) > 9 else ""
            first.message += f"; {len(problems)} destinations do not fit, the others are {rest}{more}"
        raise first
    written = result.memories
    if result.margins:
        written = [result.wholes[k] if k in result.margins else memory for k, memory in enumerate(written)]
    check_overlaps(written, result.names)


@dataclass(frozen=True, slots=True)
class _Rest:
    """Destinations that no tensor fills."""

    orphans: list[tuple[str, Any]] = field(default_factory=list)
    """Those without an entry."""
    misfits: list[Memory] = field(default_factory=list)
    """Those that do not fit their entries."""


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Names, what the checkpoint has under them, and what the caller wants filled with it."""

    names: list[str]
    found: list[Entry | None]
    items: list[Any]
    tied: bool
    """Whether several names may share one memory: a module's tied weights do, what a resolver returns must not."""

    def plain(self) -> bool:
        """Whether every name has an entry and one destination that is no Target: the usual case, gone through fast."""
        special = any(issubclass(kind, (Target, list, tuple)) for kind in set(map(type, self.items)))
        return not special and None not in self.found


def _pair(checkpoint: Checkpoint, destinations: Destinations, result: Match) -> _Pairs:
    if isinstance(destinations, Mapping):
        if not all(issubclass(kind, str) for kind in set(map(type, destinations))):
            raise DestinationTypeError("destinations are named by strings", hint="Use the tensors' names as keys")
        result.unexpected.extend(sorted(checkpoint.names() - destinations.keys()))
        names = sorted(destinations)
        return _Pairs(names, list(checkpoint.find(names)), [destinations[name] for name in names], tied=True)
    if hasattr(destinations, "state_dict") or not callable(destinations):  # a module could be called
        raise DestinationTypeError(
            f"destinations are a mapping from names or a resolver, not {type(destinations).__name__}",
            hint="Pass e.g. model.state_dict(), or a function from an entry to its destination",
        )
    pairs = _Pairs([], [], [], tied=False)
    for name in checkpoint.offset_keys():
        entry = checkpoint.entry(name)
        item = destinations(entry)
        if item is None:
            result.declined.append(name)
        else:
            pairs.names.append(name)
            pairs.found.append(entry)
            pairs.items.append(item)
    return pairs


def _merge_aliases(partial: set[int], result: Match) -> None:
    """Keep one transfer where several fill the same memory from whole entries; ``partial`` ones are left alone."""
    memories, names = result.memories, result.names
    if len({memory.pointer for memory in memories}) == len(memories):
        return
    first: dict[int, int] = {}
    kept: list[int] = []
    for number, (transfer, memory) in enumerate(zip(result.transfers, memories, strict=True)):
        # The address of a view without bytes says nothing.
        twin = first.setdefault(memory.pointer, number) if transfer.written and number not in partial else number
        if twin != number and _interchangeable(twin, number, result) and names[twin] != names[number]:
            result.aliases[names[number]] = names[twin]
        else:
            kept.append(number)
    result.transfers[:] = [
        msgspec.structs.replace(result.transfers[number], destination=k) for k, number in enumerate(kept)
    ]
    result.names[:] = [names[number] for number in kept]
    result.memories[:] = [memories[number] for number in kept]
    result.objects[:] = [result.objects[number] for number in kept]
    result.wholes = {k: result.wholes[number] for k, number in enumerate(kept) if number in result.wholes}
    result.margins = {
        k: tuple(msgspec.structs.replace(margin, destination=k) for margin in result.margins[number])
        for k, number in enumerate(kept)
        if number in result.margins
    }


def _adopt_orphans(rest: _Rest, result: Match, streams: Streams | None) -> None:
    """Count a destination without an entry as filled where it lies within the memory of one that has an entry.

    Writers leave out a tensor that is a view of another one that they write. A view of what does not fit its entry is
    nothing of its own: the fault is the other one's.
    """
    if not rest.orphans:
        return
    describe = describer(streams)
    numbers = sorted({transfer.destination for transfer in result.transfers if transfer.written})
    places = [(result.wholes.get(number, result.memories[number]), result.names[number]) for number in numbers]
    find = _finder([*(memory for memory, _ in places), *rest.misfits])
    for name, item in rest.orphans:
        parts = item if isinstance(item, (list, tuple)) else (item,)
        try:
            found = [find(describe(part.destination if isinstance(part, Target) else part)) for part in parts]
        except DeviceError:
            raise
        except LoaderError:
            found = []
        holders = [place for place in found if place is not None]
        if not holders or len(holders) < len(found):
            result.unfilled.append(name)
        elif max(holders) < len(places):
            result.aliases[name] = places[holders[0]][1]


def _finder(memories: Sequence[Memory]) -> Callable[[Memory], int | None]:
    """Return a function that finds the first of these memories that another one lies within."""
    order = sorted(range(len(memories)), key=lambda k: memories[k].extent()[0])
    extents = [memories[k].extent() for k in order]
    lows = [low for low, _ in extents]
    furthest = list(accumulate((high for _, high in extents), max))

    def find(memory: Memory) -> int | None:
        low, high = memory.extent()
        found = []
        k = bisect_right(lows, low) - 1
        while k >= 0 and furthest[k] >= high:  # of those that begin before it, one reaches as far
            if contains(memories[order[k]], memory):
                found.append(order[k])
            k -= 1
        return min(found, default=None)

    return find


def _interchangeable(one: int, other: int, result: Match) -> bool:
    """Whether two destinations are one memory that is to be written in the same places."""
    return (
        _identical(result.memories[one], result.memories[other])
        and (one in result.margins) == (other in result.margins)
        and (one in result.wholes) == (other in result.wholes)
        and (one not in result.wholes or _identical(result.wholes[one], result.wholes[other]))
    )


def _identical(one: Memory, other: Memory) -> bool:
    return (one.pointer, one.dtype, one.shape, one.strides, one.device) == (
        other.pointer,
        other.dtype,
        other.shape,
        other.strides,
        other.device,
    )


def _strict_error(result: Match, problems: Sequence[LoaderError]) -> StrictError:
    parts = []
    if result.unfilled:
        parts.append(f"{len(result.unfilled)} destination(s) without a tensor: {few(result.unfilled, 8)}")
    if result.unexpected:
        parts.append(f"{len(result.unexpected)} tensor(s) without a destination: {few(result.unexpected, 8)}")
    if problems:
        parts.append(f"{len(problems)} destination(s) that do not fit: {few([str(p.tensor) for p in problems], 8)}")
    return StrictError(
        "destinations and checkpoint do not name the same tensors: " + "; ".join(parts),
        unfilled=tuple(result.unfilled),
        unexpected=tuple(result.unexpected),
        hint="Pass strict=False to load what matches",
    )
