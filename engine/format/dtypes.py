"""Every dtype that torch has, by name, without torch.

``bits`` is what one element of a plain tensor occupies in torch's own memory: the ``int1`` ... ``uint7``
names are whole bytes there (packing is done by wrappers around them), while ``quint4x2`` and ``quint2x4``
share a byte between elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import UnsupportedValue


class Dtype(NamedTuple):
    """One row of the table. ``safetensors`` is None where that format has no name for the dtype."""

    name: str
    bits: int
    safetensors: str | None


_PACKED_F4 = "float4_e2m1fn_x2"
"""One torch element (a byte) is two of safetensors' F4 elements."""

_NAMED = {
    "bool": (8, "BOOL"),
    "uint8": (8, "U8"),
    "int8": (8, "I8"),
    "uint16": (16, "U16"),
    "int16": (16, "I16"),
    "uint32": (32, "U32"),
    "int32": (32, "I32"),
    "uint64": (64, "U64"),
    "int64": (64, "I64"),
    "float16": (16, "F16"),
    "bfloat16": (16, "BF16"),
    "float32": (32, "F32"),
    "float64": (64, "F64"),
    "complex64": (64, "C64"),
    "float8_e4m3fn": (8, "F8_E4M3"),
    "float8_e4m3fnuz": (8, "F8_E4M3FNUZ"),
    "float8_e5m2": (8, "F8_E5M2"),
    "float8_e5m2fnuz": (8, "F8_E5M2FNUZ"),
    "float8_e8m0fnu": (8, "F8_E8M0"),
    _PACKED_F4: (8, "F4"),
}
_UNNAMED = {
    "complex32": 32,
    "complex128": 128,
    "bits8": 8,
    "bits16": 16,
    "bits1x8": 8,
    "bits2x4": 8,
    "bits4x2": 8,
    "qint8": 8,
    "quint8": 8,
    "qint32": 32,
    "quint4x2": 4,
    "quint2x4": 2,
    **{f"{sign}int{width}": 8 for sign in ("", "u") for width in range(1, 8)},
}

DTYPES: dict[str, Dtype] = {
    **{name: Dtype(name, bits, known) for name, (bits, known) in _NAMED.items()},
    **{name: Dtype(name, bits, None) for name, bits in _UNNAMED.items()},
}


def lookup(dtype: str) -> Dtype:
    """The row of ``dtype``; :class:`UnsupportedValue` if there is none."""
    row = DTYPES.get(dtype)
    if row is None:
        raise UnsupportedValue(
            "this dtype cannot be stored", found=dtype, expected="a dtype of torch", dtype=dtype
        )
    return row


def itemsize_bits(dtype: str) -> int:
    """Bits of one element."""
    return lookup(dtype).bits


def nbytes(dtype: str, count: int) -> int:
    """Bytes of ``count`` elements one behind the other; a last partial byte counts as a whole one."""
    return (lookup(dtype).bits * count + 7) // 8


def header_type(row: Dtype, shape: tuple[int, ...], size: int) -> tuple[str, Sequence[int]]:
    """Dtype and shape under which ``size`` bytes of ``shape`` stand in a safetensors header."""
    if row.name == _PACKED_F4:
        return ("F4", [*shape[:-1], 2 * shape[-1]]) if shape else ("U8", [size])
    if row.safetensors is None:
        return "U8", [size]
    return row.safetensors, shape
