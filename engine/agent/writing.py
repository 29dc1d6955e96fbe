"""Jobs that wait to be written: in the order of their acceptance, but a delta comes behind the verdict on its base."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from .flushes import Flush, Job


class Jobs:
    """``under_way`` says whether a flush, by (incarnation, step), has no verdict yet, where that is to be waited for.
    Used from one loop."""

    def __init__(self, under_way: Callable[[tuple[int, int]], bool]) -> None:
        self._under_way = under_way
        self._waiting: deque[tuple[Flush, Job]] = deque()
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, flush: Flush, job: Job) -> None:
        self._waiting.append((flush, job))
        self._wake.set()

    def look(self) -> None:
        """A flush got its verdict: what stands on it need not wait any more."""
        self._wake.set()

    async def next(self) -> tuple[Flush, Job]:
        """The first one that can be written now. Only shares of older checkpoints pass by a delta that waits: of the
        very one that it stands on, say, which a rank may ask for late."""
        while True:
            self._wake.clear()
            self._waiting = deque([one for one in self._waiting if not one[0].ended])
            held: tuple[int, int] | None = None
            for at, (flush, job) in enumerate(self._waiting):
                if held is not None and flush.key >= held:
                    continue
                if job.entry.base is None or not self._under_way(job.entry.base):
                    del self._waiting[at]
                    return flush, job
                held = flush.key
            await self._wake.wait()
