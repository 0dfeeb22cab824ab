"""vLLM's load formats, over a stand-in for the parts of vLLM that they build on."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dlpack_loader import Reader, safe_open
from dlpack_loader.errors import (
    DestinationError,
    DestinationTypeError,
    FileChangedError,
    FileMissingError,
    HeaderError,
    MissingDependencyError,
    OptionError,
    StrictError,
    UnsupportedError,
)
from dlpack_loader.filling import fill
from dlpack_loader.integrations import vllm as integration
from dlpack_loader.lazy import LazyReport, LazyTensor, deferred
from dlpack_loader.runtime import host
from dlpack_loader.transfer import LoadReport
from tests import vllm_double as double
from tests.vllm_double import LoadConfig, Model, ModelConfig, World

ALONE = World()
LOGGER = "dlpack_loader.integrations.vllm"
TP = [World(rank, size) for size in (1, 2, 4, 8) for rank in range(size)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in two files, the experts in the second one."""
    weights = double.checkpoint()
    for number, experts in enumerate((False, True), 1):
        part = {name: weight for name, weight in weights.items() if (".experts." in name) is experts}
        save_file(part, tmp_path / f"model-{number:05d}-of-00002.safetensors")
    return tmp_path


def install(patch: pytest.MonkeyPatch, world: World = ALONE) -> ModuleType:
    loaders = double.install(patch, world)
    integration.register()
    return loaders


def loader_of(loaders: ModuleType, load_format: str = "dlpack", **extra: Any) -> Any:
    return loaders.get_model_loader(LoadConfig(load_format, model_loader_extra_config=extra))


def expected(folder: Path, world: World, experts: Iterable[int] = range(double.EXPERTS)) -> Model:
    """The model as its loaders fill it from whole tensors."""
    model = Model(world, experts)
    for path in sorted(folder.glob("*.safetensors")):
        model.load_weights(load_file(path).items())
    return model


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    states = model.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value.view(torch.uint8), states[1][name].view(torch.uint8)), name


