"""Starting the training job under torchrun, watching it, and killing it: a rank, or the whole node.

Only processes that this one started are ever killed: torchrun, its descendants, and the agent that the job's
own ranks named; each by its process id together with its start time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import EverstepError
from ..memory.process import Process
from .journal import Life, read_lives

POLL_S = 0.02
WAIT_S = 120.0
"""Bound of every wait for the job to get somewhere."""
DEATH_S = 20.0
LOG_TAIL_LINES = 25
RESTARTS_MAX = 3
STEP_SECONDS_MIN = 0.04
"""On a fast machine the job would be over before it could be killed half way."""


class JobFailed(EverstepError):
    """The training job ended, or hung, where the story did not mean it to."""


class Job:
    """One launch of the job on ``ranks`` local ranks. Used from one thread."""

    def __init__(
        self,
        *,
        root: Path,
        out: Path,
        log: Path,
        ranks: int,
        steps: int,
        flush_every: int,
        rate_bytes_per_s: float | None = None,
        environment: Mapping[str, str],
        tick: Callable[[Job], None] | None = None,
    ) -> None:
        self.root = root
        self.out = out
        self.log = log
        self.ranks = ranks
        self._tick = tick
        self._before = [len(read_lives(out, rank)) for rank in range(ranks)]
        self._agents: dict[int, Process] = {}
        arguments = [
            "--root",
            str(root),
            "--out",
            str(out),
            "--steps",
            str(steps),
            "--flush-every",
            str(flush_every),
        ]
        arguments += ["--step-seconds", str(STEP_SECONDS_MIN)]
        if rate_bytes_per_s is not None:
            arguments += ["--rate", str(rate_bytes_per_s)]
        with log.open("wb") as stream:
            self._torchrun = subprocess.Popen(
                [*_torchrun(ranks), "-m", "everstep.demo.train", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )

    def lives(self, rank: int) -> list[Life]:
        """The processes that this launch has had for ``rank`` so far."""
        return read_lives(self.out, rank)[self._before[rank] :]

    def newest_lives(self) -> list[Life]:
        """The newest process of each rank that has one."""
        return [lives[-1] for rank in range(self.ranks) if (lives := self.lives(rank))]

    def completed(self) -> int:
        """The newest step that all ranks have completed in this launch; 0 before any."""
        newest = [max((life.newest for life in self.lives(rank)), default=0) for rank in range(self.ranks)]
        return min(newest)

    def wait(self, what: str, until: Callable[[], bool]) -> None:
        """Until ``until()``. Raises JobFailed if the job ends first, or after WAIT_S."""
        end = time.monotonic() + WAIT_S
        while True:
            ended = self._torchrun.poll() is not None
            if until():
                return
            self._look()
            if ended:
                raise self._failed(f"the job ended while the story waited for {what}")
            if time.monotonic() > end:
                raise self._failed(f"the job did not get to {what} within {WAIT_S:g} s")
            time.sleep(POLL_S)

    def finish(self) -> None:
        """Until the job ends by itself, well. Raises JobFailed."""
        self.wait("its end", lambda: self._torchrun.poll() is not None)
        self._look()
        if self._torchrun.returncode != 0:
            raise self._failed(f"the job failed with exit code {self._torchrun.returncode}")

    def kill_rank(self, rank: int) -> float:
        """SIGKILL one rank's process; the time of it."""
        process = self.lives(rank)[-1].process
        at = time.time()
        _kill(process)
        return at

    def kill_node(self) -> float:
        """SIGKILL torchrun, every rank and the agent; returns the time when all of them are dead."""
        self._look()
        victims = _descendants(self._torchrun.pid)
        at = time.time()
        self._torchrun.kill()
        victims += [process for process in self._agents.values() if process not in victims]
        for process in victims:
            _kill(process)
        self._torchrun.wait(DEATH_S)
        self._await_death(victims)
        return at

    def end_agents(self) -> None:
        """End the agents of a finished job, which would linger for a while."""
        self._look()
        for process in self._agents.values():
            _kill(process)
        self._await_death(list(self._agents.values()))

    def _look(self) -> None:
        """Remember the agents that the ranks named, and tell whoever watches."""
        for life in self.newest_lives():
            if life.agent_pid is not None and life.agent_pid not in self._agents:
                process = Process.of(life.agent_pid)
                if process is not None and life.agent_pid not in {x.process.pid for x in self.newest_lives()}:
                    self._agents[life.agent_pid] = process
        if self._tick is not None:
            self._tick(self)

    def _await_death(self, victims: list[Process]) -> None:
        end = time.monotonic() + DEATH_S
        while alive := [process.pid for process in victims if process.alive()]:
            if time.monotonic() > end:
                raise self._failed(f"processes {alive} did not die within {DEATH_S:g} s")
            time.sleep(POLL_S)

    def _failed(self, message: str) -> JobFailed:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return JobFailed(message, found="\n".join(["the end of its log:", *lines]))


def _torchrun(ranks: int) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(
            "--nnodes=1",
            f"--nproc-per-node={ranks}",
            f"--max-restarts={RESTARTS_MAX}",
            "--monitor-interval=0.1",
        ),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
    ]


def _kill(process: Process) -> None:
    if process.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _descendants(pid: int) -> list[Process]:
    """The living descendants of a process, by /proc; those that end meanwhile are left out."""
    found: list[Process] = []
    todo = [pid]
    while todo:
        parent = todo.pop()
        for task in _numbers(f"/proc/{parent}/task"):
            for child in _children(parent, task):
                process = Process.of(child)
                if process is not None:
                    found.append(process)
                todo.append(child)
    return found


def _numbers(directory: str) -> list[int]:
    try:
        return [int(name) for name in os.listdir(directory)]
    except FileNotFoundError:
        return []


def _children(pid: int, task: int) -> list[int]:
    try:
        return [int(text) for text in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
