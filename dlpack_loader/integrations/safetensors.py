"""safetensors: programs that know only ``safe_open``, ``load_file`` and ``load_model`` read through this package.

Within :func:`read_through`, ``safetensors.safe_open`` opens a :class:`dlpack_loader.Reader`, and so do the functions of
safetensors that use it: ``load_file`` for torch, NumPy and JAX. ``safetensors.torch.load_model`` reads straight into
the module's memory. Arguments, results and the names missing and unexpected are as safetensors documents them.

A program may have taken a function by name before (``from safetensors import safe_open``). So every module that is
loaded is searched for it, and the name is replaced there too; on leaving, all are put back, also in modules that were
imported in between. A function kept elsewhere before, in a default argument, an instance or a ``functools.partial``, is
not found: it reads as it did. One that was taken within the context is safetensors' own once the context is left.

Differences that can be seen:

* ``load_model`` writes last: where a shape does not fit, or with ``strict`` a name, the module is as it was. Only
  tensors that have to be cast are written one by one, and those may have been. A hook of the module that keeps a tensor
  of the state dict keeps a :class:`dlpack_loader.lazy.LazyTensor`.
* Errors are of :mod:`dlpack_loader.errors`, each a ``safetensors.SafetensorError`` too.
* JAX arrays are made of NumPy arrays by ``jax.numpy.array``, as safetensors does: on JAX's default device, uncommitted.
  :func:`dlpack_loader.load_file` puts them elsewhere, and without that copy.
* Frameworks that this package lacks (TensorFlow, MLX, Paddle) are left to safetensors, which ``Report.passed_on`` says.

Examples
--------
>>> import os, tempfile
>>> import torch
>>> import safetensors.torch
>>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
>>> safetensors.torch.save_model(torch.nn.Linear(3, 2), path)
>>> linear = torch.nn.Linear(3, 2)
>>> with read_through() as report:
...     safetensors.torch.load_model(linear, path)
(set(), [])
>>> report.reads.bytes_written
32
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import TracebackType
from typing import Any, Self

import safetensors

from dlpack_loader.integrations.patching import StandIn, claimed, holders, replaced
from dlpack_loader.integrations.reporting import Options, Report
from dlpack_loader.reader import DEFAULT_STAGING_BYTES, Reader, safe_open
from dlpack_loader.slices import Slice

__all__ = ["read_through"]

_NOT_OURS = ("mlx", "paddle", "tensorflow", "tf")
_JAX = ("flax", "jax")
_EXTRA_STATE = "_extra_state"
"""How torch ends the name of a state that a module takes as it is given."""


@contextmanager
def read_through(
    *,
    backend: str = "auto",
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    threads: int | None = None,
    direct_io: bool | None = None,
    require_direct: bool = False,
) -> Iterator[Report]:
    """Make users of safetensors read through this package, in every thread, until the context is left.

    There is one such context at a time in a process, since it replaces functions of modules. It may be combined with
    that of :mod:`dlpack_loader.integrations.transformers`, in either order.

    Parameters
    ----------
    backend
        As for :func:`dlpack_loader.safe_open`; one that fills memory, so not ``"mmap"``. Under ``"auto"`` the host's
        own ``backend="pread"`` counts.
    staging_bytes, threads, direct_io, require_direct
        As for :func:`dlpack_loader.safe_open`, for each file that is open.

    Yields
    ------
    Report
        What was read.

    Raises
    ------
    OptionError
        An option makes no sense, or there is such a context already.
    """
    options = Options.make(backend, staging_bytes, threads, direct_io, require_direct).to_open()
    report = Report()
    with claimed(safetensors):
        stand_ins = _stand_ins(options, report)
        with replaced(stand_ins, holders(stand_ins)):
            yield report


def _stand_ins(options: dict[str, Any], report: Report) -> dict[int, StandIn]:
    """Make what stands for safetensors' functions, by the ``id`` of each."""
    original = safetensors.safe_open
    inside = threading.local()  # a load_model of this thread that is about to open its file

    def open_file(filename: Any, framework: str, device: Any = "cpu", *, backend: str = "mmap") -> Any:
        if framework in _NOT_OURS:
            report.left(os.fspath(filename))
            return original(filename, framework, device, backend=backend)
        file: _LazyFile | None = getattr(inside, "file", None)
        if file is not None:
            inside.file = None
            return file
        chosen = dict(options)
        if options["backend"] == "auto" and backend != "mmap":
            chosen["backend"] = backend
        if framework in _JAX:
            opened: Any = _JaxFile(safe_open(filename, "np", **chosen), import_module("jax.numpy").array)
        else:
            opened = safe_open(filename, framework, device, **chosen)
        report.opened(os.fspath(filename))
        return opened

    stand_ins = {id(original): StandIn(original, open_file)}
    if "torch" in sys.modules:  # without it there is no module of torch's
        load_model = import_module("safetensors.torch").load_model

        def fill_model(model: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
            with safe_open(filename, "pt", **options) as reader:
                report.opened(os.fspath(filename), reader.lazy_report)
                inside.file = _LazyFile(reader)
                try:
                    with reader.deferring():
                        return load_model(model, filename, *args, **kwargs)
                finally:
                    inside.file = None

        stand_ins[id(load_model)] = StandIn(load_model, fill_model)
    return stand_ins


class _File:
    """A file open for the host, as safetensors' is."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()

    def get_tensor(self, name: str) -> Any:
        """Return one tensor."""
        raise NotImplementedError

    def get_tensors(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return several tensors, or all of them."""
        return {name: self.get_tensor(name) for name in (self._reader.keys() if names is None else names)}


class _LazyFile(_File):
    """The file within ``load_model``, which copies each tensor into the module's memory. Its caller closes it."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader)
        self._tensors = {
            name: lazy.materialize() if name.endswith(_EXTRA_STATE) else lazy for name, lazy in reader.iter_lazy()
        }

    def get_tensor(self, name: str) -> Any:
        """Return a tensor that is read where it is copied to."""
        return self._tensors[name]

    def __exit__(self, *_: object) -> None:
        """Leave it open: the copies are made once all are known."""


class _JaxFile(_File):
    """A file of NumPy arrays, handed out as JAX's."""

    def __init__(self, reader: Reader, convert: Callable[[Any], Any]) -> None:
        super().__init__(reader)
        self._convert = convert

    def get_tensor(self, name: str) -> Any:
        """Return one array."""
        return self._convert(self._reader.get_tensor(name))

    def get_tensors(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return several arrays, or all of them."""
        return {name: self._convert(value) for name, value in self._reader.get_tensors(names).items()}

    def get_slice(self, name: str) -> Slice:
        """Return an array to be indexed."""
        return Slice(lambda entry, index: self._convert(self._reader.select(entry, index)), self._reader.entry(name))
