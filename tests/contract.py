"""What tests of every backend share: files from pieces, guarded memory on the host and on devices, and a gate."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from dlpack_loader.dtype import BY_CODE, DTYPES, DLDataType, DType
from tests.device_room import GUARD
from tests.files import write_raw

__all__ = ["DATA", "MIB", "Gate", "Guarded", "HostMemory", "Memory", "Piece", "piece", "write"]

MIB = 1 << 20
DATA = random.Random(11).randbytes(13 * MIB)
_TORCH = {dtype.dlpack: dtype.torch for dtype in DTYPES if dtype.torch}


class Memory(Protocol):
    """Memory that tensors lie in, whosever."""

    def tensor(
        self, shape: tuple[int, ...], dtype: DLDataType = ..., *, byte_offset: int = 0, strides: Any = None
    ) -> Any: ...

    def read(self) -> bytes: ...

    def fill(self, value: int) -> None: ...


class HostMemory:
    """Torch's, with the interface of ``DeviceMemory``."""

    def __init__(self, nbytes: int) -> None:
        self.storage = torch.zeros(nbytes, dtype=torch.uint8)

    def tensor(
        self,
        shape: tuple[int, ...],
        dtype: DLDataType = (1, 8, 1),
        *,
        byte_offset: int = 0,
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """A view of the whole storage, with a storage offset."""
        size = dtype[1] * dtype[2] // 8
        name = _TORCH[dtype]
        whole = self.storage[: len(self.storage) // size * size].view(getattr(torch, name))
        if strides is None:
            strides = tuple(math.prod(max(n, 1) for n in shape[axis + 1 :]) for axis in range(len(shape)))
        return whole.as_strided(shape, strides, byte_offset // size)

    def read(self) -> bytes:
        return self.storage.numpy().tobytes()

    def fill(self, value: int) -> None:
        self.storage.fill_(value)


@dataclass(frozen=True)
class Piece:
    """A tensor of a file."""

    code: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def dtype(self) -> DType:
        return BY_CODE[self.code]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of its destinations."""
        return self.dtype.dlpack[1] * self.dtype.dlpack[2] // 8

    @property
    def held_shape(self) -> tuple[int, ...]:
        """The shape of its destinations: sub-byte elements are packed along the last axis."""
        if not self.shape:
            return ()
        return (*self.shape[:-1], self.shape[-1] * self.dtype.bits // (8 * self.element_bytes))


def piece(code: str, *shape: int, at: int = 0) -> Piece:
    """Make a tensor of bytes that are nowhere twice."""
    nbytes = math.prod(shape) * BY_CODE[code].bits // 8
    assert at + nbytes <= len(DATA)
    return Piece(code, shape, DATA[at : at + nbytes])


def write(path: Path, pieces: Mapping[str, Piece], header_length: int | None = None) -> Path:
    """Write a file whose data is in the order of the pieces, with a header of that length modulo 4096."""
    entries: dict[str, Any] = {}
    at = 0
    for name, one in pieces.items():
        entries[name] = {"dtype": one.code, "shape": one.shape, "data_offsets": [at, at + len(one.data)]}
        at += len(one.data)
    header = json.dumps(entries).encode()
    if header_length is not None:
        header += b" " * ((header_length - len(header)) % 4096)
    return write_raw(path, header, b"".join(one.data for one in pieces.values()))


class Guarded:
    """Destinations of pieces in one memory, between guard bytes and at offsets of its own.

    Parameters
    ----------
    dtype
        Of the destinations, where it is not the pieces' own.
    shift
        Bytes by which every one is off a multiple of ``GUARD``.
    """

    def __init__(
        self,
        allocate: Callable[[int], Memory],
        pieces: Mapping[str, Piece],
        *,
        dtype: Callable[[Piece], DLDataType] = lambda piece: piece.dtype.dlpack,
        shift: int = 0,
    ) -> None:
        self.pieces = pieces
        self.places: dict[str, int] = {}
        at = GUARD + shift
        for name, one in pieces.items():
            self.places[name] = at
            at += (len(one.data) + GUARD) // GUARD * GUARD + GUARD
        self.memory = allocate(at)
        self.memory.fill(0xA5)
        self.tensors = {
            name: self.memory.tensor(one.held_shape, dtype(one), byte_offset=self.places[name])
            for name, one in pieces.items()
        }

    def check(self, filled: Collection[str] | None = None, *, dirty: Collection[str] = ()) -> None:
        """Check every byte: of those that were filled (all, if not said), those that were not, and the guards."""
        raw = self.memory.read()
        wanted = bytearray(b"\xa5") * len(raw)
        for name, one in self.pieces.items():
            place = slice(self.places[name], self.places[name] + len(one.data))
            if name in dirty:
                wanted[place] = raw[place]
            elif filled is None or name in filled:
                wanted[place] = one.data
        if raw != wanted:
            first = next(k for k, (have, want) in enumerate(zip(raw, wanted, strict=True)) if have != want)
            raise AssertionError(f"byte {first} is {raw[first]:#x}, not {wanted[first]:#x}; places: {self.places}")


class Gate:
    """A ``progress`` that stops a transfer after its first read until it is let go."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, done: int, total: int) -> None:
        self.reached.set()
        assert self._open.wait(30)

    def let_go(self) -> None:
        self._open.set()
