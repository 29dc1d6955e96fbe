"""Every test has directories in shared memory for two nodes, and leaves no thread behind."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from everstep.memory import points

from .kit import Holder, Owner

THREADS = ("everstep-peer", "everstep-peers")


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="everstep-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def directory(shm: Path) -> Path:
    """The holder's."""
    path = shm / "holder"
    path.mkdir()
    return path


@pytest.fixture
def holder(directory: Path) -> Iterator[Callable[..., Holder]]:
    """Makes holders on the directory."""
    made: list[Holder] = []

    def make(**options: Any) -> Holder:
        made.append(Holder(directory, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def owner(shm: Path) -> Iterator[Callable[..., Owner]]:
    made: list[Owner] = []

    def make(*args: Any, **options: Any) -> Owner:
        made.append(Owner(shm, *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.arena.close()


@pytest.fixture
def copier(shm: Path) -> Iterator[Callable[..., Owner]]:
    """An own arena on the holder's node."""
    made: list[Owner] = []

    def make(*args: Any, **options: Any) -> Owner:
        made.append(Owner(shm / "holder", *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.arena.close()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    points.hook = None
    until = time.monotonic() + 5
    while any(thread.name in THREADS for thread in threading.enumerate()):
        assert time.monotonic() < until, [thread.name for thread in threading.enumerate()]
        time.sleep(0.01)
