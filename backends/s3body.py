"""Bytes on their way to a server and back: in slices, past a gate, and seen to move."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol, TypeVar

from .errors import Retryable
from .limit import SLICE_BYTES, Gate
from .parallel import ended

T = TypeVar("T")

SEND_BYTES = 256 << 10
"""Bytes of one write to a socket where there is no gate."""

RECEIVE_BYTES = 1 << 20
"""The most that is taken from a socket's buffer at once where there is no gate."""

KERNEL_BYTES = 128 << 10
"""Bytes of an answer that the kernel may take from the wire before a gate was asked for them (it doubles this)."""


class Flow:
    """The bytes of one request, both ways."""

    def __init__(self, gate: Gate | None) -> None:
        self._gate = gate
        self._held = False
        self._moved = time.monotonic()

    @property
    def send_bytes(self) -> int:
        return SEND_BYTES if self._gate is None else SLICE_BYTES

    @property
    def receive_bytes(self) -> int:
        return RECEIVE_BYTES if self._gate is None else SLICE_BYTES

    def hold_back(self, answer: object) -> None:
        """With a gate, have the kernel take little of ``answer`` ahead: by itself it takes some MiB per connection."""
        connection = getattr(getattr(answer, "_raw_stream", None), "connection", None)
        if self._gate is None or connection is None or connection.transport is None:
            return
        wire = connection.transport.get_extra_info("socket")
        if wire is not None:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)

    async def pass_on(self, nbytes: int) -> None:
        """``nbytes`` are about to go, or have come: wait for the gate."""
        if self._gate is not None:
            self._held = True
            try:
                await self._gate.take(nbytes)
            finally:
                self._held = False
        self._moved = time.monotonic()

    async def ask_ahead(self, nbytes: int) -> None:
        """Wait for the gate for all of an answer of ``nbytes`` before it is asked for: of an answer that is under way
        many MiB come into buffers before anybody takes and counts them."""
        await self.pass_on(nbytes)
        self._gate = None

    def idle_s(self) -> float:
        """Seconds since bytes moved last; the gate's own waits do not count."""
        return 0.0 if self._held else time.monotonic() - self._moved

    async def watched(self, name: str, request: Coroutine[Any, Any, T], stall_s: float) -> T:
        """The answer of ``request``. When none of its bytes moves for ``stall_s`` it is given up: Retryable. It has
        ended when this returns, whichever way."""
        task = asyncio.ensure_future(request)
        try:
            while not task.done():
                left_s = stall_s - self.idle_s()
                if left_s <= 0:
                    raise Retryable(name, f"nothing came or went for {stall_s:g} s")
                await asyncio.wait({task}, timeout=left_s)
            return task.result()
        finally:
            await ended([task])


class Body:
    """``view`` as the body of a request. It is read in place, as often as it is sent."""

    def __init__(self, view: memoryview, flow: Flow) -> None:
        self._view = view
        self._flow = flow
        self._at = 0

    def __len__(self) -> int:
        return len(self._view)

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        step = self._flow.send_bytes
        for start in range(0, len(self._view), step):
            piece = self._view[start : start + step]
            await self._flow.pass_on(len(piece))
            yield piece

    # botocore takes for a body what looks like a file, and rewinds it before it sends it once more.

    def read(self, nbytes: int = -1) -> bytes:
        start, self._at = self._at, len(self._view) if nbytes < 0 else min(self._at + nbytes, len(self._view))
        return bytes(self._view[start : self._at])

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, min((0, self._at, len(self._view))[whence] + offset, len(self._view)))
        return self._at

    def tell(self) -> int:
        return self._at


class Answer(Protocol):
    """The body of a server's answer."""

    async def read(self, amt: int) -> bytes: ...

    def close(self) -> None: ...


async def receive(name: str, answer: Answer, view: memoryview, flow: Flow) -> None:
    """Fill ``view`` with the body of an answer, which must be as long. Retryable where it is cut."""
    done = 0
    try:
        flow.hold_back(answer)
        while done < len(view):
            piece = await answer.read(min(flow.receive_bytes, len(view) - done))
            if not piece:
                raise Retryable(name, f"the answer ended after {done} of {len(view)} bytes")
            view[done : done + len(piece)] = piece
            done += len(piece)
            await flow.pass_on(len(piece))
    except BaseException:
        answer.close()
        raise
