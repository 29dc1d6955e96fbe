"""Numbers to byte planes and back: plane i holds byte i, counted from the lowest, of every item.

All arrays are numpy's, of bytes; an item is a little-endian word. A difference is taken between the numbers' places in
their order: the bits of a float, as a whole number, go up with its magnitude, so those of negative ones are turned
around. What results is small where the numbers are close, and its sign goes into the lowest bit, so that small negative
differences have empty high bytes too.

The loops are compiled (``_kernel.c``) where the install found a compiler; here they are in numpy too, with the same
result.
"""

from __future__ import annotations

from typing import Any

from .constants import FLOAT_DIFFERENCE, NONE, XOR

_kernel: Any
try:
    from . import _kernel
except ImportError:
    _kernel = None

Bytes = Any
"""A one-dimensional numpy array of unsigned bytes; numpy is loaded when there is something to code."""


def split(new: Bytes, base: Bytes | None, transform: int, item: int) -> Bytes:
    """``[item, n]`` planes of ``new`` (``n * item`` bytes) under ``transform``; ``base`` is as long, where one is
    needed."""
    import numpy as np

    if _kernel is not None:
        planes = np.empty((item, new.size // item), np.uint8)
        _kernel.split(new, base, transform, item, planes)
        return planes
    words: Any = new.view(f"<i{item}")
    if transform != NONE:
        assert base is not None
        words = _forward(words, base.view(f"<i{item}"), transform, item)
    planes = np.empty((item, words.size), np.uint8)
    if item == 1:
        planes[0] = words.view(np.uint8)
        return planes
    words = words.view(f"<u{item}")
    for index in range(item):
        np.copyto(planes[index], words if index == 0 else words >> (8 * index), casting="unsafe")
    return planes


def join(planes: list[Bytes | int], base: Bytes | None, transform: int, item: int, out: Bytes) -> None:
    """Inverse of :func:`split`, into ``out``. A plane whose bytes are all equal is given as that byte."""
    import numpy as np

    if _kernel is not None:
        _kernel.join(planes, base, transform, item, out)
        return
    columns = out.reshape(-1, item)
    for index, plane in enumerate(planes):
        np.copyto(columns[:, index], np.uint8(plane) if isinstance(plane, int) else plane)
    if transform != NONE:
        assert base is not None
        _backward(out.view(f"<i{item}"), base.view(f"<i{item}"), transform, item)


def thin(plane: Bytes) -> tuple[Bytes, Bytes]:
    """Where the bytes of a plane are not zero (a bit for each, from the lowest of the first byte on), and these."""
    import numpy as np

    if _kernel is not None:
        map_, values = np.empty(-(-plane.size // 8), np.uint8), np.empty(plane.size, np.uint8)
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


def weigh(planes: Bytes, weights: Bytes) -> list[tuple[int, int, int]]:
    """By plane of ``[item, n]``: the sum of ``weights[c]`` over the counts c of its bytes, how many different bytes
    it has, and how many zeros. ``weights``: n + 1 whole numbers of 64 bits, of which the first is zero."""
    import numpy as np

    item = len(planes)
    if _kernel is not None:
        found: list[tuple[int, int, int]] = _kernel.weigh(planes, item, weights)
        return found
    numbered = planes + (np.arange(item, dtype=np.uint16) << 8)[:, None]
    counts = np.bincount(numbered.reshape(-1), minlength=item << 8).reshape(item, 256)
    sums, values = weights[counts].sum(axis=1), np.count_nonzero(counts, axis=1)
    return list(zip(sums.tolist(), values.tolist(), counts[:, 0].tolist(), strict=True))


def _forward(new: Any, base: Any, transform: int, item: int) -> Any:
    if transform == XOR:
        return new ^ base
    if transform == FLOAT_DIFFERENCE:
        words = _ordered(new, item)
        words -= _ordered(base, item)
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
        words += _ordered(base, item)
        words[...] = _ordered(words, item)
    else:
        words += base


def _ordered(words: Any, item: int) -> Any:
    """Signed words that are in the order of the floats whose bits ``words`` are. Its own inverse."""
    mask = words >> (8 * item - 1)
    mask &= (1 << (8 * item - 1)) - 1
    mask ^= words
    return mask
