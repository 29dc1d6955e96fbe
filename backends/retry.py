"""Trying again what may succeed when tried again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

from .api import Backend, Item, Items, Names, Notes, Writer
from .errors import Permanent, Retryable
from .wrap import Wrapper

T = TypeVar("T")

TRIES_MAX = 6
"""Tries of one operation, the first one included."""

WAIT_S_FIRST = 0.1
WAIT_S_MAX = 10.0
"""Seconds before the second try; doubled for each further one, up to the maximum."""

AFTER_S_MAX = 60.0
"""Seconds for which a store may ask at most ("Retry-After")."""


async def repeat(
    attempt: Callable[[], Awaitable[T]],
    *,
    tries_max: int = TRIES_MAX,
    wait_s_first: float = WAIT_S_FIRST,
    wait_s_max: float = WAIT_S_MAX,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    draw: Callable[[], float] = random.random,
) -> T:
    """Do ``attempt`` until it raises no :class:`Retryable`, or was tried ``tries_max`` times. Waits double and are
    drawn between half and all of that, so that many clients do not come back at once; one that the store asked for
    is kept, up to ``AFTER_S_MAX``."""
    wait_s = wait_s_first
    for _ in range(tries_max - 1):
        try:
            return await attempt()
        except Retryable as error:
            asked_s = min(error.after_s or 0.0, AFTER_S_MAX)
            await sleep(max(wait_s * (0.5 + 0.5 * draw()), asked_s))
            wait_s = min(2 * wait_s, wait_s_max)
    return await attempt()


class Retrying(Wrapper):
    """Repeats an operation that raises :class:`Retryable` (:func:`repeat`). Any other error passes at once; so does
    the last Retryable.

    A listing is gathered before it is handed on, and so repeated as a whole. Opening a writer is repeated;
    what happens on it is not, since only the caller still has the earlier bytes: whoever writes, writes
    again."""

    def __init__(
        self,
        inner: Backend,
        *,
        tries_max: int = TRIES_MAX,
        wait_s_first: float = WAIT_S_FIRST,
        wait_s_max: float = WAIT_S_MAX,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(inner)
        if tries_max < 1:
            raise Permanent(inner.url, f"{tries_max} tries")
        self._tries_max = tries_max
        self._wait_s_first = wait_s_first
        self._wait_s_max = wait_s_max
        self._sleep = sleep
        self._draw = draw

    async def read(self, name: str, nbytes_max: int = 256 << 20) -> bytes:
        return await self._retry(partial(self.inner.read, name, nbytes_max))

    async def read_into(self, name: str, offset: int, view: memoryview) -> None:
        await self._retry(partial(self.inner.read_into, name, offset, view))

    async def size(self, name: str) -> int:
        return await self._retry(partial(self.inner.size, name))

    async def open_writer(
        self, name: str, nbytes: int, notes: Notes | None = None, *, at_most: bool = False
    ) -> Writer:
        return await self._retry(partial(self.inner.open_writer, name, nbytes, notes, at_most=at_most))

    async def write(self, name: str, data: bytes) -> None:
        await self._retry(partial(self.inner.write, name, data))

    async def create(self, name: str, data: bytes) -> None:
        await self._retry(partial(self.inner.create, name, data))

    async def list(self, prefix: str = "") -> AsyncIterator[Item]:
        for item in await self._retry(partial(self._gather, prefix)):
            yield item

    async def list_names(self, prefix: str = "") -> Names:
        return await self._retry(partial(self.inner.list_names, prefix))

    async def delete(self, names: Iterable[str]) -> None:
        await self._retry(partial(self.inner.delete, tuple(names)))

    async def leftovers(self, prefix: str = "") -> Items:
        return await self._retry(partial(self.inner.leftovers, prefix))

    async def discard_leftovers(self, items: Iterable[Item]) -> None:
        await self._retry(partial(self.inner.discard_leftovers, tuple(items)))

    async def _gather(self, prefix: str) -> Items:
        return [item async for item in self.inner.list(prefix)]

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        return await repeat(
            attempt,
            tries_max=self._tries_max,
            wait_s_first=self._wait_s_first,
            wait_s_max=self._wait_s_max,
            sleep=self._sleep,
            draw=self._draw,
        )
