"""Who may send now: one turnstile for all that an agent sends, and a lane of its own for each tier.

What is more urgent goes first. Nothing that waits starves, and no connection that waits is silent for so long that a
server hangs up on it: whoever was passed over for a while has a short turn.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable
from typing import Any

from everstep.backends.limit import LOOK_S, TokenBucket
from everstep.plan.pace import Governor

PASSED_OVER_S = 9.0
"""How long a lane stands back for what is more urgent before it has a turn."""
TURN_S = 1.0
AT_WORK_S = 1.0
"""A lane that let something through is taken to go on with it for so long."""


class Urgency(enum.IntEnum):
    """What goes before what; lower is more urgent."""

    ONLY_COPY = 1
    """A snapshot that is durable nowhere yet."""
    MIRROR = 2
    """A further copy of what is durable."""


class Turnstile:
    """Used from one event loop; ``clock`` gives seconds."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.clock = clock
        self.sleep = sleep
        self.recovering = False
        """Whether someone on this node reads to recover: that goes before everything."""
        self.lanes: list[Lane] = []

    def lane(
        self,
        name: str,
        urgency: Urgency,
        governor: Governor,
        *,
        link: str = "",
    ) -> Lane:
        """A new lane, until it is closed. What goes over another ``link`` (disk, network) is in nobody's way."""
        lane = Lane(self, name, urgency, governor, link)
        self.lanes.append(lane)
        return lane

    def ahead_of(self, lane: Lane) -> bool:
        """Whether something more urgent is under way."""
        return self.recovering or any(
            other.urgency < lane.urgency and other.at_work
            for other in self.lanes
            if other is not lane and other.link == lane.link
        )


class Lane:
    """The gate of one tier: in turn, at its governor's rate. ``governor`` may be replaced at any time."""

    def __init__(
        self,
        turnstile: Turnstile,
        name: str,
        urgency: Urgency,
        governor: Governor,
        link: str,
    ) -> None:
        self.name = name
        self.link = link
        self.urgency = urgency
        self.governor = governor
        self.nbytes = 0
        """Let through so far."""
        self._turnstile = turnstile
        self._bucket = TokenBucket(None, turnstile.clock, turnstile.sleep)
        self._waiting = 0
        self._last: float | None = None
        self._passed_over: float | None = None
        """Since when it stands back."""
        self._turn_until = 0.0

    @property
    def at_work(self) -> bool:
        """Whether something waits in it, or was let through just now."""
        return self._waiting > 0 or (
            self._last is not None and self._turnstile.clock() - self._last < AT_WORK_S
        )

    @property
    def nbytes_max(self) -> int:
        self._follow()
        return self._bucket.nbytes_max

    async def take(self, nbytes: int) -> None:
        """Wait for the lane's turn, and until ``nbytes`` may go by its rate."""
        self._waiting += 1
        try:
            await self._stand_back()
            self._follow()
            await self._bucket.take(nbytes)
        finally:
            self._waiting -= 1
        self._last = self._turnstile.clock()
        self.nbytes += nbytes
        self.governor.sent(self._last, nbytes)
        self._follow()

    def close(self) -> None:
        """Nobody else stands back for it any more."""
        if self in self._turnstile.lanes:
            self._turnstile.lanes.remove(self)

    def status(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "urgency": self.urgency.name.lower(),
            "bytes_per_s": self._bucket.bytes_per_s,
            "bytes": self.nbytes,
            "stands_back": self._passed_over is not None,
            **self.governor.status(),
        }

    def _follow(self) -> None:
        self._bucket.bytes_per_s = self.governor.rate(self._turnstile.clock())

    async def _stand_back(self) -> None:
        while self._turnstile.ahead_of(self):
            now = self._turnstile.clock()
            if now < self._turn_until:
                return
            if self._passed_over is None:
                self._passed_over = now
            if now - self._passed_over >= PASSED_OVER_S:
                self._turn_until, self._passed_over = now + TURN_S, None
                return
            await self._turnstile.sleep(LOOK_S)
        self._passed_over = None
