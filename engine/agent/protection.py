"""The agent's end of protection against the loss of nodes: its listener, its guard, and what trainers hear of both."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.errors import AgentError, EverstepError, PeerLost
from everstep.memory.arena import Arena
from everstep.peers.address import joined_address
from everstep.peers.guard import Guard, Terms
from everstep.peers.keeper import Keeper
from everstep.peers.link import Link
from everstep.peers.listener import Listener
from everstep.peers.messages import Message
from everstep.peers.nodemap import NodeMap, PeerNode, decode_map, encode_map
from everstep.peers.paritykeeper import ParityKeeper

from .journal import GuardEntry
from .members import Member
from .protocol import Guarded, Guarding, Listen, Listening, PeersAnswer, PeersRequest, Taken
from .server import Peer
from .values import Progress

if TYPE_CHECKING:
    from .service import Service

log = logging.getLogger("everstep.agent")

CONNECTIONS_MAX = 1024
"""Of other agents to this one: two from each where this is the hub's, one from each whose snapshots are kept here."""
GUARD_S_MAX = 60.0
"""How long another agent that came early waits until this node's trainers say what is to be protected."""
LOOK_S = 0.5
WORK_S = 2.0
"""An agent that sent or received so lately is not idle."""


class Protection:
    """Used from the agent's loop; the listener's and the guard's threads only call what says so."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Listener | None = None
        self._secret = b""
        self._incarnation = 0
        self._guard: Guard | None = None
        self._keeper: Keeper | None = None
        self._spare: GuardEntry | None = None
        """On a spare node: what it is between jobs."""
        self._parity: ParityKeeper | None = None
        self._there = threading.Condition()
        self._lock = asyncio.Lock()

    # -- what trainers ask for

    async def listen(self, peer: Peer, member: Member, request: Listen) -> None:
        """A port for this incarnation's agents; that of the former one, if there was one and it is free."""
        async with self._lock:
            try:
                self._check(member, request.incarnation)
                port = 0 if self._listener is None else self._listener.port
                await self._leave()
                await self._listen(request.host, port, request.secret, member.run_id)
                self._incarnation = request.incarnation
            except (EverstepError, OSError) as error:
                peer.send(Listening(request.number, "", 0, _wire(error)))
                return
        assert self._listener is not None
        peer.send(Listening(request.number, self._listener.host, self._listener.port))

    async def guard(self, peer: Peer, member: Member, request: Guarding) -> None:
        """Protect, from now on."""
        error = None
        async with self._lock:
            try:
                self._check(member, request.incarnation)
                if self._listener is None or self._incarnation != request.incarnation:
                    raise AgentError("this agent was not asked to listen first")
                entry = GuardEntry(
                    nodes=request.nodes,
                    me=request.me,
                    run_id=member.run_id,
                    incarnation=request.incarnation,
                    secret=self._secret,
                    host=self._listener.host,
                    port=self._listener.port,
                    arenas=request.arenas,
                    chunk_bytes=request.chunk_bytes,
                    rate_bytes_per_s=request.rate_bytes_per_s,
                    timeout_s=request.timeout_s,
                    limit_s=request.limit_s,
                )
                await self._service.journaled_guard(entry)
                await self._begin(_terms(entry, member.adopted), Path(entry.arenas), reserve=True)
            except (EverstepError, OSError) as caught:
                error = _wire(caught)
        peer.send(Guarded(request.number, error))

    def taken(self, request: Taken) -> None:
        if self._guard is not None:
            self._guard.nudge()

    def joined(self, member: Member) -> None:
        """A trainer has registered, perhaps with another arena."""
        guard = self._guard
        if guard is not None and member.incarnation == guard.terms.incarnation:
            guard.adopt(member.rank, member.arena)

    def left(self) -> None:
        """A trainer said good-bye. Once all did, with everything durable, nothing is kept for others either: they are
        at the same point."""
        guard = self._guard
        if guard is None or guard.terms.incarnation != self._service.members.newest:
            return
        members = self._service.members.of_newest()
        if {one.rank for one in members if one.safe} >= set(guard.terms.local) != set():
            self._service.keep(self._finish(guard))

    async def _finish(self, guard: Guard) -> None:
        await asyncio.to_thread(guard.finish)
        await self._stand_by_again()

    # -- life

    async def resume(self, entry: GuardEntry | None) -> None:
        """Go on as a former agent did, if trainers of that incarnation were served. Where its port is taken, the others
        are told of the new one."""
        if entry is None or not self._service.local_ranks(entry.incarnation):
            return
        async with self._lock:
            if self._guard is not None:
                return  # its trainers were faster
            await self._listen(entry.host, entry.port, entry.secret, entry.run_id)
            self._incarnation = entry.incarnation
            guard = await self._begin(_terms(entry), Path(entry.arenas), reserve=False)
            assert self._listener is not None
            if (self._listener.host, self._listener.port) != (entry.host, entry.port):
                guard.announce(self._listener.host, self._listener.port)

    async def stand_by(
        self, run_id: str, secret: bytes, host: str, port: int, arenas: Path
    ) -> tuple[str, int]:
        """As a spare node: keep what the others send. Where it listens. Raises PeerLost if the port is taken."""
        async with self._lock:
            await self._listen(host, port, secret, run_id)
            assert self._listener is not None
            if port and self._listener.port != port:
                raise PeerLost(
                    f"port {port} of {host} is taken",
                    found="another program that listens there",
                    expected="a free port",
                    hint="End that program, or name another port: --listen HOST:PORT, and in the trainers' spares=",
                )
            node = PeerNode(self._service.settings.node, host, port, spare=True)
            alone = encode_map(NodeMap((node,), copies=0))
            self._spare = GuardEntry(alone, 0, run_id, 0, secret, host, port, str(arenas), 0, None, 1.0, 1.0)
            await self._begin(_terms(self._spare), arenas, reserve=False)
        return self._listener.host, self._listener.port

    async def _stand_by_again(self) -> None:
        """After trainers ran on the spare node, and left."""
        async with self._lock:
            if self._spare is not None and (self._guard is None or self._guard.over):
                await self._begin(_terms(self._spare), Path(self._spare.arenas), reserve=False)

    @property
    def busy(self) -> bool:
        guard = self._guard
        return guard is not None and (guard.busy or time.monotonic() - guard.last_work < WORK_S)

    def kept(self) -> dict[int, Arena]:
        """What is kept of other nodes' ranks."""
        return {} if self._keeper is None else self._keeper.arenas()

    def status(self) -> dict[str, Any] | None:
        guard = self._guard
        if guard is None:
            return None
        return {"address": self.address, **guard.status()}

    @property
    def address(self) -> str | None:
        """Where this agent listens to those of other nodes, once it talks to them."""
        guard, listener = self._guard, self._listener
        return None if guard is None or listener is None else joined_address(listener.host, listener.port)

    def peers(self, request: PeersRequest) -> PeersAnswer:
        guard, address = self._guard, self.address
        if guard is None or address is None:
            return PeersAnswer(request.number, b"", "", [])
        return PeersAnswer(request.number, self._secret, address, guard.places())

    async def close(self) -> None:
        async with self._lock:
            over = self._guard is not None and self._guard.over
            await self._leave()
            if self._parity is not None:
                await asyncio.to_thread(self._parity.close, remove=over)
            try:
                if self._keeper is not None:
                    await asyncio.to_thread(self._keeper.close, remove=over)
            finally:
                await self._stop_listening()

    # -- inside

    def _check(self, member: Member, incarnation: int) -> None:
        if member.incarnation != incarnation or incarnation < self._incarnation:
            raise AgentError(
                "a trainer of a former incarnation wants its snapshots protected",
                found=incarnation,
                expected=max(member.incarnation, self._incarnation),
            )

    async def _listen(self, host: str, port: int, secret: bytes, run_id: str) -> None:
        await self._stop_listening()
        self._loop = asyncio.get_running_loop()
        make = functools.partial(Listener, me=self._service.settings.node, connections_max=CONNECTIONS_MAX)
        self._listener = await asyncio.to_thread(make, host, port, secret, run_id, _Handlers(self._serve))
        self._secret = secret

    async def _begin(self, terms: Terms, directory: Path, *, reserve: bool) -> Guard:
        await self._leave()
        if self._keeper is None:
            self._keeper = Keeper(
                directory,
                self._service.settings.run_key,
                self._service.settings.node,
                terms.run_id,
                self._local,
                told=self._differs,
            )
        if self._parity is None:
            settings = self._service.settings
            self._parity = ParityKeeper(directory, settings.run_key, settings.node, terms.run_id)
        guard = Guard(terms, self._keeper, self._parity, self._told)
        for member in self._service.members.all():
            if member.incarnation == terms.incarnation:
                guard.adopt(member.rank, member.arena)
        try:
            if reserve:
                await asyncio.to_thread(guard.reserve)
        except BaseException:
            await asyncio.to_thread(guard.close)
            raise
        guard.start()
        with self._there:
            self._guard = guard
            self._there.notify_all()
        return guard

    async def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            try:
                await asyncio.to_thread(listener.close)
            except EverstepError as error:
                log.warning("%s", error)

    async def _leave(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            await asyncio.to_thread(guard.close)

    # -- on threads of the listener and the guard

    def _serve(self, link: Link, message: Any) -> None:
        deadline = time.monotonic() + GUARD_S_MAX
        with self._there:
            while (guard := self._guard) is None:
                if link.closed or time.monotonic() >= deadline:
                    raise PeerLost("this node's trainers have not said yet what is to be protected")
                self._there.wait(LOOK_S)
        guard.serve(link, message)

    def _local(self, rank: int) -> Arena | None:
        return self._service.members.arena(rank)

    def _differs(self, rank: int, key: tuple[int, int], error: EverstepError) -> None:
        self._told("replicas_differ", key[1], error.to_wire())

    def _told(self, stage: str, step: int, error: dict[str, Any] | None) -> None:
        service, guard = self._service, self._guard
        incarnation = self._incarnation if guard is None else guard.terms.incarnation
        progress = Progress(step, incarnation, 0, service.settings.root, stage, error)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(service.report, progress)


class _Handlers(dict[type[Message], Callable[[Link, Any], None]]):
    """The guard knows what can be served; it may come later than the first message."""

    def __init__(self, serve: Callable[[Link, Any], None]) -> None:
        super().__init__()
        self._serve = serve

    def get(self, kind: Any, default: Any = None) -> Any:
        return self._serve


def _terms(entry: GuardEntry, adopted: tuple[int, int] | None = None) -> Terms:
    return Terms(
        nodes=decode_map(entry.nodes),
        me=entry.me,
        run_id=entry.run_id,
        incarnation=entry.incarnation,
        secret=entry.secret,
        chunk_bytes=entry.chunk_bytes,
        rate_bytes_per_s=entry.rate_bytes_per_s,
        timeout_s=entry.timeout_s,
        limit_s=entry.limit_s,
        adopted=adopted,
    )


def _wire(error: Exception) -> dict[str, Any]:
    if isinstance(error, EverstepError):
        return error.to_wire()
    return AgentError(
        "the agent cannot protect snapshots", found=f"{type(error).__name__}: {error}"
    ).to_wire()
