"""Load formats for vLLM: ``dlpack`` and ``dlpack_sharded_state``.

vLLM finds them by itself where this package is installed beside it::

    vllm serve MODEL --load-format dlpack --model-loader-extra-config '{"threads": 4}'

``dlpack`` hands the weight loaders of vLLM's models lazy tensors, so that they read straight into the parameters, each
rank its own part. Weights of experts that live on other ranks are not read at all. ``dlpack_sharded_state`` fills the
parameters from the files that each rank wrote, see :func:`dlpack_loader.load_sharded_state`; unlike vLLM's own
``sharded_state``, which warns and converts, it refuses a file of another dtype, and nothing is written before every
tensor was found and checked.

Both take ``backend``, ``staging_bytes``, ``threads``, ``direct_io`` and ``require_direct`` of
:func:`dlpack_loader.safe_open`, and of vLLM's own options ``enable_weights_track`` and ``pattern``, respectively.
``dlpack`` also takes ``deferred``: a model is then read by one plan when all of its weights were handed out, see
:meth:`dlpack_loader.Reader.deferring`. That needs a model that runs no kernels of its own on weights while it loads;
where vLLM quantizes while loading, reads are not deferred. Reloading in place never defers.

What was read, and how, is logged as INFO by the logger of this module. vLLM shows such messages of others only where
its ``VLLM_LOGGING_CONFIG_PATH`` says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from copy import copy
from importlib import import_module
from string import Formatter
from typing import Any

from dlpack_loader.errors import MissingDependencyError, OptionError, UnsupportedError
from dlpack_loader.header import Entry
from dlpack_loader.integrations.reporting import Options
from dlpack_loader.load import module_tensors
from dlpack_loader.reader import DEFAULT_STAGING_BYTES, Reader, safe_open
from dlpack_loader.sharded import load_sharded_state

__all__ = ["plugin", "register"]

logger = logging.getLogger(__name__)

_OPENING = ("backend", "staging_bytes", "threads", "direct_io", "require_direct")
_DEFAULTS = ("auto", DEFAULT_STAGING_BYTES, None, None, False)
_LOADERS = "vllm.model_executor.model_loader"


def plugin() -> None:
    """Register the load formats where vLLM allows it; the entry point in the group ``vllm.general_plugins``.

    vLLM does not start when a plugin of it raises, whatever load format is asked for. So a vLLM that these formats do
    not fit is left as it is, with a warning that says why.
    """
    try:
        register()
    except UnsupportedError as error:
        logger.warning("the load formats dlpack and dlpack_sharded_state are not available: %s", error)


def register() -> None:
    """Register the load formats ``dlpack`` and ``dlpack_sharded_state`` with vLLM, in this process.

    Registering again replaces them by the same.

    Raises
    ------
    MissingDependencyError
        vLLM is not installed.
    UnsupportedError
        This vLLM has not what the loaders build on; the message names it.
    """
    register_model_loader = _seam(_LOADERS, "register_model_loader")
    default = _seam(_LOADERS, "DefaultModelLoader", "_prepare_weights", "_get_weights_iterator", "load_weights")
    sharded = _seam(_LOADERS, "ShardedStateLoader", "_render_default_pattern", "_get_default_pattern", "load_weights")
    should_skip_weight = _seam(f"{_LOADERS}.ep_weight_filter", "should_skip_weight")
    ranks = {
        "tp": _seam("vllm.distributed", "get_tensor_model_parallel_rank"),
        "pp": _seam("vllm.distributed", "get_pipeline_model_parallel_rank"),
    }
    register_model_loader("dlpack")(_default_loader(default, should_skip_weight))
    register_model_loader("dlpack_sharded_state")(_sharded_loader(sharded, ranks))


def _default_loader(base: Any, should_skip_weight: Any) -> Any:
    """Make the loader of the format ``dlpack`` from vLLM's DefaultModelLoader."""

    class DlpackModelLoader(base):  # type: ignore[misc] # a class of vLLM's, known when it is registered
        counter_before_loading_weights: float

        def __init__(self, load_config: Any) -> None:
            ours = (*_OPENING, "deferred")
            config, self._options = _split(load_config, "auto", ours=ours, theirs="enable_weights_track")
            strategy = getattr(config, "safetensors_load_strategy", None)
            if strategy not in (None, "lazy", "torchao"):
                raise OptionError(
                    f"safetensors_load_strategy {strategy!r} says how vLLM reads files, which the load format dlpack "
                    "does in its own way",
                    hint="Leave it out, or use another load format",
                )
            self._deferred = self._options.pop("deferred", False)
            self._loading: ExitStack | None = None
            self._deferring = False
            super().__init__(config)

        def load_weights(self, model: Any, model_config: Any) -> None:
            # What is entered by the iterator is left when the model has all of its weights, and not before.
            with ExitStack() as loading:
                self._loading = loading
                self._deferring = self._deferred and not _quantizes_while_loading(model)
                try:
                    super().load_weights(model, model_config)
                finally:
                    self._loading, self._deferring = None, False

        def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, Any]]:
            # Only what names the files is vLLM's; its other filters drop files to spare reading them, which lazy
            # tensors do by themselves.
            _, files, are_safetensors, *_ = self._prepare_weights(
                source.model_or_path,
                source.subfolder,
                source.revision,
                source.fall_back_to_pt,
                source.allow_patterns_overrides,
            )
            if not are_safetensors or getattr(self.load_config, "safetensors_load_strategy", None) == "torchao":
                logger.info("%s: left to vLLM, not safetensors or serialized by torchao", source.model_or_path)
                yield from super()._get_weights_iterator(source)
                return
            unused = getattr(source, "is_unused_weight", None)

            def wanted(entry: Entry) -> bool:
                skipped = should_skip_weight(entry.name, self.local_expert_ids)
                return not (skipped or (unused is not None and unused(entry.name)))

            if self.counter_before_loading_weights == 0.0:  # vLLM logs the seconds since then
                self.counter_before_loading_weights = time.perf_counter()
            with ExitStack() as iterating:
                kept = iterating if self._loading is None else self._loading
                reader = kept.enter_context(safe_open(files, **self._options))
                kept.callback(_log_counters, reader)
                if self._deferring:
                    kept.enter_context(reader.deferring())
                for name, lazy in reader.iter_lazy(wanted):
                    yield source.prefix + name, lazy

    return DlpackModelLoader


