"""Lazy tensors and what happens around them: threads, forks, files that go or change, descriptors, bounded memory."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dlpack_loader import safe_open
from dlpack_loader.errors import ClosedError, FileChangedError, TruncatedError
from dlpack_loader.reader import Reader
from tests.files import save, write_raw
from tests.lazy_material import MIB, run, same

# Threads, files and their descriptors


def descriptors(path: Path) -> int:
    """Open descriptors of a file, under whatever name it had when it was opened."""
    name = os.fspath(path.resolve())
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)") == name
        except FileNotFoundError:
            continue
    return found


def test_threads_share_a_reader(tmp_path: Path) -> None:
    tensors = save(tmp_path / "m.safetensors", {str(k): torch.randn(40, 50) for k in range(24)})
    wrong: list[str] = []
    with safe_open(tmp_path / "m.safetensors") as reader:
        start = threading.Barrier(8)

        def work(seed: int) -> None:
            start.wait()
            for k in range(24):
                name = str((k + seed * 3) % 24)
                lazy, real = reader.lazy(name), tensors[name]
                into, turned, half = torch.zeros(40, 50), torch.zeros(50, 40).t(), torch.zeros(40, 50).half()
                into.copy_(lazy)
                turned.copy_(lazy)
                half.copy_(lazy)
                if not (
                    same(into, real) and same(turned, real) and same(half, real.half()) and lazy.sum() == real.sum()
                ):
                    wrong.append(name)

        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert wrong == []
        read = 8 * 24 * 8000
        found = reader.lazy_report()
        assert (found.direct, found.staged, found.materialized) == (192, 384, 192)
        assert (found.bytes_read, found.bytes_written) == (4 * read, 3 * read + read // 2)


def test_lazy_tensors_outlive_their_reader_and_their_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = save(path, {"a": torch.randn(300, 100), "b": torch.randn(10)})
    reader = safe_open(path)
    lazies = dict(reader.iter_lazy())
    reader.close()
    assert torch.equal(torch.zeros(300, 100).copy_(lazies["a"]), tensors["a"])
    with pytest.raises(ClosedError):
        reader.lazy("a")
    path.unlink()
    part = lazies["a"][5:7].t()
    del reader, lazies["a"]
    assert torch.equal(torch.zeros(100, 2).copy_(part), tensors["a"][5:7].t())
    assert torch.equal(lazies["b"].cpu(), tensors["b"])
    save(path, {name: value + 1 for name, value in tensors.items()})
    assert torch.equal(lazies["b"].cpu(), tensors["b"])  # still of the file that was opened
    assert descriptors(path) == 1
    del part, lazies
    gc.collect()
    assert descriptors(path) == 0


def test_a_file_that_was_rewritten_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save(path, {"a": torch.ones(3000)})
    with safe_open(path) as reader:
        lazy = reader.lazy("a")
        with open(path, "r+b") as file:
            file.seek(-4, 2)
            file.write(b"\0\0\0\0")
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        into = torch.zeros(3000)
        for act in (lambda: into.copy_(lazy), lambda: lazy.to(torch.float64), lazy.sum):
            with pytest.raises(FileChangedError) as caught:
                act()
            assert (caught.value.tensor, caught.value.file) == ("a", str(path))
        assert not into.any()


def test_forgotten_lazy_tensors_give_back_their_descriptors(tmp_path: Path) -> None:
    paths = [tmp_path / f"{k}.safetensors" for k in range(20)]
    for k, path in enumerate(paths):
        save(path, {str(k): torch.full((4,), k)})
    with safe_open(paths) as reader:
        everything = dict(reader.iter_lazy())
        assert sum(map(descriptors, paths)) == 20
        assert all(torch.equal(lazy, torch.full((4,), int(name))) for name, lazy in everything.items())
        assert sum(map(descriptors, paths)) == 20
        del everything
        assert sum(map(descriptors, paths)) <= 9
        for name, lazy in reader.iter_lazy():
            assert int(lazy[0]) == int(name)
            assert sum(map(descriptors, paths)) <= 11
    del lazy
    assert sum(map(descriptors, paths)) == 0


def test_the_collector_may_come_at_any_time(tmp_path: Path) -> None:
    """Lazy tensors in cycles are let go while this thread, or another one, has the lock of the files."""
    paths = [tmp_path / f"{k}.safetensors" for k in range(12)]
    for k, path in enumerate(paths):
        save(path, {str(k): torch.full((40,), float(k))})
    reader = safe_open(paths)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for k in range(120):
                lazy: Any = reader.lazy(str((k + seed) % 12))
                lazy.me = [lazy]
                assert int(lazy.sum()) == 40 * ((k + seed) % 12)
        except BaseException as error:
            errors.append(error)

    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        workers = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(4)]
        for worker in workers:
            worker.start()
        deadline = time.monotonic() + 60
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        assert not any(worker.is_alive() for worker in workers), "deadlock"
    finally:
        gc.set_threshold(*before)
    assert errors == []
    reader.close()
    gc.collect()
    assert sum(map(descriptors, paths)) == 0


def test_what_is_let_go_under_the_lock_is_given_back_after_it(tmp_path: Path) -> None:
    save(tmp_path / "m.safetensors", {"a": torch.ones(4)})
    reader = safe_open(tmp_path / "m.safetensors")
    lazy = reader.lazy("a")
    files = reader._access.files
    with files._guard():
        del lazy  # as the collector would, in the middle of anything
    reader.close()
    assert descriptors(tmp_path / "m.safetensors") == 0


def test_what_is_let_go_while_a_file_is_refused_is_given_back(tmp_path: Path) -> None:
    gone, kept = tmp_path / "gone.safetensors", tmp_path / "kept.safetensors"
    save(gone, {"g": torch.ones(4)})
    save(kept, {"k": torch.ones(4)})
    reader = safe_open([gone, kept])
    lazy = [reader.lazy("k")]
    gone.unlink()
    files = reader._access.files
    original = files._open_checked

    def opening(path: str, flags: int) -> int:
        lazy.clear()
        return original(path, flags)

    files._open_checked = opening  # type: ignore[method-assign]
    reader.close()
    with pytest.raises(FileNotFoundError):
        files.hold(str(gone))
    assert descriptors(kept) == 0


FORKED = """
import os, sys, threading, time
import torch
from dlpack_loader import safe_open
reader = safe_open(sys.argv[1])
lazy = reader.lazy("a")
assert lazy.sum() == 3000
locks = [reader._access.files._guard(), *reader._lazy._parts._locks.values()]
taken, leave = threading.Event(), threading.Event()
def hold():
    for lock in locks:
        lock.acquire()
    taken.set()
    leave.wait()
    for lock in locks:
        lock.release()
