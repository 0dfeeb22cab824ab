"""What every backend that fills destinations must do, on the host and on devices alike.

Each test of ``BackendContract`` runs on every way that bytes take; a subclass says how destinations are made, with
which options its backend is reached, how its reads are made to fail, and what its report has to say about the way.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from dlpack_loader import LoadReport, Pending, Target, load_into, safe_open
from dlpack_loader.dtype import DTYPES, uint_of_bits
from dlpack_loader.errors import (
    ClosedError,
    DestinationError,
    DestinationTypeError,
    DeviceError,
    FileChangedError,
    LoaderError,
    OptionError,
    StorageError,
    TruncatedError,
    UnsupportedError,
)
from dlpack_loader.runtime import host
from dlpack_loader.runtime.files import Files
from tests.contract import DATA, MIB, Gate, Guarded, HostMemory, Memory, Piece, piece, write
from tests.device_room import GUARD
from tests.emulation import Driver, Mode
from tests.test_kvikio import take

CHUNK = 4 * MIB
U8 = (1, 8, 1)
BIG = {  # tensors that begin at odd offsets, and one that is longer than two chunks
    "a": piece("U8", 7),
    "b": piece("U8", 9 * MIB + 5, at=7),
    "c": piece("U8", 3, MIB + 1, at=9 * MIB + 12),
    "d": piece("U8", 3, at=100),
}
SMALL = {**BIG, "b": piece("U8", 5000), "c": piece("U8", 3, 5001, at=5000)}
TABLE = np.frombuffer(BIG["c"].data, np.uint8).reshape(BIG["c"].shape)
BUDGETS: list[dict[str, int]] = [
    {"staging_bytes": 1, "threads": 1},
    {"staging_bytes": 40_000, "threads": 3},
    {"staging_bytes": MIB, "threads": 1},
    {"staging_bytes": 64 * MIB, "threads": 1},
    {"staging_bytes": 64 * MIB, "threads": 5},
]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "small.safetensors", SMALL)


@pytest.fixture
def big(tmp_path: Path) -> Path:
    return write(tmp_path / "big.safetensors", BIG)


class BackendContract:
    """Tests of one backend."""

    name: ClassVar[str] = "pread"
    vendor: ClassVar[Literal["cuda", "hip"] | None] = None
    options: ClassVar[dict[str, Any]] = {}
    least_staging: ClassVar[int] = 1
    driver: Driver
    patch: pytest.MonkeyPatch

    @pytest.fixture(autouse=True)
    def stage(self, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        self.driver, self.patch = driver, monkeypatch
        if self.vendor is not None:
            driver.vendor, driver.mode = self.vendor, Mode.DEFERRED
        with self.prepared():
            yield

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Set the stage for a way of reading."""
        yield

    def allocate(self, nbytes: int) -> Memory:
        return HostMemory(nbytes) if self.vendor is None else self.driver.memory(0, nbytes)

    def room(self, pieces: dict[str, Piece], **options: Any) -> Guarded:
        return Guarded(self.allocate, pieces, **options)

    def load(self, path: Path, destinations: Any, **options: Any) -> LoadReport:
        report = load_into(path, destinations, **{**self.options, **options})
        assert isinstance(report, LoadReport)
        return report

    def check_way(self, report: LoadReport) -> None:
        """Check that the bytes of contiguous transfers came the way that the class is about."""
        raise NotImplementedError

    def check_whole(self, report: LoadReport, nbytes: int) -> None:
        assert report.backend == self.name
        assert report.bytes_read == report.bytes_written == nbytes
        self.check_way(report)

    def break_reads(self) -> tuple[type[LoaderError], str]:
        """Let a read fail that is not the first one and that is in "b"; return what comes of it."""
        calls: list[int] = []
        whole = host.read_at

        def fail(fd: int, offset: int, pieces: Any, enough: int) -> int:
            calls.append(offset)
            if len(calls) == 2:
                raise OSError(errno.EIO, "Input/output error")
            return whole(fd, offset, pieces, enough)

        self.patch.setattr(host, "read_at", fail)
        return StorageError, "Input/output error"

    def foreign(self) -> list[tuple[Any, type[LoaderError], str]]:
        """Destinations of "d" where the backend doesn't write, and how each is refused."""
        tensor = self.driver.memory(0, 3).tensor((3,), U8)
        tensor.device_type = 14
        return [(tensor, UnsupportedError, "oneAPI")]

    @contextmanager
    def opened(self) -> Iterator[list[str]]:
        """Note which files are opened for data."""
        paths: list[str] = []
        whole = Files.use

        def use(files: Files, path: str) -> AbstractContextManager[int]:
            paths.append(path)
            return whole(files, path)

        with self.patch.context() as patch:
            patch.setattr(Files, "use", use)
            yield paths

    def held(self) -> tuple[Any, int]:
        """What is held now, of the device and of the system."""
        gc.collect()
        return self.driver.live(), len(os.listdir("/proc/self/fd"))

    # Where the bytes go

    @pytest.mark.parametrize("shift", [0, 1, 7])
    def test_offsets_are_kept_and_guards_are_untouched(self, big: Path, shift: int) -> None:
        room = self.room(BIG, shift=shift)
        with self.opened() as paths:
            report = self.load(big, room.tensors)
        room.check()
        assert report.filled == ("a", "b", "c", "d")
        self.check_whole(report, sum(len(one.data) for one in BIG.values()))
        assert set(paths) == {str(big)}
        assert self.driver.seen().failed == 0

    @pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: "-".join(map(str, budget.values())))
    @pytest.mark.parametrize("nbytes", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 4097], ids=lambda n: f"{n - CHUNK:+}")
    def test_around_the_bounds_of_a_chunk(self, tmp_path: Path, nbytes: int, budget: dict[str, int]) -> None:
        pieces = {"short": piece("U8", 1000), "x": piece("U8", nbytes, at=1000), "end": piece("U8", 1)}
        path = write(tmp_path / "m.safetensors", pieces)
        room = self.room(pieces)
        if budget["staging_bytes"] < self.least_staging:
            with self.opened() as paths, pytest.raises(OptionError, match="staging_bytes"):
                self.load(path, room.tensors, **budget)
            assert paths == []
            room.check(())
            return
        report = self.load(path, room.tensors, **budget)
        room.check()
        self.check_whole(report, nbytes + 1001)

    def test_many_chunks_with_a_partial_last_one(self, big: Path) -> None:
        """Each read is far shorter than a tensor, and not one of them is as long as another by chance."""
        room = self.room({"b": BIG["b"]})
        report = self.load(big, room.tensors, strict=False, staging_bytes=400_000, threads=3)
        room.check()
        self.check_whole(report, 9 * MIB + 5)

    @pytest.mark.parametrize("length", [0, 1, 7, 8, 511, 512, 4088, 4095])
    def test_any_header_length(self, tmp_path: Path, length: int) -> None:
        sizes = (5000, 1, 4096, 70_001, MIB + 4097)
        pieces = {f"t{k}": piece("U8", size, at=k * 100_000) for k, size in enumerate(sizes)}
        path = write(tmp_path / "m.safetensors", pieces, length)
        assert (path.stat().st_size - sum(sizes) - 8) % 4096 == length
        room = self.room(pieces, shift=length % 5)
        report = self.load(path, room.tensors)
        room.check()
        self.check_whole(report, sum(sizes))

    def test_no_elements_and_no_axes(self, tmp_path: Path) -> None:
        empty = {"none": piece("F32", 0), "rows": piece("I64", 0, 5), "columns": piece("BF16", 3, 0)}
        pieces = {
            "byte": piece("U8"),
            **empty,
            "scalar": piece("F32", at=8),
            "long": piece("F64", at=16),
            "one": piece("I16", 1, 1, at=32),
        }
        path = write(tmp_path / "m.safetensors", pieces)
        room = self.room(pieces)
        report = self.load(path, room.tensors)
        room.check()
        assert report.filled == tuple(sorted(pieces))
        self.check_whole(report, 1 + 4 + 8 + 2)
        alone = self.room(empty)
        report = self.load(path, alone.tensors, strict=False)
        alone.check(())
        assert report.filled == tuple(sorted(empty))
        assert report.bytes_read == report.bytes_written == 0

    @pytest.mark.parametrize("as_bits", [False, True], ids=["dtype", "bits"])
    def test_every_dtype(self, tmp_path: Path, as_bits: bool) -> None:
        """As its own DLPack dtype, and as unsigned integers of its width; F4 and F6 are packed."""
        pieces = {dtype.code: piece(dtype.code, 8, 24, at=2000 * k) for k, dtype in enumerate(DTYPES)}
        path = write(tmp_path / "m.safetensors", {"odd": piece("U8", 1), **pieces})
        bits = {"dtype": lambda one: uint_of_bits(8 * one.element_bytes)} if as_bits else {}
        room = self.room(pieces, **bits)
        destinations = {name: Target(tensor, reinterpret=as_bits) for name, tensor in room.tensors.items()}
        report = self.load(path, destinations, strict=False)
        room.check()
        assert len(report.filled) == 22
        self.check_whole(report, sum(len(one.data) for one in pieces.values()))

    # Slices

    @pytest.mark.parametrize(
        "index", [np.s_[1:3], np.s_[1], np.s_[2, 5:700_001], np.s_[::-2], np.s_[:, 3 : MIB - 7]], ids=repr
    )
    def test_slices_of_long_runs(self, big: Path, index: Any) -> None:
        wanted = TABLE[index]
        room = self.room({"c": Piece("U8", wanted.shape, wanted.tobytes())})
        report = self.load(big, {"c": Target(room.tensors["c"], index)}, strict=False)
        room.check()
        self.check_whole(report, wanted.nbytes)

    @pytest.mark.parametrize("index", [np.s_[::-1, ::1000], np.s_[:, 3:50:7], np.s_[1:, 900:0:-3]], ids=repr)
    @pytest.mark.parametrize("staging", [12_288, MIB])
    def test_slices_with_steps_are_staged(self, big: Path, index: Any, staging: int) -> None:
        wanted = TABLE[index]
        room = self.room({"c": Piece("U8", wanted.shape, wanted.tobytes())})
        destinations = {"c": Target(room.tensors["c"], index)}
        report = self.load(big, destinations, strict=False, staging_bytes=staging, threads=1)
        room.check()
        assert report.bytes_written == wanted.nbytes
        assert (report.backend, report.staged_bytes) == ("pread", report.bytes_read)

    def test_destinations_with_strides(self, tmp_path: Path) -> None:
        """What lies between rows, and between elements, is not the destination's."""
        pieces = {"x": piece("I32", 300, 50)}
        path = write(tmp_path / "m.safetensors", pieces)
        source = np.frombuffer(pieces["x"].data, np.int32).reshape(300, 50)
        for rows, columns in ((130, 2), (1, 301)):
            memory = self.allocate(4 * 300 * 140)
            memory.fill(0xA5)
            wanted = np.frombuffer(memory.read(), np.int32).copy()
            steps = (4 * rows, 4 * columns)
            np.lib.stride_tricks.as_strided(wanted[16:], (300, 50), steps)[...] = source
            self.load(path, {"x": memory.tensor((300, 50), (0, 32, 1), byte_offset=64, strides=(rows, columns))})
            assert memory.read() == wanted.tobytes()

    # What goes wrong

    def test_a_truncated_file_is_refused_before_anything_is_written(self, big: Path) -> None:
        room = self.room(BIG)
        with safe_open(big, **self.options) as reader:
            os.truncate(big, big.stat().st_size - 1)
            with pytest.raises(FileChangedError) as caught:
                reader.load_into(room.tensors)
        assert caught.value.file == str(big)
        room.check(())

    def test_a_file_that_shrinks_while_it_is_read(self, big: Path) -> None:
        room = self.room(BIG)
        half = big.stat().st_size // 2

        def shrink(done: int, total: int) -> None:
            assert 0 < done < half
            os.truncate(big, half)

        with safe_open(big, progress=shrink, threads=1, **self.options) as reader:
            with pytest.raises(TruncatedError) as caught:
                reader.load_into(room.tensors)
            error = caught.value
            assert (error.file, error.tensor, error.dirty) == (str(big), "b", ("b",))
            assert error.offset is not None
            assert error.offset <= half
            assert isinstance(error, EOFError)
            room.check(("a",), dirty=("b",))
            with pytest.raises(FileChangedError):
                reader.load_into(room.tensors)

    def test_a_read_that_fails_in_the_middle(self, big: Path) -> None:
        self.load(big, self.room(BIG).tensors, threads=1)
        room = self.room(BIG)
        before = self.held()
        kind, text = self.break_reads()
        with pytest.raises(kind, match=text) as caught:
            self.load(big, room.tensors, threads=1)
        error = caught.value
        assert (error.file, error.tensor, error.dirty) == (str(big), "b", ("b",))
        assert "Partly written, load again before use: 'b'" in str(error)
        room.check(("a",), dirty=("b",))
        with pytest.raises(AssertionError):
            room.check(("a", "b"))  # it did fail before the end
        report = error.report
        assert (report.backend, report.filled, report.failed) == (self.name, ("a",), ("b",))
        assert report.unfilled == tuple(name for name in BIG if name > "b")
        assert report.bytes_written == len(BIG["a"].data)
        rest = {name: value for name, value in room.tensors.items() if name not in report.filled}
        assert self.load(big, rest, strict=False, threads=1).filled == (*report.failed, *report.unfilled)
        room.check(BIG)
        del caught, error, rest
        assert self.held() == before

    def test_a_device_that_is_not_served(self, small: Path) -> None:
        for destination, kind, text in self.foreign():
            room = self.room(SMALL)
            with self.opened() as paths, pytest.raises(kind, match=text):
                self.load(small, {**room.tensors, "d": destination})
            assert paths == []
            room.check(())

    @pytest.mark.parametrize(
        ("shape", "dtype", "kind", "text"),
        [
            ((4,), U8, DestinationError, "shape"),
            ((3, 1), U8, DestinationError, "shape"),
            ((), U8, DestinationError, "shape"),
            ((3,), (0, 8, 1), DestinationTypeError, "I8"),
            ((3,), (2, 16, 1), DestinationTypeError, "F16"),
        ],
        ids=repr,
    )
    @pytest.mark.parametrize("wait", [True, False])
    def test_a_wrong_shape_or_dtype(
        self, small: Path, shape: tuple[int, ...], dtype: Any, kind: type[LoaderError], text: str, wait: bool
    ) -> None:
        room = self.room(SMALL)
        memory = self.allocate(GUARD)
        memory.fill(0xA5)
        with self.opened() as paths, pytest.raises(kind, match=text) as caught:
            self.load(small, {**room.tensors, "d": memory.tensor(shape, dtype)}, wait=wait)
        assert caught.value.tensor == "d"
        assert paths == []
        room.check(())
        assert set(memory.read()) == {0xA5}

    @pytest.mark.parametrize("option", ["staging_bytes", "threads"])
    @pytest.mark.parametrize("value", [0, -1, -(1 << 40)])
    def test_a_budget_of_nothing(self, small: Path, option: str, value: int) -> None:
        room = self.room(SMALL)

        def opened(*arguments: object, **keywords: object) -> None:
            raise AssertionError("a file was opened")

        with self.patch.context() as patch:
            patch.setattr(os, "open", opened)
            patch.setattr("builtins.open", opened)
            with pytest.raises(OptionError, match=option):
                self.load(small, room.tensors, **{option: value})
            with pytest.raises(AssertionError, match="a file was opened"):
                self.load(small, room.tensors)
        room.check(())

    # Loads that nobody waits for

    def test_closing_the_reader_of_a_pending_load(self, big: Path) -> None:
        self.load(big, self.room(BIG).tensors, threads=1)
        room, gate = self.room(BIG), Gate()
        before = self.held()
        reader = safe_open(big, progress=gate, threads=1, **self.options)
        pending = reader.load_into(dict(room.tensors), wait=False)
        assert isinstance(pending, Pending)
        assert gate.reached.wait(30)
        reader.close()
        with pytest.raises(ClosedError):
            reader.load_into(room.tensors)
        assert not pending.done()
        with pytest.raises(AssertionError):
            room.check()
        gate.let_go()
        self.check_whole(pending.wait(), sum(len(one.data) for one in BIG.values()))
        room.check()
        del pending, reader
        assert self.held() == before

    def test_forgetting_a_pending_load(self, big: Path) -> None:
        self.load(big, self.room(BIG).tensors, threads=1)
        room, gate = self.room(BIG), Gate()
        before = self.held()
        threads = set(threading.enumerate())
        load_into(big, dict(room.tensors), wait=False, progress=gate, threads=1, **self.options)
        assert gate.reached.wait(30)
        gc.collect()
        (thread,) = set(threading.enumerate()) - threads
        gate.let_go()
        thread.join(30)
        assert not thread.is_alive()
        room.check()
        assert self.held() == before


