"""One rank decides what happens at which step, ahead of time; the others follow.

Clocks, back-pressure and intervals in seconds are read on rank 0 only, or ranks would flush different steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .agent.values import Progress
from .chained import take_in
from .plan.chains import FULL, Chains
from .plan.interval import SaveCost
from .plan.schedule import AUTO, Decision, Schedule, merge, parse_duration
from .policy import Policy, Tier
from .ranks import Ranks

log = logging.getLogger("everstep")

LOOKAHEAD_STEPS = 2
AUTO_FIRST_S = 600.0
"""The interval between fulls until what one costs was measured."""
KEPT_DECISIONS_MAX = 64
"""How many past decisions stay published for ranks that lag behind."""
KEY = "schedule"

Trouble = tuple[str, bool]
"""What is to be told, "" for nothing, and whether as an error."""


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
        chains: Chains | None = None,
    ) -> None:
        """``chains``: of rank 0, which checkpoints are durable and what they stand on."""
        self._ranks = ranks
        self._incarnation = incarnation
        self._chains = chains
        self._key = f"{KEY}/{incarnation}"
        self._timeout_s = policy.rank_timeout_s
        self._unfinished_max = unfinished_max
        self._schedule: Schedule | None = None
        if ranks.rank == 0:
            every = f"{AUTO_FIRST_S:g}s" if policy.full_every == AUTO else policy.full_every
            self._schedule = Schedule(
                policy.snapshot_every,
                every,
                LOOKAHEAD_STEPS,
                policy.on_slow,
                {tier.name: tier.every for tier in tiers},
                delta_every=policy.delta_every,
                chains=chains,
            )
        self.flush_every_s: float | None = None
        """The interval between fulls as measured (``full_every="auto"``, on rank 0): by what steps take longer while a
        full is under way than all others, those with deltas among them."""
        self._cost = SaveCost() if self._schedule is not None and policy.full_every == AUTO else None
        self._mtbf_s = parse_duration(policy.mtbf, "mtbf")
        self._flushing = self._was_flushing = False
        self._through = start
        self._last = start
        self._decided: list[Decision] = []

    def of(
        self,
        step: int,
        unfinished: Callable[[], int],
        trouble: Callable[[int], Trouble] = lambda step: ("", False),
        *,
        deltas: Callable[[], int] = lambda: 0,
    ) -> Decision:
        """The decision on ``step``. Rank 0 decides it and the next ones; others wait for it, bounded.
        ``unfinished``: how many flushes are, and ``deltas`` how many of these are. ``trouble`` is rank 0's, and told by
        all ranks at the same step."""
        if self._schedule is not None:
            self._extend(self._schedule, step, unfinished(), deltas(), trouble)
        elif step > self._through:
            self._follow(step)
        asked = merge(d for d in self._decided if self._last < d.step <= step)
        asked = asked if asked is not None else Decision(step, False, False)
        if self._ranks.world == 1:  # nobody has to agree, so it is told at once
            text, fatal = trouble(step)
            asked = replace(asked, trouble=text, fatal=fatal)
        self._flushing |= asked.flush and asked.kind == FULL
        return asked

    def told(self, step: int) -> None:
        """The trouble of decisions up to ``step`` was told; a step that is tried again does not tell it again."""
        self._decided = [replace(d, trouble="", fatal=False) if d.step <= step else d for d in self._decided]

    def heard(self, progress: Progress) -> None:
        """The agent said this; of deltas it decides what comes next."""
        if self._chains is not None:
            take_in(self._chains, progress, self._incarnation)

    def passed(self, step: int) -> None:
        """What was decided for ``step`` is done. Until then a step that failed may be tried again."""
        self._last = max(step, self._last)
        if self._cost is not None:
            self._cost.stepped(time.monotonic(), self._flushing or self._was_flushing)

    def _extend(
        self, schedule: Schedule, step: int, unfinished: int, deltas: int, trouble: Callable[[int], Trouble]
    ) -> None:
        """Decide through ``step`` + lookahead and publish it: one small message a step."""
        self._was_flushing, self._flushing = self._flushing, unfinished > deltas
        self._follow_cost(schedule)
        through = step + LOOKAHEAD_STEPS
        new = schedule.extend(through, time.monotonic(), unfinished, self._unfinished_max, deltas)
        if new and self._ranks.world > 1:  # what was published before may have been read
            text, fatal = trouble(step)
            new[-1] = replace(new[-1], trouble=text, fatal=fatal)
        self._take(through, new)
        if self._ranks.world > 1:
            self._ranks.tell(self._key, {"through": through, "decided": [_to_wire(d) for d in self._decided]})

    def _follow_cost(self, schedule: Schedule) -> None:
        seconds = self._cost.interval_s(self._mtbf_s) if self._cost is not None and self._mtbf_s else None
        if seconds is not None and seconds != self.flush_every_s:
            if self.flush_every_s is None:
                log.info("everstep: a full every %.0f s, by what one costs", seconds)
            self.flush_every_s = seconds
            schedule.flush_every(seconds)

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
        decision.trouble,
        decision.fatal,
        decision.kind,
        None if decision.base is None else list(decision.base),
        decision.merge,
    ]


def _from_wire(item: list[Any]) -> Decision:
    step, snapshot, flush, wait, supersede, tiers, trouble, fatal, kind, base, to_merge = item
    plain = step, snapshot, flush, wait, supersede, tuple(tiers), trouble, fatal
    return Decision(*plain, kind, None if base is None else tuple(base), to_merge)
