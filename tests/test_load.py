"""load_file, load_into, load_model: the public calls, end to end."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlpack_loader import Entry, LoadReport, Pending, Target, load_file, load_into, load_model, safe_open
from dlpack_loader.errors import (
    DestinationError,
    DestinationTypeError,
    OptionError,
    StorageError,
    StrictError,
    UnsupportedError,
)
from dlpack_loader.runtime import host
from tests.files import raw_bytes, save, state, write_index, write_raw


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    path = tmp_path / "m.safetensors"
    return path, save(path)


def digest(tensors: dict[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(raw_bytes(tensors[name]))
    return whole.hexdigest()


def zeros(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def test_load_file(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    for backend in ("auto", "mmap", "pread"):
        loaded = load_file(path, backend=backend)
        assert loaded.keys() == tensors.keys()
        assert digest(loaded) == digest(tensors)
    arrays = load_file(path, "np")
    assert all(raw_bytes(arrays[name]) == raw_bytes(tensor) for name, tensor in tensors.items())


def test_sharded_checkpoint_into_one_set_of_destinations(tmp_path: Path) -> None:
    tensors = state(layers=4)
    names = sorted(tensors)
    files = {}
    for shard in range(3):
        part = {name: tensors[name] for name in names[shard::3]}
        files.update(dict.fromkeys(part, f"model-{shard}.safetensors"))
        save(tmp_path / f"model-{shard}.safetensors", part)
    write_index(tmp_path / "model.safetensors.index.json", files)
    for source in (tmp_path, tmp_path / "model.safetensors.index.json", sorted(tmp_path.glob("*.safetensors"))[::-1]):
        filled = zeros(tensors)
        report = load_into(source, filled)
        assert digest(filled) == digest(tensors)
        assert report.filled == tuple(names)


def test_the_report(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    filled = zeros(tensors)
    del filled["scale"], filled["mask"]
    filled["extra"] = torch.zeros(3)
    report = load_into(path, filled, strict=False)
    assert report.filled == tuple(sorted(set(tensors) - {"scale", "mask"}))
    assert report.unfilled == ("extra",)
    assert report.unexpected == ("mask", "scale")
    assert report.declined == ()
    assert report.bytes_written == sum(tensors[name].nbytes for name in report.filled)
    assert report.backend == "pread"
    assert report.seconds > 0
    text = str(report)
    assert f"{len(report.filled)} filled, {report.bytes_written:,} bytes" in text
    assert "unexpected mask, scale" in text
    assert "unfilled  extra" in text
    assert not filled["extra"].any()


def test_strict_names_both_sides_and_writes_nothing(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    filled = zeros(tensors)
    before = digest(filled)
    del filled["scale"]
    filled["extra"] = torch.zeros(3)
    with pytest.raises(StrictError) as caught:
        load_into(path, filled)
    assert (caught.value.unfilled, caught.value.unexpected) == (("extra",), ("scale",))
    assert isinstance(caught.value, KeyError)
    assert "strict=False" in str(caught.value)
    del filled["extra"]
    filled["scale"] = torch.zeros(())
    assert digest(filled) == before


def test_one_bad_destination_leaves_all_as_they_were(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    good = {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}
    before = digest(good)
    for bad in (torch.zeros(9, dtype=torch.int64), torch.zeros(7), torch.zeros(7, dtype=torch.int32)):
        with pytest.raises(DestinationError):
            load_into(path, {**good, "steps": bad})
        assert not bad.any()
    assert digest(good) == before


def test_a_resolver(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    made: dict[str, torch.Tensor] = {}

    def resolve(entry: Entry) -> Any:
        if entry.dtype != "F32":
            return None
        made[entry.name] = torch.zeros(entry.shape)
        return [made[entry.name]] if entry.name == "scale" else made[entry.name]

    report = load_into(path, resolve)
    assert digest(made) == digest({name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.float32})
    assert set(report.declined) == {name for name, tensor in tensors.items() if tensor.dtype != torch.float32}
    assert report.unexpected == ()
    with pytest.raises(DestinationTypeError, match="a mapping from names or a resolver"):
        load_into(path, [torch.zeros(1)])  # type: ignore[call-overload]


def test_several_targets_of_one_tensor_and_one_fused_destination(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    fused = torch.zeros(128, 64)
    halves = [np.zeros((128, 64), np.float32), np.zeros((128, 64), np.float32)]
    report = load_into(
        path,
        {
            "layers.0.q": fused[:64],
            "layers.1.q": fused[64:],
            "layers.0.mlp.up": [Target(halves[0], np.s_[:128]), Target(halves[1], np.s_[128:])],
        },
        strict=False,
    )
    assert torch.equal(fused, torch.cat([tensors["layers.0.q"], tensors["layers.1.q"]]))
    assert np.array_equal(np.concatenate(halves), tensors["layers.0.mlp.up"].numpy())
    assert report.filled == ("layers.0.mlp.up", "layers.0.q", "layers.1.q")
    assert report.staged_bytes == 0


def test_two_parts_of_one_whole_destination_are_no_aliases(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, _ = saved
    square = torch.zeros(64, 64)
    with pytest.raises(DestinationError, match="overlap"):
        load_into(
            path,
            {
                "layers.0.mlp.up": Target(square, np.s_[:64]),
                "layers.1.mlp.up": Target(square, np.s_[64:128]),
            },
            strict=False,
        )


def test_cast(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    filled: dict[str, torch.Tensor] = {
        name: torch.zeros_like(tensor, dtype=torch.bfloat16 if tensor.is_floating_point() else None)
        for name, tensor in tensors.items()
    }
    with pytest.raises(DestinationTypeError, match="cast=True"):
        load_into(path, filled)
    report = load_into(path, filled, cast=True)
    for name, tensor in tensors.items():
        assert torch.equal(filled[name], tensor.to(filled[name].dtype)), name
    assert report.staged_bytes == sum(t.nbytes for t in tensors.values() if t.dtype == torch.float32)


def test_a_pending_load(saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    path, tensors = saved
    gate = threading.Event()
    whole = host.read_at

    def slow(fd: int, offset: int, pieces: Any, enough: int) -> int:
        gate.wait(30)
        return whole(fd, offset, pieces, enough)

    monkeypatch.setattr(host, "read_at", slow)
    filled = zeros(tensors)
    pending = load_into(path, filled, wait=False)
    assert isinstance(pending, Pending)
    assert not pending.done()
    with pytest.raises(TimeoutError, match="still under way"):
        pending.wait(0.01)
    gate.set()
    report = pending.wait()
    assert isinstance(report, LoadReport)
    assert pending.done()
    assert pending.wait() is report
    assert digest(filled) == digest(tensors)


def test_a_pending_load_validates_at_once_and_fails_in_wait(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tensors = saved
    with pytest.raises(StrictError):
        load_into(path, {}, wait=False)
    with pytest.raises(OptionError):
        load_into(path, {}, strict=False, wait=False, backend="mmap")

    def fail(fd: int, offset: int, pieces: Any, enough: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(host, "read_at", fail)
    pending = load_into(path, zeros(tensors), wait=False)
    for _ in range(2):
        with pytest.raises(StorageError, match="Input/output error"):
            pending.wait()


def test_closing_the_reader_does_not_harm_a_pending_load(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tensors = saved
    gate = threading.Event()
    whole = host.read_at

    def slow(fd: int, offset: int, pieces: Any, enough: int) -> int:
        gate.wait(30)
        return whole(fd, offset, pieces, enough)

    monkeypatch.setattr(host, "read_at", slow)
    before = len(os.listdir("/proc/self/fd"))
    filled = zeros(tensors)
    with safe_open(path) as reader:
        pending = reader.load_into(filled, wait=False)
    gate.set()
    assert isinstance(pending, Pending)
    pending.wait()
    assert digest(filled) == digest(tensors)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_forgotten_pending_load_completes(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    filled = zeros(tensors)
    load_into(path, filled, wait=False)
    for thread in threading.enumerate():
        if thread.name == "dlpack-loader-transfer":
            thread.join()
    assert digest(filled) == digest(tensors)


class Tied(torch.nn.Module):
    """An embedding whose weight is the head's too, a buffer, and a frozen and a trained parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 4)
        self.head = torch.nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(4)


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight", None])
def test_load_model_with_tied_weights(tmp_path: Path, kept: str | None) -> None:
    torch.manual_seed(3)
    source, model = Tied(), Tied()
    tensors = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    if kept is not None:
        del tensors["head.weight" if kept == "embed.weight" else "embed.weight"]
    save(tmp_path / "m.safetensors", tensors)
    pointers = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    report = load_model(model, tmp_path / "m.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name]), name
        assert tensor.data_ptr() == pointers[name]
    assert model.head.weight is model.embed.weight
    first, other = (kept, "head.weight" if kept == "embed.weight" else "embed.weight") if kept else (None, None)
    assert report.aliases == ({other: first} if kept else {"head.weight": "embed.weight"})
    assert report.bytes_written == sum(
        tensor.nbytes for name, tensor in tensors.items() if name != "head.weight" or kept
    )


def test_load_model_fills_the_buffers_that_a_module_saves(tmp_path: Path) -> None:
    """Scalars among them. A buffer that is not saved is none of the checkpoint's business, on either side."""

    def make(value: float) -> torch.nn.Module:
        module = torch.nn.Module()
        module.norm = torch.nn.BatchNorm1d(3)
        module.get_buffer("norm.num_batches_tracked").fill_(int(value))
        module.register_buffer("steps", torch.full((2,), value))
        module.register_buffer("scratch", torch.full((2,), value), persistent=False)
        return module

    path = tmp_path / "m.safetensors"
    source, model = make(7.0), make(1.0)
    buffers = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    save(path, source.state_dict())
    report = load_model(model, path)
    assert report.filled == tuple(sorted(source.state_dict()))
    assert (report.unfilled, report.unexpected, report.aliases) == ((), (), {})
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == buffers
    for name, buffer in source.named_buffers():
        assert torch.equal(model.get_buffer(name), torch.ones(2) if name == "scratch" else buffer), name
    save(path, {**source.state_dict(), "scratch": torch.zeros(2)})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(StrictError) as caught:
        load_model(model, path)
    assert (caught.value.unfilled, caught.value.unexpected) == ((), ("scratch",))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert load_model(model, path, strict=False).unexpected == ("scratch",)
    assert torch.equal(model.get_buffer("scratch"), torch.ones(2))


def test_load_model_reports_every_name_of_a_tie(tmp_path: Path) -> None:
    """Of three names and a checkpoint with two of them, the first that it has fills all; a missing tie is unfilled."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in ("a", "b", "c", "d")})
    for name in ("b", "c"):
        model[name].weight = model["a"].weight
    save(tmp_path / "m.safetensors", {"b.weight": torch.ones(2, 2), "c.weight": torch.ones(2, 2)})
    report = load_model(model, tmp_path / "m.safetensors", strict=False)
    assert report.aliases == {"a.weight": "b.weight", "c.weight": "b.weight"}
    assert (report.filled, report.unfilled) == (("b.weight",), ("d.weight",))
    assert torch.equal(model.get_parameter("a.weight"), torch.ones(2, 2))
    with pytest.raises(StrictError) as caught:
        load_model(model, tmp_path / "m.safetensors")
    assert (caught.value.unfilled, caught.value.unexpected) == (("d.weight",), ())


def test_load_model_refuses_what_does_not_fit(tmp_path: Path) -> None:
    save(tmp_path / "m.safetensors", {"weight": torch.ones(2, 2)})
    path = tmp_path / "m.safetensors"
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(StrictError) as caught:
        load_model(linear, path)
    assert caught.value.unfilled == ("bias",)
    assert load_model(linear, path, strict=False).unfilled == ("bias",)
    assert torch.equal(linear.weight, torch.ones(2, 2))
    with torch.device("meta"):
        empty = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(DestinationError, match="to_empty"):
        load_model(empty, path)
    with pytest.raises(DestinationTypeError, match="no state_dict"):
        load_model(object(), path)  # type: ignore[arg-type]


def test_autograd_notices_a_load(tmp_path: Path) -> None:
    """What backward had saved is gone: torch must say so instead of computing with the new values."""
    save(tmp_path / "m.safetensors", {"weight": torch.ones(3)})
    weight = torch.nn.Parameter(torch.full((3,), 2.0))
    loss = (weight * weight).sum()
    load_into(tmp_path / "m.safetensors", {"weight": weight.detach()})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_notices_a_load_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "m.safetensors", {"weight": torch.ones(3)})
    weight = torch.zeros(3)
    before = weight._version
    monkeypatch.setattr(host, "read_at", lambda fd, offset, pieces, enough: enough - 1)
    with pytest.raises(StorageError):
        load_into(tmp_path / "m.safetensors", {"weight": weight})
    assert weight._version > before


def test_a_fault_in_a_reversed_read_names_its_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "m.safetensors", {"a": torch.zeros(8), "weight": torch.ones(300, 3)})
    monkeypatch.setattr(host, "read_at", lambda fd, offset, pieces, enough: 0)
    for index in (np.s_[::-1], np.s_[::-2, ::-1], np.s_[::-7]):
        filled = np.zeros(np.empty((300, 3))[index].shape, np.float32)
        with safe_open(tmp_path / "m.safetensors") as reader, pytest.raises(StorageError) as caught:
            reader.read_into("weight", filled, index)
        assert caught.value.tensor == "weight"


def test_sizes_that_no_framework_can_count(tmp_path: Path) -> None:
    write_raw(tmp_path / "m.safetensors", {"x": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}}, b"")
    for framework in ("pt", "np"):
        with pytest.raises(UnsupportedError, match=r"no tensor can be made of shape \[0, 9223372036854775808\]"):
            load_file(tmp_path / "m.safetensors", framework)


def test_a_reader_as_source(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    with safe_open(path, threads=1) as reader:
        for _ in range(3):
            filled = zeros(tensors)
            load_into(reader, filled)
            assert digest(filled) == digest(tensors)
        with pytest.raises(OptionError, match="options of its own"):
            load_into(reader, zeros(tensors), threads=2)


def test_an_exception_of_the_callback_ends_the_load(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    filled = zeros(tensors)

    def stop(done: int, total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough") as caught:
        load_into(path, filled, progress=stop)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dlpack-loader")]
    notes = getattr(caught.value, "__notes__", [])
    assert notes == [] or "load again before use" in notes[0]


INTERRUPT = """
import os, signal, sys, threading, time
import numpy as np
import dlpack_loader
from dlpack_loader.runtime import host
whole = host.read_at
def slow(fd, offset, pieces, enough):
    if threading.current_thread() is threading.main_thread():
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)
    return whole(fd, offset, pieces, enough)
