"""What a hostile world does: rewritten files, few descriptors, pipes, interrupts, threads that won't start, forks."""

from __future__ import annotations

import difflib
import errno
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from dlpack_loader import load_file, load_into, load_model, safe_open
from dlpack_loader.errors import (
    DestinationBufferError,
    DestinationError,
    DestinationTypeError,
    FileChangedError,
    OptionError,
    SourceError,
    StorageError,
    TensorNotFoundError,
    UnsupportedError,
)
from dlpack_loader.runtime import arrays, host
from tests.files import drop_cache, write_raw
from tests.files import save as save_to

MIB = 1 << 20


def test_a_file_rewritten_in_place_is_noticed_though_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    ones, twos = torch.full((1000,), 1.0), torch.full((1000,), 2.0)
    path.write_bytes(save({"a": ones, "b": twos}))
    with safe_open(path, backend="pread") as reader:
        assert torch.equal(reader.get_tensor("b"), twos)
        raw = path.read_bytes()
        half = len(raw) - 4000
        with open(path, "r+b") as file:  # the same inode and size, and the tensors change places
            file.write(raw[: half - 4000] + raw[half:] + raw[half - 4000 : half])
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        filled = torch.zeros(1000)
        with pytest.raises(FileChangedError):
            reader.get_tensor("b")
        with pytest.raises(FileChangedError):
            reader.read_into("b", filled)
        assert not filled.any()


FEW = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
import numpy as np, dlpack_loader
reader = dlpack_loader.safe_open(sys.argv[1], "np", backend=sys.argv[2])
for _ in range(2):
    for name in reader:
        assert reader.get_tensor(name)[0] == int(name)
tensors = reader.get_tensors()
if sys.argv[2] == "pread":
    filled = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
    reader.load_into(filled)
    tensors = filled
print(sum(int(tensor[0]) for tensor in tensors.values()))
"""


@pytest.mark.parametrize("backend", ["pread", "mmap"])
def test_many_shards_and_few_descriptors(tmp_path: Path, backend: str) -> None:
    for k in range(120):
        save_to(tmp_path / f"{k}.safetensors", {str(k): torch.full((20_000,), k)})
    done = subprocess.run(
        [sys.executable, "-c", FEW, tmp_path, backend], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr) == (f"{sum(range(120))}\n", "")


def test_a_system_without_the_constant_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "RWF_NOWAIT")
    data = torch.randint(0, 255, (3 * MIB,), dtype=torch.uint8)
    save_to(tmp_path / "m.safetensors", {"x": data})
    filled = torch.zeros_like(data)
    load_into(tmp_path / "m.safetensors", {"x": filled}, direct_io=True)
    assert torch.equal(filled, data)


@pytest.mark.parametrize("as_index", [False, True])
def test_a_pipe_among_the_files_does_not_hang(tmp_path: Path, as_index: bool) -> None:
    save_to(tmp_path / "a.safetensors", {"a": torch.zeros(1)})
    os.mkfifo(tmp_path / ("model.safetensors.index.json" if as_index else "b.safetensors"))
    with pytest.raises((SourceError, ValueError), match="not a regular file"):
        safe_open(tmp_path)
    if not as_index:
        with pytest.raises(ValueError, match="not a regular file"):
            safe_open([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])


INTERRUPTED = """
import random, signal, sys, threading, time
import numpy as np, dlpack_loader
reader = dlpack_loader.safe_open(sys.argv[1], "np", threads=8, direct_io=False)
filled = np.zeros(reader.entry("x").nbytes, np.uint8)
reader.load_into({"x": filled})
chance, interrupted, left = random.Random(0), 0, 0
for _ in range(100):
    timer = threading.Timer(chance.uniform(0, 0.006), signal.raise_signal, (signal.SIGINT,))
    try:
        timer.start()
        reader.load_into({"x": filled})
        timer.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        interrupted += 1
        left += any(thread.name.startswith("dlpack-loader") for thread in threading.enumerate())
    timer.join()
