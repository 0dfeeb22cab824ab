"""What notebooks show of readers, headers, plans and reports: HTML as strings, for their ``_repr_html_`` methods. Pure.

Names and metadata come from files of strangers: everything that is not ours is escaped and cut to a bounded length. A
checkpoint of any number of tensors becomes a page of bounded size. There are no scripts and nothing is fetched. Colours
are chosen to be told apart on light and dark pages, by people who see few colours, and in print. Files are shown by
their names, since notebooks are passed on.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from html import escape
from typing import Any, Protocol

from dlpack_loader.dtype import DLDataType, dtype_of_dlpack
from dlpack_loader.quantities import plural, size_text

__all__ = [
    "checkpoint_html",
    "entry_html",
    "header_html",
    "lazy_report_html",
    "load_report_html",
    "plan_html",
    "totals_html",
]

_SHOWN = 10
"""Rows of a table that are seen at once."""
_FOLDED = 40
"""Rows that are seen when the rest is unfolded; what is beyond them is counted."""
_LONGEST = 120
"""Characters of a name or a value."""

_STYLE = (
    "<style>"
    ".dlpack-loader table{border-collapse:collapse;margin:.3em 0;font-size:90%}"
    ".dlpack-loader th,.dlpack-loader td{text-align:left;padding:.15em .8em .15em 0;border:0;"
    "border-bottom:1px solid rgba(128,128,128,.35);background:none;vertical-align:top}"
    ".dlpack-loader .n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}"
    ".dlpack-loader p{margin:.3em 0}"
    ".dlpack-loader summary{cursor:pointer}"
    ".dlpack-loader .bar{display:flex;width:20em;max-width:100%;height:.8em;border:1px solid rgba(128,128,128,.7);"
    "print-color-adjust:exact;-webkit-print-color-adjust:exact}"
    ".dlpack-loader .direct{background:#0072b2}"
    ".dlpack-loader .compat{background:#56b4e9}"
    ".dlpack-loader .staged{background-color:#e69f00;background-image:"
    "repeating-linear-gradient(45deg,transparent,transparent 4px,#8a5f00 4px,#8a5f00 6px)}"
    "</style>"
)


class _Entry(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def file(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class _Header(Protocol):
    @property
    def file(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, str] | None: ...
    def __iter__(self) -> Iterator[str]: ...
    def find(self, names: Iterable[str]) -> Iterable[_Entry | None]:
        """Return the entries of these names."""


class _Checkpoint(Protocol):
    @property
    def index(self) -> str | None: ...
    @property
    def shards(self) -> Sequence[Any]: ...
    def metadata(self) -> Mapping[str, str] | None:
        """Return the strings that writers left."""

    def offset_keys(self) -> Sequence[str]:
        """Return the names in the order of the bytes."""

    def find(self, names: Iterable[str]) -> Iterable[_Entry | None]:
        """Return the entries of these names."""


def checkpoint_html(checkpoint: _Checkpoint | None) -> str:
    """Show a checkpoint: its files, its dtypes, its largest tensors.

    Parameters
    ----------
    checkpoint
        None for one that was closed.
    """
    if checkpoint is None:
        return _page("<p><b>Reader</b>, closed</p>")
    paths = [shard.path for shard in checkpoint.shards]
    names = _file_names(paths)
    entries = [entry for entry in checkpoint.find(checkpoint.offset_keys()) if entry is not None]
    title = os.path.basename(checkpoint.index) if checkpoint.index else names[0] if len(names) == 1 else None
    head = f"<b>{_text(title)}</b>" if title else f"<b>{len(names):,} files</b>"
    parts = [f"<p>{head}, {plural(len(entries), 'tensor')}, {size_text(sum(entry.nbytes for entry in entries))}</p>"]
    if len(names) > 1:
        sums: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for entry in entries:
            sums[entry.file] += entry.nbytes
            counts[entry.file] += 1
        rows = [(_text(name), f"{counts[path]:,}", f"{sums[path]:,}") for name, path in zip(names, paths, strict=True)]
        parts.append(_folded(plural(len(names), "file"), _listed(("file", "tensors", "bytes"), rows, "_nn")))
    parts += [_dtypes(entries), _tensors(entries), _metadata(checkpoint.metadata())]
    return _page(*parts)


def header_html(header: _Header) -> str:
    """Show a header: the dtypes of its file and its largest tensors."""
    entries = [entry for entry in header.find(header) if entry is not None]
    total = sum(entry.nbytes for entry in entries)
    head = f"<p><b>{_text(os.path.basename(header.file))}</b>, {plural(len(entries), 'tensor')}, {size_text(total)}</p>"
    return _page(head, _dtypes(entries), _tensors(entries), _metadata(header.metadata))


def entry_html(entry: _Entry) -> str:
    """Show one tensor of a header.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> entry = SimpleNamespace(name="<b>", dtype="F32", shape=(2, 3), file="m.safetensors", offset=80, nbytes=24)
    >>> "&lt;b&gt;" in entry_html(entry), "[2, 3]" in entry_html(entry)
    (True, True)
    """
    facts = (
        ("tensor", _text(entry.name)),
        ("dtype", _text(entry.dtype)),
        ("shape", _shape(entry.shape)),
        ("file", _text(os.path.basename(entry.file))),
        ("offset", f"{entry.offset:,}"),
        ("bytes", size_text(entry.nbytes)),
    )
    return _page(_facts(facts))


def plan_html(plan: Any, is_staged: Callable[[Any, Any], bool]) -> str:
    """Show a plan: its sums, what is direct and what is staged, its largest transfers.

    Parameters
    ----------
    plan
        A :class:`dlpack_loader.plan.Plan`.
    is_staged
        Whether a transfer, under the plan's bounds, goes through the staging.
    """
    bounds = plan.bounds
    files = len({transfer.file for transfer in plan.transfers})
    head = (
        f"<p><b>Plan</b>: {plural(len(plan.transfers), 'transfer')} into {plural(len(plan.names), 'destination')} from "
        f"{plural(files, 'file')}</p>"
    )
    limits = (
        ("one read", f"at most {bounds.chunk_bytes:,} bytes, {bounds.threads:,} at a time"),
        ("staging allowed", f"{bounds.staging_bytes:,} bytes"),
    )
    known = ((is_staged(transfer, bounds), transfer.written, transfer) for transfer in plan.transfers)
    rows = [
        (_text(transfer.name), f"{written:,}", "staged" if staged else "direct", _cast(transfer.cast))
        for staged, written, transfer in nlargest(_SHOWN + _FOLDED, known, key=lambda item: item[:2])
    ]
    order = "staged ones" if plan.totals.staged_bytes else "largest"
    table = _unfolding(("transfer", "bytes written", "how", "cast"), rows, "_n__", len(plan.transfers), order)
    return _page(head, _totals(plan.totals, limits), table)


def totals_html(totals: Any) -> str:
    """Show the sums of a plan, a :class:`dlpack_loader.plan.PlanTotals`."""
    return _page("<p><b>Plan in numbers</b></p>", _totals(totals, ()))


def load_report_html(report: Any) -> str:
    """Show what a load did, a :class:`dlpack_loader.transfer.LoadReport`."""
    rate = f" ({report.bytes_written / report.seconds / 1e9:.2f} GB/s)" if report.seconds else ""
    facts = [
        ("filled", f"{len(report.filled):,}"),
        ("written", size_text(report.bytes_written)),
        ("read", size_text(report.bytes_read)),
        ("zeroed", size_text(report.bytes_zeroed)),
        ("time", f"{report.seconds:.3f} s{rate}"),
        ("backend", f"<b>{_text(report.backend)}</b>: {_text(report.reason, 4 * _LONGEST)}"),
    ]
    if not report.bytes_zeroed:
        del facts[3]
    aliases = tuple(f"{name} = {other}" for name, other in report.aliases.items())
    left = [("unfilled", report.unfilled), ("unexpected", report.unexpected), ("declined", report.declined)]
    folds = [
        _folded(f"{len(names):,} {label}", _names(names)) for label, names in (*left, ("aliases", aliases)) if names
    ]
    bar = _bar(report.direct_bytes, report.compat_bytes, report.staged_bytes)
    return _page("<p><b>Load</b></p>", bar, _facts(facts), *folds)


def lazy_report_html(report: Any) -> str:
    """Show what was read through lazy tensors, a :class:`dlpack_loader.lazy.LazyReport`."""
    facts = (
        ("copies, direct", f"{report.direct:,}"),
        ("copies, staged", f"{report.staged:,}"),
        ("materialized", f"{report.materialized:,}"),
        ("written", size_text(report.bytes_written)),
        ("read", size_text(report.bytes_read)),
    )
    bar = _bar(report.direct_bytes, report.compat_bytes, report.staged_bytes)
    return _page("<p><b>Read through lazy tensors</b></p>", bar, _facts(facts))


def _page(*parts: str) -> str:
    return f'<div class="dlpack-loader">{_STYLE}{"".join(parts)}</div>'


def _totals(totals: Any, more: Iterable[tuple[str, str]]) -> str:
    ratio = f" ({totals.bytes_read / totals.bytes_written:.2f} x)" if totals.bytes_written else ""
    facts = [
        ("reads", f"{totals.reads:,}"),
        ("read", size_text(totals.bytes_read)),
        ("written", f"{size_text(totals.bytes_written)}{ratio and f', read{ratio}'}"),
        ("staging at the peak", f"{size_text(totals.peak_staging)}; more, within what is allowed, if files are cold"),
        *more,
    ]
    if totals.bytes_zeroed:
        facts.append(("zeroed", f"{size_text(totals.bytes_zeroed)}, which no tensor fills"))
    return _bar(totals.direct_bytes, 0, totals.staged_bytes) + _facts(facts)


def _bar(direct: int, compat: int, staged: int) -> str:
    """Draw how the bytes travel, and say it in words, which stay where styles are taken away."""
    kinds = [("direct", direct), ("compat", compat), ("staged", staged)]
    total = direct + compat + staged
    words = ", ".join(f"{nbytes:,} bytes {kind}" for kind, nbytes in kinds if nbytes or kind != "compat")
    if not total:
        return f"<p>{words}</p>"
    drawn = "".join(
        f'<span class="{kind}" style="width:{100 * nbytes / total:.2f}%"></span>' for kind, nbytes in kinds if nbytes
    )
    return f'<div class="bar" role="img" aria-label="{words}">{drawn}</div><p>{words}</p>'


def _dtypes(entries: Sequence[_Entry]) -> str:
    counts: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    for entry in entries:
        counts[entry.dtype] += 1
        sums[entry.dtype] += entry.nbytes
    total = sum(sums.values())
    rows = [
        (_text(dtype), f"{counts[dtype]:,}", f"{nbytes:,}", f"{100 * nbytes / total:.1f} %" if total else "")
        for dtype, nbytes in sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    ]
    return _table(("dtype", "tensors", "bytes", "share"), rows, "_nnn") if rows else ""


def _tensors(entries: Sequence[_Entry]) -> str:
    largest = nlargest(_SHOWN + _FOLDED, entries, key=lambda entry: entry.nbytes)
    rows = [(_text(entry.name), _text(entry.dtype), _shape(entry.shape), f"{entry.nbytes:,}") for entry in largest]
    return _unfolding(("tensor", "dtype", "shape", "bytes"), rows, "___n", len(entries))


def _metadata(metadata: Mapping[str, str] | None) -> str:
    if not metadata:
        return ""
    rows = [(_text(key), _text(value)) for key, value in list(metadata.items())[: _SHOWN + _FOLDED]]
    return _folded("metadata", _listed(("key", "value"), rows, "__", len(metadata)))


def _names(names: Sequence[str]) -> str:
    return _listed(("name",), [(_text(name),) for name in names[: _SHOWN + _FOLDED]], "_", len(names))


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{label}</th><td>{value}</td></tr>" for label, value in facts)
    return f"<table><tbody>{rows}</tbody></table>"


def _unfolding(
    head: Sequence[str], rows: Sequence[Sequence[str]], sides: str, total: int, order: str = "largest"
) -> str:
    """Make a table whose first rows are seen, and the others when they are asked for."""
    if not rows:
        return ""
    label = f"The first {_SHOWN} of {total:,}, {order} first" if total > _SHOWN else ""
    caption = f"<p>{label}:</p>" if label else ""
    rest = _listed(head, rows[_SHOWN:], sides, total - _SHOWN) if total > _SHOWN else ""
    return caption + _table(head, rows[:_SHOWN], sides) + (_folded(f"{total - _SHOWN:,} more", rest) if rest else "")


def _listed(head: Sequence[str], rows: Sequence[Sequence[str]], sides: str, total: int | None = None) -> str:
    """Make a table of bounded length, which counts what it leaves out."""
    shown = rows[: _SHOWN + _FOLDED]
    left = (len(rows) if total is None else total) - len(shown)
    return _table(head, shown, sides) + (f"<p>and {left:,} more</p>" if left > 0 else "")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], sides: str) -> str:
    """Align columns: ``n`` for numbers, ``_`` for text."""
    marks = [' class="n"' if side == "n" else "" for side in sides]
    first = "".join(f"<th{mark}>{label}</th>" for mark, label in zip(marks, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{mark}>{cell}</td>" for mark, cell in zip(marks, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table>"


def _folded(label: str, content: str) -> str:
    return f"<details><summary>{label}</summary>{content}</details>"


def _text(text: str, longest: int = _LONGEST) -> str:
    """Make text of others harmless: bounded, without characters that are not seen, without markup."""
    cut = text if len(text) <= longest else f"{text[: longest - 1]}…"
    if not cut.isprintable():
        cut = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)
    return escape(cut)


def _shape(shape: Sequence[int]) -> str:
    sizes = ", ".join(map(str, shape[:_SHOWN]))
    return f"[{sizes}, …]" if len(shape) > _SHOWN else f"[{sizes}]"


def _cast(cast: tuple[DLDataType, DLDataType] | None) -> str:
    if cast is None:
        return ""
    codes = (dtype.code if (dtype := dtype_of_dlpack(triple)) else str(triple) for triple in cast)
    return escape(" to ".join(codes))


def _file_names(paths: Sequence[str]) -> list[str]:
    """Return what tells files apart: their names, or their paths below the folder that they have in common."""
    names = [os.path.basename(path) for path in paths]
    if len(set(names)) == len(names):
        return names
    shared = os.path.commonpath([os.path.abspath(path) for path in paths])
    return [os.path.relpath(path, shared) for path in paths]
