"""A byte rate for what is written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from .aligned import BLOCK, as_bytes
from .api import Backend, Notes, Writer
from .errors import Permanent
from .wrap import Wrapper, WriterWrapper

SLICE_BYTES = 64 << 10
"""Bytes that a network backend hands to the wire, or takes from it, between two looks at its gate."""

BUCKET_S = 0.1
"""The bucket holds what the rate gives in this time: the most by which any stretch of time can exceed it."""


class Gate(Protocol):
    """What bytes pass on their way over the wire."""

    async def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` may go."""
        ...


class TokenBucket:
    """Bytes become free at ``bytes_per_s``, up to :attr:`nbytes_max` at once. Takers are served in the
    order of their asking. Used from one event loop at a time; ``clock`` gives seconds."""

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self.nbytes_max = max(1, int(bytes_per_s * BUCKET_S))
        self._paid_until = clock() - BUCKET_S  # the moment at which all bytes taken so far have become free

    async def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` are free, and take them."""
        now = self._clock()
        self._paid_until = max(self._paid_until, now - BUCKET_S) + nbytes / self._bytes_per_s
        due = self._paid_until
        while (wait := due - self._clock()) > 0:
            await self._sleep(wait)


class RateLimited(Wrapper):
    """Writes pass at ``bytes_per_s`` at most, all writers of this object together, in slices so small that
    the rate is smooth; reads pass freely.

    Over any time T it lets through at most ``bytes_per_s * (T + BUCKET_S)``, whatever stood still before.
    Only ``create`` hands on its bytes in one piece, after having waited for all of them."""

    def __init__(
        self,
        inner: Backend,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        super().__init__(inner)
        if not 0 < bytes_per_s < float("inf"):
            raise Permanent(inner.url, f"a rate of {bytes_per_s} bytes/s")
        self._bucket = TokenBucket(bytes_per_s, clock, sleep)

    async def open_writer(self, name: str, nbytes: int, notes: Notes | None = None) -> Writer:
        return _LimitedWriter(await self.inner.open_writer(name, nbytes, notes), self._bucket, name)

    async def write(self, name: str, data: bytes) -> None:
        if len(data) <= self._bucket.nbytes_max:
            await self._bucket.take(len(data))
            await self.inner.write(name, data)
            return
        writer = await self.open_writer(name, len(data))
        try:
            await writer.write(memoryview(data))
            await writer.commit()
        finally:
            await writer.abort()

    async def create(self, name: str, data: bytes) -> None:
        await self._bucket.take(len(data))
        await self.inner.create(name, data)


class _LimitedWriter(WriterWrapper):
    def __init__(self, inner: Writer, bucket: TokenBucket, name: str) -> None:
        super().__init__(inner)
        self._bucket = bucket
        self._name = name
        # Whole blocks, where the rate allows it, so that direct I/O stays possible.
        self._slice = bucket.nbytes_max // BLOCK * BLOCK or bucket.nbytes_max

    async def write(self, view: memoryview) -> None:
        data = as_bytes(view, self._name)
        for start in range(0, len(data), self._slice):
            part = data[start : start + self._slice]
            await self._bucket.take(len(part))
            await self.inner.write(part)
