"""A pytest plugin that puts our reader in the place of safetensors' own, and counts who reached it.

It must be loaded with ``-p``: ``safetensors.torch`` and ``safetensors.numpy`` take the two functions by name, so they
are put in place before anything imports these modules. What it counted goes as JSON to the file that
``DLPACK_LOADER_COMPAT_REPORT`` names.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors

import dlpack_loader
from dlpack_loader.header import parse_header

_calls = {"safe_open": 0, "deserialize": 0}
_reached: list[str] = []
_outcomes: dict[str, str] = {}
_reasons: dict[str, str] = {}


def _safe_open(*arguments: Any, **keywords: Any) -> dlpack_loader.Reader:
    _calls["safe_open"] += 1
    return dlpack_loader.safe_open(*arguments, **keywords)


def _deserialize(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    _calls["deserialize"] += 1
    header = parse_header(data)
    return [
        (
            name,
            {
                "shape": list(header[name].shape),
                "dtype": header[name].dtype,
                "data": bytearray(data[header[name].offset : header[name].offset + header[name].nbytes]),
            },
        )
        for name in header
    ]


_SUBSTITUTES = {"safe_open": _safe_open, "deserialize": _deserialize}


def pytest_configure(config: pytest.Config) -> None:
    early = {"safetensors.torch", "safetensors.numpy"} & sys.modules.keys()
    assert not early, f"imported before the substitution: {early}"
    for name, substitute in _SUBSTITUTES.items():
        setattr(safetensors, name, substitute)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    before = sum(_calls.values())
    try:
        return (yield)
    finally:
        if sum(_calls.values()) > before:
            _reached.append(item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid] = report.outcome
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        _reasons[report.nodeid] = str(crash.message if crash is not None else report.longrepr)
    elif report.skipped and isinstance(report.longrepr, tuple):
        _reasons[report.nodeid] = str(report.longrepr[2])


def pytest_sessionfinish(session: pytest.Session) -> None:
    import safetensors.numpy
    import safetensors.torch

    for module, name in (
        (safetensors.torch, "safe_open"),
        (safetensors.torch, "deserialize"),
        (safetensors.numpy, "safe_open"),
        (safetensors.numpy, "deserialize"),
    ):
        assert getattr(module, name) is _SUBSTITUTES[name], f"{module.__name__}.{name} is not ours"
    Path(os.environ["DLPACK_LOADER_COMPAT_REPORT"]).write_text(
        json.dumps({"calls": _calls, "reached": _reached, "outcomes": _outcomes, "reasons": _reasons})
    )
