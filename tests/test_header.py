"""Every rule of the format, each asked of safetensors' Rust too; then what is ours: errors, hints, plain reads."""

from __future__ import annotations

import builtins
import copy
import errno
import gzip
import io
import mmap
import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from dlpack_loader import header
from dlpack_loader.errors import (
    FileAccessError,
    FileIsDirectoryError,
    FileMissingError,
    FileNotDirectoryError,
    HeaderError,
    StorageError,
    TensorNotFoundError,
)
from dlpack_loader.header import MAX_HEADER_BYTES, Entry, parse_header, read_header
from tests.header_oracle import OURS_PREFIX, compare, compare_file, file_bytes, ours, ours_strictly, rust, rust_of_file

JSON = "InvalidHeaderDeserialization"
UTF8 = "InvalidHeader"
OFFSET = "InvalidOffset"
OVERFLOW = "ValidationOverflow"
MISALIGNED = "MisalignedSlice"
INFO = "TensorInvalidInfo"
INCOMPLETE = "MetadataIncompleteBuffer"
ACCEPTED = ""


def info(dtype: str = "F32", shape: str = "[1]", offsets: str = "[0,4]", extra: str = "") -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}{extra}}}'


def one(dtype: str = "F32", shape: str = "[1]", offsets: str = "[0,4]", extra: str = "", name: str = "a") -> str:
    return f'{{"{name}":{info(dtype, shape, offsets, extra)}}}'


def several(*infos: str) -> str:
    return "{" + ",".join(f'"{name}":{item}' for name, item in zip("abcdefgh", infos, strict=False)) + "}"


def with_metadata(value: str) -> str:
    return f'{{"__metadata__":{value},"a":{info()}}}'


def nested(depth: int, kind: str) -> str:
    return "[" * depth + "]" * depth if kind == "array" else '{"n":' * depth + "0" + "}" * depth


def agree(data: bytes, reason: str, path: Path) -> None:
    """Both say the same about the bytes and about a file of them, in the same words."""
    outcome = compare_file(data, path)
    assert outcome.problem == "", outcome
    assert (outcome.ours.reason, outcome.rust.reason) == (reason, reason)
    if reason:
        with pytest.raises(HeaderError) as caught:
            read_header(str(path))
        with pytest.raises(safetensors.SafetensorError) as theirs, safetensors.safe_open(path, framework="np"):
            pass
        text = str(theirs.value)
        shared = text[: text.index("in header: ")] if reason in (JSON, UTF8) else text
        assert str(caught.value).startswith(shared)
        assert shared.startswith(OURS_PREFIX)
        assert caught.value.file == str(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


# The rules


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"", "HeaderTooSmall", id="no bytes"),
        pytest.param(b"\x02\0\0\0\0\0\0", "HeaderTooSmall", id="seven bytes"),
        pytest.param(bytes(8), JSON, id="eight bytes, no header"),
        pytest.param(file_bytes("{}"), ACCEPTED, id="no tensors"),
        pytest.param(file_bytes("{}", length=3), "InvalidHeaderLength", id="one byte more than there is"),
        pytest.param(file_bytes("{}", length=100_000_000), "InvalidHeaderLength", id="a length at the cap"),
        pytest.param(file_bytes("{}", length=100_000_001), "HeaderTooLarge", id="cap before file size"),
        pytest.param(file_bytes("{}", length=1 << 63), "HeaderTooLarge", id="a length of 2**63"),
        pytest.param(file_bytes("{}", length=(1 << 64) - 1), "HeaderTooLarge", id="a length of 2**64-1"),
        pytest.param(file_bytes(b"\xff", length=2), "InvalidHeaderLength", id="file size before UTF-8"),
        pytest.param(file_bytes(b"\xff{"), UTF8, id="UTF-8 before JSON"),
        pytest.param(file_bytes(one(dtype="Q8", offsets="[1,2]")), JSON, id="JSON before offsets"),
        pytest.param(file_bytes(one(offsets="[4,8]")), OFFSET, id="offsets before the file's end"),
        pytest.param(file_bytes(one("F32", "[1]", "[0,4]"), 5), INCOMPLETE, id="a byte after the data"),
        pytest.param(file_bytes(one("F32", "[1]", "[0,4]"), 3), INCOMPLETE, id="a byte short"),
        pytest.param(file_bytes("{}", 1), INCOMPLETE, id="data without tensors"),
        pytest.param(file_bytes(one(name="abc"), 4), ACCEPTED, id="header length not a multiple of 8"),
    ],
)
def test_sizes_and_their_order(data: bytes, reason: str, path: Path) -> None:
    agree(data, reason, path)


def test_header_cap_is_exact(path: Path) -> None:
    """100,000,000 bytes are read, 100,000,001 are not: in sparse files, whose zeros are no JSON."""
    for length, reason in ((MAX_HEADER_BYTES, JSON), (MAX_HEADER_BYTES + 1, "HeaderTooLarge")):
        with path.open("wb") as file:
            file.write(struct.pack("<Q", length) + b"{}")
            file.truncate(8 + length)
        with pytest.raises(HeaderError) as caught:
            read_header(str(path))
        assert (caught.value.reason, rust_of_file(path).reason) == (reason, reason)


