"""What must hold of a disturbed run, judged from its ranks' journals: every number is the undisturbed run's,
and no resume went further back than what must have survived."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHOWN_MAX = 4


@dataclass
class Life:
    """One process of a rank. ``losses`` were computed, ``steps`` (time, step) were handed over; ``durable`` is
    (time, step) of what a handle called durable."""

    attempt: str
    rank: int
    began: float
    resumed: int | None = None
    tier: str | None = None
    skipped: list[str] = field(default_factory=list)
    losses: dict[int, str] = field(default_factory=dict)
    steps: list[tuple[float, int]] = field(default_factory=list)
    durable: list[tuple[float, int]] = field(default_factory=list)
    fingerprints: dict[str, str] | None = None
    error: str | None = None
    closed: bool = False

    def newest(self, before: float) -> int | None:
        """The newest step that it had in memory at a time; what it resumed from counts."""
        found = [step for at, step in self.steps if at < before]
        return max(found, default=self.resumed)

    def take(self, fact: dict[str, Any]) -> None:
        kind = fact["kind"]
        if kind == "start":
            self.resumed, self.tier, self.skipped = fact["step"], fact["tier"], fact["skipped"]
        elif kind == "loss":
            self.losses[fact["step"]] = fact["loss"]
        elif kind == "step":
            self.steps.append((fact["at"], fact["step"]))
            if fact.get("durable") is not None:
                self.durable.append((fact["at"], fact["durable"]))
        elif kind == "end":
            self.fingerprints = fact["fingerprints"]
        elif kind == "error":
            self.error = fact["error"]
        elif kind == "closed":
            self.closed = True


@dataclass(frozen=True)
class Wiped:
    """Memory was lost at ``at``; ``disk`` is the newest undamaged step that was committed then (0: none)."""

    at: float
    disk: int


def read_lives(out: Path, rank: int) -> list[Life]:
    lives: dict[str, Life] = {}
    try:
        lines = (out / f"rank-{rank}.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    for line in lines:
        fact = json.loads(line)
        if fact["kind"] == "begin":
            lives[fact["attempt"]] = Life(fact["attempt"], rank, fact["at"])
        else:
            lives[fact["attempt"]].take(fact)
    return list(lives.values())


def by_attempt(out: Path, world: int) -> list[list[Life]]:
    """The ranks of each attempt, oldest attempt first; some ranks may not have come to begin."""
    attempts: dict[str, list[Life]] = {}
    for rank in range(world):
        for life in read_lives(out, rank):
            attempts.setdefault(life.attempt, []).append(life)
    return sorted(attempts.values(), key=lambda lives: min(life.began for life in lives))


def completed(out: Path, world: int) -> int:
    """The newest step that all ranks have completed in one attempt."""
    return max((_common(lives, world, float("inf")) for lives in by_attempt(out, world)), default=0)


def _common(lives: list[Life], world: int, before: float) -> int:
    newest = [life.newest(before) for life in lives]
    return min(step or 0 for step in newest) if len(newest) == world else 0


def check_floors(attempts: list[list[Life]], world: int, wiped: list[Wiped], *, late: bool) -> list[str]:
    """``late``: copies may still have been running when a step was journaled, so the one before it counts."""
    problems = []
    for number, lives in enumerate(attempts):
        began = min(life.began for life in lives)
        lost = max((one for one in wiped if one.at < began), key=lambda one: one.at, default=Wiped(0.0, 0))
        floor, why = lost.disk, "on disk when memory was lost"
        for former in attempts[:number]:
            durable = [step for life in former for at, step in life.durable if lost.at < at < began]
            if durable and max(durable) > floor:
                floor, why = max(durable), f"called durable by attempt {former[0].attempt}"
            if min(life.began for life in former) > lost.at:
                held = _common(former, world, began) - (1 if late else 0)
                if held > floor:
                    floor, why = held, f"completed by all ranks of attempt {former[0].attempt}"
        resumed = {life.rank: life.resumed for life in lives if life.resumed is not None}
        if len(set(resumed.values())) > 1:
            problems.append(f"attempt {lives[0].attempt}: ranks resumed from different steps {resumed}")
        for rank, step in resumed.items():
            if step < floor:
                problems.append(
                    f"attempt {lives[0].attempt}, rank {rank}: resumed from {step}, but {floor} was {why}"
                )
    return problems


def check_numbers(attempts: list[list[Life]], reference: list[Life], steps: int, world: int) -> list[str]:
    """Each loss that was ever computed, each step at least once, and the final state of every finished rank."""
    problems: list[str] = []
    for rank in range(world):
        wanted = reference[rank].losses
        lives = [life for lives in attempts for life in lives if life.rank == rank]
        for life in lives:
            wrong = [step for step, loss in life.losses.items() if wanted.get(step) != loss]
            if wrong:
                problems.append(
                    f"attempt {life.attempt}, rank {rank}: {len(wrong)} losses differ, from step {wrong[0]} "
                    f"(resumed from {life.resumed}, {life.tier})"
                )
            ended = life.fingerprints
            if ended is not None and ended != reference[rank].fingerprints:
                differing = sorted(
                    key
                    for key, value in (reference[rank].fingerprints or {}).items()
                    if ended.get(key) != value
                )
                problems.append(f"attempt {life.attempt}, rank {rank}: final {differing[:SHOWN_MAX]} differ")
        missing = set(range(1, steps + 1)) - {step for life in lives for step in life.losses}
        if missing:
            problems.append(f"rank {rank}: steps {sorted(missing)[:SHOWN_MAX]} were never completed")
        if not any(life.fingerprints for life in lives):
            problems.append(f"rank {rank} never came to its end")
    return problems
