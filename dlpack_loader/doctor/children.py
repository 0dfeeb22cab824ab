"""Trying something in a child process: what crashes, hangs or raises there becomes a sentence here.

The child has the interpreter, the module path and the environment of this process, a working directory of its own that
is removed afterwards (libraries drop log files), and no warnings that are errors.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

__all__ = ["DEFAULT_TIMEOUT", "Outcome", "State", "attempt"]

DEFAULT_TIMEOUT = 120.0
"""Seconds: a framework's first import from a cold network disk takes long."""

_START = """
import sys
sys.path[:] = {path!r}
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except (ImportError, OSError, ValueError):
    pass
import json, os
try:
    from {module} import {name} as probe
    told = {{"facts": probe()}}
except BaseException as error:
    told = {{"error": f"{{type(error).__name__}}: {{error}}" if str(error) else type(error).__name__}}
with open("told.json", "w", encoding="utf-8") as file:
    json.dump(told, file)
os._exit(0)  # at once: no library's own clean-up
"""

_MOST_WORDS = 300
_LOOK_EVERY = 0.2  # seconds, for whether to stop


class State(StrEnum):
    """How an attempt ended."""

    WORKED = "worked"
    RAISED = "raised"
    CRASHED = "crashed"
    """The process was ended by what it did."""
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an attempt."""

    state: State
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the probe returned, where it worked."""
    why: str = ""
    """In a sentence, where it did not."""


def attempt(
    name: str,
    *,
    module: str = "dlpack_loader.doctor.probes",
    timeout: float = DEFAULT_TIMEOUT,
    stop: threading.Event | None = None,
) -> Outcome:
    """Call a function of a module in a child process.

    Parameters
    ----------
    name
        The function; it takes nothing and returns what JSON can have.
    timeout
        Seconds after which the child is ended.
    stop
        Ends the child when it is set, by another thread.
    """
    # Entries may be relative, and the child stands elsewhere.
    code = _START.format(path=[os.path.abspath(entry) for entry in sys.path], module=module, name=name)
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONWARNINGS", "PYTHONFAULTHANDLER")
    }
    with tempfile.TemporaryDirectory(prefix="dlpack-loader-", ignore_cleanup_errors=True) as folder:
        words = Path(folder, "stderr")
        with words.open("wb") as stderr:
            try:
                child = subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-c", code],
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    start_new_session=True,
                )
            except OSError as error:
                return Outcome(State.CRASHED, why=f"no process could be started: {error.strerror}")
            try:
                code_of_exit = _wait(child, timeout, stop)
            finally:  # after an interrupt as well: nothing is left running
                child.kill()
                child.wait()
        if code_of_exit is None:
            return Outcome(State.HUNG, why=f"it did not end within {timeout:g} s")
        told = Path(folder, "told.json")
        if code_of_exit or not told.exists():
            return Outcome(State.CRASHED, why=_last_words(code_of_exit, words))
        result = json.loads(told.read_text(encoding="utf-8"))
    if "facts" in result:
        return Outcome(State.WORKED, facts=result["facts"])
    return Outcome(State.RAISED, why=_short(result["error"]))


def _wait(child: subprocess.Popen[bytes], timeout: float, stop: threading.Event | None) -> int | None:
    """Return a child's exit code, or None when it is to wait no longer."""
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0 and not (stop is not None and stop.is_set()):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(min(left, _LOOK_EVERY))
    return None


def _last_words(code: int, words: Path) -> str:
    """Say how a process ended, with what it said last."""
    how = f"the process ended with code {code}"
    if code < 0:
        with contextlib.suppress(ValueError):
            how = f"the process was ended by {signal.Signals(-code).name}"
    with words.open("rb") as file:
        file.seek(max(0, words.stat().st_size - 4096))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return f"{how}: {_short(lines[-1])}" if lines else how


def _short(text: str) -> str:
    """Return a text as one line of a bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_WORDS else line[:_MOST_WORDS] + "..."
