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

BUCKET_S = 0.1
"""The bucket holds what the rate gives in this time: the most by which any stretch of time can exceed it."""
SLICE_BYTES = 64 << 10
"""The most that a network backend takes at once, so that what is on the wire follows a rate of 4 slices a second or
more within 5 % over 5 s."""
OPEN_SLICE_BYTES = 32 << 20
"""What passes at once where there is no rate."""
LOOK_S = 0.25
"""Who waits for bytes looks this often whether the rate was changed."""


class Gate(Protocol):
    """What bytes pass before they go over the wire."""

    async def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` may go, and count them as gone."""
        ...


class Limit(Gate, Protocol):
    """A gate for writes in slices: ``nbytes_max`` is the most to take at once, at this moment."""

    @property
    def nbytes_max(self) -> int: ...


class TokenBucket:
    """Bytes become free at ``bytes_per_s`` (None: at once), up to :attr:`nbytes_max` in advance. Takers are served in
    the order of their asking; the rate may be changed at any time, and counts from then on for those who wait, too.
    Used from one event loop at a time; ``clock`` gives seconds."""

    def __init__(
        self,
        bytes_per_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._rate = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._at = clock()
        self._taken = 0.0
        self._free = float(self.nbytes_max)  # how many bytes may have been taken by now

    @property
    def bytes_per_s(self) -> float | None:
        return self._rate

    @bytes_per_s.setter
    def bytes_per_s(self, rate: float | None) -> None:
        if rate != self._rate:
            self._fill()
            self._rate = rate
            self._fill()

    @property
    def nbytes_max(self) -> int:
        return OPEN_SLICE_BYTES if self._rate is None else max(1, int(self._rate * BUCKET_S))

    async def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` are free, and take them."""
        self._fill()
        self._taken += nbytes
        mine = self._taken
        while self._fill() <= mine - 1 and self._rate is not None:
            await self._sleep(min((mine - self._free) / self._rate, LOOK_S))

    def _fill(self) -> float:
        now = self._clock()
        if self._rate is None:
            self._free = self._taken
        else:
            self._free = min(self._free + (now - self._at) * self._rate, self._taken + self.nbytes_max)
        self._at = now
        return self._free


class RateLimited(Wrapper):
    """Writes pass ``limit``, bytes per second or a :class:`Limit` that others use too, in slices so small that
    the rate is smooth; reads pass freely.

    Over any time T a rate lets through at most ``bytes_per_s * (T + BUCKET_S)``, whatever stood still before.
    Only ``create`` hands on its bytes in one piece, after having waited for all of them."""

    def __init__(
        self,
        inner: Backend,
        limit: float | Limit,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        super().__init__(inner)
        if isinstance(limit, (int, float)):
            if not 0 < limit < float("inf"):
                raise Permanent(inner.url, f"a rate of {limit} bytes/s")
            limit = TokenBucket(limit, clock, sleep)
        self._limit = limit

    async def open_writer(
        self, name: str, nbytes: int, notes: Notes | None = None, *, at_most: bool = False
    ) -> Writer:
        return _LimitedWriter(
            await self.inner.open_writer(name, nbytes, notes, at_most=at_most), self._limit, name
        )

    async def write(self, name: str, data: bytes) -> None:
        if len(data) <= self._limit.nbytes_max:
            await self._limit.take(len(data))
            await self.inner.write(name, data)
            return
        writer = await self.open_writer(name, len(data))
        try:
            await writer.write(memoryview(data))
            await writer.commit()
        finally:
            await writer.abort()

    async def create(self, name: str, data: bytes) -> None:
        await self._limit.take(len(data))
        await self.inner.create(name, data)


class _LimitedWriter(WriterWrapper):
    def __init__(self, inner: Writer, limit: Limit, name: str) -> None:
        super().__init__(inner)
        self._limit = limit
        self._name = name

    async def write(self, view: memoryview) -> None:
        data = as_bytes(view, self._name)
        start = 0
        while start < len(data):
            # Whole blocks, where the rate allows it, so that direct I/O stays possible.
            most = self._limit.nbytes_max
            part = data[start : start + (most // BLOCK * BLOCK or most)]
            await self._limit.take(len(part))
            await self.inner.write(part)
            start += len(part)
