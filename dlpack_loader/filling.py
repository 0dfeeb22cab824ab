"""Filling destinations that were matched: one plan and one backend for the host and for each device, in turn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from dlpack_loader.backend import Backend, check_host, device_backend, device_bounds, direct_backend, host_backend
from dlpack_loader.bounds import Bounds
from dlpack_loader.errors import UnsupportedError
from dlpack_loader.framework import wrote
from dlpack_loader.matching import Match
from dlpack_loader.plan import Plan, is_staged
from dlpack_loader.progress import Progress
from dlpack_loader.reads import Transfer
from dlpack_loader.runtime import host
from dlpack_loader.runtime.files import Files
from dlpack_loader.stream import OwnedStream, Streams
from dlpack_loader.transfer import LoadReport, run

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
    return Plan.make(found.transfers, found.names, bounds)


def fill(access: Access, found: Match, streams: Streams, begin: float) -> LoadReport:
    """Fill every destination; on return all bytes are there for any reader.

    The host's destinations come first, then each device's in the order of their numbers, all within one budget. Which
    backend does what is decided, and what can't be done is refused, before the first of them reads. The streams are
    closed on return, after an error too, and only then is the memory of the destinations let go.
    """
    try:
        jobs: list[_Job] = []
        for device, transfers in _by_device(found):
            jobs.extend(_jobs(access, found, device, transfers, streams))
        for job in jobs:
            run(job.plan, job.backend, access.progress)
        streams.publish()
    finally:
        streams.close()
        wrote(found.objects)  # after an error too: some of them were
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
        direct_bytes=direct,
        compat_bytes=compat,
        staged_bytes=staged,
        seconds=time.perf_counter() - begin,
        backend="+".join(dict.fromkeys(info.name for info in infos)),
        reason="; ".join(dict.fromkeys(reasons)),
    )


def _jobs(
    access: Access, found: Match, device: tuple[int, int] | None, transfers: list[Transfer], streams: Streams
) -> Iterator[_Job]:
    """Decide which backends fill the destinations on one device, or, for None, on the host."""
    files, memories, names, bounds = access.files, found.memories, found.names, access.bounds
    if device is None:
        if transfers:
            check_host(access.backend)
        backend = host_backend(files, memories, bounds, direct_io=access.direct_io)
        yield _Job(Plan.make(transfers, names, bounds), backend)
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
            yield _Job(Plan.make(contiguous, names, bounds), direct)
        why = f"{len(staged)} tensor(s) with strides or a cast can't be read directly"
    elif why:
        why = f"not GPU-direct: {why}"
    if staged:
        bounds = device_bounds(bounds)
        backend = device_backend(files, memories, bounds, stream, direct_io=access.direct_io)
        yield _Job(Plan.make(staged, names, bounds), backend, why)


def _affordable(bounds: Bounds, stream: OwnedStream) -> Bounds:
    """Bound the staging by what is available, where a device's memory is the host's and its tensors take of it too."""
    room = host.available_memory() if stream.device.unified else None
    if room is None or room // _SHARE >= bounds.staging_bytes:
        return bounds
    return replace(bounds, staging_bytes=max(room // _SHARE, 1))


def _by_device(found: Match) -> list[tuple[tuple[int, int] | None, list[Transfer]]]:
    """Group the transfers by the device of their destination; None is the host."""
    groups: dict[tuple[int, int] | None, list[Transfer]] = {}
    for transfer in found.transfers:
        memory = found.memories[transfer.destination]
        groups.setdefault(None if memory.on_host else memory.device, []).append(transfer)
    if not groups:
        groups[None] = []
    return sorted(groups.items(), key=lambda group: group[0] or (0, 0))
