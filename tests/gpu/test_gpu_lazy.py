"""Lazy tensors copied into tensors of a real GPU: the same bits, in order, at once and deferred."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from dlpack_loader import safe_open
from tests.files import raw_bytes, save
from tests.gpu.material import bits_of
from tests.model_zoo import CASES

pytestmark = pytest.mark.gpu
_CYCLES = 5_000_000  # of the GPU's clock: some milliseconds


@pytest.mark.parametrize("deferred", [False, True])
def test_views_and_casts_come_after_what_is_pending(tmp_path: Path, device: torch.device, deferred: bool) -> None:
    real = save(tmp_path / "m.safetensors", {"w": torch.randn(48, 6, 40)})["w"]
    with safe_open(tmp_path / "m.safetensors") as reader:
        lazy = reader.lazy("w")
        for stream in (torch.cuda.current_stream(device), torch.cuda.Stream(device)):
            with torch.cuda.stream(stream):
                around = torch.empty(40, 6, 50, device=device)
                turned = around[..., 1:49].permute(2, 1, 0)
                whole, half = torch.empty(48, 6, 40, device=device), torch.empty(48, 6, 40, device=device).half()
                columns = torch.empty(48, 6, 7, device=device)
                torch.cuda._sleep(_CYCLES)  # what follows has not run when the copies are made
                for tensor in (around, whole, half, columns):
                    tensor.fill_(7)
                with reader.deferring() if deferred else nullcontext():
                    turned.copy_(lazy)
                    whole.copy_(lazy)
                    half.copy_(lazy)
                    columns.copy_(lazy[..., 33:])
                    assert torch.equal(whole.sum(), whole.sum())
                for got, wanted in ((turned, real), (whole, real), (half, real.half()), (columns, real[..., 33:])):
                    assert bits_of(got) == raw_bytes(wanted)
                assert bool((around[..., 0] == 7).all())
                assert bool((around[..., 49] == 7).all())


def test_allocating_there(tmp_path: Path, device: torch.device) -> None:
    real = save(tmp_path / "m.safetensors", {"w": torch.randn(300, 40)})["w"]
    with safe_open(tmp_path / "m.safetensors") as reader:
        lazy = reader.lazy("w")
        for got in (lazy.cuda(), lazy.to(device), lazy.to(device, torch.bfloat16), lazy.t().to(device, torch.float64)):
            assert got.device == device
        assert bits_of(lazy.cuda()) == raw_bytes(real)
        assert bits_of(lazy.to(device, torch.bfloat16)) == raw_bytes(real.bfloat16())
        assert torch.equal((lazy.to(device) + 1).cpu(), real + 1)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_loaders_fill_parameters_there(tmp_path: Path, device: torch.device, name: str, deferred: bool) -> None:
    case = CASES[name]
    size = case.sizes[-1]
    real = save(tmp_path / "m.safetensors", case.checkpoint())
    with safe_open(tmp_path / "m.safetensors") as reader:
        for rank in range(size):
            wanted = case.make(rank, size)
            there = {key: torch.empty_like(value, device=device) for key, value in wanted.items()}
            if "head" in there:
                there["head"] = there["embedding"]
            case.load(wanted, real, rank, size)
            with reader.deferring() if deferred else nullcontext():
                case.load(there, dict(reader.iter_lazy()), rank, size)
            for key, value in wanted.items():
                assert bits_of(there[key].detach()) == raw_bytes(value), (key, rank)
