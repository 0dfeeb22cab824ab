"""The benchmark of a user's file: what is measured, what is not and why, and what follows. No speed is asserted."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch

from dlpack_loader import bench
from dlpack_loader.bench import Measured, State, advise, measure, sample, tell_apart, ways
from dlpack_loader.bench.cache import PageCache
from dlpack_loader.checkpoint import open_checkpoint
from dlpack_loader.doctor import Outcome, attempt
from dlpack_loader.doctor import State as Tried
from dlpack_loader.errors import HeaderError, LoaderError, OptionError
from tests.device_room import Room
from tests.emulation import Driver
from tests.files import save, state, write_index, write_raw
from tests.test_cli import at_terminal, python, run

HOST = {"pread, O_DIRECT", "pread, page cache", "mmap, copied", "safetensors safe_open", "safetensors load_file"}


@pytest.fixture(autouse=True)
def tried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare tests of other things the child that imports torch."""

    def answer(name: str) -> Outcome:
        return attempt(name) if name != "torch" else Outcome(Tried.WORKED)

    monkeypatch.setattr(ways, "attempt", answer)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    save(path, state(width=256))
    return path


def cold_is_possible(path: Path) -> bool:
    """Whether the file's pages can be dropped, by the plainest means; a tmpfs keeps them."""
    cache = PageCache(open_checkpoint(path).shards, [])
    cache.close()
    return sys.platform == "linux" and os.major(path.stat().st_dev) != 0


def names(result: bench.Benchmark, wanted: State) -> set[str]:
    return {item.way for item in result.measured if item.state is wanted}


