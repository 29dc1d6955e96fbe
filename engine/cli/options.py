"""Values of options that several commands read alike."""

from __future__ import annotations

import re

import click

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
UNITS_BYTES = {
    "": 1,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
}


def duration(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """Seconds, from "90s", "30m", "1h", "2d"."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no duration such as 90s, 30m, 1h or 2d")
    return float(found[1]) * UNITS_S[found[2]]


def period(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """As :func:`duration`, above 0."""
    found = duration(ctx, param, text)
    if found == 0:
        raise click.BadParameter(f"{text!r} is no time at all")
    return found


def rate(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """Bytes (per second), from "200MiB", "1GB" or "1000000"."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]i?B|)", text)
    if found is None or float(found[1]) <= 0:
        raise click.BadParameter(f"{text!r} is no rate such as 200MiB, 1GB or 1000000 (bytes per second)")
    return float(found[1]) * UNITS_BYTES[found[2]]


def share(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """A share of 1, from "5%" or "0.05"."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(%?)", text)
    value = 0.0 if found is None else float(found[1]) / (100 if found[2] else 1)
    if not 0 < value <= 1:
        raise click.BadParameter(f"{text!r} is no share such as 5% or 0.05")
    return value
