"""Pins: what they say, and that a byte that is not as written is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from everstep.errors import Damaged, UnsupportedValue
from everstep.format import names
from everstep.format.pin import Pin, decode_pin, encode_pin

from .damage import damages

ID = names.pin_id(500, 3, "5f0c9a1e")
PIN = Pin(ID, 500, 3, "paper's figure 2", "ann@host", "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z")


def test_round_trip() -> None:
    for pin in (PIN, replace(PIN, expires=None, reason="")):
        assert decode_pin(encode_pin(pin), names.pin(ID)) == pin
    assert PIN.key == (3, 500)


def test_names() -> None:
    assert names.pin(ID) == "pins/000000500-0003-5f0c9a1e.json"
    parsed = names.parse(names.pin(ID))
    assert parsed == names.Parsed(names.Kind.PIN, step=500, incarnation=3, text="5f0c9a1e")
    for bad in (
        "500-0003-5f0c9a1e",
        "000000500-0003-5F0C9A1E",
        "000000500-0003",
        "000000500-0003-5f0c9a1e-x",
        "a",
    ):
        assert names.parse(f"pins/{bad}.json") is None
        with pytest.raises(ValueError, match="no pin's id"):
            names.pin(bad)


def test_every_change_is_damage() -> None:
    for what, data in damages(encode_pin(PIN)):
        with pytest.raises(Damaged):
            decode_pin(data, names.pin(ID))
            raise AssertionError(what)


def test_a_pin_says_what_its_name_says() -> None:
    with pytest.raises(Damaged, match="the record breaks a rule"):
        decode_pin(encode_pin(PIN), names.pin(names.pin_id(500, 3, "00000000")))
    for bad in (replace(PIN, step=501), replace(PIN, id="x"), replace(PIN, expires="tomorrow")):
        with pytest.raises(UnsupportedValue):
            encode_pin(bad)