def counters(caplog: pytest.LogCaptureFixture) -> list[Any]:
    """The reports that were logged."""
    arguments = (record.args for record in caplog.records if record.name == LOGGER)
    found = (one[-1] for one in arguments if isinstance(one, tuple) and one)
    return [report for report in found if isinstance(report, (LazyReport, LoadReport))]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Every range that is read: name of the file, first byte, byte after the last."""
    found: list[tuple[str, int, int]] = []
    original = host.read_at

    def read_at(fd: int, offset: int, pieces: Any, enough: int) -> int:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        found.append((name, offset, offset + sum(pieces[1::2])))
        return original(fd, offset, pieces, enough)

    monkeypatch.setattr(host, "read_at", read_at)
    return found


def opened_in(folder: Path) -> Reader:
    return safe_open(sorted(map(str, folder.glob("*.safetensors"))))


# Registration


def test_without_vllm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    with pytest.raises(MissingDependencyError, match="vLLM is not installed"):
        integration.register()
    integration.plugin()
    assert "vLLM is not installed" in caplog.text


def test_importing_it_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, dlpack_loader.integrations.vllm; print({'torch', 'vllm'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "name",
    [
        "vllm.distributed",
        "vllm.distributed.get_pipeline_model_parallel_rank",
        "vllm.distributed.get_tensor_model_parallel_rank",
        "vllm.model_executor.model_loader",
        "vllm.model_executor.model_loader.DefaultModelLoader",
        "vllm.model_executor.model_loader.ShardedStateLoader",
        "vllm.model_executor.model_loader.ep_weight_filter.should_skip_weight",
        "vllm.model_executor.model_loader.register_model_loader",
    ],
)
def test_a_vllm_that_lacks_something(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    double.install(monkeypatch, without=name)
    with pytest.raises(UnsupportedError) as caught:
        integration.register()
    assert not isinstance(caught.value, MissingDependencyError)
    assert f"vLLM 0.33.0 has no {name}" in str(caught.value)
    integration.plugin()  # vLLM itself starts
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert name in caplog.text


@pytest.mark.parametrize("method", ["_prepare_weights", "_get_weights_iterator"])
def test_a_vllm_whose_loader_lacks_a_method(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    loaders = double.install(monkeypatch)
    names = {name: value for name, value in vars(double.DefaultModelLoader).items() if name != method}
    monkeypatch.setattr(loaders, "DefaultModelLoader", type("DefaultModelLoader", (double.BaseModelLoader,), names))
    with pytest.raises(
        UnsupportedError, match=rf"has no vllm\.model_executor\.model_loader\.DefaultModelLoader\.{method}"
    ):
        integration.register()


def test_registering_again_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = double.install(monkeypatch)
    with pytest.raises(ValueError, match="not supported"):
        loader_of(loaders)
    integration.plugin()
    integration.plugin()
    assert isinstance(loader_of(loaders), double.DefaultModelLoader)
    assert isinstance(loader_of(loaders, "dlpack_sharded_state"), double.ShardedStateLoader)


# Options


@pytest.mark.parametrize("load_format", ["dlpack", "dlpack_sharded_state"])
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"stagin_bytes": 1}, "'stagin_bytes'"),
        ({"enable_multithread_load": True, "cast": True}, "'cast', 'enable_multithread_load'"),
        ({"staging_bytes": 0}, "staging_bytes must be a positive integer"),
        ({"threads": "4"}, "threads must be a positive integer"),
        ({"backend": "cufile"}, "backend 'cufile' is invalid"),
        ({"backend": "mmap"}, "cannot fill a destination"),
        ({"direct_io": "yes"}, "direct_io is True, False or None"),
        ({"require_direct": 1}, "require_direct is true or false, not 1"),
    ],
)
def test_options_that_make_no_sense(
    monkeypatch: pytest.MonkeyPatch, load_format: str, extra: dict[str, Any], message: str
) -> None:
    loaders = install(monkeypatch)
    with pytest.raises(OptionError, match=message):
        loader_of(loaders, load_format, **extra)


def test_options_of_one_format_only(monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = install(monkeypatch)
    with pytest.raises(OptionError, match="'deferred'"):
        loader_of(loaders, "dlpack_sharded_state", deferred=True)
    with pytest.raises(OptionError, match="'pattern'"):
        loader_of(loaders, pattern="x-{rank}-{part}.safetensors")
    with pytest.raises(OptionError, match="deferred is true or false, not 'yes'"):
        loader_of(loaders, deferred="yes")
    with pytest.raises(OptionError, match="a dict, not list"):
        loaders.get_model_loader(LoadConfig("dlpack", model_loader_extra_config=["threads"]))
    assert loader_of(loaders, enable_weights_track=False).enable_weights_track is False


@pytest.mark.parametrize("strategy", ["eager", "prefetch"])
def test_strategies_of_reading_are_refused(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    loaders = install(monkeypatch)
    with pytest.raises(OptionError, match=f"safetensors_load_strategy '{strategy}'"):
        loaders.get_model_loader(LoadConfig("dlpack", safetensors_load_strategy=strategy))


def test_the_config_of_vllm_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    loaders = install(monkeypatch)
    extra = {"threads": 2, "deferred": True}
    config = LoadConfig("dlpack", model_loader_extra_config=extra)
    loaders.get_model_loader(config).load_weights(Model(), ModelConfig(str(folder)))
    assert config == LoadConfig("dlpack", model_loader_extra_config={"threads": 2, "deferred": True})


def test_options_reach_the_reader(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    given: list[dict[str, Any]] = []

    def opened(source: Any, **options: Any) -> Reader:
        given.append(options)
        return safe_open(source, **options)

    monkeypatch.setattr(integration, "safe_open", opened)
    options: dict[str, Any] = {
        "threads": 2,
        "staging_bytes": 1 << 20,
        "backend": "pread",
        "direct_io": False,
        "require_direct": False,
    }
    loader = loader_of(install(monkeypatch), deferred=False, **options)
    loader.load_weights(Model(), ModelConfig(str(folder)))
    assert given == [options]


# Loading


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("world", TP, ids=lambda world: f"{world.tp_rank}of{world.tp_size}")
def test_every_rank_gets_what_whole_tensors_give(
    monkeypatch: pytest.MonkeyPatch, folder: Path, world: World, deferred: bool
) -> None:
    model = Model(world)
    places = {name: value.data_ptr() for name, value in model.named_parameters()}
    loader = loader_of(install(monkeypatch, world), deferred=deferred)
    loader.load_weights(model, ModelConfig(str(folder)))
    assert_equal(model, expected(folder, world))
    assert {name: value.data_ptr() for name, value in model.named_parameters()} == places


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_together_hold_the_checkpoint(monkeypatch: pytest.MonkeyPatch, folder: Path, size: int) -> None:
    models = []
    for rank in range(size):
        models.append(Model(World(rank, size)))
        loader_of(install(monkeypatch, World(rank, size))).load_weights(models[-1], ModelConfig(str(folder)))
    states = [model.state_dict() for model in models]
    weights = double.checkpoint()
    assert torch.equal(torch.cat([state["column.weight"] for state in states]), weights["column.weight"])
    assert torch.equal(torch.cat([state["down_proj.weight"] for state in states], 1), weights["down_proj.weight"])
    assert torch.equal(torch.cat([state["o_proj.weight"] for state in states], 1), weights["o_proj.weight"])
    queries = torch.cat([state["qkv.weight"][: model.queries] for state, model in zip(states, models, strict=True)])
    assert torch.equal(queries, weights["q_proj.weight"])
    middle = double.MIDDLE // size
    for number, part in enumerate(("gate", "up")):
        found = torch.cat([state["gate_up.weight"][number * middle : (number + 1) * middle] for state in states])
        assert torch.equal(found, weights[f"{part}_proj.weight"])
    rows = models[0].vocabulary
    assert torch.equal(
        torch.cat([state["embed.weight"][:rows] for state in states])[: double.VOCAB], weights["embed.weight"]
    )
    assert not states[-1]["embed.weight"][rows:].any()
    for state in states:
        assert torch.equal(state["qkv.scale"], torch.stack([weights[f"{part}_proj.scale"] for part in "qkv"]))


def test_a_rank_reads_its_part(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture, reads: list[tuple[str, int, int]]
) -> None:
    world = World(1, 2)
    with caplog.at_level(logging.INFO, LOGGER):
        loader_of(install(monkeypatch, world)).load_weights(Model(world), ModelConfig(str(folder)))
    [report] = counters(caplog)
    assert report.materialized == 0
    assert report.direct + report.staged == len(double.checkpoint())
    assert sum(end - begin for _, begin, end in reads) == report.bytes_read
    kept = Model(world)
    padding = (kept.get_parameter("embed.weight").shape[0] - 50) * double.HIDDEN * 2
    assert report.bytes_written == sum(value.nbytes for value in kept.parameters()) - padding


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("local", [{1, 2}, {0, 2}], ids=str)
def test_experts_of_other_ranks_are_not_read(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    reads: list[tuple[str, int, int]],
    local: set[int],
    deferred: bool,
) -> None:
    model = Model(experts=sorted(local))
    loader = loader_of(install(monkeypatch), direct_io=False, deferred=deferred)
    with caplog.at_level(logging.INFO, LOGGER):
        loader.load_weights(model, ModelConfig(str(folder), local_expert_ids=local))
    assert_equal(model, expected(folder, World(), sorted(local)))
    [report] = counters(caplog)
    foreign = 0
    with opened_in(folder) as reader:
        for name in reader:
            entry = reader.entry(name)
            inside = [
                (begin, end)
                for file, begin, end in reads
                if file == os.path.basename(entry.file) and begin < entry.offset + entry.nbytes and end > entry.offset
            ]
            if double.should_skip_weight(name, local):
                assert not inside, name
                foreign += entry.nbytes
            else:
                assert inside, name
        assert report.bytes_read == sum(reader.entry(name).nbytes for name in reader) - foreign
    assert foreign == 2 * 3 * double.MIDDLE * double.HIDDEN * 2


def test_a_file_of_foreign_experts_is_not_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its header is read when the checkpoint is opened; then it could as well be gone."""
    weights = double.checkpoint()
    foreign = {name: value for name, value in weights.items() if double.should_skip_weight(name, {0})}
    save_file({name: value for name, value in weights.items() if name not in foreign}, tmp_path / "a.safetensors")
    save_file(foreign, tmp_path / "b.safetensors")
    loader = loader_of(install(monkeypatch))
    loader.local_expert_ids = {0}
    found = loader.get_all_weights(ModelConfig(str(tmp_path)), Model())
    first = next(found)
    (tmp_path / "b.safetensors").unlink()
    assert {name for name, _ in [first, *found]} == weights.keys() - foreign.keys()


