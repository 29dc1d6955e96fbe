"""From a rank's leaves to its layout, remembered while the structure stays the same.

The memory holds structure only (keys, dtypes, shapes, owners), never tensors, and no verdict that something has
not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .format import dtypes
from .format.layout import Box, EntrySpec, Layout, Scope, build_layout, encode, layout_hash
from .plan.owners import Owners


class Planned(Protocol):
    """What planning needs to know of a leaf."""

    @property
    def part(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def boxes(self) -> tuple[Box, ...]: ...
    @property
    def scope(self) -> Scope: ...


@dataclass(frozen=True, slots=True)
class RankLayout:
    """A layout with its canonical bytes and their hash."""

    layout: Layout
    encoded: bytes
    hash: str


class LayoutPlanner:
    """Plans one rank's layouts. Replicated entries have one owner, balanced by bytes; an entry that appears late
    moves no other. Every rank that sees the same GLOBAL entries finds the same owners, without a word."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._owners = Owners(world)
        self._signature: list[tuple[object, ...]] = []
        self._current: RankLayout | None = None

    def plan(self, leaves: Sequence[Planned]) -> RankLayout:
        """The layout for ``leaves``, entries in their order."""
        signature: list[tuple[object, ...]] = [(x.part, x.key, x.dtype, x.shape, x.boxes, x.scope) for x in leaves]
        if self._current is None or signature != self._signature:
            self._current = self._build(leaves)
            self._signature = signature
        return self._current

    def _build(self, leaves: Sequence[Planned]) -> RankLayout:
        shared = [(x.part, x.key, _nbytes(x)) for x in leaves if x.scope is Scope.GLOBAL and _is_full(x)]
        owners = self._owners.assign(shared)
        specs = [
            EntrySpec(
                part=x.part,
                key=x.key,
                dtype=x.dtype,
                shape=x.shape,
                boxes=x.boxes,
                scope=x.scope,
                stored=owners.get((x.part, x.key), self._rank) == self._rank,
            )
            for x in leaves
        ]
        layout = build_layout(specs)
        encoded = encode(layout)
        return RankLayout(layout=layout, encoded=encoded, hash=layout_hash(encoded))


def _is_full(leaf: Planned) -> bool:
    return len(leaf.boxes) == 1 and leaf.boxes[0].lengths == leaf.shape


def _nbytes(leaf: Planned) -> int:
    count = 1
    for length in leaf.shape:
        count *= length
    return dtypes.nbytes(leaf.dtype, count)
