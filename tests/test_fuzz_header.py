"""The parser and Rust agree on headers that hypothesis makes; and the fuzzer finds faults that are planted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlpack_loader import header, header_json
from dlpack_loader.dtype import BITS
from tests import fuzz_header
from tests.header_oracle import compare, file_bytes

_SIZES = st.one_of(st.integers(0, 9), st.sampled_from([1 << 32, 1 << 61, (1 << 64) - 1, 1 << 64, -1]))
_NAMES = st.one_of(st.sampled_from(["a", "b", "", ":", "-", "__metadata__", "dtype"]), st.text(max_size=8))
_JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_NAMES, inner, max_size=3)),
    max_leaves=6,
)
_METADATA = st.one_of(st.none(), st.dictionaries(_NAMES, st.text(max_size=6), max_size=3), _JUNK)


class Layout:
    """Draws entries one after another, so that a good part of the headers is good."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.cursor = 0

    def entry(self) -> dict[str, Any]:
        dtype = self.draw(st.sampled_from(list(BITS)))
        shape = self.draw(st.lists(_SIZES, max_size=3))
        bits = BITS[dtype]
        for size in shape:
            bits *= size
        nbytes = bits // 8 if 0 <= bits < 1 << 16 else self.draw(st.integers(0, 64))
        begin = max(0, self.cursor + self.draw(st.sampled_from([0] * 12 + [-1, 1, 8])))
        self.cursor = begin + nbytes
        entry: dict[str, Any] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + nbytes]}
        if self.draw(st.integers(0, 9)) == 0:
            entry[self.draw(st.sampled_from(list(entry)))] = self.draw(_JUNK)
        if self.draw(st.integers(0, 9)) == 0:
            del entry[self.draw(st.sampled_from(list(entry)))]
        if self.draw(st.integers(0, 4)) == 0:
            entry[self.draw(_NAMES)] = self.draw(_JUNK)
        return entry


@st.composite
def files(draw: st.DrawFn) -> bytes:
    layout = Layout(draw)
    root: dict[str, Any] = {name: layout.entry() for name in draw(st.lists(_NAMES, max_size=4, unique=True))}
    if draw(st.booleans()):
        root["__metadata__"] = draw(_METADATA)
    names = draw(st.permutations(list(root)))
    text = json.dumps(
        {name: root[name] for name in names},
        ensure_ascii=draw(st.booleans()),
        separators=draw(st.sampled_from([(",", ":"), (", ", ": ")])),
    )
    return file_bytes(text + draw(st.sampled_from(["", " ", "\n\t"])), min(layout.cursor, 1 << 17))


@settings(max_examples=400, deadline=None)
@given(files())
def test_headers(data: bytes) -> None:
    outcome = compare(data)
    assert outcome.problem == "", outcome


@settings(max_examples=300, deadline=None)
@given(files(), st.data())
def test_headers_with_changed_bytes(data: bytes, more: st.DataObject) -> None:
    raw = bytearray(data)
    for _ in range(more.draw(st.integers(1, 3))):
        raw[more.draw(st.integers(0, len(raw) - 1))] = more.draw(st.sampled_from(b'\x00 "-:,[]{}0159eu\\\xff'))
    outcome = compare(bytes(raw))
    assert outcome.problem == "", outcome


@settings(max_examples=300, deadline=None)
@given(st.from_regex(r"-?(0|[1-9][0-9]{0,330})(\.[0-9]{1,30})?([eE][-+]?[0-9]{1,3})?", fullmatch=True))
def test_numbers_that_nobody_reads(number: str) -> None:
    """Which numbers overflow a double is decided by Rust's own arithmetic."""
    outcome = compare(file_bytes(f'{{"a":{{"dtype":"U8","shape":[],"data_offsets":[0,1],"x":{number}}}}}', 1))
    assert outcome.problem == "", outcome


@settings(max_examples=300, deadline=None)
@given(st.integers(-3000, 3000), st.text("0123456789", max_size=9), st.integers(1, 20))
def test_numbers_at_the_edge_of_a_double(step: int, more: str, point: int) -> None:
    digits = str(17976931348623157000 + step) + more
    number = f"{digits[:point]}.{digits[point:]}0e{309 - point}"
    outcome = compare(file_bytes(f'{{"a":{{"dtype":"U8","shape":[],"data_offsets":[0,1],"x":{number}}}}}', 1))
    assert outcome.problem == "", outcome


def test_fuzzer_meets_every_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz_header.main(["--inputs", "1000", "--seed", "7"]) == 0
    assert "differences unexplained: 0 kinds" in capsys.readouterr().out


def test_fuzzer_fails_when_it_proves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz_header.main(["--inputs", "3"]) == 1
    assert "no input of these classes came up" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "function", "fault"),
    [
        (header, "_overflows", lambda shape, bits: False),
        (header_json, "_check_text", lambda text: None),
        (header_json, "_out_of_range", lambda number: False),
        (header, "_check_layout", lambda infos, path, start, data_bytes: None),
    ],
)
def test_fuzzer_finds_planted_faults(
    module: Any, function: str, fault: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, function, fault)
    assert fuzz_header.main(["--inputs", "3000"]) == 1
    printed = capsys.readouterr().out
    assert "differences unexplained: 0 kinds" not in printed
    assert "shortest b" in printed


def test_fuzzer_is_repeatable() -> None:
    first, second = fuzz_header.Maker(3), fuzz_header.Maker(3)
    assert [first.file() for _ in range(50)] == [second.file() for _ in range(50)]
    assert fuzz_header.Maker(4).file() != fuzz_header.Maker(3).file()
