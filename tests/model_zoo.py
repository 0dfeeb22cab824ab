"""Weight loaders written by hand, one for each way in which engines bring a checkpoint's tensors into parameters.

A loader takes a parameter and a loaded tensor, and narrows, chunks, turns and copies. It does not know whether that
tensor is lazy. Each case says what its loading costs: how many copies are direct, staged and materialized, and how many
bytes are read of the storage, as a formula of the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["CASES", "Case", "Cost", "part_of"]

Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class Cost:
    """What a loader asks of the storage."""

    direct: int = 0
    staged: int = 0
    materialized: int = 0
    bytes_read: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.direct + other.direct,
            self.staged + other.staged,
            self.materialized + other.materialized,
            self.bytes_read + other.bytes_read,
        )


@dataclass(frozen=True)
class Case:
    """One rank's parameters, how they are loaded, and what that costs."""

    checkpoint: Callable[[], dict[str, torch.Tensor]]
    make: Callable[[int, int], dict[str, torch.Tensor]]
    """The parameters of a rank: takes the rank and how many there are."""
    load: Callable[[dict[str, torch.Tensor], Tensors, int, int], object]
    cost: Callable[[int, int], Cost]
    sizes: tuple[int, ...] = (1, 2, 4, 8)
    columns: bool = False
    """Whether the rank's part lies in pieces, all over the tensor."""


