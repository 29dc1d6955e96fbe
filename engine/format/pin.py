"""A pin: a small sealed record which says that a checkpoint is not to be removed. No part of any checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from . import names
from .constants import TIME_FORMAT
from .sealed import seal, unseal
from .typed import build, decoding, encoding, fields, need

_PIN = "pin"

PIN_BYTES_MAX = 1 << 16
"""No pin is larger."""


@dataclass(frozen=True, slots=True)
class Pin:
    """``step`` of ``incarnation`` stays until ``expires`` (None: until the pin is removed). ``reason`` and ``who`` are
    for people. The id names step and incarnation, so that a damaged pin still holds."""

    id: str
    step: int
    incarnation: int
    reason: str
    who: str
    created: str
    expires: str | None

    @property
    def key(self) -> tuple[int, int]:
        """(incarnation, step)"""
        return self.incarnation, self.step


def encode_pin(pin: Pin) -> bytes:
    """The bytes of ``pins/ID.json``. Raises UnsupportedValue."""
    encoding(names.PINS, lambda: _check(pin))
    return seal(_PIN, fields(pin))


def decode_pin(data: bytes, name: str) -> Pin:
    """The pin in ``data``; its id must be the one in ``name``. Raises Damaged or UnknownFormat."""
    body = unseal(data, _PIN, name)

    def make() -> Pin:
        pin = build(Pin, body)
        _check(pin)
        need(names.pin(pin.id) == name, f"the pin is {pin.id}, by the name another one")
        return pin

    return decoding(name, make)


def _check(pin: Pin) -> None:
    parsed = names.parse(f"{names.PINS}/{pin.id}.json")
    need(parsed is not None and parsed.kind is names.Kind.PIN, f"id is {pin.id!r}, no pin's")
    here = (pin.step, pin.incarnation)
    there = (parsed.step, parsed.incarnation) if parsed is not None else None
    need(here == there, f"step and incarnation are {here}, by the id {there}")
    if pin.expires is not None:
        try:
            datetime.strptime(pin.expires, TIME_FORMAT)
        except ValueError:
            need(False, f"expires is {pin.expires!r}, no time such as 2026-01-01T00:00:00Z")
