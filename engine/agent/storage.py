"""How the agent asks storage: bounded retries of what may pass, and the fence of newer incarnations."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from everstep.backends.api import Backend
from everstep.backends.errors import BackendError, NoSpace, Retryable
from everstep.errors import CannotTell, EverstepError, SaveFailed, StorageFull
from everstep.format.records import IncarnationRecord
from everstep.memory.process import Process, boot_id
from everstep.plan.lineage import Lineage
from everstep.store.runs import read_incarnations

TRIES_MAX = 5
BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 5.0

T = TypeVar("T")


def may_pass(error: BaseException) -> bool:
    """Whether trying again may help: a Retryable, or what the store made of one."""
    return isinstance(error, Retryable) or isinstance(error.__cause__, Retryable)


async def patiently(work: Callable[[], Awaitable[T]]) -> T:
    """``work``'s result, tried up to TRIES_MAX times while it fails in a way that may pass."""
    pause = BACKOFF_FIRST_S
    for left in range(TRIES_MAX - 1, -1, -1):
        try:
            return await work()
        except (BackendError, EverstepError) as error:
            if left == 0 or not may_pass(error):
                raise
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, BACKOFF_MAX_S)
    raise AssertionError("unreachable")


def in_our_words(error: Exception, *, step: int, rank: int | None, tier: str) -> EverstepError:
    """Any failure of a flush as an error of the tree that names step, rank and tier."""
    who = f"step {step}" if rank is None else f"step {step}, rank {rank}"
    fields: dict[str, Any] = {"step": step, "tier": tier, **({} if rank is None else {"rank": rank})}
    if isinstance(error, EverstepError):
        message = error.message if error.message.startswith(f"step {step}") else f"{who}: {error.message}"
        return type(error)(
            message,
            found=error.found,
            expected=error.expected,
            hint=error.hint,
            **{**fields, **error.fields},
        )
    kind = StorageFull if isinstance(error, NoSpace) else SaveFailed
    return kind(
        f"{who}: the flush failed",
        found=f"{type(error).__name__}: {error}",
        hint="Earlier checkpoints are untouched",
        **fields,
    )


class Fence:
    """Which incarnations write the run. Records are read again at each look: a newer one ends our right to
    commit above its cut, and to delete at all."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.lineage = Lineage([])
        """As it was at the last look."""
        self.known: dict[int, IncarnationRecord] = {}
        """Records that were read; they never change."""
        self.newest = 0
        self.worlds: dict[int, int] = {}
        self._writers: dict[int, Process] = {}

    async def look(self) -> Lineage:
        """The lineage as it is now. Raises CannotTell, Damaged, UnknownFormat."""
        records = await patiently(lambda: read_incarnations(self._backend, self.known))
        self.worlds = {record.number: record.world for record in records}
        self._writers = {
            record.number: Process(record.writer.pid, record.writer.start_time, record.writer.boot)
            for record in records
        }
        self.newest = max(self.worlds, default=0)
        self.lineage = Lineage(records)
        return self.lineage

    async def allows(self, incarnation: int, step: int) -> bool:
        """Whether that checkpoint may still be committed."""
        lineage = await self.look()
        return incarnation >= self.newest or lineage.counts(incarnation, step)

    async def superseded(self, incarnation: int) -> bool:
        """Whether a newer incarnation exists; also where that cannot be told: then nothing may be deleted."""
        try:
            await self.look()
        except (CannotTell, BackendError):
            return True
        return self.newest > incarnation

    def writer_is_dead(self, incarnation: int) -> bool:
        """Whether the incarnation's writer provably ended: a process of this boot of this machine, not
        running."""
        writer = self._writers.get(incarnation)
        return writer is not None and writer.boot == boot_id() != "" and not writer.alive()
