"""What the memory tier raises besides the general errors. They belong to the tree of ``everstep.errors``."""

from __future__ import annotations

from everstep.errors import CapacityError, OwnershipError, StateError


class SlotGone(StateError):
    """The slot no longer holds that snapshot: it was reused, given up or taken over."""


class ArenaGone(StateError):
    """The arena was cleaned up meanwhile, or this object was closed (or came through a fork)."""


class ArenaBusy(OwnershipError):
    """A living process holds the arena's lock for longer than the longest time that it may."""


class TooManyPins(CapacityError):
    """A slot's pin table is full of living processes' pins."""
