"""The README names what exists: targets of make, commands, dtypes, oddities. Its examples run in test_docs."""

from __future__ import annotations

import re
from pathlib import Path

from dlpack_loader.dtype import DTYPES

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_targets_of_make_exist() -> None:
    named = set(re.findall(r"`make (\w+)`", TEXT)) | set(re.findall(r"^\$ make (\w+)", TEXT, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"demo", "test"} <= named
    assert named <= set(re.findall(r"^(\w+):", makefile, re.MULTILINE))


def test_the_readme_names_every_command() -> None:
    from dlpack_loader.cli import app

    named = set(re.findall(r"^\$ dlpack-loader (\w+)", TEXT, re.MULTILINE))
    assert named == {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}


def test_the_table_of_dtypes_has_each_of_them() -> None:
    rows = re.findall(r"^\| ((?:BOOL|BF16|F4|F6)[^|]*) \|", TEXT, re.MULTILINE)
    named = {word for row in rows for word in re.findall(r"[A-Z][A-Z0-9_]+", row)}
    integers = {dtype.code for dtype in DTYPES if dtype.code.lstrip("UI").isdigit()}
    assert "integers" in rows[0]
    assert named | integers == {dtype.code for dtype in DTYPES}


def test_the_files_that_are_named_exist() -> None:
    paths = set(re.findall(r"`((?:tests|docs|dlpack_loader|notebooks)/[\w/.]+)`", TEXT))
    assert "tests/gpu/run" in paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
