"""Fixtures for tests that run over the emulated driver.

One process has one driver, which the whole session shares. That works beside tests that import torch's CPU build, which
looks for no libcuda. A test that needs another process (a crash, another environment, a first call that must come
before ``cuInit``) takes ``emulation_folder`` and runs ``subprocess`` with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulation.build import build
from tests.emulation.driver import Driver

__all__ = ["driver", "emulation_folder", "loaded_driver"]


@pytest.fixture(scope="session")
def emulation_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the libraries were built: into ``EMULATION_CACHE`` if that is set, else anew for this session."""
    cache = os.environ.get("EMULATION_CACHE")
    return build(Path(cache) if cache else tmp_path_factory.mktemp("emulation"))


@pytest.fixture(scope="session")
def loaded_driver(emulation_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """The driver of this process. Never as new; tests take ``driver``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROCM_PATH", str(emulation_folder))  # where hip-python looks
        configuration = tmp_path_factory.mktemp("cufile") / "cufile.json"
        configuration.write_text("{}")
        patch.setenv("CUFILE_ENV_PATH_JSON", str(configuration))  # without one, KvikIO's reads on a stream block
        yield Driver.load(emulation_folder)


@pytest.fixture
def driver(loaded_driver: Driver) -> Iterator[Driver]:
    """The driver, as new."""
    loaded_driver.reset()
    yield loaded_driver
    loaded_driver.reset()
