"""The package itself: what it imports, what it exports, what its wheel holds."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dlpack_loader
from tests.emulation import Driver

ROOT = Path(__file__).parents[1]
HEAVY = ("cupy", "hipfile", "jax", "kvikio", "numpy", "torch", "tqdm", "typer")

IMPORTED = """
import sys
{statement}
print(*sorted(set(name.partition(".")[0] for name in sys.modules) & set({heavy!r})))
"""


def _imports(statement: str) -> list[str]:
    code = IMPORTED.format(statement=statement, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.split()


def test_importing_the_package_imports_no_framework() -> None:
    assert _imports("import dlpack_loader") == []


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_the_check_above_can_fail(name: str) -> None:
    assert name in _imports(f"import dlpack_loader.framework.{name}")


def test_loading_into_numpy_imports_no_torch(tmp_path: Path) -> None:
    from tests.files import save

    save(tmp_path / "m.safetensors")
    path = str(tmp_path / "m.safetensors")
    assert _imports(f"import dlpack_loader; dlpack_loader.load_file({path!r}, 'np', backend='pread')") == ["numpy"]


def test_a_missing_framework_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import dlpack_loader\n"
        "try: dlpack_loader.safe_open('x')\n"
        "except ImportError as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == (
        "MissingDependencyError framework 'pt' needs the package torch, which is not installed. pip install torch\n"
    )


def test_every_public_name_is_there_and_documented(loaded_driver: Driver) -> None:
    """Over the emulated driver, since the vendors' libraries are looked for when their modules are imported."""
    assert sorted(dlpack_loader.__all__) == list(dlpack_loader.__all__)
    for module_info in pkgutil.walk_packages(dlpack_loader.__path__, "dlpack_loader."):
        if module_info.name.endswith(("__main__", "framework.cupy")):  # CuPy comes with a gigabyte of libraries
            continue
        module = importlib.import_module(module_info.name)
        assert module.__doc__, module_info.name
        if module_info.name.count(".") == 1 and not module_info.ispkg:
            assert module.__all__, module_info.name
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name), (module_info.name, name)
    for name in dlpack_loader.__all__:
        if name != "__version__":
            assert getattr(dlpack_loader, name).__doc__, name


def test_errors_are_safetensors_own_and_python_own() -> None:
    """The tree in the docstring of ``errors`` is the tree in the code."""
    import builtins

    from safetensors import SafetensorError

    from dlpack_loader import errors

    drawn = {}
    for line in (errors.__doc__ or "").splitlines():
        words = line.replace("│", " ").replace("├──", " ").replace("└──", " ").split()
        if len(words) > 1 and words[0].endswith("Error") and words[0] != "LoaderError":
            drawn[words[0]] = words[1]
    defined = {name for name in errors.__all__ if isinstance(getattr(errors, name), type) and name != "LoaderError"}
    assert set(drawn) == defined
    for name, builtin in drawn.items():
        error = getattr(errors, name)
        assert issubclass(error, errors.LoaderError)
        assert issubclass(error, SafetensorError)
        if builtin != "-":
            assert issubclass(error, getattr(builtins, builtin)), name


def test_no_file_grows_beyond_one_idea() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / "dlpack_loader").rglob("*.py")
    }
    assert lengths
    assert {name: count for name, count in lengths.items() if count > 400} == {}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        text = archive.read(metadata).decode()
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dlpack_loader").rglob("*.py")}
    assert names == sources | {"dlpack_loader/py.typed"}
    assert f"Version: {dlpack_loader.__version__}" in text
    assert "License-Expression: Apache-2.0" in text
    for extra in ("torch", "cu12", "cu13", "rocm", "jax", "cli", "notebook"):
        assert f"Provides-Extra: {extra}" in text


def test_the_wheel_works_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    """Not the working tree's files, those of the wheel."""
    from tests.files import save

    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    save(tmp_path / "m.safetensors")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import dlpack_loader, os\n"
        "assert os.path.realpath(dlpack_loader.__file__).startswith(os.path.realpath(sys.argv[1]))\n"
        "print(dlpack_loader.load_file(sys.argv[2], 'np')['steps'].sum())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "site", tmp_path / "m.safetensors"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
    )
    assert (done.stdout, done.stderr) == ("21\n", "")
