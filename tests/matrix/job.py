"""What the ranks of a job do: save under one mesh, load under another and compare."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import everstep
import torch

from . import meshes

STEP = 40


def make_state(model: Any, optimizer: Any) -> everstep.TrainState:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return everstep.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, extra={"epoch": 1})


def open_run(root: Path, shared: Path | None) -> everstep.Checkpointer:
    """``shared``: a directory for a memory tier; without it there is none."""
    memory = everstep.Memory(path=shared) if shared is not None else None
    policy = everstep.Policy(full_every=None, rank_timeout_s=60)
    return everstep.Checkpointer(root, memory=memory, policy=policy, agent="inline")


def save(rank: int, world: int, mesh: str, root: Path, shared: Path | None) -> None:
    """Leave a checkpoint on disk, or only in memory: the job then ends as if it were killed."""
    model, optimizer = meshes.build(mesh, rank, world, filled=True)
    state = make_state(model, optimizer)
    state.extra["epoch"] = 9
    checkpointer = open_run(root, shared)
    assert checkpointer.load(state) is None
    if shared is None:
        checkpointer.save(STEP, state).wait(timeout_s=60)
        checkpointer.close()
    else:
        checkpointer.step(STEP, state)


def load(
    rank: int, world: int, mesh: str, sources: list[tuple[str, Path, Path | None]]
) -> dict[str, list[str]]:
    """By source (mesh of the save, root, directory of its memory tier): what is not as it must be."""
    found = {}
    expected = meshes.build(mesh, rank, world, filled=True)
    for saved, root, shared in sources:
        found[saved + ("" if shared is None else " memory")] = _load(
            rank, world, mesh, root, shared, expected
        )
    return found


def _load(
    rank: int, world: int, mesh: str, root: Path, shared: Path | None, expected: tuple[Any, Any]
) -> list[str]:
    model, optimizer = meshes.build(mesh, rank, world, filled=False)
    state = make_state(model, optimizer)
    checkpointer = open_run(root, shared)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # random numbers are derived where the world is another
        step = checkpointer.load(state)
    wrong = meshes.differences(model, optimizer, *expected)
    recovery = checkpointer.recovery
    if step != STEP or recovery is None or recovery.tier != ("disk" if shared is None else "memory"):
        wrong.append(f"step {step}, {recovery}")
    if state.extra != {"epoch": 9}:
        wrong.append(f"extra {state.extra}")
    if mesh.startswith(meshes.FORWARD) and "x" not in mesh.replace("2x2", ""):
        loss = meshes.loss_of(model).detach()
        if not torch.equal(loss, meshes.reference()["loss"][""]):
            wrong.append(f"loss {loss.item()}")
    checkpointer.close(flush=False)
    if rank == 0:
        wrong += _evaluate(root) if shared is None else []
    return wrong


def _evaluate(root: Path) -> list[str]:
    """A single process, without any template, gets whole tensors."""
    model = meshes.Net()
    model.load_state_dict(everstep.load(root, parts=["model"])["model"])
    loss = meshes.loss_of(model).detach()
    return [] if torch.equal(loss, meshes.reference()["loss"][""]) else [f"loss of the values {loss.item()}"]
