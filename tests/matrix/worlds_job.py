"""One rank of a job whose world changes from life to life.

Everything it holds is a function of the step alone, element by element: so what must be there after a load is known
under every mesh, and a value of another step, or of another place, is seen.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import everstep
import torch
import torch.distributed as dist
from everstep.backends import points as backend_points
from everstep.memory import points as memory_points

from . import meshes

ROWS, COLUMNS = 61, 300
SLOW_S = 0.01
POLICY: dict[str, Any] = {
    "keep_last": 2,
    "linger_s": 1.0,
    "rank_timeout_s": 20.0,
    "slot_timeout_s": 15.0,
    "close_timeout_s": 40.0,
    "commit_timeout_s": 8.0,
    "failures_max": None,
}


@dataclass(frozen=True)
class Fate:
    """How one rank dies by itself: at the ``count``-th time that a named point is reached, or after ``steps`` steps
    of this life (0: before its load)."""

    rank: int
    point: str = ""
    count: int = 1
    steps: int | None = None


@dataclass(frozen=True)
class Life:
    """What one launch of the job does: ``steps`` steps, then close, unless something ends it before."""

    mesh: str
    steps: int
    flush_every: int
    agent: str
    copy: str
    rate: float | None
    together: bool
    nodes: tuple[str, ...]
    fates: tuple[Fate, ...] = ()
    agent_point: str = ""


class Journal:
    """One line a fact, one ``write`` a line: whoever is killed leaves whole lines."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def put(self, kind: str, **facts: Any) -> None:
        os.write(self._fd, (json.dumps({"kind": kind, "at": time.monotonic(), **facts}) + "\n").encode())


def value_at(base: torch.Tensor, step: int) -> torch.Tensor:
    """Two roundings an element, whatever the shape and the place."""
    return base.mul(1.0 + 0.125 * step).add(float(step))


