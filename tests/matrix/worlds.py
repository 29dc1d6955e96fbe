"""A run that is killed and started again under another mesh, again and again; drawn from a seed, judged by content.

``python -m tests.matrix.worlds SEED...`` runs seeds by hand; ``--keep`` leaves what they wrote.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import everstep
from everstep.memory.directory import clean, find_arenas
from everstep.places import locate
from everstep.store.findings import Kind

from tests.chaos.disk import Key, damage, findings, standing
from tests.chaos.processes import Family, kill
from tests.seeds import run_given

from . import launch, meshes
from .worlds_job import Fate, Life, live, wrong_values

SHM = Path("/dev/shm")
VERDICT_S = 60.0
"""Far longer than every wait of the job's policy: who says nothing by then hangs."""
LIFE_S = 90.0
LEFT_S = 15.0
ARENAS_MAX = 3
POLL_S = 0.02

SMALL = ("one", "ddp2", "fsdp2", "fsdp3", "hsdp2x2", "tp2", "fsdp2xtp2", "pp2")
ALL = tuple(meshes.MESHES)
POINTS = (
    "slot.begin", "slot.mid_copy", "slot.copied", "slot.publish.before", "slot.publish.locked", "slot.publish.after",
    "arena.reserve.before", "arena.name.before", "take.locked", "pin.locked", "owner.locked",
)  # fmt: skip
"""Of the trainer's thread: opening, loading, snapshots."""
AGENT_POINTS = (
    "seal.before", "seal.locked", "seal.after", "flush.image.first", "flush.image.done", "vote.before", "vote.after",
    "manifest.before", "manifest.after", "agent.accepted", "agent.begun", "agent.voted", "agent.commit.before",
    "agent.committed", "agent.settled", "agent.rotate.before", "rotate.tombstoned", "rotate.settled",
    "rotate.deleted.votes", "rotate.deleted.images", "rotate.deleted.decisions", "rotate.deleted.tombstone",
    "write.before", "link.before", "link.after", "fsync.before", "fsync.after", "rename.before", "unlink.after",
)  # fmt: skip


@dataclass(frozen=True)
class After:
    """What happens between two lives. A rank's fate begins it, or the driver's SIGKILL after some time."""

    kill_after_s: float | None
    grace_s: float | None
    """From the first death to the death of the others; None: when they have all said what they think of it."""
    kill_agent: bool
    erase: str
    damage: str | None
    pause_s: float
    draw: int


@dataclass(frozen=True)
class Plan:
    seed: int
    lives: tuple[Life, ...]
    after: tuple[After, ...]

    @classmethod
    def of(cls, seed: int, *, lives: int | None = None, small: bool = False) -> Plan:
        draw = random.Random(f"worlds {seed}")
        count = lives or draw.randint(4, 7)
        two = draw.random() < 0.25
        names = SMALL if small or draw.random() < 0.6 else ALL
        made = [_life(draw, names, two, last=number == count - 1) for number in range(count)]
        return cls(seed, tuple(made), tuple(_after(draw, life) for life in made[:-1]))


def _life(draw: random.Random, names: tuple[str, ...], two: bool, *, last: bool) -> Life:
    mesh = draw.choice(names)
    world = meshes.MESHES[mesh][0]
    agent = draw.choice(("process", "process", "inline"))
    fates: list[Fate] = []
    point = ""
    kind = "end" if last else draw.choice(("steps", "steps", "point", "point", "agent", "time", "load"))
    who = draw.sample(range(world), draw.choice((1, 1, world)))
    if kind == "steps":
        fates = [Fate(rank, steps=draw.randint(1, 9)) for rank in who]
    elif kind == "point":
        points = POINTS if agent == "process" or draw.random() < 0.5 else AGENT_POINTS
        fates = [Fate(rank, draw.choice(points), draw.choice((1, 2, 5, 9, 20))) for rank in who]
    elif kind == "load":
        fates = [Fate(rank, draw.choice(("pin.locked", "", "take.locked")), steps=0) for rank in who]
        fates = [Fate(f.rank, f.point, 1, None if f.point else 0) for f in fates]
    elif kind == "agent" and agent == "process":
        point = f"{draw.choice(AGENT_POINTS)}::{draw.choice((1, 1, 2, 3))}"
    nodes = tuple(draw.choice("ab") if two else "a" for _ in range(world))
    return Life(
        mesh=mesh,
        steps=draw.randint(4, 9) if last else draw.choice((0, 2, 6, 10, 14, 14)),
        flush_every=draw.randint(2, 5),
        agent=agent,
        copy=draw.choice(("eager", "eager", "overlap")),
        rate=draw.choice((None, None, 100_000.0, 20_000.0)),
        together=two or draw.random() < 0.6,
        nodes=nodes,
        fates=tuple(fates),
        agent_point=point,
    )


