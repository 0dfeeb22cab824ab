"""JAX: arrays on one device, or spread over several by a ``jax.sharding.Sharding``.

An array never changes, so neither may its memory. On the CPU each piece of an array is read into memory of its own,
aligned as XLA wants it, and handed over to JAX without a copy; nobody else keeps a reference to it. A file is never
mapped for one: a mapping shows what is written to the file later. Devices that want the same range of a tensor share
one read, and on the CPU one piece of memory.

F4 is copied once, from the bytes of the file to ``float4_e2m1fn`` with one element each; every other dtype is not
copied. F6, which JAX lacks, comes as its bytes in uint8. F64, I64 and U64 need ``jax_enable_x64``.

On CUDA and ROCm devices the memory is CuPy's or torch's, filled as theirs is, and handed over through DLPack; what CuPy
has no dtype for is copied once on the device. None of that has run on hardware. JAX reserves most of a GPU's memory for
itself when it starts: set ``XLA_PYTHON_CLIENT_PREALLOCATE=false`` to leave room.

Examples
--------
>>> import os, tempfile
>>> import jax, numpy as np
>>> from dlpack_loader import load_file
>>> from jax.sharding import Mesh, NamedSharding, PartitionSpec
>>> from safetensors.numpy import save_file
>>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
>>> save_file({"bias": np.ones(3, np.float32), "weight": np.ones((8, 3), np.float32)}, path)
>>> load_file(path, "jax", "cpu")["bias"]
Array([1., 1., 1.], dtype=float32)
>>> mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("x",))
>>> rows, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
>>> tensors = load_file(path, "jax", lambda entry: rows if len(entry.shape) == 2 else whole)
>>> tensors["weight"].sharding == rows, tensors["bias"].sharding == whole
(True, True)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from dlpack_loader.destination import Memory
from dlpack_loader.dtype import BY_CODE, DType
from dlpack_loader.errors import DeviceError, LoaderError, MissingDependencyError, OptionError, UnsupportedError
from dlpack_loader.framework import HOST, Allocation, Framework, Layout, Piece, Spread, framework_named
from dlpack_loader.header import Entry
from dlpack_loader.runtime.arrays import numpy_dtype
from dlpack_loader.runtime.device import CUDA, ROCM

__all__ = ["describe", "empty", "resolve_device", "wrap", "wrote"]

_ALIGNMENT = 64
"""XLA's, on the CPU: memory at any other address would be copied."""

_NUMBER = "0|[1-9][0-9]{0,8}"
_SPELLINGS = 'Use "cpu", "cuda:N", N, a jax.Device, a Sharding, or a mapping from names to any of these'


def resolve_device(device: object) -> Layout:
    """Accept what names a place for every tensor, or for each.

    Parameters
    ----------
    device
        ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"gpu"``, each with ``:N`` or without, which is JAX's default device where
        that is of the kind, and else the first; a number, of JAX's default kind of device; a ``jax.Device``; a
        ``jax.sharding.Sharding``. Numbers count the devices of this process, from 0. Or a mapping from names to any of
        these, which must name each tensor that is asked for, and may name others; or a function from an entry to one of
        them. Arrays are committed to where they are put.

    Raises
    ------
    OptionError
        No device is spelled so, or there is none of that number.
    UnsupportedError
        A kind of device, or of memory, that this version does not fill.
    DeviceError
        JAX has no such kind of device here.
    """
    if isinstance(device, Mapping):
        return partial(_spread, partial(_named, {name: _sharding(place) for name, place in device.items()}))
    if callable(device) and not isinstance(device, Mesh):  # a mesh decorates functions too
        return partial(_spread, partial(_chosen, device))
    sharding = _sharding(device)
    return partial(_spread, lambda _: sharding)


def _named(shardings: Mapping[Any, Sharding], entry: Entry) -> Sharding:
    sharding = shardings.get(entry.name)
    if sharding is None:
        raise OptionError(
            "the mapping of devices does not name this tensor",
            tensor=entry.name,
            hint="Name every tensor that is asked for, or pass a function from an entry to its sharding",
        )
    return sharding


def _chosen(choose: Callable[[Entry], object], entry: Entry) -> Sharding:
    try:
        return _sharding(choose(entry))
    except LoaderError as error:
        error.tensor = error.tensor or entry.name
        raise


