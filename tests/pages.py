"""Pages of the documentation as programs: their blocks of code run in order, in a process of their own.

``python -m tests.pages PAGE`` runs one in the current folder. A block says what is done with it by its language:

``python``
    It runs. With ``:class: needs-gpu`` or ``:class: needs-vllm`` it is only compiled.
``pycon``
    It runs, and what it prints, returns or raises is what stands there; ``...`` stands for anything.
``console``
    Commands of ``dlpack-loader`` run, and print what stands below them, if anything does. Others do not run.
``text`` and directives of Sphinx
    Nothing.
"""

from __future__ import annotations

import doctest
import inspect
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PLAIN = ("text", "{eval-rst}", "{toctree}")
CODE = ("python", "pycon", "console")
CHECKED_ONLY = ("doctor", "bench")
"""Commands that take too long, or say too much of the machine: their options are checked, and other tests run them."""

_FENCE = re.compile(r"^```(?P<info>\S.*)\n(?P<text>(?:.*\n)*?)```$", re.MULTILINE)
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    language: str
    text: str
    line: int
    """Number of the line before its first."""
    needs: str | None = None
    """What it needs that is not at hand where the tests run."""


def pages() -> list[Path]:
    """The README and every page below docs/."""
    return [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    content = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(content):
        info, text = match["info"], match["text"]
        line = content.count("\n", 0, match.start("text"))
        needs = None
        if info.startswith("{code-block}"):
            info = info.split()[1]
            while text.startswith(":"):
                option, _, text = text.partition("\n")
                line += 1
                name, _, value = option[1:].partition(": ")
                if name == "class":
                    needs = value
        found.append(Block(info.split()[0], text, line, needs))
    return found


def commands_of(block: Block) -> Iterator[tuple[list[str], str]]:
    """Yield the commands of a console block, each with what it prints."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield shlex.split(command, comments=True), output


def run(page: Path) -> None:
    """Run the blocks of a page in one namespace."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.language == "python":
            code = compile("\n" * block.line + block.text, str(page), "exec")
            if block.needs is None:
                exec(code, space)
        elif block.language == "pycon":
            with _user_without_rights(block):
                _compare(block, page, space)
        elif block.language == "console":
            for words, output in commands_of(block):
                if words[0] == "dlpack-loader":
                    _command(words[1:], output, f"{page.name}:{block.line}")


def _compare(block: Block, page: Path, space: dict[str, Any]) -> None:
    example = doctest.DocTestParser().get_doctest(block.text, space, page.name, str(page), block.line)
    assert example.examples, f"{page.name}:{block.line}: nothing to run"
    if doctest.DocTestRunner(optionflags=_FLAGS).run(example, clear_globs=False).failed:
        raise AssertionError(f"{page.name}:{block.line}: not what stands there")
    space.update(example.globs)


def _command(arguments: list[str], output: str, where: str) -> None:
    from typer.testing import CliRunner

    from dlpack_loader.cli import app

    if arguments[0] in CHECKED_ONLY:
        arguments = [*arguments, "--help"]  # options before it are checked all the same
    done = CliRunner().invoke(app, arguments)
    usual = {0, 1} if arguments[0] in ("diff", "check") else {0}
    assert done.exit_code in usual, f"{where}: {arguments}: {done.output}"
    assert done.exception is None or isinstance(done.exception, SystemExit), f"{where}: {done.exception!r}"
    if output.strip() and not doctest.OutputChecker().check_output(output, done.output, _FLAGS):
        raise AssertionError(f"{where}: {arguments}: expected\n{output}\ngot\n{done.output}")


@contextmanager
def _user_without_rights(block: Block) -> Iterator[None]:
    """Be somebody else for a block that takes rights away: no file is locked for root."""
    if "os.chmod(" not in block.text or not hasattr(os, "geteuid") or os.geteuid() != 0:
        yield
        return
    os.chmod(".", 0o777)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def signatures() -> tuple[dict[str, inspect.Signature], dict[str, inspect.Signature]]:
    """What people call: functions and classes by their names, and methods by theirs."""
    import dlpack_loader
    from dlpack_loader.integrations import safetensors, transformers

    functions: dict[str, Any] = {name: getattr(dlpack_loader, name) for name in dlpack_loader.__all__}
    functions["read_through"] = safetensors.read_through
    assert inspect.signature(safetensors.read_through) == inspect.signature(transformers.read_through)
    owners = (dlpack_loader.Reader, dlpack_loader.Pending, dlpack_loader.Refresher, dlpack_loader.Plan)
    methods = {name: value for owner in owners for name, value in vars(owner).items() if not name.startswith("_")}
    return (
        {name: inspect.signature(value) for name, value in functions.items() if callable(value)},
        {name: inspect.signature(value) for name, value in methods.items() if callable(value)},
    )


if __name__ == "__main__":
    run(Path(sys.argv[1]))
