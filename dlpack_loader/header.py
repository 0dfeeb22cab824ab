"""The safetensors header: bytes to entries, with the verdicts and the texts of safetensors' Rust library.

Checks run in the order of ``SafeTensors::read_metadata``: the eight length bytes, the cap of 100,000,000 bytes, the
file's size, UTF-8, JSON, offsets in order without hole or overlap, sizes, and last that the tensors cover the file.
No framework is imported, and nothing is allocated before the length has passed its checks.

Decoding is done by msgspec into typed structs, which takes about as long as the Rust library. msgspec is laxer than
serde_json in a few places (repeated fields, ``-0``); cheap counts over the raw bytes prove their absence, and whenever
a count or a check does not fit, :mod:`dlpack_loader.header_json` reads the text again by the exact rules.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import NoReturn

import msgspec

from dlpack_loader.diagnose import explain_file
from dlpack_loader.dtype import BITS
from dlpack_loader.errors import HeaderError, SourceError, TensorNotFoundError, storage_error
from dlpack_loader.header_json import parse_strictly

__all__ = ["MAX_HEADER_BYTES", "Entry", "Header", "open_regular", "parse_header", "read_header"]

MAX_HEADER_BYTES = 100_000_000
"""The Rust library's cap on the JSON's length; exactly this many bytes are allowed."""

_LENGTH_BYTES = 8
_U64 = 1 << 64


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One tensor of a header."""

    name: str
    dtype: str
    """Its dtype code, such as ``"BF16"``."""
    shape: tuple[int, ...]
    """In elements; ``()`` is a scalar."""
    file: str
    """Path of the file that holds it."""
    offset: int
    """Absolute offset of its first byte in the file."""
    nbytes: int

    def _repr_html_(self) -> str:
        from dlpack_loader.html import entry_html

        return entry_html(self)


class _Info(msgspec.Struct, gc=False):
    # Defaults make `__metadata__` decode as one of these too; each is one that no real entry passes `_covers` with.
    dtype: str = ""
    shape: tuple[int, ...] = (_U64,)
    data_offsets: tuple[int, int] = (-1, -1)


class _Metadata(msgspec.Struct, gc=False, rename={"metadata": "__metadata__"}):
    metadata: dict[str, str] | None = None


_INFOS = msgspec.json.Decoder(dict[str, _Info])
_METADATA = msgspec.json.Decoder(_Metadata)


class Header:
    """The tensors of one file, by name. Immutable; entries are made when asked for.

    Iteration, ``len`` and ``in`` go over names in file order: by offset, ties (tensors without bytes) by name.
    """

    __slots__ = ("_infos", "_raw", "data_start", "file", "metadata")

    def __init__(
        self,
        file: str,
        data_start: int,
        infos: Mapping[str, _Info],
        metadata: Mapping[str, str] | None,
        raw: bytes | None = None,
    ) -> None:
        self.file = file
        """Path that the header was read from."""
        self.data_start = data_start
        """Absolute offset of the first data byte."""
        self.metadata = metadata
        """The ``__metadata__`` strings, or None."""
        self._infos = infos
        self._raw = raw

    def same_as(self, other: Header) -> bool:
        """Whether it says the same of its tensors because it was read as like the other one; False proves nothing."""
        return self._infos is other._infos

    def again(self, file: str, raw: bytes, data_bytes: int) -> Header | None:
        """Return the header of another file if its bytes are these, which were kept, and as much data follows."""
        end = max((info.data_offsets[1] for info in self._infos.values()), default=0)
        if raw != self._raw or data_bytes != end:
            return None
        return Header(file, self.data_start, self._infos, self.metadata, self._raw)

    def __len__(self) -> int:
        return len(self._infos)

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def __repr__(self) -> str:
        return f"Header({self.file!r}, {len(self)} tensors)"

    def _repr_html_(self) -> str:
        from dlpack_loader.html import header_html

        return header_html(self)

    def __getitem__(self, name: str) -> Entry:
        entry = self.get(name)
        if entry is None:
            raise TensorNotFoundError(f"File does not contain tensor {name}", file=self.file)
        return entry

    def get(self, name: str) -> Entry | None:
        """Return the entry of that name, or None."""
        return next(self.find((name,)))

    def find(self, names: Iterable[str]) -> Iterator[Entry | None]:
        """Return the entry of each name, or None, in the order of the names."""
        file, start = self.file, self.data_start
        info_of = self._infos.get
        for name in names:
            info = info_of(name)
            if info is None:
                yield None
            else:
                begin, end = info.data_offsets
                yield Entry(name, info.dtype, info.shape, file, start + begin, end - begin)


