"""The command line: what every command prints, at a terminal, into a pipe and as JSON, and how it fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

import dlpack_loader
from dlpack_loader import cli, safe_open
from dlpack_loader.dtype import DTYPES
from dlpack_loader.quantities import size_text

ROOT = Path(dlpack_loader.__file__).parents[1]

Arrays = dict[str, np.ndarray[Any, Any]]

TENSORS: Arrays = {
    "layer.10.bias": np.arange(5, dtype=np.float16),
    "layer.2.bias": np.arange(6, dtype=np.float16).reshape(2, 3),
    "embed": np.arange(12, dtype=np.float32).reshape(3, 4),
    "steps": np.array(7),
}
"""66 + 8 bytes: 10, 12, 48 and 8."""


COMMANDS = ("ls", "check", "plan", "load", "doctor", "bench", "diff", "completion")


class Ran:
    """What a command did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def document(self) -> Any:
        """The JSON document that is all of the output."""
        return json.loads(self.out)


def run(*args: str | Path) -> Ran:
    """Run a command in this process; neither stream is a terminal."""
    result = CliRunner().invoke(cli.app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (more.pop("first", ""), str(ROOT), os.environ.get("PYTHONPATH", ""))))
    settings = ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "PYTHONUNBUFFERED")
    quiet = {name: value for name, value in os.environ.items() if name not in settings}
    return quiet | {"PYTHONPATH": path, "PYTHONWARNINGS": "error", "TERM": "xterm"} | more


def python(*args: str | Path, **env: str) -> Ran:
    """Run an interpreter of its own; warnings are errors there too."""
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, env=environment(**env), capture_output=True, check=False, timeout=60)
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())


