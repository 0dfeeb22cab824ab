"""What only a real GPU shows, in one table: ``python -m tests.gpu.measure``; see ``tests/gpu/run``.

Speeds are medians of rounds in which the alternatives take turns, with the destination's bytes for the size. They
stand beside the speed of a plain copy from pinned memory on the same machine, which nothing that is staged can beat.
``--dry`` runs the script itself on the CPU, with little data, to see that it works: it measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import dlpack_loader
from dlpack_loader import backend
from dlpack_loader.errors import LoaderError
from tests.files import drop_cache
from tests.gpu.material import every_dtype, wrong_of_cupy, wrong_of_order, wrong_of_torch

STAGING = 64 << 20
WIDTH = 60
PACKAGES = ("torch", "cuda-bindings", "cupy-cuda13x", "cupy-cuda12x", "kvikio-cu13", "kvikio-cu12", "fastsafetensors")

Load = Callable[[Path], Mapping[str, torch.Tensor]]


class Table:
    """Prints rows as they come, and remembers whether anything was wrong."""

    def __init__(self) -> None:
        self.failed = False

    def row(self, what: str, result: object) -> None:
        """Print a measurement."""
        print(f"{what:<{WIDTH}} {result}", flush=True)

    def check(self, what: str, wrong: list[str]) -> None:
        """Print whether bytes are right."""
        self.failed |= bool(wrong)
        self.row(what, "right" if not wrong else f"WRONG: {', '.join(wrong[:4])} ({len(wrong)} in all)")

    def attempt(self, what: str, work: Callable[[], list[str]]) -> None:
        """Check something that may need what is not installed, or may fail otherwise, which is a fault."""
        try:
            self.check(what, work())
        except ImportError as error:
            self.row(what, f"not run: {error.name or error} is not installed")
        except Exception as error:
            self.failed = True
            self.row(what, f"FAILED: {type(error).__name__}: {error}")


def main() -> int:
    """Run everything; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=170.0, help="no round begins after that")
    parser.add_argument("--folder", type=Path, help="where the files go: a local disk, not a tmpfs")
    parser.add_argument("--dry", action="store_true", help="on the CPU, to test the script")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    if not options.dry and not torch.cuda.is_available():
        print("torch finds no CUDA device: nothing to measure. --dry runs the script on the CPU.")
        return 2
    device = torch.device("cpu") if options.dry else torch.device("cuda", torch.cuda.current_device())
    table = Table()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        describe(table, device, folder)
        check_bytes(table, device, folder)
        size = room(options.gigabytes if not options.dry else 0.004, device, folder)
        path, nbytes = make_file(folder / "large.safetensors", size)
        check_memory(table, device, path, nbytes)
        compare(table, device, path, nbytes, end)
    print("something was WRONG" if table.failed else "every byte was right")
    return 1 if table.failed else 0


def describe(table: Table, device: torch.device, folder: Path) -> None:
    """Print the hardware and the software."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        table.row("GPU", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, {torch.cuda.device_count()} seen")
        table.row("built for", f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}")
    else:
        table.row("GPU", "none: a dry run, whose numbers mean nothing")
    table.row("host", f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}")
    table.row("file system", file_system(folder))
    table.row("dlpack_loader", dlpack_loader.__version__)
    for package in PACKAGES:
        try:
            table.row(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            table.row(package, "not installed")


def file_system(folder: Path) -> str:
    """The type of the file system that a folder is on."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, found, *_ = line.split()
        inside = folder.resolve().is_relative_to(point)
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind


def check_bytes(table: Table, device: torch.device, folder: Path) -> None:
    """Every dtype, and the order between a load and what else the GPU does."""
    path, contents = every_dtype(folder)
    table.attempt("every dtype through torch", lambda: wrong_of_torch(path, contents, device))
    small = {"staging_bytes": 12_288}
    table.attempt("every dtype through torch, 12 KiB staging", lambda: wrong_of_torch(path, contents, device, **small))
    if device.type == "cuda":
        table.attempt("every dtype through CuPy", lambda: wrong_of_cupy(path, contents, device))
    table.attempt("kernels pending before, readers right after", lambda: wrong_of_order(path, contents, device, 30))
    path.unlink()


def room(gigabytes: float, device: torch.device, folder: Path) -> int:
    """Bytes of the large file: what was asked for, or a part of the free disk, memory and GPU memory."""
    limits = [gigabytes * 1e9, shutil.disk_usage(folder).free / 2]
    limits.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 4)
    if device.type == "cuda":
        limits.append(torch.cuda.mem_get_info(device)[0] / 4)
    return int(min(limits))


def make_file(path: Path, size: int) -> tuple[Path, int]:
    """Write 64 tensors of BF16 with random bytes."""
    each = size // 64 // 2048
    data = {f"layers.{k}.w": torch.randint(0, 256, (each, 2048), dtype=torch.uint8) for k in range(64)}
    tensors = {name: raw.view(torch.bfloat16) for name, raw in data.items()}
    safetensors.torch.save_file(tensors, path)
    return path, sum(tensor.nbytes for tensor in tensors.values())


