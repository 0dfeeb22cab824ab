"""The packages that a load may use: what is installed, of what version, and whether it can be imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from dlpack_loader import __version__
from dlpack_loader.doctor.children import Outcome, State
from dlpack_loader.doctor.findings import Device, Finding, Level

__all__ = ["LIBRARIES", "Library", "examine_packages", "find_libraries"]


@dataclass(frozen=True, slots=True)
class Library:
    """One package, looked up without importing it."""

    name: str
    """As its makers write it."""
    module: str
    packages: tuple[str, ...]
    """Names that it is installed under; the first one is what to install."""
    version: str | None = None
    """Of what is installed, as its metadata says."""
    installed: bool = False

    @property
    def package(self) -> str:
        """What to install."""
        return self.packages[0]

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}" if self.version else self.name


LIBRARIES: tuple[tuple[str, Library], ...] = (
    ("numpy", Library("NumPy", "numpy", ("numpy",))),
    ("torch", Library("torch", "torch", ("torch",))),
    ("jax", Library("JAX", "jax", ("jax",))),
    ("cupy", Library("CuPy", "cupy", ("cupy-cuda13x", "cupy-cuda12x", "cupy-rocm-7-0", "cupy"))),
    ("cuda_binding", Library("cuda-bindings", "cuda", ("cuda-bindings",))),
    ("hip_binding", Library("rocm-bindings-hip", "rocm", ("rocm-bindings-hip",))),
    ("kvikio", Library("KvikIO", "kvikio", ("kvikio-cu13", "kvikio-cu12", "kvikio"))),
    ("hipfile", Library("hipFile", "hipfile", ("hipfile",))),
)
"""What is tried in child processes, by the name of its probe."""

_PURPOSES = MappingProxyType(
    {
        "safetensors": "every error here is one of its errors",
        "msgspec": "reads the headers",
        "ml_dtypes": "NumPy and JAX arrays of BF16, FP8 and FP4 need it",
    }
)
_PLAIN = (
    Library("safetensors", "safetensors", ("safetensors",)),
    Library("msgspec", "msgspec", ("msgspec",)),
    Library("ml_dtypes", "ml_dtypes", ("ml_dtypes",)),
)
_SHARED = ("cuda", "rocm")  # packages that several distributions have a part of
_GIVES = {
    "torch": 'framework="pt" and load_model',
    "jax": 'framework="jax"',
    "cupy": 'framework="cupy"',
}


def find_libraries() -> dict[str, Library]:
    """Look up every package, without importing any."""
    return {name: _look_up(library) for name, library in LIBRARIES}


def _look_up(library: Library) -> Library:
    found = None
    for package in library.packages:
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        break
    return replace(library, version=found, installed=found is not None or _is_there(library.module))


def _is_there(module: str) -> bool:
    """Whether a module could be imported, without importing it; one that is no distribution counts too."""
    if module in _SHARED:
        return False
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a module that was put where none belongs
        return True


def examine_packages(
    outcomes: Mapping[str, Outcome], libraries: Mapping[str, Library], devices: tuple[Device, ...]
) -> Iterator[Finding]:
    """Judge what loads into memory of a framework need."""
    yield Finding("packages.dlpack_loader", Level.OK, f"dlpack_loader {__version__}", "this package")
    for plain in map(_look_up, _PLAIN):
        missing = not plain.installed
        yield Finding(
            f"packages.{plain.module}",
            Level.NOTE if missing else Level.OK,
            f"{plain.name} is not installed" if missing else plain.title,
            _PURPOSES[plain.module],
            f"pip install {plain.package}" if missing else None,
        )
    for name, required in (("numpy", True), ("torch", False), ("jax", False), ("cupy", False)):
        yield _framework(name, libraries[name], outcomes.get(name), devices, required=required)


def _framework(
    name: str, library: Library, outcome: Outcome | None, devices: tuple[Device, ...], *, required: bool
) -> Finding:
    key, gives = f"packages.{name}", _GIVES.get(name, "")
    if outcome is None:
        wanted = name == "torch" or (name == "cupy" and any(device.kind == "cuda" for device in devices))
        return Finding(
            key,
            Level.PROBLEM if required else Level.NOTE if wanted else Level.OK,
            f"{library.name} is not installed",
            "every load needs it" if required else f"{gives} need it" if " and " in gives else f"{gives} needs it",
            f"pip install {library.package}" if required or wanted else None,
            blocking=required,
        )
    if outcome.state is not State.WORKED:
        ways = {State.CRASHED: "crashes when it is imported", State.HUNG: "hangs when it is imported"}
        how = ways.get(outcome.state, "can't be imported")
        return Finding(
            key,
            Level.PROBLEM,
            f"{library.title} {how}: {outcome.why}",
            "every load needs it" if required else f"{gives} fail" if " and " in gives else f"{gives} fails",
            f"pip install --force-reinstall {library.package}, in a fresh environment if that does not help",
            blocking=required,
        )
    facts = outcome.facts
    if name == "torch":
        return _torch(key, outcome, devices)
    build = " for ROCm" if facts.get("hip") else ""
    return Finding(key, Level.OK, f"{library.title}{build}", f"{gives} works" if gives else "every load needs it")


def _torch(key: str, outcome: Outcome, devices: tuple[Device, ...]) -> Finding:
    """Judge torch: whether its build reaches the devices that the drivers know."""
    facts = outcome.facts
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "the CPU only"
    value = f"torch {facts['version']}, built for {build}"
    if facts["devices"]:
        return Finding(key, Level.OK, f"{value}, finds {facts['devices']} device(s)", "loads to the CPU and to them")
    if not devices:
        return Finding(key, Level.OK, value, "loads to the CPU")
    if not facts["cuda"] and not facts["hip"]:
        remedy = "Install a build of torch for CUDA or ROCm (https://pytorch.org/get-started)"
    else:
        remedy = "Install a build of torch that fits the driver, or update the driver"
    return Finding(key, Level.NOTE, f"{value}, finds no device", 'device="cuda" is refused by torch', remedy)
