"""What a job leaves behind as it is started again, and again, in other worlds: nothing that was lost, nothing that
grows."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import everstep
import pytest
from everstep.memory import points

from tests.facade.kit import Forked, opened, steps_on_disk

from .kit import WAIT_S, Job, directory_of, erase, held
from .test_worlds import Sharded, life

Say = Callable[..., None]
ARENA_BYTES_MAX = 1_200_000
"""Of one rank in :func:`life`, three slots and what describes them."""


def arenas(root: Path, node: str) -> list[Path]:
    return sorted(directory_of(root, node).glob("*"))


def test_sixteen_worlds_leave_no_more_than_one(root: Path, nodes: list[str], job: Job) -> None:
    seed = int(os.environ.get("WORLDS_SEED", "16"))
    print(f"WORLDS_SEED={seed}")
    draw = random.Random(seed)
    step, former = 0, 0
    for _ in range(16):
        world, steps = draw.randint(1, 5), draw.randint(0, 2)
        expected = f"{step} memory True" if step else "None None True"
        assert life(job, [nodes[0]] * world, steps) == [expected] * world
        step += steps
        files = arenas(root, nodes[0])
        print(world, steps, step, [path.name for path in files], sum(path.stat().st_size for path in files))
        former = world if steps else max(former, world)
        assert sum(path.stat().st_size for path in files) < ARENA_BYTES_MAX * 2 * former
        if steps:
            newest = [rank for rank, _, at in held(root, nodes[0]) if at == step]
            assert sorted(newest) == list(range(world))
    assert life(job, [nodes[0]] * 2, 2, close=True) == [f"{step} memory True"] * 2
    assert arenas(root, nodes[0]) == [] and steps_on_disk(root) == [step + 2]


@pytest.mark.parametrize(
    ("point", "victim"),
    [
        ("pin.locked", 1),
        ("before", 1),
        *(pytest.param("pin.locked", rank, marks=pytest.mark.long) for rank in (0, 2)),
        *(pytest.param("before", rank, marks=pytest.mark.long) for rank in (0, 2)),
    ],
)
def test_a_rank_killed_during_load(root: Path, nodes: list[str], job: Job, point: str, victim: int) -> None:
    life(job, [nodes[0]] * 4, 2)

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        def die(name: str, detail: str) -> None:
            if name == point:
                os.kill(os.getpid(), signal.SIGKILL)

        if rank == victim:
            points.hook = die
            if point == "before":
                os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            say("loaded", ckpt.load(Sharded(rank, 3).state))
        except everstep.errors.EverstepError as error:
            say(f"{time.monotonic() - began:.0f}", type(error).__name__, str(error).replace("\n", " "))

    ends = [rank.end() for rank in job.start([nodes[0]] * 3, body, policy={"rank_timeout_s": 4.0})]
    print(ends)
    for rank, (code, lines) in enumerate(ends):
        if rank == victim:
            assert code == -signal.SIGKILL
        else:
            seconds, text = lines[0].split(" ", 1)
            assert float(seconds) < (20 if victim == 0 else 8), lines
            assert f"rank {victim}" in text or f"rank(s) [{victim}]" in text, lines
    job.kill()
    assert life(job, [nodes[0]] * 2, 1) == ["2 memory True"] * 2


def test_one_of_two_nodes_is_lost(root: Path, nodes: list[str], job: Job) -> None:
    """Its memory is gone, the other's is whole but of no use alone: what is durable counts, for all ranks alike; and
    the next world does not keep the lost one's halves."""
    a, b = nodes[:2]

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        sharded = Sharded(rank, 4)
        ckpt.load(sharded.state)
        for step in range(1, 6):
            sharded.set(step)
            ckpt.step(step, sharded.state)
            if step == 3:
                ckpt.save(3, sharded.state).wait()
        say("done")
        threading.Event().wait(WAIT_S)

    assert [rank.line() for rank in job.start([a, a, b, b], body)] == ["done"] * 4
    job.kill()
    erase(root, b)
    assert life(job, [a, a, a], 3) == ["3 disk True"] * 3
    assert {(rank, incarnation) for rank, incarnation, _ in held(root, a)} == {(rank, 2) for rank in range(3)}
    assert life(job, [b, a], 1) == ["6 memory True"] * 2
    assert life(job, [a, b], 2, close=True) == ["7 memory True"] * 2
    assert steps_on_disk(root) == [3, 9]
    assert arenas(root, a) == arenas(root, b) == []


def test_a_load_while_the_former_agent_flushes(root: Path, nodes: list[str], job: Job) -> None:
    """It writes slowly what the killed ranks left; another world loads that very step, goes on, and closes."""
    a = nodes[0]
    options = {"agent": "process", "policy": {"rate_bytes_per_s": 10_000.0, "full_every": 2}}
    assert life(job, [a] * 3, 4, **options) == ["None None True"] * 3
    options["policy"] = {}
    assert life(job, [a] * 2, 0, **options) == ["4 memory True"] * 2
    assert life(job, [a] * 4, 1, **options) == ["4 memory True"] * 4
    assert life(job, [a] * 2, 3, close=True, **options) == ["5 memory True"] * 2
    assert steps_on_disk(root)[-1] == 8
    assert arenas(root, a) == []
    with everstep.Checkpointer(root, memory=None, agent="inline") as ckpt:
        sharded = Sharded(0, 1)
        assert ckpt.load(sharded.state) == 8 and sharded.is_at(8)


def test_a_job_that_dies_before_its_first_step_again_and_again(
    root: Path, nodes: list[str], job: Job
) -> None:
    life(job, [nodes[0]] * 4, 2)
    sizes = []
    for _ in range(5):
        assert life(job, [nodes[0]] * 2, 0) == ["2 memory True"] * 2
        sizes.append(sum(path.stat().st_size for path in arenas(root, nodes[0])))
    print(sizes)
    assert sizes[0] == sizes[-1]


def only_load(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
    sharded = Sharded(rank, 2)
    say(ckpt.load(sharded.state), ckpt.recovery.tier if ckpt.recovery else None)
    ckpt.close()


def test_a_job_that_only_loads_leaves_no_memory(root: Path, nodes: list[str], job: Job) -> None:
    a = nodes[0]
    assert job.run([a] * 2, only_load) == [["None None"]] * 2
    assert arenas(root, a) == []
    life(job, [a] * 3, 1, close=True)
    assert job.run([a] * 2, only_load) == [["1 disk"]] * 2
    assert arenas(root, a) == []


def test_what_one_only_reserved_another_may_lose(root: Path, nodes: list[str], job: Job) -> None:
    """Two of one rank that load at the same time find the same room; who goes takes nothing from who stays."""
    a = nodes[0]
    life(job, [a], 1, close=True)

    def die(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        say(ckpt.load(Sharded(0, 1).state))
        threading.Event().wait(WAIT_S)

    assert job.start([a], die)[0].line() == "1"
    job.kill()
    assert len(arenas(root, a)) == 1

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        sharded = Sharded(0, 1)
        say(ckpt.load(sharded.state))
        other = Forked(lambda tell: only_load(0, opened(root), tell))
        say(other.end())
        other.stop()
        say(len(arenas(root, a)))
        sharded.set(2)
        ckpt.step(2, sharded.state)
        ckpt.close()

    [said] = job.run([a], body)
    assert said == ["1", "(0, ['1 disk'])", "0"]
    assert arenas(root, a) == [] and steps_on_disk(root) == [1, 2]
