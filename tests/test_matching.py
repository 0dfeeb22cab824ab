"""Which destination is filled from which tensor, strict loads, tied weights, and no write on any fault."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlpack_loader.destination import Target
from dlpack_loader.errors import (
    DestinationBufferError,
    DestinationError,
    DestinationTypeError,
    LoaderError,
    SelectionError,
    StrictError,
)
from dlpack_loader.header import Entry
from dlpack_loader.load import load_into
from dlpack_loader.reader import Reader, safe_open
from dlpack_loader.transfer import LoadReport
from tests.files import save

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.arange(6, 12, dtype=torch.float32).reshape(2, 3),
    "c": torch.arange(4, dtype=torch.int64),
    "z": torch.empty(0, 2),
}


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    save(tmp_path / "m.safetensors", TENSORS)
    with safe_open(tmp_path / "m.safetensors", "np") as opened:
        yield opened


def blanks(*names: str) -> dict[str, Any]:
    return {name: torch.full_like(TENSORS[name], 77) for name in names}


def load(reader: Reader, destinations: Any, **options: Any) -> LoadReport:
    report: LoadReport = load_into(reader, destinations, **options)
    return report


def holds(destination: Any, name: str, index: Any = ...) -> bool:
    return np.array_equal(np.asarray(destination), TENSORS[name].numpy()[index])


# Names


def test_a_mapping_fills_by_name(reader: Reader) -> None:
    destinations = blanks("a", "b", "c", "z")
    report = load(reader, destinations)
    assert all(holds(value, name) for name, value in destinations.items())
    assert report.filled == ("a", "b", "c", "z")
    assert (report.unfilled, report.unexpected, report.declined, report.aliases) == ((), (), (), {})
    assert report.bytes_written == 24 + 24 + 32


def test_a_target_takes_a_part(reader: Reader) -> None:
    row, column = np.zeros(3, np.float32), np.zeros(2, np.float32)
    report = load(reader, {"a": Target(row, 1), "b": [Target(column, np.s_[:, -1])]}, strict=False)
    assert holds(row, "a", 1)
    assert holds(column, "b", np.s_[:, -1])
    assert report.filled == ("a", "b")
    assert report.unexpected == ("c", "z")


def test_a_list_fills_several(reader: Reader) -> None:
    whole, top, turned = np.zeros((2, 3), np.float32), np.zeros((1, 3), np.float32), np.zeros((3, 2), np.float32).T
    for items in ([whole, Target(top, np.s_[:1]), turned], (whole, Target(top, np.s_[:1]), turned)):
        for item in (whole, top, turned):
            item[...] = 0
        report = load(reader, {"a": items}, strict=False)
        assert holds(whole, "a")
        assert holds(top, "a", np.s_[:1])
        assert holds(turned, "a")
        assert report.filled == ("a",)
        assert report.bytes_written == 24 + 12 + 24


def test_an_empty_list_is_refused(reader: Reader) -> None:
    with pytest.raises(DestinationTypeError, match="the list of destinations is empty \\(tensor 'a'\\)"):
        load(reader, {"a": []}, strict=False)


def test_several_tensors_fill_one_fused_destination(reader: Reader) -> None:
    fused = torch.zeros(4, 3)
    report = load(reader, {"a": fused[:2], "b": fused[2:]}, strict=False)
    assert fused.flatten().tolist() == list(range(12))
    assert report.filled == ("a", "b")


def test_a_resolver_is_asked_for_every_tensor_in_file_order(reader: Reader) -> None:
    asked: list[Entry] = []
    destinations = blanks("a", "c")

    def resolve(entry: Entry) -> Any:
        asked.append(entry)
        return destinations.get(entry.name)

    report = load(reader, resolve)
    assert [entry.name for entry in asked] == reader.offset_keys()
    assert {entry.name: (entry.dtype, entry.shape, entry.nbytes) for entry in asked} == {
        "a": ("F32", (2, 3), 24),
        "b": ("F32", (2, 3), 24),
        "c": ("I64", (4,), 32),
        "z": ("F32", (0, 2), 0),
    }
    assert all(holds(value, name) for name, value in destinations.items())
    assert sorted(report.filled) == ["a", "c"]
    assert sorted(report.declined) == ["b", "z"]
    assert (report.unfilled, report.unexpected) == ((), ())


def test_a_resolver_may_give_targets_and_lists(reader: Reader) -> None:
    row, whole = np.zeros(3, np.float32), np.zeros((2, 3), np.float32)
    load(reader, lambda entry: [Target(row, 0), whole] if entry.name == "b" else None)
    assert holds(row, "b", 0)
    assert holds(whole, "b")


def test_what_a_resolver_raises_is_the_callers(reader: Reader) -> None:
    def resolve(entry: Entry) -> Any:
        raise LookupError(entry.name)

    with pytest.raises(LookupError, match=r"^[abcz]$"):
        load(reader, resolve)


@pytest.mark.parametrize("destinations", [None, 3, [torch.zeros(2, 3)], torch.zeros(2, 3), torch.nn.Linear(3, 2)])
def test_what_is_neither_mapping_nor_resolver(reader: Reader, destinations: Any) -> None:
    with pytest.raises(DestinationTypeError) as caught:
        load(reader, destinations)
    kind = type(destinations).__name__
    assert caught.value.message == f"destinations are a mapping from names or a resolver, not {kind}"
    assert "model.state_dict()" in str(caught.value)


# Strict


def test_strict_lists_both_sides(reader: Reader) -> None:
    destinations = blanks("a") | {"x": torch.zeros(1), "y": torch.zeros(1)}
    with pytest.raises(StrictError) as caught:
        load(reader, destinations)
    error = caught.value
    assert isinstance(error, KeyError)
    assert (error.unfilled, error.unexpected) == (("x", "y"), ("b", "c", "z"))
    assert str(error) == (
        "destinations and checkpoint do not name the same tensors: 2 destination(s) without a tensor: x, y; "
        "3 tensor(s) without a destination: b, c, z. Pass strict=False to load what matches"
    )
    assert destinations["a"].unique().tolist() == [77]

    report = load(reader, destinations, strict=False)
    assert (report.filled, report.unfilled, report.unexpected) == (("a",), ("x", "y"), ("b", "c", "z"))
    assert destinations["x"].tolist() == [0]


def test_strict_errors_are_not_endless(reader: Reader) -> None:
    with pytest.raises(StrictError, match=r"20 destination\(s\) without a tensor: x00, .*, x07 and 12 more; 4 tensor"):
        load(reader, {f"x{k:02}": torch.zeros(1) for k in range(20)})


def test_strict_says_what_does_not_fit_either(reader: Reader) -> None:
    with pytest.raises(
        StrictError, match="3 tensor\\(s\\) without a destination: b, c, z; 1 destination\\(s\\) that do not fit: a"
    ):
        load(reader, {"a": torch.zeros(3)})


# Tied weights


def test_tied_weights_of_which_the_checkpoint_has_one(reader: Reader) -> None:
    tied = torch.zeros(2, 3)
    for names, filled in ((("a", "x"), "a"), (("0", "b"), "b")):
        report = load(reader, dict.fromkeys(names, tied), strict=False)
        assert holds(tied, filled)
        assert report.filled == (filled,)
        assert report.aliases == {next(name for name in names if name != filled): filled}
        assert report.unfilled == ()
        assert report.bytes_written == 24


def test_tied_weights_count_once_when_strict(reader: Reader) -> None:
    destinations = blanks("a", "b", "c", "z")
    destinations["tied"] = destinations["b"]
    destinations["view"] = destinations["c"].view(4)
    report = load(reader, destinations)
    assert report.aliases == {"tied": "b", "view": "c"}


def test_tied_weights_of_which_the_checkpoint_has_both(reader: Reader) -> None:
    tied = np.zeros((2, 3), np.float32)
    report = load(reader, {"b": tied, "a": tied, "c": np.zeros(4, np.int64), "z": np.zeros((0, 2), np.float32)})
    assert holds(tied, "a")  # the first of the names, sorted
    assert report.filled == ("a", "c", "z")
    assert report.aliases == {"b": "a"}
    assert report.bytes_written == 24 + 32


def test_a_resolver_gives_each_tensor_its_own_memory(reader: Reader) -> None:
    """It could have been a buffer used twice, of which one tensor would be lost; it returns None for a tied one."""
    tied = np.zeros((2, 3), np.float32)
    with pytest.raises(DestinationBufferError, match="overlap in memory"):
        load(reader, lambda entry: tied if entry.name in "ab" else None)
    assert not tied.any()
    report = load(reader, lambda entry: tied if entry.name == "b" else None)
    assert report.filled == ("b",)
    assert holds(tied, "b")


def test_tied_bits(reader: Reader) -> None:
    bits = np.zeros((2, 3), np.uint32)
    targets = {name: Target(bits, reinterpret=True) for name in ("a", "b", "x")}
    report = load(reader, targets, strict=False)
    assert report.aliases == {"b": "a", "x": "a"}
    assert holds(bits.view(np.float32), "a")


def test_a_view_of_what_is_filled_is_an_alias_of_it(reader: Reader) -> None:
    base = torch.zeros(4, 3)
    for other in (base[:2].reshape(3, 2), base[:2].flatten(), base[1], base[:2, 1], base[:2].view(torch.int32)):
        report = load(reader, {"a": base[:2], "x": other}, strict=False)
        assert report.unfilled == ()
        assert report.aliases == {"x": "a"}


def test_memory_of_another_place_is_no_alias(reader: Reader) -> None:
    base = torch.zeros(4, 3)
    for other in (base[1:3], base[2], base, base[:, 1]):
        report = load(reader, {"a": base[:2], "x": other}, strict=False)
        assert report.unfilled == ("x",)
        assert report.aliases == {}


def test_an_orphan_that_cannot_be_written_is_unfilled(reader: Reader) -> None:
    orphans: dict[str, Any] = {"x": object(), "y": torch.zeros(1, device="meta"), "u": [torch.zeros(1)]}
    report = load(reader, blanks("a") | orphans, strict=False)
    assert sorted(report.unfilled) == ["u", "x", "y"]


def test_empty_tensors_are_never_aliases(reader: Reader) -> None:
    empty = torch.empty(0, 2)
    report = load(reader, {"z": empty, "x": empty}, strict=False)
    assert report.filled == ("z",)
    assert report.unfilled == ("x",)


def test_two_parts_for_one_memory_overlap(reader: Reader) -> None:
    row = np.zeros(3, np.float32)
    cases: list[Mapping[str, Any]] = [
        {"a": Target(row, 0), "b": Target(row, 0)},
        {"a": Target(row, 0), "b": Target(row, 1)},
        {"a": [Target(row, 0), Target(row, 1)]},
        {"a": [np.zeros((2, 3), np.float32)] * 2},
    ]
    for destinations in cases:
        with pytest.raises(DestinationBufferError, match="overlap in memory"):
            load(reader, destinations, strict=False)
    assert not row.any()


# Nothing is written when anything is wrong


def test_every_fault_is_in_one_error(reader: Reader) -> None:
    destinations = {
        "a": torch.zeros(3, 2),
        "b": [Target(torch.zeros(3), 7), torch.zeros(2, 3, dtype=torch.float16)],
        "c": torch.zeros(4, device="meta"),
        "z": object(),
    }
    with pytest.raises(DestinationError) as caught:
        load(reader, destinations)
    assert str(caught.value).startswith(
        "the checkpoint gives shape [2, 3] and the destination 'a' has [3, 2]; "
        "5 destinations do not fit, the others are 'b', 'b', 'c', 'z' (tensor 'a', file "
    )


def test_of_many_faults_some_are_named(reader: Reader) -> None:
    with pytest.raises(
        DestinationTypeError, match=r"; 12 destinations do not fit, the others are ('a', ){7}'a' and 3 more"
    ):
        load(reader, {"a": [None] * 12}, strict=False)


FAULTS: dict[str, tuple[Any, type[LoaderError]]] = {
    "shape": (torch.zeros(5, dtype=torch.int64), DestinationError),
    "dtype": (torch.zeros(4), DestinationTypeError),
    "kind": (None, DestinationTypeError),
    "read-only": (np.frombuffer(bytes(32), np.int64), DestinationBufferError),
    "index": (Target(torch.zeros((), dtype=torch.int64), 4), SelectionError),
    "folded": (torch.zeros(1, dtype=torch.int64).expand(4), DestinationBufferError),
}


@pytest.mark.parametrize("fault", [*FAULTS, "overlap", "strict"])
def test_nothing_is_written_or_opened_when_one_is_wrong(
    reader: Reader, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = torch.full((5, 3), 77.0)
    destinations: dict[str, Any] = {"a": base[:2], "b": base[2:4], "z": torch.empty(0, 2)}
    kind: type[LoaderError] = StrictError
    if fault == "overlap":
        destinations |= {"b": base[1:3], "c": torch.full((4,), 77)}
        kind = DestinationBufferError
    elif fault != "strict":
        destinations["c"], kind = FAULTS[fault]

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a file was opened")

    for module, name in ((os, "open"), (io, "open"), (builtins, "open")):
        monkeypatch.setattr(module, name, refuse)
    with pytest.raises(LoaderError) as caught:
        load(reader, destinations)
    assert type(caught.value) is kind
    assert base.unique().tolist() == [77]
    if fault in FAULTS:
        assert caught.value.tensor == "c"


def test_the_trap_for_opened_files_works(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a file was opened")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(AssertionError, match="a file was opened"):
        load(reader, blanks("a", "b", "c", "z"))


def test_one_destination_needs_no_other(reader: Reader) -> None:
    row = np.zeros(3, np.float32)
    assert reader.read_into("b", row, 1).filled == ("b",)
    assert holds(row, "b", 1)
    with pytest.raises(
        DestinationError, match="the checkpoint gives shape \\[2, 3\\] and the destination 'b' has \\[3\\]"
    ):
        reader.read_into("b", row)
