"""Giving an arena its memory beside what its process does: the first slot's first, and not while one is written."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .header import Fixed
from .mapping import HUGE_BYTES, Mapping
from .room import BLOCK_BYTES, reserve

PIECE_BYTES = 4 << 20
"""Given at once, in some 5 ms: a snapshot that is begun meanwhile shares processors and memory so long."""
POLL_S = 0.002
YIELD_S = 1.0
"""Longest pause for a snapshot: some take their time (copies behind a step)."""


class Populating:
    """What gives the file behind ``fd``, mapped as ``pages``, its memory. ``writing`` says whether a slot is being
    written now. One thread at a time starts and ends it; any may wait."""

    def __init__(
        self, fd: int, path: Path | None, fixed: Fixed, pages: Mapping, writing: Callable[[], bool]
    ) -> None:
        self._fd, self._path, self._fixed, self._pages, self._writing = fd, path, fixed, pages, writing
        self._thread: threading.Thread | None = None
        self._reserved, self._first, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._reserved.set()
        self._no_room: BaseException | None = None
        self._first_end = -(-fixed.data_offset(1) // HUGE_BYTES) * HUGE_BYTES
        self._first_begun, self._taking = threading.Event(), threading.Lock()
        self._of_first = iter(range(0))
        """Where pieces of the first slot begin that nobody has taken. Guarded by ``_taking``."""
        self._waited = False
        """Whether the snapshot that is being written has been waited for long enough."""

    def start(self, *, reserving: bool) -> None:
        """Begin, on a thread; with ``reserving``, a file that has not all its memory gets that first."""
        behind = reserving and os.fstat(self._fd).st_blocks * BLOCK_BYTES < self._fixed.nbytes
        if behind:
            self._reserved.clear()
        target = self._reserve_and_populate if behind else self._populate
        self._thread = threading.Thread(target=target, name="everstep-populate", daemon=True)
        self._thread.start()

    def await_reserved(self) -> None:
        """Until all memory is reserved. MemoryTooSmall where others took it meanwhile."""
        self._reserved.wait()
        if self._no_room is not None:
            raise self._no_room

    def await_first_slot(self, within_s: float) -> None:
        """Until the first slot has its memory, or ``within_s`` seconds have passed. Who waits helps."""
        until = time.monotonic() + within_s
        if self._thread is None or not self._first_begun.wait(within_s):
            return
        while time.monotonic() < until and self._give_next():
            pass
        self._first.wait(max(0.0, until - time.monotonic()))

    def stop(self) -> None:
        """Reserve no more."""
        self._stop.set()

    def await_stopped(self) -> None:
        """Until the file is not used any more (after :meth:`stop`)."""
        self._reserved.wait()

    def join(self) -> None:
        """Until the thread has ended, which it soon does once the mapping was closed."""
        if self._thread is not None:
            self._thread.join()

    def forget(self) -> None:
        """In a forked child, where nobody reserves."""
        self._reserved = threading.Event()
        self._reserved.set()

    def _reserve_and_populate(self) -> None:
        try:
            reserve(self._fd, self._fixed.nbytes, self._path and self._path.parent, self._stop)
        except BaseException as error:
            self._no_room = error
            self._first_begun.set()
            self._first.set()
            return
        finally:
            self._reserved.set()
        self._populate()

    def _populate(self) -> None:
        self._of_first = iter(range(0, self._first_end, PIECE_BYTES))
        self._first_begun.set()
        try:
            while self._give_next():
                pass
        finally:
            self._first.set()
        for begin in range(self._first_end, self._fixed.nbytes, PIECE_BYTES):
            self._give(begin, begin + PIECE_BYTES)

    def _give_next(self) -> bool:
        """One more piece of the first slot; False where none is left."""
        with self._taking:
            begin = next(self._of_first, None)
        if begin is not None:
            self._give(begin, min(begin + PIECE_BYTES, self._first_end))
        return begin is not None

    def _give(self, begin: int, end: int) -> None:
        until = time.monotonic() + YIELD_S
        while (writing := self._writing()) and not self._waited:
            if self._stop.wait(POLL_S):
                return
            self._waited = time.monotonic() >= until
        self._waited = writing
        if not self._stop.is_set():
            self._pages.populate(begin, end)
