"""A clock of the tests' own, and what passed when."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from everstep.plan.pace import Adaptive

Passed = Sequence[tuple[float, int]]


def within(passed: Passed, start: float, seconds: float) -> int:
    """Bytes that passed from ``start`` on, for ``seconds``."""
    moments = [moment for moment, _ in passed]
    first, last = bisect_left(moments, start), bisect_right(moments, start + seconds)
    return sum(nbytes for _, nbytes in passed[first:last])


class Disk:
    """A simulated training that shares a disk with what an :class:`Adaptive` lets through.

    ``can`` bytes/s; a step takes ``alone_s``, of which ``reads_s`` are reads that go slower the more of the disk is
    taken. ``noise`` is the spread of a step's length. Everything in simulated seconds.
    """

    def __init__(
        self, can: float, alone_s: float, reads_s: float, *, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.can, self.alone_s, self.reads_s, self.noise = can, alone_s, reads_s, noise
        self.now = 100.0
        self.pace = Adaptive()
        self.took: list[float] = []
        self.rates: list[float] = []
        self._random = random.Random(seed)

    def steps(self, count: int, nbytes: float) -> float:
        """``count`` training steps while ``nbytes`` are to be written. What is left."""
        for _ in range(count):
            rate = self.pace.rate(self.now) if nbytes > 0 else 0.0
            rate = self.can if rate is None else min(rate, self.can)
            self.rates.append(rate)
            share = min(rate / self.can, 0.95)
            took = self.alone_s + self.reads_s * share / (1 - share)
            took *= max(0.2, self._random.gauss(1.0, self.noise))
            nbytes = self._send(min(nbytes, rate * took), took, nbytes)
            self.now += 0.001
            self.took.append(took)
            self.pace.stepped(self.now - 0.001, took)
        return nbytes

    def _send(self, sent: float, took: float, left: float) -> float:
        slices = max(1, min(int(took / 0.05), 20))
        for _ in range(slices):
            self.now += took / slices
            if sent > 0:
                self.pace.sent(self.now, int(sent / slices))
        return left - sent
