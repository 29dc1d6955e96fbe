"""Fixtures of the agent's tests. Whatever agent a test started is gone when it ends."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_kit import Place, TrainerProcess, until


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path).create()
    yield place
    agent = place.agent()
    if agent is not None and agent.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent.pid, signal.SIGKILL)
        until(lambda: not agent.alive(), "the end of the agent")


@pytest.fixture
def start(place: Place) -> Iterator[Callable[..., TrainerProcess]]:
    """Starts trainer processes."""
    started: list[TrainerProcess] = []

    def begin(rank: int = 0, world: int = 1, incarnation: int = 1, **env: str) -> TrainerProcess:
        started.append(TrainerProcess(place, rank, world, incarnation, **env))
        return started[-1]

    yield begin
    for trainer in started:
        trainer.close()
