"""What changed between two states of a tensor's bytes, in numbers. Only numpy, and only inside the functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PLAIN = {
    "bool": "u1",
    "uint8": "u1",
    "int8": "i1",
    "uint16": "u2",
    "int16": "i2",
    "uint32": "u4",
    "int32": "i4",
    "uint64": "u8",
    "int64": "i8",
    "float16": "f2",
    "float32": "f4",
    "float64": "f8",
    "complex64": "c8",
    "complex128": "c16",
    "qint8": "i1",
    "quint8": "u1",
    "qint32": "i4",
    **{f"{sign}int{width}": f"{sign[:1] or 'i'}1" for sign in ("", "u") for width in range(1, 8)},
}
"""Numpy's codes of the dtypes that it knows, little-endian."""

_FLOAT8 = {
    "float8_e4m3fn": (4, 7, False),
    "float8_e4m3fnuz": (4, 8, True),
    "float8_e5m2": (5, 15, False),
    "float8_e5m2fnuz": (5, 16, True),
}
"""Bits of the exponent, its bias, and whether the only special value is the negative zero (NaN)."""

BLOCK = 1 << 18
"""Elements that are converted at a time: a few MiB of working memory, whatever the size."""


@dataclass(slots=True)
class Change:
    """Of one tensor: ``elements`` in all, ``changed`` of them whose bytes differ, ``changed_bytes`` that differ of
    ``nbytes``. Of the values: ``max_abs``, the largest absolute difference, ``norm``, the Euclidean norm of the
    differences, ``before_norm``, that of the values before, all over elements that are finite in both; NaNs before and
    after. ``numeric`` is False where the dtype has no numbers to compare; those are 0 then."""

    elements: int = 0
    changed: int = 0
    nbytes: int = 0
    changed_bytes: int = 0
    numeric: bool = True
    max_abs: float = 0.0
    squares: float = 0.0
    before_squares: float = 0.0
    nans_before: int = 0
    nans_after: int = 0

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares)

    @property
    def before_norm(self) -> float:
        return math.sqrt(self.before_squares)

    @property
    def relative_norm(self) -> float | None:
        """The norm of the differences over that of the values before; None where that is 0."""
        return self.norm / self.before_norm if self.before_squares else None

    @property
    def changed_fraction(self) -> float:
        """Of the bytes."""
        return self.changed_bytes / self.nbytes if self.nbytes else 0.0


def is_numeric(dtype: str) -> bool:
    """Whether :func:`compare` has numbers to compare."""
    return dtype in _PLAIN or dtype in _FLOAT8 or dtype == "bfloat16"


def count_same(change: Change, nbytes: int, bits: int) -> None:
    """Add ``nbytes`` of elements of ``bits`` bits that are known to be equal, unread."""
    change.nbytes += nbytes
    change.elements += nbytes * 8 // bits


def compare(change: Change, dtype: str, bits: int, before: memoryview, after: memoryview) -> None:
    """Add what differs between ``before`` and ``after``: the same elements of one tensor of ``dtype``, whose elements
    have ``bits`` bits (whole bytes, or fewer: then they are compared as bytes)."""
    import numpy as np

    item = max(bits // 8, 1)
    old, new = np.frombuffer(before, np.uint8), np.frombuffer(after, np.uint8)
    change.nbytes += len(old)
    change.elements += len(old) * 8 // bits
    values = _values_of(dtype)
    change.numeric = values is not None
    for at in range(0, len(old), BLOCK * item):
        was, now = old[at : at + BLOCK * item], new[at : at + BLOCK * item]
        differs = was != now
        changed_bytes = int(np.count_nonzero(differs))
        change.changed_bytes += changed_bytes
        if item > 1:
            change.changed += int(np.count_nonzero(differs.reshape(-1, item).any(axis=1)))
        else:
            change.changed += changed_bytes
        if values is not None:
            _numbers(change, values(was), values(now) if changed_bytes else None)


def _numbers(change: Change, was: Any, now: Any | None) -> None:
    """The numbers of one block; ``now`` is None where nothing differs."""
    import numpy as np

    with np.errstate(all="ignore"):
        finite_before = np.isfinite(was)
        nans = int(np.count_nonzero(np.isnan(was)))
        change.nans_before += nans
        change.before_squares += float(np.sum(np.square(np.abs(was[finite_before]))))
        if now is None:
            change.nans_after += nans
            return
        change.nans_after += int(np.count_nonzero(np.isnan(now)))
        both = finite_before & np.isfinite(now)
        apart = np.abs(now[both] - was[both])
        if len(apart):
            change.max_abs = max(change.max_abs, float(apart.max()))
            change.squares += float(np.sum(np.square(apart)))


def _values_of(dtype: str) -> Callable[[Any], Any] | None:
    """Gives bytes of ``dtype`` as float64 (or complex128); None where they are no numbers."""
    import numpy as np

    if dtype == "bfloat16":
        return lambda raw: (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype in _FLOAT8:
        table = np.array([_float8(code, *_FLOAT8[dtype]) for code in range(256)])
        return lambda raw: table[raw]
    code = _PLAIN.get(dtype)
    if code is None:
        return None
    wide = np.complex128 if code.startswith("c") else np.float64
    return lambda raw: raw.view("<" + code).astype(wide)


def _float8(code: int, exponent_bits: int, bias: int, one_nan: bool) -> float:
    """The value of a float8 (Micikevicius et al. 2022, "FP8 formats for deep learning"; the fnuz kinds have neither
    infinities nor a negative zero, whose code is their NaN)."""
    mantissa_bits = 7 - exponent_bits
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & ((1 << mantissa_bits) - 1)
    if one_nan:
        if code == 0x80:
            return math.nan
    elif exponent_bits == 5 and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    elif exponent_bits == 4 and code & 0x7F == 0x7F:
        return math.nan
    scale = 1 << mantissa_bits
    if exponent == 0:
        return sign * mantissa / scale * 2.0 ** (1 - bias)
    return sign * (1 + mantissa / scale) * 2.0 ** (exponent - bias)
