"""A load that ended early says what is filled, what failed and what is left, and is taken up again from there."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from dlpack_loader import LoadReport, Target, load_into, safe_open
from dlpack_loader.errors import DeviceError, LoaderError, StorageError
from dlpack_loader.runtime import host
from tests.device_room import Room
from tests.emulation import Driver
from tests.files import save

SIZE = 1 << 18  # floats: 1 MiB each, so that every tensor takes a read of its own below


def checkpoint(path: Path) -> dict[str, torch.Tensor]:
    return save(path, {f"t{k:02}": torch.full((SIZE,), float(k + 1)) for k in range(20)})


def fail_from(monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    """Make reads of the file fail that begin at an offset or after it, once they have read a part."""
    whole = host.read_at

    def read(fd: int, at: int, pieces: host.Vector, enough: int) -> int:
        if at >= offset:
            whole(fd, at, host.vector(pieces[0], min(64, pieces[1])), min(64, pieces[1]))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(fd, at, pieces, enough)

    monkeypatch.setattr(host, "read_at", read)


def zeros(wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in wanted.items()}


def check(report: LoadReport, destinations: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Every name is in one place, and what is said of it is so."""
    assert sorted((*report.filled, *report.failed, *report.unfilled)) == sorted(wanted)
    for name in report.filled:
        assert torch.equal(destinations[name], wanted[name]), name
    for name in report.unfilled:
        assert not destinations[name].any(), name
    assert report.bytes_written == sum(wanted[name].nbytes for name in report.filled)


def test_what_was_filled_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    wanted = checkpoint(path)
    destinations = zeros(wanted)
    with safe_open(path, threads=1) as reader, monkeypatch.context() as patch:
        fail_from(patch, reader.entry("t07").offset)
        with pytest.raises(StorageError) as caught:
            reader.load_into(destinations)
    report = caught.value.report
    check(report, destinations, wanted)
    # One thread reads up to 4 MiB at a time: the one that failed has about four tensors.
    assert report.failed == caught.value.dirty
    assert "t07" in report.failed
    assert "t00" in report.filled
    assert "t19" in report.unfilled
    assert "failed" in str(report)
    rest = {name: value for name, value in destinations.items() if name not in report.filled}
    resumed = load_into(path, rest, strict=False)
    assert resumed.bytes_read == sum(value.nbytes for value in rest.values()) < sum(v.nbytes for v in wanted.values())
    for name, value in wanted.items():
        assert torch.equal(destinations[name], value), name


@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize("at", [0, 3, 6, 11])
def test_the_report_is_right_wherever_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, threads: int
) -> None:
    path = tmp_path / "model.safetensors"
    wanted = checkpoint(path)
    destinations = zeros(wanted)
    with safe_open(path, threads=threads) as reader, monkeypatch.context() as patch:
        fail_from(patch, reader.entry(f"t{at:02}").offset)
        with pytest.raises(StorageError) as caught:
            reader.load_into(destinations)
    check(caught.value.report, destinations, wanted)
    assert caught.value.report.failed


def test_a_name_is_filled_when_all_of_its_destinations_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    wanted = save(path, {"a": torch.arange(SIZE * 8.0), "b": torch.ones(SIZE)})
    early, late, b = torch.zeros(SIZE), torch.zeros(SIZE), torch.zeros(SIZE)
    last = slice(7 * SIZE, None)
    destinations: dict[str, Any] = {"a": [Target(early, index=slice(0, SIZE)), Target(late, index=last)], "b": b}
    with safe_open(path, threads=1) as reader, monkeypatch.context() as patch:
        fail_from(patch, reader.entry("a").offset + 7 * SIZE * 4)
        with pytest.raises(StorageError) as caught:
            reader.load_into(destinations)
    assert torch.equal(early, wanted["a"][:SIZE])
    assert "a" not in caught.value.report.filled


