"""The node's beacon: while trainers live here, the agent says so on the shared tier, every heartbeat.

For whoever is on another node: people who look, and an opening that must not take a run from a living writer. Nothing
waits for a beacon, and none that fails is more than a line in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import time
from typing import TYPE_CHECKING, Any

from everstep.backends.api import Backend
from everstep.backends.errors import BackendError
from everstep.errors import EverstepError
from everstep.format import names
from everstep.format.beacon import Beacon, BeaconRank, encode_beacon
from everstep.format.typed import fields
from everstep.memory.arena import Arena
from everstep.memory.process import Process
from everstep.store.asking import writing
from everstep.store.beacons import read_beacons

from .guard import SameRun
from .members import Member
from .waiting import happened

if TYPE_CHECKING:
    from .service import Service

log = logging.getLogger("everstep.agent")

WRITES_PER_S_MAX = 20.0
"""Of all nodes of a job together, about: with more nodes each writes less often, and says so."""

SWEEP_AFTER = 10
"""Beacons of an earlier incarnation that stood still for this many of ours are a lost node's, and go."""

BOOT_CHARS = 8
"""Of the boot's id, enough to tell hosts apart."""

CLOSE_S = 5.0
"""For taking the beacon back at the end, where storage may not answer."""


class Beacons:
    """One agent's. Used from its loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._me = Process.current()
        self._changed = asyncio.Event()
        self._count = 0
        self._name = ""
        self._quiet = True
        self._durable: tuple[int, int, float] | None = None
        self._written: float | None = None
        self._error: str | None = None
        self._seen: dict[str, tuple[Any, int]] = {}
        self._sweep_at = (0, 0)

    # -- what happened

    def changed(self) -> None:
        """A trainer came, said goodbye, or died."""
        self._changed.set()

    def committed(self, incarnation: int, step: int) -> None:
        """That step became durable just now."""
        if self._durable is None or (incarnation, step) > self._durable[:2]:
            self._durable = incarnation, step, time.monotonic()

    # -- saying it

    async def run(self) -> None:
        """Until cancelled. The first one comes after an interval, so that short jobs leave no trace; afterwards the
        end of a trainer is said at once, for its successor may be waiting to hear it."""
        while True:
            beacon = self.now()
            pause = self._service.settings.heartbeat_s if beacon is None else beacon.interval_s
            if await happened(self._changed, pause):
                self._changed.clear()
                if self._quiet:
                    continue
            await self._say()

    async def _say(self) -> None:
        beacon, run = self.now(), self._service.run_record
        if beacon is None or run is None or (self._quiet and not beacon.living and not beacon.queue):
            return
        guarded = SameRun(self._service.backend, run, lambda found: None)
        name = self._name_of(beacon)
        try:
            if self._name not in ("", name):
                await self._remove(guarded)
            self._name = name  # cancelled in mid write, it is still ours to remove
            with writing(guarded, name):
                await guarded.write(name, encode_beacon(beacon))
            self._written = time.monotonic()
            self._count += (
                1  # only now: two steps of it prove that the later one was made after the former was there
            )
            self._quiet = not beacon.living and not beacon.queue
            self._failed(None)
            await self._sweep(guarded, beacon)
        except (BackendError, EverstepError) as error:
            self._failed(f"{type(error).__name__}: {error}")

    def now(self) -> Beacon | None:
        """What there is to say at this moment; None before any trainer came."""
        service = self._service
        members = [member for member in service.members.of_newest() if member.farewell is None]
        newest = service.members.newest
        if not newest:
            return None
        worlds = [member.world for member in service.members.of_newest()]
        ranks = tuple(sorted((_rank(member) for member in members), key=lambda rank: rank.rank))
        complete = [_of(newest, member.arena, "complete") for member in members]
        durable = self._durable if self._durable is not None and self._durable[0] == newest else None
        return Beacon(
            node=service.settings.node,
            host=socket.gethostname(),
            boot=self._me.boot,
            agent_pid=self._me.pid,
            agent_start=self._me.start_time,
            count=self._count + 1,
            interval_s=self._interval_s(max(worlds), len(worlds)),
            timeout_s=service.settings.heartbeat_timeout_s,
            incarnation=newest,
            world=max(worlds),
            ranks=ranks,
            complete=max((step for step in complete if step is not None), default=None),
            durable=None if durable is None else durable[1],
            durable_age_s=None if durable is None else time.monotonic() - durable[2],
            queue=self._queue(),
            address=service.protection.address,
        )

    def _queue(self) -> int:
        """Other nodes wait for what is under way here: flushes, and deltas that are made fulls."""
        pipeline, tiers = self._service.pipeline, self._service.tiers
        return 0 if pipeline is None else len(pipeline.flushes()) + len(tiers.merging())

    def status(self) -> dict[str, Any]:
        """What the beacon would say now, how long ago the last one was written, and why the next one was not."""
        now = self.now()
        age = None if self._written is None else time.monotonic() - self._written
        return {
            "beacon": None if now is None else {**fields(now), "ranks": [fields(rank) for rank in now.ranks]},
            "written_age_s": age,
            "error": self._error,
        }

    async def close(self) -> None:
        """Take the beacon back."""
        run = self._service.run_record
        if run is None or not self._name:
            return
        try:
            await asyncio.wait_for(
                self._remove(SameRun(self._service.backend, run, lambda found: None)), CLOSE_S
            )
        except (BackendError, EverstepError, asyncio.TimeoutError) as error:
            log.warning("the beacon stays behind: %s", error)

    # -- inside

    async def _remove(self, backend: Backend) -> None:
        name, self._name = self._name, ""
        await backend.delete([name])

    def _name_of(self, beacon: Beacon) -> str:
        """Of the node, which another host may be called as well; where each trainer is its own agent, of the rank."""
        key = f"{self._service.settings.run_key}-{self._me.boot[:BOOT_CHARS]}"
        if self._service.inline and beacon.ranks:
            key = f"{key}-{beacon.ranks[0].rank:05d}"
        elif self._service.inline:
            return self._name
        return names.beacon(key)

    def _interval_s(self, world: int, here: int) -> float:
        nodes = math.ceil(world / max(1, here))
        return max(self._service.settings.heartbeat_s, nodes / WRITES_PER_S_MAX)

    def _failed(self, error: str | None) -> None:
        if error is not None and self._error is None:
            log.warning("the beacon cannot be written: %s", error)
        elif error is None and self._error is not None:
            log.info("the beacon is written again")
        self._error = error

    async def _sweep(self, backend: Backend, mine: Beacon) -> None:
        """Once in an incarnation the first rank's agent removes what lost nodes left of earlier ones."""
        if all(rank.rank for rank in mine.living):
            return
        if self._sweep_at[0] != mine.incarnation:
            self._sweep_at = mine.incarnation, mine.count + SWEEP_AFTER
            self._seen = await self._others(backend, mine)
        elif self._seen and mine.count >= self._sweep_at[1]:
            now = await self._others(backend, mine)
            seen, self._seen = self._seen, {}
            still = [name for name, what in now.items() if seen.get(name) == what]
            if still and not await self._service.superseded(mine.incarnation):
                await backend.delete(still)

    @staticmethod
    async def _others(backend: Backend, mine: Beacon) -> dict[str, tuple[Any, int]]:
        found, _ = await read_beacons(backend)
        return {
            name: (other.agent, other.count)
            for name, other in found.items()
            if other.incarnation < mine.incarnation
        }


