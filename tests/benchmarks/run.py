"""Ratios against safetensors and against bare reads: ``python -m tests.benchmarks.run [--rounds N] [--gigabytes G]``.

Every row compares alternatives that took turns in one run, by the median of the rounds; absolute times say more about
the machine than about the code, so none is printed. Destinations exist and were touched before, as when weights are
refreshed in place.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file

import dlpack_loader
from tests.benchmarks.compare import Run, drop_cache, interleave, row
from tests.benchmarks.lazy import compare_lazy

THREADS = min(8, 2 * (os.cpu_count() or 1))
CHUNK = 4 << 20


def main() -> None:
    """Make the files, run every comparison, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, help="where the files go: a local disk, not a tmpfs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(f"{'what':<58} {'ours / other':>12}  {'bound':>7}")
        compare_headers(Path(folder), options.rounds)
        compare_small(Path(folder), options.rounds)
        compare_large(Path(folder), options.rounds, int(options.gigabytes * 1e9))
        compare_lazy(Path(folder), options.rounds, int(options.gigabytes * 1e9))
        compare_import(options.rounds)


def compare_headers(folder: Path, rounds: int) -> None:
    """Open a header of 100,000 tensors and list its names."""
    path = folder / "header.safetensors"
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for k in range(100_000):
        name = f"model.layers.{k // 1000}.mlp.experts.{k % 1000}.gate_proj.weight"
        header[name] = {"dtype": "BF16", "shape": [4, 2], "data_offsets": [16 * k, 16 * k + 16]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16 * 100_000))
    times = interleave(
        {
            "ours": lambda: dlpack_loader.safe_open(path, "np").keys(),
            "theirs": lambda: safetensors.safe_open(path, "np").keys(),
        },
        rounds,
    )
    row("open and keys() of 100,000 tensors: time", times["ours"][0] / times["theirs"][0], "<= 1.10")
    path.unlink()


def compare_small(folder: Path, rounds: int) -> None:
    """Fill 20,000 tensors of 1 KiB."""
    path = folder / "small.safetensors"
    save_file({f"layers.{k // 200}.experts.{k % 200}.scale": torch.randn(256) for k in range(20_000)}, path)
    filled = {name: torch.ones(256) for name in dlpack_loader.safe_open(path).keys()}  # noqa: SIM118
    times = interleave(
        {
            "ours": lambda: dlpack_loader.load_into(path, filled),
            "mmap": lambda: copy_loop(path, filled, "mmap"),
            "pread": lambda: copy_loop(path, filled, "pread"),
        },
        2 * rounds,
    )
    best = min(times["mmap"][0], times["pread"][0])
    row("fill 20,000 tensors of 1 KiB: time / safetensors' best loop", times["ours"][0] / best, "<= 0.70")
    refresher = dlpack_loader.Refresher(filled)
    refresher.load(path)
    again = interleave(
        {"load_into": lambda: dlpack_loader.load_into(path, filled), "refresher": lambda: refresher.load(path)},
        2 * rounds,
    )
    row("refresh them: time / load_into", again["refresher"][0] / again["load_into"][0], "<= 0.80")
    path.unlink()


