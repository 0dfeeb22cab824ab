"""What every backend that fills destinations must do, whatever the way that the bytes take."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlpack_loader import Target, load_into, safe_open
from dlpack_loader.errors import FileChangedError, OptionError, StorageError, TruncatedError, UnsupportedError
from dlpack_loader.runtime import host
from tests.files import drop_cache, raw_bytes, save, state, write_raw

MIB = 1 << 20
Reading = Callable[[int, int, Any, int], int]


@pytest.fixture
def big(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A file in which tensors start at odd offsets and are longer than a chunk."""
    tensors = {
        "a": torch.arange(7, dtype=torch.uint8),
        "b": torch.randint(0, 255, (9 * MIB + 5,), dtype=torch.uint8),
        "c": torch.randint(0, 255, (3, MIB + 1), dtype=torch.uint8),
        "d": torch.arange(3, dtype=torch.uint8),
    }
    path = tmp_path / "big.safetensors"
    save(path, tensors)
    return path, tensors


class BackendContract:
    """Tests of one backend; a subclass says with which options it is reached."""

    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def prepare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Set the stage for a way of reading."""

    def cool(self, path: Path) -> None:
        """Put a file into the state that the backend is about."""

    def load(self, path: Path, destinations: Any, **options: Any) -> Any:
        self.cool(path)
        return load_into(path, destinations, **{**self.options, **options})

    def test_every_tensor_arrives(self, tmp_path: Path) -> None:
        tensors = save(tmp_path / "m.safetensors")
        filled = {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}
        report = self.load(tmp_path / "m.safetensors", filled)
        for name, tensor in tensors.items():
            assert torch.equal(filled[name], tensor), name
        total = sum(tensor.nbytes for tensor in tensors.values())
        assert report.filled == tuple(sorted(tensors))
        assert report.bytes_written == total
        assert report.bytes_read == report.direct_bytes + report.staged_bytes == total

    def test_long_and_misaligned_tensors_arrive(self, big: tuple[Path, dict[str, torch.Tensor]]) -> None:
        path, tensors = big
        for threads in (1, 3):
            filled = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            self.load(path, filled, threads=threads)
            for name, tensor in tensors.items():
                assert torch.equal(filled[name], tensor), name

    def test_storage_offset_is_kept_and_guards_are_untouched(self, big: tuple[Path, dict[str, torch.Tensor]]) -> None:
        path, tensors = big
        guard = 4099
        holders = {}
        for name, tensor in tensors.items():
            holders[name] = torch.full((tensor.numel() + 2 * guard,), 0xA5, dtype=torch.uint8)
        views = {
            name: holder[guard : holder.numel() - guard].view(tensors[name].shape) for name, holder in holders.items()
        }
        self.load(path, views)
        for name, holder in holders.items():
            assert torch.equal(views[name], tensors[name]), name
            assert (holder[:guard] == 0xA5).all()
            assert (holder[-guard:] == 0xA5).all()

    def test_staging_smaller_than_a_page_and_one_thread(self, big: tuple[Path, dict[str, torch.Tensor]]) -> None:
        path, tensors = big
        for staging in (1, 64, 5000):
            filled = {"c": np.zeros((3, (MIB + 1 + 999) // 1000), np.uint8)}
            targets = {"c": Target(filled["c"], np.s_[::-1, ::1000])}
            report = self.load(path, targets, strict=False, staging_bytes=staging, threads=1)
            assert np.array_equal(filled["c"], tensors["c"].numpy()[::-1, ::1000])
            assert report.bytes_written == filled["c"].nbytes

    @pytest.mark.parametrize("pad", [0, 1, 7, 8, 511, 512, 4095])
    def test_any_header_length(self, tmp_path: Path, pad: int) -> None:
        """Offsets are unaligned at any header length; nothing is shifted to mend that."""
        data = np.random.default_rng(pad).integers(0, 255, 2 * MIB + 4097, np.uint8).tobytes()
        header = b'{"x":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (len(data), len(data)) + b" " * pad
        path = write_raw(tmp_path / "m.safetensors", header, data)
        filled = np.zeros(len(data), np.uint8)
        self.load(path, {"x": filled})
        assert filled.tobytes() == data

    def test_a_truncated_file_is_told_before_anything_is_read(self, big: tuple[Path, dict[str, torch.Tensor]]) -> None:
        path, tensors = big
        filled = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        reader = safe_open(path, **self.options)
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(StorageError, match="replaced or rewritten"):
            reader.load_into(filled)
        assert all(not tensor.any() for tensor in filled.values())

    def test_a_file_that_shrinks_while_it_is_read(
        self, big: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The end of the file is missed by the read itself: the error names the tensor, the place and the damage."""
        path, tensors = big
        filled = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        whole = host.read_at

        def shrink(fd: int, offset: int, pieces: Any, enough: int) -> int:
            os.truncate(path, path.stat().st_size // 2)
            monkeypatch.setattr(host, "read_at", whole)
            return whole(fd, offset, pieces, enough)

        monkeypatch.setattr(host, "read_at", shrink)
        with pytest.raises(TruncatedError) as caught:
            self.load(path, filled, threads=1)
        error = caught.value
        assert isinstance(error, EOFError)
        assert error.file == str(path)
        assert error.tensor == "b"
        assert error.offset is not None
        assert error.dirty == ("b",)
        assert "Partly written" in str(error)

    def test_a_read_that_fails_in_the_middle(
        self, big: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, tensors = big
        filled = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        calls = []
        whole = host.read_at

        def fail(fd: int, offset: int, pieces: Any, enough: int) -> int:
            calls.append(offset)
            if len(calls) == 3:
                raise OSError(errno.EIO, "Input/output error")
            return whole(fd, offset, pieces, enough)

        monkeypatch.setattr(host, "read_at", fail)
        with pytest.raises(OSError, match="Input/output error") as caught:
            self.load(path, filled, threads=1)
        error = caught.value
        assert isinstance(error, StorageError)
        assert error.errno == errno.EIO
        assert error.dirty == ("b", "c")  # the third read holds the end of one and the beginning of the other
        assert torch.equal(filled["a"], tensors["a"])
        assert not filled["d"].any()
        assert len(calls) == 3

    def test_no_partial_tensor_is_handed_out(
        self, big: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, _ = big
        monkeypatch.setattr(host, "read_at", lambda fd, offset, pieces, enough: enough - 1)
        self.cool(path)
        with safe_open(path, **{"backend": "pread", **self.options}) as reader, pytest.raises(TruncatedError):
            reader.get_tensor("b")

    def test_the_budget_is_checked_before_any_io(
        self, big: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, _ = big

        def opened(*args: object, **keywords: object) -> None:
            raise AssertionError("a file was opened")

        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr("builtins.open", opened)
        for options in (
            {"staging_bytes": 0},
            {"staging_bytes": -1},
            {"staging_bytes": 1.5},
            {"staging_bytes": True},
            {"threads": 0},
            {"threads": -2},
            {"threads": 10**6},
            {"backend": "nonsense"},
            {"backend": 3},
        ):
            with pytest.raises(OptionError):
                load_into(path, {}, **{**self.options, **options})

    def test_wrong_shape_is_refused_before_any_data_is_read(
        self, big: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, tensors = big
        filled = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        filled["d"] = torch.zeros(4, dtype=torch.uint8)

        def read(*args: object) -> int:
            raise AssertionError("data was read")

        monkeypatch.setattr(host, "read_at", read)
        with pytest.raises(ValueError, match=r"gives shape \[3\] and the destination 'd' has \[4\]"):
            self.load(path, filled)
        assert all(not tensor.any() for tensor in filled.values())

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def test_any_slice_into_guarded_memory(
        self, big: tuple[Path, dict[str, torch.Tensor]], data: st.DataObject
    ) -> None:
        path, tensors = big
        source = tensors["c"].numpy()
        rows = data.draw(st.slices(3))
        low = data.draw(st.integers(-(MIB + 2), MIB + 2))
        step = data.draw(st.sampled_from([1, 1, -1, 2, 3, -7, 4096]))
        columns = slice(low, None, step)
        wanted = source[rows, columns]
        holder = np.full((wanted.shape[0] + 2, wanted.shape[1] + 2), 0xA5, np.uint8)
        inside = holder[1:-1, 1:-1]
        report = self.load(path, {"c": Target(inside, (rows, columns))}, strict=False)
        assert np.array_equal(inside, wanted)
        inside[...] = 0xA5
        assert (holder == 0xA5).all()
        assert report.bytes_written == wanted.nbytes


class TestBuffered(BackendContract):
    """Through the page cache."""

    options: ClassVar[dict[str, Any]] = {"direct_io": False}

    def test_info(self, tmp_path: Path) -> None:
        tensors = save(tmp_path / "m.safetensors")
        with safe_open(tmp_path / "m.safetensors", direct_io=False) as reader:
            reader.load_into({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
            info = reader.backend_info()
        assert (info.name, info.direct) == ("pread", True)
        assert "page cache" in info.reason


class TestDirectIO(BackendContract):
    """Around the page cache, where the pages are not in it."""

    options: ClassVar[dict[str, Any]] = {"direct_io": True}

    def cool(self, path: Path) -> None:
        drop_cache(path)

    def test_info_says_which_way_the_bytes_took(self, big: tuple[Path, dict[str, torch.Tensor]]) -> None:
        path, tensors = big
        filled = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        drop_cache(path)
        probe = os.open(path, os.O_RDONLY)
        cold = host.is_resident(probe, 6 * MIB) is False
        os.close(probe)
        report = self.load(path, filled)
        if cold:
            assert report.staged_bytes >= 8 * MIB
            assert "came by O_DIRECT" in report.reason
        else:  # the file system keeps its pages, or can't tell
            assert report.staged_bytes == 0

    def test_what_is_resident_comes_from_the_cache(self, big: tuple[Path, dict[str, torch.Tensor]]) -> None:
        path, tensors = big
        path.read_bytes()
        filled = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        report = load_into(path, filled, direct_io=True)
        assert report.staged_bytes == 0
        assert all(torch.equal(filled[name], tensor) for name, tensor in tensors.items())


class TestDirectIORefused(BackendContract):
    """A file system without O_DIRECT: never fatal, and said."""

    options: ClassVar[dict[str, Any]] = {"direct_io": True}

    @pytest.fixture(autouse=True)
    def prepare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = os.open

        def refuse(path: Any, flags: int, *rest: Any, **keywords: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return whole(path, flags, *rest, **keywords)

        monkeypatch.setattr(os, "open", refuse)
        monkeypatch.setattr(host, "is_resident", lambda fd, offset: False)

    def test_the_reason_says_so(self, big: tuple[Path, dict[str, torch.Tensor]]) -> None:
        path, tensors = big
        report = self.load(path, {name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
        assert "O_DIRECT was refused for 1 file(s) (Invalid argument), read buffered" in report.reason


class TestPortable(BackendContract):
    """The way of systems without preadv, forced here."""

    options: ClassVar[dict[str, Any]] = {"direct_io": False}

    @pytest.fixture(autouse=True)
    def prepare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host, "LINUX", False)
        monkeypatch.setattr(host, "_PORTABLE_READ", 100_003)  # many reads where the real bound would need gigabytes
        monkeypatch.delattr(host, "_preadv")
        monkeypatch.delattr(host, "_pread")


class TestShortReads(BackendContract):
    """A system that returns less than asked for, and interrupts."""

    options: ClassVar[dict[str, Any]] = {"direct_io": False}

    @pytest.fixture(autouse=True)
    def prepare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        whole, whole_vector = host._pread, host._preadv
        self.calls = 0

        def short(fd: int, address: int, size: int, offset: int) -> int:
            self.calls += 1
            if self.calls % 3 == 0:
                return _interrupted()
            count: int = whole(fd, address, min(size, 700_001), offset)
            return count

        def short_vector(fd: int, vector: int, count: int, offset: int) -> int:
            self.calls += 1
            if self.calls % 3 == 0:
                return _interrupted()
            number: int = whole_vector(fd, vector, max(1, count // 2), offset)
            return number

        monkeypatch.setattr(host, "_pread", short)
        monkeypatch.setattr(host, "_preadv", short_vector)


def _interrupted() -> int:
    import ctypes

    ctypes.set_errno(errno.EINTR)
    return -1


def test_a_named_backend_that_cannot_serve_raises(tmp_path: Path) -> None:
    tensors = save(tmp_path / "m.safetensors")
    filled = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with pytest.raises(OptionError, match="cannot fill a destination"):
        load_into(tmp_path / "m.safetensors", filled, backend="mmap")
    assert not filled["steps"].any()
    with pytest.raises(UnsupportedError, match="not to device 'mps'"):
        safe_open(tmp_path / "m.safetensors", device="mps")
    with pytest.raises(OptionError, match="host memory has no stream"):
        load_into(tmp_path / "m.safetensors", filled, stream=3)


def _views(path: Path, names: Sequence[str]) -> dict[str, Any]:
    with safe_open(path, "np", backend="mmap") as reader:
        return {name: reader.get_tensor(name) for name in names}


class TestMmap:
    """Tensors over private mappings."""

    def test_a_write_never_reaches_the_file(self, big: tuple[Path, dict[str, torch.Tensor]]) -> None:
        path, tensors = big
        before = path.read_bytes()
        first = _views(path, ["b"])["b"]
        first[:] = 0
        assert path.read_bytes() == before
        second = _views(path, ["b"])["b"]
        assert np.array_equal(second, tensors["b"].numpy())
        assert not first.any()

    def test_a_mapping_goes_with_its_tensor(self, big: tuple[Path, dict[str, torch.Tensor]]) -> None:
        path, _ = big
        views = _views(path, ["b", "c"])
        assert _mapped(path) == 2
        kept = views["c"][1, 5:9]
        del views
        assert _mapped(path) == 1
        assert kept.shape == (4,)
        del kept
        assert _mapped(path) == 0

    def test_no_descriptor_stays_open(self, big: tuple[Path, dict[str, torch.Tensor]]) -> None:
        path, _ = big
        before = len(os.listdir("/proc/self/fd"))
        views = _views(path, ["b", "c"])
        assert len(os.listdir("/proc/self/fd")) == before
        assert views["c"].shape == (3, MIB + 1)

    def test_what_is_small_or_misaligned_is_read(self, tmp_path: Path) -> None:
        wide = torch.randn(40_000, dtype=torch.float64)
        header = {
            "odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "wide": {"dtype": "F64", "shape": [40_000], "data_offsets": [1, 320_001]},
        }
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        path = write_raw(tmp_path / "m.safetensors", raw, b"x" + wide.numpy().tobytes())
        with safe_open(path, backend="mmap") as reader:
            assert torch.equal(reader.get_tensor("wide"), wide)
            assert reader.get_tensor("odd").tolist() == [ord("x")]
            reason = reader.backend_info().reason
        assert "1 that start at an address that their dtype does not allow" in reason
        assert "1 that are smaller than 65,536 bytes" in reason
        assert _mapped(path) == 0

    def test_a_file_system_without_mmap(
        self, big: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, tensors = big

        def refuse(fd: int, offset: int, nbytes: int) -> int:
            raise OSError(errno.ENODEV, "No such device")

        monkeypatch.setattr(host, "map_private", refuse)
        with safe_open(path) as reader:
            assert torch.equal(reader.get_tensor("b"), tensors["b"])
            assert "1 that could not be mapped (No such device)" in reader.backend_info().reason

    def test_a_file_cut_off_after_it_was_opened(self, big: tuple[Path, dict[str, torch.Tensor]]) -> None:
        path, _ = big
        with safe_open(path) as reader:
            assert reader.get_tensor("a").tolist() == list(range(7))
            os.truncate(path, 2 * MIB)
            with pytest.raises(FileChangedError):
                reader.get_tensor("b")

    def test_the_portable_way(self, big: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host, "LINUX", False)
        path, tensors = big
        with safe_open(path) as reader:
            values = reader.get_tensors()
        for name, tensor in tensors.items():
            assert torch.equal(values[name], tensor)

    def test_contiguous_slices_are_views_and_others_are_read(self, tmp_path: Path) -> None:
        table = torch.randn(512, 256)
        save(tmp_path / "m.safetensors", {"table": table})
        path = tmp_path / "m.safetensors"
        with safe_open(path) as reader:
            rows = reader.get_slice("table")[100:300]
            assert _mapped(path) == 1
            columns = reader.get_slice("table")[:, 3:9]
            assert _mapped(path) == 1
        assert torch.equal(rows, table[100:300])
        assert torch.equal(columns, table[:, 3:9])


def _mapped(path: Path) -> int:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return sum(line.rstrip().endswith(str(path)) for line in maps)


def test_bytes_of_both_backends_are_the_same(tmp_path: Path) -> None:
    tensors = save(tmp_path / "m.safetensors", state(width=256))
    for backend in ("mmap", "pread"):
        with safe_open(tmp_path / "m.safetensors", backend=backend) as reader:
            for name, value in reader.get_tensors().items():
                assert raw_bytes(value) == raw_bytes(tensors[name]), (backend, name)