def test_header_at_the_cap_is_accepted() -> None:
    data = struct.pack("<Q", MAX_HEADER_BYTES) + b"{}".ljust(MAX_HEADER_BYTES)
    assert len(parse_header(data)) == 0
    assert safetensors.deserialize(data) == []


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        pytest.param(f" \t\r\n{one()}", ACCEPTED, id="leading white space"),
        pytest.param(f"{one()} \t\r\n", ACCEPTED, id="trailing white space"),
        pytest.param(one().replace(",", " ,\n").replace(":", "\t:\r"), ACCEPTED, id="white space between tokens"),
        pytest.param(f"{one()}\0\0", JSON, id="NUL padding"),
        pytest.param(f"{one()}\x0b", JSON, id="vertical tab"),
        pytest.param(f"{one()}\x0c", JSON, id="form feed"),
        pytest.param(f"{one()}\u00a0", JSON, id="no-break space"),
        pytest.param(f"\ufeff{one()}", JSON, id="byte order mark"),
        pytest.param(f"{one()}//x", JSON, id="comment"),
        pytest.param(f"{one()}{{}}", JSON, id="two values"),
        pytest.param(one().replace("}}", "},}"), JSON, id="trailing comma in an object"),
        pytest.param(one(shape="[1,]"), JSON, id="trailing comma in an array"),
        pytest.param(one().replace('"a"', "'a'"), JSON, id="single quotes"),
        pytest.param(one().replace('"a"', "a"), JSON, id="a name without quotes"),
        pytest.param("", JSON, id="nothing"),
        pytest.param(" ", JSON, id="white space only"),
        pytest.param("[]", JSON, id="an array"),
        pytest.param("null", JSON, id="null"),
        pytest.param('"a"', JSON, id="a string"),
        pytest.param("1", JSON, id="a number"),
        pytest.param("{", JSON, id="cut off"),
        pytest.param(b'{"a\xff":1}', UTF8, id="a byte that no UTF-8 has"),
        pytest.param(b'{"\xc0\x80":1}', UTF8, id="overlong NUL"),
        pytest.param(b'{"\xed\xa0\x80":1}', UTF8, id="an encoded surrogate"),
        pytest.param(b'{"\xf4\x90\x80\x80":1}', UTF8, id="beyond the last code point"),
        pytest.param(b'{"\xe2\x82', UTF8, id="an incomplete character"),
    ],
)
def test_text(raw: str | bytes, reason: str, path: Path) -> None:
    agree(file_bytes(raw, 4), reason, path)


@pytest.mark.parametrize("raw", [b'{"a\xff":1}', b'{"abc\xe2\x82', b'{"\xf0\x9f\x98\x80\xc0\x80":1}'])
def test_invalid_utf8_is_located(raw: bytes) -> None:
    data = file_bytes(raw)
    with pytest.raises(HeaderError) as caught:
        parse_header(data)
    index = int(rust(data).text.rsplit(" ", 1)[1])
    assert str(caught.value.message).endswith(f"at byte {index}")
    assert caught.value.offset == 8 + index


A, B, EMPTY = info(), info(offsets="[4,8]"), info(shape="[0]", offsets="[0,0]")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(with_metadata("{}"), ACCEPTED, id="no metadata"),
        pytest.param(with_metadata("null"), ACCEPTED, id="null metadata"),
        pytest.param(with_metadata('{"k":"v"}'), ACCEPTED, id="one string"),
        pytest.param(with_metadata('{"k":"1","k":"2"}'), ACCEPTED, id="a key twice: the last wins"),
        pytest.param(with_metadata('{"k:":"1","k\\u003a":"2"}'), ACCEPTED, id="a key twice in two spellings"),
        pytest.param(with_metadata('{"a:b":"c:-d","-":""}'), ACCEPTED, id="colons and minus signs in strings"),
        pytest.param(with_metadata('{"dtype":"F64","shape":"[]","data_offsets":"-"}'), ACCEPTED, id="keys of entries"),
        pytest.param(with_metadata('{"\\ud83d\\ude00":"\\u0000"}'), ACCEPTED, id="escapes"),
        pytest.param('{"\\u005f_metadata__":{"k":"v"}}', ACCEPTED, id="its own name escaped"),
        pytest.param(with_metadata('{"k":1}'), JSON, id="a number"),
        pytest.param(with_metadata('{"k":null}'), JSON, id="a null"),
        pytest.param(with_metadata('{"k":1,"k":"v"}'), JSON, id="a number that is overridden"),
        pytest.param(with_metadata('{"k":{}}'), JSON, id="an object"),
        pytest.param(with_metadata("[]"), JSON, id="metadata as an array"),
        pytest.param(with_metadata('"x"'), JSON, id="metadata as a string"),
        pytest.param(with_metadata('{"k":"\\ud800"}'), JSON, id="lone surrogate in a value"),
        pytest.param(with_metadata('{"\\ud800":"v"}'), JSON, id="lone surrogate in a key"),
        pytest.param(f'{{"__metadata__":{{}},"a":{A},"__metadata__":{{}}}}', JSON, id="metadata twice"),
        pytest.param(f'{{"__metadata__":null,"a":{A},"__metadata__":null}}', JSON, id="null metadata twice"),
        pytest.param(f'{{"__metadata__":{A}}}', JSON, id="a tensor of that name"),
        pytest.param(f'{{"__metadata__":{{}},"__metadata__":{A}}}', JSON, id="metadata and a tensor of that name"),
    ],
)
def test_metadata(text: str, reason: str, path: Path) -> None:
    agree(file_bytes(text, 4 if '"a"' in text else 0), reason, path)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("null", None), ("{}", {}), ('{"k":"1","l":"","k":"2"}', {"k": "2", "l": ""}), ('{"\\u00e9":"\\/"}', {"é": "/"})],
)
def test_metadata_value(value: str, expected: dict[str, str] | None) -> None:
    assert parse_header(file_bytes(with_metadata(value), 4)).metadata == expected


