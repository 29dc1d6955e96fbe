"""What each rank of the job writes down as it goes, one JSON line a fact, and how the story reads it.

One ``write`` call per line on a file opened for appending: a killed process leaves whole lines only. The
reading side needs no torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..memory.process import Process


def journal_path(out: Path, rank: int) -> Path:
    return out / f"rank-{rank:05d}.jsonl"


class Journal:
    """The writing side: one per rank and process."""

    def __init__(self, out: Path, rank: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(journal_path(out, rank), flags, 0o644)
        self._agent: int | None = None

    def started(self, *, step: int, tier: str | None, seconds: float, skipped: tuple[str, ...] = ()) -> None:
        """This process is about to train from ``step`` on (0: from nothing, ``tier`` None)."""
        me = Process.current()
        process = {"pid": me.pid, "start_time": me.start_time, "boot": me.boot}
        self._put("start", process=process, step=step, tier=tier, seconds=seconds, skipped=list(skipped))

    def stepped(self, step: int, loss: float, agent_pid: int | None) -> None:
        """``step`` was handed to the checkpointer. The loss is written exactly."""
        if agent_pid is not None and agent_pid != self._agent:
            self._agent = agent_pid
            self._put("agent", pid=agent_pid)
        self._put("step", step=step, loss=loss.hex())

    def ended(self, fingerprints: dict[str, str]) -> None:
        """Training is over; what the live objects then held."""
        self._put("end", fingerprints=fingerprints)

    def _put(self, kind: str, **facts: Any) -> None:
        os.write(self._fd, (json.dumps({"kind": kind, "at": time.time(), **facts}) + "\n").encode())


@dataclass
class Life:
    """One process of a rank, from its journal."""

    process: Process
    started_at: float
    start_step: int
    tier: str | None
    load_seconds: float
    skipped: list[str]
    agent_pid: int | None = None
    losses: dict[int, str] = field(default_factory=dict)
    stepped_at: dict[int, float] = field(default_factory=dict)
    fingerprints: dict[str, str] | None = None

    @property
    def newest(self) -> int:
        """The newest step that this process completed, or the one it started from."""
        return max(self.losses, default=self.start_step)


def read_lives(out: Path, rank: int) -> list[Life]:
    """The processes of ``rank``, oldest first. A missing journal has none."""
    lives: list[Life] = []
    for fact in _facts(journal_path(out, rank)):
        if fact["kind"] == "start":
            lives.append(
                Life(
                    process=Process(**fact["process"]),
                    started_at=fact["at"],
                    start_step=fact["step"],
                    tier=fact["tier"],
                    load_seconds=fact["seconds"],
                    skipped=fact["skipped"],
                )
            )
        elif fact["kind"] == "agent":
            lives[-1].agent_pid = fact["pid"]
        elif fact["kind"] == "step":
            lives[-1].losses[fact["step"]] = fact["loss"]
            lives[-1].stepped_at[fact["step"]] = fact["at"]
        elif fact["kind"] == "end":
            lives[-1].fingerprints = fact["fingerprints"]
    return lives


def _facts(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    for line in lines[:-1]:
        yield json.loads(line)
