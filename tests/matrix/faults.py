"""One rank of a sharded job goes wrong in the middle of a save; what every rank then says."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import everstep
import torch
from everstep.backends import points
from everstep.backends.door import Door
from everstep.errors import EverstepError

from . import meshes

BOUND_S = 30.0
"""What a verdict may take; the policy's patience is a part of it."""
BAD = 1


def open_run(root: Path) -> everstep.Checkpointer:
    policy = everstep.Policy(full_every=None, commit_timeout_s=6, rank_timeout_s=15, close_timeout_s=40)
    return everstep.Checkpointer(root, memory=None, policy=policy, agent="inline")


def start(rank: int, world: int, mesh: str, root: Path) -> tuple[everstep.Checkpointer, everstep.TrainState]:
    """A run with one good checkpoint, of step 1."""
    model, optimizer = meshes.build(mesh, rank, world, filled=True)
    state = everstep.TrainState(model=model, optimizer=optimizer, extra={"more": torch.zeros(4)})
    state.replicated = frozenset({"extra"})
    checkpointer = open_run(root)
    checkpointer.load(state)
    checkpointer.save(1, state).wait(timeout_s=60)
    return checkpointer, state


def told(act: Any) -> tuple[str, float]:
    """What ``act`` raises, with its class, and after how many seconds; "" if nothing."""
    began = time.monotonic()
    try:
        act()
    except EverstepError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", time.monotonic() - began


def go_on(checkpointer: everstep.Checkpointer, state: everstep.TrainState, step: int) -> str:
    """A later save, with whatever was wrong put right; "" if it is durable."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of the failure before, which the caller knows
        text, _ = told(lambda: checkpointer.save(step, state).wait(timeout_s=60))
        closing, _ = told(checkpointer.close)
    return text + closing


def other_shapes(rank: int, world: int, mesh: str, root: Path) -> tuple[str, float, str]:
    checkpointer, state = start(rank, world, mesh, root)
    state.extra["more"] = torch.zeros(5 if rank == BAD else 4)
    text, seconds = told(lambda: checkpointer.save(2, state).wait(timeout_s=60))
    state.extra["more"] = torch.zeros(6)
    return text, seconds, go_on(checkpointer, state, 3)


def other_step(rank: int, world: int, mesh: str, root: Path) -> tuple[str, float, str]:
    checkpointer, state = start(rank, world, mesh, root)
    text, seconds = told(lambda: checkpointer.save(3 if rank == BAD else 2, state).wait(timeout_s=60))
    return text, seconds, go_on(checkpointer, state, 4)


def full_disk(rank: int, world: int, mesh: str, root: Path) -> tuple[str, float, str]:
    checkpointer, state = start(rank, world, mesh, root)

    real = Door.write

    def full(door: Any, file: Any, view: memoryview, offset: int) -> int:
        """No room for images; the few bytes of a record still fit."""
        if len(view) > 512 and "rank-" in str(getattr(file, "name", file)):
            raise OSError(28, os.strerror(28))
        return real(door, file, view, offset)

    if rank == BAD:
        Door.write = full  # type: ignore[method-assign]
    text, seconds = told(lambda: checkpointer.save(2, state).wait(timeout_s=60))
    Door.write = real  # type: ignore[method-assign]
    return text, seconds, go_on(checkpointer, state, 3)


def death(rank: int, world: int, mesh: str, root: Path) -> tuple[str, float, str]:
    checkpointer, state = start(rank, world, mesh, root)
    if rank == BAD:

        def die(name: str, detail: str) -> None:
            if name == "flush.image.first":
                os.kill(os.getpid(), signal.SIGKILL)

        points.hook = die
    text, seconds = told(lambda: checkpointer.save(2, state).wait(timeout_s=60))
    return text, seconds, ""


def again(rank: int, world: int, mesh: str, root: Path) -> tuple[int | None, str]:
    """The job is started again after a death: it loads, and saves the same step."""
    model, optimizer = meshes.build(mesh, rank, world, filled=False)
    state = everstep.TrainState(model=model, optimizer=optimizer, extra={"more": torch.zeros(4)})
    state.replicated = frozenset({"extra"})
    checkpointer = open_run(root)
    step = checkpointer.load(state)
    return step, go_on(checkpointer, state, 2)