def compare_large(folder: Path, rounds: int, nbytes: int) -> None:
    """Fill a few hundred tensors of megabytes, warm and cold."""
    path = folder / "large.safetensors"
    save_file(model(nbytes), path)
    with dlpack_loader.safe_open(path) as reader:
        filled = {name: torch.ones(reader.entry(name).shape, dtype=torch.bfloat16) for name in reader}
        ranges = [
            (reader.entry(name).offset + start, filled[name].data_ptr() + start, min(CHUNK, entry_bytes - start))
            for name in reader.offset_keys()
            for entry_bytes in [reader.entry(name).nbytes]
            for start in range(0, entry_bytes, CHUNK)
        ]
    runs: dict[str, Run] = {
        "ours": lambda: dlpack_loader.load_into(path, filled),
        "bare": lambda: bare_loop(path, ranges),
        "theirs": lambda: copy_loop(path, filled, "mmap"),
    }
    for name, run in runs.items():  # once for each, so that nobody pays for first touches
        run()
        check(path, filled, name)
    warm = interleave(runs, rounds)
    row("fill warm: throughput / bare preadv loop", warm["bare"][0] / warm["ours"][0], ">= 0.90")
    row("fill warm: throughput / safetensors", warm["theirs"][0] / warm["ours"][0], ">= 1.00")
    cold = interleave(runs, rounds, before=lambda: drop_cache(path))
    row("fill cold: throughput / bare preadv loop", cold["bare"][0] / cold["ours"][0], ">= 0.90")
    row("fill cold: throughput / safetensors", cold["theirs"][0] / cold["ours"][0], ">= 1.40")
    row("fill cold: CPU seconds / bare preadv loop", cold["ours"][1] / cold["bare"][1], "<= 1.30")
    row("fill cold: CPU seconds / safetensors", cold["ours"][1] / cold["theirs"][1], "")
    for label, before in (("warm", lambda: None), ("cold", lambda: drop_cache(path))):
        before()
        beyond = peak(path)
        row(f"fill {label}: peak RSS beyond destinations / (staging + 16 MiB)", beyond / ((64 + 16) << 20), "<= 1.00")


def compare_import(rounds: int) -> None:
    """Import the package in a fresh interpreter, less what an empty interpreter takes."""

    def start(code: str) -> Run:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True)

    times = interleave({"ours": start("import dlpack_loader"), "empty": start("")}, 2 * rounds)
    row("import dlpack_loader: time / 100 ms", (times["ours"][0] - times["empty"][0]) / 0.1, "<= 1.00")


def model(nbytes: int) -> dict[str, torch.Tensor]:
    """Make the tensors of a small decoder, of about so many bytes."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (1536, 1536), "k": (256, 1536), "o": (1536, 1536), "up": (4096, 1536), "down": (1536, 4096)}
    tensors: dict[str, torch.Tensor] = {}
    total = 0
    for layer in itertools.count():
        if total >= nbytes:
            return tensors
        for name, shape in {**shapes, "norm": (1536,)}.items():
            tensor = torch.randn(shape, generator=generator).bfloat16()
            tensors[f"model.layers.{layer}.{name}.weight"] = tensor
            total += tensor.nbytes
    raise AssertionError


def copy_loop(path: Path, filled: Mapping[str, torch.Tensor], backend: str) -> None:
    """Fill tensors as one does with safetensors."""
    with safetensors.safe_open(path, "pt", backend=backend) as file:
        for name in file.keys():  # noqa: SIM118
            filled[name].copy_(file.get_tensor(name))


def bare_loop(path: Path, ranges: list[tuple[int, int, int]]) -> None:
    """Read the same ranges by as many threads, with nothing around the system call."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.pread.restype = ctypes.c_ssize_t
    libc.pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
    numbers = itertools.count()
    fd = os.open(path, os.O_RDONLY)

    def work() -> None:
        while (k := next(numbers)) < len(ranges):
            offset, address, size = ranges[k]
            assert libc.pread(fd, address, size, offset) == size

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)


def check(path: Path, filled: Mapping[str, torch.Tensor], name: str) -> None:
    """Stop if an alternative did not do the work, and undo it for the next."""
    with safetensors.safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118
            assert torch.equal(filled[key], file.get_tensor(key)), (name, key)
            filled[key].fill_(1)


PEAK = """
import sys, torch, dlpack_loader
path = sys.argv[1]
with dlpack_loader.safe_open(path) as reader:
    filled = {name: torch.ones(reader.entry(name).shape, dtype=torch.bfloat16) for name in reader}
    first = next(iter(filled))
    reader.read_into(first, filled[first][:1], slice(0, 1))
def status(key):
    return int(open("/proc/self/status").read().split(key)[1].split()[0]) * 1024
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS:")
dlpack_loader.load_into(path, filled)
print(status("VmHWM:") - before)
"""


def peak(path: Path) -> int:
    """Return the bytes by which a load raises the peak of a process that holds the destinations."""
    done = subprocess.run([sys.executable, "-c", PEAK, path], check=True, capture_output=True, text=True)
    return int(done.stdout)


if __name__ == "__main__":
    main()
