"""How often to save: the interval that loses the least time, from what a save costs and how often something fails.

Young (A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974) gives sqrt(2 c M), for a save
that costs c and a mean time M between failures; Daly (A higher order estimate of the optimum checkpoint interval for
restart dumps, FGCS 22(3), 2006) the further terms that are used here.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

FLUSHES_APART = 2.0
"""The interval is at least this many flushes long: storage needs room for retries and for what comes after a flush."""
QUIET_STEPS_MIN = 8
QUIET_STEPS_MAX = 64
FLUSHES_MAX = 5
"""Flushes that the cost is made of."""


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between the end of one save and the beginning of the next: for c < 2 M

        sqrt(2 c M) * (1 + sqrt(c / 2M) / 3 + (c / 2M) / 9) - c

    and M above that. 0 for a save that costs nothing."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def interval_s(cost_s: float, flush_s: float, mtbf_s: float) -> float:
    """Seconds from save to save: Daly's interval and the save itself, but no less than a flush of ``flush_s`` leaves
    room for, and otherwise no more than ``mtbf_s``."""
    return max(min(daly_interval_s(cost_s, mtbf_s) + cost_s, mtbf_s), FLUSHES_APART * flush_s)


class SaveCost:
    """What a save costs training, measured: by how much the steps from the beginning of a flush to its end took longer
    than as many undisturbed ones (their median). That has the time of the call, and what the training was slowed down;
    the snapshot of every step is in both. Medians of the last flushes count."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._quiet: deque[float] = deque(maxlen=QUIET_STEPS_MAX)
        self._flushes: deque[tuple[float, int]] = deque(maxlen=FLUSHES_MAX)
        """Seconds and steps of each."""
        self._flush: tuple[float, int] | None = None

    def stepped(self, now: float, flushing: bool) -> None:
        """A step ended ``now``; ``flushing``: while a flush was under way, at its end or before."""
        last, self._last = self._last, now
        took = 0.0 if last is None else now - last
        if flushing:
            seconds, steps = self._flush or (0.0, 0)
            self._flush = seconds + took, steps + (last is not None)
            return
        if self._flush is not None:
            if self._flush[1]:
                self._flushes.append(self._flush)
            self._flush = None
        if last is not None:
            self._quiet.append(took)

    def measured(self) -> tuple[float, float] | None:
        """(cost, duration) of a flush in seconds; None while that is not known."""
        if not self._flushes or len(self._quiet) < QUIET_STEPS_MIN:
            return None
        quiet = statistics.median(self._quiet)
        cost = statistics.median(max(0.0, seconds - steps * quiet) for seconds, steps in self._flushes)
        return cost, statistics.median(seconds for seconds, _ in self._flushes)

    def interval_s(self, mtbf_s: float) -> float | None:
        """Seconds from save to save; None while the cost is not known."""
        found = self.measured()
        return None if found is None else interval_s(*found, mtbf_s)