print(interrupted > 50, left)
"""


def test_interrupts_at_any_moment_leave_no_thread_behind(tmp_path: Path) -> None:
    save_to(tmp_path / "m.safetensors", {"x": torch.zeros(24 * MIB, dtype=torch.uint8)})
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, tmp_path / "m.safetensors"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "True 0\n", done.stderr


def test_threads_that_will_not_start_are_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randint(0, 255, (24 * MIB,), dtype=torch.uint8)
    save_to(tmp_path / "m.safetensors", {"x": data})
    started: list[str] = []
    whole = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "dlpack-loader-read" and started:
            raise RuntimeError("can't start new thread")
        started.append(thread.name)
        whole(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    filled = torch.zeros_like(data)
    load_into(tmp_path / "m.safetensors", {"x": filled}, threads=6)
    assert torch.equal(filled, data)
    assert started == ["dlpack-loader-read"]


FORKED = """
import os, sys
import numpy as np, dlpack_loader
from dlpack_loader.errors import UnsupportedError
filled = np.zeros(1000, np.float32)
pending = dlpack_loader.load_into(sys.argv[1], {"x": filled}, wait=False)
child = os.fork()
if not child:
    try:
        pending.wait()
    except UnsupportedError as error:
        os._exit(7 if "belongs to the process" in str(error) else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), pending.wait().filled, filled.sum())
"""


def test_a_pending_load_in_a_fork(tmp_path: Path) -> None:
    save_to(tmp_path / "m.safetensors", {"x": torch.ones(1000)})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, tmp_path / "m.safetensors"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("7 ('x',) 1000.0\n", "")


def test_a_failure_that_nobody_waits_for_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_to(tmp_path / "m.safetensors", {"x": torch.ones(1000)})
    monkeypatch.setattr(host, "read_at", lambda fd, offset, pieces, enough: 0)
    filled = torch.zeros(1000)
    for waits in (True, False):
        caplog.clear()
        pending = load_into(tmp_path / "m.safetensors", {"x": filled}, wait=False)
        while not pending.done():
            time.sleep(0.001)
        if waits:
            with pytest.raises(StorageError):
                pending.wait()
        del pending
        gc.collect()
        logged = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert len(logged) == (0 if waits else 1)


def test_o_direct_that_cannot_be_opened_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randint(0, 255, (9 * MIB,), dtype=torch.uint8)
    path = tmp_path / "m.safetensors"
    save_to(path, {"x": data})
    whole = os.open
    for code in (errno.EPERM, errno.EMFILE, errno.ENOMEM):

        def refuse(name: Any, flags: int, *rest: Any, code: int = code, **keywords: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(code, os.strerror(code))
            return whole(name, flags, *rest, **keywords)

        monkeypatch.setattr(os, "open", refuse)
        monkeypatch.setattr(host, "is_resident", lambda fd, offset: False)
        drop_cache(path)
        filled = torch.zeros_like(data)
        report = load_into(path, {"x": filled}, direct_io=True)
        assert torch.equal(filled, data)
        assert f"O_DIRECT was refused for 1 file(s) ({os.strerror(code)})" in report.reason


@pytest.mark.parametrize(("tensors", "looks"), [(20, 1), (5000, 0)])
def test_a_missing_name_is_cheap_to_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors: int, looks: int
) -> None:
    """Comparing with thousands of names takes a second, which a loop that expects misses can't afford."""
    save_to(tmp_path / "m.safetensors", {f"layers.{k}.weight": torch.zeros(1) for k in range(tensors)})
    calls: list[int] = []
    whole = difflib.get_close_matches

    def counted(word: str, names: Any, n: int) -> list[str]:
        calls.append(len(names))
        return whole(word, names, n)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    with safe_open(tmp_path / "m.safetensors") as reader, pytest.raises(TensorNotFoundError):
        reader.get_tensor("layers.1.weigth")
    assert len(calls) == looks


