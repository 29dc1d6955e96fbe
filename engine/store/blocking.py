"""Asynchronous storage code for synchronous callers.

One private thread per process runs one event loop, so a call works inside notebooks (whose own loop is
running) and a backend is always used from the same loop. Calls from several threads run side by side.
A forked child gets a thread of its own; it must not use backend objects made before the fork.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from everstep.backends.parallel import answered
from everstep.errors import UsageError

CANCEL_WAIT_S = 10.0
"""How long an interrupted call waits for its coroutine to clean up."""

T = TypeVar("T")


class _Runner:
    """An event loop on a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="everstep-storage", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


_guard = threading.Lock()
_current: _Runner | None = None
"""Guarded by ``_guard``."""


def _after_fork() -> None:
    global _guard, _current
    _guard = threading.Lock()
    _current = None


os.register_at_fork(after_in_child=_after_fork)


def _runner() -> _Runner:
    global _current
    with _guard:
        if _current is None or not _current.thread.is_alive():
            _current = _Runner()
        return _current


def run_blocking(coro: Coroutine[Any, Any, T]) -> T:
    """The result of ``coro``, run on the private loop. An interrupt here cancels it and waits, bounded, for
    its clean-up.

    Raises :class:`UsageError` when called on that loop itself, where waiting could never end.
    """
    runner = _runner()
    if threading.current_thread() is runner.thread:
        coro.close()
        raise UsageError(
            "run_blocking was called on the storage loop itself", hint="Await the coroutine instead"
        )
    ended = threading.Event()

    async def watched() -> T:
        try:
            return await answered(coro)
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(watched(), runner.loop)
    try:
        return future.result()
    except BaseException:
        if not future.done():
            future.cancel()
            ended.wait(CANCEL_WAIT_S)
        raise
