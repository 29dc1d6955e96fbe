"""One rank of one life of the job: load, train with a snapshot every step, and die as the plan says.

A node dies whole: its agent, its other ranks and this one, by their process ids, from the very place in the code that
the plan names.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import everstep
from everstep.backends import points as backend_points
from everstep.memory import points as memory_points

from .training import Training

POLICY: dict[str, Any] = {
    "full_every": None,
    "linger_s": 20.0,
    "rank_timeout_s": 20.0,
    "slot_timeout_s": 30.0,
    "close_timeout_s": 20.0,
    "commit_timeout_s": 8.0,
    "failures_max": None,
    "heartbeat_s": 1.0,
}
GONE_S = 60.0
"""What keeps a rank of a lost node from going on after it sent the signals; it never lasts that long."""


@dataclass(frozen=True)
class Fate:
    """How a node dies in one life, after ``steps`` whole steps of it.

    ``where``: "after" a step's call has returned, "before" the next one's call, at a ``point`` inside of it (its
    ``count``-th time), in the "load", or wherever its "agent" comes to ``point``, at the latest after ``steps`` steps.
    """

    node: int
    where: str
    steps: int
    point: str = ""
    count: int = 1


@dataclass(frozen=True)
class Place:
    """A simulated node, as its processes see it."""

    name: str
    arenas: str
    runtime: str
    domain: str = ""
    address: str = "127.0.0.1"
    """At which the other nodes' agents reach it."""
    netns: str = ""


