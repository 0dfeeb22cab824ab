"""Our parser and safetensors' Rust on the same bytes: the oracle that the header tests and the fuzzer share.

``compare`` says how a whole file held in memory fares with both. Differences are explained only by a second, plain look
at the JSON that uses nothing of the package.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import safetensors

from dlpack_loader import header
from dlpack_loader.errors import HeaderError
from dlpack_loader.header import Header, parse_header, read_header

__all__ = [
    "ODDITIES",
    "OURS_PREFIX",
    "REASONS",
    "Outcome",
    "Verdict",
    "compare",
    "compare_file",
    "file_bytes",
    "ours",
    "ours_of_file",
    "ours_strictly",
    "rust",
    "rust_of_file",
]

OURS_PREFIX = "Error while deserializing header: "
_RUST_PREFIXES = (OURS_PREFIX, "Error while deserializing: ")  # safe_open's, deserialize's

REASONS = {
    "HeaderTooSmall": "header too small",
    "HeaderTooLarge": "header too large",
    "InvalidHeaderLength": "invalid header length",
    "InvalidHeader": "invalid UTF-8 in header: ",
    "InvalidHeaderDeserialization": "invalid JSON in header: ",
    "InvalidOffset": "invalid offset for tensor `",
    "ValidationOverflow": "overflow computing buffer size from shape and/or element type",
    "MisalignedSlice": "The slice is slicing for subbytes dtypes, and the slice does not end up at a byte boundary, "
    "this is invalid.",
    "TensorInvalidInfo": "invalid shape, data type, or offset for tensor",
    "MetadataIncompleteBuffer": "incomplete metadata, file not fully covered",
}
"""Names of the Rust library's error variants, and how their texts begin."""

_FREE_TEXT = ("InvalidHeader", "InvalidHeaderDeserialization")  # the texts after the colon are each library's own
ODDITIES = ("DuplicateTensor", "EntryForm")
"""Reasons of ours for what Rust accepts and we refuse on purpose."""

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""dtype code, shape and bytes, by name."""


@dataclass(frozen=True)
class Verdict:
    """What one parser said."""

    reason: str = ""
    """Empty when it accepted."""
    text: str = ""
    """The error without its prefix."""
    tensor: str | None = None
    tensors: Tensors | None = None
    metadata: dict[str, str] | None = None
    """Not known from bytes with Rust."""
    order: tuple[str, ...] = ()
    """Names with bytes, in file order; not known from bytes with Rust."""

    @property
    def stable(self) -> tuple[str, str]:
        """The part of a refusal that both must share."""
        return self.reason, "" if self.reason in _FREE_TEXT else self.text


@dataclass(frozen=True)
class Outcome:
    """How the two verdicts compare."""

    ours: Verdict
    rust: Verdict
    explained: str = ""
    """One of ODDITIES, or ``"Tie"`` when Rust's own answer varies from call to call, or empty."""
    problem: str = ""
    """What differs without an explanation, or empty."""


