"""Memory of emulated devices for checkpoints to be loaded into, of any vendor."""

from __future__ import annotations

from typing import Any

import torch

from dlpack_loader.dtype import BY_CODE
from tests.emulation import DeviceMemory, DeviceTensor, Driver, Stream
from tests.files import raw_bytes

__all__ = ["F32", "GUARD", "Room", "pinned_peak"]

F32 = (2, 32, 1)
GUARD = 64


def pinned_peak(driver: Driver) -> int:
    """The peak of what a load had pinned: libraries of the process may keep some for themselves."""
    return driver.seen().pinned_peak - driver.live().pinned_bytes


class Room:
    """Device memory for a set of tensors, each between guard bytes."""

    def __init__(self, driver: Driver, tensors: dict[str, torch.Tensor], device: int = 0, **options: Any) -> None:
        self.memories: dict[str, DeviceMemory] = {}
        self.tensors: dict[str, DeviceTensor] = {}
        for name, tensor in tensors.items():
            code = {str(getattr(torch, d.torch or "", None)): d for d in BY_CODE.values()}[str(tensor.dtype)]
            memory = driver.memory(device, tensor.nbytes + 2 * GUARD)
            memory.fill(0xA5)
            self.memories[name] = memory
            self.tensors[name] = memory.tensor(tuple(tensor.shape), code.dlpack, offset=GUARD, **options)

    def disturb(self, stream: Stream) -> None:
        """Queue writes to every tensor that run only when somebody waits for them."""
        for memory in self.memories.values():
            stream.write(memory, b"\x77" * (len(memory.read()) - 2 * GUARD), GUARD)

    def check(self, wanted: dict[str, torch.Tensor]) -> None:
        for name, tensor in wanted.items():
            raw = self.memories[name].read()
            assert raw[GUARD:-GUARD] == raw_bytes(tensor), name
            assert set(raw[:GUARD] + raw[-GUARD:]) == {0xA5}, name
