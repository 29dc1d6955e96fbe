"""How likely it is that nodes which fail together take all copies of something, by where copies lie.

Counted, not drawn: every set of nodes is as likely as any other of its size, and how many of them are fatal follows
from the placement. ``python -m everstep.benchmarks.placement [--json]``.

Placements, each in the order of the ranks or with the domains (racks) dealt out first:

- ring: a node's snapshots are kept by the next m nodes;
- pair: by m partners, the nodes whose numbers differ in one of the lowest m bits;
- group: by the others of a group of m + 1 (:mod:`everstep.plan.placement`, as the engine does).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations
from math import comb
from typing import Any

from everstep.plan import placement
from everstep.plan.placement import Node

SIZES = {16: 4, 128: 8, 1024: 16}
"""Nodes of a job, and how many of them a rack has."""
COPIES = (1, 2)
FAILED = (2, 3, 4, 8)
"""How many nodes fail together."""
COMPONENT_MAX = 12
"""Largest group whose subsets are counted one by one."""

Holders = Sequence[Sequence[int]]
"""By node, the others that keep its snapshots."""
Maker = Callable[[Sequence[int], int], Holders]


def racks(nodes: int, size: int, *, shuffled: bool = False) -> list[int]:
    """The rack of each node: ranks fill one after the other, or a scheduler has dealt them out anyhow."""
    found = [node // size for node in range(nodes)]
    if shuffled:
        random.Random(nodes).shuffle(found)
    return found


def dealt_out(domains: Sequence[int]) -> list[int]:
    """Nodes in an order in which neighbours lie in different domains."""
    by_domain: dict[int, list[int]] = {}
    for node, domain in enumerate(domains):
        by_domain.setdefault(domain, []).append(node)
    most = max(map(len, by_domain.values()))
    return [some[turn] for turn in range(most) for some in by_domain.values() if turn < len(some)]


def ring(order: Sequence[int], copies: int) -> list[tuple[int, ...]]:
    """Each node's are kept by the next ones of ``order``."""
    count = len(order)
    found: list[tuple[int, ...]] = [()] * count
    for place, node in enumerate(order):
        found[node] = tuple(order[(place + step) % count] for step in range(1, copies + 1))
    return found


def pairs(order: Sequence[int], copies: int) -> list[tuple[int, ...]]:
    """Each node's are kept by its partners, one for each copy; ``order`` has a multiple of 2^copies nodes."""
    found: list[tuple[int, ...]] = [()] * len(order)
    for place, node in enumerate(order):
        found[node] = tuple(order[place ^ 1 << bit] for bit in range(copies))
    return found


def groups(domains: Sequence[int] | None, count: int, copies: int) -> Holders:
    """The engine's own placement, which knows the ``domains`` or not."""
    names = domains or [0] * count
    return placement.holders([Node(f"n{i}", str(names[i]), (i,)) for i in range(count)], copies)


def fatal_sets(holders: Holders) -> set[frozenset[int]]:
    """The least sets of nodes whose common failure loses something."""
    return {frozenset([node, *some]) for node, some in enumerate(holders)}


def loses(holders: Holders, failed: set[int]) -> bool:
    """Whether the failure of these nodes takes all copies of a node's snapshots."""
    return any(failed.issuperset(holders[node]) for node in failed)


def loss(holders: Holders, failed: int) -> Fraction:
    """The probability that ``failed`` random nodes lose something."""
    survived = [1] + [0] * failed
    for component in _components(holders):
        survived = _product(survived, _harmless(holders, component, failed))
    return 1 - Fraction(survived[failed], comb(len(holders), failed))


