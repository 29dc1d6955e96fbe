"""What a rate limit does on the wire: a relay on the loopback address that sees the bytes pass."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

READ_BYTES = 64 << 10
"""The most that is passed on at once."""

STOP_S = 10.0


class Passed:
    """Bytes that went one way, by the moments at which they were seen."""

    def __init__(self) -> None:
        self._moments: list[float] = []
        self._totals: list[int] = []

    def add(self, nbytes: int) -> None:
        self._moments.append(time.monotonic())
        self._totals.append((self._totals[-1] if self._totals else 0) + nbytes)

    def clear(self) -> None:
        self._moments.clear()
        self._totals.clear()

    def rates(self, window_s: float) -> tuple[float, float]:
        """The least and the greatest rate, in bytes/s, in any ``window_s`` seconds between the moments at which a
        hundredth of the bytes had passed, and all but one: what comes before and after are questions and answers. Where
        all passed in less time, both are that of a window with all in it. Raises ValueError where there is nothing."""
        if not self._moments:
            raise ValueError("no bytes were seen")
        total = self._totals[-1]
        first = bisect_right(self._totals, total / 100)
        last = bisect_right(self._totals, total * 99 / 100)
        found = []
        for index in range(first, last + 1):
            end = self._moments[index] + window_s
            if end > self._moments[last]:
                break
            before = self._totals[index - 1] if index else 0
            found.append((self._totals[bisect_right(self._moments, end) - 1] - before) / window_s)
        return (min(found), max(found)) if found else (total / window_s, total / window_s)


class Relay:
    """Passes connections on to ``endpoint``. ``sent`` and ``received`` are the client's, in both ways."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self.sent, self.received = Passed(), Passed()
        self.endpoint = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=READ_BYTES)
        self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with suppress(OSError, asyncio.CancelledError):
            await self._pass_on(reader, writer)
        writer.close()
        self._tasks.discard(task)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, onward = await asyncio.open_connection(self._host, self._port, limit=READ_BYTES)
        for end in (onward, writer):  # what waits here would count as gone
            end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, READ_BYTES)
        pumps = [
            asyncio.ensure_future(self._pump(reader, onward, self.sent)),
            asyncio.ensure_future(self._pump(behind, writer, self.received)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            onward.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passed: Passed) -> None:
        while data := await reader.read(READ_BYTES):
            passed.add(len(data))
            writer.write(data)
            await writer.drain()


@contextmanager
def relayed(endpoint: str) -> Iterator[Relay]:
    """A relay to ``endpoint``, on a thread of its own, ended with the block."""
    relay, ready = Relay(endpoint), threading.Event()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(relay.serve(ready, stop))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    if not ready.wait(STOP_S):
        raise TimeoutError("the relay did not start")
    try:
        yield relay
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(STOP_S)