def _rank(member: Member) -> BeaconRank:
    return describe_rank(member.rank, member.process, member.arena, member.incarnation, alive=not member.dead)


def describe_rank(rank: int, process: Process, arena: Arena, incarnation: int, *, alive: bool) -> BeaconRank:
    """What a rank's arena says of it now."""
    beat = last = snapshot = None
    with contextlib.suppress(EverstepError):
        beat, last, snapshot = arena.heartbeat(), arena.last_step(), arena.newest(incarnation)
    if last is not None and last[0][0] != incarnation:
        last = None
    return BeaconRank(
        rank=rank,
        pid=process.pid,
        start_time=process.start_time,
        alive=alive,
        step=None if last is None else last[0][1],
        step_age_s=None if last is None else last[1],
        step_s=beat[1] if beat is not None and beat[1] else None,
        beat_age_s=None if beat is None else beat[0],
        snapshot=snapshot,
        protected=_of(incarnation, arena, "protected"),
    )


def _of(incarnation: int, arena: Arena, word: str) -> int | None:
    """The step that the arena's header has in ``word``, if it is of that incarnation."""
    with contextlib.suppress(EverstepError):
        key = arena.protected if word == "protected" else arena.complete
        return key[1] if key is not None and key[0] == incarnation else None
    return None
