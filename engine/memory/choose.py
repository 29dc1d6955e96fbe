"""Which slot the next snapshot goes into. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Key = tuple[int, int]
"""(incarnation, step)."""


@dataclass(frozen=True)
class Candidate:
    """A slot as ``choose`` sees it. ``key`` is None for a slot without a readable snapshot (free, or
    damaged); ``busy`` says that it is being written, or pinned by a living process."""

    index: int
    free: bool
    key: Key | None
    busy: bool


def choose(slots: Sequence[Candidate], incarnation: int, complete: Key | None) -> int | None:
    """Index of the slot to reuse; None: no room now.

    ``complete`` is W, the newest snapshot complete on all ranks (after a resume: the adopted one). Reused
    are, in this order, free slots, unreadable ones, snapshots of lineages that the run left, and snapshots
    before W, the oldest first. Never W, nor anything of this incarnation after it, nor a newer incarnation's.
    """
    found = [
        (rank, slot.key or (0, 0), slot.index)
        for slot in slots
        if (rank := _rank(slot, incarnation, complete))
    ]
    return min(found)[2] if found else None


def _rank(slot: Candidate, incarnation: int, complete: Key | None) -> int:
    """Preference, 1 first; 0: not to be reused."""
    if slot.busy:
        return 0
    if slot.free:
        return 1
    if slot.key is None:
        return 2
    of, step = slot.key
    if slot.key == complete or of > incarnation:
        return 0
    if complete is not None and of == complete[0]:
        if step < complete[1]:
            return 4
        # After W: this incarnation's are on their way to become W, an adopted incarnation's were cut off.
        return 0 if of == incarnation else 3
    return 0 if of == incarnation else 3
