"""One rank decides what happens at which step, ahead of time; the others follow.

Clocks, back-pressure and intervals in seconds are read on rank 0 only, or ranks would flush different steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .plan.schedule import Decision, Schedule
from .policy import Policy
from .ranks import Ranks

LOOKAHEAD_STEPS = 2
KEPT_STEPS = 64
"""How many past steps stay published for ranks that lag behind."""
KEY = "schedule"


class Decisions:
    """What the schedule says of each step, the same on every rank."""

    def __init__(self, ranks: Ranks, policy: Policy, *, unfinished_max: int) -> None:
        self._ranks = ranks
        self._timeout_s = policy.rank_timeout_s
        self._unfinished_max = unfinished_max
        self._schedule = (
            Schedule(
                snapshot_every=policy.snapshot_every,
                full_every=policy.full_every,
                lookahead=LOOKAHEAD_STEPS,
                on_slow=policy.on_slow,
            )
            if ranks.rank == 0
            else None
        )
        self._through = -1
        self._decided: dict[int, Decision] = {}

    def of(self, step: int, unfinished: Callable[[], int]) -> Decision:
        """The decision on ``step``. Rank 0 decides it and the next ones; others wait for it, bounded."""
        if self._schedule is not None:
            if step > self._through - LOOKAHEAD_STEPS:
                self._extend(step, unfinished())
        elif step > self._through:
            self._follow(step)
        return self._decided[step]

    def _extend(self, step: int, unfinished: int) -> None:
        assert self._schedule is not None
        first = max(self._through + 1, step)
        through = step + LOOKAHEAD_STEPS
        new = self._schedule.extend(
            first, through, now=time.monotonic(), unfinished=unfinished, unfinished_max=self._unfinished_max
        )
        self._take(through, new)
        wire = {"through": through, "decided": [_to_wire(d) for d in self._decided.values()]}
        self._ranks.tell(KEY, wire)

    def _follow(self, step: int) -> None:
        wire = self._ranks.ask(
            KEY,
            lambda value: value["through"] >= step,
            f"waiting for the decision on step {step}",
            timeout_s=self._timeout_s,
        )
        self._take(wire["through"], [Decision(*item) for item in wire["decided"]])

    def _take(self, through: int, new: list[Decision]) -> None:
        self._through = through
        for decision in new:
            self._decided[decision.step] = decision
        for old in [s for s in self._decided if s < through - KEPT_STEPS]:
            del self._decided[old]


def _to_wire(decision: Decision) -> list[Any]:
    return [decision.step, decision.snapshot, decision.flush, decision.wait, decision.supersede]
