"""transformers: ``from_pretrained`` reads its weights through this package.

transformers opens each file of a checkpoint and lets a pool of threads bring one tensor after the other to its device
and dtype. Within :func:`read_through` a thread allocates the tensor there and reads into it: by a backend that fills
that device's memory, converted block by block where the dtype differs. A tensor that stays on the CPU as it is in the
file is made as :func:`dlpack_loader.safe_open` makes it: mapped, and read when it is touched, or with
``backend="pread"`` read at once. What transformers makes of the tensors afterwards (experts stacked, projections
joined, weights tied or quantized) is its own work on tensors of its own, as before.

What is read so: safetensors files, by ``from_pretrained`` of models, adapters and multi-token-prediction layers. Read
as before: ``.bin`` files, ``disable_mmap=True`` and mounts of ``hf-mount``, where transformers reads whole files.
``Report.files`` says what was opened here.

Examples
--------
>>> import tempfile
>>> import transformers
>>> config = transformers.LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
...                                   num_attention_heads=2)
>>> folder = tempfile.mkdtemp()
>>> transformers.LlamaForCausalLM(config).save_pretrained(folder)
>>> with read_through(backend="pread", staging_bytes=16 << 20) as report:
...     model = transformers.LlamaForCausalLM.from_pretrained(folder)
>>> len(report.files), report.reads.bytes_written == sum(each.nbytes for each in model.parameters())
(1, True)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any, Self

from dlpack_loader.errors import MissingDependencyError, UnsupportedError
from dlpack_loader.header import Entry
from dlpack_loader.integrations.patching import StandIn, claimed, replaced
from dlpack_loader.integrations.reporting import Options, Report
from dlpack_loader.reader import DEFAULT_STAGING_BYTES, Reader, safe_open
from dlpack_loader.slices import Slice

__all__ = ["read_through"]

_NAME = "safe_open"
_OPENERS = ("transformers.modeling_utils", "transformers.modeling_layers")
"""Modules that open files for their weights; others only look at names and metadata."""


@contextmanager
def read_through(
    *,
    backend: str = "auto",
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    threads: int | None = None,
    direct_io: bool | None = None,
    require_direct: bool = False,
) -> Iterator[Report]:
    """Make ``from_pretrained`` of transformers read through this package, in every thread, until the context is left.

    There is one such context at a time in a process, since it replaces functions of transformers'. It may be combined
    with that of :mod:`dlpack_loader.integrations.safetensors`, in either order.

    Parameters
    ----------
    backend, direct_io, require_direct
        As for :func:`dlpack_loader.safe_open`; a backend that fills memory, so not ``"mmap"``. What transformers itself
        asks of safetensors (``backend``, ``device``) is not heeded: each tensor is read where it is wanted.
    staging_bytes, threads
        As for :func:`dlpack_loader.safe_open`, for all threads of transformers' pool together.

    Yields
    ------
    Report
        What was read.

    Raises
    ------
    OptionError
        An option makes no sense, or there is such a context already.
    MissingDependencyError, UnsupportedError
        transformers, or torch, is not installed; this release of it does not load in the way that is served.
    """
    options = Options.make(backend, staging_bytes, threads, direct_io, require_direct)
    modules, workers = _seams()
    to_open = options.to_open(workers)
    report = Report()
    readers: list[Reader] = []

    def open_file(filename: Any, framework: str = "pt", device: Any = "cpu", **_: Any) -> _WeightFile:  # noqa: ARG001
        reader = safe_open(filename, "pt", **to_open)
        readers.append(reader)
        report.opened(os.fspath(filename), reader.lazy_report)
        return _WeightFile(reader, report, maps=options.backend == "auto")

    with claimed(modules[0]):
        places = [(vars(module), _NAME) for module in modules]
        stand_ins = {id(space[name]): StandIn(space[name], open_file) for space, name in places}
        try:
            with replaced(stand_ins, places):
                yield report
        finally:
            for reader in readers:  # an error leaves them open
                reader.close()


class _WeightFile:
    """A file as transformers' loading sees it: tensors by index are lazy, and read by ``to``.

    Parameters
    ----------
    maps
        Whether what stays on the CPU as it is may be mapped.
    """

    def __init__(self, reader: Reader, report: Report, *, maps: bool) -> None:
        self._reader = reader
        self._report = report
        self._maps = maps

    def get_slice(self, name: str) -> Slice:
        """Return a tensor to be indexed; what the index selects is lazy."""
        return Slice(self._select, self._reader.entry(name))

    def _select(self, entry: Entry, index: Any) -> Any:
        part: Any = self._reader.lazy(entry.name)[index]
        if self._maps and index is ...:
            part.to = partial(self._bring, entry.name)
        return part

    def _bring(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Do what ``to`` of a whole tensor means, without a copy where it means nothing."""
        lazy: Any = self._reader.lazy(name)
        like = import_module("torch").empty(0, dtype=lazy.dtype, device="cpu")
        if like.to(*args, **kwargs) is not like:
            return lazy.to(*args, **kwargs)
        self._report.made(1)
        return self._reader.get_tensor(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()


def _seams() -> tuple[list[ModuleType], int]:
    """Return the modules that open files, and how many threads read at a time."""
    try:
        import_module("transformers")
        loading = import_module("transformers.core_model_loading")
        modules = [import_module(name) for name in _OPENERS]
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("transformers."):
            raise MissingDependencyError(
                f"reading for transformers needs the package {error.name}, which is not installed",
                hint=f"pip install {error.name}",
            ) from error
        raise _unsupported(f"it has no module {error.name}") from error
    if not callable(vars(modules[0]).get(_NAME)):
        raise _unsupported(f"{_OPENERS[0]} has no {_NAME}")
    workers: object = getattr(loading, "GLOBAL_WORKERS", None)
    if not isinstance(workers, int):
        raise _unsupported("transformers.core_model_loading has no GLOBAL_WORKERS")
    return [module for module in modules if callable(vars(module).get(_NAME))], max(1, workers)


def _unsupported(why: str) -> UnsupportedError:
    version = getattr(import_module("transformers"), "__version__", "of an unknown version")
    return UnsupportedError(
        f"transformers {version} does not load weights in the way that is served here: {why}",
        hint="Use transformers 5.24, or dlpack_loader.integrations.safetensors.read_through, which serves any release",
    )
