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
    where there are not as many. Members of a domain are spread over groups as far as there are any, and within a group
    they are not next to each other as far as there are others."""
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
    return tuple(_apart([nodes[index].domain for index in group], group) for group in members)


def _apart(domains: Sequence[str], group: Sequence[int]) -> Group:
    """The group in an order (around, as its members keep each other's) in which those of a domain are apart: the
    largest domain first, on every other place."""
    weight = Counter(domains)
    if len(weight) in (1, len(group)):
        return tuple(group)
    places = range(len(group))
    ordered = sorted(places, key=lambda place: (-weight[domains[place]], domains[place], place))
    found = [0] * len(group)
    for place, source in zip([*places[::2], *places[1::2]], ordered, strict=True):
        found[place] = group[source]
    return tuple(found)


def holders(nodes: Sequence[Node], copies: int) -> tuple[Group, ...]:
    """By node the others that keep its snapshots, the preferred one first; none of a spare node's. Spare nodes come
    first, evenly, for whoever takes over a lost node's ranks there has them already; then those of the same group.
    Nodes of other domains are taken before those of the same one, as long as no node keeps more than its share.
    Fewer than ``copies`` where there are not as many other nodes."""
    spares = [index for index, node in enumerate(nodes) if node.spare]
    on_spares = min(copies, len(spares))
    others = copies - on_spares
    members = groups(nodes, others + 1)
    left = _shares(spares, on_spares * sum(map(len, members)))
    waiting = sum(map(len, members))
    found: list[Group] = [()] * len(nodes)
    for group in members:
        for place, index in enumerate(group):
            domain = nodes[index].domain
            chosen = _spares_for(domain, nodes, left, waiting)[:on_spares]
            for spare in chosen:
                left[spare] -= 1
            waiting -= 1
            steps = range(1, min(others, len(group) - 1) + 1)
            near = [group[(place + step) % len(group)] for step in steps]
            same = [other for other in near if _same(domain, nodes[other])]
            found[index] = (*chosen, *[other for other in near if other not in same], *same)
    return tuple(found)


def _shares(spares: Sequence[int], total: int) -> dict[int, int]:
    """How many nodes' snapshots each spare node is to keep: evenly, ``total`` together."""
    count = len(spares) or 1
    return {spare: total // count + (at < total % count) for at, spare in enumerate(spares)}


def _spares_for(domain: str, nodes: Sequence[Node], left: Mapping[int, int], waiting: int) -> list[int]:
    """Spare nodes for a node of ``domain``, the preferred one first: those that every node still ``waiting`` needs
    must be taken; then those of other domains, then those with the most room left."""
    return sorted(
        left,
        key=lambda spare: (
            left[spare] < waiting,
            left[spare] == 0,
            _same(domain, nodes[spare]),
            -left[spare],
            spare,
        ),
    )


def _same(domain: str, node: Node) -> bool:
    """Whether a node is in a domain; one without a label is alone."""
    return bool(domain) and node.domain == domain
