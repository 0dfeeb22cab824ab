"""Every exception that the package raises.

Each one is a :class:`LoaderError`, which is a ``safetensors.SafetensorError``, and also the builtin that people already
catch for that kind of fault::

    LoaderError                          safetensors.SafetensorError
    ├── HeaderError                      ValueError        the bytes are not a safetensors header
    ├── CheckpointError                  ValueError        files, index and headers do not fit together
    ├── SourceError                      ValueError        the source is not something that can be opened
    ├── TensorNotFoundError              KeyError          no tensor of that name
    ├── SelectionError                   IndexError        an index that basic indexing does not allow
    ├── MisalignedSelectionError         ValueError        a cut inside a byte of a sub-byte dtype
    ├── OptionError                      ValueError        a bound, device, framework or backend name makes no sense
    ├── DestinationError                 ValueError        a destination that the header does not allow
    │   ├── DestinationTypeError         TypeError         ... because of its dtype or its kind of object
    │   └── DestinationBufferError       BufferError       ... because of its memory: read-only, strided, overlapping
    ├── StrictError                      KeyError          destinations and checkpoint do not name the same tensors
    ├── UnsupportedError                 NotImplementedError   not served by this version or machine
    │   └── MissingDependencyError       ImportError       an optional package is not installed
    ├── DeviceError                      RuntimeError      a device's driver is absent, too old, or failed
    ├── ClosedError                      ValueError        the reader was closed
    └── StorageError                     OSError           the operating system refused; errno and class are kept
        ├── FileMissingError             FileNotFoundError
        ├── FileAccessError              PermissionError
        ├── FileIsDirectoryError         IsADirectoryError
        ├── FileNotDirectoryError        NotADirectoryError
        ├── FileTimeoutError             TimeoutError
        ├── FileChangedError             -                 the file is not the one whose header was read
        └── TruncatedError               EOFError          the file ends before the bytes that its header promises

``str(error)`` says what was wrong, where (file, tensor, offset), and what to do.
"""

from __future__ import annotations

import errno as _errno
from collections.abc import Sequence
from typing import Any

from safetensors import SafetensorError

__all__ = [
    "CheckpointError",
    "ClosedError",
    "DestinationBufferError",
    "DestinationError",
    "DestinationTypeError",
    "DeviceError",
    "FileAccessError",
    "FileChangedError",
    "FileIsDirectoryError",
    "FileMissingError",
    "FileNotDirectoryError",
    "FileTimeoutError",
    "HeaderError",
    "LoaderError",
    "MisalignedSelectionError",
    "MissingDependencyError",
    "OptionError",
    "SelectionError",
    "SourceError",
    "StorageError",
    "StrictError",
    "TensorNotFoundError",
    "TruncatedError",
    "UnsupportedError",
    "few",
    "storage_error",
]


class LoaderError(SafetensorError):
    """Base of every exception of this package.

    Parameters
    ----------
    message
        What was wrong.
    file, tensor, offset
        Where: the path, the tensor's name, the absolute byte offset in the file.
    hint
        What to do about it, one sentence.
    dirty
        Names of the destinations that may hold a mixture of old and new bytes, because the fault came while they were
        being written. An in-place write cannot be undone: load them again before use.

    Attributes
    ----------
    report
        The :class:`dlpack_loader.LoadReport` of a load that ended early, or None where nothing was written: what is
        ``filled``, what ``failed`` (the dirty ones), and what is ``unfilled`` still.
    """

    report: Any = None

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        hint: str | None = None,
        dirty: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.file = file
        self.tensor = tensor
        self.offset = offset
        self.hint = hint
        self.dirty = dirty

    def __str__(self) -> str:
        where = [
            f"{label} {value!r}" if isinstance(value, str) else f"{label} {value}"
            for label, value in (("tensor", self.tensor), ("file", self.file), ("offset", self.offset))
            if value is not None
        ]
        text = self.message + (f" ({', '.join(where)})" if where else "")
        if self.hint:
            text += f". {self.hint}"
        if self.dirty:
            text += f". Partly written, load again before use: {few(list(map(repr, self.dirty)), 8)}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword-only arguments do not pickle by themselves, and loaders run in worker processes.
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(cls: type[LoaderError], message: str, state: dict[str, Any]) -> LoaderError:
    error = cls.__new__(cls, message)
    LoaderError.__init__(error, message)
    error.__dict__.update(state)
    if isinstance(error, StorageError):
        error.errno = state.get("code")
        error.filename = state.get("file")
        error.strerror = message
    return error


class HeaderError(LoaderError, ValueError):
    """The bytes are not a safetensors header.

    ``reason`` is the name of the Rust library's error variant (``"InvalidOffset"``, ``"TensorInvalidInfo"``, ...), or
    ``"DuplicateTensor"`` / ``"EntryForm"`` for the oddities that Rust accepts and this package refuses.
    """

    def __init__(self, message: str, *, reason: str = "", **where: Any) -> None:
        super().__init__(message, **where)
        self.reason = reason

    def __str__(self) -> str:
        return f"Error while deserializing header: {super().__str__()}"


