"""Lazy tensors: each view and each copy equals torch's own, writes are refused, nothing reaches missing memory."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlpack_loader import safe_open
from dlpack_loader.dtype import DTYPES
from dlpack_loader.errors import ClosedError, DestinationError, LoaderError, OptionError, UnsupportedError
from dlpack_loader.lazy import LazyReport, LazyTensor
from tests.files import raw_bytes, save, write_raw
from tests.lazy_material import MIB, run, same

GUARD = 0xA5
SHAPES = ((), (0, 4), (24,), (6, 8), (4, 1, 8), (2, 3, 2, 4))
VIEWED = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.complex64)
CAST_TO = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
REFUSED = (LoaderError, RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError)

Every = tuple[Path, dict[str, torch.Tensor]]


def shown_dtype(dtype: Any) -> torch.dtype:
    return getattr(torch, dtype.torch) if dtype.torch else torch.uint8


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Every:
    """Every dtype in several shapes; the bytes of (6, 8) are any, those of the others finite numbers."""
    numbers = np.random.default_rng(5)
    header: dict[str, Any] = {}
    wanted: dict[str, torch.Tensor] = {}
    data = b""
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    for dtype in DTYPES:
        for shape in shapes:
            if dtype.group > 1 and not shape:
                continue
            nbytes = prod(shape) * dtype.bits // 8
            raw = numbers.integers(0, 2 if dtype.code == "BOOL" else 256, nbytes, np.uint8).tobytes()
            target = shown_dtype(dtype)
            if dtype.floating and dtype.group == 1 and shape != (6, 8):
                raw = raw_bytes(torch.from_numpy(numbers.standard_normal(shape)).abs().add(0.1).to(target))
            name = f"{dtype.code}.{'x'.join(map(str, shape)) or 'scalar'}"
            header[name] = {"dtype": dtype.code, "shape": shape, "data_offsets": [len(data), len(data) + nbytes]}
            data += raw
            flat = torch.tensor(list(raw), dtype=torch.uint8).view(target)
            wanted[name] = flat.reshape(*shape[:-1], -1) if nbytes and shape else flat.reshape(shape)
            if not nbytes:
                *outer, last = shape
                wanted[name] = torch.empty((*outer, last * dtype.bits // 8 // target.itemsize), dtype=target)
    return write_raw(tmp_path_factory.mktemp("lazy") / "m.safetensors", header, data), wanted


View = tuple[str, Callable[[torch.Tensor], torch.Tensor]]


@st.composite
def views(draw: st.DrawFn, now: torch.Tensor) -> View:
    """One view of a tensor that is not 0-dimensional, as a name and a function."""
    shape, ndim = now.shape, now.ndim
    axis = draw(st.integers(0, ndim - 1))
    size = shape[axis]
    start = draw(st.integers(0, size))
    length = draw(st.integers(0, size - start))
    step = draw(st.integers(1, 3))
    order = draw(st.permutations(range(ndim)))
    parts = draw(st.integers(1, 4))
    other = draw(st.integers(0, ndim - 1))
    dtype = draw(st.sampled_from(VIEWED))
    known: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "narrow": lambda t: t.narrow(axis, start, length),
        "slice": lambda t: t[(slice(None),) * axis + (slice(start, None, step),)],
        "dots": lambda t: t[..., start:],
        "new axis": lambda t: t[None],
        "chunk": lambda t: t.chunk(parts, axis)[-1],
        "tensor_split": lambda t: t.tensor_split(parts, axis)[parts // 2],
        "split": lambda t: t.split(max(1, size // 2), axis)[-1],
        "transpose": lambda t: t.transpose(axis, other),
        "permute": lambda t: t.permute(order),
        "movedim": lambda t: t.movedim(axis, other),
        "unsqueeze": lambda t: t.unsqueeze(axis),
        "squeeze": lambda t: t.squeeze(),
        "expand": lambda t: t.unsqueeze(0).expand(parts, *shape),
        "expand inside": lambda t: t.unsqueeze(-1).expand(*shape, parts),
        "unfold": lambda t: t.unfold(axis, max(1, min(size, parts)), step),
        "flatten": lambda t: t.flatten(),
        "view": lambda t: t.view(-1),
        "reshape": lambda t: t.reshape(*shape[:axis], -1, *shape[axis + 1 :]),
        "unflatten": lambda t: t.unflatten(axis, (size // 2, 2) if size % 2 == 0 and size else (1, size)),
        "view as": lambda t: t.view(dtype),
        "detach": lambda t: t.detach(),
        "data": lambda t: t.data,
        "alias": lambda t: torch.ops.aten.alias(t),
        "view_as": lambda t: t.view_as(t),
        "adjoint": lambda t: t.mT if ndim > 1 else t,
        "t": lambda t: t.t() if ndim < 3 else t.swapdims(0, 1),
    }
    if size:
        known["select"] = lambda t: t.select(axis, start % size)
        known["index"] = lambda t: t[(slice(None),) * axis + (start % size - size,)]
        known["unbind"] = lambda t: t.unbind(axis)[start % size]
    if ndim > 1 and axis != other:
        known["diagonal"] = lambda t: t.diagonal(draw_offset, axis, other)
    draw_offset = draw(st.integers(-1, 1))
    name = draw(st.sampled_from(sorted(known)))
    return name, known[name]


def outcome(act: Callable[[], Any]) -> Any:
    """What a function returns, or the class of its exception."""
    try:
        return act()
    except REFUSED as error:
        return type(error)


@st.composite
def places(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], tuple[torch.Tensor, Any]]:
    """Make a destination of a shape somewhere in a buffer full of guard bytes, the same one each time."""
    order = draw(st.permutations(range(len(shape)))) if draw(st.booleans()) else tuple(range(len(shape)))
    steps = [draw(st.integers(1, 3)) if draw(st.integers(0, 2)) == 0 else 1 for _ in shape]
    before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    strides, pitch = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = pitch * steps[axis]
        pitch *= max(1, shape[axis]) * steps[axis]
    total = (before + pitch + after) * dtype.itemsize

    def make() -> tuple[torch.Tensor, Any]:
        buffer = torch.full((total,), GUARD, dtype=torch.uint8)
        return buffer, buffer.view(dtype).as_strided(shape, strides, before)

    return make


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_view_copied_anywhere_is_what_torch_makes_of_it(every: Every, data: st.DataObject) -> None:
    path, wanted = every
    name = data.draw(st.sampled_from(sorted(wanted)))
    staging = data.draw(st.sampled_from([64 * MIB, 20_000, 100, 1]))
    with safe_open(path, staging_bytes=staging) as reader:
        real, lazy = wanted[name], reader.lazy(name)
        assert real.shape == lazy.shape
        assert real.dtype == lazy.dtype
        for _ in range(data.draw(st.integers(0, 4))):
            if not real.ndim:
                break
            label, view = data.draw(views(real), label="view")
            before = real
            real, lazy = outcome(lambda: view(before)), outcome(lambda: view(lazy))  # noqa: B023
            if not isinstance(real, torch.Tensor):
                assert real is lazy, label
                return
            assert (real.shape, real.dtype, real.stride()) == (lazy.shape, lazy.dtype, lazy.stride()), label
            if real.numel():
                assert real.storage_offset() == lazy.storage_offset() or not isinstance(lazy, LazyTensor)
            if real._is_view() or real is before:
                assert isinstance(lazy, LazyTensor), label
                assert reader.lazy_report() == LazyReport(), label
            elif not isinstance(lazy, LazyTensor):
                assert same(real, lazy)
                return
        assert isinstance(lazy, LazyTensor)
        dtype = real.dtype
        kind = next(d for d in DTYPES if d.code == name.split(".")[0])
        if kind.floating and kind.group == 1 and dtype == shown_dtype(kind) and not name.endswith(".6x8"):
            dtype = data.draw(st.sampled_from((dtype, *CAST_TO)))
        broad = data.draw(st.sampled_from([(), (1,), (3,), (2, 1)]))
        make = data.draw(places((*broad, *real.shape), dtype))
        (expected, into), (buffer, destination) = make(), make()
        if not isinstance(result := outcome(lambda: into.copy_(real)), torch.Tensor):
            assert outcome(lambda: destination.copy_(lazy)) == result
            return
        version = destination._version
        assert destination.copy_(lazy) is destination
        assert torch.equal(buffer, expected)
        assert destination._version == version + 1
        total = reader.lazy_report()
        assert total.bytes_written == destination.nbytes
        assert total.direct + total.staged == (1 if real.numel() and prod(broad) else 0)
        assert total.materialized == 0


USES: dict[str, Callable[[Any], Any]] = {
    "to": lambda t: t.to("cpu"),
    "to dtype": lambda t: t.to(torch.float64),
    "to both": lambda t: t.to("cpu", torch.float16, copy=True),
    "to other": lambda t: t.to(torch.zeros((), dtype=torch.int32)),
    "to format": lambda t: t.to(torch.float64, memory_format=torch.contiguous_format),
    "cpu": lambda t: t.cpu(),
    "clone": lambda t: t.clone(),
    "clone contiguous": lambda t: t.clone(memory_format=torch.contiguous_format),
    "contiguous": lambda t: t.contiguous(),
    "float": lambda t: t.float(),
    "half": lambda t: t.half(),
    "type": lambda t: t.type(torch.float64),
    "type name": lambda t: t.type("torch.DoubleTensor"),
    "item": lambda t: t[1, 2].item(),
    "numbers": lambda t: (int(t[0, 0]), float(t[0, 1]), bool(t[0, 2]), complex(t[0, 2])),
    "index": lambda t: range(100)[t.to(torch.int64)[0, 0].abs() % 7],
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "numpy by force": lambda t: t.numpy(force=True),
    "asarray": np.asarray,
    "array": lambda t: np.array(t, dtype=np.float64, copy=True),
    "numpy dlpack": np.from_dlpack,
    "dlpack": torch.utils.dlpack.from_dlpack,
    "tensor": lambda t: torch.asarray(t, copy=True),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "save": lambda t: torch.load(saved(t)),
    "state": lambda t: torch.load(saved({"a": [t]}))["a"][0],
    "len": len,
    "iterate": lambda t: [row.sum() for row in t],
    "contains": lambda t: (t[0, 0].item() in t, 12345 in t),
    "compare": lambda t: (t > 1, t == t.clone(), t != 0, torch.equal(t, t)),
    "add": lambda t: t + 1,
    "reverse": lambda t: 2 - t,
    "matmul": lambda t: t.float() @ t.float().t(),
    "linear": lambda t: torch.nn.functional.linear(torch.ones(2, 8), t.float()),
    "cat": lambda t: torch.cat([t, torch.ones_like(t), t]),
    "stack": lambda t: torch.stack([t, t]),
    "index_select": lambda t: t.index_select(1, torch.tensor([3, 0])),
    "mask": lambda t: t[t > 0],
    "fancy": lambda t: t[[0, 2]],
    "where": lambda t: torch.where(t > 0, t, 0),
    "sum": lambda t: t.sum(0),
    "repeat_interleave": lambda t: t.repeat_interleave(2, 0),
    "pad": lambda t: torch.nn.functional.pad(t, (1, 1)),
    "out": lambda t: torch.add(t, 1, out=torch.empty(6, 8, dtype=t.dtype)),
    "into another": lambda t: torch.zeros(6, 8, dtype=t.dtype).add_(t),
    "setitem": lambda t: put(torch.zeros(7, 8, dtype=t.dtype), t),
    "index_put": lambda t: torch.zeros(6, 8, dtype=t.dtype).index_put((torch.arange(6),), t),
    "foreach": lambda t: torch._foreach_add([t, torch.ones(3)], 1),
    "foreach copy": lambda t: foreach_copy(t),
    "geometry": lambda t: (t.shape, t.stride(), t.dtype, t.device, t.nbytes, t.numel(), t.is_contiguous(), t.dim()),
    "likes": lambda t: [like.zero_() for like in (torch.empty_like(t), torch.empty_like(t.t()), t.new_empty(3))],
    "full": lambda t: (torch.full_like(t, 3), t.new_full((2,), 3), torch.zeros_like(t, dtype=torch.float64)),
    "sparse": lambda t: t.to_sparse().to_dense(),
    "unsafe_chunk": lambda t: torch.unsafe_chunk(t, 2),
    "format": lambda t: f"{t[0, 0].item():.3f} {t[0, 0]:.3f}" if t.is_floating_point() else "",
}


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def put(into: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    into[1:] = value
    into[0, 1:4] = value[2, 3:6]
    return into


def foreach_copy(value: torch.Tensor) -> list[torch.Tensor]:
    into = [torch.zeros(6, 8, dtype=value.dtype), torch.zeros(8, 6), torch.zeros(4)]
    torch._foreach_copy_(into, [value, value.t(), torch.ones(4)])
    return into


def assert_same(got: Any, real: Any) -> None:
    if isinstance(real, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        assert got.stride() == real.stride()
        plain = got.materialize() if isinstance(got, LazyTensor) else got
        assert type(plain) is torch.Tensor
        assert same(plain, real)
    elif isinstance(real, np.ndarray):
        assert got.dtype == real.dtype
        assert np.array_equal(got, real, equal_nan=real.dtype.kind == "f")
    elif isinstance(real, (list, tuple)) and not isinstance(real, torch.Size):
        assert len(got) == len(real)
        for one, other in zip(got, real, strict=True):
            assert_same(one, other)
    else:
        assert type(got) is type(real)
        assert got == real


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_every_other_use_is_torchs(tmp_path: Path, dtype: torch.dtype, use: str) -> None:
    """Where torch refuses, so does a lazy tensor."""
    real = save(tmp_path / "m.safetensors", {"w": (torch.randn(6, 8) * 9).to(dtype)})["w"]
    with safe_open(tmp_path / "m.safetensors") as reader:
        lazy = reader.lazy("w")
        expected = outcome(lambda: USES[use](real))
        got = outcome(lambda: USES[use](lazy))
        assert_same(got, expected)


def test_shapes_and_dtypes_cost_no_reading(every: Every) -> None:
    path, _ = every
    with safe_open(path) as reader:
        lazy = reader.lazy("F32.6x8")
        for like in (torch.zeros_like(lazy), torch.empty_like(lazy, dtype=torch.int8), lazy.new_ones(2, 2)):
            assert type(like) is torch.Tensor
            assert like.device.type == "cpu"
        torch.zeros(6, 8).view_as(lazy).expand_as(lazy)
        assert torch.empty_like(lazy, device="meta").is_meta
        assert (lazy.size(0), lazy.element_size(), lazy.is_floating_point(), lazy.is_complex()) == (6, 4, True, False)
        assert torch.result_type(lazy, torch.zeros((), dtype=torch.float64)) == torch.float32
        assert repr(lazy) == str(lazy) == f"LazyTensor('F32.6x8', shape=[6, 8], dtype=torch.float32, file='{path}')"
        assert reader.lazy_report() == LazyReport()


def test_meta_and_empty_read_nothing(every: Every) -> None:
    path, _ = every
    with safe_open(path) as reader:
        lazy = reader.lazy("F32.6x8")
        torch.empty(6, 8, device="meta").copy_(lazy)
        torch.empty(6, 8, device="meta", dtype=torch.float16).copy_(lazy)
        torch.nn.Parameter(torch.empty(2, 6, 8, device="meta")).data.copy_(lazy)
        assert lazy.to("meta").is_meta
        torch.empty(0, 8).copy_(lazy[3:3])
        torch.empty(0, 4).copy_(reader.lazy("F32.0x4"))
        assert reader.lazy_report() == LazyReport()


def test_parts_that_are_used_are_all_that_is_read(every: Every) -> None:
    path, wanted = every
    with safe_open(path) as reader:
        total = reader.lazy("F32.6x8")[2:4].sum()
        assert same(total, wanted["F32.6x8"][2:4].sum())
        assert reader.lazy_report() == LazyReport(0, 0, 1, 64, 64, 64)
        reader.lazy("F32.6x8").to(torch.float64)
        assert (reader.lazy_report().staged, reader.lazy_report().bytes_read) == (1, 64 + 192)


def test_attributes(every: Every) -> None:
    with safe_open(every[0]) as reader:
        lazy: Any = reader.lazy("F32.6x8")
        lazy.shard_id = 3
        lazy.grad = torch.zeros(6, 8)
        assert lazy.shard_id == 3
        for other in (lazy.detach(), lazy.data, lazy.detach_()):
            assert isinstance(other, LazyTensor)
        assert isinstance(lazy, torch.Tensor)
        assert not lazy.requires_grad
        assert lazy.is_leaf


WRITES: dict[str, Callable[[Any], Any]] = {
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t[0].fill_(1),
    "copy_": lambda t: t.copy_(torch.zeros(6, 8)),
    "copy_ lazy": lambda t: t[0].copy_(t[1]),
    "setitem": lambda t: t.__setitem__((0, 0), 3.0),
    "index": lambda t: t.__setitem__(torch.tensor([0]), 3.0),
    "iadd": lambda t: t.__iadd__(1),
    "out": lambda t: torch.add(t, 1, out=t),
    "out of two": lambda t: torch.max(t, 0, out=(t[0], torch.empty(8, dtype=torch.int64))),
    "foreach": lambda t: torch._foreach_mul_([torch.zeros(2), t], 2),
    "foreach copy": lambda t: torch._foreach_copy_([torch.zeros(6, 8), t], [t, torch.zeros(6, 8)]),
    "t_": lambda t: t.t_(),
    "squeeze_": lambda t: t.squeeze_(),
    "resize_": lambda t: t.resize_(3),
    "as_strided_": lambda t: t.as_strided_((1,), (1,)),
    "set_": lambda t: t.set_(),
    "set_ to": lambda t: t.set_(torch.zeros(3)),
    "data": lambda t: setattr(t, "data", torch.zeros(6, 8)),
    "random_": lambda t: t.random_(),
    "normal_": lambda t: torch.nn.init.normal_(t),
    "masked_fill_": lambda t: t.masked_fill_(t > 0, 1),
    "apply_": lambda t: t.apply_(lambda x: x),
    "map_": lambda t: t.map_(t, lambda x, y: x),
    "requires_grad_": lambda t: t.requires_grad_(),
    "requires_grad": lambda t: setattr(t, "requires_grad", True),
    "Parameter": torch.nn.Parameter,
    "numpy dlpack": lambda t: np.from_dlpack(t).fill(0),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_are_refused_or_reach_a_copy(every: Every, write: str) -> None:
    path, wanted = every
    raw = path.read_bytes()
    with safe_open(path) as reader:
        lazy = reader.lazy("F32.6x8")
        if write == "numpy dlpack":
            WRITES[write](lazy)
        else:
            with pytest.raises((UnsupportedError, RuntimeError)):
                WRITES[write](lazy)
        assert lazy.shape == (6, 8)
        assert lazy.stride() == (8, 1)
        assert same(lazy.materialize(), wanted["F32.6x8"])
    assert path.read_bytes() == raw


def test_a_refused_foreach_copy_writes_nothing(every: Every) -> None:
    with safe_open(every[0]) as reader:
        lazy = reader.lazy("F32.6x8")
        into = torch.zeros(6, 8)
        with pytest.raises(UnsupportedError, match="can't be written to"):
            torch._foreach_copy_([into, lazy], [lazy, into])
        with pytest.raises(RuntimeError, match="same number of tensors"):
            torch._foreach_copy_([into, torch.zeros(6, 8)], [lazy])
        assert not into.any()
        assert reader.lazy_report() == LazyReport()


ADDRESSES = """
import ctypes, multiprocessing.reduction as reduction, pickle, sys
import numpy as np, torch
from dlpack_loader import safe_open
reader = safe_open(sys.argv[1])
whole = reader.lazy("F32.6x8")
acts = {
    "data_ptr": lambda t: t.data_ptr(),
    "class": lambda t: torch.Tensor.data_ptr(t),
    "ctypes": lambda t: ctypes.string_at(torch.Tensor.data_ptr(t), 4),
    "const": lambda t: t.const_data_ptr(),
    "untyped_storage": lambda t: t.untyped_storage(),
    "class storage": lambda t: torch.Tensor.untyped_storage(t).data_ptr(),
    "storage": lambda t: t.storage(),
    "_typed_storage": lambda t: t._typed_storage(),
    "is_shared": lambda t: t.is_shared(),
    "share_memory_": lambda t: t.share_memory_(),
    "class share": lambda t: torch.Tensor.share_memory_(t),
    "pin_memory": lambda t: t.pin_memory(),
    "frombuffer": lambda t: torch.frombuffer(t, dtype=torch.uint8),
    "memoryview": memoryview,
    "apply_": lambda t: t.apply_(lambda x: x),
    "map_": lambda t: t.map_(torch.zeros(t.shape), lambda x, y: x),
    "map_ from": lambda t: torch.zeros(t.shape).map_(t, lambda x, y: y),
    "set data": lambda t: setattr(torch.zeros(t.shape), "data", t),
    "set meta data": lambda t: setattr(torch.zeros(t.shape, device="meta"), "data", t),
    "set parameter data": lambda t: setattr(torch.nn.Parameter(torch.zeros(t.shape)), "data", t),
    "to_dlpack": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)).tolist(),
    "_to_dlpack": lambda t: torch._C._from_dlpack(torch._C._to_dlpack(t)).tolist(),
    "class dlpack": lambda t: torch.Tensor.__dlpack__(t),
    "array interface": lambda t: t.__array_interface__,
    "cuda interface": lambda t: t.__cuda_array_interface__,
    "class numpy": lambda t: torch.Tensor.numpy(t),
    "class tolist": lambda t: torch.Tensor.tolist(t),
    "resize storage": lambda t: t.untyped_storage().resize_(0),
    "as_strided": lambda t: torch.as_strided(t, (7, 8), (8, 1)),
    "as_strided offset": lambda t: torch.as_strided(t, (1,), (1,), 48),
    "as_strided far": lambda t: torch.as_strided(t, (2,), (1 << 40,)),
}
done = 0
for where, tensor in {"whole": whole, "part": whole[1:3, 2:5].t(), "detached": whole.detach()}.items():
    for name, act in acts.items():
        print(where, name, flush=True)
        try:
            act(tensor)
        except Exception as error:
            done += 1
            if name.startswith("as_strided"):
                assert "beyond its bytes" in str(error), error
        else:
            raise SystemExit(f"{name} of {where} was not refused")
