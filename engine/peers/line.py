"""A node's line to the hub: its standing goes there, W comes from there. On the hub's own node, and where the hub
cannot be reached for too long, W is found here."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from everstep.errors import EverstepError, PeerLost

from .hub import BEAT_S, SILENT_S, Change, Hear, Hub, Tally
from .link import Link
from .messages import Complete, Wire, expect

if TYPE_CHECKING:
    from .guard import Guard

log = logging.getLogger("everstep.peers")

PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 2.0


class HubLine:
    """Runs on threads of the guard's."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.hub = self._make_hub()
        self.name = guard.terms.nodes.nodes[0].name
        """The hub's node."""
        self.without: dict[str, Wire] = {}
        """Nodes whose protection training does not wait for, and why."""
        self._alone = False
        self._own = self._make_own()
        """What this node finds by itself where it hears of no hub. It listens all the time, so that the bound for this
        node's own protection does not begin only when the one for the hub has ended."""
        self._heard = time.monotonic()
        self._error: str | None = None

    def _make_hub(self) -> Hub | None:
        """On the first node."""
        terms = self._guard.terms
        if terms.me or terms.nodes.nodes[0].spare:
            return None
        active = [one.name for one in terms.nodes.nodes if not one.spare]
        tally = Tally(active, timeout_s=terms.timeout_s, limit_s=terms.limit_s)
        return Hub(tally, active, terms.incarnation, self._guard.nudge)

    def _make_own(self) -> Tally:
        terms = self._guard.terms
        return Tally([terms.name], timeout_s=terms.timeout_s, limit_s=terms.limit_s)

    def start(self) -> None:
        self._heard, self._own = time.monotonic(), self._make_own()
        if self.hub is not None:
            self.hub.tally.complete = self._guard.complete
        self._guard.thread("watch", self._watch)
        if self.hub is None:
            self._guard.thread("tell", self._tell)
            self._guard.thread("hear", self._hear)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "hub": self.name,
            "alone": self._alone,
            "unprotected": sorted(self.without),
        }
        if self.hub is not None:
            found["nodes"] = self.hub.status()
        return found

    def close(self) -> None:
        if self.hub is not None:
            self.hub.close()

    def _watch(self) -> None:
        """The hub finds W; any other looks whether it hears of one, and finds its own if not."""
        while not self._guard.end.is_set():
            self._guard.await_change()
            if self.hub is not None:
                self.hub.heard(0, self._guard.standing())
                complete, changes = self.hub.look()
                self._take_changes(changes)
                self._guard.set_complete(complete)
                continue
            self._own.heard(0, self._guard.standing())
            if time.monotonic() - self._heard >= self._guard.terms.timeout_s:
                self._go_alone()
            elif self._alone:
                self._hear_again()

    def _go_alone(self) -> None:
        hub = self.name
        if self._guard.over:
            return
        if not self._alone:
            self._alone, self._own.complete = True, self._guard.complete
            error = PeerLost(
                f"node {hub}, which finds the newest step protected on all nodes, cannot be reached",
                found=self._error or f"nothing for {self._guard.terms.timeout_s:g} s",
                hint="Training goes on; nodes may now be left without a step that all of them keep",
                node=hub,
            )
            self._take_changes([Change(hub, error.to_wire())])
        self._take_changes(self._own.look())
        self._guard.set_complete(self._own.complete)

    def _hear_again(self) -> None:
        self._alone, self._own = False, self._make_own()
        back = [name for name in (self.name, self._guard.terms.name) if name in self.without]
        self._take_changes([Change(name, None) for name in back])

    def _take_changes(self, changes: list[Change]) -> None:
        for change in changes:
            if change.error is not None:
                log.warning("going on without node %s: %s", change.node, change.error.get("message"))
                self.without[change.node] = change.error
            else:
                log.info("node %s is protected again", change.node)
                self.without.pop(change.node, None)
            if not self._guard.over:
                stage = "protected" if change.error is None else "unprotected"
                back = EverstepError(f"the snapshots of node {change.node} are protected again")
                self._guard.told(stage, self._guard.complete, change.error or back.to_wire())

    def _tell(self) -> None:
        """To the hub, whenever this node's standing changes."""

        def talk(link: Link) -> None:
            said, at = None, 0.0
            while not self._guard.end.is_set():
                standing = self._guard.standing()
                if standing != said or time.monotonic() - at >= BEAT_S:
                    link.send(standing)
                    said, at = standing, time.monotonic()
                else:
                    self._guard.await_change()

        self._keep_talking(talk)

    def _hear(self) -> None:
        """What the hub says."""

        def talk(link: Link) -> None:
            link.send(Hear(self._guard.terms.name, self._guard.terms.incarnation))
            while not self._guard.end.is_set():
                message = expect(link.receive(SILENT_S), Complete)
                self._heard, self._error = time.monotonic(), None
                self._guard.set_complete(message.step)
                if not self._alone:
                    self._take_changes(_difference(self.without, message.without))

        self._keep_talking(talk)

    def _keep_talking(self, talk: Callable[[Link], None]) -> None:
        """To the hub, again and again; each failure is followed by a longer pause."""
        pause = PAUSE_FIRST_S
        while not self._guard.end.is_set():
            began = time.monotonic()
            try:
                link = self._guard.open_link(self.name)
                try:
                    talk(link)
                finally:
                    self._guard.drop_link(link)
            except Exception as error:
                if self._guard.end.is_set():
                    return
                if not isinstance(error, (EverstepError, OSError)):
                    log.exception("talking to the hub failed")
                self._error = f"{type(error).__name__}: {error}"
            pause = PAUSE_FIRST_S if time.monotonic() - began > PAUSE_MAX_S else min(2 * pause, PAUSE_MAX_S)
            self._guard.pause(pause)


def _difference(before: dict[str, Wire], now: dict[str, Wire]) -> list[Change]:
    gone = [Change(name, error) for name, error in now.items() if name not in before]
    return gone + [Change(name, None) for name in before if name not in now]
