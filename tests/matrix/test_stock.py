"""A run that torch's own checkpoints were made of is imported, and gone on with under another mesh."""

from __future__ import annotations

import warnings
from pathlib import Path

import everstep
import torch.distributed.checkpoint as dcp
from everstep.port.dcp_dirs import import_dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from . import launch, meshes


def save_stock(rank: int, world: int, mesh: str, path: Path) -> None:
    model, optimizer = meshes.build(mesh, rank, world, filled=True)
    names, moments = get_state_dict(model, optimizer)
    dcp.save({"app": {"model": names, "optimizer": moments}}, checkpoint_id=path)


def resume(rank: int, world: int, mesh: str, root: Path) -> list[str]:
    expected = meshes.build(mesh, rank, world, filled=True)
    model, optimizer = meshes.build(mesh, rank, world, filled=False)
    state = everstep.TrainState(model=model, optimizer=optimizer, rng=False)
    checkpointer = everstep.Checkpointer(root, memory=None, agent="inline")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        step = checkpointer.load(state)
    wrong = meshes.differences(model, optimizer, *expected)
    checkpointer.save(8, state).wait(timeout_s=60)
    checkpointer.close()
    return wrong if step == 7 else [*wrong, f"step {step}"]


def test_sharded_by_torch_and_resumed_by_others(tmp_path: Path) -> None:
    launch.run(2, save_stock, "fsdp2", tmp_path / "stock")
    assert set(import_dcp(tmp_path / "stock", tmp_path / "run", step=7)) == {"model", "optimizer"}
    assert launch.run(3, resume, "fsdp3", tmp_path / "run") == [[], [], []]
    assert set(everstep.load(tmp_path / "run", step=8)) == {"model", "optimizer"}