def test_metadata_absent() -> None:
    assert parse_header(file_bytes(one(), 4)).metadata is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(one(extra=',"x":1'), ACCEPTED, id="an unknown field"),
        pytest.param(one(extra=',"x":1,"x":2'), ACCEPTED, id="an unknown field twice"),
        pytest.param(one(extra=',"":null'), ACCEPTED, id="an unknown field without a name"),
        pytest.param(one(extra=',"x":{"dtype":1,"dtype":2}'), ACCEPTED, id="a duplicate below an unknown field"),
        pytest.param(one(extra=',"dtype":"F32"'), JSON, id="dtype twice"),
        pytest.param(one(extra=',"shape":[1]'), JSON, id="shape twice"),
        pytest.param(one(extra=',"data_offsets":[0,4]'), JSON, id="data_offsets twice"),
        pytest.param(one(extra=',"d\\u0074ype":"F32"'), JSON, id="dtype twice, once escaped"),
        pytest.param(one().replace("dtype", "d\\u0074ype"), ACCEPTED, id="an escaped field"),
        pytest.param('{"a":{"shape":[1],"data_offsets":[0,4]}}', JSON, id="no dtype"),
        pytest.param('{"a":{"dtype":"F32","data_offsets":[0,4]}}', JSON, id="no shape"),
        pytest.param('{"a":{"dtype":"F32","shape":[1]}}', JSON, id="no data_offsets"),
        pytest.param('{"a":{"x":"F32","shape":[1],"data_offsets":[0,4]}}', JSON, id="an unknown field for dtype"),
        pytest.param('{"a":{"dtype":"F32","x":[1],"data_offsets":[0,4]}}', JSON, id="an unknown field for shape"),
        pytest.param('{"a":{"dtype":"F32","shape":[1],"x":[0,4]}}', JSON, id="an unknown field for data_offsets"),
        pytest.param('{"a":{}}', JSON, id="an empty entry"),
        pytest.param('{"a":null}', JSON, id="a null entry"),
        pytest.param('{"a":"F32"}', JSON, id="a string entry"),
        pytest.param('{"a":1}', JSON, id="a number entry"),
        pytest.param('{"a":true}', JSON, id="a boolean entry"),
        pytest.param(one(shape="null"), JSON, id="null shape"),
        pytest.param(one(shape="1"), JSON, id="shape as a number"),
        pytest.param(one(shape="{}"), JSON, id="shape as an object"),
        pytest.param(one(shape='"1"'), JSON, id="shape as a string"),
        pytest.param(one(shape="[[1]]"), JSON, id="nested shape"),
        pytest.param(one(shape="[true]"), JSON, id="boolean size"),
        pytest.param(one(shape='["1"]'), JSON, id="string size"),
        pytest.param(one(shape="[null]"), JSON, id="null size"),
        pytest.param(one(offsets="[]"), JSON, id="no offsets"),
        pytest.param(one(offsets="[0]"), JSON, id="one offset"),
        pytest.param(one(offsets="[0,4,8]"), JSON, id="three offsets"),
        pytest.param(one(offsets='{"0":4}'), JSON, id="offsets as an object"),
        pytest.param(one(dtype="f32"), JSON, id="lower-case dtype"),
        pytest.param(one(dtype="F32 "), JSON, id="dtype with a blank"),
        pytest.param(one(dtype="Q8"), JSON, id="unknown dtype"),
        pytest.param(one(dtype=""), JSON, id="empty dtype"),
        pytest.param(one(dtype="\\u004632"), ACCEPTED, id="escaped dtype"),
        pytest.param(one().replace('"F32"', "null"), JSON, id="null dtype"),
        pytest.param(one().replace('"F32"', "17"), JSON, id="dtype as a number"),
        pytest.param(one().replace('"F32"', '["F32"]'), JSON, id="dtype as an array"),
    ],
)
def test_entries(text: str, reason: str, path: Path) -> None:
    agree(file_bytes(text, 4), reason, path)


