"""A look at a sample of a block: which transform, and which planes are worth compressing."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from .classes import SHIFTS, Setting, classify, open_bits, window
from .constants import (
    CONTEXTS_MAX,
    FLOAT_CLASSES,
    FLOAT_DIFFERENCE,
    INT_CLASSES,
    INT_DIFFERENCE,
    NONE,
    XOR,
)
from .planes import Bytes, changed, split, weigh
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

CLASS_GAIN = 1 / 100
"""What classes have to save, of the block's size, over the best planes: they take longer to read."""
CLASS_SHARE = 0.9
"""Where classes of floats take less than this share of the planes without the base, or more than these, others are not
looked at: the base tells much, or nothing."""
CLASS_ITEMS_MIN = 1024
"""Fewer items are not worth the weights of their classes, which take about ``WEIGHT_COST`` bits each."""
WEIGHT_COST = 5

CONTEXT_ITEMS = 1024
"""The first and the last context of a block have at least so many of its items."""

SAME_SHARE = 1 / 256
"""Where at most so many items differ, they are stored alone. So they are where up to ``SPARSE_CHANGES`` differ in
runs: where neighbours are unlike each other less than half as often as by chance."""
SPARSE_CHANGES = 0.75
WEIGHT_BITS = 32
"""Weights of counts are multiples of one part in 2 to the power of this."""


class Verdict(NamedTuple):
    """``bits`` and ``zeros`` are of each plane: bits per byte (entropy of order 0), and the share of zero bytes.
    ``setting``: of classes, which have no planes. ``sparse``: whether only the items that differ are worth storing;
    nothing else was looked at then."""

    transform: int
    bits: list[float]
    zeros: list[float]
    setting: Setting | None = None
    sparse: bool = False


def probe(new: Bytes, base: Bytes | None, item: int, kind: Kind) -> Verdict:
    """What to do with a block of whole items. The smallest sum of entropies wins; without the base, where that is
    hardly larger, and in planes, where these are."""
    items = new.size // item
    new = _sample(new, item)
    if base is not None:
        base = _sample(base, item)
        if _is_sparse(new, base, item):
            return Verdict(NONE, [], [], sparse=True)
    best = _look(new, None, NONE, item)
    if base is None:
        return best
    needed = sum(best.bits) - 8 * item * BASE_GAIN
    classes = None
    if kind != "bytes" and items >= CLASS_ITEMS_MIN:
        setting, bits = _class_bits(new, base, _setting(base, item, kind), items)
        classes = Verdict(setting.transform, [], [], setting)
        if kind == "float" and bits < needed * CLASS_SHARE:
            return classes
        if kind == "float" and bits > sum(best.bits):
            return best
    difference = FLOAT_DIFFERENCE if kind == "float" else INT_DIFFERENCE
    for transform in (XOR,) if kind == "bytes" else (XOR, difference):
        verdict = _look(new, base, transform, item)
        if sum(verdict.bits) < needed:
            best, needed = verdict, sum(verdict.bits)
    return classes if classes is not None and bits < needed - 8 * item * CLASS_GAIN else best


def _is_sparse(new: Bytes, base: Bytes, item: int) -> bool:
    map_, count = changed(new, base, item)
    items = new.size // item
    if count <= items * SAME_SHARE:
        return True
    if count > items * SPARSE_CHANGES:
        return False
    # Of neighbours that lie in one byte of the map: seven pairs in each.
    unlike = int(_unlike()[map_].sum())
    return bool(unlike / (7 * map_.size) < count / items * (1 - count / items))


def _setting(base: Bytes, item: int, kind: Kind) -> Setting:
    """Contexts for most of the base's numbers; of whole numbers, whose high bits tell nothing, one."""
    if kind != "float":
        return Setting(INT_CLASSES, item, 0, 0, 1)
    return Setting(FLOAT_CLASSES, item, SHIFTS[item], window(base, item), CONTEXTS_MAX)


def _class_bits(new: Bytes, base: Bytes, setting: Setting, items: int) -> tuple[Setting, float]:
    """Bits per item of a block of ``items``, of which there is a sample; and the setting without the contexts at both
    ends that have few items."""
    found = classify(new, base, setting)
    sampled = int(found.marks.size)
    left, values, contexts = open_bits(found.counts, _weights(sampled))
    unseen = (values - contexts) / (2 * math.log(2))
    bits = (left / (1 << WEIGHT_BITS) + unseen + found.nbits) / sampled + values * WEIGHT_COST / items
    sums: list[int] = found.counts.sum(axis=1).tolist()
    least = min(CONTEXT_ITEMS / items, 1) * sampled
    low, high, below, above = 0, len(sums) - 1, sums[0], sums[-1]
    while below < least and low < high:
        low += 1
        below += sums[low]
    while above < least and high > low:
        high -= 1
        above += sums[high]
    return setting._replace(low=(setting.low + low) % 256, contexts=high - low + 1), bits


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


@functools.lru_cache(maxsize=1)
def _unlike() -> Any:
    """By byte: how many of its seven pairs of neighbouring bits differ."""
    import numpy as np

    return np.array([((byte ^ byte >> 1) & 127).bit_count() for byte in range(256)])