holder = threading.Thread(target=hold)
holder.start()
taken.wait()
child = os.fork()
if not child:
    into = torch.zeros(3000)
    into.copy_(lazy)
    good = bool((into == 1).all()) and reader.lazy("a").half().sum() == 3000 and reader.lazy_report().direct == 1
    with reader.deferring():
        into.zero_()
        into.copy_(lazy)
    os._exit(0 if good and into.sum() == 3000 else 1)
deadline = time.monotonic() + 30
while time.monotonic() < deadline:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        break
    time.sleep(0.02)
else:
    os.kill(child, 9)
    status = "hung"
leave.set()
holder.join()
print(status, lazy.sum().item())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_while_another_thread_reads(tmp_path: Path) -> None:
    save(tmp_path / "m.safetensors", {"a": torch.ones(3000)})
    assert run(FORKED, tmp_path / "m.safetensors").strip() == "0 3000.0"


# Failures


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[tuple[Reader, Path]]:
    """A reader whose file lost the end of its last tensor, with the same inode and time of change."""
    path = tmp_path / "m.safetensors"
    save(path, {"small": torch.ones(100), "zlarge": torch.ones(1200, 1000)})
    with safe_open(path, staging_bytes=2 * MIB) as reader:
        reader.lazy("small").sum()
        yield reader, path


def truncate(reader: Reader, path: Path, monkeypatch: pytest.MonkeyPatch, lost: int) -> int:
    """Cut bytes off, and make the check of the file's identity miss it, as it would when cut between check and read."""
    os.truncate(path, path.stat().st_size - lost)
    monkeypatch.setattr(type(reader._access.files), "_check", lambda *_: None)
    return path.stat().st_size


