"""Jobs that die and are started again with other numbers of ranks, again and again, from memory alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import everstep
import everstep.snapshots
import pytest
import torch

from tests.facade.kit import steps_on_disk

from .kit import WAIT_S, Job, held, manifests

ROWS, COLUMNS = 60, 50
Say = Callable[..., None]


def table(step: int) -> torch.Tensor:
    return torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(step))


def same(step: int) -> torch.Tensor:
    return torch.rand(4000, generator=torch.Generator().manual_seed(7000 + step))


class Sharded:
    """One tensor in rows over the ranks, and one that all of them hold."""

    def __init__(self, rank: int, world: int) -> None:
        self.begin, self.end = rank * ROWS // world, (rank + 1) * ROWS // world
        self.rows = torch.zeros(self.end - self.begin, COLUMNS)
        self.values: dict[str, Any] = {"w": torch.zeros(4000), "n": 0}
        box = ((self.begin, 0), (self.end - self.begin, COLUMNS))
        shards = everstep.Shards((ROWS, COLUMNS), [box], [self.rows])
        self.state = everstep.TrainState(
            rng=False, replicated=("same",), own={"table": shards}, same=self.values
        )

    def set(self, step: int) -> None:
        self.rows.copy_(table(step)[self.begin : self.end])
        self.values["w"].copy_(same(step))
        self.values["n"] = step

    def is_at(self, step: int) -> bool:
        return (
            torch.equal(self.rows, table(step)[self.begin : self.end])
            and torch.equal(self.values["w"], same(step))
            and self.values["n"] == step
        )


def life(job: Job, places: Sequence[str], steps: int, *, close: bool = False, **options: Any) -> list[str]:
    """Load, take ``steps`` steps into memory alone, and be killed (or close). What each rank found: the step, the
    tier, whether all bits are right."""

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        sharded = Sharded(rank, len(places))
        start = ckpt.load(sharded.state)
        right = start is None or sharded.is_at(start)
        say(start, ckpt.recovery.tier if ckpt.recovery else None, right)
        for step in range((start or 0) + 1, (start or 0) + 1 + steps):
            sharded.set(step)
            ckpt.step(step, sharded.state)
            assert ckpt._ranks is not None
            ckpt._ranks.agree("training together", step, timeout_s=WAIT_S)
        if close:
            ckpt.close()
        say("done")
        threading.Event().wait(WAIT_S)

    ranks = job.start(places, body, **options)
    said = [rank.line() for rank in ranks]
    assert [rank.line() for rank in ranks] == ["done"] * len(places)
    job.kill()
    return said


def test_one_node_with_four_ranks_then_two_then_three(root: Path, nodes: list[str], job: Job) -> None:
    node = nodes[0]
    assert life(job, [node] * 4, 3) == ["None None True"] * 4
    assert life(job, [node] * 2, 0) == ["3 memory True"] * 2
    assert {(rank, step) for rank, _, step in held(root, node)} >= {(rank, 3) for rank in range(4)}
    assert life(job, [node] * 3, 2) == ["3 memory True"] * 3
    now = held(root, node)
    assert {(rank, 2, step) for rank in range(3) for step in (4, 5)} <= now, "the incarnation's own"
    assert not [rank for rank, _, _ in now if rank == 3], (
        "its W exists: a rank that is no more keeps no memory"
    )
    assert life(job, [node] * 6, 1) == ["5 memory True"] * 6
    assert life(job, [node] * 1, 1) == ["6 memory True"]
    assert life(job, [node] * 4, 1) == ["7 memory True"] * 4
    assert manifests(root) == []


def refuse(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("not today")


@pytest.mark.parametrize(
    ("where", "fits"),
    [
        pytest.param("aa", True, id="one-node-arena-reused"),
        pytest.param("ab", False, id="two-nodes-arena-outgrown"),
        pytest.param("aa", False, id="one-node-arena-outgrown", marks=pytest.mark.long),
        pytest.param("ab", True, id="two-nodes-arena-reused", marks=pytest.mark.long),
    ],
)
def test_the_former_worlds_step_stays_until_the_new_world_has_one(
    root: Path, nodes: list[str], job: Job, where: str, fits: bool
) -> None:
    """Rank 0 of the new world goes ahead, rank 1 fails at its first snapshot, and all are killed."""
    memory = everstep.Memory(bytes=1 << 20) if fits else None
    options = {"memory": memory} if memory is not None else {}
    places = [nodes["ab".index(letter)] for letter in where]
    life(job, [places[0], *places], 2, **options)
    before = held(root, places[0]) | held(root, places[1])

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        sharded = Sharded(rank, 2)
        say(ckpt.load(sharded.state))
        if rank == 1:
            everstep.snapshots.Snapshots.take = refuse  # type: ignore[method-assign]
        # On a node of its own, rank 0 is at most one snapshot ahead of ranks that it trains with.
        for step in range(3, 10) if rank == 0 and where == "aa" else (3,):
            sharded.set(step)
            try:
                ckpt.step(step, sharded.state)
            except (ZeroDivisionError, everstep.errors.CapacityError) as error:
                say(type(error).__name__)
                break
        say("done")
        threading.Event().wait(WAIT_S)

    ranks = job.start(places, body, policy={"slot_timeout_s": 1.0}, **options)
    assert [rank.line() for rank in ranks] == ["2", "2"]
    assert [ranks[1].line(), ranks[1].line()] == ["ZeroDivisionError", "done"]
    if where == "aa":
        assert ranks[0].line() == "CapacityError", "rather no room than the room of what may be needed"
    assert ranks[0].line() == "done"
    job.kill()
    now = held(root, places[0]) | held(root, places[1])
    assert {one for one in before if one[2] == 2} <= now and (0, 2, 3) in now
    assert life(job, [*places, *places], 0, **options) == ["2 memory True"] * 4


@pytest.mark.parametrize("worlds", [["aabb", "ab", "aaab"], ["ab", "bbaa", "ba"]], ids=lambda w: "-".join(w))
def test_two_nodes_with_other_numbers_of_ranks(
    root: Path, nodes: list[str], job: Job, worlds: list[str]
) -> None:
    step = 0
    for world in worlds:
        places = [nodes["ab".index(letter)] for letter in world]
        expected = f"{step} memory True" if step else "None None True"
        assert life(job, places, 2) == [expected] * len(places)
        step += 2
    assert manifests(root) == []


def test_what_was_loaded_from_memory_becomes_durable_at_close(root: Path, nodes: list[str], job: Job) -> None:
    """By the new world, as a step of its own incarnation."""
    node = nodes[0]
    life(job, [node] * 3, 2)
    assert life(job, [node] * 2, 0, close=True) == ["2 memory True"] * 2
    assert steps_on_disk(root) == [2]
    assert held(root, node) == set() or not [rank for rank, _, _ in held(root, node) if rank < 2]
    assert life(job, [node], 0, close=True)[0].startswith("2 ")
