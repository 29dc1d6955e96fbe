"""What a worker measures of one system in one workload: saves, cold loads, memory. Each load is compared, bit for bit.

With several ranks a sample is the slowest rank's, and nothing begins before all ranks are there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common import Mismatch, drop_caches
from ..memory import PeakWatch, proportional_bytes
from ..stall import COMPUTE_RATIO, Compute
from ..state import require_equal
from .api import Job, Session, State, System
from .processes import own_processes

KEEP = 2
"""Steps whose files stay."""
WARM_UPS = 3
"""Saves after the first, before those that count: everything is made, every slot is touched."""
WARM_UP_S = 5.0
"""No further one begins so long after the first save began."""
REPEATS_S = 8.0
"""No further save, or load, begins so long after the first that counts: systems that take minutes are measured once."""
EQUAL = "every load compared: equal, bit for bit"


@dataclass
class Found:
    """What a worker gives back: seconds by work and by floor, ``numbers`` that are no times, and what else is told
    of a system."""

    works: dict[str, list[float]] = field(default_factory=dict)
    floors: dict[str, list[float]] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] | None = None
    timelines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    checked: str = ""
    cold_by: str = ""
    size_bytes: int = 0
    tensors: int = 0
    scale: dict[str, Any] | None = None
    version: str = ""

    def add(self, work: str, seconds: float) -> None:
        self.works.setdefault(work, []).append(seconds)


@dataclass
class Bench:
    """One worker's task. ``options``: the job's; ``token``: the mark of the worker's own processes; ``memory``: to look
    at memory, and at nothing else."""

    system: System
    state: State
    directory: Path
    rank: int = 0
    world: int = 1
    repeats: int = 3
    turn: int = 0
    memory: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    token: str = ""
    found: Found = field(default_factory=Found)

    def can(self, work: str) -> bool:
        return work in self.system.works

    def job(self, directory: Path | None = None) -> Job:
        return Job(directory or self.directory, self.state, self.rank, self.world, self.options)

    def meet(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            import torch.distributed as dist

            dist.barrier()

    def slowest(self, seconds: float) -> float:
        """The greatest of all ranks' ``seconds``."""
        if self.world == 1:
            return seconds
        import torch
        import torch.distributed as dist

        slowest = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    def total(self, number: int) -> int:
        """The sum of all ranks' ``number``."""
        if self.world == 1:
            return number
        import torch
        import torch.distributed as dist

        total = torch.tensor([number])
        dist.all_reduce(total)
        return int(total)

    def timed(self, work: Callable[[], Any]) -> float:
        """Seconds of ``work``, begun together, of the slowest rank."""
        self.meet()
        begun = time.perf_counter()
        work()
        return self.slowest(time.perf_counter() - begun)

    def while_time_is_left(self, times: int, seconds: float, begun: float | None = None) -> Iterator[int]:
        """1, 2, ... ``times``, on all ranks alike; none is begun ``seconds`` after ``begun``. Default: after the first,
        which always comes."""
        for number in range(1, 1 + times):
            if begun is not None and self.slowest(time.perf_counter() - begun) >= seconds:
                return
            begun = time.perf_counter() if begun is None else begun
            yield number

    def quiet(self) -> None:
        """Nobody pays for what another has left to be written."""
        if self.rank == 0:
            os.sync()
        self.meet()

    def first_only(self, work: Callable[[], Any]) -> None:
        """``work`` on rank 0 while the others wait."""
        if self.rank == 0:
            work()
        self.meet()

    def require_equal(self, expected: list[str], what: str) -> None:
        """Raises Mismatch, on all ranks, unless the state is as ``expected`` on each."""
        problem = ""
        try:
            require_equal(self.state.hashes(), expected, what)
        except Mismatch as error:
            problem = str(error)
        if self.slowest(float(bool(problem))):
            raise Mismatch(problem or f"{what}: another rank's tensors came back with other bytes")


def measure(bench: Bench) -> None:
    """Open, first save, warm-ups, saves, loads; or memory alone. Raises Mismatch where bytes come back changed."""
    if bench.memory:
        if bench.can("save"):
            bench.found.memory = _memory(bench)
        return
    saves = _Saves(bench)
    with opened(bench) as session:
        if bench.can("save"):
            saves.run(session)
        else:
            saves.once(session)
        bench.found.timelines |= session.timelines()
        bench.found.notes += session.notes()
        if bench.can("load"):
            session.saved()
            _loads(bench, session, saves.step)
            bench.found.timelines |= session.timelines()


@contextmanager
def opened(bench: Bench, directory: Path | None = None) -> Iterator[Session]:
    """A session, opened on all ranks; opening is timed the first time."""
    sessions: list[Session] = []
    took = bench.timed(lambda: sessions.append(bench.system.open(bench.job(directory))))
    if directory is None:
        bench.found.add("open", took)
    try:
        yield sessions[0]
    finally:
        sessions[0].close()


