"""What each rank wrote, back into its tensors: names of files, padding, tied weights and views; no write on a fault.

The files are made here, by narrowing whole tensors for each rank and leaving out what lies within another tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from dlpack_loader import LoadReport, Pending, Target, load_model, load_sharded_state
from dlpack_loader.destination import Memory
from dlpack_loader.errors import (
    CheckpointError,
    DestinationBufferError,
    DestinationError,
    DestinationTypeError,
    FileMissingError,
    FileNotDirectoryError,
    LoaderError,
    OptionError,
    SourceError,
    StorageError,
    StrictError,
)
from dlpack_loader.framework.numpy import describe
from dlpack_loader.header import Entry
from dlpack_loader.rank_files import rank_files
from dlpack_loader.region import contains
from dlpack_loader.runtime import host
from dlpack_loader.runtime.files import Files
from tests.device_room import F32, GUARD, Room
from tests.emulation import Driver, Mode
from tests.files import save
from tests.strategies import basic_indices, layouts, shapes

VOCABULARY, WIDTH, HIDDEN = 30, 12, 26  # of which no rank of 4 or 8 has a whole share
Ranks = dict[str, int]
Padding = Literal["keep", "zero"]


# A model whose ranks hold shards


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "embed": torch.randn(VOCABULARY, WIDTH, generator=generator),
        "qkv": torch.randn(3 * WIDTH, WIDTH, generator=generator).bfloat16(),
        "up": torch.randn(HIDDEN, WIDTH, generator=generator),
        "down": torch.randn(WIDTH, HIDDEN, generator=generator),
        "scale": torch.randn(HIDDEN, generator=generator),
        "norm": torch.randn(WIDTH, generator=generator),
        "steps": torch.tensor(5),
    }


SHARDED = {"embed": 0, "up": 0, "down": 1, "scale": 0}
"""The dimension that is divided among the ranks, in shares of one size, of which the last ones may have less."""


def share(size: int, ranks: int) -> int:
    return -(-size // ranks)


def written(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """What one rank writes: the parts that exist, of no padding."""
    tensors = whole()
    for name, dimension in SHARDED.items():
        size = tensors[name].shape[dimension]
        each = share(size, ranks)
        begin = min(rank * each, size)
        tensors[name] = tensors[name].narrow(dimension, begin, min(each, size - begin))
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


class Shard(torch.nn.Module):
    """The tensors of one rank, as an engine allocates them: padded, tied, and views of one another."""

    def __init__(self, ranks: int, pad: int = 4) -> None:
        super().__init__()
        tensors = whole()
        for name, dimension in SHARDED.items():
            shape = list(tensors[name].shape)
            shape[dimension] = -(-share(shape[dimension], ranks) // pad) * pad
            tensors[name] = torch.empty(shape)
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                setattr(self, name, torch.nn.Parameter(torch.full_like(tensor, 7)))
            else:
                self.register_buffer(name, torch.full_like(tensor, 7))
        self.head = self.embed  # tied
        qkv = self.get_parameter("qkv").data
        self.register_buffer("keys", qkv[WIDTH : 2 * WIDTH])
        self.register_buffer("flat", qkv.flatten())


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def state_bits(module: torch.nn.Module) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in module.state_dict().items()}


def save_parts(folder: Path, form: str, tensors: Mapping[str, torch.Tensor], parts: int = 1) -> None:
    """Write a rank's tensors in turn into so many files."""
    names = sorted(tensors)
    for part in range(parts):
        chosen = {name: tensors[name] for name in names[part::parts]}
        save_file(chosen, folder / f"{form}-part-{part}.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks of two parts."""
    for rank in range(2):
        save_parts(tmp_path, f"model-rank-{rank}", written(rank, 2), 2)
    return tmp_path


def check(module: Shard, rank: int, ranks: int, padding: Padding | None) -> None:
    """Every tensor holds what its rank wrote, and beside that what the padding says."""
    for name, tensor in written(rank, ranks).items():
        have = module.state_dict()[name]
        wanted = torch.zeros_like(have) if padding == "zero" else torch.full_like(have, 7)
        wanted[tuple(map(slice, tensor.shape))] = tensor
        assert bits(have) == bits(wanted), name
    assert module.head is module.embed
    assert bits(module.get_buffer("keys")) == bits(module.get_parameter("qkv")[WIDTH : 2 * WIDTH])


ALIASES = {"flat": "qkv", "head": "embed", "keys": "qkv"}


@pytest.mark.parametrize("padding", ["keep", "zero"])
@pytest.mark.parametrize("form", ["rank", "grid", "pattern"])
@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (2, 3), (4, 2), (8, 5)])
def test_every_rank_gets_what_it_wrote(tmp_path: Path, ranks: int, parts: int, form: str, padding: Padding) -> None:
    options: Callable[[int], dict[str, Any]] = {
        "rank": lambda rank: {"rank": rank},
        "grid": lambda rank: {"pp_rank": rank % 2, "tp_rank": rank // 2},
        "pattern": lambda rank: {"rank": rank, "pattern": "of-{rank:03d}-part-{part}.safetensors"},
    }[form]
    name = {"rank": "model-rank-{rank}", "grid": "model-pp-{pp_rank}-tp-{tp_rank}", "pattern": "of-{rank:03d}"}[form]
    for rank in range(ranks):
        save_parts(tmp_path, name.format(**options(rank)), written(rank, ranks), parts)
    zeroed = 0
    for rank in range(ranks):
        module = Shard(ranks)
        pointers = {key: tensor.data_ptr() for key, tensor in module.state_dict().items()}
        report = load_sharded_state(module, tmp_path, padding=padding, **options(rank))
        check(module, rank, ranks, padding)
        assert set(report.filled) == set(whole())
        assert report.aliases == ALIASES
        assert (report.unfilled, report.unexpected, report.declined) == ((), (), ())
        assert report.bytes_read == sum(tensor.nbytes for tensor in written(rank, ranks).values())
        held = sum(module.state_dict()[key].nbytes for key in whole())
        assert report.bytes_zeroed == (held - report.bytes_written if padding == "zero" else 0)
        zeroed += report.bytes_zeroed
        assert {key: tensor.data_ptr() for key, tensor in module.state_dict().items()} == pointers
    assert (zeroed > 0) == (padding == "zero")


def test_a_mapping_and_a_resolver(folder: Path) -> None:
    module = Shard(2)
    report = load_sharded_state(module.state_dict(), folder, rank=1)
    check(module, 1, 2, "keep")
    assert report.aliases == ALIASES

    module = Shard(2)
    tensors = module.state_dict()
    asked: list[str] = []

    def resolve(entry: Entry) -> Any:
        asked.append(entry.name)
        if entry.name in ("scale", "up"):
            return None  # a layout that the caller makes by itself
        if entry.name == "down":
            return [Target(tensors["down"], padding="zero")]
        return tensors[entry.name]

    report = load_sharded_state(resolve, str(folder), rank=0, padding="keep")
    assert sorted(asked) == sorted(whole())
    assert sorted(report.declined) == ["scale", "up"]
    assert sorted(report.filled) == sorted(whole().keys() - {"scale", "up"})
    assert report.bytes_zeroed == 4 * WIDTH * (16 - 13)
    assert (tensors["up"] == 7).all()
    assert (tensors["down"][:, 13:] == 0).all()
    assert (tensors["embed"][15:] == 7).all()


def test_targets_have_indices_and_paddings_of_their_own(folder: Path) -> None:
    top, rest = torch.full((5, WIDTH), 7.0), torch.full((2, WIDTH), 7.0)
    report = load_sharded_state(
        {"embed": [Target(top, np.s_[:4], padding="zero"), Target(rest, np.s_[4:5])]}, folder, rank=0, strict=False
    )
    rows = written(0, 2)["embed"]
    assert torch.equal(top, torch.cat([rows[:4], torch.zeros(1, WIDTH)]))
    assert torch.equal(rest, torch.cat([rows[4:5], torch.full((1, WIDTH), 7.0)]))
    assert report.bytes_zeroed == 4 * WIDTH


def test_without_padding_every_shape_is_the_tensors(folder: Path) -> None:
    module = Shard(2)
    before = state_bits(module)
    with pytest.raises(DestinationError, match="the checkpoint gives shape"):
        load_sharded_state(module, folder, rank=0, padding=None)
    assert state_bits(module) == before
    exact = {name: torch.zeros_like(tensor) for name, tensor in written(0, 2).items()}
    load_sharded_state(exact, folder, rank=0, padding=None)
    assert {name: bits(tensor) for name, tensor in exact.items()} == {
        name: bits(tensor) for name, tensor in written(0, 2).items()
    }


def test_a_pending_load(folder: Path) -> None:
    module = Shard(2)
    pending = load_sharded_state(module, folder, rank=0, padding="zero", wait=False)
    assert isinstance(pending, Pending)
    assert pending.wait().aliases == ALIASES
    check(module, 0, 2, "zero")


def test_a_dtype_of_its_own_needs_a_cast(folder: Path) -> None:
    module = Shard(2).to(torch.float64)
    before = state_bits(module)
    with pytest.raises(DestinationTypeError, match=r"F32 and the destination '.*' has F64"):
        load_sharded_state(module, folder, rank=0, strict=False)
    assert state_bits(module) == before
    load_sharded_state(module, folder, rank=0, cast=True, strict=False)
    up = module.get_parameter("up")
    assert torch.equal(up[:13], written(0, 2)["up"].double())
    assert (up[13:] == 7).all()


# Files


def touch(folder: Path, *names: str) -> None:
    for name in names:
        save(folder / name, {name: torch.zeros(1)})


def test_parts_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    tensors = {f"t{k:02}": torch.full((2,), float(k)) for k in range(13)}
    save_parts(tmp_path, "model-rank-3", tensors, 13)
    touch(tmp_path, "model-rank-31-part-0.safetensors", "model-rank-3-part-0.safetensors.bak", "config.json")
    touch(
        tmp_path,
        "model-rank-3-part-01.safetensors",
        "xmodel-rank-3-part-13.safetensors",
        "model-rank-03-part-13.safetensors",
    )
    names = [os.path.basename(path) for path in rank_files(tmp_path, rank=3)]
    assert names == [f"model-rank-3-part-{part}.safetensors" for part in range(13)]
    destinations = {name: torch.zeros(3) for name in tensors}
    report = load_sharded_state(destinations, tmp_path, rank=3)
    assert len(report.filled) == 13
    assert {name: value.tolist() for name, value in destinations.items()} == {f"t{k:02}": [k, k, 0] for k in range(13)}


@pytest.mark.parametrize(
    ("parts", "lacking"),
    [((0, 2), "1"), ((1,), "0"), ((0, 1, 5, 6, 8), "2 to 4, 7"), ((99_999_999_999,), "0 to 99999999998")],
)
def test_a_missing_part(tmp_path: Path, parts: tuple[int, ...], lacking: str) -> None:
    touch(tmp_path, *(f"model-rank-0-part-{part}.safetensors" for part in parts))
    with pytest.raises(CheckpointError) as caught:
        load_sharded_state({}, tmp_path, rank=0)
    assert caught.value.file == str(tmp_path)
    assert caught.value.message == (
        f"rank 0 has {len(parts)} part(s) up to part {parts[-1]}, and these are missing: {lacking}"
    )


def test_no_file_for_a_rank(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileMissingError) as caught:
        load_sharded_state({}, folder, rank=2)
    assert isinstance(caught.value, FileNotFoundError)
    assert caught.value.file == str(folder)
    assert caught.value.message == "no file for rank 2; there are files for rank 0, rank 1"
    grid = tmp_path / "grid"
    grid.mkdir()
    touch(grid, *(f"model-pp-{pp}-tp-{tp}-part-0.safetensors" for pp in range(2) for tp in range(2)))
    with pytest.raises(
        FileMissingError, match="no file for pp_rank 1 tp_rank 2; there are files for pp_rank 0 tp_rank 0, "
    ):
        load_sharded_state({}, grid, pp_rank=1, tp_rank=2)


def test_files_of_the_other_form_or_of_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        FileMissingError, match=r"no file is named like model-pp-.*; there are files like model-rank-"
    ) as caught:
        load_sharded_state({}, folder, pp_rank=0, tp_rank=0)
    assert caught.value.hint == "Pass rank"
    grid, plain, empty = tmp_path / "grid", tmp_path / "plain", tmp_path / "empty"
    for path in (grid, plain, empty):
        path.mkdir()
    touch(grid, "model-pp-0-tp-0-part-0.safetensors")
    with pytest.raises(
        FileMissingError, match=r"no file is named like model-rank-.*; there are files like model-pp-"
    ) as caught:
        load_sharded_state({}, grid, rank=0)
    assert caught.value.hint == "Pass pp_rank and tp_rank"
    touch(plain, "model-00001-of-00002.safetensors")
    with pytest.raises(FileMissingError, match=r"there are other \*\.safetensors files.*use load_into or load_model"):
        load_sharded_state({}, plain, rank=0)
    with pytest.raises(FileMissingError, match=r"no file is named like model-rank-.*Pass the directory"):
        load_sharded_state({}, empty, rank=0)
    with pytest.raises(FileMissingError, match=r"no file is named like x-\{part\}"):
        load_sharded_state({}, empty, pattern="x-{part}")


