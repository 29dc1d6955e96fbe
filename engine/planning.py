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

    ``copies`` and ``node_of``: see :class:`~everstep.plan.owners.Owners`.
    """

    def __init__(
        self, rank: int, world: int, *, copies: int = 0, node_of: Sequence[str] | None = None
    ) -> None:
        self._rank = rank
        self._owners = Owners(world, copies=copies, node_of=node_of)
        self._signature: list[tuple[Any, ...]] = []
        self._current: Plan | None = None
        self.owners: dict[tuple[str, str], tuple[int, ...]] = {}
        """Of each replicated (part, key) that this rank holds: the rank that stores it, then those that are to
        have second copies."""

    def plan(self, flat: FlatState) -> Plan:
        """The layout for the leaves of ``flat``, entries in their order. UnsupportedValue for holders that are no
        ranks of this job."""
        signature = flat.signature()
        if self._current is None or signature != self._signature:
            self._current = self._build(flat.leaves)
            self._signature = signature
        return self._current

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
            first, *second = self.owners.get((leaf.part, leaf.key), alone)
            specs.append(leaf.spec(stored=first == self._rank, copied=self._rank in second))
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


class Copies(NamedTuple):
    """How many second copies there are of each replicated tensor, and which part of a tensor that all ranks hold one
    rank's copies amount to in the mean."""

    number: int
    share: float

    @classmethod
    def on(cls, rank: int, nodes: Sequence[str], number: int) -> Copies:
        """Of ``rank``, where ``nodes`` are those of all ranks and ``number`` is below how many there are."""
        if not number:
            return NO_COPIES
        here, world = nodes.count(nodes[rank]), len(nodes)
        if number + 1 == len(set(nodes)):  # each node has a copy of all that the others store
            return cls(number, (1 - here / world) / here)
        return cls(number, min(1, number / world))

    def among(self, holders: int) -> float:
        """The same of a tensor that ``holders`` ranks hold, each on a node of its own."""
        return min(self.number, holders - 1) / holders


NO_COPIES = Copies(0, 0.0)


def expected_slot_bytes(state: TrainState, world: int, copies: Copies = NO_COPIES) -> int:
    """Room for one snapshot of this rank, said before the first step: what is there now and what optimizers will
    add; of replicated tensors this rank's share, and one whole of the largest, for shares are not equal. The same
    for second copies of them."""
    flat = state.flatten()
    shared = any(leaf.scope is Scope.GLOBAL and type(leaf) is Leaf for leaf in flat.leaves)
    sizes, largest = [], 0
    for leaf in flat.leaves:
        count, second = 1, 0.0
        if isinstance(leaf, ShardedLeaf):
            count = len(leaf.holders or (0,))
            second = copies.among(count)
        elif leaf.scope is Scope.GLOBAL:
            count, second = world, copies.share
        sizes.append(_Sized(math.ceil(leaf.nbytes * (1 / count + second))))
        if count > 1:
            largest = max(largest, leaf.nbytes * (2 if second else 1))

    def share(parameter: torch.Tensor) -> float:
        """Bytes of what this rank will store of a tensor of the optimizer's that is like ``parameter``."""
        held = held_by(parameter)
        if held is None:
            return parameter.nbytes * ((1 / world + copies.share) if shared else 1)
        count = len(held.holders or (0,))
        return sum(piece.nbytes for piece in held.pieces) * (1 / count + copies.among(count))

    expected = estimate(sizes, state.optimizers(), state_bytes=len(flat.state), share=share)
    return expected.nbytes + largest
