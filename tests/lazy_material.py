"""What the tests of lazy tensors share: tensors that are compared bit by bit, and programs that run by themselves."""

from __future__ import annotations

import subprocess
import sys

import torch

from tests.files import raw_bytes

__all__ = ["MIB", "run", "same"]

MIB = 1 << 20


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and raw_bytes(one) == raw_bytes(other)


def run(program: str, *arguments: object) -> str:
    """Run a program in a process of its own; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-X", "faulthandler", "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-2000:]
    return done.stdout
