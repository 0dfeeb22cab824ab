"""The control functions of ``libemulation.so``, with their types."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_bool, c_char_p, c_int, c_long, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

__all__ = ["Core", "EmulationError", "check", "open_library", "present"]

# ctypes' own classes are generic in the stubs only, so their types are left open here.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "set": (c_int, c_char_p, c_long),
    "get": (c_int, c_char_p, POINTER(c_long)),
    "reset": (None,),
    "function": (c_bool, c_long, POINTER(c_char_p), POINTER(c_long)),
    "fault": (c_void_p, c_char_p, c_long, c_long, c_int, c_int, c_bool, c_long, c_long),
    "fired": (c_long, c_void_p),
    "faultless": (None,),
    "context": (c_bool, c_int, POINTER(c_long), POINTER(c_long), POINTER(c_long)),
    "context_retain": (c_int, c_int),
    "context_release": (c_int, c_int),
    "device_current": (c_int, c_bool),
    "device_bytes": (c_long, c_int),
    "device_synchronize": (c_int, c_int),
    "allocate": (c_int, c_int, c_int, c_size_t, POINTER(c_uint64)),
    "free": (c_int, c_uint64, c_bool),
    "read": (c_int, c_uint64, c_void_p, c_size_t),
    "write": (c_int, c_uint64, c_char_p, c_size_t),
    "find": (c_bool, c_uint64, POINTER(c_uint64), POINTER(c_size_t), POINTER(c_int), POINTER(c_int)),
    "stream_create": (c_int, c_int, c_bool, POINTER(c_void_p)),
    "stream_destroy": (c_int, c_void_p),
    "stream_synchronize": (c_int, c_void_p, c_int),
    "stream_write": (c_int, c_void_p, c_int, c_uint64, c_char_p, c_size_t),
    "stream_pending": (c_long, c_void_p, c_int),
    "stream_hold": (c_int, c_void_p, c_int, c_bool),
    "stream_set_capture": (c_int, c_void_p, c_int, c_int),
    "stream_device": (c_int, c_void_p, c_int),
    "order": (c_int, c_void_p, c_int, c_void_p, c_int),
    "executed": (
        c_bool, c_size_t, POINTER(c_int), POINTER(c_int), POINTER(c_void_p), POINTER(c_uint64), POINTER(c_uint64),
        POINTER(c_size_t),
    ),
    "export": (c_void_p, c_void_p, POINTER(c_void_p)),
    "export_calls": (c_long, c_void_p),
}  # fmt: skip


class EmulationError(RuntimeError):
    """A control function refused: the test asked for something that can't be."""


def check(code: int, what: str) -> None:
    """Raise for a control function that failed."""
    if code:
        raise EmulationError(f"{what}: error {code}")


class Core:
    """``libemulation.so``: ``core.read`` is its ``emulation_read``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, f"emulation_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library so that later look-ups of its name find it."""
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def present(name: str) -> bool:
    """Whether a library of this name is loaded."""
    try:
        ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True
