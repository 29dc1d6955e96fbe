"""A rank's signs of life, written into its arena: that the process runs, and what its last step was.

The thread knows nothing of training: a trainer that hangs in a step still beats, and is seen by its last step growing
old. It talks to nobody; whoever wants to know reads the arena.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from .errors import EverstepError
from .memory.arena import Arena

JOIN_S = 1.0
"""The thread only sleeps and stores some words."""

MEAN_STEPS = 8
"""How many steps the mean of their length looks back, about."""


class Heartbeat:
    """``arena`` gives the present one, which may be replaced at any time; None: there is none. It ends by itself once
    the arena is a newer incarnation's. ``stepped`` is called on the trainer's thread. A forked child has no such
    thread, and is not to have one."""

    def __init__(self, arena: Callable[[], Arena | None], incarnation: int, *, interval_s: float) -> None:
        self._arena = arena
        self._incarnation = incarnation
        self._interval_s = interval_s
        self._last: tuple[int, int] | None = None
        self._step_s = 0.0
        self._called: int | None = None
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._beat()
        self._took(0.0)
        self._thread = threading.Thread(target=self._run, name="everstep-heartbeat", daemon=True)
        self._thread.start()

    def called(self) -> None:
        """The trainer comes with a step: what it took ends here, what the engine does with it takes its own time."""
        self._called = time.monotonic_ns()

    def waits(self) -> None:
        """The trainer does nothing but wait for the agent, until its next step is done."""
        self._called = None
        self._took(None)

    def stepped(self, step: int) -> None:
        """The trainer finished ``step`` just now."""
        now = time.monotonic_ns()
        alone_s = 0.0
        if self._last is not None and self._called is not None and step > self._last[0]:
            alone_s = (self._called - self._last[1]) / 1e9 / (step - self._last[0])
        self._called = None
        self._took(alone_s)
        if self._last is not None and step > self._last[0]:
            took = (now - self._last[1]) / 1e9 / (step - self._last[0])
            self._step_s += (took - self._step_s) / (MEAN_STEPS if self._step_s else 1)
        self._last = step, now
        arena = self._arena()
        if arena is not None:
            self._note(arena)

    def close(self) -> None:
        """End the thread. Safe to call again, and in a forked child."""
        if os.getpid() != self._pid:
            return
        self._stop.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._beat()

    def _beat(self) -> None:
        try:
            arena = self._arena()
            if arena is None:
                return
            if (
                arena.info.incarnation > self._incarnation
            ):  # this process went back, and beats for that one now
                self._stop.set()
                return
            arena.beat(self._step_s)
            self._note(arena)
        except (EverstepError, IndexError):
            return  # closed at this moment, to be replaced or for good

    def _took(self, seconds: float | None) -> None:
        try:
            arena = self._arena()
            if arena is not None:
                arena.took(seconds)
        except (EverstepError, IndexError):
            return  # closed: a handle is waited for after the end

    def _note(self, arena: Arena) -> None:
        last = self._last
        if last is not None:
            arena.stepped((self._incarnation, last[0]), last[1])
