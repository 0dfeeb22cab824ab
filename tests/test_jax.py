"""``framework="jax"``: runs ``jax/cases`` once, in a process of its own, and shows each of its functions as a test."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[1]
CASES = ROOT / "tests" / "jax" / "cases.py"


def _names() -> list[str]:
    tree = ast.parse(CASES.read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def _environment(devices: int) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={devices}"
    return {**os.environ, "JAX_CASES": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}


@dataclass
class _Outcome:
    """What became of one function, for all its parameters."""

    passed: int = 0
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Run:
    output: str
    outcomes: dict[str, _Outcome]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> _Run:
    """Run all of them; they end before any other test goes on."""
    report = tmp_path_factory.mktemp("jax") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(CASES)]
    done = subprocess.run(
        command, cwd=ROOT, env=_environment(8), capture_output=True, text=True, check=False, timeout=580
    )
    output = done.stdout + done.stderr
    assert report.exists(), output
    outcomes: dict[str, _Outcome] = {}
    for case in ET.parse(report).iter("testcase"):
        outcome = outcomes.setdefault(case.attrib["name"].partition("[")[0], _Outcome())
        wrong = [*case.iter("failure"), *case.iter("error")]
        skipped = list(case.iter("skipped"))
        outcome.failed += [f"{case.attrib['name']}\n{node.text}" for node in wrong]
        outcome.skipped += [str(node.attrib.get("message")) for node in skipped]
        outcome.passed += not wrong and not skipped
    return _Run(output, outcomes)


@pytest.mark.parametrize("name", _names())
def test_jax(cases: _Run, name: str) -> None:
    outcome = cases.outcomes.get(name)
    assert outcome is not None, cases.output
    if outcome.failed:
        pytest.fail("\n\n".join(outcome.failed), pytrace=False)
    if outcome.skipped:
        pytest.skip("; ".join(dict.fromkeys(outcome.skipped)))
    assert outcome.passed


def test_a_case_that_fails_would_be_seen(tmp_path: Path) -> None:
    """The way that failures come from the other process."""
    path = tmp_path / "test_wrong.py"
    path.write_text("def test_wrong():\n    assert 1 == 2\n", encoding="utf-8")
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "assert 1 == 2" in "".join(str(node.text) for node in ET.parse(report).iter("failure"))


TWO_PROCESSES = """
import sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

number, address, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(address, 2, number, cluster_detection_method="deactivate")
from dlpack_loader import load_file, making, safe_open

fill, read = making.fill, []

def filling(*wanted):
    report = fill(*wanted)
    read.append(report.bytes_read)
    return report

making.fill = filling
assert (len(jax.devices()), len(jax.local_devices())) == (8, 4)
mesh = Mesh(np.array(jax.devices()), ("x",))
rows = NamedSharding(mesh, PartitionSpec("x"))
array = load_file(path, "jax", rows)["w"]
assert array.shape == (4096, 256) and array.sharding == rows and not array.is_fully_addressable
for shard in array.addressable_shards:
    expected = np.arange(4096 * 256, dtype=np.float32).reshape(4096, 256)[shard.index]
    assert np.array_equal(np.asarray(shard.data), expected)
theirs = Mesh(np.array([device for device in jax.devices() if device.process_index != number]), ("x",))
for sharding in (NamedSharding(theirs, PartitionSpec("x")), SingleDeviceSharding(theirs.devices.flat[0])):
    nothing = load_file(path, "jax", sharding)["w"]
    assert nothing.shape == (4096, 256) and nothing.sharding == sharding and not nothing.addressable_shards
assert load_file(path, "jax", "cpu:1")["w"].devices() == {jax.local_devices()[1]}
print(*read)
jax.distributed.shutdown()
"""


def test_each_of_two_processes_reads_its_own_half(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": np.arange(4096 * 256, dtype=np.float32).reshape(4096, 256)}, path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(number), address, str(path)],
            env=_environment(4),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        ends = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    nbytes = 4096 * 256 * 4
    for process, (output, errors) in zip(processes, ends, strict=True):
        assert process.returncode == 0, errors
        rows, whole = map(int, output.split())  # of devices of the other process nothing is read
        assert rows <= 1.05 * nbytes / 2
        assert whole == nbytes


def test_the_examples_of_its_docstrings() -> None:
    code = (
        "import doctest, sys\n"
        "import dlpack_loader.framework.jax as module\n"
        "result = doctest.testmod(module)\n"
        "print(result.attempted)\n"
        "sys.exit(result.failed)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=_environment(8),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) >= 10


def test_importing_the_module_starts_nothing() -> None:
    """Others may import it, and fork after it: JAX starts its threads with the first device that is asked for."""
    code = (
        "import os, threading, warnings\n"
        "warnings.simplefilter('error')\n"
        "import dlpack_loader.framework.jax\n"
        "child = os.fork()\n"
        "if not child: os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
