"""From a mesh and placements to the regions of a global tensor that one rank holds.

Pure: placements are described by the small classes here, meshes by their shape and a rank's coordinates.

Along one axis of the tensor several mesh axes may cut, and two orders are in use. *Left to right*, mesh axis
after mesh axis, is how tensors are distributed in general; a strided shard then takes its share of each of
``split_factor`` parts. *As it was cut*: a strided shard says into how many parts the axis had been cut before,
by mesh axes to its right, and takes a plain chunk of the one part that was there. Sharded data parallelism over
tensor parallelism does that: it chunks what the tensor parallel rank holds. Where sizes divide evenly both give
the same regions; where they do not, the data that is really held tells which it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from ..format.entries import Box


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along this mesh axis holds the same."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The ranks along this mesh axis hold chunks of tensor axis ``dim``: equal ones, as many as can be filled,
    then a shorter one, then empty ones."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """A shard of an axis that was (or counts as) cut into ``split_factor`` parts before."""

    dim: int
    split_factor: int


Placement = Replicate | Shard | StridedShard

Interval = tuple[int, int]
"""(first index, length) along one axis, length > 0."""


@dataclass(frozen=True, slots=True)
class Region:
    """``box`` of the global tensor lies at ``local`` (offsets, as long as the box) in what the rank holds."""

    box: Box
    local: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Cut:
    """One mesh axis that cuts a tensor axis: this rank is ``index`` of ``count``. ``split_factor`` is None for a
    plain shard."""

    count: int
    index: int
    split_factor: int | None


def regions(
    shape: Sequence[int],
    mesh: Sequence[int],
    at: Sequence[int],
    placements: Sequence[Placement],
    local: Sequence[int],
) -> tuple[Region, ...] | None:
    """What the rank at coordinates ``at`` of a mesh of shape ``mesh`` holds of a tensor of ``shape``, if that has
    the shape ``local``; None where no reading of the placements gives that shape. Local order; none where the
    rank holds no element. Of a tensor without elements everyone on the mesh holds the whole."""
    if len(placements) != len(mesh) or len(at) != len(mesh):
        return None
    readings = [_readings(size, _cuts(axis, mesh, at, placements)) for axis, size in enumerate(shape)]
    if any(not 0 <= p.dim < len(shape) for p in placements if not isinstance(p, Replicate)):
        return None
    if 0 in shape:
        return (Region(Box.full(tuple(shape)), (0,) * len(shape)),) if 0 in local else None
    if 0 in local:
        # An empty shard's other axes have any length: who holds nothing may say so in several ways.
        return () if any([] in axis for axis in readings) else None
    if len(local) != len(shape):
        return None
    held = []
    for axis, length in zip(readings, local, strict=True):
        fitting = [found for found in axis if sum(n for _, n in found) == length]
        if not fitting:
            return None
        held.append(fitting[0])
    return tuple(_product(held))


def expected_shapes(
    shape: Sequence[int], mesh: Sequence[int], at: Sequence[int], placements: Sequence[Placement]
) -> list[tuple[int, ...]]:
    """The local shapes that the placements could mean, for messages."""
    axes = [
        [sum(n for _, n in found) for found in _readings(size, _cuts(axis, mesh, at, placements))]
        for axis, size in enumerate(shape)
    ]
    return sorted(set(itertools.product(*axes)))


def sharded_axes(placements: Sequence[Placement]) -> list[int]:
    """The mesh axes along which ranks hold different regions."""
    return [axis for axis, placement in enumerate(placements) if not isinstance(placement, Replicate)]


def flat_boxes(shape: Sequence[int], start: int, count: int) -> list[Box]:
    """The boxes that ``count`` elements from ``start`` on of the flattened tensor make up, in flat order: at most
    2 * axes - 1. ValueError if the range does not lie inside."""
    if start < 0 or count < 0 or start + count > prod(shape):
        raise ValueError(f"elements {start} to {start + count} of {prod(shape)}")
    if not count:
        return []
    return [Box(offsets, lengths) for offsets, lengths in _flat(tuple(shape), start, count)]


def _flat(shape: tuple[int, ...], start: int, count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    if not shape:
        return [((), ())]
    size = prod(shape[1:])
    first, into = divmod(start, size)
    found = []
    if into or count < size:
        # What is left of the first row, or all of it that is wanted.
        part = min(size - into, count)
        found += [((first, *at), (1, *n)) for at, n in _flat(shape[1:], into, part)]
        first, count = first + 1, count - part
    rows, rest = divmod(count, size)
    if rows:
        found.append(((first, *(0 for _ in shape[1:])), (rows, *shape[1:])))
    if rest:
        found += [((first + rows, *at), (1, *n)) for at, n in _flat(shape[1:], 0, rest)]
    return found


def _cuts(axis: int, mesh: Sequence[int], at: Sequence[int], placements: Sequence[Placement]) -> list[_Cut]:
    found = []
    for count, index, placement in zip(mesh, at, placements, strict=True):
        if isinstance(placement, StridedShard) and placement.dim == axis:
            found.append(_Cut(count, index, placement.split_factor))
        elif isinstance(placement, Shard) and placement.dim == axis:
            found.append(_Cut(count, index, None))
    return found


def _readings(size: int, cuts: Sequence[_Cut]) -> list[list[Interval]]:
    """What the cuts can mean along an axis of ``size``: as it was cut first, then left to right."""
    found = []
    order = _as_cut(cuts)
    if order is not None:
        found.append(_apply(size, order))
    found.append(_apply(size, cuts))
    return found


def _as_cut(cuts: Sequence[_Cut]) -> list[_Cut] | None:
    """The cuts as plain chunks in the order in which they were made, or None where the split factors tell of no
    order. From the right: each cut goes behind those that made as many parts as its split factor says."""
    order: list[_Cut] = []
    for cut in reversed(cuts):
        place, parts = 0, 1
        wanted = 1 if cut.split_factor is None else cut.split_factor
        while parts < wanted and place < len(order):
            parts *= order[place].count
            place += 1
        if parts != wanted:
            return None
        order.insert(place, _Cut(cut.count, cut.index, None))
    return order


def _apply(size: int, cuts: Sequence[_Cut]) -> list[Interval]:
    held = [(0, size)] if size else []
    for cut in cuts:
        if cut.split_factor is None:
            held = _chunk(held, cut.count, cut.index)
        else:
            parts = [_chunk(held, cut.split_factor, part) for part in range(cut.split_factor)]
            held = _merge(interval for part in parts for interval in _chunk(part, cut.count, cut.index))
    return held


def _chunk(held: Sequence[Interval], count: int, index: int) -> list[Interval]:
    """Chunk ``index`` of ``count`` of the elements in ``held``, taken one behind the other."""
    total = sum(length for _, length in held)
    size = -(-total // count)
    low, high = min(index * size, total), min((index + 1) * size, total)
    found, position = [], 0
    for start, length in held:
        begin, end = max(low, position), min(high, position + length)
        if begin < end:
            found.append((start + begin - position, end - begin))
        position += length
    return found


def _merge(held: Iterable[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for start, length in held:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return found


def _product(held: Sequence[Sequence[Interval]]) -> list[Region]:
    """Every combination of the axes' intervals, each with its place in the local tensor."""
    placed = []
    for axis in held:
        position = 0
        rows = []
        for start, length in axis:
            rows.append((start, length, position))
            position += length
        placed.append(rows)
    return [
        Region(Box(tuple(x[0] for x in row), tuple(x[1] for x in row)), tuple(x[2] for x in row))
        for row in itertools.product(*placed)
    ]
