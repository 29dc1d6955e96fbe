"""Sending this node's snapshots to one peer, as a duty of the guard."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from everstep.errors import EverstepError, PeerLost
from everstep.memory.slots import Pinned

from .failing import own_failures
from .keeper import Keeper
from .link import Link
from .messages import Complete, Message, Mode, expect, failed
from .nodemap import PeerNode
from .rate import Rate
from .sender import send_snapshot

if TYPE_CHECKING:
    from .guard import Guard

RESERVE_S = 60.0
"""How long a spare node may take to find memory."""
SPARE_S = 10.0
"""How long a spare node may take to answer: it may be about to be started."""
SPARE_PAUSE_S = 0.2

Key = tuple[int, int]


class Reserve(Message, frozen=True):
    """Have memory for these ranks' snapshots: each with the bytes of its slots."""

    ranks: list[tuple[int, int]]
    chunk_bytes: int
    adopted: Key | None
    """What the incarnation loaded: it is kept until there is a newer W."""


class Reserved(Message, frozen=True):
    """There is memory for all of them."""


class _Meter(Rate):
    """A rate that also counts what goes through."""

    def __init__(self, rate: Rate, count: Callable[[int], None]) -> None:
        super().__init__(None)
        self._inner = rate
        self._count = count

    @property
    def slice_bytes(self) -> int:
        return self._inner.slice_bytes

    def take(self, nbytes: int) -> None:
        self._inner.take(nbytes)
        self._count(nbytes)


class ReplicaDuty:
    """Over one connection, which is made anew after a failure. What a step's earlier try brought over is not sent
    again."""

    def __init__(self, guard: Guard, node: PeerNode, mode: Mode) -> None:
        self.name = node.name
        self._spare = node.spare
        self.moved = 0
        self._guard = guard
        self._mode = mode
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._key: Key | None = None
        self._sent: set[int] = set()
        self._meter = _Meter(guard.rate, self._count)
        self._base = 0
        self._now = 0

    def protect(self, key: Key, pins: dict[int, Pinned]) -> None:
        if self._key != key:
            self._key, self._sent, self._base = key, set(), self.moved
        with self._lock:
            fresh = self._link is None
        try:
            self._send(pins)
        except PeerLost:
            if fresh:
                raise
            self._send(pins)  # the connection was old: the other side may have ended it, or started anew

    def _send(self, pins: dict[int, Pinned]) -> None:
        terms = self._guard.terms
        rooms = dict(zip(terms.local, terms.nodes.nodes[terms.me].slot_bytes, strict=True))
        self._now = 0
        try:
            for rank, pin in pins.items():
                if rank in self._sent:
                    continue
                link = self._open()
                if self._spare and self._guard.complete >= 0:
                    # It is not told by the hub, as it has no snapshots of its own.
                    link.send(Complete(terms.incarnation, self._guard.complete))
                send_snapshot(
                    link,
                    pin,
                    pin.sealed() or (),
                    run_id=terms.run_id,
                    world=terms.nodes.world,
                    slot_bytes=rooms[rank],
                    mode=self._mode,
                    rate=self._meter,
                )
                self._sent.add(rank)
                self._base = self.moved = max(self.moved, self._base + self._now)
                self._now = 0
        except BaseException:
            self.close()
            raise

    def _count(self, nbytes: int) -> None:
        """What is sent a second time is no progress."""
        self._now += nbytes
        self.moved = max(self.moved, self._base + self._now)

    def _open(self) -> Link:
        with self._lock:
            link = self._link
        if link is None:
            link = self._guard.open_link(self.name)
            with self._lock:
                self._link = link
        return link

    def close(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            self._guard.drop_link(link)


def reserve_at_spare(guard: Guard, name: str) -> None:
    """Have the spare node ``name`` make room for this node's ranks. One that is just being started is waited for.
    Raises MemoryTooSmall, PeerLost."""
    until = time.monotonic() + SPARE_S
    while True:
        try:
            _ask_for_room(guard, name)
            return
        except PeerLost as error:
            if error.fields.get("stranger") or time.monotonic() >= until or guard.pause(SPARE_PAUSE_S):
                raise


def _ask_for_room(guard: Guard, name: str) -> None:
    terms = guard.terms
    node = terms.nodes.nodes[terms.me]
    rooms = list(zip(node.ranks, node.slot_bytes, strict=True))
    link = guard.open_link(name)
    try:
        link.send(Reserve(rooms, terms.chunk_bytes, terms.adopted))
        expect(link.receive(RESERVE_S), Reserved)
    finally:
        guard.drop_link(link)


def answer_reserve(keeper: Keeper, node: str, link: Link, message: Reserve) -> None:
    """Have memory for the ranks of another node on ``node``, and say so, or why not."""
    try:
        if message.adopted is not None:
            keeper.completed(message.adopted)
        with own_failures(node, f"it cannot make room for snapshots of node {link.peer}"):
            for rank, slot_bytes in message.ranks:
                keeper.reserve(rank, slot_bytes, message.chunk_bytes)
    except EverstepError as error:
        link.send(failed(error))
        return
    link.send(Reserved())
