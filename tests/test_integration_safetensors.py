"""Programs that know only safetensors, reading through this package; and torch's own ``load_state_dict``."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError

from dlpack_loader import LoaderError, Reader, load_model, safe_open
from dlpack_loader.errors import FileMissingError, OptionError, StorageError
from dlpack_loader.integrations.patching import StandIn
from dlpack_loader.integrations.safetensors import read_through
from dlpack_loader.lazy import LazyTensor
from dlpack_loader.runtime import host
from tests.files import save, state, write_index

HOST = """
from functools import partial
from safetensors import safe_open
from safetensors.torch import load_file as load, load_model

def names(path, opener=safe_open):
    with opener(path, framework="pt") as file:
        return type(file), file.keys()

def tensors(path, **options):
    with safe_open(path, framework="pt", **options) as file:
        return type(file), {name: file.get_tensor(name) for name in file.keys()}
"""


def program(name: str) -> ModuleType:
    """A module that took its functions of safetensors by name when it was imported."""
    module = ModuleType(name)
    exec(HOST, vars(module))
    sys.modules[name] = module
    return module


@pytest.fixture
def host_program() -> Iterator[ModuleType]:
    module = program("a_program")
    yield module
    del sys.modules["a_program"]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    path = tmp_path / "m.safetensors"
    return path, save(path, part="one")


def functions() -> list[Any]:
    holders = [safetensors, safetensors.torch, safetensors.numpy, import_module("safetensors._safetensors_rust")]
    opening = [vars(module)["safe_open"] for module in holders]
    return [*opening, safetensors.torch.load_file, safetensors.torch.load_model]


def same(found: list[Any], before: list[Any]) -> bool:
    return all(one is other for one, other in zip(found, before, strict=True))


# Tensors


def test_load_file_gives_tensors_as_safetensors_does(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    size = path.stat().st_size
    with read_through() as report:
        found = safetensors.torch.load_file(path)
        twice = safetensors.torch.load_file(str(path), device="cpu")
    assert report.files == (str(path),)
    assert report.passed_on == ()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert type(found[name]) is torch.Tensor
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)
    for tensor in found.values():  # memory of their own
        tensor.view(torch.uint8 if tensor.ndim else tensor.dtype).zero_()
    assert all(torch.equal(twice[name], tensor) for name, tensor in tensors.items())
    assert all(torch.equal(safetensors.torch.load_file(path)[name], tensor) for name, tensor in tensors.items())
    assert path.stat().st_size == size


def test_functions_that_a_program_took_before(
    saved: tuple[Path, dict[str, torch.Tensor]], host_program: ModuleType
) -> None:
    path, tensors = saved
    stock, names = host_program.names(path)
    kept = host_program.safe_open
    with read_through() as report:
        kind, found = host_program.tensors(path)
        assert kind is Reader
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        assert host_program.load(path).keys() == tensors.keys()
        assert report.files == (str(path),)
        # What is kept in a default argument is no module's name; it reads as it did.
        assert host_program.names(path) == (stock, names)
    assert host_program.safe_open is kept
    assert host_program.tensors(path)[0] is stock


def test_a_program_imported_meanwhile_is_left_with_safetensors_own(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    path, _ = saved
    before = functions()
    try:
        with read_through():
            module = program("a_late_program")
            assert module.names(path)[0] is Reader
        assert module.safe_open is before[0]
        assert module.load_model is before[-1]
        # The default argument is the stand-in still, which calls safetensors' own by now.
        assert isinstance(module.names.__defaults__[0], StandIn)
        assert module.names(path)[0] is type(module.safe_open(path, framework="pt"))
    finally:
        del sys.modules["a_late_program"]


def test_slices_metadata_and_options(saved: tuple[Path, dict[str, torch.Tensor]], host_program: ModuleType) -> None:
    path, tensors = saved
    with read_through(staging_bytes=1000, threads=2, direct_io=False) as report:
        with host_program.safe_open(path, "pt", "cpu") as file:
            assert file.metadata() == {"part": "one"}
            part = file.get_slice("layers.0.q")
            assert (part.get_dtype(), part.get_shape()) == ("F32", [64, 64])
            assert torch.equal(part[3:9, ::2], tensors["layers.0.q"][3:9, ::2])
        assert host_program.tensors(path, backend="mmap")[0] is Reader
        with host_program.safe_open(path, framework="pt", backend="pread") as file:
            assert file.backend_info().name == "pread"
            assert torch.equal(file.get_tensor("layers.0.q"), tensors["layers.0.q"])
        with pytest.raises(SafetensorError, match="framework"):
            host_program.safe_open(path, framework="theano")
        with pytest.raises(FileNotFoundError):
            host_program.load(path.with_name("none.safetensors"))
    assert "1 files" in str(report)


def test_numpy(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, _ = saved
    save(path, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(True)})
    stock = safetensors.numpy.load_file(path)
    with read_through() as report:
        found = safetensors.numpy.load_file(path)
    assert report.files == (str(path),)
    for name, array in stock.items():
        assert type(found[name]) is np.ndarray
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
        assert found[name].flags.writeable


FLAX = """
import sys
import numpy as np
import safetensors.flax
from safetensors import safe_open
from dlpack_loader.integrations.safetensors import read_through
path = sys.argv[1]
stock = safetensors.flax.load_file(path)
with read_through() as report:
    found = safetensors.flax.load_file(path)
    with safetensors.safe_open(path, framework="flax") as file:
        found["part"], stock["part"] = file.get_slice("layers.0.q")[3:5, ::2], stock["layers.0.q"][3:5, ::2]
        found["one"], stock["one"] = file.get_tensor("scale"), stock["scale"]
