"""Deferred copies: torch can't tell them from immediate ones, and they are read together."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlpack_loader import filling, safe_open
from dlpack_loader.errors import OptionError, StorageError, TruncatedError
from dlpack_loader.lazy import LazyReport, LazyTensor, deferred
from dlpack_loader.reader import Reader
from tests.files import save

Data = tuple[Path, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    path = tmp_path_factory.mktemp("deferring") / "m.safetensors"
    tensors = {name: torch.randn(8, 6) for name in "abcd"} | {"half": torch.randn(8, 6).half(), "s": torch.tensor(2.5)}
    return path, save(path, tensors)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many copies each plan had."""
    seen: list[int] = []
    original = filling.fill

    def fill(access: Any, found: Any, *rest: Any) -> Any:
        seen.append(len(found.transfers))
        return original(access, found, *rest)

    monkeypatch.setattr(deferred, "fill", fill)
    return seen


def fresh() -> dict[str, torch.Tensor]:
    """Destinations: two of their own, and three that share memory."""
    fused = torch.full((20, 6), -1.0)
    return {"one": torch.full((8, 6), -1.0), "two": torch.full((8, 6), -1.0), "fused": fused, "upper": fused[:8],
            "middle": fused[4:12], "lower": fused[12:]}  # fmt: skip


# One step of a loader: an operation on the destinations, given the tensors of the checkpoint.
Step = Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]

STEPS: dict[str, Step] = {
    "copy one": lambda d, s: d["one"].copy_(s["a"]),
    "copy two": lambda d, s: d["two"].copy_(s["b"]),
    "copy upper": lambda d, s: d["upper"].copy_(s["c"]),
    "copy middle": lambda d, s: d["middle"].copy_(s["d"]),
    "copy lower": lambda d, s: d["lower"].copy_(s["a"]),
    "copy twice": lambda d, s: d["one"].copy_(s["d"]),
    "copy turned": lambda d, s: d["two"][:6].copy_(s["a"].t()[:, :6]),
    "copy columns": lambda d, s: d["fused"][:8, :3].copy_(s["b"][:, 3:]),
    "copy other columns": lambda d, s: d["fused"][:8, 3:].copy_(s["b"][:, :3]),
    "narrow": lambda d, s: d["fused"].narrow(0, 2, 4).copy_(s["b"].narrow(0, 4, 4)),
    "cast": lambda d, s: d["one"].copy_(s["half"]),
    "broadcast": lambda d, s: d["fused"].copy_(s["a"][0]),
    "broadcast columns": lambda d, s: d["one"].copy_(s["a"][:, 1:2]),
    "broadcast a scalar": lambda d, s: d["one"].copy_(s["s"]),
    "scalar": lambda d, s: d["two"][0, 0].copy_(s["s"]),
    "zero": lambda d, s: d["upper"].zero_(),
    "zero rest": lambda d, s: d["fused"][18:].zero_(),
    "fill": lambda d, s: d["one"].fill_(3),
    "add": lambda d, s: d["one"].add_(s["b"]),
    "double": lambda d, s: d["fused"].mul_(2),
    "between": lambda d, s: d["two"].copy_(d["one"]),
    "between views": lambda d, s: d["upper"].copy_(d["lower"]),
    "setitem": lambda d, s: d["fused"].__setitem__(slice(0, 3), 4.0),
    "set lazy item": lambda d, s: d["fused"].__setitem__(slice(1, 9), s["c"]),
    "index_copy": lambda d, s: d["fused"].index_copy_(0, torch.arange(8), s["d"]),
    "foreach mul": lambda d, s: torch._foreach_mul_([d["one"], d["two"]], 3),
    "foreach copy": lambda d, s: torch._foreach_copy_([d["one"], d["upper"], d["two"]], [s["a"], d["two"], s["c"]]),
    "foreach over": lambda d, s: torch._foreach_copy_([d["upper"], d["middle"], d["one"]], [s["a"], d["one"], s["b"]]),
    "out": lambda d, s: torch.add(d["two"], 1, out=d["one"]),
    "sum": lambda d, s: d["fused"].sum(),
    "item": lambda d, s: d["one"][2, 3].item(),
    "equal": lambda d, s: torch.equal(d["one"], d["two"]),
    "list": lambda d, s: d["lower"].tolist(),
    "numpy": lambda d, s: d["one"].numpy().copy(),
    "asarray": lambda d, s: np.asarray(d["upper"]).copy(),
    "dlpack": lambda d, s: np.from_dlpack(d["two"]).copy(),
    "bytes": lambda d, s: bytes(d["fused"].untyped_storage()),
    "pickle": lambda d, s: copy.deepcopy(d["fused"]),
    "save": lambda d, s: load(d["one"]),
    "cpu": lambda d, s: d["one"].to(torch.float64),
    "to": lambda d, s: s["a"].to("cpu").numpy().copy(),
    "cat": lambda d, s: torch.cat([d["one"], s["a"], d["two"]]),
    "stack": lambda d, s: torch.stack([d["upper"], d["lower"]]),
    "clone": lambda d, s: d["middle"].clone(),
    "isfinite": lambda d, s: torch.isfinite(d["one"]).all(),
    "str": lambda d, s: str(d["lower"]),
    "resize": lambda d, s: d["two"].resize_(8, 6),
    "share": lambda d, s: d["two"].share_memory_(),
    "lazy": lambda d, s: s["a"].sum(),
}  # fmt: skip


