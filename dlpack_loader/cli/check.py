"""``check``: whether checkpoints are sound."""

from __future__ import annotations

from typing import Annotated

import typer

from dlpack_loader.checkpoint import open_checkpoint
from dlpack_loader.cli.options import Json
from dlpack_loader.errors import CheckpointError, LoaderError
from dlpack_loader.quantities import plural
from dlpack_loader.terminal import amount, clean, document, explain, print_json

__all__ = ["check"]


def check(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="Files, directories or indexes, each checked by itself.")
    ],
    as_json: Json = False,
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


def _verdict(source: str) -> tuple[dict[str, int], tuple[LoaderError, ...]]:
    """Open a checkpoint; return what is in it and the problems found, of which one excludes the other."""
    try:
        checkpoint = open_checkpoint(source)
    except LoaderError as error:
        problems = error.problems if isinstance(error, CheckpointError) else ()
        return {"tensors": 0, "nbytes": 0, "files": 0}, problems or (error,)
    return {"tensors": len(checkpoint), "nbytes": checkpoint.nbytes(), "files": len(checkpoint.shards)}, ()
