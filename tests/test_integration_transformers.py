"""The installed transformers, reading through this package: tiny models made here, against its own way of loading."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from dlpack_loader import LoaderError
from dlpack_loader.errors import OptionError, StorageError, UnsupportedError
from dlpack_loader.integrations import safetensors as for_safetensors
from dlpack_loader.integrations.transformers import read_through
from dlpack_loader.lazy import LazyTensor
from dlpack_loader.lazy.parts import PartReader

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
MOE = {**LLAMA, "moe_intermediate_size": 16, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def host() -> Iterator[Any]:
    """transformers, without a network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        transformers = import_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        yield transformers


@pytest.fixture(scope="module")
def saved(host: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """A class and a folder for each kind of checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, tuple[Any, Path]] = {}

    def make(name: str, cls: Any, config: Any, **saving: Any) -> None:
        torch.manual_seed(len(made))
        cls(config).to(saving.pop("dtype", torch.float32)).save_pretrained(folder / name, **saving)
        made[name] = cls, folder / name

    make("llama", host.LlamaForCausalLM, host.LlamaConfig(**LLAMA))
    make("tied", host.LlamaForCausalLM, host.LlamaConfig(**{**LLAMA, "vocab_size": 1024}, tie_word_embeddings=True))
    make("half", host.LlamaForCausalLM, host.LlamaConfig(**LLAMA, dtype="bfloat16"), dtype=torch.bfloat16)
    make("sharded", host.LlamaForCausalLM, host.LlamaConfig(**LLAMA), max_shard_size="20KB")
    make("moe", host.Qwen3MoeForCausalLM, host.Qwen3MoeConfig(**MOE))
    make("moe sharded", host.Qwen3MoeForCausalLM, host.Qwen3MoeConfig(**MOE), max_shard_size="20KB")
    return made


def tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(12).reshape(2, 6)).logits
    return result


def check_equal(found: Any, stock: Any) -> None:
    """Same names, bytes, dtypes, kinds and ties of every parameter and buffer; same logits."""
    ours, theirs = tensors(found), tensors(stock)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert type(ours[name]) is type(tensor), name
        assert (ours[name].dtype, ours[name].device) == (tensor.dtype, tensor.device), name
        assert ours[name].requires_grad == tensor.requires_grad, name
        assert torch.equal(ours[name], tensor), name
    shared = {(a, b) for a in theirs for b in theirs if theirs[a].data_ptr() == theirs[b].data_ptr()}
    assert {(a, b) for a in ours for b in ours if ours[a].data_ptr() == ours[b].data_ptr()} == shared
    assert torch.equal(logits(found), logits(stock))


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("dtype", [None, "auto", torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "tied", "half", "sharded", "moe", "moe sharded"])
def test_a_model_is_the_one_that_transformers_loads(saved: dict[str, Any], name: str, dtype: Any) -> None:
    cls, folder = saved[name]
    options = {} if dtype is None else {"dtype": dtype}
    stock = cls.from_pretrained(folder, **options)
    sources = {key: tensor for file in weight_files(folder) for key, tensor in load_file(file).items()}
    cast = next(stock.parameters()).dtype != next(iter(sources.values())).dtype
    for backend in ("auto", "pread"):
        with read_through(backend=backend) as report:
            found = cls.from_pretrained(folder, **options)
        check_equal(found, stock)
        assert sorted(report.files) == list(map(str, weight_files(folder)))
        reads = report.reads
        count = (reads.direct, reads.staged, reads.materialized, report.mapped)
        if cast:
            assert count == (0, len(sources), 0, 0)
        elif backend == "auto":
            assert count == (0, 0, 0, len(sources))
            assert f"{len(report.files)} files: {len(sources)} mapped" in str(report)
        else:
            assert count == (len(sources), 0, 0, 0)
        assert reads.bytes_read == (0 if report.mapped else sum(tensor.nbytes for tensor in sources.values()))


def test_what_is_mapped_is_memory_of_its_own(saved: dict[str, Any]) -> None:
    """As the tensors of safetensors, which stay when the file goes and are written without it."""
    cls, folder = saved["tied"]
    stock = cls.from_pretrained(folder)
    with read_through():
        found, other = cls.from_pretrained(folder), cls.from_pretrained(folder)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.zero_()
    check_equal(other, stock)
    check_equal(cls.from_pretrained(folder), stock)
    assert open_files(folder) == []


@pytest.mark.parametrize("sequential", [True, False])
def test_the_pool_reads_and_so_does_a_load_without_one(
    saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch, sequential: bool
) -> None:
    """Each tensor is read by the thread that wants it: of the pool, or the caller's own under constraints of memory."""
    cls, folder = saved["moe"]
    stock = cls.from_pretrained(folder)
    if sequential:
        monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    readers: set[threading.Thread] = set()
    copy = PartReader.copy

    def watched(self: PartReader, *args: Any, **kwargs: Any) -> None:
        readers.add(threading.current_thread())
        copy(self, *args, **kwargs)

    monkeypatch.setattr(PartReader, "copy", watched)
    with read_through(backend="pread"):
        found = cls.from_pretrained(folder)
    assert (readers == {threading.main_thread()}) is sequential
    assert (threading.main_thread() in readers) is sequential
    check_equal(found, stock)


@pytest.mark.parametrize("staging_bytes", [1000, 64 << 20])
def test_options_reach_the_reads(saved: dict[str, Any], staging_bytes: int) -> None:
    cls, folder = saved["sharded"]
    stock = cls.from_pretrained(folder, dtype=torch.bfloat16)
    with read_through(backend="pread", staging_bytes=staging_bytes, threads=1, direct_io=False) as report:
        found = cls.from_pretrained(folder, dtype=torch.bfloat16)
    check_equal(found, stock)
    assert report.reads.staged_bytes == report.reads.bytes_read


def test_a_device_map(saved: dict[str, Any], host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A map to one device needs nothing of accelerate, though transformers asks whether it is there."""
    cls, folder = saved["moe"]
    monkeypatch.setattr(import_module("transformers.integrations.accelerate"), "is_accelerate_available", lambda: True)
    stock = cls.from_pretrained(folder, device_map="cpu")
    with read_through(backend="pread") as report:
        found = cls.from_pretrained(folder, device_map="cpu")
    check_equal(found, stock)
    assert report.reads.direct == len(load_file(folder / "model.safetensors"))


def test_other_ways_in_end_as_real_tensors(saved: dict[str, Any], host: Any) -> None:
    """transformers' own ``load_state_dict``, and parts of tensors with nothing said about where to."""
    _, folder = saved["llama"]
    path = folder / "model.safetensors"
    modeling = import_module("transformers.modeling_utils")
    stock = modeling.load_state_dict(path)
    with read_through():
        found = modeling.load_state_dict(path)
        shapes = modeling.load_state_dict(path, map_location="meta")
        with modeling.safe_open(path, framework="pt", device="cpu", backend="mmap") as file:
            assert file.metadata() == {"format": "pt"}
            part = file.get_slice("model.norm.weight")
            assert (part.get_shape(), part.get_dtype()) == ([32], "F32")
            assert isinstance(part[...], LazyTensor)
            assert type(part[...].to("cpu")) is type(part[...].to(torch.float64)) is torch.Tensor
            assert part[...].to(device="meta").is_meta
            stacked = torch.stack([part[...], part[:]])
            with pytest.raises(UnsupportedError, match="lazy"):
                torch.nn.Parameter(part[...])
    assert type(stacked) is torch.Tensor
    for name, tensor in stock.items():
        assert type(found[name]) is torch.Tensor
        assert torch.equal(found[name], tensor)
        assert shapes[name].shape == tensor.shape
        assert shapes[name].is_meta


def test_shards_of_a_tensor_as_transformers_cuts_them(saved: dict[str, Any], host: Any) -> None:
    """Tensor parallelism: each rank reads its own rows or columns, or interleaved groups, of what it indexes."""
    _, folder = saved["llama"]
    sharding = import_module("transformers.distributed.sharding_utils")
    placements = import_module("torch.distributed.tensor.placement_types")
    path, name = folder / "model.safetensors", "model.layers.0.mlp.gate_proj.weight"
    whole = load_file(path)[name]
    rows, columns, groups = (
        placements.Shard(0),
        placements.Shard(1),
        placements._StridedShard(0, split_factor=2),
    )
    mesh = SimpleNamespace(get_local_rank=lambda: 1, size=lambda: 2)
    for placed in (rows, columns, groups):
        operation = object.__new__(sharding.DtensorShardOperation)
        operation.placements, operation.param_ndim, operation._get_sub_mesh = (placed,), 2, lambda _: mesh
        expected = operation.shard_tensor(whole, device="cpu", dtype=torch.bfloat16)
        with (
            read_through() as report,
            import_module("transformers.modeling_utils").safe_open(path, framework="pt") as file,
        ):
            found = operation.shard_tensor(file.get_slice(name), device="cpu", dtype=torch.bfloat16)
        assert type(found) is torch.Tensor
        assert torch.equal(found, expected)
        assert found.numel() == whole.numel() // 2
        if placed is columns:  # short pieces are read with what lies between them
            assert report.reads.bytes_read <= whole.nbytes
        else:
            assert report.reads.bytes_read == whole.nbytes // 2


# Faults


def copy_of(saved: dict[str, Any], name: str, to: Path) -> tuple[Any, Path]:
    cls, folder = saved[name]
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return cls, to


def outcome(load: Callable[[], Any]) -> BaseException:
    """What it raises, without the frames that would keep files open."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 # its class is for the caller to judge
        load()
    return caught.value.with_traceback(None)


def open_files(folder: Path) -> list[str]:
    gc.collect()
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return [file for file in found if file.startswith(str(folder))]


def rewrite(file: Path, name: str, shape: tuple[int, ...]) -> None:
    save_file({**load_file(file), name: torch.ones(shape)}, file, metadata={"format": "pt"})


def test_a_wrong_shape_is_reported_as_transformers_does(saved: dict[str, Any], tmp_path: Path) -> None:
    cls, folder = copy_of(saved, "llama", tmp_path / "model")
    rewrite(folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight", (48, 31))
    stock = outcome(lambda: cls.from_pretrained(folder))
    with read_through():
        found = outcome(lambda: cls.from_pretrained(folder))
    assert type(found) is type(stock) is RuntimeError
    assert str(found) == str(stock)
    # Told to go on, it makes that weight anew, and nothing of the file's is in it.
    torch.manual_seed(5)
    remade = cls.from_pretrained(folder, ignore_mismatched_sizes=True)
    torch.manual_seed(5)
    with read_through():
        found = cls.from_pretrained(folder, ignore_mismatched_sizes=True)
    check_equal(found, remade)


def test_a_shard_that_is_missing(saved: dict[str, Any], tmp_path: Path) -> None:
    cls, folder = copy_of(saved, "sharded", tmp_path / "model")
    lost = weight_files(folder)[1]
    lost.unlink()
    stock = outcome(lambda: cls.from_pretrained(folder))
    with read_through() as report:
        found = outcome(lambda: cls.from_pretrained(folder))
    assert isinstance(found, type(stock))
    assert isinstance(found, OSError)
    assert lost.name in str(found)
    assert report.reads.bytes_read == 0
    assert open_files(folder) == []


def test_a_shard_that_is_cut_short(saved: dict[str, Any], tmp_path: Path) -> None:
    cls, folder = copy_of(saved, "sharded", tmp_path / "model")
    cut = weight_files(folder)[1]
    os.truncate(cut, cut.stat().st_size - 1)
    stock = outcome(lambda: cls.from_pretrained(folder))
    with read_through() as report:
        found = outcome(lambda: cls.from_pretrained(folder))
    assert isinstance(found, type(stock))
    assert isinstance(found, LoaderError)
    assert str(cut) in str(found)
    assert report.reads.bytes_read == 0
    assert open_files(folder) == []


@pytest.mark.parametrize("backend", ["auto", "pread"])
@pytest.mark.parametrize("name", ["sharded", "moe", "tied"])
def test_a_shard_that_is_cut_short_while_it_is_read(
    saved: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, backend: str
) -> None:
    """An error, and no model; where transformers maps what is not there any more, the process ends by SIGBUS."""
    cls, folder = copy_of(saved, name, tmp_path / "model")
    cut = weight_files(folder)[-1]
    modeling = import_module("transformers.modeling_utils")
    place = modeling.convert_and_load_state_dict_in_model

    def late(**given: Any) -> Any:
        os.truncate(cut, cut.stat().st_size - 64)
        return place(**given)

    live = cls.from_pretrained(saved[name][1])
    monkeypatch.setattr(modeling, "convert_and_load_state_dict_in_model", late)
    before = {key: tensor.clone() for key, tensor in tensors(live).items()}
    with read_through(backend=backend):
        found = outcome(lambda: cls.from_pretrained(folder))
    assert isinstance(found, StorageError)
    assert str(cut) in str(found)
    assert all(torch.equal(tensor, before[key]) for key, tensor in tensors(live).items())
    monkeypatch.undo()
    with read_through():
        check_equal(cls.from_pretrained(saved[name][1]), live)


# The context


def openers() -> list[object]:
    return [
        import_module(f"transformers.{name}").safe_open
        for name in ("modeling_utils", "modeling_layers", "integrations.accelerate")
    ]


def test_leaving_restores_everything(host: Any) -> None:
    before = openers()
    with read_through() as report:
        assert [found is stock for found, stock in zip(openers(), before, strict=True)] == [False, False, True]
    assert all(found is stock for found, stock in zip(openers(), before, strict=True))
    assert report.files == ()
    assert report.reads.bytes_read == 0
    with pytest.raises(KeyError), read_through():
        raise KeyError
    assert all(found is stock for found, stock in zip(openers(), before, strict=True))
    with read_through():
        pass


def test_one_context_at_a_time(saved: dict[str, Any]) -> None:
    """A second one has options of its own, which could not hold for some threads only."""
    cls, folder = saved["llama"]
    refused: list[BaseException] = []

    def enter() -> None:
        with read_through():
            pass

    def elsewhere() -> None:
        refused.append(outcome(enter))

    before = openers()
    with read_through() as report:
        with pytest.raises(OptionError, match="already"):
            enter()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert isinstance(refused[0], OptionError)
        found = cls.from_pretrained(folder)
        assert len(report.files) == 1
    assert all(found is stock for found, stock in zip(openers(), before, strict=True))
    check_equal(found, cls.from_pretrained(folder))


@pytest.mark.parametrize("outer", ["transformers", "safetensors"])
def test_together_with_the_context_for_safetensors(saved: dict[str, Any], outer: str) -> None:
    cls, folder = saved["moe"]
    before = openers()
    with contextlib.ExitStack() as stack:
        contexts = [read_through, for_safetensors.read_through]
        reports = [stack.enter_context(context()) for context in contexts[:: 1 if outer == "transformers" else -1]]
        found = cls.from_pretrained(folder)
    mine, other = reports[:: 1 if outer == "transformers" else -1]
    assert (len(mine.files), len(other.files)) == (1, 0)
    assert all(found is stock for found, stock in zip(openers(), before, strict=True))
    check_equal(found, cls.from_pretrained(folder))


@pytest.mark.parametrize("outer", ["transformers", "safetensors"])
def test_contexts_that_are_left_in_the_order_in_which_they_began(saved: dict[str, Any], outer: str) -> None:
    cls, folder = saved["llama"]
    before = [*openers(), safetensors.safe_open]
    first, second = [read_through(), for_safetensors.read_through()][:: 1 if outer == "transformers" else -1]
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    found = cls.from_pretrained(folder)
    second.__exit__(None, None, None)
    assert all(left is stock for left, stock in zip([*openers(), safetensors.safe_open], before, strict=True))
    check_equal(found, cls.from_pretrained(folder))


def test_the_context_for_safetensors_serves_transformers_too(saved: dict[str, Any]) -> None:
    cls, folder = saved["moe sharded"]
    with for_safetensors.read_through() as report:
        found = cls.from_pretrained(folder, dtype=torch.bfloat16)
    assert sorted(report.files) == list(map(str, weight_files(folder)))
    check_equal(found, cls.from_pretrained(folder, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"backend": "mmap"}, "cannot fill"),
        ({"backend": "nvme"}, "nvme"),
        ({"staging_bytes": 0}, "staging_bytes"),
        ({"threads": -1}, "threads"),
        ({"direct_io": "yes"}, "direct_io"),
    ],
)
def test_options_are_checked_before_anything_is_replaced(host: Any, options: dict[str, Any], why: str) -> None:
    before = openers()
    with pytest.raises(OptionError, match=why), read_through(**options):
        pass
    assert all(found is stock for found, stock in zip(openers(), before, strict=True))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda patch: patch.delattr(import_module("transformers.modeling_utils"), "safe_open"),
        lambda patch: patch.delattr(import_module("transformers.core_model_loading"), "GLOBAL_WORKERS"),
        lambda patch: patch.setitem(sys.modules, "transformers.core_model_loading", None),
    ],
    ids=["no opener", "no pool", "no such module"],
)
def test_another_release_is_refused(host: Any, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], None]) -> None:
    """Instead of reading as before, silently."""
    spoil(monkeypatch)
    with pytest.raises(UnsupportedError, match=host.__version__) as caught, read_through():
        pass
    assert "integrations.safetensors" in str(caught.value)


WITHOUT = """
import sys
sys.modules["transformers"] = None
from dlpack_loader.errors import MissingDependencyError
from dlpack_loader.integrations.transformers import read_through
assert "torch" not in sys.modules
try:
    with read_through():
        pass
except MissingDependencyError as error:
    print(error)
"""


def test_without_transformers() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60, check=False)
    assert "transformers, which is not installed" in done.stdout
    assert "pip install transformers" in done.stdout
    assert done.stderr == ""
