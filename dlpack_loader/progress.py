"""Progress of a transfer: a callback of the caller's, or the bar that the caller asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

__all__ = ["Progress", "reporting"]

Progress = Callable[[int, int], object] | Literal[True]
"""Called with the bytes read so far and the bytes to read, by the thread that runs the transfer; True shows a bar."""


@contextmanager
def reporting(progress: Progress | None, total: Callable[[], int]) -> Iterator[Callable[[int], object] | None]:
    """Lend a function to call with the bytes read so far, or None when nobody wants to know.

    Parameters
    ----------
    total
        Tells the bytes to read; asked only when somebody does.
    """
    if progress is None:
        yield None
    elif progress is True:
        from tqdm.auto import tqdm

        with tqdm(total=total(), unit="B", unit_scale=True, unit_divisor=1024, desc="loading") as bar:
            yield lambda done: bar.update(done - bar.n)
    else:
        callback, count = progress, total()
        yield lambda done: callback(done, count)
