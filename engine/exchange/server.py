"""Serving the snapshots of this node's memory, for as long as the ranks of other nodes load them.

On a thread of its own, which knows nothing but views of pinned slots: it reads, and it changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from everstep.errors import EverstepError

from .protocol import (
    GREETING_S,
    IO_S,
    LOST,
    MAGIC,
    TEXT_MAX,
    Reply,
    Request,
    Violation,
    decode_request,
    receive_frame,
    receive_into,
    send,
    send_frame,
)

log = logging.getLogger("everstep")

BACKLOG = 1024
ACCEPT_PAUSE_S = 0.1
"""After an accept that failed (no descriptor left, for one)."""
CLOSE_S = 10.0
"""How long closing waits for the thread."""


@dataclass(frozen=True)
class Shelf:
    """What is served of one saved rank: its regions, and the table of its records."""

    meta: memoryview
    layout: memoryview
    records: memoryview
    images: Mapping[str, memoryview]

    def find(self, request: Request) -> memoryview:
        """Violation where there is no such thing."""
        if request.what == "meta":
            return self.meta
        if request.what == "layout":
            return self.layout
        if request.what == "records":
            return self.records
        image = self.images.get(request.image)
        if image is None:
            raise Violation(f"no image {request.image!r}")
        end = request.offset + request.nbytes
        if request.offset < 0 or request.nbytes < 0 or end > len(image):
            raise Violation(f"image {request.image!r} has {len(image)} bytes, not {request.offset}..{end}")
        return image[request.offset : end]


class Server:
    """Gives whoever knows ``token`` what lies on the ``shelves`` (by saved rank and copy). ``port`` is the system's
    choice.

    At most ``connections_max`` connections are served; more wait. One that says nothing for ``idle_s`` is closed,
    one whose messages take longer than ``io_s`` (and their bytes) too.
    """

    def __init__(
        self,
        shelves: Mapping[tuple[int, int], Shelf],
        token: bytes,
        *,
        host: str,
        connections_max: int,
        idle_s: float,
        io_s: float = IO_S,
    ) -> None:
        """Listens at once. OSError if that cannot be."""
        self._shelves = shelves
        self._greeting = MAGIC + token
        self._connections_max = connections_max
        self._idle_s = idle_s
        self._io_s = io_s
        family, kind, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.socket(family, kind)
        try:
            self._listener.bind(place)
            self._listener.listen(BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self.host = str(self._listener.getsockname()[0])
        self.port = int(self._listener.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-exchange", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections and the thread. Safe to call again."""
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise EverstepError("the exchange's thread does not end", found=f"alive after {CLOSE_S:g} s")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._listener.close()
            self._loop.close()

    async def _serve(self) -> None:
        serving: set[asyncio.Task[None]] = set()
        accepting = asyncio.ensure_future(self._accept(serving))
        await self._stop.wait()
        tasks = [accepting, *serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, serving: set[asyncio.Task[None]]) -> None:
        room = asyncio.Semaphore(self._connections_max)

        def ended(task: asyncio.Task[None]) -> None:
            serving.discard(task)
            room.release()

        while True:
            await room.acquire()
            try:
                sock, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("everstep: exchange: %s", error)
                room.release()
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            task = asyncio.ensure_future(self._client(sock))
            serving.add(task)
            task.add_done_callback(ended)

    async def _client(self, sock: socket.socket) -> None:
        with sock:
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await self._greet(sock)
                while True:
                    data = await receive_frame(sock, self._io_s, idle_s=self._idle_s)
                    await self._answer(sock, decode_request(data))
            except LOST as error:
                log.debug("everstep: exchange: a connection ended: %r", error)

    async def _greet(self, sock: socket.socket) -> None:
        """Whoever does not know the token hears nothing."""
        said = bytearray(len(self._greeting))
        await receive_into(sock, memoryview(said), min(GREETING_S, self._io_s))
        if not hmac.compare_digest(said, self._greeting):
            raise Violation("a wrong token")
        await send_frame(sock, Reply(0), self._io_s)

    async def _answer(self, sock: socket.socket, request: Request) -> None:
        shelf = self._shelves.get((request.rank, request.copy))
        try:
            if shelf is None:
                raise Violation(f"nothing of rank {request.rank}, copy {request.copy}")
            found = shelf.find(request)
        except Violation as error:
            await send_frame(sock, Reply(0, str(error)[:TEXT_MAX]), self._io_s)
            return
        await send_frame(sock, Reply(len(found)), self._io_s)
        await send(sock, found, self._io_s)
