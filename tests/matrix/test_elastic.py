"""One run that shrinks and grows again, with what former numbers of ranks left in its directory."""

from __future__ import annotations

import warnings
from pathlib import Path

import everstep
import pytest

from . import job, launch, meshes
from .test_faults import steps_of


def go_on(rank: int, world: int, mesh: str, root: Path, step: int) -> list[str]:
    """Load what there is, compare it, and save it as ``step``; leave a half attempt of a later step behind."""
    expected = meshes.build(mesh, rank, world, filled=True)
    first = step == 10
    model, optimizer = expected if first else meshes.build(mesh, rank, world, filled=False)
    state = job.make_state(model, optimizer)
    policy = everstep.Policy(full_every=None, keep_last=9, rank_timeout_s=60)
    checkpointer = everstep.Checkpointer(root, memory=None, policy=policy, agent="inline")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = checkpointer.load(state)
    wrong = meshes.differences(model, optimizer, *expected)
    if found != (None if first else step - 10):
        wrong.append(f"step {found}")
    checkpointer.save(step, state).wait(timeout_s=60)
    if rank % 2:  # the others never ask for it: nothing comes of it
        checkpointer.save(step + 5, state)
    return wrong


def shrink_and_grow(root: Path, many: str, few: str) -> None:
    for number, mesh in enumerate((many, few, many)):
        found = launch.run(meshes.MESHES[mesh][0], go_on, mesh, root, 10 * (number + 1))
        assert not any(found), found
    assert steps_of(root, fsck=False) == {10, 20, 30}


def test_four_two_four(tmp_path: Path) -> None:
    shrink_and_grow(tmp_path / "run", "fsdp4", "fsdp2")


@pytest.mark.long
def test_sixteen_eight_sixteen(tmp_path: Path) -> None:
    shrink_and_grow(tmp_path / "run", "fsdp16", "fsdp8")
