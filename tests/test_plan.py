"""Bounds, reads and plans: a small interpreter performs the reads over bytes in memory and NumPy says what is right."""

from __future__ import annotations

import builtins
import io
import itertools
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlpack_loader.bounds import Bounds
from dlpack_loader.destination import Memory, Target, transfer_into
from dlpack_loader.dtype import BY_CODE
from dlpack_loader.errors import OptionError
from dlpack_loader.framework.numpy import describe
from dlpack_loader.header import Entry
from dlpack_loader.load import load_into
from dlpack_loader.plan import Plan
from dlpack_loader.reader import safe_open
from dlpack_loader.reads import MAX_SEGMENTS, Axis, Gather, Runs, Scatter, Segment, Transfer
from dlpack_loader.runtime.arrays import numpy_dtype
from tests.files import write_raw
from tests.strategies import Array, Layout, basic_indices, layouts, shapes

GUARD = 0xA5


@dataclass
class Interpreter:
    """Performs reads over files that are bytes, into destinations that are blocks of bytes."""

    files: dict[str, bytes]
    blocks: list[Array]
    """For each destination the block that it lies in."""
    origins: list[int]
    """Byte of its block at which each destination's first element is."""
    writes: list[Array] = field(init=False)
    """How often each byte of a block was written."""

    def __post_init__(self) -> None:
        self.writes = [np.zeros_like(block) for block in self.blocks]

    def perform(self, read: Scatter | Runs | Gather) -> None:
        if isinstance(read, Scatter):
            data, at = self._read(read.file, read.offset, read.nbytes), 0
            for part in read.segments:
                self._write(part.destination, part.offset, data[at : at + part.nbytes])
                at += part.nbytes
            assert at == read.nbytes
        elif isinstance(read, Runs):
            for i in range(read.axis.steps):
                data = self._read(read.file, read.offset + i * read.axis.source, read.size)
                self._write(read.destination, read.at + i * read.axis.target, data)
        else:
            data = self._read(read.file, read.offset, read.nbytes)
            for position in itertools.product(*(range(axis.steps) for axis in read.axes)):
                source = read.origin + sum(i * axis.source for i, axis in zip(position, read.axes, strict=True))
                target = read.at + sum(i * axis.target for i, axis in zip(position, read.axes, strict=True))
                assert 0 <= source <= len(data) - read.unit
                self._write(read.destination, target, _convert(data[source : source + read.unit], read.cast))

    def _read(self, file: str, offset: int, nbytes: int) -> bytes:
        assert 0 <= offset <= offset + nbytes <= len(self.files[file])
        assert nbytes > 0
        return self.files[file][offset : offset + nbytes]

    def _write(self, destination: int, at: int, data: bytes) -> None:
        begin = self.origins[destination] + at
        assert 0 <= begin <= begin + len(data) <= self.blocks[destination].size
        self.blocks[destination][begin : begin + len(data)] = np.frombuffer(data, np.uint8)
        self.writes[destination][begin : begin + len(data)] += 1


def _convert(unit: bytes, cast: tuple[Any, Any] | None) -> bytes:
    if cast is None:
        return unit
    return np.frombuffer(unit, numpy_dtype(cast[0])).astype(numpy_dtype(cast[1])).tobytes()


@dataclass
class Part:
    """One destination of a case: what fills it, and where it lies in its block."""

    entry: Entry
    index: Any
    layout: Layout
    cast: str | None


CODES = ("U8", "F16", "F32", "F64")
BOUNDS = st.builds(
    Bounds,
    staging_bytes=st.sampled_from([1, 5, 24, 100, 1 << 20]),
    threads=st.integers(1, 3),
    chunk_bytes=st.sampled_from([1, 3, 7, 16, 64, 1 << 20]),
    over_read=st.sampled_from([1, 1.5, 2.0, 4.0, 1e9]),
)


