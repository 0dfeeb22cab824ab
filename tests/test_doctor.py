"""The doctor on machines that lack things and with libraries that are broken: always a report, with the remedy."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dlpack_loader.doctor import Examination, Finding, Level, State, attempt, examine, storage, system
from dlpack_loader.doctor.storage import file_system_of
from tests.files import save, write_index
from tests.test_cli import Ran, at_terminal, environment, run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="drivers and libraries are looked for as on Linux")

NO_LIBRARY = """
import ctypes
class Missing(ctypes.CDLL):
    def __init__(self, name, *arguments, **options):
        if name and any(part in name for part in {names!r}):
            raise OSError(f"{{name}}: cannot open shared object file: No such file or directory")
        super().__init__(name, *arguments, **options)
ctypes.CDLL = Missing
"""
"""A ``sitecustomize`` that hides libraries of the system: the children of the doctor start with it."""

TORCH = """
__version__ = "9+cpu"
class version:
    cuda = hip = None
class cuda:
    is_available = staticmethod(lambda: False)
"""

DRIVER = """
#include <stdlib.h>
int cuDriverGetVersion(int *version) { *version = atoi(getenv("FAKE_VERSION")); return 0; }
int cuInit(unsigned flags) { return atoi(getenv("FAKE_CODE")); }
int cuDeviceGetCount(int *count) { *count = atoi(getenv("FAKE_COUNT")); return 0; }
int cuGetErrorName(int code, const char **name) { *name = "CUDA_ERROR_FAKE"; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int room, int device) { name[0] = 'G'; name[1] = 27; name[2] = 0; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 8UL << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute; return 0; }
"""


@pytest.fixture
def hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Hide libraries from the doctor's children, whatever this machine has."""

    def hide(*names: str) -> None:
        folder = tmp_path / "site"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(NO_LIBRARY.format(names=names))
        monkeypatch.setenv("PYTHONPATH", str(folder))

    monkeypatch.delenv("ROCM_PATH", raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return hide


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put modules before the installed ones."""

    def put(name: str, code: str) -> None:
        (tmp_path / "modules" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "modules" / name / "__init__.py").write_text(code)

    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    return put


@pytest.fixture
def real_frameworks() -> None:
    """Let torch and JAX be the real ones."""


@pytest.fixture(autouse=True)
def light(request: pytest.FixtureRequest, broken: Callable[[str, str], None]) -> None:
    """Spare tests of other things the seconds that importing torch and JAX takes in every child."""
    if "real_frameworks" not in request.fixturenames:
        broken("torch", TORCH)
        broken("jax", "__version__ = '0'")


@pytest.fixture
def emulated(emulation_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the doctor's children find the emulated libraries as they would find a driver."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(emulation_folder / "lib"))
    monkeypatch.setenv("LD_PRELOAD", str(emulation_folder / "lib" / "libamdhip64.so"))  # hipfile wants its symbols
    monkeypatch.setenv("ROCM_PATH", str(emulation_folder))
    monkeypatch.delenv("PYTHONPATH", raising=False)


def complete(examination: Examination) -> None:
    """What holds for every report."""
    keys = [finding.key for finding in examination.findings]
    assert len(keys) == len(set(keys))
    for finding in examination.findings:
        assert finding.value, finding
        assert finding.meaning, finding
        assert "Traceback" not in finding.value
        assert (finding.remedy is not None) or finding.level is Level.OK, finding
        assert finding.level is Level.PROBLEM or not finding.blocking
    expected = {
        "system.platform", "system.cpus", "system.io_uring", "memory.host", "memory.cgroup", "memory.page_size",
        "limits.open_files", "limits.locked_memory", "packages.safetensors", "packages.numpy", "packages.torch",
        "packages.jax", "packages.cupy", "packages.ml_dtypes", "cuda.driver", "cuda.runtime", "cuda.binding",
        "cuda.gpu_direct", "rocm.driver", "rocm.binding", "rocm.gpu_direct",
    }  # fmt: skip
    assert expected <= set(keys)


class TestNoGpu:
    @pytest.mark.usefixtures("real_frameworks")
    def test_host_only(self, hidden: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        hidden("libcuda.so", "libamdhip64", "nvcuda")
        monkeypatch.setattr("dlpack_loader.doctor.devices._on_bus", lambda vendor: False)
        before = sorted(os.listdir(Path.cwd()))
        examination = examine()
        complete(examination)
        assert examination.can_load
        assert examination.devices == ()
        cuda = examination.finding("cuda.driver")
        assert (cuda.level, cuda.value) == (Level.NOTE, "none: libcuda.so.1 is not installed")
        assert cuda.remedy is not None
        assert "NVIDIA's driver" in cuda.remedy
        assert "--gpus all" in cuda.remedy
        assert examination.finding("rocm.driver").level is Level.NOTE
        assert "no device" in examination.finding("cuda.gpu_direct").value
        torch, found = importlib.import_module("torch"), examination.finding("packages.torch")
        assert found.level is Level.OK
        assert found.value.startswith(f"torch {torch.__version__}, built for ")
        assert examination.finding("packages.jax").value.startswith("JAX ")
        assert sorted(os.listdir(Path.cwd())) == before  # no log, no core

    def test_a_gpu_without_its_driver(self, hidden: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
        hidden("libcuda.so", "libamdhip64", "nvcuda")
        monkeypatch.setattr("dlpack_loader.doctor.devices._on_bus", lambda vendor: vendor == "0x10de")
        examination = examine()
        driver = examination.finding("cuda.driver")
        assert driver.level is Level.PROBLEM
        assert driver.value == "none: libcuda.so.1 is not installed, and the machine has an NVIDIA GPU"
        assert examination.finding("rocm.driver").level is Level.NOTE
        assert examination.can_load


class TestDrivers:
    @pytest.fixture
    def driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Examination]:
        """A libcuda that answers as it is told."""
        (tmp_path / "driver.c").write_text(DRIVER)
        folder = tmp_path / "lib"
        folder.mkdir()
        command = ["cc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(tmp_path / "driver.c")]
        subprocess.run(command, check=True)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
        monkeypatch.delenv("ROCM_PATH", raising=False)

        def answer(code: int = 0, count: int = 1, version: int = 13000) -> Examination:
            for name, value in (("CODE", code), ("COUNT", count), ("VERSION", version)):
                monkeypatch.setenv(f"FAKE_{name}", str(value))
            return examine()

        return answer

    @pytest.mark.parametrize(
        ("code", "remedy"),
        [
            (34, "take .../stubs out of LD_LIBRARY_PATH"),
            (100, "CUDA_VISIBLE_DEVICES"),
            (802, "nvidia-fabricmanager"),
            (803, "restart the machine after a driver update"),
            (999, "nvidia-smi"),
        ],
    )
    def test_faults(self, driver: Callable[..., Examination], code: int, remedy: str) -> None:
        examination = driver(code=code)
        complete(examination)
        finding = examination.finding("cuda.driver")
        assert finding.value == f"version 13.0: CUDA_ERROR_FAKE ({code})"
        assert finding.level is Level.PROBLEM
        assert remedy in (finding.remedy or "")
        assert examination.can_load

    def test_old(self, driver: Callable[..., Examination]) -> None:
        finding = driver(version=11080).finding("cuda.driver")
        assert (finding.level, finding.value, finding.remedy) == (Level.PROBLEM, "version 11.8", "Update the driver")

    def test_no_device(self, driver: Callable[..., Examination]) -> None:
        examination = driver(count=0)
        assert examination.devices == ()
        assert examination.finding("cuda.driver").value == "version 13.0, no device"

    def test_names_of_strangers(self, driver: Callable[..., Examination]) -> None:
        driver()
        out = run("doctor").out
        assert r"G\x1b, 8.0 GiB, compute capability 75.76" in out

    def test_no_library_at_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "libcuda.so.1").write_text("this is not a library, and longer than a header of one is " * 3)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
        finding = examine().finding("cuda.driver")
        assert finding.level is Level.PROBLEM
        assert "libcuda.so.1 can't be loaded" in finding.value
        assert "invalid ELF header" in finding.value


@pytest.mark.usefixtures("emulated")
class TestEmulated:
    def test_devices(self) -> None:
        examination = examine()
        complete(examination)
        assert [(d.kind, d.ordinal, d.nbytes, d.unified) for d in examination.devices] == [
            (kind, ordinal, 16 << 30, False) for kind in ("cuda", "hip") for ordinal in range(3)
        ]
        assert {d.arch for d in examination.devices if d.kind == "cuda"} == {"9.0"}
        assert examination.finding("cuda.driver").value.startswith("version 13.0")
        assert examination.finding("cuda.driver").value.endswith("3 device(s)")
        assert examination.finding("rocm.driver").value == "version 7.2, 3 device(s)"
        for key in ("cuda.binding", "rocm.binding", "cuda.driver", "rocm.driver"):
            assert examination.finding(key).level is Level.OK, key
        assert examination.finding("rocm.gpu_direct").level is Level.OK  # the emulated hipFile opens
        torch = examination.finding("packages.torch")
        assert "finds no device" in torch.value  # its CPU build
        assert (torch.level, torch.remedy and "build of torch for CUDA" in torch.remedy) == (Level.NOTE, True)

    @pytest.mark.parametrize(
        ("name", "value", "key", "remedy"),
        [
            ("KVIKIO_COMPAT_MODE", "ON", "cuda.gpu_direct", "Unset KVIKIO_COMPAT_MODE"),
            ("HIPFILE_FORCE_COMPAT_MODE", "true", "rocm.gpu_direct", "Unset HIPFILE_FORCE_COMPAT_MODE"),
            ("CUDA_VISIBLE_DEVICES", "", "cuda.gpu_direct", None),
        ],
    )
    def test_why_not_direct(
        self, monkeypatch: pytest.MonkeyPatch, name: str, value: str, key: str, remedy: str | None
    ) -> None:
        monkeypatch.setenv(name, value)
        finding = examine().finding(key)
        if remedy is not None:
            assert (finding.level, finding.remedy) == (Level.NOTE, remedy)
        assert finding.value.startswith("not possible: ")

    @pytest.mark.parametrize(
        ("code", "value", "remedy"),
        [
            (
                "raise ImportError('libcufile.so.0: cannot open shared object file: No such file or directory')",
                "can't be imported: ImportError: libcufile.so.0",
                "pip install nvidia-cufile",
            ),
            ("raise RuntimeError('two\\nlines')", "can't be imported: RuntimeError: two lines", "Reinstall kvikio"),
            ("raise SystemExit(3)", "can't be imported: SystemExit: 3", "Reinstall kvikio"),
            ("import no_such_module", "No module named 'no_such_module'", "Reinstall kvikio"),
            (
                "import os, sys; print('last words', file=sys.stderr); os.abort()",
                "SIGABRT: last words",
                'backend="pread"',
            ),
            ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV", 'backend="pread"'),
            ("import os; os._exit(7)", "ended with code 7", 'backend="pread"'),
            ("import time; time.sleep(600)", "did not end within 5 s", 'backend="pread"'),
        ],
        ids=["import error", "error", "exit", "missing part", "abort", "crash", "silent exit", "hang"],
    )
    def test_a_broken_kvikio(self, broken: Callable[[str, str], None], code: str, value: str, remedy: str) -> None:
        broken("kvikio", code)
        examination = examine(timeout=5 if "sleep" in code else 120)
        finding = examination.finding("cuda.gpu_direct")
        assert finding.level is Level.PROBLEM
        assert value in finding.value
        assert remedy in (finding.remedy or "")
        if remedy == 'backend="pread"':
            assert "a load to a device tries it" in finding.meaning
        assert examination.can_load

    def test_a_broken_binding(self, broken: Callable[[str, str], None], tmp_path: Path) -> None:
        broken("cuda", "")
        broken("cuda/bindings", "raise OSError('wrong architecture')")
        finding = examine().finding("cuda.binding")
        assert finding.level is Level.PROBLEM
        assert "can't be imported: OSError: wrong architecture" in finding.value
        assert finding.remedy == "pip install --force-reinstall cuda-bindings"


class TestLibraries:
    def test_a_broken_numpy_blocks_everything(self, broken: Callable[[str, str], None]) -> None:
        broken("numpy", "raise ImportError('numpy._core.multiarray failed to import')")
        examination = examine()
        finding = examination.finding("packages.numpy")
        assert (finding.level, finding.blocking) == (Level.PROBLEM, True)
        assert not examination.can_load
        ran = run("doctor")
        assert (ran.code, ran.err) == (1, "")
        assert "# Loading is not possible: NumPy" in ran.out

    def test_all_broken_at_once(self, broken: Callable[[str, str], None], tmp_path: Path) -> None:
        """In a process as a user starts it: a report, and no traceback."""
        for name in ("torch", "jax", "cupy", "kvikio", "hipfile"):
            broken(name, f"import os, sys\nprint('no {name}', file=sys.stderr)\nos.abort()")
        empty = tmp_path / "empty"
        empty.mkdir()
        command = [sys.executable, "-m", "dlpack_loader", "doctor"]
        env = environment(first=str(tmp_path / "modules"))
        done = subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr, os.listdir(empty)) == (0, "", [])
        rows = {line.split()[1]: line for line in done.stdout.splitlines() if not line.startswith("#")}
        for name in ("torch", "jax", "cupy"):
            assert rows[f"packages.{name}"].startswith("problem")
            assert f"SIGABRT: no {name}" in rows[f"packages.{name}"]
        assert "SIGABRT: no kvikio" in rows["cuda.gpu_direct"]
        assert "SIGABRT: no hipfile" in rows["rocm.gpu_direct"]
        assert "Traceback" not in done.stdout
        assert re.search(r"^# Loads can fill host memory", done.stdout, re.MULTILINE)

    def test_what_is_not_installed(self, tmp_path: Path) -> None:
        """In a process whose module path has nothing but what the package itself needs."""
        for name in ("dlpack_loader", "safetensors", "msgspec", "numpy", "numpy.libs", "typer", "rich"):
            for folder in [Path(__file__).parents[1], *map(Path, sys.path)]:
                if (folder / name).is_dir():
                    (tmp_path / name).symlink_to(folder / name)
                    break
        code = (
            f"import sys; sys.path[:] = [{str(tmp_path)!r}, *(p for p in sys.path if 'site-packages' not in p)]\n"
            "import json; from dataclasses import asdict; from dlpack_loader.doctor import examine\n"
            "print(json.dumps([asdict(finding) for finding in examine().findings]))"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, timeout=60
        )
        found = {item["key"]: item for item in json.loads(done.stdout)}
        assert done.stderr == ""
        expected = {
            "packages.torch": ("note", "pip install torch"),
            "packages.ml_dtypes": ("note", "pip install ml_dtypes"),
            "packages.jax": ("ok", None),
            "packages.numpy": ("ok", None),
        }
        assert {key: (found[key]["level"], found[key]["remedy"]) for key in expected} == expected
        assert found["cuda.gpu_direct"]["value"] == "not possible: KvikIO is not installed"


class TestChildren:
    def test_facts(self) -> None:
        outcome = attempt("numpy")
        assert outcome.state is State.WORKED
        assert outcome.facts["version"].count(".") >= 2

    def test_nothing_is_left_running_or_behind(
        self, broken: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
        (tmp_path / "temporary").mkdir()
        monkeypatch.setattr("tempfile.tempdir", None)
        mark = tmp_path / "pid"
        broken("slow", f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
        begin = time.monotonic()
        outcome = attempt("anything", module="slow", timeout=3)
        assert (outcome.state, outcome.why) == (State.HUNG, "it did not end within 3 s")
        assert time.monotonic() - begin < 30
        with pytest.raises(ProcessLookupError):
            os.kill(int(mark.read_text()), 0)
        assert list((tmp_path / "temporary").iterdir()) == []

    def test_settings_of_the_process_do_not_matter(
        self, broken: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONWARNINGS", "error")
        broken(
            "careless", "import warnings\nwarnings.warn('old')\nprint('noise')\ndef probe(): return {'here': __name__}"
        )
        assert attempt("probe", module="careless").facts == {"here": "careless"}

    def test_no_core_file(self, broken: Callable[[str, str], None]) -> None:
        broken("limits", "import resource\ndef probe(): return {'core': resource.getrlimit(resource.RLIMIT_CORE)[1]}")
        assert attempt("probe", module="limits").facts == {"core": 0}


class TestStorage:
    def found(self, path: Path | str, *, named: bool = True) -> dict[str, Finding]:
        return {finding.key: finding for finding in storage.examine_storage(str(path), named=named)}

    def test_direct_io_is_tried(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        place = tmp_path / "place"
        place.mkdir()
        path = place / "x"
        path.write_bytes(bytes(8192))
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
            works = True
        except OSError:
            works = False
        for named in (path, place):
            assert (self.found(named, named=False)["storage.direct_io"].value == "works") == works
        assert [entry.name for entry in place.iterdir()] == ["x"]
        opened = os.open

        def refuse(name: str, flags: int, *more: int, **options: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(22, "Invalid argument")
            return opened(name, flags, *more, **options)

        monkeypatch.setattr(os, "open", refuse)
        finding = self.found(path, named=False)["storage.direct_io"]
        assert (finding.level, finding.value) == (Level.NOTE, "refused (Invalid argument)")
        assert "local disk" in (finding.remedy or "")

    def test_a_folder_that_can_not_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(**options: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("tempfile.TemporaryFile", refuse)
        finding = self.found(tmp_path, named=False)["storage.direct_io"]
        assert (finding.level, finding.value) == (Level.NOTE, "not tried: Permission denied")
        save(tmp_path / "m.safetensors")  # then this one is read
        assert not self.found(tmp_path, named=False)["storage.direct_io"].value.startswith("not tried")

    def test_file_systems(self, tmp_path: Path) -> None:
        proc = file_system_of("/proc/self/status")
        assert proc is not None
        assert (proc.type, proc.mount, proc.kind) == ("proc", "/proc", "disk")
        here = file_system_of(str(tmp_path))
        assert here is not None
        told = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True).stdout
        assert told.strip().split("/")[0] in (here.type, "ext2", "UNKNOWN")  # stat says ext2/ext3 of ext4
        shm = file_system_of("/dev/shm")
        assert shm is None or shm.kind in ("memory", "disk", "overlay")

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("tmpfs", "memory"),
            ("nfs4", "network"),
            ("fuse.s3fs", "fuse"),
            ("overlay", "overlay"),
            ("ext4", "disk"),
        ],
    )
    def test_kinds(self, kind: str, expected: str) -> None:
        assert storage.FileSystem(kind, "/").kind == expected

    def test_checkpoints(self, tmp_path: Path) -> None:
        save(tmp_path / "m.safetensors")
        assert "sound" in self.found(tmp_path)["storage.checkpoint"].meaning
        assert "storage.checkpoint" not in self.found(tmp_path, named=False)
        (tmp_path / "n").mkdir()
        assert "a folder without a checkpoint" in self.found(tmp_path / "n")["storage.checkpoint"].value
        os.truncate(tmp_path / "m.safetensors", 50)
        found = self.found(tmp_path / "m.safetensors")["storage.checkpoint"]
        assert (found.level, found.blocking) == (Level.PROBLEM, True)
        assert "cut off" in (found.remedy or "")
        index = write_index(tmp_path / "i.safetensors.index.json", {"a": "x.safetensors", "b": "y.safetensors"})
        assert "the first of 2 problems" in self.found(index)["storage.checkpoint"].value

    def test_no_such_path(self, tmp_path: Path) -> None:
        ran = run("doctor", tmp_path / "none", "--json")
        (finding,) = (item for item in ran.document["findings"] if item["key"].startswith("storage."))
        assert (ran.code, ran.document["can_load"], finding["blocking"]) == (1, False, True)
        assert finding["value"] == f"{tmp_path / 'none'}: No such file or directory"
        assert finding["remedy"] == "Check the path"

    def test_a_pipe(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        found = self.found(tmp_path / "pipe")
        assert found["storage.checkpoint"].level is Level.PROBLEM
        assert "storage.direct_io" not in found


class TestSystem:
    def found(self) -> dict[str, Finding]:
        return {finding.key: finding for finding in system.examine_system()}

    def test_control_group(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "inner").mkdir()
        for folder, limit, used in ((tmp_path, "max", "5"), (tmp_path / "inner", str(3 << 20), str(1 << 20))):
            (folder / "memory.max").write_text(limit + "\n")
            (folder / "memory.current").write_text(used + "\n")
        groups = [(folder, "memory.max", "memory.current") for folder in (tmp_path / "inner", tmp_path)]
        monkeypatch.setattr(system, "_control_groups", lambda: iter(groups))
        assert system.memory_limit() == (3 << 20, 1 << 20)
        assert system.usable_memory() == 2 << 20
        finding = self.found()["memory.cgroup"]
        assert (finding.level, finding.value) == (Level.NOTE, "0.0 GiB, 0.0 GiB in use")
        assert "memory limit" in (finding.remedy or "")
        monkeypatch.setattr(system, "_control_groups", lambda: iter(groups[1:]))
        assert system.memory_limit() is None
        assert self.found()["memory.cgroup"].value == "no limit"

    def test_this_process_has_a_control_group(self) -> None:
        if not Path("/proc/self/cgroup").exists():
            pytest.skip("this system has no control groups")
        assert all(str(folder).startswith("/sys/fs/cgroup") for folder, *_ in system._control_groups())

    def test_few_open_files(self) -> None:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
        try:
            finding = self.found()["limits.open_files"]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert finding.level is Level.NOTE
        assert finding.value.startswith("128 (ulimit -n)")
        assert (finding.remedy or "").startswith("ulimit -n ")

    @pytest.mark.parametrize(
        ("text", "level"),
        [("[always] madvise never", "ok"), ("always [madvise] never", "ok"), ("always madvise [never]", "note")],
    )
    def test_huge_pages(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, level: str) -> None:
        (tmp_path / "enabled").write_text(text)
        monkeypatch.setattr(system, "_THP", tmp_path / "enabled")
        finding = self.found()["memory.huge_pages"]
        assert (finding.level, finding.value.rsplit(" ", 1)[1]) == (level, text.partition("[")[2].partition("]")[0])


class TestCommand:
    def test_json(self, tmp_path: Path) -> None:
        save(tmp_path / "m.safetensors")
        ran = run("doctor", tmp_path, "--json")
        assert (ran.code, ran.err, ran.out.count("\n")) == (0, "", 1)
        document = ran.document
        assert set(document) == {"path", "can_load", "problems", "notes", "devices", "findings"}
        levels = [finding["level"] for finding in document["findings"]]
        assert (document["problems"], document["notes"]) == (levels.count("problem"), levels.count("note"))

    def test_rows(self) -> None:
        out = run("doctor").out
        rows = [line for line in out.splitlines() if not line.startswith("#")]
        assert all(re.match(r"(ok|note|problem) +[a-z_.0-9]+ +\S", row) for row in rows)
        assert out.splitlines()[-2].startswith("# Loads can fill host memory")

    @pytest.mark.parametrize("columns", [30, 100])
    def test_at_a_terminal(self, columns: int, shown: Callable[..., Ran]) -> None:
        ran = shown(COLUMNS=str(columns))
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", ran.err).replace("\r", "\n")
        assert ran.code == 0
        assert max(len(line.rstrip()) for line in text.splitlines()) <= columns
        assert [line for line in text.splitlines() if line.rstrip() in ("system", "storage", "cuda", "rocm")]
        assert "#" not in text
        assert "Loads can fill" in " ".join(text.split())

    @pytest.fixture
    def shown(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
        """Run the doctor at a terminal, with settings of the environment."""

        def show(**settings: str) -> Ran:
            fixed = environment(first=str(tmp_path / "modules"), **settings)
            monkeypatch.setattr("tests.test_cli.environment", lambda: fixed)
            return at_terminal("doctor")

        return show

    def test_a_long_path_is_shown_whole(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / ("a_long_name" * 8 + ".safetensors")
        path.write_bytes(b"<html>")
        fixed = environment(COLUMNS="50", NO_COLOR="1")
        monkeypatch.setattr("tests.test_cli.environment", lambda: fixed)
        ran = at_terminal("doctor", path, "--timeout", "30")
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", ran.err)
        assert ran.code == 1
        assert "…" not in text
        assert f"{path}: header too small" in re.sub(r"\s*\n\s*", "", text)

    def test_colour(self, shown: Callable[..., Ran]) -> None:
        colour = re.compile(r"\x1b\[[0-9;]*3[0-9]m")
        assert colour.search(shown().err)
        assert not colour.search(shown(NO_COLOR="1").err)

    def test_an_interrupt_ends_it_with_its_children(self, broken: Callable[[str, str], None], tmp_path: Path) -> None:
        mark = tmp_path / "pid"
        broken("torch", f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
        command = [sys.executable, "-m", "dlpack_loader", "doctor", "--timeout", "100"]
        env = environment(first=str(tmp_path / "modules"))
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            deadline = time.monotonic() + 30
            while not mark.exists() or not mark.read_text():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=30)
        assert process.returncode != 0
        assert b"Traceback" not in err
        with pytest.raises(ProcessLookupError):
            os.kill(int(mark.read_text()), 0)

    def test_hopeless_options(self) -> None:
        assert run("doctor", "--timeout", "0").code == 2
        assert shutil.which("cc")  # what the tests of drivers need
