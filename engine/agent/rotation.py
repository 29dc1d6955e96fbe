"""Rotation in the background: one at a time, after a commit is durable or the storage was full,
never while superseded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from everstep.backends.api import Backend
from everstep.backends.errors import BackendError
from everstep.backends.points import reach
from everstep.errors import EverstepError
from everstep.plan.chains import next_bases
from everstep.plan.retention import Retention
from everstep.store.rotate import Key, RotationReport, rotate
from everstep.store.shelf import Shelf

from .storage import Fence, patiently

log = logging.getLogger("everstep.agent")


class Rotator:
    """``in_use`` says of an incarnation whether flushes of it are still under way here; ``done`` hears of
    each rotation that removed something, and of errors; ``owed`` are checkpoints that stay; ``goes_on`` says whether
    the job may have decided on a delta that is not here yet."""

    def __init__(
        self,
        backend: Backend,
        fence: Fence,
        retention: Retention,
        in_use: Callable[[int], bool],
        done: Callable[[int, RotationReport | None, EverstepError | BackendError | None], None],
        owed: Callable[[], set[Key]] = set,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self.retention = retention
        self.deltas = False
        """Whether deltas are written: what the next ones may stand on stays."""
        self._backend = backend
        self._fence = fence
        self._in_use = in_use
        self._done = done
        self._owed = owed
        self._goes_on = goes_on
        self._wanted: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._shelf = Shelf()

    @property
    def busy(self) -> bool:
        return self._task is not None

    def want(self, incarnation: int) -> None:
        """Rotate soon, on behalf of ``incarnation``; requests that come while one is under way become one
        more."""
        self._wanted = max(incarnation, self._wanted or 0)
        if self._task is None:
            self._task = asyncio.ensure_future(self._work())
            self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        self._wanted = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("rotation failed unexpectedly", exc_info=error)

    async def _work(self) -> None:
        while self._wanted is not None:
            incarnation, self._wanted = self._wanted, None
            try:
                report = await self._rotate(incarnation)
            except (EverstepError, BackendError) as error:
                log.warning("rotation failed: %s", error)
                self._done(incarnation, None, error)
                continue
            if report is not None and (report.removed or report.collected):
                self._done(incarnation, report, None)

    async def _rotate(self, incarnation: int) -> RotationReport | None:
        if await self._fence.superseded(incarnation):
            return None
        # By the lineage as the fence has just seen it: a further tier learns of new incarnations later.
        self._shelf.records = self._fence.known
        records = list(self._fence.known.values())
        look = await patiently(lambda: self._shelf.look(self._backend, records))
        parents = {key: facts.parent for key, facts in look.facts.items() if look.lineage.counts(*key)}
        bases = next_bases(parents, goes_on=self._goes_on()) if self.deltas else set()
        plan = look.plan(self.retention, self._owed() | bases)
        reach("agent.rotate.before", str(incarnation))

        async def is_superseded() -> bool:
            return await self._fence.superseded(incarnation)

        def is_gone(number: int) -> bool:
            return number < incarnation and self._fence.writer_is_dead(number) and not self._in_use(number)

        # Also with nothing to remove: it finishes what a crash left, and collects given-up attempts.
        return await patiently(
            lambda: rotate(
                self._backend,
                plan,
                is_superseded=is_superseded,
                is_gone=is_gone,
                shelf=self._shelf,
                look=look,
                held=self._owed,
            )
        )
