"""Running a plan: a bounded number of reads in flight, errors that drain before they are raised, and the report.

The calling thread reads too, so a plan of one read starts no thread. Threads live for one transfer only; a process
that forks between transfers forks none of them.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlpack_loader.backend import Backend, BackendInfo
from dlpack_loader.errors import LoaderError, UnsupportedError, few
from dlpack_loader.plan import Plan
from dlpack_loader.progress import Progress, reporting
from dlpack_loader.reads import Margin, Read, Scatter
from dlpack_loader.stream import Streams

__all__ = ["LoadReport", "Pending", "Tally", "run"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did."""

    filled: tuple[str, ...]
    """Destinations that now hold their tensor."""
    unfilled: tuple[str, ...]
    """Destinations that the checkpoint has no tensor for; untouched."""
    unexpected: tuple[str, ...]
    """Tensors of the checkpoint without a destination; not read."""
    declined: tuple[str, ...]
    """Tensors that a resolver returned None for; not read."""
    aliases: dict[str, str]
    """Destinations that lie within the memory of another one, which was filled in their stead."""
    bytes_read: int
    """Bytes asked of the storage."""
    bytes_written: int
    """Bytes of tensors written into destinations."""
    bytes_zeroed: int
    """Bytes of padded destinations, beside their tensors, that were zeroed."""
    direct_bytes: int
    """Of the bytes read: straight into destinations."""
    compat_bytes: int
    """Of the bytes read: through host memory of a storage library, in its compatibility mode."""
    staged_bytes: int
    """Of the bytes read: through host memory of ours."""
    seconds: float
    """From the plan to the last byte."""
    backend: str
    """The backend used."""
    reason: str
    """Why that one, and how the bytes came."""
    failed: tuple[str, ...] = ()
    """Destinations that may hold a mixture, in the report of an error; ``unfilled`` then has those not begun too."""

    def info(self) -> BackendInfo:
        """Say which backend served, whether every byte came directly, and why."""
        return BackendInfo(self.backend, self.staged_bytes == self.compat_bytes == 0, self.reason)

    def _repr_html_(self) -> str:
        from dlpack_loader.html import load_report_html

        return load_report_html(self)

    def __str__(self) -> str:
        rate = self.bytes_written / self.seconds / 1e9 if self.seconds else 0.0
        compat = f"{self.compat_bytes:,} in compatibility mode, " if self.compat_bytes else ""
        how = f"{self.direct_bytes:,} direct, {compat}{self.staged_bytes:,} staged"
        lines = [
            f"{len(self.filled)} filled, {self.bytes_written:,} bytes in {self.seconds:.3f} s ({rate:.2f} GB/s)",
            f"  read      {self.bytes_read:,} bytes: {how}",
            f"  backend   {self.backend}: {self.reason}",
        ]
        if self.bytes_zeroed:
            lines.insert(1, f"  zeroed    {self.bytes_zeroed:,} bytes of padding")
        for label, names in (
            ("failed", self.failed),
            ("unfilled", self.unfilled),
            ("unexpected", self.unexpected),
            ("declined", self.declined),
            ("aliases", tuple(f"{name} = {other}" for name, other in self.aliases.items())),
        ):
            if names:
                lines.append(f"  {label:<9} {few(names, 5)}")
        return "\n".join(lines)


class Pending:
    """A transfer under way. It holds every reference that the transfer needs; forgetting it is fine.

    Destinations hold a mixture of old and new bytes until ``wait`` returns.
    """

    def __init__(self, work: Callable[[], LoadReport], streams: Streams) -> None:
        self._streams = streams
        self._outcome = _Outcome()
        self._told = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=_perform, args=(work, self._outcome), name="dlpack-loader-transfer")
        self._thread.start()

    def done(self) -> bool:
        """Whether the transfer has ended, well or not."""
        self._check_process()
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> LoadReport:
        """Wait for the last byte and return the report.

        Parameters
        ----------
        timeout
            Seconds; None waits for as long as it takes.

        Raises
        ------
        TimeoutError
            The transfer is still under way; it goes on.
        LoaderError
            Whatever went wrong in the transfer.
        """
        self._check_process()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the transfer is still under way after {timeout} s")
        self._told = True
        if self._outcome.error is not None:
            raise self._outcome.error
        assert self._outcome.report is not None
        return self._outcome.report

    def wait_on(self, stream: Any) -> None:
        """Make a stream of the caller's wait, on the device, for the last byte; the host does not wait for copies.

        It does wait until the files are read and the copies enqueued. Work that is put on the stream afterwards sees
        complete data, unless the transfer fails, which only ``wait`` tells.

        Parameters
        ----------
        stream
            An integer handle, or a stream object of torch, CuPy or any other with ``__cuda_stream__``.
        """
        self._check_process()
        self._streams.lead(stream)

    def __await__(self) -> Generator[Any, None, LoadReport]:
        import asyncio

        return asyncio.to_thread(self.wait).__await__()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise UnsupportedError(
                "the transfer belongs to the process that began it, not to its fork",
                hint="Wait for it before forking, or load again in the child",
            )

    def __del__(self) -> None:
        if self._outcome.error is not None and not self._told:
            _LOG.error("a load in the background failed, and nobody waited for it: %s", self._outcome.error)


@dataclass(slots=True)
class _Outcome:
    """What became of a pending load; apart from it, so that the thread does not keep the Pending alive."""

    report: LoadReport | None = None
    error: BaseException | None = None


