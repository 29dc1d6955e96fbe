"""Fixtures of the memory tests: a private directory in shared memory, and arenas in it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from everstep.memory import points
from everstep.memory.arena import Arena
from everstep.memory.process import Process

SETTINGS: dict[str, Any] = {
    "run_key": "key",
    "node": "node",
    "rank": 0,
    "world": 1,
    "slots": 3,
    "slot_bytes": 64 << 10,
    "chunk_bytes": 4096,
}


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="everstep-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def make(directory: Path) -> Iterator[Callable[..., Arena]]:
    """Makes small arenas; owned (incarnation 1 of run "run") unless ``owned=False``."""
    made: list[Arena] = []

    def create(*, owned: bool = True, **options: Any) -> Arena:
        arena = Arena.create(directory, **{**SETTINGS, **options})
        made.append(arena)
        if owned:
            arena.take(Process.current(), run_id="run", incarnation=1, world=1)
        return arena

    yield create
    for arena in made:
        arena.close()


@pytest.fixture(autouse=True)
def _no_hook() -> Iterator[None]:
    yield
    points.hook = None