@pytest.mark.parametrize("kind", ["array", "object"])
@pytest.mark.parametrize(
    ("depth", "reason"), [(126, ACCEPTED), (127, ACCEPTED), (128, JSON), (1000, JSON), (90_000, JSON)]
)
def test_nesting(kind: str, depth: int, reason: str, path: Path) -> None:
    """``depth`` containers in one another, the header and the entry among them."""
    agree(file_bytes(one(extra=f',"x":{nested(depth - 2, kind)}'), 4), reason, path)


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ("1", ACCEPTED), ("1.0", JSON), ("1e0", JSON), ("10e-1", JSON), ("-0", JSON), ("-1", JSON), ("01", JSON),
        ("+1", JSON), ("1.", JSON), (".1", JSON), ("0x1", JSON), ("1_0", JSON), ("NaN", JSON), ("Infinity", JSON),
        ("\u0661", JSON), ("18446744073709551616", JSON), ("1e400", JSON), ("9" * 5000, JSON),
    ],
)  # fmt: skip
def test_size_numbers(token: str, reason: str, path: Path) -> None:
    agree(file_bytes(one(shape=f"[{token}]"), 4), reason, path)
    agree(file_bytes(one(shape=f"[0,{token}]", offsets="[0,0]"), 0), reason, path)


@pytest.mark.parametrize("token", ["4.0", "4e0", "04", "-4", "18446744073709551616"])
def test_offset_numbers(token: str, path: Path) -> None:
    agree(file_bytes(one(offsets=f"[0,{token}]"), 4), JSON, path)


@pytest.mark.parametrize("token", ["-0", "0.0", "0e0", "-1", "00"])
def test_offset_zeros(token: str, path: Path) -> None:
    agree(file_bytes(one(offsets=f"[{token},4]"), 4), JSON, path)


def test_largest_numbers(path: Path) -> None:
    agree(file_bytes(one(shape="[0,18446744073709551615]", offsets="[0,0]")), ACCEPTED, path)
    agree(file_bytes(one(offsets="[18446744073709551615,18446744073709551615]")), OFFSET, path)
    agree(file_bytes(one(dtype="U8", offsets="[0,18446744073709551615]"), 1), INFO, path)


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ("1e308", ACCEPTED), ("1e309", JSON), ("1e400", JSON), ("-1e400", JSON), ("1E+400", JSON), ("1e-400", ACCEPTED),
        ("1e99999999999999999999", JSON), ("1e-99999999999999999999", ACCEPTED), ("0e99999999999999999999", ACCEPTED),
        ("0e999", ACCEPTED), ("1e" + "0" * 5000 + "1", ACCEPTED), ("1" * 308, ACCEPTED), ("1" * 400, JSON),
        ("1" * 400 + "e-100", ACCEPTED), ("1" * 400 + ".5e-100", ACCEPTED), ("0." + "0" * 400 + "1e700", ACCEPTED),
        # Doubles all the same, but Rust rounds twice on the way to them:
        ("1.7976931348623157e308", ACCEPTED), ("1.7976931348623158e308", JSON), ("-17976931348623158e292", JSON),
        ("17976931348623157e292", ACCEPTED), ("17976931348623158e292", JSON), ("1844674407370955161.5e290", JSON),
        ("18446744073709551616e289", JSON), ("18446744073709551615e288", ACCEPTED),
        ("1.7976931348623157682495185e308", JSON),
        ("-0", ACCEPTED), ("-5", ACCEPTED), ("1.5", ACCEPTED), ("18446744073709551616", ACCEPTED), ("NaN", JSON),
        ("Infinity", JSON), ("-Infinity", JSON), ("-", JSON), ("1e", JSON), ("true", ACCEPTED), ("tru", JSON),
        ('"\\ud800"', JSON), ('"\\udc00"', JSON), ('"\\ud800\\ud800\\udc00"', JSON), ('"\\ud83d\\u0041"', JSON),
        ('"\\ud83d\\ude00"', ACCEPTED), ('{"\\ud800":1}', JSON), ('[["\\udfff"]]', JSON), ('"\\x41"', JSON),
        ('"\\u12"', JSON), ('"\x01"', JSON), ('"\n"', JSON), ('"\x7f\u2028"', ACCEPTED), ('"\\/\\b\\f"', ACCEPTED),
    ],
)  # fmt: skip
def test_unread_values(token: str, reason: str, path: Path) -> None:
    """What nobody reads is checked all the same, in an entry and below."""
    agree(file_bytes(one(extra=f',"x":{token}'), 4), reason, path)
    agree(file_bytes(one(extra=f',"x":[{{"y":{token}}}]'), 4), reason, path)


