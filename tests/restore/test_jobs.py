"""Real jobs: DDP, FSDP2 and pipelines, saved at one number of ranks and loaded at others, from disk and memory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from everstep.memory.directory import find_arenas

from tests.matrix import launch

from .job import CASES, RANKS, main

SHM = Path("/dev/shm")
LIMIT_S = 240


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where every rank of every case has written what became of it."""
    out, node = tmp_path_factory.mktemp("jobs"), f"test-{secrets.token_hex(6)}"
    port = launch.free_port()
    env = {"EVERSTEP_NODE": node, "EVERSTEP_RUNTIME_DIR": str(out / "runtime")}
    ranks = [launch.start(main, rank, port, out, out=out / f"said.{rank}", env=env) for rank in range(RANKS)]
    try:
        launch.ended(ranks, LIMIT_S)
        yield out
    finally:
        for directory in (SHM / f"everstep-{os.getuid()}").glob("*"):
            for info in find_arenas(directory):
                if info.node == node and info.path is not None:
                    info.path.unlink(missing_ok=True)
            if not any(directory.iterdir()):
                directory.rmdir()


@pytest.mark.parametrize(("name", "world"), [(name, world) for name, world, _, _ in CASES])
def test_a_job(outcome: Path, name: str, world: int) -> None:
    for rank in range(world):
        said = outcome / f"{name}.{rank}"
        assert said.exists(), f"rank {rank} did not come to it"
        assert said.read_text() == "ok", f"rank {rank}:\n{said.read_text()}"
