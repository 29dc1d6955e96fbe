"""What client and server of an exchange say: a greeting, then requests, each with one reply.

The greeting is ``MAGIC`` and the token. A request or the head of a reply is a 4-byte length (big-endian) and a
msgpack map; behind a reply's head come ``nbytes`` raw bytes. Nothing is larger than its bound, and nothing takes
longer than its deadline.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import Literal

import msgspec
from everstep.format.constants import LAYOUT_BYTES_MAX
from everstep.format.records_table import decode_records as decode_records
from everstep.format.records_table import encode_records as encode_records

MAGIC = b"everstep exchange 1\n"
TOKEN_BYTES = 32
FRAME_BYTES_MAX = 64 << 10
"""Largest request, and largest head of a reply."""
BLOB_BYTES_MAX = LAYOUT_BYTES_MAX
"""Largest meta region, layout or table of records: what a client makes room for. Image bytes go where they are
wanted."""
TEXT_MAX = 1000
"""Characters of an error that a reply tells."""

GREETING_S = 5.0
"""How long a stranger may take to say its token."""
IO_S = 20.0
"""How long a message may take, besides its bytes."""
BYTES_PER_S_MIN = 1 << 20
"""A peer that is slower than this counts as lost."""

_LENGTH = struct.Struct(">I")
_TIMEVAL = struct.Struct("@ll")

What = Literal["meta", "layout", "records", "read"]


class Violation(Exception):
    """The other side does not speak the protocol."""


LOST = (OSError, EOFError, Violation)
"""What ends a connection; a TimeoutError is an OSError."""


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """``what`` of the saved rank ``rank``; for "read" ``nbytes`` of ``image`` from ``offset`` on. ``copy``: of which
    of the node's snapshots of that rank."""

    what: What
    rank: int
    image: str = ""
    offset: int = 0
    nbytes: int = 0
    copy: int = 0


class Reply(msgspec.Struct, forbid_unknown_fields=True):
    """``nbytes`` follow, unless ``error`` says why not."""

    nbytes: int
    error: str = ""


class Proof(msgspec.Struct):
    """What a saved rank's snapshot must be: told through the job's store, it binds all that comes over the
    connection. ``root`` is over the records of all the rank's images. A node may have several ``copy`` of one rank;
    ``lacks`` are images that are not in this one."""

    rank: int
    generation: int
    layout_hash: str
    root: bytes
    meta_hash: bytes
    copy: int = 0
    lacks: list[str] = []


class Offer(msgspec.Struct):
    """Where a node's memory is served, to whom knows the token, and what is there. ``problems``: what could not be
    offered."""

    host: str
    port: int
    token: bytes
    proofs: list[Proof]
    problems: list[str] = []


def decode_request(data: bytes) -> Request:
    try:
        return msgspec.msgpack.decode(data, type=Request)
    except msgspec.DecodeError as error:
        raise Violation(f"no request: {error}") from None


def decode_reply(data: bytes) -> Reply:
    try:
        return msgspec.msgpack.decode(data, type=Reply)
    except msgspec.DecodeError as error:
        raise Violation(f"no reply: {error}") from None


def within_s(nbytes: int, io_s: float) -> float:
    """How long ``nbytes`` may take."""
    return io_s + nbytes / BYTES_PER_S_MIN


class Line:
    """One connection of an exchange; one thread uses it at a time. It blocks, with the kernel's own timeouts: bulk
    bytes take one call for each piece, without the interpreter lock. Everything raises one of :data:`LOST`."""

    def __init__(self, sock: socket.socket, io_s: float) -> None:
        """Takes over ``sock``, connected or not."""
        self.sock = sock
        self._io_s = io_s
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connect(self, place: tuple[str, int]) -> None:
        """In bounded time."""
        self._limit(socket.SO_SNDTIMEO, self._io_s)
        try:
            self.sock.connect(place)
        except BlockingIOError:
            raise TimeoutError from None

    def receive_into(self, view: memoryview, *, idle_s: float | None = None) -> None:
        """Fill ``view``; the first byte may be awaited for ``idle_s`` instead. EOFError if the other side ends before,
        TimeoutError if it is too slow."""
        until = time.monotonic() + (within_s(len(view), self._io_s) if idle_s is None else idle_s)
        at = 0
        while at < len(view):
            self._limit(socket.SO_RCVTIMEO, until - time.monotonic())
            try:
                received = self.sock.recv_into(view[at:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError from None
            if not received:
                raise EOFError("the other side closed the connection")
            at += received

    def send(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        until = time.monotonic() + within_s(len(view), self._io_s)
        at = 0
        while at < len(view):
            self._limit(socket.SO_SNDTIMEO, until - time.monotonic())
            try:
                at += self.sock.send(view[at:])
            except BlockingIOError:
                raise TimeoutError from None

    def receive_frame(self, *, idle_s: float | None = None) -> bytes:
        """One frame, which may be awaited for ``idle_s``. Violation if it says that it is too large."""
        head = bytearray(_LENGTH.size)
        self.receive_into(memoryview(head), idle_s=idle_s)
        (nbytes,) = _LENGTH.unpack(head)
        if nbytes > FRAME_BYTES_MAX:
            raise Violation(f"a message of {nbytes} bytes; at most {FRAME_BYTES_MAX} are allowed")
        data = bytearray(nbytes)
        self.receive_into(memoryview(data))
        return bytes(data)

    def send_frame(self, message: Request | Reply) -> None:
        data = msgspec.msgpack.encode(message)
        self.send(_LENGTH.pack(len(data)) + data)

    def _limit(self, option: int, seconds: float) -> None:
        """The longest that the next call may wait. TimeoutError when the time is up."""
        if seconds <= 0:
            raise TimeoutError
        whole, micros = divmod(int(seconds * 1e6), 1_000_000)
        self.sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(whole, max(micros, 1)))

    def abort(self) -> None:
        """From any thread: whoever waits on the connection is woken, with one of :data:`LOST`."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """By the thread that uses it."""
        self.sock.close()
