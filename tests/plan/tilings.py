"""Random ways to spread a tensor over ranks, and the brute force that judges plans: one element at a time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from everstep.format.entries import Box

Point = tuple[int, ...]


def points(box: Box) -> Iterator[Point]:
    """All elements of ``box``, row-major."""
    return itertools.product(*(range(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True)))


def tiling(rng: random.Random, box: Box, pieces: int) -> list[Box]:
    """``box`` cut at random, again and again, into at most ``pieces`` boxes (some of them may be empty)."""
    found = [box]
    while len(found) < pieces and box.lengths:
        whole = found.pop(rng.randrange(len(found)))
        axis = rng.randrange(len(whole.lengths))
        at = rng.randint(0, whole.lengths[axis])
        for begin, size in ((0, at), (at, whole.lengths[axis] - at)):
            offsets, lengths = list(whole.offsets), list(whole.lengths)
            offsets[axis] += begin
            lengths[axis] = size
            found.append(Box(tuple(offsets), tuple(lengths)))
    return list(dict.fromkeys(found))


def random_box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    offsets = tuple(rng.randint(0, size) for size in shape)
    return Box(offsets, tuple(rng.randint(0, size - o) for size, o in zip(shape, offsets, strict=True)))


def random_shape(rng: random.Random, axes_max: int = 3, size_max: int = 6) -> tuple[int, ...]:
    return tuple(rng.randint(0, size_max) for _ in range(rng.randint(0, axes_max)))
