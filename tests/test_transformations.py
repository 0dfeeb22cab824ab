"""The transformations of engines as data: Targets that fill a rank's parameters by one plan, with no weight loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlpack_loader import Target, load_into
from tests.device_room import GUARD
from tests.emulation import Driver
from tests.files import raw_bytes, save
from tests.model_zoo import CASES, HEADS, KV, WIDTH, Q, heads_of, part_of, rows_of_vocabulary

Places = Callable[[Mapping[str, Any], int, int], dict[str, Any]]
"""Which part of each tensor goes where: takes the parameters, the rank and how many ranks there are."""


def rows(start: int, count: int) -> Any:
    return np.s_[start : start + count]


def default(parameters: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    return dict(parameters)


def column(parameters: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    return {name: Target(value, index=rows(*part_of(90, rank, size))) for name, value in parameters.items()}


def row(parameters: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    start, count = part_of(WIDTH, rank, size)
    return {"weight": Target(parameters["weight"], index=np.s_[:, start : start + count])}


def qkv(parameters: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    return {
        name: Target(parameters["qkv"][into : into + count], index=rows(start, count))
        for name, (into, start, count) in heads_of(rank, size).items()
    }


def fused_qkv(parameters: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Several targets of one tensor."""
    before = {"q": 0, "k": Q[0], "v": Q[0] + KV[0]}
    return {
        "qkv": [
            Target(parameters["qkv"][into : into + count], index=rows(before[name] + start, count))
            for name, (into, start, count) in heads_of(rank, size).items()
        ]
    }