def _perform(work: Callable[[], LoadReport], outcome: _Outcome) -> None:
    try:
        outcome.report = work()
    except BaseException as error:
        outcome.error = error


@dataclass(slots=True)
class Tally:
    """What became of the destinations of one load, by number, over all of its plans."""

    finished: set[int] = field(default_factory=set)
    dirty: set[int] = field(default_factory=set)
    cause: BaseException | None = None
    """What ended a plan early."""


def run(
    plan: Plan,
    backend: Backend,
    progress: Progress | None = None,
    *,
    zero: Callable[[Margin], object] | None = None,
    tally: Tally | None = None,
) -> None:
    """Zero the margins of a plan, then perform every read of it.

    On an error no further read begins, those under way are waited for, and the error names the destinations that may
    be partly written. An exception of ``progress``, or an interrupt, ends the transfer in the same way.

    Parameters
    ----------
    zero
        Zeroes a margin, or enqueues that before all that the backend enqueues; for plans that have any.
    tally
        Is told which destinations were finished, and which were begun.
    """
    tally = tally or Tally()
    reads = plan.reads()
    first = list(itertools.islice(reads, plan.bounds.threads))
    state = _State(itertools.chain(first, reads))
    helpers: list[threading.Thread] = []
    try:
        for margin in plan.margins:
            assert zero is not None
            zero(margin)
            state.zeroed += 1
        with reporting(progress, lambda: plan.totals.bytes_read) as report:
            for _ in first[1:]:
                helper = threading.Thread(target=_help, args=(state, backend), name="dlpack-loader-read")
                helpers.append(helper)  # before it is started: an interrupt may come in between
                try:
                    helper.start()
                except RuntimeError:  # no more threads to be had; those that there are do the work
                    break
            told = _work(state, backend, report)
            _join(helpers)
            if report is not None and not state.failed and told != state.done:
                report(state.done)
    except BaseException as error:
        state.fail(error)
    finally:
        state.stopped = True
        _join(helpers)
    if not state.failed:
        tally.finished.update(transfer.destination for transfer in plan.transfers)
        return
    cause = tally.cause = state.failed[0]
    begun, unfinished = _begun(plan, state)
    tally.finished |= begun - unfinished
    tally.dirty |= begun & unfinished
    dirty = tuple(plan.names[number] for number in sorted(begun & unfinished))
    if isinstance(cause, LoaderError):
        cause.dirty = dirty
        _name_tensor(cause, plan)
    elif dirty:
        cause.add_note(f"The transfer was ended early; load again before use: {', '.join(dirty[:8])}")
    raise cause


@dataclass(slots=True)
class _State:
    """What the threads of one transfer share."""

    reads: Iterator[Read]
    lock: threading.Lock = field(default_factory=threading.Lock)
    zeroed: int = 0
    """Margins that were zeroed, in the plan's order."""
    taken: int = 0
    done: int = 0
    stopped: bool = False
    failed: list[BaseException] = field(default_factory=list)
    unfinished: set[int] = field(default_factory=set)
    """Numbers of the reads that were begun and did not end well."""

    def take(self) -> tuple[int, Read] | None:
        with self.lock:
            if self.stopped:
                return None
            read = next(self.reads, None)
            if read is None:
                return None
            number = self.taken
            self.unfinished.add(number)
            self.taken += 1
            return number, read

    def finish(self, number: int, nbytes: int) -> int:
        with self.lock:
            self.unfinished.discard(number)
            self.done += nbytes
            return self.done

    def fail(self, error: BaseException) -> None:
        with self.lock:
            self.stopped = True
            self.failed.append(error)


def _work(state: _State, backend: Backend, report: Callable[[int], object] | None) -> int:
    """Read until nothing is left; return the bytes that were last reported."""
    done = -1
    with backend.worker() as worker:
        while (item := state.take()) is not None:
            number, read = item
            worker.read(read)
            done = state.finish(number, read.nbytes)
            if report is not None:
                report(done)
    return done


def _help(state: _State, backend: Backend) -> None:
    try:
        _work(state, backend, None)
    except BaseException as error:
        state.fail(error)


def _join(helpers: Sequence[threading.Thread]) -> None:
    """Wait for every helper that was started, whatever comes in between: they write into the caller's memory."""
    interrupt: BaseException | None = None
    for helper in helpers:
        while helper.ident is not None and helper.is_alive():
            try:
                helper.join()
            except BaseException as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt


def _begun(plan: Plan, state: _State) -> tuple[set[int], set[int]]:
    """Return the destinations that were begun, and those that were not finished: reads are taken in order."""
    begun = {margin.destination for margin in plan.margins[: state.zeroed + 1]}
    unfinished = {margin.destination for margin in plan.margins[state.zeroed :]}
    for number, read in enumerate(plan.reads()):
        numbers = _destinations(read)
        if number < state.taken:
            begun.update(numbers)
        if number >= state.taken or number in state.unfinished:
            unfinished.update(numbers)
    return begun, unfinished


def _destinations(read: Read) -> Sequence[int]:
    if isinstance(read, Scatter):
        return [segment.destination for segment in read.segments]
    return [read.destination]


def _name_tensor(error: LoaderError, plan: Plan) -> None:
    """Say which tensor a faulty offset belongs to."""
    if error.tensor is None and error.offset is not None:
        for transfer in plan.transfers:
            low, high = transfer.extent()
            if transfer.file == error.file and low <= error.offset < high:
                error.tensor = transfer.name
                return
