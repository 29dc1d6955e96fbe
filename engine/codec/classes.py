"""Differences as classes and bits, and back: what a number's difference costs is what its base's number leaves open.

A difference is a *class* of one byte (its sign, the place of its highest bit, and one to three bits below that) and the
bits below those, which are noise and stored as they are. Classes are coded by rANS (Duda 2013), which takes what the
entropy says also where that is much less than a bit. Each has the counts of its *context*: how far a weight moves, in
steps of its last bit, goes with its size, so the context is the base's exponent. Many lanes are coded in turn: their
states do not wait for each other.

The loops are compiled, as those of :mod:`.planes`; here they are in numpy too, with the same result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import planes
from .constants import CLASSES, CONTEXTS_MAX, FLOAT_CLASSES, LANES_MAX, LANES_MIN, SCALE_BITS
from .planes import Bytes, ordered
from .scratch import back, kept, take

STEPS = {1: 3, 2: 3, 4: 2, 8: 1}
"""By bytes of an item: the bits below the highest one that its class has."""
SHIFTS = {1: 3, 2: 7, 4: 23, 8: 52}
"""By bytes of an item: where its exponent begins."""
ITEMS_PER_LANE = 2048
STATE_LOW = 1 << 15
"""States lie between this and 2^31."""
_SCALE = 1 << SCALE_BITS
_WEIGHT_STEPS = 2


class Setting(NamedTuple):
    """How a block is coded. Context i has the base's numbers whose byte at bit ``shift`` is ``low + i``; the first and
    the last of the ``contexts`` those beyond, too."""

    transform: int
    item: int
    shift: int
    low: int
    contexts: int


class Coded(NamedTuple):
    """``weights`` of the classes up to the highest one, ``most``, one context behind the other; states of the lanes and
    the words that they left; and the bits below the classes, the last byte filled up with zeros."""

    most: int
    weights: Bytes
    words: Bytes
    bits: Bytes


class Classified(NamedTuple):
    """``counts`` ``[contexts, CLASSES]`` of 32 bits; ``marks`` ``[n]``, context * CLASSES + class of each number;
    ``nbits`` bits below the classes, in ``bits``, whose last byte is filled up with zeros."""

    counts: Any
    marks: Any
    nbits: int
    bits: Bytes


def lanes_of(count: int) -> int:
    """In how many lanes so many numbers are coded: a power of two."""
    most = max(count // ITEMS_PER_LANE, 1)
    return min(max(1 << (most.bit_length() - 1), LANES_MIN), LANES_MAX)


def code(new: Bytes, base: Bytes, setting: Setting) -> Coded:
    """The differences of ``new`` from ``base``, coded: in this thread's scratch, of which no more is taken."""
    import numpy as np

    if planes._kernel is None:
        found = _classify(new, base, setting)
        weights = _weights_of(found.counts)
        states, words = _encode(found.marks, frequencies_of(weights))
        most = int(weights.any(axis=0).nonzero()[0][-1])
        table = np.ascontiguousarray(weights[:, : most + 1]).reshape(-1)
        return Coded(most, table, np.concatenate([states, words]), found.bits)
    count = new.size // setting.item
    lanes, begin = lanes_of(count), kept()
    out = take(new.size + 16 + 4 * lanes + 2 * count)
    behind = kept()
    weights, marks, room = take(setting.contexts * CLASSES), take(2 * count), take(2 * count)
    most, bits, words = planes._kernel.code(new, base, *setting, lanes, weights, marks, room, out)
    # What lies behind is used again by the next block, still in the cache.
    back(begin + bits + words if behind > begin else begin)
    table = weights[: setting.contexts * (most + 1)].copy()
    return Coded(most, table, out[bits : bits + words], out[:bits])


class Counted(NamedTuple):
    """What classes of a sample come to: the lowest context; ``nbits`` below them; what their counts leave open, in the
    unit of the weights of counts; how many counts are not zero; and by context their sums."""

    low: int
    nbits: int
    left: int
    values: int
    sums: list[int]


