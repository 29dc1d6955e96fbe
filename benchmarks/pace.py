"""How much flushing slows down a training that reads its data from the same disk: without a limit, with a fixed one,
and in the adaptive mode.

A step computes, and reads past the page cache; flushes follow each other without a pause, so that nothing else is
measured. All modes, and training without flushes, are measured in turn within each repeat; a slow-down is against the
training alone of the same repeat.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import everstep
import torch

from .common import MIB, Step, end_run, in_turn, machine, workspace
from .floors import Buffer, raw_write
from .state import BenchState

DATA_BYTES = 1024 * MIB
READ_BYTES = 4 * MIB
READ_S = 0.05
COMPUTE_S = 0.05
"""What a step reads and computes, alone."""
STAGE_S = 12.0
"""How long each mode is measured in each repeat; the first part does not count."""
SETTLE_S = 2.0
FIXED_SHARE = 0.25
"""The fixed limit, as a share of what a flush without one does beside the training."""
COMPUTE_WIDTH = 256


class Work:
    """One training step: so many reads of the data, and so much computing."""

    def __init__(self, data: Path) -> None:
        buffer = Buffer(DATA_BYTES)
        raw_write(data, buffer, direct=True)
        self._fd = os.open(data, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        self._room = mmap.mmap(-1, READ_BYTES)
        self._at = 0
        self._a = torch.rand(COMPUTE_WIDTH, COMPUTE_WIDTH)
        self._reads = self._fit(self._read, READ_S)
        self._products = self._fit(self._compute, COMPUTE_S)

    def step(self) -> None:
        self._read(self._reads)
        self._compute(self._products)

    @property
    def read_bytes(self) -> int:
        return self._reads * READ_BYTES

    def close(self) -> None:
        os.close(self._fd)

    def _read(self, times: int) -> None:
        for _ in range(times):
            os.preadv(self._fd, [self._room], self._at)
            self._at = (self._at + READ_BYTES) % DATA_BYTES

    def _compute(self, times: int) -> None:
        a = self._a
        for _ in range(times):
            a = torch.mm(self._a, a)
            a = a / a.sum()

    @staticmethod
    def _fit(work: Any, seconds: float) -> int:
        """How often ``work`` is done in ``seconds``."""
        work(8)
        began = time.perf_counter()
        times = 0
        while time.perf_counter() - began < 10 * seconds:
            work(4)
            times += 4
        return max(1, round(times * seconds / (time.perf_counter() - began)))


@dataclass
class Mode:
    """A run with its rate, and what was measured: seconds per step and bytes flushed per second, by repeat."""

    name: str
    ckpt: everstep.Checkpointer
    trained: everstep.TrainState
    flushes: bool = True
    step_s: list[float] = field(default_factory=list)
    flushed: list[float] = field(default_factory=list)
    at: int = 1

    def stage(self, work: Work) -> None:
        """Train for a while, with one flush after the other."""
        handle = None
        before, seconds, began = self._bytes(), [], time.perf_counter()
        while (now := time.perf_counter()) - began < STAGE_S:
            work.step()
            took = time.perf_counter() - now
            if now - began > SETTLE_S:
                seconds.append(took)
            self.at += 1
            if self.flushes and (handle is None or handle.done()):
                handle = self.ckpt.save(self.at, self.trained)
            else:
                self.ckpt.step(self.at, self.trained)
        self.step_s.append(statistics.fmean(seconds))
        self.flushed.append((self._bytes() - before) / (time.perf_counter() - began))
        if handle is not None:
            handle.wait()

    def _bytes(self) -> int:
        """What the agent has written of the run so far."""
        lanes: list[dict[str, Any]] = self.ckpt.status()["agent"]["pace"]["lanes"]
        return int(lanes[0]["bytes"])


@contextmanager
def _opened(
    root: Path, name: str, state: BenchState, rate: float | str | None, *, flushes: bool = True
) -> Iterator[Mode]:
    """A new run with one durable checkpoint."""
    trained = everstep.TrainState(model=state.module, optimizer=state.optimizer, rng=False)
    policy = everstep.Policy(
        snapshot_every=None, full_every=None, keep_last=1, linger_s=5.0, rate_bytes_per_s=rate
    )
    ckpt = everstep.Checkpointer(root, memory=everstep.Memory(slots=3), policy=policy)
    agent_pid = None
    try:
        ckpt.load(trained)
        ckpt.save(1, trained).wait()
        agent_pid = ckpt.agent_pid
        yield Mode(name, ckpt, trained, flushes)
    finally:
        ckpt.close(flush=False)
        end_run(root, agent_pid)


def run_pace(size_mib: int, repeats: int, directory: Path | None, tell: Step) -> dict[str, Any]:
    """All measurements of ``bench pace``."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with workspace(directory) as place, ExitStack() as stack:
            tell("making the data")
            work = Work(place / "data")
            stack.callback(work.close)
            state = BenchState(size_mib * MIB)
            alone = stack.enter_context(_opened(place / "alone", "alone", state, None, flushes=False))
            free = stack.enter_context(_opened(place / "free", "no limit", state, None))
            tell("warming up")
            free.stage(work)
            fixed_rate = FIXED_SHARE * free.flushed[-1]
            fixed = stack.enter_context(_opened(place / "fixed", "fixed", state, fixed_rate))
            adaptive = stack.enter_context(_opened(place / "adaptive", "adaptive", state, "adaptive"))
            adaptive.stage(work)
            modes = [alone, free, fixed, adaptive]
            for mode in modes:
                mode.step_s, mode.flushed = [], []
            for turn in range(repeats):
                tell(f"repeat {turn + 1}")
                in_turn(turn, [lambda mode=mode: mode.stage(work) for mode in modes])  # type: ignore[misc]
            return _result(modes, fixed_rate, work.read_bytes, state, place)
    finally:
        torch.set_num_threads(threads)


def _result(
    modes: list[Mode], fixed_rate: float, read_bytes: int, state: BenchState, place: Path
) -> dict[str, Any]:
    alone, *others = modes
    found: dict[str, Any] = {
        "benchmark": "pace",
        "size_bytes": state.nbytes,
        "tensors": len(state.tensors),
        "repeats": len(alone.step_s),
        "step_alone_s": statistics.median(alone.step_s),
        "step_reads_bytes": read_bytes,
        "fixed_bytes_per_s": fixed_rate,
        "modes": [],
        "load_average": list(os.getloadavg()),
        "machine": machine(place),
    }
    for mode in others:
        slower = [a / b - 1 for a, b in zip(mode.step_s, alone.step_s, strict=True)]
        found[f"slowdown_{mode.name.replace(' ', '_')}"] = statistics.median(slower)
        found["modes"].append(
            {
                "name": mode.name,
                "slowdown": statistics.median(slower),
                "slowdown_min": min(slower),
                "slowdown_max": max(slower),
                "flushed_bytes_per_s": statistics.median(mode.flushed),
            }
        )
    return found
