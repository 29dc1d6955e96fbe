"""Arithmetic in GF(2^8) on blocks of bytes, as Reed-Solomon parity needs it. Pure.

A block is a row of *units*; a unit is eight equal *planes*, and the i-th bits of eight bytes' worth of a symbol lie in
plane i. Multiplying by a constant is then a matrix of bits: each plane of the product is the XOR of some planes of the
factor (Blömer et al. 1995, "An XOR-based erasure-resilient coding scheme"). XOR of long runs is what numpy does at the
speed of memory, without the interpreter lock: 5 to 17 GB/s on one core, where tables of products came to 0.9 GB/s.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

POLYNOMIAL = 0x11D
"""x^8 + x^4 + x^3 + x^2 + 1, of which x generates all elements but 0."""

ORDER = 255
"""Elements other than 0."""

PLANES = 8
UNIT_BYTES_MAX = 1 << 20
"""Largest unit: its planes still lie in a core's cache, and are long enough that a call of numpy does not count."""
UNIT_BYTES_MIN = 64
"""A plane is at least one machine word."""

BLOCKS_MAX = 256
"""Data and parity blocks of one code: each has an element of the field of its own."""

Row = tuple[int, ...]


def unit_of(chunk_bytes: int) -> int:
    """Size of a unit where blocks are made of chunks of ``chunk_bytes`` (a power of two, at least 64)."""
    return min(chunk_bytes, UNIT_BYTES_MAX)


