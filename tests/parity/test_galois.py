"""Arithmetic in GF(2^8): a field, a code of which every square part can be inverted, and blocks that follow it."""

from __future__ import annotations

import itertools
import random

import pytest
from everstep.plan import galois


def slow_product(one: int, other: int) -> int:
    """By shift and add, as the field is defined."""
    product = 0
    for bit in range(8):
        if other >> bit & 1:
            product ^= one << bit
    for bit in range(14, 7, -1):
        if product >> bit & 1:
            product ^= galois.POLYNOMIAL << (bit - 8)
    return product


def test_products_are_those_of_the_field() -> None:
    for one in range(256):
        for other in range(256):
            assert galois.multiply(one, other) == slow_product(one, other), (one, other)


def test_every_element_but_zero_has_an_inverse() -> None:
    for value in range(1, 256):
        assert galois.multiply(value, galois.inverse(value)) == 1
    with pytest.raises(ZeroDivisionError):
        galois.inverse(0)


def in_planes(symbols: bytes) -> bytearray:
    """One unit whose symbols, bit by bit across its planes, are ``symbols``."""
    unit = bytearray(len(symbols))
    plane_bits = len(symbols)  # symbols of 8 bits in len(symbols) bytes: so many bits per plane
    for index, symbol in enumerate(symbols):
        for plane in range(8):
            if symbol >> plane & 1:
                bit = plane * plane_bits + index
                unit[bit // 8] |= 1 << bit % 8
    return unit


@pytest.mark.parametrize("factor", [0, 1, 2, 0x1D, 0x53, 0x8E, 0xFF])
def test_accumulating_multiplies_every_symbol(factor: int) -> None:
    source = random.Random(factor)
    data, before = source.randbytes(64), source.randbytes(64)
    target = in_planes(before)
    galois.accumulate(memoryview(target), memoryview(in_planes(data)), factor, 64)
    assert target == in_planes(bytes(b ^ slow_product(factor, d) for b, d in zip(before, data, strict=True)))


def test_units_are_alike_whatever_their_number() -> None:
    source = random.Random(5)
    data = source.randbytes(3 * 512)
    whole = bytearray(3 * 512)
    galois.accumulate(memoryview(whole), memoryview(data), 0x47, 512)
    for at in range(0, len(data), 512):
        one = bytearray(512)
        galois.accumulate(memoryview(one), memoryview(data)[at : at + 512], 0x47, 512)
        assert whole[at : at + 512] == one


def test_plain_xor_takes_any_length_and_others_whole_units() -> None:
    target = bytearray(b"abcdefghijk")
    galois.accumulate(memoryview(target), memoryview(b"\x01" * 11), 1, 64)
    assert target == bytes(b ^ 1 for b in b"abcdefghijk")
    with pytest.raises(ValueError, match="whole units"):
        galois.accumulate(memoryview(target), memoryview(b"\x01" * 11), 2, 64)
    with pytest.raises(ValueError, match="11 and 10"):
        galois.accumulate(memoryview(target), memoryview(b"\x01" * 10), 1, 64)


def test_one_parity_block_is_plain_xor_and_two_are_cheap() -> None:
    assert galois.generator(31, 1) == ((1,) * 31,)
    for m in range(2, 6):
        assert galois.generator(8, m)[0] == (1,) * 8
    _, second = galois.generator(6, 2)
    assert len(set(second)) == 6 and max(map(galois.cost, second)) < 20, "elements cost 32 on average"


def regular(matrix: list[list[int]]) -> bool:
    try:
        inverted = galois.invert(matrix)
    except ValueError:
        return False
    size = range(len(matrix))
    for row, column in itertools.product(size, size):
        total = 0
        for at in size:
            total ^= galois.multiply(matrix[row][at], inverted[at][column])
        assert total == (row == column)
    return True


@pytest.mark.parametrize("m", range(1, 6))
def test_every_square_part_of_small_codes_can_be_inverted(m: int) -> None:
    for k in range(1, 9):
        code = galois.generator(k, m)
        for size in range(1, min(k, m) + 1):
            for rows in itertools.combinations(range(m), size):
                for columns in itertools.combinations(range(k), size):
                    assert regular([[code[r][c] for c in columns] for r in rows]), (k, m, rows, columns)


def test_every_pair_of_two_rows_can_be_inverted() -> None:
    for k in range(1, 62):
        code = galois.generator(k, 2)
        for columns in itertools.combinations(range(k), 2):
            assert regular([[code[r][c] for c in columns] for r in range(2)]), (k, columns)


def test_square_parts_of_large_codes_can_be_inverted() -> None:
    """All groups of up to 63 nodes (31 more than can be asked for, which uneven numbers of nodes lead to)."""
    seed = random.randrange(1 << 30)
    source = random.Random(seed)
    for m in range(3, 32):
        for k in {1, 2, 32 - m, 63 - m, source.randint(1, 63 - m)}:
            code = galois.generator(k, m)
            assert all(all(row) for row in code)
            for _ in range(3):
                size = source.randint(1, min(k, m))
                rows, columns = source.sample(range(m), size), source.sample(range(k), size)
                assert regular([[code[r][c] for c in columns] for r in rows]), (seed, k, m, rows, columns)


def test_a_singular_matrix_is_told() -> None:
    assert not regular([[1, 2], [1, 2]])


@pytest.mark.parametrize(("k", "m"), [(0, 1), (1, 0), (255, 2)])
def test_impossible_codes_are_refused(k: int, m: int) -> None:
    with pytest.raises(ValueError, match="data and"):
        galois.generator(k, m)


@pytest.mark.parametrize(("k", "m"), [(2, 1), (4, 2), (3, 3), (6, 2), (2, 4)])
def test_any_lost_data_blocks_follow_from_any_parity(k: int, m: int) -> None:
    source = random.Random(k * 100 + m)
    unit = 64
    data = [source.randbytes(2 * unit) for _ in range(k)]
    parity = []
    for row in galois.generator(k, m):
        block = bytearray(2 * unit)
        for factor, one in zip(row, data, strict=True):
            galois.accumulate(memoryview(block), memoryview(one), factor, unit)
        parity.append(bytes(block))
    for size in range(1, min(k, m) + 1):
        for missing in itertools.combinations(range(k), size):
            for rows in itertools.combinations(range(m), size):
                for wanted in missing:
                    by_row, by_column = galois.solve(k, m, missing, rows, wanted)
                    assert not set(by_column) & set(missing)
                    found = bytearray(2 * unit)
                    for at, factor in by_row.items():
                        galois.accumulate(memoryview(found), memoryview(parity[at]), factor, unit)
                    for at, factor in by_column.items():
                        galois.accumulate(memoryview(found), memoryview(data[at]), factor, unit)
                    assert found == data[wanted], (missing, rows, wanted)


def test_solving_needs_as_many_rows_as_columns_are_missing() -> None:
    with pytest.raises(ValueError, match="missing"):
        galois.solve(4, 2, [0, 1], [0], 0)
    with pytest.raises(ValueError, match="missing"):
        galois.solve(4, 2, [0], [0], 1)
