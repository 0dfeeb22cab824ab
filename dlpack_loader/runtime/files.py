"""Open files of a checkpoint: few descriptors, and certainty that a path still names the file whose header was read."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from dlpack_loader.checkpoint import Shard
from dlpack_loader.errors import FileChangedError, storage_error
from dlpack_loader.runtime import host

__all__ = ["Files", "Hold", "lock_of_process"]

_MAX_IDLE = 8
"""Descriptors kept open while nobody reads from them."""


def lock_of_process(locks: dict[int, threading.Lock]) -> threading.Lock:
    """Return this process's lock: what it was forked from may have held its own just then, and for ever."""
    process = os.getpid()
    lock = locks.get(process)
    return locks.setdefault(process, threading.Lock()) if lock is None else lock


@dataclass(slots=True)
class _Open:
    fd: int
    users: int


class Hold:
    """Keeps a file open as long as anything refers to it, also after the ``Files`` were closed."""

    __slots__ = ("__weakref__", "_files", "_kept", "_path")

    def __init__(self, files: Files, path: str, kept: _Open) -> None:
        self._files = files
        self._path = path
        self._kept = kept

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be half gone
            self._files.give_back_later(self._path, self._kept)


class Files:
    """Descriptors of a checkpoint's files, opened when first used, shared by threads, closed by ``close``.

    A file that was replaced or rewritten since its header was read is refused: its offsets mean nothing any more.
    """

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        self._shards = shards
        self._open: dict[str, _Open] = {}
        self._returned: deque[tuple[str, _Open]] = deque()
        self._locks = {os.getpid(): threading.Lock()}
        self._closed = False

    def shard(self, path: str) -> Shard:
        """Return the shard of that path."""
        return self._shards[path]

    @contextmanager
    def use(self, path: str) -> Iterator[int]:
        """Lend a descriptor of a file for positioned reads; where these move a position, it is the caller's own."""
        if not host.LINUX:
            fd = self._open_checked(path, os.O_RDONLY)
            try:
                yield fd
            finally:
                os.close(fd)
            return
        kept = self._take(path)
        try:
            yield kept.fd
        finally:
            with self._guard():
                self._give_back(path, kept)
            self._clear_returned()

    def hold(self, path: str) -> Hold:
        """Keep a file open until the result is forgotten, so that it can be read after it was renamed or removed.

        Elsewhere than on Linux files are opened anew for each use, so there they have to keep their name.
        """
        if not host.LINUX:
            return Hold(self, path, _Open(self._open_checked(path, os.O_RDONLY), 1))
        return Hold(self, path, self._take(path))

    def give_back_later(self, path: str, kept: _Open) -> None:
        """Give back what is held, from a destructor: whoever has the lock, this very thread perhaps, does the work."""
        self._returned.append((path, kept))
        self._clear_returned()

    def _clear_returned(self) -> None:
        while self._returned:
            lock = self._guard()
            if not lock.acquire(blocking=False):
                return  # its holder looks again when it has let go
            try:
                while self._returned:
                    self._give_back(*self._returned.popleft())
            finally:
                lock.release()

    def _take(self, path: str) -> _Open:
        try:
            with self._guard():
                kept = self._open.get(path)
                if kept is None:
                    kept = self._open[path] = _Open(self._open_checked(path, os.O_RDONLY), 0)
                else:
                    self._check(kept.fd, path)  # it may have been rewritten since it was opened
                kept.users += 1
        finally:
            self._clear_returned()
        return kept

    def _give_back(self, path: str, kept: _Open) -> None:
        kept.users -= 1
        current = self._open.get(path) is kept
        if kept.users == 0 and (self._closed or not current or len(self._open) > _MAX_IDLE):
            if current:
                del self._open[path]
            os.close(kept.fd)

    def another(self, path: str, flags: int = 0) -> int:
        """Open a descriptor of the caller's own, with a file position, readahead and flags of its own."""
        if host.LINUX:
            with self.use(path) as fd:
                try:
                    # The very same inode, even where the path was renamed or removed meanwhile.
                    return self._open_some(f"/proc/self/fd/{fd}", os.O_RDONLY | flags)
                except FileNotFoundError:
                    pass  # no /proc here
                except OSError as error:
                    raise storage_error(error.errno, error.strerror, file=path) from None
        return self._open_checked(path, os.O_RDONLY | flags)

    def close(self) -> None:
        """Close every descriptor that is not in use; the others are closed by their last user.

        A transfer that is under way may still open files; each is closed right after its use.
        """
        with self._guard():
            self._closed = True
            self._close_idle()
        self._clear_returned()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be half gone
            self.close()

    def _guard(self) -> threading.Lock:
        return lock_of_process(self._locks)

    def _open_checked(self, path: str, flags: int) -> int:
        try:
            fd = self._open_some(path, flags)
        except OSError as error:
            raise storage_error(error.errno, error.strerror, file=path) from None
        try:
            self._check(fd, path)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _open_some(self, path: str, flags: int) -> int:
        """Open a path; where there are too many open files, ours that are idle go first."""
        flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        try:
            return os.open(path, flags)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        self._close_idle()
        return os.open(path, flags)

    def _close_idle(self) -> None:
        for path in [path for path, item in self._open.items() if item.users == 0]:
            os.close(self._open.pop(path).fd)

    def _check(self, fd: int, path: str) -> None:
        if Shard.identify(os.fstat(fd)) != self._shards[path].identity:
            raise FileChangedError(
                "the file was replaced or rewritten after its header was read",
                file=path,
                hint="Open the checkpoint again",
            )