def test_odd_sources(tmp_path: Path) -> None:
    save_to(tmp_path / "m.safetensors", {"a": torch.zeros(1), "b": torch.ones(1)})
    save_to(tmp_path / "._m.safetensors", {"junk": torch.zeros(1)})
    with safe_open(tmp_path) as reader:
        assert reader.keys() == ["a", "b"]
    with safe_open([tmp_path / "m.safetensors", f"{tmp_path}/./m.safetensors"]) as reader:
        assert reader.keys() == ["a", "b"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "m.safetensors", "b": "./m.safetensors"}}')
    with safe_open(index) as reader:
        assert reader.keys() == ["a", "b"]
    index.write_text('{"weight_map": ' + "[" * 100_000)
    with pytest.raises(ValueError, match="not an index"):
        safe_open(index)
    with pytest.raises(SourceError, match="not a path"):
        safe_open("\ud800")


def test_columns_of_one_matrix_need_no_search_for_common_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair of columns has to be told apart by arithmetic: there are half a million pairs."""
    save_to(tmp_path / "m.safetensors", {f"{k:04}": torch.full((50,), float(k)) for k in range(1000)})
    matrix = np.zeros((50, 1000), np.float32)

    def search(*arguments: object) -> bool:
        raise AssertionError("searched")

    monkeypatch.setattr(arrays, "shares_memory", search)
    load_into(tmp_path / "m.safetensors", {f"{k:04}": matrix[:, k] for k in range(1000)})
    assert (matrix == np.arange(1000)).all()
    with pytest.raises(AssertionError, match="searched"):  # what arithmetic can't tell apart is searched
        load_into(tmp_path / "m.safetensors", {"0000": matrix[:, 0], "0001": matrix[::-1, 1]}, strict=False)


def test_a_resolver_that_reuses_its_memory_is_refused(tmp_path: Path) -> None:
    save_to(tmp_path / "m.safetensors", {"a": torch.ones(4), "b": torch.full((4,), 2.0)})
    scratch = torch.zeros(4)
    with pytest.raises(DestinationBufferError, match="'a' and 'b' overlap"):
        load_into(tmp_path / "m.safetensors", lambda entry: scratch)
    assert not scratch.any()


def test_names_that_are_no_strings(tmp_path: Path) -> None:
    save_to(tmp_path / "m.safetensors", {"a": torch.ones(4)})
    odd: Any = {"a": torch.zeros(4), 3: torch.zeros(4)}
    with pytest.raises(DestinationTypeError, match="named by strings"):
        load_into(tmp_path / "m.safetensors", odd)


def test_memory_of_a_tensor_that_is_moved_elsewhere_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor gets other memory while it is loaded; what it had is filled, and nobody else has it meanwhile."""
    save_to(tmp_path / "m.safetensors", {"a": torch.full((1 << 20,), 7.0)})
    gate = threading.Event()
    whole = host.read_at

    def slow(fd: int, offset: int, pieces: Any, enough: int) -> int:
        gate.wait(30)
        return whole(fd, offset, pieces, enough)

    monkeypatch.setattr(host, "read_at", slow)
    tensor = torch.zeros(1 << 20)
    address = tensor.data_ptr()
    pending = load_into(tmp_path / "m.safetensors", {"a": tensor}, wait=False)
    tensor.data = torch.zeros(1)
    others = [torch.zeros(1 << 20) for _ in range(4)]
    assert address not in [other.data_ptr() for other in others]
    gate.set()
    pending.wait()
    assert not any(other.any() for other in others)