def _sharding(place: object) -> Sharding:
    """Return the sharding that a place stands for, and check that its memory can be filled."""
    if not isinstance(place, Sharding):
        place = SingleDeviceSharding(place if isinstance(place, jax.Device) else _device(place))
    try:
        devices: Iterable[Any] = place.addressable_devices
    except ValueError as error:  # that of an AbstractMesh
        raise OptionError(
            f"{place} has no devices to load to", hint="Use a sharding over a jax.sharding.Mesh of devices"
        ) from error
    for device in devices:
        if device.platform not in ("cpu", "gpu"):
            raise UnsupportedError(
                f"this version loads JAX arrays to the CPU and to CUDA and ROCm devices, not to {device}",
                hint='Load with device="cpu" and move the arrays with jax.device_put',
            )
        if device.platform == "gpu" and place.memory_kind not in (None, "device"):
            raise UnsupportedError(
                f"this version does not fill memory of the kind {place.memory_kind!r} on {device}",
                hint="Load without the memory kind and move the arrays with jax.device_put",
            )
    return place


def _device(name: object) -> Any:
    found = re.fullmatch(rf"(cpu|gpu|cuda|rocm)(?::({_NUMBER}))?|({_NUMBER})", str(name))
    if found is None:
        raise OptionError(f"Device {name} is not supported for framework jax", hint=_SPELLINGS)
    kind, number = found[1], found[2] or found[3]
    try:
        devices = jax.local_devices(backend=kind)
    except RuntimeError as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise DeviceError(
            f"JAX finds no device for {name!r}: {reason}",
            hint='Install JAX for it, e.g. jax[cuda13], check the driver and JAX_PLATFORMS, or load with device="cpu"',
        ) from None
    if number is None:
        config: Any = jax.config
        default = config.jax_default_device
        return default if default in devices else devices[0]
    if int(number) >= len(devices):
        raise OptionError(f"there is no device {name}: JAX has {len(devices)} in this process, numbered from 0")
    return devices[int(number)]


def _memory_device(device: Any) -> tuple[int, int]:
    """Return DLPack's name for the memory of a device."""
    if device.platform == "cpu":
        return HOST
    kind = ROCM if "rocm" in str(device.client.platform_version).lower() else CUDA
    return kind, int(device.local_hardware_id)


def _spread(choose: Callable[[Entry], Sharding], entry: Entry, dtype: DType, shape: tuple[int, ...]) -> Spread:
    """Say which ranges the devices of this process need of a tensor, each once."""
    goal = _goal(dtype, entry)
    sharding = choose(entry)
    try:
        indices = sharding.addressable_devices_indices_map(shape)
    except (IndexError, TypeError, ValueError) as error:  # JAX checks some of it, and stumbles over the rest
        reason = (str(error).splitlines() or [""])[0]
        if isinstance(error, IndexError):
            reason = "it is for more dimensions"
        raise OptionError(
            f"a shape of {list(shape)} can't be spread by {sharding}: {reason}",
            tensor=entry.name,
            file=entry.file,
            hint="Pass a sharding of its own for this tensor, by a mapping or a function from its entry",
        ) from error
    pieces: list[Piece] = []
    numbers: dict[tuple[tuple[int, int], ...], int] = {}
    places: list[tuple[Any, int]] = []
    for device, index in indices.items():
        ranges = (slice(None),) * len(shape) if index is None else index
        box = tuple(item.indices(size)[:2] for item, size in zip(ranges, shape, strict=True))
        number = numbers.setdefault(box, len(pieces))
        if number == len(pieces):
            pieces.append(Piece(box, _memory_device(device)))
        places.append((device, number))
    return Spread(tuple(pieces), partial(_join, sharding, places, goal))


def _goal(dtype: DType, entry: Entry) -> np.dtype[Any]:
    """Return the dtype that the array will have."""
    if dtype.numpy is None:
        return np.dtype(np.uint8)
    if dtype.extension and not hasattr(jnp, dtype.numpy):
        raise UnsupportedError(
            f"JAX {jax.__version__} has no dtype {dtype.numpy} for {dtype.code}",
            tensor=entry.name,
            file=entry.file,
            hint="Update JAX",
        )
    goal = numpy_dtype(dtype.dlpack)
    narrowed = jax.dtypes.canonicalize_dtype(goal)
    if narrowed != goal:
        raise UnsupportedError(
            f"JAX would narrow {dtype.code} to {narrowed}: its 64-bit dtypes are switched off",
            tensor=entry.name,
            file=entry.file,
            hint='Call jax.config.update("jax_enable_x64", True) first, or load this tensor with framework="np"',
        )
    return goal


