"""What a seed stands for: the job's settings and the disturbances, all drawn from one generator."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

STEPS_PER_DISTURBANCE = 30
DELAY_S_MAX = 0.7
STOPPED_S_MAX = 0.8
LONG_STOP_S = 12.0
"""Longer than the silence after which an agent counts as lost."""

KINDS = {
    "kill-rank": 3,
    "term-rank": 1,
    "stop-rank": 1,
    "kill-ranks": 3,
    "kill-agent": 3,
    "stop-agent": 1,
    "kill-ranks-and-agent": 2,
    "term-launcher": 2,
    "kill-launcher": 1,
    "node": 5,
    "full-disk": 2,
}
"""Kinds of disturbances, and how likely each is."""


@dataclass(frozen=True)
class Disturbance:
    """``steps``: how many steps after the last one; None: ``delay_s`` after it, whatever the job is doing
    then.

    ``at_end``: not before the last step but one. ``pause_s`` is how long something is stopped or full, or the
    launcher away."""

    kind: str
    steps: int | None
    delay_s: float
    pause_s: float
    at_end: bool = False
    wipe_memory: bool = False
    wipe_runtime: bool = False
    damage: str | None = None
    draw: int = 0


@dataclass(frozen=True)
class Plan:
    seed: int
    world: int
    steps: int
    copy: str
    agent: str
    flush_every: int
    rate: float | None
    graceful: bool
    small_disk: bool
    torchrun: bool
    disturbances: tuple[Disturbance, ...] = field(repr=False)

    @classmethod
    def of(cls, seed: int, *, disturbances: int | None = None) -> Plan:
        draw = random.Random(f"chaos {seed}")
        count = draw.randint(4, 8) if disturbances is None else disturbances
        return cls(
            seed=seed,
            world=draw.choice((2, 2, 3)),
            steps=STEPS_PER_DISTURBANCE * (count + 1),
            copy=draw.choice(("eager", "overlap")),
            agent="inline" if draw.random() < 0.12 else "process",
            flush_every=draw.randint(2, 9),
            rate=draw.choice((None, None, 300_000.0, 1_000_000.0)),
            graceful=draw.random() < 0.3,
            small_disk=draw.random() < 0.7,
            torchrun=disturbances is None and draw.random() < 0.08,
            disturbances=tuple(_disturbance(draw) for _ in range(count)),
        )


def _disturbance(draw: random.Random) -> Disturbance:
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    wipes = kind in ("node", "term-launcher") and draw.random() < 0.6
    stopped = (
        LONG_STOP_S if kind == "stop-agent" and draw.random() < 0.2 else draw.uniform(0.0, STOPPED_S_MAX)
    )
    return Disturbance(
        kind=kind,
        steps=draw.randint(1, STEPS_PER_DISTURBANCE // 2) if draw.random() < 0.5 else None,
        delay_s=draw.uniform(0.0, DELAY_S_MAX),
        pause_s=stopped,
        at_end=draw.random() < 0.08,
        wipe_memory=wipes,
        wipe_runtime=kind == "node" and draw.random() < 0.5,
        damage=draw.choice(("flip", "shorten", "remove"))
        if kind == "node" and wipes and draw.random() < 0.6
        else None,
        draw=draw.randrange(1 << 30),
    )
