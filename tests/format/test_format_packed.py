"""The object of a packed image: table and footer."""

from __future__ import annotations

import struct

import pytest
from everstep.errors import Damaged, UnknownFormat, UnsupportedValue
from everstep.format import packed
from everstep.format.constants import FORMAT_VERSION
from everstep.format.hashing import digest

from .damage import assert_all_found

CHUNK = 4096
NBYTES = 2 * CHUNK + 10
ROWS = [(packed.REFERENCE, 0), (packed.XOR, 100), (packed.PLAIN, 10)]
TAIL = packed.encode_tail(NBYTES, CHUNK, ROWS)
STORED = 110 + len(TAIL)


def decode(tail: bytes, nbytes: int = NBYTES, chunk: int = CHUNK, stored: int = STORED) -> packed.Table:
    return packed.decode_tail(tail, nbytes, chunk, stored, "object")


def test_a_table_comes_back() -> None:
    assert len(TAIL) == packed.tail_bytes(NBYTES, CHUNK)
    table = decode(TAIL)
    assert list(table.encodings) == [code for code, _ in ROWS]
    assert [table.span(at, at + 1) for at in range(3)] == [(0, 0), (0, 100), (100, 110)]
    assert table.span(0, 3) == (0, 110) and table.needs_base
    plain = packed.encode_tail(10, CHUNK, [(packed.PLAIN, 10)])
    assert not decode(plain, 10, stored=10 + len(plain)).needs_base


def test_every_damage_is_found() -> None:
    assert_all_found(TAIL, decode, "object")


@pytest.mark.parametrize(
    "rows",
    [
        ROWS[:2],
        [*ROWS, (1, 1)],
        [(0, 1), *ROWS[1:]],
        [(6, 1), *ROWS[1:]],
        [(2, 0), *ROWS[1:]],
        [(2, CHUNK + 1), *ROWS[1:]],
        [(1, CHUNK - 1), *ROWS[1:]],
        [*ROWS[:2], (2, 11)],
    ],
)
def test_tables_that_cannot_be_are_not_written(rows: list[tuple[int, int]]) -> None:
    with pytest.raises(UnsupportedValue):
        packed.encode_tail(NBYTES, CHUNK, rows)


def test_hostile_tables_with_good_hashes_are_refused() -> None:
    def made(codes: list[int], lengths: list[int], **changes: int) -> bytes:
        table = bytes(codes) + struct.pack(f"<{len(lengths)}I", *lengths)
        values = {"version": FORMAT_VERSION, "zero": 0, "chunk": CHUNK, "nbytes": NBYTES, "count": 3}
        values["table"] = len(table)
        values.update(changes)
        footer = struct.pack("<8sIIQQQQ16s", b"EVSTPACK", *values.values(), digest(table))
        return table + footer + digest(footer)

    assert decode(made([0, 4, 1], [0, 100, 10])) == decode(TAIL)
    for tail, error in (
        (made([0, 9, 1], [0, 100, 10]), Damaged),
        (made([0, 4, 1], [0, 2**32 - 1, 10]), Damaged),
        (made([0, 4, 1], [0, 99, 10]), Damaged),
        (made([0, 4, 1], [0, 100, 10], version=FORMAT_VERSION + 1), UnknownFormat),
        (made([0, 4, 1], [0, 100, 10], version=3), UnknownFormat),
        (made([0, 4, 1], [0, 100, 10], zero=1), UnknownFormat),
        (made([0, 4, 1], [0, 100, 10], chunk=2 * CHUNK), Damaged),
        (made([0, 4, 1], [0, 100, 10], nbytes=NBYTES + 1), Damaged),
        (made([0, 4], [0, 100]), Damaged),
    ):
        with pytest.raises(error):
            decode(tail)
    for other in (decode, lambda tail: decode(tail, stored=STORED + 1)):
        with pytest.raises(Damaged):
            other(TAIL[: len(TAIL) // 2] if other is decode else TAIL)
