"""The DLPack capsule ABI, consumer side: an object's ``__dlpack__`` becomes an address with its facts.

Only consuming is done here. Exporting is left to the frameworks, whose C deleters are safe where a Python callback is
not: a consumer that frees while an exception is pending would leak the buffer and lose the exception.

Structures and numbers follow ``dlpack.h`` 1.3 (https://dmlc.github.io/dlpack/latest/c_api.html).
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from dlpack_loader.errors import DestinationBufferError, DestinationTypeError

__all__ = ["IS_COPIED", "READ_ONLY", "SUBBYTE_PADDED", "Capsule", "take"]

READ_ONLY = 1
IS_COPIED = 2
SUBBYTE_PADDED = 4

_MAX_VERSION = (1, 3)
_MAX_NDIM = 64


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


# PyCapsule keeps the pointer of a name, not a copy of it, so these must live as long as any capsule.
_VERSIONED, _VERSIONED_USED = b"dltensor_versioned", b"used_dltensor_versioned"
_LEGACY, _LEGACY_USED = b"dltensor", b"used_dltensor"

_python = ctypes.PyDLL(None)
_is_valid = _python.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_get_pointer = _python.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_set_name = _python.PyCapsule_SetName
_set_name.restype, _set_name.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
# A deleter takes the GIL itself, so it is called without it.
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Capsule:
    """A consumed capsule: the memory's facts, and the one deleter call that is owed for it.

    ``release`` makes that call; doing it twice is fine, and garbage collection or interpreter exit does it too.
    """

    __slots__ = (
        "__weakref__", "_release", "device", "dtype", "flags", "pointer", "shape", "strides", "version"
    )  # fmt: skip

    pointer: int
    """Address of the first element, ``byte_offset`` applied; 0 for memory without bytes, and for fakes."""
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """In elements; None is C-contiguous."""
    dtype: tuple[int, int, int]
    device: tuple[int, int]
    flags: int
    version: tuple[int, int] | None
    """DLPack version, or None for a capsule of before 1.0, which cannot say whether it is read-only."""

    def __init__(self, capsule: object) -> None:
        structure: type[_Managed | _ManagedVersioned]
        if _is_valid(capsule, _VERSIONED):
            name, used, structure = _VERSIONED, _VERSIONED_USED, _ManagedVersioned
        elif _is_valid(capsule, _LEGACY):
            name, used, structure = _LEGACY, _LEGACY_USED, _Managed
        else:
            raise DestinationTypeError("__dlpack__ did not return an unconsumed DLPack capsule")
        address = _get_pointer(capsule, name)
        managed = structure.from_address(address)
        _set_name(capsule, used)
        self._release = weakref.finalize(self, _call_deleter, address, managed.deleter)
        try:
            self._read(managed)
        except BaseException:
            self._release()
            raise

    def _read(self, managed: _Managed | _ManagedVersioned) -> None:
        self.version, self.flags = None, 0
        if isinstance(managed, _ManagedVersioned):
            self.version, self.flags = (managed.major, managed.minor), managed.flags
            if managed.major != 1:
                raise DestinationBufferError(f"DLPack major version {managed.major} is not understood")
        tensor = managed.tensor
        if not 0 <= tensor.ndim <= _MAX_NDIM:
            raise DestinationBufferError(f"a DLPack tensor of {tensor.ndim} dimensions")
        if tensor.ndim and not tensor.shape:
            raise DestinationBufferError("a DLPack tensor without a shape")
        self.shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
        self.strides = tuple(tensor.strides[: tensor.ndim]) if tensor.ndim and tensor.strides else None
        self.pointer = tensor.data + tensor.byte_offset if tensor.data else 0
        self.dtype = (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
        self.device = (tensor.device.type, tensor.device.id)

    def release(self) -> None:
        """Call the deleter, unless that was done."""
        self._release()

    @property
    def alive(self) -> bool:
        """Whether the deleter is still owed."""
        return self._release.alive


def _call_deleter(address: int, deleter: int | None) -> None:
    if deleter:
        _Deleter(deleter)(address)


def take(producer: Any, *, stream: int | None) -> Capsule:
    """Ask a producer for its memory and consume the capsule.

    Parameters
    ----------
    producer
        An object with ``__dlpack__``.
    stream
        The consumer's stream handle, or None for host memory.

    Raises
    ------
    DestinationTypeError
        The object has no ``__dlpack__``, or its ``__dlpack__`` returned something else than a capsule.
    DestinationBufferError
        The producer refused to export, or exports something that DLPack does not allow.
    """
    export = getattr(producer, "__dlpack__", None)
    if export is None:
        raise DestinationTypeError(
            f"{type(producer).__name__} has no __dlpack__", hint="Pass a tensor or array that exports DLPack"
        )
    keywords: dict[str, Any] = {} if stream is None else {"stream": stream}
    try:
        try:
            capsule = export(max_version=_MAX_VERSION, copy=False, **keywords)
        except TypeError:  # a producer of before DLPack 1.0 does not know these keywords
            capsule = export(**keywords)
    except (BufferError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise DestinationBufferError(f"the producer refuses to export its memory: {error}") from error
    return Capsule(capsule)
