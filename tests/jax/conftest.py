"""Keeps the cases out of every process but their own: to import them is to start JAX's threads."""

from __future__ import annotations

import os

collect_ignore = [] if "JAX_CASES" in os.environ else ["cases.py"]
