"""Filling destinations that were matched: one plan and one backend for the host and for each device, in turn."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from dlpack_loader.backend import Backend, check_host, device_backend, device_bounds, direct_backend, host_backend
from dlpack_loader.bounds import Bounds
from dlpack_loader.errors import LoaderError, UnsupportedError
from dlpack_loader.framework import wrote
from dlpack_loader.matching import Match
from dlpack_loader.plan import Plan, is_staged
from dlpack_loader.progress import Progress
from dlpack_loader.reads import Margin, Transfer
from dlpack_loader.runtime import host
from dlpack_loader.runtime.files import Files
from dlpack_loader.stream import OwnedStream, Streams
from dlpack_loader.transfer import LoadReport, Tally, run

__all__ = ["Access", "fill", "plan_of"]

_SHARE = 16  # of the memory available, one part for staging


@dataclass(frozen=True, slots=True)
class Access:
    """How the files of an open checkpoint are read."""

    files: Files
    bounds: Bounds
    progress: Progress | None
    direct_io: bool | None
    backend: str = "auto"
    require_direct: bool = False
    scratch: host.ScratchPool | None = None
    """Keeps staging for the loads that follow; for those of one tensor each."""


class _Job(NamedTuple):
    """What one backend does of a load."""

    plan: Plan
    backend: Backend
    why: str = ""
    """Why this backend, where it does not say so itself."""


def plan_of(found: Match, bounds: Bounds) -> Plan:
    """Return the plan of all transfers together; where some are on a device, within what its slots allow."""
    if not all(memory.on_host for memory in found.memories):
        bounds = device_bounds(bounds)
    return Plan.make(found.transfers, found.names, bounds, chain.from_iterable(found.margins.values()))


def fill(access: Access, found: Match, streams: Streams, begin: float) -> LoadReport:
    """Fill every destination; on return all bytes are there for any reader.

    The host's destinations come first, then each device's in the order of their numbers, all within one budget. Which
    backend does what is decided, and what can't be done is refused, before the first of them reads. The streams are
    closed on return, after an error too, and only then is the memory of the destinations let go.
    """
    jobs: list[_Job] = []
    tally = Tally()
    try:
        try:
            for device, transfers in _by_device(found):
                jobs.extend(_jobs(access, found, device, transfers, streams))
            if found.margins:
                _check_files(access, found)
            for job in jobs:
                zero = partial(_zero, found=found, streams=streams)
                run(job.plan, job.backend, access.progress, zero=zero, tally=tally)
            streams.publish()
        finally:
            streams.close()
            if found.objects:
                wrote(found.objects)  # after an error too: some of them were
    except LoaderError as error:
        if tally.finished or tally.dirty:
            _explain(error, found, jobs, tally, begin)
        raise
    return _report(found, jobs, begin)


def _report(found: Match, jobs: Sequence[_Job], begin: float) -> LoadReport:
    """Report a load that went well."""
    direct, compat, staged = (
        sum(getattr(job.backend, f"{kind}_bytes") for job in jobs) for kind in ("direct", "compat", "staged")
    )
    infos = [job.backend.info() for job in jobs]
    reasons = [reason for info, job in zip(infos, jobs, strict=True) for reason in (info.reason, job.why) if reason]
    return LoadReport(
        filled=tuple(dict.fromkeys(found.names)),
        unfilled=tuple(found.unfilled),
        unexpected=tuple(found.unexpected),
        declined=tuple(found.declined),
        aliases=found.aliases,
        bytes_read=direct + compat + staged,
        bytes_written=sum(transfer.written for transfer in found.transfers),
        bytes_zeroed=sum(margin.nbytes for job in jobs for margin in job.plan.margins),
        direct_bytes=direct,
        compat_bytes=compat,
        staged_bytes=staged,
        seconds=time.perf_counter() - begin,
        backend="+".join(dict.fromkeys(info.name for info in infos)),
        reason="; ".join(dict.fromkeys(reasons)),
    )


def _explain(error: LoaderError, found: Match, jobs: Sequence[_Job], tally: Tally, begin: float) -> None:
    """Give an error the report of what was done until then, so that the load can be resumed."""
    dirty, finished = set(tally.dirty), set(tally.finished)
    if error is not tally.cause:  # the wait for a device failed, and with it all that is known of its memory
        dirty |= {number for number in finished if not found.memories[number].on_host}
    finished -= dirty
    bare = {number for number, memory in enumerate(found.memories) if not memory.nbytes and number not in found.margins}
    names = found.names
    begun = {names[number] for number in finished - bare}
    finished |= bare  # nothing is written to these
    # A name of which one destination is new and another one old is a mixture too.
    failed = dict.fromkeys(
        name for number, name in enumerate(names) if number in dirty or (number not in finished and name in begun)
    )
    pending = dict.fromkeys(name for number, name in enumerate(names) if number not in finished and name not in failed)
    whole = {name: owner for name, owner in found.aliases.items() if owner not in failed and owner not in pending}
    error.dirty = tuple(failed)
    error.report = replace(
        _report(found, jobs, begin),
        filled=tuple(name for name in dict.fromkeys(names) if name not in failed and name not in pending),
        failed=tuple(failed),
        unfilled=(*found.unfilled, *pending, *(name for name in found.aliases if name not in whole)),
        aliases=whole,
        bytes_written=sum(each.written for each in found.transfers if each.destination in finished),
        bytes_zeroed=sum(
            margin.nbytes for job in jobs for margin in job.plan.margins if margin.destination in finished
        ),
    )


def _jobs(
    access: Access, found: Match, device: tuple[int, int] | None, transfers: list[Transfer], streams: Streams
) -> Iterator[_Job]:
    """Decide which backends fill the destinations on one device, or, for None, on the host."""
    files, memories, bounds = access.files, found.memories, access.bounds
    if device is None:
        if transfers:
            check_host(access.backend)
        backend = host_backend(files, memories, bounds, direct_io=access.direct_io, scratch=access.scratch)
        yield _Job(_plan(transfers, found, bounds), backend)
        return
    stream = streams.of(device)
    bounds = _affordable(bounds, stream)
    direct, why = direct_backend(
        access.backend,
        files,
        memories,
        bounds,
        stream,
        device=device,
        paths=dict.fromkeys(transfer.file for transfer in transfers),
        require_direct=access.require_direct,
    )
    staged = transfers if direct is None else [transfer for transfer in transfers if is_staged(transfer, bounds)]
    if direct is not None:
        if staged and access.require_direct:
            raise UnsupportedError(
                "strides or a cast go through pinned host memory, and require_direct asks for reads without",
                tensor=staged[0].name,
                file=staged[0].file,
                hint="Pass contiguous destinations of the checkpoint's dtype, or leave out require_direct",
            )
        contiguous = [transfer for transfer in transfers if not is_staged(transfer, bounds)]
        if contiguous:
            yield _Job(_plan(contiguous, found, bounds), direct)
        why = f"{len(staged)} tensor(s) with strides or a cast can't be read directly"
    elif why:
        why = f"not GPU-direct: {why}"
    if staged:
        bounds = device_bounds(bounds)
        backend = device_backend(files, memories, bounds, stream, direct_io=access.direct_io)
        yield _Job(_plan(staged, found, bounds), backend, why)


def _plan(transfers: Sequence[Transfer], found: Match, bounds: Bounds) -> Plan:
    """Make the plan of some of the transfers, with what is to be zeroed beside them."""
    margins = chain.from_iterable(found.margins.get(transfer.destination, ()) for transfer in transfers)
    return Plan.make(transfers, found.names, bounds, margins)


def _check_files(access: Access, found: Match) -> None:
    """Refuse a file that was replaced or rewritten, as its first read would, but before anything is zeroed."""
    for path in dict.fromkeys(transfer.file for transfer in found.transfers if transfer.written):
        with access.files.use(path):
            pass


def _zero(margin: Margin, found: Match, streams: Streams) -> None:
    """Zero a margin on the host, or enqueue that on the load's own stream of its device."""
    memory = found.memories[margin.destination]
    address = memory.pointer + margin.at
    if memory.on_host:
        from dlpack_loader.runtime.arrays import zero_strided  # NumPy is imported when it is needed

        zero_strided(address, margin.axes, margin.run)
        return
    stream = streams.of(memory.device)
    with stream.device.current():
        _zero_rows(stream, address, margin.axes, margin.run)


