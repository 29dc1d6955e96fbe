"""Every test's run has agents and arenas of its own."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from everstep.memory.directory import arena_dir
from everstep.places import locate

from .runner import SHM


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    runtime = tempfile.mkdtemp(prefix="everstep-chaos-", dir="/var/tmp")
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", runtime)
    yield tmp_path / "run"
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(arena_dir(SHM, locate(tmp_path / "run").run_key))
    shutil.rmtree(runtime, ignore_errors=True)
