"""What a refused file is taken for, from its first bytes alone; through `read_header` in test_header."""

from __future__ import annotations

import io
import pickle
import zipfile

import numpy as np
import pytest
import torch

from dlpack_loader.diagnose import explain_file
from tests.header_oracle import file_bytes


def explain(data: bytes) -> str | None:
    return explain_file(data[:512], len(data))


def zipped() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3)}, buffer)
    assert zipfile.is_zipfile(buffer)
    return buffer.getvalue()


def legacy() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3)}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ones(3))
    return buffer.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123\n"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(b"", "empty", id="empty"),
        pytest.param(LFS, "git lfs pull", id="LFS"),
        pytest.param(zipped(), "zip archive", id="torch.save"),
        pytest.param(legacy(), "pickle", id="torch.save of before 1.6"),
        pytest.param(pickle.dumps({"a": [1.0] * 99}, 4), "pickle", id="pickle 4"),
        pytest.param(npy(), ".npy", id="npy"),
        pytest.param(b"GGUF\x03\0\0\0\x09\0\0\0", "GGUF", id="GGUF"),
        pytest.param(b"\x89HDF\r\n\x1a\n" + bytes(40), "HDF5", id="HDF5"),
        pytest.param(b"\x1f\x8b\x08\0" + b"\x17" * 40, "gzip", id="gzip"),
        pytest.param(b"\x28\xb5\x2f\xfd" + b"\x17" * 40, "zstd", id="zstd"),
        pytest.param(b"<!doctype HTML><p>Sign in", "web page", id="HTML"),
        pytest.param(b"\n  <html>", "web page", id="HTML after blanks"),
        pytest.param(b'<?xml version="1.0"?><Error/>', "web page", id="XML of an object store"),
        pytest.param(b'{"weight_map": {"a": "b"}}', "index", id="an index"),
        pytest.param(b"\xef\xbb\xbf{}" + b" " * 9, "index", id="JSON with a byte order mark"),
        pytest.param(b"{}", "index", id="two bytes of JSON"),
        pytest.param(bytes(1), "zero bytes", id="a zero"),
        pytest.param(bytes(8192), "zero bytes", id="zeros"),
        pytest.param(file_bytes('{"a":1}')[:12], "needs 15 bytes and the file has 12", id="cut off in the header"),
        pytest.param(file_bytes(' {"a":1}')[:12], "needs 16 bytes and the file has 12", id="cut off after a blank"),
        pytest.param(file_bytes("{".ljust(0x7B))[:99], "needs 131 bytes", id="cut off, and its length reads {"),
        pytest.param(
            file_bytes("{".ljust(0x280))[:99], "needs 648 bytes", id="cut off, and its length reads as a pickle"
        ),
    ],
)
def test_recognised(data: bytes, says: str) -> None:
    hint = explain(data)
    assert hint is not None
    assert says in hint


@pytest.mark.parametrize("length", [0x7B, 0x280, 0x480, 0x8B1F, ord("<")])
def test_a_length_that_can_be_right_is_no_magic_number(length: int) -> None:
    """The two or one bytes that these files begin with mean something else elsewhere."""
    assert explain(file_bytes("{".ljust(length))) is None


@pytest.mark.parametrize("data", [b"\xde\xad\xbe\xef" * 9, b"hello world", b"\x01\0", file_bytes('{"a":1}')])
def test_not_recognised(data: bytes) -> None:
    assert explain(data) is None
