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
MIB = UNITS_BYTES["MiB"]
SIZE_MAX = 1 << 40
"""Bytes of the largest state that is measured."""


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
    found = _bytes(text, "")
    if found is None or found <= 0:
        raise click.BadParameter(f"{text!r} is no rate such as 200MiB, 1GB or 1000000 (bytes per second)")
    return found


def mebibytes(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """Whole MiB, at least one and at most a TiB, from "512", "512MiB" or "2GiB"."""
    if text is None:
        return None
    found = _bytes(text, "MiB")
    if found is None or found % MIB or not MIB <= found <= SIZE_MAX:
        raise click.BadParameter(
            f"{text!r} is no size such as 512, 512MiB or 2GiB: whole MiB, at most 1024GiB"
        )
    return int(found) // MIB


def _bytes(text: str, unit: str) -> float | None:
    """Bytes, from a number and one of :data:`UNITS_BYTES`, without one in ``unit``; None from anything else."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]i?B|)", text)
    return None if found is None else float(found[1]) * UNITS_BYTES[found[2] or unit]


def share(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """A share of 1, from "5%" or "0.05"."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(%?)", text)
    value = 0.0 if found is None else float(found[1]) / (100 if found[2] else 1)
    if not 0 < value <= 1:
        raise click.BadParameter(f"{text!r} is no share such as 5% or 0.05")
    return value
