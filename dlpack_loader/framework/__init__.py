"""Frameworks allocate tensors, wrap mapped memory as tensors and name the memory of tensors. One file each.

A framework's module imports that framework at its top, and is imported only when the caller names it or passes one of
its tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

from dlpack_loader.destination import Memory, memory_of_dlpack
from dlpack_loader.dtype import DType
from dlpack_loader.errors import MissingDependencyError, OptionError, UnsupportedError
from dlpack_loader.header import Entry
from dlpack_loader.runtime.device import OF_TORCH
from dlpack_loader.stream import Streams

__all__ = [
    "HOST",
    "Allocation",
    "Framework",
    "Layout",
    "Piece",
    "Place",
    "Spread",
    "describer",
    "framework_named",
    "wrote",
]

HOST = (1, 0)
"""DLPack's name for the CPU."""

_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "pt": "torch",
        "torch": "torch",
        "pytorch": "torch",
        "np": "numpy",
        "numpy": "numpy",
        "cupy": "cupy",
        "jax": "jax",
        "flax": "jax",
    }
)
_LATER = ("mlx", "tf", "tensorflow", "paddle")
_PACKAGES: Mapping[str, str] = MappingProxyType({"cupy": "cupy-cuda13x (or cupy-cuda12x)"})


@dataclass(frozen=True, slots=True)
class Allocation:
    """Fresh memory of a framework, to be filled."""

    value: Any
    """The tensor or array that is handed out once it is full."""
    memory: Memory | None = None
    """Its bytes, where they are in host memory."""
    raw: Any = None
    """Its bytes, where they are on a device: one dimension of uint8. Every release of every framework exports that
    through DLPack, which makes our stream wait for what the allocator's last user of the memory had pending."""
    finish: Callable[[], None] | None = None
    """To be called when the memory is full and before the value is handed out."""


class Piece(NamedTuple):
    """A part of a tensor that gets memory of its own, on one device."""

    box: tuple[tuple[int, int], ...]
    """Where it begins and where it ends in each dimension, in elements."""
    device: tuple[int, int]


class Spread(NamedTuple):
    """The pieces that one tensor is made of."""

    pieces: tuple[Piece, ...]
    """What is to be read, each range once."""
    join: Callable[[tuple[int, ...], Sequence[Any]], Any]
    """Makes the tensor: takes the shape that its memory would have in one piece, and the full value of each piece."""


Layout: TypeAlias = Callable[[Entry, DType, tuple[int, ...]], Spread]
"""Says how a tensor is spread, given its entry, its dtype and its shape in elements: where a framework's tensors may
lie on several devices, or each on another. It raises, before anything is read, what can't be."""

Place: TypeAlias = tuple[int, int] | Layout
"""One device, as DLPack's type and number; or a layout."""


class Framework(Protocol):
    """What the loader needs of a framework; the module of its name has one function for each."""

    def resolve_device(self, device: object) -> Place:
        """Return the DLPack type and number of a device as its users spell it, or a layout; ``HOST`` is the CPU.

        Raises
        ------
        OptionError
            No device is spelled so, or there is none of that number.
        UnsupportedError
            Tensors can't be made there by this version, or by this build of the framework.
        DeviceError
            The framework finds no such device, or no driver.
        """

    def empty(self, dtype: DType, shape: tuple[int, ...], unit: int, device: tuple[int, int], /) -> Allocation:
        """Allocate for a selection of ``shape`` units of ``unit`` bytes each, on a device that was resolved.

        For a layout, on the device of a piece; the value is what ``Spread.join`` takes.
        """

    def wrap(self, array: Any, dtype: DType, shape: tuple[int, ...]) -> Any | None:
        """View host bytes (a NumPy array of uint8 that owns them) as a tensor, or None when only a copy would do."""

    def describe(self, value: Any) -> Memory | None:
        """Name the memory of a tensor of this framework, checked for writing; None for anything else."""

    def wrote(self, values: Iterable[Any]) -> None:
        """Tell the framework that tensors were written behind its back."""


def framework_named(name: object) -> Framework:
    """Return the framework of that name, as safetensors spells them.

    Raises
    ------
    OptionError
        No such framework.
    UnsupportedError, MissingDependencyError
        Not served by this version; not installed, or broken.
    """
    if not isinstance(name, str) or (name not in _ALIASES and name not in _LATER):
        raise OptionError(f"framework {name} is invalid", hint=f"Use one of {', '.join(_ALIASES)}")
    if name in _LATER:
        raise UnsupportedError(
            f"framework {name!r} is not served by this version", hint='Load with framework="np" and convert'
        )
    try:
        module: Any = import_module(f"dlpack_loader.framework.{_ALIASES[name]}")
    except ModuleNotFoundError as error:
        package = error.name or _ALIASES[name]
        raise MissingDependencyError(
            f"framework {name!r} needs the package {package}, which is not installed",
            hint=f"pip install {_PACKAGES.get(package, package)}",
        ) from error
    except ImportError as error:
        why = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise MissingDependencyError(
            f"framework {name!r} can't be imported: {why}",
            hint=f"Install its package anew ({_PACKAGES.get(_ALIASES[name], _ALIASES[name])}); dlpack-loader doctor "
            "says more",
        ) from error
    framework: Framework = module
    return framework


def describer(streams: Streams | None) -> Callable[[Any], Memory]:
    """Return a function that names the memory of a destination and checks that it may be written.

    ``streams`` are those of the load that will write, or None to know the facts only.

    Tensors of frameworks that the process has imported are asked for their address, which takes a tenth of an export
    and checks more; everything else goes through DLPack. Make a new one for each load: it knows what is imported now.
    """
    describers = [framework.describe for framework in _loaded()]

    def describe(destination: Any) -> Memory:
        for named in describers:
            memory = named(destination)
            if memory is not None:
                if streams is not None and memory.device[0] in OF_TORCH:
                    streams.adopt(memory.device, memory.owner)
                return memory
        return memory_of_dlpack(destination, streams)

    return describe


def wrote(destinations: Iterable[Any]) -> None:
    """Tell the frameworks that destinations were written behind their back."""
    values = list(destinations)
    for framework in _loaded():
        framework.wrote(values)


def _loaded() -> list[Framework]:
    """Frameworks that the process has imported: an object of any other can't exist."""
    return [framework_named(name) for name in ("torch", "numpy", "cupy") if sys.modules.get(name) is not None]
