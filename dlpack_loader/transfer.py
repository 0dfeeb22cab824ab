"""Running a plan: a bounded number of reads in flight, errors that drain before they are raised, and the report.

The calling thread reads too, so a plan of one read starts no thread. Threads live for one transfer only; a process
that forks between transfers forks none of them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dlpack_loader.backend import Backend
from dlpack_loader.errors import LoaderError
from dlpack_loader.plan import Plan
from dlpack_loader.progress import Progress, reporting
from dlpack_loader.reads import Read, Scatter

__all__ = ["LoadReport", "Pending", "run"]


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
    """Destinations that are the same memory as another one, which was filled in their stead."""
    bytes_read: int
    """Bytes asked of the storage."""
    bytes_written: int
    """Bytes written into destinations."""
    direct_bytes: int
    """Of the bytes read: straight into destinations."""
    staged_bytes: int
    """Of the bytes read: through host memory of ours."""
    seconds: float
    """From the plan to the last byte."""
    backend: str
    """The backend used."""
    reason: str
    """Why that one, and how the bytes came."""

    def __str__(self) -> str:
        rate = self.bytes_written / self.seconds / 1e9 if self.seconds else 0.0
        lines = [
            f"{len(self.filled)} filled, {self.bytes_written:,} bytes in {self.seconds:.3f} s ({rate:.2f} GB/s)",
            f"  read      {self.bytes_read:,} bytes: {self.direct_bytes:,} direct, {self.staged_bytes:,} staged",
            f"  backend   {self.backend}: {self.reason}",
        ]
        for label, names in (
            ("unfilled", self.unfilled),
            ("unexpected", self.unexpected),
            ("declined", self.declined),
            ("aliases", tuple(f"{name} = {other}" for name, other in self.aliases.items())),
        ):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                lines.append(f"  {label:<9} {', '.join(names[:5])}{more}")
        return "\n".join(lines)


class Pending:
    """A transfer under way. It holds every reference that the transfer needs; forgetting it is fine.

    Destinations hold a mixture of old and new bytes until ``wait`` returns.
    """

    def __init__(self, work: Callable[[], LoadReport]) -> None:
        self._work: Callable[[], LoadReport] | None = work
        self._report: LoadReport | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dlpack-loader-transfer")
        self._thread.start()

    def _run(self) -> None:
        work, self._work = self._work, None
        try:
            assert work is not None
            self._report = work()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Whether the transfer has ended, well or not."""
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
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the transfer is still under way after {timeout} s")
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report


def run(plan: Plan, backend: Backend, progress: Progress | None = None) -> None:
    """Perform every read of a plan.

    On an error no further read begins, those under way are waited for, and the error names the destinations that may
    be partly written. An exception of ``progress``, or an interrupt, ends the transfer in the same way.
    """
    reads = plan.reads()
    first = list(itertools.islice(reads, plan.bounds.threads))
    state = _State(itertools.chain(first, reads))
    helpers: list[threading.Thread] = []
    try:
        with reporting(progress, lambda: plan.totals.bytes_read) as report:
            for _ in first[1:]:
                helper = threading.Thread(target=_help, args=(state, backend), name="dlpack-loader-read")
                helper.start()
                helpers.append(helper)
            _work(state, backend, report)
            for helper in helpers:
                helper.join()
            if report is not None and not state.failed:
                report(state.done)
    except BaseException as error:
        state.fail(None, error)
    finally:
        state.stopped = True
        for helper in helpers:
            helper.join()
    if not state.failed:
        return
    cause = state.failed[0]
    dirty = _dirty(plan, state)
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
    taken: int = 0
    done: int = 0
    stopped: bool = False
    failed: list[BaseException] = field(default_factory=list)
    failed_reads: list[int | None] = field(default_factory=list)
    """Numbers of the failed reads; None where an interrupt or a callback ended the work between two reads."""

    def take(self) -> tuple[int, Read] | None:
        with self.lock:
            if self.stopped:
                return None
            read = next(self.reads, None)
            if read is None:
                return None
            number = self.taken
            self.taken += 1
            return number, read

    def finish(self, nbytes: int) -> int:
        with self.lock:
            self.done += nbytes
            return self.done

    def fail(self, number: int | None, error: BaseException) -> None:
        with self.lock:
            self.stopped = True
            self.failed.append(error)
            self.failed_reads.append(number)


def _work(state: _State, backend: Backend, report: Callable[[int], object] | None) -> None:
    with backend.worker() as worker:
        while (item := state.take()) is not None:
            number, read = item
            try:
                worker.read(read)
            except BaseException as error:
                state.fail(number, error)
                return
            done = state.finish(read.nbytes)
            if report is not None:
                report(done)


def _help(state: _State, backend: Backend) -> None:
    try:
        _work(state, backend, None)
    except BaseException as error:
        state.fail(None, error)


def _dirty(plan: Plan, state: _State) -> tuple[str, ...]:
    """Name the destinations that were begun and not finished: reads are taken in the plan's order."""
    begun: set[int] = set()
    unfinished: set[int] = set()
    failed = set(state.failed_reads)
    for number, read in enumerate(plan.reads()):
        numbers = _destinations(read)
        if number < state.taken:
            begun.update(numbers)
        if number >= state.taken or number in failed or None in failed:
            unfinished.update(numbers)
    return tuple(plan.names[number] for number in sorted(begun & unfinished))


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
