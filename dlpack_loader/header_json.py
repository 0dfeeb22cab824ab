"""A header read by serde_json's rules, slowly: the verdict wherever the fast decoder of :mod:`header` can't vouch.

The Rust library parses a header with serde_json into a struct with two fields, ``__metadata__`` and everything else.
What follows from that and differs from ordinary JSON readers, rule by rule (tests compare each with the Rust library):

- numbers in ``shape`` and ``data_offsets`` are plain non-negative integers below 2**64: ``2.0``, ``2e0``, ``-0``
  are refused;
- numbers that overflow a double, lone surrogates, ``NaN``, and more than 127 nested containers are refused everywhere,
  in fields that nobody reads too;
- a field given twice in one entry, or ``__metadata__`` given twice, is refused; unknown fields are allowed.

Two things that Rust accepts are refused here on purpose, with reasons of their own: a tensor named twice
(``DuplicateTensor``: which one counts depends on the reader) and an entry that is not an object, or whose dtype is an
object (``EntryForm``: serde's other spellings of a struct, which no writer makes and most readers misread).
"""

from __future__ import annotations

import json
from math import inf
from typing import Any, NoReturn

from dlpack_loader.dtype import BITS
from dlpack_loader.errors import HeaderError

__all__ = ["RawEntry", "parse_strictly"]

RawEntry = tuple[str, tuple[int, ...], tuple[int, int]]
"""dtype code, shape, data offsets: shape and offsets not yet checked against each other."""

_U64 = 1 << 64
_MAX_DEPTH = 127


class _Pairs(list[tuple[str, Any]]):
    """A JSON object with its members in order, repeated names included."""


class _OtherNumber:
    """A number that is not an unsigned 64-bit integer."""


def parse_strictly(text: str) -> tuple[dict[str, RawEntry], dict[str, str] | None]:
    """Parse header text by serde_json's rules.

    Returns
    -------
    tuple
        Entries by name, and the ``__metadata__`` (None when absent or null).

    Raises
    ------
    HeaderError
        ``reason`` is ``InvalidHeaderDeserialization``, ``DuplicateTensor`` or ``EntryForm``.
    """
    decoder = json.JSONDecoder(
        object_pairs_hook=_Pairs, parse_int=_integer, parse_float=_float, parse_constant=_constant, strict=True
    )
    try:
        root = decoder.decode(text)
    except json.JSONDecodeError as error:
        offset = 8 + len(error.doc[: error.pos].encode())  # in the file, where eight length bytes come first
        _refuse(f"{error.msg} at line {error.lineno} column {error.colno}", offset=offset)
    except RecursionError:
        _refuse("recursion limit exceeded")
    _check_tree(root)
    if not isinstance(root, _Pairs):
        _refuse(f"invalid type: {_kind(root)}, expected a map of tensors")

    metadata: dict[str, str] | None = None
    entries: dict[str, RawEntry] = {}
    repeated: str | None = None
    seen_metadata = False
    for name, value in root:
        if name == "__metadata__":
            if seen_metadata:
                _refuse("duplicate field `__metadata__`")
            seen_metadata = True
            metadata = _metadata(value)
            continue
        if name in entries:
            repeated = name
        entries[name] = _entry(name, value)
    if repeated is not None:
        raise HeaderError(
            "the same tensor name is given twice",
            reason="DuplicateTensor",
            tensor=repeated,
            hint="Readers disagree on which one counts; write the file again with unique names",
        )
    return entries, metadata


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, _Pairs):
        _refuse(f"invalid type: {_kind(value)}, expected a map", tensor="__metadata__")
    for key, item in value:
        if not isinstance(item, str):
            _refuse(f"invalid type: {_kind(item)}, expected a string for {key!r}", tensor="__metadata__")
    return dict(value)


