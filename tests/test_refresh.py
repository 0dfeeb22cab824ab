"""Refreshing the same destinations: as right as ``load_into``, whatever changed between two loads, and less work."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dlpack_loader import Refresher, Target, refresh
from dlpack_loader.errors import DestinationBufferError, DestinationError, DestinationTypeError, StrictError

Tensors = dict[str, torch.Tensor]


def weights(step: int, names: str = "abc") -> Tensors:
    return {name: torch.full((4, 3), float(step * 10 + k)) for k, name in enumerate(names)}


def zeros(names: str = "abc") -> Tensors:
    return {name: torch.zeros(4, 3) for name in names}


def assert_equal(got: Tensors, wanted: Tensors) -> None:
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[object]]:
    """Note the calls of a function of the module."""

    def watch(name: str) -> list[object]:
        calls: list[object] = []
        real = getattr(refresh, name)

        def noted(*args: object, **kwargs: object) -> object:
            calls.append(args)
            return real(*args, **kwargs)

        monkeypatch.setattr(refresh, name, noted)
        return calls

    return watch


def settle(*paths: Path) -> None:
    """Make files an hour old, so that their times can be trusted."""
    for path in paths:
        facts = path.stat()
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns - 3_600_000_000_000))


def test_each_step_is_loaded_into_the_same_memory(tmp_path: Path) -> None:
    destinations = zeros()
    pointers = {name: value.data_ptr() for name, value in destinations.items()}
    refresher = Refresher(destinations)
    for step in range(3):
        path = tmp_path / "model.safetensors"
        save_file(weights(step), path)
        report = refresher.load(path)
        assert report.filled == ("a", "b", "c")
        assert_equal(destinations, weights(step))
    assert pointers == {name: value.data_ptr() for name, value in destinations.items()}


def test_a_file_that_is_as_it_was_is_not_parsed_again(tmp_path: Path, count: Callable[[str], list[object]]) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights(1), path)
    settle(path)
    headers, matches = count("read_shard"), count("match")
    destinations = zeros()
    refresher = Refresher(destinations)
    for _ in range(3):
        for value in destinations.values():
            value.zero_()
        refresher.load(path)
        assert_equal(destinations, weights(1))
    assert (len(headers), len(matches)) == (1, 1)


def test_a_rewrite_in_place_with_the_same_size_and_time_is_seen(tmp_path: Path) -> None:
    """The three facts that a file is known by are the same, and so they must not be trusted for a young file."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.full((2, 6), 1.0), "b": torch.full((4, 3), 2.0)}, path)
    destinations = {"a": torch.zeros(12), "b": torch.zeros(12)}
    refresher = Refresher(
        {
            name: Target(value.view(shape))
            for (name, value), shape in zip(destinations.items(), [(2, 6), (4, 3)], strict=True)
        }
    )
    refresher.load(path)
    before = path.stat()
    raw = bytearray(path.read_bytes())
    # The two tensors change places: an entry that was kept would now read the other one's bytes.
    first, second = raw.find(b"[0,48]"), raw.find(b"[48,96]")
    assert 0 < first < second
    header = raw[:-96].replace(b"[0,48]", b"[##]").replace(b"[48,96]", b"[0,48]").replace(b"[##]", b"[48,96]")
    assert len(header) == len(raw) - 96
    with path.open("r+b") as file:
        file.write(header)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    refresher.load(path)
    assert destinations["a"].unique().tolist() == [2.0]
    assert destinations["b"].unique().tolist() == [1.0]


def test_a_settled_file_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    destinations = zeros()
    refresher = Refresher(destinations)
    for step in (1, 2):
        save_file(weights(step), path)
        settle(path)
        refresher.load(path)
        refresher.load(path)
        assert_equal(destinations, weights(step))


