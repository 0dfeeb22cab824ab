"""A stand-in for the parts of vLLM that the load formats build on, and small models with loaders like those of vLLM.

Names, signatures and the order of what happens are those of vLLM 0.33.0, in ``vllm.model_executor.model_loader``
(``register_model_loader``, ``get_model_loader``, ``BaseModelLoader``, ``DefaultModelLoader``, ``ShardedStateLoader``,
``ep_weight_filter.should_skip_weight``), ``vllm.config`` and ``vllm.distributed``. The code is written for these tests.
"""

from __future__ import annotations

import dataclasses
import glob
import inspect
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from string import Formatter
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

Weights = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class World:
    """Where this process stands among those that serve one model."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1


@dataclass
class LoadConfig:
    """What of ``vllm.config.load.LoadConfig`` loaders look at."""

    load_format: str = "auto"
    download_dir: str | None = None
    safetensors_load_strategy: str | None = None
    model_loader_extra_config: Any = field(default_factory=dict)
    device: str | None = None
    ignore_patterns: list[str] | str = field(default_factory=lambda: ["original/**/*"])
    use_tqdm_on_load: bool = True
    pt_load_map_location: str | dict[str, str] = "cpu"


@dataclass
class ModelConfig:
    """What of ``vllm.config.ModelConfig`` loaders look at."""

    model: str
    revision: str | None = None
    model_weights: str = ""
    quantization: str | None = None
    local_expert_ids: set[int] | None = None
    """Of this double only: vLLM computes these from its parallel configuration."""


class BaseModelLoader(ABC):
    """The interface of loaders."""

    def __init__(self, load_config: LoadConfig):
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: ModelConfig) -> None:
        raise NotImplementedError

    @abstractmethod
    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        raise NotImplementedError


def should_skip_weight(weight_name: str, local_expert_ids: set[int] | None) -> bool:
    """Whether a weight is that of an expert of another rank."""
    found = re.search(r"\.experts\.(\d+)\.", weight_name)
    if local_expert_ids is None or found is None or not weight_name.endswith((".weight", ".weight_packed")):
        return False
    return int(found.group(1)) not in local_expert_ids


class DefaultModelLoader(BaseModelLoader):
    """Reads files of any kind, whole tensors at a time."""

    @dataclasses.dataclass
    class Source:
        """Where weights come from."""

        model_or_path: str
        revision: str | None
        subfolder: str | None = None
        prefix: str = ""
        fall_back_to_pt: bool = True
        allow_patterns_overrides: list[str] | None = None
        is_unused_weight: Callable[[str], bool] | None = None

    counter_before_loading_weights: float = 0.0
    counter_after_loading_weights: float = 0.0

    def __init__(self, load_config: LoadConfig):
        super().__init__(load_config)
        self.local_expert_ids: set[int] | None = None
        extra_config = load_config.model_loader_extra_config
        allowed_keys = {"enable_multithread_load", "num_threads", "enable_weights_track"}
        if unexpected_keys := set(extra_config.keys()) - allowed_keys:
            raise ValueError(f"Unexpected extra config keys: {unexpected_keys}")
        self.enable_weights_track: bool | None = extra_config.get("enable_weights_track")

    def _prepare_weights(
        self,
        model_name_or_path: str,
        subfolder: str | None,
        revision: str | None,
        fall_back_to_pt: bool,
        allow_patterns_overrides: list[str] | None,
    ) -> tuple[str, list[str], bool, str]:
        load_format = self.load_config.load_format
        patterns = {"auto": ["*.safetensors", "*.bin"], "safetensors": ["*.safetensors"]}.get(load_format)
        if patterns is None:
            raise ValueError(f"Unknown load_format: {load_format}")
        if fall_back_to_pt and load_format != "safetensors":
            patterns = [*patterns, "*.pt"]
        folder = os.path.join(model_name_or_path, subfolder or "")
        for pattern in allow_patterns_overrides or patterns:
            if files := glob.glob(os.path.join(folder, pattern)):
                return folder, files, pattern.endswith(".safetensors"), "model.safetensors.index.json"
        raise RuntimeError(f"Cannot find any model weights with `{model_name_or_path}`")

    def _get_weights_iterator(self, source: Source) -> Generator[tuple[str, torch.Tensor], None, None]:
        _, files, use_safetensors, _ = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        return ((source.prefix + name, tensor) for name, tensor in self._read(files, use_safetensors))

    def _read(self, files: list[str], use_safetensors: bool) -> Iterable[tuple[str, torch.Tensor]]:
        for path in sorted(files):
            if not use_safetensors:
                yield from torch.load(path, weights_only=True).items()
                continue
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 # it has no iterator
                    if not should_skip_weight(name, self.local_expert_ids):
                        yield name, opened.get_tensor(name)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        primary = DefaultModelLoader.Source(
            model_config.model,
            model_config.revision,
            prefix="",
            fall_back_to_pt=getattr(model, "fall_back_to_pt_during_load", True),
            allow_patterns_overrides=getattr(model, "allow_patterns_overrides", None),
            is_unused_weight=getattr(model, "is_unused_checkpoint_weight", None),
        )
        yield from self._get_weights_iterator(primary)
        for source in getattr(model, "secondary_weights", ()):
            yield from self._get_weights_iterator(source)

    def download_model(self, model_config: ModelConfig) -> None:
        self._prepare_weights(model_config.model, None, model_config.revision, True, None)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        self.local_expert_ids = model_config.local_expert_ids
        loaded: set[str] | None = model.load_weights(self.get_all_weights(model_config, model))  # type: ignore[operator]
        self.counter_after_loading_weights = time.perf_counter()
        track = model_config.quantization is None if self.enable_weights_track is None else self.enable_weights_track
        missing = {name for name, _ in model.named_parameters()} - (loaded or set())
        if track and loaded is not None and missing:
            raise ValueError(f"Following weights were not initialized from checkpoint: {missing}")


class ShardedStateLoader(BaseModelLoader):
    """Reads what each rank wrote."""

    TP_ONLY_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
    PP_AND_TP_PATTERN = "model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors"

    def __init__(self, load_config: LoadConfig):
        super().__init__(load_config)
        extra_config = dict(load_config.model_loader_extra_config or {})
        self.pattern = extra_config.pop("pattern", None)
        if extra_config:
            raise ValueError(f"Unexpected extra config keys: {extra_config.keys()}")

    @staticmethod
    def _get_default_pattern() -> str:
        grid = sys.modules["vllm.distributed"].get_pp_group().world_size > 1
        return ShardedStateLoader.PP_AND_TP_PATTERN if grid else ShardedStateLoader.TP_ONLY_PATTERN

    @staticmethod
    def _render_default_pattern(pattern: str | None = None, *, part: int | str) -> str:
        distributed = sys.modules["vllm.distributed"]
        if pattern is None:
            pattern = ShardedStateLoader._get_default_pattern()
        fields = {name for _, name, _, _ in Formatter().parse(pattern) if name is not None}
        if unsupported := fields - {"pp_rank", "tp_rank", "rank", "part"}:
            raise ValueError(f"Pattern '{pattern}' uses unsupported placeholder(s) {sorted(unsupported)}")
        stages, ranks = distributed.get_pp_group().world_size, distributed.get_tp_group().world_size
        if (stages > 1) != ("pp_rank" in fields) or (ranks > 1 and not {"tp_rank", "rank"} & fields):
            raise ValueError(f"Pattern '{pattern}' does not suit the parallel sizes")
        rank = distributed.get_tensor_model_parallel_rank()
        stage = distributed.get_pipeline_model_parallel_rank()
        return pattern.format(pp_rank=stage, tp_rank=rank, rank=rank, part=part)

    @staticmethod
    def _filter_subtensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Leave out what lies within another tensor; of equal ones the smallest name stays."""

        def reach(tensor: torch.Tensor) -> tuple[int, int]:
            return tensor.data_ptr(), tensor.view(-1)[-1].data_ptr() + tensor.element_size()

        def is_covered(name: str, tensor: torch.Tensor) -> bool:
            low, high = reach(tensor)
            for other, holder in tensors.items():
                if not holder.numel() or not holder.is_contiguous():
                    continue
                begin, end = reach(holder)
                larger = begin < low or high < end or not tensor.is_contiguous()
                if begin <= low and high <= end and (larger or other < name):
                    return True
            return False

        return {name: tensor for name, tensor in tensors.items() if tensor.numel() and not is_covered(name, tensor)}

    def _prepare_weights(self, model_name_or_path: str, revision: str | None) -> str:
        return model_name_or_path

    def download_model(self, model_config: ModelConfig) -> None:
        self._prepare_weights(model_config.model, model_config.revision)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        raise AssertionError("the tests have no use for it")

    @staticmethod
    def save_model(model: torch.nn.Module, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        parts: list[dict[str, torch.Tensor]] = [{}]
        for name, tensor in ShardedStateLoader._filter_subtensors(model.state_dict()).items():
            if (
                max_size is not None
                and parts[-1]
                and sum(t.nbytes for t in parts[-1].values()) + tensor.nbytes > max_size
            ):
                parts.append({})
            parts[-1][name] = tensor
        for number, part in enumerate(parts):
            name = ShardedStateLoader._render_default_pattern(pattern, part=number)
            save_file({key: tensor.contiguous() for key, tensor in part.items()}, os.path.join(path, name))


def install(patch: pytest.MonkeyPatch, world: World = World(), *, without: str = "") -> ModuleType:
    """Put the package among the imported modules, without one of its names; return the module with the loaders."""
    loaders: dict[str, Any] = {"auto": DefaultModelLoader, "sharded_state": ShardedStateLoader}

    def register_model_loader(load_format: str) -> Callable[[Any], Any]:
        def wrapper(model_loader_cls: Any) -> Any:
            if not issubclass(model_loader_cls, BaseModelLoader):
                raise ValueError("The model loader must be a subclass of `BaseModelLoader`.")  # noqa: TRY004
            loaders[load_format] = model_loader_cls
            return model_loader_cls

        return wrapper

    def get_model_loader(load_config: LoadConfig) -> BaseModelLoader:
        if load_config.load_format not in loaders:
            raise ValueError(f"Load format `{load_config.load_format}` is not supported")
        loader: BaseModelLoader = loaders[load_config.load_format](load_config)
        return loader

    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.33.0"},
        "vllm.config": {"LoadConfig": LoadConfig, "ModelConfig": ModelConfig},
        "vllm.distributed": {
            "get_tensor_model_parallel_rank": lambda: world.tp_rank,
            "get_tensor_model_parallel_world_size": lambda: world.tp_size,
            "get_pipeline_model_parallel_rank": lambda: world.pp_rank,
            "get_tp_group": lambda: SimpleNamespace(world_size=world.tp_size, rank_in_group=world.tp_rank),
            "get_pp_group": lambda: SimpleNamespace(world_size=world.pp_size, rank_in_group=world.pp_rank),
        },
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {
            "BaseModelLoader": BaseModelLoader,
            "DefaultModelLoader": DefaultModelLoader,
            "ShardedStateLoader": ShardedStateLoader,
            "get_model_loader": get_model_loader,
            "register_model_loader": register_model_loader,
        },
        "vllm.model_executor.model_loader.ep_weight_filter": {"should_skip_weight": should_skip_weight},
    }
    for name, names in contents.items():
        module = ModuleType(name)
        module.__path__ = []
        module.__dict__.update({key: value for key, value in names.items() if f"{name}.{key}" != without})
        if name != without:
            patch.setitem(sys.modules, name, module)
    return sys.modules.get("vllm.model_executor.model_loader", ModuleType("none"))


