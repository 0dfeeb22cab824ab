"""The 22 dtypes of the safetensors format: their sizes, their DLPack triples and their names elsewhere. Pure data.

A dtype's name in a header is its *code* (``"BF16"``). Sizes follow the Rust library (``safetensors::Dtype::bitsize``);
DLPack triples follow ``dlpack.h`` 1.3 (``DLDataTypeCode``, bits, lanes). F4 travels as torch's ``float4_e2m1fn_x2``
does: two elements a byte, so the triple has two lanes and the last dimension is halved. F6 has no framework type that
keeps its four elements in three bytes: its bytes are handed out as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from types import MappingProxyType

__all__ = ["BITS", "BY_CODE", "DTYPES", "UINT8", "DLDataType", "DType", "dtype_of_dlpack", "uint_of_bits"]

DLDataType = tuple[int, int, int]
"""DLPack's ``(code, bits, lanes)``."""

UINT8: DLDataType = (1, 8, 1)


@dataclass(frozen=True, slots=True)
class DType:
    """One dtype of the format."""

    code: str
    """Its name in a header."""
    bits: int
    """Bits an element, as stored."""
    dlpack: DLDataType
    """The DLPack triple of a destination that holds it."""
    torch: str | None
    """Attribute of ``torch``, or None where torch has no such dtype (its bytes are handed out as uint8)."""
    numpy: str | None
    """Name of the NumPy dtype: NumPy's own, or ml_dtypes' when ``extension`` is set."""
    extension: bool = False
    """Whether the NumPy dtype comes from ml_dtypes."""

    @property
    def floating(self) -> bool:
        """Whether it is a real floating-point type: the ones that a cast may go between."""
        return self.code.startswith(("F", "BF"))

    @property
    def group(self) -> int:
        """Elements in the smallest run that ends on a byte: 1, or 2 for F4 and 4 for F6."""
        return 8 // gcd(self.bits, 8)

    @property
    def group_bytes(self) -> int:
        """Bytes of that run: the unit in which the format can be cut."""
        return self.bits * self.group // 8


DTYPES: tuple[DType, ...] = (
    DType("BOOL", 8, (6, 8, 1), "bool", "bool"),
    DType("F4", 4, (17, 4, 2), "float4_e2m1fn_x2", "float4_e2m1fn", True),
    DType("F6_E2M3", 6, UINT8, None, None),
    DType("F6_E3M2", 6, UINT8, None, None),
    DType("U8", 8, UINT8, "uint8", "uint8"),
    DType("I8", 8, (0, 8, 1), "int8", "int8"),
    DType("F8_E5M2", 8, (12, 8, 1), "float8_e5m2", "float8_e5m2", True),
    DType("F8_E4M3", 8, (10, 8, 1), "float8_e4m3fn", "float8_e4m3fn", True),
    DType("F8_E8M0", 8, (14, 8, 1), "float8_e8m0fnu", "float8_e8m0fnu", True),
    DType("F8_E4M3FNUZ", 8, (11, 8, 1), "float8_e4m3fnuz", "float8_e4m3fnuz", True),
    DType("F8_E5M2FNUZ", 8, (13, 8, 1), "float8_e5m2fnuz", "float8_e5m2fnuz", True),
    DType("I16", 16, (0, 16, 1), "int16", "int16"),
    DType("U16", 16, (1, 16, 1), "uint16", "uint16"),
    DType("F16", 16, (2, 16, 1), "float16", "float16"),
    DType("BF16", 16, (4, 16, 1), "bfloat16", "bfloat16", True),
    DType("I32", 32, (0, 32, 1), "int32", "int32"),
    DType("U32", 32, (1, 32, 1), "uint32", "uint32"),
    DType("F32", 32, (2, 32, 1), "float32", "float32"),
    DType("C64", 64, (5, 64, 1), "complex64", "complex64"),
    DType("F64", 64, (2, 64, 1), "float64", "float64"),
    DType("I64", 64, (0, 64, 1), "int64", "int64"),
    DType("U64", 64, (1, 64, 1), "uint64", "uint64"),
)
"""Every dtype, in the order of the Rust enum."""

BY_CODE: Mapping[str, DType] = MappingProxyType({dtype.code: dtype for dtype in DTYPES})
BITS: Mapping[str, int] = MappingProxyType({dtype.code: dtype.bits for dtype in DTYPES})
_BY_DLPACK: Mapping[DLDataType, DType] = MappingProxyType(
    {dtype.dlpack: dtype for dtype in DTYPES if not dtype.code.startswith("F6_")}
)


def dtype_of_dlpack(triple: DLDataType) -> DType | None:
    """Return the dtype that a DLPack triple names, or None (a dtype that the format does not have)."""
    return _BY_DLPACK.get(triple)


def uint_of_bits(bits: int) -> DLDataType:
    """Return the triple of the unsigned integer of that width: how bits travel where a framework lacks the dtype."""
    return (1, bits, 1)
