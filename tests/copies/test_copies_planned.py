"""Layouts with second copies: who has them, where they lie, and that nothing durable counts them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import everstep
import msgspec
import pytest
import torch
from everstep.auditing import Auditor
from everstep.errors import BadOption, Damaged, StateMismatch
from everstep.format import layout as layouts
from everstep.format.entries import Box, EntrySpec, Layout, Place, Scope
from everstep.format.fields import read_own
from everstep.format.table import TableReader
from everstep.plan.agreement import copy_windows
from everstep.plan.coverage import check_coverage
from everstep.plan.placement import holders, node_map
from everstep.plan.reads import plan_reads
from everstep.planning import Copies, LayoutPlanner, expected_slot_bytes
from everstep.policy import Memory, Policy
from everstep.snapshot.copier import Plan
from everstep.state.trainstate import TrainState

PLACES = ["a", "a", "b", "b"]


def spec(key: str, *, copied: bool = False, shared: tuple[int, ...] = (1,)) -> EntrySpec:
    """Stored by rank 0, or the copy of that."""
    whole = (Box.full((2, 3)),)
    copy_of = 0 if copied else None
    return EntrySpec("model", key, "float32", (2, 3), whole, Scope.GLOBAL, not copied, shared, copy_of)


def state_of(sizes: Sequence[int]) -> TrainState:
    tensors = {f"w{i}": torch.zeros(size) for i, size in enumerate(sizes)}
    return TrainState(rng=False, replicated=("model",), model=tensors, own={"o": torch.zeros(5)})


def planned(planners: Sequence[LayoutPlanner], sizes: Sequence[int]) -> list[Plan]:
    return [planner.plan(state_of(sizes).flatten()) for planner in planners]


def planners(places: Sequence[str], copies: int = 1) -> list[LayoutPlanner]:
    keepers = holders(node_map(places), copies)
    return [LayoutPlanner(rank, len(places), node_of=places, holders=keepers) for rank in range(len(places))]


def owners(plans: Sequence[Plan]) -> dict[str, tuple[list[int], list[int]]]:
    """By replicated key the ranks that store it and those that have copies."""
    found: dict[str, tuple[list[int], list[int]]] = {}
    for rank, plan in enumerate(plans):
        copied = {one.entry for one in plan.layout.copied}
        for index, entry in enumerate(plan.layout.entries):
            if entry.part == "model":
                stores, copies = found.setdefault(entry.key, ([], []))
                if entry.image is not None:
                    stores.append(rank)
                if index in copied:
                    copies.append(rank)
    return found


@pytest.mark.parametrize(("places", "copies"), [("aabb", 1), ("aabbc", 2), ("abcd", 3), ("aabb", 0)])
def test_each_tensor_lies_with_its_owners_on_distinct_nodes_balanced(places: str, copies: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    sizes = [rng.randint(1, 1000) for _ in range(60)]
    ranks = planners(places, copies)
    plans = planned(ranks, sizes)
    found = owners(plans)
    for stores, second in found.values():
        assert len(stores) == 1 and len(second) == copies
        assert len({places[rank] for rank in (*stores, *second)}) == 1 + copies
    if places == "aabb":
        for images in ("images", "copies"):
            loads = [sum(one.nbytes for one in getattr(plan.layout, images)) for plan in plans]
            assert max(loads) - min(loads) <= 4 * max(sizes) + 4096, loads
    later = planned(ranks, [*sizes, 500, 700])
    assert {key: who for key, who in owners(later).items() if key in found} == found, "late ones move none"
    for plan in [*plans, *later]:
        assert layouts.decode(plan.encoded) == plan.layout
        assert bool(plan.layout.copies) == bool(copies) == bool(plan.copied)
        assert [one for one in plan.layout.places() if plan.layout.entries[one.entry].image is not None]


def test_coverage_and_reads_leave_copies_out() -> None:
    plans = planned(planners(PLACES), [64] * 8)
    read = TableReader()
    check_coverage([read.read(plan.encoded, "x") for plan in plans])
    wanted = [entry for entry in plans[0].layout.entries if entry.part == "model"]
    reads = plan_reads(wanted, [plan.layout for plan in plans])
    names = [{image.name for image in plan.layout.images} for plan in plans]
    assert sorted(one.entry_index for one in reads) == list(range(8))
    for one in reads:
        (stores,) = owners(plans)[wanted[one.entry_index].key][0]
        assert one.rank == stores and one.image in names[stores]
    alone = layouts.build_layout([spec("w", copied=True)])
    assert alone.images == () and alone.copied == (Place(0, 0, len(alone.copies[0].header)),)
    with pytest.raises(StateMismatch, match="stored by no rank"):
        check_coverage([read.of(alone)])


def test_a_copy_lies_as_what_is_stored_does() -> None:
    stored = layouts.build_layout([spec("w"), spec("v"), spec("own", shared=())])
    both = layouts.build_layout([spec("v", copied=True), spec("x", shared=()), spec("w", copied=True)])
    assert [image.name for image in stored.images] == ["model+1", "model"]
    (copy,) = both.copies
    assert copy.name == "0/model+1"
    assert (copy.header, copy.nbytes) == (stored.images[0].header, stored.images[0].nbytes)
    places = {entry.key: entry.offset for entry in stored.entries}
    assert places["v"] < places["w"], "by their keys"
    assert [(both.entries[one.entry].key, one.offset) for one in both.copied] == [
        (key, places[key]) for key in ("v", "w")
    ]
    assert [entry.image for entry in both.entries] == [None, 0, None]
    assert layouts.decode(layouts.encode(both)) == both
    moved = dataclasses.replace(
        both,
        copied=tuple(
            place._replace(offset=other.offset)
            for place, other in zip(both.copied, reversed(both.copied), strict=True)
        ),
    )
    header = layouts.decode(layouts.encode(moved)).copies[0].header
    assert header != both.copies[0].header, "other places are told"


def encoded(layout: Layout, **changed: object) -> bytes:
    own = read_own(layouts.encode(layout), "x")
    assert own is not None
    return msgspec.msgpack.encode({**msgspec.to_builtins(own, builtin_types=(bytes,)), **changed})


def test_marks_that_cannot_be_are_damage() -> None:
    plain = layouts.build_layout([spec("w")])
    copy = layouts.build_layout([spec("w", copied=True)])
    assert encoded(copy) == layouts.encode(copy) != layouts.encode(plain) == encoded(plain)
    rank = layouts.build_layout([dataclasses.replace(spec("w", shared=()), scope=Scope.RANK)])
    for data in (
        encoded(plain, copies=0),
        encoded(plain, copies=2),
        encoded(plain, copies=-1),
        encoded(rank, copies=1),
    ):
        with pytest.raises(Damaged):
            layouts.decode(data, "x")


@pytest.mark.parametrize("places", ["aabb", "aaab", "abc", "aa"])
def test_the_slot_is_reserved_with_room_for_copies(places: str) -> None:
    number = 1 if len(set(places)) > 1 else 0
    sizes = [1000 + 10 * i for i in range(200)]
    for rank, plan in enumerate(planned(planners(places, number), sizes)):
        need = sum(size for _, size in plan.regions(1000, 1000))
        copies = Copies.on(rank, places, holders(node_map(places), number))
        room = expected_slot_bytes(state_of(sizes), len(places), copies)
        assert need <= room, places
        assert copies.share(None) * len(places) == len(
            {image.name.split("/")[0] for image in plan.layout.copies}
        )


def test_who_has_a_copy_leaves_it_to_the_agent() -> None:
    places, sizes = ["a", "a", "b", "b"], [64] * 8
    plans = planned(planners(places), sizes)
    flat = state_of(sizes).flatten()
    said = []
    for rank, plan in enumerate(plans):
        auditor = Auditor(rank, 4, Policy(audit_every=1), 1)
        auditor.begin(1)
        found = auditor.meta(1, flat, plan, flush=True)["hashes"]
        here = {one.entry for one in plan.layout.places() if plan.layout.entries[one.entry].part == "model"}
        assert layouts_of(found["stored"]) == here
        assert set(found["live"]) == {i for i in plan.copied if i not in here}
        quiet = Auditor(rank, 4, Policy(audit_every=None), 1).meta(1, flat, plan, flush=False)["hashes"]
        assert layouts_of(quiet["stored"]) == here and quiet["live"] == [] and quiet["digests"] == ""
        said.append(here)
    assert sum(map(len, said)) == 2 * 8


def layouts_of(column: str) -> set[int]:
    from everstep.format.columns import unpack

    return set(unpack(bytes.fromhex(column)))


def test_hashes_of_copies_stay_bounded_in_large_jobs() -> None:
    sizes = [("p", f"k{i}", 1 << 30) for i in range(1000)]
    assert copy_windows(sizes, 16384, 1, 16384) == copy_windows(sizes, 2, 1, 2)
    assert len(copy_windows(sizes, 2, 1, 2)) == 1
    many = copy_windows(sizes, 8, 1, 16384)
    assert len(many) == 16 and sorted(i for window in many for i in window) == list(range(1000))
    assert copy_windows([], 2, 1, 2) == []


@pytest.mark.parametrize("bad", [-1, 1.0, True, "1"])
def test_replicas_are_a_whole_number(bad: object) -> None:
    with pytest.raises(BadOption, match="replicas"):
        everstep.Memory(replicas=bad)  # type: ignore[arg-type]
    assert Memory().replicas == 0