@pytest.mark.parametrize(
    ("text", "data_bytes", "reason"),
    [
        pytest.param(several(A, B), 8, ACCEPTED, id="side by side"),
        pytest.param(several(B, A), 8, ACCEPTED, id="in another order"),
        pytest.param(several(A, info(offsets="[8,12]")), 12, OFFSET, id="a hole"),
        pytest.param(several(B), 8, OFFSET, id="a hole at the start"),
        pytest.param(several(A, info(offsets="[3,7]")), 7, OFFSET, id="an overlap"),
        pytest.param(several(info("U8", "[1]", "[0,1]"), info("F32", "[1]", "[1,5]")), 5, ACCEPTED, id="not aligned"),
        pytest.param(one(offsets="[4,0]"), 4, OFFSET, id="end before begin"),
        pytest.param(several(A, info(offsets="[4,0]")), 4, OFFSET, id="end before begin, later"),
        pytest.param(several(info("U8", "[8]", "[0,8]"), info(offsets="[8,4]")), 4, OFFSET, id="backwards to the end"),
        pytest.param(one(offsets="[0,8]"), 8, INFO, id="more bytes than dtype and shape"),
        pytest.param(one(offsets="[0,3]"), 3, INFO, id="fewer bytes than dtype and shape"),
        pytest.param(one(shape="[0]"), 4, INFO, id="bytes for nothing"),
        pytest.param(one(offsets="[0,0]"), 0, INFO, id="nothing for bytes"),
        pytest.param(one(shape="[]"), 4, ACCEPTED, id="a scalar"),
        pytest.param(one(shape="[]", offsets="[0,0]"), 0, INFO, id="a scalar without bytes"),
        pytest.param(one(shape="[" + "1," * 200 + "1]"), 4, ACCEPTED, id="201 dimensions"),
        pytest.param(one(shape="[0]", offsets="[0,0]"), 0, ACCEPTED, id="empty"),
        pytest.param(one("Q8", "[0]", "[0,0]"), 0, JSON, id="empty, of an unknown dtype"),
        pytest.param(one(shape="[3,0,2]", offsets="[0,0]"), 0, ACCEPTED, id="empty in the middle"),
        pytest.param(several(A, info(shape="[0]", offsets="[0,0]")), 4, ACCEPTED, id="empty at the start"),
        pytest.param(several(A, info(shape="[0]", offsets="[4,4]"), B), 8, ACCEPTED, id="empty between"),
        pytest.param(several(A, info(shape="[0]", offsets="[2,2]")), 4, OFFSET, id="empty inside another"),
        pytest.param(several(A, info(shape="[0]", offsets="[5,5]")), 5, OFFSET, id="empty after the end"),
        pytest.param(several(*[EMPTY] * 5), 0, ACCEPTED, id="empty ties"),
        pytest.param(one(shape="[1099511627776,1099511627776,0]", offsets="[0,0]"), 0, OVERFLOW, id="overflow, then 0"),
        pytest.param(one(shape="[0,1099511627776,1099511627776]", offsets="[0,0]"), 0, ACCEPTED, id="0, no overflow"),
        pytest.param(one(shape="[4294967296,4294967296]"), 4, OVERFLOW, id="2**64 elements"),
        pytest.param(one(shape="[576460752303423488]"), 4, OVERFLOW, id="2**64 bits"),
        pytest.param(one("F64", "[288230376151711743]"), 4, INFO, id="just below 2**64 bits"),
        pytest.param(one(shape="[4294967296,4294967296]", offsets="[4,8]"), 8, OFFSET, id="offset before overflow"),
        pytest.param(one("F4", "[9223372036854775807,3]"), 4, OVERFLOW, id="overflow before misalignment"),
        pytest.param(one("F4", "[3]", "[0,9]"), 9, MISALIGNED, id="misalignment before bytes"),
        pytest.param(one("F4", "[2]", "[0,1]"), 1, ACCEPTED, id="F4: two a byte"),
        pytest.param(one("F4", "[1]", "[0,1]"), 1, MISALIGNED, id="F4: half a byte"),
        pytest.param(one("F4", "[2,3,1]", "[0,3]"), 3, ACCEPTED, id="F4: odd last dimension"),
        pytest.param(one("F4", "[]", "[0,1]"), 1, MISALIGNED, id="F4: scalar"),
        pytest.param(one("F6_E2M3", "[4]", "[0,3]"), 3, ACCEPTED, id="F6: four in three bytes"),
        pytest.param(one("F6_E3M2", "[2,2]", "[0,3]"), 3, ACCEPTED, id="F6: four in three bytes, the other"),
        pytest.param(one("F6_E3M2", "[4]", "[0,4]"), 4, INFO, id="F6: a byte each"),
        pytest.param(one("F6_E2M3", "[2]", "[0,2]"), 2, MISALIGNED, id="F6: one and a half bytes"),
        pytest.param(several(A, info("F4", "[1]", "[0,0]")), 4, MISALIGNED, id="by begin, then by end"),
    ],
)
def test_layout(text: str, data_bytes: int, reason: str, path: Path) -> None:
    agree(file_bytes(text, data_bytes), reason, path)


def test_shared_range(path: Path) -> None:
    """The second of the two is to blame; Rust's hash map says by chance which that is."""
    outcome = compare_file(file_bytes(several(A, A), 4), path)
    assert outcome.problem == ""
    assert (outcome.ours.reason, outcome.rust.reason) == (OFFSET, OFFSET)
    assert outcome.ours.tensor == "b"


NAMES = [
    "",
    "../x",
    "/etc/passwd",
    "a b",
    "a:b",
    "-",
    "é",
    "😀",
    "\u2028",
    "\x7f",
    "dtype",
    "__metadata",
    "x" * 1_000_000,
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[:12]))
def test_odd_names(name: str, path: Path) -> None:
    data = file_bytes(one(name=name), 4)
    agree(data, ACCEPTED, path)
    assert list(parse_header(data)) == [name]


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("\\u0000", "\0"), ("\\u0061", "a"), ("\\ud83d\\ude00", "😀"), ("\\uD83D\\uDE00", "😀"), ('\\"\\\\', '"\\'),
        ("\\/\\b\\f\\n\\r\\t", "/\b\f\n\r\t"), ("\\\\u0061", "\\u0061"),
    ],
)  # fmt: skip
def test_escaped_names(spelling: str, name: str, path: Path) -> None:
    data = file_bytes(one(name=spelling), 4)
    agree(data, ACCEPTED, path)
    assert list(parse_header(data)) == [name]


