"""What this machine can load, how, and what stands in the way: facts with their meaning and the remedy.

Nothing that may crash is imported here: libraries and drivers are tried in child processes, all of them at the same
time, so that a crash, an abort or an import error of one is a finding like any other.

The files: findings (pure data), children (trying something elsewhere), probes (what is tried there), libraries,
devices, system and storage (facts judged).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from dlpack_loader.doctor.children import DEFAULT_TIMEOUT, Outcome, State, attempt
from dlpack_loader.doctor.devices import devices_of, examine_cuda, examine_rocm
from dlpack_loader.doctor.findings import Device, Examination, Finding, Level
from dlpack_loader.doctor.libraries import examine_packages, find_libraries
from dlpack_loader.doctor.storage import examine_storage
from dlpack_loader.doctor.system import examine_system, usable_memory

__all__ = ["Device", "Examination", "Finding", "Level", "Outcome", "State", "attempt", "examine", "usable_memory"]

_AT_A_TIME = 4


def examine(path: str | os.PathLike[str] | None = None, *, timeout: float = DEFAULT_TIMEOUT) -> Examination:
    """Find out what this machine can load, and how.

    Parameters
    ----------
    path
        A checkpoint, or the folder where one is to be; by default the current folder. One that is named and can't be
        loaded makes loading impossible; without one, only the place is examined.
    timeout
        Seconds for each library that is tried in a process of its own.

    Examples
    --------
    >>> examination = examine(".")
    >>> examination.finding("system.io_uring").value
    'not used'
    >>> remedies = [finding.remedy for finding in examination.findings if finding.level is Level.PROBLEM]
    """
    where = os.fspath(path) if path is not None else os.getcwd()
    libraries = find_libraries()
    probes = ["cuda", "hip", *(name for name, library in libraries.items() if library.installed)]
    probes.sort(key=lambda name: name not in ("torch", "jax"))  # what takes longest begins first
    outcomes = dict(zip(probes, _attempt_all(probes, timeout), strict=True))
    devices = devices_of("cuda", outcomes["cuda"]) + devices_of("hip", outcomes["hip"])
    return Examination(
        where,
        (
            *examine_system(),
            *examine_storage(where, named=path is not None),
            *examine_packages(outcomes, libraries, devices),
            *examine_cuda(outcomes, libraries),
            *examine_rocm(outcomes, libraries),
        ),
        devices,
    )


def _attempt_all(probes: Sequence[str], timeout: float) -> list[Outcome]:
    """Try several things at the same time; an interrupt ends all of them."""
    stop = threading.Event()
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        try:
            return list(pool.map(lambda name: attempt(name, timeout=timeout, stop=stop), probes))
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
