"""A look at a sample of a block: which transform, and which planes are worth compressing."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from . import planes
from .classes import SHIFTS, Counted, Setting, count
from .constants import (
    CONTEXTS_MAX,
    FLOAT_CLASSES,
    FLOAT_DIFFERENCE,
    INT_CLASSES,
    INT_DIFFERENCE,
    NONE,
    XOR,
)
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


class _Look(NamedTuple):
    """At a sample of so many items: how many are not the base's, how many neighbours are unlike each other in that,
    :func:`weigh` of the planes, and what classes come to."""

    items: int
    changed: int
    unlike: int
    rows: list[tuple[int, int, int]]
    classes: Counted | None


def probe(new: Bytes, base: Bytes | None, item: int, kind: Kind) -> Verdict:
    """What to do with a block of whole items. The smallest sum of entropies wins; without the base, where that is
    hardly larger, and in planes, where these are."""
    items = new.size // item
    if base is None:
        return _planes(_sample(new, item), None, NONE, item)
    setting = _setting(item, kind) if kind != "bytes" and items >= CLASS_ITEMS_MIN else None
    found = _look(new, base, item, setting)
    if _is_sparse(found):
        return Verdict(NONE, [], [], sparse=True)
    best = Verdict(NONE, *_measured(found.rows, found.items))
    needed = sum(best.bits) - 8 * item * BASE_GAIN
    classes = None
    if setting is not None and found.classes is not None:
        setting, bits = _class_bits(found.classes, setting, found.items, items)
        classes = Verdict(setting.transform, [], [], setting)
        if kind == "float" and bits < needed * CLASS_SHARE:
            return classes
        if kind == "float" and bits > sum(best.bits):
            return best
    new, base = _sample(new, item), _sample(base, item)
    difference = FLOAT_DIFFERENCE if kind == "float" else INT_DIFFERENCE
    for transform in (XOR,) if kind == "bytes" else (XOR, difference):
        verdict = _planes(new, base, transform, item)
        if sum(verdict.bits) < needed:
            best, needed = verdict, sum(verdict.bits)
    return classes if classes is not None and bits < needed - 8 * item * CLASS_GAIN else best


def _look(new: Bytes, base: Bytes, item: int, setting: Setting | None) -> _Look:
    """``setting``: of the classes that are looked at, if any."""
    items = min(new.size // item, RUNS * RUN_ITEMS)
    weights = _weights(items)
    if planes._kernel is not None:
        of = (
            (NONE, item, 0, 1)
            if setting is None
            else (setting.transform, item, setting.shift, setting.contexts)
        )
        *rest, counted = planes._kernel.look(new, base, *of, RUNS, RUN_ITEMS, weights)
        return _Look(*rest, None if counted is None else Counted(*counted))
    new, base = _sample(new, item), _sample(base, item)
    map_, changed = planes.changed(new, base, item)
    # Of neighbours that lie in one byte of the map: seven pairs in each.
    unlike = int(_unlike()[map_].sum())
    rows = weigh(split(new, None, NONE, item), weights)
    return _Look(
        items, changed, unlike, rows, None if setting is None else count(new, base, setting, weights)
    )


def _is_sparse(found: _Look) -> bool:
    if found.changed <= found.items * SAME_SHARE:
        return True
    if found.changed > found.items * SPARSE_CHANGES:
        return False
    share, pairs = found.changed / found.items, 7 * -(-found.items // 8)
    return found.unlike / pairs < share * (1 - share)


def _setting(item: int, kind: Kind) -> Setting:
    """Contexts for most of the base's numbers; of whole numbers, whose high bits tell nothing, one."""
    if kind != "float":
        return Setting(INT_CLASSES, item, 0, 0, 1)
    return Setting(FLOAT_CLASSES, item, SHIFTS[item], 0, CONTEXTS_MAX)


def _class_bits(found: Counted, setting: Setting, sampled: int, items: int) -> tuple[Setting, float]:
    """Bits per item of a block of ``items``, of which so many were looked at; and the setting without the contexts at
    both ends that have few items."""
    sums = found.sums
    contexts = sum(map(bool, sums))
    unseen = (found.values - contexts) / (2 * math.log(2))
    bits = (
        found.left / (1 << WEIGHT_BITS) + unseen + found.nbits
    ) / sampled + found.values * WEIGHT_COST / items
    least = min(CONTEXT_ITEMS / items, 1) * sampled
    low, high, below, above = 0, len(sums) - 1, sums[0], sums[-1]
    while below < least and low < high:
        low += 1
        below += sums[low]
    while above < least and high > low:
        high -= 1
        above += sums[high]
    return setting._replace(low=(found.low + low) % 256, contexts=high - low + 1), bits


def _sample(data: Bytes, item: int) -> Bytes:
    import numpy as np

    items = data.size // item
    if items <= RUNS * RUN_ITEMS:
        return data
    step = items // RUNS * item
    return np.ascontiguousarray(data[: RUNS * step].reshape(RUNS, step)[:, : RUN_ITEMS * item]).reshape(-1)


def _planes(new: Bytes, base: Bytes | None, transform: int, item: int) -> Verdict:
    """Of a sample, in planes."""
    rows = split(new, base, transform, item)
    items = rows.shape[1]
    return Verdict(transform, *_measured(weigh(rows, _weights(items)), items))


def _measured(rows: list[tuple[int, int, int]], items: int) -> tuple[list[float], list[float]]:
    """Bits per byte and share of zeros of each row of so many items, by :func:`weigh`."""
    bits, zeros = [], []
    for weight, values, none in rows:
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
