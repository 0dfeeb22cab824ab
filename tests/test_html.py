"""What notebooks show: well-formed, harmless whatever the file says, bounded, and right."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dlpack_loader import Target, load_into, safe_open
from dlpack_loader.header import read_header
from dlpack_loader.html import checkpoint_html, entry_html, lazy_report_html, load_report_html, plan_html, totals_html
from tests.files import save, write_raw

HOSTILE = "<script>alert('x')</script>\"&\u202eevil\x1b[31m\n"
VOID = {"br", "hr", "img", "input", "meta", "link"}
ALLOWED = {"div", "style", "p", "b", "span", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"}


class Page(HTMLParser):
    """Reads HTML, checks that what was opened is closed in order, and keeps what is seen."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        assert set(self.tags) <= ALLOWED
        assert self.attributes <= {"class", "style", "role", "aria-label"}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in VOID
        self.open.append(tag)
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pytest.fail(f"a tag that closes itself: {tag}")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)
            if self.rows and self.open[-1] in ("td", "th", "b"):
                self.rows[-1][-1] += data

    def facts(self) -> dict[str, str]:
        return {row[0]: row[1] for row in self.rows if len(row) == 2}

    @property
    def text(self) -> str:
        return " ".join(self.words)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path / "m.safetensors", author="somebody")
    return tmp_path / "m.safetensors"


def read(value: Any) -> Page:
    return Page(value._repr_html_())


def test_a_reader(path: Path) -> None:
    with safe_open(path, "np") as reader:
        page = read(reader)
        largest = max((reader.entry(name) for name in reader), key=lambda entry: entry.nbytes)
        total = sum(reader.entry(name).nbytes for name in reader)
        floats = [reader.entry(name).nbytes for name in reader if reader.entry(name).dtype == "F32"]
    assert f"{len(reader_names(path))} tensors" in page.text
    assert f"({total:,} bytes)" in page.text
    share = f"{100 * sum(floats) / total:.1f} %"
    assert ["F32", f"{len(floats):,}", f"{sum(floats):,}", share] in page.rows
    first = next(row for row in page.rows if len(row) == 4 and row[1] == "F32")
    assert first == [largest.name, "F32", str(list(largest.shape)), f"{largest.nbytes:,}"]
    assert ["author", "somebody"] in page.rows
    assert str(path.parent) not in reader_html(path)  # notebooks are passed on
    assert "m.safetensors" in page.text


def reader_names(path: Path) -> list[str]:
    with safe_open(path, "np") as reader:
        return reader.keys()


def reader_html(path: Path | str) -> str:
    with safe_open(path, "np") as reader:
        return reader._repr_html_()


def test_every_tensor_of_a_small_checkpoint_is_listed(path: Path) -> None:
    page = Page(reader_html(path))
    listed = [row[0] for row in page.rows if len(row) == 4]
    assert set(reader_names(path)) <= set(listed)


def test_a_closed_reader(path: Path) -> None:
    reader = safe_open(path, "np")
    reader.close()
    assert read(reader).text == "Reader , closed"