class CheckpointError(LoaderError, ValueError):
    """Files, index and headers do not make one checkpoint; ``problems`` holds every single fault found."""

    def __init__(self, message: str, *, problems: tuple[LoaderError, ...] = (), **where: Any) -> None:
        super().__init__(message, **where)
        self.problems = problems

    def __str__(self) -> str:
        return "\n  - ".join([super().__str__(), *map(str, self.problems)])


class SourceError(LoaderError, ValueError):
    """The source is not a file, a list of files, a directory or an index."""


class _TextKeyError(LoaderError, KeyError):
    """KeyError shows the ``repr`` of its message; these show the message."""

    __str__ = LoaderError.__str__


class TensorNotFoundError(_TextKeyError):
    """The checkpoint has no tensor of that name."""


class StrictError(_TextKeyError):
    """Strict loading: destinations without a tensor (``unfilled``), tensors without a destination (``unexpected``)."""

    def __init__(
        self, message: str, *, unfilled: tuple[str, ...] = (), unexpected: tuple[str, ...] = (), **where: Any
    ) -> None:
        super().__init__(message, **where)
        self.unfilled = unfilled
        self.unexpected = unexpected


class SelectionError(LoaderError, IndexError):
    """An index that NumPy's basic indexing does not allow for that shape."""


class MisalignedSelectionError(LoaderError, ValueError):
    """A selection of a sub-byte dtype (F4, F6) that cuts through a byte."""


class OptionError(LoaderError, ValueError):
    """An argument makes no sense: a bound of zero, an unknown backend, framework or device."""


class DestinationError(LoaderError, ValueError):
    """A destination does not fit the tensor that the header describes; nothing was written."""


class DestinationTypeError(DestinationError, TypeError):
    """The destination's dtype, or the destination itself, is of the wrong type."""


class DestinationBufferError(DestinationError, BufferError):
    """The destination's memory can't be written as asked: read-only, copied, overlapping, on another device."""


class UnsupportedError(LoaderError, NotImplementedError):
    """Not served by this version, or on this machine."""


class MissingDependencyError(UnsupportedError, ImportError):
    """An optional package is needed, and is not installed or can't be imported."""


class DeviceError(LoaderError, RuntimeError):
    """A device's driver is absent, too old, or failed; ``status`` is its own name for what happened, if any."""

    def __init__(self, message: str, *, status: str | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.status = status


class ClosedError(LoaderError, ValueError):
    """The reader was closed. Tensors taken before stay valid."""


class StorageError(LoaderError, OSError):
    """The operating system refused an operation on a file; ``errno`` and the OSError class are kept."""

    def __init__(self, message: str, *, code: int | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.code = code
        self.errno = code
        self.strerror = message
        self.filename = self.file

    def __str__(self) -> str:
        if self.tensor is None and self.offset is None and self.hint is None and not self.dirty and self.file:
            return f"{self.message}: {self.file}"
        return LoaderError.__str__(self)


class FileMissingError(StorageError, FileNotFoundError):
    """No such file."""


class FileAccessError(StorageError, PermissionError):
    """Permission denied."""


class FileIsDirectoryError(StorageError, IsADirectoryError):
    """A directory where a file was expected."""


class FileNotDirectoryError(StorageError, NotADirectoryError):
    """A part of the path is not a directory."""


class FileTimeoutError(StorageError, TimeoutError):
    """The storage did not answer in time."""


class FileChangedError(StorageError):
    """The file was replaced or rewritten after its header was read."""


class TruncatedError(StorageError, EOFError):
    """The file ends before the bytes that its header promises."""


def few(names: Sequence[str], most: int) -> str:
    """Name the first of many, and say how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def storage_error(
    code: int | None,
    text: str | None,
    *,
    file: str | None = None,
    tensor: str | None = None,
    offset: int | None = None,
    hint: str | None = None,
) -> StorageError:
    """Make the StorageError of an errno, of the same builtin class that ``OSError(code, ...)`` would have."""
    builtin = type(OSError(code, "")) if code is not None else OSError
    kinds: tuple[type[StorageError], ...] = (
        FileMissingError,
        FileAccessError,
        FileIsDirectoryError,
        FileNotDirectoryError,
        FileTimeoutError,
    )
    cls = next((kind for kind in kinds if builtin is not OSError and issubclass(kind, builtin)), StorageError)
    if hint is None and code == _errno.EMFILE:
        hint = "Raise the limit on open files (ulimit -n)"
    message = text or "I/O error"
    return cls(message, code=code, file=file, tensor=tensor, offset=offset, hint=hint)
