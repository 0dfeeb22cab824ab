"""How Sphinx builds these pages: nothing is fetched, and with ``make docs`` every warning is an error."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

import dlpack_loader

project = "dlpack_loader"
version = release = dlpack_loader.__version__
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"dlpack_loader {version}"
html_static_path: list[str] = []
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
pygments_style = "tango"
pygments_dark_style = "monokai"

add_module_names = False
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
numpydoc_show_class_members = False
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True

nitpicky = True
# No index of another project is fetched, so that the pages build without a network; what is theirs is no link.
nitpick_ignore_regex = [
    (r"py:.*", r"(collections|contextlib|os|threading|types|typing|torch|safetensors|msgspec|numpy|jax|cupy|cuda)\..*"),
    (r"py:.*", r"(Any|Self|NoReturn|Literal.*|Callable|Mapping|Sequence|Iterator|PathLike|ndarray|TimeoutError)"),
    (r"py:.*", r"(bool|bytes|dict|float|int|list|object|str|tuple|type|None|True|False|BaseException)"),
    (r"py:.*", r"dlpack_loader\.(checkpoint|dtype|framework|load|reads)\..*"),  # internal, seen in types only
]

_HOMES = ("dlpack_loader", "dlpack_loader.errors", "dlpack_loader.lazy", "dlpack_loader.plan")
"""Where things are documented, whichever module defines them."""


def _find_home(app: Sphinx, env: Any, node: Any, content: nodes.TextElement) -> nodes.reference | None:
    """Link a name to the place where people import it from."""
    target = str(node.get("reftarget", ""))
    name = target.rpartition(".")[2]
    if node.get("refdomain") != "py" or (name != target and not target.startswith("dlpack_loader.")):
        return None
    objects = env.domains.python_domain.objects
    for home in _HOMES:
        found = objects.get(f"{home}.{name}")
        if found is not None:
            return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, content, name)
    return None


def _title_examples(_app: Sphinx, what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Make the headings within a module's docstring titles of paragraphs: as headings they would have to be unique."""
    if what == "module":
        for number, line in enumerate(lines[:-1]):
            if line and lines[number + 1] == "-" * len(line):
                lines[number : number + 2] = [f".. rubric:: {line}", ""]


def setup(app: Sphinx) -> None:
    """Take part in reading docstrings and in resolving references."""
    app.connect("autodoc-process-docstring", _title_examples)
    app.connect("missing-reference", _find_home)
