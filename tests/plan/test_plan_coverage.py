"""Whether ranks together store everything once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from everstep.errors import StateMismatch
from everstep.format.layout import Box, Entry, EntrySpec, ImageSpec, Layout, Scope, build_layout
from everstep.format.table import TableReader
from everstep.plan.coverage import check_coverage
from hypothesis import given, settings
from hypothesis import strategies as st

from .tilings import points, random_box, random_shape, tiling


def of(
    *boxes: Box, key: str = "w", shape: tuple[int, ...] = (8,), dtype: str = "float32", **more: object
) -> EntrySpec:
    return EntrySpec("model", key, dtype, shape, boxes, **{"scope": Scope.GLOBAL, **more})  # type: ignore[arg-type]


def check(*ranks: list[EntrySpec]) -> None:
    check_layouts([build_layout(rank) for rank in ranks])


def check_layouts(layouts: Sequence[Layout]) -> None:
    reader = TableReader()
    check_coverage(reader.of(layout) for layout in layouts)


FULL = Box((0,), (8,))
LEFT, RIGHT = Box((0,), (4,)), Box((4,), (4,))


def test_good_jobs_pass() -> None:
    check([])
    check([of(FULL)])
    check([of(FULL)], [of(FULL, stored=False)])
    check([of(LEFT)], [of(RIGHT)])
    check([of(LEFT, RIGHT)], [])
    check([of(FULL)], [of(FULL, key="other stage")])
    check([of(shape=())], [of(Box((), ()), shape=())])
    check([of(Box((0, 0), (0, 3)), shape=(0, 3))])
    private = EntrySpec("model", "rng", "uint8", (3,), (Box.full((3,)),))
    check([private], [private])


@pytest.mark.parametrize(
    ("ranks", "texts"),
    [
        ([[of(FULL, stored=False)], [of(FULL, stored=False)]], ["model/w: stored by no rank"]),
        ([[of(FULL)], [of(FULL)]], ["element (0,)", "stored 2 times, by ranks [0, 1]"]),
        ([[of(LEFT)], [of(Box((5,), (3,)))]], ["element (4,) of shape (8,) is stored by no rank"]),
        ([[of(LEFT)], [of(Box((3,), (5,)))]], ["element (3,)", "by ranks [0, 1]"]),
        ([[of(LEFT)], [of(RIGHT, dtype="float16")]], ["float32[8] on rank 0, float16[8] on rank 1"]),
        ([[of(LEFT)], [of(RIGHT, shape=(9,))]], ["float32[8] on rank 0, float32[9] on rank 1"]),
        ([[of(shape=(0,))], []], ["stored by no rank"]),
        ([[of(FULL)], [of(FULL, scope=Scope.RANK)]], ["one tensor of the job on rank 0, rank 1's own"]),
        (
            [[of(FULL, key="a"), of(FULL, key="b")], [of(FULL, key="a"), of(LEFT, key="b")]],
            ["model/a", "model/b"],
        ),
    ],
)
def test_bad_jobs_are_named(ranks: list[list[EntrySpec]], texts: list[str]) -> None:
    with pytest.raises(StateMismatch) as caught:
        check(*ranks)
    for text in texts:
        assert text in str(caught.value)
    assert caught.value.keys[0].startswith("model/")
    assert caught.value.count >= 1


def test_very_many_problems_make_a_short_message() -> None:
    with pytest.raises(StateMismatch) as caught:
        check([of(FULL, key=f"w{i}", stored=False) for i in range(1000)])
    assert caught.value.count == 1000
    assert len(str(caught.value)) < 2000 and "and 980 more" in str(caught.value)


def test_boxes_that_no_layout_would_hold_are_refused() -> None:
    wild = Entry("model", "w", "float32", (8,), (Box((6,), (4,)),), Scope.GLOBAL, 0, 4096, 16)
    with pytest.raises(StateMismatch, match="outside shape"):
        check_layouts([Layout((wild,), (ImageSpec("model", "model", bytes(4096), 4112),))])


def spread(
    rng: random.Random, shape: tuple[int, ...], world: int, *, pieces: int, wrong: float
) -> tuple[list[Box], list[list[Box]]]:
    """Boxes that tile ``shape``, of which with the probability ``wrong`` one is too many, or too few; and by rank."""
    boxes = tiling(rng, Box.full(shape), rng.randint(1, pieces))
    if rng.random() < wrong:
        boxes.append(random_box(rng, shape))
    if rng.random() < wrong:
        boxes.pop(rng.randrange(len(boxes)))
    boxes = list(dict.fromkeys(boxes))
    held: list[list[Box]] = [[] for _ in range(world)]
    for box in boxes:
        held[rng.randrange(world)].append(box)
    return boxes, held


@given(st.randoms(use_true_random=False), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_against_counting_elements(rng: random.Random, world: int) -> None:
    ranks: list[list[EntrySpec]] = [[] for _ in range(world)]
    good = True
    for key in ("a", "b", "c"):
        shape = random_shape(rng)
        boxes, held = spread(rng, shape, world, pieces=6, wrong=0.3)
        for rank in range(world):
            ranks[rank].append(of(*held[rank], key=key, shape=shape))
        counts = Counter(point for box in boxes for point in points(box))
        good = good and bool(boxes) and all(counts[point] == 1 for point in points(Box.full(shape)))
    if good:
        check(*ranks)
    else:
        with pytest.raises(StateMismatch):
            check(*ranks)


@given(st.randoms(use_true_random=False), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_what_is_wrong_is_named_exactly(rng: random.Random, world: int) -> None:
    """The first element with a wrong count, in the order of coordinates, how often, and by whom."""
    shape = random_shape(rng)
    boxes, held = spread(rng, shape, world, pieces=9, wrong=0.5)
    counts = Counter(point for box in boxes for point in points(box))
    wrong = next((point for point in sorted(points(Box.full(shape))) if counts[point] != 1), None)
    ranks = [[of(*some, shape=shape)] for some in held]
    if wrong is None and boxes:
        check(*ranks)
        return
    with pytest.raises(StateMismatch) as caught:
        check(*ranks)
    text = str(caught.value)
    if not boxes:
        assert "stored by no rank" in text
    elif not counts[wrong]:
        assert f"element {wrong} of shape {shape} is stored by no rank" in text
    else:
        by = [rank for rank in range(world) if any(wrong in set(points(box)) for box in held[rank])]
        assert f"element {wrong} of shape {shape} is stored {counts[wrong]} times, by ranks {by}" in text


def test_ranks_of_different_structure_together() -> None:
    """Stages with other keys, ranks with nothing, several boxes on a rank, tensors of other numbers of axes."""
    grid = [Box((row, column), (2, 3)) for row in (0, 2) for column in (0, 3)]
    stage = of(*grid[:3], key="grid", shape=(4, 6)), of(FULL, key="first stage")
    check(
        [*stage],
        [],
        [of(key="grid", shape=(4, 6)), of(LEFT)],
        [of(grid[3], key="grid", shape=(4, 6)), of(RIGHT), of(Box((), ()), shape=(), key="scalar")],
        [of(Box((0, 0, 0), (1, 2, 3)), key="deep", shape=(1, 2, 3)), of(FULL, key="last stage")],
    )
    with pytest.raises(StateMismatch, match=r"model/grid: element \(2, 3\)"):
        check([*stage], [of(LEFT), of(RIGHT, key="w2")], [of(RIGHT)], [of(LEFT, key="w2")])


def test_a_scalar_stored_twice_beside_one_stored_once() -> None:
    scalar = Box((), ())
    once, twice = of(scalar, key="once", shape=()), of(scalar, key="twice", shape=())
    with pytest.raises(StateMismatch, match=r"twice: element \(\) of shape \(\) is stored 2 times") as caught:
        check([once, twice], [twice])
    assert caught.value.count == 1


def test_sizes_beyond_32_bits() -> None:
    size = 1 << 40
    halves = Box((0, 0), (size // 2, 2)), Box((size // 2, 0), (size - size // 2, 2))
    check([of(halves[0], shape=(size, 2))], [of(halves[1], shape=(size, 2)), of(FULL, key="small")])
    short = Box((size // 2 + (1 << 32), 0), (size - size // 2 - (1 << 32), 2))
    with pytest.raises(StateMismatch, match=rf"element \({size // 2}, 0\)"):
        check([of(halves[0], shape=(size, 2))], [of(short, shape=(size, 2))])


def test_more_schemas_and_ways_to_hold_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.plan.coverage.SCHEMAS_MAX", 2)
    monkeypatch.setattr("everstep.plan.coverage.SHAPES_MAX", 2)
    ranks = [[of(Box((rank,), (1,)), shape=(12,)), of(FULL, key=f"stage {rank % 5}")] for rank in range(12)]
    for rank in range(5, 12):
        ranks[rank][1] = of(FULL, key=f"stage {rank % 5}", stored=False)
    check(*ranks)
    with pytest.raises(StateMismatch, match="stage 3: stored by no rank"):
        check(*[[one for one in rank if one.key != "stage 3" or not one.stored] for rank in ranks])


def test_many_keys_and_many_shards() -> None:
    """Quadratic work would end in the suite's time-out."""
    keys = 12_500
    layouts = []
    for rank in range(8):
        box = Box((rank,), (1,))
        layouts.append(build_layout([of(box, key=f"layers.{i}.w") for i in range(keys)]))
    check_layouts(layouts)  # 100,000 entries

    def sharded(count: int) -> list[Layout]:
        return [
            build_layout([of(*[Box((3 * i,), (3,)) for i in range(r, count, 4)], shape=(3 * count,))])
            for r in range(4)
        ]

    check_layouts(sharded(32_000))
