"""The script that runs on a GPU machine, run dry on the CPU: it is no use if it fails when a GPU is at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_dry_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.measure", "--dry", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("every dtype through torch ", "kernels pending", "warm: load_file", "cold: safetensors.load_file"):
        assert line in done.stdout
    assert done.stdout.endswith("every byte was right\n")
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    done = subprocess.run(
        [ROOT / "tests/gpu/run"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert "torch finds no CUDA device" in done.stdout
