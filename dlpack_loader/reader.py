"""``safe_open``: a checkpoint opened for reading, with the calls of ``safetensors.safe_open`` and more."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from dlpack_loader.backend import (
    BackendInfo,
    check_fills,
    check_name,
)
from dlpack_loader.bounds import Bounds
from dlpack_loader.checkpoint import Checkpoint, Source, open_checkpoint
from dlpack_loader.destination import Target
from dlpack_loader.errors import ClosedError, OptionError
from dlpack_loader.filling import Access, fill, plan_of
from dlpack_loader.framework import HOST, framework_named
from dlpack_loader.header import Entry
from dlpack_loader.making import Maker
from dlpack_loader.matching import Destinations, match, match_one
from dlpack_loader.plan import Plan
from dlpack_loader.progress import Progress
from dlpack_loader.runtime.files import Files
from dlpack_loader.stream import Streams
from dlpack_loader.transfer import LoadReport, Pending

__all__ = ["Reader", "Slice", "safe_open"]

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
        ``"pt"`` (``"torch"``, ``"pytorch"``), ``"np"`` (``"numpy"``) or ``"cupy"``.
    device
        Where tensors are made, and nowhere else: the CPU; for torch and CuPy also a CUDA or ROCm device, as
        ``"cuda:1"``, as a number, or as a device object of theirs. ``"cuda"`` is the framework's device that is current
        now. CuPy has no arrays on the CPU, so it has to be told a device.
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
    """Refuse a stream: the memory that this version writes has none."""
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
        device: tuple[int, int],
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
        return Slice(self, self.entry(name))

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
            None: host memory has no stream.
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


class Slice:
    """A tensor that is read by indexing; made by :meth:`Reader.get_slice`.

    Indices are NumPy's basic ones for every framework: integers, slices of any sign and step, ``...``. They count
    elements of the header's shape; F4 and F6 can be cut where a byte ends.
    """

    __slots__ = ("_entry", "_reader")

    def __init__(self, reader: Reader, entry: Entry) -> None:
        self._reader = reader
        self._entry = entry

    def get_shape(self) -> list[int]:
        """Return the tensor's shape, in elements."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """Return the tensor's dtype code."""
        return self._entry.dtype

    def __getitem__(self, index: Any) -> Any:
        return self._reader.select(self._entry, index)

    def __len__(self) -> int:
        if not self._entry.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._entry.shape[0]

    def __repr__(self) -> str:
        return f"<Slice of {self._entry.name!r}, {self._entry.dtype}, {list(self._entry.shape)}>"
