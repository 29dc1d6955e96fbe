"""Every test has nodes of its own, which go with it, and leaves no thread of the exchange behind."""

from __future__ import annotations

import gc
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from everstep.memory.directory import find_arenas

from tests.facade.kit import SHM, until

from .kit import Job


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Names of simulated nodes."""
    prefix = f"test-{secrets.token_hex(6)}"
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("EVERSTEP_ADDRESS", "127.0.0.1")
    yield [f"{prefix}-{letter}" for letter in "abcd"]
    for directory in (SHM / f"everstep-{os.getuid()}").glob("*"):
        mine = [info for info in find_arenas(directory) if info.node.startswith(prefix)]
        for info in mine:
            assert info.path is not None
            info.path.unlink(missing_ok=True)
        if mine:
            directory.rmdir()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def job(root: Path, nodes: list[str]) -> Iterator[Job]:
    made = Job(root)
    yield made
    made.end()


@pytest.fixture(autouse=True)
def nothing_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    gc.collect()  # tasks whose errors nobody heard of complain when they go
    assert not [text for text in caplog.messages if "never retrieved" in text]
    # Lines that the other side has just left take a moment to notice.
    until(lambda: not [one for one in threading.enumerate() if one.name == "everstep-exchange"], "their end")