def count(new: Bytes, base: Bytes, setting: Setting, weights: Bytes) -> Counted:
    """Of a sample; of floats, in the contexts that have the most numbers. ``weights`` of counts are as in
    :func:`.planes.weigh`. The kernel has this in its ``look``."""
    if setting.transform == FLOAT_CLASSES:
        setting = setting._replace(low=_window(base, setting))
    found = _classify(new, base, setting)
    sums = found.counts.sum(axis=1)
    left = int(weights[sums].sum()) - int(weights[found.counts].sum())
    values = int((found.counts != 0).sum())
    return Counted(setting.low, found.nbits, left, values, sums.tolist())


def _window(base: Bytes, setting: Setting) -> int:
    """The lowest of as many neighbouring keys as there are contexts that have the most numbers."""
    import numpy as np

    keys = (base.view(f"<u{setting.item}") >> setting.shift).astype(np.uint8)
    covered = np.cumsum(np.bincount(keys, minlength=256))
    covered[CONTEXTS_MAX:] -= covered[:-CONTEXTS_MAX].copy()
    return max(int(covered.argmax()) - CONTEXTS_MAX + 1, 0)


def _classify(new: Bytes, base: Bytes, setting: Setting) -> Classified:
    """The differences of ``new`` from ``base``, taken apart."""
    import numpy as np

    classes, lengths, rest = _classes(_difference(new, base, setting), STEPS[setting.item])
    marks = (_contexts(base, setting) << 8 | classes).astype(np.uint16)
    counts = np.bincount(marks, minlength=setting.contexts * CLASSES).astype(np.uint32)
    nbits = int(lengths.sum())
    return Classified(counts.reshape(-1, CLASSES), marks, nbits, _put_bits(rest, lengths, nbits))


def _weights_of(counts: Any) -> Bytes:
    """``[contexts, CLASSES]`` bytes that stand for the counts; 0 only for what was never counted."""
    import numpy as np

    many = counts.astype(np.uint64)
    shares = (many << np.uint64(16)) // np.maximum(many.sum(axis=1, keepdims=True), np.uint64(1))
    shares += (many > 0) & (shares == 0)
    high = np.frexp(shares.astype(np.float64))[1] - 1
    lengths = np.maximum(high, _WEIGHT_STEPS).astype(np.uint64) - np.uint64(_WEIGHT_STEPS)
    return ((lengths << np.uint64(_WEIGHT_STEPS)) + (shares >> lengths)).astype(np.uint8)


def frequencies_of(weights: Bytes) -> Any:
    """``[contexts, CLASSES]`` of 16 bits: by context they sum up to 2^SCALE_BITS, or are none if all weights are 0."""
    import numpy as np

    if planes._kernel is not None:
        frequencies = np.empty(weights.shape, np.uint16)
        planes._kernel.frequencies(weights, frequencies)
        return frequencies
    given = (weights & 63).astype(np.int64)
    lengths = np.maximum((given >> _WEIGHT_STEPS) - 1, 0)
    shares = ((given - (lengths << _WEIGHT_STEPS)) << lengths) + ((1 << lengths) >> 1)
    used = np.count_nonzero(shares, axis=1)[:, None]
    parts = shares * (_SCALE - used) // np.maximum(shares.sum(axis=1, keepdims=True), 1)
    parts = np.maximum(parts, shares > 0)
    rows = np.arange(len(parts))
    parts[rows, parts.argmax(axis=1)] += np.where(used[:, 0] > 0, _SCALE - parts.sum(axis=1), 0)
    return parts.astype(np.uint16)


