"""Which rank stores which replicated tensor."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class Owners:
    """Balanced assignment of replicated GLOBAL entries to ranks, which moves no owner afterwards.

    Every rank keeps one and gives it the same keys in the same calls (the order within a call does not
    matter), so that all agree without talking. Not thread-safe; used by the thread that plans.
    """

    def __init__(self, world: int) -> None:
        if world < 1:
            raise ValueError(f"a world of {world} ranks")
        self.world = world
        self._owner: dict[tuple[str, str], int] = {}

    def assign(self, keys_with_nbytes: Sequence[tuple[str, str, int]]) -> dict[tuple[str, str], int]:
        """Owner (rank) of every (part, key, nbytes) given.

        Known keys keep their owner, whatever their size is now. New ones go, largest first, to the rank with
        the fewest bytes among the keys of this call. Keys that are not given any more are forgotten.
        """
        loads = [0] * self.world
        owner: dict[tuple[str, str], int] = {}
        new: list[tuple[int, str, str]] = []
        for part, key, nbytes in keys_with_nbytes:
            known = self._owner.get((part, key))
            if known is None:
                new.append((-nbytes, part, key))
            else:
                owner[part, key] = known
                loads[known] += nbytes
        heap = [(load, rank) for rank, load in enumerate(loads)]
        heapq.heapify(heap)
        for minus_nbytes, part, key in sorted(new):
            load, rank = heap[0]
            owner[part, key] = rank
            heapq.heapreplace(heap, (load - minus_nbytes, rank))
        self._owner = owner
        return dict(owner)
