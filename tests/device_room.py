"""Memory of emulated devices for checkpoints to be loaded into, of any vendor."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from dlpack_loader import load_into
from dlpack_loader.dtype import BY_CODE
from dlpack_loader.errors import StorageError
from dlpack_loader.runtime import host
from tests.emulation import DeviceMemory, DeviceTensor, Driver, Mode, Stream
from tests.files import raw_bytes, save

__all__ = ["F32", "GUARD", "Room", "check_a_read_that_fails", "pinned_peak"]

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


def check_a_read_that_fails(driver: Driver, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a read fail in the middle of a load by the ring: what is under way is drained, and the damage is named."""
    data = {"a": torch.zeros(10, dtype=torch.uint8), "b": torch.ones(1 << 20, dtype=torch.uint8)}
    save(folder / "m.safetensors", data)
    room = Room(driver, data)
    before = driver.live()
    driver.mode = Mode.DEFERRED
    calls: list[int] = []
    whole = host.read_at

    def fail(fd: int, offset: int, pieces: Any, enough: int) -> int:
        calls.append(offset)
        if len(calls) == 4:
            raise OSError(5, "Input/output error")
        return whole(fd, offset, pieces, enough)

    monkeypatch.setattr(host, "read_at", fail)
    with pytest.raises(StorageError, match="Input/output error") as caught:
        load_into(folder / "m.safetensors", room.tensors, staging_bytes=300_000, threads=1, backend="pread")
    assert caught.value.dirty == ("b",)
    del caught
    gc.collect()
    assert driver.live() == before
    assert driver.seen().failed == 0
    assert room.tensors["b"].releases == [1]