assert report.files == (path,)
assert found.keys() == stock.keys()
for name, array in stock.items():
    assert type(found[name]) is type(array)
    for fact in ("dtype", "shape", "sharding", "committed"):
        assert getattr(found[name], fact) == getattr(array, fact), (name, fact)
    assert np.array_equal(found[name], array), name
print(len(found))
"""


def test_flax(tmp_path: Path) -> None:
    """In a process of its own: JAX warns of every fork from then on."""
    path = tmp_path / "m.safetensors"
    tensors = {name: tensor for name, tensor in state().items() if name != "steps"}  # I64 needs jax_enable_x64
    save(path, tensors)
    done = subprocess.run(
        [sys.executable, "-c", FLAX, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert (done.stdout, done.stderr) == (f"{len(tensors) + 2}\n", "")


def test_frameworks_that_we_lack_are_left_to_safetensors(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = saved
    with read_through() as report, safetensors.safe_open(path, framework="mlx") as file:
        assert not isinstance(file, Reader)
        assert set(file.keys()) == set(tensors)
    assert report.files == ()
    assert report.passed_on == (str(path),)
    assert "1 left to safetensors" in str(report)


# load_model


class Tied(torch.nn.Module):
    """A head whose weight is the embedding's, and a norm with buffers; one buffer is not saved."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, width)
        self.head = torch.nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(width)
        self.register_buffer("scratch", torch.ones(3), persistent=False)


class Stateful(torch.nn.Linear):
    """A module with a state of its own, which it takes as it is given."""

    state: Any = None

    def get_extra_state(self) -> torch.Tensor:
        return torch.arange(3)

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def model_pair(make: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, torch.nn.Module, torch.nn.Module]:
    """A model to save, and two alike to load into."""
    torch.manual_seed(1)
    source = make()
    torch.manual_seed(2)
    first = make()
    torch.manual_seed(2)
    return source, first, make()


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def check_models(found: torch.nn.Module, stock: torch.nn.Module) -> None:
    for ours, theirs in ((found.named_parameters, stock.named_parameters), (found.named_buffers, stock.named_buffers)):
        for (name, tensor), (other, expected) in zip(ours(), theirs(), strict=True):
            assert name == other
            assert type(tensor) is type(expected)
            assert torch.equal(tensor, expected), name


def test_load_model_fills_in_place(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    source, found, stock = model_pair(Tied)
    safetensors.torch.save_model(source, str(path))
    pointers = {name: tensor.data_ptr() for name, tensor in found.state_dict().items()}
    expected = safetensors.torch.load_model(stock, path)
    with read_through() as report:
        assert safetensors.torch.load_model(found, str(path), strict=True, device="cpu") == expected
    check_models(found, stock)
    assert {name: tensor.data_ptr() for name, tensor in found.state_dict().items()} == pointers
    reads = report.reads
    assert reads.materialized == 0
    # The scratch is not saved, and the tied weight is read once.
    assert reads.bytes_written == sum(t.nbytes for n, t in source.state_dict().items() if n != "head.weight")


def listed(model: torch.nn.Module, path: Path, strict: bool) -> str | tuple[list[str], list[str]]:
    """What load_model lists, or the text of its error."""
    try:
        missing, unexpected = safetensors.torch.load_model(model, path, strict=strict)
    except RuntimeError as error:
        return str(error)
    return sorted(missing), sorted(unexpected)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("norm.bias"),
        lambda tensors: tensors.update(more=torch.ones(2)),
        lambda tensors: tensors.update({"head.weight": tensors.pop("embed.weight")}),
        lambda tensors: (tensors.pop("embed.weight"), tensors.update(odd=torch.ones(1))),
    ],
    ids=["missing", "unexpected", "the other name", "a tie without a tensor"],
)
def test_load_model_names_what_is_missing_and_unexpected(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], strict: bool
) -> None:
    """The lists and errors of safetensors; but an error leaves the model as it was."""
    path = tmp_path / "m.safetensors"
    source, found, stock = model_pair(Tied)
    tensors = {name: tensor for name, tensor in source.state_dict().items() if name != "head.weight"}
    change(tensors)
    save(path, tensors)
    before = values(found)
    expected = listed(stock, path, strict)
    with read_through():
        assert listed(found, path, strict) == expected
    if isinstance(expected, str):
        assert all(torch.equal(tensor, before[name]) for name, tensor in found.state_dict().items())
    else:
        check_models(found, stock)


