"""One rank fails in a sharded save: all ranks get one verdict that names it, in bounded time; nothing half done is
seen; the engine goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import everstep
import pytest
from click.testing import CliRunner
from everstep.cli.main import main

from . import faults, launch

MESH, WORLD = "fsdp3", 3


def steps_of(root: Path, *, fsck: bool = True) -> set[int]:
    """What a reader can load, each step loaded whole; fsck has nothing to say against it."""
    import json

    done = CliRunner().invoke(main, ["ls", str(root), "--json"])
    assert done.exit_code == 0, done.output
    steps = {int(item["step"]) for item in json.loads(done.stdout)["checkpoints"]}
    for step in steps:
        assert set(everstep.load(root, step=step)) >= {"model", "optimizer"}
    if not fsck:
        return steps
    checked = CliRunner().invoke(main, ["fsck", str(root)])
    assert checked.exit_code == 0, checked.output
    return steps


@pytest.mark.parametrize(
    ("fault", "word", "steps"),
    [
        (faults.other_shapes, "more", {1, 3}),
        (faults.other_step, "", {1, 4}),
        (faults.full_disk, "no room", {1, 3}),
    ],
)
def test_all_ranks_get_one_verdict(
    tmp_path: Path, fault: Callable[..., Any], word: str, steps: set[int]
) -> None:
    found = launch.run(WORLD, fault, MESH, tmp_path / "run")
    for rank, (text, seconds, after) in enumerate(found):
        assert text, f"rank {rank} heard nothing"
        assert word in text, f"rank {rank}: {text}"
        assert seconds < faults.BOUND_S
        assert after == "", f"rank {rank} cannot go on: {after}"
    others = [text for rank, (text, _, _) in enumerate(found) if rank != faults.BAD]
    assert all(str(faults.BAD) in text for text in others), others
    assert steps_of(tmp_path / "run") == steps


def test_a_rank_dies(tmp_path: Path) -> None:
    found = launch.run(WORLD, faults.death, MESH, tmp_path / "run", dies={faults.BAD})
    for rank, outcome in enumerate(found):
        if rank != faults.BAD:
            text, seconds, _ = outcome
            assert f"rank {faults.BAD}" in text and seconds < faults.BOUND_S, outcome
    assert steps_of(tmp_path / "run") == {1}
    assert launch.run(WORLD, faults.again, MESH, tmp_path / "run") == [(1, "")] * WORLD
    assert steps_of(tmp_path / "run") == {1, 2}
