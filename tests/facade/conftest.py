"""Every test has a node of its own, so that its arenas and agents are apart from all others and go with it."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import everstep.agent.inline
import everstep.opened
import pytest
from everstep.agent.inline import InlineAgent
from everstep.memory.directory import find_arenas

from .kit import SHM, Forked, Script, Storage


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    name = f"test-{secrets.token_hex(6)}"
    monkeypatch.setenv("EVERSTEP_NODE", name)
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", str(tmp_path / "runtime"))
    yield name
    for checkpointer in list(everstep.opened._newest.values()):
        with contextlib.suppress(Exception):
            checkpointer._close(flush=False, keep=False)
    for directory in (SHM / f"everstep-{os.getuid()}").glob("*"):
        infos = [info for info in find_arenas(directory) if info.node == name]
        for info in infos:
            assert info.path is not None
            info.path.unlink(missing_ok=True)
        if infos:
            with contextlib.suppress(OSError):
                directory.rmdir()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Storage:
    """Storage of the inline agents, which fails on command."""
    made = Storage()
    monkeypatch.setattr(
        everstep.agent.inline, "InlineAgent", functools.partial(InlineAgent, open_backend=made.open)
    )
    return made


@pytest.fixture
def script() -> Iterator[Callable[..., Script]]:
    made: list[Script] = []

    def start(body: str, *args: object, **options: Any) -> Script:
        made.append(Script(body, *args, **options))
        return made[-1]

    yield start
    for one in made:
        one.stop()


@pytest.fixture
def forked() -> Iterator[Callable[[Callable[..., object]], Forked]]:
    made: list[Forked] = []

    def start(body: Callable[..., object]) -> Forked:
        made.append(Forked(body))
        return made[-1]

    yield start
    for one in made:
        one.stop()
