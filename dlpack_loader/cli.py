"""The command line: what is in a checkpoint, whether it is sound, what loading it would do, and loading it.

Results go to standard output, one row a line; errors and progress go to standard error. At a terminal sizes are
rounded for people; anywhere else they are exact, nothing is shortened, and lines that are not rows begin with ``#``.
With ``--json`` the output is one JSON document; errors are text on standard error in any case. The exit code is 1 when
something is wrong with the checkpoint or its files and 2 when the command line makes no sense.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from fnmatch import translate
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from dlpack_loader import __version__
from dlpack_loader.checkpoint import Checkpoint, open_checkpoint
from dlpack_loader.destination import Target, wanted_shape
from dlpack_loader.dtype import BY_CODE
from dlpack_loader.errors import CheckpointError, LoaderError, OptionError
from dlpack_loader.header import Entry
from dlpack_loader.load import load_into
from dlpack_loader.plan import Plan
from dlpack_loader.progress import Progress
from dlpack_loader.reader import DEFAULT_STAGING_BYTES, Reader, make_bounds, safe_open
from dlpack_loader.reads import Transfer
from dlpack_loader.selection import select
from dlpack_loader.terminal import (
    amount,
    clean,
    complain,
    document,
    explain,
    plural,
    print_json,
    print_table,
    rounded,
    short_paths,
    size_text,
)

__all__ = ["app"]


class _Commands(TyperGroup):
    """The commands, all of which turn an error of the package into one message and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a name may hold what the terminal's encoding lacks
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except LoaderError as error:
            problems = error.problems if isinstance(error, CheckpointError) else ()
            complain(explain(error), *map(explain, problems))
        except MemoryError:
            complain(["not enough memory", "hint: Choose some of the tensors with --match"])
        finally:
            sys.stdout.flush()  # here, so that a closed pipe is noticed where typer deals with it
        raise typer.Exit(1)


