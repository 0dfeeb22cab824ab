"""Runs the notebooks, each in a kernel of this interpreter, which is talked to through files where the system has that.

``python -m tests.notebooks`` runs all of them and stores what they show beside their cells; ``--check FOLDER`` stores
the results in a folder instead. What is stored holds no time, no name and no path of the machine.

Cells tagged ``measured`` show what differs from run to run, and cells tagged ``device`` what depends on the devices;
the others show the same wherever they run.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
SECONDS = 120
"""Most that one cell may take."""

_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class ThisPython(AsyncKernelManager):
    """Starts kernels of the interpreter that runs this, whatever kernels are registered with Jupyter."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def paths() -> list[Path]:
    """The notebooks, in order."""
    return sorted(FOLDER.glob("*.ipynb"))


def execute(path: Path, folder: Path) -> Any:
    """Run a notebook in a folder of its own and return it with what it showed."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    with tempfile.TemporaryDirectory(prefix="nb") as runtime:  # short: paths of sockets are
        client = NotebookClient(
            notebook,
            kernel_manager_class=ThisPython,
            timeout=SECONDS,
            record_timing=False,
            resources={"metadata": {"path": str(folder)}},
        )
        manager = client.create_kernel_manager()  # the client's own, which it shuts down
        manager.connection_file = os.path.join(runtime, "kernel.json")
        if os.name == "posix":
            manager.transport, manager.ip = "ipc", os.path.join(runtime, "kernel")
        client.execute(env=_environment(runtime))
    return tidy(notebook)


def _environment(runtime: str) -> Mapping[str, str]:
    """What kernels see: the sources of this tree, whatever folder they start in, and Jupyter's files elsewhere."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "IPYTHONDIR": os.path.join(runtime, "ipython"),
        "JUPYTER_RUNTIME_DIR": runtime,
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


def tidy(notebook: Any) -> Any:
    """Keep what a reader sees, and a note of the source that was run."""
    notebook.metadata = nbformat.from_dict({**_METADATA, "executed_source": source_digest(notebook)})
    for number, cell in enumerate(notebook.cells, 1):
        cell.id = f"cell-{number:02}"
        cell.metadata = {key: cell.metadata[key] for key in ("tags",) if cell.metadata.get(key)}
        if cell.cell_type == "code":
            cell.outputs = list(_merged(cell.outputs))
            for output in cell.outputs:
                output.pop("transient", None)
                if "metadata" in output:
                    output.metadata = {}
    return notebook


def _merged(outputs: Sequence[Any]) -> Iterator[Any]:
    """Join what was printed: how it came in pieces differs from run to run."""
    last = None
    for output in outputs:
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
            continue
        last = output
        yield output


def source_digest(notebook: Mapping[str, Any]) -> str:
    """Tell one state of the cells' sources from another."""
    sources = [[cell["cell_type"], "".join(cell["source"])] for cell in notebook["cells"]]
    return hashlib.sha256(repr(sources).encode()).hexdigest()


def shown_text(cell: Mapping[str, Any]) -> list[str]:
    """What a cell shows, but for pictures, as text."""
    texts = []
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        pieces = [output.get("text", ""), *(data.get(kind, "") for kind in ("text/plain", "text/html"))]
        pieces.extend(output.get("traceback", ()))
        texts.append("".join("".join(piece) for piece in pieces))
    return texts


def private(text: str) -> list[str]:
    """Parts of a text that only this machine, or its user, has."""
    home = os.path.expanduser("~")
    own = [name for name in (str(ROOT), home, sys.prefix, tempfile.gettempdir()) if len(name) > 1 and name in text]
    absolute = re.compile(r"(?<![\w.:/<])(?:/[A-Za-z0-9_.~+-]+){2,}|[A-Za-z]:\\\\?\w+")
    return own + absolute.findall(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.notebooks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="of all by default")
    parser.add_argument("--check", metavar="FOLDER", type=Path, help="store results here, and leave the notebooks")
    options = parser.parse_args(arguments)
    for path in options.notebooks or paths():
        with tempfile.TemporaryDirectory(prefix="nb") as folder:
            try:
                notebook = execute(path, Path(folder))
            except CellExecutionError as error:
                print(f"{path.name}: {error}", file=sys.stderr)
                return 1
        into = options.check / path.name if options.check else path
        nbformat.write(notebook, into)
        print(f"{path.name}: {into.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    if sys.platform == "win32":  # pyzmq needs the other kind of loop there
        asyncio.set_event_loop_policy(asyncio.WindowsSelectorEventLoopPolicy())
    sys.exit(main())
