"""The README and the pages below docs/: every block of code runs, every link leads somewhere, every name exists."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

import dlpack_loader
from dlpack_loader import errors
from tests.files import save
from tests.pages import CODE, DOCS, PLAIN, ROOT, Block, blocks_of, commands_of, pages, signatures

PAGES = pages()
NOT_RUN = {"needs-gpu": 2, "needs-vllm": 1}
"""Blocks that are compiled and not run, by what they need."""

ELSEWHERE = {
    "dlpack_loader.lazy": ("LazyReport", "LazySource", "LazyTensor"),
    "dlpack_loader.plan": ("PlanTotals",),
    "dlpack_loader.integrations.reporting": ("Report",),
}
"""Public names that are not imported from the package itself, by their modules."""

MODULES = ("errors", "framework.jax", "integrations.safetensors", "integrations.transformers", "integrations.vllm")
"""Modules whose docstrings are pages of the API."""


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose_of(page: Path) -> str:
    """A page without its blocks."""
    return re.sub(r"^```\S.*\n(?:.*\n)*?```$", "", text_of(page), flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_run(page: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LayerNorm(4))
    save(tmp_path / "model.safetensors", model.state_dict())
    (tmp_path / "weights").mkdir()
    for copy in ("other.safetensors", "weights/model.safetensors"):
        shutil.copy(tmp_path / "model.safetensors", tmp_path / copy)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.pages", page],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if page.name in ("README.md", "index.md"):
        assert "4 filled, 176 bytes" in done.stdout


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ("```python\nassert 1 == 2\n```", "AssertionError"),
        ("```pycon\n>>> 1 + 1\n3\n```", "Expected:\n    3\nGot:\n    2"),
        ("```pycon\n>>> 1 + 1\nTraceback (most recent call last):\nValueError: no\n```", "not what stands there"),
        ("```console\n$ dlpack-loader ls missing.safetensors\n```", "missing.safetensors"),
        ("```console\n$ dlpack-loader doctor --no-such-option\n```", "no-such-option"),
        ("```console\n$ dlpack-loader --version\nanother\n```", "expected"),
        ("```{code-block} python\n:class: needs-gpu\n\n1 +\n```", "SyntaxError"),
    ],
)
def test_an_example_that_is_wrong_is_noticed(tmp_path: Path, content: str, wrong: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{content}\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "tests.pages", page],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert wrong in done.stdout + done.stderr


def test_every_block_is_of_a_known_kind() -> None:
    found = {(page.name, block.language) for page in PAGES for block in blocks_of(page)}
    assert {(name, language) for name, language in found if language not in CODE + PLAIN} == set()
    opened = sum(len(re.findall(r"^```\S", text_of(page), re.MULTILINE)) for page in PAGES)
    assert opened == sum(len(blocks_of(page)) for page in PAGES)


def test_few_blocks_are_not_run_and_say_so() -> None:
    waiting = [(page, block) for page in PAGES for block in blocks_of(page) if block.needs is not None]
    assert Counter(block.needs for _, block in waiting) == NOT_RUN
    for page, block in waiting:
        shown = text_of(page).splitlines()[block.line - 4 : block.line]
        assert any(line.startswith(":caption: Needs") and "not run" in line for line in shown), (page.name, block.line)


def calls_of(block: Block) -> Iterator[ast.Call]:
    code = block.text
    if block.language == "pycon":
        code = "\n".join(line[4:] for line in code.splitlines() if line.startswith((">>> ", "... ")))
    if block.language in ("python", "pycon"):
        yield from (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))


def test_calls_have_the_arguments_that_there_are() -> None:
    """Of the blocks that are not run too."""
    functions, methods = signatures()
    seen = set()
    for page in PAGES:
        for block in blocks_of(page):
            for call in calls_of(block):
                by_attribute = isinstance(call.func, ast.Attribute)
                name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
                signature = (methods if by_attribute else functions).get(name)
                if signature is not None:
                    seen.add(name)
                    given = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
                    assert given <= set(signature.parameters), (page.name, block.line, name)
    assert {"load_into", "load_model", "load_file", "safe_open", "wait_on", "read_through"} <= seen


def test_options_in_the_prose_exist() -> None:
    """``cast=True`` and the like, and those of the command line."""
    from typer.main import get_command

    from dlpack_loader.cli import app

    known = {name for group in signatures() for signature in group.values() for name in signature.parameters}
    named = {
        (page.name, option) for page in PAGES for option in re.findall(r"`[^`=]*?\b([a-z_]+)=[^`]*`", prose_of(page))
    }
    assert len(named) > 10
    assert {pair for pair in named if pair[1] not in known} == set()
    command: object = get_command(app)
    flags = {
        flag
        for each in getattr(command, "commands").values()  # noqa: B009 - typer's type does not say it
        for parameter in each.params
        for flag in parameter.opts + parameter.secondary_opts
    }
    used = {
        word
        for page in PAGES
        for block in blocks_of(page)
        if block.language == "console"
        for words, _ in commands_of(block)
        if words[0] == "dlpack-loader"
        for word in words
        if word.startswith("--")
    }
    assert used
    assert used <= flags | {"--help", "--version"}


def names_in_api() -> set[str]:
    return set(
        re.findall(r"^\.\. auto(?:class|function|data|module):: ([\w.]+)", text_of(DOCS / "api.md"), re.MULTILINE)
    )


def test_every_public_name_is_in_the_api() -> None:
    documented = names_in_api()
    of_modules = {f"dlpack_loader.{name}" for name in MODULES}
    assert of_modules <= documented
    for name in dlpack_loader.__all__:
        home = getattr(getattr(dlpack_loader, name), "__module__", "")
        assert f"dlpack_loader.{name}" in documented or home in of_modules, name
    for module, names in ELSEWHERE.items():
        assert {f"{module}.{name}" for name in names} <= documented
    assert set(ELSEWHERE["dlpack_loader.lazy"]) == set(import_module("dlpack_loader.lazy").__all__)
    integrations = {f"integrations.{path.stem}" for path in (ROOT / "dlpack_loader" / "integrations").glob("*.py")}
    assert integrations - set(MODULES) == {"integrations.__init__", "integrations.patching", "integrations.reporting"}


def test_the_api_names_nothing_that_is_not_there() -> None:
    for name in names_in_api():
        module, _, attribute = name.rpartition(".")
        if name.removeprefix("dlpack_loader.") in MODULES:
            assert (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
        elif module != "dlpack_loader.framework.jax":  # which starts threads of JAX's
            assert hasattr(import_module(module), attribute), name


CLASSES = {name for name in errors.__all__ if inspect.isclass(getattr(errors, name))}
SECTIONS = dict(re.findall(r"^### `(\w+)`\n((?:(?!^##).*\n)*)", text_of(DOCS / "failures.md"), re.MULTILINE))


def test_every_error_has_a_section() -> None:
    assert set(SECTIONS) == CLASSES
    assert len(re.findall(r"^### ", text_of(DOCS / "failures.md"), re.MULTILINE)) == len(CLASSES)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_section_shows_its_error_and_says_what_else_it_is(name: str) -> None:
    """The examples run, so what stands there is raised by real code."""
    section = SECTIONS[name]
    if name == "LoaderError":
        assert "except LoaderError" in section
        return
    assert re.search(rf"^Traceback.*\ndlpack_loader\.errors\.{name}: ", section, re.MULTILINE)
    builtins = [base for base in getattr(errors, name).__mro__ if base.__module__ == "builtins"]
    parents = [base.__name__ for base in getattr(errors, name).__bases__ if base in builtins]
    for parent in parents:
        assert re.search(rf"Also an? `{parent}`", section), parent


def slug(heading: str) -> str:
    words = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return words.strip().replace(" ", "-")


def anchors_of(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#{1,3} (.*)$", prose_of(page), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose_of(page))
    for link in links:
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors_of(target), link


def test_every_page_is_reachable_from_the_start() -> None:
    seen: set[Path] = set()
    waiting = [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        seen.add(page)
        linked = {DOCS / link for link in re.findall(r"\]\(([\w-]+\.md)", prose_of(page))}
        waiting += [other for other in linked if other not in seen]
    assert seen == set(DOCS.glob("*.md"))
    (contents,) = (block for block in blocks_of(DOCS / "index.md") if block.language == "{toctree}")
    entries = [line for line in contents.text.split() if not line.startswith(":")]
    assert sorted(entries) == sorted(page.stem for page in seen if page.stem != "index")


def test_every_picture_is_there_and_serves_light_and_dark() -> None:
    named = {match for page in PAGES for match in re.findall(r"!\[[^\]]+\]\((\S+\.svg)\)", text_of(page))}
    assert named == {path.name for path in DOCS.glob("*.svg")}
    for name in named:
        picture = text_of(DOCS / name)
        assert "prefers-color-scheme: dark" in picture
        assert "<title" in picture
        used = set(re.findall(r'class="([\w ]+)"', picture))
        style, _, dark = re.search("<style>(.*?)(@media)(.*?)</style>", picture, re.DOTALL).groups()  # type: ignore[union-attr]
        for name_of_class in used:
            assert f".{name_of_class} " in style or f".{name_of_class}," in style, name_of_class
            assert f".{name_of_class} " in dark or f".{name_of_class}," in dark, name_of_class


def test_lines_of_code_are_no_wider_than_the_page() -> None:
    for page in PAGES:
        for block in blocks_of(page):
            if block.language == "python":
                assert max(map(len, textwrap.dedent(block.text).splitlines())) <= 120, (page.name, block.line)


def test_the_start_page_names_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    paragraph = re.search(r"^Extras: (?:.+\n)+", text_of(DOCS / "index.md"), re.MULTILINE)
    assert paragraph is not None
    named = {word for word in re.findall(r"`(\w+)`", paragraph[0]) if word != "dlpack_loader"}
    assert named == set(project["optional-dependencies"])