def test_several_files(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        save(tmp_path / folder / "m.safetensors", {folder: torch.zeros(4)})
    with safe_open([tmp_path / "one" / "m.safetensors", tmp_path / "two" / "m.safetensors"], "np") as reader:
        html = reader._repr_html_()
    page = Page(html)
    assert "2 files" in page.text
    assert ["one/m.safetensors", "1", "16"] in [[row[0].replace("\\", "/"), *row[1:]] for row in page.rows]
    assert str(tmp_path) not in html


def test_an_empty_checkpoint(tmp_path: Path) -> None:
    write_raw(tmp_path / "none.safetensors", {}, b"")
    assert "0 tensors, 0 bytes" in Page(reader_html(tmp_path / "none.safetensors")).text


def test_a_header_and_an_entry(path: Path) -> None:
    header, _ = read_header(str(path))
    page = read(header)
    assert f"{len(header)} tensors" in page.text
    assert ["author", "somebody"] in page.rows
    entry = header["scale"]
    facts = read(entry).facts()
    assert (facts["tensor"], facts["dtype"], facts["shape"]) == ("scale", "F32", "[]")
    assert (facts["file"], facts["offset"], facts["bytes"]) == ("m.safetensors", f"{entry.offset:,}", "4 bytes")


def test_hostile_names_and_metadata_are_text(tmp_path: Path) -> None:
    """Nothing that a file says becomes markup, or moves what is beside it."""
    shown = "<script>alert('x')</script>\"&\\u202eevil\\x1b[31m\\n"
    info = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    target = tmp_path / "<img src=x>.safetensors"
    write_raw(target, {"__metadata__": {HOSTILE: HOSTILE}, HOSTILE: info}, bytes(4))
    with safe_open(target, "np") as reader:
        plan = reader.plan({HOSTILE: np.zeros(1, np.float32)})
        report = load_into(reader, {HOSTILE: np.zeros(1, np.float32), "<b>": np.zeros(1, np.float32)}, strict=False)
        pages = [read(reader), read(reader.entry(HOSTILE)), read(read_header(str(target))[0]), read(plan)]
    for page in pages:
        assert any(shown in row for row in page.rows)
    assert [shown, shown] in pages[0].rows
    assert ["<b>"] in read(report).rows
    assert "<img src=x>.safetensors" in pages[0].text


def test_long_names_and_shapes_are_cut() -> None:
    entry = SimpleNamespace(
        name="n" * 10**6, dtype="F32", shape=(1,) * 10**5, file="f" * 10**5, offset=10**15, nbytes=10**15
    )
    html = entry_html(entry)
    assert len(html) < 4000
    facts = Page(html).facts()
    assert facts["tensor"].endswith("n…")
    assert facts["shape"].endswith(", …]")
    assert facts["bytes"] == "909.5 TiB (1,000,000,000,000,000 bytes)"


class Many:
    """A checkpoint of so many tensors, which counts how often it is asked for all of them."""

    index = None

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, 0
        self.shards = [SimpleNamespace(path=f"/models/part-{number}.safetensors") for number in range(count // 100)]

    def metadata(self) -> dict[str, str]:
        return {f"key {number}": "value" * 1000 for number in range(self.count)}

    def offset_keys(self) -> list[str]:
        return [f"layers.{number}.weight" for number in range(self.count)]

    def find(self, names: Any) -> Any:
        self.asked += 1
        for number, name in enumerate(names):
            path = self.shards[number % len(self.shards)].path
            yield SimpleNamespace(name=name, dtype="BF16", shape=(number,), file=path, offset=0, nbytes=2 * number)


def test_a_checkpoint_of_100_000_tensors_stays_small() -> None:
    checkpoint = Many(100_000)
    html = checkpoint_html(checkpoint)
    assert checkpoint.asked == 1
    assert len(html) < 40_000
    page = Page(html)
    assert "100,000 tensors" in page.text
    assert "99,990 more" in page.text
    assert page.text.count("99,950 more") == 2  # of the tensors and of the metadata, beyond those that can be unfolded
    assert ["BF16", "100,000", f"{100_000 * 99_999:,}", "100.0 %"] in page.rows
    assert ["layers.99999.weight", "BF16", "[99999]", "199,998"] in page.rows
    first = next(row for row in page.rows if len(row) == 4 and row[1] == "BF16")
    assert first[0] == "layers.99999.weight"


def test_the_size_of_a_page_does_not_grow_with_the_checkpoint() -> None:
    one, other = (len(checkpoint_html(Many(count))) for count in (10_000, 40_000))
    assert other < 1.1 * one


def test_a_plan(path: Path) -> None:
    with safe_open(path, "np", threads=3) as reader:
        up = np.zeros((256, 64), np.float32)
        cast = np.zeros((64, 64), np.float16)
        columns = np.zeros((64, 32), np.float32)
        destinations = {
            "layers.0.mlp.up": up,
            "layers.0.q": cast,
            "layers.1.q": Target(columns, index=np.s_[:, :32]),
        }
        plan = reader.plan(destinations, strict=False, cast=True)
    page = read(plan)
    totals = plan.totals
    assert "3 transfers into 3 destinations from 1 file" in page.text
    assert f"{totals.direct_bytes:,} bytes direct, {totals.staged_bytes:,} bytes staged" in page.text
    assert totals.direct_bytes == up.nbytes
    assert page.facts()["reads"] == f"{totals.reads:,}"
    assert page.facts()["one read"].endswith("3 at a time")
    assert [row for row in page.rows if len(row) == 4] == [
        ["transfer", "bytes written", "how", "cast"],
        ["layers.0.q", "8,192", "staged", "F32 to F16"],
        ["layers.1.q", "8,192", "staged", ""],
        ["layers.0.mlp.up", "65,536", "direct", ""],
    ]
    widths = [float(width) for width in re.findall(r'style="width:([\d.]+)%"', plan._repr_html_())]
    assert widths == [
        pytest.approx(100 * nbytes / totals.bytes_read, abs=0.01) for nbytes in (up.nbytes, totals.staged_bytes)
    ]
    assert read(totals).facts()["reads"] == f"{totals.reads:,}"
    assert totals_html(totals) == totals._repr_html_()


def test_a_plan_that_zeroes(tmp_path: Path) -> None:
    save(tmp_path / "m.safetensors", {"weight": torch.ones(3, 4)})
    with safe_open(tmp_path / "m.safetensors", "np") as reader:
        padded = np.full((4, 4), 7, np.float32)
        plan = reader.plan({"weight": Target(padded, padding="zero")})
        report = load_into(reader, {"weight": Target(padded, padding="zero")})
    assert read(plan).facts()["zeroed"] == "16 bytes, which no tensor fills"
    assert read(report).facts()["zeroed"] == "16 bytes"


def test_an_empty_plan(path: Path) -> None:
    with safe_open(path, "np") as reader:
        page = read(reader.plan({}, strict=False))
    assert "0 transfers into 0 destinations" in page.text
    assert "0 bytes direct, 0 bytes staged" in page.text


def test_a_plan_of_100_000_transfers_stays_small() -> None:
    transfers = [
        SimpleNamespace(name=f"layers.{number}", file="m.safetensors", written=number, cast=None)
        for number in range(100_000)
    ]
    totals = SimpleNamespace(
        reads=1, bytes_read=9, bytes_written=9, direct_bytes=9, staged_bytes=0, peak_staging=0, bytes_zeroed=0
    )
    bounds = SimpleNamespace(chunk_bytes=1, threads=1, staging_bytes=1)
    plan = SimpleNamespace(transfers=transfers, names=("x",), bounds=bounds, totals=totals)
    html = plan_html(plan, lambda transfer, _: transfer.name == "layers.5")
    assert len(html) < 20_000
    rows = [row for row in Page(html).rows if len(row) == 4]
    assert rows[1:3] == [["layers.5", "5", "staged", ""], ["layers.99999", "99,999", "direct", ""]]


def test_a_report(path: Path) -> None:
    with safe_open(path, "np") as reader:
        scale = np.zeros((), np.float32)
        report = load_into(reader, {"scale": scale, "other": np.zeros(2)}, strict=False)
    page = read(report)
    facts = page.facts()
    assert facts["filled"] == "1"
    assert facts["written"] == facts["read"] == "4 bytes"
    assert facts["time"].startswith(f"{report.seconds:.3f} s")
    assert facts["backend"].startswith("pread: ")
    assert "4 bytes direct, 0 bytes staged" in page.text
    assert "1 unfilled" in page.text
    assert ["other"] in page.rows
    assert f"{len(report.unexpected)} unexpected" in page.text
    assert "declined" not in page.text
    assert "zeroed" not in page.text


def test_a_report_of_compatibility_mode_and_aliases() -> None:
    report = SimpleNamespace(
        filled=("a",),
        unfilled=(),
        unexpected=(),
        declined=tuple(f"n{number}" for number in range(1000)),
        aliases={"b": "a"},
        bytes_read=6,
        bytes_written=6,
        bytes_zeroed=0,
        direct_bytes=1,
        compat_bytes=2,
        staged_bytes=3,
        seconds=0.0,
        backend="kvikio",
        reason="no GPUDirect Storage here",
    )
    page = Page(load_report_html(report))
    assert "1 bytes direct, 2 bytes compat, 3 bytes staged" in page.text
    assert ["b = a"] in page.rows
    assert "1,000 declined" in page.text
    assert "and 950 more" in page.text
    assert page.facts()["time"] == "0.000 s"


def test_a_report_of_lazy_tensors(path: Path) -> None:
    with safe_open(path) as reader:
        torch.zeros(64, 64).copy_(reader.lazy("layers.0.q"))
        torch.zeros(64, 64).T.copy_(reader.lazy("layers.1.q"))
        assert reader.lazy("scale") + 1 == 3.5
        report = reader.lazy_report()
    facts = read(report).facts()
    assert (facts["copies, direct"], facts["copies, staged"], facts["materialized"]) == ("1", "1", "1")
    assert facts["written"] == f"32.0 KiB ({report.bytes_written:,} bytes)"
    assert lazy_report_html(report) == report._repr_html_()


def test_nothing_is_fetched_and_nothing_runs(path: Path) -> None:
    html = reader_html(path)
    assert not re.search(r"script|https?:|url\(|@import|src=|href=|on\w+=", html)