class TestHostBuffered(BackendContract):
    """Host memory through the page cache."""

    options: ClassVar[dict[str, Any]] = {"backend": "pread", "direct_io": False}

    def check_way(self, report: LoadReport) -> None:
        assert (report.direct_bytes, report.compat_bytes, report.staged_bytes) == (report.bytes_read, 0, 0)


class TestHostDirect(BackendContract):
    """Host memory around the page cache, where the file system lets it: no page is said to be in it."""

    options: ClassVar[dict[str, Any]] = {"backend": "pread", "direct_io": True}

    @contextmanager
    def prepared(self) -> Iterator[None]:
        self.patch.setattr(host, "is_resident", lambda fd, offset: False)
        yield

    def check_way(self, report: LoadReport) -> None:
        assert report.compat_bytes == 0
        assert report.direct_bytes + report.staged_bytes == report.bytes_read
        assert (report.staged_bytes > 0) == ("came by O_DIRECT" in report.reason)

    def test_large_reads_are_around_the_cache(self, big: Path) -> None:
        room = self.room(BIG)
        report = self.load(big, room.tensors)
        room.check()
        refused = "O_DIRECT was refused" in report.reason
        assert refused or report.staged_bytes >= 8 * MIB


class Ring(BackendContract):
    """Device memory through pinned memory of ours."""

    options: ClassVar[dict[str, Any]] = {"backend": "pread"}
    least_staging: ClassVar[int] = 12_288

    def check_way(self, report: LoadReport) -> None:
        assert (report.direct_bytes, report.compat_bytes, report.staged_bytes) == (0, 0, report.bytes_read)
        assert self.driver.count("cuFileRead", "hipFileRead") == self.driver.seen().pageable == 0