class Held:
    """Model, optimizer, scheduler, a table that is cut by hand, and plain values: at any step."""

    def __init__(self, mesh: str, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.model, self.optimizer = meshes.build(mesh, rank, world, filled=False)
        self.base = meshes.build(mesh, rank, world, filled=True)
        self.wanted = meshes.build(mesh, rank, world, filled=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.begin, self.end = rank * ROWS // world, (rank + 1) * ROWS // world
        self.rows = torch.zeros(self.end - self.begin, COLUMNS)
        self.extra: dict[str, Any] = {"epoch": -1, "history": [], "blob": torch.zeros(5)}
        shards = everstep.Shards(
            (ROWS, COLUMNS), [((self.begin, 0), (self.end - self.begin, COLUMNS))], [self.rows]
        )
        self.state = everstep.TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.schedule,
            extra=self.extra,
            own={"table": shards},
        )

    @torch.no_grad()
    def set(self, step: int) -> None:
        """What training up to ``step`` gives."""
        self.optimizer.step()  # there are no gradients: only those who wait for it are told
        self._fill(self.model, self.optimizer, step)
        self.schedule.last_epoch = step
        for group, rate in zip(self.optimizer.param_groups, self.schedule.base_lrs, strict=True):
            group["lr"] = rate / (1 + step)
        self.schedule._last_lr = [group["lr"] for group in self.optimizer.param_groups]
        self.rows.copy_(self._table(step))
        self.extra.update(epoch=step, history=list(range(step % 7)), blob=torch.full((5,), float(step)))

    def _table(self, step: int) -> torch.Tensor:
        whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
        return value_at(whole[self.begin : self.end], step)

    def _fill(self, model: Any, optimizer: Any, step: int) -> None:
        based, bases = self.base
        for (_, mine), (_, base) in zip(model.named_parameters(), based.named_parameters(), strict=True):
            meshes.local(mine).copy_(value_at(meshes.local(base), step))
            state = optimizer.state.setdefault(mine, {})
            for moment in meshes.MOMENTS:
                value = bases.state[base][moment]
                if moment not in state:
                    state[moment] = value.detach().clone()
                meshes.local(state[moment]).copy_(value_at(meshes.local(value), step))
            state["step"] = torch.tensor(float(step))
        for (_, buffer), (_, base) in zip(model.named_buffers(), based.named_buffers(), strict=True):
            buffer.copy_(value_at(base, step))

    @torch.no_grad()
    def wrong(self, step: int) -> list[str]:
        """What is not as it must be at ``step``."""
        expected, optimizer = self.wanted
        self._fill(expected, optimizer, step)
        found = meshes.differences(self.model, self.optimizer, expected, optimizer)
        if not torch.equal(self.rows, self._table(step)):
            found.append("table")
        if self.extra["epoch"] != step or self.extra["history"] != list(range(step % 7)):
            found.append(f"extra {self.extra['epoch']} {self.extra['history']}")
        if not torch.equal(self.extra["blob"], torch.full((5,), float(step))):
            found.append("extra/blob")
        if self.schedule.last_epoch != step:
            found.append(f"scheduler at {self.schedule.last_epoch}")
        for group, rate in zip(self.optimizer.param_groups, self.schedule.base_lrs, strict=True):
            if group["params"] and group["lr"] != rate / (1 + step):
                found.append(f"learning rate {group['lr']}")
        return found


def wrong_values(values: dict[str, Any], step: int) -> list[str]:
    """The same of what a single process loads without any template."""
    known = meshes.reference()
    wanted = {**known["parameters"], **known["buffers"]}
    found = []
    if set(values["model"]) != set(wanted):
        found.append(f"model has {sorted(values['model'])}")
    for name, base in wanted.items():
        if name in values["model"] and not torch.equal(values["model"][name], value_at(base, step)):
            found.append(f"model/{name}")
    table = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    if not torch.equal(values["own"]["table"], value_at(table, step)):
        found.append("own/table")
    if values["extra"]["epoch"] != step:
        found.append(f"epoch {values['extra']['epoch']}")
    return found


def live(rank: int, world: int, life: Life, root: Path, runtime: Path, out: Path) -> None:
    """One rank's part of one life."""
    journal = Journal(out / f"rank-{rank}.jsonl")
    os.environ.update(
        EVERSTEP_RUNTIME_DIR=str(runtime), EVERSTEP_NODE=life.nodes[rank], EVERSTEP_ADDRESS="127.0.0.1"
    )
    if life.agent_point:
        os.environ["EVERSTEP_AGENT_POINTS"] = f"kill:{life.agent_point}"
    log = (out / f"rank-{rank}.stacks").open("w")
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held = Held(life.mesh, rank, world)
        fates = [fate for fate in life.fates if fate.rank == rank]
        journal.put("begin")
        try:
            _train(held, life, root, journal, fates)
        except BaseException as error:
            journal.put("error", error=f"{type(error).__name__}: {error}", error_kind=type(error).__name__)
        journal.put("warned", texts=[str(one.message) for one in caught])


def _train(held: Held, life: Life, root: Path, journal: Journal, fates: list[Fate]) -> None:
    for fate in fates:
        if fate.point:
            _die_at(fate, journal)
    policy = everstep.Policy(full_every=life.flush_every, rate_bytes_per_s=life.rate, **POLICY)
    memory = everstep.Memory(copy="overlap" if life.copy == "overlap" else "eager")
    agent: Any = life.agent
    ckpt = everstep.Checkpointer(root, policy=policy, memory=memory, agent=agent)
    _maybe_die(fates, 0, journal)
    start = ckpt.load(held.state)
    found = ckpt.recovery
    journal.put(
        "loaded",
        step=start,
        tier=found.tier if found else None,
        skipped=list(found.skipped) if found else [],
        wrong=held.wrong(start) if start is not None else [],
    )
    begin = start or 0
    for step in range(begin + 1, begin + 1 + life.steps):
        held.set(step)
        ckpt.step(step, held.state)
        journal.put("step", step=step)
        _maybe_die(fates, step - begin, journal)
        if life.together:
            dist.barrier()
        time.sleep(SLOW_S * random.random())
    ckpt.close()
    journal.put("closed")


def _maybe_die(fates: list[Fate], steps: int, journal: Journal) -> None:
    if any(fate.steps == steps for fate in fates):
        journal.put("dies", how=f"after {steps} steps")
        os.kill(os.getpid(), signal.SIGKILL)


def _die_at(fate: Fate, journal: Journal) -> None:
    left = fate.count

    def fire(name: str, detail: str) -> None:
        nonlocal left
        if name == fate.point:
            left -= 1
            if left == 0:
                journal.put("dies", how=f"at {name} {detail}")
                os.kill(os.getpid(), signal.SIGKILL)

    backend_points.hook = memory_points.hook = fire
