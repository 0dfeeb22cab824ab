"""When the tests that need a GPU run: in a process of their own, since the other tests' has the emulated driver."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.material import every_dtype


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where it can't run, and say why."""
    reason = None
    if config.option.markexpr != "gpu":
        reason = "needs a GPU and a process without the emulated driver: run tests/gpu/run"
    elif not torch.cuda.is_available():
        reason = "torch finds no CUDA device"
    for item in items:
        if reason is not None and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A file with every dtype, and the bytes of its tensors."""
    return every_dtype(tmp_path_factory.mktemp("gpu"))


@pytest.fixture
def device() -> torch.device:
    """The GPU that torch takes by default."""
    return torch.device("cuda", torch.cuda.current_device())
