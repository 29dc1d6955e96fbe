"""From a rank's leaves to its layout, remembered while the structure stays the same.

The memory holds structure only (keys, dtypes, shapes, owners), never tensors, and no verdict that something has
not changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .errors import UnsupportedValue
from .format.constants import ALIGN_BYTES
from .format.layout import Scope, build_layout, encode, layout_hash
from .plan.owners import Owners, Replica
from .snapshot.copier import Plan
from .snapshot.estimate import estimate
from .state.sharded import held_by
from .state.trainstate import TrainState
from .state.tree import FlatState, Leaf, ShardedLeaf


class LayoutPlanner:
    """Plans one rank's layouts. Of the ranks that hold the same of an entry one stores it, balanced by bytes; an
    entry that appears late moves no other. All that hold it find the same owner, without a word.

    ``node_of`` and ``holders``: see :class:`~everstep.plan.owners.Owners`.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        node_of: Sequence[str] | None = None,
        holders: Sequence[Sequence[int]] = (),
    ) -> None:
        self._rank = rank
        self._owners = Owners(world, node_of=node_of, holders=holders)
        self._signature: list[tuple[Any, ...]] = []
        self._current: Plan | None = None
        self._guessed = False
        self.owners: dict[tuple[str, str], tuple[int, ...]] = {}
        """Of each replicated (part, key) that this rank holds: the rank that stores it, then those that keep second
        copies, ascending."""

    def plan(self, flat: FlatState) -> Plan:
        """The layout for the leaves of ``flat``, entries in their order. UnsupportedValue for holders that are no
        ranks of this job."""
        signature = flat.signature()
        if self._current is None or signature != self._signature:
            if self._guessed:
                self._owners.forget()  # what was never saved has no owners that others could know
            self._current = self._build(flat.leaves)
            self._signature = signature
        self._guessed = False
        return self._current

    def guess(self, flat: FlatState) -> Plan:
        """As :meth:`plan`, before the first: if that is of another structure, it is planned as if nothing had been."""
        try:
            return self.plan(flat)
        finally:
            self._guessed = True

    def forget(self) -> None:
        """Plan anew at the next save, as if it were the first. After a save that failed: a rank that planned other
        saves than the others did (one was refused there, say) may have found other owners, and would for ever."""
        self._owners.forget()
        self._current = None

    def _build(self, leaves: Sequence[Leaf]) -> Plan:
        replicas = []
        for leaf in leaves:
            holders = self._holders(leaf) if leaf.scope is Scope.GLOBAL else (self._rank,)
            if holders is None or len(holders) > 1:
                replicas.append(Replica(leaf.part, leaf.key, leaf.nbytes, holders))
        try:
            self.owners = self._owners.assign(replicas)
        except ValueError as problem:
            raise UnsupportedValue(
                "shards name holders that this job does not have", found=str(problem)
            ) from None
        alone = (self._rank,)
        specs, copied = [], []
        for index, leaf in enumerate(leaves):
            first, *others = self.owners.get((leaf.part, leaf.key), alone)
            second = tuple(others)
            copy_of = first if self._rank in second else None
            specs.append(leaf.spec(stored=first == self._rank, shared=second, copy_of=copy_of))
            if second:
                copied.append(index)
        layout = build_layout(specs)
        encoded = encode(layout)
        return Plan(layout, encoded, layout_hash(encoded), frozenset(copied))

    def _holders(self, leaf: Leaf) -> tuple[int, ...] | None:
        """The ranks that hold the same of a GLOBAL leaf; None: all of this job."""
        if not isinstance(leaf, ShardedLeaf):
            return None
        # Alone: one process writes what it holds, whichever rank of a larger job it is besides.
        if leaf.holders is None or not leaf.boxes or self._owners.world == 1:
            return (self._rank,)
        if self._rank in leaf.holders:
            return leaf.holders
        return tuple(sorted({*leaf.holders, self._rank}))


class _Sized(NamedTuple):
    nbytes: int


class Copies:
    """How much of what other ranks store this rank keeps second copies of, in the mean."""

    def __init__(self, rank: int, owners: Owners) -> None:
        self._rank = rank
        self._owners = owners
        self._sources: dict[tuple[int, ...] | None, int] = {}

    @classmethod
    def on(cls, rank: int, nodes: Sequence[str], holders: Sequence[Sequence[int]]) -> Copies:
        """Of ``rank``, where ``nodes`` are those of all ranks; see :class:`~everstep.plan.owners.Owners`."""
        return cls(rank, Owners(len(nodes), node_of=nodes, holders=holders))

    def sources(self, members: tuple[int, ...] | None) -> int:
        """Of how many of ``members`` (None: all ranks), which hold the same."""
        found = self._sources.get(members)
        if found is None:
            found = self._sources[members] = self._owners.sources(self._rank, members)
        return found

    def share(self, members: tuple[int, ...] | None) -> float:
        """Which part of a tensor that ``members`` hold this rank's copies amount to."""
        return self.sources(members) / (self._owners.world if members is None else len(members))


NO_COPIES = Copies(0, Owners(1))


def expected_slot_bytes(
    state: TrainState, world: int, copies: Copies = NO_COPIES, flat: FlatState | None = None
) -> int:
    """Room for one snapshot of this rank, said before the first step: what is there now and what optimizers will
    add; of replicated tensors this rank's share, and one whole of the largest, for shares are not equal. The same
    for second copies of them, by the ranks that store them. ``flat``: the state as it is now, if that is known."""
    flat = flat or state.flatten()
    shared = any(leaf.scope is Scope.GLOBAL and type(leaf) is Leaf for leaf in flat.leaves)
    sizes, largest, sources = [], 0, 0
    for leaf in flat.leaves:
        count, second = 1, 0.0
        if isinstance(leaf, ShardedLeaf) or leaf.scope is Scope.GLOBAL:
            count = len(leaf.holders or (0,)) if isinstance(leaf, ShardedLeaf) else world
        if count > 1:
            second = copies.share(leaf.holders)
            sources = max(sources, copies.sources(leaf.holders))
            largest = max(largest, leaf.nbytes * (1 + copies.sources(leaf.holders)))
        sizes.append(_Sized(math.ceil(leaf.nbytes * (1 / count + second))))

    def share(parameter: torch.Tensor) -> float:
        """Bytes of what this rank will store of a tensor of the optimizer's that is like ``parameter``."""
        held = held_by(parameter)
        if held is None:
            return parameter.nbytes * ((1 / world + copies.share(None)) if shared else 1)
        count = len(held.holders or (0,))
        second = copies.share(held.holders) if count > 1 else 0.0
        return sum(piece.nbytes for piece in held.pieces) * (1 / count + second)

    expected = estimate(sizes, state.optimizers(), state_bytes=len(flat.state), share=share)
    headers = 2 * ALIGN_BYTES * sources * len({leaf.part for leaf in flat.leaves})
    return expected.nbytes + largest + headers
