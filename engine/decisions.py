"""One rank decides what happens at which step, ahead of time; the others follow.

Clocks, back-pressure and intervals in seconds are read on rank 0 only, or ranks would flush different steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from .plan.schedule import Decision, Schedule, merge
from .policy import Policy, Tier
from .ranks import Ranks

LOOKAHEAD_STEPS = 2
KEPT_DECISIONS_MAX = 64
"""How many past decisions stay published for ranks that lag behind."""
KEY = "schedule"


class Decisions:
    """What the schedule says of each step, the same on every rank.

    The steps that are asked for go up, by one or by more; what was decided for steps that were passed over
    happens at the next one. ``start`` is the step that ``incarnation`` began from: one job may write several, and what
    was decided in one says nothing of another.
    """

    def __init__(
        self,
        ranks: Ranks,
        policy: Policy,
        *,
        start: int,
        unfinished_max: int,
        incarnation: int = 0,
        tiers: Sequence[Tier] = (),
    ) -> None:
        self._ranks = ranks
        self._key = f"{KEY}/{incarnation}"
        self._timeout_s = policy.rank_timeout_s
        self._unfinished_max = unfinished_max
        self._schedule: Schedule | None = None
        if ranks.rank == 0:
            self._schedule = Schedule(
                policy.snapshot_every,
                policy.full_every,
                LOOKAHEAD_STEPS,
                policy.on_slow,
                {tier.name: tier.every for tier in tiers},
            )
        self._through = start
        self._last = start
        self._decided: list[Decision] = []

    def of(self, step: int, unfinished: Callable[[], int]) -> Decision:
        """The decision on ``step``. Rank 0 decides it and the next ones; others wait for it, bounded."""
        if self._schedule is not None:
            self._extend(self._schedule, step, unfinished())
        elif step > self._through:
            self._follow(step)
        asked = merge(d for d in self._decided if self._last < d.step <= step)
        return asked if asked is not None else Decision(step, False, False)

    def passed(self, step: int) -> None:
        """What was decided for ``step`` is done. Until then a step that failed may be tried again."""
        self._last = max(step, self._last)

    def _extend(self, schedule: Schedule, step: int, unfinished: int) -> None:
        """Decide through ``step`` + lookahead and publish it: one small message a step."""
        through = step + LOOKAHEAD_STEPS
        new = schedule.extend(through, time.monotonic(), unfinished, self._unfinished_max)
        self._take(through, new)
        self._ranks.tell(self._key, {"through": through, "decided": [_to_wire(d) for d in self._decided]})

    def _follow(self, step: int) -> None:
        wire = self._ranks.ask(
            self._key,
            lambda value: bool(value["through"] >= step),
            f"waiting for the decision on step {step}",
            timeout_s=self._timeout_s,
        )
        self._take(wire["through"], [_from_wire(item) for item in wire["decided"]])

    def _take(self, through: int, new: list[Decision]) -> None:
        self._through = max(through, self._through)
        known = {d.step for d in self._decided}
        self._decided += [d for d in new if d.step not in known]
        del self._decided[:-KEPT_DECISIONS_MAX]


def _to_wire(decision: Decision) -> list[Any]:
    return [
        decision.step,
        decision.snapshot,
        decision.flush,
        decision.wait,
        decision.supersede,
        list(decision.tiers),
    ]


def _from_wire(item: list[Any]) -> Decision:
    step, snapshot, flush, wait, supersede, tiers = item
    return Decision(step, snapshot, flush, wait, supersede, tuple(tiers))
