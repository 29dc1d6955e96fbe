"""Where a node's agent listens to those of other nodes: one thread accepts, and each connection has one."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from everstep.errors import CapacityError, EverstepError

from .address import unusable
from .failing import own_failure
from .greeting import answer, check_name
from .link import Link
from .messages import Message, failed, unexpected
from .stream import IO_S, Stream, opened, secured, set_options
from .telling import is_logged
from .tls import tls_settings

log = logging.getLogger("everstep.peers")

CONNECTIONS_MAX = 256
STRANGERS_MAX = 32
"""Connections that are being greeted; more wait to be accepted. So strangers keep nobody out who is in."""
BACKLOG = 256
IDLE_S = 900.0
"""How long a connection may say nothing; its owner makes another."""
ACCEPT_PAUSE_S = 0.1
"""After an accept that failed (no descriptor left, for one)."""
WAKE_S = 5.0
"""How long the accepting thread sleeps at most; closing wakes it."""
CLOSE_S = 10.0
"""How long closing waits for the threads."""

Handler = Callable[[Link, Any], None]
"""Called with the link and the message, on the connection's thread. It may go on talking over the link; when it
returns, the next message is waited for. An error ends the connection, after the other side was told."""


class Listener:
    """Serves agents of ``run_id`` that know ``secret``, by ``handlers``: what is done with each kind of message. The
    mapping is looked into at each message, so that it may still grow.

    ``port`` is taken if it is free, else the system's choice. At most ``connections_max`` agents are served; one more
    is told so. One that says nothing for ``idle_s`` is cut off. TLS as the environment says.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        run_id: str,
        handlers: Mapping[type[Message], Handler],
        *,
        me: str,
        connections_max: int = CONNECTIONS_MAX,
        idle_s: float = IDLE_S,
        io_s: float = IO_S,
    ) -> None:
        """Listens at once. OSError if that cannot be; BadOption if ``host`` is no address of this host, and for
        settings of TLS that cannot be used."""
        self.me = check_name(me)
        self._secret = secret
        self._run_id = run_id
        self._handlers = handlers
        self._connections_max = connections_max
        self._idle_s = idle_s
        self._io_s = io_s
        tls = tls_settings()
        self._tls = tls.server if tls is not None else None
        try:
            self._socket = _bound(host, port)
        except OSError as error:
            raise unusable(host, error) from error
        self.host = str(self._socket.getsockname()[0])
        self.port = int(self._socket.getsockname()[1])
        self._lock = threading.Lock()
        self._strangers = threading.Semaphore(STRANGERS_MAX)
        self._serving = 0
        """Guarded by ``_lock``, like the next three."""
        self._failures = 0
        """Of this side itself, while it served."""
        self._streams: set[Stream] = set()
        self._threads: set[threading.Thread] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="everstep-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections and threads. EverstepError if one does not end in time: what a handler waits for is to
        be ended first. Safe to call again; not from a handler."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(CLOSE_S)
        self._socket.close()
        with self._lock:
            streams, threads = list(self._streams), list(self._threads)
        for stream in streams:
            stream.close()
        for thread in threads:
            thread.join(CLOSE_S)
        alive = [thread.name for thread in (self._thread, *threads) if thread.is_alive()]
        if alive:
            raise EverstepError("threads of connections between nodes do not end", found=alive)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    # -- the accepting thread

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not self._closing.is_set():
            if not self._strangers.acquire(timeout=WAKE_S):
                continue
            started = False
            try:
                if poll.poll(WAKE_S * 1000) and not self._closing.is_set():
                    started = self._start()
            except OSError as error:
                log.warning("everstep: peers: %s", error)
                self._closing.wait(ACCEPT_PAUSE_S)
            finally:
                if not started:
                    self._strangers.release()

    def _start(self) -> bool:
        """Accept one, and give it a thread."""
        sock = opened(lambda: self._socket.accept()[0])
        try:
            set_options(sock)
            if self._tls is not None:
                sock = secured(sock, self._tls, server=True)
            stream = Stream(sock)
            thread = threading.Thread(
                target=self._connection, args=(stream,), name="everstep-peer", daemon=True
            )
            with self._lock:
                self._streams.add(stream)
                self._threads.add(thread)
            thread.start()
            return True
        except BaseException:
            sock.close()
            raise

    # -- a connection's thread

    def _connection(self, stream: Stream) -> None:
        try:
            try:
                peer = answer(stream, self._secret, self._run_id, self.me)
            finally:
                self._strangers.release()
            link = Link(stream, peer, io_s=self._io_s)
            with self._place(link) as served:
                while served and not self._closing.is_set():
                    self._handle(link, link.receive(self._idle_s))
        except EverstepError as error:  # whoever is to know was told; a lost connection is PeerLost
            log.debug("everstep: peers: a connection ended: %s", error)
        except Exception:
            log.exception("everstep: peers: a connection failed")
        finally:
            stream.close()
            with self._lock:
                self._streams.discard(stream)
                self._threads.discard(threading.current_thread())

    @contextlib.contextmanager
    def _place(self, link: Link) -> Iterator[bool]:
        """Whether there is one for the connection."""
        with self._lock:
            free = self._serving < self._connections_max
            self._serving += free
        try:
            if not free:
                error = CapacityError(
                    f"the agent of node {self.me} serves as many connections as it may",
                    found=self._connections_max,
                    node=self.me,
                )
                link.send(failed(error))
            yield free
        finally:
            with self._lock:
                self._serving -= free

    def _handle(self, link: Link, message: Message) -> None:
        handler = self._handlers.get(type(message))
        try:
            if handler is None:
                raise unexpected(message, "a message that this agent serves")
            handler(link, message)
        except EverstepError as error:
            if not link.closed:
                link.send(failed(error))
            raise
        except Exception as error:
            # Not the connection's: a link makes PeerLost of that. So it is an answer, and the end in order.
            said = own_failure(
                self.me, f"{type(message).__name__} of node {link.peer} could not be served", error
            )
            with self._lock:
                self._failures += 1
                times = self._failures
            if is_logged(times):
                trace = None if isinstance(error, OSError) else error
                log.warning("everstep: peers: %s (%d such failures now)", said, times, exc_info=trace)
            if not link.closed:
                link.send(failed(said))
            raise said from error


def _bound(host: str, port: int) -> socket.socket:
    for wanted in (port, 0) if port else (0,):
        family, kind, _, _, place = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0]
        sock = opened(lambda family=family, kind=kind: socket.socket(family, kind))  # type: ignore[misc]
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(place)
            sock.listen(BACKLOG)
            return sock
        except OSError:
            sock.close()
            if wanted == 0:
                raise
    raise AssertionError("one of the two was the system's choice")
