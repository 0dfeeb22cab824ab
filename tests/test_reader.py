"""safe_open and its Reader: safetensors' calls, slices, lifetimes, threads, forks."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch

from dlpack_loader import Entry, Reader, Target, safe_open
from dlpack_loader.errors import (
    ClosedError,
    FileChangedError,
    LoaderError,
    OptionError,
    SelectionError,
    StorageError,
    TensorNotFoundError,
    UnsupportedError,
)
from tests.files import save

LINUX = sys.platform == "linux"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path / "m.safetensors", format="pt", note="hé")
    return tmp_path / "m.safetensors"


def test_it_answers_as_safetensors_does(path: Path) -> None:
    for framework in ("pt", "np"):
        with safetensors.safe_open(path, framework) as theirs, safe_open(path, framework) as ours:
            assert ours.keys() == theirs.keys()
            assert ours.metadata() == theirs.metadata() == {"format": "pt", "note": "hé"}
            assert sorted(ours.offset_keys()) == sorted(theirs.offset_keys())
            for name in theirs.keys():  # noqa: SIM118
                part = theirs.get_slice(name)
                assert ours.get_slice(name).get_shape() == part.get_shape()
                assert ours.get_slice(name).get_dtype() == part.get_dtype()
                assert ours.get_tensor_meta(name) == (part.get_dtype(), part.get_shape())
                if framework == "np" and part.get_dtype() == "BF16":
                    continue  # safetensors hands out float32-free bf16 only when ml_dtypes was imported
                mine, other = ours.get_tensor(name), theirs.get_tensor(name)
                assert type(mine) is type(other)
                assert mine.dtype == other.dtype
                assert mine.shape == other.shape
                assert (mine == other).all()
            assert set(ours.get_tensors()) == set(theirs.keys())


def test_positional_arguments_are_safetensors_own(path: Path) -> None:
    assert safe_open(path, "np", "cpu").get_tensor("steps").tolist() == list(range(7))
    assert safe_open(str(path), "numpy").get_tensor("scale") == 2.5
    assert safe_open(path, "pytorch", torch.device("cpu")).get_tensor("scale").item() == 2.5
    assert safe_open(path, "torch", "cpu:0").get_tensor("scale").device == torch.device("cpu")
    assert safe_open(path, "pt", "cpu", backend="pread").get_tensors(["mask", "scale"]).keys() == {"mask", "scale"}


def test_beyond_safetensors(path: Path) -> None:
    with safe_open(path) as reader:
        assert len(reader) == len(reader.keys())
        assert list(reader) == reader.keys()
        assert "scale" in reader
        assert "nothing" not in reader
        assert isinstance(reader.entry("steps"), Entry)
        assert repr(reader) == f"<Reader of {str(path)!r}, {len(reader)} tensors, {reader_bytes(reader):,} bytes>"
        assert repr(reader.get_slice("steps")) == "<Slice of 'steps', I64, [7]>"
        assert len(reader.get_slice("steps")) == 7
        with pytest.raises(TypeError, match="0-d"):
            len(reader.get_slice("scale"))
    assert repr(reader) == "<Reader, closed>"


def reader_bytes(reader: Reader) -> int:
    return sum(reader.entry(name).nbytes for name in reader)


INDICES: list[Any] = [
    np.s_[:],
    (),
    np.s_[...],
    np.s_[:-1],
    np.s_[0:100],
    np.s_[300:400],
    np.s_[3:1],
    np.s_[-3:],
    np.s_[::-1],
    np.s_[::-7, ::3],
    np.s_[5],
    np.s_[-1, -1],
    np.s_[..., 0],
    np.s_[7, ...],
    np.s_[:, 2:2],
    np.s_[np.int64(4), 1:9],
    [],
]


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_slices_are_numpys(path: Path, backend: str, framework: str, index: Any) -> None:
    with safe_open(path, framework, backend=backend) as reader:
        whole = np.asarray(reader.get_tensor("layers.0.mlp.up"))
        part = reader.get_slice("layers.0.mlp.up")[index]
    wanted = whole[index]
    assert isinstance(part, torch.Tensor if framework == "pt" else np.ndarray)
    assert tuple(part.shape) == wanted.shape
    assert np.array_equal(np.asarray(part), wanted)


def test_scalars_and_empty_tensors_are_sliced(path: Path) -> None:
    with safe_open(path) as reader:
        assert reader.get_slice("scale")[()].item() == 2.5
        assert reader.get_slice("scale")[...].shape == ()
        assert reader.get_slice("none")[:, 1:].shape == (0, 3)
        assert reader.get_slice("none")[2:-9].shape == (0, 4)
        with pytest.raises(SelectionError, match="1 indices for a tensor of 0 dimensions") as caught:
            reader.get_slice("scale")[0]
    assert isinstance(caught.value, IndexError)
    assert caught.value.tensor == "scale"


@pytest.mark.skipif(not LINUX, reason="/proc counts bytes on Linux only")
def test_a_slice_reads_its_bytes_only(tmp_path: Path) -> None:
    table = torch.randn(4096, 1024)
    save(tmp_path / "m.safetensors", {"table": table})
    with safe_open(tmp_path / "m.safetensors", backend="pread") as reader:
        part = reader.get_slice("table")
        part[0]  # modules are imported and files opened by the first
        for index, wanted in ((np.s_[100:110], 10 * 4096), (np.s_[:, 5], 4096 * 4), (np.s_[7, 3:5], 8)):
            before = _read_bytes()
            value = part[index]
            read = _read_bytes() - before
            assert torch.equal(value, table[index])
            assert wanted <= read < wanted + 512, (index, read)  # reading /proc itself is what comes on top


def _read_bytes() -> int:
    with open("/proc/self/io", "rb", buffering=0) as file:
        return int(file.read(256).split(b"rchar: ")[1].split()[0])


KEPT = """
import gc, os, sys, weakref
import dlpack_loader
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
with dlpack_loader.safe_open(sys.argv[1], backend=sys.argv[2]) as reader:
    tensors = reader.get_tensors()
