"""The processes of one seed, found by what only they have in their environment. Nothing else is ever
signalled."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from everstep.memory.process import Process

DEATH_S = 20.0
AGENT = b"everstep.agent.main"


class Family:
    """Every process with ``marker`` in its environment, but for ``root`` (the launcher's server)."""

    def __init__(self, marker: str, root: int) -> None:
        self._marker = marker.encode()
        self._root = root

    def all(self) -> list[Process]:
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) not in (self._root, os.getpid()):
                with contextlib.suppress(OSError):
                    if self._marker in Path(f"/proc/{entry}/environ").read_bytes():
                        process = Process.of(int(entry))
                        if process is not None:
                            found.append(process)
        return sorted(found, key=lambda process: (process.start_time, process.pid))

    def agents(self) -> list[Process]:
        return [process for process in self.all() if AGENT in command(process)]

    def ranks(self, launcher: int) -> list[Process]:
        """All but agents and ``launcher``: this launch's ranks, and those that a killed launcher left."""
        return [
            process for process in self.all() if process.pid != launcher and AGENT not in command(process)
        ]


def command(process: Process) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/cmdline").read_bytes()
    return b""


def send(processes: Iterable[Process], number: signal.Signals) -> None:
    for process in processes:
        if process.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


def kill(processes: list[Process]) -> None:
    """SIGKILL, and wait until they are gone."""
    send(processes, signal.SIGKILL)
    until = time.monotonic() + DEATH_S
    while any(process.alive() for process in processes):
        assert time.monotonic() < until, "killed processes do not die"
        time.sleep(0.005)
