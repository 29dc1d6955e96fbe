"""Runs with deltas: a state of which little changes, and what is on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import everstep
import torch
from everstep.backends.files import LocalBackend
from everstep.format.manifest import Manifest
from everstep.store.blocking import run_blocking
from everstep.store.catalog import list_steps, read_decision

from tests.facade.kit import opened, until

FROZEN = 1 << 18
"""Elements (float32) that never change: 1 MiB, a chunk; the others are few."""


class Adapter:
    """As with LoRA: a large frozen part, and a small one that is trained. Its values follow from the step."""

    def __init__(self, rank: int = 0, frozen: int = FROZEN) -> None:
        made = torch.Generator().manual_seed(7 + rank)
        self.rank = rank
        self.state = {
            "frozen": torch.randn(frozen, generator=made),
            "adapter": torch.zeros(3000),
            "count": 0,
        }

    def at(self, step: int) -> dict[str, Any]:
        made = torch.Generator().manual_seed(1000 * step + self.rank)
        self.state["adapter"] = torch.randn(3000, generator=made)
        self.state["count"] = step
        return {"model": self.state}

    def is_at(self, step: int, found: dict[str, Any]) -> bool:
        want = Adapter(self.rank, len(self.state["frozen"])).at(step)["model"]
        got = found["model"]
        return got["count"] == want["count"] and all(
            torch.equal(got[k], want[k]) for k in ("frozen", "adapter")
        )


class Stood(NamedTuple):
    """What counts of a checkpoint: its kind, the step below it, its attempt, and the bytes of its objects."""

    kind: str
    base: int | None
    attempt: int
    nbytes: int


def stands(root: Path) -> dict[int, Stood]:
    """By step."""

    async def look() -> dict[int, Stood]:
        backend, found = LocalBackend(str(root)), {}
        for one in await list_steps(backend):
            decision = await read_decision(backend, one)
            if isinstance(decision, Manifest):
                below = decision.parent_key
                size = sum(record.objects_nbytes for record in decision.ranks)
                place = None if below is None else below[1]
                found[one.step] = Stood(decision.kind, place, decision.attempt, size)
        return found

    return run_blocking(look())


def chain(root: Path, step: int) -> list[int]:
    """The steps that ``step`` needs, itself included."""
    found, known = [step], stands(root)
    while (below := known[found[-1]].base) is not None:
        found.append(below)
    return found


def deltas(root: Path, **changes: Any) -> everstep.Checkpointer:
    """Without fulls by schedule, and without anything removed; each flush waits for room."""
    options = {
        name: changes.pop(name)
        for name in ("agent", "tiers", "memory", "take_over", "node")
        if name in changes
    }
    given = {"delta_every": 1, "max_chain": 16, "keep_last": 1000, "on_slow": "wait", **changes}
    return opened(root, policy=given, **options)


def train(
    ckpt: everstep.Checkpointer, work: Adapter, steps: range, wait: Callable[[Any], object] | None = None
) -> None:
    """Each flush is durable before the next step."""
    for step in steps:
        handle = ckpt.step(step, work.at(step))
        if handle is not None:
            (wait or (lambda one: one.wait()))(handle)


def is_bit_equal(root: Path, step: int, work: Adapter) -> bool:
    return work.is_at(step, everstep.load(root, step=step))


def merged(root: Path, step: int) -> None:
    """Wait until that checkpoint is a full by another attempt."""
    until(lambda: stands(root)[step][:3] == ("full", None, 2), f"step {step} is a full")


def events(root: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in (root / "events").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
