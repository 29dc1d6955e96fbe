"""The arena's lock: an flock on the arena's own file, so the kernel frees it when its holder dies."""

from __future__ import annotations

import fcntl
import threading
import time
from types import TracebackType

from .errors import ArenaBusy, ArenaGone

LOCK_WAIT_S_MAX = 5.0
"""Sections under the lock take well below a millisecond; a holder that is stopped must not stop others for
ever."""
_PAUSE_S_MIN = 20e-6
_PAUSE_S_MAX = 2e-3


class FileLock:
    """Excludes threads of this process and other processes. Each opening of the file is one party: a
    descriptor that came from another process must be opened anew first. Not re-entrant."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self._name = name
        self._threads = threading.Lock()

    def retire(self) -> None:
        """The descriptor is closed, or belongs to another process since a fork."""
        self._fd = -1

    def __enter__(self) -> None:
        deadline = time.monotonic() + LOCK_WAIT_S_MAX
        if not self._threads.acquire(timeout=LOCK_WAIT_S_MAX):
            raise self._busy()
        try:
            self._acquire(deadline)
        except BaseException:
            self._threads.release()
            raise

    def _acquire(self, deadline: float) -> None:
        pause = _PAUSE_S_MIN
        while True:
            if self._fd < 0:
                raise ArenaGone(f"{self._name}: closed, or used after a fork")
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise self._busy() from None
                time.sleep(pause)
                pause = min(2 * pause, _PAUSE_S_MAX)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def _busy(self) -> ArenaBusy:
        return ArenaBusy(
            f"{self._name}: its lock was not free within {LOCK_WAIT_S_MAX:g} s",
            hint="A process that uses this arena is stopped (SIGSTOP, debugger); let it go on, or end it",
        )
