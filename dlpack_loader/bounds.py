"""What a transfer may use: memory, threads, the length of a read. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dlpack_loader.errors import OptionError

__all__ = ["Bounds"]

_MAX_CHUNK = 0x7FFFF000
"""Most bytes that one read(2) moves on Linux."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a transfer may use. Everything that makes no sense is refused when it is made, before any I/O."""

    staging_bytes: int = 64 << 20
    """Host memory beyond the destinations, for all workers together."""
    threads: int = 4
    """Workers that read at the same time."""
    chunk_bytes: int = 4 << 20
    """Most bytes of one read."""
    over_read: float = 2.0
    """Most bytes read for each byte wanted when strided pieces are read as one range; see ``reads`` for tiny ones."""

    def __post_init__(self) -> None:
        for name in ("staging_bytes", "threads", "chunk_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise OptionError(f"{name} must be a positive integer, not {value!r}")
        if self.threads > 1024:
            raise OptionError(f"threads is at most 1024, not {self.threads}")
        if self.chunk_bytes > _MAX_CHUNK:
            raise OptionError(f"chunk_bytes is at most {_MAX_CHUNK:,}, not {self.chunk_bytes:,}")
        ratio: object = self.over_read
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not ratio >= 1:  # NaN is not either
            raise OptionError(f"over_read must be a number of at least 1, not {ratio!r}")

    @property
    def scratch_bytes(self) -> int:
        """Staging bytes of one worker."""
        return self.staging_bytes // self.threads
