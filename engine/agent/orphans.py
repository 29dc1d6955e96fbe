"""When all trainers of the node have ended without goodbye, the agent still makes their newest common step
durable."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import TYPE_CHECKING

from everstep.backends.errors import BackendError
from everstep.errors import EverstepError
from everstep.memory.process import Process
from everstep.store.commit import next_attempt

from .members import KEPT, Member, find_snapshot
from .storage import patiently

if TYPE_CHECKING:
    from .service import Service

log = logging.getLogger("everstep.agent")

TRIES_MAX = 3
PAUSE_S = 2.0
"""Between tries; nobody else will try again."""


class Orphans:
    """Looks after each death; one flush of W at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._working = False
        self._again = False
        self._done: set[tuple[int, int]] = set()
        """(incarnation, step) that became durable, or was found to be."""

    @property
    def busy(self) -> bool:
        return self._working

    async def look(self) -> None:
        """Flush W if every trainer of the newest incarnation is gone and at least one had no time to say
        so."""
        self._again = True
        if self._working:
            return
        self._working = True
        try:
            while self._again:
                self._again = False
                await self._look()
        finally:
            self._working = False

    async def _look(self) -> None:
        members = self._service.members.of_newest()
        if any(member.here for member in members) or any(member.farewell == KEPT for member in members):
            return
        dead = [member for member in members if member.farewell is None]
        if dead and await self._flush_newest():
            for member in dead:
                await self._service.forget_member(member)

    async def _flush_newest(self) -> bool:
        """Whether nothing is left to do. If not, the journal keeps the members for the next agent."""
        for _ in range(TRIES_MAX):
            try:
                key = await self._complete()
                if key is None:
                    log.info("all trainers are gone; no step is complete in the arenas of this node")
                    return True
                if key in self._done or await self._flush(*key):
                    self._done.add(key)
                    return True
            except (BackendError, EverstepError) as error:
                log.warning("the newest step could not be made durable: %s", error)
            await asyncio.sleep(PAUSE_S)
        return False

    async def _complete(self) -> tuple[int, int] | None:
        """W: the newest (incarnation, step) that counts and that all its ranks hold here."""
        arenas = self._service.members.arenas()
        pipeline = await self._service.open_pipeline()
        lineage = await pipeline.fence.look()
        held: dict[tuple[int, int], set[int]] = defaultdict(set)
        for rank, arena in arenas.items():
            for found in arena.snapshots():
                held[found.key].add(rank)
        # Each by its own number of ranks: arenas of a former, larger world stay for as long as they may be needed.
        worlds = pipeline.fence.worlds
        fitting = [
            key
            for key, ranks in held.items()
            if lineage.counts(*key) and ranks == set(range(worlds.get(key[0], 0)))
        ]
        return max(fitting, default=None)

    async def _flush(self, incarnation: int, step: int) -> bool:
        """Whether the step is durable now."""
        service, pipeline = self._service, await self._service.open_pipeline()
        attempt, manifest = await patiently(lambda: next_attempt(pipeline.backend, step, incarnation))
        if manifest is not None:
            return True
        log.info("all trainers are gone; making step %d of incarnation %d durable", step, incarnation)
        arenas, world = service.members.arenas(), pipeline.fence.worlds[incarnation]
        for rank in range(world):
            arena = arenas[rank]
            snapshot = find_snapshot(arena, incarnation, step)
            if snapshot is None:
                return False
            member = self._member_for(rank, incarnation, world)
            entry = service.entry_of(member, step, snapshot.index, snapshot.generation, attempt, "full")
            await pipeline.add(entry, service.pin_of(member, snapshot.index, snapshot.generation))
        flush = pipeline.find(incarnation, step)
        if flush is not None:
            await flush.over.wait()
        return (await patiently(lambda: next_attempt(pipeline.backend, step, incarnation)))[1] is not None

    def _member_for(self, rank: int, incarnation: int, world: int) -> Member:
        """Who the job is entered for: the rank as it was in that incarnation, whose record says the same
        world. Of a rank that is no more, the arena tells."""
        arena = self._service.members.arenas()[rank]
        info = arena.info
        path = "" if info.path is None else str(info.path)
        last = next((member for member in reversed(self._service.members.all()) if member.rank == rank), None)
        process = last.process if last is not None else info.owner or Process.current()
        return Member(info.run_id, rank, world, incarnation, None, process, arena, path)
