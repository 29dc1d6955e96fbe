"""What a load or a rollback restored, until a step or save follows it: it may lie in memory alone."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

from .backends.api import Backend
from .discovery import is_durable
from .loading import Recovery
from .ranks import Ranks
from .state.trainstate import TrainState
from .state.tree import FlatState

Flat = Callable[[], FlatState]
"""Gives a state as it is now."""

IN_MEMORY = ("memory", "device")


class Adopted:
    """``state`` as ``recovery`` restored it. Keeps the state alive, and the version counters of its tensors."""

    def __init__(self, state: TrainState, recovery: Recovery, flat: Flat) -> None:
        self.state = state
        self.recovery = recovery
        self.in_memory_alone = recovery.tier in IN_MEMORY
        """As far as is known."""
        self._versions = _versions(flat()) if self.in_memory_alone else []

    def is_owed(self, ranks: Ranks, backend: Backend, timeout_s: float) -> bool:
        """Whether it has still to be made durable, and the state is what was restored. All ranks call it and get the
        same. Where a tensor was written to since, as far as torch counts that, the state is of no step that anyone
        knows: a warning says that what was restored stays in memory alone."""
        if not self.in_memory_alone:
            return False
        key = (self.recovery.incarnation, self.recovery.step)
        if ranks.from_first(
            "looking for the checkpoint on disk", lambda: is_durable(backend, key), timeout_s=timeout_s
        ):
            self.in_memory_alone = False
            return False
        changed = ranks.agree(
            "comparing with what was loaded",
            _versions(self.state.flatten()) != self._versions,
            timeout_s=timeout_s,
        )
        if any(changed):
            warnings.warn(
                f"everstep: step {key[1]} stays in memory alone: the state was changed since it was loaded, and no "
                "step or save followed",
                RuntimeWarning,
                stacklevel=4,
            )
        return not any(changed)


def flattened_once(state: TrainState) -> Flat:
    """For several who look at the state while nobody changes it."""
    return functools.cache(state.flatten)


def _versions(flat: FlatState) -> list[tuple[str, str, int]]:
    found = []
    for leaf in flat.leaves:
        for piece in leaf.pieces:
            found.append((leaf.part, leaf.key, 0 if piece.is_inference() else piece._version))
    return found
