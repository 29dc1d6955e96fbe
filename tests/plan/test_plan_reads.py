"""Load plans, executed on real bytes and compared with the tensor, one element at a time."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest
from everstep.errors import Damaged, StateMismatch
from everstep.format.layout import Box, Entry, EntrySpec, Layout, Scope, build_layout
from everstep.plan.reads import Read, plan_reads, segments
from hypothesis import given, settings
from hypothesis import strategies as st

from .tilings import points, random_box, random_shape, tiling

GLOBAL, RANK = Scope.GLOBAL, Scope.RANK
Images = dict[tuple[int, str], bytearray]


def spec(
    key: str, shape: tuple[int, ...], boxes: list[Box], scope: Scope = GLOBAL, **more: object
) -> EntrySpec:
    dtype = more.pop("dtype", "int32")
    return EntrySpec("model", key, dtype, shape, tuple(boxes), scope, **more)  # type: ignore[arg-type]


def element(key: str, point: tuple[int, ...], rank: int | None) -> bytes:
    """The four bytes of one element of an int32 tensor: they tell key, place and (for RANK tensors) rank."""
    return random.Random(f"{key}{point}{rank}").randbytes(4)


def content(entry: Entry, rank: int | None) -> bytes:
    """What the boxes of ``entry`` hold, one behind the other."""
    own = rank if entry.scope is RANK else None
    return b"".join(element(entry.key, point, own) for box in entry.boxes for point in points(box))


def filled(layouts: list[Layout]) -> Images:
    images: Images = {}
    for rank, layout in enumerate(layouts):
        for image in layout.images:
            images[rank, image.name] = bytearray(image.header + bytes(image.nbytes - len(image.header)))
        for entry in layout.entries:
            if entry.image is not None:
                data = images[rank, layout.images[entry.image].name]
                data[entry.offset : entry.offset + entry.nbytes] = content(entry, rank)
    return images


def execute(reads: list[Read], wanted: tuple[Entry, ...], images: Images) -> list[bytes]:
    """The bytes of each wanted entry; every byte must be written exactly once."""
    out = [bytearray(entry.nbytes) for entry in wanted]
    writes = [bytearray(entry.nbytes) for entry in wanted]
    for read in reads:
        assert read.nbytes > 0
        image = images[read.rank, read.image]
        assert read.image_offset + read.nbytes <= len(image)
        piece = slice(read.dest_offset, read.dest_offset + read.nbytes)
        assert piece.stop <= len(out[read.entry_index])
        out[read.entry_index][piece] = image[read.image_offset : read.image_offset + read.nbytes]
        for at in range(piece.start, piece.stop):
            writes[read.entry_index][at] += 1
    assert all(count == 1 for written in writes for count in written)
    return [bytes(data) for data in out]


def spread(rng: random.Random, world: int, keys: dict[str, tuple[int, ...]], replicas: float) -> list[Layout]:
    """Layouts of ``world`` ranks that store every key: tiled at random, some tiles twice or more."""
    ranks: list[list[EntrySpec]] = [[] for _ in range(world)]
    for key, shape in keys.items():
        held: list[list[Box]] = [[] for _ in range(world)]
        for box in tiling(rng, Box.full(shape), rng.randint(1, 6)):
            held[rng.randrange(world)].append(box)
        for boxes in held:
            if rng.random() < replicas:
                boxes.append(random_box(rng, shape))
        for rank, boxes in enumerate(held):
            rng.shuffle(boxes)
            ranks[rank].append(spec(key, shape, list(dict.fromkeys(boxes))))
    for rank in ranks:
        rng.shuffle(rank)
    return [build_layout(rank) for rank in ranks]


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_boxes_are_filled_from_any_others(rng: random.Random, world: int, replicated: bool) -> None:
    keys = {key: random_shape(rng) for key in ("a", "b")}
    layouts = spread(rng, world, keys, 0.5 if replicated else 0.0)
    wanted = build_layout(
        [
            spec(key, shape, list(dict.fromkeys(random_box(rng, shape) for _ in range(rng.randint(0, 3)))))
            for key, shape in keys.items()
        ]
    ).entries
    own = rng.choice([None, *range(world + 2)])
    reads = plan_reads(wanted, layouts, own)
    assert execute(reads, wanted, filled(layouts)) == [content(entry, None) for entry in wanted]
    order = [(read.entry_index, read.dest_offset) for read in reads]
    assert order == sorted(order)
    for a, b in pairwise(reads):  # neighbours in both places would be one read
        same = (a.entry_index, a.rank, a.image) == (b.entry_index, b.rank, b.image)
        joined = a.dest_offset + a.nbytes == b.dest_offset and a.image_offset + a.nbytes == b.image_offset
        assert not (same and joined)


@given(st.randoms(use_true_random=False), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_segments_hold_each_read_once_and_no_chunk_twice(rng: random.Random, chunk_bytes: int) -> None:
    layouts = spread(rng, 3, {key: random_shape(rng) for key in "abc"}, 0.3)
    wanted = build_layout([spec(e.key, e.shape, [Box.full(e.shape)]) for e in layouts[0].entries]).entries
    reads = plan_reads(wanted, layouts, 0)
    found = segments(reads, chunk_bytes)
    assert sorted((r for s in found for r in s.reads), key=repr) == sorted(reads, key=repr)
    ends: dict[tuple[int, str], int] = defaultdict(lambda: -1)
    for segment in found:
        assert segment.begin % chunk_bytes == segment.end % chunk_bytes == 0
        assert segment.begin > ends[segment.rank, segment.image]  # not even adjacent
        ends[segment.rank, segment.image] = segment.end
        needed = set()
        for read in segment.reads:
            assert (read.rank, read.image) == (segment.rank, segment.image)
            needed |= set(
                range(read.image_offset // chunk_bytes, -(-(read.image_offset + read.nbytes) // chunk_bytes))
            )
        assert needed == set(range(segment.begin // chunk_bytes, segment.end // chunk_bytes))


# ---------------------------------------------------------------------------------------- which source


def full(key: str, shape: tuple[int, ...] = (8,), scope: Scope = GLOBAL, **more: object) -> EntrySpec:
    return spec(key, shape, [Box.full(shape)], scope, **more)


def plan(wanted: list[EntrySpec], layouts: list[list[EntrySpec]], rank: int | None) -> list[Read]:
    return plan_reads(build_layout(wanted).entries, [build_layout(entries) for entries in layouts], rank)


def test_an_unchanged_layout_is_one_read_an_entry() -> None:
    entries = [
        full("a"),
        spec("b", (9, 4), [Box((0, 0), (3, 4)), Box((6, 1), (3, 2))]),
        full("empty", (0, 3)),
    ]
    layout = build_layout(entries)
    reads = plan_reads(layout.entries, [layout], 0)
    assert [(r.entry_index, r.image_offset, r.nbytes, r.dest_offset) for r in reads] == [
        (index, entry.offset, entry.nbytes, 0) for index, entry in enumerate(layout.entries) if entry.nbytes
    ]


def test_own_rank_then_the_lowest() -> None:
    everywhere = [[full("a")]] * 4
    assert [read.rank for read in plan([full("a")], everywhere, 2)] == [2]
    assert [read.rank for read in plan([full("a")], everywhere, None)] == [0]
    assert [read.rank for read in plan([full("a")], everywhere, 9)] == [0]
    elsewhere = [[full("a", stored=False)], [full("a", stored=False)], [full("a")], [full("a")]]
    assert [read.rank for read in plan([full("a")], elsewhere, 0)] == [2]
    left, right = Box((0,), (4,)), Box((4,), (4,))
    mixed = [[full("a")], [spec("a", (8,), [right])], [spec("a", (8,), [left])]]
    assert [(r.rank, r.nbytes) for r in plan([full("a")], mixed, 1)] == [(0, 16), (1, 16)]


def test_whose_tensor_may_fill_whose() -> None:
    own = [[full("a", scope=RANK)], [full("a", scope=RANK)]]
    assert [read.rank for read in plan([full("a", scope=RANK)], own, 1)] == [1]
    common = [[full("a")], [full("a", stored=False)]]
    assert [read.rank for read in plan([full("a", scope=RANK)], common, 1)] == [0]
    single = [[full("a", scope=RANK)]]
    assert [read.rank for read in plan([full("a")], single, 3)] == [0]
    with pytest.raises(StateMismatch, match=r"model/a: stored only as the own tensor of ranks \[0, 1\]"):
        plan([full("a")], own, 0)
    with pytest.raises(StateMismatch, match=r"stored only as the own tensor of ranks \[0, 1\]"):
        plan([full("a", scope=RANK)], own, 2)


def test_everything_that_does_not_fit_is_named_at_once() -> None:
    stored = [[full("a"), full("b"), full("c", dtype="float32")]]
    wanted = [full("a", (2, 4)), full("missing"), full("c", dtype="bfloat16"), full("b")]
    with pytest.raises(StateMismatch) as caught:
        plan(wanted, stored, 0)
    assert caught.value.keys == ("model/a", "model/missing", "model/c")
    for text in (
        "int32[8] stored by rank 0, int32[2, 4] wanted",
        "not in the checkpoint",
        "bfloat16[8] wanted",
    ):
        assert text in str(caught.value)


@pytest.mark.parametrize("shape", [(4, 2), (2, 8), (16,), (4, 4, 1), (1, 4, 4), (16, 1)])
def test_shapes_must_be_equal(shape: tuple[int, ...]) -> None:
    with pytest.raises(StateMismatch):
        plan([full("a", shape)], [[full("a", (4, 4))]], 0)


def test_elements_stored_nowhere_are_damage() -> None:
    holes = [[spec("a", (8,), [Box((0,), (4,)), Box((2,), (4,))])], [spec("a", (8,), [Box((7,), (1,))])]]
    with pytest.raises(Damaged, match=r"model/a: element \(6,\)"):
        plan([full("a")], holes, 0)
    with pytest.raises(Damaged, match=r"model/a: element \(6,\)"):
        plan([full("a")], holes[:1], 0)  # as many elements as are wanted, but not the same
    assert plan([spec("a", (8,), [Box((0,), (6,))])], holes, 0)


def test_elements_that_share_bytes_are_read_whole_or_not_at_all() -> None:
    packed = [[full("a", (5,), dtype="quint4x2")]]
    assert [read.nbytes for read in plan([full("a", (5,), dtype="quint4x2")], packed, 0)] == [3]
    half = [spec("a", (5,), [Box((0,), (2,))], dtype="quint4x2")]
    with pytest.raises(StateMismatch, match="shares bytes"):
        plan(half, packed, 0)
    two = [[spec("a", (5,), [Box((2,), (3,)), Box((0,), (2,))], dtype="quint4x2")]]
    reads = plan([spec("a", (5,), [Box((0,), (2,)), Box((2,), (3,))], dtype="quint4x2")], two, 0)
    assert [(read.dest_offset, read.nbytes) for read in reads] == [(0, 1), (1, 2)]


def test_a_checkpoint_without_ranks_has_nothing() -> None:
    assert plan([], [], 0) == []
    with pytest.raises(StateMismatch, match="not in the checkpoint"):
        plan([full("a")], [], 0)