pickled = reduction.ForkingPickler.dumps(whole)
assert torch.equal(pickle.loads(pickled), whole.materialize())
assert torch.as_strided(whole, (1,), (1,), 47).item() == whole[5, 7].item()
assert torch.equal(torch.zeros(3).set_(whole), whole)
swapped = reader.lazy("F32.6x8")
other = torch.zeros(3)
torch.utils.swap_tensors(swapped, other)
assert swapped.tolist() == [0, 0, 0] and torch.equal(other, whole)
print("refused", done)
"""


def test_nothing_gets_an_address_that_is_not_there(every: Every) -> None:
    """In a process of its own: what went wrong here would be a segmentation fault."""
    assert run(ADDRESSES, every[0]).splitlines()[-1] == "refused 93"


def test_destinations_that_share_memory_with_themselves(every: Every) -> None:
    """Torch refuses them before it writes; so does a copy that is broadcast over two positions."""
    with safe_open(every[0]) as reader:
        lazy = reader.lazy("F32.6x8")
        for base, shape in ((torch.full((8,), 7.0), (6, 8)), (torch.full((6, 1), 7.0), (6, 8))):
            with pytest.raises(RuntimeError, match="single memory location"):
                base.expand(shape).copy_(lazy)
            assert bool((base == 7).all())
        base = torch.full((8,), 7.0)
        for source in (lazy[0].expand(2, 8), lazy[0], lazy[0].double()):
            with pytest.raises(RuntimeError, match="single memory location"):
                base.expand(2, 8).copy_(source)
        assert bool((base == 7).all())


def test_shapes_that_do_not_fit_name_tensor_and_file(every: Every) -> None:
    with safe_open(every[0]) as reader:
        into = torch.zeros(6, 7)
        with pytest.raises(DestinationError, match=r"shape \[6, 8\] and the destination \[6, 7\] \(tensor 'F32.6x8'"):
            into.copy_(reader.lazy("F32.6x8"))
        assert not into.any()


def test_destinations_with_grad_are_torchs_matter(every: Every) -> None:
    path, wanted = every
    with safe_open(path) as reader:
        lazy, real = reader.lazy("F32.6x8"), wanted["F32.6x8"]
        for dtype in (torch.float32, torch.bfloat16):
            parameter = torch.nn.Parameter(torch.zeros(6, 8, dtype=dtype))
            with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
                parameter.copy_(lazy)
            assert not parameter.any()
            with torch.no_grad():
                parameter.copy_(lazy)
                parameter[1:2].copy_(lazy[0])
            expected = real.clone()
            expected[1] = real[0]
            assert same(parameter.detach(), expected.to(dtype))
            assert parameter.requires_grad
            assert parameter._version == 2
            inner = torch.zeros(6, 8, requires_grad=True)
            (inner * 1).copy_(lazy).sum().backward()
            assert inner.grad is not None
            assert not inner.grad.any()


def test_a_write_is_seen_by_autograd(every: Every) -> None:
    with safe_open(every[0]) as reader:
        factor = torch.ones(6, 8)
        result = (torch.ones(6, 8, requires_grad=True) * factor).sum()
        factor.copy_(reader.lazy("F32.6x8"))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_modes_of_autograd(every: Every, mode: Callable[[], Any]) -> None:
    path, wanted = every
    real = wanted["F32.6x8"]
    with safe_open(path) as reader:
        outside = reader.lazy("F32.6x8")
        plain = torch.zeros(6, 8)
        with mode():
            inside = reader.lazy("F32.6x8")
            for lazy in (outside, inside):
                assert same(torch.zeros(6, 8).copy_(lazy), real)
                assert same(torch.zeros(3, 8).copy_(lazy[1:4]), real[1:4])
                assert same(plain.copy_(lazy), real)
                assert same(lazy.to(torch.float64), real.double())
                assert same(lazy + 1, real + 1)
                assert same(lazy.to(torch.int32), real.to(torch.int32))  # of the same width: its bits are not reused
                assert same(lazy.t().contiguous(), real.t().contiguous())
                assert same(lazy[:, 1:3].reshape(12), real[:, 1:3].reshape(12))
                assert isinstance(lazy.view(12, 4).chunk(2)[1].reshape(3, 8), LazyTensor)
                assert same(lazy.view(12, 4).chunk(2)[1].reshape(3, 8).clone(), real[3:])
        assert same(torch.zeros(8, 6).copy_(inside.t()), real.t())
        assert same(inside[:, 3].clone(), real[:, 3])
        assert same(inside * 2, real * 2)


def test_autocast_and_default_devices(every: Every) -> None:
    path, wanted = every
    with safe_open(path) as reader:
        lazy, real = reader.lazy("F32.2x3x2x4").flatten(0, 2), wanted["F32.2x3x2x4"].flatten(0, 2)
        given = torch.ones(2, 4)
        with torch.autocast("cpu", torch.bfloat16):
            assert same(torch.nn.functional.linear(given, lazy), torch.nn.functional.linear(given, real))
        with torch.device("meta"):
            assert same(reader.lazy("F32.2x3x2x4").flatten(0, 2).clone(), real)
            assert same(lazy.to(torch.float64), real.double())
            assert same(lazy.clone(), real)


def test_modules_load_lazy_state_dicts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 16))
    state = save(tmp_path / "m.safetensors", {name: value.clone() for name, value in model.state_dict().items()})
    with safe_open(tmp_path / "m.safetensors") as reader:
        other = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 16))
        pointers = [value.data_ptr() for value in other.state_dict().values()]
        other.load_state_dict(dict(reader.iter_lazy()))
        assert pointers == [value.data_ptr() for value in other.state_dict().values()]
        for name, value in other.state_dict().items():
            assert same(value, state[name])
        sizes = sum(value.nbytes for value in state.values())
        assert reader.lazy_report() == LazyReport(len(state), 0, 0, sizes, sizes, sizes)


def test_filters_and_order(tmp_path: Path) -> None:
    tensors = {name: torch.full((4,), float(k)) for k, name in enumerate(["b", "c", "a"])}
    save(tmp_path / "1.safetensors", {"b": tensors["b"], "c": tensors["c"]})
    save(tmp_path / "0.safetensors", {"a": tensors["a"]})
    with safe_open([tmp_path / "1.safetensors", tmp_path / "0.safetensors"]) as reader:
        got = dict(reader.iter_lazy(lambda entry: entry.name != "c"))
        assert list(got) == [name for name in reader.offset_keys() if name != "c"]
        assert all(torch.equal(lazy, tensors[name]) for name, lazy in got.items())
    with pytest.raises(ClosedError):
        next(reader.iter_lazy())
    with safe_open(tmp_path / "0.safetensors", backend="mmap") as reader, pytest.raises(OptionError, match="mmap"):
        reader.lazy("a")


def test_f4_that_torch_has_no_shape_for(tmp_path: Path) -> None:
    path = write_raw(
        tmp_path / "m.safetensors", {"w": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, b"abc"
    )
    with safe_open(path) as reader, pytest.raises(UnsupportedError, match="divisible by 2") as caught:
        reader.lazy("w")
    assert caught.value.tensor == "w"