@pytest.mark.parametrize(
    "spelling", ["\\ud800", "\\udc00", "\\ud800x", "\\ud83d\\u0041", "\x01", "\n", "\\x", "\\u12", "\\"]
)
def test_names_that_are_no_text(spelling: str, path: Path) -> None:
    agree(file_bytes(one(name=spelling), 4), JSON, path)


# What Rust accepts and we refuse


@pytest.mark.parametrize(
    ("text", "data_bytes", "tensor"),
    [
        pytest.param(f'{{"a":{A},"a":{A}}}', 4, "a", id="the same"),
        pytest.param(f'{{"a":{A},"b":{B},"a":{A}}}', 8, "a", id="apart"),
        pytest.param(f'{{"a":{info("F64", "[9]")},"a":{A}}}', 4, "a", id="the first is nonsense"),
        pytest.param(f'{{"a":{A},"\\u0061":{A}}}', 4, "a", id="in two spellings"),
        pytest.param(f'{{"a:b":{A},"a\\u003ab":{A}}}', 4, "a:b", id="in two spellings, with a colon"),
        pytest.param(f'{{"":{A},"":{A}}}', 4, "", id="without a name"),
    ],
)
def test_duplicate_tensor_is_refused(text: str, data_bytes: int, tensor: str, path: Path) -> None:
    data = file_bytes(text, data_bytes)
    outcome = compare_file(data, path)
    assert outcome.problem == ""
    assert (outcome.rust.reason, outcome.ours.reason) == (ACCEPTED, "DuplicateTensor")
    with pytest.raises(HeaderError, match="given twice") as caught:
        read_header(str(path))
    assert (caught.value.tensor, caught.value.file) == (tensor, str(path))
    assert "unique names" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"a":["F32",[1],[0,4]]}', id="an array"),
        pytest.param(one().replace('"F32"', '{"F32":null}'), id="dtype as an object"),
        pytest.param('{"a":[{"F32":null},[1],[0,4]]}', id="both"),
        pytest.param(one(extra=',"x":1').replace('"F32"', '{"F32":null}'), id="dtype as an object, an unknown field"),
    ],
)
def test_entry_form_is_refused(text: str, path: Path) -> None:
    outcome = compare_file(file_bytes(text, 4), path)
    assert outcome.problem == ""
    assert (outcome.rust.reason, outcome.ours.reason) == (ACCEPTED, "EntryForm")
    with pytest.raises(HeaderError, match="which is refused") as caught:
        read_header(str(path))
    assert (caught.value.tensor, caught.value.file) == ("a", str(path))


# The fast decoder


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            '{"a\\u003a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', id="duplicate field"
        ),
        pytest.param('{"a\\u002d":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}', id="minus zero"),
        pytest.param(f'{{"a:":{A},"__metadata__":{{"\\u003a":""}},"__metadata__":{{}}}}', id="metadata twice"),
        pytest.param('{"a":{"dtype":"F32","x:":[1],"data_offsets":[0,4]}}', id="a colon in an unknown field"),
        pytest.param('{"a":{"dtype":"F32","x":[],"data_offsets":[0,4]}}', id="an unknown field for a scalar's shape"),
        pytest.param('{"a":{"dtype":"F32","shape":[0,18446744073709551616],"data_offsets":[0,0]}}', id="2**64"),
        pytest.param(
            f'{{"a":{info("U8", "[8]", "[0,8]")},"b":{{"dtype":"F32","x":1,"data_offsets":[8,4]}},"c":{B}}}',
            id="backwards, without a shape",
        ),
    ],
)
def test_fast_decoder_is_not_fooled(text: str) -> None:
    """Escaped colons and minus signs, and unknown fields, keep its counts what they would be in a good header."""
    for data_bytes in (0, 4, 8):
        data = file_bytes(text, data_bytes)
        outcome = compare(data)
        assert outcome.problem == ""
        assert outcome.ours.reason == ours_strictly(data).reason == JSON


def real_file() -> bytes:
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "model.layers.0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "model.layers.0.bias": np.ones(3, np.float16),
        "a:b-c": np.ones((), np.int64),
        "none": np.ones((0, 4), np.uint8),
        "empty": np.ones((4, 0), np.uint8),
    }
    return safetensors.numpy.save(tensors, metadata={"format": "pt", "a:b": "-"})


def test_fast_decoder_serves_what_writers_write(monkeypatch: pytest.MonkeyPatch) -> None:
    data = real_file()
    slow = ours_strictly(data)

    def refuse(text: str) -> NoReturn:
        raise AssertionError("the slow parser was used")

    monkeypatch.setattr(header, "parse_strictly", refuse)
    fast = ours(data)
    assert fast == slow
    assert list(fast.tensors or ()) == list(slow.tensors or ())
    assert fast.metadata == {"format": "pt", "a:b": "-"}


# Entries


