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
SPARSE_SHARE = 0.7
"""A plane with at least this share of zero bytes is stored as where the others are, and these."""
BASE_GAIN = 1 / 128
"""What a base has to bring, of the block's size, for a block to need it."""

WEIGHT_BITS = 32
"""Weights of counts are multiples of one part in 2 to the power of this."""


class Verdict(NamedTuple):
    """``bits`` and ``zeros`` are of each plane: bits per byte (entropy of order 0), and the share of zero bytes."""

    transform: int
    bits: list[float]
    zeros: list[float]


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
    return best


def _sample(data: Bytes, item: int) -> Bytes:
    import numpy as np

    items = data.size // item
    if items <= RUNS * RUN_ITEMS:
        return data
    step = items // RUNS * item
    return np.ascontiguousarray(data[: RUNS * step].reshape(RUNS, step)[:, : RUN_ITEMS * item]).reshape(-1)


def _look(new: Bytes, base: Bytes | None, transform: int, item: int) -> Verdict:
    planes = split(new, base, transform, item)
    items = planes.shape[1]
    bits, zeros = [], []
    for weight, values, none in weigh(planes, _weights(items)):
        # A sample shows fewer values than there are, which makes it look tidier than it is.
        unseen = (values - 1) / (2 * math.log(2) * items)
        bits.append(math.log2(items) - weight / (items << WEIGHT_BITS) + unseen)
        zeros.append(none / items)
    return Verdict(transform, bits, zeros)


@functools.lru_cache(maxsize=16)
def _weights(items: int) -> Any:
    """By count c of a byte: c * log2(c), in whole numbers, whose sums do not depend on their order."""
    import numpy as np

    counts = np.arange(items + 1, dtype=np.float64)
    return np.rint(counts * np.log2(np.maximum(counts, 1)) * (1 << WEIGHT_BITS)).astype(np.int64)
