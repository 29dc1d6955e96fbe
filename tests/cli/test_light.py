"""The command line is there at once, and works where torch is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_kit import everstep

COMMANDS = [
    "ls",
    "show",
    "status",
    "plan-memory",
    "fsck",
    "copy",
    "prune",
    "pin",
    "unpin",
    "gc",
    "clean-memory",
]
COMMANDS += ["demo", "bench"]
HELP_CPU_S_MAX = 0.3


def test_help_is_there_at_once() -> None:
    best = min(everstep("ls", "--help", fresh=True).cpu_s for _ in range(3))
    assert best < HELP_CPU_S_MAX


@pytest.mark.parametrize("command", [*COMMANDS, "bench stall", "bench save-load"])
def test_help_shows_an_example_and_needs_no_torch(command: str) -> None:
    said = everstep(*command.split(), "--help", blocked=True)
    assert said.code == 0
    assert f"everstep {command}" in said.out.split("Example")[1]


@pytest.mark.parametrize("command", ["ls", "show", "fsck", "gc", "plan-memory"])
def test_runs_without_torch(made_run: Path, command: str) -> None:
    said = everstep(command, made_run, "--json", blocked=True)
    assert (said.code, said.err) == (0, "")
    assert said.json


def test_plain_values_without_torch(made_run: Path) -> None:
    values = everstep("show", made_run, "--values", "--json", blocked=True).json["checkpoint"]["values"]
    assert values["model"]["weight"] == "<float32 [32, 64]>"
    assert values["extra"] == {"note": "hello", "odd": "nan"}


def test_what_needs_torch_says_so(tmp_path: Path) -> None:
    said = everstep("bench", "stall", "--dir", tmp_path, blocked=True)
    assert said.code == 1
    assert "error: this command needs torch" in said.err
    assert "Traceback" not in said.err
