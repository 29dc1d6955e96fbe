"""Connections: frames in, requests to the service one by one per trainer, replies and news out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from everstep.errors import AgentError, EverstepError
from everstep.memory.process import Process

from . import protocol
from .frames import FrameSocket
from .members import Member
from .places import peer_uid
from .protocol import Answer, Knock, Ping, Pong, Refused, Reply, Request

log = logging.getLogger("everstep.agent")

PEERS_MAX = 4096
INBOX_MAX = 4096
"""Requests of one trainer that wait for their turn; whoever sends more is hung up on."""
SHAKE_S_MAX = 10.0
"""Who has not knocked by then is hung up on."""


class Handler(Protocol):
    """The service, as a connection sees it."""

    @property
    def idle(self) -> bool: ...

    async def handle(self, peer: Peer, request: Request) -> None: ...

    def leave(self) -> None: ...

    def gone(self, peer: Peer) -> None: ...


class Peer:
    """One connection. ``member`` is set once it has registered. Everything happens on the agent's loop."""

    def __init__(self, sock: socket.socket, handler: Handler, closed: Callable[[Peer], None]) -> None:
        self.member: Member | None = None
        self._frames = FrameSocket(sock)
        self._handler = handler
        self._closed = closed
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Request] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._knocked = False
        self._writing = False
        self._loop.add_reader(self._frames.fileno(), self._readable)
        self._timer = self._loop.call_later(SHAKE_S_MAX, self._too_late)

    @property
    def open(self) -> bool:
        return not self._frames.ended

    def send(self, message: Reply, fds: Sequence[int] = ()) -> None:
        """Never waits; a peer that does not read is hung up on once too much has gathered."""
        if self._frames.ended:
            return
        self._frames.queue(protocol.encode(message), fds)
        self._push()

    def take_fd(self) -> int:
        return self._frames.take_fd()

    def close(self) -> None:
        if self._frames.fileno() < 0:
            return
        self._frames.push()
        self._timer.cancel()
        self._loop.remove_reader(self._frames.fileno())
        self._loop.remove_writer(self._frames.fileno())
        self._frames.close()  # what was received is still worked off: a trainer may ask, and die
        self._closed(self)
        self._handler.gone(self)

    def _too_late(self) -> None:
        if not self._knocked:
            self.close()

    def _push(self) -> None:
        self._frames.push()
        if self._frames.ended:
            self._loop.call_soon(self.close)
        elif self._frames.waiting != self._writing:
            self._writing = self._frames.waiting
            if self._writing:
                self._loop.add_writer(self._frames.fileno(), self._push)
            else:
                self._loop.remove_writer(self._frames.fileno())

    def _readable(self) -> None:
        try:
            for frame in self._frames.pull():
                self._take(protocol.decode_request(frame))
        except AgentError as error:
            log.warning("hung up on a client: %s", error)
            self.send(Refused(error.to_wire()))
            self.close()
            return
        if self._frames.ended:
            self.close()

    def _take(self, request: Request) -> None:
        if isinstance(request, Knock):
            self._answer(request)
        elif not self._knocked:
            raise AgentError("a client did not knock first", found=type(request).__name__)
        elif isinstance(request, Ping):
            self.send(Pong(request.number))  # at once: it asks whether the loop lives, not whether it is busy
        elif len(self._inbox) >= INBOX_MAX:
            raise AgentError("a client sends faster than it can be served", found=len(self._inbox))
        else:
            self._inbox.append(request)
            if self._worker is None:
                self._worker = asyncio.ensure_future(self._work())

    def _answer(self, knock: Knock) -> None:
        """Same protocol: go on. Else hang up; an idle agent leaves when it is asked to, whatever the
        protocol."""
        me = Process.current()
        leaving = knock.wants == "leave" and self._handler.idle
        answer = Answer(protocol.PROTOCOL, me.pid, me.start_time, me.boot, self._handler.idle, leaving)
        self.send(answer)
        self._knocked = knock.protocol == protocol.PROTOCOL and knock.wants == "serve"
        if leaving:
            self._handler.leave()
        if not self._knocked:
            self._loop.call_soon(self.close)

    async def _work(self) -> None:
        """Requests in their order."""
        try:
            while self._inbox:
                await self._one(self._inbox.popleft())
        finally:
            self._worker = None

    async def _one(self, request: Request) -> None:
        try:
            await self._handler.handle(self, request)
        except EverstepError as error:
            log.warning("refused a %s: %s", type(request).__name__, error)
            self.send(Refused(error.to_wire()))
            self._loop.call_soon(self.close)
        except Exception as error:
            log.exception("a %s failed", type(request).__name__)
            self.send(
                Refused(AgentError("the agent failed", found=f"{type(error).__name__}: {error}").to_wire())
            )
            self._loop.call_soon(self.close)


class Server:
    """All connections of an agent; ``listener`` is None for an inline one, which is handed its only
    connection."""

    def __init__(self, handler: Handler, listener: socket.socket | None) -> None:
        self.peers: set[Peer] = set()
        self._handler = handler
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        if listener is not None:
            self._loop.add_reader(listener.fileno(), self._accept)

    def adopt(self, sock: socket.socket) -> Peer:
        peer = Peer(sock, self._handler, self.peers.discard)
        self.peers.add(peer)
        return peer

    def close(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        for peer in list(self.peers):
            peer.close()

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError, ConnectionError, InterruptedError):
            while True:
                sock, _ = self._listener.accept()
                if len(self.peers) >= PEERS_MAX or peer_uid(sock) != os.getuid():
                    log.warning("turned away a connection of user %d", peer_uid(sock))
                    sock.close()
                else:
                    self.adopt(sock)
