"""Simulated nodes on one machine, and the lives of a job on them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from everstep.memory.arena import Arena
from everstep.memory.directory import find_arenas
from everstep.memory.header import Kind
from everstep.memory.process import Process

from tests.chaos.processes import Family, kill
from tests.matrix import launch

from .job import Life, Place, live

SHM = Path("/dev/shm")
LIFE_S = 100.0
VERDICT_S = 45.0
"""Far longer than every wait of the job's policy: who says nothing by then hangs."""
POLL_S = 0.02


class Node:
    """One simulated node: its memory, its runtime directory, its name. ``renew`` replaces it by a fresh one."""

    def __init__(self, number: int, base: Path, shm: Path, domain: str = "") -> None:
        self.number = number
        self.domain = domain
        self._base, self._shm = base, shm
        self.generation = 0
        self.address = "127.0.0.1"
        self.netns = ""
        self._make()

    def _make(self) -> None:
        self.name = f"{self._base.name}-n{self.number}g{self.generation}"
        self.arenas = self._shm / f"n{self.number}g{self.generation}"
        self.runtime = self._base / f"runtime-n{self.number}g{self.generation}"
        self.arenas.mkdir(exist_ok=True)
        self.runtime.mkdir(exist_ok=True)
        self.family = Family(f"EVERSTEP_RUNTIME_DIR={self.runtime}\0", 0)

    @property
    def place(self) -> Place:
        return Place(self.name, str(self.arenas), str(self.runtime), self.domain, self.address, self.netns)

    def agents(self) -> list[Process]:
        return self.family.agents()

    def end(self) -> None:
        """SIGKILL for whatever runs there but the ranks, which the launcher ends."""
        kill(self.agents())

    def lose(self, *, renamed: bool) -> None:
        """What was there is gone; the next one is fresh, under the same name or another one."""
        self.end()
        shutil.rmtree(self.arenas)
        logs = sorted(self.runtime.rglob("agent.log"))
        for log in logs:
            shutil.copy(log, self._base / f"lost-{self.name}-{time.monotonic_ns()}.log")
        shutil.rmtree(self.runtime)
        self.generation += renamed
        self._make()

    def snapshots(self, *kinds: Kind) -> set[tuple[int, int, int]]:
        """(saved rank, incarnation, step) in this node's arenas."""
        found = set()
        for path in self.arenas.rglob("*.arena"):
            for info in find_arenas(path.parent, *kinds):
                if info.path == path:
                    with Arena.attach(path) as arena:
                        found |= {(info.rank, one.incarnation, one.step) for one in arena.snapshots()}
        return found

    def protected(self) -> tuple[int, int]:
        """The newest (incarnation, step) that its agent calls protected; (0, 0) if none."""
        found = (0, 0)
        for directory in {path.parent for path in self.arenas.rglob("*.arena")}:
            for info in find_arenas(directory, Kind.OWN):
                if info.path is not None:
                    with Arena.attach(info.path) as arena:
                        found = max(found, arena.protected or found)
        return found


@dataclass
class Lived:
    """What one rank said in one life."""

    loaded: dict[str, Any] | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    dies: str | None = None
    error: str | None = None
    hashes: dict[str, str] | None = None
    closed: bool = False
    warned: list[str] = field(default_factory=list)

    @property
    def newest(self) -> int:
        """The last step whose call returned, or the one that was loaded."""
        return self.steps[-1]["step"] if self.steps else (self.loaded or {"step": 0})["step"]

    @classmethod
    def read(cls, out: Path, rank: int) -> Lived:
        lived = cls()
        try:
            lines = (out / f"rank-{rank}.jsonl").read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return lived
        for fact in map(json.loads, lines):
            if fact["kind"] == "loaded":
                lived.loaded = fact
            elif fact["kind"] == "step":
                lived.steps.append(fact)
            elif fact["kind"] == "dies":
                lived.dies = fact["how"]
            elif fact["kind"] == "error":
                lived.error = fact["error"]
            elif fact["kind"] == "done":
                lived.hashes = fact["hashes"]
            elif fact["kind"] == "closed":
                lived.closed = True
            elif fact["kind"] == "warned":
                lived.warned = fact["texts"]
        return lived


