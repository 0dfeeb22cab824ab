"""Checkpoint files for the tests: made by safetensors itself, or byte by byte where it would refuse."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file


def state(seed: int = 0, layers: int = 2, width: int = 64) -> dict[str, torch.Tensor]:
    """A small model's tensors: several dtypes, a scalar, an empty one."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        for name, shape in (("q", (width, width)), ("mlp.up", (4 * width, width)), ("norm", (width,))):
            tensors[f"layers.{layer}.{name}"] = torch.randn(shape, generator=generator)
        tensors[f"layers.{layer}.half"] = torch.randn(width, 3, generator=generator).bfloat16()
    tensors["scale"] = torch.tensor(2.5)
    tensors["steps"] = torch.arange(7)
    tensors["mask"] = torch.tensor([True, False, True])
    tensors["none"] = torch.empty(0, 4)
    return tensors


def save(path: Path, tensors: Mapping[str, torch.Tensor] | None = None, **metadata: str) -> dict[str, torch.Tensor]:
    """Write tensors to a file and return them."""
    tensors = dict(state() if tensors is None else tensors)
    save_file(tensors, path, metadata=metadata or None)
    return tensors


def write_raw(path: Path, header: bytes | Mapping[str, Any], data: bytes) -> Path:
    """Write a file from a header and its data, valid or not."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def write_index(path: Path, weight_map: Mapping[str, str]) -> Path:
    """Write an index that names the shard of each tensor."""
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": dict(weight_map)}))
    return path


def drop_cache(path: Path) -> None:
    """Put a file's pages out of the page cache, where the system does that when asked."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def raw_bytes(tensor: torch.Tensor | np.ndarray[Any, Any]) -> bytes:
    """The bytes of a tensor in C order."""
    if isinstance(tensor, torch.Tensor):
        return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return np.ascontiguousarray(tensor).tobytes()
