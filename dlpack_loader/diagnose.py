"""What a file that is not safetensors looks like instead, from its first bytes. Pure."""

from __future__ import annotations

__all__ = ["explain_file"]

_MAGICS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "This is a Git LFS pointer, not the weights: run `git lfs pull`"),
    (b"PK\x03\x04", "This is a zip archive, such as a PyTorch .pt or .bin file: convert it to safetensors"),
    (b"\x80\x02", "This is a pickle, such as an old PyTorch file: convert it to safetensors"),
    (b"\x80\x04", "This is a pickle, such as an old PyTorch file: convert it to safetensors"),
    (b"GGUF", "This is a GGUF file, not safetensors"),
    (b"\x89HDF\r\n\x1a\n", "This is an HDF5 file, not safetensors"),
    (b"\x93NUMPY", "This is a NumPy .npy file, not safetensors"),
    (b"\x1f\x8b", "This is a gzip file: decompress it first"),
    (b"\x28\xb5\x2f\xfd", "This is a zstd file: decompress it first"),
)


def explain_file(head: bytes, size: int) -> str | None:
    """Say what a refused file looks like, and what to do about it.

    Parameters
    ----------
    head
        Its first bytes; 512 are enough.
    size
        Its size in bytes.

    Returns
    -------
    str or None
        One sentence, or None when nothing is recognised.
    """
    if size == 0:
        return "The file is empty: the download or copy did not happen, get it again"
    if not head.strip(b"\0"):
        return "The file begins with zero bytes only: the download or copy was preallocated and never filled"
    length = int.from_bytes(head[:8], "little")
    if length + 8 <= size:
        return None  # a length that can be right: its bytes may look like a magic number by chance
    if length < 1 << 32 and head[8:9] in (b"{", b" "):
        return f"The header alone needs {length + 8:,} bytes and the file has {size:,}: it was cut off, get it again"
    for magic, text in _MAGICS:
        if head.startswith(magic):
            return text
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml")):
        return "This is a web page saved under the name of a weights file: the download link or login was wrong"
    if start.startswith(b"{"):
        return "The file begins with JSON, without the eight length bytes of safetensors: perhaps it is an index"
    return None
