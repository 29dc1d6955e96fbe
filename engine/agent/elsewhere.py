"""Which ranks of other nodes will not vote any more, by their nodes' beacons: asked while a flush waits for votes.

A rank that is merely slow is never one of them. Three things count, each only while storage answers us: a node's agent
says that the rank has ended, and has no flush under way; rank and agent ran on this very machine, where they are seen
to be gone, and the beacon stands still; or the beacon has stood still for so long that whoever still lived there would
have put another agent into office.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from everstep.errors import EverstepError
from everstep.format.beacon import Beacon, BeaconRank
from everstep.memory.process import Process
from everstep.store.beacons import read_beacons

if TYPE_CHECKING:
    from .service import Service

log = logging.getLogger("everstep.agent")

SETTLED_INTERVALS = 2.5
"""Of a beacon, for which what it says of a rank's end has to stand: a request may have been on its way."""
SILENT_S_MIN = 90.0
"""More than trainers take to replace an agent that was stopped, and the new one to be heard."""
SILENT_TIMEOUTS = 3.0
"""Time-outs without a beat, for which a beacon stands still until its node counts as lost."""
READS_PER_S_MAX = 500.0
"""Of beacons, by all agents of a job together, about: with many nodes each looks more seldom."""
GAPS_MAX = 2.5
GAP_S_MIN = 5.0
"""So many pauses, at least so long, between two looks, after which nothing is concluded from the former one: storage
may not have answered anyone."""

ENDED = "ended without a vote for it"
SILENT = "gave no sign of life for too long"


@dataclass
class _Node:
    """``since`` is when its beacon was first seen as it is, ``ended`` by rank since when there is nothing more to come
    of it."""

    beacon: Beacon
    since: float
    named: dict[int, BeaconRank] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)


class Elsewhere:
    """One agent's. Used from its loop, by all flushes that wait for votes."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._incarnation = 0
        self._nodes: dict[str, _Node] = {}
        self._looked = 0.0
        self._pause_s = 0.0

    async def lost(self, incarnation: int, missing: Sequence[int]) -> tuple[list[int], str]:
        """Those of ``missing`` ranks of ``incarnation`` that will not vote, and why; looks at most every heartbeat."""
        here = self._service.local_ranks(incarnation)
        far = [rank for rank in missing if rank not in here]
        if not far:
            return [], ""
        if self._incarnation != incarnation or time.monotonic() - self._looked >= self._pause_s:
            await self._look(incarnation)
        now = self._looked
        ended = [rank for rank in far if self._has_ended(rank, now)]
        return (ended, ENDED) if ended else ([rank for rank in far if self._is_silent(rank, now)], SILENT)

    def at_work(self, missing: Sequence[int]) -> bool:
        """Whether each of ``missing`` is of a node that said, when it was looked at last, that flushes are under way
        there."""
        busy = {rank for node in self._nodes.values() if node.beacon.queue for rank in node.named}
        return busy.issuperset(missing)

    async def _look(self, incarnation: int) -> None:
        found: dict[str, Beacon] = {}
        failed = False
        try:
            found, _ = await read_beacons(self._service.backend)
        except EverstepError as error:
            log.warning("whether ranks on other nodes live cannot be seen: %s", error)
            failed = True
        now = time.monotonic()
        if failed or incarnation != self._incarnation or now - self._looked > self._gap_s:
            self._nodes.clear()
        self._looked, self._incarnation = now, incarnation
        self._pause_s = max(self._service.settings.heartbeat_s, len(found) ** 2 / READS_PER_S_MAX)
        for name, beacon in found.items():
            if beacon.incarnation == incarnation:
                self._note(name, beacon, now)
        for name, node in self._nodes.items():
            # One that was taken back is that of an agent that had nothing left to do.
            said = found.get(name)
            busy = said is not None and said.queue > 0
            living = [] if said is None else [rank.rank for rank in said.living]
            for rank in node.named:
                if busy or rank in living:
                    node.ended.pop(rank, None)
                else:
                    node.ended.setdefault(rank, now)

    @property
    def _gap_s(self) -> float:
        return max(GAPS_MAX * self._pause_s, GAP_S_MIN)

    def _note(self, name: str, beacon: Beacon, now: float) -> None:
        node = self._nodes.get(name)
        if node is None:
            node = self._nodes[name] = _Node(beacon, now)
        elif (beacon.agent, beacon.count) != (node.beacon.agent, node.beacon.count):
            node.beacon, node.since = beacon, now
        node.named.update({rank.rank: rank for rank in beacon.ranks})

    def _has_ended(self, rank: int, now: float) -> bool:
        for node in self._nodes.values():
            settled_s = SETTLED_INTERVALS * node.beacon.interval_s
            if rank in node.ended and now - node.ended[rank] >= settled_s:
                return True
            if rank in node.named and now - node.since >= settled_s and _is_gone(node, rank):
                return True
        return False

    def _is_silent(self, rank: int, now: float) -> bool:
        return any(
            rank in node.named
            and now - node.since >= max(SILENT_S_MIN, SILENT_TIMEOUTS * node.beacon.timeout_s)
            for node in self._nodes.values()
        )


def _is_gone(node: _Node, rank: int) -> bool:
    """Whether rank and agent ran on this machine, and do no more. (Containers of one machine have names of their own,
    and do not see each other's processes.)"""
    beacon, one = node.beacon, node.named[rank]
    if (beacon.host, beacon.boot) != (socket.gethostname(), Process.current().boot):
        return False
    agent = Process(beacon.agent_pid, beacon.agent_start, beacon.boot)
    return not agent.alive() and not Process(one.pid, one.start_time, beacon.boot).alive()
