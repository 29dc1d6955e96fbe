"""W over all nodes: what the agents say of their snapshots, and the newest step that is protected on all of them.

:class:`Tally` is pure, with a clock. :class:`Hub` serves it to the other agents: each says its standing over one
connection, and hears of W over another, so that no connection is written and read at the same time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.errors import PeerLost

from .link import Link
from .messages import Complete, Message, Standing, Wire, expect

log = logging.getLogger("everstep.peers")

NO_STEP = -1
BEAT_S = 1.0
"""How often both sides say what stands, though nothing changed."""
QUIET_S = 3 * BEAT_S
"""An agent that has said nothing for so long counts as not connected, from its last word on."""
SILENT_S = 10.0
"""An agent, or a hub, that has said nothing for so long is cut off."""


class Hear(Message, frozen=True):
    """An agent wants to hear of W, over this connection."""

    node: str
    incarnation: int


@dataclass
class _Node:
    name: str
    since: float
    connected: bool = False
    heard: float = 0.0
    valid: int = NO_STEP
    protected: int = NO_STEP
    moved: int = 0
    error: Wire | None = None
    began: float | None = None
    """Since when what it protects now has been under way."""
    without: bool = False
    told: bool = False

    @property
    def owes(self) -> bool:
        return not self.connected or self.valid > self.protected


@dataclass(frozen=True)
class Change:
    """A node whose protection is gone (``error`` says why), or back (None)."""

    node: str
    error: Wire | None


class Tally:
    """W of the nodes ``names``, from their standings. Used under a lock of its owner's.

    A node that owes protection and makes no progress for ``timeout_s`` (neither a step nor bytes of one), or is with
    one step for more than ``limit_s``, is gone without: its newest snapshot counts as it is, and if nothing is heard
    of it, it does not count at all. The next step that it protects brings it back: from then on W waits for it again.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        timeout_s: float,
        limit_s: float,
        complete: int = NO_STEP,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.complete = complete
        self._timeout_s = timeout_s
        self._limit_s = limit_s
        self._clock = clock
        now = clock()
        self._nodes = [_Node(name, now) for name in names]

    def heard(self, index: int, standing: Standing) -> None:
        node, now = self._nodes[index], self._clock()
        owed, step = node.owes, node.protected
        progress = standing.protected > node.protected or standing.moved > node.moved
        node.connected, node.heard = True, now
        node.valid = max(node.valid, standing.valid)
        node.protected = max(node.protected, standing.protected)
        node.moved = max(node.moved, standing.moved)
        node.error = standing.error
        if node.protected > step or (not node.owes and node.without):
            node.without = False
        if progress or (node.owes and not owed):
            node.since = now
        if not node.owes:
            node.began = None
        elif node.protected > step or node.began is None:
            node.began = now

    def lost(self, index: int) -> None:
        """Its connection ended."""
        self._lose(self._nodes[index], self._clock())

    @staticmethod
    def _lose(node: _Node, when: float) -> None:
        if node.connected:
            if not node.owes:
                node.since = node.began = when
            node.connected = False

    def look(self) -> list[Change]:
        """Take time into account, and bring :attr:`complete` up to date."""
        now = self._clock()
        for node in self._nodes:
            if now - node.heard >= QUIET_S:
                self._lose(node, node.heard)
            late = now - node.since >= self._timeout_s
            late = late or (node.began is not None and now - node.began >= self._limit_s)
            if node.owes and late:
                node.without = True
        counted = [
            node.valid if node.without else node.protected for node in self._nodes if self._counts(node)
        ]
        if counted:
            self.complete = max(self.complete, min(counted))
        changes = []
        for node in self._nodes:
            if node.without and not node.told:
                node.told = True
                changes.append(Change(node.name, self._why(node)))
            elif node.told and not node.without and node.protected >= self.complete:
                node.told = False
                changes.append(Change(node.name, None))
        return changes

    @staticmethod
    def _counts(node: _Node) -> bool:
        return node.connected or not node.without

    @property
    def without(self) -> dict[str, Wire]:
        """Nodes whose protection is gone, and why."""
        return {node.name: self._why(node) for node in self._nodes if node.told}

    def status(self) -> dict[str, dict[str, Any]]:
        return {
            node.name: {
                "connected": node.connected,
                "newest": _step(node.valid),
                "protected": _step(node.protected),
                "state": "unprotected" if node.told else "late" if node.without else "ok",
            }
            for node in self._nodes
        }

    def _why(self, node: _Node) -> Wire:
        if not node.connected:
            found = "no word of it"
        elif node.error is not None:
            found = f"{node.error.get('message')}; {node.error.get('found')}"
        else:
            found = f"step {node.valid} is there, step {node.protected} is protected"
        return PeerLost(
            f"the snapshots of node {node.name} are not protected",
            found=found,
            expected=f"progress within {self._timeout_s:g} s",
            hint="Training goes on; the loss of that node would cost more than one step now",
            node=node.name,
        ).to_wire()


def _step(step: int) -> int | None:
    return step if step >= 0 else None


@dataclass
class Hub:
    """Serves a tally of one incarnation. Any thread may call; ``changed`` is called without the lock when somebody's
    standing changed."""

    tally: Tally
    names: Sequence[str]
    incarnation: int
    changed: Callable[[], None]
    _lock: threading.Condition = field(default_factory=threading.Condition)
    _version: int = 0
    _ended: bool = False

    def heard(self, index: int, standing: Standing) -> None:
        with self._lock:
            self.tally.heard(index, standing)

    def look(self) -> tuple[int, list[Change]]:
        """(W, what changed of the nodes' protection)."""
        with self._lock:
            before = self.tally.complete
            changes = self.tally.look()
            if changes or self.tally.complete != before:
                self._version += 1
                self._lock.notify_all()
            return self.tally.complete, changes

    def status(self) -> dict[str, dict[str, Any]]:
        with self._lock:
            return self.tally.status()

    def close(self) -> None:
        with self._lock:
            self._ended = True
            self._lock.notify_all()

    # -- on the threads of connections

    def listen_to(self, link: Link, first: Standing) -> None:
        """Hear one agent's standings until its connection ends."""
        index = self._index(first.node)
        standing = first
        try:
            while not self._ended:
                self._check(standing)
                self.heard(index, standing)
                self.changed()
                standing = expect(link.receive(SILENT_S), Standing)
        finally:
            with self._lock:
                self.tally.lost(index)
            self.changed()

    def tell(self, link: Link) -> None:
        """Say W to one agent, whenever it changes, until its connection ends."""
        seen = NO_STEP
        while not self._ended:
            with self._lock:
                if self._version == seen:
                    self._lock.wait(BEAT_S)
                seen = self._version
                message = Complete(self.incarnation, self.tally.complete, self.tally.without)
            link.send(message)

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise PeerLost("an agent of a node that is not in the node map", found=name, node=name)
        return list(self.names).index(name)

    def _check(self, standing: Standing) -> None:
        if standing.incarnation != self.incarnation:
            raise PeerLost(
                "an agent speaks of another incarnation",
                found=standing.incarnation,
                expected=self.incarnation,
                node=standing.node,
            )
