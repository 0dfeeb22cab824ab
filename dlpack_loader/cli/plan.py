"""``plan``: what loading a checkpoint would read."""

from __future__ import annotations

from dataclasses import asdict

from dlpack_loader.checkpoint import open_checkpoint
from dlpack_loader.cli.options import Json, Match, Source, Staging, Threads, choose
from dlpack_loader.plan import Plan
from dlpack_loader.reader import DEFAULT_STAGING_BYTES, make_bounds
from dlpack_loader.reads import Transfer
from dlpack_loader.terminal import print_json

__all__ = ["plan"]


def plan(
    source: Source,
    match: Match = None,
    threads: Threads = None,
    staging_bytes: Staging = DEFAULT_STAGING_BYTES,
    as_json: Json = False,
) -> None:
    """Show which reads would load the tensors into host memory of their dtype and shape.

    No tensor is read and no memory is allocated for one, so this works for checkpoints of any size.
    """
    entries = choose(open_checkpoint(source), match)
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
