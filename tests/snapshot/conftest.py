from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from everstep.memory import points
from everstep.memory.arena import Arena
from everstep.memory.process import Process
from everstep.snapshot.copier import Plan

from .plans import room_for


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="everstep-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def arena_for(directory: Path) -> Iterator[Callable[[Plan], Arena]]:
    made: list[Arena] = []

    def create(plan: Plan, slots: int = 3) -> Arena:
        arena = Arena.create(
            directory,
            run_key="key",
            node="node",
            rank=0,
            world=1,
            slots=slots,
            slot_bytes=room_for(plan),
            chunk_bytes=1 << 16,
        )
        arena.take(Process.current(), run_id="run", incarnation=1, world=1)
        made.append(arena)
        return arena

    yield create
    for arena in made:
        arena.close()
    points.hook = None