app = typer.Typer(
    name="dlpack-loader",
    cls=_Commands,
    help="Look into safetensors checkpoints, check them, and load them.\n\n"
    "SOURCE is a .safetensors file, a directory of them, or an .index.json.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Sort(StrEnum):
    """Orders of ``ls``."""

    NAME = "name"
    OFFSET = "offset"
    SIZE = "size"


class Filling(StrEnum):
    """Backends that fill memory."""

    AUTO = "auto"
    PREAD = "pread"


def _parse_size(text: str) -> int:
    """Read ``64MiB``, ``16MB`` or ``1048576``."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) ?(?:(?:([kmgt])(i?))?b)?", str(text).strip().lower(), re.ASCII)
    if found is not None:
        number, prefix, binary = found.groups()
        size: int = round(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " "))
        if size > 0:
            return size
    raise typer.BadParameter(f"{text!r} is not a size such as 64MiB, 16MB or 1048576")


_Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="A .safetensors file, a directory of them, or an .index.json.")
]
_Match = Annotated[
    str | None, typer.Option("--match", metavar="GLOB", help="Only tensors whose whole name matches, e.g. '*.bias'.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
_Threads = Annotated[
    int | None, typer.Option(min=1, max=1024, metavar="N", help="Readers at a time; by default two a CPU, at most 8.")
]
_Staging = Annotated[
    int,
    typer.Option(
        parser=_parse_size,
        metavar="SIZE",
        show_default=False,
        help="Bound on host memory beyond the tensors, such as 16MB, 1048576, or 64MiB, the default.",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dlpack-loader {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


@app.command("ls")
def list_tensors(
    source: _Source,
    sort: Annotated[
        Sort, typer.Option(help="By name (layer.2 before layer.10), place in the files, or size, largest first.")
    ] = Sort.NAME,
    match: _Match = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N rows.")] = None,
    as_json: _Json = False,
) -> None:
    """Show what is in a checkpoint: name, dtype, shape and bytes of each tensor, and the sums.

    Only the headers are read. Piped, sizes are exact bytes and the lines that are not tensors begin with '#'.
    """
    checkpoint = open_checkpoint(source)
    entries = _choose(checkpoint, match)
    if sort is Sort.NAME:
        entries.sort(key=lambda entry: _natural(entry.name))
    elif sort is Sort.SIZE:
        entries.sort(key=lambda entry: -entry.nbytes)
    shown = entries[:limit]
    tensors = Counter(entry.dtype for entry in entries)
    nbytes: Counter[str] = Counter()
    for entry in entries:
        nbytes[entry.dtype] += entry.nbytes
    dtypes = {code: {"tensors": tensors[code], "nbytes": size} for code, size in nbytes.most_common()}
    metadata = checkpoint.metadata()
    if as_json:
        print_json(
            {
                "source": source,
                "count": len(entries),
                "nbytes": nbytes.total(),
                "dtypes": dtypes,
                "metadata": metadata,
                "index": checkpoint.index,
                "files": [{"path": s.path, "size": s.size, "tensors": len(s.header)} for s in checkpoint.shards],
                "tensors": [{name: getattr(entry, name) for name in Entry.__struct_fields__} for entry in shown],
            }
        )
        return
    people = sys.stdout.isatty()
    labels = short_paths([shard.path for shard in checkpoint.shards])
    table = [("name" if people else "# name", "dtype", "shape", "bytes", "file" if len(labels) > 1 else "")]
    for entry in shown:
        shape = f"[{','.join(map(str, entry.shape))}]"
        size = rounded(entry.nbytes) if people else str(entry.nbytes)
        table.append((clean(entry.name), entry.dtype, shape, size, labels[entry.file]))
    print_table(table)
    notes = [amount(len(entries), nbytes.total())]
    if len(shown) < len(entries):
        notes[0] += f", the first {len(shown):,} shown"
    if match is not None:
        notes[0] += f", of {len(checkpoint):,} in all"
    notes += [f"  {code:<9} {amount(**sums)}" for code, sums in dtypes.items()]
    for key, value in (metadata or {}).items():
        text = clean(value)
        notes.append(f"  metadata  {clean(key)} = {text[:80] + '...' if people and len(text) > 83 else text}")
    if checkpoint.index is not None:
        notes.append(f"  index     {clean(checkpoint.index)}")
    notes += [f"  file      {clean(shard.path)}, {size_text(shard.size)}" for shard in checkpoint.shards]
    if people:
        print()
    print("\n".join(notes if people else (f"# {note}" for note in notes)))


@app.command()
def check(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="Files, directories or indexes, each checked by itself.")
    ],
    as_json: _Json = False,
) -> None:
    """Check headers, indexes and file sizes, and name every problem. Exits with 1 when there is one.

    No tensor is read: a file whose header and size are right may still hold wrong numbers.
    """
    documents = []
    for source in sources:
        counts, problems = _verdict(source)
        documents.append({"source": source, "ok": not problems, **counts, "problems": list(map(document, problems))})
        if as_json:
            continue
        if problems:
            print(f"BAD  {clean(source)}: {plural(len(problems), 'problem')}")
            for problem in problems:
                print("  -", "\n    ".join(explain(problem)))
        else:
            held = amount(counts["tensors"], counts["nbytes"])
            print(f"ok   {clean(source)}: {held} in {plural(counts['files'], 'file')}")
    sound = all(item["ok"] for item in documents)
    if as_json:
        print_json({"ok": sound, "sources": documents})
    if not sound:
        raise typer.Exit(1)


@app.command()
def plan(
    source: _Source,
    match: _Match = None,
    threads: _Threads = None,
    staging_bytes: _Staging = DEFAULT_STAGING_BYTES,
    as_json: _Json = False,
) -> None:
    """Show which reads would load the tensors into host memory of their dtype and shape.

    No tensor is read and no memory is allocated for one, so this works for checkpoints of any size.
    """
    entries = _choose(open_checkpoint(source), match)
    transfers = [Transfer(e.name, e.file, e.offset, k, e.nbytes, written=e.nbytes) for k, e in enumerate(entries)]
    made = Plan.make(transfers, [entry.name for entry in entries], make_bounds(staging_bytes, threads))
    if not as_json:
        print(made.explain())
        return
    print_json(
        {
            "source": source,
            "tensors": len(entries),
            "transfers": len(made.transfers),
            "files": len({transfer.file for transfer in made.transfers}),
            **asdict(made.totals),
            "bounds": asdict(made.bounds),
        }
    )


@app.command()
def load(
    source: _Source,
    match: _Match = None,
    backend: Annotated[Filling, typer.Option(help="What reads the files.")] = Filling.AUTO,
    threads: _Threads = None,
    staging_bytes: _Staging = DEFAULT_STAGING_BYTES,
    direct_io: Annotated[
        bool | None,
        typer.Option(
            "--direct-io/--no-direct-io",
            help="Read what is not cached around the page cache: on every disk, or never. By default on local ones.",
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Load the tensors into fresh host memory, report how that went, and forget them.

    Needs as much memory as the tensors take. A second run finds what the first one left in the page cache.
    """
    with _progress() as progress:
        reader = safe_open(
            source,
            "np",
            backend=backend.value,
            staging_bytes=staging_bytes,
            threads=threads,
            progress=progress,
            direct_io=direct_io,
        )
        with reader:
            entries = _choose(reader, match)
            _check_memory(sum(entry.nbytes for entry in entries))
            room = {entry.name: _room(entry) for entry in entries}
            report = load_into(reader, lambda entry: room.get(entry.name))
    if as_json:
        rate = report.bytes_written / report.seconds if report.seconds else None
        print_json({"source": source, **asdict(report), "bytes_per_second": rate})
    else:
        print("\n".join(map(clean, str(report).split("\n"))))


def _verdict(source: str) -> tuple[dict[str, int], tuple[LoaderError, ...]]:
    """Open a checkpoint; return what is in it and the problems found, of which one excludes the other."""
    try:
        checkpoint = open_checkpoint(source)
    except LoaderError as error:
        problems = error.problems if isinstance(error, CheckpointError) else ()
        return {"tensors": 0, "nbytes": 0, "files": 0}, problems or (error,)
    return {"tensors": len(checkpoint), "nbytes": checkpoint.nbytes(), "files": len(checkpoint.shards)}, ()


def _choose(source: Checkpoint | Reader, glob: str | None) -> list[Entry]:
    """Return the entries whose names match, in the order of the files."""
    names = source.offset_keys()
    chosen = names if glob is None else list(filter(re.compile(translate(glob)).match, names))
    if names and not chosen:
        raise OptionError(
            f"no tensor matches {glob!r}",
            hint=f"The pattern is for whole names, such as {names[0]!r}; put * around a part of one",
        )
    return list(map(source.entry, chosen))


def _natural(name: str) -> list[str | int]:
    """Sort key that puts ``layer.2`` before ``layer.10``."""
    return [int(part) if k % 2 else part for k, part in enumerate(re.split(r"([0-9]{1,18})", name))]


def _room(entry: Entry) -> Target:
    """Allocate host memory for an entry, as unsigned integers of its width: NumPy need not know its dtype."""
    import numpy as np

    dtype = BY_CODE[entry.dtype]
    _, bits, lanes = dtype.dlpack
    shape = wanted_shape(dtype, select(..., dtype, entry.shape))
    return Target(np.empty(shape, f"u{bits * lanes // 8}"), reinterpret=True)


def _check_memory(nbytes: int) -> None:
    """Refuse what the machine cannot hold, before it begins to swap or to end processes."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # this system does not say
        return
    if nbytes > memory > 0:
        raise OptionError(
            f"the tensors take {size_text(nbytes)} and this machine has {size_text(memory)} of memory",
            hint="Choose some of the tensors with --match",
        )


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """Show a bar while a load runs, where somebody can see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("load", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
