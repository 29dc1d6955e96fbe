"""Numbers to byte planes and back: plane i holds byte i, counted from the lowest, of every item.

All arrays are numpy's, of bytes; an item is a little-endian word. A difference is taken between the numbers' places in
their order: the bits of a float, as a whole number, go up with its magnitude, so those of negative ones are turned
around. What results is small where the numbers are close, and its sign goes into the lowest bit, so that small negative
differences have empty high bytes too.

*Grouped* items do not lie in their own order in the planes, but one group behind the other, by the exponent of the
base's number: how far a weight moves, in steps of its last bit, goes with its size, so the bytes of a group are more
alike.

The loops are compiled (``_kernel.c``) where the install found a compiler; here they are in numpy too, with the same
result.
"""

from __future__ import annotations

from typing import Any

from .constants import FLOAT_DIFFERENCE, NONE, XOR
from .scratch import take

_kernel: Any
try:
    from . import _kernel
except ImportError:
    _kernel = None

Bytes = Any
"""A one-dimensional numpy array of unsigned bytes; numpy is loaded when there is something to code."""


def split(new: Bytes, base: Bytes | None, transform: int, item: int, grouped: bool = False) -> Bytes:
    """``[item, n]`` planes of ``new`` (``n * item`` bytes) under ``transform``; ``base`` is as long, where one is
    needed. ``grouped``: see above; only where there is a transform."""
    import numpy as np

    if _kernel is not None:
        planes = take(new.size).reshape(item, -1)
        _kernel.split(new, base, transform, item, grouped, planes)
        return planes
    words: Any = new.view(f"<i{item}")
    if transform != NONE:
        assert base is not None
        words = _forward(words, base.view(f"<i{item}"), transform, item)
        if grouped:
            words = words[_order(base, item)]
    planes = np.empty((item, words.size), np.uint8)
    words = words.view(f"<u{item}")
    for index in range(item):
        np.copyto(planes[index], words if index == 0 else words >> (8 * index), casting="unsafe")
    return planes


def join(
    planes: list[Bytes | int], base: Bytes | None, transform: int, item: int, grouped: bool, out: Bytes
) -> None:
    """Inverse of :func:`split`, into ``out``. A plane whose bytes are all equal is given as that byte."""
    if _kernel is not None:
        _kernel.join(planes, base, transform, item, grouped, out)
        return
    columns = out.reshape(-1, item)
    for index, plane in enumerate(planes):
        columns[:, index] = plane
    if transform != NONE:
        assert base is not None
        words = out.view(f"<i{item}")
        if grouped:
            words[_order(base, item)] = words.copy()
        _backward(words, base.view(f"<i{item}"), transform, item)


def thin(plane: Bytes) -> tuple[Bytes, Bytes]:
    """Where the bytes of a plane are not zero (a bit for each, from the lowest of the first byte on), and these."""
    import numpy as np

    if _kernel is not None:
        map_, values = take(-(-plane.size // 8)), take(plane.size)
        return map_, values[: _kernel.thin(plane, map_, values)]
    mask = plane != 0
    return np.packbits(mask, bitorder="little"), plane[mask]


def fill(map_: Bytes, values: Bytes, count: int) -> Bytes | None:
    """Inverse of :func:`thin`: a plane of ``count`` bytes; None if there are not as many values as bits are set."""
    import numpy as np

    if _kernel is not None:
        plane = np.empty(count, np.uint8)
        return plane if _kernel.fill(map_, values, plane) else None
    mask = np.unpackbits(map_, count=count, bitorder="little").view(np.bool_)
    if np.count_nonzero(mask) != values.size:
        return None
    plane = np.zeros(count, np.uint8)
    plane[mask] = values
    return plane


def changed(new: Bytes, base: Bytes, item: int) -> tuple[Bytes, int]:
    """Which items are not the base's, a bit for each as in :func:`thin`, and how many."""
    import numpy as np

    if _kernel is not None:
        map_ = take(-(-(new.size // item) // 8))
        return map_, _kernel.changed(new, base, item, map_)
    mask = new.view(f"<u{item}") != base.view(f"<u{item}")
    return np.packbits(mask, bitorder="little"), int(np.count_nonzero(mask))


def pick(data: Bytes, map_: Bytes, item: int, count: int) -> Bytes | None:
    """The items of ``data`` whose bits are set; None if these are not ``count``."""
    import numpy as np

    if _kernel is not None:
        some = take(count * item)
        return some if _kernel.pick(data, map_, item, some) else None
    words = data.view(f"<u{item}")
    found = words[np.unpackbits(map_, count=words.size, bitorder="little").view(np.bool_)]
    return found.view(np.uint8) if found.size == count else None


def place(some: Bytes, map_: Bytes, item: int, out: Bytes) -> None:
    """Inverse of :func:`pick`: what is not set stays in ``out``."""
    import numpy as np

    if _kernel is not None:
        _kernel.place(some, map_, item, out)
        return
    words = out.view(f"<u{item}")
    words[np.unpackbits(map_, count=words.size, bitorder="little").view(np.bool_)] = some.view(f"<u{item}")


def weigh(planes: Bytes, weights: Bytes) -> list[tuple[int, int, int]]:
    """By row of ``[rows, n]``: the sum of ``weights[c]`` over the counts c of its bytes, how many different bytes
    it has, and how many zeros. ``weights``: n + 1 whole numbers of 64 bits, of which the first is zero."""
    import numpy as np

    rows = len(planes)
    if _kernel is not None:
        found: list[tuple[int, int, int]] = _kernel.weigh(planes, rows, weights)
        return found
    numbered = planes + (np.arange(rows, dtype=np.uint16) << 8)[:, None]
    counts = np.bincount(numbered.reshape(-1), minlength=rows << 8).reshape(rows, 256)
    sums, values = weights[counts].sum(axis=1), np.count_nonzero(counts, axis=1)
    return list(zip(sums.tolist(), values.tolist(), counts[:, 0].tolist(), strict=True))


def _order(base: Bytes, item: int) -> Any:
    """``[n]``: which item comes first, second, ... of grouped ones. The low eight bits of the exponent are the key
    (where it is shorter, with the next bits of the mantissa)."""
    import numpy as np

    keys = base.view(f"<u{item}") >> {1: 0, 2: 7, 4: 23, 8: 52}[item]
    return np.argsort(keys.astype(np.uint8), kind="stable")


def _forward(new: Any, base: Any, transform: int, item: int) -> Any:
    if transform == XOR:
        return new ^ base
    if transform == FLOAT_DIFFERENCE:
        words = ordered(new, item)
        words -= ordered(base, item)
    else:
        words = new - base
    sign = words >> (8 * item - 1)
    words <<= 1
    words ^= sign
    return words


def _backward(words: Any, base: Any, transform: int, item: int) -> None:
    """Turn ``words`` into what they stand for, in place."""
    import numpy as np

    if transform == XOR:
        words ^= base
        return
    sign = words & 1
    np.negative(sign, out=sign)
    unsigned = words.view(f"<u{item}")
    unsigned >>= 1
    words ^= sign
    if transform == FLOAT_DIFFERENCE:
        words += ordered(base, item)
        words[...] = ordered(words, item)
    else:
        words += base


def ordered(words: Any, item: int) -> Any:
    """Signed words that are in the order of the floats whose bits ``words`` are. Its own inverse."""
    mask = words >> (8 * item - 1)
    mask &= (1 << (8 * item - 1)) - 1
    mask ^= words
    return mask