def _components(holders: Holders) -> list[list[int]]:
    """Nodes that have to do with each other."""
    parent = list(range(len(holders)))

    def top(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node, some in enumerate(holders):
        for other in some:
            parent[top(other)] = top(node)
    found: dict[int, list[int]] = {}
    for node in range(len(holders)):
        found.setdefault(top(node), []).append(node)
    return list(found.values())


def _harmless(holders: Holders, nodes: list[int], most: int) -> list[int]:
    """By size the number of sets of these nodes that lose nothing."""
    if len(nodes) > COMPONENT_MAX:
        return [_harmless_on_ring(holders, nodes, size) for size in range(most + 1)]
    return [
        sum(not loses(holders, set(some)) for some in combinations(nodes, size)) for size in range(most + 1)
    ]


def _harmless_on_ring(holders: Holders, nodes: list[int], size: int) -> int:
    """The same of a ring: sets without copies + 1 neighbours. The others make gaps, which these fill."""
    copies, count = len(holders[nodes[0]]), len(nodes)
    turn, node = 0, nodes[0]
    while turn == 0 or node != nodes[0]:
        node, turn = holders[node][0], turn + 1
    if turn != count or any(holders[one][1:] != holders[holders[one][0]][: copies - 1] for one in nodes):
        raise ValueError(f"{count} nodes that are no ring have too many sets to count")
    gaps = [1]
    for _ in range(count - size):
        gaps = _product([*gaps, *[0] * (size + 1 - len(gaps))], [1] * (copies + 1))[: size + 1]
    return gaps[size] * count // (count - size)


def _product(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Of two polynomials, to the degree of the first."""
    return [
        sum(one[at - i] * other[i] for i in range(min(at + 1, len(other))) if at - i < len(one))
        for at in range(len(one))
    ]


def domain_loss(holders: Holders, domains: Sequence[int], more: int = 0) -> Fraction:
    """The probability that the failure of one random domain loses something; with ``more`` = 1, and of one other
    node besides."""
    fatal = total = 0
    for domain in sorted(set(domains)):
        down = {node for node, one in enumerate(domains) if one == domain}
        lost = loses(holders, down)
        others = [node for node in range(len(domains)) if node not in down] if more else [-1]
        total += len(others)
        for node in others:
            fatal += lost or (more > 0 and loses(holders, down | {node}))
    return Fraction(fatal, total)


def measure() -> list[dict[str, Any]]:
    """All placements of all jobs."""
    found = []
    for count, size in SIZES.items():
        for copies in COPIES:
            for shuffled in (False, True):
                where = racks(count, size, shuffled=shuffled)
                plain, spread = list(range(count)), dealt_out(where)
                rows: list[tuple[str, bool, Holders]] = [
                    ("ring", False, ring(plain, copies)),
                    ("pair", False, pairs(plain, copies)),
                    ("group", False, groups(None, count, copies)),
                    ("ring", True, ring(spread, copies)),
                    ("pair", True, pairs(spread, copies)),
                    ("group", True, groups(where, count, copies)),
                ]
                for name, aware, holders in rows:
                    found.append(
                        {
                            "nodes": count,
                            "copies": copies,
                            "ranks_fill_racks": not shuffled,
                            "placement": name,
                            "knows_domains": aware,
                            "fatal_sets": len(fatal_sets(holders)),
                            "lost_by_failed": {str(f): float(loss(holders, f)) for f in FAILED},
                            "lost_by_a_domain": float(domain_loss(holders, where)),
                            "lost_by_a_domain_and_a_node": float(domain_loss(holders, where, 1)),
                        }
                    )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m everstep.benchmarks.placement", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    as_json = parser.parse_args(arguments).json
    found = measure()
    if as_json:
        print(json.dumps({"benchmark": "placement", "rack": SIZES, "placements": found}))
        return
    failed = "".join(f"{f'{f} nodes':>10}" for f in FAILED)
    print(f"nodes copies ranks     placement        fatal sets{failed}    domain  domain+1")
    for row in found:
        order = "in racks" if row["ranks_fill_racks"] else "anyhow"
        name = row["placement"] + (", domains" if row["knows_domains"] else "")
        chances = [
            *row["lost_by_failed"].values(),
            row["lost_by_a_domain"],
            row["lost_by_a_domain_and_a_node"],
        ]
        print(
            f"{row['nodes']:5} {row['copies']:6} {order:9} {name:16} {row['fatal_sets']:10}"
            + "".join(f"{chance:10.2g}" for chance in chances)
        )


if __name__ == "__main__":
    main()
