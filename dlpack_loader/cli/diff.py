"""``diff``: what two checkpoints differ in."""

from __future__ import annotations

import re
import sys
from collections import Counter
from fnmatch import translate
from typing import Annotated, Any

import typer

from dlpack_loader.cli.options import Json, Match, Staging, Threads
from dlpack_loader.cli.progress import bar
from dlpack_loader.diff import Change, Comparison, Kind, compare
from dlpack_loader.dtype import BITS
from dlpack_loader.errors import OptionError
from dlpack_loader.header import Entry
from dlpack_loader.quantities import plural, size_text
from dlpack_loader.reader import DEFAULT_STAGING_BYTES
from dlpack_loader.terminal import clean, print_json, print_table

__all__ = ["diff"]

_ALONE = (Kind.ADDED, Kind.REMOVED)


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A file, a directory or an .index.json.")],
    after: Annotated[str, typer.Argument(metavar="B", help="What it is compared with; its shards may be others.")],
    match: Match = None,
    count: Annotated[
        bool, typer.Option("--count", help="Read differing tensors to their end and count what differs.")
    ] = False,
    ignore_metadata: Annotated[
        bool, typer.Option("--ignore-metadata", help="Differences of __metadata__ do not count.")
    ] = False,
    threads: Threads = None,
    staging_bytes: Staging = DEFAULT_STAGING_BYTES,
    as_json: Json = False,
) -> None:
    """Show what two checkpoints differ in: tensors added or removed, dtypes, shapes, bytes, metadata.

    Tensors are paired by name, so other shards make no difference. Bytes are compared as bits, within bounded memory.
    Exits with 0 when nothing differs, with 1 when something does, and with 2 on errors, as diff does.
    """
    wanted = None if match is None else re.compile(translate(match)).match
    seen = 0

    def choose(name: str) -> bool:
        nonlocal seen
        chosen = wanted is None or wanted(name) is not None
        seen += chosen
        return chosen

    with bar("compare") as progress:
        found = compare(
            before,
            after,
            choose=choose,
            count=count,
            metadata=not ignore_metadata,
            staging_bytes=staging_bytes,
            threads=threads,
            progress=progress,
        )
    if match is not None and not seen:
        raise OptionError(f"no tensor matches {match!r}", hint="The pattern is for whole names; put * around a part")
    if as_json:
        print_json(_document(before, after, found))
    else:
        _show(found)
    if not found.same:
        raise typer.Exit(1)


def _document(before: str, after: str, found: Comparison) -> dict[str, Any]:
    return {
        "before": before,
        "after": after,
        "same": found.same,
        "equal": found.equal,
        "bytes_read": found.bytes_read,
        "bytes_shared": found.bytes_shared,
        "seconds": found.seconds,
        "metadata": [{"key": m.key, "before": m.before, "after": m.after} for m in found.metadata],
        "tensors": [
            {
                "name": change.name,
                "changes": list(change.kinds),
                "before": _side(change.before),
                "after": _side(change.after),
                "first": change.first,
                "differing": change.differing,
            }
            for change in found.changes
        ],
    }


def _side(entry: Entry | None) -> dict[str, Any] | None:
    return None if entry is None else {name: getattr(entry, name) for name in Entry.__struct_fields__ if name != "name"}


def _show(found: Comparison) -> None:
    people = sys.stdout.isatty()
    rows = [
        (",".join(change.kinds), clean(change.name), _form(change.before), _form(change.after), _where(change))
        for change in found.changes
    ]
    rows += [
        ("metadata", clean(change.key), _text(change.before, people), _text(change.after, people), "")
        for change in found.metadata
    ]
    if rows:
        print_table([("change" if people else "# change", "name", "A", "B", ""), *rows], "<<<<<")
    kinds = Counter(" and ".join(change.kinds) for change in found.changes)
    counts = [f"{number:,} {kind if kind in _ALONE else f'changed in {kind}'}" for kind, number in kinds.items()]
    if found.metadata:
        counts.append(f"{plural(len(found.metadata), 'key')} of the metadata")
    lines = [f"{', '.join(counts) if counts else 'nothing differs'}; {plural(found.equal, 'tensor')} equal"]
    shared = f", {size_text(found.bytes_shared)} in the same files" if found.bytes_shared else ""
    lines.append(f"{size_text(found.bytes_read)} read of both together{shared}")
    if people and rows:
        print()
    print("\n".join(lines if people else (f"# {line}" for line in lines)))


def _form(entry: Entry | None) -> str:
    return "-" if entry is None else f"{entry.dtype} [{','.join(map(str, entry.shape))}]"


def _where(change: Change) -> str:
    if change.first is None or change.before is None:
        return ""
    text = f"first at byte {change.first:,} of {change.before.nbytes:,}"
    if change.differing is None:
        return text
    bits = BITS[change.before.dtype]
    whole, unit = (change.before.nbytes * 8 // bits, "elements") if bits % 8 == 0 else (change.before.nbytes, "bytes")
    return f"{text}, {change.differing:,} of {whole:,} {unit}"


def _text(value: str | None, people: bool) -> str:
    if value is None:
        return "-"
    text = clean(value)
    return f"{text[:40]}..." if people and len(text) > 43 else text
