"""Fixtures of every test: the emulated driver, loaded once for the whole session."""

from tests.emulation.fixtures import driver, emulation_folder, loaded_driver

__all__ = ["driver", "emulation_folder", "loaded_driver"]