def load(value: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    return bool(one == other)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=8), st.sampled_from(["on", "no grad", "inference"])
)
def test_deferred_copies_are_what_immediate_ones_are(data: Data, steps: list[str], mode: str) -> None:
    path, tensors = data
    modes: dict[str, Callable[[], Any]] = {
        "on": nullcontext,
        "no grad": torch.no_grad,
        "inference": torch.inference_mode,
    }
    with modes[mode](), safe_open(path) as reader:
        wanted, filled = fresh(), fresh()
        lazies = {name: reader.lazy(name) for name in tensors}
        expected = [looked_at(step, wanted, tensors) for step in steps]
        with reader.deferring():
            got = [looked_at(step, filled, lazies) for step in steps]
        assert all(map(equal, got, expected)), steps
        for name, value in wanted.items():
            assert torch.equal(filled[name], value), (name, steps)
            # Under a mode, whichever it is, torch does not count what its own foreach operations write.
            if mode != "inference" and "foreach mul" not in steps:
                assert filled[name]._version == value._version, (name, steps)


READS = frozenset(STEPS) & {
    *("sum", "item", "equal", "list", "numpy", "asarray", "dlpack", "bytes", "pickle", "save", "cpu", "to", "cat"),
    *("stack", "clone", "isfinite", "str", "lazy"),
}
"""Steps that return what they saw, as a copy."""


def looked_at(name: str, destinations: dict[str, torch.Tensor], sources: dict[str, Any]) -> Any:
    value = STEPS[name](destinations, sources)
    return value if name in READS else None


@pytest.mark.parametrize("name", sorted(READS - {"to", "lazy"}))
def test_each_way_to_look_at_a_destination_sees_its_tensor(data: Data, plans: list[int], name: str) -> None:
    """With nothing but that look between the copies and the end, so that nothing else can make them."""
    path, tensors = data
    copies = (("one", "a"), ("two", "b"), ("upper", "c"), ("lower", "d"))
    wanted, filled = fresh(), fresh()
    for into, source in copies:
        wanted[into].copy_(tensors[source])
    with safe_open(path) as reader:
        lazies = {name: reader.lazy(name) for name in tensors}
        with reader.deferring():
            for into, source in copies:
                filled[into].copy_(lazies[source])
            assert plans == []
            value = looked_at(name, filled, lazies)
            assert plans == [4]
        assert plans == [4]
    assert equal(value, looked_at(name, wanted, tensors))


