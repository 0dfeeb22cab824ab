"""The functions that load a checkpoint in one call: into new tensors, into existing memory, into a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, overload

from dlpack_loader.checkpoint import Source
from dlpack_loader.errors import DestinationError, DestinationTypeError, OptionError
from dlpack_loader.matching import Destinations
from dlpack_loader.progress import Progress
from dlpack_loader.reader import DEFAULT_STAGING_BYTES, Reader, safe_open
from dlpack_loader.transfer import LoadReport, Pending

__all__ = ["load_file", "load_into", "load_model", "module_tensors"]


class _Module(Protocol):
    def state_dict(self) -> Mapping[str, Any]: ...


def load_file(
    source: Source,
    framework: str = "pt",
    device: Any = "cpu",
    *,
    backend: str = "auto",
    stream: object = None,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    threads: int | None = None,
    progress: Progress | None = None,
    direct_io: bool | None = None,
    require_direct: bool = False,
) -> dict[str, Any]:
    """Load every tensor of a checkpoint.

    The parameters are those of :func:`dlpack_loader.safe_open`.

    Returns
    -------
    dict
        Tensors by name. Each has memory of its own: keeping one keeps nothing else.
    """
    with safe_open(
        source,
        framework,
        device,
        backend=backend,
        stream=stream,
        staging_bytes=staging_bytes,
        threads=threads,
        progress=progress,
        direct_io=direct_io,
        require_direct=require_direct,
    ) as reader:
        return reader.get_tensors()


@overload
def load_into(
    source: Source | Reader,
    destinations: Destinations,
    *,
    strict: bool = True,
    cast: bool = False,
    stream: object = None,
    wait: Literal[True] = True,
    backend: str = "auto",
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    threads: int | None = None,
    progress: Progress | None = None,
    direct_io: bool | None = None,
    require_direct: bool = False,
) -> LoadReport: ...


@overload
def load_into(
    source: Source | Reader,
    destinations: Destinations,
    *,
    strict: bool = True,
    cast: bool = False,
    stream: object = None,
    wait: Literal[False],
    backend: str = "auto",
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    threads: int | None = None,
    progress: Progress | None = None,
    direct_io: bool | None = None,
    require_direct: bool = False,
) -> Pending: ...


def load_into(
    source: Source | Reader,
    destinations: Destinations,
    *,
    strict: bool = True,
    cast: bool = False,
    stream: object = None,
    wait: bool = True,
    backend: str = "auto",
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    threads: int | None = None,
    progress: Progress | None = None,
    direct_io: bool | None = None,
    require_direct: bool = False,
) -> LoadReport | Pending:
    """Fill memory that exists with the tensors of a checkpoint.

    Every destination is checked against the headers before the first byte is written. Only the bytes of a
    destination's view are written. On an error while reading, nothing further is read, and the error's ``dirty``
    names the destinations that may hold a mixture.

    Parameters
    ----------
    source
        What :func:`dlpack_loader.safe_open` opens, or an open Reader, which has options of its own.
    destinations
        A mapping from tensor names to a destination (anything with ``__dlpack__``, such as ``model.state_dict()``), a
        Target or a list of either; or a resolver, a function from an entry to one of these or None.
    strict
        Require a tensor for every destination and a destination for every tensor. Two names for one memory count once.
        A resolver that returns None has declined, which is not an error.
    cast
        Allow a destination of another floating-point dtype; values are rounded to nearest even. Two places differ from
        ``torch.Tensor.to``: what is too large for F8_E4M3 becomes NaN instead of its largest value, and F64 to F16 is
        rounded once instead of twice.
    wait
        False returns a Pending at once; the destinations are in use until its ``wait`` returns.
    stream, backend, staging_bytes, threads, progress, direct_io, require_direct
        As for :func:`dlpack_loader.safe_open`.

    Raises
    ------
    StrictError, DestinationError
        The destinations do not suit the checkpoint; nothing was written.
    StorageError
        Reading failed; see ``dirty``.

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> from safetensors.numpy import save_file
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> save_file({"weight": np.arange(4, dtype=np.float32)}, path)
    >>> buffer = np.zeros(4, np.float32)
    >>> report = load_into(path, {"weight": buffer})
    >>> report.filled, buffer.tolist()
    (('weight',), [0.0, 1.0, 2.0, 3.0])
    """
    if isinstance(source, Reader):
        given = (backend, staging_bytes, threads, progress, direct_io, require_direct)
        if given != ("auto", DEFAULT_STAGING_BYTES, None, None, None, False):
            raise OptionError("a Reader has options of its own", hint="Give them to safe_open")
        return source.load_into(destinations, strict=strict, cast=cast, stream=stream, wait=wait)
    reader = safe_open(
        source,
        "np",  # makes no tensors
        backend=backend,
        staging_bytes=staging_bytes,
        threads=threads,
        progress=progress,
        direct_io=direct_io,
        require_direct=require_direct,
    )
    with reader:  # a pending transfer reads on: files that are open are closed by their last user
        return reader.load_into(destinations, strict=strict, cast=cast, stream=stream, wait=wait)


def module_tensors(module: _Module) -> dict[str, Any]:
    """Return a module's own tensors by name, as its ``state_dict`` gives them.

    Raises
    ------
    DestinationTypeError
        It has no ``state_dict``.
    DestinationError
        One of them is a copy, not the module's own memory.
    """
    state = getattr(module, "state_dict", None)
    if not callable(state):
        raise DestinationTypeError(
            f"{type(module).__name__} has no state_dict()", hint="Pass a torch.nn.Module, or use load_into"
        )
    destinations = {name: value for name, value in state().items() if hasattr(value, "__dlpack__")}
    _check_live(module, destinations)
    return destinations


def _check_live(module: Any, destinations: Mapping[str, Any]) -> None:
    """Refuse tensors of a state_dict that are not the module's own memory: filling a copy would change nothing."""
    if not (hasattr(module, "parameters") and hasattr(module, "buffers")):
        return
    live = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
    for name, tensor in destinations.items():
        if tensor.nbytes and tensor.untyped_storage().data_ptr() not in live:
            raise DestinationError(
                f"the module's state_dict gives a copy under {name!r}, which is not its own memory",
                tensor=name,
                hint="Load it by itself and hand it over as the module's extra state or hooks want it",
            )


def load_model(
    module: _Module,
    source: Source | Reader,
    *,
    strict: bool = True,
    cast: bool = False,
    stream: object = None,
    backend: str = "auto",
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    threads: int | None = None,
    progress: Progress | None = None,
    direct_io: bool | None = None,
    require_direct: bool = False,
) -> LoadReport:
    """Fill a module's parameters and buffers in place; no tensor is replaced, so pointers to them stay good.

    Parameters
    ----------
    module
        A ``torch.nn.Module``, or anything whose ``state_dict()`` gives the live tensors by name.
    strict
        Require the checkpoint to name exactly the module's tensors; tied weights count once.
    source, cast, stream, backend, staging_bytes, threads, progress, direct_io, require_direct
        As for :func:`load_into`.
    """
    return load_into(
        source,
        module_tensors(module),
        strict=strict,
        cast=cast,
        stream=stream,
        backend=backend,
        staging_bytes=staging_bytes,
        threads=threads,
        progress=progress,
        direct_io=direct_io,
        require_direct=require_direct,
    )