def read_header(path: str, *, keep: bool = False, like: Header | None = None) -> tuple[Header, os.stat_result]:
    """Read and check the header of one file.

    The file is read with plain reads, never mapped, so file systems without mmap work.

    Parameters
    ----------
    keep
        Keep the bytes, so that the result can serve as ``like``.
    like
        A header that was kept: one of the same bytes is not decoded again.

    Returns
    -------
    tuple
        The header, and the ``os.stat_result`` of the very file that it was read from.

    Raises
    ------
    HeaderError
        The bytes are not a safetensors header; ``hint`` names what the file looks like instead.
    StorageError
        The operating system refused, with its errno and its class.
    """
    try:
        with open_regular(path) as file:
            facts = os.fstat(file.fileno())
            try:
                return _read(file, path, facts.st_size, keep=keep, like=like), facts
            except HeaderError as error:
                file.seek(0)
                error.hint = error.hint or explain_file(file.read(512), facts.st_size) or _no_length(error)
                raise
    except OSError as error:
        raise storage_error(error.errno, error.strerror, file=path, hint=_directory_hint(error)) from None


def open_regular(path: str) -> io.FileIO:
    """Open a file for plain reads; what is none, such as a pipe that would never answer, is refused.

    Raises
    ------
    OSError
        What the operating system said, or that it is a directory.
    SourceError
        Neither a file nor a directory.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    file = open(path, "rb", buffering=0, opener=opener)  # noqa: SIM115 - handed to the caller
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise SourceError("not a regular file", file=path, hint="Copy the data into a file first")
    return file


def parse_header(data: bytes | memoryview, *, file: str = "<bytes>") -> Header:
    """Check a whole file held in memory and return its header."""
    view = memoryview(data)
    return _read(_BytesFile(view), file, view.nbytes)


class _BytesFile(io.RawIOBase):
    """A read-only file over a buffer, without a copy of it."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        end = len(self._view) if size < 0 else self._at + size
        chunk = bytes(self._view[self._at : end])
        self._at += len(chunk)
        return chunk


def _read(file: io.RawIOBase, path: str, size: int, *, keep: bool = False, like: Header | None = None) -> Header:
    if size < _LENGTH_BYTES:
        _refuse("HeaderTooSmall", "header too small", path)
    length = int.from_bytes(_exactly(file, _LENGTH_BYTES, path), "little")
    if length > MAX_HEADER_BYTES:
        _refuse("HeaderTooLarge", "header too large", path)
    if length + _LENGTH_BYTES > size:
        _refuse("InvalidHeaderLength", "invalid header length", path)
    raw = _exactly(file, length, path)
    data_start = _LENGTH_BYTES + length
    again = like.again(path, raw, size - data_start) if like is not None else None
    if again is not None:
        return again
    infos, metadata = _decode(raw, path, size - data_start)
    return Header(path, data_start, infos, metadata, raw if keep else None)


def _exactly(file: io.RawIOBase, count: int, path: str) -> bytes:
    chunks = []
    while count:
        chunk = file.read(count)
        if not chunk:  # the file shrank after fstat
            _refuse("InvalidHeaderLength", "invalid header length", path)
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


def _decode(raw: bytes, path: str, data_bytes: int) -> tuple[Mapping[str, _Info], Mapping[str, str] | None]:
    try:
        text = None if raw.isascii() else raw.decode()
    except UnicodeDecodeError as error:
        text = f"invalid UTF-8 in header: {error.reason} at byte {error.start}"
        _refuse("InvalidHeader", text, path, offset=_LENGTH_BYTES + error.start)
    vouched = _vouched(raw, data_bytes)
    if vouched is not None:
        return vouched
    try:
        entries, metadata = parse_strictly(raw.decode() if text is None else text)
    except HeaderError as error:
        error.file = path
        raise
    infos = _in_file_order({name: _Info(*entry) for name, entry in entries.items()})
    _check_layout(infos, path, _LENGTH_BYTES + len(raw), data_bytes)
    return infos, metadata