class TestRingOnCuda(Ring):
    vendor = "cuda"


class TestRingOnRocm(Ring):
    vendor = "hip"


class Direct(BackendContract):
    """A vendor's library, which neither the host's memory nor another vendor's is for."""

    def foreign(self) -> list[tuple[Any, type[LoaderError], str]]:
        other: Literal["cuda", "hip"] = "hip" if self.vendor == "cuda" else "cuda"
        mine, self.driver.vendor = self.driver.vendor, other
        tensor = self.driver.memory(1, 3).tensor((3,), U8)
        self.driver.vendor = mine
        return [
            *super().foreign(),
            (HostMemory(3).tensor((3,)), OptionError, "a destination is in host memory"),
            (tensor, OptionError, f"'{self.name}' does not serve {other}:1"),
        ]


class Kvikio(Direct):
    name = "kvikio"
    vendor = "cuda"
    options: ClassVar[dict[str, Any]] = {"backend": "kvikio"}
    mode: ClassVar[Literal["compat", "gds"]]

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """KvikIO's settings are the process's, and are put back."""
        importlib.import_module("dlpack_loader.backend.kvikio")
        defaults = importlib.import_module("kvikio").defaults
        before = defaults.get("compat_mode")
        take(self.patch, self.mode)
        yield
        defaults.set({"compat_mode": before})


