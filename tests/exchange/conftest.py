"""Every test has nodes of its own, which go with it, and leaves no thread of the exchange behind."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from everstep.memory.directory import find_arenas
from everstep.memory.process import Process

from tests.facade.kit import SHM, until

from .kit import Job, directory_of


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Names of simulated nodes."""
    prefix = f"test-{secrets.token_hex(6)}"
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("EVERSTEP_ADDRESS", "127.0.0.1")
    names = [f"{prefix}-{letter}" for letter in "abcd"]
    yield names
    _end_agents(tmp_path / "runtime")
    for directory in (SHM / f"everstep-{os.getuid()}").glob("*"):
        mine = [info for info in find_arenas(directory) if info.node.startswith(prefix)]
        for info in mine:
            assert info.path is not None
            info.path.unlink(missing_ok=True)
    for name in names:  # also those from which the job itself removed all
        with contextlib.suppress(OSError):
            directory_of(tmp_path / "run", name).rmdir()


def _end_agents(runtime: Path) -> None:
    """Those that a test's ranks started, and left: they linger, or have something to do yet."""
    mark = b"EVERSTEP_RUNTIME_DIR=" + os.fsencode(runtime) + b"\0"
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            others = entry.isdigit() and int(entry) != os.getpid()
            if others and mark in Path(f"/proc/{entry}/environ").read_bytes():
                process = Process.of(int(entry))
                os.kill(int(entry), signal.SIGKILL)
                assert process is None or process.wait_dead(10.0)


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
