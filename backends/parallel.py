"""Several things at once, within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def each(items: Iterable[T], work: Callable[[T], Awaitable[R]], *, limit: int) -> list[R]:
    """``work`` of every item, at most ``limit`` at a time; results in the items' order. The first error stops the rest
    and is raised; no work is under way any more when this returns."""
    todo = list(enumerate(items))
    todo.reverse()
    results: dict[int, R] = {}

    async def worker() -> None:
        while todo:
            index, item = todo.pop()
            results[index] = await work(item)

    tasks = [asyncio.ensure_future(worker()) for _ in range(min(limit, len(todo)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        await ended(tasks)
    return [results[index] for index in sorted(results)]


async def ended(tasks: Iterable[asyncio.Future[R]]) -> None:
    """Cancel ``tasks`` and wait for their end, whatever it is."""
    waited = list(tasks)
    for task in waited:
        task.cancel()
    await asyncio.gather(*waited, return_exceptions=True)
