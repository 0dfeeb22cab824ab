"""``safe_open``: a checkpoint opened for reading, with the calls of ``safetensors.safe_open`` and more."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dlpack_loader.backend import (
    BackendInfo,
    check_fills,
    check_name,
)
from dlpack_loader.bounds import Bounds
from dlpack_loader.checkpoint import Checkpoint, Source, open_checkpoint
from dlpack_loader.destination import Target
from dlpack_loader.errors import ClosedError, MissingDependencyError, OptionError
from dlpack_loader.filling import Access, fill, plan_of
from dlpack_loader.framework import HOST, Place, framework_named
from dlpack_loader.header import Entry
from dlpack_loader.making import Maker
from dlpack_loader.matching import Destinations, match, match_one
from dlpack_loader.plan import Plan
from dlpack_loader.progress import Progress
from dlpack_loader.runtime.files import Files, lock_of_process
from dlpack_loader.slices import Slice
from dlpack_loader.stream import Streams
from dlpack_loader.transfer import LoadReport, Pending

if TYPE_CHECKING:
    from dlpack_loader.lazy import LazyReport, LazySource, LazyTensor

__all__ = ["Reader", "safe_open"]

DEFAULT_STAGING_BYTES = 64 << 20


def safe_open(
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
) -> Reader:
    """Open a checkpoint for reading.

    Headers are read and checked at once; tensors are read when asked for.

    Parameters
    ----------
    source
        A file, a sequence of files, a directory or an ``*.index.json``.
    framework
        ``"pt"`` (``"torch"``, ``"pytorch"``), ``"np"`` (``"numpy"``), ``"cupy"`` or ``"jax"`` (``"flax"``).
    device
        Where tensors are made, and nowhere else: the CPU; for torch and CuPy also a CUDA or ROCm device, as
        ``"cuda:1"``, as a number, or as a device object of theirs. ``"cuda"`` is the framework's device that is current
        now. CuPy has no arrays on the CPU, so it has to be told a device. For JAX also a ``jax.Device``, a
        ``jax.sharding.Sharding``, a mapping from names to these, or a function from an entry to one; of each tensor
        only the bytes that the devices of this process need are read. See :mod:`dlpack_loader.framework.jax`.
    backend
        ``"mmap"``: tensors are views of private mappings, read when touched. ``"pread"``: tensors are read at once into
        memory of their own; the memory of a device is filled through pinned memory. ``"kvikio"``, ``"hipfile"``: the
        memory of a CUDA or ROCm device is filled by that library. ``"auto"`` takes ``mmap`` for tensors that the reader
        makes on the host, the library of a device where it reads GPU-direct, and else ``pread``.
    stream
        A stream of the device that reading waits for, beside the framework's current one, which it waits for always;
        the bytes are there for every stream when a call returns. None on the CPU, which has no stream.
    staging_bytes
        Bound on host memory beyond the tensors, for strides, casts and reads around the page cache.
    threads
        Readers at the same time; by default twice the CPUs, at most 8.
    progress
        Called with bytes done and bytes in all, by the calling thread; True shows a bar.
    direct_io
        None: ranges that are not in the page cache are read with O_DIRECT, where the file is on a local disk. False:
        always through the page cache (a second load finds the bytes there). True: on network disks too.
    require_direct
        Refuse to fill the memory of a device in any other way than by GPU-direct reads (GPUDirect Storage, hipFile).
        By default ``backend="auto"`` uses these where they are to be had.

    Raises
    ------
    LoaderError
        See :func:`dlpack_loader.checkpoint.open_checkpoint` for faults of the source.

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> from safetensors.numpy import save_file
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> save_file({"weight": np.arange(6, dtype=np.float32).reshape(2, 3)}, path)
    >>> with safe_open(path, framework="np") as reader:
    ...     print(reader.keys(), reader.get_slice("weight")[:, ::-1])
    ['weight'] [[2. 1. 0.]
     [5. 4. 3.]]
    """
    bounds = make_bounds(staging_bytes, threads)
    check_name(backend)
    check_flags(progress, direct_io)
    place = framework_named(framework).resolve_device(device)
    if place == HOST:
        check_stream(stream)
    return Reader(
        open_checkpoint(source),
        framework,
        place,
        bounds=bounds,
        stream=stream,
        backend=backend,
        progress=progress,
        direct_io=direct_io,
        require_direct=require_direct,
    )


def make_bounds(staging_bytes: int, threads: int | None) -> Bounds:
    """Check what a load may use; a ``threads`` of None becomes the default."""
    if threads is None:
        threads = min(8, 2 * (os.cpu_count() or 1))
    return Bounds(staging_bytes=staging_bytes, threads=threads)


def check_flags(progress: object, direct_io: object) -> None:
    """Refuse what is no callback and no choice, before anything is opened."""
    if progress is not None and progress is not True and not callable(progress):
        raise OptionError(f"progress is a function of two numbers, or True for a bar, not {progress!r}")
    if direct_io is not None and not isinstance(direct_io, bool):
        raise OptionError(f"direct_io is True, False or None, not {direct_io!r}")


def check_stream(stream: object) -> None:
    """Refuse a stream where tensors are made in host memory, which has none."""
    if stream is not None:
        raise OptionError("host memory has no stream", hint="Pass stream=None")


class Reader:
    """A checkpoint open for reading; made by :func:`safe_open`. Threads may share it.

    It works with and without ``with``. After ``close`` everything but tensors already taken raises ClosedError;
    a reader that is forgotten closes itself.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        framework: str,
        device: Place,
        *,
        bounds: Bounds,
        stream: object,
        backend: str,
        progress: Progress | None,
        direct_io: bool | None,
        require_direct: bool = False,
    ) -> None:
        self._checkpoint: Checkpoint | None = checkpoint
        self._access = Access(
            Files({shard.path: shard for shard in checkpoint.shards}),
            bounds,
            progress=progress,
            direct_io=direct_io,
            backend=backend,
            require_direct=require_direct,
        )
        self._backend = backend
        self._maker = Maker(self._access, framework_named(framework), device, backend=backend, stream=stream)
        self._filled: BackendInfo | None = None
        self._lazy: LazySource | None = None
        self._locks: dict[int, threading.Lock] = {}

    # What safetensors.safe_open has

    def keys(self) -> list[str]:
        """Return every tensor's name, sorted."""
        return self._opened().keys()

    def offset_keys(self) -> list[str]:
        """Return every tensor's name in the order of the bytes: by file, then by offset."""
        return self._opened().offset_keys()

    def metadata(self) -> dict[str, str] | None:
        """Return the ``__metadata__`` strings, or None when there are none."""
        return self._opened().metadata()

    def get_tensor(self, name: str) -> Any:
        """Return one tensor.

        Raises
        ------
        TensorNotFoundError
            No such name.
        StorageError
            It could not be read.
        """
        return self._maker.make([(self.entry(name), ...)])[0]

    def get_tensors(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return several tensors, or all of them, read together in the order of the file."""
        wanted = self.keys() if names is None else list(names)
        if isinstance(names, str):
            raise OptionError("names is a sequence of names, not one name", hint="Use get_tensor(name)")
        return dict(zip(wanted, self._maker.make([(self.entry(name), ...) for name in wanted]), strict=True))

    def get_slice(self, name: str) -> Slice:
        """Return a tensor to be indexed: only the bytes of the selection are read."""
        return Slice(self.select, self.entry(name))

    def get_tensor_meta(self, name: str) -> tuple[str, list[int]]:
        """Return a tensor's dtype code and its shape, without reading it."""
        entry = self.entry(name)
        return entry.dtype, list(entry.shape)

    # Beyond it

    def __len__(self) -> int:
        return len(self._opened())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._opened()

    def __repr__(self) -> str:
        if self._checkpoint is None:
            return "<Reader, closed>"
        shards = self._checkpoint.shards
        where = self._checkpoint.index or (shards[0].path if len(shards) == 1 else f"{len(shards)} files")
        return f"<Reader of {where!r}, {len(self)} tensors, {self._checkpoint.nbytes():,} bytes>"

    def _repr_html_(self) -> str:
        from dlpack_loader.html import checkpoint_html

        return checkpoint_html(self._checkpoint)

    def entry(self, name: str) -> Entry:
        """Return a tensor's header entry: dtype code, shape, file, absolute offset and bytes."""
        return self._opened().entry(name)

    def read_into(self, name: str, destination: Any, index: Any = ..., *, stream: object = None) -> LoadReport:
        """Fill one destination with a tensor, or with the part of it that a basic index selects.

        Parameters
        ----------
        destination
            Anything with ``__dlpack__``, or a Target.
        index
            A NumPy-style basic index into the tensor.
        stream
            A stream of the destination's device that the read waits for, beside the one that its producer has work on.
        """
        entry = self.entry(name)
        if not isinstance(destination, Target):
            destination = Target(destination, ... if index is None else index)
        elif index is not ... and index is not None:
            raise OptionError("the Target has an index of its own", tensor=name, hint="Pass one of the two")
        check_fills(self._backend)
        begin = time.perf_counter()
        with Streams(stream) as streams:
            found = match_one(entry, destination, streams=streams)
            streams.check()
            return self._note(fill(self._access, found, streams, begin))

    def select(self, entry: Entry, index: Any) -> Any:
        """Return the part of an entry that a basic index selects; only its bytes are read."""
        self._opened()
        return self._maker.make([(entry, index)])[0]

    def lazy(self, name: str) -> LazyTensor:
        """Return a torch tensor that is read when it is copied somewhere; see :class:`dlpack_loader.lazy.LazyTensor`.

        It stays good after the reader was closed.
        """
        entry = self.entry(name)
        return self._lazy_source().tensor(entry)

    def iter_lazy(self, filter: Callable[[Entry], bool] | None = None) -> Iterator[tuple[str, LazyTensor]]:  # noqa: A002
        """Yield names and lazy tensors in the order of the bytes, for consumers such as ``model.load_weights``.

        Parameters
        ----------
        filter
            Which entries to yield; nothing is read of the others.
        """
        checkpoint = self._opened()
        source = self._lazy_source()
        for name in checkpoint.offset_keys():
            entry = checkpoint.entry(name)
            if filter is None or filter(entry):
                yield name, source.tensor(entry)

    def deferring(self) -> AbstractContextManager[None]:
        """Collect the copies of lazy tensors that this thread makes, and read all of them together.

        Reading everything by one plan is faster than tensor by tensor, and happens when the context is left: after an
        exception nothing of what was collected is written. An operation of torch that needs memory with a copy still
        to come makes the copies happen first, and so does asking a tensor for its address, its storage, a NumPy array
        or a pickle. Whatever got hold of the memory before the copy (a NumPy array of it, a raw address), and another
        thread, has to wait for the end of the context; so has code that asks for the address in C, past torch's
        functions, such as ``torch.utils.dlpack.to_dlpack`` and ``tvm_ffi.from_dlpack``. Casts are made at once.
        """
        return self._lazy_source().deferring()

    def lazy_report(self) -> LazyReport:
        """Return what was read through lazy tensors of this reader, so far."""
        return self._lazy_source().report()

    def _lazy_source(self) -> LazySource:
        if self._lazy is None:
            check_fills(self._backend)
            try:
                from dlpack_loader.lazy import LazySource
            except ImportError as error:
                raise MissingDependencyError(
                    "lazy tensors are torch's, which is not installed", hint="pip install torch"
                ) from error
            with lock_of_process(self._locks):  # one for all threads, since it counts
                if self._lazy is None:
                    self._lazy = LazySource(self._access)
        return self._lazy

    def plan(self, destinations: Destinations, *, strict: bool = True, cast: bool = False) -> Plan:
        """Check destinations and return the reads that would fill them; nothing is read or written."""
        found = match(self._opened(), destinations, strict=strict, cast=cast, streams=None)
        return plan_of(found, self._access.bounds)

    def load_into(
        self,
        destinations: Destinations,
        *,
        strict: bool = True,
        cast: bool = False,
        stream: object = None,
        wait: bool = True,
    ) -> LoadReport | Pending:
        """Fill destinations; see :func:`dlpack_loader.load_into`."""
        check_fills(self._backend)
        begin = time.perf_counter()
        with Streams(stream) as streams:
            found = match(self._opened(), destinations, strict=strict, cast=cast, streams=streams)
            streams.check()
            if wait:
                return self._note(fill(self._access, found, streams, begin))
            kept = streams.detach()
        return Pending(lambda: self._note(fill(self._access, found, kept, begin)), kept)

    def _note(self, report: LoadReport) -> LoadReport:
        self._filled = report.info()
        return report

    def backend_info(self) -> BackendInfo:
        """Say which backend served, and why: the last load into destinations, else the tensors made."""
        if self._filled is not None:
            return self._filled
        return self._maker.info()

    def close(self) -> None:
        """Close the files. Closing twice is fine."""
        self._checkpoint = None
        self._access.files.close()

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> Checkpoint:
        checkpoint = self._checkpoint
        if checkpoint is None:
            raise ClosedError("File is closed", hint="Open the checkpoint again")
        return checkpoint