def _after(draw: random.Random, life: Life) -> After:
    return After(
        kill_after_s=None if life.fates else draw.uniform(0.0, 6.0),
        grace_s=None if draw.random() < 0.15 else draw.choice((0.0, 0.0, draw.uniform(0.0, 1.0))),
        kill_agent=draw.random() < 0.35,
        erase=draw.choice(("", "", "", "", "", "", "all", "some")),
        damage=draw.choice((None, None, None, "flip", "shorten", "remove")),
        pause_s=draw.choice((0.0, 0.0, 0.2, 2.5)),
        draw=draw.randrange(1 << 30),
    )


@dataclass
class Floor:
    """What the next load must at least find: ``memory`` counts as long as it is not erased."""

    disk: int = 0
    memory: int = 0
    exact: bool = True

    def step(self) -> int:
        return max(self.disk, self.memory)


@dataclass
class Lived:
    """What one rank said in one life."""

    loaded: dict[str, Any] | None = None
    step: int | None = None
    dies: str | None = None
    error: str | None = None
    closed: bool = False
    warned: list[str] = field(default_factory=list)


def read_lived(out: Path, rank: int) -> Lived:
    lived = Lived()
    try:
        lines = (out / f"rank-{rank}.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return lived
    for fact in map(json.loads, lines):
        if fact["kind"] == "loaded":
            lived.loaded = fact
            lived.step = fact["step"]
        elif fact["kind"] == "step":
            lived.step = fact["step"]
        elif fact["kind"] == "dies":
            lived.dies = fact["how"]
        elif fact["kind"] == "error":
            lived.error = fact["error"]
        elif fact["kind"] == "closed":
            lived.closed = True
        elif fact["kind"] == "warned":
            lived.warned = fact["texts"]
    return lived


class Run:
    """The state of one seed's run."""

    def __init__(self, plan: Plan, base: Path) -> None:
        self.plan = plan
        self.base = base
        self.root = base / "run"
        self.runtime = base / "runtime"
        self.runtime.mkdir()
        self.family = Family(f"EVERSTEP_RUNTIME_DIR={self.runtime}\0", 0)
        self.floor = Floor()
        self.damaged: dict[Key, str] = {}
        self.undo: tuple[Path, bytes] | None = None
        self.undone: Key = (0, 0)
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.began = time.monotonic()
        self.number = 0
        self.resumed: list[str] = []
        self.holders: set[str] = set()

    def note(self, text: str) -> None:
        self.notes.append(f"{time.monotonic() - self.began:6.2f} s, life {self.number}: {text}")

    def problem(self, text: str) -> None:
        self.note(f"PROBLEM {text}")
        self.problems.append(f"life {self.number}: {text}")

    def directories(self) -> dict[str, Path]:
        top = SHM / f"everstep-{os.getuid()}"
        return {node: top / locate(self.root, node=self.node(node)).run_key for node in "ab"}

    def node(self, letter: str) -> str:
        return f"{self.base.name}-{letter}"

    # -- one life

    def live(self, life: Life, after: After | None) -> None:
        out = self.base / f"life-{self.number}"
        out.mkdir()
        world = meshes.MESHES[life.mesh][0]
        told = {**life.__dict__, "nodes": tuple(self.node(letter) for letter in life.nodes)}
        self.note(f"{life}")
        job = launch.Job(world, live, Life(**told), self.root, self.runtime, out)
        try:
            killed = self._until_over(job, out, after)
        finally:
            kept = [process.exitcode for process in job.processes]
            for process in job.processes:
                process.kill()
            job.end(10.0)
        lived = [read_lived(out, rank) for rank in range(world)]
        self.note(f"ended {kept}, {[(one.step, one.dies, one.error, one.closed) for one in lived]}")
        self._judge(life, lived, killed=killed)

    def _until_over(self, job: launch.Job, out: Path, after: After | None) -> bool:
        """Whether anybody was killed, or was to die, before all ended well."""
        began = time.monotonic()
        moment = after.kill_after_s if after else None
        begun: float | None = None
        left = {pipe.fileno(): pipe for pipe in job.pipes}
        first_death: float | None = None
        while left:
            now = time.monotonic()
            if begun is None and len(list(out.glob("rank-*.jsonl"))) == len(job.pipes):
                begun = now
            if moment is not None and begun and now - begun > moment and first_death is None:
                victims = [p for p in job.processes if p.is_alive()]
                draw = random.Random(after.draw if after else 0)
                for victim in draw.sample(victims, draw.choice((1, len(victims))) if victims else 0):
                    victim.kill()
                first_death = now
            for pipe in wait(list(left.values()), POLL_S):
                assert not isinstance(pipe, int) and hasattr(pipe, "recv")
                try:
                    good, value = pipe.recv()
                    if not good:
                        self.note(f"a rank failed: {value}")
                        first_death = first_death or now
                except EOFError:
                    first_death = first_death or now
                left.pop(pipe.fileno())
            if first_death is not None:
                grace = after.grace_s if after else None
                if grace is not None and now - first_death >= grace:
                    return True
                if grace is None and now - first_death > VERDICT_S:
                    self._hung(job)
                    return True
            elif now - began > LIFE_S + 20 * len(job.pipes):
                self._hung(job)
                return True
        return first_death is not None

    def _hung(self, job: launch.Job) -> None:
        for process in job.processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        self.problem("some ranks say nothing")

    def _judge(self, life: Life, lived: list[Lived], *, killed: bool) -> None:
        loads = [one.loaded for one in lived if one.loaded is not None]
        if not self.holders <= set(life.nodes):
            self.floor.memory = 0  # no rank runs where it lies
        for rank, one in enumerate(lived):
            if one.loaded and one.loaded["wrong"]:
                self.problem(f"WRONG CONTENT: rank {rank} loaded {one.loaded}")
            if one.error and not killed and not self._expected(life, one.error):
                self.problem(f"rank {rank}: {one.error}")
        if len({load["step"] for load in loads}) > 1:
            self.problem(f"ranks loaded different steps: {[load['step'] for load in loads]}")
        for load in loads[:1]:
            step = load["step"] or 0
            self.resumed.append(f"{step} {load['tier']}")
            if step < self.floor.step():
                self.problem(f"loaded {step} ({load['tier']}, {load['skipped']}), but floor {self.floor}")
        if len(loads) == len(lived):
            self.floor.memory = self.floor.memory if loads[0]["tier"] == "disk" else loads[0]["step"] or 0
            self.floor.memory = min(self.floor.memory, loads[0]["step"] or 0)
            self.floor.disk = min(self.floor.disk, loads[0]["step"] or 0)
            newest = min(one.step or 0 for one in lived)
            slack = (1 if life.copy == "overlap" else 0) + (1 if len(set(life.nodes)) > 1 else 0)
            if any(one.step != loads[0]["step"] for one in lived):
                self.floor.memory = max(self.floor.memory, newest - slack)
                self.holders = set(life.nodes)
            if all(one.closed for one in lived):
                self.floor = Floor(disk=newest)
        elif not killed and not any(one.error for one in lived):
            self.problem("not all ranks loaded")

    def _expected(self, life: Life, error: str) -> bool:
        """With the only checkpoint damaged and no memory, a refusal is right; and where each agent dies, to say so."""
        if life.agent_point and "the agent was lost again and again" in error:
            return True
        return self.undo is not None and self.floor.step() == 0 and error.startswith("Damaged")

    # -- between two lives

    def between(self, after: After) -> None:
        if after.kill_agent:
            kill(self.family.all())
            kill(self.family.all())
            self.note("agents killed")
        time.sleep(after.pause_s)
        if self.undo is not None:
            self._restore()
        keys = [key for key in standing(self.root) if key not in self.damaged]
        self.floor.disk = max(self.floor.disk, keys[-1][1]) if keys else self.floor.disk
        self.check_disk(keys)
        self.check_memory()
        draw = random.Random(after.draw)
        if after.damage and keys:
            self._damage(keys, after.damage, draw)
        if after.erase:
            self._erase(after.erase, draw)
        self.note(f"{after}: standing {keys}, {self.floor}, memory {self.memory_bytes()}")

    def _damage(self, keys: list[Key], how: str, draw: random.Random) -> None:
        if self.family.all() or (len(keys) == 1 and self.number == len(self.plan.after) - 1):
            return  # an agent that lives may be rotating it; nothing would be left for the last life
        key = keys[-1]
        top = self.root / "checkpoints"
        before = {path: path.read_bytes() for path in top.rglob("*") if path.is_file()}
        self.damaged[key] = damage(self.root, key, how, draw)
        self.note(self.damaged[key])
        changed = [path for path, data in before.items() if not path.exists() or path.read_bytes() != data]
        self.floor.disk = keys[-2][1] if len(keys) > 1 else 0
        if len(keys) == 1:
            self.undo, self.undone = (changed[0], before[changed[0]]), key
        if not [f for f in findings(self.root) if (f.incarnation, f.step) == key]:
            self.problem(f"fsck does not see what was done: {self.damaged[key]}")

    def _restore(self) -> None:
        assert self.undo is not None
        path, data = self.undo
        if path.parent.exists():
            path.write_bytes(data)
        self.undo = None
        self.damaged.pop(self.undone)
        self.note(f"{path.name} is as it was")

    def _erase(self, what: str, draw: random.Random) -> None:
        for directory in self.directories().values():
            infos = find_arenas(directory)
            some = infos if what == "all" else draw.sample(infos, min(len(infos), 1))
            for info in some:
                assert info.path is not None
                info.path.unlink(missing_ok=True)
        self.floor.memory = 0

    def check_memory(self) -> None:
        """What former lives left in memory does not add up: a rank has its room, and that of what it loaded."""
        for directory in self.directories().values():
            ranks = [info.rank for info in find_arenas(directory)]
            if most := [rank for rank in set(ranks) if ranks.count(rank) > ARENAS_MAX]:
                self.problem(f"rank(s) {most} have more than {ARENAS_MAX} arenas: {ranks}")

    def memory_bytes(self) -> int:
        paths = [path for directory in self.directories().values() for path in directory.glob("*")]
        return sum(path.stat().st_size for path in paths)

    def check_disk(self, keys: list[Key]) -> None:
        busy = bool(self.family.all())
        for found in findings(self.root):
            if found.kind is Kind.UNDECIDED or (found.incarnation, found.step) in self.damaged:
                continue
            if not busy or found in findings(self.root):
                self.problem(f"fsck: {found}")
        for key in keys[-1:]:
            self.check_values(key[1])

    def check_values(self, step: int) -> None:
        try:
            wrong = wrong_values(everstep.load(self.root, step=step), step)
        except everstep.errors.EverstepError as error:
            if step not in {key[1] for key in standing(self.root)}:
                return  # an agent that lives has rotated it
            wrong = [] if self.damaged else [f"{type(error).__name__}: {error}"]
        if wrong:
            self.problem(f"WRONG CONTENT: step {step} on disk: {wrong}")

    # -- the end

    def end(self) -> None:
        keys = [key for key in standing(self.root) if key not in self.damaged]
        if not keys or keys[-1][1] != self.floor.disk:
            self.problem(f"the last step {self.floor.disk} is not on disk: {keys}")
        for _, step in keys:
            self.check_values(step)
        # What a former life's agent still reads when the last rank closes, only its death sets free.
        busy = self.plan.lives[-1].agent == "inline" and bool(self.family.all())
        until = time.monotonic() + LEFT_S
        while self.family.all() and time.monotonic() < until:
            time.sleep(POLL_S)
        if left := self.family.all():
            self.problem(f"agents are left: {left}")
        self.check_disk([])
        used = {self.node(letter) for letter in self.plan.lives[-1].nodes}
        for letter, directory in self.directories().items():
            if busy:
                clean(directory, keep=lambda info: False)
            stays = sorted(path.name for path in directory.glob("*"))
            if stays and self.node(letter) in used:
                self.problem(f"arenas are left on node {letter}: {stays}")

    def clear(self) -> None:
        kill(self.family.all())
        for directory in self.directories().values():
            shutil.rmtree(directory, ignore_errors=True)


def run_seed(seed: int, base: Path, *, lives: int | None = None, small: bool = False) -> Run:
    run = Run(Plan.of(seed, lives=lives, small=small), base)
    try:
        for life, after in zip(run.plan.lives, (*run.plan.after, None), strict=True):
            run.live(life, after)
            if after is not None:
                run.between(after)
            run.number += 1
        run.end()
    except Exception:
        run.problem(traceback.format_exc())
    finally:
        run.clear()
    return run


def told(run: Run) -> str:
    seconds = time.monotonic() - run.began
    meshes_of = ", ".join(life.mesh for life in run.plan.lives)
    head = f"seed {run.plan.seed}: {seconds:.1f} s, {meshes_of}; resumed from {', '.join(run.resumed)}"
    if not run.problems:
        return f"ok   {head}"
    logs = sorted(run.runtime.rglob("agent.log"))
    tails = [f"== {path}\n" + "\n".join(path.read_text().splitlines()[-30:]) for path in logs]
    return "\n".join([f"FAIL {head}", *run.notes, *run.problems, *tails])


def main(arguments: list[str]) -> int:
    return run_given(
        arguments, "worlds", lambda seed, base: run_seed(seed, base, small="--small" in arguments), told
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
