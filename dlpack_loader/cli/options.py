"""What several commands take: sources, patterns, sizes, and what these mean."""

from __future__ import annotations

import re
from fnmatch import translate
from typing import Annotated

import typer

from dlpack_loader.checkpoint import Checkpoint
from dlpack_loader.errors import OptionError
from dlpack_loader.header import Entry
from dlpack_loader.reader import Reader

__all__ = ["Json", "Match", "Source", "Staging", "Threads", "choose", "parse_size"]


def parse_size(text: str) -> int:
    """Read ``64MiB``, ``16MB`` or ``1048576``."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) ?(?:(?:([kmgt])(i?))?b)?", str(text).strip().lower(), re.ASCII)
    if found is not None:
        number, prefix, binary = found.groups()
        size: int = round(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " "))
        if size > 0:
            return size
    raise typer.BadParameter(f"{text!r} is not a size such as 64MiB, 16MB or 1048576")


Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="A .safetensors file, a directory of them, or an .index.json.")
]
Match = Annotated[
    str | None, typer.Option("--match", metavar="GLOB", help="Only tensors whose whole name matches, e.g. '*.bias'.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Threads = Annotated[
    int | None, typer.Option(min=1, max=1024, metavar="N", help="Readers at a time; by default two a CPU, at most 8.")
]
Staging = Annotated[
    int,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        show_default=False,
        help="Bound on host memory beyond the tensors, such as 16MB, 1048576, or 64MiB, the default.",
    ),
]


def choose(source: Checkpoint | Reader, glob: str | None) -> list[Entry]:
    """Return the entries whose names match, in the order of the files."""
    names = source.offset_keys()
    chosen = names if glob is None else list(filter(re.compile(translate(glob)).match, names))
    if names and not chosen:
        raise OptionError(
            f"no tensor matches {glob!r}",
            hint=f"The pattern is for whole names, such as {names[0]!r}; put * around a part of one",
        )
    return list(map(source.entry, chosen))