def part_of(total: int, rank: int, size: int) -> tuple[int, int]:
    """Where a rank's part begins and how long it is; the last ones get less where it does not come out even."""
    each = -(-total // size)
    begin = min(total, rank * each)
    return begin, min(each, total - begin)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Numbers that are different everywhere, in any dtype."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def run_cost(rows: int, run: int, stride: int) -> Cost:
    """Of one copy of ``rows`` pieces of ``run`` bytes, ``stride`` bytes apart: see the table of the README."""
    if not rows or not run:
        return Cost()
    if rows == 1 or run == stride:
        return Cost(direct=1, bytes_read=rows * run)
    reach = max(2 * run, run + 1024 if run < 64 else 0)
    if run < 1 << 16 and stride <= reach:
        return Cost(staged=1, bytes_read=(rows - 1) * stride + run)
    return Cost(direct=1, bytes_read=rows * run)


# Whole tensors


def make_default(rank: int, size: int) -> dict[str, torch.Tensor]:
    return {"norm": torch.empty(300, dtype=torch.bfloat16), "router": torch.empty(32, 48)}


def load_default(parameters: dict[str, torch.Tensor], loaded: Tensors, rank: int, size: int) -> None:
    for name, parameter in parameters.items():
        assert parameter.size() == loaded[name].size()
        parameter.data.copy_(loaded[name])


def load_cast(parameters: dict[str, torch.Tensor], loaded: Tensors, rank: int, size: int) -> None:
    parameters["router"].copy_(loaded["router"])


# Column parallel: each rank has some of the rows; Q, K and V, or gate and up, share a parameter


HIDDEN, HEADS, KV_HEADS, HEAD = 96, 8, 2, 16


def make_column(rank: int, size: int) -> dict[str, torch.Tensor]:
    rows = part_of(90, rank, size)[1]
    return {"weight": torch.empty(rows, HIDDEN, dtype=torch.bfloat16), "bias": torch.empty(rows, dtype=torch.bfloat16)}


def load_column(parameters: dict[str, torch.Tensor], loaded: Tensors, rank: int, size: int) -> None:
    for name, parameter in parameters.items():
        parameter.data.copy_(loaded[name].narrow(0, part_of(90, rank, size)[0], parameter.shape[0]))


def cost_column(rank: int, size: int) -> Cost:
    rows = part_of(90, rank, size)[1]
    return Cost(direct=2, bytes_read=rows * (HIDDEN + 1) * 2) if rows else Cost()


def heads_of(rank: int, size: int) -> dict[str, tuple[int, int, int]]:
    """Of each of Q, K and V: the first row in the parameter, in the checkpoint, and how many rows."""
    q, kv = HEADS // size * HEAD, max(1, KV_HEADS // size) * HEAD
    replicas = max(1, size // KV_HEADS)
    return {
        "q": (0, rank * q, q),
        "k": (q, rank // replicas * kv, kv),
        "v": (q + kv, rank // replicas * kv, kv),
    }


def make_qkv(rank: int, size: int) -> dict[str, torch.Tensor]:
    rows = sum(count for _, _, count in heads_of(rank, size).values())
    return {"qkv": torch.empty(rows, HIDDEN, dtype=torch.bfloat16)}


def load_qkv(parameters: dict[str, torch.Tensor], loaded: Tensors, rank: int, size: int) -> None:
    for name, (into, start, count) in heads_of(rank, size).items():
        place = parameters["qkv"].data.narrow(0, into, count)
        part = loaded[name].narrow(0, start, count)
        assert place.shape == part.shape
        place.copy_(part)


def load_fused_qkv(parameters: dict[str, torch.Tensor], loaded: Tensors, rank: int, size: int) -> None:
    sizes = [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD]
    load_qkv(parameters, dict(zip("qkv", loaded["qkv"].split(sizes, dim=0), strict=True)), rank, size)


def cost_qkv(rank: int, size: int) -> Cost:
    rows = sum(count for _, _, count in heads_of(rank, size).values())
    return Cost(direct=3, bytes_read=rows * HIDDEN * 2)


def make_merged(rank: int, size: int) -> dict[str, torch.Tensor]:
    return {"gate_up": torch.empty(2 * part_of(150, rank, size)[1], HIDDEN, dtype=torch.bfloat16)}


def load_merged(parameters: dict[str, torch.Tensor], loaded: Tensors, rank: int, size: int) -> None:
    start, count = part_of(150, rank, size)
    for shard, name in enumerate(("gate", "up")):
        part = loaded[name].narrow(0, start, count)
        part.shard_id = shard  # engines hang such things on what they loaded
        parameters["gate_up"].data.narrow(0, shard * count, count).copy_(part)


def load_fused_merged(parameters: dict[str, torch.Tensor], loaded: Tensors, rank: int, size: int) -> None:
    load_merged(parameters, dict(zip(("gate", "up"), loaded["gate_up"].chunk(2), strict=True)), rank, size)


def cost_merged(rank: int, size: int) -> Cost:
    count = part_of(150, rank, size)[1]
    return Cost(direct=2, bytes_read=2 * count * HIDDEN * 2) if count else Cost()


def make_vocabulary(rank: int, size: int) -> dict[str, torch.Tensor]:
    """Padded to 64 rows for each rank; of the last ones, some rows or all are padding."""
    return {"embedding": torch.empty(512 // size, HIDDEN, dtype=torch.bfloat16)}


def rows_of_vocabulary(rank: int, size: int) -> tuple[int, int]:
    begin = rank * (512 // size)
    return min(begin, 401), max(0, min(512 // size, 401 - begin))


def load_vocabulary(parameters: dict[str, torch.Tensor], loaded: Tensors, rank: int, size: int) -> None:
    start, count = rows_of_vocabulary(rank, size)
    parameter = parameters["embedding"]
    parameter[:count].data.copy_(loaded["embedding"].narrow(0, start, count))
    parameter[count:].data.fill_(0)


def cost_vocabulary(rank: int, size: int) -> Cost:
    count = rows_of_vocabulary(rank, size)[1]
    return Cost(direct=1, bytes_read=count * HIDDEN * 2) if count else Cost()


def make_tied(rank: int, size: int) -> dict[str, torch.Tensor]:
    embedding = torch.nn.Parameter(make_vocabulary(rank, size)["embedding"], requires_grad=False)
    return {"embedding": embedding, "head": embedding}


def load_tied(parameters: dict[str, torch.Tensor], loaded: Tensors, rank: int, size: int) -> None:
    for name in loaded:
        if name != "head":  # it is the embedding
            load_vocabulary(parameters, {name: loaded[name]}, rank, size)


# Row parallel: each rank has some of the columns


WIDTH = 1000


def make_row(rank: int, size: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.empty(60, part_of(WIDTH, rank, size)[1], dtype=torch.bfloat16)}


def load_row(parameters: dict[str, torch.Tensor], loaded: Tensors, rank: int, size: int) -> None:
    start, count = part_of(WIDTH, rank, size)
    parameters["weight"].data.copy_(loaded["weight"].narrow(1, start, count))


def cost_row(rank: int, size: int) -> Cost:
    return run_cost(60, part_of(WIDTH, rank, size)[1] * 2, WIDTH * 2)


# Quantized: offsets are divided by what is packed into one element, or by what has one scale


def make_packed(rank: int, size: int) -> dict[str, torch.Tensor]:
    return {"rows": torch.empty(1024 // 8 // size, 64, dtype=torch.int32),
            "columns": torch.empty(64, 4096 // 8 // size, dtype=torch.int32)}  # fmt: skip


def load_packed(parameters: dict[str, torch.Tensor], loaded: Tensors, rank: int, size: int) -> None:
    for name, axis, total in (("rows", 0, 1024), ("columns", 1, 4096)):
        start, count = rank * total // size, total // size
        parameters[name].data.copy_(loaded[name].narrow(axis, start // 8, count // 8))


def cost_packed(rank: int, size: int) -> Cost:
    return Cost(direct=1, bytes_read=128 // size * 64 * 4) + run_cost(64, 512 // size * 4, 512 * 4)


def make_blocks(rank: int, size: int) -> dict[str, torch.Tensor]:
    rows = 2 * 1024 // size
    return {"weight": torch.empty(rows, 256, dtype=torch.float8_e4m3fn), "scale": torch.empty(rows // 128, 2)}


def load_blocks(parameters: dict[str, torch.Tensor], loaded: Tensors, rank: int, size: int) -> None:
    count = 1024 // size
    for shard, name in enumerate(("gate", "up")):
        for kind, block in (("weight", 1), ("scale", 128)):
            place = parameters[kind].data.narrow(0, shard * count // block, count // block)
            place.copy_(loaded[f"{name}.{kind}"].narrow(0, rank * count // block, count // block))


def cost_blocks(rank: int, size: int) -> Cost:
    return Cost(direct=4, bytes_read=2 * 1024 // size * 256 + 2 * 8 // size * 2 * 4)


def load_scalars(parameters: dict[str, torch.Tensor], loaded: Tensors, rank: int, size: int) -> None:
    for slot, name in enumerate("qkv"):
        value = loaded[name]
        if value.ndim:
            assert value.shape[0] == 1
            value = value[0]
        parameters["scales"].data[slot].copy_(value)


# Experts


def make_experts(rank: int, size: int) -> dict[str, torch.Tensor]:
    count = part_of(520, rank, size)[1]
    return {"w13": torch.empty(3, 2 * count, HIDDEN, dtype=torch.bfloat16),
            "w2": torch.empty(3, HIDDEN, count, dtype=torch.bfloat16)}  # fmt: skip


def load_experts(parameters: dict[str, torch.Tensor], loaded: Tensors, rank: int, size: int) -> None:
    start, count = part_of(520, rank, size)
    for expert in range(3):
        w13 = parameters["w13"].data[expert]
        w13.narrow(0, 0, count).copy_(loaded[f"{expert}.w1"].narrow(0, start, count))
        w13.narrow(0, count, count).copy_(loaded[f"{expert}.w3"].narrow(0, start, count))
        parameters["w2"].data[expert].copy_(loaded[f"{expert}.w2"].narrow(1, start, count))


def load_fused_experts(parameters: dict[str, torch.Tensor], loaded: Tensors, rank: int, size: int) -> None:
    """Experts in one tensor of three dimensions: cut into gate and up, then expert by expert."""
    gate, up = loaded["gate_up"].chunk(2, dim=1)
    each = zip(gate.unbind(), up.unbind(), loaded["down"].unbind(), strict=True)
    load_experts(
        parameters,
        {
            f"{k}.{name}": part
            for k, parts in enumerate(each)
            for name, part in zip(("w1", "w3", "w2"), parts, strict=True)
        },
        rank,
        size,
    )


def cost_experts(rank: int, size: int) -> Cost:
    count = part_of(520, rank, size)[1]
    rows = Cost(direct=2, bytes_read=2 * count * HIDDEN * 2) if count else Cost()
    one = rows + run_cost(HIDDEN, count * 2, 520 * 2)
    return one + one + one


# Not plain


def load_rotary(parameters: dict[str, torch.Tensor], loaded: Tensors, rank: int, size: int) -> None:
    """Pairs of rows that lie interleaved come apart: the reshape is no view, so it reads its part into a tensor."""
    count = HEADS // size * HEAD
    part = loaded["q"].narrow(0, rank * count, count)
    part = part.view(HEADS // size, HEAD // 2, 2, HIDDEN).transpose(1, 2).reshape(count, HIDDEN)
    parameters["q"].data.copy_(part)


def load_rotary_view(parameters: dict[str, torch.Tensor], loaded: Tensors, rank: int, size: int) -> None:
    """The same written with a view of the parameter, which needs no copy in between."""
    count = HEADS // size * HEAD
    part = loaded["q"].narrow(0, rank * count, count).view(HEADS // size, HEAD // 2, 2, HIDDEN).transpose(1, 2)
    parameters["q"].data.view(HEADS // size, 2, HEAD // 2, HIDDEN).copy_(part)


def load_transposed(parameters: dict[str, torch.Tensor], loaded: Tensors, rank: int, size: int) -> None:
    """Conv1D keeps inputs by outputs, and a linear layer outputs by inputs."""
    count = 1024 // size
    parameters["weight"].data.copy_(loaded["weight"].t().narrow(0, rank * count, count))


def cost_transposed(rank: int, size: int) -> Cost:
    wide = 1024 // size * 2
    dense = max(2 * wide, wide + 1024) >= 2048
    return Cost(staged=1, bytes_read=39 * 2048 + wide if dense else 40 * wide)


def weights(shapes: Mapping[str, tuple[int, ...]]) -> Callable[[], dict[str, torch.Tensor]]:
    """Make tensors of these shapes, in bfloat16."""
    return lambda: {name: numbers(*shape, seed=k) for k, (name, shape) in enumerate(shapes.items())}


def block_weights() -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for k, name in enumerate(("gate", "up")):
        made[f"{name}.weight"] = numbers(1024, 256, dtype=torch.float8_e4m3fn, seed=k)
        made[f"{name}.scale"] = numbers(8, 2, dtype=torch.float32, seed=k)
    return made


KV = (KV_HEADS * HEAD, HIDDEN)
Q = (HEADS * HEAD, HIDDEN)
EXPERT = {"w1": (520, HIDDEN), "w3": (520, HIDDEN), "w2": (HIDDEN, 520)}

CASES: dict[str, Case] = {
    "default": Case(
        lambda: {"norm": numbers(300), "router": numbers(32, 48, dtype=torch.float32)},
        make_default,
        load_default,
        lambda rank, size: Cost(direct=2, bytes_read=300 * 2 + 32 * 48 * 4),
        sizes=(1,),
    ),
    "cast": Case(
        lambda: {"router": numbers(32, 48, dtype=torch.float32)},
        lambda rank, size: {"router": torch.empty(32, 48, dtype=torch.bfloat16)},
        load_cast,
        lambda rank, size: Cost(staged=1, bytes_read=32 * 48 * 4),
        sizes=(1,),
        columns=True,  # twice the bytes that are kept, since those are half as wide
    ),
    "column": Case(weights({"weight": (90, HIDDEN), "bias": (90,)}), make_column, load_column, cost_column),
    "row": Case(weights({"weight": (60, WIDTH)}), make_row, load_row, cost_row, columns=True),
    "qkv": Case(weights({"q": Q, "k": KV, "v": KV}), make_qkv, load_qkv, cost_qkv),
    "qkv fused on disk": Case(weights({"qkv": (Q[0] + 2 * KV[0], HIDDEN)}), make_qkv, load_fused_qkv, cost_qkv),
    "gate and up": Case(weights({"gate": (150, HIDDEN), "up": (150, HIDDEN)}), make_merged, load_merged, cost_merged),
    "gate and up fused on disk": Case(weights({"gate_up": (300, HIDDEN)}), make_merged, load_fused_merged, cost_merged),
    "vocabulary": Case(weights({"embedding": (401, HIDDEN)}), make_vocabulary, load_vocabulary, cost_vocabulary),
    "tied head": Case(
        weights({"embedding": (401, HIDDEN), "head": (401, HIDDEN)}), make_tied, load_tied, cost_vocabulary
    ),
    "packed int4": Case(
        lambda: {"rows": numbers(128, 64, dtype=torch.int32), "columns": numbers(64, 512, dtype=torch.int32)},
        make_packed,
        load_packed,
        cost_packed,
        columns=True,
    ),
    "block scales": Case(block_weights, make_blocks, load_blocks, cost_blocks),
    "scalar scales": Case(
        lambda: {"q": torch.tensor(0.5), "k": torch.tensor([0.25]), "v": torch.tensor(2.0)},
        lambda rank, size: {"scales": torch.empty(3)},
        load_scalars,
        lambda rank, size: Cost(direct=3, bytes_read=12),
        sizes=(1,),
    ),
    "experts": Case(
        weights({f"{k}.{name}": shape for k in range(3) for name, shape in EXPERT.items()}),
        make_experts,
        load_experts,
        cost_experts,
        columns=True,
    ),
    "experts fused on disk": Case(
        weights({"gate_up": (3, 1040, HIDDEN), "down": (3, HIDDEN, 520)}),
        make_experts,
        load_fused_experts,
        cost_experts,
        columns=True,
    ),
    "rotary": Case(
        weights({"q": Q}),
        lambda rank, size: {"q": torch.empty(Q[0] // size, HIDDEN, dtype=torch.bfloat16)},
        load_rotary,
        lambda rank, size: Cost(materialized=1, bytes_read=Q[0] // size * HIDDEN * 2),
    ),
    "rotary by a view": Case(
        weights({"q": Q}),
        lambda rank, size: {"q": torch.empty(Q[0] // size, HIDDEN, dtype=torch.bfloat16)},
        load_rotary_view,
        lambda rank, size: Cost(staged=1, bytes_read=Q[0] // size * HIDDEN * 2),
    ),
    "Conv1D": Case(
        weights({"weight": (40, 1024)}),
        lambda rank, size: {"weight": torch.empty(1024 // size, 40, dtype=torch.bfloat16)},
        load_transposed,
        cost_transposed,
        columns=True,
    ),
}
