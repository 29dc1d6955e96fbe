"""The story: one undisturbed run; one that is killed in three ways; then the comparison, bit for bit.

No torch here: the numbers are made in the job's own processes and compared as they wrote them down.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BadOption
from .compare import Comparison, compare_ends, compare_losses
from .disk import Checkpoint, adoptions, damage, forget_memory, look, wipe_memory, written_files
from .job import Job, JobFailed
from .journal import Life, read_lives

STEPS_MIN = 24
RANKS_MAX = 16
SLOW_BYTES_PER_S = 400_000.0
"""Write limit while a flush is to be caught half done: the whole of one then takes about ten seconds."""

Tell = Callable[[str, int], None]
"""Told what is going on, and how many steps were newly completed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """When what happens, in steps."""

    ranks: int
    steps: int
    flush_every: int
    rank_killed_at: int
    node_killed_at: int

    @classmethod
    def make(cls, ranks: int, steps: int) -> Plan:
        if not 1 <= ranks <= RANKS_MAX:
            raise BadOption(
                "the demonstration's number of ranks is out of range",
                found=ranks,
                expected=f"1 to {RANKS_MAX}",
            )
        if steps < STEPS_MIN:
            raise BadOption(
                "too few steps for three incidents", found=steps, expected=f"at least {STEPS_MIN}"
            )
        flush_every = max(2, steps // 10)
        return cls(ranks, steps, flush_every, steps // 4, steps // 2 + flush_every // 2)


@dataclass(frozen=True, slots=True)
class Incident:
    """One kill and what came of it. ``lost`` counts steps that all ranks had completed and that had to be
    computed again; ``seconds`` runs from the kill to the first step that all ranks completed after it, the
    start of new processes included; ``load_seconds`` is the restore alone. ``half_files`` lay on disk of an
    undecided flush."""

    name: str
    tier: str | None
    completed: int
    resumed: int
    lost: int
    seconds: float
    load_seconds: float
    half: Checkpoint | None = None
    half_files: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that has to hold, and what was found."""

    what: str
    holds: bool
    found: str


@dataclass
class Story:
    """What happened. The demonstration succeeded if everything in ``checks`` holds."""

    plan: Plan
    directory: Path
    incidents: list[Incident] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return bool(self.checks) and all(check.holds for check in self.checks)


def tell_story(plan: Plan, directory: Path, tell: Tell) -> Story:
    """Run everything in ``directory`` (empty or absent). Raises JobFailed where the job does not do its
    part."""
    if directory.exists() and any(directory.iterdir()):
        raise BadOption("the demonstration wants an empty directory", found=str(directory))
    directory = directory.resolve()
    story = Story(plan, directory)
    begun = time.monotonic()
    with _runtime() as environment:
        stage = _Stage(plan, directory, environment, tell)
        _undisturbed(stage)
        _disturbed(stage, story)
    _compare(stage, story)
    story.seconds = time.monotonic() - begun
    return story


@contextmanager
def _runtime() -> Iterator[dict[str, str]]:
    """The jobs' environment: the agents' own directory, removed in the end; one thread; the loopback
    device."""
    directory = tempfile.mkdtemp(prefix="everstep-demo-", dir="/var/tmp")
    environment = {
        "EVERSTEP_RUNTIME_DIR": directory,
        "OMP_NUM_THREADS": "1",
        # Else torch hands the dead ranks' addresses to the restarted ones, and the first restart is wasted.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if os.path.isdir("/sys/class/net/lo"):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield environment
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class _Stage:
    """Starts jobs of one plan in one directory, and counts their steps for whoever watches."""

    def __init__(self, plan: Plan, directory: Path, environment: dict[str, str], tell: Tell) -> None:
        self.plan = plan
        self.directory = directory
        self._environment = environment
        self._tell = tell
        self._told = 0

    def root(self, run: str) -> Path:
        return self.directory / run / "run"

    def out(self, run: str) -> Path:
        return self.directory / run / "out"

    def lives(self, run: str) -> list[list[Life]]:
        return [read_lives(self.out(run), rank) for rank in range(self.plan.ranks)]

    def say(self, text: str) -> None:
        self._tell(text, 0)

    @contextmanager
    def job(self, run: str, name: str, *, rate_bytes_per_s: float | None = None) -> Iterator[Job]:
        """A launch of the job; whatever of it is alive at the end of the block is killed."""
        self.out(run).mkdir(parents=True, exist_ok=True)
        job = Job(
            root=self.root(run),
            out=self.out(run),
            log=self.directory / run / f"{name}.log",
            ranks=self.plan.ranks,
            steps=self.plan.steps,
            flush_every=self.plan.flush_every,
            rate_bytes_per_s=rate_bytes_per_s,
            environment=self._environment,
            tick=lambda job: self._count(run, job),
        )
        try:
            yield job
        finally:
            job.kill_node()

    def _count(self, run: str, job: Job) -> None:
        now = job.completed() + (self.plan.steps if run == "disturbed" else 0)
        if now > self._told:
            self._tell("", now - self._told)
            self._told = now


def _undisturbed(stage: _Stage) -> None:
    stage.say("undisturbed run")
    with stage.job("reference", "job") as job:
        job.finish()
    forget_memory(stage.root("reference"))


def _disturbed(stage: _Stage, story: Story) -> None:
    with stage.job("disturbed", "job-1") as job:
        stage.say("disturbed run")
        _kill_one_rank(stage, story, job)
        killed = _lose_node(stage, story, job)
    before = look(stage.root("disturbed")).undecided
    with stage.job("disturbed", "job-2", rate_bytes_per_s=SLOW_BYTES_PER_S) as job:
        _resumed(stage, story, job, killed)
        killed = _lose_node_in_flush(stage, story, job, before)
    with stage.job("disturbed", "job-3") as job:
        _resumed(stage, story, job, killed)
        stage.say("to the end")
        job.finish()
    forget_memory(stage.root("disturbed"))


@dataclass(frozen=True, slots=True)
class _Killed:
    """A kill whose outcome is not known yet. ``lives`` is how many processes rank 0 had before, of the
    run."""

    name: str
    at: float
    completed: int
    durable: Checkpoint | None
    half: Checkpoint | None = None
    half_files: int = 0


def _kill_one_rank(stage: _Stage, story: Story, job: Job) -> None:
    plan, victim = stage.plan, stage.plan.ranks - 1
    job.wait(f"step {plan.rank_killed_at}", lambda: job.completed() >= plan.rank_killed_at)
    stage.say(f"SIGKILL to rank {victim}")
    at = job.kill_rank(victim)
    job.wait("the restart", lambda: _going(job, lives=2))
    before = [job.lives(rank)[0] for rank in range(plan.ranks)]
    completed = min(life.newest for life in before)
    _settle(stage, story, job, _Killed("one rank killed", at, completed, None), life=1)
    incident = story.incidents[-1]
    story.checks.append(
        Check("one rank killed: resumed from memory", incident.tier == "memory", str(incident.tier))
    )
    story.checks.append(
        Check("one rank killed: no completed step lost", incident.lost == 0, f"{incident.lost} lost")
    )


def _lose_node(stage: _Stage, story: Story, job: Job) -> _Killed:
    plan, root = stage.plan, stage.root("disturbed")
    resumed = story.incidents[-1].resumed

    def ripe() -> bool:
        enough = job.completed() >= max(plan.node_killed_at, resumed + plan.flush_every)
        return enough and any(step > resumed for _, step in look(root).committed)

    job.wait(f"step {plan.node_killed_at} and a checkpoint on disk", ripe)
    stage.say("SIGKILL to everything, memory wiped")
    return _end_of_node("node lost", stage, job)


def _lose_node_in_flush(stage: _Stage, story: Story, job: Job, before: tuple[Checkpoint, ...]) -> _Killed:
    """Kill when a flush is half done: something of it lies on disk, and nothing decides it yet.

    ``before`` is what lay undecided before this launch (the first kill may have left something too).
    """
    root = stage.root("disturbed")
    start = story.incidents[-1].resumed

    def begun() -> list[Checkpoint]:
        found = [c for c in look(root).undecided if c not in before]
        return [c for c in found if written_files(root, c)]

    job.wait("a flush that is half done", lambda: bool(begun()) and job.completed() >= start + 3)
    stage.say("SIGKILL to everything in mid flush, memory wiped")
    killed = _end_of_node("node lost during a flush", stage, job)
    halves = begun()
    story.checks.append(
        Check(
            "half a flush lay on disk, undecided", len(halves) == 1, ", ".join(map(_shown, halves)) or "none"
        )
    )
    if not halves:
        return killed
    files = written_files(root, halves[0])
    return _Killed(killed.name, killed.at, killed.completed, killed.durable, halves[0], len(files))


def _end_of_node(name: str, stage: _Stage, job: Job) -> _Killed:
    root = stage.root("disturbed")
    at = job.kill_node()
    wipe_memory(root)
    committed = look(root).committed
    return _Killed(name, at, job.completed(), committed[-1] if committed else None)


def _resumed(stage: _Stage, story: Story, job: Job, killed: _Killed) -> None:
    """A new launch after the loss of the node goes on from the newest checkpoint on disk."""
    stage.say("starting again")
    job.wait("the first step after a resume", lambda: _going(job, lives=1))
    _settle(stage, story, job, killed, life=0)
    incident = story.incidents[-1]
    story.checks.append(
        Check(f"{killed.name}: resumed from disk", incident.tier == "disk", str(incident.tier))
    )
    adopted = adoptions(stage.root("disturbed"))[-1]
    story.checks.append(
        Check(
            f"{killed.name}: resumed from the newest checkpoint on disk",
            adopted is not None and adopted == killed.durable,
            f"{_shown(adopted)} of {_shown(killed.durable)}",
        )
    )


def _settle(stage: _Stage, story: Story, job: Job, killed: _Killed, *, life: int) -> None:
    """Note what came of a kill, from the journals of the processes that followed it."""
    after = [job.lives(rank)[life] for rank in range(stage.plan.ranks)]
    first = max(min(x.stepped_at.values()) for x in after)
    resumed = min(x.start_step for x in after)
    tiers = {x.tier for x in after}
    story.incidents.append(
        Incident(
            name=killed.name,
            tier=tiers.pop() if len(tiers) == 1 else None,
            completed=killed.completed,
            resumed=resumed,
            lost=max(0, killed.completed - resumed),
            seconds=first - killed.at,
            load_seconds=max(x.load_seconds for x in after),
            half=killed.half,
            half_files=killed.half_files,
        )
    )


def _going(job: Job, *, lives: int) -> bool:
    """Whether every rank is in its ``lives``-th process of this launch and has completed a step in it."""
    found = [job.lives(rank) for rank in range(job.ranks)]
    return all(len(x) >= lives and x[lives - 1].losses for x in found)


def _compare(stage: _Stage, story: Story) -> None:
    reference, disturbed = stage.lives("reference"), stage.lives("disturbed")
    story.comparisons = [
        compare_losses(reference, disturbed, stage.plan.steps),
        compare_ends(reference, disturbed, "/model", "final weights"),
        compare_ends(reference, disturbed, "/optimizer", "final optimizer state"),
    ]
    for comparison in story.comparisons:
        found = (
            f"{comparison.compared} equal"
            if comparison.equal
            else "; ".join(comparison.differing) or "nothing"
        )
        story.checks.append(Check(f"{comparison.what} equal, bit for bit", comparison.equal, found))
    halves = [incident.half for incident in story.incidents if incident.half is not None]
    root = stage.root("disturbed")
    seen = [half for half in halves if half in look(root).committed or half in adoptions(root)]
    story.checks.append(
        Check("the half flush was never seen", bool(halves) and not seen, f"{len(seen)} listings or loads")
    )
    hurt = damage(root)
    story.checks.append(Check("every byte on disk proved", not hurt, "; ".join(hurt) or "no damage"))


def _shown(checkpoint: Any) -> str:
    if checkpoint is None:
        return "nothing"
    incarnation, step = checkpoint
    return f"step {step} (incarnation {incarnation})"


__all__ = ["Check", "Incident", "JobFailed", "Plan", "Story", "tell_story"]