def test_load_model_gives_a_module_its_extra_state_as_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    source, found, _ = model_pair(lambda: Stateful(3, 2))
    safetensors.torch.save_model(source, str(path))
    with read_through():
        safetensors.torch.load_model(found, path)
    assert type(found.state) is torch.Tensor
    assert torch.equal(found.state, torch.arange(3))
    check_models(found, source)


def test_a_file_that_a_hook_of_load_model_opens_is_another(tmp_path: Path) -> None:
    path, other = tmp_path / "m.safetensors", tmp_path / "other.safetensors"
    source, found, _ = model_pair(lambda: torch.nn.Linear(3, 2))
    safetensors.torch.save_model(source, str(path))
    save(other, {"x": torch.ones(2)})
    seen: list[dict[str, torch.Tensor]] = []
    found.register_load_state_dict_pre_hook(lambda *_: seen.append(safetensors.torch.load_file(other)))
    with read_through() as report:
        safetensors.torch.load_model(found, path)
    assert type(seen[0]["x"]) is torch.Tensor
    assert report.files == (str(path), str(other))
    check_models(found, source)


# Faults: nothing of a model that exists is written


def spoil_shape(path: Path) -> None:
    save(path, {**safetensors.torch.load_file(path), "norm.weight": torch.ones(5)})