def test_entries_of_a_file(path: Path) -> None:
    data = file_bytes(several(B, A, info("U8", "[0]", "[8,8]"), info("U8", "[0,7]", "[8,8]")), 8)
    path.write_bytes(data)
    found, stat = read_header(str(path))
    start = len(data) - 8
    assert stat.st_size == len(data)
    assert (found.file, found.data_start, len(found)) == (str(path), start, 4)
    assert list(found) == ["b", "a", "c", "d"]
    assert found["a"] == Entry("a", "F32", (1,), str(path), start + 4, 4)
    assert found["d"] == Entry("d", "U8", (0, 7), str(path), start + 8, 0)
    assert "a" in found
    assert "q" not in found
    assert found.get("q") is None
    assert [entry and entry.name for entry in found.find(["d", "q", "a"])] == ["d", None, "a"]
    with pytest.raises(TensorNotFoundError, match=r"^File does not contain tensor q ") as caught:
        found["q"]
    assert caught.value.file == str(path)
    assert repr(found) == f"Header({str(path)!r}, 4 tensors)"


def test_ties_are_in_name_order_whatever_the_writing_order() -> None:
    for order in ("abc", "bac", "bca", "cba"):
        text = "{" + ",".join(f'"{name}":{A if name == "c" else EMPTY}' for name in order) + "}"
        assert list(parse_header(file_bytes(text, 4))) == ["a", "b", "c"]


def test_bytes_and_memoryview() -> None:
    data = real_file()
    wider = memoryview(b"xx" + data + b"yy")[2:-2]
    assert list(parse_header(wider)) == list(parse_header(data))
    assert parse_header(data).file == "<bytes>"
    with pytest.raises(HeaderError) as caught:
        parse_header(data[:-1], file="from a store")
    assert caught.value.file == "from a store"


# Errors


@pytest.mark.parametrize(
    ("text", "data_bytes", "tensor", "offset"),
    [
        pytest.param(several(A, info(offsets="[8,12]")), 12, "b", 8, id="hole"),
        pytest.param(several(A, info(shape="[2]", offsets="[4,8]")), 8, "b", 4, id="wrong size"),
        pytest.param(several(A, info(shape="[4294967296,4294967296]", offsets="[4,8]")), 8, "b", 4, id="overflow"),
        pytest.param(several(A, info("F4", "[1]", "[4,5]")), 5, "b", 4, id="half a byte"),
        pytest.param(several(A), 3, None, 3, id="short"),
        pytest.param(several(A), 9, None, 4, id="long"),
    ],
)
def test_layout_errors_say_where(text: str, data_bytes: int, tensor: str | None, offset: int, path: Path) -> None:
    data = file_bytes(text, data_bytes)
    path.write_bytes(data)
    with pytest.raises(HeaderError) as caught:
        read_header(str(path))
    error = caught.value
    absolute = len(data) - data_bytes + offset
    assert (error.tensor, error.file, error.offset) == (tensor, str(path), absolute)
    where = f"file {str(path)!r}, offset {absolute}"
    assert f"({where})" in str(error) or f"(tensor {tensor!r}, {where})" in str(error)


def test_json_errors_say_where(path: Path) -> None:
    path.write_bytes(file_bytes('{"é":nul}'))
    with pytest.raises(HeaderError) as caught:
        read_header(str(path))
    assert caught.value.offset == 8 + len('{"é":'.encode())
    assert "line 1 column 6" in str(caught.value)
    path.write_bytes(file_bytes(one("Q8"), 4))
    with pytest.raises(HeaderError, match="unknown variant `Q8`, expected one of `BOOL`, `F4`") as caught:
        read_header(str(path))
    assert (caught.value.tensor, caught.value.file) == ("a", str(path))


GOOD = file_bytes(one(), 4)


@pytest.mark.parametrize(
    ("data", "reason", "hint"),
    [
        pytest.param(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
            "HeaderTooLarge",
            "git lfs pull",
            id="LFS",
        ),
        pytest.param(b"<!DOCTYPE html>\n<html></html>", "HeaderTooLarge", "web page", id="HTML"),
        pytest.param(b"\xef\xbb\xbf\n <HTML lang=en>", "HeaderTooLarge", "web page", id="HTML with a byte order mark"),
        pytest.param(bytes(4096), JSON, "zero bytes", id="zeros"),
        pytest.param(bytes(3), "HeaderTooSmall", "zero bytes", id="three zeros"),
        pytest.param(b"", "HeaderTooSmall", "empty", id="empty"),
        pytest.param(GOOD[:-1], INCOMPLETE, "1 bytes shorter", id="truncated by one byte"),
        pytest.param(GOOD + b"\0", INCOMPLETE, "1 bytes more", id="one trailing byte"),
        pytest.param(
            GOOD[:20], "InvalidHeaderLength", f"needs {len(GOOD) - 4} bytes and the file has 20", id="cut header"
        ),
        pytest.param(b"PK\x03\x04" + bytes(90), "InvalidHeaderLength", "zip archive", id="zip"),
        pytest.param(pickle.dumps(list(range(999)), 2), "HeaderTooLarge", "pickle", id="pickle 2"),
        pytest.param(pickle.dumps(list(range(999)), 4), "HeaderTooLarge", "pickle", id="pickle 4"),
        pytest.param(b"GGUF\x03\0\0\0" + bytes(90), "HeaderTooLarge", "GGUF", id="GGUF"),
        pytest.param(b"\x89HDF\r\n\x1a\n" + bytes(90), "HeaderTooLarge", "HDF5", id="HDF5"),
        pytest.param(gzip.compress(GOOD), "HeaderTooLarge", "gzip", id="gzip"),
        pytest.param(b'{"metadata":{},"weight_map":{}}', "HeaderTooLarge", "index", id="an index"),
    ],
)
def test_hints(data: bytes, reason: str, hint: str, path: Path) -> None:
    path.write_bytes(data)
    with pytest.raises(HeaderError) as caught:
        read_header(str(path))
    assert (caught.value.reason, compare(data).rust.reason) == (reason, reason)
    assert hint in str(caught.value.hint)
    assert hint in str(caught.value)


