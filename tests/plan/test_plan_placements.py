"""Regions of placements: against brute force on indices, in both orders of cutting, and against each other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from everstep.format.entries import Box
from everstep.plan.boxes import misfit
from everstep.plan.placements import (
    Placement,
    Replicate,
    Shard,
    StridedShard,
    expected_shapes,
    flat_boxes,
    regions,
    sharded_axes,
)

Indices = list[int]


def chunk(held: Indices, count: int, index: int) -> Indices:
    """As torch.chunk, with empty chunks where it gives fewer."""
    size = -(-len(held) // count)
    return held[index * size : (index + 1) * size]


def left_to_right(
    size: int, mesh: Sequence[int], at: Sequence[int], placements: Sequence[Placement]
) -> Indices:
    """What a rank holds of one axis as tensors are distributed: element by element."""
    held = list(range(size))
    for count, index, placement in zip(mesh, at, placements, strict=True):
        if isinstance(placement, Shard):
            held = chunk(held, count, index)
        elif isinstance(placement, StridedShard):
            parts = [chunk(held, placement.split_factor, part) for part in range(placement.split_factor)]
            held = [index_ for part in parts for index_ in chunk(part, count, index)]
    return held


def indices(shape: Sequence[int], box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))))


def held_indices(
    shape: Sequence[int],
    mesh: Sequence[int],
    at: Sequence[int],
    placements: Sequence[Placement],
    local: Sequence[int],
) -> Indices:
    """Of a tensor with one axis: its elements in the local order, of which every region says where they lie."""
    found = regions(shape, mesh, at, placements, local)
    assert found is not None, (shape, mesh, at, placements, local)
    row: Indices = [-1] * local[0]
    for region in found:
        begin, length, start = region.local[0], region.box.lengths[0], region.box.offsets[0]
        assert length > 0
        row[begin : begin + length] = range(start, start + length)
    assert -1 not in row
    return row


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_plain_shards_are_chunks(world: int) -> None:
    for size in range(10):
        seen: Indices = []
        for rank in range(world):
            expected = chunk(list(range(size)), world, rank)
            if size:
                found = held_indices([size], [world], [rank], [Shard(0)], [len(expected)])
                assert found == expected
                seen += found
                for wrong in {len(expected) + 1, max(len(expected) - 1, 0)} - {len(expected)}:
                    assert regions([size], [world], [rank], [Shard(0)], [wrong]) is None
        assert seen == list(range(size))


@pytest.mark.parametrize(("dp", "tp"), list(itertools.product((2, 3, 4), (2, 3, 4))))
def test_data_parallel_over_tensor_parallel(dp: int, tp: int) -> None:
    """The tensor parallel shard is cut first, then chunked: what is held tells it apart from a strided one."""
    placements = (StridedShard(0, tp), Shard(0))
    for size in range(1, 20):
        seen: Indices = []
        for at in itertools.product(range(dp), range(tp)):
            held = chunk(chunk(list(range(size)), tp, at[1]), dp, at[0])
            found = held_indices([size], [dp, tp], at, placements, [len(held)])
            assert found == held
            seen += found
        assert sorted(seen) == list(range(size))


@pytest.mark.parametrize(("dp", "tp"), list(itertools.product((2, 3, 4), (2, 3, 4))))
def test_the_same_placements_distributed_left_to_right(dp: int, tp: int) -> None:
    """Never silently wrong: each rank's region is right, or a rank refuses, or the regions do not tile."""
    placements = (StridedShard(0, tp), Shard(0))
    for size in range(1, 20):
        right, boxes = True, []
        for at in itertools.product(range(dp), range(tp)):
            held = left_to_right(size, [dp, tp], at, placements)
            found = held_indices([size], [dp, tp], at, placements, [len(held)])
            right = right and found == held
            region = regions([size], [dp, tp], at, placements, [len(held)])
            assert region is not None
            boxes += [r.box for r in region]
        assert right or misfit(boxes, Box.full((size,))) is not None, (size, dp, tp)


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), StridedShard(0, 2)),
        (Shard(0), StridedShard(0, 3)),
        (StridedShard(0, 2), Replicate()),
        (Replicate(), StridedShard(0, 3)),
        (StridedShard(0, 3), StridedShard(0, 2)),
        (Shard(0), Shard(0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("mesh", list(itertools.product((2, 3), (2, 3))), ids=str)
def test_other_strided_shards_have_several_regions(
    placements: tuple[Placement, ...], mesh: tuple[int, int]
) -> None:
    for size in range(1, 20):
        count = [0] * size
        for at in itertools.product(*map(range, mesh)):
            held = left_to_right(size, mesh, at, placements)
            assert held_indices([size], mesh, at, placements, [len(held)]) == held
            for index in held:
                count[index] += 1
        assert len(set(count)) == 1


def test_three_mesh_axes_cut_from_the_right() -> None:
    """Data parallel over expert parallel over tensor parallel, all on one axis, in both orders of the latter."""
    for size in range(1, 30):
        for at in itertools.product(range(3), range(2), range(2)):
            dp, ep, tp = at
            held = chunk(chunk(chunk(list(range(size)), 2, ep), 2, tp), 3, dp)
            placements: tuple[Placement, ...] = (StridedShard(0, 4), Shard(0), Shard(0))
            assert held_indices([size], [3, 2, 2], at, placements, [len(held)]) == held
            held = chunk(chunk(chunk(list(range(size)), 2, tp), 2, ep), 3, dp)
            placements = (StridedShard(0, 4), StridedShard(0, 2), Shard(0))
            assert held_indices([size], [3, 2, 2], at, placements, [len(held)]) == held
            held = chunk(chunk(chunk(list(range(size)), 2, tp), 3, dp), 2, ep)
            placements = (StridedShard(0, 2), StridedShard(0, 2), Shard(0))
            assert held_indices([size], [3, 2, 2], at, placements, [len(held)]) == held


def test_random_meshes_and_axes() -> None:
    """Tensors of up to three axes, all mesh axes anywhere: each rank's regions against brute force, and together
    they have every element as often as there are replicas."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        axes = rng.randint(1, 3)
        shape = [rng.randint(1, 7) for _ in range(axes)]
        mesh = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
        placements = [rng.choice([Replicate(), Shard(rng.randrange(axes))]) for _ in mesh]
        total: dict[tuple[int, ...], int] = {}
        for at in itertools.product(*map(range, mesh)):
            rows = [
                left_to_right(size, mesh, at, [p if p == Shard(axis) else Replicate() for p in placements])
                for axis, size in enumerate(shape)
            ]
            found = regions(shape, mesh, at, placements, [len(row) for row in rows])
            assert found is not None
            mine = [index for region in found for index in indices(shape, region.box)]
            assert sorted(mine) == sorted(itertools.product(*rows))
            for index in mine:
                total[index] = total.get(index, 0) + 1
        replicas = 1
        for size, placement in zip(mesh, placements, strict=True):
            replicas *= size if placement == Replicate() else 1
        assert set(total.values()) == {replicas} and len(total) == len(
            list(itertools.product(*map(range, shape)))
        )


def test_regions_of_several_axes_lie_where_they_say() -> None:
    found = regions([4, 4], [2, 2], [1, 0], [StridedShard(0, 2), StridedShard(1, 2)], [2, 2])
    assert found is not None and len(found) == 4
    assert {(r.box.offsets, r.box.lengths, r.local) for r in found} == {
        ((1, 0), (1, 1), (0, 0)),
        ((1, 2), (1, 1), (0, 1)),
        ((3, 0), (1, 1), (1, 0)),
        ((3, 2), (1, 1), (1, 1)),
    }


def test_no_elements_and_no_axes() -> None:
    whole = regions([0, 4], [2], [1], [Shard(0)], [0, 4])
    assert whole is not None and [r.box for r in whole] == [Box((0, 0), (0, 4))]
    scalar = regions([], [2], [1], [Replicate()], [])
    assert scalar is not None and [r.box for r in scalar] == [Box((), ())]
    assert regions([3, 4], [4], [3], [Shard(0)], [0, 4]) == ()
    assert regions([3, 4], [4], [3], [Shard(0)], [0]) == ()


def test_what_cannot_be() -> None:
    assert regions([4], [2], [0], [Shard(0)], [0]) is None
    assert regions([4], [2], [0], [Shard(1)], [4]) is None
    assert regions([4], [2], [0], [Shard(0), Shard(0)], [2]) is None
    assert regions([4, 4], [2], [0], [Shard(0)], [2]) is None
    assert regions([4], [2, 2], [0, 0], [StridedShard(0, 3), Shard(0)], [3]) is None
    assert expected_shapes([4, 6], [2], [0], [Shard(1)]) == [(4, 3)]
    assert expected_shapes([7, 4], [3, 2], [2, 0], [StridedShard(0, 2), Shard(0)]) == [(0, 4), (1, 4)]
    assert sharded_axes([Replicate(), Shard(1), StridedShard(0, 2)]) == [1, 2]


def test_flat_ranges() -> None:
    for shape in [(7,), (3, 4), (2, 3, 4), (2, 1, 3, 2), (1, 5), ()]:
        flat = list(itertools.product(*map(range, shape)))
        for start in range(len(flat) + 1):
            for count in range(len(flat) - start + 1):
                boxes = flat_boxes(shape, start, count)
                inside = [
                    index
                    for box in boxes
                    for index in itertools.product(
                        *(range(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
                    )
                ]
                assert inside == flat[start : start + count]
                assert len(boxes) <= max(2 * len(shape) - 1, 1)
    for start, count in [(-1, 2), (0, 13), (12, 1), (3, -1)]:
        with pytest.raises(ValueError):
            flat_boxes((3, 4), start, count)