assert tensors["big"].sum() == 0  # touches every page
small, gone = tensors["small"], weakref.ref(tensors["big"])
before = resident()
del tensors
gc.collect()
assert gone() is None
assert before - resident() > 50 << 20, before - resident()
print(small.untyped_storage().nbytes())
"""


@pytest.mark.skipif(not LINUX, reason="/proc counts pages on Linux only")
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_one_kept_tensor_keeps_its_own_memory_only(tmp_path: Path, backend: str) -> None:
    """In a process of its own: an allocator that has seen much may keep what is freed."""
    path = tmp_path / "m.safetensors"
    save(path, {"big": torch.zeros(64 << 20, dtype=torch.uint8), "small": torch.zeros(4)})
    done = subprocess.run(
        [sys.executable, "-c", KEPT, path, backend], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr) == ("16\n", "")


def test_use_after_close(path: Path) -> None:
    reader = safe_open(path)
    part = reader.get_slice("steps")
    taken = reader.get_tensor("layers.0.mlp.up")
    reader.close()
    reader.close()
    for call in (
        reader.keys,
        reader.metadata,
        lambda: reader.get_tensor("steps"),
        lambda: part[:],
        lambda: len(reader),
        lambda: "steps" in reader,
        lambda: reader.load_into({}),
        reader.__enter__,
    ):
        with pytest.raises(ClosedError, match="File is closed"):
            call()
    assert torch.isfinite(taken).all()


@pytest.mark.skipif(not LINUX, reason="/proc lists descriptors on Linux only")
def test_a_forgotten_reader_leaves_no_descriptor(path: Path) -> None:
    gc.collect()
    before = os.listdir("/proc/self/fd")
    for _ in range(50):
        reader = safe_open(path, backend="pread")
        reader.get_tensor("steps")
        reader.get_slice("layers.0.q")[::2]
    del reader
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_missing_names_and_wrong_arguments(path: Path) -> None:
    with safe_open(path) as reader:
        for call in (reader.get_tensor, reader.get_slice, reader.entry, reader.get_tensor_meta):
            with pytest.raises(TensorNotFoundError, match="File does not contain tensor q"):
                call("q")
        with pytest.raises(safetensors.SafetensorError):
            reader.get_tensors(["steps", "q"])
        with pytest.raises(OptionError, match="not one name"):
            reader.get_tensors("steps")
    for framework in ("mlx", "tf", "paddle"):
        with pytest.raises(UnsupportedError, match="not served by this version"):
            safe_open(path, framework)
    wrong: list[Any] = ["PT", "", None, 3]
    for name in wrong:
        with pytest.raises(OptionError, match="is invalid"):
            safe_open(path, name)
    for device in ("nonsense", "meta", None, True, 1.5):
        with pytest.raises(OptionError, match="is invalid"):
            safe_open(path, device=device)
    for device in ("mps", "xpu:0"):
        with pytest.raises(UnsupportedError, match="not to device"):
            safe_open(path, device=device)
    with pytest.raises(OptionError, match="not supported for framework numpy"):
        safe_open(path, "np", "cuda")


def test_a_replaced_file_is_noticed(path: Path, tmp_path: Path) -> None:
    """Offsets of one file mean nothing in another."""
    reader = safe_open(path, backend="pread")
    save(tmp_path / "other.safetensors", {"steps": torch.zeros(7, dtype=torch.int64)})
    os.replace(tmp_path / "other.safetensors", path)
    with pytest.raises(FileChangedError, match="Open the checkpoint again"):
        reader.get_tensor("steps")
    with safe_open(path, backend="pread") as opened:
        assert not opened.get_tensor("steps").any()
        os.remove(path)  # a file that is open may go; what is read is still that file
        assert not opened.get_tensor("steps").any()


def test_read_into(path: Path) -> None:
    with safe_open(path) as reader:
        wanted = reader.get_tensor("layers.1.mlp.up")
        row = torch.zeros(64)
        report = reader.read_into("layers.1.mlp.up", row, 5)
        assert torch.equal(row, wanted[5])
        assert (report.filled, report.bytes_read) == (("layers.1.mlp.up",), 256)
        assert report.unexpected == ()
        column = np.zeros(256, np.float32)
        reader.read_into("layers.1.mlp.up", Target(column, np.s_[:, 9]))
        assert np.array_equal(column, wanted[:, 9].numpy())
        whole = torch.zeros_like(wanted)
        reader.read_into("layers.1.mlp.up", whole, None)
        assert torch.equal(whole, wanted)
        with pytest.raises(OptionError, match="index of its own"):
            reader.read_into("steps", Target(torch.zeros(1), 0), 0)


def test_threads_share_a_reader(path: Path) -> None:
    with safe_open(path, backend="pread", threads=2) as reader:
        wanted = {name: tensor.clone() for name, tensor in reader.get_tensors().items()}
        failures: list[str] = []

        def work(seed: int) -> None:
            names = list(wanted)
            for step in range(60):
                name = names[(seed + step) % len(names)]
                if not torch.equal(reader.get_tensor(name), wanted[name]):
                    failures.append(name)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


FORK = """
import os, sys
import dlpack_loader
reader = dlpack_loader.safe_open(sys.argv[1], "np", backend="pread", threads=4)
first = reader.get_tensors()
child = os.fork()
if not child:
    again = reader.get_tensors()
    os._exit(0 if all((again[name] == first[name]).all() for name in first) else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert (reader.get_tensor("steps") == first["steps"]).all()
print("both")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_after_use_works(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORK, path], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("both\n", "")


def test_nothing_is_printed_or_logged(
    path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for backend in ("mmap", "pread"):
        with safe_open(path, backend=backend) as reader:
            tensors = reader.get_tensors()
    with safe_open(path) as reader:
        reader.load_into(tensors)
        reader.load_into(tensors, wait=False)
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_errors_travel_between_processes(path: Path) -> None:
    with safe_open(path) as reader, pytest.raises(LoaderError) as caught:
        reader.get_tensor("q")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is TensorNotFoundError
    assert str(copy) == str(caught.value)
    os.remove(path)
    with pytest.raises(StorageError) as missing:
        safe_open(path)
    other = pickle.loads(pickle.dumps(missing.value))
    assert isinstance(other, FileNotFoundError)
    assert (other.errno, other.filename, str(other)) == (2, str(path), str(missing.value))


def test_progress_is_told_by_the_calling_thread(path: Path) -> None:
    seen: list[tuple[int, int]] = []
    threads = set()

    def note(done: int, total: int) -> None:
        seen.append((done, total))
        threads.add(threading.get_ident())

    with safe_open(path, backend="pread", progress=note) as reader:
        reader.get_tensors()
        total = reader_bytes(reader)
    assert threads == {threading.get_ident()}
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_bar_is_shown_when_asked_for(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with safe_open(path, "np", backend="pread", progress=True) as reader:
        reader.get_tensors()
    out, err = capfd.readouterr()
    assert out == ""
    assert "loading: 100%" in err