@dataclass(frozen=True)
class Life:
    """What one launch does. ``places``: by rank; ``steps``: the last step of training; ``stops``: steps after which to
    wait for the launcher's word. ``plain``: without everstep."""

    root: str
    out: str
    kind: str
    steps: int
    places: tuple[Place, ...] = ()
    numbers: tuple[int, ...] = ()
    """By rank the number of its node: what a fate speaks of."""
    memory: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    fates: tuple[Fate, ...] = ()
    plain: bool = False
    flush: bool = False
    """Make the last step durable at the end."""
    whole: bool = False
    """Say after the load and each step what all ranks hold together."""
    stops: tuple[int, ...] = ()
    save_at: tuple[int, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    inner: Callable[[int, Life], None] | None = None
    """Called in each rank before it trains: what a test needs there."""


class Journal:
    """One line a fact, one ``write`` a line: whoever is killed leaves whole lines."""

    def __init__(self, out: str, rank: int) -> None:
        path = os.path.join(out, f"rank-{rank}.jsonl")
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def put(self, kind: str, **facts: Any) -> None:
        line = {"kind": kind, "at": time.monotonic(), "pid": os.getpid(), **facts}
        os.write(self._fd, (json.dumps(line) + "\n").encode())


def live(rank: int, world: int, life: Life) -> None:
    """One rank's part of one life."""
    journal = Journal(life.out, rank)
    log = (Path(life.out) / f"rank-{rank}.stacks").open("w")
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    (Path(life.out) / f"pid-{rank}").write_text(str(os.getpid()))
    if life.inner is not None:
        life.inner(rank, life)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            training = Training(life.kind, rank, world)
            if life.plain:
                for _ in range(life.steps):
                    training.step()
                journal.put("done", hashes=training.hashes())
            else:
                _Rank(rank, life, training, journal, caught).run()
        except BaseException as error:
            journal.put("error", error=f"{type(error).__name__}: {error}")
        journal.put("warned", texts=[str(one.message) for one in caught])


class _Rank:
    def __init__(
        self, rank: int, life: Life, training: Training, journal: Journal, caught: list[Any]
    ) -> None:
        self.rank, self.life, self.training, self.journal, self.caught = rank, life, training, journal, caught
        self.place = life.places[rank]
        self.ckpt: everstep.Checkpointer | None = None
        self.told = 0
        self.fate = next((f for f in life.fates if f.node == life.numbers[rank]), None)
        if self.fate is not None and life.numbers.index(self.fate.node) != rank:
            self.fate = None  # the first of the node's ranks is the one that kills it
        os.environ.update(
            life.environment,
            EVERSTEP_NODE=self.place.name,
            EVERSTEP_RUNTIME_DIR=self.place.runtime,
            EVERSTEP_ADDRESS=self.place.address,
        )
        if self.fate is not None and self.fate.where == "agent":
            os.environ["EVERSTEP_AGENT_POINTS"] = f"kill:{self.fate.point}::{self.fate.count}"

    def run(self) -> None:
        life, training = self.life, self.training
        memory = everstep.Memory(path=self.place.arenas, domain=self.place.domain or None, **life.memory)
        policy = everstep.Policy(**{**POLICY, **life.policy})
        self.ckpt = ckpt = everstep.Checkpointer(life.root, policy=policy, memory=memory)
        if self.fate is not None and self.fate.where == "load":
            self._arm(self.fate)
        start = ckpt.load(training.state) or 0
        self._loaded(start)
        self._maybe_die("load", 0)  # it never came to the point
        for step in range(start + 1, life.steps + 1):
            training.step()
            done = step - start - 1
            self._maybe_die("before", done)
            if self.fate is not None and self.fate.where == "point" and self.fate.steps == done:
                self._arm(self.fate)
            if step in life.save_at:
                ckpt.save(step, training.state).wait(timeout_s=30)
            else:
                ckpt.step(step, training.state)
            self._passed(step)
            self._maybe_die("after", done + 1)
            self._maybe_die("point", done)  # the step never came there
            self._maybe_die("agent", done)
            if step == start + 1:
                self._watch_agent()
            if step in life.stops:
                self._wait(step)
        self.journal.put("done", hashes=training.hashes())
        ckpt.close(flush=life.flush)
        self.journal.put("closed")

    def _maybe_die(self, where: str, done: int) -> None:
        if self.fate is not None and self.fate.where == where and self.fate.steps == done:
            self._die(f"{where} {done} steps")

    def _loaded(self, start: int) -> None:
        assert self.ckpt is not None
        found = self.ckpt.recovery
        facts: dict[str, Any] = {"tier": None, "skipped": []}
        if found is not None:
            facts = {"tier": found.tier, "skipped": list(found.skipped), "recovery": repr(found)}
            facts["sources"] = dict(getattr(found, "sources", None) or {})
        whole = self.training.whole() if self.life.whole else None
        self.journal.put("loaded", step=start, whole=whole, **facts)

    def _passed(self, step: int) -> None:
        assert self.ckpt is not None
        new = [str(one.message) for one in self.caught[self.told :]]
        self.told += len(new)
        whole = self.training.whole() if self.life.whole else None
        self.journal.put("step", step=step, whole=whole, agent=self.ckpt.agent_pid, warned=new)

    def _wait(self, step: int) -> None:
        """Until the launcher says so."""
        word = Path(self.life.out) / f"go-{step}"
        until = time.monotonic() + GONE_S
        while not word.exists() and time.monotonic() < until:
            time.sleep(0.005)

    # -- dying

    def _arm(self, fate: Fate) -> None:
        left = fate.count

        def fire(name: str, detail: str) -> None:
            nonlocal left
            if name == fate.point:
                left -= 1
                if left == 0:
                    self._die(f"at {name} {detail}")

        backend_points.hook = memory_points.hook = fire

    def _watch_agent(self) -> None:
        """Where the agent dies by itself, the node dies with it."""
        assert self.ckpt is not None
        pid = self.ckpt.agent_pid
        if self.fate is None or self.fate.where != "agent" or pid is None:
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._die("its agent was gone")

        def watch() -> None:
            select.select([fd], [], [])
            self._die(f"its agent came to {self.fate.point if self.fate else ''}")

        threading.Thread(target=watch, daemon=True).start()

    def _die(self, how: str) -> None:
        """The whole node: agent first, so that nothing is sent any more, then the ranks."""
        self.journal.put("dies", how=how)
        agent = self.ckpt.agent_pid if self.ckpt is not None else None
        mine = self.life.numbers[self.rank]
        others = [r for r, number in enumerate(self.life.numbers) if number == mine and r != self.rank]
        pids = [agent] if agent is not None else []
        pids += [int((Path(self.life.out) / f"pid-{other}").read_text()) for other in others]
        for pid in [*pids, os.getpid()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(GONE_S)