# A model whose loaders cut weights as those of vLLM do

HIDDEN, HEADS, KV_HEADS, HEAD, MIDDLE, VOCAB, EXPERTS = 32, 8, 2, 4, 48, 100, 4


def checkpoint(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Weights as they are published: whole, not fused."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,)}
    shapes |= {"q_proj.weight": (HEADS * HEAD, HIDDEN)}
    shapes |= {f"{part}_proj.weight": (KV_HEADS * HEAD, HIDDEN) for part in "kv"}
    shapes |= {f"{part}_proj.scale": () for part in "qkv"}
    shapes |= {"o_proj.weight": (HIDDEN, HEADS * HEAD)}
    shapes |= {f"{part}_proj.weight": (MIDDLE, HIDDEN) for part in ("gate", "up")}
    shapes |= {"down_proj.weight": (HIDDEN, MIDDLE), "column.weight": (MIDDLE, HIDDEN)}
    for expert in range(EXPERTS):
        shapes |= {f"mlp.experts.{expert}.{part}.weight": (MIDDLE, HIDDEN) for part in ("w1", "w3")}
        shapes |= {f"mlp.experts.{expert}.w2.weight": (HIDDEN, MIDDLE)}
        shapes |= {f"mlp.experts.{expert}.w2.scale": ()}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


class Model(nn.Module):
    """One rank's part of a model, with fused and cut parameters."""

    fused: dict[str, tuple[str, Any]] = {  # noqa: RUF012
        **{f"{part}_proj.weight": ("qkv.weight", part) for part in "qkv"},
        **{f"{part}_proj.scale": ("qkv.scale", "qkv".index(part)) for part in "qkv"},
        **{f"{part}_proj.weight": ("gate_up.weight", number) for number, part in enumerate(("gate", "up"))},
    }

    def __init__(self, world: World = World(), experts: Iterable[int] = range(EXPERTS)) -> None:
        super().__init__()
        self.rank, size = world.tp_rank, world.tp_size
        self.experts = list(experts)
        self.queries = HEADS // size * HEAD
        self.keys = max(1, KV_HEADS // size) * HEAD
        self.replicas = max(1, size // KV_HEADS)
        middle = MIDDLE // size
        self.vocabulary = -(-VOCAB // size)
        self.add("embed.weight", (self.vocabulary + 3, HIDDEN), self.load_vocabulary)
        self.add("norm.weight", (HIDDEN,), self.load_whole)
        self.add("qkv.weight", (self.queries + 2 * self.keys, HIDDEN), self.load_qkv)
        self.add("qkv.scale", (3,), self.load_slot)
        self.add("o_proj.weight", (HIDDEN, HEADS * HEAD // size), self.load_row)
        self.add("gate_up.weight", (2 * middle, HIDDEN), self.load_merged)
        self.add("down_proj.weight", (HIDDEN, middle), self.load_row)
        self.add("column.weight", (middle, HIDDEN), self.load_column)
        self.add("mlp.w13.weight", (len(self.experts), 2 * middle, HIDDEN), self.load_expert)
        self.add("mlp.w2.weight", (len(self.experts), HIDDEN, middle), self.load_expert)
        self.add("mlp.w2.scale", (EXPERTS,), self.load_slot)

    def add(self, name: str, shape: tuple[int, ...], loader: Callable[..., None]) -> None:
        *path, leaf = name.split(".")
        module: nn.Module = self
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        parameter: Any = nn.Parameter(torch.full(shape, 7.0, dtype=torch.bfloat16), requires_grad=False)
        parameter.weight_loader = loader
        module.register_parameter(leaf, parameter)

    def load_weights(self, weights: Weights) -> set[str]:
        parameters: dict[str, Any] = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            target, arguments = self.place(name)
            if target is not None:
                parameter = parameters[target]
                parameter.weight_loader(parameter, weight, *arguments)
                loaded.add(target)
        return loaded

    def place(self, name: str) -> tuple[str | None, tuple[Any, ...]]:
        if name in self.fused:
            target, shard = self.fused[name]
            return target, (shard,)
        found = re.fullmatch(r"mlp\.experts\.(\d+)\.(w\d)\.(\w+)", name)
        if found is None:
            return name, ()
        expert, part, kind = int(found[1]), found[2], found[3]
        if kind == "scale":
            return "mlp.w2.scale", (expert,)
        if expert not in self.experts:
            return None, ()
        return ("mlp.w2.weight" if part == "w2" else "mlp.w13.weight"), (part, self.experts.index(expert))

    # Weight loaders: they cut the weight, cut the parameter, compare shapes and copy.

    def load_whole(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        assert param.shape == loaded_weight.shape
        param.data.copy_(loaded_weight)

    def load_column(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        self.load_whole(param, self.cut(loaded_weight, 0, param.shape[0]))

    def load_row(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        self.load_whole(param, self.cut(loaded_weight, 1, param.shape[1]))

    def load_merged(self, param: torch.Tensor, loaded_weight: torch.Tensor, number: int) -> None:
        half = param.shape[0] // 2
        self.load_whole(param.narrow(0, number * half, half), self.cut(loaded_weight, 0, half))

    def load_qkv(self, param: torch.Tensor, loaded_weight: torch.Tensor, part: str) -> None:
        offset = {"q": 0, "k": self.queries, "v": self.queries + self.keys}[part]
        size = self.queries if part == "q" else self.keys
        shard = self.rank if part == "q" else self.rank // self.replicas
        self.load_whole(param.narrow(0, offset, size), loaded_weight.narrow(0, shard * size, size))

    def load_slot(self, param: torch.Tensor, loaded_weight: torch.Tensor, slot: int) -> None:
        self.load_whole(param[slot], loaded_weight)

    def load_vocabulary(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        begin = self.rank * self.vocabulary
        count = min(self.vocabulary, loaded_weight.shape[0] - begin)
        param[:count].data.copy_(loaded_weight.narrow(0, begin, count))
        param[count:].data.fill_(0)

    def load_expert(self, param: torch.Tensor, loaded_weight: torch.Tensor, part: str, expert: int) -> None:
        data = param.data[expert]
        if part == "w2":
            self.load_row(data, loaded_weight)
        else:
            self.load_merged(data, loaded_weight, 0 if part == "w1" else 1)

    def cut(self, weight: torch.Tensor, axis: int, size: int) -> torch.Tensor:
        return weight.narrow(axis, self.rank * size, size)


# Reloading layer by layer, as vLLM's ``reload.layerwise`` does


class CopyCounter(TorchDispatchMode):
    """Counts the elements that loaders copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            assert args[0].numel() == args[1].numel()
            self.copied += args[0].numel()
        return func(*args, **(kwargs or {}))


class Reload:
    """Puts parameters on the meta device, keeps the calls of their loaders, and makes them into new memory later."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.kept: dict[str, Any] = dict(model.named_parameters())
        self.calls: list[tuple[str, Callable[..., None], inspect.BoundArguments]] = []
        self.counted = 0
        for name, parameter in self.kept.items():
            meta: Any = nn.Parameter(parameter.data.to("meta"), requires_grad=False)
            meta.weight_loader = self.keeping(name, parameter.weight_loader)
            self.put(name, meta)

    def put(self, name: str, parameter: nn.Parameter) -> None:
        path, _, leaf = name.rpartition(".")
        self.model.get_submodule(path).register_parameter(leaf, parameter)

    def keeping(self, name: str, loader: Callable[..., None]) -> Callable[..., None]:
        def keep(*args: Any) -> None:
            bound = inspect.signature(loader).bind(*args)
            self.calls.append((name, loader, bound))
            with CopyCounter() as counter:
                loader(*bound.args)
            self.counted += counter.copied

        return keep

    def finish(self) -> None:
        """Load into new memory, then copy into the memory that the parameters had."""
        fresh = {name: torch.zeros_like(parameter) for name, parameter in self.kept.items()}
        for name, loader, bound in self.calls:
            bound.arguments["param"] = fresh[name]
            loader(*bound.args)
        for name, parameter in self.kept.items():
            parameter.data.copy_(fresh[name])
            self.put(name, parameter)
