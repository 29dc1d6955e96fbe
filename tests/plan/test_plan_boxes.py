"""Boxes against one element at a time."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from everstep.format.entries import Box
from everstep.plan.boxes import Block, BoxIndex, blocks, contains, intersect, is_valid, misfit, subtract
from hypothesis import given, settings
from hypothesis import strategies as st

from .tilings import points, random_box, random_shape, tiling

RNG = st.randoms(use_true_random=False)


@given(RNG)
def test_intersection_and_difference(rng: random.Random) -> None:
    shape = random_shape(rng)
    a, b = random_box(rng, shape), random_box(rng, shape)
    common = set(points(a)) & set(points(b))
    region = intersect(a, b)
    assert set(points(region) if region else ()) == common
    if region is not None:
        rest = [point for box in subtract(a, region) for point in points(box)]
        assert len(rest) == len(set(rest))
        assert set(rest) == set(points(a)) - common
    for point in points(Box.full(shape)):
        assert contains(a, point) == (point in set(points(a)))


@given(RNG)
@settings(max_examples=300)
def test_misfits_are_found_exactly(rng: random.Random) -> None:
    target = random_box(rng, random_shape(rng))
    boxes = tiling(rng, target, rng.randint(1, 8))
    for _ in range(rng.randint(0, 2)):  # spoil it, perhaps
        choice = rng.randrange(3)
        if choice == 0 and boxes:
            boxes.pop(rng.randrange(len(boxes)))
        elif choice == 1:
            inner = random_box(rng, target.lengths)
            moved = tuple(o + t for o, t in zip(inner.offsets, target.offsets, strict=True))
            boxes.append(Box(moved, inner.lengths))
        elif boxes:
            boxes.append(rng.choice(boxes))
    counts = Counter(point for box in boxes for point in points(box))
    wrong = [(point, counts[point] - 1) for point in points(target) if counts[point] != 1]
    assert misfit(boxes, target) == (wrong[0] if wrong else None)


def test_a_gap_and_an_overlap_of_one_size_do_not_cancel() -> None:
    boxes = [Box((0,), (4,)), Box((2,), (4,))]
    assert misfit(boxes, Box((0,), (8,))) == ((2,), 1)
    assert misfit([Box((4,), (4,)), Box((4,), (4,))], Box((0,), (8,))) == ((0,), -1)


def test_tensors_without_axes_and_without_elements() -> None:
    scalar = Box((), ())
    assert misfit([scalar], scalar) is None
    assert misfit([], scalar) == ((), -1)
    assert misfit([scalar, scalar], scalar) == ((), 1)
    empty = Box((0, 0), (3, 0))
    assert misfit([], empty) is None and misfit([empty], empty) is None


def test_too_many_cut_axes_are_refused_before_the_work() -> None:
    halves = [Box((0,) * 40, (1,) * 40), Box((1,) * 40, (1,) * 40)]
    with pytest.raises(ValueError, match="40 axes"):
        misfit(halves, Box((0,) * 40, (2,) * 40))


@given(RNG)
@settings(max_examples=300)
def test_blocks_copy_each_element_to_its_place_in_as_few_runs_as_can_be(rng: random.Random) -> None:
    shape = random_shape(rng, axes_max=4)
    source, target = random_box(rng, shape), random_box(rng, shape)
    region = intersect(source, target)
    if region is None:
        return
    source_at = {point: index for index, point in enumerate(points(source))}
    target_at = {point: index for index, point in enumerate(points(target))}
    expected = {source_at[point]: target_at[point] for point in points(region)}
    found = list(blocks(region, source, target))
    pieces = [
        (block.source_at + i * block.source_step, block.target_at + i * block.target_step, block.length)
        for block in found
        for i in range(block.runs)
    ]
    copied = {a + i: b + i for a, b, n in pieces for i in range(n)}
    assert copied == expected
    assert sum(n for _, _, n in pieces) == len(expected)
    breaks = sum(1 for s, t in expected.items() if expected.get(s - 1) != t - 1)
    assert len(pieces) == breaks
    assert all(block.runs > 1 or block[4:] == (0, 0) for block in found)
    longest = found[0].runs
    assert all(block.runs == longest for block in found)
    assert len(found) <= longest ** max(len(shape) - 1, 0), "the other axes are shorter"


def test_boxes_cut_along_one_axis_differ_by_one_block() -> None:
    """A column-wise cut, of a matrix and of a convolution's weights, is one block however many rows there are."""
    matrix = Box.full((1000, 64))
    columns = Box((0, 16), (1000, 16))
    assert list(blocks(columns, matrix, columns)) == [Block(16, 0, 16, 1000, 64, 16)]
    assert list(blocks(columns, columns, matrix)) == [Block(0, 16, 16, 1000, 16, 64)]
    kernel = Box.full((8, 6, 3, 3))
    inputs = Box((0, 2, 0, 0), (8, 2, 3, 3))
    assert list(blocks(inputs, kernel, inputs)) == [Block(18, 0, 18, 8, 54, 18)]
    last = Box((0, 0, 0, 1), (8, 6, 3, 2))
    assert list(blocks(last, kernel, last)) == [Block(1, 0, 2, 144, 3, 2)]
    assert len(list(blocks(inputs, inputs, inputs))) == len(list(blocks(kernel, kernel, kernel))) == 1


@given(RNG, st.integers(0, 60))
def test_the_index_forgets_no_box(rng: random.Random, count: int) -> None:
    shape = random_shape(rng, size_max=30)
    boxes = [random_box(rng, shape) for _ in range(count)]
    index = BoxIndex(boxes)
    for _ in range(5):
        wanted = random_box(rng, shape)
        near = index.near(wanted)
        assert near == sorted(near)
        assert {i for i, box in enumerate(boxes) if intersect(box, wanted) is not None} <= set(near)


def test_the_index_is_worth_it() -> None:
    index = BoxIndex([Box((0, 4 * i), (8, 4)) for i in range(1000)])
    assert index.near(Box((0, 400), (8, 8))) == [100, 101]


def test_validity() -> None:
    assert is_valid(Box((1, 0), (2, 0)), (3, 4)) and is_valid(Box((), ()), ())
    for box in (Box((1,), (3,)), Box((-1,), (2,)), Box((0,), (-1,)), Box((0, 0), (1, 1)), Box((0,), (1, 1))):
        assert not is_valid(box, (3,))
