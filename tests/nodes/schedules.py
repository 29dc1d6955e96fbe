"""Nodes are killed at moments drawn from a seed; what the run then is, is compared with the undisturbed one.

``python -m tests.nodes.schedules SEED...`` runs seeds by hand; ``--keep`` leaves what they wrote.
"""

from __future__ import annotations

import functools
import random
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.matrix import launch
from tests.seeds import run_given

from .cluster import Cluster, Lived
from .job import Fate, Life, live

STEPS = 32
POINTS = (
    "slot.begin", "slot.mid_copy", "slot.copied", "slot.publish.before", "slot.publish.locked", "slot.publish.after",
)  # fmt: skip
"""Of the trainer, while it takes a snapshot."""
AGENT_POINTS = (
    "pin.locked", "seal.before", "seal.locked", "seal.after", "peers.offered", "peers.sending", "peers.sent.before",
    "keeper.begun", "keeper.sealed", "keeper.kept.before", "slot.publish.before", "slot.publish.after",
)  # fmt: skip
"""Of the agent, while it sends a rank's snapshot, or keeps another one's."""
SHAPES = {"4x1": (0, 1, 2, 3), "2x2": (0, 0, 1, 1)}


@dataclass(frozen=True)
class Death:
    """How one life ends: its node's fate, how long the launcher takes to kill the rest, and what comes in the place of
    the lost node."""

    fate: Fate
    grace_s: float
    renamed: bool
    erased: bool
    moved: tuple[int, ...]
    """The nodes of the ranks from then on."""


@dataclass(frozen=True)
class Schedule:
    seed: int
    kind: str
    shape: str
    copy: str
    replicas: int
    deaths: tuple[Death, ...]

    @classmethod
    def of(cls, seed: int, *, deaths: int | None = None) -> Schedule:
        draw = random.Random(f"nodes {seed}")
        kind = draw.choice(("ddp", "ddp", "fsdp"))
        shape = draw.choice(("4x1", "4x1", "4x1", "2x2"))
        copy = draw.choice(("eager", "eager", "overlap"))
        replicas = 1 if shape == "2x2" else draw.choice((1, 1, 1, 2))
        made: list[Death] = []
        for _ in range(deaths or draw.randint(2, 4)):
            made.append(_death(draw, SHAPES[shape], made[-1] if made else None))
        return cls(seed, kind, shape, copy, replicas, tuple(made))


def _death(draw: random.Random, places: tuple[int, ...], former: Death | None) -> Death:
    node = draw.choice(sorted(set(places)))
    where = draw.choice(("after", "before", "point", "point", "agent", "agent", "load"))
    if where == "load" and (former is None or not former.erased):
        where = (
            "after"  # there is nothing to load, or another node would be lost before the first is replaced
        )
    # From the second step of a life on, its first one is protected: before that, a further loss may be one too many.
    steps = draw.randint(2, 5)
    point, count = "", 1
    if where == "point":
        point, count = draw.choice(POINTS), draw.choice((1, 1, 2))
    elif where == "agent":
        point, count, steps = draw.choice(AGENT_POINTS), draw.randint(2, 9), 6
        node = (
            former.fate.node if former is not None else node
        )  # it may be at the first step, too early for another
    elif where == "load" and former is not None:
        node, steps, point = former.fate.node, 0, draw.choice(("pin.locked", "arena.reserve.before"))
    moved = list(places)
    if draw.random() < 0.2:
        numbers = sorted(set(places))
        others = dict(zip(numbers, draw.sample(numbers, len(numbers)), strict=True))
        moved = [others[number] for number in places]
    return Death(
        fate=Fate(node, where, steps, point, count),
        grace_s=draw.choice((0.0, 0.0, 0.05, 1.0)),
        renamed=draw.random() < 0.5,
        erased=draw.random() < 0.9,
        moved=tuple(moved),
    )


@functools.cache
def undisturbed(kind: str, world: int, steps: int = STEPS) -> list[dict[str, str]]:
    """The hashes, by rank, of the run that nothing disturbs, without everstep."""
    out = Path(tempfile.mkdtemp(prefix="undisturbed-"))
    try:
        launch.run(world, live, Life(root="", out=str(out), kind=kind, steps=steps, plain=True))
        found = [Lived.read(out, rank) for rank in range(world)]
    finally:
        shutil.rmtree(out)
    hashes = [one.hashes for one in found]
    assert all(hashes), [one.error for one in found]
    return [one for one in hashes if one]


