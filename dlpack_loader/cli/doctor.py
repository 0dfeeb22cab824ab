"""``doctor``: what this machine can load, how, and what stands in the way."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dlpack_loader.cli.options import Json
from dlpack_loader.doctor import Examination, Finding, Level, examine
from dlpack_loader.quantities import plural
from dlpack_loader.terminal import clean, print_json

__all__ = ["doctor"]

_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}


def doctor(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATH]", help="A checkpoint, or a folder on the storage in question; by default the current one."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="For each library that is tried in a process of its own.")
    ] = 120,
    as_json: Json = False,
) -> None:
    """Show what this machine can load and how: devices, drivers, libraries, storage, limits, each with the remedy.

    Libraries are tried in processes of their own, so a broken one is a line here and never the end. A note says what
    would be faster or reach more, a problem what is there and does not work. Exits with 1 only where nothing can be
    loaded at all: PATH is missing or broken, or NumPy is.
    """
    with _waiting():
        examination = examine(path, timeout=timeout)
    if as_json:
        print_json(
            {
                "path": examination.path,
                "can_load": examination.can_load,
                "problems": examination.count(Level.PROBLEM),
                "notes": examination.count(Level.NOTE),
                "devices": [asdict(device) for device in examination.devices],
                "findings": [asdict(finding) for finding in examination.findings],
            }
        )
    elif sys.stdout.isatty():
        _show(examination)
    else:
        _list(examination)
    if not examination.can_load:
        raise typer.Exit(1)


def _show(examination: Examination) -> None:
    """Write for people: groups, and below each fact what it means."""
    console = Console()
    group = ""
    for finding in examination.findings:
        if finding.group != group:
            group = finding.group
            console.print(Text(group, style="bold"))
        console.print(Padding(_row(finding), (0, 0, 0, 2)))
    console.print()
    for line in _summary(examination):
        console.print(Text(line))


def _row(finding: Finding) -> Table:
    row = Table.grid(padding=(0, 2))
    row.add_column(width=7)
    row.add_column(ratio=1)
    label = finding.key.partition(".")[2].replace("_", " ").replace(".", " ")
    told = Text.assemble((label, "bold"), f"  {clean(finding.value)}", overflow="fold")  # paths are long words
    meaning = Text(clean(finding.meaning), style="dim", overflow="fold")
    parts = [told, meaning]
    if finding.remedy:
        parts.append(Text(f"-> {clean(finding.remedy)}", style=_STYLES[finding.level], overflow="fold"))
    row.add_row(Text(finding.level, style=_STYLES[finding.level]), Group(*parts))
    return row


def _list(examination: Examination) -> None:
    """Write for pipes: one finding a line."""
    width = max(len(finding.key) for finding in examination.findings)
    for finding in examination.findings:
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        text = clean(f"{finding.value}; {finding.meaning}{remedy}")
        print(f"{finding.level:<7}  {finding.key:<{width}}  {text}")
    for line in _summary(examination):
        print(f"# {line}")


def _summary(examination: Examination) -> list[str]:
    """Say in a few words whether loading works, and where to."""
    counts = f"{plural(examination.count(Level.PROBLEM), 'problem')}, {plural(examination.count(Level.NOTE), 'note')}"
    blocking = [finding for finding in examination.findings if finding.blocking]
    if blocking:
        return [f"Loading is not possible: {clean(blocking[0].value)}", counts]
    places = ["host memory"]
    for group, kind in (("cuda", "cuda"), ("rocm", "hip")):
        count = sum(device.kind == kind for device in examination.devices)
        works = all(examination.finding(f"{group}.{part}").level is Level.OK for part in ("driver", "binding"))
        if count and works:
            direct = examination.finding(f"{group}.gpu_direct").level is Level.OK
            how = "directly from storage" if direct else "through pinned host memory"
            places.append(f"{plural(count, f'{kind.upper()} device')} ({how})")
    return [f"Loads can fill {' and '.join(places)}", counts]


@contextmanager
def _waiting() -> Iterator[None]:
    """Say that something is under way, where somebody can see it."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status("trying drivers and libraries"):
        yield