def test_unused_weights_are_left_out(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    model = Model()
    model.is_unused_checkpoint_weight = lambda name: name.startswith("embed")  # type: ignore[assignment]
    loader = loader_of(install(monkeypatch))
    names = {name for name, _ in loader.get_all_weights(ModelConfig(str(folder)), model)}
    assert names == double.checkpoint().keys() - {"embed.weight"}


def test_secondary_weights_and_prefixes(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path_factory: Any) -> None:
    second = tmp_path_factory.mktemp("second")
    (second / "vision").mkdir()
    save_file({"tower.weight": torch.ones(3)}, second / "vision" / "model.safetensors")
    model = Model()
    source = double.DefaultModelLoader.Source(str(second), None, subfolder="vision", prefix="visual.")
    model.secondary_weights = [source]  # type: ignore[assignment]
    found = dict(loader_of(install(monkeypatch)).get_all_weights(ModelConfig(str(folder)), model))
    assert found.keys() == double.checkpoint().keys() | {"visual.tower.weight"}
    assert all(isinstance(value, LazyTensor) for value in found.values())
    assert torch.equal(found["visual.tower.weight"].to("cpu"), torch.ones(3))


@pytest.mark.parametrize("ending", ["bin", "pt"])
def test_other_files_are_left_to_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, ending: str
) -> None:
    weights = double.checkpoint()
    torch.save(weights, tmp_path / f"pytorch_model.{ending}")
    model = Model()
    loader = loader_of(install(monkeypatch), deferred=True)
    with caplog.at_level(logging.INFO, LOGGER):
        loader.load_weights(model, ModelConfig(str(tmp_path)))
    other = Model()
    other.load_weights(weights.items())
    assert_equal(model, other)
    assert "left to vLLM" in caplog.text