def _encode(marks: Any, frequencies: Any) -> tuple[Bytes, Bytes]:
    """The states of the lanes, and the words that they left, as bytes."""
    import numpy as np

    lanes = lanes_of(marks.size)
    starts = (np.cumsum(frequencies, axis=1, dtype=np.uint32) - frequencies).reshape(-1)
    of, firsts = frequencies.reshape(-1).astype(np.uint32)[marks], starts[marks]
    states = np.full(lanes, STATE_LOW, np.uint32)
    left: list[Any] = []
    for row in range((marks.size - 1) // lanes * lanes, -1, -lanes):
        frequency, first = of[row : row + lanes], firsts[row : row + lanes]
        state = states[: frequency.size]
        full = (state >> 19) >= frequency
        left.append(state[full].astype(np.uint16))
        state[full] >>= 16
        times = state // frequency
        state += first + times * (_SCALE - frequency)
    words = np.concatenate(left[::-1]) if left else np.empty(0, np.uint16)
    return states.view(np.uint8), words.view(np.uint8)


def declassify(
    words: Bytes, bits: Bytes, frequencies: Any, base: Bytes, setting: Setting, out: Bytes
) -> bool:
    """Inverse of :func:`code`. Whether words and bits are exactly those of as many numbers as ``out`` has."""
    import numpy as np

    lanes = lanes_of(out.size // setting.item)
    if words.size < 4 * lanes or words.size % 2:
        return False
    if planes._kernel is not None:
        whole: bool = planes._kernel.declassify(
            words, lanes, bits, frequencies, base, *setting, take(CONTEXTS_MAX * _SCALE), out
        )
        return whole
    classes = _decode(words, lanes, frequencies, _contexts(base, setting))
    if classes is None:
        return False
    steps = STEPS[setting.item]
    code = (classes >> 1).astype(np.uint64)
    over = code >> np.uint64(steps)
    lengths = np.where(over > 1, over, np.uint64(1)) - np.uint64(1)
    rest = _take_bits(bits, lengths)
    if rest is None:
        return False
    size = ((code - (lengths << np.uint64(steps))) << lengths | rest).astype(f"<u{setting.item}")
    words_ = size.view(f"<i{setting.item}")
    np.negative(words_, out=words_, where=(classes & 1) == 1)
    target = out.view(f"<i{setting.item}")
    if setting.transform == FLOAT_CLASSES:
        words_ += ordered(base.view(f"<i{setting.item}"), setting.item)
        target[...] = ordered(words_, setting.item)
    else:
        np.add(words_, base.view(f"<i{setting.item}"), out=target)
    return True


def _difference(new: Bytes, base: Bytes, setting: Setting) -> Any:
    mine, other = new.view(f"<i{setting.item}"), base.view(f"<i{setting.item}")
    if setting.transform == FLOAT_CLASSES:
        mine, other = ordered(mine, setting.item), ordered(other, setting.item)
    return mine - other


def _classes(words: Any, steps: int) -> tuple[Any, Any, Any]:
    """Of signed ``words``: class, number of bits below (64 bits each), and these."""
    import numpy as np

    bits = 8 * words.dtype.itemsize
    size = np.abs(words).view(f"<u{words.dtype.itemsize}").astype(np.uint64)
    # What would round up to the next power of two is cleared.
    high = np.frexp((size & ~(size >> np.uint64(53))).astype(np.float64))[1] - 1
    lengths = np.maximum(high, steps).astype(np.uint64) - np.uint64(steps)
    code = (lengths << np.uint64(steps)) + (size >> lengths)
    classes = code << np.uint64(1) | (words >> (bits - 1) & 1).astype(np.uint64)
    return classes, lengths, size & ((np.uint64(1) << lengths) - np.uint64(1))


def _contexts(base: Bytes, setting: Setting) -> Any:
    import numpy as np

    at = (base.view(f"<u{setting.item}") >> setting.shift).astype(np.uint8) - np.uint8(
        (setting.low + 8) % 256
    )
    place = at.view(np.int8).astype(np.int64) + 8
    return np.clip(place, 0, setting.contexts - 1).astype(np.uint64)


def _put_bits(rest: Any, lengths: Any, nbits: int) -> Bytes:
    """``rest``, of ``lengths`` bits each, one behind the other."""
    import numpy as np

    ends = np.cumsum(lengths, dtype=np.uint64)
    words = np.zeros(nbits // 32 + 3)
    for shift in (0, 32):
        part = rest >> np.uint64(shift) & np.uint64(0xFFFFFFFF)
        if shift and not part.any():
            break
        begins = ends - lengths + np.uint64(shift)
        where = np.minimum(begins >> np.uint64(5), np.uint64(words.size - 2)).astype(np.int64)
        moved = part << (begins & np.uint64(31))
        # Sums of bits that do not meet: exact in floats.
        words += np.bincount(where, moved & np.uint64(0xFFFFFFFF), words.size)
        words += np.bincount(where + 1, moved >> np.uint64(32), words.size)
    return words.astype("<u4").view(np.uint8)[: -(-nbits // 8)]


def _take_bits(bits: Bytes, lengths: Any) -> Any:
    """Inverse of :func:`_put_bits`; None if there are not as many bytes as these take."""
    import numpy as np

    ends = np.cumsum(lengths, dtype=np.uint64)
    nbits = int(ends[-1]) if ends.size else 0
    if bits.size != -(-nbits // 8):
        return None
    padded = np.zeros(bits.size + 16, np.uint8)
    padded[: bits.size] = bits
    windows = np.ndarray(padded.size - 7, "<u8", padded, strides=(1,))
    begins = ends - lengths
    found = windows[(begins >> np.uint64(3)).astype(np.int64)] >> (begins & np.uint64(7))
    if lengths.size and int(lengths.max()) > 32:
        begins += np.uint64(32)
        high = windows[np.minimum(begins >> np.uint64(3), np.uint64(bits.size + 8)).astype(np.int64)]
        found = found & np.uint64(0xFFFFFFFF) | (high >> (begins & np.uint64(7))) << np.uint64(32)
    return found & ((np.uint64(1) << lengths) - np.uint64(1))


def _decode(words: Bytes, lanes: int, frequencies: Any, contexts: Any) -> Any:
    """The classes; None if the words are not exactly theirs."""
    import numpy as np

    classes_of, less_one, place = _slots(frequencies)
    states = np.frombuffer(words[: 4 * lanes].tobytes(), "<u4").astype(np.uint32)
    rest = np.frombuffer(words[4 * lanes :].tobytes(), "<u2").astype(np.uint32)
    classes, bases = np.empty(contexts.size, np.uint8), (contexts << np.uint64(SCALE_BITS)).astype(np.int64)
    at = 0
    for row in range(0, contexts.size, lanes):
        state = states[: min(lanes, contexts.size - row)]
        slots = bases[row : row + lanes] + (state & (_SCALE - 1))
        classes[row : row + lanes] = classes_of[slots]
        state[...] = (less_one[slots] + np.uint32(1)) * (state >> SCALE_BITS) + place[slots]
        needs = state < STATE_LOW
        count = int(np.count_nonzero(needs))
        if count > rest.size - at:
            return None
        state[needs] = state[needs] << 16 | rest[at : at + count]
        at += count
    return classes if at == rest.size and (states == STATE_LOW).all() else None


def _slots(frequencies: Any) -> tuple[Any, Any, Any]:
    """By context and slot: the class, its frequency less one, and the slot's place among its own."""
    import numpy as np

    contexts = len(frequencies)
    classes, less_one, place = np.zeros((3, contexts, _SCALE), np.uint32)
    for context, row in enumerate(frequencies.astype(np.int64)):
        if row.any():
            classes[context] = np.repeat(np.arange(CLASSES), row)
            less_one[context] = (row - 1)[classes[context]]
            place[context] = np.arange(_SCALE) - (np.cumsum(row) - row)[classes[context]]
    return classes.reshape(-1), less_one.reshape(-1), place.reshape(-1)
