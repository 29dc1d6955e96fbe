"""Any tiling into any other: plans are carried out on numpy arrays and compared with slices of the tensor."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence

import numpy
import pytest
import torch
from everstep.errors import Damaged, StateMismatch
from everstep.format.entries import Box, Entry, EntrySpec, Layout, Scope
from everstep.format.layout import build_layout
from everstep.plan.boxes import blocks, intersect
from everstep.plan.reads import Read, plan_reads
from hypothesis import given, settings
from hypothesis import strategies as st

from .tilings import flat_boxes, points, random_box, random_shape, tiling

DTYPES = {"uint8": 1, "int16": 2, "float32": 4, "int64": 8, "complex128": 16}
Images = dict[tuple[int, str], numpy.ndarray]
Tensors = dict[str, numpy.ndarray]
"""Bytes of whole tensors by key: one axis more than the tensor, of the size of an element."""


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))


def flat(tensor: numpy.ndarray, boxes: Sequence[Box]) -> numpy.ndarray:
    """The bytes of ``boxes``, one behind the other."""
    return numpy.concatenate([numpy.zeros(0, numpy.uint8), *(tensor[slices(box)].ravel() for box in boxes)])


def images_of(layouts: Sequence[Layout], tensors: Tensors) -> Images:
    images: Images = {}
    for rank, layout in enumerate(layouts):
        for image in layout.images:
            images[rank, image.name] = numpy.zeros(image.nbytes, numpy.uint8)
        for entry in layout.entries:
            if entry.image is not None:
                data = images[rank, layout.images[entry.image].name]
                data[entry.offset : entry.offset + entry.nbytes] = flat(tensors[entry.key], entry.boxes)
    return images


def carry_out(reads: Sequence[Read], wanted: Sequence[Entry], images: Images) -> list[numpy.ndarray]:
    """The bytes of the wanted entries; each must be written once."""
    out = [numpy.zeros(entry.nbytes, numpy.uint8) for entry in wanted]
    written = [numpy.zeros(entry.nbytes, numpy.int64) for entry in wanted]
    for index, rank, image, at, nbytes, dest, count, step, dest_step in reads:
        for i in range(count):
            source = images[rank, image][at + i * step :][:nbytes]
            assert len(source) == nbytes > 0
            place = slice(dest + i * dest_step, dest + i * dest_step + nbytes)
            out[index][place] = source
            written[index][place] += 1
    assert all((counts == 1).all() for counts in written)
    return out


# ------------------------------------------------------------------------------------------- any to any


def by_cuts(rng: random.Random, shape: tuple[int, ...], world: int) -> list[list[Box]]:
    """Boxes by recursive cuts, each on a random rank."""
    held: list[list[Box]] = [[] for _ in range(world)]
    for box in tiling(rng, Box.full(shape), rng.randint(1, 8)):
        held[rng.randrange(world)].append(box)
    return held


def by_flat_ranges(rng: random.Random, shape: tuple[int, ...], world: int) -> list[list[Box]]:
    """Ranges of the flattened tensor, one for each rank, split into boxes."""
    volume = math.prod(shape)
    cuts = [0, *sorted(rng.randint(0, volume) for _ in range(world - 1)), volume]
    held = [flat_boxes(shape, begin, end) for begin, end in itertools.pairwise(cuts)]
    rng.shuffle(held)
    return held


def by_replicas(rng: random.Random, shape: tuple[int, ...], world: int) -> list[list[Box]]:
    """Boxes by recursive cuts, each on one rank or on several."""
    held: list[list[Box]] = [[] for _ in range(world)]
    for box in tiling(rng, Box.full(shape), rng.randint(1, 6)):
        for rank in rng.sample(range(world), rng.randint(1, world)):
            held[rank].append(box)
    return held


TILINGS = [by_cuts, by_flat_ranges, by_replicas]
Tiling = Callable[[random.Random, tuple[int, ...], int], list[list[Box]]]


def saved(rng: random.Random, tile: Tiling, world: int) -> tuple[list[Layout], Tensors, list[EntrySpec]]:
    """Two random tensors, tiled over ``world`` ranks: layouts, bytes, and each as one whole."""
    ranks: list[list[EntrySpec]] = [[] for _ in range(world)]
    tensors: Tensors = {}
    wholes = []
    for key in ("a", "b"):
        shape, dtype = random_shape(rng, axes_max=4, size_max=5), rng.choice([*DTYPES])
        whole = EntrySpec("model", key, dtype, shape, (Box.full(shape),), Scope.GLOBAL)
        data = random.Random(f"{key}{shape}").randbytes(math.prod(shape) * DTYPES[dtype])
        tensors[key] = numpy.frombuffer(data, numpy.uint8).reshape(*shape, DTYPES[dtype])
        for rank, boxes in enumerate(tile(rng, shape, world)):
            rng.shuffle(boxes)
            ranks[rank].append(dataclasses.replace(whole, boxes=tuple(boxes)))
        wholes.append(whole)
    for specs in ranks:
        rng.shuffle(specs)
    return [build_layout(specs) for specs in ranks], tensors, wholes


def wanted_of(rng: random.Random, wholes: Sequence[EntrySpec]) -> list[Entry]:
    """Random boxes of the tensors, several an entry, several entries a key."""
    wanted = []
    for whole in rng.choices(wholes, k=rng.randint(1, 4)):
        boxes = [random_box(rng, whole.shape) for _ in range(rng.randint(0, 3))]
        spec = dataclasses.replace(whole, boxes=tuple(dict.fromkeys(boxes)))
        wanted += build_layout([spec]).entries
    return wanted


def bound(wanted: Sequence[Entry], layouts: Sequence[Layout]) -> int:
    """The stated bound on the number of reads, where the stored boxes are a tiling: for each pair of a wanted and a
    stored box as many as there are blocks in it."""
    count = 0
    for entry in wanted:
        stored = {box for x in layouts for e in x.entries if e.key == entry.key for box in e.boxes}
        for box, source in itertools.product(entry.boxes, stored):
            region = intersect(box, source)
            count += 0 if region is None else len(list(blocks(region, source, box)))
    return count


@pytest.mark.parametrize("tile", TILINGS)
@given(st.randoms(use_true_random=False), st.integers(1, 5))
@settings(max_examples=250, deadline=None)
def test_every_byte_arrives_once_and_from_the_right_place(
    tile: Tiling, rng: random.Random, world: int
) -> None:
    layouts, tensors, wholes = saved(rng, tile, world)
    wanted = wanted_of(rng, wholes)
    reads = plan_reads(wanted, layouts, rng.choice([None, *range(world)]))
    found = carry_out(reads, wanted, images_of(layouts, tensors))
    for entry, data in zip(wanted, found, strict=True):
        assert (data == flat(tensors[entry.key], entry.boxes)).all()
    assert [(r.entry_index, r.dest_offset) for r in reads] == sorted(
        (r.entry_index, r.dest_offset) for r in reads
    )
    assert len(reads) <= bound(wanted, layouts)


def without(lost: Box, entry: Entry, key: str) -> EntrySpec:
    boxes = tuple(box for box in entry.boxes if entry.key != key or box != lost)
    return EntrySpec(entry.part, entry.key, entry.dtype, entry.shape, boxes, entry.scope)


@pytest.mark.parametrize("tile", TILINGS)
@given(st.randoms(use_true_random=False), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_what_no_rank_stores_is_damage_and_what_is_another_tensor_a_mismatch(
    tile: Tiling, rng: random.Random, world: int
) -> None:
    layouts, _, wholes = saved(rng, tile, world)
    whole = rng.choice(wholes)
    held = [box for x in layouts for e in x.entries if e.key == whole.key for box in e.boxes if box.volume]
    wanted = build_layout([whole]).entries
    if held:
        lost = rng.choice(held)
        spoilt = [build_layout([without(lost, entry, whole.key) for entry in x.entries]) for x in layouts]
        with pytest.raises(Damaged, match=f"model/{whole.key}: element") as caught:
            plan_reads(wanted, spoilt, None)
        assert any(str(point) in str(caught.value) for point in points(lost))
    other = rng.choice(
        [
            dataclasses.replace(whole, dtype="float64"),
            dataclasses.replace(whole, shape=(*whole.shape, 1), boxes=(Box.full((*whole.shape, 1)),)),
            dataclasses.replace(whole, shape=(7, *whole.shape[1:]), boxes=(Box.full((7, *whole.shape[1:])),)),
        ]
    )
    with pytest.raises(StateMismatch, match=f"model/{whole.key}") as mismatch:
        plan_reads(build_layout([other]).entries, layouts, None)
    assert f"{whole.dtype}{list(whole.shape)}" in str(mismatch.value)


# ------------------------------------------------------------------------------------ all small sizes


def by_chunk(size: int, world: int) -> list[list[Box]]:
    """What torch.chunk gives to each rank; the last ones may have nothing."""
    pieces = torch.arange(size).chunk(world) if size else ()
    held = [[Box((int(piece[0]),), (len(piece),))] for piece in pieces]
    return held + [[] for _ in range(world - len(held))]


def by_arbitrary_cuts(size: int, world: int) -> list[list[Box]]:
    rng = random.Random(f"{size} {world}")
    cuts = [0, *sorted(rng.randint(0, size) for _ in range(world - 1)), size]
    return [[Box((a,), (b - a,))] for a, b in itertools.pairwise(cuts)]


@pytest.mark.parametrize("loaded_by", [by_chunk, by_arbitrary_cuts])
@pytest.mark.parametrize("saved_by", [by_chunk, by_arbitrary_cuts])
@pytest.mark.parametrize("size", range(10))
def test_all_small_sizes_over_all_small_worlds(
    size: int,
    saved_by: Callable[[int, int], list[list[Box]]],
    loaded_by: Callable[[int, int], list[list[Box]]],
) -> None:
    """Rows that are not divisible by the ranks, ranks without rows; along the first axis and along the second."""
    for before, after, axis in itertools.product(range(1, 6), range(1, 6), (0, 1)):

        def spec(boxes: Sequence[Box], axis: int = axis) -> EntrySpec:
            other = Box((0,), (3,))
            pairs = [(box, other) if axis == 0 else (other, box) for box in boxes]
            made = [Box(a.offsets + b.offsets, a.lengths + b.lengths) for a, b in pairs]
            shape = (size, 3) if axis == 0 else (3, size)
            return EntrySpec("model", "w", "float32", shape, tuple(made), Scope.GLOBAL)

        data = random.Random(size).randbytes(size * 12)
        tensors = {"w": numpy.frombuffer(data, numpy.uint8).reshape(*spec(()).shape, 4)}
        layouts = [build_layout([spec(boxes)]) for boxes in saved_by(size, before)]
        images = images_of(layouts, tensors)
        for rank, boxes in enumerate(loaded_by(size, after)):
            wanted = build_layout([spec(boxes)]).entries
            reads = plan_reads(wanted, layouts, rank if before == after else None)
            (found,) = carry_out(reads, wanted, images)
            assert (found == flat(tensors["w"], wanted[0].boxes)).all(), (before, after, axis, rank)
            assert len(reads) <= before, "one read for each rank that has some of it"
