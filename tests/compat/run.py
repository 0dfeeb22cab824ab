"""safetensors' own tests, with our reader in the place of theirs.

    python tests/compat/run.py

Their source is fetched into a temporary directory and never kept. A test that fails because we are better on purpose is
listed below with the reason, and must fail in just that way: a listed test that passes is an error, as is any other
that fails. The run also fails when too few tests reached our reader for it to prove anything.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

VERSION = "0.8.0"
AT_LEAST = 40
"""Tests that must reach our reader."""


@dataclass(frozen=True)
class Better:
    """A test of theirs that fails with us, and should."""

    why: str
    message: str
    """How its failure begins."""


BETTER = {
    "tests/test_simple.py::ReadmeTestCase::test_numpy_slice": Better(
        why="errors name the tensor too; and [:20] of ten elements is the ten, as in NumPy, where they want an error",
        message="AssertionError: \"Invalid index -6 for dimension 1 of size 5 (tensor 'a')\" "
        "!= 'Invalid index -6 for dimension 1 of size 5'",
    ),
}

FRAMEWORKS = {
    "test_flax_comparison.py": ("jax", "flax"),
    "test_mlx_comparison.py": ("mlx",),
    "test_paddle_comparison.py": ("paddle",),
    "test_tf_comparison.py": ("tensorflow", "h5py"),
}
"""Files left out where their framework is absent."""

# pip asks an sdist's build backend for metadata before it hands the file over, and safetensors' backend needs Rust.
_BACKEND = f"""
import os

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    name = "safetensors-{VERSION}.dist-info"
    os.makedirs(os.path.join(metadata_directory, name))
    with open(os.path.join(metadata_directory, name, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: safetensors\\nVersion: {VERSION}\\n")
    return name
"""


def fetch(folder: Path) -> Path:
    """Fetch the sdist and return the directory that it unpacks to."""
    backend = folder / "backend"
    backend.mkdir()
    (backend / "maturin.py").write_text(_BACKEND)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    command += [
        "--disable-pip-version-check",
        "--no-binary",
        "safetensors",
        f"safetensors=={VERSION}",
        "-d",
        str(folder),
    ]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(backend)})
    with tarfile.open(folder / f"safetensors-{VERSION}.tar.gz") as archive:
        archive.extractall(folder / "sdist", filter="data")
    return folder / "sdist" / f"safetensors-{VERSION}"


def absent_frameworks() -> dict[str, str]:
    """Return the files to leave out, and why."""
    found = {}
    for name, modules in FRAMEWORKS.items():
        absent = [module for module in modules if importlib.util.find_spec(module) is None]
        if absent:
            found[name] = f"{' and '.join(absent)} not installed"
    return found


def main() -> int:
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = fetch(folder)
        work = folder / "work"  # they write beside themselves, below ./tests/data
        shutil.copytree(source / "bindings" / "python" / "tests", work / "tests")
        left_out = absent_frameworks()
        report = folder / "report.json"
        paths = [str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "DLPACK_LOADER_COMPAT_REPORT": str(report),
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "plugin",
            "-p",
            "no:cacheprovider",
            "-q",
            "--no-header",
            "--tb=no",
        ]
        command += ["--rootdir", str(work), "-c", os.devnull, *(f"--ignore=tests/{name}" for name in left_out), "tests"]
        subprocess.run(command, cwd=work, env=environment, check=False)
        if not report.exists():
            print("the test run did not come to its end")
            return 1
        result = json.loads(report.read_text())
    return judge(result, left_out)


def judge(result: dict[str, dict[str, str]], left_out: dict[str, str]) -> int:
    """Print the summary and return the exit status."""
    outcomes, reasons, reached = result["outcomes"], result["reasons"], result["reached"]
    counts = Counter(outcomes.values())
    print(
        f"\nsafetensors {VERSION}'s own tests with our reader: "
        + ", ".join(f"{n} {what}" for what, n in counts.items())
    )
    for name, why in left_out.items():
        print(f"  left out  {name}: {why}")
    for why, number in Counter(reasons[test] for test, what in outcomes.items() if what == "skipped").items():
        print(f"  skipped   {number}: {why}")
    calls = ", ".join(f"{name} {number}" for name, number in result["calls"].items())
    executed = counts["passed"] + counts["failed"]
    print(f"  reached our reader: {len(reached)} of the {executed} tests that ran (calls: {calls})")

    problems = []
    for test, better in BETTER.items():
        what = outcomes.get(test)
        if what != "failed":
            problems.append(f"{test} is listed as failing, and {what or 'was not run'}")
        elif not reasons[test].startswith(better.message):
            problems.append(f"{test} fails in another way than listed: {reasons[test]}")
        elif test not in reached:
            problems.append(f"{test} fails without having reached our reader")
        else:
            print(f"  fails, and should  {test}: {better.why}")
    problems += [
        f"{test} {what}: {reasons.get(test, '')}"
        for test, what in outcomes.items()
        if what not in ("passed", "skipped") and test not in BETTER
    ]
    if len(reached) < AT_LEAST or not all(result["calls"].values()):
        problems.append(f"only {len(reached)} tests reached our reader, of at least {AT_LEAST}")
    for problem in problems:
        print(f"  PROBLEM   {problem}")
    print("OK" if not problems else f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