class TestKvikioCompat(Kvikio):
    mode = "compat"

    def check_way(self, report: LoadReport) -> None:
        assert (report.direct_bytes, report.compat_bytes, report.staged_bytes) == (0, report.bytes_read, 0)
        assert self.driver.count("cuFileRead") == 0

    def break_reads(self) -> tuple[type[LoaderError], str]:
        """KvikIO reads by itself here, so what fails is its copy to the device."""
        self.driver.fault("cuMemcpyBatchAsync", 3, error=719)
        return DeviceError, "KvikIO failed: .*LAUNCH_FAILED"


class TestKvikioGds(Kvikio):
    mode = "gds"

    def check_way(self, report: LoadReport) -> None:
        assert (report.direct_bytes, report.compat_bytes, report.staged_bytes) == (report.bytes_read, 0, 0)
        assert self.driver.count("cuFileRead") > 0

    def break_reads(self) -> tuple[type[LoaderError], str]:
        self.driver.fault("cuFileRead", 3, errno=errno.EIO)
        return StorageError, "cuFile failed in the operating system"


class TestHipfile(Direct):
    name = "hipfile"
    vendor = "hip"
    options: ClassVar[dict[str, Any]] = {"backend": "hipfile"}

    def check_way(self, report: LoadReport) -> None:
        assert report.direct_bytes + report.compat_bytes == report.bytes_read
        assert report.staged_bytes == 0
        assert self.driver.count("hipFileRead") > 0

    def break_reads(self) -> tuple[type[LoaderError], str]:
        self.driver.fault("hipFileRead", 4, errno=errno.EIO)
        return StorageError, "Input/output error"


