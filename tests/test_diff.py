"""What two checkpoints differ in: against a plain comparison, by place, within bounds, and at the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import dlpack_loader
from dlpack_loader import diff as diffing
from dlpack_loader.bounds import Bounds
from dlpack_loader.checkpoint import open_checkpoint
from dlpack_loader.diff import Comparison, Kind, compare
from dlpack_loader.dtype import BY_CODE, DTYPES
from dlpack_loader.errors import CheckpointError, FileChangedError, FileMissingError, OptionError
from tests.files import write_index, write_raw
from tests.test_cli import at_terminal, python, run

Arrays = Mapping[str, np.ndarray[Any, Any]]
ROOT = Path(dlpack_loader.__file__).parents[1]


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    def make(before: Arrays, after: Arrays, *metadata: dict[str, str] | None) -> tuple[Path, Path]:
        paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
        for k, (path, arrays) in enumerate(zip(paths, (before, after), strict=True)):
            save_file(dict(arrays), path, metadata=metadata[k] if metadata else None)
        return paths

    return make


Make = Callable[..., tuple[Path, Path]]
BASE: Arrays = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "bias": np.arange(5, dtype=np.float16),
    "none": np.zeros((0, 3), np.int64),
    "scalar": np.array(7),
}


def kinds(found: Comparison) -> dict[str, tuple[str, ...]]:
    return {change.name: tuple(change.kinds) for change in found.changes}


def test_equal(pair: Make) -> None:
    found = compare(*pair(BASE, {name: BASE[name].copy() for name in reversed(list(BASE))}))
    assert (found.same, found.changes, found.metadata, found.equal) == (True, (), (), 4)
    assert (found.bytes_read, found.bytes_shared) == (2 * (48 + 10 + 8), 0)


def test_every_kind_of_change(pair: Make) -> None:
    changed = BASE["w"].copy()
    changed[1, 2] = 9
    after = {
        "w": changed,
        "bias": BASE["bias"].reshape(1, 5).astype(np.float32),
        "new": np.zeros(2),
        "scalar": BASE["scalar"],
    }
    found = compare(*pair(BASE, after))
    assert kinds(found) == {"bias": ("dtype", "shape"), "new": ("added",), "none": ("removed",), "w": ("bytes",)}
    sides = {change.name: (change.before is not None, change.after is not None) for change in found.changes}
    assert sides == {"bias": (True, True), "new": (False, True), "none": (True, False), "w": (True, True)}
    (change,) = (change for change in found.changes if change.name == "w")
    at = int(np.flatnonzero(BASE["w"].view(np.uint8) != changed.view(np.uint8))[0])
    assert (change.first, change.differing, found.equal) == (at, None, 1)


def test_bits_count(pair: Make) -> None:
    nan, other = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    before = {"nan": np.array([nan]), "payload": np.array([nan]), "zero": np.array([0.0])}
    after = {"nan": np.array([nan]), "payload": np.array([other]), "zero": np.array([-0.0])}
    assert kinds(compare(*pair(before, after))) == {"payload": ("bytes",), "zero": ("bytes",)}


@pytest.mark.parametrize("code", [dtype.code for dtype in DTYPES])
def test_counts_of_every_dtype(tmp_path: Path, code: str) -> None:
    """Elements, or bytes for dtypes below one."""
    bits = BY_CODE[code].bits
    nbytes = 4096 * bits // 8
    data = bytearray(os.urandom(nbytes))
    entry = {"x": {"dtype": code, "shape": [4096], "data_offsets": [0, nbytes]}}
    before = write_raw(tmp_path / "a.safetensors", entry, bytes(data))
    width = bits // 8 if bits % 8 == 0 else 1
    for element in (3, 4, nbytes // width - 1):
        data[element * width] ^= 0x11
        data[element * width + width - 1] ^= 0x22
    after = write_raw(tmp_path / "b.safetensors", entry, bytes(data))
    (change,) = compare(before, after, count=True).changes
    assert (change.kinds, change.first, change.differing) == ((Kind.BYTES,), 3 * width, 3)


@given(
    sizes=st.lists(st.integers(0, 30_000), min_size=1, max_size=4),
    flips=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 29_999)), max_size=5),
    count=st.booleans(),
    staging=st.sampled_from([1, 4096, 20_000, 1 << 26]),
)
def test_against_a_plain_comparison(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], flips: list[tuple[int, int]], count: bool, staging: int
) -> None:
    """Whatever the pieces are: their sizes are a matter of the budget."""
    folder = tmp_path_factory.mktemp("pair")
    before = {str(k): np.random.default_rng(k).integers(0, 256, size, np.uint8) for k, size in enumerate(sizes)}
    after = {name: array.copy() for name, array in before.items()}
    for which, at in flips:
        if which < len(sizes) and at < sizes[which]:
            after[str(which)][at] ^= 0xFF
    paths = folder / "a.safetensors", folder / "b.safetensors"
    for path, arrays in zip(paths, (before, after), strict=True):
        save_file(arrays, path)
    found = compare(*paths, count=count, staging_bytes=staging, threads=2)
    unequal = {name: np.flatnonzero(before[name] != after[name]) for name in before}
    expected = {
        name: (int(places[0]), len(places) if count else None) for name, places in unequal.items() if len(places)
    }
    assert {change.name: (change.first, change.differing) for change in found.changes} == expected
    assert found.equal == len(sizes) - len(expected)


def test_other_shards_are_equal(tmp_path: Path) -> None:
    arrays = {f"t.{k}": np.random.default_rng(k).random(1000 + k) for k in range(9)}
    whole = tmp_path / "whole.safetensors"
    save_file(arrays, whole)
    shards = tmp_path / "shards"
    shards.mkdir()
    names = list(arrays)
    homes = {name: f"m-{k % 3}.safetensors" for k, name in enumerate(names)}
    for shard in set(homes.values()):
        save_file({name: arrays[name] for name in names if homes[name] == shard}, shards / shard)
    index = write_index(shards / "m.safetensors.index.json", homes)
    for other in (shards, index, [shards / shard for shard in sorted(set(homes.values()))]):
        assert compare(whole, other).same
        assert compare(other, whole).equal == 9
    arrays["t.4"][-1] += 1
    save_file({name: arrays[name] for name in names if homes[name] == homes["t.4"]}, shards / homes["t.4"])
    (change,) = compare(whole, shards).changes
    assert (change.name, change.after and Path(change.after.file).name) == ("t.4", homes["t.4"])


def test_metadata(pair: Make) -> None:
    paths = pair(BASE, BASE, {"format": "pt", "gone": "1", "kept": "x"}, {"format": "np", "kept": "x", "new": "2"})
    found = compare(*paths)
    assert not found.same
    assert [(m.key, m.before, m.after) for m in found.metadata] == [
        ("format", "pt", "np"),
        ("gone", "1", None),
        ("new", None, "2"),
    ]
    assert compare(*paths, metadata=False).same


@pytest.mark.parametrize("how", ["itself", "link", "symlink"])
def test_what_is_shared_is_not_read(tmp_path: Path, how: str) -> None:
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file(dict(BASE), path)
    if how == "link":
        other.hardlink_to(path)
    elif how == "symlink":
        other.symlink_to(path)
    found = compare(path, path if how == "itself" else other)
    assert (found.same, found.equal, found.bytes_read, found.bytes_shared) == (True, 4, 0, 66)


def test_a_tensor_that_differs_is_read_no_further(pair: Make) -> None:
    before = {"big": np.zeros(8 << 20, np.uint8), "late": np.zeros(8 << 20, np.uint8)}
    after = {name: array.copy() for name, array in before.items()}
    after["big"][5], after["big"][-1], after["late"][-1] = 1, 1, 1
    paths = pair(before, after)
    room = (1 << 20) * 3 // 8 // 4096 * 4096
    soon = compare(*paths, staging_bytes=1 << 20)
    full = compare(*paths, staging_bytes=1 << 20, count=True)
    assert [change.first for change in soon.changes] == [change.first for change in full.changes] == [5, (8 << 20) - 1]
    assert [change.differing for change in full.changes] == [2, 1]
    assert full.bytes_read == 32 << 20
    assert 16 << 20 <= soon.bytes_read <= (16 << 20) + 2 * room


def test_chosen(pair: Make) -> None:
    after = {**BASE, "w": BASE["w"] + 1, "bias": BASE["bias"] + 1}
    found = compare(*pair(BASE, after), choose=lambda name: name != "w")
    assert (kinds(found), found.equal) == ({"bias": ("bytes",)}, 2)


def test_progress_reaches_its_end(pair: Make) -> None:
    told: list[tuple[int, int]] = []
    before = {"a": np.zeros(100_000, np.uint8), "b": np.zeros(50_000, np.uint8)}
    after = {"a": np.ones(100_000, np.uint8), "b": np.zeros(50_000, np.uint8)}
    compare(*pair(before, after), staging_bytes=65_536, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert len(told) > 2
    assert (told[-1], {total for _, total in told}) == ((300_000, 300_000), {300_000})


def test_faults(pair: Make, tmp_path: Path) -> None:
    before, after = pair(BASE, BASE)
    with pytest.raises(FileMissingError):
        compare(before, tmp_path / "none.safetensors")
    with pytest.raises(OptionError, match="staging_bytes must be a positive integer"):
        compare(before, after, staging_bytes=0)
    (tmp_path / "broken").mkdir()
    write_index(tmp_path / "broken" / "m.safetensors.index.json", {"w": "none.safetensors"})
    with pytest.raises(CheckpointError, match="1 problem"):
        compare(before, tmp_path / "broken")


def test_a_file_that_changes_meanwhile(pair: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = pair(BASE, BASE)
    opened = open_checkpoint

    def change(source: Any) -> Any:
        checkpoint = opened(source)
        os.truncate(after, os.path.getsize(after) - (source == after))
        return checkpoint

    monkeypatch.setattr(diffing, "open_checkpoint", change)
    with pytest.raises(FileChangedError) as caught:
        compare(before, after)
    assert caught.value.file == str(after)


PEAK = """
import sys
from dlpack_loader.diff import compare
before, after, staging = sys.argv[1], sys.argv[2], int(sys.argv[3])
compare(before, after, staging_bytes=staging, count=True, choose=lambda name: name == "small")  # imports all of it
def status(key):
    return int(open("/proc/self/status").read().split(key)[1].split()[0]) * 1024
