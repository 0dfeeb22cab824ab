"""``ls``: what is in a checkpoint."""

from __future__ import annotations

import re
import sys
from collections import Counter
from enum import StrEnum
from typing import Annotated

import typer

from dlpack_loader.checkpoint import open_checkpoint
from dlpack_loader.cli.options import Json, Match, Source, choose
from dlpack_loader.header import Entry
from dlpack_loader.quantities import rounded, size_text
from dlpack_loader.terminal import amount, clean, print_json, print_table, short_paths

__all__ = ["list_tensors"]


class Sort(StrEnum):
    """Orders of ``ls``."""

    NAME = "name"
    OFFSET = "offset"
    SIZE = "size"


def list_tensors(
    source: Source,
    sort: Annotated[
        Sort, typer.Option(help="By name (layer.2 before layer.10), place in the files, or size, largest first.")
    ] = Sort.NAME,
    match: Match = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N rows.")] = None,
    as_json: Json = False,
) -> None:
    """Show what is in a checkpoint: name, dtype, shape and bytes of each tensor, and the sums.

    Only the headers are read. Piped, sizes are exact bytes and the lines that are not tensors begin with '#'.
    """
    checkpoint = open_checkpoint(source)
    entries = choose(checkpoint, match)
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
    print_table(table, "<<>><")
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


def _natural(name: str) -> list[str | int]:
    """Sort key that puts ``layer.2`` before ``layer.10``."""
    return [int(part) if k % 2 else part for k, part in enumerate(re.split(r"([0-9]{1,18})", name))]