def file_bytes(text: str | bytes, data_bytes: int = 0, length: int | None = None) -> bytes:
    """Put a file together: length bytes, header, and data in which every four-byte word is another."""
    raw = text if isinstance(text, bytes) else text.encode()
    data = b"".join(struct.pack("<I", i * 0x01010101 & 0xFFFFFFFF) for i in range((data_bytes + 3) // 4))[:data_bytes]
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def rust(data: bytes) -> Verdict:
    """Rust's verdict on a file held in memory."""
    try:
        items = safetensors.deserialize(data)
    except safetensors.SafetensorError as error:
        return _rust_refusal(error)
    return Verdict(
        tensors={name: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in items},
    )


def rust_of_file(path: Path) -> Verdict:
    """Rust's verdict on a file, with what only ``safe_open`` tells: metadata and order."""
    try:
        with safetensors.safe_open(path, framework="np") as file:
            names = file.offset_keys()
            slices = {name: file.get_slice(name) for name in names}
            tensors: Tensors = {name: (one.get_dtype(), tuple(one.get_shape()), b"") for name, one in slices.items()}
            empty = {name for name, (_, shape, _) in tensors.items() if 0 in shape}
            order = tuple(name for name in names if name not in empty)
            return Verdict(tensors=tensors, metadata=file.metadata(), order=order)
    except safetensors.SafetensorError as error:
        return _rust_refusal(error)


def _rust_refusal(error: Exception) -> Verdict:
    text = str(error)
    for prefix in _RUST_PREFIXES:
        if text.startswith(prefix):
            text = text.removeprefix(prefix)
            for reason, begin in REASONS.items():
                if text.startswith(begin):
                    return Verdict(reason, text)
    raise AssertionError(f"an error of Rust that is not known: {error}")


def ours(data: bytes) -> Verdict:
    """Our verdict on a file held in memory."""
    return _ours(lambda: parse_header(data), data)


def ours_strictly(data: bytes) -> Verdict:
    """Our verdict when the fast decoder never vouches: the slow rules decide alone."""
    with patch.object(header, "_vouched", lambda raw, data_bytes: None):
        return ours(data)


def ours_of_file(path: Path) -> Verdict:
    """Our verdict on a file."""
    return _ours(lambda: read_header(str(path))[0], None)


def _ours(parse: Callable[[], Header], data: bytes | None) -> Verdict:
    try:
        found = parse()
    except HeaderError as error:
        return Verdict(error.reason, error.message, error.tensor)
    except Exception as error:  # a fault to be reported with its input like any other
        return Verdict("Crash", repr(error))
    tensors: Tensors = {}
    for name in found:
        entry = found[name]
        held = b"" if data is None else data[entry.offset : entry.offset + entry.nbytes]
        tensors[name] = (entry.dtype, entry.shape, held)
    order = tuple(name for name in found if found[name].nbytes)
    metadata = None if found.metadata is None else dict(found.metadata)
    return Verdict(tensors=tensors, metadata=metadata, order=order)


def compare(data: bytes) -> Outcome:
    """Ask both about a file held in memory."""
    mine, theirs = ours(data), rust(data)
    if not mine.reason:
        slow = ours_strictly(data)
        if slow != mine or list(slow.tensors or ()) != list(mine.tensors or ()):
            return Outcome(mine, slow, problem="the fast decoder and the exact rules disagree")
    return _judge(data, mine, theirs, lambda: rust(data))


def compare_file(data: bytes, path: Path) -> Outcome:
    """Ask both about the same bytes in memory and in a file, metadata and order included."""
    outcome = compare(data)
    if outcome.problem:
        return outcome
    path.write_bytes(data)
    mine, theirs = ours_of_file(path), rust_of_file(path)
    if (mine.reason, mine.text) != (outcome.ours.reason, outcome.ours.text):
        return Outcome(mine, theirs, problem="a file is something else to us than its bytes")
    if mine.reason in ODDITIES:
        return outcome
    outcome = _judge(data, mine, theirs, lambda: rust_of_file(path))
    accepted = not mine.reason and not theirs.reason
    if accepted and not outcome.problem and (mine.metadata, mine.order) != (theirs.metadata, theirs.order):
        return Outcome(mine, theirs, problem="metadata or order differ")
    return outcome


def _judge(data: bytes, mine: Verdict, theirs: Verdict, ask_again: Callable[[], Verdict]) -> Outcome:
    if mine.reason in ODDITIES:
        return Outcome(mine, theirs, mine.reason, _unexcused(data, mine, theirs))
    if mine.reason and theirs.reason:
        if mine.stable == theirs.stable:
            return Outcome(mine, theirs)
        # Rust keeps tensors in a hash map: which of several at the same offsets comes first changes from call to call.
        if _has_ties(data) and any(ask_again().stable == mine.stable for _ in range(64)):
            return Outcome(mine, theirs, "Tie")
        return Outcome(mine, theirs, problem="the errors differ")
    if mine.reason or theirs.reason:
        return Outcome(mine, theirs, problem="the verdicts differ")
    return Outcome(mine, theirs, problem="" if mine.tensors == theirs.tensors else "the tensors differ")


# The second look at the JSON


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as it is written."""


def _root(data: bytes) -> _Pairs:
    length = int.from_bytes(data[:8], "little")
    root = json.loads(data[8 : 8 + length].decode(), object_pairs_hook=_Pairs)
    assert isinstance(root, _Pairs)
    return root


def _has_ties(data: bytes) -> bool:
    offsets = [
        json.dumps(field)
        for name, value in _root(data)
        if name != "__metadata__" and isinstance(value, _Pairs)
        for key, field in value
        if key == "data_offsets"
    ]
    return len(set(offsets)) < len(offsets)


def _unexcused(data: bytes, mine: Verdict, theirs: Verdict) -> str:
    """Whether the input really is the oddity that we say, and means to Rust what it seems to: "" or what is wrong."""
    entries = [(name, value) for name, value in _root(data) if name != "__metadata__"]
    if mine.reason == "DuplicateTensor":
        if [name for name, _ in entries].count(str(mine.tensor)) < 2:
            return f"{mine.tensor!r} is not there twice"
    elif not any(name == mine.tensor and _is_odd(value) for name, value in entries):
        return f"the entry {mine.tensor!r} is an ordinary one"
    if theirs.reason:
        return ""
    plain = json.dumps({name: _plain(value) for name, value in entries})
    length = int.from_bytes(data[:8], "little")
    again = ours(struct.pack("<Q", len(plain)) + plain.encode() + data[8 + length :])
    return "" if again.tensors == theirs.tensors else "written plainly it is something else to us"


def _is_odd(value: Any) -> bool:
    if not isinstance(value, _Pairs):
        return isinstance(value, list)
    return any(key == "dtype" and isinstance(field, _Pairs) for key, field in value)


def _plain(value: Any) -> dict[str, Any]:
    """Write an entry that Rust accepts as the object that it stands for."""
    if not isinstance(value, _Pairs):
        dtype, shape, offsets = value
    else:
        fields = dict(value)
        dtype, shape, offsets = (fields[key] for key in ("dtype", "shape", "data_offsets"))
    if isinstance(dtype, _Pairs):
        dtype = dtype[0][0]
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}
