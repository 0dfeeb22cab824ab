"""A file, a list, a directory, an index: read as one, checked as a whole."""

from __future__ import annotations

import errno
import os
from itertools import permutations
from pathlib import Path

import pytest
import torch

from dlpack_loader.checkpoint import open_checkpoint
from dlpack_loader.errors import (
    CheckpointError,
    FileIsDirectoryError,
    FileMissingError,
    HeaderError,
    SourceError,
    TensorNotFoundError,
    UnsupportedError,
)
from tests.files import save, write_index, write_raw


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Two shards with one tensor name each, and metadata in both."""
    paths = [tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"]
    save(paths[0], {"b": torch.arange(4), "a": torch.ones(2)}, format="pt", only="first")
    save(paths[1], {"c": torch.zeros(3)}, format="np", second="yes")
    return paths


def test_one_file(tmp_path: Path) -> None:
    tensors = save(tmp_path / "m.safetensors")
    checkpoint = open_checkpoint(tmp_path / "m.safetensors")
    assert checkpoint.keys() == sorted(tensors)
    assert len(checkpoint) == len(tensors)
    assert "scale" in checkpoint
    assert "nothing" not in checkpoint
    assert checkpoint.nbytes() == sum(tensor.nbytes for tensor in tensors.values())
    entry = checkpoint.entry("steps")
    assert (entry.name, entry.dtype, entry.shape, entry.nbytes) == ("steps", "I64", (7,), 56)
    assert entry.file == str(tmp_path / "m.safetensors")
    with open(entry.file, "rb") as file:
        file.seek(entry.offset)
        assert file.read(entry.nbytes) == tensors["steps"].numpy().tobytes()


def test_a_list_reads_as_one_in_any_order(shards: list[Path]) -> None:
    seen = set()
    for order in permutations(shards):
        checkpoint = open_checkpoint(list(order))
        assert checkpoint.keys() == ["a", "b", "c"]
        metadata = checkpoint.metadata()
        assert metadata is not None
        seen.add((tuple(checkpoint.offset_keys()), tuple(sorted(metadata.items()))))
    assert seen == {(("b", "a", "c"), (("format", "pt"), ("only", "first"), ("second", "yes")))}


def test_a_file_given_twice_counts_once(shards: list[Path]) -> None:
    assert open_checkpoint([shards[0], shards[0]]).keys() == ["a", "b"]


def test_a_directory_reads_every_file(shards: list[Path], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a shard")
    assert open_checkpoint(tmp_path).keys() == ["a", "b", "c"]
    assert open_checkpoint(str(tmp_path) + os.sep).keys() == ["a", "b", "c"]


def test_an_index_decides_what_belongs(shards: list[Path], tmp_path: Path) -> None:
    """Tensors that it does not list, and files that it does not name, are not the checkpoint's."""
    save(tmp_path / "consolidated.safetensors", {"a": torch.zeros(2)})
    index = write_index(
        tmp_path / "model.safetensors.index.json", {"a": "model-1.safetensors", "c": "model-2.safetensors"}
    )
    for source in (index, tmp_path):
        checkpoint = open_checkpoint(source)
        assert checkpoint.keys() == ["a", "c"]
        assert checkpoint.offset_keys() == ["a", "c"]
        assert checkpoint.entry("a").file == str(shards[0])
        assert checkpoint.index == str(index)
        with pytest.raises(TensorNotFoundError):
            checkpoint.entry("b")


def test_a_shard_may_lie_in_a_folder_or_behind_a_link(shards: list[Path], tmp_path: Path) -> None:
    """Hub caches keep shards as links to files elsewhere."""
    home = tmp_path / "home"
    (home / "parts").mkdir(parents=True)
    (home / "parts" / "one.safetensors").symlink_to(shards[0])
    index = write_index(home / "model.safetensors.index.json", {"a": "parts/one.safetensors"})
    assert open_checkpoint(index).keys() == ["a"]


