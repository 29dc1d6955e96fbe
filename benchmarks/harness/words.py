"""Numbers and names as a report writes them."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from typing import Any

NONE = "–"
"""Where something was not measured."""


def plain(text: object) -> str:
    """One line that HTML and SVG can hold: no control characters, no halves of characters."""
    words = "".join(
        " " if one.isspace() else "\ufffd" if unicodedata.category(one) in ("Cc", "Cs", "Cn", "Cf") else one
        for one in str(text)
    )
    return " ".join(words.split())


def short(text: object, limit: int) -> str:
    """At most ``limit`` columns of ``text``, its middle left out: ends tell modes apart. Wide characters count two."""
    words = plain(text)
    if _columns(words) <= limit:
        return words
    room = max(limit - 1, 2)
    tail = ""
    while words and _columns(tail + words[-1]) <= room // 2:
        tail, words = words[-1] + tail, words[:-1]
    head = ""
    while words and _columns(head + words[0]) <= room - _columns(tail):
        head, words = head + words[0], words[1:]
    return f"{head}…{tail}"


def _columns(words: str) -> int:
    return sum(2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in words)


def bounds(samples: Mapping[str, Any] | None) -> tuple[float, float, float] | None:
    """Median, least and greatest seconds, None if one is not a finite number."""
    values = [(samples or {}).get(name) for name in ("median_s", "min_s", "max_s")]
    if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in values):
        return None
    median, low, high = (float(x) for x in values if x is not None)
    return median, low, high


def digits(value: float) -> str:
    """Three digits that count: 0.0512, 1.15, 12.8, 340, 1,234."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else NONE
    value = float(f"{value:.3g}") if abs(value) < 1000 else value
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(places, 6)}f}"


def times(value: float) -> str:
    """A ratio, 1.15 or 12.8; of small ones two digits: 0.039."""
    if 0 < abs(value) < 0.1:
        return f"{value:.{min(1 - math.floor(math.log10(abs(value))), 6)}f}"
    return digits(value)


def decimals(value: float) -> str:
    """A tick of a scale: no more places than it needs."""
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """A time with its unit: 45.2 µs, 70.4 ms, 1.31 s."""
    if value is None or not math.isfinite(value):
        return NONE
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(value) * factor >= 0.9995:
            return f"{digits(value * factor)} {unit}"
    return f"{digits(value * 1e6)} µs"


def size(value: float | None) -> str:
    """Bytes in the largest unit that leaves a whole number before the point."""
    if value is None or not math.isfinite(value):
        return NONE
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(value) >= 0.9995 * factor:
            return f"{digits(value / factor)} {unit}"
    return f"{value:.0f} B"


def rate(value: float | None) -> str:
    """Bytes a second, in powers of ten as disks are sold."""
    if value is None or not math.isfinite(value):
        return NONE
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s")):
        if value >= factor:
            return f"{digits(value / factor)} {unit}"
    return f"{digits(value / 1e3)} kB/s"


__all__ = ["NONE", "bounds", "decimals", "digits", "plain", "rate", "seconds", "short", "size", "times"]
