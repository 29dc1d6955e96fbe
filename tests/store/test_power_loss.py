"""Power loss after every operation of flush, commit and rotation, on a disk that drops unsynced data."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import pytest
from everstep.backends.files import LocalBackend

from tests.disk.simdisk import SimDisk
from tests.store.crash_story import BOTH, NEW, OLD, before, story
from tests.store.test_crash import STATES, finish, state_of


def record(root: Path) -> SimDisk:
    """The story on the simulated disk, which then knows every state in between."""

    async def prepare() -> None:
        backend = LocalBackend(root)
        await before(backend)
        await backend.close()

    asyncio.run(prepare())
    sim = SimDisk(root)

    async def go() -> None:
        backend = LocalBackend(root, door=sim.door)
        await story(backend)
        await backend.close()

    asyncio.run(go())
    return sim


def check_index(sim: SimDisk, dest: Path, index: int, seed: int | None) -> frozenset[tuple[int, int]]:
    sim.crash(dest, seed, op_index=index)
    state = asyncio.run(state_of(dest))
    assert state in STATES, (index, seed, state, [str(op) for op in sim.ops[max(index - 5, 0) : index]])
    asyncio.run(finish(dest))
    shutil.rmtree(dest)
    return state


def test_power_loss_at_some_operations_leaves_old_or_new(tmp_path: Path) -> None:
    sim = record(tmp_path / "run")
    seed = random.randrange(1 << 30)
    print("seed", seed)
    numbers = random.Random(seed)
    for index in sorted(numbers.sample(range(len(sim.ops) + 1), 8)):
        check_index(sim, tmp_path / "crashed", index, numbers.choice((None, seed + index)))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_power_loss_at_every_operation_leaves_old_or_new(tmp_path: Path, seed: int | None) -> None:
    sim = record(tmp_path / "run")
    seen = [check_index(sim, tmp_path / "crashed", index, seed) for index in range(len(sim.ops) + 1)]
    assert seen[0] == OLD and seen[-1] == NEW and set(seen) == {OLD, BOTH, NEW}


def test_what_was_acknowledged_survives(tmp_path: Path) -> None:
    """When the story has ended, a power loss takes nothing."""
    sim = record(tmp_path / "run")
    sim.crash(tmp_path / "crashed")
    assert asyncio.run(state_of(tmp_path / "crashed")) == NEW
