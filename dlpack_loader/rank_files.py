"""Which files a rank wrote of a sharded state, by their names: complete, in order, and of one form."""

from __future__ import annotations

import errno
import operator
import os
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from dlpack_loader.errors import CheckpointError, FileMissingError, OptionError, SourceError, few, storage_error

__all__ = ["rank_files"]

_BY_RANK = "model-rank-{rank}-part-{part}.safetensors"
_BY_GRID = "model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors"
_RANKS = ("rank", "pp_rank", "tp_rank")
_WIDTH = re.compile(r"(0[0-9]{1,2})?d?")


def rank_files(
    directory: str | os.PathLike[str],
    *,
    rank: int | None = None,
    pp_rank: int | None = None,
    tp_rank: int | None = None,
    pattern: str | None = None,
) -> list[str]:
    """Return the paths of one rank's files, in the order of their parts.

    The parameters are those of :func:`dlpack_loader.load_sharded_state`. Only the directory is read.

    Raises
    ------
    OptionError
        The ranks name no form, or do not suit the pattern.
    FileMissingError, CheckpointError
        Files are missing, or of two forms.
    """
    ranks = {
        name: _number(name, value)
        for name, value in zip(_RANKS, (rank, pp_rank, tp_rank), strict=True)
        if value is not None
    }
    form = _Form.of(_chosen(ranks) if pattern is None else pattern)
    form.check(ranks)
    folder: object = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    if not isinstance(folder, str) or not folder or "\0" in folder:
        raise SourceError(f"not a path: {directory!r}", hint="Pass the directory of the files")
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise storage_error(error.errno, error.strerror, file=folder) from None
    found = form.find(names)
    if pattern is None:
        _check_forms(folder, form, found, names)
    parts = sorted((place["part"], name) for name, place in found.items() if place.items() >= ranks.items())
    if not parts:
        _missing(folder, form, found, names, ranks)
    lacking = _gaps([part for part, _ in parts])
    if lacking:
        raise CheckpointError(
            f"{_said(ranks) or 'the pattern'} has {len(parts)} part(s) up to part {parts[-1][0]}, and these are "
            f"missing: {few(lacking, 8)}",
            file=folder,
            hint="Parts are numbered from 0 without a gap: copy the missing files, or write the state again",
        )
    return [os.path.join(folder, name) for _, name in parts]


@dataclass(frozen=True, slots=True)
class _Form:
    """How files are named: text and fields, in turn."""

    pattern: str
    pieces: tuple[tuple[str, str | None, str], ...]
    """Text, the field after it, and how that is written."""

    @classmethod
    def of(cls, pattern: object) -> _Form:
        """Take a pattern apart."""
        if not isinstance(pattern, str):
            raise OptionError(f"pattern is a string, not {pattern!r}")
        try:
            pieces = [(text, name, spec or "", how) for text, name, spec, how in string.Formatter().parse(pattern)]
        except ValueError as error:
            raise OptionError(f"pattern {pattern!r} is malformed: {error}") from None
        known = (*_RANKS, "part", None)
        if any(name not in known or how or not _WIDTH.fullmatch(spec) for _, name, spec, how in pieces):
            raise OptionError(
                f"pattern {pattern!r} has fields that mean nothing here",
                hint=f"Use {{part}} and those of {', '.join(f'{{{name}}}' for name in _RANKS)} that you give",
            )
        if [name for _, name, _, _ in pieces].count("part") != 1:
            raise OptionError(
                f"pattern {pattern!r} must have {{part}} once", hint="Put it where the number of a part is"
            )
        if any(separator in pattern for separator in (os.sep, os.altsep) if separator):
            raise OptionError(
                f"pattern {pattern!r} names files below the directory", hint="Pass their own directory instead"
            )
        if _runs_together(pieces):
            raise OptionError(
                f"pattern {pattern!r} has nothing but digits between two numbers, so 111 could be 1 and 11 or 11 and 1",
                hint="Name the files with a letter or a sign between any two numbers",
            )
        return cls(pattern, tuple((text, name, spec) for text, name, spec, _ in pieces))

    @property
    def fields(self) -> set[str]:
        """Names of the ranks that it has a place for."""
        return {name for _, name, _ in self.pieces if name is not None} - {"part"}

    def check(self, ranks: Mapping[str, int]) -> None:
        """Refuse ranks that are not those of the pattern."""
        for names, text in (
            (self.fields - ranks.keys(), "needs"),
            (ranks.keys() - self.fields, "has no place for"),
        ):
            if names:
                raise OptionError(
                    f"the pattern {self.pattern!r} {text} {', '.join(sorted(names))}",
                    hint="Pass exactly the ranks that the pattern names",
                )

    def find(self, names: Iterable[str]) -> dict[str, dict[str, int]]:
        """Return the names of the form, each with the numbers in it."""
        seen: set[str] = set()
        expression = ""
        for text, name, _ in self.pieces:
            expression += re.escape(text)
            if name is not None:
                expression += f"(?P={name})" if name in seen else rf"(?P<{name}>[0-9]+)"
                seen.add(name)
        matches = ((name, re.fullmatch(expression, name)) for name in names)
        numbers = (
            (name, {key: int(value) for key, value in match.groupdict().items()}) for name, match in matches if match
        )
        return {name: place for name, place in numbers if self.name(place) == name}  # not "part-01" for part 1

    def name(self, place: Mapping[str, int]) -> str:
        """Return the name of one file."""
        return "".join(text + ("" if name is None else format(place[name], spec)) for text, name, spec in self.pieces)