def empty(dtype: DType, shape: tuple[int, ...], unit: int, device: tuple[int, int]) -> Allocation:
    """Allocate for one piece: a NumPy array on the host, memory of CuPy or of torch on a device."""
    if device != HOST:
        return _borrowed(dtype, shape, unit, device)
    plain = dtype.numpy is None or dtype.code == "F4"  # bytes, which are unpacked later or stay what they are
    if dtype.numpy is None:
        shape = (*shape[:-1], shape[-1] * unit)
    kind = np.dtype(np.uint8) if plain else numpy_dtype(dtype.dlpack)
    nbytes = prod(shape) * kind.itemsize
    block = np.empty(nbytes + _ALIGNMENT - 1, np.uint8)
    skip = -block.ctypes.data % _ALIGNMENT
    value = block[skip : skip + nbytes].view(kind).reshape(shape)
    return Allocation(value, Memory(value.ctypes.data, dtype.dlpack, shape, None, HOST, value, nbytes))


def _borrowed(dtype: DType, shape: tuple[int, ...], unit: int, device: tuple[int, int]) -> Allocation:
    lender = _lender(device)
    if dtype.numpy is not None and dtype.code != "F4":  # JAX does not import F4's pairs
        try:
            return lender.empty(dtype, shape, unit, device)
        except UnsupportedError:  # CuPy has not every dtype
            pass
    if dtype.numpy is None:
        shape = (*shape[:-1], shape[-1] * unit)
    elif unit > 1:
        shape = (*shape, unit)
    return lender.empty(BY_CODE["U8"], shape, 1, device)


def _lender(device: tuple[int, int]) -> Framework:
    """Return the framework that allocates on a device: one that is imported already, where there is a choice."""
    reasons = []
    for name in sorted(("cupy", "torch"), key=lambda name: name not in sys.modules):
        try:
            framework = framework_named(name)
            if framework.resolve_device(f"cuda:{device[1]}") == device:
                return framework
            reasons.append(f"{name} is built for another kind of device")
        except LoaderError as error:
            reasons.append(error.message)
    raise MissingDependencyError(
        f"JAX arrays on a GPU are made over memory of CuPy or of torch, and neither can serve: {'; '.join(reasons)}",
        hint='Install cupy-cuda13x (or cupy-cuda12x), or load with device="cpu" and use jax.device_put',
    )


def _join(
    sharding: Sharding,
    places: Sequence[tuple[Any, int]],
    goal: np.dtype[Any],
    shape: tuple[int, ...],
    values: Sequence[Any],
) -> jax.Array:
    """Hand the full pieces over to JAX and make one array of them."""
    homes: dict[int, jax.Array] = {}
    parts: list[jax.Array] = []
    for device, number in places:
        where = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        value = values[number]
        if not isinstance(value, np.ndarray):  # a GPU's, made once and copied from there to the others
            if number not in homes:
                homes[number] = _imported(value, goal, device)
            value = homes[number]
        part = jax.device_put(value, where, may_alias=True)
        parts.append(part if part.dtype == goal else _typed(part, goal))
    if parts and isinstance(sharding, SingleDeviceSharding):
        return parts[0]
    if goal.name == "float4_e2m1fn":
        shape = (*shape[:-1], shape[-1] * 2)
    if not parts:
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=goal)
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _imported(value: Any, goal: np.dtype[Any], device: Any) -> jax.Array:
    if 0 in value.shape:  # torch exports no address for these
        plain = str(value.dtype).endswith("uint8")
        return jnp.zeros(value.shape, np.uint8 if plain else goal, device=device)
    array: jax.Array = jax.dlpack.from_dlpack(value)
    return array


@partial(jax.jit, static_argnums=1)
def _typed(raw: jax.Array, goal: np.dtype[Any]) -> jax.Array:
    """Show bytes as elements of a dtype; XLA copies them."""
    elements: jax.Array = jax.lax.bitcast_convert_type(raw, goal)
    if goal.name == "float4_e2m1fn":
        elements = elements.reshape(*raw.shape[:-1], raw.shape[-1] * 2)
    return elements


def wrap(array: Any, dtype: DType, shape: tuple[int, ...]) -> None:
    """View nothing: mapped bytes may change, and arrays may not."""


def describe(value: Any) -> None:
    """Name no memory: arrays can't be written, and DLPack destinations that are JAX's are refused."""


def wrote(values: Iterable[Any]) -> None:
    """Do nothing: no array was written."""
