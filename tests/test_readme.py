"""The README's examples run, and the commands that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.files import save

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LayerNorm(4))
    save(tmp_path / "model.safetensors", model.state_dict())
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    space: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), space)
    loaded = space["model"]
    assert isinstance(loaded, torch.nn.Module)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert "4 filled, 176 bytes" in capsys.readouterr().out


def test_the_targets_of_make_exist() -> None:
    named = set(re.findall(r"`make (\w+)`", TEXT)) | set(re.findall(r"^\$ make (\w+)", TEXT, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"demo", "test"} <= named
    assert named <= set(re.findall(r"^(\w+):", makefile, re.MULTILINE))


def test_the_command_line_of_the_readme_exists() -> None:
    from dlpack_loader.cli import app

    named = set(re.findall(r"^\$ dlpack-loader (\w+)", TEXT, re.MULTILINE))
    assert named == {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
