"""Random ways to spread a tensor over ranks, and the brute force that judges plans: one element at a time."""

from __future__ import annotations

import itertools
import math
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
    """A box inside ``shape``; along each axis it is whole half of the time, as the boxes of real jobs are."""
    whole = [rng.random() < 0.5 for _ in shape]
    offsets = tuple(0 if all_of else rng.randint(0, size) for size, all_of in zip(shape, whole, strict=True))
    lengths = (
        size if all_of else rng.randint(0, size - offset)
        for size, offset, all_of in zip(shape, offsets, whole, strict=True)
    )
    return Box(offsets, tuple(lengths))


def random_shape(rng: random.Random, axes_max: int = 3, size_max: int = 6) -> tuple[int, ...]:
    return tuple(rng.randint(0, size_max) for _ in range(rng.randint(0, axes_max)))


def flat_boxes(shape: tuple[int, ...], begin: int, end: int) -> list[Box]:
    """Elements ``begin`` to ``end`` of a flattened tensor as boxes, in order: what a distributed optimizer holds."""
    if begin >= end:
        return []
    if not shape:
        return [Box((), ())]
    inner = math.prod(shape[1:])
    first, last = -(-begin // inner), end // inner
    if first > last:  # inside one row
        row = begin // inner
        return [_in_row(row, box) for box in flat_boxes(shape[1:], begin - row * inner, end - row * inner)]
    boxes = []
    if begin < first * inner:
        boxes += [
            _in_row(first - 1, box) for box in flat_boxes(shape[1:], begin - (first - 1) * inner, inner)
        ]
    if first < last:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if last * inner < end:
        boxes += [_in_row(last, box) for box in flat_boxes(shape[1:], 0, end - last * inner)]
    return boxes


def _in_row(row: int, box: Box) -> Box:
    return Box((row, *box.offsets), (1, *box.lengths))
