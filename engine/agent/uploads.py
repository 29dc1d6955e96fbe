"""Staged shares on their way from the node's tier to the root, in the order in which they were staged.

One is uploaded at a time, and tried for as long as it takes. When the shares of more than ``WAITING_MAX`` steps wait
behind it, the oldest of these steps is given up, a delta before a full, by its abort record at the root, so that no
node goes on with it; the newest never is. A step whose upload fails makes way once as many wait behind it. Everything
here runs on the agent's loop.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from everstep.backends.errors import BackendError
from everstep.errors import Damaged, Pruned

from .behind import WAITING_MAX
from .flushes import Flush, Job
from .journal import VOTED
from .waiting import happened

PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 30.0
"""Between tries of a root that fails."""

Work = Callable[[Flush, Job], Awaitable[BaseException | None]]


def is_the_roots(error: BaseException) -> bool:
    """Whether it is storage that failed: of no fault of what is uploaded, so that it is tried again."""
    if isinstance(error, (Damaged, Pruned)):
        return False
    return isinstance(error, (BackendError, OSError)) or isinstance(error.__cause__, BackendError)


def pause_after(failures: int) -> float:
    """Seconds until the next try."""
    exponent = min(failures - 1, 16)
    return float(min(PAUSE_FIRST_S * 2**exponent, PAUSE_MAX_S) * random.uniform(0.5, 1.0))


class Uploads:
    """The queue. ``work`` uploads one share and says what went wrong, ``failing`` hears of what is tried again (with
    the number of failures so far), ``failed`` of what is not, ``drop`` gives a flush up."""

    def __init__(
        self,
        work: Work,
        *,
        failing: Callable[[Flush, Job, BaseException, int], None],
        failed: Callable[[Flush, BaseException, int], None],
        drop: Callable[[Flush], None],
    ) -> None:
        self._work = work
        self._failing = failing
        self._failed = failed
        self._drop = drop
        self._queue: deque[tuple[Flush, Job]] = deque()
        self._now: Flush | None = None
        self._wake = asyncio.Event()
        self._failures = 0

    def add(self, flush: Flush, job: Job) -> None:
        self._queue = deque([one for one in self._queue if not one[0].ended])
        self._queue.append((flush, job))
        waiting = self._waiting()
        while len(waiting) > WAITING_MAX:
            spare = _spare(waiting)
            waiting.remove(spare)
            self._drop(spare)
        self._wake.set()

    def look(self) -> None:
        """A flush has ended: it is not waited for any more."""
        self._wake.set()

    def status(self) -> dict[str, Any]:
        now = [self._now] if self._now is not None and not self._now.ended else []
        return {"owed": [flush.step for flush in [*now, *self._waiting()]], "upload_failures": self._failures}

    async def run(self) -> None:
        """Upload until cancelled."""
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            self._now, job = self._queue.popleft()
            await self._see_through(self._now, job)
            self._now = None

    async def _see_through(self, flush: Flush, job: Job) -> None:
        while not flush.ended:
            error = await self._work(flush, job)
            if error is None:
                if job.entry.stage == VOTED:
                    self._failures = 0
                return
            if not is_the_roots(error):
                self._failed(flush, error, job.entry.rank)
                return
            self._failures += 1
            self._failing(flush, job, error, self._failures)
            waiting = self._waiting()
            if len(waiting) >= WAITING_MAX:  # newer ones are there: this one has had its time
                spare = _spare([flush, *waiting])
                self._drop(spare)
                if spare is flush:
                    return
            self._wake.clear()
            await happened(self._wake, pause_after(self._failures))

    def _waiting(self) -> list[Flush]:
        """Steps that wait, the oldest first."""
        found: list[Flush] = []
        for flush, _ in self._queue:
            if flush is not self._now and not flush.ended and flush not in found:
                found.append(flush)
        return found


def _spare(flushes: list[Flush]) -> Flush:
    """Which of several goes first: the oldest, but of fulls and deltas a delta; the newest never."""
    return next((flush for flush in flushes[:-1] if flush.is_delta), flushes[0])
