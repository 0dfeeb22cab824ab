"""The command line: what is in a checkpoint, whether it is sound, how it loads here, what two of them differ in.

Results go to standard output, one row a line; errors and progress go to standard error. At a terminal sizes are
rounded for people; anywhere else they are exact, nothing is shortened, and lines that are not rows begin with ``#``.
With ``--json`` the output is one JSON document; errors are text on standard error in any case.

Exit codes: 1 when something is wrong with the checkpoint or its files, 2 when the command line makes no sense. Two
commands have a meaning of their own, as their help says: ``diff`` exits with 1 when the two differ and with 2 on every
error; ``doctor`` exits with 1 only where nothing can be loaded.

One file a command; ``options`` is what they share.
"""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dlpack_loader import __version__
from dlpack_loader.cli import bench, check, completion, diff, doctor, load, ls, plan
from dlpack_loader.errors import CheckpointError, LoaderError
from dlpack_loader.terminal import complain, explain

__all__ = ["app"]

_OVERVIEW = """Look into safetensors checkpoints, check, compare, measure and load them.

SOURCE is a .safetensors file, a directory of them, or an .index.json.

Start here:
  dlpack-loader ls model.safetensors       what is in it
  dlpack-loader check weights/             is every file whole?
  dlpack-loader doctor weights/            what this machine can load, and how
  dlpack-loader bench model.safetensors    which way is fastest here
  dlpack-loader diff old/ new/             what changed

Each command has a --help with examples, and --json for programs. Piped,
there is one row a line with exact numbers, and other lines begin with '#'.

Exit codes:
  0  all is well
  1  something is wrong with a checkpoint; diff: the two differ
  2  the command line makes no sense; diff: any error
"""


class _Commands(TyperGroup):
    """The commands, all of which turn an error of the package into one message and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a name may hold what the terminal's encoding lacks
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except LoaderError as error:
            problems = error.problems if isinstance(error, CheckpointError) else ()
            complain(explain(error), *map(explain, problems))
        except MemoryError:
            complain(["not enough memory", "hint: Choose some of the tensors with --match"])
        finally:
            sys.stdout.flush()  # here, so that a closed pipe is noticed where typer deals with it
        raise typer.Exit(2 if ctx.invoked_subcommand == "diff" else 1)


completion.answer()
app = typer.Typer(
    name="dlpack-loader",
    cls=_Commands,
    help=_OVERVIEW,
    no_args_is_help=True,
    add_completion=False,  # its option guesses the shell; ``completion`` is told
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dlpack-loader {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


_COMMANDS: tuple[tuple[str, Callable[..., None], tuple[str, ...]], ...] = (
    (
        "ls",
        ls.list_tensors,
        (
            "dlpack-loader ls model.safetensors --sort size --limit 20",
            "dlpack-loader ls weights/ --match '*.bias'",
            "dlpack-loader ls weights/ --json | jq '.tensors[].name'",
        ),
    ),
    ("check", check.check, ("dlpack-loader check weights/ other.safetensors", "dlpack-loader check weights/ && serve")),
    ("plan", plan.plan, ("dlpack-loader plan weights/", "dlpack-loader plan weights/ --threads 16 --json")),
    (
        "load",
        load.load,
        ("dlpack-loader load weights/", "dlpack-loader load weights/ --match 'model.layers.0.*' --no-direct-io"),
    ),
    (
        "doctor",
        doctor.doctor,
        ("dlpack-loader doctor", "dlpack-loader doctor /data/weights", "dlpack-loader doctor --json > report.json"),
    ),
    (
        "bench",
        bench.bench,
        (
            "dlpack-loader bench model.safetensors",
            "dlpack-loader bench weights/ --device cuda:0 --seconds 120",
            "dlpack-loader bench weights/ --rounds 9 --json",
        ),
    ),
    (
        "diff",
        diff.diff,
        (
            "dlpack-loader diff old.safetensors new.safetensors",
            "dlpack-loader diff sharded/ merged.safetensors && echo same",
            "dlpack-loader diff base/ tuned/ --match '*.lora_*' --count",
        ),
    ),
    (
        "completion",
        completion.completion,
        (
            'eval "$(dlpack-loader completion bash)"    # in ~/.bashrc',
            'eval "$(dlpack-loader completion zsh)"     # in ~/.zshrc, after compinit',
            "dlpack-loader completion fish | source    # in config.fish",
        ),
    ),
)


def _teach(command: Callable[..., None], examples: tuple[str, ...]) -> str:
    """Return a command's help: what it does, in paragraphs that the terminal wraps, and examples."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    shown = "\n".join(f"  {example}" for example in examples)
    return "\n\n".join([*(paragraph.replace("\n", " ") for paragraph in paragraphs), f"Examples:\n{shown}"])


for _name, _command, _examples in _COMMANDS:
    app.command(_name, help=_teach(_command, _examples))(_command)
