"""How much memory processes hold beyond the arenas' slots."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

INTERVAL_S = 0.02
ARENA_MARKS = (".arena", "memfd:")
"""Mappings whose name holds one of these are slots."""


def resident_bytes(pid: int) -> int:
    """Resident memory of ``pid`` without arenas; 0 if it is gone."""
    total, counts = 0, True
    try:
        text = Path(f"/proc/{pid}/smaps").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    for line in text.splitlines():
        head = line.split(None, 1)[0]
        if not head.endswith(":"):
            counts = not any(mark in line for mark in ARENA_MARKS)
        elif counts and head == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


class PeakWatch:
    """The greatest sum of some processes' :func:`resident_bytes` while the block runs, looked at every 20 ms
    by a thread. Looking costs time: nothing is timed meanwhile."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> PeakWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, sum(resident_bytes(pid) for pid in self._pids))
            if self._stop.wait(INTERVAL_S):
                return
