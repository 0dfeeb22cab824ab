"""Loaders of engines, as they are, read lazy tensors straight into a rank's parameters, and no more than that."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from dlpack_loader import safe_open
from dlpack_loader.lazy import LazyReport
from tests.files import save
from tests.lazy_material import same
from tests.model_zoo import CASES, Case, Cost

SMALL = 4096
"""Bytes that a process reads beside: of /proc, to know what it has read."""


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import what copies need, since reading its files counts as reading."""
    path = tmp_path_factory.mktemp("warm") / "m.safetensors"
    save(path, {"w": torch.ones(64, 64)})
    with safe_open(path) as reader:
        for into in (torch.zeros(64, 64), torch.zeros(64, 64).t(), torch.zeros(64, 64).half()):
            into.copy_(reader.lazy("w"))
            with reader.deferring():
                into.copy_(reader.lazy("w"))


def filled(case: Case, rank: int, size: int) -> dict[str, torch.Tensor]:
    """A rank's parameters, with something else in them."""
    parameters = case.make(rank, size)
    for parameter in parameters.values():
        parameter.data.view(torch.uint8).fill_(0x77)
    return parameters


def characters_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def cost_of(report: LazyReport) -> Cost:
    return Cost(report.direct, report.staged, report.materialized, report.bytes_read)


@pytest.mark.parametrize("deferred", [False, True], ids=["immediate", "deferred"])
@pytest.mark.parametrize(
    ("name", "size"),
    [(name, size) for name, case in CASES.items() for size in case.sizes],
    ids=lambda value: str(value),
)
def test_a_loader_reads_its_part_and_gets_the_same_bits(tmp_path: Path, name: str, size: int, deferred: bool) -> None:
    case = CASES[name]
    real = save(tmp_path / "m.safetensors", case.checkpoint())
    for rank in range(size):
        wanted, parameters = filled(case, rank, size), filled(case, rank, size)
        case.load(wanted, real, rank, size)
        with safe_open(tmp_path / "m.safetensors") as reader:
            loaded = dict(reader.iter_lazy())
            before = characters_read()
            with reader.deferring() if deferred else nullcontext():
                case.load(parameters, loaded, rank, size)
            read = characters_read() - before
            report = reader.lazy_report()
        for key, parameter in wanted.items():
            assert same(parameters[key].detach(), parameter.detach()), (key, rank)
        assert cost_of(report) == case.cost(rank, size), rank
        assert report.bytes_read <= read <= report.bytes_read + SMALL
        kept = report.bytes_written
        assert report.bytes_read <= (2.0 if case.columns else 1.1) * kept, rank


@pytest.mark.parametrize(("name", "axis"), [("column", 0), ("row", 1)])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_all_ranks_together_keep_the_whole(tmp_path: Path, name: str, axis: int, size: int) -> None:
    """The sizes do not come out even, and no rank is left out."""
    case = CASES[name]
    real = save(tmp_path / "m.safetensors", case.checkpoint())
    with safe_open(tmp_path / "m.safetensors") as reader:
        ranks = []
        for rank in range(size):
            ranks.append(filled(case, rank, size))
            case.load(ranks[-1], dict(reader.iter_lazy()), rank, size)
    assert same(torch.cat([parameters["weight"] for parameters in ranks], axis), real["weight"])


def test_numbers_that_were_worked_out_by_hand() -> None:
    """The formulas of the cases at one point each."""
    assert CASES["row"].cost(0, 1) == Cost(direct=1, bytes_read=120_000)
    assert CASES["row"].cost(0, 2) == Cost(staged=1, bytes_read=59 * 2000 + 1000)
    assert CASES["row"].cost(3, 4) == Cost(direct=1, bytes_read=60 * 500)
    assert CASES["column"].cost(7, 8) == Cost(direct=2, bytes_read=6 * 97 * 2)
    assert CASES["vocabulary"].cost(7, 8) == Cost()
    assert CASES["qkv"].cost(5, 8) == Cost(direct=3, bytes_read=48 * 192)
    assert CASES["Conv1D"].cost(1, 4) == Cost(staged=1, bytes_read=40 * 512)


def test_a_filter_reads_nothing_of_other_experts(tmp_path: Path) -> None:
    case = CASES["experts"]
    save(tmp_path / "m.safetensors", case.checkpoint())
    with safe_open(tmp_path / "m.safetensors") as reader:
        before = characters_read()
        mine = dict(reader.iter_lazy(lambda entry: entry.name.startswith("1.")))
        parameter = torch.empty(520, 96, dtype=torch.bfloat16)
        parameter.copy_(mine["1.w1"])
        assert sorted(mine) == ["1.w1", "1.w2", "1.w3"]
        assert parameter.nbytes <= characters_read() - before <= parameter.nbytes + SMALL
        assert reader.lazy_report().bytes_read == parameter.nbytes