def _zero_rows(stream: OwnedStream, address: int, axes: tuple[tuple[int, int], ...], run: int) -> None:
    if len(axes) < 2:
        rows, pitch = axes[0] if axes else (1, run)
        stream.device.zero_rows(address, pitch, run, rows, stream.handle)
        return
    steps, distance = axes[0]
    for i in range(steps):
        _zero_rows(stream, address + distance * i, axes[1:], run)


def _affordable(bounds: Bounds, stream: OwnedStream) -> Bounds:
    """Bound the staging by what is available, where a device's memory is the host's and its tensors take of it too."""
    room = host.available_memory() if stream.device.unified else None
    if room is not None and room // _SHARE < bounds.staging_bytes:
        bounds = replace(bounds, staging_bytes=max(room // _SHARE, 1))
    if getattr(stream.device, "rounds_pinned", False):  # slots of a power of two bytes are not rounded up
        slot = device_bounds(bounds).scratch_bytes
        bounds = replace(bounds, staging_bytes=bounds.staging_bytes * (1 << slot.bit_length() - 1) // slot)
    return bounds


def _by_device(found: Match) -> list[tuple[tuple[int, int] | None, list[Transfer]]]:
    """Group the transfers by the device of their destination; None is the host."""
    groups: dict[tuple[int, int] | None, list[Transfer]] = {}
    for transfer in found.transfers:
        memory = found.memories[transfer.destination]
        groups.setdefault(None if memory.on_host else memory.device, []).append(transfer)
    if not groups:
        groups[None] = []
    return sorted(groups.items(), key=lambda group: group[0] or (0, 0))
