"""The order between a load and what else a real GPU does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dlpack_loader import load_file, load_into
from dlpack_loader.errors import DeviceError
from tests.gpu.material import wrong_of_order

pytestmark = pytest.mark.gpu
Checkpoint = tuple[Path, dict[str, bytes]]


def test_work_that_is_pending_before_and_readers_right_after(checkpoint: Checkpoint, device: torch.device) -> None:
    assert wrong_of_order(*checkpoint, device, rounds=12) == []


def test_a_stream_that_is_named(checkpoint: Checkpoint, device: torch.device) -> None:
    path, contents = checkpoint
    side = torch.cuda.Stream(device)
    tensor = torch.zeros(37, 65_536, device=device)
    side.wait_stream(torch.cuda.current_stream(device))
    for stream in (side, side.cuda_stream):
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            tensor.fill_(7)
        load_into(path, {"F32.large": tensor}, strict=False, stream=stream)
        assert tensor.view(torch.uint8).cpu().numpy().tobytes() == contents["F32.large"]


def test_a_capture_is_refused(checkpoint: Checkpoint, device: torch.device) -> None:
    path, _ = checkpoint
    tensor = torch.zeros(37, 65_536, device=device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        tensor.add_(1)
        with pytest.raises(DeviceError, match="capturing a graph"):
            load_file(path, "pt", device)
        with pytest.raises(DeviceError, match="capturing a graph"):
            load_into(path, {"F32.large": tensor}, strict=False)