def check_memory(table: Table, device: torch.device, path: Path, nbytes: int) -> None:
    """Peak of GPU memory beyond the tensors, and of what we pinned."""
    if device.type != "cuda":
        return
    pinned = count_pinned()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    loaded = dlpack_loader.load_file(path, "pt", device, staging_bytes=STAGING)
    beyond = torch.cuda.max_memory_allocated(device) - before - nbytes
    table.row("GPU memory beyond the tensors, by torch's count", f"{beyond:,} bytes")
    table.check(
        f"pinned by us at the peak: {pinned():,} of {STAGING:,} bytes",
        [] if pinned() <= STAGING else ["over the budget"],
    )
    del loaded


def count_pinned() -> Callable[[], int]:
    """Count what the device runtime pins from now on; the function returns the peak."""
    now, peak, sizes = [0], [0], dict[int, int]()
    module = import_module(f"dlpack_loader.runtime.{'cuda' if torch.version.cuda else 'hip'}")
    found = module.CudaDevice if torch.version.cuda else module.HipDevice
    allocate, free = found.allocate_pinned, found.free_pinned

    def allocating(self: Any, nbytes: int) -> int:
        address = int(allocate(self, nbytes))
        sizes[address] = nbytes
        now[0] += nbytes
        peak[0] = max(peak[0], now[0])
        return address

    def freeing(self: Any, address: int) -> None:
        free(self, address)
        now[0] -= sizes.pop(address)

    found.allocate_pinned, found.free_pinned = allocating, freeing
    return lambda: peak[0]


def compare(table: Table, device: torch.device, path: Path, nbytes: int, end: float) -> None:
    """Speeds of the backends and of what others have, from the page cache and from the storage."""
    reference = safetensors.torch.load_file(path, device=str(device))
    there = {name: torch.zeros_like(tensor) for name, tensor in reference.items()}
    loads: dict[str, Load] = {}
    for name in ("auto", *(name for name in backend.NAMES if name not in ("auto", "mmap"))):
        loads[f"load_into, backend {name!r}"] = into(there, name)
    loads["load_file"] = lambda path: dlpack_loader.load_file(path, "pt", device)
    loads["safetensors.load_file"] = lambda path: safetensors.torch.load_file(path, device=str(device))
    loads["fastsafetensors, without GDS"] = lambda path: fast(path, device)
    for what in list(loads):
        try:
            loaded = loads[what](path)
        except ImportError as error:
            table.row(what, f"not run: {error.name or error} is not installed")
            del loads[what]
        except LoaderError as error:
            table.row(what, f"can't serve here: {error}")
            del loads[what]
        except Exception as error:  # of another library's
            table.row(what, f"fails here: {type(error).__name__}: {str(error)[:100]}")
            del loads[what]
            table.failed |= what.startswith("load_")
        else:
            wrong = [
                name for name, tensor in reference.items() if not torch.equal(as_bytes(loaded[name]), as_bytes(tensor))
            ]
            if what.startswith("load_"):
                table.check(what, wrong)
            del loaded
        for tensor in there.values():
            tensor.zero_()
    del reference
    copy = pinned_copy(device, nbytes)
    table.row("copy from pinned memory", f"{copy / 1e9:8.2f} GB/s")
    for kind, rounds in (("warm", 3), ("cold", 2)):
        speeds = interleave(loads, path, nbytes, device, rounds, end, cold=kind == "cold")
        theirs = speeds.get("safetensors.load_file")
        for what, speed in speeds.items():
            ratio = f", {speed / theirs:5.2f} x safetensors" if theirs else ""
            table.row(f"{kind}: {what}", f"{speed / 1e9:8.2f} GB/s, {speed / copy:5.2f} x pinned copy{ratio}")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes: a comparison of floats would pass over NaNs."""
    return tensor.view(torch.uint8)


def into(there: Mapping[str, torch.Tensor], name: str) -> Load:
    """A load into tensors that are there; says once how the bytes came."""
    said: list[str] = []

    def load(path: Path) -> Mapping[str, torch.Tensor]:
        report = dlpack_loader.load_into(path, there, backend=name)
        if not said:
            said.append(report.reason)
            print(f"  {name}: {report.backend}: {report.reason}")
        return there

    return load


def fast(path: Path, device: torch.device) -> Mapping[str, torch.Tensor]:
    """Load with fastsafetensors."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=True)
    try:
        loader.add_filenames({0: [str(path)]})
        buffer = loader.copy_files_to_device()
        try:
            return {name: buffer.get_tensor(name).clone() for name in loader.get_keys()}
        finally:
            buffer.close()
    finally:
        loader.close()


def pinned_copy(device: torch.device, nbytes: int) -> float:
    """Bytes a second of a plain copy from pinned memory."""
    source = torch.empty(min(nbytes, 256 << 20), dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        settle(device)
        times.append(time.perf_counter() - start)
    return source.nbytes / statistics.median(times[1:])


def interleave(
    loads: Mapping[str, Load], path: Path, nbytes: int, device: torch.device, rounds: int, end: float, *, cold: bool
) -> dict[str, float]:
    """Run each alternative once a round, in turn; return the medians in bytes a second."""
    times: dict[str, list[float]] = {what: [] for what in loads}
    for _ in range(rounds):
        for what, load in loads.items():
            if time.monotonic() > end:
                continue
            if cold:
                drop_cache(path)
            gc.collect()
            settle(device)
            start = time.perf_counter()
            load(path)
            settle(device)
            times[what].append(time.perf_counter() - start)
    return {what: nbytes / statistics.median(taken) for what, taken in times.items() if taken}


def settle(device: torch.device) -> None:
    """Wait for everything on the device: this is a benchmark, and the loader itself never does."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
