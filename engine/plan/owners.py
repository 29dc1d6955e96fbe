"""Which ranks own which replicated tensor: one stores it, more can keep second copies."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Key = tuple[str, str]
"""(part, key text)."""


class Replica(NamedTuple):
    """A tensor of which several ranks hold the same ``nbytes`` bytes: ``holders``, or all ranks where None."""

    part: str
    key: str
    nbytes: int
    holders: tuple[int, ...] | None = None


@dataclass(slots=True)
class _Group:
    """The replicas with one set of holders, and what its members store of them, in bytes."""

    members: tuple[int, ...]
    bits: int
    """The members as bits of a number: comparing sets of thousands of ranks is then one operation."""
    replicas: list[Replica] = field(default_factory=list)
    stored: dict[int, int] = field(default_factory=dict)


class Owners:
    """Balanced assignment of replicated entries to ranks that hold them, which moves no owner afterwards.

    Every rank keeps one and gives it all entries that it is a holder of, in the same calls as the other holders
    (the order within a call does not matter). All holders then agree without talking, though none knows what
    others hold besides: an entry's owners depend on nothing but entries that all its holders see, which are those
    with the same holders and with supersets of them.

    ``node_of`` names each rank's node (default: each rank is one); nodes are numbered in the order of their first
    ranks. ``holders`` gives by that number the nodes that keep a node's snapshots
    (:func:`~everstep.plan.placement.holders`); numbers beyond the ranks' nodes are nodes without ranks. Who has second
    copies follows from it (:meth:`second`). Not thread-safe; used by the thread that plans.
    """

    def __init__(
        self, world: int, *, node_of: Sequence[str] | None = None, holders: Sequence[Sequence[int]] = ()
    ) -> None:
        if world < 1:
            raise ValueError(f"a world of {world} ranks")
        if node_of is not None and len(node_of) != world:
            raise ValueError(f"nodes of {len(node_of)} ranks in a world of {world}")
        self.world = world
        numbers: dict[str | int, int] = {}
        names: Sequence[str | int] = range(world) if node_of is None else node_of
        self._node_of = [numbers.setdefault(name, len(numbers)) for name in names]
        self._nodes = len(numbers)
        self._holders = _checked(holders, self._nodes)
        self._all = tuple(range(world))
        self._owners: dict[Key, tuple[tuple[int, ...], int]] = {}
        """By key: its holders, and which of them stores it."""
        self._on_nodes: dict[tuple[int, ...], dict[int, list[int]]] = {}
        """Of the groups met in the last call: their members by node."""

    @property
    def copies(self) -> int:
        """The most second copies that any entry may have."""
        return max([len(nodes) for nodes in self._holders], default=0)

    def assign(self, replicas: Sequence[Replica]) -> dict[Key, tuple[int, ...]]:
        """Owners of every entry given: first the rank that stores it, then those with second copies, ascending.

        Known keys of unchanged holders keep their owners, whatever their size is now. New ones go, largest first,
        to the holder with the fewest bytes of those that all holders know of. Keys that are not given any more
        are forgotten. ValueError for holders that are no ranks of this world.
        """
        owners: dict[Key, tuple[tuple[int, ...], int]] = {}
        found: dict[Key, tuple[int, ...]] = {}
        done: list[_Group] = []
        self._on_nodes.clear()
        for group in self._grouped(replicas):
            above = [other for other in done if other.bits & group.bits == group.bits]
            second: dict[int, tuple[int, ...]] = {}
            for replica, first in self._assign(group, above):
                if first not in second:
                    second[first] = self.second(first, group.members)
                owners[replica.part, replica.key] = group.members, first
                found[replica.part, replica.key] = (first, *second[first])
            done.append(group)
        self._owners = owners
        return found

    def forget(self) -> None:
        """Give all keys an owner anew at the next call."""
        self._owners = {}

    def second(self, first: int, members: Sequence[int] | None) -> tuple[int, ...]:
        """The ranks that keep second copies of what ``first`` stores of the entries that ``members`` (None: all ranks)
        hold, ascending: one on each node that keeps the snapshots of its node, as far as ranks run there. None at all
        where one of these nodes has no member, or none has ranks: the bytes themselves are then to be kept there.

        On each node it is the member at the owner's place among the members on its own node, counted around: ranks
        with equally many neighbours keep the copies of one each.
        """
        home = self._node_of[first]
        wanted = [node for node in self._holders[home] if node < self._nodes] if self._holders else []
        if not wanted:
            return ()
        on_nodes = self._by_node(self._all if members is None else tuple(members))
        place = on_nodes[home].index(first)
        there = [on_nodes.get(node) for node in wanted]
        if None in there:
            return ()
        return tuple(sorted(some[place % len(some)] for some in there if some))

    def sources(self, rank: int, members: Sequence[int] | None) -> int:
        """How many of ``members`` there are of whose stored entries ``rank`` keeps second copies."""
        if not self._holders:
            return 0
        home = self._node_of[rank]
        some = self._all if members is None else members
        others = [other for other in some if home in self._holders[self._node_of[other]]]
        return sum(1 for other in others if rank in self.second(other, members))

    def _by_node(self, members: tuple[int, ...]) -> dict[int, list[int]]:
        found = self._on_nodes.get(members)
        if found is None:
            found = {}
            for rank in members:
                found.setdefault(self._node_of[rank], []).append(rank)
            self._on_nodes[members] = found
        return found

    def _grouped(self, replicas: Sequence[Replica]) -> list[_Group]:
        """By holders; supersets come before their subsets."""
        groups: dict[tuple[int, ...], _Group] = {}
        for replica in replicas:
            members = self._all if replica.holders is None else replica.holders
            group = groups.get(members)
            if group is None:
                group = groups[members] = self._group(replica, members)
            group.replicas.append(replica)
        return sorted(groups.values(), key=lambda group: (-len(group.members), group.members))

    def _group(self, replica: Replica, members: tuple[int, ...]) -> _Group:
        proper = members and members[0] >= 0 and members[-1] < self.world
        if not proper or members != tuple(sorted(set(members))):
            raise ValueError(
                f"{replica.part}/{replica.key}: holders {members} are no ranks, ascending, of {self.world}"
            )
        return _Group(members, sum([1 << rank for rank in members]))

    def _assign(self, group: _Group, above: Sequence[_Group]) -> list[tuple[Replica, int]]:
        """Who stores the group's replicas; ``above``: groups whose loads all members know."""
        found, new = [], []
        for replica in group.replicas:
            holders, known = self._owners.get((replica.part, replica.key), (None, 0))
            # Owners of other holders are known only to those who were among them.
            if holders == group.members:
                _count(group, known, replica.nbytes)
                found.append((replica, known))
            else:
                new.append(replica)
        if not new:
            return found
        stored = _heap(group.members, [other.stored for other in (*above, group)])
        for replica in sorted(new, key=lambda replica: (-replica.nbytes, replica.part, replica.key)):
            load, first = stored[0]
            heapq.heapreplace(stored, (load + replica.nbytes, first))
            _count(group, first, replica.nbytes)
            found.append((replica, first))
        return found


def _checked(holders: Sequence[Sequence[int]], nodes: int) -> tuple[tuple[int, ...], ...]:
    """By node what keeps its snapshots. ValueError where that is no other node, or one twice."""
    if holders and len(holders) < nodes:
        raise ValueError(f"holders of {len(holders)} nodes, {nodes} have ranks")
    for node, some in enumerate(holders):
        if node in some or len(set(some)) != len(some) or min(some, default=0) < 0:
            raise ValueError(f"holders {tuple(some)} of node {node} are no other nodes, each once")
    return tuple(tuple(some) for some in holders)


def _count(group: _Group, rank: int, nbytes: int) -> None:
    group.stored[rank] = group.stored.get(rank, 0) + nbytes


def _heap(members: Sequence[int], loads: Sequence[Mapping[int, int]]) -> list[tuple[int, int]]:
    found = [(sum([load.get(rank, 0) for load in loads]), rank) for rank in members]
    heapq.heapify(found)
    return found
