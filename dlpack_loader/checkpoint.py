"""A checkpoint: a file, a sequence of files, a directory or an index, read as one set of entries.

Every shard's header is read and checked when the checkpoint is opened, and every fault found in any of them is
reported at once, before a byte of a tensor is read. The result does not depend on the order in which files are given.
"""

from __future__ import annotations

import os
import stat as _stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath

import msgspec

from dlpack_loader.errors import (
    CheckpointError,
    FileMissingError,
    LoaderError,
    SourceError,
    StorageError,
    TensorNotFoundError,
    UnsupportedError,
    few,
    storage_error,
)
from dlpack_loader.header import Entry, Header, open_regular, read_header

__all__ = ["Checkpoint", "ReadShard", "Shard", "Source", "open_checkpoint", "read_shard"]

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""What can be opened: a path (file, directory or ``*.index.json``), or a sequence of file paths."""

ReadShard = Callable[[str], "Shard | LoaderError"]
"""Reads the header of one file."""

_INDEX_SUFFIX = ".index.json"
_SUFFIX = ".safetensors"
_HEADER_THREADS = 8
_MOST_GUESSES = 500  # names among which a near one is looked for; it takes 50 us for each
_ONE_OWNER = "A tensor belongs to one file: leave out the files of the other checkpoint, or pass an index"


class _Index(msgspec.Struct, gc=False):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a checkpoint, and the facts by which it is known again."""

    path: str
    header: Header
    size: int
    """Bytes in the file."""
    identity: tuple[int, int, int, int]
    """Device, inode, size and modification time (ns) at the moment that the header was read."""

    @staticmethod
    def identify(stat: os.stat_result) -> tuple[int, int, int, int]:
        """Return what tells one state of one file from another."""
        return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


class Checkpoint:
    """The entries of one or more files, by name. Immutable."""

    __slots__ = ("_home", "index", "shards")

    def __init__(self, shards: tuple[Shard, ...], home: Mapping[str, Header], index: str | None) -> None:
        self.shards = shards
        """The files, sorted by path."""
        self.index = index
        """Path of the index that named the files, or None."""
        self._home = home

    def __len__(self) -> int:
        return len(self._home)

    def __contains__(self, name: object) -> bool:
        return name in self._home

    def entry(self, name: str) -> Entry:
        """Return the entry of that name; TensorNotFoundError when there is none."""
        entry = self.get(name)
        if entry is None:
            where = self.index or (self.shards[0].path if len(self.shards) == 1 else None)
            raise TensorNotFoundError(f"File does not contain tensor {name}", file=where, hint=self._near(name))
        return entry

    def get(self, name: str) -> Entry | None:
        """Return the entry of that name, or None."""
        header = self._home.get(name)
        return None if header is None else header.get(name)

    def find(self, names: Iterable[str]) -> Iterator[Entry | None]:
        """Return the entry of each name, or None, in the order of the names."""
        if len(self.shards) == 1 and self.index is None:
            return self.shards[0].header.find(names)
        return map(self.get, names)

    def names(self) -> AbstractSet[str]:
        """Return every name, in no order."""
        return self._home.keys()

    def keys(self) -> list[str]:
        """Return every name, sorted."""
        return sorted(self._home)

    def offset_keys(self) -> list[str]:
        """Return every name in the order of the bytes: by file, then by offset."""
        return [name for shard in self.shards for name in shard.header if self._home.get(name) is shard.header]

    def metadata(self) -> dict[str, str] | None:
        """Return the ``__metadata__`` of the first file that has one, completed by those of the others."""
        merged: dict[str, str] = {}
        found = False
        for shard in self.shards:
            if shard.header.metadata is not None:
                found = True
                merged = {**shard.header.metadata, **merged}
        return merged if found else None

    def same_layout(self, other: Checkpoint) -> bool:
        """Whether every tensor is known to be at the same place of the same file, but for the files' paths."""
        if len(self.shards) != len(other.shards) or (self.index is None) != (other.index is None):
            return False
        if not all(one.header.same_as(two.header) for one, two in zip(self.shards, other.shards, strict=True)):
            return False
        if self.index is None:
            return True
        ours, theirs = (
            {id(shard.header): number for number, shard in enumerate(checkpoint.shards)} for checkpoint in (self, other)
        )
        return self._home.keys() == other._home.keys() and all(
            ours[id(header)] == theirs[id(other._home[name])] for name, header in self._home.items()
        )

    def nbytes(self) -> int:
        """Return the sum of all entries' bytes."""
        return sum(self.entry(name).nbytes for name in self._home)

    def _near(self, name: str) -> str | None:
        from difflib import get_close_matches

        near = get_close_matches(name, self._home, n=1) if len(self._home) <= _MOST_GUESSES else []
        return f"Did you mean {near[0]!r}?" if near else None