host.read_at = slow
reader = dlpack_loader.safe_open(sys.argv[1], "np")
filled = {name: np.zeros(reader.entry(name).nbytes, np.uint8) for name in reader}
try:
    reader.load_into({n: dlpack_loader.Target(b, reinterpret=True) for n, b in filled.items()})
except KeyboardInterrupt as error:
    assert not [t for t in threading.enumerate() if t is not threading.main_thread()]
    print("interrupted", error.__notes__[0].split(";")[1].split(":")[0])
"""


def test_an_interrupt_drains_and_names_the_damage(tmp_path: Path) -> None:
    save(tmp_path / "m.safetensors", {f"t{k}": torch.randint(0, 9, (3 << 20,), dtype=torch.uint8) for k in range(9)})
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT, tmp_path / "m.safetensors"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("interrupted  load again before use\n", "")


PEAK = """
import sys
import numpy as np
import dlpack_loader
path, staging, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
reader = dlpack_loader.safe_open(path, "np", staging_bytes=staging, direct_io=how == "direct")
entry = reader.entry("big")
if how == "cast":
    import ml_dtypes
    buffer = np.ones(entry.shape, ml_dtypes.bfloat16)
elif how == "strided":
    buffer = np.ones((entry.shape[0], entry.shape[1] // 2), np.float32)
else:
    buffer = np.ones(entry.shape, np.float32)
small = np.ones(4, np.float32)
reader.read_into("small", small)
open("/proc/self/clear_refs", "w").write("5")
def status(key):
    return int(open("/proc/self/status").read().split(key)[1].split()[0]) * 1024
before = status("VmRSS:")
if how == "strided":
    reader.read_into("big", dlpack_loader.Target(buffer, np.s_[:, ::2]))
else:
    reader.load_into({"big": buffer, "small": small}, cast=how == "cast")
print(status("VmHWM:") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak on Linux only")
@pytest.mark.parametrize("how", ["plain", "direct", "cast", "strided"])
def test_the_peak_is_bounded_however_large_a_tensor_is(tmp_path: Path, how: str) -> None:
    """A tensor of 200 MB through 8 MiB of staging; 16 MiB are allowed for everything else."""
    path = tmp_path / "m.safetensors"
    save(path, {"big": torch.zeros(25_000, 2000), "small": torch.zeros(4)})
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    staging = 8 << 20
    done = subprocess.run(
        [sys.executable, "-c", PEAK, path, str(staging), how], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr == ""
    assert int(done.stdout) < staging + (16 << 20)