@st.composite
def parts(draw: st.DrawFn) -> list[Part]:
    """Destinations of the tensors of two files; some tensors have two, some none, some lie side by side."""
    ends = {"a": draw(st.integers(8, 20)), "b": 8}
    chosen: list[Part] = []
    for number in range(draw(st.integers(1, 4))):
        file, code, shape = draw(st.sampled_from("aab")), draw(st.sampled_from(CODES)), draw(shapes(4, 5))
        nbytes = int(np.prod(shape)) * BY_CODE[code].bits // 8
        entry = Entry(str(number), code, shape, file, ends[file], nbytes)
        ends[file] += nbytes
        for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2]))):
            index = draw(st.just(...) | basic_indices(shape))
            cast = draw(st.sampled_from([None, None, "F16", "F64"])) if code.startswith("F") else None
            goal = BY_CODE[cast or code]
            view = np.empty(shape, "u1")[index]
            chosen.append(Part(entry, index, draw(layouts(np.shape(view), goal.bits // 8)), cast))
    return chosen


def contents(ends: dict[str, int]) -> dict[str, bytes]:
    """Files of bytes that are small numbers in every dtype, so that casts are exact and no two neighbours are equal."""
    numbers = np.random.default_rng(7)
    return {file: numbers.integers(0, 60, end, np.uint8).tobytes() for file, end in ends.items()}


@given(parts(), BOUNDS)
@settings(max_examples=200, deadline=None)
def test_reads_fill_destinations_as_numpy_would(cases: list[Part], bounds: Bounds) -> None:
    check_plan(cases, bounds)


CHOICES: list[Any] = [
    np.s_[:, ::-1],
    np.s_[::-1, 1:3],
    np.s_[::-2, ::-1, ::-1],
    np.s_[1:, :, ::3],
    np.s_[:, -1],
    np.s_[:, 1:2, ::-2],
]


@pytest.mark.parametrize("number", range(len(CHOICES)))
@pytest.mark.parametrize("staging_bytes", [1, 16, 100, 200, 1 << 20])
@pytest.mark.parametrize("steps", [(1, 1, 1), (-2, 1, -1)])
def test_steps_in_several_dimensions(number: int, staging_bytes: int, steps: tuple[int, int, int]) -> None:
    index, of = CHOICES[number], entry("F16", (4, 3, 5), 11)
    shape = np.empty(of.shape)[index].shape
    layout = Layout(shape, 2, tuple(range(len(shape)))[::-1], steps[: len(shape)], 1, 3)
    for cast in (None, "F64"):
        if cast:
            layout = Layout(shape, 8, layout.order, layout.steps, 0, 0)
        for chunk_bytes in (1, 24, 1 << 20):
            bounds = Bounds(staging_bytes=staging_bytes, threads=1, chunk_bytes=chunk_bytes, over_read=4)
            check_plan([Part(of, index, layout, cast)], bounds)


def check_plan(cases: list[Part], bounds: Bounds) -> None:
    """Make the plan of these destinations, check that each read keeps the bounds, perform all and look at the bytes."""
    files = contents({part.entry.file: 8 for part in cases} | _ends(cases))
    blocks, expected, marks, transfers, origins = [], [], [], [], []
    for number, part in enumerate(cases):
        goal = np.dtype(BY_CODE[part.cast or part.entry.dtype].numpy)
        block = np.full(part.layout.nbytes, GUARD, np.uint8)
        memory = describe(part.layout.view(block, goal))
        assert memory is not None
        blocks.append(block)
        origins.append(memory.pointer - block.__array_interface__["data"][0])
        transfers.append(transfer_into(memory, part.entry, number, str(number), part.index, cast=True))

        raw = files[part.entry.file][part.entry.offset :][: part.entry.nbytes]
        tensor = np.frombuffer(raw, BY_CODE[part.entry.dtype].numpy).reshape(part.entry.shape)
        right, mark = block.copy(), np.zeros_like(block)
        with np.errstate(over="ignore"):
            part.layout.view(right, goal)[...] = tensor[part.index]
        part.layout.view(mark, np.dtype(f"u{goal.itemsize}"))[...] = int.from_bytes(b"\1" * goal.itemsize, "little")
        expected.append(right)
        marks.append(mark)

    plan = Plan.make(transfers, [part.entry.name for part in cases], bounds)
    run = Interpreter(files, blocks, origins)
    reads = list(plan.reads())
    with np.errstate(over="ignore"):
        for read in reads:
            _check_bounds(read, bounds)
            run.perform(read)
    for have, want in zip(run.blocks, expected, strict=True):
        assert have.tobytes() == want.tobytes()
    for have, want in zip(run.writes, marks, strict=True):
        assert have.tobytes() == want.tobytes()  # each wanted byte once, no other

    totals = plan.totals
    gathers = [read for read in reads if isinstance(read, Gather)]
    assert totals.reads == sum(read.axis.steps if isinstance(read, Runs) else 1 for read in reads)
    assert totals.bytes_written == sum(int(mark.sum()) for mark in marks)
    assert totals.staged_bytes == sum(read.nbytes for read in gathers)
    assert totals.direct_bytes == sum(read.nbytes for read in reads if not isinstance(read, Gather))
    assert totals.bytes_read == totals.direct_bytes + totals.staged_bytes
    largest = max((read.nbytes for read in gathers), default=0)
    assert totals.peak_staging == largest * min(bounds.threads, len(gathers))


def _ends(cases: list[Part]) -> dict[str, int]:
    last = sorted(cases, key=lambda part: part.entry.offset + part.entry.nbytes)
    return {part.entry.file: part.entry.offset + part.entry.nbytes for part in last}


def _check_bounds(read: Scatter | Runs | Gather, bounds: Bounds) -> None:
    if isinstance(read, Scatter):
        assert read.nbytes <= bounds.chunk_bytes
        assert len(read.segments) <= MAX_SEGMENTS
        # No Scatter crosses a multiple of the chunk in the file.
        assert read.offset // bounds.chunk_bytes == (read.offset + read.nbytes - 1) // bounds.chunk_bytes
    elif isinstance(read, Runs):
        assert read.nbytes == read.size * read.axis.steps <= bounds.chunk_bytes
    else:
        units = int(np.prod([axis.steps for axis in read.axes], dtype=int))
        # What is guaranteed of each single Gather: it reads at most over_read bytes for each byte of its units, and
        # besides, where a unit is under 64 bytes, 1 KiB between one unit and the next.
        between = 1024 * (units - 1) if read.unit < 64 else 0
        assert read.nbytes <= bounds.over_read * units * read.unit + between
        # A unit of a cast is read whole, however little staging there is.
        least = read.unit if read.cast else 1
        assert read.nbytes <= max(min(bounds.chunk_bytes, bounds.scratch_bytes), least)


def entry(code: str, shape: tuple[int, ...], offset: int = 0, *, name: str = "x", file: str = "f") -> Entry:
    return Entry(name, code, shape, file, offset, int(np.prod(shape, dtype=object)) * BY_CODE[code].bits // 8)


def into(array: Array, of: Entry, index: Any = ..., number: int = 0) -> Transfer:
    memory = describe(array)
    assert memory is not None
    return transfer_into(memory, of, number, of.name, index)


def planned(transfers: list[Transfer], **bounds: Any) -> list[Scatter | Runs | Gather]:
    return list(Plan.make(transfers, [transfer.name for transfer in transfers], Bounds(**bounds)).reads())


def test_neighbours_share_a_read() -> None:
    some = [
        into(np.empty(2, np.float32), entry("F32", (2,), 100 + 8 * k), number=k) for k in range(2 * MAX_SEGMENTS + 1)
    ]
    reads = planned(some)
    assert [(read.offset, read.nbytes) for read in reads] == [(100, 8192), (8292, 8192), (16484, 8)]
    assert all(isinstance(read, Scatter) for read in reads)
    assert [segment.destination for read in reads for segment in read.segments] == list(range(len(some)))  # type: ignore[union-attr]


def test_a_gap_or_another_file_ends_a_read() -> None:
    near, far = entry("U8", (4,), 8), entry("U8", (4,), 13)
    other = entry("U8", (4,), 17, file="g")
    reads = planned([into(np.empty(4, np.uint8), e, number=k) for k, e in enumerate((near, far, other))])
    assert [(read.file, read.offset, read.nbytes) for read in reads] == [("f", 8, 4), ("f", 13, 4), ("g", 17, 4)]


def test_long_tensors_are_cut_at_multiples_of_the_chunk_in_the_file() -> None:
    first = into(np.empty(50, np.uint8), entry("U8", (50,), 50))
    second = into(np.empty(10_000, np.uint8), entry("U8", (10_000,), 100), number=1)
    reads = planned([second, first], chunk_bytes=4096)
    assert reads == [
        Scatter("f", 50, 4046, (Segment(0, 0, 50), Segment(1, 0, 3996))),
        Scatter("f", 4096, 4096, (Segment(1, 3996, 4096),)),
        Scatter("f", 8192, 1908, (Segment(1, 8092, 1908),)),
    ]


def test_a_tensor_that_ends_at_a_cut_leaves_nothing_over() -> None:
    reads = planned(
        [
            into(np.empty(16, np.uint8), entry("U8", (16,), 16)),
            into(np.empty(16, np.uint8), entry("U8", (16,), 32), number=1),
        ],
        chunk_bytes=16,
    )
    assert [(read.offset, read.nbytes) for read in reads] == [(16, 16), (32, 16)]


def test_reads_come_in_file_order() -> None:
    plain = into(np.empty(64, np.uint8), entry("U8", (64,), 0))
    strided = into(np.empty((8, 4), np.uint8), entry("U8", (8, 8), 64), np.s_[:, :4], 1)
    other = into(np.empty(8, np.uint8), entry("U8", (8,), 128), number=2)
    elsewhere = into(np.empty((8, 4), np.uint8), entry("U8", (8, 8), 0, file="g"), np.s_[:, :4], 3)
    reads = planned([elsewhere, other, strided, plain])
    assert [(type(read), read.file, read.offset) for read in reads] == [
        (Scatter, "f", 0),
        (Gather, "f", 64),
        (Scatter, "f", 128),
        (Gather, "g", 0),
    ]


def test_several_tensors_fill_one_fused_destination() -> None:
    fused = np.zeros((6, 2), np.uint8)
    raw = bytes(range(32))
    parts_of = [
        into(fused[2 * k : 2 * k + 2], entry("U8", (2, 2), 8 + 4 * k, name=name), number=k)
        for k, name in enumerate(("v", "k", "q"))
    ]
    run = Interpreter({"f": raw}, [fused.reshape(-1)] * 3, [0, 4, 8])
    reads = planned(parts_of)
    assert [(read.offset, read.nbytes) for read in reads] == [(8, 12)]
    run.perform(reads[0])
    assert fused.reshape(-1).tolist() == list(range(8, 20))


@pytest.mark.parametrize(
    ("index", "over_read", "kind"),
    [
        (np.s_[:, :500], 2.0, Gather),  # 1,000 wanted of every 2,000 bytes
        (np.s_[:, :499], 2.0, Runs),  # 998 of 2,000
        (np.s_[:, :499], 3.0, Gather),
        (np.s_[::2], 1.0, Runs),
        (np.s_[:, ::-1], 1.0, Gather),  # every byte is wanted, in another order
        (np.s_[:, :31], 1.0, Runs),  # 62 bytes, and the next after 1,938 more
        (np.s_[0, ::513], 1.0, Gather),  # 2 bytes, and the next after 1,024 more
        (np.s_[0, ::514], 1.0, Runs),
        (np.s_[:1, 0::400], 1.0, Gather),
    ],
)
def test_gaps_are_read_along_only_where_that_is_cheap(index: Any, over_read: float, kind: type) -> None:
    array = np.empty(np.empty((4, 1000))[index].shape, np.float16)
    reads = planned([into(array, entry("F16", (4, 1000)), index)], over_read=over_read)
    assert {type(read) for read in reads} == {kind}
    if kind is Runs:
        assert sum(read.nbytes for read in reads) == array.nbytes


def test_long_pieces_are_read_by_themselves() -> None:
    index = np.s_[:, : 1 << 16]
    reads = planned([into(np.empty((3, 1 << 16), np.uint8), entry("U8", (3, 100_000)), index)])
    assert reads == [Runs("f", 0, 0, 0, 1 << 16, Axis(3, 100_000, 1 << 16))]


def test_pieces_longer_than_the_chunk_are_cut() -> None:
    index = np.s_[:, : 1 << 16]
    reads = planned([into(np.empty((2, 1 << 16), np.uint8), entry("U8", (2, 100_000)), index)], chunk_bytes=40_000)
    assert [(read.offset, read.nbytes) for read in reads] == [
        (0, 40_000),
        (40_000, 25_536),
        (100_000, 40_000),
        (140_000, 25_536),
    ]


def test_pieces_are_grouped_up_to_the_chunk() -> None:
    index = np.s_[:, :64]
    reads = planned([into(np.empty((5, 64), np.uint8), entry("U8", (5, 1000)), index)], chunk_bytes=150)
    assert reads == [
        Runs("f", 0, 0, 0, 64, Axis(2, 1000, 64)),
        Runs("f", 2000, 0, 128, 64, Axis(2, 1000, 64)),
        Runs("f", 4000, 0, 256, 64, Axis(1, 1000, 64)),
    ]


def test_dimensions_that_step_evenly_become_one() -> None:
    transfer = into(np.empty((2, 3, 4, 5), np.float32), entry("F32", (2, 3, 4, 10)), np.s_[..., :5])
    assert (transfer.run, transfer.axes) == (20, (Axis(24, 40, 20),))
    assert transfer.extent() == (0, 23 * 40 + 20)
    backwards = into(np.empty((4, 6), np.float32), entry("F32", (4, 6)), np.s_[::-1])
    assert (backwards.offset, backwards.run, backwards.axes) == (72, 24, (Axis(4, -24, 24),))
    assert backwards.extent() == (0, 96)


def test_a_sparse_part_of_a_terabyte_is_a_small_plan_at_once() -> None:
    of = entry("F32", (1 << 38,))
    count = len(range(0, 1 << 38, 1000))
    memory = Memory(1 << 40, (2, 32, 1), (count,), None, (1, 0), None, 4 * count)
    plan = Plan.make([transfer_into(memory, of, 0, "x", np.s_[::1000])], ["x"], Bounds())
    assert len(pickle.dumps(plan)) < 2000
    assert list(itertools.islice(plan.reads(), 2)) == [
        Runs("f", 0, 0, 0, 4, Axis(MAX_SEGMENTS, 4000, 4)),
        Runs("f", 4000 * MAX_SEGMENTS, 0, 4 * MAX_SEGMENTS, 4, Axis(MAX_SEGMENTS, 4000, 4)),
    ]


def test_a_whole_terabyte_is_read_in_chunks() -> None:
    of = entry("U8", (1 << 40,), 8)
    memory = Memory(1 << 40, (1, 8, 1), of.shape, None, (1, 0), None, of.nbytes)
    plan = Plan.make([transfer_into(memory, of, 0, "x")], ["x"], Bounds(chunk_bytes=1 << 20))
    first, second = itertools.islice(plan.reads(), 2)
    assert (first.offset, first.nbytes, second.offset, second.nbytes) == (8, (1 << 20) - 8, 1 << 20, 1 << 20)


def test_transfers_without_bytes_need_no_read() -> None:
    plan = Plan.make([into(np.empty((0, 3), np.float32), entry("F32", (0, 3)))], ["x"], Bounds())
    assert list(plan.reads()) == []
    assert plan.totals.reads == plan.totals.bytes_read == plan.totals.peak_staging == 0
    assert "0 bytes for 0 written\n" in plan.explain()


@pytest.mark.parametrize("name", ["staging_bytes", "threads", "chunk_bytes"])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, float("nan"), "1", None])
def test_bounds_are_positive_integers(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"{name} must be a positive integer, not {value!r}"):
        Bounds(**{name: value})


@pytest.mark.parametrize("value", [0, 0.99, -1.0, float("nan"), True, "2", None])
def test_over_read_is_at_least_one(value: Any) -> None:
    with pytest.raises(OptionError, match="over_read must be a number of at least 1"):
        Bounds(over_read=value)


def test_bounds_have_upper_ends() -> None:
    assert Bounds(threads=1024, chunk_bytes=0x7FFFF000, over_read=1).scratch_bytes == (64 << 20) // 1024
    with pytest.raises(OptionError, match="threads is at most 1024, not 1025"):
        Bounds(threads=1025)
    with pytest.raises(OptionError, match="chunk_bytes is at most 2,147,479,552, not 2,147,479,553"):
        Bounds(chunk_bytes=0x7FFFF001)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """``a``: 1,000 F32, ``b``: 100 x 10 F32, ``c``: 50 x 64 BF16, side by side, numbered through."""
    data = np.arange(2000, dtype=np.float32).tobytes() + (np.arange(3200, dtype=np.uint32) << 7).astype("u2").tobytes()
    header = {
        "a": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]},
        "b": {"dtype": "F32", "shape": [100, 10], "data_offsets": [4000, 8000]},
        "c": {"dtype": "BF16", "shape": [50, 64], "data_offsets": [8000, 14400]},
    }
    return write_raw(tmp_path / "m.safetensors", header, data)


def test_explain_counts_by_hand(checkpoint: Path) -> None:
    with safe_open(checkpoint, "np", threads=2, staging_bytes=1 << 20) as reader:
        plan = reader.plan(
            {
                "a": np.empty(1000, np.float32),
                "b": Target(np.empty((100, 5), np.float32), np.s_[:, :5]),
                "c": Target(np.empty((5, 64), np.uint16), np.s_[::10], reinterpret=True),
            }
        )
    # b: 99 steps of 40 bytes and the 20 of the last. c: five pieces of 128 bytes, 1,280 apart.
    assert plan.explain().splitlines() == [
        "3 transfers into 3 destinations from 1 file(s)",
        "  reads     7 of up to 4,194,304 bytes, 2 at a time",
        "  read      8,620 bytes for 6,640 written (1.30 x)",
        "  direct    4,640 bytes, from storage into the destination",
        "  staged    3,980 bytes, through host memory of ours: pieces, strides or a cast",
        "  staging   3,980 bytes at the peak, 1,048,576 if files are cold",
        "  these are b",
    ]


DESTINATIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "whole": lambda: {"a": np.zeros(1000, np.float32), "b": np.zeros((100, 10), np.float32)},
    "cast": lambda: {"a": np.zeros(1000, np.float64), "b": np.zeros((100, 10), np.float16)},
    "transposed": lambda: {"b": np.zeros((10, 100), np.float32).T},
    "reversed": lambda: {"b": Target(np.zeros((100, 10), np.float32), np.s_[::-1, ::-1])},
    "sparse": lambda: {"c": Target(np.zeros((5, 64), np.uint16), np.s_[::10], reinterpret=True)},
    "twice": lambda: {"a": [np.zeros(1000, np.float32), Target(np.zeros(3, np.float64), np.s_[5:8])]},
}