@functools.cache
def _tables() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Powers of x (twice over, so that sums of logarithms need no reduction), and logarithms."""
    powers, logarithms = [0] * (2 * ORDER), [0] * (ORDER + 1)
    value = 1
    for exponent in range(ORDER):
        powers[exponent] = powers[exponent + ORDER] = value
        logarithms[value] = exponent
        value <<= 1
        if value > ORDER:
            value ^= POLYNOMIAL
    return tuple(powers), tuple(logarithms)


def multiply(one: int, other: int) -> int:
    """The product of two elements (0 to 255). Their sum is ``one ^ other``."""
    if not one or not other:
        return 0
    powers, logarithms = _tables()
    return powers[logarithms[one] + logarithms[other]]


def inverse(value: int) -> int:
    """What multiplied by ``value`` is 1. ZeroDivisionError for 0."""
    if not value:
        raise ZeroDivisionError("0 has no inverse")
    powers, logarithms = _tables()
    return powers[ORDER - logarithms[value]]


@functools.cache
def bit_matrix(factor: int) -> tuple[Row, ...]:
    """By plane of ``factor * block`` the planes of the block whose XOR it is."""
    columns = [multiply(factor, 1 << plane) for plane in range(PLANES)]
    return tuple(
        tuple(source for source in range(PLANES) if columns[source] >> plane & 1) for plane in range(PLANES)
    )


def cost(factor: int) -> int:
    """XORs of planes that multiplying one unit by ``factor`` takes."""
    return sum(map(len, bit_matrix(factor)))


def accumulate(target: memoryview, block: memoryview, factor: int, unit: int) -> None:
    """``target ^= factor * block``, in place; flat views of equal length, whole units unless ``factor`` is 0 or 1. The
    interpreter lock is not held for long."""
    import numpy  # here: the agent starts without it

    if len(target) != len(block):
        raise ValueError(f"blocks of {len(target)} and {len(block)} bytes")
    if factor == 1:
        whole = len(target) // 8 * 8
        into = numpy.frombuffer(target[:whole], numpy.uint64)
        numpy.bitwise_xor(into, numpy.frombuffer(block[:whole], numpy.uint64), out=into)
        rest = numpy.frombuffer(target[whole:], numpy.uint8)
        numpy.bitwise_xor(rest, numpy.frombuffer(block[whole:], numpy.uint8), out=rest)
        return
    if factor == 0:
        return
    if unit % UNIT_BYTES_MIN or len(target) % unit:
        raise ValueError(f"{len(target)} bytes are no whole units of {unit}")
    shape = len(target) // unit, PLANES, unit // PLANES // 8
    into = numpy.frombuffer(target, numpy.uint64).reshape(shape)
    given = numpy.frombuffer(block, numpy.uint64).reshape(shape)
    for at in range(shape[0]):  # one unit after the other, so that it stays in the cache
        for plane, sources in enumerate(bit_matrix(factor)):
            for source in sources:
                numpy.bitwise_xor(into[at, plane], given[at, source], out=into[at, plane])


# -- matrices


@functools.cache
def generator(k: int, m: int) -> tuple[Row, ...]:
    """The ``m`` rows of factors by which parity is made of ``k`` data blocks: parity r is the sum of
    ``generator(k, m)[r][i] * data[i]``. The first row is all 1: plain XOR. Every square part of it can be inverted, so
    that any ``m`` of the ``k + m`` blocks may be lost.

    For m = 2 the second row are distinct elements, the cheapest ones (any will do: a 2 by 2 part with a row of 1 is
    singular only where the other row repeats itself). Beyond, a Cauchy matrix 1 / (x + y): all its square parts are
    regular, and stay so when columns and rows are multiplied by anything but 0; columns by what makes the first row
    1, rows by what makes them cheapest. ValueError for what is no code.
    """
    if k < 1 or m < 1 or k + m > BLOCKS_MAX:
        raise ValueError(f"{k} data and {m} parity blocks; 1 or more each, together at most {BLOCKS_MAX}")
    ones = (1,) * k
    if m == 1:
        return (ones,)
    if m == 2 and k <= ORDER:
        return ones, tuple(sorted(range(1, ORDER + 1), key=lambda factor: (cost(factor), factor))[:k])
    rows = [[inverse(y ^ (k + x)) for y in range(k)] for x in range(m)]
    scales = [inverse(value) for value in rows[0]]
    scaled = [[multiply(value, scale) for value, scale in zip(row, scales, strict=True)] for row in rows]
    return (ones, *(_cheapest(row) for row in scaled[1:]))


def _cheapest(row: Sequence[int]) -> Row:
    """A multiple of ``row`` whose factors cost least."""
    choices = [tuple(multiply(value, inverse(by)) for value in row) for by in dict.fromkeys(row)]
    return min(choices, key=lambda choice: (sum(map(cost, choice)), choice))


def invert(matrix: Sequence[Sequence[int]]) -> tuple[Row, ...]:
    """The inverse of a square matrix (Gauss-Jordan). ValueError if it is singular."""
    size = len(matrix)
    rows = [[*row, *(int(at == column) for column in range(size))] for at, row in enumerate(matrix)]
    for column in range(size):
        pivot = next((at for at in range(column, size) if rows[at][column]), None)
        if pivot is None:
            raise ValueError("a singular matrix")
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = inverse(rows[column][column])
        rows[column] = [multiply(value, scale) for value in rows[column]]
        for at in range(size):
            factor = rows[at][column]
            if at != column and factor:
                rows[at] = [
                    value ^ multiply(factor, other)
                    for value, other in zip(rows[at], rows[column], strict=True)
                ]
    return tuple(tuple(row[size:]) for row in rows)


def solve(
    k: int, m: int, missing: Sequence[int], rows: Sequence[int], wanted: int
) -> tuple[dict[int, int], dict[int, int]]:
    """Data block ``wanted`` as a sum of others: factors by parity row, and factors by data column.

    ``missing`` are the data columns that are not used, ``wanted`` among them; ``rows`` as many parity rows. Factors of
    0 are left out."""
    if len(rows) != len(missing) or wanted not in missing:
        raise ValueError(f"column {wanted} of the missing ones {missing} from rows {rows}")
    factors = generator(k, m)
    inverted = invert([[factors[row][column] for column in missing] for row in rows])
    by_row = dict(zip(rows, inverted[list(missing).index(wanted)], strict=True))
    by_column: dict[int, int] = {}
    for column in set(range(k)) - set(missing):
        value = 0
        for row, factor in by_row.items():
            value ^= multiply(factor, factors[row][column])
        by_column[column] = value
    return {row: f for row, f in by_row.items() if f}, {column: f for column, f in by_column.items() if f}