@pytest.mark.parametrize("index", [False, True])
def test_a_directory_for_each_step(tmp_path: Path, count: Callable[[str], list[object]], *, index: bool) -> None:
    matches = count("match")
    destinations = zeros("abcd")
    refresher = Refresher(destinations)
    for step in range(3):
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        wanted = weights(step, "abcd")
        save_file({name: wanted[name] for name in "ab"}, folder / "model-1.safetensors")
        save_file({name: wanted[name] for name in "cd"}, folder / "model-2.safetensors")
        if index:
            places = ", ".join(f'"{name}": "model-{1 + (name in "cd")}.safetensors"' for name in "abcd")
            (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{places}}}}}')
        refresher.load(folder)
        assert_equal(destinations, wanted)
    assert len(matches) == 1  # the files say the same of their tensors each time


def test_another_layout_of_the_same_tensors(tmp_path: Path, count: Callable[[str], list[object]]) -> None:
    matches = count("match")
    destinations = zeros()
    refresher = Refresher(destinations)
    save_file(weights(1), tmp_path / "one.safetensors")
    save_file({"pad": torch.zeros(5), **weights(2)}, tmp_path / "two.safetensors")
    save_file({name: weights(3)[name].to(torch.float64) for name in "abc"}, tmp_path / "three.safetensors")
    refresher.load(tmp_path / "one.safetensors")
    with pytest.raises(StrictError, match="pad"):
        refresher.load(tmp_path / "two.safetensors")
    with pytest.raises(DestinationTypeError, match="F64"):
        refresher.load(tmp_path / "three.safetensors")
    assert_equal(destinations, weights(1))  # nothing was written
    refresher.load(tmp_path / "one.safetensors")
    assert_equal(destinations, weights(1))
    assert len(matches) == 4