def gate_and_up(parameters: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    start, count = part_of(150, rank, size)
    return {
        name: Target(parameters["gate_up"][k * count : (k + 1) * count], index=rows(start, count))
        for k, name in enumerate(("gate", "up"))
    }


def vocabulary(parameters: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    index = rows(*rows_of_vocabulary(rank, size))
    return {"embedding": Target(parameters["embedding"], index=index, padding="zero")}


def packed(parameters: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    high, wide = 128 // size, 512 // size
    return {
        "rows": Target(parameters["rows"], index=rows(rank * high, high)),
        "columns": Target(parameters["columns"], index=np.s_[:, rank * wide : (rank + 1) * wide]),
    }


def block_scales(parameters: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    return {
        f"{name}.{kind}": Target(parameters[kind][k * count : (k + 1) * count], index=rows(rank * count, count))
        for kind, count in (("weight", 1024 // size), ("scale", 8 // size))
        for k, name in enumerate(("gate", "up"))
    }


def scalars(parameters: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    slots = parameters["scales"]
    return {"q": slots[0:1].reshape(()), "k": slots[1:2], "v": slots[2:3].reshape(())}


def experts(parameters: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    start, count = part_of(520, rank, size)
    places: dict[str, Any] = {}
    for expert in range(3):
        w13 = parameters["w13"][expert]
        places[f"{expert}.w1"] = Target(w13[:count], index=rows(start, count))
        places[f"{expert}.w3"] = Target(w13[count:], index=rows(start, count))
        places[f"{expert}.w2"] = Target(parameters["w2"][expert], index=np.s_[:, start : start + count])
    return places


def fused_experts(parameters: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    start, count = part_of(520, rank, size)
    w13 = parameters["w13"]
    return {
        "gate_up": [
            Target(w13[:, :count], index=np.s_[:, start : start + count]),
            Target(w13[:, count:], index=np.s_[:, 520 + start : 520 + start + count]),
        ],
        "down": Target(parameters["w2"], index=np.s_[:, :, start : start + count]),
    }


def rotary(parameters: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Pairs of rows that lie interleaved come apart: even ones to the first half of a head, odd ones to the rest."""
    half = Q[0] // HEADS // 2
    heads = HEADS // size
    first = rank * heads * 2 * half
    return {
        "q": [
            Target(
                parameters["q"][(2 * head + odd) * half : (2 * head + odd + 1) * half],
                index=np.s_[first + 2 * half * head + odd : first + 2 * half * (head + 1) : 2],
            )
            for head in range(heads)
            for odd in (0, 1)
        ]
    }


def transposed(parameters: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    count = 1024 // size
    return {"weight": Target(parameters["weight"].T, index=np.s_[:, rank * count : (rank + 1) * count])}


PLACES: dict[str, Places] = {
    "default": default,
    "cast": default,
    "column": column,
    "row": row,
    "qkv": qkv,
    "qkv fused on disk": fused_qkv,
    "gate and up": gate_and_up,
    "vocabulary": vocabulary,
    "packed int4": packed,
    "block scales": block_scales,
    "scalar scales": scalars,
    "experts": experts,
    "experts fused on disk": fused_experts,
    "rotary": rotary,
    "Conv1D": transposed,
}

ROWS = ("column", "qkv", "qkv fused on disk", "gate and up", "vocabulary", "block scales")
"""What keeps whole rows: no byte more is read than is kept."""


def ranks() -> list[Any]:
    return [
        pytest.param(name, rank, size, id=f"{name}-{rank}of{size}")
        for name in PLACES
        for size in CASES[name].sizes
        for rank in sorted({0, size // 2, size - 1})
    ]


@pytest.mark.parametrize(("name", "rank", "size"), ranks())
def test_targets_do_what_the_weight_loader_does(tmp_path: Path, name: str, rank: int, size: int) -> None:
    case = CASES[name]
    tensors = save(tmp_path / "model.safetensors", case.checkpoint())
    wanted, got = case.make(rank, size), case.make(rank, size)
    for value in (*wanted.values(), *got.values()):
        value.view(torch.uint8).fill_(0xA5)
    case.load(wanted, tensors, rank, size)
    report = load_into(tmp_path / "model.safetensors", PLACES[name](got, rank, size), cast=name == "cast")
    for key, value in wanted.items():
        assert raw_bytes(got[key]) == raw_bytes(value), key
    if name in ROWS:
        assert report.bytes_read == report.bytes_written
    elif name != "cast":  # whose tensor is twice as wide as what is kept
        assert report.bytes_read <= 2 * report.bytes_written


@pytest.mark.parametrize("name", ["row", "qkv", "vocabulary", "experts fused on disk", "packed int4"])
@pytest.mark.parametrize("size", [2, 8])
def test_on_a_device(driver: Driver, tmp_path: Path, name: str, size: int) -> None:
    """The same through the pinned ring, with strided copies on the device; nothing beside the parameters is written."""
    case, rank = CASES[name], 1
    tensors = save(tmp_path / "model.safetensors", case.checkpoint())
    wanted = case.make(rank, size)
    case.load(wanted, tensors, rank, size)
    memories = {key: driver.memory(0, value.nbytes + 2 * GUARD) for key, value in wanted.items()}
    for memory in memories.values():
        memory.fill(0xA5)
    there = {key: Sliced(memories[key], value) for key, value in wanted.items()}
    report = load_into(tmp_path / "model.safetensors", PLACES[name](there, rank, size), staging_bytes=1 << 20)
    assert report.staged_bytes == report.bytes_read
    for key, value in wanted.items():
        raw = memories[key].read()
        assert raw[GUARD:-GUARD] == raw_bytes(value), key
        assert set(raw[:GUARD] + raw[-GUARD:]) == {0xA5}, key


class Sliced:
    """A tensor of an emulated device that is indexed as torch's are: torch works out shape, strides and offset."""

    def __init__(self, memory: Any, like: torch.Tensor) -> None:
        self._memory = memory
        self._view = torch.empty(like.shape, dtype=like.dtype, device="meta")

    def __getitem__(self, index: Any) -> Sliced:
        part = Sliced(self._memory, self._view)
        part._view = self._view[index]
        return part

    def _tensor(self) -> Any:
        view = self._view
        kinds = {torch.bfloat16: (4, 16, 1), torch.int32: (0, 32, 1)}
        offset = GUARD + int(view.storage_offset()) * view.itemsize
        return self._memory.tensor(tuple(view.shape), kinds[view.dtype], offset=offset, strides=view.stride())

    def __dlpack_device__(self) -> Any:
        return self._tensor().__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor().__dlpack__(**options)