@pytest.mark.parametrize("lost", [1, 4_000_000])
def test_a_truncated_file_is_an_error_at_the_copy(
    cut: tuple[Reader, Path], monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    reader, path = cut
    lazy = reader.lazy("zlarge")
    end = truncate(reader, path, monkeypatch, lost)
    into = {
        "direct": (torch.zeros(1200, 1000), lazy),
        "small": (torch.zeros(1000), lazy[-1]),
        "strided": (torch.zeros(1200, 9), lazy[:, :9]),
        "turned": (torch.zeros(1000, 1200).t(), lazy),
        "cast": (torch.zeros(1200, 1000, dtype=torch.float64), lazy),
        "broadcast": (torch.zeros(2, 1200, 1000), lazy),
    }
    for what, (destination, source) in into.items():
        if what == "strided" and lost == 1:
            continue  # the byte that is lost is none of these
        with pytest.raises(TruncatedError) as caught:
            destination.copy_(source)
        error = caught.value
        dirty = () if what == "cast" and lost > 1 else ("zlarge",)  # its first block is not there
        assert (error.tensor, error.file, error.dirty) == ("zlarge", str(path), dirty), what
        assert error.offset is not None
        assert abs(error.offset - end) < MIB if lost == 1 else error.offset >= 0, what
    # Nobody has these, so nothing is dirty.
    for act in (lazy.clone, lazy.sum, lambda: lazy.to(torch.float64), lazy[-1].clone, lambda: lazy.to("cpu")):
        with pytest.raises(TruncatedError) as caught:
            act()
        assert (caught.value.tensor, caught.value.dirty) == ("zlarge", ())
    assert torch.equal(reader.lazy("small"), torch.ones(100))


def test_a_cast_that_fails_in_its_first_block_leaves_the_destination_clean(
    cut: tuple[Reader, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, path = cut
    lazy = reader.lazy("zlarge")
    truncate(reader, path, monkeypatch, 4_700_000)
    into = torch.full((1200, 1000), 7.0, dtype=torch.float64)
    with pytest.raises(TruncatedError) as caught:
        into.copy_(lazy)
    assert caught.value.dirty == ()
    assert bool((into == 7).all())


# Memory


PEAK = """
import sys
import torch
from dlpack_loader import safe_open
torch.set_num_threads(1)
reader = safe_open(sys.argv[1], staging_bytes=int(sys.argv[2]))
warm = reader.lazy("small")
for into in (torch.zeros(64, 64), torch.zeros(64, 64).t(), torch.zeros(64, 64).half()):
    into.copy_(warm)
    with reader.deferring():
        into.copy_(warm)
rows = columns = 8192
lazy = reader.lazy("w")
copies = {
    "direct": ((rows, columns), torch.float32, lazy),
    "deferred": ((rows, columns), torch.float32, lazy),
    "strided": ((rows, columns // 4), torch.float32, lazy[:, columns // 4 : columns // 2]),
    "stepped": ((rows, columns // 2), torch.float32, lazy[:, ::2]),
    "cast": ((rows, columns), torch.bfloat16, lazy),
    "cast columns": ((rows, columns // 4), torch.bfloat16, lazy[:, : columns // 4]),
    "transpose": ((columns, rows), torch.float32, lazy.t()),
    "cast transpose": ((columns // 4, rows), torch.bfloat16, lazy.t()[: columns // 4]),
    "windows": ((1 << 16, 512), torch.float64, lazy.view(-1).unfold(0, 512, 1)[: 1 << 16]),
    "repeated": ((512, 1 << 17), torch.float32, lazy.view(-1)[: 1 << 17]),
    "to": (None, torch.bfloat16, lazy),
}
def memory(which):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(which))
for what, (shape, dtype, source) in copies.items():
    made = destination = None if shape is None else torch.ones(shape, dtype=dtype)  # its pages are there
    before = memory("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    if what == "to":
        made = source.to(dtype)
        before += made.nbytes
    elif what == "deferred":
        with reader.deferring():
            destination.copy_(source)
    else:
        destination.copy_(source)
    print(what, memory("VmHWM") - before, int(made.count_nonzero()), sep=":")
    del made, destination
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "m.safetensors"
    header = {
        "small": {"dtype": "F32", "shape": [64, 64], "data_offsets": [0, 16384]},
        "w": {"dtype": "F32", "shape": [8192, 8192], "data_offsets": [16384, 16384 + 256 * MIB]},
    }
    write_raw(path, header, b"")
    os.truncate(path, path.stat().st_size + 16384 + 256 * MIB)  # zeros that take no space
    return path


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory can't be reset here")
def test_memory_is_bounded(large: Path) -> None:
    """Of 256 MiB, whatever becomes of them, no more than the staging and a small constant is in memory."""
    staging = 8 * MIB
    lines = run(PEAK, large, staging).splitlines()
    grown = {what: int(grown) for what, grown, _ in (line.split(":") for line in lines)}
    assert len(grown) == 11
    assert {what: size for what, size in grown.items() if size > staging + 4 * MIB} == {}
    assert {line.split(":")[2] for line in lines} == {"0"}  # all ones became zeros
