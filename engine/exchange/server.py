"""Serving the snapshots of this node's memory, for as long as the ranks of other nodes load them.

On threads of its own, one for each connection, which know nothing but views of pinned slots: they read, and change
nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import select
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from everstep.errors import EverstepError
from everstep.peers.address import unusable
from everstep.peers.stream import opened

from .protocol import (
    GREETING_S,
    IO_S,
    LOST,
    MAGIC,
    TEXT_MAX,
    Line,
    Reply,
    Request,
    Violation,
    decode_request,
)

log = logging.getLogger("everstep")

BACKLOG = 1024
ACCEPT_PAUSE_S = 0.1
"""After an accept that failed (no descriptor left, for one)."""
CLOSE_S = 10.0
"""How long closing waits for the threads."""
THREADS = "everstep-exchange"
"""Their name."""


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
        """Listens at once. OSError if that cannot be; BadOption if ``host`` is no address of this host."""
        self._shelves = shelves
        self._greeting = MAGIC + token
        self._idle_s = idle_s
        self._io_s = io_s
        try:
            self._listener = _listening(host)
        except OSError as error:
            raise unusable(host, error) from error
        self.host = str(self._listener.getsockname()[0])
        self.port = int(self._listener.getsockname()[1])
        self._guard = threading.Lock()
        self._lines: dict[Line, threading.Thread] = {}
        self._room = threading.Semaphore(connections_max)
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name=THREADS, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections and their threads. Safe to call again."""
        with self._guard:
            self._closed = True
            lines = dict(self._lines)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._room.release()  # it may be waiting for that
        for line in lines:
            line.abort()
        until = time.monotonic() + CLOSE_S
        for thread in (self._thread, *lines.values()):
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                raise EverstepError(
                    "a thread of the exchange does not end", found=f"alive after {CLOSE_S:g} s"
                )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def _accept(self) -> None:
        with self._listener:
            while True:
                self._room.acquire()
                if self._is_closed():
                    return
                try:
                    self._start(Line(self._next(), self._io_s))
                except OSError as error:
                    self._room.release()
                    if self._is_closed():
                        return
                    log.warning("everstep: exchange: %s", error)
                    time.sleep(ACCEPT_PAUSE_S)

    def _is_closed(self) -> bool:
        with self._guard:
            return self._closed

    def _next(self) -> socket.socket:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while True:
            poll.poll()
            try:
                return opened(lambda: self._listener.accept()[0])
            except BlockingIOError:
                continue  # whoever it was is gone again

    def _start(self, line: Line) -> None:
        """Serve it on a thread of its own, unless it is too late."""
        thread = threading.Thread(target=self._client, args=(line,), name=THREADS, daemon=True)
        with self._guard:
            if self._closed:
                line.close()
                return
            self._lines[line] = thread
        try:
            thread.start()
        except RuntimeError as error:  # no more threads on this machine
            log.warning("everstep: exchange: %s", error)
            self._ended(line)

    def _client(self, line: Line) -> None:
        try:
            self._greet(line)
            while True:
                self._answer(line, decode_request(line.receive_frame(idle_s=self._idle_s)))
        except LOST as error:
            log.debug("everstep: exchange: a connection ended: %r", error)
        finally:
            self._ended(line)

    def _ended(self, line: Line) -> None:
        with self._guard:
            self._lines.pop(line, None)
            line.close()
        self._room.release()

    def _greet(self, line: Line) -> None:
        """Whoever does not know the token hears nothing."""
        said = bytearray(len(self._greeting))
        line.receive_into(memoryview(said), idle_s=min(GREETING_S, self._io_s))
        if not hmac.compare_digest(said, self._greeting):
            raise Violation("a wrong token")
        line.send_frame(Reply(0))

    def _answer(self, line: Line, request: Request) -> None:
        shelf = self._shelves.get((request.rank, request.copy))
        try:
            if shelf is None:
                raise Violation(f"nothing of rank {request.rank}, copy {request.copy}")
            found = shelf.find(request)
        except Violation as error:
            line.send_frame(Reply(0, str(error)[:TEXT_MAX]))
            return
        line.send_frame(Reply(len(found)))
        line.send(found)


def _listening(host: str) -> socket.socket:
    family, kind, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = opened(lambda: socket.socket(family, kind))
    try:
        listener.bind(place)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
