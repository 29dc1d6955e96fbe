"""Fixtures of the agent's tests. Whatever agent a test started is gone when it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .agent_kit import Place, TrainerProcess, until


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


@pytest.fixture
def special_agent(place: Place) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts an agent with scripted faults ("faults") or of another protocol ("protocol": difference)."""
    started: list[subprocess.Popen[str]] = []

    def begin(**wishes: Any) -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(__file__).with_name("special_agent.py"))]
        command += [place.settings.to_json(), json.dumps(wishes)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
