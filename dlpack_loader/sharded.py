"""Sharded state: what each rank of an inference engine wrote of its own tensors, back into the tensors of that rank.

vLLM and SGLang write such directories: one or more files for each rank, with the tensors as that rank holds them, so
nothing is to be cut or gathered. Two things differ from a plain load. The memory of a tensor may be larger than what
was written of it, such as a vocabulary that is padded. And a tensor within another one's memory is not written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, overload

from dlpack_loader.destination import Target
from dlpack_loader.header import Entry
from dlpack_loader.load import module_tensors
from dlpack_loader.matching import Destinations
from dlpack_loader.progress import Progress
from dlpack_loader.rank_files import rank_files
from dlpack_loader.reader import DEFAULT_STAGING_BYTES, Reader, safe_open
from dlpack_loader.transfer import LoadReport, Pending

__all__ = ["load_sharded_state"]


@overload
def load_sharded_state(
    destinations: Any,
    directory: str | os.PathLike[str],
    *,
    rank: int | None = None,
    pp_rank: int | None = None,
    tp_rank: int | None = None,
    pattern: str | None = None,
    padding: Literal["keep", "zero"] | None = "keep",
    cast: bool = False,
    strict: bool = True,
    wait: Literal[True] = True,
    stream: object = None,
    backend: str = "auto",
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    threads: int | None = None,
    progress: Progress | None = None,
    direct_io: bool | None = None,
    require_direct: bool = False,
) -> LoadReport: ...


@overload
def load_sharded_state(
    destinations: Any,
    directory: str | os.PathLike[str],
    *,
    rank: int | None = None,
    pp_rank: int | None = None,
    tp_rank: int | None = None,
    pattern: str | None = None,
    padding: Literal["keep", "zero"] | None = "keep",
    cast: bool = False,
    strict: bool = True,
    wait: Literal[False],
    stream: object = None,
    backend: str = "auto",
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    threads: int | None = None,
    progress: Progress | None = None,
    direct_io: bool | None = None,
    require_direct: bool = False,
) -> Pending: ...


def load_sharded_state(
    destinations: Any,
    directory: str | os.PathLike[str],
    *,
    rank: int | None = None,
    pp_rank: int | None = None,
    tp_rank: int | None = None,
    pattern: str | None = None,
    padding: Literal["keep", "zero"] | None = "keep",
    cast: bool = False,
    strict: bool = True,
    wait: bool = True,
    stream: object = None,
    backend: str = "auto",
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    threads: int | None = None,
    progress: Progress | None = None,
    direct_io: bool | None = None,
    require_direct: bool = False,
) -> LoadReport | Pending:
    """Fill the tensors of one rank from the files that this rank wrote.

    The headers of all its files are read, and every destination is checked, before the first byte is written.

    Parameters
    ----------
    destinations
        A ``torch.nn.Module``, or what :func:`dlpack_loader.load_into` takes: a mapping from names, or a resolver, which
        leaves a tensor to its caller by returning None.
    directory
        Where the files of all ranks are.
    rank
        Reads ``model-rank-{rank}-part-{part}.safetensors``.
    pp_rank, tp_rank
        Together, instead of ``rank``: read ``model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors``.
    pattern
        Other names of files: with ``{part}``, and with those of ``{rank}``, ``{pp_rank}``, ``{tp_rank}`` that are
        given. Widths such as ``{part:05d}`` are understood.
    padding
        What becomes of the rest of a destination that is larger than its tensor: it is kept, as vLLM does, or zeroed;
        None refuses such a destination. A Target may have a padding of its own.
    cast
        Allow a destination of another floating-point dtype.
    strict
        Require a tensor for every destination and a destination for every tensor. A destination that lies within the
        memory of another one that is filled needs none, and is in the report's ``aliases``; nor does one without
        elements.
    wait, stream, backend, staging_bytes, threads, progress, direct_io, require_direct
        As for :func:`dlpack_loader.load_into`.

    Raises
    ------
    FileMissingError
        There is no file for that rank; the message says for which ranks there are.
    CheckpointError
        A part is missing, or malformed, or the directory holds files of two forms.
    StrictError, DestinationError
        The destinations do not suit the files; nothing was written.
    StorageError
        Reading failed; see ``dirty``.

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> from safetensors.numpy import save_file
    >>> folder = tempfile.mkdtemp()
    >>> save_file({"embed": np.ones((3, 2), np.float32)}, os.path.join(folder, "model-rank-0-part-0.safetensors"))
    >>> embed = np.full((4, 2), 7, np.float32)
    >>> report = load_sharded_state({"embed": embed}, folder, rank=0, padding="zero")
    >>> embed.tolist(), report.bytes_zeroed
    ([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]], 8)
    """
    Target(None, padding=padding)  # a padding that makes no sense is refused before any I/O
    files = rank_files(directory, rank=rank, pp_rank=pp_rank, tp_rank=tp_rank, pattern=pattern)
    reader = safe_open(
        files,
        "np",  # makes no tensors
        backend=backend,
        staging_bytes=staging_bytes,
        threads=threads,
        progress=progress,
        direct_io=direct_io,
        require_direct=require_direct,
    )
    with reader:
        wanted = _padded(_written(destinations, reader), padding)
        return reader.load_into(wanted, strict=strict, cast=cast, stream=stream, wait=wait)


def _written(destinations: Any, reader: Reader) -> Any:
    """Leave out destinations without elements that have no tensor, since writers leave those out."""
    if hasattr(destinations, "state_dict"):
        destinations = module_tensors(destinations)
    if not isinstance(destinations, Mapping):
        return destinations
    return {name: item for name, item in destinations.items() if name in reader or not _is_empty(item)}


def _is_empty(item: Any) -> bool:
    if isinstance(item, (list, tuple)):
        return bool(item) and all(map(_is_empty, item))
    return 0 in getattr(item.destination if isinstance(item, Target) else item, "shape", ())


def _padded(destinations: Any, padding: Literal["keep", "zero"] | None) -> Destinations:
    """Give every destination a padding that has none."""
    if padding is None:
        return destinations  # type: ignore[no-any-return]
    if isinstance(destinations, Mapping):
        return {name: _target(item, padding) for name, item in destinations.items()}
    if not callable(destinations):
        return destinations  # type: ignore[no-any-return]  # refused where all are

    def resolve(entry: Entry) -> Any:
        item = destinations(entry)
        return None if item is None else _target(item, padding)

    return resolve


def _target(item: Any, padding: Literal["keep", "zero"]) -> Any:
    if isinstance(item, (list, tuple)):
        return [_target(part, padding) for part in item]
    if isinstance(item, Target):
        return item if item.padding is not None else replace(item, padding=padding)
    return Target(item, padding=padding)