def test_files_of_both_forms(folder: Path) -> None:
    touch(folder, "model-pp-0-tp-0-part-0.safetensors")
    choices: list[Any] = [{"rank": 0}, {"pp_rank": 0, "tp_rank": 0}, {"rank": 7}]
    for ranks in choices:
        with pytest.raises(CheckpointError, match=r"holds sharded state in two forms, such as model-.*pattern='model-"):
            load_sharded_state({}, folder, **ranks)
    module = Shard(2)
    load_sharded_state(module, folder, rank=0, pattern="model-rank-{rank}-part-{part}.safetensors")
    check(module, 0, 2, "keep")


def test_what_is_no_directory(folder: Path) -> None:
    file = next(folder.iterdir())
    with pytest.raises(FileNotDirectoryError):
        load_sharded_state({}, file, rank=0)
    with pytest.raises(FileMissingError, match="No such file"):
        load_sharded_state({}, folder / "none", rank=0)
    wrong: list[Any] = [None, 3, b"folder", "", "a\0b", ["a"]]
    for directory in wrong:
        with pytest.raises(SourceError, match="not a path"):
            load_sharded_state({}, directory, rank=0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "which files to read is not clear from no rank at all"),
        ({"pp_rank": 0}, "not clear from pp_rank"),
        ({"tp_rank": 0}, "not clear from tp_rank"),
        ({"rank": 0, "tp_rank": 0}, "not clear from rank, tp_rank"),
        ({"rank": 0, "pp_rank": 0, "tp_rank": 0}, "not clear from pp_rank, rank, tp_rank"),
        ({"rank": -1}, "rank is a number from 0, not -1"),
        ({"rank": True}, "rank is a number from 0, not True"),
        ({"rank": "0"}, "rank is a number from 0, not '0'"),
        ({"pp_rank": 0, "tp_rank": 1.0}, "tp_rank is a number from 0, not 1.0"),
        ({"pattern": "x-{part}", "rank": 1}, "has no place for rank"),
        ({"pattern": "x-{rank}-{part}"}, "needs rank"),
        ({"pattern": "x-{tp_rank}-{part}", "rank": 1}, "needs tp_rank"),
        ({"pattern": "x"}, r"must have \{part\} once"),
        ({"pattern": "x-{part}-{part}"}, r"must have \{part\} once"),
        ({"pattern": "x-{part"}, "is malformed"),
        ({"pattern": "x-{part!r}"}, "fields that mean nothing here"),
        ({"pattern": "x-{part.real}"}, "fields that mean nothing here"),
        ({"pattern": "x-{part:>9}"}, "fields that mean nothing here"),
        ({"pattern": "x-{part:099999999999d}"}, "fields that mean nothing here"),
        ({"pattern": "x-{}-{part}"}, "fields that mean nothing here"),
        ({"pattern": "x-{dp_rank}-{part}"}, "fields that mean nothing here"),
        ({"pattern": "../x-{part}"}, "names files below the directory"),
        ({"pattern": "x{rank}{part}", "rank": 1}, "nothing but digits between two numbers"),
        ({"pattern": "{part:02d}0{rank:02d}", "rank": 1}, "nothing but digits between two numbers"),
        ({"pattern": "{tp_rank}-{part}{tp_rank}", "tp_rank": 1}, "nothing but digits between two numbers"),
        ({"pattern": 3}, "pattern is a string, not 3"),
        ({"rank": 0, "padding": "fill"}, "padding is None"),
    ],
    ids=repr,
)
def test_options_that_make_no_sense(options: dict[str, Any], text: str) -> None:
    """They are refused before the directory is looked at."""
    with pytest.raises(OptionError, match=text):
        load_sharded_state({}, "/nowhere", **options)


