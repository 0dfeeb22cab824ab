"""Counts and sizes in words. Pure."""

from __future__ import annotations

__all__ = ["plural", "rounded", "size_text"]


def plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def size_text(nbytes: int) -> str:
    """Return a size exactly, and rounded where that helps."""
    exact = f"{nbytes:,} bytes" if nbytes != 1 else "1 byte"
    return exact if nbytes < 1024 else f"{rounded(nbytes)} ({exact})"


def rounded(nbytes: int) -> str:
    """Return a size in binary units, one decimal."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{nbytes} B" if unit == "B" else f"{size:,.1f} {unit}"