def at_terminal(*args: str | Path, only_stderr: bool = False) -> Ran:
    """Run a command with its output, or only its errors, at a pseudo-terminal; ``err`` is what that one showed."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "dlpack_loader", *map(str, args)]
    out = subprocess.PIPE if only_stderr else theirs
    with subprocess.Popen(command, env=environment(), stdin=theirs, stdout=out, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        try:
            while chunk := os.read(ours, 65536):
                seen += chunk
        except OSError:  # Linux says so when the last user of the other side has gone
            pass
        os.close(ours)
        piped = process.stdout.read() if process.stdout else b""
    return Ran(process.returncode, piped.decode(), seen.decode().replace("\r\n", "\n"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "np"})
    return path


def raw_file(path: Path, tensors: Mapping[str, tuple[str, list[int], int]], seed: int = 0) -> dict[str, bytes]:
    """Write tensors of any dtype code, as (code, shape, bytes), with random bytes; return these."""
    header: dict[str, Any] = {}
    generator = np.random.default_rng(seed)
    data: dict[str, bytes] = {}
    at = 0
    for name, (code, shape, nbytes) in tensors.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, at + nbytes]}
        data[name] = generator.bytes(nbytes)
        at += nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data.values()))
    return data


def index_of(path: Path, weight_map: Mapping[str, str]) -> Path:
    path.write_text(json.dumps({"weight_map": dict(weight_map)}))
    return path


def rows(out: str) -> list[str]:
    """The names in the first column of ``ls``."""
    return [line.split()[0] for line in out.splitlines() if not line.startswith("#")]


class TestLs:
    def test_piped(self, file: Path) -> None:
        ran = run("ls", file)
        size = file.stat().st_size
        assert (ran.code, ran.err) == (0, "")
        assert ran.out.splitlines() == [
            "# name         dtype  shape  bytes",
            "embed          F32    [3,4]     48",
            "layer.2.bias   F16    [2,3]     12",
            "layer.10.bias  F16      [5]     10",
            "steps          I64       []      8",
            "# 4 tensors, 78 bytes",
            "#   F32       1 tensor, 48 bytes",
            "#   F16       2 tensors, 22 bytes",
            "#   I64       1 tensor, 8 bytes",
            "#   metadata  format = np",
            f"#   file      {file}, {size} bytes",
        ]

    def test_json(self, file: Path) -> None:
        ran = run("ls", file, "--json", "--match", "layer.*")
        with safe_open(file, "np") as reader:
            offsets = {name: reader.entry(name).offset for name in reader.keys()}  # noqa: SIM118
        assert (ran.code, ran.err, ran.out.count("\n")) == (0, "", 1)
        assert ran.document == {
            "source": str(file),
            "count": 2,
            "nbytes": 22,
            "dtypes": {"F16": {"tensors": 2, "nbytes": 22}},
            "metadata": {"format": "np"},
            "index": None,
            "files": [{"path": str(file), "size": file.stat().st_size, "tensors": 4}],
            "tensors": [
                {
                    "name": name,
                    "dtype": "F16",
                    "shape": shape,
                    "nbytes": nbytes,
                    "file": str(file),
                    "offset": offsets[name],
                }
                for name, shape, nbytes in (("layer.2.bias", [2, 3], 12), ("layer.10.bias", [5], 10))
            ],
        }

    def test_orders(self, tmp_path: Path) -> None:
        path = tmp_path / "m.safetensors"
        raw_file(path, {"w.10": ("U8", [3], 3), "w.9": ("U8", [1], 1), "a": ("U8", [2], 2), "w.9b": ("U8", [9], 9)})
        assert rows(run("ls", path).out) == ["a", "w.9", "w.9b", "w.10"]
        assert rows(run("ls", path, "--sort", "offset").out) == ["w.10", "w.9", "a", "w.9b"]
        assert rows(run("ls", path, "--sort", "size").out) == ["w.9b", "w.10", "a", "w.9"]

    def test_chosen_and_cut(self, file: Path) -> None:
        ran = run("ls", file, "--match", "*s", "--limit", "2")
        assert rows(ran.out) == ["layer.2.bias", "layer.10.bias"]
        assert "# 3 tensors, 30 bytes, the first 2 shown, of 4 in all" in ran.out.splitlines()

    @pytest.mark.parametrize("command", ["ls", "plan", "load"])
    def test_no_match(self, file: Path, command: str) -> None:
        ran = run(command, file, "--match", "bias", "--json")
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith("error: no tensor matches 'bias'\n  hint: The pattern is for whole names, such as '")

    def test_several_files(self, tmp_path: Path) -> None:
        save_file({"a": np.zeros(3, np.uint8)}, tmp_path / "one.safetensors", metadata={"k": "1"})
        save_file({"b": np.zeros(4, np.uint8)}, tmp_path / "two.safetensors", metadata={"k": "2", "l": "3"})
        assert run("ls", tmp_path).out.splitlines()[:3] == [
            "# name  dtype  shape  bytes  file",
            "a       U8       [3]      3  one.safetensors",
            "b       U8       [4]      4  two.safetensors",
        ]
        files = run("ls", tmp_path, "--json").document["files"]
        assert [Path(found["path"]).name for found in files] == ["one.safetensors", "two.safetensors"]

    def test_index_and_files_of_one_name(self, tmp_path: Path) -> None:
        for folder in ("x", "y"):
            (tmp_path / folder).mkdir()
            save_file({folder: np.zeros(1, np.uint8)}, tmp_path / folder / "m.safetensors")
        index = index_of(tmp_path / "i.index.json", {"x": "x/m.safetensors", "y": "y/m.safetensors"})
        ran = run("ls", index)
        lines = ran.out.splitlines()
        assert lines[1].endswith(f" {tmp_path}/x/m.safetensors")
        assert lines[2].endswith(f" {tmp_path}/y/m.safetensors")
        assert f"#   index     {index}" in lines
        assert run("ls", index, "--json").document["index"] == str(index)

    def test_names_of_strangers(self, tmp_path: Path) -> None:
        path = tmp_path / "m.safetensors"
        names = ["\x1b[31mred\nline", "[bold]", "größe", "x" * 500]
        save_file({name: np.zeros(1, np.uint8) for name in names}, path, metadata={"a\tb": "c\nd"})
        out = run("ls", path).out
        assert sorted(rows(out)) == sorted([r"\x1b[31mred\nline", "[bold]", "größe", "x" * 500])
        assert r"#   metadata  a\tb = c\nd" in out.splitlines()
        assert sorted(row["name"] for row in run("ls", path, "--json").document["tensors"]) == sorted(names)

    def test_empty_checkpoint(self, tmp_path: Path) -> None:
        save_file({}, tmp_path / "m.safetensors")
        assert run("ls", tmp_path).out.splitlines()[:2] == ["# name  dtype  shape  bytes", "# 0 tensors, 0 bytes"]
        assert run("load", tmp_path, "--json").document["filled"] == []

    def test_at_a_terminal(self, tmp_path: Path) -> None:
        path = tmp_path / "m.safetensors"
        save_file({"w": np.zeros((300, 40), np.float32)}, path, metadata={"note": "n" * 200})
        ran = at_terminal("ls", path)
        assert ran.code == 0
        assert re.sub(r"\x1b\[[0-9;]*m", "", ran.err).splitlines() == [
            "name  dtype     shape     bytes",
            "w     F32    [300,40]  46.9 KiB",
            "",
            "1 tensor, 46.9 KiB (48,000 bytes)",
            "  F32       1 tensor, 46.9 KiB (48,000 bytes)",
            f"  metadata  note = {'n' * 80}...",
            f"  file      {path}, {size_text(path.stat().st_size)}",
        ]
        assert f"note = {'n' * 200}\n" in run("ls", path).out

    def test_ten_thousands_of_rows(self, tmp_path: Path) -> None:
        raw_file(tmp_path / "m.safetensors", {f"t.{k}": ("U8", [1], 1) for k in range(30_000)})
        assert rows(run("ls", tmp_path).out) == [f"t.{k}" for k in range(30_000)]


BROKEN = {
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "HeaderTooLarge", "Git LFS pointer"),
    "html": (b"<!DOCTYPE html><html><body>Sign in</body></html>", "HeaderTooLarge", "web page"),
    "empty": (b"", "HeaderTooSmall", "The file is empty"),
    "zip": (b"PK\x03\x04" + b"z" * 100, "HeaderTooLarge", "zip archive"),
    "cut header": (None, "InvalidHeaderLength", "it was cut off"),
    "cut data": (None, "MetadataIncompleteBuffer", "5 bytes shorter than its header says"),
    "longer": (None, "MetadataIncompleteBuffer", "3 bytes more than its header says"),
}


@pytest.fixture(params=BROKEN)
def broken(request: pytest.FixtureRequest, file: Path) -> tuple[Path, str, str]:
    """A file that is not what it should be, the reason and a part of the hint."""
    content, reason, hint = BROKEN[request.param]
    whole = file.read_bytes()
    cut = {"cut header": whole[:40], "cut data": whole[:-5], "longer": whole + b"abc"}
    file.write_bytes(cut[request.param] if content is None else content)
    return file, reason, hint


class TestCheck:
    def test_sound(self, file: Path) -> None:
        ran = run("check", file, file.parent)
        amount = "4 tensors, 78 bytes in 1 file"
        assert (ran.code, ran.err) == (0, "")
        assert ran.out == f"ok   {file}: {amount}\nok   {file.parent}: {amount}\n"

    def test_sound_json(self, file: Path) -> None:
        ran = run("check", "--json", file)
        assert (ran.code, ran.err) == (0, "")
        counts = {"tensors": 4, "nbytes": 78, "files": 1}
        assert ran.document == {
            "ok": True,
            "sources": [{"source": str(file), "ok": True, **counts, "problems": []}],
        }

    def test_broken(self, broken: tuple[Path, str, str]) -> None:
        path, _, hint = broken
        ran = run("check", path)
        first, message, *where = ran.out.splitlines()
        assert (ran.code, ran.err) == (1, "")
        assert first == f"BAD  {path}: 1 problem"
        assert message.startswith("  - Error while deserializing header: ")
        assert f"    file: {path}" in where
        assert any(line.startswith("    hint: ") and hint in line for line in where)

    def test_broken_json(self, broken: tuple[Path, str, str]) -> None:
        path, reason, hint = broken
        ran = run("check", path, "--json")
        (source,) = ran.document["sources"]
        (problem,) = source["problems"]
        assert (ran.code, ran.document["ok"], source["ok"]) == (1, False, False)
        assert (problem["kind"], problem["reason"], problem["file"]) == ("HeaderError", reason, str(path))
        assert hint in problem["hint"]

    @pytest.mark.parametrize("command", ["ls", "plan", "load"])
    def test_other_commands_say_the_same(self, broken: tuple[Path, str, str], command: str) -> None:
        path, _, hint = broken
        ran = run(command, path, "--json")
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith("error: Error while deserializing header: ")
        assert f"\n  file: {path}\n" in ran.err
        assert hint in ran.err

    def test_tensor_at_fault(self, tmp_path: Path) -> None:
        path = tmp_path / "m.safetensors"
        raw_file(path, {"good": ("F32", [1], 4), "bad": ("F32", [3], 8)})
        problem = run("check", path, "--json").document["sources"][0]["problems"][0]
        assert (problem["reason"], problem["tensor"]) == ("TensorInvalidInfo", "bad")
        assert "    tensor: bad\n" in run("check", path).out

    def test_missing(self, tmp_path: Path) -> None:
        path = tmp_path / "none.safetensors"
        ran = run("check", path)
        assert (ran.code, ran.err) == (1, "")
        assert ran.out == f"BAD  {path}: 1 problem\n  - No such file or directory\n    file: {path}\n"
        (problem,) = run("check", path, "--json").document["sources"][0]["problems"]
        assert problem == {
            "kind": "FileMissingError",
            "reason": None,
            "message": "No such file or directory",
            "file": str(path),
            "tensor": None,
            "hint": None,
        }

    def test_every_problem_of_an_index_at_once(self, tmp_path: Path, file: Path) -> None:
        (tmp_path / "lfs.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
        shards = {
            "steps": "model.safetensors",
            "ghost": "model.safetensors",
            "a": "missing.safetensors",
            "b": "../x.safetensors",
            "c": "lfs.safetensors",
        }
        index = index_of(tmp_path / "model.safetensors.index.json", shards)
        ran = run("check", index, "--json")
        (source,) = ran.document["sources"]
        found = {(problem["kind"], os.path.basename(problem["file"])): problem for problem in source["problems"]}
        assert ran.code == 1
        assert found.keys() == {
            ("CheckpointError", "model.safetensors"),
            ("CheckpointError", "model.safetensors.index.json"),
            ("FileMissingError", "missing.safetensors"),
            ("HeaderError", "lfs.safetensors"),
        }
        assert "'../x.safetensors'" in found["CheckpointError", "model.safetensors.index.json"]["message"]
        assert "ghost" in found["CheckpointError", "model.safetensors"]["message"]
        out = run("check", tmp_path).out  # the directory is read by its index
        assert out.startswith(f"BAD  {tmp_path}: 4 problems\n")
        assert out.count("\n  - ") == 4
        err = run("ls", index).err
        assert err.startswith(f"error: the checkpoint has 4 problems\n  file: {index}\n  - ")
        assert err.count("\n  - ") == 4
        assert "Git LFS pointer" in err

    def test_sources_are_judged_one_by_one(self, file: Path) -> None:
        missing = file.parent / "none.safetensors"
        ran = run("check", missing, file)
        assert ran.code == 1
        assert [line[:4] for line in ran.out.splitlines() if not line.startswith(" ")] == ["BAD ", "ok  "]
        assert [source["ok"] for source in run("check", missing, file, "--json").document["sources"]] == [False, True]


class TestPlan:
    def test_people(self, file: Path) -> None:
        ran = run("plan", file, "--threads", "3")
        assert (ran.code, ran.err) == (0, "")
        assert ran.out.splitlines()[:3] == [
            "4 transfers into 4 destinations from 1 file(s)",
            "  reads     1 of up to 4,194,304 bytes, 3 at a time",
            "  read      78 bytes for 78 written (1.00 x)",
        ]

    def test_json_is_the_plan_of_a_reader(self, file: Path) -> None:
        ran = run("plan", file, "--match", "layer.*", "--threads", "2", "--staging-bytes", "2MiB", "--json")
        with safe_open(file, "np", threads=2, staging_bytes=2 << 20) as reader:
            room = {name: np.empty_like(TENSORS[name]) for name in ("layer.2.bias", "layer.10.bias")}
            expected = reader.plan(room, strict=False)
        assert ran.document == {
            "source": str(file),
            "tensors": 2,
            "transfers": 2,
            "files": 1,
            "reads": expected.totals.reads,
            "bytes_read": 22,
            "bytes_written": 22,
            "bytes_zeroed": 0,
            "direct_bytes": 22,
            "staged_bytes": 0,
            "peak_staging": expected.totals.peak_staging,
            "bounds": {"staging_bytes": 2 << 20, "threads": 2, "chunk_bytes": 4 << 20, "over_read": 2.0},
        }

    def test_tensors_without_bytes_need_no_read(self, tmp_path: Path) -> None:
        raw_file(tmp_path / "m.safetensors", {"none": ("F32", [0, 3], 0)})
        document = run("plan", tmp_path, "--json").document
        assert (document["tensors"], document["transfers"], document["reads"]) == (1, 0, 0)

    def test_neither_reads_nor_allocates(self, tmp_path: Path) -> None:
        path = tmp_path / "huge.safetensors"
        terabyte = 1 << 40
        header = json.dumps({"w": {"dtype": "U8", "shape": [terabyte], "data_offsets": [0, terabyte]}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(path, 8 + len(header) + terabyte)  # sparse
        document = run("plan", path, "--json").document
        assert (document["bytes_read"], document["reads"]) == (terabyte, terabyte // (4 << 20) + 1)


class TestLoad:
    def test_people(self, file: Path) -> None:
        ran = run("load", file)
        first, read, backend = ran.out.splitlines()
        assert (ran.code, ran.err) == (0, "")
        assert re.fullmatch(r"4 filled, 78 bytes in \d\.\d{3} s \(\d+\.\d\d GB/s\)", first)
        assert read == "  read      78 bytes: 78 direct, 0 staged"
        assert backend.startswith("  backend   pread: ")

    def test_json(self, file: Path) -> None:
        ran = run("load", file, "--match", "*.bias", "--backend", "pread", "--no-direct-io", "--json")
        document = ran.document
        seconds = document.pop("seconds")
        assert (ran.code, ran.err) == (0, "")
        assert document.pop("bytes_per_second") == pytest.approx(22 / seconds)
        assert sorted(document.pop("filled")) == ["layer.10.bias", "layer.2.bias"]
        assert sorted(document.pop("declined")) == ["embed", "steps"]
        assert document.pop("reason")
        assert document == {
            "source": str(file),
            "unfilled": [],
            "unexpected": [],
            "failed": [],
            "aliases": {},
            "bytes_read": 22,
            "bytes_written": 22,
            "bytes_zeroed": 0,
            "direct_bytes": 22,
            "compat_bytes": 0,
            "staged_bytes": 0,
            "backend": "pread",
        }

    def test_options_reach_the_reader(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[dict[str, object]] = []

        def remembered(source: str, framework: str, **options: Any) -> dlpack_loader.Reader:
            asked.append(options)
            return safe_open(source, framework, **options)

        monkeypatch.setattr(cli.load, "safe_open", remembered)
        run("load", file)
        run("load", file, "--backend", "pread", "--threads", "3", "--staging-bytes", "2MB", "--no-direct-io")
        run("load", file, "--direct-io")
        usual = {"backend": "auto", "threads": None, "staging_bytes": 64 << 20, "direct_io": None, "progress": None}
        chosen = {"backend": "pread", "threads": 3, "staging_bytes": 2_000_000, "direct_io": False}
        assert asked == [usual, usual | chosen, usual | {"direct_io": True}]

    def test_every_dtype_arrives(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also those that NumPy lacks, and sub-byte ones whose last dimension is no whole number of bytes."""
        tensors = {dtype.code: (dtype.code, [3, 4], 12 * dtype.bits // 8) for dtype in DTYPES}
        tensors |= {"odd4": ("F4", [2, 3], 3), "odd6": ("F6_E3M2", [2, 2], 3), "scalar": ("BF16", [], 2)}
        data = raw_file(tmp_path / "m.safetensors", tensors)
        made: dict[str, dlpack_loader.Target] = {}
        room = cli.load._room

        def remembered(entry: dlpack_loader.Entry) -> dlpack_loader.Target:
            target = made[entry.name] = room(entry)
            return target

        monkeypatch.setattr(cli.load, "_room", remembered)
        assert len(run("load", tmp_path, "--json").document["filled"]) == len(data) == 25
        assert {name: target.destination.tobytes() for name, target in made.items()} == data

    def test_what_cannot_fit_is_refused(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 7, "SC_PAGE_SIZE": 11}.__getitem__)
        ran = run("load", file)
        assert (ran.code, ran.out) == (1, "")
        assert ran.err == (
            "error: the tensors take 78 bytes and this machine has 77 bytes of memory\n"
            "  hint: Choose some of the tensors with --match\n"
        )
        assert run("load", file, "--match", "*.bias").code == 0

    def test_out_of_memory(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(entry: object) -> None:
            raise MemoryError

        monkeypatch.setattr(cli.load, "_room", refuse)
        ran = run("load", file)
        assert (ran.code, ran.out, ran.err.splitlines()[0]) == (1, "", "error: not enough memory")

    def test_bar_only_where_somebody_sees_it(self, file: Path) -> None:
        seen = at_terminal("load", file, "--json", only_stderr=True)
        assert seen.code == 0
        assert seen.document["bytes_written"] == 78
        assert "78/78 bytes" in seen.err
        assert seen.err.endswith("\x1b[2K")  # the line is given back
        piped = python("-m", "dlpack_loader", "load", file, "--json")
        assert (piped.code, piped.err, piped.document["bytes_written"]) == (0, "", 78)


class TestUsage:
    @pytest.mark.parametrize(
        ("text", "size"),
        [
            ("1048576", 1 << 20),
            ("64MiB", 64 << 20),
            ("16MB", 16_000_000),
            ("1.5 kib", 1536),
            ("100B", 100),
            ("2GB", 2 * 10**9),
            ("1TiB", 1 << 40),
        ],
    )
    def test_sizes(self, file: Path, text: str, size: int) -> None:
        document = run("plan", file, "--staging-bytes", text, "--json").document
        assert document["bounds"]["staging_bytes"] == size

    @pytest.mark.parametrize(
        "text", ["0", "-1", "many", "1.5.2", "64M", "64iB", "1 2", "", "٣MB", "nan", "9" * 16, "0.1"]
    )
    def test_what_is_no_size(self, file: Path, text: str) -> None:
        ran = run("plan", file, "--staging-bytes", text)
        assert (ran.code, ran.out) == (2, "")
        assert "is not a size such as 64MiB" in " ".join(re.split(r"[\s│]+", ran.err))

    @pytest.mark.parametrize(
        "args",
        [
            ["ls"],
            ["check"],
            ["ls", "FILE", "--sort", "colour"],
            ["ls", "FILE", "--limit", "0"],
            ["load", "FILE", "--threads", "0"],
            ["load", "FILE", "--backend", "mmap"],
            ["plan", "FILE", "--nonsense"],
            ["unknown"],
        ],
        ids=" ".join,
    )
    def test_bad_usage(self, file: Path, args: list[str]) -> None:
        ran = run(*(str(file) if arg == "FILE" else arg for arg in args))
        assert (ran.code, ran.out) == (2, "")
        assert "Usage: " in ran.err

    def test_help(self) -> None:
        out = run("--help").out
        assert all(f" {name} " in out for name in COMMANDS)
        options = {
            "ls": ("--sort", "--match", "--limit", "--json"),
            "check": ("--json",),
            "plan": ("--match", "--threads", "--staging-bytes", "--json"),
            "load": ("--match", "--backend", "--threads", "--staging-bytes", "--no-direct-io", "--json"),
            "doctor": ("--timeout", "--json"),
            "bench": ("--device", "--rounds", "--seconds", "--match", "--most", "--json"),
            "diff": ("--match", "--count", "--ignore-metadata", "--threads", "--staging-bytes", "--json"),
            "completion": (),
        }
        assert tuple(options) == COMMANDS
        for command, names in options.items():
            ran = run(command, "--help")
            assert ran.code == 0
            assert [name for name in names if f"{name} " not in ran.out] == []

    def test_help_teaches(self) -> None:
        """Exit codes on the first page; an example of every command that its own options allow."""
        out = run("--help").out
        assert "Exit codes:" in out
        examples = re.findall(r"(?m)^ *dlpack-loader (\w+)", out)
        assert set(examples) <= set(COMMANDS)
        for command in COMMANDS:
            text = run(command, "--help").out
            shown = re.findall(rf"(?m)^ +(?:eval \"\$\()?dlpack-loader {command}\b(.*)$", text)
            assert len(shown) >= 2, command
            for option in re.findall(r"(--[a-z-]+)", " ".join(shown)):
                assert re.search(rf"│ {option} ", text) or f"--direct-io --{option[2:]}" in re.sub(r" +", " ", text), (
                    option
                )

    def test_version(self) -> None:
        ran = run("--version")
        assert (ran.code, ran.out, ran.err) == (0, f"dlpack-loader {dlpack_loader.__version__}\n", "")

    def test_unknown_places(self, tmp_path: Path) -> None:
        assert run("ls", tmp_path / "none").err == f"error: No such file or directory\n  file: {tmp_path / 'none'}\n"
        ran = run("ls", "s3://bucket/model.safetensors")
        assert ran.code == 1
        assert ran.err.splitlines() == [
            "error: this version reads local files, not s3:// addresses",
            "  file: s3://bucket/model.safetensors",
            "  hint: Download the file first",
        ]


class TestCompletion:
    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_scripts(self, shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of the shell that was named: nobody guesses which one this process runs in."""

        def guess() -> None:
            raise AssertionError("nobody asked for a guess")

        monkeypatch.setattr("shellingham.detect_shell", guess)
        ran = run("completion", shell)
        assert (ran.code, ran.err) == (0, "")
        assert f"_DLPACK_LOADER_COMPLETE=complete_{shell}" in ran.out
        assert {"bash": "complete -o default", "zsh": "compdef", "fish": "complete --command dlpack-loader"}[
            shell
        ] in ran.out
        if shutil.which(shell):
            subprocess.run([shell, "-n", "-c", ran.out], check=True)

    def test_a_shell_completes(self, tmp_path: Path) -> None:
        """bash itself, with a program of that name on its path."""
        if not shutil.which("bash"):
            pytest.skip("there is no bash here")
        program = tmp_path / "dlpack-loader"
        program.write_text(f"#!{sys.executable}\nfrom dlpack_loader.__main__ import main\nmain()\n")
        program.chmod(0o755)
        question = (
            'eval "$(dlpack-loader completion bash)"\n'
            "ask() { COMP_WORDS=(dlpack-loader $1); COMP_CWORD=$2; COMPREPLY=(); "
            "_dlpack_loader_completion dlpack-loader; "
            'echo "${COMPREPLY[@]}"; }\n'
            "ask d 1; ask 'ls --so' 2; ask 'ls --sort ' 3; ask 'completion f' 2; ask 'ls mo' 2"
        )
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", question], env=environment(PATH=path), capture_output=True, text=True, check=True, timeout=60
        )
        answers = [sorted(line.split()) for line in done.stdout.splitlines()]
        assert answers == [["diff", "doctor"], ["--sort"], ["name", "offset", "size"], ["fish"], []]
        assert done.stderr == ""

    def test_unknown_shells(self) -> None:
        assert run("completion", "tcsh").code == 2
        assert run("completion").code == 2


class TestProcess:
    def test_module(self, file: Path) -> None:
        ran = python("-m", "dlpack_loader", "ls", file)
        assert (ran.code, ran.err) == (0, "")
        assert ran.out == run("ls", file).out

    def test_errors(self, tmp_path: Path) -> None:
        ran = python("-m", "dlpack_loader", "load", tmp_path / "none")
        assert (ran.code, ran.out) == (1, "")
        assert ran.err == f"error: No such file or directory\n  file: {tmp_path / 'none'}\n"

    def test_errors_at_a_terminal(self, tmp_path: Path) -> None:
        ran = at_terminal("ls", tmp_path / "3.safetensors")
        assert ran.code == 1
        assert ran.err == (f"\x1b[1;31merror: \x1b[0mNo such file or directory\n  file: {tmp_path / '3.safetensors'}\n")

    @pytest.mark.parametrize(("command", "tensors"), [("ls", 1), ("ls", 20_000), ("plan", 1), ("check", 0)])
    def test_reader_of_the_pipe_goes_away(self, tmp_path: Path, command: str, tensors: int) -> None:
        """With more output than a pipe holds, with less, and with a fault to be told by the exit code as well."""
        raw_file(tmp_path / "m.safetensors", {f"t.{k}": ("U8", [1], 1) for k in range(tensors)})
        if not tensors:
            (tmp_path / "m.safetensors").write_bytes(b"")
        reading, writing = os.pipe()
        os.close(reading)
        words = [sys.executable, "-m", "dlpack_loader", command, str(tmp_path)]
        with subprocess.Popen(words, env=environment(), stdout=writing, stderr=subprocess.PIPE) as process:
            os.close(writing)
            _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (1, b"")

    def test_narrow_encodings(self, tmp_path: Path) -> None:
        save_file({"größe": np.zeros(1, np.uint8)}, tmp_path / "m.safetensors")
        ran = python("-m", "dlpack_loader", "ls", tmp_path, PYTHONIOENCODING="ascii")
        assert (ran.code, rows(ran.out)) == (0, [r"gr\xf6\xdfe"])

    @pytest.mark.parametrize("package", ["typer", "rich", "msgspec"])
    def test_missing_packages(self, package: str) -> None:
        code = f"""
            import sys
            class Missing:
                def find_spec(self, name, path=None, target=None):
                    if name.partition(".")[0] == {package!r}:
                        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
            sys.meta_path.insert(0, Missing())
            from dlpack_loader.__main__ import main
            main()
        """
        ran = python("-c", re.sub(r"(?m)^ {12}", "", code))
        assert (ran.code, ran.out) == (1, "")
        if package == "msgspec":  # not one of the extra: its absence is a broken installation and shown as it is
            assert ran.err.splitlines()[-1].endswith("No module named 'msgspec'")
        else:
            assert ran.err == f"dlpack-loader needs the package {package}: pip install 'dlpack_loader[cli]'\n"

    @pytest.mark.parametrize("first", ["", "import torch, numpy; "], ids=["nothing else", "imported before"])
    def test_frameworks_stay_out(self, tmp_path: Path, file: Path, first: str) -> None:
        """No command imports torch, and only ``load`` imports NumPy; the second run shows that this test can fail."""
        (tmp_path / "modules").mkdir()
        (tmp_path / "modules" / "torch.py").write_text(
            "Tensor = type('Tensor', (), {})\n"
        )  # torch is there to be found
        code = first + (
            "import sys; from dlpack_loader.cli import app; frameworks = []\n"
            f"for command in ('ls', 'check', 'plan', 'load'):\n"
            f"    app([command, {str(file)!r}, '--json'], standalone_mode=False)\n"
            f"    print(command, *sorted({{'torch', 'numpy'}} & sys.modules.keys()), file=sys.stderr)\n"
        )
        ran = python("-c", code, first=str(tmp_path / "modules"))
        found = [line.split() for line in ran.err.splitlines()]
        if first:
            assert found[:3] == [[name, "numpy", "torch"] for name in ("ls", "check", "plan")]
        else:
            assert found == [["ls"], ["check"], ["plan"], ["load", "numpy"]]
