"""How fast a node's agent may send, all its connections together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from everstep.errors import BadOption, Closed

from .stream import PIECE_BYTES

BUCKET_S = 0.1
"""The bucket holds what the rate gives in this time: the most by which any stretch of time can exceed it."""
BYTES_PER_S_LEAST = 64 << 10
"""A smaller rate, shared by some senders, could not be told from a peer that is stuck."""
SLICE_BYTES_MIN = 4 << 10


class Rate:
    """Bytes become free at ``bytes_per_s`` (None: at once), for whoever asks first. Any thread may call.

    Over any time T at most ``bytes_per_s * (T + BUCKET_S)`` bytes are let through, and one slice. ``clock`` gives
    seconds.
    """

    def __init__(self, bytes_per_s: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        if bytes_per_s is not None and not BYTES_PER_S_LEAST <= bytes_per_s < float("inf"):
            raise BadOption(
                "the rate at which snapshots are sent to other nodes",
                found=f"{bytes_per_s} bytes/s",
                expected=f"at least {BYTES_PER_S_LEAST}",
            )
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._paid_until = clock() - BUCKET_S
        """The moment at which all bytes taken so far have become free. Guarded by ``_lock``."""

    @property
    def slice_bytes(self) -> int:
        """How much to take at once, so that what is sent is even."""
        if self._bytes_per_s is None:
            return PIECE_BYTES
        return min(PIECE_BYTES, max(SLICE_BYTES_MIN, int(self._bytes_per_s * BUCKET_S)))

    def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` are free, and take them. Closed after :meth:`close`, at once."""
        if self._bytes_per_s is not None:
            with self._lock:
                self._paid_until = (
                    max(self._paid_until, self._clock() - BUCKET_S) + nbytes / self._bytes_per_s
                )
                due = self._paid_until
            while (wait := due - self._clock()) > 0 and not self._closed.wait(wait):
                pass
        if self._closed.is_set():
            raise Closed("nothing is sent to other nodes any more")

    def close(self) -> None:
        """Whoever waits, or asks later, is refused."""
        self._closed.set()