class Run:
    """One schedule, carried out and judged; ``problems`` is what was not as it must be."""

    def __init__(self, schedule: Schedule, base: Path) -> None:
        self.schedule = schedule
        self.cluster = Cluster(base, len(set(SHAPES[schedule.shape])))
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.began = time.monotonic()
        self.floor: int | None = None
        """What the next load must at least find."""

    def note(self, text: str) -> None:
        self.notes.append(f"{time.monotonic() - self.began:6.2f} s, life {self.cluster.lives}: {text}")

    def problem(self, text: str) -> None:
        self.note(f"PROBLEM {text}")
        self.problems.append(f"life {self.cluster.lives}: {text}")

    def carry_out(self) -> None:
        places = SHAPES[self.schedule.shape]
        world = len(places)
        for death in self.schedule.deaths:
            self.note(f"{death}")
            if death.fate.where == "agent":
                self.cluster.nodes[death.fate.node].end()  # the next one is told where to die
            lived = self._live(places, (death.fate,), death.grace_s)
            if not any(one.dies for one in lived):
                self.problem("nobody died")
                return
            self._lower(lived)
            if death.erased:
                self.cluster.nodes[death.fate.node].lose(renamed=death.renamed)
            places = death.moved
            if durable := self.cluster.durable():
                self.problem(f"on disk: {durable}")
            if self.problems:
                return
        lived = self._live(places, (), 0.0)
        self._judge_end(lived, world)

    def _lower(self, lived: list[Lived]) -> None:
        """What this life leaves: all completed steps but one (two), or what it loaded."""
        loaded = [one.loaded["step"] for one in lived if one.loaded]
        if any(one.steps for one in lived):
            newest = max(one.newest for one in lived)
            self.floor = max(newest - (2 if self.schedule.copy == "overlap" else 1), *loaded)
        elif loaded:
            self.floor = loaded[0]

    def _live(self, places: tuple[int, ...], fates: tuple[Fate, ...], grace_s: float) -> list[Lived]:
        memory = {"replicas": self.schedule.replicas, "copy": self.schedule.copy}
        lived = self.cluster.live(
            places, grace_s=grace_s, kind=self.schedule.kind, steps=STEPS, memory=memory, fates=fates
        )
        for one in lived:
            loaded = one.loaded and (one.loaded["step"], one.loaded["tier"], one.loaded["skipped"])
            self.note(f"loaded {loaded}, newest {one.newest}, dies {one.dies}, error {one.error}")
        loads = [one.loaded for one in lived if one.loaded is not None]
        if len({load["step"] for load in loads}) > 1:
            self.problem(f"ranks loaded different steps: {[load['step'] for load in loads]}")
        if self.floor is not None:
            for load in loads:
                if load["step"] < self.floor or load["tier"] != ("memory" if load["step"] else None):
                    self.problem(
                        f"loaded step {load['step']} ({load['tier']}, {load['skipped']}), not {self.floor}"
                    )
        elif any(load["step"] for load in loads):
            self.problem("the first life loaded something")
        self.problems += self.cluster.hung
        return lived

    def _judge_end(self, lived: list[Lived], world: int) -> None:
        if durable := self.cluster.durable():
            self.problem(f"on disk: {durable}")
        for rank, (one, wanted) in enumerate(zip(lived, undisturbed(self.schedule.kind, world), strict=True)):
            if one.error or not one.closed:
                self.problem(f"rank {rank} did not end well: {one.error}")
            elif one.hashes != wanted:
                wrong = sorted(key for key in wanted if (one.hashes or {}).get(key) != wanted[key])
                self.problem(f"WRONG CONTENT: rank {rank}: {wrong}")


def run_schedule(schedule: Schedule, base: Path) -> Run:
    run = Run(schedule, base)
    try:
        run.carry_out()
    except Exception:
        run.problem(traceback.format_exc())
    finally:
        if run.problems:
            run.notes.append(run.cluster.told())
        run.cluster.close()
    return run


def told(run: Run) -> str:
    one = run.schedule
    head = f"seed {one.seed}: {time.monotonic() - run.began:.1f} s, {one.kind} {one.shape} {one.copy} r{one.replicas}"
    if not run.problems:
        return f"ok   {head}"
    return "\n".join([f"FAIL {head}", *run.problems, *run.notes])


def main(arguments: list[str]) -> int:
    return run_given(arguments, "nodes", lambda seed, base: run_schedule(Schedule.of(seed), base), told)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
