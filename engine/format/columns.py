"""Packed columns: many small integers as bytes, read back as a list, or without a copy as an array.

A column is one byte, the width in bytes of every value (1, 2, 4 or 8, as small as its largest value allows),
then the values, little-endian and unsigned. A column without values is no bytes at all.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

Array = Any
"""A numpy array. The module is imported where arrays are made, for it is not needed everywhere."""

_CODES = {array(code).itemsize: code for code in "BHIQ"}
"""Width in bytes to the array module's code of it."""

_SWAP = sys.byteorder == "big"


class BadColumn(ValueError):
    """Bytes that are no column, in words."""


def _width_of(largest: int) -> int:
    for width in _CODES:
        if largest < 1 << (8 * width):
            return width
    raise OverflowError(f"{largest} has more than 64 bits")


def pack(values: Sequence[int]) -> bytes:
    """``values`` (0 .. 2^64-1) as a column. Raises OverflowError for others."""
    if not values:
        return b""
    width = _width_of(max(values))
    packed = array(_CODES[width], values)
    if _SWAP:
        packed.byteswap()
    return bytes((width,)) + packed.tobytes()


def pack_array(values: Array) -> bytes:
    """As :func:`pack`, of a flat array of integers that are not negative."""
    if not len(values):
        return b""
    width = _width_of(int(values.max()))
    packed: bytes = values.astype(f"<u{width}").tobytes()
    return bytes((width,)) + packed


def _check(data: bytes) -> int:
    """The width of the column ``data``, which must not be empty."""
    width = data[0]
    if width not in _CODES or (len(data) - 1) % width or len(data) == 1:
        raise BadColumn(f"{len(data)} bytes that begin with {width} are no column")
    return width


def unpack(data: bytes) -> list[int]:
    """The values of a column. Raises BadColumn, also for a wider column than its values need."""
    if not data:
        return []
    width = _check(data)
    unpacked = array(_CODES[width], data[1:])
    if _SWAP:
        unpacked.byteswap()
    if _width_of(max(unpacked)) != width:
        raise BadColumn(f"values of {width} bytes are wider than they need")
    return unpacked.tolist()


def unpack_array(data: bytes) -> Array:
    """The values of a column as a read-only array over ``data``, unsigned, as wide as they are stored. Raises
    BadColumn."""
    import numpy as np

    if not data:
        return np.empty(0, np.uint8)
    width = _check(data)
    return np.frombuffer(data, f"<u{width}", offset=1)