def test_views_and_other_memory_make_nothing_happen(data: Data, plans: list[int]) -> None:
    path, tensors = data
    with safe_open(path) as reader:
        one, other = torch.zeros(8, 6), torch.zeros(8, 6)
        parameter = torch.nn.Parameter(torch.zeros(8, 6))
        with reader.deferring():
            one.copy_(reader.lazy("a"))
            parameter.data.copy_(reader.lazy("b"))
            with torch.no_grad():
                parameter.detach().view(48)
            for view in (one.t(), one[2:4, 1], one.view(-1), one.chunk(2)[0], one.unflatten(0, (2, 4)), one.detach()):
                assert view.shape
            assert one.data.is_contiguous()
            other.add_(1).sum().item()
            other.numpy()
            torch.zeros(3).copy_(reader.lazy("c")[0, :3])
            reader.lazy("c").sum()
            torch.empty(8, 6, device="meta").copy_(reader.lazy("d"))
            assert plans == []
            assert reader.lazy_report().direct == 0
        assert plans == [3]
        assert torch.equal(one, tensors["a"])
        assert torch.equal(parameter, tensors["b"])
        assert reader.lazy_report() == LazyReport(3, 0, 1, 192 * 3 + 12, 192 * 3 + 12, 192 * 3 + 12)


def test_fused_parameters_are_one_plan(data: Data, plans: list[int]) -> None:
    path, tensors = data
    with safe_open(path) as reader:
        rows, columns = torch.nn.Parameter(torch.zeros(32, 6)), torch.nn.Parameter(torch.zeros(8, 24))
        with reader.deferring():
            for k, name in enumerate("abcd"):
                rows.data.narrow(0, 8 * k, 8).copy_(reader.lazy(name))
        assert plans == [4]
        assert torch.equal(rows, torch.cat([tensors[name] for name in "abcd"]))
        with reader.deferring():
            for k, name in enumerate("abcd"):
                columns.data[:, 6 * k : 6 * k + 6].copy_(reader.lazy(name))
        assert torch.equal(columns, torch.cat([tensors[name] for name in "abcd"], 1))


def test_what_overlaps_is_written_in_turn(data: Data, plans: list[int]) -> None:
    path, tensors = data
    with safe_open(path) as reader:
        for first, second in (("upper", "middle"), ("middle", "upper")):
            destinations = fresh()
            with reader.deferring():
                destinations[first].copy_(reader.lazy("a"))
                destinations[second].copy_(reader.lazy("b"))
            assert torch.equal(destinations[second], tensors["b"])
        assert plans == [1, 1, 1, 1]


def test_another_readers_copies_keep_their_turn(data: Data, tmp_path: Path) -> None:
    """Whether it defers too or not, whichever copy comes last counts."""
    path, tensors = data
    other = save(tmp_path / "o.safetensors", {"o": torch.randn(8, 6)})["o"]
    with safe_open(path) as reader, safe_open(tmp_path / "o.safetensors") as second:
        for both in (False, True):
            for mine_last in (False, True):
                for foreach in (False, True):
                    into = torch.zeros(8, 6)
                    with reader.deferring(), second.deferring() if both else nullcontext():
                        order: list[torch.Tensor] = [reader.lazy("a"), second.lazy("o")]
                        order = order[::-1] if mine_last else order
                        if foreach:
                            torch._foreach_copy_([into, into], order)
                        else:
                            for lazy in order:
                                into.copy_(lazy)
                    assert torch.equal(into, tensors["a"] if mine_last else other), (both, mine_last, foreach)