class TestMeasure:
    def test_every_way_on_the_host(self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        before = file.read_bytes(), file.stat().st_mtime_ns, sorted(os.listdir(tmp_path))
        result = measure(file, rounds=3)
        assert (file.read_bytes(), file.stat().st_mtime_ns, sorted(os.listdir(tmp_path))) == before
        assert (result.framework, result.device, result.whole) == ("torch", "cpu", True)
        assert result.unusable == ()
        assert names(result, State.WARM) == HOST
        if cold_is_possible(file):
            assert names(result, State.COLD) == HOST
            assert result.notes == ()
        tensors = {name: tensor for name, tensor in state(width=256).items() if tensor.nbytes}
        assert (result.tensors, result.nbytes) == (len(tensors), sum(tensor.nbytes for tensor in tensors.values()))
        for item in result.measured:
            assert len(item.seconds) == len(item.cpu_seconds) == 3
            assert min(item.seconds) > 0
            assert item.nbytes == result.nbytes
            assert item.ours == (not item.way.startswith("safetensors"))
        assert sum(item.default for item in result.measured) == len(result.advice)
        assert [advice.state for advice in result.advice] == [state for state in State if names(result, state)]

    def test_shards_and_a_choice(self, tmp_path: Path) -> None:
        save(tmp_path / "a.safetensors", {"a.w": torch.ones(5000), "a.b": torch.ones(3)})
        save(tmp_path / "b.safetensors", {"b.w": torch.ones(7000), "none": torch.ones(0)})
        write_index(
            tmp_path / "m.safetensors.index.json",
            {"a.w": "a.safetensors", "a.b": "a.safetensors", "b.w": "b.safetensors", "none": "b.safetensors"},
        )
        whole = measure(tmp_path, rounds=1)
        assert (whole.tensors, whole.whole, names(whole, State.WARM)) == (3, True, HOST)
        part = measure(tmp_path, rounds=1, choose=lambda name: name.endswith("w"))
        assert (part.tensors, part.nbytes, part.whole) == (2, 48_000, False)
        assert names(part, State.WARM) == HOST - {"safetensors load_file"}
        assert [item.why for item in part.unusable] == ["it reads whole files, and this is a sample"]

    def test_numpy_where_torch_does_not_work(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def answer(name: str) -> Outcome:
            return Outcome(Tried.RAISED, why="ImportError: broken") if name == "torch" else attempt(name)

        monkeypatch.setattr(ways, "attempt", answer)
        result = measure(file, rounds=1)
        assert result.framework == "numpy"
        assert [(item.way, item.why) for item in result.unusable] == [("torch tensors", "ImportError: broken")]
        assert names(result, State.WARM) == HOST

    def test_a_dtype_that_safetensors_does_not_load(self, tmp_path: Path) -> None:
        entry = {"x": {"dtype": "F6_E2M3", "shape": [4000], "data_offsets": [0, 3000]}}
        result = measure(write_raw(tmp_path / "m.safetensors", entry, os.urandom(3000)), rounds=1)
        ours = {item.way for item in result.measured}
        assert {"pread, O_DIRECT", "pread, page cache"} <= ours
        unusable = {item.way for item in result.unusable}
        assert unusable | ours == HOST
        assert unusable == {"safetensors safe_open", "safetensors load_file"}

    def test_a_way_that_does_not_do_the_work_is_not_measured(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ways, "load_into", lambda *given, **options: None)
        result = measure(file, rounds=1)
        assert names(result, State.WARM) == HOST - {"pread, O_DIRECT", "pread, page cache"}
        assert {item.why for item in result.unusable} == {"the destinations do not hold the file's bytes afterwards"}

    def test_a_way_that_fails_is_a_line(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*given: object, **options: object) -> None:
            raise RuntimeError("no\nway")

        monkeypatch.setattr(safetensors, "safe_open", refuse)
        result = measure(file, rounds=1)
        found = {item.way: item.why for item in result.unusable}
        assert found["safetensors safe_open"] == "RuntimeError: no way"
        assert "pread, O_DIRECT" in names(result, State.WARM)

    def test_a_way_that_fails_later_is_taken_out(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usual, calls = safetensors.safe_open, []

        def tire(*given: Any, **options: Any) -> Any:
            calls.append(given)
            if len(calls) > 3:  # the trial, and two rounds
                raise OSError("tired")
            return usual(*given, **options)

        monkeypatch.setattr(safetensors, "safe_open", tire)
        result = measure(file, rounds=4)
        assert "safetensors safe_open" not in {item.way for item in result.measured}
        assert ("safetensors safe_open", "OSError: tired") in {(item.way, item.why) for item in result.unusable}
        assert all(len(item.seconds) == 4 for item in result.measured if item.state is State.WARM and item.ours)

    def test_runs_take_turns(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        said: list[str] = []
        measure(file, rounds=3, say=said.append)
        warm = [text.partition(": ")[2] for text in said if text.startswith("warm, round")]
        rounds = [warm[k : k + 5] for k in range(0, 15, 5)]
        assert all(set(turn) == HOST for turn in rounds)
        assert [turn[0] for turn in rounds] == rounds[0][:3]  # none is always first

    def test_time_runs_out(self, file: Path) -> None:
        result = measure(file, rounds=1000, seconds=0.5)
        assert {len(item.seconds) for item in result.measured} != {1000}
        assert [note for note in result.notes if re.match(r"warm: \d+ of 1000 rounds, for want of time", note)]
        assert all(item.seconds for item in result.measured)

    @pytest.mark.parametrize("options", [{"rounds": 0}, {"seconds": 0.0}, {"seconds": float("nan")}, {"most_bytes": 0}])
    def test_nonsense(self, file: Path, options: dict[str, Any]) -> None:
        with pytest.raises(OptionError):
            measure(file, **options)

    def test_faults_of_the_source(self, file: Path, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match="no tensor with bytes"):
            measure(file, choose=lambda name: name == "none")
        os.truncate(file, 100)
        with pytest.raises(HeaderError):
            measure(file)


class TestSample:
    def test_within_a_bound(self, file: Path) -> None:
        result = measure(file, rounds=1, most_bytes=300_000)
        assert 0 < result.nbytes <= 300_000
        assert not result.whole
        assert re.match(
            r"a sample: \d+ of 11 tensors, [\d,]+ of [\d,]+ bytes, within the bound that was given", result.notes[0]
        )

    def test_within_the_memory(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sample, "usable_memory", lambda: 4 * 400_000)
        result = measure(file, rounds=1)
        assert 0 < result.nbytes <= 400_000
        assert "within the memory that may be used" in result.notes[0]

    def test_within_the_time(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sample, "_pace", lambda checkpoint, entries: 1e6)
        result = measure(file, rounds=1, seconds=6)
        assert 0 < result.nbytes <= 300_000
        assert "within what 6 s allow at 1 MB/s" in result.notes[0]

    def test_small_tensors_do_not_look_like_slow_storage(self, tmp_path: Path) -> None:
        save(tmp_path / "m.safetensors", {f"{k:04}": torch.zeros(256) for k in range(8000)})
        checkpoint = open_checkpoint(tmp_path)
        entries = [checkpoint.entry(name) for name in checkpoint.offset_keys()]
        notes: list[str] = []
        assert sample.pick(checkpoint, entries, "torch", "cpu", 10, None, notes) == entries
        assert notes == []

    def test_nothing_fits(self, tmp_path: Path) -> None:
        save(tmp_path / "m.safetensors", {"big": torch.zeros(1000)})
        with pytest.raises(OptionError, match="the smallest tensor takes 4,000 bytes, and 3,999 may be used") as caught:
            measure(tmp_path, most_bytes=3999)
        assert caught.value.tensor == "big"

    @pytest.mark.parametrize("most", [1, 7, 50, 99, 1000])
    def test_evenly_over_the_checkpoint(self, tmp_path: Path, most: int) -> None:
        save(tmp_path / "m.safetensors", {f"{k:03}": torch.zeros(1, dtype=torch.uint8) for k in range(100)})
        checkpoint = open_checkpoint(tmp_path)
        entries = [checkpoint.entry(name) for name in checkpoint.offset_keys()]
        notes: list[str] = []
        chosen = sample.pick(checkpoint, entries, "torch", "cpu", 1e6, most, notes)
        assert min(100, most) / 2 <= len(chosen) <= most
        assert bool(notes) == (most < 100)
        numbers = [int(entry.name) for entry in chosen]
        assert numbers == sorted(set(numbers))
        if len(numbers) > 1:
            assert numbers[-1] - numbers[0] >= 50


class TestPageCache:
    @pytest.mark.parametrize("size", [1, 1000, 40_000, 300_000])
    def test_a_small_file_is_cold_when_it_was_dropped(self, tmp_path: Path, size: int) -> None:
        """To look at a page makes the system read it, so no page is looked at twice."""
        path = tmp_path / "m.safetensors"
        save(path, {"a": torch.zeros(size)})
        if not cold_is_possible(path):
            pytest.skip("nothing is cold here")
        result = measure(path, rounds=3)
        assert names(result, State.COLD) == HOST
        assert result.notes == ()

    def test_fill_and_drop(self, tmp_path: Path) -> None:
        path = tmp_path / "m.safetensors"
        save(path, {"a": torch.zeros(1 << 20), "b": torch.zeros(3), "c": torch.zeros(1 << 18)})
        checkpoint = open_checkpoint(path)
        cache = PageCache(checkpoint.shards, [checkpoint.entry(name) for name in checkpoint.offset_keys()])
        if cache.resident() is None:
            pytest.skip("this system does not tell what is in its page cache")
        cache.fill()
        assert (cache.resident() or 0) > 0.95
        assert cache.drop()
        if cold_is_possible(path):
            assert (cache.resident() or 0) < 0.05
        cache.close()

    @pytest.mark.parametrize(
        ("parts", "note", "states"),
        [
            ([1.0], "cold: 100% of the file stays in the page cache", {State.WARM}),
            ([0.0], "warm: only 0% of the file stays in the page cache", {State.COLD}),
            ([None], "cold: the system does not tell", {State.WARM, State.COLD}),
        ],
    )
    def test_what_can_not_be_reached_is_said(
        self, file: Path, monkeypatch: pytest.MonkeyPatch, parts: list[float | None], note: str, states: set[State]
    ) -> None:
        monkeypatch.setattr(PageCache, "resident", lambda self: parts[0])
        result = measure(file, rounds=1)
        assert [text for text in result.notes if text.startswith(note)]
        assert {item.state for item in result.measured} == states

    def test_a_system_that_drops_nothing(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PageCache, "drop", lambda self: False)
        result = measure(file, rounds=1)
        assert {item.state for item in result.measured} == {State.WARM}
        assert "cold: this system does not let a file be dropped from the page cache" in result.notes

    def test_direct_io_that_is_refused_is_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "m.safetensors"
        save(path, {"a": torch.zeros(6 << 20)})
        if not cold_is_possible(path):
            pytest.skip("nothing is cold here, so nothing is read around the page cache")
        opened = os.open

        def refuse(name: Any, flags: int, *more: Any, **options: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(22, "Invalid argument")
            return opened(name, flags, *more, **options)

        monkeypatch.setattr(os, "open", refuse)
        result = measure(path, rounds=1)
        assert "cold: O_DIRECT was refused, so pread, O_DIRECT went through the page cache" in result.notes


class TestDevices:
    def test_memory_of_a_device(self, driver: Driver, file: Path) -> None:
        room = Room(driver, state(width=256), device=1)
        result = measure(file, rounds=2, destinations=room.tensors)
        room.check(state(width=256))
        assert (result.framework, result.device) == (None, "cuda:1")
        found = names(result, State.WARM)
        assert {"pread, O_DIRECT, pinned memory", "pread, page cache, pinned memory"} <= found
        assert [item.why for item in result.unusable if item.way == "safetensors"]
        assert all(item.ours for item in result.measured)
        assert driver.context(0).uses == 0

    @pytest.mark.parametrize("direct", [False, True])
    def test_kvikio(self, driver: Driver, file: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
        """The real one, over the emulated driver; whether it is the default is what its probe says."""
        facts = {"direct": direct, "why": "said so"}
        monkeypatch.setattr(ways, "attempt", lambda name: Outcome(Tried.WORKED, facts=facts))
        room = Room(driver, state(width=256))
        result = measure(file, rounds=1, destinations=room.tensors)
        room.check(state(width=256))
        assert "kvikio" in names(result, State.WARM)
        assert {item.way for item in result.measured if item.default} <= (
            {"kvikio"} if direct else {"pread, O_DIRECT, pinned memory", "pread, page cache, pinned memory"}
        )

    @pytest.mark.parametrize("tried", [Tried.CRASHED, Tried.RAISED, Tried.HUNG])
    def test_a_broken_kvikio_is_never_imported(
        self, driver: Driver, file: Path, monkeypatch: pytest.MonkeyPatch, tried: Tried
    ) -> None:
        monkeypatch.setattr(ways, "attempt", lambda name: Outcome(tried, why="ended by SIGABRT"))
        room = Room(driver, state(width=256))
        result = measure(file, rounds=1, destinations=room.tensors)
        (kvikio,) = (item for item in result.unusable if item.way == "kvikio")
        assert (kvikio.why, kvikio.remedy) == ("ended by SIGABRT", "dlpack-loader doctor says more")
        assert len(names(result, State.WARM)) == 2

    def test_rocm(self, driver: Driver, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        driver.vendor = "hip"
        facts = {"direct": True, "why": ""}
        monkeypatch.setattr(ways, "attempt", lambda name: Outcome(Tried.WORKED, facts=facts))
        room = Room(driver, state(width=256))
        result = measure(file, rounds=1, destinations=room.tensors)
        room.check(state(width=256))
        assert (result.device, "hipfile" in names(result, State.WARM)) == ("hip:0", True)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
    def test_no_device(self, file: Path) -> None:
        with pytest.raises(LoaderError) as caught:
            measure(file, "cuda")
        assert "dlpack-loader doctor says what stands in the way" in (caught.value.hint or "")


def measured(way: str, *seconds: float, ours: bool = True, default: bool = False, nbytes: int = 3 << 20) -> Measured:
    cpu = tuple(0.5 * second for second in seconds)
    return Measured(way, ours, default, f"call of {way}", State.COLD, nbytes, seconds, cpu)


class TestAdvice:
    def test_arithmetic(self) -> None:
        item = measured("a", 4, 1, 2, 3, 10)
        assert (item.median, item.cpu_median, item.spread, item.rate) == (3, 1.5, (2, 4), 1 << 20)
        assert measured("a", 4, 1).spread == (1, 4)

    @pytest.mark.parametrize(
        ("one", "other", "apart"),
        [
            ((1, 1, 1), (2, 2, 2), True),
            ((2, 2, 2), (1, 1, 1), True),
            ((1, 2, 3), (2, 3, 4), False),
            ((1, 1), (2, 2), False),
            ((1, 1, 1), (1, 1, 1), False),
        ],
    )
    def test_tell_apart(self, one: tuple[float, ...], other: tuple[float, ...], apart: bool) -> None:
        assert tell_apart(measured("a", *one), measured("b", *other)) == apart

    def test_the_default_is_kept_within_noise(self) -> None:
        (advice,) = advise(
            [measured("fast", 1, 1.1, 1.2), measured("usual", 1.05, 1.15, 1.3, default=True), measured("slow", 5, 5, 5)]
        )
        assert (advice.way, advice.default, advice.over_default, advice.rival) == ("usual", True, None, None)
        assert advice.text == "cold: usual, which is what happens by itself; within noise of fast"

    def test_something_else_is_better(self) -> None:
        rivals = [measured("loop", 4, 4, 4, ours=False), measured("file", 3, 3, 3, ours=False)]
        (advice,) = advise([measured("fast", 1, 1, 1), measured("usual", 2, 2, 2, default=True), *rivals])
        assert (advice.way, advice.over_default, advice.rival, advice.over_rival) == ("fast", 2, "file", 3)
        assert advice.certain
        assert advice.text == (
            "cold: fast: call of fast; 2.00 x as fast as what happens by itself; "
            "3.00 x as fast as the best of safetensors, file"
        )

    def test_safetensors_is_better(self) -> None:
        (advice,) = advise([measured("usual", 2, 2, 2, default=True), measured("loop", 1, 1, 1, ours=False)])
        assert (advice.way, advice.over_rival, advice.certain) == ("usual", 0.5, True)
        assert advice.text == (
            "cold: loop, 2.00 x as fast as the best of this package, usual, which is what happens by itself"
        )

    def test_safetensors_is_better_than_what_is_better_here(self) -> None:
        slow = [measured("usual", 4, 4, 4, default=True), measured("like it", 2, 2, 2), measured("other", 2, 2, 2)]
        (advice,) = advise([*slow, measured("loop", 1, 1, 1, ours=False)])
        assert advice.text == (
            "cold: loop, 2.00 x as fast as the best of this package, like it: call of like it; "
            "like it is 2.00 x as fast as what happens by itself; like it is within noise of other"
        )

    def test_too_few_bytes(self) -> None:
        few = (1 << 20) - 1
        (advice,) = advise(
            [measured("usual", 2, 2, 2, default=True, nbytes=few), measured("loop", 1, 1, 1, ours=False, nbytes=few)]
        )
        assert not advice.enough
        assert advice.text == (
            "cold: whichever you like; 1,048,575 bytes are too few to tell: a run is mostly the opening of files"
        )
        (advice,) = advise([measured("usual", 2, 2, 2, default=True, nbytes=few + 1)])
        assert advice.enough

    def test_within_noise_of_safetensors(self) -> None:
        (advice,) = advise([measured("usual", 1, 2, 3, default=True), measured("loop", 2, 3, 4, ours=False)])
        assert not advice.certain
        assert "not to be told apart from the best of safetensors, loop (1.50 x)" in advice.text

    def test_too_few_runs(self) -> None:
        (advice,) = advise([measured("usual", 1, default=True), measured("loop", 9, ours=False)])
        assert not advice.certain
        assert "9.00 x as fast as the best of safetensors, loop, by too few runs to be certain" in advice.text

    def test_nothing_measured(self) -> None:
        assert advise([]) == ()
        assert advise([measured("loop", 1, 1, 1, ours=False)]) == ()


class TestCommand:
    def test_json(self, file: Path) -> None:
        ran = run("bench", file, "--rounds", "3", "--json")
        document = ran.document
        assert (ran.code, ran.err) == (0, "")
        warm = [row for row in document["measured"] if row["state"] == "warm"]
        assert {row["way"] for row in warm} == HOST
        for row in warm:
            assert row["median"] == np.median(row["seconds"])
            assert row["bytes_per_second"] == pytest.approx(document["nbytes"] / row["median"])
            assert row["quartiles"][0] <= row["median"] <= row["quartiles"][1]
        assert (document["source"], document["device"], document["whole"]) == (str(file), "cpu", True)
        assert document["advice"][0]["state"] == "warm"

    def test_rows(self, file: Path) -> None:
        ran = run("bench", file, "--rounds", "1", "--match", "layers.0.*")
        rows = [line for line in ran.out.splitlines() if not line.startswith("#")]
        assert (ran.code, ran.err) == (0, "")
        assert {re.split(r"  +", row)[1] for row in rows} == HOST - {"safetensors load_file"}
        assert "# not measured: safetensors load_file: it reads whole files, and this is a sample" in ran.out
        assert "# choose, warm: " in ran.out
        assert f"# {file}: 4 tensors, " in ran.out

    @pytest.mark.parametrize("args", [["--rounds", "0"], ["--seconds", "0"], ["--most", "many"]], ids=" ".join)
    def test_usage(self, file: Path, args: list[str]) -> None:
        assert run("bench", file, *args).code == 2

    def test_faults(self, file: Path, tmp_path: Path) -> None:
        missing = run("bench", tmp_path / "none")
        assert (missing.code, missing.out) == (1, "")
        assert missing.err == f"error: No such file or directory\n  file: {tmp_path / 'none'}\n"
        assert run("bench", file, "--match", "nothing").code == 1
        assert "hint:" in run("bench", file, "--match", "nothing").err
        os.truncate(file, 1000)
        assert run("bench", file).code == 1

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
    def test_no_device(self, file: Path) -> None:
        ran = run("bench", file, "--device", "cuda")
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith("error: ")
        assert "dlpack-loader doctor" in ran.err

    def test_nothing_is_left_behind(self, file: Path, tmp_path: Path) -> None:
        """With broken libraries on the path, in a process as a user starts it."""
        for name in ("torch", "kvikio"):
            (tmp_path / "modules" / name).mkdir(parents=True)
            (tmp_path / "modules" / name / "__init__.py").write_text("import os\nos.abort()")
        (tmp_path / "temporary").mkdir()
        before = sorted(os.listdir(Path.cwd())), file.stat().st_mtime_ns
        settings = {"first": str(tmp_path / "modules"), "TMPDIR": str(tmp_path / "temporary")}
        ran = python("-m", "dlpack_loader", "bench", file, "--rounds", "1", **settings)
        assert (ran.code, ran.err) == (0, "")
        assert "# not measured: torch tensors: the process was ended by SIGABRT -> dlpack-loader doctor" in ran.out
        assert "into memory of numpy on cpu" in ran.out
        assert (sorted(os.listdir(Path.cwd())), file.stat().st_mtime_ns) == before
        assert list((tmp_path / "temporary").iterdir()) == []

    def test_at_a_terminal(self, file: Path) -> None:
        ran = at_terminal("bench", file, "--rounds", "1")
        assert ran.code == 0
        assert "choose, warm: " in ran.err
        assert "# " not in ran.err

    def test_ours_of_a_log_is_kept(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[str | None] = []

        def look(*given: object, **options: object) -> None:
            seen.append(os.environ.get("CUFILE_LOGFILE_PATH"))
            raise OptionError("enough")

        command: Callable[..., object] = look
        monkeypatch.setattr("dlpack_loader.cli.bench.measure", command)
        run("bench", file)
        monkeypatch.setenv("CUFILE_LOGFILE_PATH", "mine.log")
        run("bench", file)
        assert seen[0] is not None
        assert (os.path.exists(os.path.dirname(seen[0])), seen[1]) == (False, "mine.log")
