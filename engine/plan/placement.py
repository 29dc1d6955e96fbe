"""Which nodes keep what another node must not be lost with. Pure: a function of the node map, the same everywhere.

Nodes are put into small groups whose members keep each other's snapshots, not into one ring: with one copy, a ring of n
nodes has n pairs whose common loss is fatal, pairs have n/2 (``benchmarks/placement.py`` has the numbers; the
observation is that of Gemini, SOSP 2023). Groups are spread over failure domains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Group = tuple[int, ...]
"""Positions in the node map, in the order in which they keep each other's."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the job. ``domain`` is what fails together (a rack, a switch), as the user names it; ``ranks`` are
    those that run there, none on a spare one."""

    name: str
    domain: str = ""
    ranks: tuple[int, ...] = ()
    spare: bool = False


def node_map(names: Sequence[str], domains: Mapping[str, str] | None = None) -> list[Node]:
    """The nodes of all ranks (``names``, by rank), in the order of their first ranks; ``domains`` by name. Spare nodes
    are to be appended."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    return [Node(name, (domains or {}).get(name, ""), tuple(some)) for name, some in ranks.items()]


def groups(nodes: Sequence[Node], size: int) -> tuple[Group, ...]:
    """All nodes but the spare ones in groups of ``size``, or a little more where that does not divide them; fewer
    where there are not as many. Members of a domain are spread over groups as far as there are any."""
    if size < 1:
        raise ValueError(f"groups of {size} nodes")
    active = [index for index, node in enumerate(nodes) if not node.spare]
    if not active:
        return ()
    count = max(1, len(active) // size)
    members: list[list[int]] = [[] for _ in range(count)]
    weight = Counter(nodes[index].domain for index in active)
    # The members of a domain follow one another, and so come into different groups.
    ordered = sorted(active, key=lambda index: (-weight[nodes[index].domain], nodes[index].domain, index))
    for position, index in enumerate(ordered):
        members[position % count].append(index)
    return tuple(tuple(group) for group in members)


def holders(nodes: Sequence[Node], copies: int) -> tuple[Group, ...]:
    """By node the others that keep its snapshots, the preferred one first; none of a spare node's. Spare nodes come
    first, in turn, for whoever takes over a lost node's ranks there has them already; then those of the same group.
    Fewer than ``copies`` where there are not as many other nodes."""
    spares = [index for index, node in enumerate(nodes) if node.spare]
    others = max(0, copies - min(copies, len(spares)))
    found: list[Group] = [()] * len(nodes)
    number = 0
    for group in groups(nodes, others + 1):
        for place, index in enumerate(group):
            chosen = [spares[(number + step) % len(spares)] for step in range(min(copies, len(spares)))]
            chosen += [
                group[(place + step) % len(group)] for step in range(1, min(others, len(group) - 1) + 1)
            ]
            found[index] = tuple(chosen)
            number += 1
    return tuple(found)
