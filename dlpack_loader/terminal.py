"""Text for people and JSON for programs: sizes, tables, and errors as the command line shows them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from dlpack_loader.errors import HeaderError, LoaderError
from dlpack_loader.quantities import plural, size_text

__all__ = [
    "amount",
    "clean",
    "complain",
    "document",
    "explain",
    "print_json",
    "print_table",
    "short_paths",
]


def explain(error: LoaderError) -> list[str]:
    """Say in lines what was wrong, where, and what to do."""
    what = error.message
    if isinstance(error, HeaderError):
        what = f"Error while deserializing header: {what}"
    where = [("tensor", error.tensor), ("file", error.file), ("offset", error.offset), ("hint", error.hint)]
    return [clean(what), *(f"{label}: {clean(str(value))}" for label, value in where if value is not None)]


def complain(*messages: Sequence[str]) -> None:
    """Write an error, and those that it consists of, to standard error."""
    (first, *rest), *others = messages
    text = Text.assemble(("error: ", "bold red"), "\n  ".join([first, *rest]))
    for message in others:
        text.append("\n  - " + "\n    ".join(message))
    Console(stderr=True).print(text, soft_wrap=True)


def document(error: LoaderError) -> dict[str, Any]:
    """Return a problem as JSON has it."""
    return {
        "kind": type(error).__name__,
        "reason": error.reason if isinstance(error, HeaderError) else None,
        "message": error.message,
        "file": error.file,
        "tensor": error.tensor,
        "hint": error.hint,
    }


def print_json(content: dict[str, Any]) -> None:
    """Print one JSON document: indented at a terminal, on one line elsewhere."""
    print(json.dumps(content, indent=2 if sys.stdout.isatty() else None))


def print_table(rows: Sequence[Sequence[str]], sides: str) -> None:
    """Align columns below the first row. Plain text: quick for any number of rows, and good for pipes.

    Parameters
    ----------
    sides
        For each column, ``<`` where it begins or ``>`` where it ends at one place.
    """
    widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    head, *lines = (form.format(*row).rstrip() for row in rows)
    Console().print(Text(head, style="bold"), soft_wrap=True)
    print("".join(f"{line}\n" for line in lines), end="")


def short_paths(paths: Sequence[str]) -> dict[str, str]:
    """Map paths to what tells them apart: nothing for one, their names, or where these repeat, the paths."""
    names = [os.path.basename(path) for path in paths]
    labels = [""] if len(paths) == 1 else names if len(set(names)) == len(names) else paths
    return dict(zip(paths, map(clean, labels), strict=True))


def clean(text: str) -> str:
    """Escape what would move the cursor, break the line or fail to be encoded; names come from files of strangers."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def amount(tensors: int, nbytes: int) -> str:
    """Return so many tensors and so many bytes in words."""
    return f"{plural(tensors, 'tensor')}, {size_text(nbytes)}"
