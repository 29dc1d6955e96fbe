"""The beacon's record and its name."""

from __future__ import annotations

import dataclasses

import pytest
from everstep.errors import Damaged, UnknownFormat, UnsupportedValue
from everstep.format import names
from everstep.format.beacon import Beacon, BeaconRank, decode_beacon, encode_beacon
from everstep.format.sealed import seal

from tests.format.damage import assert_all_found

NAME = names.beacon("0123456789abcdef")
RANK = BeaconRank(1, 4242, 777, True, 12, 0.5, 1.25, 2.0, 11, None)
BEACON = Beacon("n0", "host", "boot", 99, 88, 7, 5.0, 20.0, 3, 2, (RANK,), None, 10, 60.5, 1)


def test_it_comes_back() -> None:
    assert decode_beacon(encode_beacon(BEACON), NAME) == BEACON
    silent = dataclasses.replace(
        BEACON, ranks=(dataclasses.replace(RANK, step=None, alive=False),), durable=None, durable_age_s=None
    )
    assert decode_beacon(encode_beacon(silent), NAME) == silent
    assert (silent.living, BEACON.living) == ((), (RANK,))


def test_every_damage_is_found() -> None:
    assert_all_found(encode_beacon(BEACON), lambda data: decode_beacon(data, NAME), NAME, (0x01, 0x20))


def test_fields_that_are_not_known_or_out_of_range_are_refused() -> None:
    with pytest.raises(UnsupportedValue, match="rank is 5"):
        encode_beacon(dataclasses.replace(BEACON, ranks=(dataclasses.replace(RANK, rank=5),)))
    with pytest.raises(UnsupportedValue, match="interval_s"):
        encode_beacon(dataclasses.replace(BEACON, interval_s=0.0))
    with pytest.raises(UnknownFormat, match="mood"):
        decode_beacon(seal("beacon", {"mood": "good"}), NAME)
    with pytest.raises(Damaged):
        decode_beacon(seal("run", {}), NAME)


@pytest.mark.parametrize("key", ["0123456789abcdef", "0123456789abcdef-00003", "a/b", ""])
def test_its_name_parses(key: str) -> None:
    parsed = names.parse(names.beacon(key))
    assert parsed is not None and (parsed.kind, parsed.writer) == (names.Kind.BEACON, key)


@pytest.mark.parametrize("name", ["live/a.b.json", "live/.json", "live/a", "live/a/b.json", "life/a.json"])
def test_foreign_names_do_not(name: str) -> None:
    assert names.parse(name) is None