class Cluster:
    """``count`` nodes, and the one run on them. ``close`` ends and removes everything."""

    def __init__(self, base: Path, count: int, domains: Sequence[str] = ()) -> None:
        self.base = base
        self.root = base / "run"
        self.shm = SHM / f"everstep-test-{secrets.token_hex(6)}"
        self.shm.mkdir(mode=0o700)
        domains = domains or [""] * count
        self.nodes = [Node(number, base, self.shm, domains[number]) for number in range(count)]
        self.lives = 0
        self.hung: list[str] = []
        self.running: launch.Job | None = None
        self._out = base

    def close(self) -> None:
        if self.running is not None:
            self.running.end(0.1)
        for node in self.nodes:
            node.end()
        shutil.rmtree(self.shm, ignore_errors=True)

    # -- lives

    def start(
        self, numbers: Sequence[int], *, enter: Callable[[int], str] | None = None, **life: Any
    ) -> Path:
        """Launch ranks, one on each node of ``numbers`` (a node may come several times); where they write."""
        self.lives += 1
        self._out = out = self.base / f"life-{self.lives}"
        out.mkdir()
        made = Life(
            root=str(self.root),
            out=str(out),
            places=tuple(self.nodes[number].place for number in numbers),
            numbers=tuple(numbers),
            **life,
        )
        self.running = launch.Job(len(numbers), live, made, enter=enter)
        return out

    def finish(self, *, grace_s: float = 0.0) -> list[Lived]:
        """Until all ranks ended, or one died and ``grace_s`` later the launcher killed the others; what they said."""
        job = self.running
        assert job is not None
        try:
            self._await(job, grace_s)
        finally:
            for process in job.processes:
                process.kill()
            job.end(10.0)
            self.running = None
        return [Lived.read(self._out, rank) for rank in range(len(job.processes))]

    def live(self, numbers: Sequence[int], *, grace_s: float = 0.0, **life: Any) -> list[Lived]:
        self.start(numbers, **life)
        return self.finish(grace_s=grace_s)

    def kill_node(self, number: int, numbers: Sequence[int]) -> None:
        """SIGKILL for the node's agent and its ranks in the life that runs on ``numbers``."""
        assert self.running is not None
        self.nodes[number].end()
        for rank, place in enumerate(numbers):
            if place == number:
                self.running.processes[rank].kill()

    def steps_of(self, rank: int) -> list[dict[str, Any]]:
        return Lived.read(self._out, rank).steps

    def await_step(self, step: int, ranks: int) -> None:
        """Until all ranks' calls for ``step`` have returned."""
        self.until(
            lambda: all(
                lived.newest >= step or lived.error
                for lived in (Lived.read(self._out, r) for r in range(ranks))
            ),
            f"step {step} on all ranks",
        )

    def go(self, step: int) -> None:
        """Let the ranks go on that wait after ``step``, one of the life's ``stops``."""
        (self._out / f"go-{step}").touch()

    def warnings(self, rank: int) -> list[str]:
        """What the rank was warned of in this life."""
        return [text for step in self.steps_of(rank) for text in step["warned"]]

    def until(self, look: Callable[[], Any], what: str, timeout_s: float = VERDICT_S) -> Any:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if found := look():
                return found
            time.sleep(POLL_S / 4)
        raise AssertionError(f"not within {timeout_s:g} s: {what}\n{self.told()}")

    def _await(self, job: launch.Job, grace_s: float) -> None:
        began = time.monotonic()
        left = {pipe.fileno(): pipe for pipe in job.pipes}
        death: float | None = None
        while left:
            for pipe in wait(list(left.values()), POLL_S):
                assert not isinstance(pipe, int) and hasattr(pipe, "recv")
                try:
                    good, value = pipe.recv()
                    if not good:
                        self.hung.append(f"life {self.lives}: a rank failed: {value}")
                except EOFError:
                    death = death or time.monotonic()
                left.pop(pipe.fileno())
            now = time.monotonic()
            if death is not None and now - death >= grace_s:
                return
            if now - began > LIFE_S:
                self._say_where(job)
                return

    def _say_where(self, job: launch.Job) -> None:
        for process in job.processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        self.hung.append(f"life {self.lives}: some ranks say nothing")

    # -- what is there

    def durable(self) -> list[str]:
        """Whatever decides for a checkpoint on disk, or could."""
        return [
            str(path.relative_to(self.root))
            for path in sorted(self.root.glob("checkpoints/**/manifest-*.json"))
            if '"manifest"' in path.read_text()
        ]

    def told(self, lines: int = 30) -> str:
        """The ends of the agents' logs and the ranks' last words."""
        texts = [f"== {path}\n{path.read_text()[-2000:]}" for path in sorted(self._out.glob("*.stacks"))]
        for rank in range(len(list(self._out.glob("rank-*.jsonl")))):
            lived = Lived.read(self._out, rank)
            warned = [text for step in lived.steps for text in step["warned"]]
            texts.append(f"rank {rank}: {lived.loaded} {lived.newest} {lived.dies} {lived.error} {warned}")
        for path in [*sorted(self.base.rglob("agent.log")), *sorted(self.base.glob("lost-*.log"))]:
            texts.append(f"== {path}\n" + "\n".join(path.read_text().splitlines()[-lines:]))
        return "\n".join(texts)
