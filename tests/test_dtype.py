"""The 22 dtypes, each fact against where it comes from: the Rust library, torch's capsules, NumPy and ml_dtypes."""

from __future__ import annotations

import re
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors
import torch

from dlpack_loader.dlpack import take
from dlpack_loader.dtype import BITS, BY_CODE, DTYPES, UINT8, DType, dtype_of_dlpack, uint_of_bits

WITH_TORCH = [dtype for dtype in DTYPES if dtype.torch is not None]
WITH_NUMPY = [dtype for dtype in DTYPES if dtype.numpy is not None]


def rust_refusal(dtype: str, count: int, nbytes: int) -> str | None:
    """Return what Rust says against a tensor of that many elements in that many bytes, or None."""
    header = f'{{"a":{{"dtype":"{dtype}","shape":[{count}],"data_offsets":[0,{nbytes}]}}}}'.encode()
    try:
        safetensors.deserialize(struct.pack("<Q", len(header)) + header + bytes(nbytes))
    except safetensors.SafetensorError as error:
        return str(error)
    return None


def by_code(dtype: DType) -> str:
    return dtype.code


def test_codes_and_their_order_are_those_of_rust() -> None:
    text = rust_refusal("Q8", 1, 1)
    assert text is not None
    assert [dtype.code for dtype in DTYPES] == re.findall(r"`([A-Z0-9_]+)`", text.partition("expected one of")[2])
    assert len(DTYPES) == 22
    assert list(BY_CODE) == list(BITS) == [dtype.code for dtype in DTYPES]


@pytest.mark.parametrize("dtype", DTYPES, ids=by_code)
def test_bits_are_those_of_rust(dtype: DType) -> None:
    """Eight elements take as many bytes as one has bits; a byte more or less is refused."""
    assert BITS[dtype.code] == dtype.bits
    assert [nbytes for nbytes in range(1, 72) if rust_refusal(dtype.code, 8, nbytes) is None] == [dtype.bits]


@pytest.mark.parametrize("dtype", DTYPES, ids=by_code)
def test_group_is_the_smallest_run_that_rust_lets_end_on_a_byte(dtype: DType) -> None:
    whole = [count for count in range(1, 9) if rust_refusal(dtype.code, count, count * dtype.bits // 8) is None]
    assert dtype.group == whole[0]
    assert dtype.group_bytes * 8 == dtype.group * dtype.bits


@pytest.mark.parametrize("dtype", WITH_TORCH, ids=by_code)
def test_dlpack_triple_is_the_one_of_torch(dtype: DType) -> None:
    tensor = torch.zeros(32, dtype=torch.uint8).view(getattr(torch, str(dtype.torch)))
    capsule = take(tensor, stream=None)
    assert capsule.dtype == dtype.dlpack
    capsule.release()
    assert tensor.element_size() * 8 == dtype.dlpack[1] * dtype.dlpack[2]
    assert dtype_of_dlpack(dtype.dlpack) is dtype


@pytest.mark.parametrize("dtype", WITH_NUMPY, ids=by_code)
def test_numpy_name_means_the_same_numbers(dtype: DType) -> None:
    assert dtype.numpy is not None
    known = np.dtype(getattr(ml_dtypes, dtype.numpy)) if dtype.extension else np.dtype(dtype.numpy)
    assert known.name == dtype.numpy
    assert known.itemsize * 8 == max(dtype.bits, 8)  # NumPy spends a byte on each F4
    assert known.byteorder in "=|<"
    if not dtype.extension:
        capsule = take(np.zeros(2, known), stream=None)
        assert capsule.dtype == dtype.dlpack
        capsule.release()


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES if dtype.torch and dtype.numpy and dtype.code != "F4"], ids=by_code
)
def test_torch_and_numpy_name_the_same_format(dtype: DType) -> None:
    """The same bits are the same values under both names."""
    assert dtype.numpy is not None
    numbers = np.dtype(getattr(ml_dtypes, dtype.numpy) if dtype.extension else dtype.numpy)
    top = 2 if dtype.code == "BOOL" else 256
    raw = np.arange(top, dtype=np.uint8).repeat(dtype.bits // 8)
    tensor = torch.from_numpy(raw).view(getattr(torch, str(dtype.torch)))
    mine = raw.view(numbers)
    if dtype.code == "U64":
        assert tensor.tolist() == mine.tolist()
        return
    wide = torch.complex128 if dtype.code == "C64" else torch.float64
    expected = mine.astype(np.complex128 if dtype.code == "C64" else np.float64)
    np.testing.assert_array_equal(tensor.to(wide).numpy(), expected)


def test_f4_names_in_torch_and_numpy_hold_the_same_codes() -> None:
    """Two elements a byte in torch, the low half first; one a byte in NumPy. The header counts elements."""
    f4 = BY_CODE["F4"]
    assert torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).shape == (4,)
    assert rust_refusal("F4", 8, 4) is None
    assert (f4.dlpack, f4.group, f4.group_bytes) == ((17, 4, 2), 2, 1)


def test_f6_travels_as_bytes() -> None:
    """No framework has four elements in three bytes, so no triple leads to F6."""
    for code in ("F6_E2M3", "F6_E3M2"):
        dtype = BY_CODE[code]
        assert (dtype.dlpack, dtype.torch, dtype.numpy) == (UINT8, None, None)
        assert (dtype.group, dtype.group_bytes) == (4, 3)
    assert dtype_of_dlpack(UINT8) is BY_CODE["U8"]
    assert [code for code, dtype in BY_CODE.items() if dtype_of_dlpack(dtype.dlpack) is not dtype] == [
        "F6_E2M3",
        "F6_E3M2",
    ]


@pytest.mark.parametrize(
    "triple", [(0, 4, 1), (1, 128, 1), (2, 32, 2), (5, 128, 1), (17, 4, 1), (3, 64, 1), (99, 8, 1)]
)
def test_other_triples_name_no_dtype(triple: tuple[int, int, int]) -> None:
    assert dtype_of_dlpack(triple) is None


def test_triples_are_told_apart() -> None:
    triples = [dtype.dlpack for dtype in DTYPES if dtype.code not in ("F6_E2M3", "F6_E3M2")]
    assert len(set(triples)) == len(triples) == 20


def test_floating_dtypes() -> None:
    """What torch calls floating, and the two that it lacks."""
    ours = {dtype.code for dtype in DTYPES if dtype.floating}
    theirs = {dtype.code for dtype in WITH_TORCH if getattr(torch, str(dtype.torch)).is_floating_point}
    assert ours == theirs | {"F6_E2M3", "F6_E3M2"}


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_unsigned_integers_by_width(bits: int) -> None:
    assert uint_of_bits(bits) == BY_CODE[f"U{bits}"].dlpack
