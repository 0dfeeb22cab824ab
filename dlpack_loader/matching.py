"""Which destination is filled from which entry: names or a resolver, strictness, aliases, every check before a write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dlpack_loader.checkpoint import Checkpoint
from dlpack_loader.destination import Memory, Target, check_overlaps, transfer_into
from dlpack_loader.errors import DestinationError, DestinationTypeError, StrictError, UnsupportedError
from dlpack_loader.framework import describer
from dlpack_loader.header import Entry
from dlpack_loader.reads import Transfer

__all__ = ["Destinations", "Match", "Resolver", "match"]

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
    objects: list[Any] = field(default_factory=list)
    """What the caller passed, by number."""
    unfilled: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    declined: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)


def match(checkpoint: Checkpoint, destinations: Destinations, *, strict: bool, cast: bool) -> Match:
    """Pair destinations with entries and check every pair.

    Two names for one whole memory (tied weights) are one destination: it is filled once, from the first of its names,
    in sorted order, that the checkpoint has; the others are in ``aliases``.

    Raises
    ------
    StrictError
        ``strict``, and a destination has no tensor or a tensor no destination.
    DestinationError
        A destination does not fit its entry, or two overlap.
    """
    result = Match()
    problems: list[DestinationError] = []
    describe = describer()
    orphans: list[tuple[str, Any]] = []
    transfers, names, memories, objects = result.transfers, result.names, result.memories, result.objects
    for name, entry, item in _pairs(checkpoint, destinations, result):
        if entry is None:
            orphans.append((name, item))
            continue
        for part in item if isinstance(item, (list, tuple)) else (item,):
            value, index, reinterpret = part, ..., False
            if isinstance(part, Target):
                value, index, reinterpret = part.destination, part.index, part.reinterpret
            try:
                memory = describe(value)
                transfers.append(transfer_into(memory, entry, len(memories), name, index, reinterpret, cast))
            except DestinationError as error:
                error.tensor = error.tensor or name
                problems.append(error)
                continue
            names.append(name)
            memories.append(memory)
            objects.append(value)
    _merge_aliases(result)
    _adopt_orphans(orphans, describe, result)
    if strict and (result.unfilled or result.unexpected):
        raise _strict_error(result)
    if problems:
        first = problems[0]
        if len(problems) > 1:
            rest = ", ".join(repr(problem.tensor) for problem in problems[1:9])
            more = f" and {len(problems) - 9} more" if len(problems) > 9 else ""
            first.message += f"; {len(problems)} destinations do not fit, the others are {rest}{more}"
        raise first
    check_overlaps(memories, names)
    return result


def _pairs(
    checkpoint: Checkpoint, destinations: Destinations, result: Match
) -> Iterable[tuple[str, Entry | None, Any]]:
    if isinstance(destinations, Mapping):
        result.unexpected.extend(sorted(checkpoint.names() - destinations.keys()))
        ordered = sorted(destinations)
        return zip(ordered, checkpoint.find(ordered), map(destinations.__getitem__, ordered), strict=True)
    if not callable(destinations):
        raise DestinationTypeError(
            f"destinations are a mapping from names or a resolver, not {type(destinations).__name__}",
            hint="Pass e.g. model.state_dict(), or a function from an entry to its destination",
        )
    found: list[tuple[str, Entry | None, Any]] = []
    for name in checkpoint.offset_keys():
        entry = checkpoint.entry(name)
        item = destinations(entry)
        if item is None:
            result.declined.append(name)
        else:
            found.append((name, entry, item))
    return found


def _merge_aliases(result: Match) -> None:
    """Keep one transfer where several fill the same memory from whole entries."""
    memories, names = result.memories, result.names
    if len({memory.pointer for memory in memories}) == len(memories):
        return
    first: dict[int, int] = {}
    kept: list[int] = []
    for number, (transfer, memory) in enumerate(zip(result.transfers, memories, strict=True)):
        # The address of a view without bytes says nothing.
        twin = first.setdefault(memory.pointer, number) if transfer.written else number
        if twin != number and _identical(memories[twin], memory) and names[twin] != names[number]:
            result.aliases[names[number]] = names[twin]
        else:
            kept.append(number)
    result.transfers[:] = [
        msgspec.structs.replace(result.transfers[number], destination=k) for k, number in enumerate(kept)
    ]
    result.names[:] = [names[number] for number in kept]
    result.memories[:] = [memories[number] for number in kept]
    result.objects[:] = [result.objects[number] for number in kept]


def _adopt_orphans(orphans: Sequence[tuple[str, Any]], describe: Callable[[Any], Memory], result: Match) -> None:
    """Count a destination without an entry as filled where it is the memory of one that has an entry."""
    if not orphans:
        return
    filled = {
        result.memories[transfer.destination].pointer: transfer.destination
        for transfer in result.transfers
        if transfer.written
    }
    for name, item in orphans:
        try:
            memory = describe(item)
        except (DestinationError, UnsupportedError):
            result.unfilled.append(name)
            continue
        twin = filled.get(memory.pointer)
        if twin is not None and _identical(result.memories[twin], memory):
            result.aliases[name] = result.names[twin]
        else:
            result.unfilled.append(name)


def _identical(one: Memory, other: Memory) -> bool:
    return (one.pointer, one.dtype, one.shape, one.strides, one.device) == (
        other.pointer,
        other.dtype,
        other.shape,
        other.strides,
        other.device,
    )


def _strict_error(result: Match) -> StrictError:
    parts = []
    if result.unfilled:
        parts.append(f"{len(result.unfilled)} destination(s) without a tensor: {_some(result.unfilled)}")
    if result.unexpected:
        parts.append(f"{len(result.unexpected)} tensor(s) without a destination: {_some(result.unexpected)}")
    return StrictError(
        "destinations and checkpoint do not name the same tensors: " + "; ".join(parts),
        unfilled=tuple(result.unfilled),
        unexpected=tuple(result.unexpected),
        hint="Pass strict=False to load what matches",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