open("/proc/self/clear_refs", "w").write("5")
resident = status("VmRSS:")
found = compare(before, after, staging_bytes=staging, count=True)
print(status("VmHWM:") - resident, found.bytes_read, *[change.name for change in found.changes])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from Linux' /proc")
@pytest.mark.parametrize("staging", [8 << 20, 32 << 20])
def test_memory_is_bounded(tmp_path: Path, staging: int) -> None:
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    arrays = {"big": np.random.default_rng(0).integers(0, 256, 160 << 20, np.uint8), "small": np.zeros(8)}
    save_file(arrays, paths[0])
    arrays["big"][::1000] ^= 1
    save_file(arrays, paths[1])
    command = [sys.executable, "-c", PEAK, *map(str, paths), str(staging)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    peak, read, *names = done.stdout.split()
    assert (int(read), names) == (2 * sum(array.nbytes for array in arrays.values()), ["big"])
    assert int(peak) <= staging + (16 << 20)


def test_the_budget_is_divided() -> None:
    comparer = diffing._Comparer((None, None), (), Bounds(staging_bytes=64 << 20), count=False, direct_io=None)  # type: ignore[arg-type]
    assert 2 * comparer._room + comparer._bounds.staging_bytes == 64 << 20


class TestCommand:
    def test_nothing_differs(self, pair: Make) -> None:
        ran = run("diff", *pair(BASE, BASE))
        assert (ran.code, ran.err) == (0, "")
        assert ran.out.splitlines() == ["# nothing differs; 4 tensors equal", "# 132 bytes read of both together"]

    def test_rows(self, pair: Make) -> None:
        after = {
            **BASE,
            "w": BASE["w"].astype(np.int8),
            "bias": BASE["bias"] + np.array([0, 0, 1, 1, 0], np.float16),
            "x": np.zeros(1),
        }
        del after["scalar"]
        ran = run("diff", "--count", *pair(BASE, after, {"format": "pt"}, None))
        assert (ran.code, ran.err) == (1, "")
        assert ran.out.splitlines() == [
            "# change  name    A          B",
            "bytes     bias    F16 [5]    F16 [5]   first at byte 5 of 10, 2 of 5 elements",
            "removed   scalar  I64 []     -",
            "dtype     w       F32 [3,4]  I8 [3,4]",
            "added     x       -          F64 [1]",
            "metadata  format  pt         -",
            "# 1 changed in bytes, 1 removed, 1 changed in dtype, 1 added, 1 key of the metadata; 1 tensor equal",
            "# 20 bytes read of both together",
        ]

    def test_json(self, pair: Make) -> None:
        before, after = pair({"w": np.zeros(3, np.int16)}, {"w": np.array([0, 0, 256], np.int16)})
        ran = run("diff", before, after, "--json")
        document = ran.document
        assert document.pop("seconds") > 0
        form = {"dtype": "I16", "shape": [3], "nbytes": 6}
        offset = before.stat().st_size - 6
        assert (ran.code, ran.err) == (1, "")
        assert document == {
            "before": str(before),
            "after": str(after),
            "same": False,
            "equal": 0,
            "bytes_read": 12,
            "bytes_shared": 0,
            "metadata": [],
            "tensors": [
                {
                    "name": "w",
                    "changes": ["bytes"],
                    "before": {**form, "file": str(before), "offset": offset},
                    "after": {**form, "file": str(after), "offset": offset},
                    "first": 5,
                    "differing": None,
                }
            ],
        }

    @pytest.mark.parametrize("fault", ["missing", "truncated", "pattern", "no B"])
    def test_errors_exit_with_2(self, pair: Make, fault: str) -> None:
        before, after = pair(BASE, BASE)
        more: list[str] = []
        if fault == "missing":
            after.unlink()
        elif fault == "truncated":
            os.truncate(after, after.stat().st_size - 3)
        elif fault == "pattern":
            more = ["--match", "nothing*"]
        ran = run("diff", before, *([] if fault == "no B" else [after]), *more, "--json")
        assert (ran.code, ran.out) == (2, "")
        expected = {
            "missing": f"error: No such file or directory\n  file: {after}",
            "truncated": "3 bytes shorter than its header says",
            "pattern": "error: no tensor matches 'nothing*'",
            "no B": "Missing argument 'B'",
        }
        assert expected[fault] in ran.err

    def test_options(self, pair: Make) -> None:
        paths = pair(BASE, {**BASE, "w": BASE["w"] + 1}, {"a": "1"}, {"a": "2"})
        assert run("diff", *paths, "--match", "b*").code == 1  # the metadata
        assert run("diff", *paths, "--match", "b*", "--ignore-metadata").code == 0
        assert run("diff", *paths, "--ignore-metadata").code == 1
        document = run(
            "diff", *paths, "--ignore-metadata", "--staging-bytes", "4096", "--threads", "1", "--json"
        ).document
        assert [tensor["name"] for tensor in document["tensors"]] == ["w"]

    def test_names_of_strangers(self, pair: Make) -> None:
        ran = run("diff", *pair({"\x1b[31mred\nline": np.zeros(1)}, {"[bold]": np.zeros(1)}, {"k\n": "\x07"}, None))
        assert [line.split()[:2] for line in ran.out.splitlines()[1:4]] == [
            ["removed", r"\x1b[31mred\nline"],
            ["added", "[bold]"],
            ["metadata", r"k\n"],
        ]

    def test_dtype_and_shape(self, pair: Make) -> None:
        ran = run("diff", *pair({"w": np.zeros(3)}, {"w": np.zeros(4, np.int8)}))
        assert ran.out.splitlines()[1:3] == [
            "dtype,shape  w     F64 [3]  I8 [4]",
            "# 1 changed in dtype and shape; 0 tensors equal",
        ]

    def test_a_broken_numpy(self, pair: Make, tmp_path: Path) -> None:
        (tmp_path / "modules").mkdir()
        (tmp_path / "modules" / "numpy.py").write_text("raise ImportError('libopenblas.so: cannot open')")
        ran = python("-m", "dlpack_loader", "diff", *pair(BASE, BASE), first=str(tmp_path / "modules"))
        assert (ran.code, ran.out) == (2, "")
        assert ran.err == (
            "error: framework 'np' can't be imported: libopenblas.so: cannot open\n"
            "  hint: Install its package anew (numpy); dlpack-loader doctor says more\n"
        )

    def test_in_a_process_and_at_a_terminal(self, pair: Make) -> None:
        paths = pair(BASE, {**BASE, "w": BASE["w"] + 1})
        piped = python("-m", "dlpack_loader", "diff", *paths)
        assert (piped.code, piped.err, piped.out.splitlines()[1].split()[:2]) == (1, "", ["bytes", "w"])
        shown = at_terminal("diff", *paths)
        assert shown.code == 1
        assert "1 changed in bytes; 3 tensors equal" in shown.err
        assert "#" not in shown.err
        assert json.loads(python("-m", "dlpack_loader", "diff", *paths, "--json").out)["same"] is False
