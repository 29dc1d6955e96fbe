"""Which nodes keep whose snapshots, and how likely it is that all of them are lost together."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

import pytest
from everstep.benchmarks import placement as chances
from everstep.plan.placement import Node, groups, holders, node_map


def jobs(seed: int, count: int) -> list[list[Node]]:
    """Random node maps."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        labels = rng.choice(["", "r", "rs", "rst", "rstuvw"])
        names = [f"n{i}" for i in range(rng.randint(1, 14))]
        nodes = [Node(name, rng.choice(labels) if labels else "", (i,)) for i, name in enumerate(names)]
        spares = rng.choice([0, 0, 1, 2, 3])
        nodes += [Node(f"s{i}", rng.choice(labels) if labels else "", spare=True) for i in range(spares)]
        found.append(nodes)
    return found


@pytest.fixture
def seed() -> int:
    found = random.randrange(1 << 30)
    print(f"seed {found}")
    return found


def test_every_node_has_as_many_holders_as_there_can_be(seed: int) -> None:
    for nodes in jobs(seed, 400):
        spares = [index for index, node in enumerate(nodes) if node.spare]
        for copies in range(5):
            found = holders(nodes, copies)
            assert found == holders(list(nodes), copies) and len(found) == len(nodes)
            kept = Counter(holder for some in found for holder in some)
            for index, node in enumerate(nodes):
                some = found[index]
                if node.spare:
                    assert some == ()
                    continue
                assert len(some) == len(set(some)) == min(copies, len(nodes) - 1) and index not in some
                first = min(copies, len(spares))
                assert set(some[:first]) <= set(spares), "spare nodes first"
                assert not set(some[first:]) & set(spares)
                assert kept[index] == len(some) - first, "as much is kept as is given to others"
            active = len(nodes) - len(spares)
            for spare in spares:
                assert kept[spare] <= -(-active * min(copies, len(spares)) // len(spares))


def test_other_domains_come_first_where_there_are_any(seed: int) -> None:
    met = 0
    for nodes in jobs(seed, 600):
        active = [node for node in nodes if not node.spare]
        most = max(Counter(node.domain for node in active).values())
        for copies in (1, 2, 3):
            found = holders(active, copies)
            count = max(1, len(active) // (copies + 1))
            for index, node in enumerate(active):
                other = [active[holder].domain != node.domain for holder in found[index]]
                assert other == sorted(other, reverse=True) or not node.domain
                if most <= count:
                    met += 1
                    assert all(other), "no group has two of a domain"
                elif 2 * most <= len(active):
                    met += 1
                    assert any(other), f"{[one.domain for one in active]} {copies}"
    assert met > 500


def test_spare_nodes_of_other_domains_come_first() -> None:
    nodes = [Node(f"n{i}", domain, (i,)) for i, domain in enumerate("rrss")]
    nodes += [Node("x", "r", spare=True), Node("y", "s", spare=True)]
    assert holders(nodes, 1) == ((5,), (5,), (4,), (4,), (), ())
    assert holders(nodes[:2] + nodes[4:], 1) == ((3,), (2,), (), ()), "but each keeps its share"
    assert holders(nodes, 3)[0] == (5, 4, 2)


def test_groups_are_small_and_spread_over_domains() -> None:
    nodes = [Node(f"n{i}", f"rack{i // 4}", (i,)) for i in range(16)]
    assert groups(nodes, 2) == tuple((i, i + 8) for i in range(8))
    assert all(len({nodes[i].domain for i in group}) == len(group) for group in groups(nodes, 4))
    assert [len(group) for group in groups(nodes[:11], 3)] == [4, 4, 3]
    assert groups(nodes[:2], 3) == ((0, 1),) and groups([], 2) == ()
    assert groups([Node("s", spare=True)], 2) == () and holders([Node("s", spare=True)], 1) == ((),)
    with pytest.raises(ValueError):
        groups(nodes, 0)
    around = [Node(f"n{i}", domain, (i,)) for i, domain in enumerate("rrrss")]
    (group,) = groups(around, 3)
    assert [around[i].domain for i in group] == list("rsrsr")


def test_nodes_are_numbered_by_their_first_ranks() -> None:
    found = node_map(["b", "a", "b", "c", "a"], {"a": "r"})
    assert found == [Node("b", "", (0, 2)), Node("a", "r", (1, 4)), Node("c", "", (3,))]


# -- the figures of everstep.benchmarks.placement


def drawn(holders: Sequence[Sequence[int]], failed: int) -> Fraction:
    """Set by set."""
    sets = list(combinations(range(len(holders)), failed))
    return Fraction(sum(chances.loses(holders, set(some)) for some in sets), len(sets))


@pytest.mark.parametrize("copies", [1, 2])
def test_chances_are_those_of_all_sets(copies: int) -> None:
    order = list(range(16))
    random.Random(3).shuffle(order)
    placed = {
        "ring": chances.ring(order, copies),
        "pair": chances.pairs(order, copies),
        "group": chances.groups(None, 16, copies),
        "odd": chances.groups(None, 13, copies),
    }
    for name, found in placed.items():
        for failed in range(6):
            assert chances.loss(found, failed) == drawn(found, failed), (name, failed)
        least = chances.fatal_sets(found)
        assert chances.loss(found, copies + 1) == Fraction(
            len(least), len(list(combinations(range(len(found)), copies + 1)))
        )


def test_groups_are_never_worse_than_rings_and_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    chances.SIZES, sizes = {16: 4, 32: 4}, chances.SIZES
    try:
        chances.main(["--json"])
        rows = json.loads(capsys.readouterr().out)["placements"]
        chances.main([])
    finally:
        chances.SIZES = sizes
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows) == 1 + 2 * 2 * 2 * 6
    for row in rows:
        if row["placement"] != "group":
            (ours,) = (
                one
                for one in rows
                if one["placement"] == "group"
                and all(
                    one[key] == row[key] for key in ("nodes", "copies", "ranks_fill_racks", "knows_domains")
                )
            )
            for failed, chance in row["lost_by_failed"].items():
                assert ours["lost_by_failed"][failed] <= chance
        if row["placement"] == "group" and row["knows_domains"]:
            assert row["lost_by_a_domain"] == 0.0


def test_the_failure_of_a_domain_is_counted() -> None:
    where = chances.racks(8, 2)
    assert chances.domain_loss(chances.ring(range(8), 1), where) == 1
    ours = chances.groups(where, 8, 1)
    assert chances.domain_loss(ours, where) == 0
    assert chances.domain_loss(ours, where, 1) == Fraction(2, 6), "either of two partners"


def test_what_is_no_ring_is_not_counted_as_one() -> None:
    with pytest.raises(ValueError, match="no ring"):
        chances.loss([((i * 5 + 3) % 17, (i + 1) % 17) for i in range(17)], 3)
