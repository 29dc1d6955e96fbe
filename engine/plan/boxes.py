"""Geometry of boxes: N-d half-open regions of a global tensor."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..format.entries import Box

CUT_AXES_MAX = 12
"""Most axes along which one tensor may be cut. Checking a tiling costs 2**axes per box."""

Point = tuple[int, ...]


def is_valid(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether ``box`` has the axes of ``shape`` and lies inside it."""
    return len(box.offsets) == len(box.lengths) == len(shape) and all(
        offset >= 0 and length >= 0 and offset + length <= size
        for offset, length, size in zip(box.offsets, box.lengths, shape, strict=True)
    )


def contains(box: Box, point: Point) -> bool:
    """Whether the element at ``point`` lies in ``box``."""
    return all(o <= p < o + n for o, n, p in zip(box.offsets, box.lengths, point, strict=True))


def intersect(a: Box, b: Box) -> Box | None:
    """The common region, or None if it has no element."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    lengths = tuple(
        min(ao + an, bo + bn) - o
        for ao, an, bo, bn, o in zip(a.offsets, a.lengths, b.offsets, b.lengths, offsets, strict=True)
    )
    return None if lengths and min(lengths) <= 0 else Box(offsets, lengths)


def subtract(box: Box, hole: Box) -> list[Box]:
    """What is left of ``box`` without ``hole`` (which lies inside it): disjoint boxes, at most two per
    axis."""
    left = []
    offsets, lengths = list(box.offsets), list(box.lengths)
    for axis, (start, length) in enumerate(zip(hole.offsets, hole.lengths, strict=True)):
        before = start - offsets[axis]
        after = offsets[axis] + lengths[axis] - (start + length)
        for begin, size in ((offsets[axis], before), (start + length, after)):
            if size:
                at, sizes = [*offsets], [*lengths]
                at[axis], sizes[axis] = begin, size
                left.append(Box(tuple(at), tuple(sizes)))
        offsets[axis], lengths[axis] = start, length
    return left


def misfit(boxes: Sequence[Box], target: Box) -> tuple[Point, int] | None:
    """None if ``boxes`` (all inside ``target``) cover each element of it exactly once; else the first element
    that they do not, and by how many they cover it too often (negative: not at all).

    Exact and linear in the number of boxes. A box's indicator function is the sum of its corners, each with
    the sign of its parity; summing over boxes and taking off the target's corners leaves nothing exactly if
    every element is covered once. The least corner that is left, in the order of its coordinates, is the
    first element with a wrong count. Raises ValueError for boxes cut along more than ``CUT_AXES_MAX`` axes.
    """
    axes = [
        axis
        for axis in range(len(target.offsets))
        if any(
            b.offsets[axis] != target.offsets[axis] or b.lengths[axis] != target.lengths[axis] for b in boxes
        )
    ]
    if len(axes) > CUT_AXES_MAX:
        raise ValueError(f"cut along {len(axes)} axes, more than {CUT_AXES_MAX}")
    if not boxes and target.volume:
        return target.offsets, -1
    if not target.volume:
        return None
    counts: dict[Point, int] = {}
    for corner, sign in _corners(target, axes):
        counts[corner] = -sign
    for box in boxes:
        for corner, sign in _corners(box, axes):
            counts[corner] = counts.get(corner, 0) + sign
    wrong = [corner for corner, count in counts.items() if count]
    if not wrong:
        return None
    first = min(wrong)
    point = list(target.offsets)
    for axis, position in zip(axes, first, strict=True):
        point[axis] = position
    return tuple(point), counts[first]


def _corners(box: Box, axes: Sequence[int]) -> list[tuple[Point, int]]:
    """All corners of ``box`` in the coordinates ``axes``, with the sign of each."""
    corners: list[tuple[Point, int]] = [((), 1)]
    for axis in axes:
        low = box.offsets[axis]
        high = low + box.lengths[axis]
        corners = [corner for at, sign in corners for corner in (((*at, low), sign), ((*at, high), -sign))]
    return corners


class Block(NamedTuple):
    """``runs`` runs of ``length`` elements each, at equal distances: run ``i`` begins ``i * source_step`` after
    ``source_at`` in one box, ``i * target_step`` after ``target_at`` in the other. Both steps are 0 for one run."""

    source_at: int
    target_at: int
    length: int
    runs: int
    source_step: int
    target_step: int


def blocks(region: Box, source: Box, target: Box) -> Iterator[Block]:
    """Where the elements of ``region`` (not empty, inside both others) lie, both boxes stored row-major.

    The runs are as few as there can be. Those along the longest axis that does not merge with its neighbours
    make one block, so there are as many blocks as the product of the other such axes: one, where the boxes
    differ along one axis only.
    """
    inner, outer = _merged_axes(region, source, target)
    along = max(outer, key=lambda axis: axis[0], default=(1, 0, 0))
    if outer:
        outer.remove(along)
    starts = [(_origin(region, source), _origin(region, target))]
    for length, source_step, target_step in outer:
        starts = [(a + i * source_step, b + i * target_step) for a, b in starts for i in range(length)]
    for a, b in starts:
        yield Block(a, b, inner, *along)


def _merged_axes(region: Box, source: Box, target: Box) -> tuple[int, list[tuple[int, int, int]]]:
    """Length of a run, and the other axes of ``region`` as (length, step in ``source``, step in ``target``),
    outermost first; axes over which the steps simply go on are one."""
    axes: list[tuple[int, int, int]] = []
    source_step = target_step = 1
    for length, source_length, target_length in zip(
        reversed(region.lengths), reversed(source.lengths), reversed(target.lengths), strict=True
    ):
        if length > 1:
            last = axes[-1] if axes else (1, 1, 1)
            if (source_step, target_step) == (last[0] * last[1], last[0] * last[2]):
                axes[-1:] = [(last[0] * length, last[1], last[2])]
            else:
                axes.append((length, source_step, target_step))
        source_step *= source_length
        target_step *= target_length
    inner = axes.pop(0)[0] if axes and axes[0][1:] == (1, 1) else 1
    return inner, axes[::-1]


def _origin(region: Box, box: Box) -> int:
    """Row-major index in ``box`` of the first element of ``region``."""
    index = 0
    for at, offset, length in zip(region.offsets, box.offsets, box.lengths, strict=True):
        index = index * length + at - offset
    return index


class BoxIndex:
    """Finds, among many boxes of one tensor, those that may meet a given one: sorted along the axis that
    tells most of them apart. Immutable after construction."""

    FEW = 16
    """So many boxes are not worth sorting."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._all = list(range(len(boxes)))
        self._sorted = len(boxes) > self.FEW and len(boxes[0].offsets) > 0
        if not self._sorted:
            return
        axes = range(len(boxes[0].offsets))
        axis = max(axes, key=lambda axis: len({box.offsets[axis] for box in boxes}))
        self._axis = axis
        self._order = sorted(self._all, key=lambda i: boxes[i].offsets[axis])
        self._starts = [boxes[i].offsets[axis] for i in self._order]
        self._longest = max(box.lengths[axis] for box in boxes)

    def near(self, box: Box) -> list[int]:
        """Indices of the boxes that may meet ``box``, in ascending order."""
        if not self._sorted:
            return self._all
        begin = box.offsets[self._axis]
        low = bisect.bisect_right(self._starts, begin - self._longest)
        high = bisect.bisect_left(self._starts, begin + box.lengths[self._axis])
        return sorted(self._order[low:high])
