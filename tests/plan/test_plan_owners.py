"""Owners: balanced, sticky, the same everywhere."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from everstep.plan.owners import Key, Owners, Replica
from hypothesis import given
from hypothesis import strategies as st

KEYS = st.lists(
    st.builds(Replica, st.sampled_from("mo"), st.text("abc", max_size=4), st.integers(0, 1000), st.none()),
    unique_by=lambda item: item[:2],
    max_size=30,
)
WORLD = 6
GROUPS = (None, (0, 1, 2, 3), (0, 2), (1, 3), (0, 1), (2,), (3, 4, 5), (4, 5))
GROUPED = st.lists(
    st.builds(
        Replica,
        st.sampled_from("mo"),
        st.text("abc", max_size=4),
        st.integers(0, 1000),
        st.sampled_from(GROUPS),
    ),
    unique_by=lambda item: item[:2],
    max_size=30,
)


def loads(owners: dict[Key, tuple[int, ...]], items: Sequence[Replica], world: int) -> list[int]:
    """Bytes that each rank stores."""
    found = [0] * world
    for item in items:
        found[owners[item.part, item.key][0]] += item.nbytes
    return found


def seen_by(rank: int, items: Sequence[Replica]) -> list[Replica]:
    return [item for item in items if item.holders is None or rank in item.holders]


@given(KEYS, st.integers(1, 5), st.randoms(use_true_random=False))
def test_ranks_agree_whatever_the_order(items: list[Replica], world: int, rng: random.Random) -> None:
    shuffled = list(items)
    rng.shuffle(shuffled)
    found = Owners(world).assign(items)
    assert found == Owners(world).assign(shuffled)
    assert set(found) == {item[:2] for item in items}
    assert all(len(ranks) == 1 and 0 <= ranks[0] < world for ranks in found.values())


@given(KEYS, st.integers(1, 5))
def test_no_rank_has_more_than_the_least_and_one_entry(items: list[Replica], world: int) -> None:
    found = loads(Owners(world).assign(items), items, world)
    assert max(found) - min(found) <= max((item.nbytes for item in items), default=0)


@given(KEYS, KEYS, st.integers(1, 5))
def test_late_entries_move_nobody(first: list[Replica], second: list[Replica], world: int) -> None:
    owners = Owners(world)
    before = owners.assign(first)
    late = [item for item in second if item[:2] not in before]
    after = owners.assign([*late, *first])
    assert {key: after[key] for key in before} == before
    grown = [item._replace(nbytes=item.nbytes + 7) for item in [*first, *late]]
    assert owners.assign(grown) == after


@given(GROUPED, GROUPED, st.integers(0, 2), st.randoms(use_true_random=False))
def test_holders_agree_though_each_sees_only_its_own(
    first: list[Replica], second: list[Replica], copies: int, rng: random.Random
) -> None:
    """Two calls, in which entries come, go, grow and change hands; each rank is told what it holds, in an order of
    its own. All holders of an entry name the same owners, holders all."""
    node_of = ["a", "a", "b", "b", "c", "c"]
    owners = [Owners(WORLD, copies=copies, node_of=node_of) for _ in range(WORLD)]
    for items in (first, second):
        named: dict[Key, set[tuple[int, ...]]] = {}
        for rank in range(WORLD):
            mine = seen_by(rank, items)
            rng.shuffle(mine)
            for key, ranks in owners[rank].assign(mine).items():
                named.setdefault(key, set()).add(ranks)
        for item in items:
            (ranks,) = named[item.part, item.key]
            holders = range(WORLD) if item.holders is None else item.holders
            nodes = {node_of[rank] for rank in holders}
            assert set(ranks) <= set(holders)
            assert len(ranks) == len({node_of[rank] for rank in ranks}) == min(copies + 1, len(nodes))


def test_holders_of_a_part_make_up_for_what_they_own_of_the_whole() -> None:
    """Rank 0 owns the one large tensor of all, so the other of its pair stores what only they hold."""
    whole = Replica("m", "embedding", 100)
    pairs = [Replica("m", f"layer{i}", 10, (0, 2)) for i in range(4)]
    found = Owners(4).assign([*pairs, whole])
    assert found["m", "embedding"] == (0,)
    assert {found["m", f"layer{i}"] for i in range(4)} == {(2,)}
    some = [Replica("m", name, 10, (0, 1, 3)) for name in "ab"]
    found = Owners(4, copies=1).assign([*some, whole])
    assert found["m", "embedding"] == (0, 1)
    assert (found["m", "a"], found["m", "b"]) == ((1, 0), (3, 0)), "rank 1 has the copy of the large one"


def test_groups_of_equal_holders_are_balanced_each() -> None:
    """Hybrid sharding: 4 shards, each on 4 replicas."""
    groups = [tuple(range(shard, 16, 4)) for shard in range(4)]
    stored = [0] * 16
    for rank in range(16):
        mine = [Replica("m", f"{i}", 10, groups[rank % 4]) for i in range(40)]
        found = Owners(16).assign(mine)
        stored[rank] = sum(10 for ranks in found.values() if ranks[0] == rank)
    assert stored == [100] * 16


def test_second_copies_are_balanced_too() -> None:
    items = [Replica("m", f"{i}", 10) for i in range(80)]
    node_of = [f"node{rank // 4}" for rank in range(8)]
    found = Owners(8, copies=1, node_of=node_of).assign(items)
    assert loads(found, items, 8) == [100] * 8
    kept = [sum(10 for ranks in found.values() if ranks[1] == rank) for rank in range(8)]
    assert kept == [100] * 8
    assert all(node_of[a] != node_of[b] for a, b in found.values())


def test_an_entry_that_changes_hands_has_no_owner_from_before() -> None:
    """Who holds it newly cannot know who owned it."""
    veteran, newcomer = Owners(4), Owners(4)
    veteran.assign([Replica("m", "big", 9, (0, 1)), Replica("m", "w", 1, (0, 1))])
    newcomer.assign([])
    moved = [Replica("m", "w", 1, (1, 2))]
    assert veteran.assign(moved) == newcomer.assign(moved)


def test_late_entries_go_to_who_has_least() -> None:
    owners = Owners(2)
    big, small = Replica("m", "big", 10), Replica("m", "small", 1)
    assert owners.assign([big, small]) == {("m", "big"): (0,), ("m", "small"): (1,)}
    assert owners.assign([big, small, Replica("m", "new", 1)])["m", "new"] == (1,)


def test_vanished_entries_are_forgotten() -> None:
    owners = Owners(2)
    owners.assign([Replica("m", f"{i}", 1) for i in range(100)])
    assert owners.assign([Replica("m", "0", 1)]) == {("m", "0"): (0,)}
    assert len(owners._owners) == 1


def test_worlds_and_holders_that_cannot_be() -> None:
    with pytest.raises(ValueError):
        Owners(0)
    with pytest.raises(ValueError):
        Owners(2, copies=-1)
    with pytest.raises(ValueError):
        Owners(2, node_of=["a"])
    for holders in [(), (2,), (-1, 0), (1, 0), (0, 0)]:
        with pytest.raises(ValueError, match="m/w"):
            Owners(2).assign([Replica("m", "w", 1, holders)])


def test_all_ranks_by_name_are_all_ranks() -> None:
    items = [Replica("m", f"{i}", i, None if i % 2 else (0, 1, 2)) for i in range(20)]
    named = [item._replace(holders=(0, 1, 2)) for item in items]
    assert Owners(3).assign(items) == Owners(3).assign(named)
    assert len(list(itertools.chain(*Owners(3).assign(items).values()))) == 20