@pytest.mark.parametrize("case", list(DESTINATIONS))
def test_totals_are_what_a_run_reports(checkpoint: Path, case: str) -> None:
    destinations = DESTINATIONS[case]()
    with safe_open(checkpoint, "np", threads=2, staging_bytes=4000, direct_io=False) as reader:
        totals = reader.plan(destinations, strict=False, cast=True).totals
        report = load_into(reader, destinations, strict=False, cast=True)
    assert totals.bytes_written > 0
    assert totals.peak_staging <= 4000
    assert (report.bytes_read, report.bytes_written) == (totals.bytes_read, totals.bytes_written)
    assert (report.direct_bytes, report.staged_bytes) == (totals.direct_bytes, totals.staged_bytes)
    numbers = np.arange(2000, dtype=np.float32)
    bits = (np.arange(3200, dtype=np.uint32) << 7).astype(np.uint16)
    whole: dict[str, Array] = {"a": numbers[:1000], "b": numbers[1000:].reshape(100, 10), "c": bits.reshape(50, 64)}
    for name, targets in destinations.items():
        for target in targets if isinstance(targets, list) else [targets]:
            part = target if isinstance(target, Target) else Target(target)
            assert np.array_equal(part.destination, whole[name][part.index].astype(part.destination.dtype))


def _no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a file was opened")

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(io, "open", refuse)
    monkeypatch.setattr(builtins, "open", refuse)


def test_making_a_plan_opens_no_file(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destinations = DESTINATIONS["cast"]()
    with safe_open(checkpoint, "np") as reader:
        _no_files(monkeypatch)
        plan = reader.plan(destinations, strict=False, cast=True)
        assert plan.totals.bytes_read == 8000
        assert "these are a, b" in plan.explain()
        with pytest.raises(AssertionError, match="a file was opened"):  # the trap works
            load_into(reader, destinations, strict=False, cast=True)
    assert all(not array.any() for array in destinations.values())


def test_a_plan_is_data(checkpoint: Path) -> None:
    with safe_open(checkpoint, "np") as reader:
        plan = reader.plan(DESTINATIONS["sparse"](), strict=False)
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert list(_kinds(again.reads())) == ["Runs"]


def _kinds(reads: Iterator[Scatter | Runs | Gather]) -> Iterator[str]:
    return (type(read).__name__ for read in reads)