def open_checkpoint(source: Source, read: ReadShard | None = None) -> Checkpoint:
    """Read the headers of every file that a source names.

    Parameters
    ----------
    source
        A file; a sequence of files; a directory, of which the index decides when there is one, and otherwise every
        ``*.safetensors`` in it; or an ``*.index.json`` with a ``weight_map``. With an index, exactly the tensors that
        it lists are the checkpoint's.
    read
        Reads one file's header; for callers that keep headers.

    Raises
    ------
    StorageError, HeaderError
        One file was given and it can't be opened or is malformed.
    CheckpointError
        Several files were named; ``problems`` lists every fault of each: missing or malformed shards, names that the
        index gives and the shard lacks, names in two shards, shard paths that leave the index's directory.
    SourceError, UnsupportedError
        The source is nothing that can be opened.
    """
    read = read or read_shard
    if isinstance(source, (str, os.PathLike)):
        return _open_path(_path(source), read)
    if isinstance(source, (bytes, bytearray, memoryview)) or not isinstance(source, Sequence):
        raise SourceError(
            f"a source is a path or a sequence of paths, not {type(source).__name__}",
            hint="Pass a file, a list of files, a directory or an *.index.json",
        )
    paths = [_path(item) for item in source]
    if not paths:
        raise SourceError("the sequence of files is empty", hint="Pass at least one path")
    return _open_files(paths, read, whole=len(paths) == 1)


def _path(item: object) -> str:
    if isinstance(item, os.PathLike):
        item = os.fspath(item)
    if not isinstance(item, str) or not item or "\0" in item:
        raise SourceError(f"not a path: {item!r}")
    try:
        os.fsencode(item)
    except UnicodeEncodeError:
        raise SourceError(f"not a path that this system can have: {item!r}") from None
    scheme, separator, _ = item.partition("://")
    if separator and scheme.isalnum() and not os.path.exists(item):
        raise UnsupportedError(
            f"this version reads local files, not {scheme}:// addresses", file=item, hint="Download the file first"
        )
    return item


def _open_path(path: str, read: ReadShard) -> Checkpoint:
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        hint = _near_path(path) if isinstance(error, FileNotFoundError) else None
        raise storage_error(error.errno, error.strerror, file=path, hint=hint) from None
    if _stat.S_ISDIR(mode):
        return _open_directory(path, read)
    if not _stat.S_ISREG(mode):
        raise SourceError("not a regular file", file=path, hint="Copy the data into a file first")
    if path.endswith(_INDEX_SUFFIX):
        return _open_index(path, read)
    return _open_files([path], read, whole=True)


def _near_path(path: str) -> str | None:
    """Say how a path that names nothing may have been meant."""
    from difflib import get_close_matches

    folder, name = os.path.split(path)
    try:
        names = os.listdir(folder or os.curdir)
    except OSError:
        return f"There is no folder {folder!r} either"
    near = get_close_matches(name, names, n=1, cutoff=0.8) if len(names) <= _MOST_GUESSES else []
    return f"Did you mean {os.path.join(folder, near[0])!r}?" if near else None


def _open_directory(path: str, read: ReadShard) -> Checkpoint:
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise storage_error(error.errno, error.strerror, file=path) from None
    names = [name for name in names if not name.startswith(".")]  # such as a Mac's "._model.safetensors"
    indexes = [name for name in names if name.endswith(_SUFFIX + _INDEX_SUFFIX)]
    if len(indexes) > 1:
        raise SourceError(
            f"the directory holds {len(indexes)} indexes: {', '.join(indexes)}", file=path, hint="Pass one of them"
        )
    if indexes:
        return _open_index(os.path.join(path, indexes[0]), read)
    files = [os.path.join(path, name) for name in names if name.endswith(_SUFFIX)]
    if not files:
        raise FileMissingError("no *.safetensors file in the directory", code=2, file=path)
    return _open_files(files, read, whole=False)