def _runs_together(pieces: Iterable[tuple[str, str | None, str, str | None]]) -> bool:
    """Whether two fields have no more between them than digits, which may be of either."""
    between: str | None = None  # since the last field
    for text, name, _, _ in pieces:
        if between is not None:
            between += text
        if name is not None:
            if between is not None and not between.strip(string.digits):
                return True
            between = ""
    return False


def _number(name: str, value: object) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0 or isinstance(value, bool):
        raise OptionError(f"{name} is a number from 0, not {value!r}")
    return number


def _chosen(ranks: Mapping[str, int]) -> str:
    """Return the pattern of the form that ranks belong to."""
    if ranks.keys() == {"rank"}:
        return _BY_RANK
    if ranks.keys() == {"pp_rank", "tp_rank"}:
        return _BY_GRID
    raise OptionError(
        f"which files to read is not clear from {', '.join(sorted(ranks)) or 'no rank at all'}",
        hint="Pass rank, or pp_rank and tp_rank, or a pattern with what it needs of them",
    )


def _check_forms(folder: str, form: _Form, found: Mapping[str, object], names: Sequence[str]) -> None:
    """Refuse a directory with files of both forms: they are of two writers, and one of the two may be stale."""
    other = _Form.of(_BY_GRID if form.pattern == _BY_RANK else _BY_RANK)
    others = other.find(names)
    if found and others:
        raise CheckpointError(
            f"the directory holds sharded state in two forms, such as {min(found)} and {min(others)}",
            file=folder,
            hint=f"Remove the files of the one that is not meant, or name the other: pattern={form.pattern!r}",
        )


def _missing(
    folder: str, form: _Form, found: Mapping[str, Mapping[str, int]], names: Sequence[str], ranks: Mapping[str, int]
) -> NoReturn:
    """Say what there is instead of the files that are looked for."""
    if found:
        have = sorted(
            {tuple((name, place[name]) for name in _RANKS if name in form.fields) for place in found.values()}
        )
        text = f"no file for {_said(ranks)}; there are files for {few([_said(dict(one)) for one in have], 16)}"
        hint = "Pass one of these ranks, or write the state for as many ranks as there are now"
    else:
        text = f"no file is named like {form.pattern}"
        hint = "Pass the directory that the state was written to, or a pattern"
        other = next((form for form in map(_Form.of, (_BY_RANK, _BY_GRID)) if form.find(names)), None)
        if other is not None:
            text += f"; there are files like {other.pattern}"
            hint = f"Pass {' and '.join(sorted(other.fields))}"
        elif any(name.endswith(".safetensors") for name in names):
            text += "; there are other *.safetensors files"
            hint = "If they are a checkpoint that is not sharded, use load_into or load_model; else pass a pattern"
    raise FileMissingError(text, code=errno.ENOENT, file=folder, hint=hint)


def _said(ranks: Mapping[str, int]) -> str:
    return " ".join(f"{name} {ranks[name]}" for name in _RANKS if name in ranks)


def _gaps(parts: Sequence[int]) -> list[str]:
    """Return the numbers, or ranges of numbers, that are missing from 0 to the last."""
    gaps = []
    expected = 0
    for part in parts:
        if part > expected:
            gaps.append(f"{expected}" if part == expected + 1 else f"{expected} to {part - 1}")
        expected = part + 1
    return gaps