def _vouched(raw: bytes, data_bytes: int) -> tuple[Mapping[str, _Info], Mapping[str, str] | None] | None:
    """Decode the usual header fast, or return None when it is not certain that serde_json would agree."""
    try:
        infos = _INFOS.decode(raw)
        has_metadata = infos.pop("__metadata__", None) is not None
        metadata = _METADATA.decode(raw).metadata if has_metadata else None
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
    # One colon belongs to each member of an object. If no others are left over once those inside strings are taken
    # away, then no member was dropped as a repetition. A minus sign outside strings could only be a `-0`.
    strings = "\0".join(infos)
    members = 4 * len(infos) + has_metadata
    if metadata is not None:
        strings += "\0".join((*metadata, *metadata.values()))
        members += len(metadata)
    if b"\\u" in raw or raw.count(b":") != members + strings.count(":") or raw.count(b"-") != strings.count("-"):
        return None
    if not _covers(infos, data_bytes):
        infos = _in_file_order(infos)
        if not _covers(infos, data_bytes):
            return None
    return infos, metadata


def _in_file_order(infos: dict[str, _Info]) -> dict[str, _Info]:
    return dict(sorted(infos.items(), key=lambda item: (item[1].data_offsets, item[0])))


def _covers(infos: Mapping[str, _Info], data_bytes: int) -> bool:
    """Whether the tensors, in this order, are well formed and cover the data exactly."""
    cursor = 0
    previous = ""
    bits_of = BITS.get
    for name, info in infos.items():
        begin, end = info.data_offsets
        bits = bits_of(info.dtype, 0)
        if begin != cursor or not bits or prod(info.shape) * bits != (end - begin) * 8:
            return False
        if begin == end and (_overflows(info.shape, bits) or name < previous):
            return False  # ties among empty tensors are put in name order, so that order is one of a kind
        cursor = end
        previous = name if begin == end else ""
    return cursor == data_bytes


def _overflows(shape: tuple[int, ...], bits: int) -> bool:
    """Whether a size, or the product multiplied from the left as Rust does, overflows 64 bits."""
    count = 1
    for size in (*shape, bits):
        count *= size
        if count >= _U64 or size >= _U64:
            return True
    return False


def _check_layout(infos: Mapping[str, _Info], path: str, start: int, data_bytes: int) -> None:
    """Make the checks of ``Metadata::validate`` and of ``read_metadata`` after it, in their order, with their texts."""
    cursor = 0
    for name, info in infos.items():
        begin, end = info.data_offsets
        offset = start + begin
        if begin != cursor or end < begin:
            _refuse("InvalidOffset", f"invalid offset for tensor `{name}`", path, name, offset)
        cursor = end
        bits = BITS[info.dtype]
        if _overflows(info.shape, bits):
            text = "overflow computing buffer size from shape and/or element type"
            _refuse("ValidationOverflow", text, path, name, offset)
        total = prod(info.shape) * bits
        if total % 8:
            text = (
                "The slice is slicing for subbytes dtypes, and the slice does not end up at a byte boundary, "
                "this is invalid."
            )
            _refuse("MisalignedSlice", text, path, name, offset)
        if end - begin != total // 8:
            _refuse("TensorInvalidInfo", "invalid shape, data type, or offset for tensor", path, name, offset)
    if cursor != data_bytes:
        short = cursor - data_bytes
        hint = (
            f"The file is {short:,} bytes shorter than its header says: the download or copy was cut off, get it again"
            if short > 0
            else f"The file has {-short:,} bytes more than its header says"
        )
        text = "incomplete metadata, file not fully covered"
        _refuse("MetadataIncompleteBuffer", text, path, offset=start + min(cursor, data_bytes), hint=hint)


def _no_length(error: HeaderError) -> str | None:
    if error.reason in ("HeaderTooLarge", "InvalidHeaderLength"):
        return "Its first eight bytes are no header's length: this is no safetensors file, or it was overwritten"
    return None


def _directory_hint(error: OSError) -> str | None:
    if isinstance(error, IsADirectoryError):
        return "A directory is opened as a checkpoint by the functions that take a source"
    return None


def _refuse(
    reason: str, text: str, path: str, tensor: str | None = None, offset: int | None = None, hint: str | None = None
) -> NoReturn:
    raise HeaderError(text, reason=reason, file=path, tensor=tensor, offset=offset, hint=hint)
