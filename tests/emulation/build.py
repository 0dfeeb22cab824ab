"""Building the emulated libraries with the system's C compiler, once for each content of the sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["build"]

_HERE = Path(__file__).parent
_FLAGS = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-g", "-fPIC", "-shared", "-pthread")
_CORE = "libemulation.so"
_CORE_SOURCES = ("core.c", "memory.c", "queue.c", "stream.c", "file.c", "export.c")
# The names that cuda.bindings, KvikIO, hip-python and hipfile look for.
_LIBRARIES = {
    "libcuda.so.1": "cuda.c",
    "libcufile.so.0": "cufile.c",
    "libamdhip64.so": "hip.c",
    "libhipfile.so": "hipfile.c",
}


def build(cache: Path, compiler: str = "cc") -> Path:
    """Build the libraries below a folder, unless these sources were built there already.

    Returns
    -------
    Path
        A folder with ``lib`` and ``include``.

    Raises
    ------
    RuntimeError
        There is no compiler, or it fails; the message has what it said.
    """
    if shutil.which(compiler) is None:
        raise RuntimeError(f"the emulated driver needs a C compiler, and there is no {compiler!r}")
    built = cache / f"emulation-{_fingerprint(compiler)}"
    if built.exists():
        return built
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=cache))
    (work / "lib").mkdir()
    shutil.copytree(_HERE / "include", work / "include")
    _compile(compiler, work / "lib" / _CORE, *_CORE_SOURCES, "-ldl")
    for name, source in _LIBRARIES.items():
        _compile(
            compiler, work / "lib" / name, source, f"-L{work / 'lib'}", f"-l:{_CORE}", "-Wl,-rpath,$ORIGIN", "-ldl"
        )
    try:
        work.rename(built)
    except OSError:  # another process was faster
        shutil.rmtree(work)
    return built


def _fingerprint(compiler: str) -> str:
    digest = hashlib.sha256(repr((compiler, _FLAGS, _LIBRARIES, os.uname().machine)).encode())
    for path in sorted([*_HERE.glob("src/*"), *_HERE.glob("include/**/*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, target: Path, *arguments: str) -> None:
    command = [compiler, *_FLAGS, f"-I{_HERE / 'include'}", f"-Wl,-soname,{target.name}", "-o", str(target), *arguments]
    done = subprocess.run(command, cwd=_HERE / "src", capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
