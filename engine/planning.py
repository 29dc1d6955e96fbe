"""From a rank's leaves to its layout, remembered while the structure stays the same.

The memory holds structure only (keys, dtypes, shapes, owners), never tensors, and no verdict that something has
not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .format.layout import Scope, build_layout, encode, layout_hash
from .plan.owners import Owners
from .snapshot.copier import Plan
from .snapshot.estimate import estimate
from .state.trainstate import TrainState
from .state.tree import FlatState, Leaf


class LayoutPlanner:
    """Plans one rank's layouts. Replicated entries have one owner, balanced by bytes; an entry that appears late
    moves no other. Every rank that sees the same GLOBAL entries finds the same owners, without a word."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._owners = Owners(world)
        self._signature: list[tuple[Any, ...]] = []
        self._current: Plan | None = None

    def plan(self, flat: FlatState) -> Plan:
        """The layout for the leaves of ``flat``, entries in their order."""
        signature = flat.signature()
        if self._current is None or signature != self._signature:
            self._current = self._build(flat.leaves)
            self._signature = signature
        return self._current

    def _build(self, leaves: Sequence[Leaf]) -> Plan:
        shared = [(x.part, x.key, x.nbytes) for x in leaves if x.scope is Scope.GLOBAL and _is_full(x)]
        owners = self._owners.assign(shared)
        specs = [
            leaf.spec(stored=owners.get((leaf.part, leaf.key), self._rank) == self._rank) for leaf in leaves
        ]
        layout = build_layout(specs)
        encoded = encode(layout)
        return Plan(layout, encoded, layout_hash(encoded))


def _is_full(leaf: Leaf) -> bool:
    return len(leaf.boxes) == 1 and leaf.boxes[0].lengths == leaf.shape


def expected_slot_bytes(state: TrainState, world: int) -> int:
    """Room for one snapshot of this rank, said before the first step: what is there now and what optimizers will
    add; of GLOBAL tensors this rank's share, and one whole of the largest, for shares are not equal."""
    flat = state.flatten()
    own = [leaf.tensor for leaf in flat.leaves if leaf.scope is Scope.RANK]
    shared = [leaf.tensor for leaf in flat.leaves if leaf.scope is Scope.GLOBAL]
    if not shared:
        return estimate(own, state.optimizers(), state_bytes=len(flat.state)).nbytes
    alone = estimate(own, state_bytes=len(flat.state)).nbytes
    together = estimate(shared, state.optimizers())
    return alone + together.nbytes // world + max(tensor.nbytes for tensor in shared)
