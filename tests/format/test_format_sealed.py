"""Sealed records: every change is found, values come back exactly, a person can read them."""

from __future__ import annotations

import json
import math
import re
import struct
from typing import Any

import numpy
import pytest
import torch
from everstep.errors import Damaged, UnknownFormat, UnsupportedValue
from everstep.format import hashing, plain, sealed
from everstep.format.constants import FORMAT_VERSION
from hypothesis import example, given
from hypothesis import strategies as st

from .damage import assert_all_found

NAME = "checkpoints/000000001/0001/manifest-1.json"
BODY: dict[str, Any] = {
    "step": 12,
    "texts": ["é", "line\nbreak", "~tilde", "~~two", "~nan", ""],
    "numbers": [0, -1, 2**63 - 1, 2**63, -(10**40), 0.1, -0.0, 1e300, math.inf, -math.inf],
    "nested": {"empty": {}, "none": None, "flag": True, "long": ["x" * 60, "y" * 60]},
}


def forge(text: str) -> bytes:
    """``text`` with a proper hash in place of 32 zeros: what a writer with bad intentions would store."""
    data = text.encode("utf-8", "surrogatepass")
    return data.replace(b"0" * 32, hashing.hexdigest(data).encode(), 1)


def head(more: str = "", version: str = "1") -> str:
    return (
        '{\n  "everstep": "thing",\n  "hash": "xxh3-128:'
        + "0" * 32
        + f'",\n  "format": {version}{more}\n}}\n'
    )


def test_every_damage_is_found() -> None:
    data = sealed.seal("thing", BODY)
    assert assert_all_found(data, lambda damaged: sealed.unseal(damaged, "thing", NAME), NAME) > 3000
    assert assert_all_found(data, lambda damaged: sealed.unseal(damaged, None, NAME), NAME) > 3000


@pytest.mark.long
def test_every_value_of_every_byte_is_found() -> None:
    data = sealed.seal("thing", BODY)
    assert_all_found(data, lambda damaged: sealed.unseal(damaged, None, NAME), NAME, tuple(range(1, 256)))


def test_two_swapped_bytes_are_found() -> None:
    data = bytearray(sealed.seal("thing", BODY))
    for at in range(len(data) - 1):
        if data[at] != data[at + 1]:
            swapped = bytes(data[:at]) + bytes([data[at + 1], data[at]]) + bytes(data[at + 2 :])
            with pytest.raises((Damaged, UnknownFormat)):
                sealed.unseal(swapped, "thing", NAME)


