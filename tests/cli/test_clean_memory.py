"""``everstep clean-memory``: never what is in use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cli_kit import arena_with_snapshot, bare_run, everstep, incarnation
from everstep.cli.arenas import directory_of_run

DEAD = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from cli_kit import arena_with_snapshot
arena_with_snapshot(Path(sys.argv[2]), Path(sys.argv[3]), step=5)
import os
os._exit(0)
"""


def test_removes_what_the_dead_left_and_keeps_what_lives(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    dead_run = bare_run(tmp_path / "dead", incarnation(1), manifests=[])
    live_run = bare_run(tmp_path / "live", incarnation(1), manifests=[])
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", DEAD, here, memory, dead_run], check=True, timeout=60)
    arena = arena_with_snapshot(memory, live_run, step=5)
    try:
        listed = everstep("ls", dead_run, "--memory", memory, "--json").json["memory"]
        assert [s["in_use"] for s in listed] == [False]
        found = everstep("clean-memory", "--all", "--memory", memory, "--json").json
        assert [item["path"] for item in found["removed"]] == [listed[0]["path"]]
        assert found["removed"][0]["nbytes"] > 0
        assert found["in_use"] == [str(arena.info.path)]
        assert not directory_of_run(memory, str(dead_run)).exists()
        assert arena.info.path is not None
        assert arena.info.path.exists()
    finally:
        arena.close()


def test_one_run_only(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    arena = arena_with_snapshot(memory, bare_run(tmp_path / "a", incarnation(1), manifests=[]), step=1)
    try:
        found = everstep("clean-memory", tmp_path / "b", "--memory", memory, "--json").json
        assert found == {"removed": [], "in_use": []}
        assert "kept" in everstep("clean-memory", tmp_path / "a", "--memory", memory).out
    finally:
        arena.close()


def test_all_runs_only_when_asked(tmp_path: Path) -> None:
    """A run that was just killed goes on from its memory: another's clean-up must not take that by the way."""
    assert everstep("clean-memory", "--memory", tmp_path).code == 2
    assert everstep("clean-memory", tmp_path, "--all", "--memory", tmp_path).code == 2
