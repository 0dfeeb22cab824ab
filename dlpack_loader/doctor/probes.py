"""What is tried in child processes. Each function returns plain facts; see :mod:`dlpack_loader.doctor.children`.

Drivers are asked through ctypes, so that a device is found where no binding of it is installed. No context is made.
"""

from __future__ import annotations

import ctypes
import os
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = [
    "cuda",
    "cuda_binding",
    "cupy",
    "hip",
    "hip_binding",
    "hipfile",
    "jax",
    "kvikio",
    "numpy",
    "torch",
]

_CUDA = ("libcuda.so.1", "nvcuda.dll")
_CUDA_RUNTIME = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")
_HIP = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "amdhip64.dll")
_NAME_BYTES = 256

# CU_DEVICE_ATTRIBUTE_...
_INTEGRATED, _MAJOR, _MINOR = 18, 75, 76
_HIP_INTEGRATED = 20  # hipDeviceAttributeIntegrated


def cuda() -> dict[str, Any]:
    """Ask the CUDA driver for its version and its devices."""
    library, why = _load(_CUDA)
    facts: dict[str, Any] = {"runtime": next((name for name in _CUDA_RUNTIME if _load((name,))[0]), None)}
    if library is None:
        return facts | {"library": None, "why": why}
    facts["library"] = "libcuda"
    number = ctypes.c_int()
    if not library.cuDriverGetVersion(ctypes.byref(number)):
        facts["version"] = number.value
    code = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(number))
    if code:
        name = ctypes.c_char_p()
        named = not library.cuGetErrorName(code, ctypes.byref(name)) and name.value
        return facts | {"code": code, "status": name.value.decode() if named and name.value else f"error {code}"}
    devices = []
    for ordinal in range(number.value):
        device, text, nbytes = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
        library.cuDeviceGet(ctypes.byref(device), ordinal)
        library.cuDeviceGetName(text, _NAME_BYTES, device)
        library.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device)
        values = []
        for attribute in (_MAJOR, _MINOR, _INTEGRATED):
            value = ctypes.c_int()
            library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            values.append(value.value)
        devices.append(
            {
                "name": text.value.decode(errors="replace"),
                "nbytes": nbytes.value,
                "arch": f"{values[0]}.{values[1]}",
                "unified": values[2] != 0,
            }
        )
    return facts | {"devices": devices}


def hip() -> dict[str, Any]:
    """Ask HIP for its version and its devices."""
    folders = [os.environ.get("ROCM_PATH", ""), "/opt/rocm"]
    places = [os.path.join(folder, "lib", name) for folder in folders if folder for name in _HIP]
    library, why = _load((*_HIP, *places))
    if library is None:
        return {"library": None, "why": why}
    facts: dict[str, Any] = {"library": "libamdhip64"}
    number = ctypes.c_int()
    if not library.hipRuntimeGetVersion(ctypes.byref(number)):
        facts["version"] = number.value
    code = library.hipInit(0) or library.hipGetDeviceCount(ctypes.byref(number))
    if code:
        library.hipGetErrorName.restype = ctypes.c_char_p
        name = library.hipGetErrorName(code)
        return facts | {"code": code, "status": name.decode() if name else f"error {code}"}
    archs = _amd_archs()
    devices = []
    for ordinal in range(number.value):
        text, nbytes, unified = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t(), ctypes.c_int()
        library.hipDeviceGetName(text, _NAME_BYTES, ordinal)
        library.hipDeviceTotalMem(ctypes.byref(nbytes), ordinal)
        library.hipDeviceGetAttribute(ctypes.byref(unified), _HIP_INTEGRATED, ordinal)
        devices.append(
            {
                "name": text.value.decode(errors="replace"),
                "nbytes": nbytes.value,
                # The kernel lists all devices; it tells which is which only where HIP hides none of them.
                "arch": archs[ordinal] if len(archs) == number.value else "",
                "unified": unified.value != 0,
            }
        )
    return facts | {"devices": devices}


def cuda_binding() -> dict[str, Any]:
    """Import what the loader talks to the CUDA driver with."""
    from dlpack_loader.runtime import cuda as runtime

    return {"module": runtime.__name__}


def hip_binding() -> dict[str, Any]:
    """Import what the loader talks to HIP with."""
    from dlpack_loader.runtime import hip as runtime

    return {"module": runtime.__name__}


def kvikio() -> dict[str, Any]:
    """Ask KvikIO whether it reads GPU-direct."""
    from dlpack_loader.backend import kvikio as backend

    direct, why = backend.probe()
    return {"direct": direct, "why": why}


def hipfile() -> dict[str, Any]:
    """Ask hipFile whether it reads GPU-direct."""
    from dlpack_loader.backend import hipfile as backend

    direct, why = backend.probe()
    return {"direct": direct, "why": why}


def numpy() -> dict[str, Any]:
    """Import what every load needs."""
    import numpy as np

    import dlpack_loader.runtime.arrays  # noqa: F401 (what copies, casts and compares)

    return {"version": np.__version__}


def torch() -> dict[str, Any]:
    """Import torch and ask it for its devices."""
    framework: Any = import_module("torch")
    available = framework.cuda.is_available()
    return {
        "version": framework.__version__,
        "cuda": framework.version.cuda,
        "hip": framework.version.hip,
        "devices": framework.cuda.device_count() if available else 0,
    }


def jax() -> dict[str, Any]:
    """Import JAX, which checks that jaxlib fits; its backends are left alone, since they take most of a device."""
    framework: Any = import_module("jax")
    return {"version": framework.__version__}


def cupy() -> dict[str, Any]:
    """Import CuPy."""
    framework: Any = import_module("cupy")
    return {"version": framework.__version__, "hip": bool(framework.cuda.runtime.is_hip)}


def _load(names: tuple[str, ...]) -> tuple[Any, str]:
    """Load the first library that there is, or say why none could be loaded."""
    why = ""
    for name in names:
        try:
            return ctypes.CDLL(name), ""
        except OSError as error:
            # The first name is the usual one; a library that is there and broken says more than one that is not.
            if not why or ("No such file" in why and "No such file" not in str(error)):
                why = str(error)
    return None, why


def _amd_archs() -> list[str]:
    """Return the architectures of AMD's GPUs in the kernel's order."""
    archs = []
    for node in sorted(Path("/sys/class/kfd/kfd/topology/nodes").glob("*"), key=lambda path: int(path.name)):
        try:
            lines = (node / "properties").read_text().splitlines()
        except OSError:
            continue
        version = int(next((line.split()[1] for line in lines if line.startswith("gfx_target_version ")), "0"))
        if version:  # a CPU has none
            archs.append(f"gfx{version // 10_000}{version // 100 % 100:x}{version % 100:x}")
    return archs
