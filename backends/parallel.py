"""Several things at once, within a bound."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

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


async def together(work: Iterable[Awaitable[R]]) -> list[R]:
    """All results. The first error ends the rest and is raised; no work is under way any more when this returns."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await ended(tasks)


async def both(one: Awaitable[T], other: Awaitable[R]) -> tuple[T, R]:
    """:func:`together` for two whose results differ in type."""
    work: list[Awaitable[Any]] = [one, other]
    first, second = await together(work)
    return first, second


async def finished(job: concurrent.futures.Future[R]) -> R:
    """The result of a thread's job. When the caller is cancelled, a job that has begun is waited for."""
    waiter = asyncio.wrap_future(job)
    try:
        await asyncio.wait([waiter])
    except asyncio.CancelledError:
        if not job.cancel():
            await settled(waiter)
        raise
    return waiter.result()


async def settled(future: asyncio.Future[Any]) -> None:
    """Wait until ``future`` has ended, whatever its end and however often the caller is cancelled."""
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([future])
    heard(future)


async def answered(work: Awaitable[R]) -> R:
    """``work``, to be run as a task of its own, whose error is taken as heard: whoever waits for it in another thread
    may have given up."""
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(heard)
    return await work


def heard(future: asyncio.Future[Any]) -> None:
    """Take note of the error of one that has ended, which asyncio reports on stderr where nobody does: whoever asked
    may have been cancelled meanwhile."""
    if not future.cancelled():
        future.exception()


async def ended(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel ``tasks`` and wait for their end, whatever it is."""
    waited = list(tasks)
    for task in waited:
        task.cancel()
    await asyncio.gather(*waited, return_exceptions=True)