def test_a_name_of_which_some_destinations_were_filled_has_failed(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is old here and new there, though none of its destinations is a mixture in itself."""
    path = tmp_path / "model.safetensors"
    wanted = checkpoint(path)
    room = Room(driver, {name: wanted[name] for name in ("t00", "t19")})
    destinations: dict[str, Any] = zeros(wanted)
    early, late = destinations["t00"], destinations["t19"]
    destinations["t00"] = [early, room.tensors["t00"]]
    destinations["t19"] = [late, room.tensors["t19"]]
    with safe_open(path, threads=1) as reader, monkeypatch.context() as patch:
        fail_from(patch, reader.entry("t07").offset)
        with pytest.raises(StorageError) as caught:
            reader.load_into(destinations)
    assert torch.equal(early, wanted["t00"])
    assert not late.any()
    assert set(room.memories["t00"].read()) == {0xA5}
    report = caught.value.report
    assert report.failed == caught.value.dirty
    assert "t00" in report.failed
    assert "t19" in report.unfilled


def test_what_is_to_be_zeroed_alone_is_not_filled_before(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part without elements has nothing to read, and its padding is zeroed when its device's turn comes."""
    path = tmp_path / "model.safetensors"
    wanted = save(path, {"a": torch.ones(SIZE), "b": torch.ones(SIZE), "c": torch.ones(SIZE)})
    room = Room(driver, {name: wanted[name] for name in "bc"})
    destinations = {
        "a": torch.zeros(SIZE),  # on the host, which comes first
        "b": Target(room.tensors["b"], index=slice(0, 0), padding="zero"),
        "c": Target(room.tensors["c"], index=slice(0, 0), padding="keep"),
    }
    with safe_open(path, threads=1) as reader, monkeypatch.context() as patch:
        fail_from(patch, reader.entry("a").offset)
        with pytest.raises(StorageError) as caught:
            reader.load_into(destinations)
    assert set(room.memories["b"].read()) == {0xA5}
    report = caught.value.report
    assert (report.filled, report.failed, report.unfilled) == (("c",), ("a",), ("b",))


def test_aliases_share_what_becomes_of_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    wanted = checkpoint(path)
    destinations = zeros(wanted)
    tied: dict[str, Any] = {**destinations, "early": destinations["t00"], "late": destinations["t19"]}
    with safe_open(path, threads=1) as reader, monkeypatch.context() as patch:
        fail_from(patch, reader.entry("t06").offset)
        with pytest.raises(StorageError) as caught:
            reader.load_into(tied)
    report = caught.value.report
    assert report.aliases == {"early": "t00"}
    assert {"late", "t19"} <= set(report.unfilled)


def test_an_error_before_the_first_byte_has_no_report(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    wanted = checkpoint(path)
    with pytest.raises(LoaderError) as caught:
        load_into(path, {name: torch.zeros(3) for name in wanted})
    assert caught.value.report is None


def test_an_error_and_its_report_go_to_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    wanted = checkpoint(path)
    with monkeypatch.context() as patch:
        fail_from(patch, 5 << 20)
        with pytest.raises(StorageError) as caught:
            load_into(path, zeros(wanted), threads=1)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.report == caught.value.report


def test_a_pending_load_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    wanted = checkpoint(path)
    destinations = zeros(wanted)
    with monkeypatch.context() as patch:
        fail_from(patch, 5 << 20)
        pending = load_into(path, destinations, wait=False, threads=1)
        with pytest.raises(StorageError) as caught:
            pending.wait()
    check(caught.value.report, destinations, wanted)


def test_on_a_device(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    wanted = checkpoint(path)
    room = Room(driver, wanted)
    with safe_open(path, "np", threads=1) as reader, monkeypatch.context() as patch:
        fail_from(patch, reader.entry("t06").offset)
        with pytest.raises(StorageError) as caught:
            reader.load_into(room.tensors)
    report = caught.value.report
    assert sorted((*report.filled, *report.failed, *report.unfilled)) == sorted(wanted)
    assert report.filled
    room.check({name: wanted[name] for name in report.filled})
    load_into(path, {name: value for name, value in room.tensors.items() if name not in report.filled}, strict=False)
    room.check(wanted)


def test_nothing_on_a_device_counts_as_filled_when_the_wait_for_it_fails(driver: Driver, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    wanted = checkpoint(path)
    room = Room(driver, wanted)
    kept = torch.zeros(SIZE)
    driver.fault("cuStreamSynchronize", error=719)  # what a kernel of somebody's leaves behind
    with pytest.raises(DeviceError) as caught:
        load_into(path, {**room.tensors, "t03": [room.tensors["t03"]], "t04": kept})
    report = caught.value.report
    assert report.filled == ("t04",)  # on the host
    assert torch.equal(kept, wanted["t04"])
    assert set(report.failed) == set(caught.value.dirty) == set(wanted) - {"t04"}
