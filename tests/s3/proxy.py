"""A network between a client and an S3 server that does what a test asks for.

:class:`S3Proxy` stands before one endpoint and passes requests on as they are (the Host header too, which the
signature covers: the client signs for the proxy's address, and the server checks what it is told). A :class:`Fault`
strikes at the n-th request that it matches. All requests are recorded, and the bytes of bodies metered.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from .wire import (
    BODY_BYTES_MAX,
    LINE_BYTES_MAX,
    Answer,
    Head,
    Request,
    body_pieces,
    encode_head,
    error_answer,
    header,
    read_head,
    without,
)

STALL_S_MAX = 30.0
"""A stall that nobody releases ends after this."""

SEND_BUFFER_BYTES = 16 << 10
"""Of a connection to a client: what is metered as sent has left, but for about this much."""

JOIN_S = 10.0
CONNECT_S = 5.0

What = Literal[
    "reset",  # the connection is reset as soon as the request begins; the server sees nothing
    "cut_up",  # half of the request's body reaches the server, then both connections are reset
    "lose",  # the server has done it, and the connection is reset instead of an answer
    "stall",  # held until released, then passed on, whether or not the client is still there
    "stall_answer",  # the server has done it, the answer is held
    "stall_body",  # half of the answer's body comes, the rest is held
    "cut_down",  # half of the answer's body under its full length, then the connection ends
    "answer",  # the client is told `answer`; the server sees nothing
    "replace",  # the server has done it, the client is told `answer`
    "twice",  # the server gets it twice, one after the other; the client is told the second answer
    "flip_up",  # a bit of the request's body is inverted
    "flip_down",  # a bit of the answer's body is inverted
]
WHATS: tuple[What, ...] = get_args(What)

INTERNAL_ERROR = error_answer(500, "InternalError")
SLOW_DOWN = error_answer(503, "SlowDown", ("Retry-After", "1"))
ACCESS_DENIED = error_answer(403, "AccessDenied")
NO_SUCH_BUCKET = error_answer(404, "NoSuchBucket")
EXPIRED_TOKEN = error_answer(400, "ExpiredToken")
SKEWED = error_answer(403, "RequestTimeTooSkewed")
OK_WITH_ERROR = Answer(200, "OK", INTERNAL_ERROR.headers, INTERNAL_ERROR.body)
"""What completing an upload, and copying, may say after the status has been sent."""


def deletes_refused(request: Request, body: bytes) -> Answer:
    """To DeleteObjects: 200, and an error for each key."""
    keys = re.findall(rb"<Key>(.*?)</Key>", body)
    errors = b"".join(
        b"<Error><Key>%s</Key><Code>InternalError</Code><Message>by the proxy</Message></Error>" % key
        for key in keys
    )
    text = b'<?xml version="1.0" encoding="UTF-8"?>\n<DeleteResult>%s</DeleteResult>' % errors
    return Answer(200, "OK", [("Content-Type", "application/xml")], text)


def is_any(request: Request) -> bool:
    return True


@dataclass(eq=False)
class Fault:
    """What goes wrong, and when: from the ``nth`` request on for which ``when`` holds, ``times`` times."""

    what: What
    when: Callable[[Request], bool] = is_any
    nth: int = 1
    times: int = 1
    answer: Answer | Callable[[Request, bytes], Answer] = INTERNAL_ERROR
    met: int = 0
    """Matching requests so far."""
    struck: int = 0

    def strikes(self, request: Request) -> bool:
        """Counts the request if it matches; whether this one goes wrong."""
        if not self.when(request):
            return False
        self.met += 1
        if not self.nth <= self.met < self.nth + self.times:
            return False
        self.struck += 1
        return True

    def answer_to(self, request: Request, body: bytes) -> Answer:
        return self.answer(request, body) if callable(self.answer) else self.answer


class Meter:
    """Bytes of bodies by the time at which the proxy read them."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.totals: list[int] = [0]
        """Bytes up to each of ``times_s``, after a first 0."""

    def note(self, nbytes: int) -> None:
        self.times_s.append(time.monotonic())
        self.totals.append(self.totals[-1] + nbytes)

    @property
    def nbytes(self) -> int:
        return self.totals[-1]

    def rates(self, window_s: float) -> list[float]:
        """Bytes/s over each window that begins with a piece and ends within the traffic."""
        found = []
        end = 0
        for start, begin_s in enumerate(self.times_s):
            while end < len(self.times_s) and self.times_s[end] < begin_s + window_s:
                end += 1
            if end == len(self.times_s):
                break
            found.append((self.totals[end] - self.totals[start]) / window_s)
        return found


