"""The host: processors, memory and its limits, pages, files. Read from the operating system; nothing is changed."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from dlpack_loader.doctor.findings import Finding, Level
from dlpack_loader.reader import DEFAULT_STAGING_BYTES, make_bounds
from dlpack_loader.runtime import host

__all__ = ["examine_system", "memory_limit", "usable_memory"]

_FEW_FILES = 256
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_GIB = 1 << 30


def examine_system() -> Iterator[Finding]:
    """Look at the machine and at what this process may use of it."""
    bounds = make_bounds(DEFAULT_STAGING_BYTES, None)
    yield Finding(
        "system.platform",
        Level.OK if host.LINUX else Level.NOTE,
        f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}",
        "reads are preadv by threads, with O_DIRECT where that helps"
        if host.LINUX
        else "reads take the portable path: a seek and a read a thread",
        None if host.LINUX else "64-bit Linux is what is measured and fastest",
    )
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding(
        "system.cpus",
        Level.OK,
        f"{cpus} usable of {os.cpu_count()}",
        f"{bounds.threads} readers at a time by default",
    )
    yield Finding(
        "system.io_uring",
        Level.OK,
        "not used",
        "a sandbox that forbids io_uring costs nothing here",
    )
    yield from _memory()
    yield _page_size()
    yield from _huge_pages()
    yield from _limits()


def memory_limit() -> tuple[int, int] | None:
    """Return the limit of this process's control group on memory and what is used of it, or None where none is set."""
    found: tuple[int, int] | None = None
    for folder, limit, used in _control_groups():
        nbytes = _number(folder / limit)
        # Version 1 says "none" by a number near 2**63.
        if nbytes is not None and nbytes < 1 << 60 and (found is None or nbytes < found[0]):
            found = nbytes, _number(folder / used) or 0
    return found


def usable_memory() -> int | None:
    """Return the bytes that can be allocated without swapping, within the control group's limit."""
    available, limit = host.available_memory(), memory_limit()
    if limit is None:
        return available
    left = max(0, limit[0] - limit[1])
    return left if available is None else min(left, available)


def _control_groups() -> Iterator[tuple[Path, str, str]]:
    """Name the folders of this process's control group and of those above it, of either version."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, files = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, files = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / path.lstrip("/")
        while True:
            yield folder, *files
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _memory() -> Iterator[Finding]:
    available, limit = host.available_memory(), memory_limit()
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        total = 0
    scarce = available is not None and available < _GIB
    yield Finding(
        "memory.host",
        Level.NOTE if scarce else Level.OK,
        ("not told" if available is None else f"{_gib(available)} available") + (f" of {_gib(total)}" if total else ""),
        f"beyond the destinations a load takes {DEFAULT_STAGING_BYTES >> 20} MiB (staging_bytes)",
        "Pass a smaller staging_bytes, and fill existing tensors instead of making new ones" if scarce else None,
    )
    if limit is None:
        yield Finding("memory.cgroup", Level.OK, "no limit", "only the machine's memory bounds a load")
        return
    most, used = limit
    tight = bool(total) and most < total
    yield Finding(
        "memory.cgroup",
        Level.NOTE if tight else Level.OK,
        f"{_gib(most)}, {_gib(used)} in use",
        "the control group (container) ends processes beyond it; the page cache of files read counts too, and is given "
        "back first",
        "Keep the destinations below it, or raise the container's memory limit" if tight else None,
    )


def _page_size() -> Finding:
    size = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else host.ALIGNMENT
    return Finding(
        "memory.page_size",
        Level.OK,
        f"{size:,} bytes",
        "direct reads are aligned to 4,096 bytes and staging to whole pages"
        if size == host.ALIGNMENT
        else "staging is aligned to it; direct reads are aligned to 4,096 bytes",
    )


def _huge_pages() -> Iterator[Finding]:
    try:
        chosen = _THP.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return
    meanings = {
        "always": "large new tensors in host memory get huge pages, which makes their first touch cheaper",
        "madvise": "programs that ask get huge pages: NumPy does for large arrays, torch with THP_MEM_ALLOC_ENABLE=1",
        "never": "the first touch of new tensors in host memory takes a page fault for every page",
    }
    yield Finding(
        "memory.huge_pages",
        Level.NOTE if chosen == "never" else Level.OK,
        f"transparent huge pages: {chosen or 'not told'}",
        meanings.get(chosen, "what this setting means is not known here"),
        f"echo madvise | sudo tee {_THP}, or reuse tensors that exist" if chosen == "never" else None,
    )


def _limits() -> Iterator[Finding]:
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _FEW_FILES
    yield Finding(
        "limits.open_files",
        Level.NOTE if few else Level.OK,
        f"{_limit(soft)} (ulimit -n), at most {_limit(hard)}",
        "a load has two descriptors a reader open and eight besides, however many files the checkpoint has",
        f"ulimit -n {_FEW_FILES if hard == resource.RLIM_INFINITY else min(4096, hard)}" if few else None,
    )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Finding(
        "limits.locked_memory",
        Level.OK,
        f"{_limit(locked, 'bytes')} (ulimit -l)",
        "the drivers of GPUs pin memory themselves; only RDMA to network storage is bound by it",
    )


def _limit(value: int, unit: str = "") -> str:
    import resource

    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,} {unit}".strip()


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:,.1f} GiB"