def test_a_person_can_read_it() -> None:
    data = sealed.seal(
        "thing", {"step": 7, "name": "Zoë", "ranks": [{"rank": n, "text": "t" * 40} for n in (0, 1, 2)]}
    )
    lines = data.decode().splitlines()
    assert lines[:5] == [
        "{",
        '  "everstep": "thing",',
        f'  "hash": "xxh3-128:{json.loads(data)["hash"][9:]}",',
        f'  "format": {FORMAT_VERSION},',
        '  "step": 7,',
    ]
    assert '  "name": "Zoë",' in lines
    assert '    {"rank": 0, "text": "' + "t" * 40 + '"},' in lines
    assert max(map(len, lines)) <= 100
    assert data.endswith(b"}\n")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.text("~naif:-0", max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(
    st.dictionaries(
        st.text().filter(lambda key: key not in ("everstep", "hash", "format")), VALUES, max_size=5
    )
)
@example({"surrogate": "\ud800", "\udfff": 1})
def test_plain_values_come_back_with_their_types(body: dict[str, Any]) -> None:
    found = sealed.unseal(sealed.seal("thing", body), "thing", NAME)
    assert repr(found) == repr(body)
    assert list(found) == list(body)


@given(st.integers(0, 2**64 - 1))
@example(0x7FF8000000000000)
@example(0xFFF8000000000001)
@example(0x7FF0000000000001)
def test_floats_come_back_bit_for_bit(bits: int) -> None:
    (value,) = struct.unpack(">d", bits.to_bytes(8, "big"))
    data = sealed.seal("thing", {"x": value})
    assert b"NaN" not in data and b"Infinity" not in data
    back = sealed.unseal(data, "thing", NAME)["x"]
    assert type(back) is float
    assert struct.pack(">d", back) == struct.pack(">d", value)


def test_scalars_of_libraries_become_numbers() -> None:
    body = {
        "a": numpy.int64(3),
        "b": numpy.float32(0.5),
        "c": numpy.bool_(True),
        "d": torch.tensor(2.5),
        "e": (1, 2),
        "f": numpy.float64("nan"),
    }
    found = sealed.unseal(sealed.seal("thing", body), "thing", NAME)
    assert math.isnan(found.pop("f"))
    assert repr(found) == "{'a': 3, 'b': 0.5, 'c': True, 'd': 2.5, 'e': [1, 2]}"


def nest(levels: int) -> Any:
    return [nest(levels - 1)] if levels else 1


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"metrics": {"loss": object()}}, "metrics.loss"),
        ({"metrics": [0, {"x": b"bytes"}]}, "metrics[1].x"),
        ({"metrics": {3: 1}}, "metrics[3]"),
        ({"m": {1, 2}}, "m"),
        ({"m": 1j}, "m"),
        ({"m": torch.zeros(2)}, "m"),
        ({"m": numpy.zeros(1)}, "m"),
        ({"m": torch.tensor(1j)}, "m"),
        ({"m": 1 << 100000}, "m"),
        ({"m": nest(40)}, "m" + "[0]" * 31),
        ({"hash": 1}, "hash"),
        ({"format": 1}, "format"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_path(body: dict[str, Any], path: str) -> None:
    with pytest.raises(UnsupportedValue) as caught:
        sealed.seal("thing", body)
    assert caught.value.path.lstrip(".") == path


@pytest.mark.parametrize("kind", ["", "Thing", "a b", "1a", 'x"', "x" * 33])
def test_kinds_are_simple_words(kind: str) -> None:
    with pytest.raises(UnsupportedValue):
        sealed.seal(kind, {})


def test_another_kind_is_not_taken() -> None:
    with pytest.raises(Damaged, match="another kind") as caught:
        sealed.unseal(sealed.seal("thing", {}), "other", NAME)
    assert (caught.value.found, caught.value.expected, caught.value.name) == ("thing", "other", NAME)


def test_another_format_version_says_what_to_do() -> None:
    with pytest.raises(UnknownFormat) as caught:
        sealed.unseal(sealed.seal("thing", {"new": 1}, format=FORMAT_VERSION + 1), "thing", NAME)
    error = caught.value
    assert (error.found, error.expected, error.name) == (
        FORMAT_VERSION + 1,
        f"at most {FORMAT_VERSION}",
        NAME,
    )
    assert error.hint and "release" in error.hint


def test_former_versions_are_read() -> None:
    data = sealed.seal("thing", {"old": 1}, format=1)
    assert sealed.unseal(data, "thing", NAME) == {"old": 1}
    assert sealed.unseal_versioned(data, NAME) == ("thing", 1, {"old": 1})


@given(st.lists(st.integers() | st.text(max_size=60) | st.none() | st.floats(allow_nan=False), max_size=80))
def test_long_lists_of_scalars_are_filled_into_lines(items: list[Any]) -> None:
    data = sealed.seal("thing", {"inside": {"items": items}})
    assert sealed.unseal(data, "thing", NAME) == {"inside": {"items": items}}
    if all(isinstance(item, int) and item < 10**9 for item in items):
        assert len(data.splitlines()) < 12 + len(items) // 5


def test_another_hash_is_another_format() -> None:
    data = sealed.seal("thing", {})
    data = re.sub(rb"xxh3-128:[0-9a-f]+", b"blake3-256:" + b"ab" * 32, data)
    with pytest.raises(UnknownFormat) as caught:
        sealed.unseal(data, "thing", NAME)
    assert (caught.value.found, caught.value.expected) == ("blake3-256", "xxh3-128")


def test_a_changed_name_of_the_hash_is_damage() -> None:
    data = sealed.seal("thing", {}).replace(b"xxh3-128:", b"yxh3-128:")
    with pytest.raises(Damaged, match="the name of the record's hash"):
        sealed.unseal(data, "thing", NAME)


def test_a_changed_version_without_a_new_hash_is_damage() -> None:
    data = sealed.seal("thing", {}).replace(b'"format": %d' % FORMAT_VERSION, b'"format": 1')
    with pytest.raises(Damaged, match="hash is wrong"):
        sealed.unseal(data, "thing", NAME)


HOSTILE = {
    "not json": head(', "x": }'),
    "two objects": head() + "{}",
    "field twice": head(', "x": 1, "x": 2'),
    "kind twice": head(', "everstep": "other"'),
    "nan": head(', "x": NaN'),
    "infinity": head(', "x": -Infinity'),
    "deep": head(', "x": ' + "[" * 100000 + "]" * 100000),
    "deep maps": head(', "x": ' + '{"a":' * 5000 + "1" + "}" * 5000),
    "digits": head(', "x": ' + "9" * 10000),
    "more than 64 bits": head(', "x": ' + "9" * 21),
    "tag": head(', "x": "~what"'),
    "bad nan": head(', "x": "~nan:3ff0000000000000"'),
    "bad nan digits": head(', "x": "~nan:zzzzzzzzzzzzzzzz"'),
    "bad int": head(', "x": "~int:xyz"'),
    "no version": head().replace(',\n  "format": 1', ""),
    "version is true": head(version="true"),
    "version is text": head(version='"1"'),
    "bad utf-8": head(', "x": "\udc80"'),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_records_with_a_good_hash_are_refused(text: str) -> None:
    with pytest.raises((Damaged, UnknownFormat)) as caught:
        sealed.unseal(forge(text), "thing", NAME)
    assert caught.value.name == NAME


def test_the_forger_of_these_tests_forges_well() -> None:
    assert sealed.unseal(forge(head(', "x": [1]')), "thing", NAME) == {"x": [1]}


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_record(data: bytes) -> None:
    with pytest.raises(Damaged) as caught:
        sealed.unseal(data, None, NAME)
    assert caught.value.name == NAME


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sealed.seal("thing", {"x": "y" * 1000})
    monkeypatch.setattr(sealed, "SEALED_BYTES_MAX", 1000)
    with pytest.raises(Damaged, match="too large"):
        sealed.unseal(data, None, NAME)
    with pytest.raises(UnsupportedValue, match="too large"):
        sealed.seal("thing", {"x": "y" * 1000})


def test_plain_text_and_tags_do_not_mix() -> None:
    for text in ("~", "~~", "~inf", "~-inf", "~nan:7ff8000000000000", "~int:ff"):
        assert plain.from_plain(plain.to_plain(text)) == text