class _Saves:
    """The saves of one session, steps 1, 2, ..."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self.step = bench, 0
        self._compute: Compute | None = None

    def once(self, session: Session) -> None:
        """One save that is not timed: for systems that only load."""
        self.step += 1
        session.save(self.step).wait()

    def run(self, session: Session) -> None:
        bench = self._bench
        begun = time.perf_counter()
        first = self._save(session)
        bench.found.add("first_blocking", first[0])
        bench.found.add("first_durable", first[1])
        for _ in bench.while_time_is_left(WARM_UPS, WARM_UP_S, begun):
            self._save(session)
        if bench.system.defers:
            self._compute = Compute(copy_seconds(bench.state) * COMPUTE_RATIO)
        for _ in bench.while_time_is_left(bench.repeats, REPEATS_S):
            beside = self._save_beside_computing(session) if bench.system.defers else None
            blocking, durable = self._save(session)
            synced = durable if bench.system.syncs else durable + self._sync()
            bench.found.add("blocking", blocking if beside is None else beside)
            bench.found.add("blocking_alone", blocking)
            bench.found.add("durable", durable)
            bench.found.add("durable_synced", synced)

    def _begin(self, session: Session) -> None:
        if self.step >= KEEP:
            session.forget(self.step + 1 - KEEP)
        self.step += 1
        self._bench.state.change()
        self._bench.quiet()

    def _save(self, session: Session) -> tuple[float, float]:
        """(blocking, until written) of a save after which nothing is computed."""
        self._begin(session)
        self._bench.meet()
        begun = time.perf_counter()
        pending = session.save(self.step)
        self._settle(session)
        blocked = time.perf_counter() - begun
        pending.wait()
        written = time.perf_counter() - begun
        return self._bench.slowest(blocked), self._bench.slowest(written)

    def _save_beside_computing(self, session: Session) -> float:
        """The call, and what the optimizer had to wait for after a step's computing."""
        compute = self._compute or Compute(0)
        self._begin(session)
        self._bench.meet()
        begun = time.perf_counter()
        pending = session.save(self.step)
        call = time.perf_counter() - begun
        compute.run()
        begun = time.perf_counter()
        self._settle(session)
        blocked = call + time.perf_counter() - begun
        pending.wait()
        return self._bench.slowest(blocked)

    def _settle(self, session: Session) -> None:
        session.settle()
        if self._bench.state.optimizer is not None:
            self._bench.state.optimizer.step()  # changes nothing; hooks wait in it

    def _sync(self) -> float:
        bench = self._bench
        return bench.timed(lambda: sync_tree(bench.directory) if bench.rank == 0 else None)


def _loads(bench: Bench, session: Session, step: int) -> None:
    """Cold loads of the last step; the first one of a process counts as any other."""
    expected = bench.state.hashes()
    for number in bench.while_time_is_left(bench.repeats, REPEATS_S):
        bench.state.scramble()
        bench.first_only(lambda: drop(bench))
        bench.found.add("cold_load", bench.timed(lambda: session.load(step)))
        bench.require_equal(expected, f"cold load {number} of round {bench.turn + 1}")
    bench.found.checked = EQUAL


def drop(bench: Bench) -> None:
    """Make reads of the system's files cold."""
    os.sync()  # what is not written yet cannot be dropped
    bench.found.cold_by = drop_caches(files_below(bench.directory))


def _memory(bench: Bench) -> dict[str, int] | None:
    """Memory of two saves and a load of a process that has done nothing before (what a system keeps from one save to
    the next would be taken for the state's); nothing is timed."""
    directory = bench.directory / "memory"
    bench.first_only(directory.mkdir)
    pids = own_processes(bench.token)
    before = proportional_bytes(pids)
    watch = PeakWatch.of(lambda: proportional_bytes(own_processes(bench.token)))
    with watch if bench.rank == 0 else nullcontext():  # its processes are all ranks'
        with opened(bench, directory) as session:
            for step in (1, 2):
                bench.state.change()
                pending = session.save(step)
                session.settle()
                pending.wait()
            if bench.can("load"):
                session.saved()
                expected = bench.state.hashes()
                bench.state.scramble()
                session.load(2)
                bench.require_equal(expected, "the load whose memory was watched")
        bench.meet()
    if bench.rank:
        return None
    outside, peak = (max(0, seen - was) for seen, was in zip(watch.peaks, before, strict=True))
    copy = bench.state.nbytes * bench.world
    stages = bench.can("async") and peak >= copy
    beyond = outside if bench.system.slots else peak - copy if stages else peak
    return {"peak_extra_bytes": peak, "peak_beyond_copy_bytes": beyond}


def copy_seconds(state: State) -> float:
    """About how long a plain copy of the state takes."""
    import torch

    from .states import local

    tensors = [local(tensor) for tensor in state.tensors().values()]
    rooms = [torch.empty_like(tensor) for tensor in tensors]
    seconds = []
    for _ in range(2):
        begun = time.perf_counter()
        torch._foreach_copy_(rooms, tensors)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def files_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]


def sync_tree(directory: Path) -> None:
    """fsync of every file and directory below, and of ``directory`` itself."""
    for path in (*directory.rglob("*"), directory):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            continue
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


__all__ = ["Bench", "Found", "drop", "measure", "opened", "sync_tree"]
