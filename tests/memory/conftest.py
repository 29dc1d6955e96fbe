"""Fixtures of the memory tests: a private directory in shared memory, and arenas in it."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from everstep.memory import points
from everstep.memory.arena import Arena
from everstep.memory.process import Process

SOON_S = 20.0
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
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


class Reserving:
    """Memory that is reserved behind, piece by piece, each when it may; ``error`` instead, once it is set."""

    def __init__(self, make: Callable[..., Arena], monkeypatch: pytest.MonkeyPatch) -> None:
        self.may, self.begun = threading.Event(), threading.Event()
        self.error: OSError | None = None
        self._make = make
        reserve = os.posix_fallocate

        def fallocate(fd: int, offset: int, nbytes: int) -> None:
            if threading.current_thread().name == "everstep-populate":
                self.begun.set()
                assert self.may.wait(SOON_S)
                if self.error is not None:
                    raise self.error
            reserve(fd, offset, nbytes)

        monkeypatch.setattr(os, "posix_fallocate", fallocate)

    def arena(self) -> Arena:
        return self._make(populate="behind", slot_bytes=8 << 20)

    def fail(self, error: OSError) -> None:
        self.error = error
        self.may.set()


@pytest.fixture
def reserving(make: Callable[..., Arena], monkeypatch: pytest.MonkeyPatch) -> Reserving:
    return Reserving(make, monkeypatch)


@pytest.fixture(autouse=True)
def _no_hook() -> Iterator[None]:
    yield
    points.hook = None
