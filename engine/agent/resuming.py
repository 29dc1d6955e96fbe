"""An agent goes on where a former one of the node stopped: with what its journal holds."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING

from everstep.errors import AgentError, CannotTell, EverstepError
from everstep.format.records import RunRecord
from everstep.memory.arena import Arena
from everstep.memory.control import Purpose
from everstep.memory.process import Process
from everstep.memory.slots import Pinned

from .journal import QUEUED, JobEntry
from .members import Member

if TYPE_CHECKING:
    from .service import Service

log = logging.getLogger("everstep.agent")

TRIES_MAX = 40
PAUSE_S = 15.0
"""How long a new agent waits for storage before it leaves the journal's jobs to the next one."""


async def resume(service: Service) -> None:
    """Members, jobs and mirrors of the former agent. A job whose slot is gone fails as any other: aborted,
    reported."""
    await _resume_members(service)
    journal = service.journal
    service.keep(service.protection.resume(await service.journaled(journal.guard)))
    jobs = await service.journaled(journal.jobs)
    mirrors = await service.journaled(journal.mirrors)
    merges = await service.journaled(journal.merges)
    service.count_from(max([entry.order for entry in jobs], default=0))
    with service.working():
        if jobs or mirrors or merges:
            run = await _run_in_spite_of_storage(service)
            await _resume_jobs(service, run, jobs)
            await service.tiers.resume(mirrors)
            service.tiers.resume_merges(merges)


async def _resume_members(service: Service) -> None:
    found = []
    for kept in await service.journaled(service.journal.members):
        try:
            arena = await asyncio.to_thread(service.arena_of, kept.arena, None, kept.rank)
        except (EverstepError, OSError) as error:
            log.warning("rank %d of incarnation %d is forgotten: %s", kept.rank, kept.incarnation, error)
            await service.journaled(service.journal.drop_member, kept)
            continue
        found.append(Member.of(kept, arena))
    # All at once: a death is judged by who else is there.
    for member in found:
        if service.members.find(member.incarnation, member.rank) is None:
            service.members.add(member)


async def _resume_jobs(service: Service, run: RunRecord, jobs: list[JobEntry]) -> None:
    pipeline = await service.open_pipeline()
    for entry in jobs:
        if entry.run_id != run.run_id:
            log.warning("step %d of another run is dropped", entry.step)
            await service.forget([entry])
        elif entry.stage == QUEUED and not entry.arena and Process(*entry.process).alive():
            await service.forget([entry])  # its trainer has the arena, and will ask again
        else:
            await pipeline.add(entry, functools.partial(_pin_again, service, entry, []))


async def _run_in_spite_of_storage(service: Service) -> RunRecord:
    """The run, waiting some minutes for storage that does not answer; jobs stay in the journal meanwhile."""
    for left in range(TRIES_MAX - 1, -1, -1):
        try:
            return await service.ensure_run(None)
        except CannotTell as error:
            if left == 0:
                raise
            log.warning("cannot go on yet: %s", error)
            await asyncio.sleep(PAUSE_S)
    raise AssertionError("unreachable")


def _pin_again(service: Service, entry: JobEntry, opened: list[Arena]) -> Pinned:
    """Pin a journaled job's slot, in a thread; ``opened`` keeps the arena open. SlotGone, AgentError if it cannot be
    found any more."""
    if not entry.arena:
        raise AgentError(
            f"the snapshot of step {entry.step} of rank {entry.rank} went with the former agent",
            expected="an arena in a file, which outlives its processes",
        )
    arena = service.arena_of(entry.arena, None, entry.rank)
    opened.append(arena)
    return arena.pin(entry.slot, entry.generation, purpose=Purpose.FLUSH)
