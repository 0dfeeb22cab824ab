"""Devices and what talks to them: drivers, bindings, and the libraries that read from storage into device memory."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dlpack_loader.doctor.children import Outcome, State
from dlpack_loader.doctor.findings import Device, Finding, Level
from dlpack_loader.doctor.libraries import Library

__all__ = ["devices_of", "examine_cuda", "examine_rocm"]

_NVIDIA, _AMD = "0x10de", "0x1002"
_OLDEST_CUDA = 12000
_OLDEST_HIP = 60_000_000

_HIDDEN = "Check {tool}, {variable}, and that a container was started with the devices"
_CUDA_REMEDIES: Mapping[int, str] = MappingProxyType(
    {
        34: "A stub of libcuda from the CUDA toolkit hides the driver: take .../stubs out of LD_LIBRARY_PATH",
        100: _HIDDEN.format(tool="nvidia-smi", variable="CUDA_VISIBLE_DEVICES") + " (docker run --gpus all)",
        802: "Start the service nvidia-fabricmanager",
        803: "The kernel's module and libcuda are of different versions: restart the machine after a driver update",
        804: "This device takes no newer libcuda than its kernel module: take the compat folder out of LD_LIBRARY_PATH",
    }
)
_MISSING_LIBRARIES = (
    ("libcufile", "pip install nvidia-cufile, or install cuFile of the CUDA toolkit"),
    ("libhipfile", "Install hipFile of ROCm, and put its folder on the library path (LD_LIBRARY_PATH)"),
    ("libamdhip64", "Install ROCm, and put its folder on the library path (LD_LIBRARY_PATH)"),
)
_GDS_REMEDIES = (
    ("switched on", "Unset KVIKIO_COMPAT_MODE"),
    ("Windows Subsystem", "None on WSL: run on Linux itself"),
    ("/run/udev", "Give it to the container: docker run --volume /run/udev:/run/udev:ro"),
    ("libcufile can't be loaded", "pip install nvidia-cufile, or install cuFile of the CUDA toolkit"),
    ("nvidia-fs", "Install nvidia-gds and load the kernel module: modprobe nvidia-fs"),
    ("HIPFILE_FORCE_COMPAT_MODE", "Unset HIPFILE_FORCE_COMPAT_MODE"),
)


def devices_of(kind: str, outcome: Outcome) -> tuple[Device, ...]:
    """Return the devices that a driver told."""
    return tuple(Device(kind=kind, ordinal=k, **facts) for k, facts in enumerate(outcome.facts.get("devices", ())))


def examine_cuda(outcomes: Mapping[str, Outcome], libraries: Mapping[str, Library]) -> Iterator[Finding]:
    """Judge the CUDA driver, its binding and KvikIO."""
    there = _on_bus(_NVIDIA)
    driver = outcomes["cuda"]
    devices = devices_of("cuda", driver)
    yield _driver(
        "cuda.driver",
        driver,
        _version(driver, 1000, 10) + _kernel_driver(),
        hardware="an NVIDIA GPU" if there else None,
        library="libcuda.so.1",
        install="Install NVIDIA's driver; in a container, start it with the NVIDIA Container Toolkit (--gpus all)",
        remedy=_CUDA_REMEDIES.get(driver.facts.get("code", 0), "See what nvidia-smi says of it, and update the driver"),
        old=0 < driver.facts.get("version", _OLDEST_CUDA) < _OLDEST_CUDA,
    )
    yield from _list(devices)
    runtime = driver.facts.get("runtime")
    yield Finding(
        "cuda.runtime",
        Level.OK,
        f"{runtime} can be loaded" if runtime else "libcudart is not on the library path",
        "not needed: loads go through the driver, and torch, CuPy and JAX bring a runtime of their own",
    )
    yield _binding("cuda.binding", libraries["cuda_binding"], outcomes.get("cuda_binding"), devices)
    yield _direct("cuda.gpu_direct", "GPUDirect Storage", libraries["kvikio"], outcomes.get("kvikio"), devices)


def examine_rocm(outcomes: Mapping[str, Outcome], libraries: Mapping[str, Library]) -> Iterator[Finding]:
    """Judge HIP, its binding and hipFile."""
    there = _on_bus(_AMD)
    driver = outcomes["hip"]
    devices = devices_of("hip", driver)
    remedy = (
        _HIDDEN.format(tool="rocminfo", variable="HIP_VISIBLE_DEVICES")
        + " (docker run --device /dev/kfd --device /dev/dri)"
    )
    if os.path.exists("/dev/kfd") and not os.access("/dev/kfd", os.R_OK | os.W_OK):
        remedy = "/dev/kfd can't be opened: add the user to the groups render and video"
    yield _driver(
        "rocm.driver",
        driver,
        _version(driver, 10_000_000, 100_000),
        hardware="an AMD GPU" if there else None,
        library="libamdhip64.so",
        install="Install ROCm, and set ROCM_PATH where it is not in /opt/rocm",
        remedy=remedy,
        old=0 < driver.facts.get("version", _OLDEST_HIP) < _OLDEST_HIP,
    )
    yield from _list(devices)
    yield _binding("rocm.binding", libraries["hip_binding"], outcomes.get("hip_binding"), devices)
    yield _direct("rocm.gpu_direct", "hipFile", libraries["hipfile"], outcomes.get("hipfile"), devices)


def _driver(
    key: str,
    outcome: Outcome,
    version: str,
    *,
    hardware: str | None,
    library: str,
    install: str,
    remedy: str,
    old: bool,
) -> Finding:
    missed = Level.PROBLEM if hardware else Level.NOTE
    host_only = "loads fill host memory only"
    if outcome.state is not State.WORKED:
        return Finding(key, Level.PROBLEM, f"asking it failed: {outcome.why}", host_only, remedy)
    if outcome.facts["library"] is None:
        why = outcome.facts["why"]
        absent = "No such file" in why or "not found" in why
        value = f"none: {library} is not installed" if absent else f"{library} can't be loaded: {why}"
        if hardware:
            value += f", and the machine has {hardware}"
        return Finding(key, missed if absent else Level.PROBLEM, value, host_only, install)
    if "code" in outcome.facts:
        status = f"{outcome.facts['status']} ({outcome.facts['code']})"
        none = "NO_DEVICE" in status.upper().replace("ERRORNODEVICE", "NO_DEVICE")
        return Finding(key, missed if none else Level.PROBLEM, f"{version}: {status}", host_only, remedy)
    count = len(outcome.facts["devices"])
    if not count:
        return Finding(key, missed, f"{version}, no device", host_only, remedy)
    if old:
        return Finding(key, Level.PROBLEM, version, "too old: loads to its devices are refused", "Update the driver")
    return Finding(key, Level.OK, f"{version}, {count} device(s)", "loads can fill its devices' memory")


def _list(devices: tuple[Device, ...]) -> Iterator[Finding]:
    for device in devices:
        arch = f", compute capability {device.arch}" if device.kind == "cuda" else f", {device.arch}"
        yield Finding(
            f"{'cuda' if device.kind == 'cuda' else 'rocm'}.device.{device.ordinal}",
            Level.OK,
            f"{device.name}, {device.nbytes / (1 << 30):,.1f} GiB{arch if device.arch else ''}",
            "its memory is the host's: what is staged is missing there too"
            if device.unified
            else f'device="cuda:{device.ordinal}" for torch and CuPy',
        )


def _binding(key: str, library: Library, outcome: Outcome | None, devices: tuple[Device, ...]) -> Finding:
    """Judge the package that the loader talks to a driver with."""
    if outcome is None:
        return Finding(
            key,
            Level.PROBLEM if devices else Level.OK,
            f"{library.package} is not installed",
            "the devices can't be loaded to" if devices else "needed for the devices only, of which there are none",
            f"pip install {library.package}" if devices else None,
        )
    if outcome.state is not State.WORKED:
        return Finding(
            key,
            Level.PROBLEM if devices else Level.NOTE,
            f"{library.title} can't be imported: {outcome.why}",
            "the devices can't be loaded to" if devices else "only loads to devices need it",
            f"pip install --force-reinstall {library.package}",
        )
    return Finding(key, Level.OK, library.title, "what loads to its devices go through")


def _direct(key: str, what: str, library: Library, outcome: Outcome | None, devices: tuple[Device, ...]) -> Finding:
    """Judge the library that reads from storage into device memory."""
    staged = "device memory is filled through pinned host memory (pread)"
    broken = Level.PROBLEM if devices else Level.NOTE
    if not devices:
        staged = "there is no device that it could fill"
    if outcome is None:
        return Finding(
            key,
            Level.NOTE if devices else Level.OK,
            f"not possible: {library.name} is not installed",
            staged,
            f"pip install {library.package}, where storage and file system can do it" if devices else None,
        )
    if outcome.state in (State.CRASHED, State.HUNG):
        verb = "crashes" if outcome.state is State.CRASHED else "hangs"
        return Finding(
            key,
            broken,
            f"not possible: {library.title} {verb} when it is imported: {outcome.why}",
            f"a load to a device tries it, and {verb} too" if devices else staged,
            f'Uninstall or reinstall {library.package}; until then pass backend="pread" for devices',
        )
    if outcome.state is not State.WORKED:
        return Finding(
            key,
            broken,
            f"not possible: {library.title} can't be imported: {outcome.why}",
            staged,
            next((text for part, text in _MISSING_LIBRARIES if part in outcome.why), None)
            or f"Reinstall {library.package} for the CUDA or ROCm that is installed, or uninstall it",
        )
    why = outcome.facts["why"]
    if outcome.facts["direct"]:
        return Finding(
            key,
            Level.OK,
            f"possible by {library.title}: {why}",
            'backend="auto" uses it; the file system has to serve it too, which require_direct=True makes sure of',
        )
    remedy = next((text for part, text in _GDS_REMEDIES if part in why), f"See the documentation of {what}")
    if not devices:
        return Finding(key, Level.OK, f"not possible: no device ({library.title}: {why})", staged)
    return Finding(key, Level.NOTE, f"not possible: {why} ({library.title})", staged, remedy)


def _version(outcome: Outcome, major: int, minor: int) -> str:
    number: Any = outcome.facts.get("version")
    if not number:
        return "version not told"
    return f"version {number // major}.{number % major // minor}"


def _kernel_driver() -> str:
    """Return the version of NVIDIA's kernel module, as it is known to people, where there is one."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
    words = [word for word in line.split() if word[0].isdigit() and "." in word]
    return f" (driver {words[0]})" if words else ""


def _on_bus(vendor: str) -> bool:
    """Whether a display controller or accelerator of a vendor is in the machine; False where that is not told."""
    if platform.system() != "Linux":
        return False
    for folder in Path("/sys/bus/pci/devices").glob("*"):
        try:
            if (folder / "vendor").read_text().strip() == vendor and (folder / "class").read_text()[:4] in (
                "0x03",
                "0x12",
            ):
                return True
        except OSError:
            continue
    return False
