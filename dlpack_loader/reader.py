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
from dlpack_loader.framework import framework_named, wrote
from dlpack_loader.header import Entry
from dlpack_loader.making import Access, Maker
from dlpack_loader.matching import Destinations, Match, match, match_one
from dlpack_loader.plan import Plan
from dlpack_loader.progress import Progress
from dlpack_loader.runtime.files import Files
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
) -> Reader:
    """Open a checkpoint for reading.

    Headers are read and checked at once; tensors are read when asked for.

    Parameters
    ----------
    source
        A file, a sequence of files, a directory or an ``*.index.json``.
    framework
        ``"pt"`` (``"torch"``, ``"pytorch"``) or ``"np"`` (``"numpy"``).
    device
        Where tensors are made: the CPU, in every spelling of it.
    backend
        ``"mmap"``: tensors are views of private mappings, read when touched. ``"pread"``: tensors are read at once into
        memory of their own. ``"auto"`` takes ``mmap`` for tensors that the reader makes and ``pread`` for destinations.
    stream
        None: host memory has no stream.
    staging_bytes
        Bound on host memory beyond the tensors, for strides, casts and reads around the page cache.
    threads
        Readers at the same time; by default twice the CPUs, at most 8.
    progress
        Called with bytes done and bytes in all, by the calling thread; True shows a bar.
    direct_io
        None: ranges that are not in the page cache are read with O_DIRECT, where the file is on a local disk. False:
        always through the page cache (a second load finds the bytes there). True: on network disks too.

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
    check_stream(stream)
    chosen = framework_named(framework)
    chosen.check_device(device)
    return Reader(
        open_checkpoint(source),
        framework,
        bounds=bounds,
        backend=backend,
        progress=progress,
        direct_io=direct_io,
    )


def make_bounds(staging_bytes: int, threads: int | None) -> Bounds:
    """Check what a load may use; a ``threads`` of None becomes the default."""
    if threads is None:
        threads = min(8, 2 * (os.cpu_count() or 1))
    return Bounds(staging_bytes=staging_bytes, threads=threads)


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
        *,
        bounds: Bounds,
        backend: str,
        progress: Progress | None,
        direct_io: bool | None,
    ) -> None:
        self._checkpoint: Checkpoint | None = checkpoint
        self._access = Access(
            Files({shard.path: shard for shard in checkpoint.shards}), bounds, progress=progress, direct_io=direct_io
        )
        self._backend = backend
        self._maker = Maker(self._access, framework_named(framework), maps=backend in ("auto", "mmap"))
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
        check_stream(stream)
        check_fills(self._backend)
        begin = time.perf_counter()
        return self._fill(match_one(entry, destination), begin)

    def select(self, entry: Entry, index: Any) -> Any:
        """Return the part of an entry that a basic index selects; only its bytes are read."""
        self._opened()
        return self._maker.make([(entry, index)])[0]

    def plan(self, destinations: Destinations, *, strict: bool = True, cast: bool = False) -> Plan:
        """Check destinations and return the reads that would fill them; nothing is read or written."""
        found = match(self._opened(), destinations, strict=strict, cast=cast)
        return Plan.make(found.transfers, found.names, self._access.bounds)

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
        check_stream(stream)
        check_fills(self._backend)
        begin = time.perf_counter()
        found = match(self._opened(), destinations, strict=strict, cast=cast)
        if wait:
            return self._fill(found, begin)
        return Pending(lambda: self._fill(found, begin))

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

    def _fill(self, found: Match, begin: float) -> LoadReport:
        plan = Plan.make(found.transfers, found.names, self._access.bounds)
        try:
            backend = self._access.perform(plan, found.memories)
        finally:
            wrote(found.objects)  # after an error too: some of them were
        info = self._filled = backend.info()
        return LoadReport(
            filled=tuple(dict.fromkeys(found.names)),
            unfilled=tuple(found.unfilled),
            unexpected=tuple(found.unexpected),
            declined=tuple(found.declined),
            aliases=found.aliases,
            bytes_read=backend.direct_bytes + backend.staged_bytes,
            bytes_written=sum(transfer.written for transfer in plan.transfers),
            direct_bytes=backend.direct_bytes,
            staged_bytes=backend.staged_bytes,
            seconds=time.perf_counter() - begin,
            backend=info.name,
            reason=info.reason,
        )


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