def _entry(name: str, value: Any) -> RawEntry:
    if not isinstance(value, _Pairs):
        if isinstance(value, list):
            _odd_form(name, "an array")
        _refuse(f"invalid type: {_kind(value)}, expected struct TensorInfo", tensor=name)
    fields: dict[str, Any] = {}
    for key, item in value:
        if key in ("dtype", "shape", "data_offsets"):
            if key in fields:
                _refuse(f"duplicate field `{key}`", tensor=name)
            fields[key] = item
    for key in ("dtype", "shape", "data_offsets"):
        if key not in fields:
            _refuse(f"missing field `{key}`", tensor=name)
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if isinstance(dtype, _Pairs):
        _odd_form(name, "a dtype that is an object")
    if not isinstance(dtype, str):
        _refuse(f"invalid type: {_kind(dtype)}, expected a dtype", tensor=name)
    if dtype not in BITS:
        known = ", ".join(f"`{code}`" for code in BITS)
        _refuse(f"unknown variant `{dtype}`, expected one of {known}", tensor=name)
    sizes = _integers(name, "shape", shape)
    begin_end = _integers(name, "data_offsets", offsets)
    if len(begin_end) != 2:
        _refuse(f"invalid length {len(begin_end)}, expected a tuple of size 2 for data_offsets", tensor=name)
    return dtype, sizes, (begin_end[0], begin_end[1])


def _integers(name: str, field: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or isinstance(value, _Pairs):
        _refuse(f"invalid type: {_kind(value)}, expected a sequence for {field}", tensor=name)
    for item in value:
        if type(item) is not int:
            _refuse(f"invalid type: {_kind(item)}, expected usize in {field}", tensor=name)
    return tuple(value)


def _check_tree(root: Any) -> None:
    """Refuse what serde_json refuses anywhere: nesting beyond its limit, and strings that are not Unicode."""
    level = [root]
    depth = 0
    while level:
        below: list[Any] = []
        nested = False
        for value in level:
            if isinstance(value, str):
                _check_text(value)
            elif isinstance(value, _Pairs):
                nested = True
                for key, item in value:
                    _check_text(key)
                    below.append(item)
            elif isinstance(value, list):
                nested = True
                below.extend(value)
        depth += nested
        if depth > _MAX_DEPTH:
            _refuse("recursion limit exceeded")
        level = below


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            _refuse("lone leading surrogate in hex escape")


def _integer(digits: str) -> int | _OtherNumber:
    if digits[0] != "-" and len(digits) <= 20:
        value = int(digits)
        if value < _U64:
            return value
    return _float(digits)


def _float(number: str) -> _OtherNumber:
    if _out_of_range(number):
        _refuse("number out of range")
    return _OtherNumber()


def _out_of_range(number: str) -> bool:
    """Whether serde_json's arithmetic overflows a double: a 64-bit significand times a power of ten, rounded twice."""
    mantissa, _, exponent = number.lstrip("-").lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    significand = 0
    scale = int(max(-1e9, min(1e9, float(exponent or 0))))  # int() alone refuses thousands of digits
    for place, digit in enumerate(whole):
        if significand * 10 + int(digit) >= _U64:
            scale += len(whole) - place
            break
        significand = significand * 10 + int(digit)
    for digit in fraction:
        if significand * 10 + int(digit) >= _U64:
            break
        significand = significand * 10 + int(digit)
        scale -= 1
    return float(significand) * float(f"1e{scale}") == inf  # zero times infinity is not: zero is in range


def _constant(name: str) -> NoReturn:
    _refuse(f"expected value, found {name}")


def _kind(value: Any) -> str:
    if isinstance(value, _OtherNumber):
        return "a number that is not an unsigned integer"
    names = {bool: "boolean", int: "integer", str: "string", type(None): "null", _Pairs: "map", list: "sequence"}
    return names[type(value)]


def _odd_form(name: str, what: str) -> NoReturn:
    raise HeaderError(
        f"invalid JSON in header: the entry is {what}, which is refused",
        reason="EntryForm",
        tensor=name,
        hint="Write entries as objects with dtype, shape and data_offsets",
    )


def _refuse(detail: str, *, tensor: str | None = None, offset: int | None = None) -> NoReturn:
    text = f"invalid JSON in header: {detail}"
    raise HeaderError(text, reason="InvalidHeaderDeserialization", tensor=tensor, offset=offset)
