"""How fast this node's agent sends, and in which order: the lanes of its tiers, trainers' step times, and who loads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from everstep.memory.process import Process
from everstep.plan.pace import TIER_RATE, Adaptive, Fixed, governor, parse_rate

from .members import Member
from .protocol import Loading, Noted
from .server import Peer
from .turnstile import Lane, Turnstile, Urgency
from .watch import Watch

log = logging.getLogger("everstep.agent")

STEPS_LOOK_S = 0.1
"""How often the trainers' step times are read. Of shorter steps some are not seen."""
LOAD_S_MAX = 600.0
"""How long a trainer that loads goes before everything; it may hang."""
LOADERS_MAX = 4096


@dataclass
class _Loader:
    """A trainer that loads: until it says that it is done, registers, dies, or its time is over."""

    watch: Watch
    timer: asyncio.TimerHandle


class Pacing:
    """``members`` gives the trainers of the newest incarnation. Used from the agent's loop."""

    def __init__(
        self, members: Callable[[], Iterable[Member]], rate: float | str | None, link: str = ""
    ) -> None:
        """``rate`` and ``link`` are the root's."""
        self.turnstile = Turnstile()
        self._members = members
        self._loaders: dict[Process, _Loader] = {}
        self._seen: dict[int, float] = {}
        """By rank: when the newest step that was seen of it ended."""
        self._root_rate: float | str | None = None
        self.root = self.turnstile.lane("root", Urgency.ONLY_COPY, Fixed(None), link=link)
        self.follow(rate)

    # -- rates

    def follow(self, rate: float | str | None) -> None:
        """What flushes to the root keep to from now on. Raises BadOption."""
        if rate != self._root_rate:
            self.root.governor = governor(parse_rate(rate, "rate_bytes_per_s"))
            self._root_rate = rate

    def lane(
        self,
        name: str,
        rate: float | str | None = TIER_RATE,
        *,
        link: str = "",
        urgency: Urgency = Urgency.MIRROR,
    ) -> Lane:
        """The lane of a further tier. Raises BadOption."""
        rules = governor(parse_rate(rate, f"rate of {name}"))
        return self.turnstile.lane(name, urgency, rules, link=link)

    async def run(self) -> None:
        """Tell adaptive governors of the trainers' steps, until cancelled."""
        while True:
            adaptive = [one for lane in self.turnstile.lanes if isinstance(one := lane.governor, Adaptive)]
            if adaptive:
                self._look(adaptive)
            await asyncio.sleep(STEPS_LOOK_S)

    def _look(self, adaptive: list[Adaptive]) -> None:
        """Ranks that train together take equally long, each waits for the others; so the slowest one's steps count. A
        rank that waits for the agent holds all up."""
        training, slowest = False, (0.0, 0.0)
        waits = False
        for member in self._members():
            if not member.here:
                continue
            training = True
            found = member.arena.step_time()
            if found is None:
                waits = True
            elif found[0] != self._seen.get(member.rank):
                self._seen[member.rank] = found[0]
                slowest = max(slowest, found, key=lambda step: step[1])
        for one in adaptive:
            one.waited_for = waits or not training
            if not one.waited_for and slowest[1] > 0:
                one.stepped(*slowest)

    # -- recovery goes first

    def hear(self, peer: Peer, request: Loading) -> None:
        """What a process on this node says of its loading."""
        process = Process(request.pid, request.start_time, request.boot)
        if request.ended:
            self.loaded(process)
        else:
            self.loading(process)
        peer.send(Noted(request.number))

    def loading(self, process: Process) -> None:
        """``process`` reads to recover: what is sent in the background stands back."""
        if process in self._loaders or len(self._loaders) >= LOADERS_MAX or not process.alive():
            return
        timer = asyncio.get_running_loop().call_later(LOAD_S_MAX, self._overdue, process)
        self._loaders[process] = _Loader(Watch(process, lambda: self.loaded(process)), timer)
        self.turnstile.recovering = True

    def loaded(self, process: Process) -> None:
        """It is done, or will not be."""
        loader = self._loaders.pop(process, None)
        if loader is not None:
            loader.watch.stop()
            loader.timer.cancel()
        self.turnstile.recovering = bool(self._loaders)

    def _overdue(self, process: Process) -> None:
        log.warning("process %d has been loading for %g s: it waits in turn now", process.pid, LOAD_S_MAX)
        self.loaded(process)

    # -- for people who look

    def status(self) -> dict[str, Any]:
        return {
            "recovering": sorted(process.pid for process in self._loaders),
            "lanes": [lane.status() for lane in self.turnstile.lanes],
        }

    def close(self) -> None:
        for process in list(self._loaders):
            self.loaded(process)