@dataclass
class Link:
    """``bytes_per_s`` for each direction, all connections together; ``delay_s`` before each request goes on."""

    bytes_per_s: float | None = None
    delay_s: float = 0.0
    free_s: dict[str, float] = field(default_factory=dict)

    async def carry(self, direction: str, nbytes: int) -> None:
        if self.bytes_per_s is None:
            return
        now = time.monotonic()
        due = max(self.free_s.get(direction, now), now) + nbytes / self.bytes_per_s
        self.free_s[direction] = due
        await asyncio.sleep(due - now)


class S3Proxy:
    """Listens on the loopback address before ``endpoint`` (``http://host:port``), on a thread of its own.

    ``faults`` and ``link`` may be changed at any time, :meth:`clear` forgets all. While ``refusing``, connections are
    reset as they come.
    """

    def __init__(self, endpoint: str, faults: Iterable[Fault] = ()) -> None:
        parts = urlsplit(endpoint)
        assert parts.scheme == "http" and parts.hostname, endpoint
        self._target = (parts.hostname, parts.port or 80)
        self.refusing = False
        self.stalled = threading.Event()
        """Set once a stall has begun."""
        self._quiet = threading.Condition()
        self._busy = 0
        self.busy_max = 0
        """The most requests that were under way at once."""
        self.clear(faults)
        self._released = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._main, name="test-s3-proxy", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def clear(self, faults: Iterable[Fault] = ()) -> None:
        """A good network but for ``faults``, nothing recorded. No request should be under way."""
        self.faults = list(faults)
        self.link = Link()
        self.requests: list[Request] = []
        self.up, self.down = Meter(), Meter()
        self.stalled.clear()
        self.busy_max = 0

    def release(self) -> None:
        """End all stalls that have begun."""
        self._loop.call_soon_threadsafe(self._release)

    def wait_quiet(self) -> None:
        """Until no request is under way, those included that only the server still hears of."""
        with self._quiet:
            assert self._quiet.wait_for(lambda: self._busy == 0, JOIN_S), f"{self._busy} requests under way"

    def cut(self) -> None:
        """End all connections."""
        self._loop.call_soon_threadsafe(self._cut)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: this was called before
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive()

    def __enter__(self) -> S3Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- on the proxy's thread -------------------------------------------------------------------------------------

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._tasks: set[asyncio.Task[None]] = set()
        server = self._loop.run_until_complete(
            asyncio.start_server(self._accept, sock=self._listener, limit=LINE_BYTES_MAX)
        )
        self._loop.run_forever()
        server.close()
        self._cut()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()

    def _release(self) -> None:
        self._released.set()
        self._released = asyncio.Event()

    def _cut(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _stall(self) -> None:
        self.stalled.set()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._released.wait(), STALL_S_MAX)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task: Any = asyncio.current_task()
        writer.transport.set_write_buffer_limits(SEND_BUFFER_BYTES)
        # asyncio does this only for sockets that were made with the protocol's number.
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._tasks.add(task)
        try:
            while not self.refusing and (head := await read_head(reader)) is not None:
                with self._under_way():
                    await self._exchange(head, reader, writer)
            if self.refusing:
                _reset(writer)
        except (OSError, ValueError, asyncio.CancelledError, asyncio.TimeoutError):
            _reset(writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        with self._quiet:
            self._busy += 1
            self.busy_max = max(self.busy_max, self._busy)
        try:
            yield
        finally:
            with self._quiet:
                self._busy -= 1
                self._quiet.notify_all()

    async def _exchange(self, head: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = head.request(len(self.requests))
        self.requests.append(request)
        fault = next((one for one in self.faults if one.strikes(request)), None)
        if fault is not None:
            request.fault = fault.what
            if fault.what == "reset":
                raise ConnectionResetError
        if header(head.headers, "expect"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head.headers = without(head.headers, "expect")
        if self.link.delay_s:
            await asyncio.sleep(self.link.delay_s)
        if fault is None:
            await self._pass(head, request, reader, writer)
            return
        body = await self._whole(request, reader, head)
        if body:
            head.headers = [*without(head.headers, "transfer-encoding", "content-length")]
            head.headers.append(("Content-Length", str(len(body))))
        answer = await self._strike(fault, head, request, body)
        await self._tell(fault, request, answer, writer)

    async def _whole(self, request: Request, reader: asyncio.StreamReader, head: Head) -> bytes:
        found = bytearray()
        async for piece in body_pieces(reader, head):
            await self._note_up(request, len(piece))
            found += piece
            assert len(found) <= BODY_BYTES_MAX
        return bytes(found)

    async def _note_up(self, request: Request, nbytes: int) -> None:
        request.nbytes += nbytes
        self.up.note(nbytes)
        await self.link.carry("up", nbytes)

    async def _strike(self, fault: Fault, head: Head, request: Request, body: bytes) -> Answer:
        """What the client would be told, after the server saw what it is to see."""
        if fault.what == "answer":
            return fault.answer_to(request, body)
        if fault.what == "cut_up":
            await self._send_part(head, body[: len(body) // 2])
            raise ConnectionResetError
        if fault.what == "stall":
            await self._stall()
        if fault.what == "twice":
            await self._ask(head, body)
        answer = await self._ask(head, flipped(body) if fault.what == "flip_up" else body)
        return fault.answer_to(request, body) if fault.what == "replace" else answer

    async def _tell(
        self, fault: Fault, request: Request, answer: Answer, writer: asyncio.StreamWriter
    ) -> None:
        if fault.what == "lose":
            raise ConnectionResetError
        if fault.what == "stall_answer":
            await self._stall()
        body = b"" if request.method == "HEAD" else answer.body
        if fault.what == "flip_down":
            body = flipped(body)
        request.status, request.answer_nbytes = answer.status, len(body)
        length = header(answer.headers, "content-length") if request.method == "HEAD" else str(len(body))
        headers = [*without(answer.headers, "content-length"), ("Content-Length", length or "0")]
        if answer.status in (204, 304):
            headers = without(headers, "content-length")
        writer.write(encode_head(f"HTTP/1.1 {answer.status} {answer.reason}", headers))
        half = len(body) // 2
        await self._note_down(writer, body[:half])
        if fault.what == "stall_body":
            await self._stall()
        if fault.what == "cut_down":
            writer.close()
            raise ConnectionAbortedError
        await self._note_down(writer, body[half:])

    async def _note_down(self, writer: asyncio.StreamWriter, piece: bytes) -> None:
        if piece:
            await self.link.carry("down", len(piece))
            self.down.note(len(piece))
            writer.write(piece)
        await writer.drain()

    async def _ask(self, head: Head, body: bytes) -> Answer:
        """The server's answer to a request that is whole here."""
        reader, writer = await self._connect()
        try:
            writer.write(head.encode())
            with contextlib.suppress(ConnectionError):  # it may answer before it has all
                writer.write(body)
                await writer.drain()
            answer = await _answer_head(reader)
            whole = b""
            if _has_body(head, answer):
                whole = b"".join([piece async for piece in body_pieces(reader, answer, to_the_end=True)])
            kept = without(answer.headers, "connection", "keep-alive", "transfer-encoding")
            return Answer(answer.status, answer.reason, kept, whole)
        finally:
            writer.close()

    async def _send_part(self, head: Head, body: bytes) -> None:
        _, writer = await self._connect()
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.wait_for(asyncio.open_connection(*self._target, limit=LINE_BYTES_MAX), CONNECT_S)

    async def _pass(
        self, head: Head, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One request and its answer, piece by piece as they come."""
        far_reader, far = await self._connect()
        try:
            far.write(head.encode())
            await self._send_body(head, request, reader, far)
            answer = await _answer_head(far_reader)
            request.status = answer.status
            pieces = body_pieces(far_reader, answer, to_the_end=True)
            if _has_body(head, answer) and answer.nbytes is None:  # its framing went: gather it for a length
                whole = b"".join([piece async for piece in pieces])
                kept = without(answer.headers, "connection", "keep-alive", "transfer-encoding")
                kept.append(("Content-Length", str(len(whole))))
                request.answer_nbytes = len(whole)
                writer.write(encode_head(answer.first, kept))
                await self._note_down(writer, whole)
                return
            writer.write(encode_head(answer.first, without(answer.headers, "connection", "keep-alive")))
            if _has_body(head, answer):
                request.answer_nbytes = answer.nbytes or 0
                async for piece in pieces:
                    await self._note_down(writer, piece)
            await writer.drain()
        finally:
            far.close()

    async def _send_body(
        self, head: Head, request: Request, reader: asyncio.StreamReader, far: asyncio.StreamWriter
    ) -> None:
        gone = False  # a server may answer, and close, before it has all
        async for piece in body_pieces(reader, head):
            await self._note_up(request, len(piece))
            if not gone:
                framed = b"%x\r\n%s\r\n" % (len(piece), piece) if head.is_chunked else piece
                try:
                    far.write(framed)
                    await far.drain()
                except ConnectionError:
                    gone = True
        if head.is_chunked and not gone:
            far.write(b"0\r\n\r\n")


async def _answer_head(reader: asyncio.StreamReader) -> Head:
    while (answer := await read_head(reader)) is not None:
        if answer.status >= 200:
            return answer
    raise ConnectionError("the server ended without an answer")


def _has_body(head: Head, answer: Head) -> bool:
    return not head.first.startswith("HEAD ") and answer.status not in (204, 304)


def flipped(body: bytes) -> bytes:
    changed = bytearray(body)
    if changed:
        changed[len(changed) // 2] ^= 0x10
    return bytes(changed)


def _reset(writer: asyncio.StreamWriter) -> None:
    """End the connection so that the other side sees a reset, not an end."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
