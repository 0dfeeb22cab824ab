"""``load``: loading a checkpoint into host memory, to see how it goes."""

from __future__ import annotations

import os
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from dlpack_loader.cli.options import Json, Match, Source, Staging, Threads, choose
from dlpack_loader.cli.progress import bar
from dlpack_loader.destination import Target, wanted_shape
from dlpack_loader.dtype import BY_CODE
from dlpack_loader.errors import OptionError
from dlpack_loader.header import Entry
from dlpack_loader.load import load_into
from dlpack_loader.quantities import size_text
from dlpack_loader.reader import DEFAULT_STAGING_BYTES, safe_open
from dlpack_loader.selection import select
from dlpack_loader.terminal import clean, print_json

__all__ = ["load"]


class Filling(StrEnum):
    """Backends that fill memory."""

    AUTO = "auto"
    PREAD = "pread"


def load(
    source: Source,
    match: Match = None,
    backend: Annotated[Filling, typer.Option(help="What reads the files.")] = Filling.AUTO,
    threads: Threads = None,
    staging_bytes: Staging = DEFAULT_STAGING_BYTES,
    direct_io: Annotated[
        bool | None,
        typer.Option(
            "--direct-io/--no-direct-io",
            help="Read what is not cached around the page cache: on every disk, or never. By default on local ones.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Load the tensors into fresh host memory, report how that went, and forget them.

    Needs as much memory as the tensors take. A second run finds what the first one left in the page cache.
    """
    with bar("load") as progress:
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
            entries = choose(reader, match)
            _check_memory(sum(entry.nbytes for entry in entries))
            room = {entry.name: _room(entry) for entry in entries}
            report = load_into(reader, lambda entry: room.get(entry.name))
    if as_json:
        rate = report.bytes_written / report.seconds if report.seconds else None
        print_json({"source": source, **asdict(report), "bytes_per_second": rate})
    else:
        print("\n".join(map(clean, str(report).split("\n"))))


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
