"""A connection between the agents of two nodes: messages, and bulk bytes straight from and into memory."""

from __future__ import annotations

import contextlib
import socket
import ssl
from types import TracebackType
from typing import NoReturn

from everstep.errors import PeerLost

from .address import ADDRESS
from .greeting import call, check_name
from .messages import HEAD_BYTES, Message, decode_body, decode_head, encode_frame
from .rate import Rate
from .stream import IO_S, LOST, PIECE_BYTES, Deadline, Stream, opened, secured, set_options
from .tls import tls_settings


class Link:
    """One connection, after its greeting. ``peer`` is the other node's name.

    One thread may send while another receives; any may close, which ends both at once. Every method raises PeerLost
    when the other side is gone, breaks the rules, or lets nothing move for ``io_s`` seconds, and closes the link first:
    half a message is not mended.
    """

    def __init__(self, stream: Stream, peer: str, *, io_s: float = IO_S) -> None:
        self.peer = peer
        self._stream = stream
        self._io_s = io_s

    @property
    def closed(self) -> bool:
        return self._stream.closed

    def send(self, message: Message) -> None:
        """BadOption if the message is too large (and nothing was sent)."""
        self._send(memoryview(encode_frame(message)))

    def receive(self, timeout_s: float) -> Message:
        """The next message, whose first byte comes within ``timeout_s``."""
        try:
            head = bytearray(HEAD_BYTES)
            first = memoryview(head)[:1]
            self._stream.receive_into(first, Deadline(timeout_s))
            self._stream.receive_into(memoryview(head)[1:], Deadline.of(HEAD_BYTES, self._io_s))
            nbytes, expected = decode_head(head)
            body = bytearray(nbytes)
            self._receive(memoryview(body))
            return decode_body(body, expected)
        except (*LOST, PeerLost) as error:
            self._lost(error)

    def send_bytes(self, view: memoryview, rate: Rate | None = None) -> None:
        """All of ``view``, no faster than ``rate`` allows (Closed where that was closed)."""
        step = PIECE_BYTES if rate is None else rate.slice_bytes
        try:
            for start in range(0, len(view), step):
                piece = view[start : start + step]
                if rate is not None:
                    rate.take(len(piece))
                self._send(piece)
        except BaseException:
            self.close()
            raise

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` with the bytes that :meth:`send_bytes` sends."""
        try:
            self._receive(view)
        except LOST as error:
            self._lost(error)

    def close(self) -> None:
        """Safe to call again."""
        self._stream.close()

    def _send(self, view: memoryview) -> None:
        try:
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                self._stream.send(piece, Deadline.of(len(piece), self._io_s))
        except LOST as error:
            self._lost(error)

    def _receive(self, view: memoryview) -> None:
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            self._stream.receive_into(piece, Deadline.of(len(piece), self._io_s))

    def _lost(self, error: BaseException) -> NoReturn:
        self.close()
        if isinstance(error, PeerLost):
            raise PeerLost(
                error.message, found=error.found, expected=error.expected, hint=error.hint, node=self.peer
            ) from error
        raise PeerLost(
            f"the agent of node {self.peer} does not answer"
            if isinstance(error, TimeoutError)
            else f"the connection to the agent of node {self.peer} is gone",
            found=f"{type(error).__name__}: {error}",
            node=self.peer,
        ) from error

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(
    host: str, port: int, secret: bytes, run_id: str, *, me: str, timeout_s: float, io_s: float = IO_S
) -> Link:
    """A link to the agent that listens there, which is one of ``run_id``; ``me`` is this node's name. TLS as the
    environment says. PeerLost if it cannot be reached within ``timeout_s``, or does not prove itself; BadOption for
    settings of TLS that cannot be used."""
    tls = tls_settings()
    check_name(me)
    try:
        stream = Stream(_connected(host, port, timeout_s, tls.client if tls is not None else None))
    except LOST as error:
        raise _unreachable(host, port, error) from None
    try:
        return Link(stream, call(stream, secret, run_id, me), io_s=io_s)
    except PeerLost as error:
        stream.close()
        raise PeerLost(
            f"{host}:{port}: {error.message}",
            found=error.found,
            expected=error.expected,
            hint=error.hint,
            **error.fields,
        ) from None
    except BaseException:
        stream.close()
        raise


def _connected(host: str, port: int, timeout_s: float, context: ssl.SSLContext | None) -> socket.socket:
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = opened(lambda: socket.socket(family, kind))
    try:
        sock.settimeout(timeout_s)
        sock.connect(place)
        sock.setblocking(False)
        set_options(sock)
        return secured(sock, context, server=False) if context is not None else sock
    except BaseException:
        with contextlib.suppress(OSError):
            sock.close()
        raise


def _unreachable(host: str, port: int, error: BaseException) -> PeerLost:
    return PeerLost(
        f"no agent can be reached at {host}:{port}",
        found=f"{type(error).__name__}: {error}",
        hint=f"If other nodes reach that host by another address, set {ADDRESS} there.",
    )