def test_every_problem_of_an_index_is_listed_at_once(shards: list[Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(shards[1].read_bytes()[:-1])
    index = write_index(
        tmp_path / "model.safetensors.index.json",
        {
            "a": "model-1.safetensors",
            "z": "model-1.safetensors",
            "c": "broken.safetensors",
            "d": "absent.safetensors",
            "e": "../outside.safetensors",
            "f": str(tmp_path / "model-1.safetensors"),
            "g": "C:\\weights.safetensors",
            "h": "..\\up.safetensors",
        },
    )
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(index)
    problems = caught.value.problems
    assert sorted(type(problem).__name__ for problem in problems) == [
        *["CheckpointError"] * 5,
        "FileMissingError",
        "HeaderError",
    ]
    text = str(caught.value)
    for part in ("'../outside", "z", "absent.safetensors", "file not fully covered", "C:\\\\weights", "..\\\\up"):
        assert part in text
    assert "7 problems" in text


def test_a_name_in_two_shards_is_refused(shards: list[Path], tmp_path: Path) -> None:
    again = tmp_path / "model-3.safetensors"
    save(again, {"a": torch.zeros(5), "c": torch.zeros(1)})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert sorted(problem.tensor or "" for problem in caught.value.problems) == ["a", "c"]
    index = write_index(
        tmp_path / "model.safetensors.index.json", {"a": "model-1.safetensors", "c": "model-3.safetensors"}
    )
    with pytest.raises(CheckpointError, match="the tensor is in two shards"):
        open_checkpoint(index)


def test_all_malformed_files_of_a_list_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.safetensors").touch()
    write_raw(tmp_path / "hole.safetensors", {"x": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, b"ab")
    save(tmp_path / "fine.safetensors", {"ok": torch.zeros(1)})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    reasons = {problem.reason for problem in caught.value.problems if isinstance(problem, HeaderError)}
    assert reasons == {"HeaderTooSmall", "InvalidOffset"}


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "\xff"])
def test_an_index_that_is_none(tmp_path: Path, body: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(body.encode("latin-1"))
    with pytest.raises(CheckpointError, match="not an index with a weight_map"):
        open_checkpoint(path)


def test_sources_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileMissingError) as missing:
        open_checkpoint(tmp_path / "nothing.safetensors")
    assert missing.value.errno == errno.ENOENT
    assert str(missing.value) == f"No such file or directory: {tmp_path / 'nothing.safetensors'}"
    with pytest.raises(FileMissingError, match=r"no \*.safetensors file"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError) as listed:
        open_checkpoint([tmp_path, tmp_path / "x"])
    assert {type(problem) for problem in listed.value.problems} == {FileIsDirectoryError, FileMissingError}
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="not a regular file"):
        open_checkpoint(tmp_path / "pipe")
    for source in (b"bytes", 3, None, [], [3], "", "a\0b", {"a": 1}):
        with pytest.raises(SourceError):
            open_checkpoint(source)  # type: ignore[arg-type]
    for address in ("https://example.com/model.safetensors", "s3://bucket/model.safetensors"):
        with pytest.raises(UnsupportedError, match="local files"):
            open_checkpoint(address)


def test_two_indexes_are_refused(shards: list[Path], tmp_path: Path) -> None:
    for name in ("model", "other"):
        write_index(tmp_path / f"{name}.safetensors.index.json", {"a": "model-1.safetensors"})
    with pytest.raises(SourceError, match="holds 2 indexes"):
        open_checkpoint(tmp_path)


def test_a_name_that_is_nearly_right_is_suggested(tmp_path: Path) -> None:
    save(tmp_path / "m.safetensors")
    with pytest.raises(TensorNotFoundError, match=r"Did you mean 'layers\.0\.norm'") as caught:
        open_checkpoint(tmp_path / "m.safetensors").entry("layer.0.norm")
    assert isinstance(caught.value, KeyError)
    assert str(caught.value).startswith("File does not contain tensor layer.0.norm")


def test_a_file_that_no_one_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    save(path)

    def refuse(*args: object, **keywords: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(PermissionError) as caught:
        open_checkpoint(path)
    assert caught.value.errno == errno.EACCES


def test_a_path_that_names_nothing_says_what_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    for path, hint in (
        ("modle.safetensors", "Did you mean 'model.safetensors'?"),
        (f"{tmp_path}/model.safetensor", f"Did you mean {str(tmp_path / 'model.safetensors')!r}?"),
        ("weights/model.safetensors", "There is no folder 'weights' either"),
        ("something else", None),
    ):
        with pytest.raises(FileMissingError) as caught:
            open_checkpoint(path)
        assert caught.value.hint == hint


def test_a_file_of_another_kind_says_that_it_is_none_of_these(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("root:x:0:0:root:/root:/bin/bash\n" * 20)
    with pytest.raises(HeaderError, match="header too large") as caught:
        open_checkpoint(path)
    assert caught.value.hint == (
        "Its first eight bytes are no header's length: this is no safetensors file, or it was overwritten"
    )
