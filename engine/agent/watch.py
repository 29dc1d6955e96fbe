"""Noticing the death of a process: by its pidfd where the kernel has them, else by looking every second.

A closed socket is no death: forked loader workers keep it open, and a trainer may reconnect.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from everstep.memory.process import Process

LOOK_S = 1.0


class Watch:
    """Calls ``died`` once on the running loop after ``process`` has ended (soon, if it has already)."""

    def __init__(self, process: Process, died: Callable[[], None]) -> None:
        self._process = process
        self._died = died
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._fd = -1
        try:
            self._fd = os.pidfd_open(process.pid)
        except (OSError, AttributeError):
            self._look()
            return
        self._loop.add_reader(self._fd, self._look)
        self._loop.call_soon(
            self._look
        )  # the id may have been another process's before the descriptor was made

    def _look(self) -> None:
        if not self._process.alive():
            self.stop()
            self._loop.call_soon(self._died)
        elif self._fd < 0:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