class Extra(torch.nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(3)

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("not called")


def test_a_copy_in_a_state_dict_is_not_filled_in_vain(tmp_path: Path) -> None:
    extra = Extra(2, 2, bias=False)
    save_to(tmp_path / "m.safetensors", {"weight": torch.ones(2, 2), "_extra_state": torch.ones(3)})
    with pytest.raises(DestinationError, match="gives a copy under '_extra_state'"):
        load_model(extra, tmp_path / "m.safetensors")
    plain = torch.nn.Linear(2, 2, bias=False)
    plain.register_state_dict_post_hook(lambda module, state, prefix, local: state.update(weight=state["weight"] + 0))
    save_to(tmp_path / "m.safetensors", {"weight": torch.ones(2, 2)})
    with pytest.raises(DestinationError, match="gives a copy under 'weight'"):
        load_model(plain, tmp_path / "m.safetensors")


def test_a_large_f4_tensor_with_an_odd_last_dimension(tmp_path: Path) -> None:
    shape, nbytes = [2, 131_073], 131_073
    header = {"x": {"dtype": "F4", "shape": shape, "data_offsets": [0, nbytes]}}
    path = write_raw(tmp_path / "m.safetensors", header, bytes(nbytes))
    for framework in ("pt", "np"):
        for backend in ("mmap", "pread"):
            with (
                safe_open(path, framework, backend=backend) as reader,
                pytest.raises(UnsupportedError, match="last dim"),
            ):
                reader.get_tensor("x")


def test_a_mapping_that_was_named_and_is_not_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_to(tmp_path / "m.safetensors", {"x": torch.ones(1 << 20)})

    def refuse(fd: int, offset: int, nbytes: int) -> int:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(host, "map_private", refuse)
    named = safe_open(tmp_path / "m.safetensors", backend="mmap")
    with pytest.raises(UnsupportedError, match="can't be mapped: No such device"):
        named.get_tensor("x")
    with safe_open(tmp_path / "m.safetensors") as reader:
        assert reader.get_tensor("x").all()


@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("shape", [[0, 2**40, 2**40], [0, 2**63]])
def test_sizes_that_no_framework_counts(tmp_path: Path, framework: str, shape: list[int]) -> None:
    """Rust multiplies from the left and accepts both, since the product is zero at once."""
    header = {"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
    path = write_raw(tmp_path / "m.safetensors", header, b"")
    with pytest.raises(UnsupportedError, match="no tensor can be made of shape"):
        load_file(path, framework)


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    save_to(tmp_path / "m.safetensors", {"x": torch.ones(4)})
    odd: Any
    for odd in ({"progress": 3}, {"progress": False}, {"direct_io": "no"}, {"direct_io": 1}):
        with pytest.raises(OptionError):
            load_into(tmp_path / "m.safetensors", {"x": torch.zeros(4)}, **odd)


def test_a_producer_that_fails_in_its_own_way() -> None:
    class Producer:
        def __dlpack__(self, **keywords: object) -> object:
            raise AttributeError("no such thing")

    from dlpack_loader.destination import memory_of_dlpack

    with pytest.raises(DestinationBufferError, match="no such thing"):
        memory_of_dlpack(Producer(), None)


def test_a_device_is_asked_for_before_an_export() -> None:
    """An export of a device's memory without a stream would order it after everything there."""
    calls: list[dict[str, object]] = []

    class Producer:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 14, 0

        def __dlpack__(self, **keywords: object) -> object:
            calls.append(keywords)
            return object()

    from dlpack_loader.destination import memory_of_dlpack

    with pytest.raises(UnsupportedError, match="oneAPI"):
        memory_of_dlpack(Producer(), None)
    assert calls == []


def test_the_gil_is_free_while_a_file_is_read(tmp_path: Path) -> None:
    """Another thread counts on while one is inside a single long read."""
    path = tmp_path / "m"
    path.write_bytes(bytes(64 * MIB))
    buffer = np.ones(64 * MIB, np.uint8)
    count, seen = [0], []

    def read() -> None:
        fd = os.open(path, os.O_RDONLY)
        seen.append(count[0])
        host.read_at(fd, 0, host.vector(buffer.ctypes.data, buffer.nbytes), buffer.nbytes)
        seen.append(count[0])
        os.close(fd)

    reader = threading.Thread(target=read)
    reader.start()
    while reader.is_alive():
        count[0] += 1
    assert not buffer.any()
    assert seen[1] - seen[0] > 100