def _open_index(path: str, read: ReadShard) -> Checkpoint:
    try:
        with open_regular(path) as file:
            weight_map = msgspec.json.decode(file.read(), type=_Index).weight_map
    except OSError as error:
        raise storage_error(error.errno, error.strerror, file=path) from None
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"not an index with a weight_map: {error}", file=path) from None
    folder = os.path.dirname(path)
    problems: list[LoaderError] = []
    targets: dict[str, str] = {}
    for shard in dict.fromkeys(weight_map.values()):
        if _leaves(shard):
            problems.append(
                CheckpointError(
                    f"the shard path {shard!r} leaves the index's directory, which is refused",
                    file=path,
                    hint="An index names files beside or below itself",
                )
            )
        else:
            targets[shard] = os.path.normpath(os.path.join(folder, shard))
    shards = _read_shards(targets.values(), read, problems, once=False)
    by_path = {shard.path: shard for shard in shards}
    home: dict[str, Header] = {}
    lacking: dict[str, list[str]] = {}
    for name, shard_name in weight_map.items():
        found = by_path.get(targets.get(shard_name, ""))
        if found is None:
            continue  # its shard's own problem is on the list already
        if name in found.header:
            home[name] = found.header
        else:
            lacking.setdefault(shard_name, []).append(name)
    for shard_name, names in lacking.items():
        problems.append(
            CheckpointError(
                f"the index puts {len(names)} tensor(s) in {shard_name} that it does not hold: {few(names, 5)}",
                file=targets[shard_name],
                hint="Index and shard are of different checkpoints, or one of the two is incomplete",
            )
        )
    listed_elsewhere = [
        (name, shard) for shard in shards for name in shard.header if name in home and home[name] is not shard.header
    ]
    problems.extend(
        CheckpointError("the tensor is in two shards", tensor=name, file=shard.path, hint=_ONE_OWNER)
        for name, shard in listed_elsewhere
    )
    _raise_all(problems, path)
    return Checkpoint(shards, home, path)


def _open_files(paths: Sequence[str], read: ReadShard, *, whole: bool) -> Checkpoint:
    problems: list[LoaderError] = []
    shards = _read_shards(paths, read, problems, once=True)
    if whole and problems:
        raise problems[0]
    home: dict[str, Header] = {}
    for shard in shards:
        if home:
            problems.extend(
                CheckpointError(
                    f"the tensor is in {home[name].file!r} too", tensor=name, file=shard.path, hint=_ONE_OWNER
                )
                for name in sorted(home.keys() & set(shard.header))
            )
        home.update(dict.fromkeys(shard.header, shard.header))
    _raise_all(problems, None)
    return Checkpoint(shards, home, None)


def _read_shards(
    paths: Iterable[str], read: ReadShard, problems: list[LoaderError], *, once: bool
) -> tuple[Shard, ...]:
    """Read every header, several at a time (a network disk answers slowly); faults go to ``problems``.

    With ``once``, a file that is given by several paths counts once.
    """
    ordered = sorted(set(paths))
    outcomes = _map(read, ordered)
    problems.extend(outcome for outcome in outcomes if isinstance(outcome, LoaderError))
    shards = (outcome for outcome in outcomes if isinstance(outcome, Shard))
    return tuple({shard.identity[:2]: shard for shard in shards}.values()) if once else tuple(shards)


def read_shard(path: str, *, keep: bool = False, like: Header | None = None) -> Shard | LoaderError:
    """Read one file's header; return what is wrong with it rather than raise it. See ``read_header``."""
    try:
        header, stat = read_header(path, keep=keep, like=like)
    except LoaderError as error:
        if isinstance(error, StorageError) and os.path.isdir(path):
            error.hint = "It is a directory; pass it alone to open the files in it"
        elif isinstance(error, FileMissingError):
            error.hint = "The checkpoint is incomplete: download the missing file"
        return error
    return Shard(path, header, stat.st_size, Shard.identify(stat))


def _map(function: Callable[[str], Shard | LoaderError], items: list[str]) -> list[Shard | LoaderError]:
    if len(items) <= 2:
        return [function(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(_HEADER_THREADS, len(items))) as pool:
        return list(pool.map(function, items))


def _leaves(shard: str) -> bool:
    """Whether a shard's path, as an index gives it, could name a file outside of the index's directory."""
    posix, windows = PurePosixPath(shard), PureWindowsPath(shard)
    return (
        not shard
        or "\0" in shard
        or posix.is_absolute()
        or windows.drive != ""
        or windows.root != ""
        or ".." in posix.parts
        or ".." in windows.parts
    )


def _raise_all(problems: list[LoaderError], path: str | None) -> None:
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise CheckpointError(f"the checkpoint has {count}", problems=tuple(problems), file=path)