def test_npy_is_recognised(path: Path) -> None:
    np.save(path.with_suffix(".npy"), np.ones(3))
    with pytest.raises(HeaderError, match=r"NumPy \.npy"):
        read_header(str(path.with_suffix(".npy")))


@pytest.mark.parametrize(
    ("call", "kind", "builtin", "code"),
    [
        ("missing", FileMissingError, FileNotFoundError, errno.ENOENT),
        (".", FileIsDirectoryError, IsADirectoryError, errno.EISDIR),
        ("file/below", FileNotDirectoryError, NotADirectoryError, errno.ENOTDIR),
        ("loop", StorageError, OSError, errno.ELOOP),
    ],
)
def test_os_errors_keep_class_and_errno(
    call: str, kind: type[StorageError], builtin: type[OSError], code: int, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(GOOD)
    (tmp_path / "loop").symlink_to("loop")
    where = str(tmp_path / call)
    with pytest.raises(builtin) as caught:
        read_header(where)
    assert type(caught.value) is kind
    assert (caught.value.errno, caught.value.filename) == (code, where)
    assert where in str(caught.value)


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.EACCES, FileAccessError), (errno.EPERM, FileAccessError), (errno.EMFILE, StorageError)]
)
def test_errors_of_open(code: int, kind: type[StorageError], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **keywords: object) -> NoReturn:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(builtins, "open", refuse)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        read_header(str(path))
    monkeypatch.undo()
    assert type(caught.value) is kind
    assert (caught.value.errno, caught.value.filename) == (code, str(path))


def opened_as(kind: type[io.FileIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "open", lambda path, mode, buffering, opener: kind(path), raising=False)


def test_errors_of_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.FileIO):
        def read(self, size: int | None = -1, /) -> NoReturn:
            raise OSError(errno.EIO, "Input/output error")

    path.write_bytes(GOOD)
    opened_as(Broken, monkeypatch)
    with pytest.raises(StorageError) as caught:
        read_header(str(path))
    assert (caught.value.errno, caught.value.file) == (errno.EIO, str(path))


def test_short_reads_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(io.FileIO):
        def read(self, size: int | None = -1, /) -> Any:
            return super().read(min(size or 0, 3))

    path.write_bytes(real_file())
    expected = list(read_header(str(path))[0])
    opened_as(Slow, monkeypatch)
    assert list(read_header(str(path))[0]) == expected


def test_a_file_that_shrinks_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shrinking(io.FileIO):
        def read(self, size: int | None = -1, /) -> Any:
            chunk = super().read(size)
            os.truncate(path, 20)
            return chunk

    path.write_bytes(GOOD)
    opened_as(Shrinking, monkeypatch)
    with pytest.raises(HeaderError) as caught:
        read_header(str(path))
    assert caught.value.reason == "InvalidHeaderLength"


def test_errors_pickle_and_copy(path: Path) -> None:
    errors: list[Exception] = []
    for content in (GOOD[:-1], file_bytes(one("Q8"), 4), file_bytes(several(B), 8), None):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises((HeaderError, StorageError)) as caught:
            read_header(str(path))
        errors.append(caught.value)
    assert {type(error) for error in errors} == {HeaderError, FileMissingError}
    for error in errors:
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(again) is type(error)
            assert str(again) == str(error)
            assert vars(again) == vars(error)
            assert getattr(again, "errno", None) == getattr(error, "errno", None)


# How it is read


def test_nothing_is_allocated_for_a_length_that_cannot_be(path: Path) -> None:
    for length in (MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1, 1 << 62, (1 << 64) - 1):
        path.write_bytes(file_bytes("{}", 16, length=length))
        tracemalloc.start()
        try:
            with pytest.raises(HeaderError):
                read_header(str(path))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20


def test_the_file_is_not_mapped_and_the_data_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    class Counting(io.FileIO):
        def read(self, size: int | None = -1, /) -> Any:
            chunk = super().read(size)
            read.append(len(chunk or b""))
            return chunk

    def refuse(*arguments: object, **keywords: object) -> NoReturn:
        raise AssertionError("mapped")

    monkeypatch.setattr(mmap, "mmap", refuse)
    opened_as(Counting, monkeypatch)
    data = file_bytes(one("U8", "[100000]", "[0,100000]"), 100_000)
    path.write_bytes(data)
    assert len(read_header(str(path))[0]) == 1
    assert read == [8, len(data) - 8 - 100_000]