def _sharded_loader(base: Any, ranks: dict[str, Any]) -> Any:
    """Make the loader of the format ``dlpack_sharded_state`` from vLLM's ShardedStateLoader."""

    class DlpackShardedStateLoader(base):  # type: ignore[misc] # a class of vLLM's, known when it is registered
        def __init__(self, load_config: Any) -> None:
            config, self._options = _split(load_config, "sharded_state", ours=_OPENING, theirs="pattern")
            super().__init__(config)

        def load_weights(self, model: Any, model_config: Any) -> None:
            self._render_default_pattern(self.pattern, part=0)  # vLLM refuses patterns that do not fit its ranks
            pattern = self._get_default_pattern() if self.pattern is None else self.pattern
            fields = {field for _, field, _, _ in Formatter().parse(pattern)}
            numbers = {"rank": ranks["tp"], "tp_rank": ranks["tp"], "pp_rank": ranks["pp"]}
            directory = getattr(model_config, "model_weights", None) or model_config.model
            report = load_sharded_state(
                {name: tensor for name, tensor in module_tensors(model).items() if tensor.numel()},  # as they are saved
                directory,
                pattern=self.pattern,
                **{name: number() for name, number in numbers.items() if name in fields},
                **self._options,
            )
            logger.info("%s: %s", directory, report)

    return DlpackShardedStateLoader


def _seam(module: str, name: str, *attributes: str) -> Any:
    """Return something of vLLM's that has the attributes."""
    version = "of an unknown version"
    try:
        version = getattr(import_module("vllm"), "__version__", version)
        found = getattr(import_module(module), name)
        for attribute in attributes:
            name = f"{found.__name__}.{attribute}"
            getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "vllm":
            raise MissingDependencyError("vLLM is not installed", hint="pip install vllm") from error
        raise UnsupportedError(
            f"vLLM {version} has no {module}.{name}, which the load formats build on: {error}",
            hint="Use vLLM 0.33, or another load format",
        ) from error
    return found


def _split(load_config: Any, load_format: str, *, ours: tuple[str, ...], theirs: str) -> tuple[Any, dict[str, Any]]:
    """Take our options out of ``model_loader_extra_config``; return a config for vLLM's loader and what is ours."""
    given = load_config.model_loader_extra_config or {}
    if not isinstance(given, dict):
        raise OptionError(f"model_loader_extra_config is a dict, not {type(given).__name__}")
    if unknown := sorted(map(repr, given.keys() - {*ours, theirs})):
        raise OptionError(
            f"model_loader_extra_config has keys that the load format {load_config.load_format!r} does not know: "
            f"{', '.join(unknown)}",
            hint=f"It takes {', '.join(sorted([*ours, theirs]))}",
        )
    for name in {"deferred", "require_direct"} & given.keys():
        if not isinstance(given[name], bool):
            raise OptionError(f"{name} is true or false, not {given[name]!r}")
    options = Options.make(*map(given.get, _OPENING, _DEFAULTS)).to_open()
    config = copy(load_config)  # vLLM goes on using its own
    config.load_format = load_format
    config.model_loader_extra_config = {theirs: given[theirs]} if theirs in given else {}
    return config, options | {name: given[name] for name in given.keys() & {*ours} - {*_OPENING}}


def _quantizes_while_loading(model: Any) -> bool:
    """Whether kernels run on some weights while others load; torch can't tell that these need their bytes."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return any(getattr(method, "uses_meta_device", False) for method in methods)


def _log_counters(reader: Reader) -> None:
    logger.info("%r, so far: %s", reader, reader.lazy_report())
