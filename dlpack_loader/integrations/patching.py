"""Functions of another package replaced for as long as a context lasts, wherever modules have them by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from dlpack_loader.errors import OptionError

__all__ = ["StandIn", "claimed", "holders", "replaced"]

_CLAIM = "__dlpack_loader__"
_OWN = __name__.partition(".")[0]

Holder = tuple[dict[str, Any], str]
"""The namespace of a module, and the name in it that stands for a function."""


class StandIn:
    """Stands for a function: calls ours while the context lasts, and later the one that it replaced.

    A module that is imported within the context keeps what it finds there for good, in a default argument, say.
    """

    def __init__(self, original: Any, ours: Callable[..., Any]) -> None:
        self.original = original
        self._ours: Callable[..., Any] | None = ours

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ours, or later the original."""
        return (self._ours or self.original)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def leave(self) -> None:
        """Call the original from now on."""
        self._ours = None

    def origin(self) -> Any:
        """Return the original, and not a stand-in of a context that was left meanwhile."""
        original = self.original
        return original.origin() if isinstance(original, StandIn) and original.was_left() else original

    def was_left(self) -> bool:
        """Whether its context is over."""
        return self._ours is None


@contextmanager
def claimed(host: ModuleType) -> Iterator[None]:
    """Refuse a second context for the same host, nested or of another thread: it can't be said which options hold.

    The claim is a mark in the host, not in this package, and setting it is one step for all threads.

    Raises
    ------
    OptionError
        There is one.
    """
    mark = object()
    if vars(host).setdefault(_CLAIM, mark) is not mark:
        raise OptionError(
            f"{host.__name__} reads through dlpack_loader already",
            hint="One context serves every thread of the process: leave it before another one begins",
        )
    try:
        yield
    finally:
        del vars(host)[_CLAIM]


@contextmanager
def replaced(stand_ins: Mapping[int, StandIn], places: Sequence[Holder]) -> Iterator[None]:
    """Put each stand-in where its original is, and every original back at the end.

    Parameters
    ----------
    stand_ins
        By the ``id`` of the original.
    places
        Where the originals are. On leaving, modules that took a stand-in meanwhile are found too; what somebody else
        replaced in between is left as it is.
    """
    try:
        for space, name in places:
            stand_in = stand_ins.get(id(space.get(name)))
            if stand_in is not None:  # a module may be there under two names
                space[name] = stand_in
        yield
    finally:
        taken = {id(stand_in): stand_in for stand_in in stand_ins.values()}
        for space, name in [*places, *holders(taken)]:
            if id(space.get(name)) in taken:
                space[name] = space[name].origin()
        for stand_in in taken.values():
            stand_in.leave()


def holders(wanted: Mapping[int, object]) -> list[Holder]:
    """Find every name of a loaded module that stands for one of these objects, given by ``id``."""
    return [
        (space, name)
        for title, module in list(sys.modules.items())
        if title.partition(".")[0] != _OWN and isinstance(space := getattr(module, "__dict__", None), dict)
        for name, value in list(space.items())
        if id(value) in wanted
    ]
