"""How much memory processes hold beyond the arenas' slots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

INTERVAL_S = 0.02
ARENA_MARKS = (".arena", "memfd:")
"""Mappings whose name holds one of these are slots."""


def resident_bytes(pid: int) -> int:
    """Resident memory of ``pid`` without arenas; 0 if it is gone."""
    return _held(pid, "Rss:")[0]


def proportional_bytes(pids: Sequence[int]) -> tuple[int, int]:
    """(without arenas, all) of some processes together: what several of them share counts once among them. A child
    that has not become a program of its own yet shows its parent's memory, and is not counted."""
    outside, arenas = 0, 0
    memories = {_memory_of(pid): pid for pid in reversed(pids)}
    for pid in memories.values():
        one = _held(pid, "Pss:")
        outside, arenas = outside + one[0], arenas + one[1]
    return outside, outside + arenas


def _memory_of(pid: int) -> tuple[str, ...]:
    """What the kernel counts of the memory of ``pid``: the same for two that share it (after vfork), and no others."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ()
    return tuple(line for line in lines if line.startswith("Vm"))


def _held(pid: int, field: str) -> tuple[int, int]:
    """(other memory, arenas) of ``pid``; nothing if it is gone."""
    held = {False: 0, True: 0}
    arena = False
    try:
        text = Path(f"/proc/{pid}/smaps").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0, 0
    for line in text.splitlines():
        head = line.split(None, 1)[0]
        if not head.endswith(":"):
            arena = any(mark in line for mark in ARENA_MARKS)
        elif head == field:
            held[arena] += int(line.split()[1]) * 1024
    return held[False], held[True]


class PeakWatch:
    """The greatest sum of some processes' :func:`resident_bytes` while the block runs, looked at every 20 ms
    by a thread; or, with :meth:`of`, the greatest of each number that ``look`` gives. Looking costs time: nothing is
    timed meanwhile."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._look: Callable[[], Sequence[int]] = lambda: [sum(map(resident_bytes, pids))]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peaks: list[int] = []

    @classmethod
    def of(cls, look: Callable[[], Sequence[int]]) -> PeakWatch:
        watch = cls(())
        watch._look = look
        return watch

    @property
    def peak_bytes(self) -> int:
        return self.peaks[0]

    def __enter__(self) -> PeakWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            seen = list(self._look())
            self.peaks = [max(pair) for pair in zip(self.peaks or seen, seen, strict=True)]
            if self._stop.wait(INTERVAL_S):
                return
