"""``bench``: which way of loading is fastest for a file, on this machine."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import translate
from typing import Annotated, Any

import typer
from rich.console import Console

from dlpack_loader.bench import Benchmark, Measured, measure
from dlpack_loader.cli.options import Json, Match, Source, parse_size
from dlpack_loader.terminal import amount, clean, print_json, print_table

__all__ = ["bench"]

_LOG = "CUFILE_LOGFILE_PATH"


def bench(
    source: Source,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Where the tensors go, as torch spells it: cpu, cuda, cuda:1.")
    ] = "cpu",
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Runs of each way, warm and cold; 3 at least tell more.")
    ] = 5,
    seconds: Annotated[
        float,
        typer.Option(min=1, metavar="S", help="About how long the runs may take: else fewer rounds, or a sample."),
    ] = 120,
    match: Match = None,
    most: Annotated[
        int | None,
        typer.Option(
            parser=parse_size, metavar="SIZE", help="Load no more than that; by default a quarter of the memory."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure every way of loading SOURCE that is usable here, against safetensors, and say which to choose.

    Warm runs find the file in the page cache, from where every way reads it; cold ones on the storage. Runs take
    turns, and each ends with the same bytes in the same tensors. The median counts; a difference within what runs of
    one way differ by is called noise.
    The file is only read, and nothing is left behind.
    """
    wanted = None if match is None else re.compile(translate(match)).match
    with _saying() as say, _no_log():
        result = measure(
            source,
            device,
            rounds=rounds,
            seconds=seconds,
            choose=None if wanted is None else lambda name: wanted(name) is not None,
            most_bytes=most,
            say=say,
        )
    if as_json:
        print_json(_document(result))
    else:
        _show(result)


def _document(result: Benchmark) -> dict[str, Any]:
    document = asdict(result)
    for row, item in zip(document["measured"], result.measured, strict=True):
        low, high = item.spread
        row |= {
            "median": item.median,
            "quartiles": [low, high],
            "cpu_median": item.cpu_median,
            "bytes_per_second": item.rate,
        }
    return document


def _show(result: Benchmark) -> None:
    people = sys.stdout.isatty()
    head = ("state" if people else "# state", "way", "GB/s", "median s", "quartiles s", "CPU s", "runs", "")
    rows = [head, *map(_row, result.measured)]
    if result.measured:
        print_table(rows, "<<>>>>><")
    of = "" if result.whole else ", a part of it"
    framework = f" of {result.framework}" if result.framework else ""
    lines = [
        f"{clean(result.source)}: {amount(result.tensors, result.nbytes)}{of}",
        f"into memory{framework} on {clean(result.device)}",
    ]
    lines += [f"note: {clean(note)}" for note in result.notes]
    for item in result.unusable:
        remedy = f" -> {clean(item.remedy)}" if item.remedy else ""
        lines.append(f"not measured: {item.way}: {clean(item.why)}{remedy}")
    lines += [f"choose, {clean(advice.text)}" for advice in result.advice]
    if people and result.measured:
        print()
    print("\n".join(lines if people else (f"# {line}" for line in lines)))


def _row(item: Measured) -> tuple[str, ...]:
    low, high = item.spread
    return (
        item.state,
        item.way,
        f"{item.rate / 1e9:.3f}",
        f"{item.median:.4f}",
        f"{low:.4f}-{high:.4f}",
        f"{item.cpu_median:.4f}",
        str(len(item.seconds)),
        "default" if item.default else "",
    )


@contextmanager
def _saying() -> Iterator[Callable[[str], object] | None]:
    """Show what is being done, where somebody can see it."""
    if not sys.stderr.isatty():
        yield None
        return
    with Console(stderr=True).status("looking at the file") as status:
        yield status.update


@contextmanager
def _no_log() -> Iterator[None]:
    """Keep cuFile from leaving a log file in the current folder, unless somebody wants one."""
    if _LOG in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="dlpack-loader-", ignore_cleanup_errors=True) as folder:
        os.environ[_LOG] = os.path.join(folder, "cufile.log")
        try:
            yield
        finally:
            del os.environ[_LOG]