def test_torchao_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """vLLM sets the strategy on the config of its loader while it loads."""
    loader = loader_of(install(monkeypatch))
    loader.load_config.safetensors_load_strategy = "torchao"
    for _, weight in loader.get_all_weights(ModelConfig(str(folder)), Model()):
        assert type(weight) is torch.Tensor


def test_vllm_measures_from_the_first_weight(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    loader = loader_of(install(monkeypatch))
    loader.load_weights(Model(), ModelConfig(str(folder)))
    assert 0 < loader.counter_after_loading_weights - loader.counter_before_loading_weights < 60


def test_weights_that_the_checkpoint_lacks_are_named_by_vllm(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    model = Model()
    model.add("extra.weight", (2,), model.load_whole)
    with pytest.raises(ValueError, match=r"not initialized from checkpoint: \{'extra\.weight'\}"):
        loader_of(install(monkeypatch)).load_weights(model, ModelConfig(str(folder)))


# Deferred


class Watched(Model):
    """Looks at its memory, past torch, when it has copied everything."""

    def load_weights(self, weights: double.Weights) -> set[str]:
        memories = [value.detach().view(torch.int16).numpy() for value in self.parameters()]
        before = [memory.copy() for memory in memories]
        loaded = super().load_weights(weights)
        pairs = zip(memories, before, strict=True)
        self.unchanged = sum(bool((memory == old).all()) for memory, old in pairs)
        self.fail()
        return loaded

    def fail(self) -> None:
        """Nothing, here."""


@pytest.mark.parametrize(("deferred", "unchanged"), [(False, 0), (True, 10)])
def test_deferred_reads_come_when_the_model_has_its_weights(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture, deferred: bool, unchanged: int
) -> None:
    """All but the vocabulary, whose padding is set while it loads, are written at the end."""
    model = Watched()
    with caplog.at_level(logging.INFO, LOGGER):
        loader_of(install(monkeypatch), deferred=deferred).load_weights(model, ModelConfig(str(folder)))
    assert model.unchanged == unchanged
    assert_equal(model, expected(folder, World()))
    [report] = counters(caplog)
    assert report.bytes_read == sum(value.nbytes for value in double.checkpoint().values())


def test_deferred_reads_are_one_plan(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    plans: list[int] = []

    def counted(access: Any, found: Any, *rest: Any) -> Any:
        plans.append(len(found.transfers))
        return fill(access, found, *rest)

    monkeypatch.setattr(deferred, "fill", counted)
    model = Model()
    model.vocabulary = double.VOCAB
    loader_of(install(monkeypatch), deferred=True).load_weights(model, ModelConfig(str(folder)))
    assert plans == [len(double.checkpoint())]


def test_deferred_reads_are_dropped_when_the_model_fails(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    model = Watched()

    def fail() -> None:
        raise RuntimeError("no such layer")

    model.fail = fail  # type: ignore[method-assign]
    loader = loader_of(install(monkeypatch), deferred=True)
    with pytest.raises(RuntimeError, match="no such layer"):
        loader.load_weights(model, ModelConfig(str(folder)))
    assert model.unchanged == 10
    assert (model.state_dict()["norm.weight"] == 7).all()
    model.fail = lambda: None  # type: ignore[method-assign]
    loader.load_weights(model, ModelConfig(str(folder)))  # and it can begin again
    assert_equal(model, expected(folder, World()))


def test_nothing_is_deferred_where_vllm_quantizes_while_loading(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    model = Watched()
    norm: Any = model.get_submodule("norm")
    norm.quant_method = SimpleNamespace(uses_meta_device=True)
    loader_of(install(monkeypatch), deferred=True).load_weights(model, ModelConfig(str(folder)))
    assert model.unchanged == 0


def test_a_file_that_changes_under_a_load(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    loader = loader_of(install(monkeypatch))
    path = folder / "model-00002-of-00002.safetensors"

    class Disturbed(Model):
        def load_weights(self, weights: double.Weights) -> set[str]:
            def disturbed() -> Iterator[tuple[str, torch.Tensor]]:
                for number, item in enumerate(weights):
                    if number == 0:
                        path.write_bytes(path.read_bytes())
                    yield item

            return super().load_weights(disturbed())

    with pytest.raises(FileChangedError) as caught:
        loader.load_weights(Disturbed(), ModelConfig(str(folder)))
    assert caught.value.file == str(path)


# Reloading in place


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("world", [World(0, 1), World(1, 2), World(5, 8)], ids=str)
def test_reload_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    reads: list[tuple[str, int, int]],
    world: World,
    deferred: bool,
) -> None:
    """Loaders first run on the meta device; they run again after the iterator ended, and after the files are gone."""
    loaders = install(monkeypatch, world)
    model = Model(world)
    loader_of(loaders, deferred=deferred).load_weights(model, ModelConfig(str(folder)))
    places = {name: value.data_ptr() for name, value in model.named_parameters()}
    for path in folder.glob("*.safetensors"):
        state = {name: weight for name, weight in double.checkpoint(1).items() if name in load_file(path)}
        path.unlink()
        save_file(state, path)
    other = expected(folder, world)

    reads.clear()
    reload = double.Reload(model)
    model.load_weights(loader_of(loaders, deferred=deferred).get_all_weights(ModelConfig(str(folder)), model))
    assert reads == []
    padding = (
        model.get_parameter("embed.weight").shape[0]
        - min(model.vocabulary, double.VOCAB - world.tp_rank * model.vocabulary)
    ) * double.HIDDEN
    assert reload.counted == sum(value.numel() for value in model.parameters()) - padding
    for path in folder.glob("*.safetensors"):
        path.unlink()
    reload.finish()
    assert_equal(model, other)
    assert {name: value.data_ptr() for name, value in model.named_parameters()} == places


def test_reload_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What vLLM does with weights that are in the layout of its kernels."""
    loaders = install(monkeypatch)
    model = nn.Linear(8, 4)
    wanted = {name: torch.randn_like(value) for name, value in model.named_parameters()}
    save_file(wanted, tmp_path / "model.safetensors")
    places = [value.data_ptr() for value in model.parameters()]
    with torch.no_grad():
        for name, weight in loader_of(loaders).get_all_weights(ModelConfig(str(tmp_path)), model):
            model.get_parameter(name).copy_(weight)
    assert all(torch.equal(value, wanted[name]) for name, value in model.named_parameters())
    assert places == [value.data_ptr() for value in model.parameters()]


def test_closing_the_iterator_early_gives_back_the_files(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    loader = loader_of(install(monkeypatch))
    found = loader.get_all_weights(ModelConfig(str(folder)), Model())
    name, lazy = next(found)
    found.close()
    assert torch.equal(lazy.to("cpu"), double.checkpoint()[name])
    del lazy
    assert not [fd for fd in os.listdir("/proc/self/fd") if str(folder) in _link(fd)]


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # the listing's own
        return ""


# Sharded state

GRID = "model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors"


def tied_model(fill: float | None = None) -> nn.Module:
    """A model with a tied weight, a view of a buffer, an empty parameter and a strided one."""
    model = nn.Module()
    model.embed = embed = nn.Linear(6, 9, bias=False)
    model.head = head = nn.Linear(6, 9, bias=False)
    head.weight = embed.weight
    table = torch.randn(4, 5)
    model.register_buffer("table", table)
    model.register_buffer("first_rows", table[:2])
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    model.register_buffer("steps", torch.arange(3))
    if fill is not None:
        with torch.no_grad():
            for value in model.state_dict().values():
                value.fill_(fill)
    return model


@pytest.mark.parametrize(
    ("world", "pattern", "extra"),
    [
        (World(), None, {}),
        (World(1, 2), None, {"threads": 1, "staging_bytes": 1 << 20}),
        (World(1, 2, 2, 3), None, {"backend": "pread", "direct_io": False}),
        (World(1, 2), "mine-{tp_rank}-{part:05d}.safetensors", {}),
        (World(1, 2, 2, 3), "s-{pp_rank}.{rank}.{part}.safetensors", {}),
        (World(), "whole-{part}.safetensors", {}),
        (World(1, 2), GRID.replace("pp-{pp_rank}-", ""), {}),
    ],
)
@pytest.mark.parametrize("max_size", [None, 100])
def test_sharded_state(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    world: World,
    pattern: str | None,
    extra: dict[str, Any],
    max_size: int | None,
) -> None:
    loaders = install(monkeypatch, world)
    saved, model = tied_model(), tied_model(0)
    loaders.ShardedStateLoader.save_model(saved, str(tmp_path), pattern, max_size)
    places = {name: value.data_ptr() for name, value in model.state_dict().items()}
    options = extra if pattern is None else {"pattern": pattern, **extra}
    with caplog.at_level(logging.INFO, LOGGER):
        loader_of(loaders, "dlpack_sharded_state", **options).load_weights(model, ModelConfig(str(tmp_path)))
    assert_equal(model, saved)
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == places
    [report] = counters(caplog)
    assert report.filled == ("embed.weight", "steps", "table")
    assert report.aliases == {"first_rows": "table", "head.weight": "embed.weight"}


def test_options_reach_the_load_of_a_sharded_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are refused where they can't be served, which only a load can tell."""
    loaders = install(monkeypatch)
    loaders.ShardedStateLoader.save_model(tied_model(), str(tmp_path))
    model, before = tied_model(3), tied_model(3)
    with pytest.raises(OptionError, match="'kvikio' fills the memory of a device"):
        loader_of(loaders, "dlpack_sharded_state", backend="kvikio").load_weights(model, ModelConfig(str(tmp_path)))
    assert_equal(model, before)


def test_sharded_state_of_the_weights_of_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaders = install(monkeypatch)
    saved, model = tied_model(), tied_model(0)
    loaders.ShardedStateLoader.save_model(saved, str(tmp_path))
    config = ModelConfig("org/model", model_weights=str(tmp_path))
    loader_of(loaders, "dlpack_sharded_state").load_weights(model, config)
    assert_equal(model, saved)


def test_sharded_state_of_a_padded_parameter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rest is kept, as vLLM keeps it."""
    loaders = install(monkeypatch)
    saved, model = nn.Linear(3, 5), nn.Linear(4, 8)
    loaders.ShardedStateLoader.save_model(saved, str(tmp_path))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loader_of(loaders, "dlpack_sharded_state").load_weights(model, ModelConfig(str(tmp_path)))
    assert torch.equal(model.weight[:5, :3], saved.weight)
    assert torch.equal(model.weight[5:], before["weight"][5:])
    assert torch.equal(model.weight[:, 3:], before["weight"][:, 3:])
    assert torch.equal(model.bias[:5], saved.bias)
    assert torch.equal(model.bias[5:], before["bias"][5:])


def written_otherwise(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        state = {"embed.weight": torch.ones(9, 6), "steps": torch.ones(3).long(), "table": torch.ones(4, 5)}
        change(state)
        save_file(state, folder / "model-rank-0-part-0.safetensors")

    return write


def truncated(folder: Path) -> None:
    written_otherwise(lambda state: None)(folder)
    path = folder / "model-rank-0-part-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (written_otherwise(lambda state: state.pop("table")), StrictError, "2 destination.* without a tensor: .*table"),
        (written_otherwise(lambda state: state.update(more=torch.ones(1))), StrictError, "without a destination: more"),
        (written_otherwise(lambda state: state.update(steps=torch.ones(3).int())), DestinationTypeError, "steps"),
        (written_otherwise(lambda state: state.update(steps=torch.ones(4).long())), DestinationError, "steps"),
        (truncated, HeaderError, "not fully covered.*model-rank-0-part-0"),
        (lambda folder: None, FileMissingError, "no file is named like model-rank-{rank}-part-{part}.safetensors"),
    ],
    ids=["missing", "unexpected", "dtype", "shape", "truncated", "no file"],
)
def test_sharded_state_that_does_not_fit_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    write: Callable[[Path], None],
    error: type[Exception],
    message: str,
) -> None:
    loaders = install(monkeypatch)
    write(tmp_path)
    model, before = tied_model(3), tied_model(3)
    with pytest.raises(error, match=message):
        loader_of(loaders, "dlpack_sharded_state").load_weights(model, ModelConfig(str(tmp_path)))
    assert_equal(model, before)


def test_sharded_state_of_another_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, World(0, 2)).ShardedStateLoader.save_model(tied_model(), str(tmp_path))
    loader = loader_of(install(monkeypatch, World(1, 2)), "dlpack_sharded_state")
    with pytest.raises(FileMissingError, match="no file for rank 1; there are files for rank 0"):
        loader.load_weights(tied_model(), ModelConfig(str(tmp_path)))


@pytest.mark.parametrize(
    ("world", "pattern"),
    [(World(1, 2), "all-{part}.safetensors"), (World(), GRID), (World(), "{layer}-{part}.safetensors")],
)
def test_patterns_that_vllm_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, world: World, pattern: str
) -> None:
    loader = loader_of(install(monkeypatch, world), "dlpack_sharded_state", pattern=pattern)
    with pytest.raises(ValueError, match="Pattern"):
        loader.load_weights(tied_model(), ModelConfig(str(tmp_path)))
