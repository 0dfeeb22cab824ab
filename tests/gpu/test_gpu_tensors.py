"""Tensors on a real GPU: every dtype, every way of making and filling them, and nothing on another device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dlpack_loader import load_file, load_into, safe_open
from dlpack_loader.errors import OptionError, StorageError
from tests.files import drop_cache, raw_bytes, save, state
from tests.gpu.material import bits_of, resolver, wrong_of_cupy, wrong_of_torch

pytestmark = pytest.mark.gpu
Checkpoint = tuple[Path, dict[str, bytes]]


@pytest.mark.parametrize("staging", [12_288, 1 << 20, 64 << 20])
def test_every_dtype_through_torch(checkpoint: Checkpoint, device: torch.device, staging: int) -> None:
    assert wrong_of_torch(*checkpoint, device, staging_bytes=staging) == []


def test_every_dtype_as_torchs_destination(checkpoint: Checkpoint, device: torch.device) -> None:
    path, contents = checkpoint
    resolve, made = resolver(lambda shape, dtype: torch.empty(shape, dtype=getattr(torch, dtype), device=device))
    load_into(path, resolve)
    assert [name for name, raw in contents.items() if bits_of(made[name]) != raw] == []
    with safe_open(path, "pt", device) as reader:
        again = reader.get_tensors()
        for tensor in again.values():
            tensor.reshape(-1).view(torch.uint8).zero_()
        reader.load_into(again)
    assert [name for name, raw in contents.items() if bits_of(again[name]) != raw] == []


def test_every_dtype_through_cupy(checkpoint: Checkpoint, device: torch.device) -> None:
    pytest.importorskip("cupy")
    assert wrong_of_cupy(*checkpoint, device) == []


@pytest.mark.parametrize("spelling", ["cuda", "cuda:0", 0, torch.device("cuda:0")])
def test_spellings(checkpoint: Checkpoint, spelling: Any) -> None:
    with safe_open(checkpoint[0], "pt", spelling) as reader:
        assert reader.get_tensor("F32.large").device.type == "cuda"


def test_a_number_too_high(checkpoint: Checkpoint) -> None:
    with pytest.raises(OptionError, match="there is no device cuda:99"):
        safe_open(checkpoint[0], "pt", "cuda:99")


def test_views_keep_what_is_around_them(tmp_path: Path, device: torch.device) -> None:
    tensors = save(tmp_path / "m.safetensors", state(width=300))
    around = {name: torch.full((tensor.numel() + 14,), 3, device=device).to(tensor.dtype) for name, tensor in
              tensors.items()}  # fmt: skip
    inside = {name: around[name][7:-7].view(tensor.shape) for name, tensor in tensors.items()}
    load_into(tmp_path / "m.safetensors", inside)
    for name, tensor in tensors.items():
        assert bits_of(inside[name]) == raw_bytes(tensor)
        assert torch.equal(around[name][:7].cpu(), torch.full((7,), 3).to(tensor.dtype))
        assert torch.equal(around[name][-7:].cpu(), torch.full((7,), 3).to(tensor.dtype))


def test_strided_destinations_and_casts(tmp_path: Path, device: torch.device) -> None:
    tensors = save(tmp_path / "m.safetensors", {"w": torch.randn(700, 900)})
    turned = torch.zeros(900, 700, device=device).t()
    wide = torch.zeros(700, 1000, device=device)
    halved = torch.zeros(700, 900, dtype=torch.bfloat16, device=device)
    with safe_open(tmp_path / "m.safetensors", staging_bytes=100_000) as reader:
        reader.read_into("w", turned)
        reader.read_into("w", wide[:, 50:950])
        reader.load_into({"w": halved}, cast=True)
    assert torch.equal(turned.cpu(), tensors["w"])
    assert torch.equal(wide[:, 50:950].cpu(), tensors["w"])
    assert not wide[:, :50].any()
    assert torch.equal(halved.cpu(), tensors["w"].bfloat16())


def test_from_a_cold_file(checkpoint: Checkpoint, device: torch.device) -> None:
    drop_cache(checkpoint[0])
    assert wrong_of_torch(*checkpoint, device) == []


def test_a_file_that_was_cut_hands_nothing_out(tmp_path: Path, device: torch.device) -> None:
    path = tmp_path / "m.safetensors"
    save(path, {"w": torch.ones(1 << 20)})
    before = torch.cuda.memory_allocated(device)
    with safe_open(path, "pt", device) as reader:
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(StorageError):
            reader.get_tensor("w")
    assert torch.cuda.memory_allocated(device) == before


def test_many_loads_leave_nothing(tmp_path: Path, device: torch.device) -> None:
    path = tmp_path / "m.safetensors"
    save(path)
    load_file(path, "pt", device)
    torch.cuda.synchronize(device)
    before, free = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)[0]
    for _ in range(500):
        load_file(path, "pt", device)
    assert torch.cuda.memory_allocated(device) == before
    assert torch.cuda.mem_get_info(device)[0] > free - (64 << 20)


def test_the_second_device(checkpoint: Checkpoint) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    before = torch.cuda.memory_allocated(0)
    assert wrong_of_torch(*checkpoint, "cuda:1") == []
    assert torch.cuda.memory_allocated(0) == before
    assert torch.cuda.current_device() == 0
