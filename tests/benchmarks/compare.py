"""Taking turns: alternatives that do the same work in one run, and the line that says how they compare."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dlpack_loader.runtime import host

Run = Callable[[], object]


def row(what: str, ratio: float, bound: str) -> None:
    """Print one line of the table."""
    print(f"{what:<58} {ratio:>12.2f}  {bound:>7}", flush=True)


def interleave(runs: Mapping[str, Run], rounds: int, before: Run = lambda: None) -> dict[str, tuple[float, float]]:
    """Run each alternative once a round, in turn; return the medians of wall and of CPU seconds."""
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            before()
            gc.collect()
            cpu_start, start = time.process_time(), time.perf_counter()
            run()
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - cpu_start)
    return {name: (statistics.median(wall[name]), statistics.median(cpu[name])) for name in runs}


def drop_cache(path: Path) -> None:
    """Put the file's pages out of the page cache, and stop where the file system does not do so when asked."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if host.is_resident(fd, path.stat().st_size // 2):
        sys.exit(f"{path} stays in the page cache, so nothing cold can be measured there: choose another --folder")
    os.close(fd)