class Wrapped(torch.Tensor):
    """A tensor that has another one inside."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stubs know the function that switches it off
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if LazyTensor in types:
            return NotImplemented  # what it does not know it leaves to the other class
        return func(*[arg.inside if isinstance(arg, Wrapped) else arg for arg in args], **(kwargs or {}))


def test_a_wrapper_of_a_destination_is_a_destination(data: Data) -> None:
    path, tensors = data
    with safe_open(path) as reader:
        into = torch.zeros(8, 6)
        with reader.deferring():
            into.copy_(reader.lazy("a"))
            Wrapped(into).copy_(reader.lazy("b"))
        assert torch.equal(into, tensors["b"])
        with reader.deferring():
            into.copy_(reader.lazy("a"))
            total = Wrapped(into).sum()
        assert torch.equal(total, tensors["a"].sum())


def test_after_an_exception_nothing_is_written(data: Data, plans: list[int]) -> None:
    path, tensors = data
    with safe_open(path) as reader:
        into = torch.full((8, 6), 5.0)
        with pytest.raises(KeyError, match="mine"), reader.deferring():  # noqa: PT012
            into.copy_(reader.lazy("a"))
            raise KeyError("mine")
        assert plans == []
        assert bool((into == 5).all())
        into.copy_(reader.lazy("a"))  # at once again
        assert torch.equal(into, tensors["a"])
        with reader.deferring():
            into.copy_(reader.lazy("b"))
        assert torch.equal(into, tensors["b"])


def test_nested_contexts_are_refused(data: Data) -> None:
    path, tensors = data
    with safe_open(path) as reader:
        into = torch.zeros(8, 6)
        with reader.deferring():
            into.copy_(reader.lazy("a"))
            with pytest.raises(OptionError, match="deferred already"), reader.deferring():
                pass
            assert reader.lazy_report().direct == 0
        assert torch.equal(into, tensors["a"])


def test_other_threads_copy_at_once(data: Data, plans: list[int]) -> None:
    path, tensors = data
    with safe_open(path) as reader:
        mine, theirs = torch.zeros(8, 6), torch.zeros(8, 6)
        with reader.deferring():
            mine.copy_(reader.lazy("a"))
            worker = threading.Thread(target=lambda: theirs.copy_(reader.lazy("b")))
            worker.start()
            worker.join()
            assert torch.equal(theirs, tensors["b"])
            assert plans == []
        assert torch.equal(mine, tensors["a"])


def test_threads_defer_each_for_itself(data: Data) -> None:
    path, tensors = data
    wrong: list[str] = []
    with safe_open(path) as reader:
        start = threading.Barrier(4)

        def work(names: str) -> None:
            start.wait()
            for _ in range(20):
                into = {name: torch.zeros(8, 6) for name in names}
                with reader.deferring():
                    for name, destination in into.items():
                        destination.copy_(reader.lazy(name))
                wrong.extend(name for name in names if not torch.equal(into[name], tensors[name]))

        workers = [threading.Thread(target=work, args=(names,)) for names in ("abcd", "dcba", "ba", "c")]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert wrong == []
        assert reader.lazy_report().direct == 20 * (4 + 4 + 2 + 1)


def test_the_files_of_deferred_copies_are_kept_open(tmp_path: Path) -> None:
    """A loader drops each lazy tensor once copied; files may go, and the reader be closed, before all is read."""
    tensors: dict[str, torch.Tensor] = {}
    for k in range(12):
        tensors |= save(tmp_path / f"{k}.safetensors", {str(k): torch.randn(30, 30)})
    reader = safe_open(sorted(tmp_path.iterdir()))
    filled = {name: torch.zeros(30, 30) for name in tensors}
    with reader.deferring():
        for name, lazy in reader.iter_lazy():
            filled[name].copy_(lazy)
        del lazy
        for path in tmp_path.iterdir():
            path.unlink()
        reader.close()
    assert all(torch.equal(filled[name], tensor) for name, tensor in tensors.items())


def test_storage_that_moves_is_followed(data: Data) -> None:
    """A storage taken before the copy moves its bytes without a word to torch's dispatcher."""
    path, tensors = data
    with safe_open(path) as reader:
        into = torch.zeros(8, 6)
        storage = into.untyped_storage()
        with reader.deferring():
            into.copy_(reader.lazy("a"))
            storage.share_memory_()
        assert torch.equal(into, tensors["a"])
        freed = torch.zeros(8, 6)
        storage = freed.untyped_storage()
        with pytest.raises(ValueError, match="freed"), reader.deferring():  # noqa: PT012
            freed.copy_(reader.lazy("a"))
            storage.resize_(0)


