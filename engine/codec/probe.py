"""A look at a sample of a block: which transform, and which planes are worth compressing."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from .constants import FLOAT_DIFFERENCE, INT_DIFFERENCE, NONE, XOR
from .planes import Bytes, split, weigh
from .segments import Kind

RUNS = 8
RUN_ITEMS = 256
"""A sample is so many runs of items, spread over the block; of a shorter block it is the whole."""

NOISE_BITS = 7.75
"""A plane of numbers that needs at least so many bits per byte is noise: stored as it is, untried."""
SPARSE_SHARE = 0.35
"""A plane with at least this share of zero bytes is stored as where the others are, and these."""
BASE_GAIN = 1 / 128
"""What a base has to bring, of the block's size, for a block to need it."""

GROUP_GAIN = 1 / 32
"""What grouping by the upper and the lower half of the exponents has to save of a block, for all to be grouped; by
all exponents it saves about twice as much. It costs as long as compressing, so where noise is most of a number, it is
not worth it."""
GROUPED_ITEMS_MIN = 512
"""A half of fewer items tells nothing."""
WEIGHT_BITS = 32
"""Weights of counts are multiples of one part in 2 to the power of this."""


class Verdict(NamedTuple):
    """``bits`` and ``zeros`` are of each plane: bits per byte (entropy of order 0), and the share of zero bytes.
    ``grouped``: whether to group the items."""

    transform: int
    bits: list[float]
    zeros: list[float]
    grouped: bool = False


def probe(new: Bytes, base: Bytes | None, item: int, kind: Kind) -> Verdict:
    """What to do with a block of whole items. The smallest sum of the planes' entropies wins; without the base, where
    that is hardly larger."""
    new = _sample(new, item)
    best = _look(new, None, NONE, item)
    if base is None:
        return best
    base = _sample(base, item)
    needed = sum(best.bits) - 8 * item * BASE_GAIN
    difference = FLOAT_DIFFERENCE if kind == "float" else INT_DIFFERENCE
    for transform in (XOR,) if kind == "bytes" else (XOR, difference):
        verdict = _look(new, base, transform, item)
        if sum(verdict.bits) < needed:
            best, needed = verdict, sum(verdict.bits)
    if best.transform == FLOAT_DIFFERENCE:
        best = best._replace(grouped=_worth_grouping(new, base, best, item))
    return best


def _worth_grouping(new: Bytes, base: Bytes, verdict: Verdict, item: int) -> bool:
    """Whether the planes that are no noise gain by groups."""
    planes = split(new, base, verdict.transform, item, True)
    half = planes.shape[1] // 2
    tried = [index for index in range(item) if verdict.bits[index] < NOISE_BITS]
    if half < GROUPED_ITEMS_MIN or not tried:
        return False
    halves, _ = _measure(planes[tried, : 2 * half].reshape(2 * len(tried), half))
    gain = sum(verdict.bits[index] for index in tried) - sum(halves) / 2
    return gain >= sum(verdict.bits) * GROUP_GAIN


def _sample(data: Bytes, item: int) -> Bytes:
    import numpy as np

    items = data.size // item
    if items <= RUNS * RUN_ITEMS:
        return data
    step = items // RUNS * item
    return np.ascontiguousarray(data[: RUNS * step].reshape(RUNS, step)[:, : RUN_ITEMS * item]).reshape(-1)


def _look(new: Bytes, base: Bytes | None, transform: int, item: int) -> Verdict:
    return Verdict(transform, *_measure(split(new, base, transform, item)))


def _measure(rows: Bytes) -> tuple[list[float], list[float]]:
    """Bits per byte and share of zeros of each of the rows ``[rows, items]``."""
    items = rows.shape[1]
    bits, zeros = [], []
    for weight, values, none in weigh(rows, _weights(items)):
        # A sample shows fewer values than there are, which makes it look tidier than it is.
        unseen = (values - 1) / (2 * math.log(2) * items)
        bits.append(math.log2(items) - weight / (items << WEIGHT_BITS) + unseen)
        zeros.append(none / items)
    return bits, zeros


@functools.lru_cache(maxsize=16)
def _weights(items: int) -> Any:
    """By count c of a byte: c * log2(c), in whole numbers, whose sums do not depend on their order."""
    import numpy as np

    counts = np.arange(items + 1, dtype=np.float64)
    return np.rint(counts * np.log2(np.maximum(counts, 1)) * (1 << WEIGHT_BITS)).astype(np.int64)