def test_tensors_that_move_from_file_to_file(tmp_path: Path) -> None:
    """Same files with the same headers' bytes, but the index now takes a tensor from the other one."""
    both = {name: torch.full((3,), float(ord(name))) for name in "ab"}
    other = {name: value + 1000 for name, value in both.items()}
    save_file(both, tmp_path / "model-1.safetensors")
    save_file(other, tmp_path / "model-2.safetensors")
    destinations = {"a": torch.zeros(3)}
    refresher = Refresher(destinations)
    for file, wanted in (("model-1", both), ("model-2", other), ("model-1", both)):
        (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{file}.safetensors"}}}}')
        refresher.load(tmp_path)
        assert torch.equal(destinations["a"], wanted["a"])


def test_a_tensor_that_was_given_other_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    destinations = zeros()
    refresher = Refresher(destinations)
    for step in (1, 2):
        save_file(weights(step), path)
        refresher.load(path)
        assert_equal(destinations, weights(step))
        old = destinations["b"].data
        destinations["b"].data = torch.zeros(4, 3)  # the same object, elsewhere
        assert old.data_ptr() != destinations["b"].data_ptr()


def test_a_module_and_its_tied_weights(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Linear(3, 4, bias=False)
            self.head = torch.nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

    model = Model()
    refresher = Refresher(model)
    path = tmp_path / "model.safetensors"
    save_file({"embed.weight": torch.full((4, 3), 1.0)}, path)
    assert refresher.load(path).aliases == {"head.weight": "embed.weight"}
    save_file({"embed.weight": torch.full((4, 3), 2.0)}, path)
    assert refresher.load(path).aliases == {"head.weight": "embed.weight"}
    assert model.head.weight.unique().tolist() == [2.0]
    model.head.weight = torch.nn.Parameter(torch.zeros(4, 3))  # no longer tied: it has no tensor now
    with pytest.raises(StrictError, match=r"head\.weight"):
        refresher.load(path)


def test_one_object_under_two_names_and_then_two(tmp_path: Path) -> None:
    """As a state dict with ``keep_vars`` gives tied parameters."""

    class Model:
        def __init__(self) -> None:
            shared = torch.zeros(4, 3)
            self.tensors = {"a": shared, "b": shared}

        def state_dict(self) -> Tensors:
            return dict(self.tensors)

    model = Model()
    refresher = Refresher(model)
    path = tmp_path / "model.safetensors"
    save_file(weights(1, "ab"), path)
    assert refresher.load(path).aliases == {"b": "a"}
    model.tensors["a"] = torch.zeros(4, 3)
    save_file(weights(2, "ab"), path)
    assert refresher.load(path).filled == ("a", "b")
    assert_equal(model.tensors, weights(2, "ab"))


def test_a_list_of_views_without_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    destinations = zeros("a")
    refresher = Refresher({**destinations, "rows": [destinations["a"][:1], Target(destinations["a"][2:])]})
    for step in (1, 2, 3):
        save_file(weights(step, "a"), path)
        assert refresher.load(path).aliases == {"rows": "a"}
        assert_equal(destinations, weights(step, "a"))


def test_a_list_is_kept_as_it_was_given(tmp_path: Path) -> None:
    """Each load fills the same destinations, whether what the last one worked out still holds or not."""
    path = tmp_path / "model.safetensors"
    first, second = torch.zeros(4, 3), torch.zeros(4, 3)
    destinations = [first]
    refresher = Refresher({"a": destinations}, strict=False)
    destinations.append(second)
    for names in ("a", "ab"):  # another layout: matched anew
        save_file(weights(3, names), path)
        refresher.load(path)
        assert torch.equal(first, weights(3)["a"])
        assert not second.any()


def test_memory_that_can_no_longer_be_written(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    first, second = np.zeros((4, 3), np.float32), np.zeros((4, 3), np.float32)
    refresher = Refresher({"a": first, "b": second})
    save_file(weights(1, "ab"), path)
    refresher.load(path)
    second.flags.writeable = False
    save_file(weights(2, "ab"), path)
    with pytest.raises(DestinationBufferError, match="read-only") as caught:
        refresher.load(path)
    assert caught.value.tensor == "b"
    np.testing.assert_array_equal(first, weights(1)["a"].numpy())


def test_what_is_known_of_files_does_not_grow(tmp_path: Path) -> None:
    refresher = Refresher(zeros())
    sizes = set()
    for step in range(1, 6):
        path = tmp_path / f"{step}.safetensors"
        save_file(weights(step), path)
        refresher.load(path)
        known = refresher._headers
        sizes.add((len(known._shards), len(known._named), len(known._settled)))
    assert sizes == {(1, 1, 1)}


def test_padded_targets_and_parts(tmp_path: Path) -> None:
    padded, part = torch.full((6, 3), 9.0), np.zeros((2, 3), np.float32)
    refresher = Refresher({"a": [Target(padded, padding="zero"), Target(part, index=np.s_[1:3])]})
    path = tmp_path / "model.safetensors"
    for step in (1, 2, 3):
        value = torch.arange(12.0).reshape(4, 3) + step
        save_file({"a": value}, path)
        padded[4:] = 9
        refresher.load(path)
        assert torch.equal(padded[:4], value)
        assert padded[4:].unique().tolist() == [0.0]
        np.testing.assert_array_equal(part, value[1:3].numpy())


def test_in_the_background(tmp_path: Path) -> None:
    destinations = zeros()
    refresher = Refresher(destinations)
    path = tmp_path / "model.safetensors"
    for step in (1, 2):
        save_file(weights(step), path)
        assert refresher.load(path, wait=False).wait().filled == ("a", "b", "c")
        assert_equal(destinations, weights(step))


def test_a_truncated_file_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    destinations = zeros()
    refresher = Refresher(destinations)
    path = tmp_path / "model.safetensors"
    save_file(weights(1), path)
    refresher.load(path)
    save_file(weights(2), path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match="incomplete metadata"):
        refresher.load(path)
    assert_equal(destinations, weights(1))
    save_file(weights(3), path)
    refresher.load(path)
    assert_equal(destinations, weights(3))


def test_what_is_no_destination(tmp_path: Path) -> None:
    with pytest.raises(DestinationTypeError, match="a mapping from names or a module"):
        Refresher(lambda entry: None)
    refresher = Refresher({"a": torch.zeros(5)})
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    for _ in range(2):
        with pytest.raises(DestinationError, match="shape"):
            refresher.load(tmp_path / "model.safetensors")