def test_destinations_are_kept(data: Data) -> None:
    path, tensors = data
    kept: list[np.ndarray[Any, Any]] = []
    with safe_open(path) as reader, reader.deferring():
        for name in "abcd":
            array = np.zeros((8, 6), np.float32)
            torch.from_numpy(array).copy_(reader.lazy(name))
            kept.append(array)
    assert all(np.array_equal(array, tensors[name].numpy()) for array, name in zip(kept, "abcd", strict=True))


@contextmanager
def cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    path = tmp_path / "m.safetensors"
    save(path, {"a": torch.ones(100), "apart": torch.ones(100), "b": torch.ones(1 << 19), "c": torch.ones(100)})
    with safe_open(path) as reader:
        reader.lazy("a").sum()
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size - (1 << 20))
        monkeypatch.setattr(type(reader._access.files), "_check", lambda *_: None)  # cut after the check
        yield reader


def test_errors_at_the_end_name_what_is_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cut(tmp_path, monkeypatch) as reader:
        filled = {name: torch.zeros(size) for name, size in (("a", 100), ("b", 1 << 19), ("c", 100))}
        with pytest.raises(TruncatedError) as caught, reader.deferring():  # noqa: PT012
            for name, destination in filled.items():
                destination.copy_(reader.lazy(name))
        assert "b" in caught.value.dirty
        assert "a" not in caught.value.dirty
        assert caught.value.tensor in ("b", "c")
        assert bool((filled["a"] == 1).all())
        with pytest.raises(StorageError), reader.deferring():  # nothing is left of it
            filled["c"].copy_(reader.lazy("c"))
        assert reader.lazy_report().direct == 0


def test_an_error_in_between_is_raised_by_the_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cut(tmp_path, monkeypatch) as reader:
        filled = torch.zeros(1 << 19)
        with reader.deferring():
            filled.copy_(reader.lazy("b"))
            with pytest.raises(TruncatedError) as caught:
                filled.sum()
            assert caught.value.dirty == ("b",)


def test_autograd_sees_the_writes_that_torch_sees(data: Data) -> None:
    """What is saved for a gradient after the copy is good, though the bytes come later; what was before is not."""
    path, tensors = data
    with safe_open(path) as reader:
        factor, start = torch.zeros(8, 6), torch.ones(8, 6, requires_grad=True)
        before = (start * factor).sum()
        with reader.deferring():
            factor.copy_(reader.lazy("a"))
            assert factor._version == 1
            after = (start * factor).sum()
        assert factor._version == 1
        after.backward()
        assert start.grad is not None
        assert torch.equal(start.grad, tensors["a"])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()
        leaf = torch.nn.Parameter(torch.zeros(8, 6))
        with reader.deferring(), pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            leaf.copy_(reader.lazy("a"))
        assert not leaf.any()


def test_lazy_tensors_stay_lazy(data: Data, plans: list[int]) -> None:
    path, _ = data
    with safe_open(path) as reader, reader.deferring():
        lazy = reader.lazy("a")
        for view in (lazy.t(), lazy[2:], *lazy.chunk(2), *lazy.unbind(1), lazy.view(torch.int32), lazy.detach()):
            assert isinstance(view, LazyTensor)
        assert torch.equal(torch.empty_like(lazy).fill_(1), torch.ones(8, 6))
    assert plans == []
    assert reader.lazy_report() == LazyReport()
