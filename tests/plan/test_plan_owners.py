"""Owners: balanced, sticky, the same everywhere."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from everstep.plan import placement
from everstep.plan.owners import Key, Owners, Replica
from everstep.plan.placement import Node, node_map
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


def brute_second(
    first: int, members: Sequence[int], node_of: Sequence[str], holders: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """The rule as it is stated, the long way."""
    numbers = list(dict.fromkeys(node_of))
    at_home = [rank for rank in members if node_of[rank] == node_of[first]]
    found = []
    for node in holders[numbers.index(node_of[first])]:
        if node >= len(numbers):
            continue
        there = [rank for rank in members if node_of[rank] == numbers[node]]
        if not there:
            return ()
        found.append(there[at_home.index(first) % len(there)])
    return tuple(sorted(found))


@given(GROUPED, GROUPED, st.integers(0, 2), st.integers(0, 2), st.randoms(use_true_random=False))
def test_holders_agree_though_each_sees_only_its_own(
    first: list[Replica], second: list[Replica], copies: int, spares: int, rng: random.Random
) -> None:
    """Two calls, in which entries come, go, grow and change hands; each rank is told what it holds, in an order of
    its own. All holders of an entry name the same owners, holders all."""
    node_of = rng.choice([list("aabbcc"), list("aaabbc"), list("abcabc"), list("abcdef"), list("aaaaaa")])
    nodes = node_map(node_of, {name: rng.choice("xy") for name in "abcdef"})
    nodes += [Node(f"spare{i}", spare=True) for i in range(spares)]
    keepers = placement.holders(nodes, copies)
    owners = [Owners(WORLD, node_of=node_of, holders=keepers) for _ in range(WORLD)]
    for items in (first, second):
        named: dict[Key, set[tuple[int, ...]]] = {}
        for rank in range(WORLD):
            mine = seen_by(rank, items)
            rng.shuffle(mine)
            for key, ranks in owners[rank].assign(mine).items():
                named.setdefault(key, set()).add(ranks)
        for item in items:
            (ranks,) = named[item.part, item.key]
            holders = tuple(range(WORLD)) if item.holders is None else item.holders
            assert ranks[0] in holders
            assert ranks[1:] == brute_second(ranks[0], holders, node_of, keepers)


def test_shared_images_in_random_jobs() -> None:
    """Brute force over jobs of several nodes: which partners share what, that these hold it, and how much each has."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    shared_somewhere = 0
    for _ in range(150):
        world = rng.randint(2, 16)
        names = rng.choices([f"n{i}" for i in range(rng.randint(1, 5))], k=world)
        if rng.random() < 0.5:
            names.sort()
        nodes = node_map(names)
        nodes += [Node(f"s{i}", spare=True) for i in range(rng.choice([0, 0, 1, 2]))]
        copies = rng.randint(0, 3)
        keepers = placement.holders(nodes, copies)
        groups = [None, *(tuple(sorted(rng.sample(range(world), rng.randint(2, world)))) for _ in range(3))]
        items = [Replica("m", f"{i}", rng.randint(0, 99), rng.choice(groups)) for i in range(60)]
        owners = [Owners(world, node_of=names, holders=keepers) for _ in range(world)]
        found = [owners[rank].assign(seen_by(rank, items)) for rank in range(world)]
        plain = [Owners(world).assign(seen_by(rank, items)) for rank in range(world)]
        stored, copied = [0] * world, [0] * world
        for item in items:
            members = item.holders or tuple(range(world))
            key = item.part, item.key
            assert len({found[rank][key] for rank in members}) == 1, seed
            first, *second = found[members[0]][key]
            assert plain[members[0]][key] == (first,), "who stores it does not depend on copies"
            assert {first, *second} <= set(members), "partners hold what they share"
            wanted = [i for i in keepers[names_of(nodes).index(names[first])] if not nodes[i].spare]
            there = [names_of(nodes).index(names[rank]) for rank in second]
            assert not second or sorted(there) == sorted(wanted), "one on each holder that has ranks"
            can = wanted and all(any(names[rank] == nodes[i].name for rank in members) for i in wanted)
            assert bool(second) == bool(can), seed
            shared_somewhere += bool(second)
            stored[first] += item.nbytes
            for rank in second:
                copied[rank] += item.nbytes
        for rank in range(world):
            sources = set()
            for group in groups:
                members = range(world) if group is None else group
                if rank in members:
                    some = {one for one in members if rank in owners[rank].second(one, group)}
                    assert (
                        len(some)
                        == owners[rank].sources(rank, group)
                        <= evenly(rank, members, names, keepers)
                    )
                    sources |= some
            assert copied[rank] <= sum(stored[one] for one in sources), seed
    assert shared_somewhere > 500


