"""Which way of loading is fastest for this file, on this machine: every usable way, measured in turns.

Every way ends with the same bytes in the same destinations, which are made once. Runs take turns, so that what slows
the machine for a while slows all of them. Cold runs begin when the file's pages were dropped from the page cache, and
it is looked at whether they were. The file is only read.

The files: results (what was measured, and what follows), cache (making a file warm or cold), sample (what fits), ways
(what is measured).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlpack_loader.bench.cache import PageCache
from dlpack_loader.bench.results import Advice, Benchmark, Measured, State, Unusable, advise, tell_apart
from dlpack_loader.bench.sample import contents, make_room, pick, room_of, wanted_bytes
from dlpack_loader.bench.ways import Room, Way, explain, find_ways, framework_for
from dlpack_loader.checkpoint import Checkpoint, Source, open_checkpoint
from dlpack_loader.errors import OptionError
from dlpack_loader.header import Entry

__all__ = ["Advice", "Benchmark", "Measured", "State", "Unusable", "advise", "measure", "tell_apart"]

_WARM, _COLD = 0.95, 0.05
"""Parts of the pages that are cached: from the one on a file is warm, up to the other it is cold."""
_WARM_SHARE = 1 / 3
"""Of the seconds, for warm runs, which are the shorter ones."""

Say = Callable[[str], object]


def measure(
    source: Source,
    device: str = "cpu",
    *,
    rounds: int = 5,
    seconds: float = 120.0,
    choose: Callable[[str], bool] | None = None,
    destinations: Mapping[str, Any] | None = None,
    most_bytes: int | None = None,
    say: Say | None = None,
) -> Benchmark:
    """Measure every way of loading a checkpoint that is usable here.

    Parameters
    ----------
    source
        What :func:`dlpack_loader.safe_open` opens.
    device
        Where the destinations are made, as torch spells it.
    rounds
        Runs of each way in each state; at least 3 are needed to tell ways apart.
    seconds
        About how long the measured runs may take: fewer rounds are run, or a sample is loaded, where that is too
        little. Making the destinations and trying every way once come before.
    choose
        Tells of a name whether to load it; by default every one.
    destinations
        Memory to fill instead of memory that is made, by name; anything with ``__dlpack__``.
    most_bytes
        Bound on the bytes that are loaded; by default a quarter of the memory that is available.
    say
        Called with what is being done.

    Raises
    ------
    OptionError
        A bound makes no sense, or no tensor fits into memory.
    LoaderError
        The checkpoint can't be opened or read, or the device has no memory to be filled.

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> from safetensors.numpy import save_file
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> save_file({"w": np.zeros((64, 64), np.float32)}, path)
    >>> result = measure(path, rounds=1, seconds=10, destinations={"w": np.empty((64, 64), np.float32)})
    >>> sorted({item.way for item in result.measured})
    ['pread, O_DIRECT', 'pread, page cache']
    """
    _check(rounds, seconds, most_bytes)
    say = say or _silent
    checkpoint = open_checkpoint(source)
    entries = [entry for name in checkpoint.offset_keys() if choose is None or choose(name)
               for entry in (checkpoint.entry(name),) if entry.nbytes]  # fmt: skip
    if destinations is not None:
        entries = [entry for entry in entries if entry.name in destinations]
    if not entries:
        raise OptionError("there is no tensor with bytes to load", hint="Choose others, or another checkpoint")
    notes: list[str] = []
    refused: list[Unusable] = []
    if destinations is None:
        framework, refused = framework_for(device)
        entries = pick(checkpoint, entries, framework, device, seconds, most_bytes, notes)
        say(f"making {len(entries):,} tensors")
        room = make_room(source, entries, framework, device)
    else:
        room = room_of({entry.name: destinations[entry.name] for entry in entries})
    whole = len(entries) == sum(checkpoint.entry(name).nbytes > 0 for name in checkpoint.offset_keys())
    ways, unusable = find_ways(source, checkpoint, entries, room, whole=whole)
    cache = PageCache(checkpoint.shards, entries)
    try:
        bench = _Bench(ways, entries, room, cache, rounds, [*refused, *unusable], notes, say)
        bench.try_all(checkpoint)
        begin = time.perf_counter()
        bench.run(State.WARM, begin + seconds * _WARM_SHARE)
        bench.run(State.COLD, begin + seconds)
    finally:
        cache.close()
    measured = bench.measured()
    return Benchmark(
        source=str(source),
        device=device if destinations is None else room.device,
        framework=room.framework,
        tensors=len(entries),
        nbytes=sum(entry.nbytes for entry in entries),
        whole=whole,
        measured=measured,
        unusable=tuple(bench.unusable),
        notes=tuple(notes),
        advice=advise(measured),
    )


def _check(rounds: int, seconds: float, most_bytes: int | None) -> None:
    if not 1 <= rounds <= 1000:
        raise OptionError(f"rounds is a number from 1 to 1000, not {rounds!r}")
    if not 0 < seconds < float("inf"):
        raise OptionError(f"seconds is a positive number, not {seconds!r}")
    if most_bytes is not None and most_bytes <= 0:
        raise OptionError(f"most_bytes is a positive number, not {most_bytes!r}")


def _silent(text: str) -> None:
    """Tell nobody."""


@dataclass(slots=True)
class _Bench:
    """The runs of one benchmark."""

    ways: list[Way]
    entries: Sequence[Entry]
    room: Room
    cache: PageCache
    rounds: int
    unusable: list[Unusable]
    notes: list[str]
    say: Say
    runs: dict[tuple[str, State], list[tuple[float, float]]] = field(default_factory=dict)

    def try_all(self, checkpoint: Checkpoint) -> None:
        """Run each way once, unmeasured, and leave out those that fail or do not do the work."""
        wanted = wanted_bytes(checkpoint, self.entries)
        usable: list[Way] = []
        for way in self.ways:
            self.say(f"trying {way.name}")
            try:
                before = contents(self.room, self.entries, clear=True)
                way.run()
                after = contents(self.room, self.entries)
            except Exception as error:  # of any library: a way that fails is a line of the result
                self.unusable.append(Unusable(way.name, *explain(error)))
                continue
            if before and after != {name: wanted[name] for name in after}:
                self.unusable.append(Unusable(way.name, "the destinations do not hold the file's bytes afterwards"))
                continue
            usable.append(way)
        self.ways = usable

    def run(self, state: State, deadline: float) -> None:
        """Run every way once a round, in turns."""
        if not self.ways or not self._reach(state):
            return
        longest = 0.0
        for number in range(self.rounds):
            start = time.perf_counter()
            if number and start + longest > deadline:
                self.notes.append(f"{state}: {number} of {self.rounds} rounds, for want of time")
                break
            turn = number % len(self.ways)
            for way in self.ways[turn:] + self.ways[:turn]:
                self.say(f"{state}, round {number + 1}: {way.name}")
                if not self._prepare(state):
                    self._note(f"{state}: a run of {way.name} began with the file in another state")
                cpu, wall = time.process_time(), time.perf_counter()
                try:
                    report = way.run()
                except Exception as error:  # it worked before; it is taken out, and the others go on
                    self.unusable.append(Unusable(way.name, *explain(error)))
                    self.ways = [other for other in self.ways if other is not way]
                    for kept in State:
                        self.runs.pop((way.name, kept), None)
                    continue
                took = time.perf_counter() - wall, time.process_time() - cpu
                self.runs.setdefault((way.name, state), []).append(took)
                if state is State.COLD and "O_DIRECT was refused" in getattr(report, "reason", ""):
                    self._note(f"cold: O_DIRECT was refused, so {way.name} went through the page cache")
            longest = max(longest, time.perf_counter() - start)

    def measured(self) -> tuple[Measured, ...]:
        """Return what was measured, the fastest of each state first."""
        nbytes = sum(entry.nbytes for entry in self.entries)
        found = []
        for way in self.ways:
            for state in State:
                if runs := self.runs.get((way.name, state)):
                    wall, cpu = zip(*runs, strict=True)
                    found.append(Measured(way.name, way.ours, way.default, way.call, state, nbytes, wall, cpu))
        order = list(State)
        return tuple(sorted(found, key=lambda item: (order.index(item.state), item.median)))

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _reach(self, state: State) -> bool:
        """Bring the file into a state for the first time; say so where that is not possible."""
        gc.collect()
        if state is State.WARM:
            self.cache.fill()
            part = self.cache.resident()
            if part is not None and part < _WARM:
                self.notes.append(f"warm: only {part:.0%} of the file stays in the page cache; nothing was measured")
                return False
            if part is None:
                self.notes.append("warm: the system does not tell whether the file is in the page cache")
            return True
        if not self.cache.drop():
            self.notes.append("cold: this system does not let a file be dropped from the page cache")
            return False
        part = self.cache.resident()
        if part is None:
            self.notes.append("cold: the system does not tell whether the file was dropped from the page cache")
        elif part > _COLD:
            self.notes.append(
                f"cold: {part:.0%} of the file stays in the page cache (it is in memory, or another process has it "
                "mapped), so nothing cold was measured"
            )
            return False
        return True

    def _prepare(self, state: State) -> bool:
        """Bring the file into a state before a run; return whether it is in it, as far as can be told."""
        part = self.cache.resident()
        if state is State.WARM:
            if part is not None and part < _WARM:
                self.cache.fill()
                part = self.cache.resident()
            return part is None or part >= _WARM
        self.cache.drop()
        part = self.cache.resident()
        if part is not None and part > _COLD:
            gc.collect()  # mappings that were forgotten keep pages
            self.cache.drop()
            part = self.cache.resident()
        self.cache.drop()  # the pages that were looked at
        return part is None or part <= _COLD
