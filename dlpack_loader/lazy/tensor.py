"""``LazyTensor``: a torch tensor whose bytes are read when they are copied somewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Self

import torch
from torch.utils._pytree import tree_map

from dlpack_loader.errors import UnsupportedError
from dlpack_loader.filling import Access
from dlpack_loader.framework.torch import wrote
from dlpack_loader.header import Entry
from dlpack_loader.lazy.deferred import Watch, WatchExports
from dlpack_loader.lazy.parts import LazyReport, Part, PartReader

__all__ = ["LazySource", "LazyTensor"]

_SHAPED = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)
"""Operators that ask a tensor for its shape, its dtype and its device, and never for a value."""


class LazyTensor(torch.Tensor):
    """A tensor of a checkpoint that is read when it is copied somewhere; made by ``Reader.lazy``.

    Views of it (indexing, ``narrow``, ``chunk``, ``split``, ``unbind``, ``t``, ``permute``, ``detach``, views as
    another dtype) read nothing and are lazy too. ``destination.copy_(lazy)`` reads the part into the destination:
    straight, where shape, strides and dtype allow it, and otherwise through the reader's bounded staging. ``to``,
    ``cpu`` and ``cuda`` allocate and read. A destination on the meta device reads nothing. Every other operation reads
    the part that it is given into a tensor of its own first. Attributes may be set on it.

    It says that it is on the CPU, can't be written, and keeps its file open. Errors surface where it is read.
    """

    _reader: PartReader
    _part: Part

    __torch_function__: Any = torch._C._disabled_torch_function_impl  # torch's documented way to leave it out

    def __new__(cls, reader: PartReader, part: Part) -> Self:
        """Make a tensor without memory that has the geometry of a part."""
        view = part.view
        value: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            view.shape,
            strides=view.stride(),
            storage_offset=view.storage_offset(),
            dtype=view.dtype,
            # To torch's C++ it is a meta tensor, whose kernels touch no memory; it says that it is on the CPU. What
            # goes past the dispatcher for its address gets an exception, where it would get a null pointer.
            device=torch.device("meta"),
            dispatch_device=True,
            storage_size=part.entry.nbytes,
        )
        torch._C._set_throw_on_mutable_data_ptr(value)
        value._reader, value._part = reader, part
        return value

    def __init__(self, reader: PartReader, part: Part) -> None: ...

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stubs know the function that switches it off
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return torch.device("cpu")
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func.is_view and isinstance(first, LazyTensor):
            viewed = _view(first, func, args[1:], kwargs)
            if viewed is None:  # `to` or `reshape`, say, where no autograd has taken it apart
                viewed = func.decompose(*args, **kwargs)
            if viewed is not NotImplemented:
                return viewed
        elif func is torch.ops.aten.copy_.default and isinstance(args[1], LazyTensor) and _is_plain(first):
            args[1]._reader.copy(args[1]._part, args[0])
            return first
        elif func is torch.ops.aten._foreach_copy_.default:
            _copy_each(*args[:2])
            return None
        elif func is torch.ops.aten._to_copy.default and isinstance(first, LazyTensor):
            return _to(first, **kwargs)
        elif func is torch.ops.aten.clone.default and isinstance(first, LazyTensor):
            return first._reader.materialize(first._part, kwargs.get("memory_format"))
        elif func._schema.is_mutable:
            _refuse_writes(func, args, kwargs)
        elif func.overloadpacket in _SHAPED:
            given = {name: value for name, value in kwargs.items() if value is not None}
            return func(*tree_map(_geometry, args), **{"device": torch.device("cpu"), **given})
        return func(*tree_map(_read, args), **tree_map(_read, kwargs))

    def materialize(self) -> torch.Tensor:
        """Read it into a new tensor of the CPU.

        Raises
        ------
        StorageError
            It could not be read.
        """
        return self._reader.materialize(self._part)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Allocate a tensor as ``torch.Tensor.to`` would and read into it; the result is never lazy."""
        value = super().to(*args, **kwargs)
        return _to(self) if value is self else value

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """Read it into a new tensor of the CPU."""
        return _to(self, memory_format=memory_format)

    def cuda(
        self,
        device: Any = None,
        non_blocking: bool = False,  # noqa: ARG002
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        """Read it into a new tensor of a CUDA or ROCm device, by default of the current one."""
        return _to(self, device="cuda" if device is None else device, memory_format=memory_format)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        entry = self._part.entry
        return f"LazyTensor({entry.name!r}, shape={list(self.shape)}, dtype={self.dtype}, file={entry.file!r})"

    # What torch does past the dispatcher, or not at all for classes like this one

    def __format__(self, spec: str) -> str:
        return format(self.materialize(), spec) if spec else str(self)

    def numpy(self, *, force: bool = False) -> Any:
        """Read it and return it as a NumPy array."""
        return self.materialize().numpy(force=force)

    def tolist(self) -> Any:
        """Read it and return it as nested lists."""
        return self.materialize().tolist()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.materialize().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return (1, 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = self.materialize()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def data_ptr(self) -> NoReturn:
        """Refuse: there is no memory yet."""
        self._refuse("it has no address before it is read")

    def const_data_ptr(self) -> NoReturn:
        """Refuse: there is no memory yet."""
        self._refuse("it has no address before it is read")

    def untyped_storage(self) -> NoReturn:
        """Refuse: there is no memory yet."""
        self._refuse("it has no storage before it is read")

    def storage(self) -> NoReturn:
        """Refuse: there is no memory yet."""
        self._refuse("it has no storage before it is read")

    def share_memory_(self) -> NoReturn:
        """Refuse: there is no memory yet."""
        self._refuse("it has no memory to share before it is read")

    @property
    def data(self) -> torch.Tensor:
        """Itself, detached."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:  # noqa: ARG002
        self._refuse("it can't be given other memory")

    @property
    def requires_grad(self) -> bool:
        """False: what is read anew each time is no parameter."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Refuse True: what is read anew each time is no parameter."""
        if requires_grad:
            self._refuse("it can't require grad, since it is read anew each time")
        return self

    # What torch.nn asks and says of a tensor that a module is about to keep

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:  # noqa: ARG002
        self._refuse("it is no parameter, since it is read anew each time")

    @property
    def _is_buffer(self) -> bool:
        self._refuse("a module can't keep it, since it is read anew each time")

    def _refuse(self, why: str) -> NoReturn:
        part = self._part
        raise UnsupportedError(
            f"the tensor is lazy: {why}",
            tensor=part.entry.name,
            file=part.entry.file,
            hint="Read it first, with .to(device) or .materialize()",
        )


class LazySource:
    """Makes the lazy tensors of one reader. Threads may share it."""

    def __init__(self, access: Access) -> None:
        self._parts = PartReader(access)

    def tensor(self, entry: Entry) -> LazyTensor:
        """Return the whole of an entry, lazy."""
        with torch.inference_mode(False):  # so that views of it can be made in every mode
            return LazyTensor(self._parts, self._parts.part(entry))

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Note the copies of this thread, and make them together; see ``Reader.deferring``."""
        with (
            self._parts.deferring() as deferred,
            Watch(deferred, self._is_noted, LazyTensor),
            WatchExports(deferred, LazyTensor),
        ):
            yield

    def _is_noted(self, func: Any, args: tuple[Any, ...]) -> bool:
        return (
            func is torch.ops.aten.copy_.default
            and isinstance(args[1], LazyTensor)
            and args[1]._reader is self._parts
            and _is_plain(args[0])
        )

    def report(self) -> LazyReport:
        """Return what was read so far."""
        return self._parts.report()


def _is_plain(value: Any) -> bool:
    """Whether a destination is a tensor with memory of its own, parameters included, and no wrapper around others."""
    return isinstance(value, torch.Tensor) and type(value).__torch_dispatch__ == torch.Tensor.__torch_dispatch__


def _view(
    lazy: LazyTensor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LazyTensor | list[LazyTensor] | tuple[LazyTensor, ...] | None:
    """View the geometry alone; None where the result is no part of the bytes, such as a conjugate."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _view(lazy, func, args, kwargs)
    reader, part = lazy._reader, lazy._part
    result = func(part.view, *args, **kwargs)
    views = [result] if isinstance(result, torch.Tensor) else list(result)
    storage = part.view.untyped_storage()._cdata
    for view in views:
        if view.is_conj() or view.is_neg() or view.layout is not torch.strided:
            return None
        if view.untyped_storage()._cdata != storage:
            return None  # it had to be copied
        new = part.with_view(view)
        if view.numel() and (view.storage_offset() * view.itemsize + new.span()) > part.entry.nbytes:
            lazy._refuse("the view reaches beyond its bytes")
    made = [LazyTensor(reader, part.with_view(view)) for view in views]
    return made[0] if isinstance(result, torch.Tensor) else type(result)(made)


def _to(
    lazy: LazyTensor,
    *,
    device: Any = None,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
    pin_memory: bool | None = None,
    layout: torch.layout | None = None,
    **_: Any,
) -> torch.Tensor:
    """Allocate where and as it is asked for, and read into it."""
    if layout not in (None, torch.strided):
        value: torch.Tensor = torch.ops.aten._to_copy.default(
            lazy.materialize(), layout=layout, device=device, dtype=dtype
        )
        return value
    value = torch.empty_like(
        lazy._part.view,
        device="cpu" if device is None else device,
        dtype=dtype or lazy.dtype,
        memory_format=memory_format or torch.preserve_format,
        pin_memory=bool(pin_memory),
    )
    lazy._reader.copy(lazy._part, value, is_new=True)
    return value


def _copy_each(destinations: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy one after the other; those that are deferred keep their turn."""
    if len(destinations) != len(values):
        raise RuntimeError(
            f"Tensor lists must have the same number of tensors, got {len(destinations)} and {len(values)}"
        )
    for destination in destinations:
        if isinstance(destination, LazyTensor):
            destination._refuse("it can't be written to")
    readers = {value._reader for value in values if isinstance(value, LazyTensor)}
    for destination, value in zip(destinations, values, strict=True):
        own = value._reader if isinstance(value, LazyTensor) and _is_plain(destination) else None
        for reader in readers - {own}:
            reader.settle([destination] if isinstance(value, LazyTensor) else [destination, value])
        destination.copy_(value)
    wrote(destinations)  # torch counts single copies by itself, and not these


def _geometry(value: Any) -> Any:
    return value._part.view if isinstance(value, LazyTensor) else value


def _read(value: Any) -> Any:
    return value.materialize() if isinstance(value, LazyTensor) else value


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse operations that write to a lazy tensor; the write would be lost."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        for value in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(value, LazyTensor):
                value._refuse("it can't be written to")
