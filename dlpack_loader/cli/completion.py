"""``completion``: scripts that complete the command line, one for each shell."""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from typing import Annotated, Any

import typer

__all__ = ["answer", "completion"]

_TYPER: Any = import_module("typer.completion")  # which exports its functions without saying so
_PROGRAM = "dlpack-loader"
_VARIABLE = "_DLPACK_LOADER_COMPLETE"


class Shell(StrEnum):
    """Shells that can be served."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """Print a script that completes commands and options, for your shell to read when it starts.

    Nothing is installed by this command: you decide where the script goes.
    """
    print(_TYPER.get_completion_script(prog_name=_PROGRAM, complete_var=_VARIABLE, shell=shell.value))


def answer() -> None:
    """Let the program answer the questions of these scripts, in the form that they expect."""
    _TYPER.completion_init()
