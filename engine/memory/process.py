"""Identity of a process: a process id alone is reused, with the start time and the boot it is not.

A process is judged by the kernel, never by a socket or a lock that a forked child may keep open. Ids are
those of this process's own pid namespace: all processes that share an arena must see one another in /proc.
"""

from __future__ import annotations

import functools
import os
import select
from dataclasses import dataclass
from pathlib import Path


@functools.lru_cache(maxsize=1)
def boot_id() -> str:
    """The kernel's random id of this boot; "" where it cannot be read (then boots are not told apart)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """(state letter, start time in clock ticks since boot) of ``pid``; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read(4096)
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in brackets, which may itself hold spaces and brackets.
    fields = text[text.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[19])


@dataclass(frozen=True)
class Process:
    """``start_time`` is in clock ticks since boot; ``boot`` is the kernel's boot id."""

    pid: int
    start_time: int
    boot: str

    @classmethod
    def current(cls) -> Process:
        """This process. Not cached by itself: a fork makes another process of the same program."""
        return _current(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process that has ``pid`` now; None if there is none, or only a zombie."""
        found = _stat(pid)
        if found is None or found[0] in "ZXx":
            return None
        return cls(pid, found[1], boot_id())

    def alive(self) -> bool:
        """Whether this very process still runs. A zombie is dead: it will not touch memory again. A process
        that may not be looked at counts as alive."""
        if self.pid <= 0 or self.boot != boot_id():
            return False
        if self.pid == os.getpid():  # of pins that are looked at during each snapshot most are our own
            return self == Process.current()
        try:
            found = _stat(self.pid)
        except OSError:
            return True
        return found is not None and found[0] not in "ZXx" and found[1] == self.start_time

    def wait_dead(self, timeout_s: float) -> bool:
        """Wait until the process has ended, at most ``timeout_s``; whether it has."""
        try:
            fd = os.pidfd_open(self.pid)
        except OSError:
            return not self.alive()
        try:
            if not self.alive():  # the id was reused before the descriptor was made
                return True
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            return bool(poll.poll(timeout_s * 1000)) or not self.alive()
        finally:
            os.close(fd)


@functools.lru_cache(maxsize=1)
def _current(pid: int) -> Process:
    found = _stat(pid)
    assert found is not None, "this process is not in /proc"
    return Process(pid, found[1], boot_id())
