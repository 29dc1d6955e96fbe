"""What client and server of an exchange say: a greeting, then requests, each with one reply.

The greeting is ``MAGIC`` and the token. A request or the head of a reply is a 4-byte length (big-endian) and a
msgpack map; behind a reply's head come ``nbytes`` raw bytes. Nothing is larger than its bound, and nothing takes
longer than its deadline.
"""

from __future__ import annotations

import asyncio
import socket
import struct
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

What = Literal["meta", "layout", "records", "read"]


class Violation(Exception):
    """The other side does not speak the protocol."""


LOST = (OSError, EOFError, asyncio.TimeoutError, Violation)
"""What ends a connection."""


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


async def receive_into(sock: socket.socket, view: memoryview, io_s: float) -> None:
    """Fill ``view``. EOFError if the other side ends before, asyncio.TimeoutError if it is too slow."""

    async def all_of_it() -> None:
        loop = asyncio.get_running_loop()
        at = 0
        while at < len(view):
            count = await loop.sock_recv_into(sock, view[at:])
            if count == 0:
                raise EOFError(f"the connection ended after {at} of {len(view)} bytes")
            at += count

    await asyncio.wait_for(all_of_it(), within_s(len(view), io_s))


async def receive_frame(sock: socket.socket, io_s: float, *, idle_s: float | None = None) -> bytes:
    """One frame, which may be awaited for ``idle_s``. Violation if it says that it is too large."""
    head = bytearray(_LENGTH.size)
    await receive_into(sock, memoryview(head), io_s if idle_s is None else idle_s)
    (nbytes,) = _LENGTH.unpack(head)
    if nbytes > FRAME_BYTES_MAX:
        raise Violation(f"a message of {nbytes} bytes; at most {FRAME_BYTES_MAX} are allowed")
    data = bytearray(nbytes)
    await receive_into(sock, memoryview(data), io_s)
    return bytes(data)


async def send(sock: socket.socket, data: bytes | memoryview, io_s: float) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.wait_for(loop.sock_sendall(sock, data), within_s(len(data), io_s))


async def send_frame(sock: socket.socket, message: Request | Reply, io_s: float) -> None:
    data = msgspec.msgpack.encode(message)
    await send(sock, _LENGTH.pack(len(data)) + data, io_s)
