"""Plain values (None, bool, int, float, str, lists and maps of them) as JSON can hold them, exactly.

JSON has no NaN, no infinity, and readers disagree on integers over 64 bits; these are written as texts that
begin with ``~``. A real text that begins with ``~`` gets another ``~`` in front.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from ..errors import UnsupportedValue
from .constants import DEPTH_MAX

_TAG = "~"
_SPECIAL = {"~inf": math.inf, "~-inf": -math.inf}
_NAN = "~nan:"
_INT = "~int:"
_INT_MAX = (1 << 63) - 1
_INT_DIGITS_MAX = 4096
"""Longest hexadecimal form of a large integer."""


def to_plain(value: Any, path: str = "") -> Any:
    """``value`` with everything that JSON lacks replaced by tagged texts; tuples become lists, scalars of
    numpy and torch become numbers.

    Raises :class:`UnsupportedValue` whose ``path`` names what cannot be stored.
    """
    return _to_plain(value, path, 0)


def _to_plain(value: Any, path: str, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = str.__str__(value)
        return _TAG + text if text.startswith(_TAG) else text
    if isinstance(value, int):
        return _int(int(value), path)
    if isinstance(value, float):
        return _float(float(value))
    if depth >= DEPTH_MAX:
        raise UnsupportedValue(
            "values are nested too deep", path=path, expected=f"at most {DEPTH_MAX} levels"
        )
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise UnsupportedValue(
                    "a map needs texts as keys", path=f"{path}[{key!r}]", found=type(key).__name__
                )
        return {str.__str__(key): _to_plain(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    if getattr(value, "shape", None) == () and hasattr(value, "dtype") and hasattr(value, "item"):
        number = value.item()
        if number is None or isinstance(number, (bool, int, float, str)):
            return _to_plain(number, path, depth)
    raise UnsupportedValue(
        "this value cannot stand in a record",
        path=path,
        found=type(value).__name__,
        expected="None, bool, int, float, str, or lists and maps of them",
    )


def _int(value: int, path: str) -> int | str:
    if -_INT_MAX <= value <= _INT_MAX:
        return value
    text = f"{_INT}{value:x}"
    if len(text) > _INT_DIGITS_MAX:
        raise UnsupportedValue(
            "this integer is too large for a record", path=path, found=f"{value.bit_length()} bits"
        )
    return text


def _float(value: float) -> float | str:
    if math.isnan(value):
        return _NAN + struct.pack(">d", value).hex()
    if math.isinf(value):
        return "~inf" if value > 0 else "~-inf"
    return value


def from_plain(value: Any) -> Any:
    """What :func:`to_plain` was given (lists for tuples). Raises ValueError for an unknown tag."""
    if isinstance(value, str):
        return _from_text(value) if value.startswith(_TAG) else value
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: from_plain(item) for key, item in value.items()}
    return value


def _from_text(text: str) -> Any:
    if text.startswith(_TAG * 2):
        return text[1:]
    if text in _SPECIAL:
        return _SPECIAL[text]
    if text.startswith(_NAN) and len(text) == len(_NAN) + 16:
        value = struct.unpack(">d", bytes.fromhex(text[len(_NAN) :]))[0]
        if math.isnan(value):
            return value
    if text.startswith(_INT) and len(text) <= _INT_DIGITS_MAX:
        return int(text[len(_INT) :], 16)
    raise ValueError(f"unknown tag {text[:20]!r}")