def test_numbers_with_braces_between_them(tmp_path: Path) -> None:
    for rank in (1, 11):
        for part in range(2):
            save(tmp_path / f"1{rank}}}{{{part}.st", {f"t{part}": torch.full((2,), float(10 * rank + part))})
    destinations = {f"t{part}": torch.zeros(2) for part in range(2)}
    load_sharded_state(destinations, tmp_path, rank=11, pattern="1{rank}}}{{{part}.st")
    assert [value[0].item() for value in destinations.values()] == [110, 111]


def test_a_pattern_without_ranks_and_with_widths(tmp_path: Path) -> None:
    for part in range(3):
        save(tmp_path / f"a{{b}}.{part:04d}.st", {f"t{part}": torch.ones(2)})
    save(tmp_path / "a{b}.00003.st", {"other": torch.ones(2)})
    destinations = {f"t{part}": torch.zeros(2) for part in range(3)}
    load_sharded_state(destinations, tmp_path, pattern="a{{b}}.{part:04d}.st")
    assert all((value == 1).all() for value in destinations.values())


def test_what_is_neither_module_nor_mapping_nor_resolver(folder: Path) -> None:
    for destinations in (None, 3, [torch.zeros(3)]):
        with pytest.raises(DestinationTypeError, match="destinations are a mapping from names or a resolver"):
            load_sharded_state(destinations, folder, rank=0)


