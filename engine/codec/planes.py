"""Numbers to byte planes and back: plane i holds byte i, counted from the lowest, of every item.

All arrays are numpy's, of bytes; an item is a little-endian word. A difference is taken between the numbers' places in
their order: the bits of a float, as a whole number, go up with its magnitude, so those of negative ones are turned
around. What results is small where the numbers are close, and its sign goes into the lowest bit, so that small negative
differences have empty high bytes too.
"""

from __future__ import annotations

from typing import Any

from .constants import FLOAT_DIFFERENCE, NONE, XOR

Bytes = Any
"""A one-dimensional numpy array of unsigned bytes; numpy is loaded when there is something to code."""


def split(new: Bytes, base: Bytes | None, transform: int, item: int) -> Bytes:
    """``[item, n]`` planes of ``new`` (``n * item`` bytes) under ``transform``; ``base`` is as long, where one is
    needed."""
    import numpy as np

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

    columns = out.reshape(-1, item)
    for index, plane in enumerate(planes):
        np.copyto(columns[:, index], np.uint8(plane) if isinstance(plane, int) else plane)
    if transform != NONE:
        assert base is not None
        _backward(out.view(f"<i{item}"), base.view(f"<i{item}"), transform, item)


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