class TestMmap:
    """Not of the contract: this backend makes tensors of its own and fills no destination, which it says.

    What is left of the contract is what is true of any tensor. That its pages are private and go with their tensors is
    tested in ``test_backends``.
    """

    def test_a_destination_is_refused(self, big: Path) -> None:
        room = Guarded(HostMemory, BIG)
        with pytest.raises(OptionError, match="cannot fill a destination"):
            load_into(big, room.tensors, backend="mmap")
        room.check(())

    @pytest.mark.parametrize("length", [0, 1, 7, 8, 511, 512, 4088, 4095])
    def test_any_header_length(self, tmp_path: Path, length: int) -> None:
        pieces = {"short": piece("U8", 5000), "byte": piece("U8", 1, at=9), "x": piece("U8", MIB + 4097, at=77)}
        path = write(tmp_path / "m.safetensors", pieces, length)
        with safe_open(path, "np", backend="mmap") as reader:
            assert {name: value.tobytes() for name, value in reader.get_tensors().items()} == {
                name: one.data for name, one in pieces.items()
            }

    def test_every_dtype_no_elements_and_no_axes(self, tmp_path: Path) -> None:
        pieces = {dtype.code: piece(dtype.code, 8, 24, at=2000 * k) for k, dtype in enumerate(DTYPES)}
        pieces.update({"none": piece("F32", 0), "columns": piece("BF16", 3, 0), "scalar": piece("F64", at=5)})
        path = write(tmp_path / "m.safetensors", pieces)
        with safe_open(path, backend="mmap") as reader:
            for name, one in pieces.items():
                value = reader.get_tensor(name)
                assert tuple(value.shape) == one.held_shape
                stored = value.contiguous().untyped_storage()
                begin = value.storage_offset() * value.element_size()
                assert bytes(stored)[begin : begin + len(one.data)] == one.data, name

    def test_a_truncated_file(self, big: Path) -> None:
        with safe_open(big, backend="mmap") as reader:
            os.truncate(big, 2 * MIB)
            with pytest.raises(FileChangedError) as caught:
                reader.get_tensor("b")
        assert caught.value.file == str(big)


def test_the_data_is_nowhere_the_guard() -> None:
    """What is written can't be taken for what was there: no long run of a tensor is of the guards' byte."""
    assert b"\xa5" * 8 not in DATA
