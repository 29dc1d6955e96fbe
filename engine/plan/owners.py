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
    """The replicas with one set of holders, and what its members own of them, in bytes."""

    members: tuple[int, ...]
    bits: int
    """The members as bits of a number: comparing sets of thousands of ranks is then one operation."""
    replicas: list[Replica] = field(default_factory=list)
    stored: dict[int, int] = field(default_factory=dict)
    copied: dict[int, int] = field(default_factory=dict)


class Owners:
    """Balanced assignment of replicated entries to ranks that hold them, which moves no owner afterwards.

    Every rank keeps one and gives it all entries that it is a holder of, in the same calls as the other holders
    (the order within a call does not matter). All holders then agree without talking, though none knows what
    others hold besides: an entry's owners depend on nothing but entries that all its holders see, which are those
    with the same holders and with supersets of them.

    ``copies``: further owners of each entry, on other nodes than the first and each other, as far as there are
    any; ``node_of`` names each rank's node (default: each rank is one). Not thread-safe; used by the thread that
    plans.
    """

    def __init__(self, world: int, *, copies: int = 0, node_of: Sequence[str] | None = None) -> None:
        if world < 1:
            raise ValueError(f"a world of {world} ranks")
        if copies < 0:
            raise ValueError(f"{copies} copies")
        if node_of is not None and len(node_of) != world:
            raise ValueError(f"nodes of {len(node_of)} ranks in a world of {world}")
        self.world = world
        self._copies = copies
        self._node_of: Sequence[str | int] = range(world) if node_of is None else node_of
        self._all = tuple(range(world))
        self._owners: dict[Key, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """By key: its holders and its owners."""

    def assign(self, replicas: Sequence[Replica]) -> dict[Key, tuple[int, ...]]:
        """Owners of every entry given: first the rank that stores it, then those with second copies.

        Known keys of unchanged holders keep their owners, whatever their size is now. New ones go, largest first,
        to the holder with the fewest bytes of those that all holders know of. Keys that are not given any more
        are forgotten. ValueError for holders that are no ranks of this world.
        """
        owners: dict[Key, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        done: list[_Group] = []
        for group in self._grouped(replicas):
            above = [other for other in done if other.bits & group.bits == group.bits]
            for replica, found in self._assign(group, above):
                owners[replica.part, replica.key] = group.members, found
            done.append(group)
        self._owners = owners
        return {key: found for key, (_, found) in owners.items()}

    def forget(self) -> None:
        """Give all keys an owner anew at the next call."""
        self._owners = {}

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

    def _assign(self, group: _Group, above: Sequence[_Group]) -> list[tuple[Replica, tuple[int, ...]]]:
        """Owners of the group's replicas; ``above``: groups whose loads all members know."""
        found, new = [], []
        for replica in group.replicas:
            holders, known = self._owners.get((replica.part, replica.key), (None, ()))
            # Owners of other holders are known only to those who were among them.
            if holders == group.members:
                _count(group, known, replica.nbytes)
                found.append((replica, known))
            else:
                new.append(replica)
        if not new:
            return found
        stored = _heap(group.members, [other.stored for other in (*above, group)])
        copied = _heap(group.members, [other.copied for other in (*above, group)]) if self._copies else []
        for replica in sorted(new, key=lambda replica: (-replica.nbytes, replica.part, replica.key)):
            load, first = stored[0]
            heapq.heapreplace(stored, (load + replica.nbytes, first))
            owners = (first, *self._second(copied, first, replica.nbytes))
            _count(group, owners, replica.nbytes)
            found.append((replica, owners))
        return found

    def _second(self, copied: list[tuple[int, int]], first: int, nbytes: int) -> list[int]:
        """Ranks with the fewest copies, each on a node of its own."""
        nodes = {self._node_of[first]}
        chosen: list[int] = []
        passed: list[tuple[int, int]] = []
        while copied and len(chosen) < self._copies:
            load, rank = heapq.heappop(copied)
            if self._node_of[rank] in nodes:
                passed.append((load, rank))
                continue
            nodes.add(self._node_of[rank])
            chosen.append(rank)
            passed.append((load + nbytes, rank))
        for item in passed:
            heapq.heappush(copied, item)
        return chosen


def _count(group: _Group, owners: Sequence[int], nbytes: int) -> None:
    for number, rank in enumerate(owners):
        loads = group.copied if number else group.stored
        loads[rank] = loads.get(rank, 0) + nbytes


def _heap(members: Sequence[int], loads: Sequence[Mapping[int, int]]) -> list[tuple[int, int]]:
    found = [(sum([load.get(rank, 0) for load in loads]), rank) for rank in members]
    heapq.heapify(found)
    return found