def spoil_size(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def fill_by_us(model: torch.nn.Module, path: Path) -> None:
    load_model(model, path)


def fill_by_safetensors(model: torch.nn.Module, path: Path) -> None:
    with read_through():
        safetensors.torch.load_model(model, path)


def fill_by_torch(model: torch.nn.Module, path: Path) -> None:
    with safe_open(path) as reader, reader.deferring():
        model.load_state_dict(dict(reader.iter_lazy()), strict=False)


@pytest.mark.parametrize("fill", [fill_by_us, fill_by_safetensors, fill_by_torch])
@pytest.mark.parametrize(
    ("spoil", "expected", "named"),
    [
        (spoil_shape, (RuntimeError, LoaderError), "norm.weight"),
        (os.unlink, (FileMissingError,), "m.safetensors"),
        (spoil_size, (LoaderError,), "m.safetensors"),
    ],
    ids=["wrong shape", "no file", "cut short"],
)
def test_a_fault_leaves_every_byte_as_it_was(
    tmp_path: Path,
    fill: Callable[[torch.nn.Module, Path], None],
    spoil: Callable[[Path], None],
    expected: tuple[type[Exception], ...],
    named: str,
) -> None:
    path = tmp_path / "m.safetensors"
    source, found, _ = model_pair(Tied)
    safetensors.torch.save_model(source, str(path))
    spoil(path)
    before, functions_before = values(found), functions()
    with pytest.raises(expected, match=named):
        fill(found, path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in found.state_dict().items())
    assert same(functions(), functions_before)


@pytest.mark.parametrize("lost", ["shard", "tail"])
def test_a_sharded_checkpoint_with_a_fault_leaves_every_byte_as_it_was(tmp_path: Path, lost: str) -> None:
    source, found, _ = model_pair(Tied)
    tensors = {name: tensor for name, tensor in source.state_dict().items() if name != "head.weight"}
    files = {name: f"m-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        save(tmp_path / file, {name: tensor for name, tensor in tensors.items() if files[name] == file})
    write_index(tmp_path / "m.safetensors.index.json", files)
    before = values(found)
    if lost == "shard":
        (tmp_path / "m-1.safetensors").unlink()
    else:
        os.truncate(tmp_path / "m-1.safetensors", 300)
    with pytest.raises(LoaderError, match=r"m-1\.safetensors"):
        load_model(found, tmp_path)
    with pytest.raises(LoaderError, match=r"m-1\.safetensors"):
        fill_by_torch(found, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in found.state_dict().items())


def test_a_read_that_fails_names_the_tensors_that_may_be_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    source, found, _ = model_pair(Tied)
    safetensors.torch.save_model(source, str(path))
    monkeypatch.setattr(host, "read_at", lambda fd, offset, pieces, enough: enough - 1)
    with pytest.raises(StorageError) as caught:
        fill_by_safetensors(found, path)
    assert str(path) in str(caught.value)
    assert caught.value.dirty


# torch's own load_state_dict


@pytest.mark.parametrize("deferred", [False, True])
def test_load_state_dict_of_lazy_tensors(tmp_path: Path, deferred: bool) -> None:
    path = tmp_path / "m.safetensors"
    source, found, _ = model_pair(Tied)
    save(path, {name: tensor.clone() for name, tensor in source.state_dict().items()})
    pointers = {name: tensor.data_ptr() for name, tensor in found.state_dict().items()}
    with safe_open(path) as reader:
        state = dict(reader.iter_lazy())
        if deferred:
            with reader.deferring():
                result = found.load_state_dict(state)
        else:
            result = found.load_state_dict(state)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert reader.lazy_report().materialized == 0
        del state["norm.bias"]
        state["more"] = reader.lazy("norm.weight")
        with pytest.raises(RuntimeError, match=r"(?s)Missing key.*norm\.bias.*Unexpected key.*more"):
            found.load_state_dict(state)
        result = found.load_state_dict(state, strict=False)
        assert (result.missing_keys, result.unexpected_keys) == (["norm.bias"], ["more"])
    check_models(found, source)
    assert found.get_parameter("head.weight") is found.get_parameter("embed.weight")
    assert {name: tensor.data_ptr() for name, tensor in found.state_dict().items()} == pointers


@pytest.mark.parametrize("frozen", [False, True])
def test_load_state_dict_refuses_to_assign_lazy_tensors(tmp_path: Path, frozen: bool) -> None:
    """A module that kept them would read its weights anew in every operation."""
    path = tmp_path / "m.safetensors"
    source, found, _ = model_pair(Tied)
    found.requires_grad_(not frozen)
    save(path, {name: tensor.clone() for name, tensor in source.state_dict().items()})
    before = values(found)
    with safe_open(path) as reader:
        with pytest.raises(RuntimeError, match="the tensor is lazy") as caught:
            found.load_state_dict(dict(reader.iter_lazy()), assign=True)
        for name in before:
            assert f'"{name}"' in str(caught.value)
        assert not any(isinstance(tensor, LazyTensor) for tensor in found.state_dict().values())
        assert all(torch.equal(tensor, before[name]) for name, tensor in found.state_dict().items())
        found.load_state_dict(reader.get_tensors(), assign=True)  # these are a module's to keep
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in source.state_dict().items())


# The context


def test_leaving_restores_everything() -> None:
    before = functions()
    with read_through():
        assert [one is other for one, other in zip(functions(), before, strict=True)] == [False] * 4 + [True, False]
    assert same(functions(), before)
    with pytest.raises(KeyError), read_through():
        raise KeyError
    assert same(functions(), before)
    with read_through():
        pass


def test_one_context_at_a_time() -> None:
    refused: list[str] = []

    def enter() -> None:
        try:
            with read_through():
                pass
        except OptionError as error:
            refused.append(str(error))

    before = functions()
    with read_through():
        enter()
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        inside = functions()
        assert not same(inside[:1], before[:1])
    assert len(refused) == 2
    assert "already" in refused[0]
    assert same(functions(), before)


def test_what_somebody_else_replaced_meanwhile_is_left(host_program: ModuleType) -> None:
    before = functions()
    with read_through():
        vars(host_program)["load_model"] = "another's"
    assert host_program.load_model == "another's"
    assert same(functions(), before)


def test_options_are_checked_before_anything_is_replaced() -> None:
    before = functions()
    for options, why in (({"backend": "mmap"}, "cannot fill"), ({"threads": 0}, "threads")):
        with pytest.raises(OptionError, match=why), read_through(**options):
            pass
    assert same(functions(), before)


def test_threads_of_a_program(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """load_model on one thread does not change what another one's safe_open gives."""
    path, tensors = saved
    source, found, _ = model_pair(Tied)
    model_path = tmp_path / "model.safetensors"
    safetensors.torch.save_model(source, str(model_path))
    loaded: list[dict[str, torch.Tensor]] = []

    def load() -> None:
        loaded.append(safetensors.torch.load_file(path))

    def meanwhile(*_: Any) -> None:
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()

    found.register_load_state_dict_pre_hook(meanwhile)
    with read_through():
        safetensors.torch.load_model(found, model_path)
    assert all(torch.equal(loaded[0][name], tensor) for name, tensor in tensors.items())
    assert all(type(tensor) is torch.Tensor for tensor in loaded[0].values())
    check_models(found, source)
