"""Where the checkpoint is: the file system, and whether it can be read around the page cache, which is tried."""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dlpack_loader.checkpoint import open_checkpoint
from dlpack_loader.doctor.findings import Finding, Level
from dlpack_loader.errors import CheckpointError, LoaderError
from dlpack_loader.runtime import host

__all__ = ["FileSystem", "examine_storage", "file_system_of"]

_MEMORY = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")
_NETWORK = (
    "nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "9p", "virtiofs", "wekafs", "afs",
)  # fmt: skip
_SUFFIXES = (".safetensors", ".safetensors.index.json")

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True, slots=True)
class FileSystem:
    """What a path is mounted from."""

    type: str
    mount: str
    """The folder that it is mounted on."""

    @property
    def kind(self) -> str:
        """One of ``"memory"``, ``"network"``, ``"fuse"``, ``"overlay"`` and ``"disk"``."""
        if self.type in _MEMORY:
            return "memory"
        if self.type in _NETWORK:
            return "network"
        if self.type.startswith("fuse"):
            return "fuse"
        return "overlay" if self.type == "overlay" else "disk"


_MEANINGS = {
    "memory": "the files are in memory already: a load copies them, and there is nothing to read around",
    "network": "reads go over the network: more threads may help, and a second load finds the page cache filled",
    "fuse": "a process answers the reads: more threads may help, and a copy on a local disk is faster",
    "overlay": "a container's layers; what is below decides, and GPU-direct reads are refused by most libraries",
    "disk": "a local disk: large ranges that are not cached are read around the page cache",
}
_REMEDIES = {
    "fuse": "Copy the checkpoint to a local disk for repeated loads",
    "overlay": "Mount the folder of the checkpoint into the container as a volume",
}


def examine_storage(path: str, *, named: bool) -> Iterator[Finding]:
    """Look at the place of a checkpoint, and try direct reads there.

    Parameters
    ----------
    named
        Whether somebody asked for this path, so that what is wrong with it makes their load impossible.
    """
    try:
        facts = os.stat(path)
    except OSError as error:
        yield Finding(
            "storage.path",
            Level.PROBLEM,
            f"{path}: {error.strerror}",
            "there is nothing to load from",
            "Check the path" if error.errno == errno.ENOENT else "Check who may read the path and the folders above it",
            blocking=True,
        )
        return
    folder = path if stat.S_ISDIR(facts.st_mode) else os.path.dirname(path) or "."
    if named:
        yield from _checkpoint(path, is_folder=stat.S_ISDIR(facts.st_mode))
    system = file_system_of(path)
    if system is not None:
        yield Finding(
            "storage.file_system",
            Level.NOTE if system.kind in _REMEDIES else Level.OK,
            f"{system.type}, mounted on {system.mount}",
            _MEANINGS[system.kind],
            _REMEDIES.get(system.kind),
        )
    if stat.S_ISDIR(facts.st_mode) or stat.S_ISREG(facts.st_mode):  # opening a pipe would never end
        yield _direct_io(path, folder, facts, system)


def _checkpoint(path: str, *, is_folder: bool) -> Iterator[Finding]:
    """Open what is there, where something is."""
    if is_folder and not any(name.endswith(_SUFFIXES) for name in _names(path)):
        yield Finding("storage.checkpoint", Level.OK, f"{path}: a folder without a checkpoint", "only the place counts")
        return
    try:
        checkpoint = open_checkpoint(path)
    except LoaderError as error:
        problems = error.problems if isinstance(error, CheckpointError) else ()
        first = problems[0] if problems else error
        more = f", the first of {len(problems)} problems" if len(problems) > 1 else ""
        where = f"{first.file}: " if first.file else ""
        yield Finding(
            "storage.checkpoint",
            Level.PROBLEM,
            f"{where}{first.message}{more}",
            "this checkpoint can't be loaded",
            first.hint or f"dlpack-loader check {path} names every problem",
            blocking=True,
        )
        return
    yield Finding(
        "storage.checkpoint",
        Level.OK,
        f"{path}: {len(checkpoint):,} tensors, {checkpoint.nbytes():,} bytes in {len(checkpoint.shards):,} file(s)",
        "headers and sizes are sound",
    )


def _direct_io(path: str, folder: str, facts: os.stat_result, system: FileSystem | None) -> Finding:
    key = "storage.direct_io"
    if not _O_DIRECT or not host.LINUX:
        return Finding(key, Level.OK, "not on this system", "reads go through the page cache")
    try:
        with _sample(path, folder, is_folder=stat.S_ISDIR(facts.st_mode)) as sample:
            refused = _try_direct(sample)
    except OSError as error:
        return Finding(
            key,
            Level.NOTE,
            f"not tried: {error.strerror}",
            "whether files here can be read around the page cache is not known; a load finds out by itself",
            "Name a file that can be read, or a folder that can be written",
        )
    if refused is not None:
        why = refused.strerror or str(refused)
        return Finding(
            key,
            Level.OK if system is not None and system.kind == "memory" else Level.NOTE,
            f"refused ({why})",
            "reads go through the page cache, and reports say so",
            None
            if system is not None and system.kind == "memory"
            else "Put the checkpoint on a file system of a local disk, such as ext4 or xfs, for faster cold loads",
        )
    if os.major(facts.st_dev) == 0:
        return Finding(
            key,
            Level.OK,
            "works",
            "not used by itself where there is no block device of its own; direct_io=True asks for it",
        )
    return Finding(key, Level.OK, "works", "large cold ranges are read around the page cache, which costs less CPU")


def _sample(path: str, folder: str, *, is_folder: bool) -> IO[bytes]:
    """Open a file of that place: the one that was named, one of a checkpoint, or one that has no name."""
    if not is_folder:
        return open(path, "rb")
    for name in _names(folder):
        if name.endswith(".safetensors"):
            try:
                return open(os.path.join(folder, name), "rb")
            except OSError:
                continue
    sample = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (the caller closes it)
    sample.write(bytes(2 * host.ALIGNMENT))
    sample.flush()
    return sample


def _try_direct(sample: IO[bytes]) -> OSError | None:
    """Read a page around the page cache; return what was said against it."""
    scratch = host.Scratch()
    address = scratch.address(host.ALIGNMENT)
    try:
        fd = os.open(f"/proc/self/fd/{sample.fileno()}", os.O_RDONLY | _O_DIRECT)
    except OSError as error:
        return error
    try:
        host.read_at(fd, 0, host.vector(address, host.ALIGNMENT), 1)
    except OSError as error:
        return error
    finally:
        os.close(fd)
    return None


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def file_system_of(path: str) -> FileSystem | None:
    """Return what a path is mounted from, or None where the system does not tell."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        device = os.stat(path).st_dev
    except OSError:
        return None
    real = os.path.realpath(path)
    number = f"{os.major(device)}:{os.minor(device)}"
    best: tuple[bool, int, FileSystem] | None = None
    for line in lines:
        fields, _, rest = line.partition(" - ")
        _, _, mounted, _, mount, *_ = fields.split()
        mount = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), mount)
        above = mount in ("/", real) or real.startswith(mount + "/")
        if not above:
            continue
        # The last mount of the longest folder counts; a device's number says more, but some file systems have several.
        rank = (mounted == number, len(mount))
        if best is None or rank >= best[:2]:
            best = (*rank, FileSystem(rest.split()[0], mount))
    return None if best is None else best[2]
