"""Load plans, executed on real bytes and compared with the tensor, one element at a time."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest
from everstep.errors import Damaged, StateMismatch
from everstep.format.layout import Box, Entry, EntrySpec, Layout, Scope, build_layout
from everstep.plan.reads import Read, chunk_ranges, clip, plan_reads
from hypothesis import given, settings
from hypothesis import strategies as st

from .tilings import points, random_box, random_shape, tiling

GLOBAL, RANK, FIRST = Scope.GLOBAL, Scope.RANK, Scope.FIRST
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


def runs(read: Read) -> list[Read]:
    """Each run of ``read`` as a read of its own."""
    assert (read.image_stride, read.dest_stride) == (0, 0) if read.runs == 1 else read.image_stride > 0
    return [
        Read(
            read.entry_index,
            read.rank,
            read.image,
            read.image_offset + i * read.image_stride,
            read.nbytes,
            read.dest_offset + i * read.dest_stride,
        )
        for i in range(read.runs)
    ]


def execute(reads: list[Read], wanted: tuple[Entry, ...], images: Images) -> list[bytes]:
    """The bytes of each wanted entry; every byte must be written exactly once."""
    out = [bytearray(entry.nbytes) for entry in wanted]
    writes = [bytearray(entry.nbytes) for entry in wanted]
    for read in reads:
        assert read.total > 0
        image = images[read.rank, read.image]
        for run in runs(read):
            assert run.image_end <= len(image)
            piece = slice(run.dest_offset, run.dest_offset + run.nbytes)
            assert piece.stop <= len(out[run.entry_index])
            out[run.entry_index][piece] = image[run.image_offset : run.image_end]
            for at in range(piece.start, piece.stop):
                writes[run.entry_index][at] += 1
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
    single = [read for read in reads if read.runs == 1]
    ends = {(r.entry_index, r.rank, r.image, r.image_end, r.dest_offset + r.nbytes) for r in single}
    begins = {(r.entry_index, r.rank, r.image, r.image_offset, r.dest_offset) for r in single}
    assert not ends & begins, "neighbours in both places would be one read"


def a_read(rng: random.Random) -> tuple[Read, int]:
    """Any read, and the size of an image that holds it."""
    nbytes, count = rng.randint(1, 40), rng.choice([1, 1, rng.randint(2, 30)])
    strides = (
        (nbytes + rng.choice([0, rng.randint(1, 300)]), nbytes + rng.randint(0, 9)) if count > 1 else (0, 0)
    )
    read = Read(3, 1, "i", rng.randint(0, 300), nbytes, rng.randint(0, 99), count, *strides)
    return read, read.image_end + rng.randint(0, 99)


@given(st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_a_clipped_read_is_its_bytes_in_the_range(rng: random.Random) -> None:
    read, nbytes = a_read(rng)
    begin = rng.randint(0, nbytes)
    end = rng.randint(begin, nbytes)

    def places(some: list[Read]) -> list[tuple[int, int]]:
        return [
            (r.image_offset + i, r.dest_offset + i)
            for one in some
            for r in runs(one)
            for i in range(r.nbytes)
        ]

    found = list(clip(read, begin, end))
    assert places(found) == [(at, dest) for at, dest in places([read]) if begin <= at < end]
    assert len(found) <= 3 and all(one[:3] == read[:3] for one in found)


@given(st.randoms(use_true_random=False), st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_exactly_the_chunks_that_are_touched_are_needed(rng: random.Random, chunk_bytes: int) -> None:
    some = [a_read(rng) for _ in range(rng.randint(0, 5))]
    nbytes = max((size for _, size in some), default=10)
    head = rng.choice([0, rng.randint(0, 10)])
    ranges = chunk_ranges([read for read, _ in some], chunk_bytes, nbytes, head)
    touched = set(range(-(-head // chunk_bytes)))
    for read, _ in some:
        for run in runs(read):
            touched |= set(range(run.image_offset // chunk_bytes, (run.image_end - 1) // chunk_bytes + 1))
    assert {
        c for begin, end in ranges for c in range(begin // chunk_bytes, -(-end // chunk_bytes))
    } == touched
    edges = [edge for both in ranges for edge in both]
    assert edges == sorted(set(edges)), "ascending, not empty, not even adjacent"
    assert all(edge % chunk_bytes == 0 or edge == nbytes for edge in edges)


# ---------------------------------------------------------------------------------------- which source


def full(key: str, shape: tuple[int, ...] = (8,), scope: Scope = GLOBAL, **more: object) -> EntrySpec:
    return spec(key, shape, [Box.full(shape)], scope, **more)


def plan(
    wanted: list[EntrySpec],
    layouts: list[list[EntrySpec]],
    rank: int | None,
    equal: Collection[tuple[str, str]] = (),
) -> list[Read]:
    layouts_made = [build_layout(entries) for entries in layouts]
    return plan_reads(build_layout(wanted).entries, layouts_made, rank, equal=equal)


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
    for wanted in (RANK, GLOBAL, FIRST):
        assert [read.rank for read in plan([full("a", scope=wanted)], common, None)] == [0]
        assert [read.rank for read in plan([full("a", scope=wanted)], single, None)] == [0]
        with pytest.raises(
            StateMismatch, match=r"model/a: stored only as the own tensor of ranks \[0, 1\]"
        ) as e:
            plan([full("a", scope=wanted)], own, None)
        assert "replicated" in str(e.value) and e.value.keys == ("model/a",)
        assert [read.rank for read in plan([full("a", scope=wanted)], own, None, [("model", "a")])] == [0]
    with pytest.raises(StateMismatch, match=r"stored only as the own tensor of ranks \[0, 1\]"):
        plan([full("a")], own, 0)  # one tensor of the job is not any one rank's


def test_a_tensor_of_the_first_rank_counts_where_there_is_no_own() -> None:
    first = [[full("a", scope=FIRST)] for _ in range(3)]
    for wanted in (RANK, FIRST):
        assert [read.rank for read in plan([full("a", scope=wanted)], first, 2)] == [2]
        assert [read.rank for read in plan([full("a", scope=wanted)], first, None)] == [0]
    assert [read.rank for read in plan([full("a")], first, 2)] == [0]
    elsewhere = [[full("b")], *first[1:]]
    assert [read.rank for read in plan([full("a", scope=FIRST)], elsewhere, None)] == [1]
    mixed = [[full("a", scope=RANK)], first[1]]
    with pytest.raises(StateMismatch, match=r"ranks \[0, 1\]"):
        plan([full("a", scope=FIRST)], mixed, None)


def test_one_key_may_be_wanted_in_many_boxes() -> None:
    layout = build_layout([full("a", (8, 4))])
    wanted = [build_layout([spec("a", (8, 4), [Box((i, 0), (1, 4))])]).entries[0] for i in range(8)]
    reads = plan_reads(wanted, [layout], None)
    offset = layout.entries[0].offset
    assert [(r.entry_index, r.image_offset, r.nbytes) for r in reads] == [
        (i, offset + 16 * i, 16) for i in range(8)
    ]


def test_a_reshard_by_columns_is_one_read_for_each_pair_of_boxes() -> None:
    rows = [[spec("a", (400, 60), [Box((100 * i, 0), (100, 60))])] for i in range(4)]
    column = spec("a", (400, 60), [Box((0, 20), (400, 20))])
    reads = plan([column], rows, None)
    assert [(r.rank, r.nbytes, r.runs, r.image_stride, r.dest_stride) for r in reads] == [
        (i, 80, 100, 240, 80) for i in range(4)
    ]
    halves = [
        spec("a", (400, 60), [Box((100 * i, 0), (50, 60)), Box((100 * i + 50, 0), (50, 60))])
        for i in range(4)
    ]
    assert plan([column], [[half] for half in halves], None) == reads, (
        "rows that go on in the image are joined"
    )


def test_a_sharded_tensor_without_elements_is_there_though_nobody_stores_it() -> None:
    nobody = [[spec("a", (0, 3), [])], [spec("a", (0, 3), [])]]
    assert plan([full("a", (0, 3))], nobody, None) == plan([spec("a", (0, 3), [])], nobody, 0) == []
    with pytest.raises(StateMismatch, match=r"int32\[0, 3\] stored by rank 0, int32\[0, 4\] wanted"):
        plan([full("a", (0, 4))], nobody, None)
    with pytest.raises(Damaged, match=r"model/b: element \(0,\)"):
        plan([full("b", (3,))], [[spec("b", (3,), [])]], None)
    assert plan([spec("b", (3,), [])], [[spec("b", (3,), [])]], None) == []


def test_many_ranks_and_many_tensors() -> None:
    """As many reads as there are boxes to read, and no more."""
    world, count = 64, 50
    layouts = [
        build_layout([spec(f"t{i}", (256, 8), [Box((4 * rank, 0), (4, 8))]) for i in range(count)])
        for rank in range(world)
    ]
    wanted = build_layout([spec(f"t{i}", (256, 8), [Box((0, 0), (128, 8))]) for i in range(count)]).entries
    assert len(plan_reads(wanted, layouts, None)) == 32 * count
    many = build_layout([full(f"t{i}", (3,), scope=RANK) for i in range(10_000)])
    assert len(plan_reads(many.entries, [many], 0)) == 10_000


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
