"""Bytes over one TCP connection, with deadlines, TLS or not; connections do not pass a fork."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

PIECE_BYTES = 4 << 20
"""Bulk bytes are sent and received in pieces of at most this, each with its own deadline."""
IO_S = 20.0
"""A connection on which nothing moves for so long is lost."""
BYTES_PER_S_MIN = 4 << 10
"""A piece that comes slower than this, besides :data:`IO_S`, is not waited for: whoever dribbles is lost too."""

KEEPALIVE_IDLE_S = 10
KEEPALIVE_EVERY_S = 5
KEEPALIVE_COUNT = 4
"""An idle connection whose other end is gone, without a word, ends after half a minute."""

LOST = (OSError, EOFError)
"""What ends a connection; TimeoutError and errors of TLS are of the first kind."""

T = TypeVar("T")


class Deadline:
    """At most ``total_s`` in all, and at most ``stall_s`` without :meth:`moved`."""

    def __init__(self, total_s: float, stall_s: float | None = None) -> None:
        now = time.monotonic()
        self._until = now + total_s
        self._stall_s = total_s if stall_s is None else stall_s
        self._stalled = now + self._stall_s

    @classmethod
    def of(cls, nbytes: int, io_s: float) -> Deadline:
        """For one piece of ``nbytes``."""
        return cls(io_s + nbytes / BYTES_PER_S_MIN, io_s)

    def moved(self) -> None:
        self._stalled = time.monotonic() + self._stall_s

    def left_s(self) -> float:
        return min(self._until, self._stalled) - time.monotonic()


class Stream:
    """One thread may send while another receives; any may close, which wakes both (OSError).

    Everything raises one of :data:`LOST`: TimeoutError at the deadline, EOFError where the other side has ended.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Takes over ``sock``, connected, made by :func:`opened`."""
        self._sock = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._one = threading.Lock()  # a TLS connection's two directions share their state
        self._sending = threading.RLock()
        self._receiving = threading.RLock()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def send(self, data: bytes | memoryview, deadline: Deadline) -> None:
        """All of ``data``."""
        view = memoryview(data)
        with self._sending:
            at = 0
            while at < len(view):
                rest = view[at:]
                at += self._tried(lambda rest=rest: self._sock.send(rest), select.POLLOUT, deadline)  # type: ignore[misc]

    def receive_into(self, view: memoryview, deadline: Deadline) -> None:
        """Fill ``view``."""
        with self._receiving:
            at = 0
            while at < len(view):
                rest = view[at:]
                came = self._tried(lambda rest=rest: self._sock.recv_into(rest), select.POLLIN, deadline)  # type: ignore[misc]
                if came == 0:
                    raise EOFError("the other side closed the connection")
                at += came

    def handshake(self, deadline: Deadline) -> None:
        """That of TLS, where there is one."""
        sock = self._sock
        if isinstance(sock, ssl.SSLSocket):
            self._tried(sock.do_handshake, select.POLLIN, deadline)

    def close(self) -> None:
        """Safe to call again, from any thread."""
        self._closed = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(
                self._sock, socket.SHUT_RDWR
            )  # an SSLSocket's own would turn it into a plain one
        with self._sending, self._receiving:  # they have been woken
            self._sock.close()

    def _tried(self, attempt: Callable[[], T], event: int, deadline: Deadline) -> T:
        """What ``attempt`` gives as soon as it need not wait."""
        while True:
            if self._closed:
                raise ConnectionAbortedError("this side closed the connection")
            try:
                if self._is_tls:
                    with self._one:
                        done = attempt()
                else:
                    done = attempt()
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, deadline)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, deadline)
            except BlockingIOError:
                self._wait(event, deadline)
            else:
                deadline.moved()
                return done

    def _wait(self, event: int, deadline: Deadline) -> None:
        left = deadline.left_s()
        poll = select.poll()
        poll.register(self._sock, event)
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError("nothing moved in time")


def set_options(sock: socket.socket) -> None:
    """Small messages go at once; the kernel notices an end that is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(IO_S * 1000))


_guard = threading.RLock()
"""Held while sockets come, and by a fork: a child knows all that it must close."""
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def opened(make: Callable[[], socket.socket]) -> socket.socket:
    """The socket that ``make`` gives without waiting, non-blocking; a forked child will not have it."""
    with _guard:
        sock = make()
        _sockets.add(sock)
    sock.setblocking(False)
    return sock


def secured(sock: socket.socket, context: ssl.SSLContext, *, server: bool) -> socket.socket:
    """``sock`` with TLS over it, before the handshake."""
    return opened(lambda: context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False))


def _close_in_child() -> None:
    global _guard
    _guard = threading.RLock()
    for sock in list(_sockets):
        sock.close()
    _sockets.clear()


os.register_at_fork(
    before=lambda: _guard.acquire(),
    after_in_parent=lambda: _guard.release(),
    after_in_child=_close_in_child,
)
