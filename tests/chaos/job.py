"""The training job that is disturbed: one rank of it, small enough that a step takes milliseconds.

Started by :mod:`tests.chaos.launch` (forked, so that nothing is imported again) or by torchrun
(``-m tests.chaos.job``). Everything that decides a number is the same however it is started.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import everstep
import torch
import torch.distributed as dist
from everstep.demo.fingerprint import fingerprints
from everstep.memory.process import Process
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.batches import Batches

WIDTH = 96
RANK_TIMEOUT_S = 20.0
POLICY: dict[str, Any] = {
    "keep_last": 2,
    "linger_s": 1.0,
    "rank_timeout_s": RANK_TIMEOUT_S,
    "slot_timeout_s": 20.0,
    "close_timeout_s": 30.0,
    "commit_timeout_s": 8.0,
    "failures_max": None,
}


@dataclass(frozen=True)
class Settings:
    """What one launch is to do. ``plain``: without everstep at all, for the numbers to compare with."""

    root: str
    out: str
    steps: int
    copy: str = "eager"
    agent: str = "process"
    flush_every: int = 5
    rate: float | None = None
    step_seconds: float = 0.0
    graceful: bool = False
    plain: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Journal:
    """One line a fact, one ``write`` a line: whoever is killed leaves whole lines."""

    def __init__(self, out: str, rank: int, attempt: str) -> None:
        path = os.path.join(out, f"rank-{rank}.jsonl")
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._attempt = attempt

    def put(self, kind: str, **facts: Any) -> None:
        line = {"kind": kind, "at": time.time(), "attempt": self._attempt, **facts}
        os.write(self._fd, (json.dumps(line) + "\n").encode())


class Training:
    """One rank's live objects."""

    def __init__(self, rank: int, steps: int) -> None:
        torch.manual_seed(7)
        self.model = DistributedDataParallel(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH),
                nn.BatchNorm1d(WIDTH),
                nn.Dropout(0.2),
                nn.ReLU(),
                nn.Linear(WIDTH, 4),
            ),
            find_unused_parameters=True,  # keeps the gradient buckets as they are, before and after a resume
        )
        torch.manual_seed(8 + rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=1e-2, total_steps=steps + 1
        )
        self.batches = Batches(rank, WIDTH)

    def step(self) -> float:
        loss: Tensor = self.model(self.batches.next()).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.item())

    def state(self) -> everstep.TrainState:
        return everstep.TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=self.batches,
            rng=True,
            data="stream",
        )

    def fingerprints(self) -> dict[str, str]:
        held = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "batches": self.batches.state_dict(),
            "rng": torch.get_rng_state(),
        }
        return fingerprints(held)


def run(settings: Settings, attempt: str) -> None:
    """One rank's part, from wherever the run stands to its end. The process group is there."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if settings.graceful:
        signal.signal(signal.SIGTERM, _leave)
    torch.set_num_threads(1)
    rank = dist.get_rank()
    journal = Journal(settings.out, rank, attempt)
    journal.put("begin", pid=os.getpid(), start_time=Process.current().start_time)
    training = Training(rank, settings.steps)
    if settings.plain:
        for step in range(1, settings.steps + 1):
            journal.put("loss", step=step, loss=training.step().hex())
    else:
        try:
            _train(settings, training, journal)
        except BaseException as error:
            journal.put("error", error=f"{type(error).__name__}: {error}")
            raise
    journal.put("end", fingerprints=training.fingerprints())


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def _train(settings: Settings, training: Training, journal: Journal) -> None:
    policy = everstep.Policy(
        full_every=settings.flush_every, rate_bytes_per_s=settings.rate, snapshot_every=1, **POLICY
    )
    memory = everstep.Memory(copy="overlap" if settings.copy == "overlap" else "eager")
    agent: Any = settings.agent
    state = training.state()
    with everstep.Checkpointer(settings.root, policy=policy, memory=memory, agent=agent) as ckpt:
        start = ckpt.load(state)
        found = ckpt.recovery
        journal.put(
            "start",
            step=start or 0,
            tier=found.tier if found else None,
            skipped=list(found.skipped) if found else [],
        )
        handles: dict[int, everstep.SaveHandle] = {}
        for step in range((start or 0) + 1, settings.steps + 1):
            began = time.monotonic()
            loss = training.step()
            journal.put("loss", step=step, loss=loss.hex())  # before the step can survive
            handle = ckpt.step(step, state, metrics={"loss": loss})
            if handle is not None:
                handles[step] = handle
            durable = max((step for step, one in handles.items() if one.done()), default=None)
            journal.put("step", step=step, durable=durable)
            time.sleep(max(0.0, began + settings.step_seconds - time.monotonic()))
    journal.put("closed")


def main() -> None:
    """As torchrun starts it: the settings and the launch's name."""
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text()))
    dist.init_process_group("gloo", timeout=timedelta(seconds=RANK_TIMEOUT_S))
    try:
        run(settings, f"{sys.argv[2]}.{os.environ['TORCHELASTIC_RESTART_COUNT']}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