# Nothing is written when anything is wrong


def cut(folder: Path) -> None:
    path = folder / "model-rank-0-part-1.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def garble(folder: Path) -> None:
    path = folder / "model-rank-0-part-1.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def drop(folder: Path) -> None:
    (folder / "model-rank-0-part-0.safetensors").unlink()


def drop_last(folder: Path) -> None:
    """Nothing in the names tells that there was another part, but the destinations do."""
    (folder / "model-rank-0-part-1.safetensors").unlink()


def twice(folder: Path) -> None:
    save_file({"up": written(0, 2)["up"]}, folder / "model-rank-0-part-2.safetensors")


def rewrite(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = {name: tensor for name, tensor in {**written(0, 2), **changes}.items() if tensor is not None}
        save_parts(folder, "model-rank-0", tensors, 2)

    return change


FAULTS: dict[str, tuple[Callable[[Path], None], type[LoaderError], str]] = {
    "truncated part": (cut, CheckpointError, "model-rank-0-part-1"),
    "cut header": (garble, CheckpointError, "model-rank-0-part-1"),
    "missing part": (drop, CheckpointError, "these are missing: 0"),
    "missing last part": (drop_last, StrictError, "destination\\(s\\) without a tensor: "),
    "a tensor in two parts": (twice, CheckpointError, "the tensor is in "),
    "too many rows": (rewrite(up=torch.zeros(17, WIDTH)), DestinationError, r"padded destination 'up' has \[16, 12\]"),
    "too many rows of what is tied": (
        rewrite(embed=torch.zeros(17, WIDTH)),
        DestinationError,
        r"padded destination 'embed' has \[16, 12\]",
    ),
    "other dimensions": (rewrite(up=torch.zeros(16)), DestinationError, "padded destination 'up'"),
    "other dtype": (rewrite(up=torch.zeros(13, WIDTH).half()), DestinationTypeError, "F16"),
    "a scale that is missing": (rewrite(scale=None), StrictError, "1 destination\\(s\\) without a tensor: scale"),
    "a tensor too many": (rewrite(more=torch.zeros(1)), StrictError, "1 tensor\\(s\\) without a destination: more"),
}


@pytest.mark.parametrize("padding", ["keep", "zero"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_byte_is_as_it_was(folder: Path, fault: str, padding: Padding, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, kind, text = FAULTS[fault]
    spoil(folder)
    module = Shard(2)
    before = state_bits(module)

    def use(files: Files, path: str) -> None:
        raise AssertionError("a file was opened for its tensors")

    monkeypatch.setattr(Files, "use", use)
    with pytest.raises(kind, match=text) as caught:
        load_sharded_state(module, folder, rank=0, padding=padding)
    assert state_bits(module) == before
    assert caught.value.dirty == ()


def test_without_strict_what_is_missing_is_unfilled(folder: Path) -> None:
    rewrite(scale=None, more=torch.zeros(1))(folder)
    module = Shard(2)
    report = load_sharded_state(module, folder, rank=0, strict=False)
    assert (report.unfilled, report.unexpected) == (("scale",), ("more",))
    assert (module.get_parameter("scale") == 7).all()
    assert report.aliases == ALIASES


@pytest.mark.parametrize("padding", ["keep", "zero"])
def test_a_failure_in_the_middle_names_what_is_dirty(
    folder: Path, padding: Padding, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read_at = host.read_at

    def fail(fd: int, offset: int, pieces: Any, enough: int) -> int:
        reads.append(fd)
        if len(reads) == 2:
            raise OSError(5, "Input/output error")
        return read_at(fd, offset, pieces, enough)

    monkeypatch.setattr(host, "read_at", fail)
    module = Shard(2)
    with pytest.raises(StorageError, match="Input/output error") as caught:
        load_sharded_state(module, folder, rank=0, padding=padding, threads=1, direct_io=False)
    # "down" was read before, and of the other file only "embed" is padded.
    assert caught.value.dirty == (("embed",) if padding == "zero" else ()) + ("norm", "scale", "up")
    state = module.state_dict()
    assert bits(state["down"][:, :13]) == bits(written(0, 2)["down"])
    assert (state["down"][:, 13:] == (0 if padding == "zero" else 7)).all()
    assert (state["embed"][:15] == 7).all()
    assert (state["embed"][15:] == (0 if padding == "zero" else 7)).all()
    assert (state["qkv"] == 7).all()
    assert state["steps"] == 7


# Names within the memory of others


@pytest.fixture
def one(tmp_path: Path) -> Path:
    save(tmp_path / "model-rank-0-part-0.safetensors", {"a": torch.arange(12.0).reshape(4, 3)})
    return tmp_path


def views(base: torch.Tensor) -> Iterator[torch.Tensor]:
    yield base
    yield base[1:3]
    yield base[2]
    yield base[:, 1]
    yield base.t()
    yield base[::2, ::2]
    yield base.flatten()
    yield base.view(torch.uint8)
    yield base.view(torch.int16)[:, 1:5]
    yield base[3, 2]


def test_a_view_of_what_is_filled_counts_as_filled(one: Path) -> None:
    count = sum(1 for _ in views(torch.zeros(4, 3)))
    for k in range(count):
        base = torch.zeros(4, 3)
        view = list(views(base))[k]
        for name in ("0", "view"):  # before and after it in order
            report: LoadReport = load_sharded_state({"a": base, name: view}, one, rank=0)
            assert report.aliases == {name: "a"}
            assert report.filled == ("a",)


def test_a_view_of_what_is_filled_with_gaps(one: Path) -> None:
    base = torch.zeros(9, 7)
    filled = base[1:5, 2:5]
    for view in (
        filled[1:3],
        filled.t(),
        filled[::2, ::2],
        base[2, 2:5],
        base[1:5:3, 4],
        filled.view(torch.uint8)[:, 3:],
    ):
        report = load_sharded_state({"a": filled, "view": view}, one, rank=0)
        assert report.aliases == {"view": "a"}
    for view in (base, base[1:5], base[1:6, 2:5], base[1:5, 1:5], base[1, :3], base[0], torch.zeros(4, 3)):
        filled.fill_(0)
        with pytest.raises(StrictError, match="without a tensor: view"):
            load_sharded_state({"a": filled, "view": view}, one, rank=0)
        assert not base.any()


def test_a_view_of_what_is_padded(one: Path) -> None:
    """It is one of the destination, which is filled as far as was asked for."""
    base = torch.zeros(6, 3)
    for view in (base, base[4:], base[1]):
        report = load_sharded_state({"a": base, "view": view}, one, rank=0)
        assert report.aliases == {"view": "a"}
    with pytest.raises(StrictError, match="without a tensor: view"):
        load_sharded_state({"a": base[:5], "view": base[:6]}, one, rank=0)


def test_a_list_of_views(one: Path) -> None:
    base, apart = torch.zeros(4, 3), torch.zeros(2)
    report = load_sharded_state({"a": base, "b": [base[0], Target(base[1:])]}, one, rank=0)
    assert report.aliases == {"b": "a"}
    for parts in ([base[0], apart], []):
        with pytest.raises(StrictError, match="without a tensor: b"):
            load_sharded_state({"a": base, "b": parts}, one, rank=0)


def test_two_names_in_one_storage_are_both_filled(tmp_path: Path) -> None:
    save(tmp_path / "model-rank-0-part-0.safetensors", {"a": torch.ones(2, 3), "b": torch.full((2, 3), 2.0)})
    base = torch.zeros(4, 3)
    report = load_sharded_state(
        {"a": base[:2], "b": base[2:], "c": base[3], "all": base}, tmp_path, rank=0, strict=False
    )
    assert base.tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    assert (report.filled, report.aliases) == (("a", "b"), {"c": "b"})
    assert report.unfilled == ("all",)  # a writer would have kept that one
    # Neither of two that share bytes can be left out without a word.
    with pytest.raises(DestinationBufferError, match="'a' and 'b' overlap in memory"):
        load_sharded_state({"a": base[:2], "b": base[1:3]}, tmp_path, rank=0)


def test_equal_views_are_filled_by_the_name_that_was_kept(one: Path) -> None:
    base = torch.zeros(4, 3)
    report = load_sharded_state({"b": base, "a": base.view(4, 3), "c": base}, one, rank=0)
    assert (report.filled, report.aliases) == (("a",), {"b": "a", "c": "a"})


def test_every_load_counts_views_as_filled(one: Path) -> None:
    class Views(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.zeros(4, 3))
            self.register_buffer("row", self.a.data[1])

    module = Views()
    report = load_model(module, one / "model-rank-0-part-0.safetensors")
    assert report.aliases == {"row": "a"}
    assert module.get_buffer("row").tolist() == [3, 4, 5]


def test_a_destination_without_elements_needs_no_tensor(one: Path) -> None:
    """Writers leave it out; where there is one, it is filled as any other."""
    base = torch.zeros(4, 3)
    for none in (torch.empty(0, 3), Target(torch.empty(0, 3)), [torch.empty(0, 3), Target(torch.empty(0, 3))]):
        report = load_sharded_state({"a": base, "none": none}, one, rank=0)
        assert (report.filled, report.unfilled, report.aliases) == (("a",), (), {})
    with pytest.raises(StrictError, match="without a tensor: some"):
        load_sharded_state({"a": base, "some": [torch.empty(0, 3), torch.empty(1, 3)]}, one, rank=0)
    save(one / "model-rank-0-part-1.safetensors", {"none": torch.empty(0, 3)})
    report = load_sharded_state({"a": base, "none": torch.empty(0, 3)}, one, rank=0)
    assert report.filled == ("a", "none")
    with pytest.raises(StrictError, match="without a destination: none"):
        load_sharded_state({"a": base}, one, rank=0)
    with pytest.raises(DestinationError, match=r"padded destination 'none' has \[0, 2\]"):
        load_sharded_state({"a": base, "none": torch.empty(0, 2)}, one, rank=0)


def test_many_views_of_many_tensors(tmp_path: Path) -> None:
    """Each is looked for among its neighbours only, and found in the right one."""
    tensors = {f"t{k:04}": torch.full((6,), float(k)) for k in range(3000)}
    save(tmp_path / "model-rank-0-part-0.safetensors", tensors)
    base = torch.zeros(3000, 8)
    destinations = {name: base[k, 1:7] for k, name in enumerate(tensors)}
    orphans = {f"v{k:04}": base[k, 2:5] for k in range(3000)}
    gaps = {f"x{k:04}": base[k, 6:] for k in range(0, 3000, 7)}
    report = load_sharded_state({**destinations, **orphans, **gaps}, tmp_path, rank=0, strict=False)
    assert report.aliases == {f"v{k:04}": f"t{k:04}" for k in range(3000)}
    assert report.unfilled == tuple(gaps)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], bool]:
    """A view of a block of bytes, another one of the same block, and whether that was sliced from the first."""
    shape = draw(shapes(max_dims=3, max_size=5))
    itemsize = draw(st.sampled_from([1, 2, 4]))
    layout = draw(layouts(shape, itemsize))
    block = np.zeros(layout.nbytes + 8, np.uint8)
    outer = layout.view(block, np.dtype(f"u{itemsize}"))
    if draw(st.booleans()):
        return outer, outer[draw(basic_indices(shape))][...], True
    other = draw(layouts(draw(shapes(max_dims=3, max_size=3)), 2))
    if other.nbytes > len(block):
        return outer, outer[..., :0] if shape else outer, True
    return outer, other.view(block, np.dtype(np.uint16)), False


def addresses(array: np.ndarray[Any, Any]) -> set[int]:
    start = array.__array_interface__["data"][0]
    offsets = sum(
        (np.arange(size).reshape(-1, *(1,) * (array.ndim - axis - 1)) * step)
        for axis, (size, step) in enumerate(zip(array.shape, array.strides, strict=True))
    ) + np.zeros(array.shape, int)
    return {start + int(offset) + byte for offset in offsets.flat for byte in range(array.itemsize)}


@settings(max_examples=400, deadline=None)
@given(pair=pairs())
def test_what_lies_within_what(pair: tuple[Any, Any, bool]) -> None:
    """Against the bytes themselves: yes is always true, and no is never said of a slice."""
    outer, inner, sliced = pair
    memories = []
    for array in (outer, inner):
        memory = describe(np.asarray(array))
        assert isinstance(memory, Memory)
        memories.append(memory)
    inside = addresses(inner) <= addresses(outer) and inner.size > 0
    said = contains(*memories)
    assert inside or not said
    assert not sliced or said == inside


# Devices


@pytest.mark.parametrize("padding", ["keep", "zero"])
@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_a_rank_on_a_device(driver: Driver, tmp_path: Path, vendor: Any, padding: Padding) -> None:
    """On one that is not the current one, with all copies late; views and tied names are found there too."""
    driver.vendor, driver.mode = vendor, Mode.DEFERRED
    tensors = {name: tensor for name, tensor in written(1, 2).items() if name != "steps"}
    save_parts(tmp_path, "model-rank-1", tensors, 3)
    padded = Shard(2).state_dict()
    room = Room(driver, {name: padded[name] for name in tensors}, device=2)
    destinations: dict[str, Any] = dict(room.tensors)
    destinations["head"] = room.memories["embed"].tensor((16, WIDTH), F32, offset=GUARD)
    destinations["row"] = room.memories["embed"].tensor((WIDTH,), F32, offset=GUARD + 4 * WIDTH)
    report = load_sharded_state(destinations, tmp_path, rank=1, padding=padding)
    assert report.aliases == {"head": "embed", "row": "embed"}
    guard = torch.full((1,), 0xA5, dtype=torch.uint8)
    wanted = {}
    for name, tensor in tensors.items():
        kept = guard.expand(padded[name].nbytes).clone().view(padded[name].dtype).reshape(padded[name].shape)
        wanted[name] = torch.zeros_like(kept) if padding == "zero" else kept
        wanted[name][tuple(map(slice, tensor.shape))] = tensor
    room.check(wanted)
    assert driver.context(0).uses == driver.context(1).uses == 0
    assert driver.seen().failed == driver.seen().pageable == driver.live().pending == 0

    before = {name: memory.read() for name, memory in room.memories.items()}
    past = room.memories["embed"].tensor((16 * WIDTH + 1,), F32, offset=GUARD)
    with pytest.raises(StrictError, match="without a tensor: past"):
        load_sharded_state({**destinations, "past": past}, tmp_path, rank=1, padding=padding)
    assert {name: memory.read() for name, memory in room.memories.items()} == before