def names_of(nodes: Sequence[Node]) -> list[str]:
    return [node.name for node in nodes]


def evenly(rank: int, members: Sequence[int], names: Sequence[str], keepers: Sequence[Sequence[int]]) -> int:
    """Of how many ranks a rank keeps the copies at most: its share, rounded up, of those of each node."""
    nodes = list(dict.fromkeys(names))
    count = {node: sum(names[one] == node for one in members) for node in nodes}
    sources = [node for at, node in enumerate(nodes) if nodes.index(names[rank]) in keepers[at]]
    return sum(-(-count[node] // count[names[rank]]) for node in sources)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_second_copies_are_balanced_as_what_is_stored(copies: int) -> None:
    """Nodes of equally many ranks: each rank keeps the copies of one rank for each holder that its node is."""
    items = [Replica("m", f"{i}", 10) for i in range(160)]
    node_of = [f"node{rank // 4}" for rank in range(16)]
    found = Owners(16, node_of=node_of, holders=placement.holders(node_map(node_of), copies)).assign(items)
    assert loads(found, items, 16) == [100] * 16
    kept = [sum(10 for ranks in found.values() if rank in ranks[1:]) for rank in range(16)]
    assert kept == [100 * copies] * 16
    assert all(len({node_of[rank] for rank in ranks}) == 1 + copies for ranks in found.values())


def test_nodes_of_unlike_numbers_of_ranks_keep_all_the_same() -> None:
    """The few ranks of a holder keep what all of the many store."""
    owners = Owners(5, node_of=list("aaaab"), holders=[(1,), (0,)])
    assert [owners.second(rank, None) for rank in range(5)] == [(4,), (4,), (4,), (4,), (0,)]
    assert [owners.sources(rank, None) for rank in range(5)] == [1, 0, 0, 0, 4]
    assert owners.second(1, (1, 2)) == (), "nobody on the other node holds it"
    assert owners.second(2, (0, 2, 4)) == (4,) and owners.second(4, (0, 2, 4)) == (0,)
    assert owners.sources(4, (0, 2, 4)) == 2 and owners.sources(0, (0, 2, 4)) == 1


def test_spare_nodes_keep_no_copies_of_tensors() -> None:
    """They have no ranks, and get bytes; others besides them still copy from their own."""
    items = [Replica("m", "w", 1)]
    assert Owners(2, node_of=list("ab"), holders=[(2,), (2,)]).assign(items) == {("m", "w"): (0,)}
    assert Owners(2, node_of=list("ab"), holders=[(2, 1), (2, 0)]).assign(items) == {("m", "w"): (0, 1)}
    assert Owners(2, node_of=list("ab"), holders=[(2, 1), (2, 0), ()]).copies == 2


def test_partners_move_with_no_owner() -> None:
    """Late entries leave both as they were."""
    owners = Owners(4, node_of=list("aabb"), holders=[(1,), (0,)])
    some = [Replica("m", f"{i}", 10 + i) for i in range(9)]
    before = owners.assign(some)
    after = owners.assign([*some, *(Replica("m", f"late{i}", 100) for i in range(5))])
    assert {key: after[key] for key in before} == before
    assert all(len(ranks) == 2 for ranks in after.values())


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
        Owners(2, node_of=["a"])
    for keepers in [[(1,)], [(0,), ()], [(1, 1), ()], [(-1,), ()]]:
        with pytest.raises(ValueError, match="holders"):
            Owners(2, holders=keepers)
    for holders in [(), (2,), (-1, 0), (1, 0), (0, 0)]:
        with pytest.raises(ValueError, match="m/w"):
            Owners(2).assign([Replica("m", "w", 1, holders)])


def test_all_ranks_by_name_are_all_ranks() -> None:
    items = [Replica("m", f"{i}", i, None if i % 2 else (0, 1, 2)) for i in range(20)]
    named = [item._replace(holders=(0, 1, 2)) for item in items]
    assert Owners(3).assign(items) == Owners(3).assign(named)
    assert len(list(itertools.chain(*Owners(3).assign(items).values()))) == 20
