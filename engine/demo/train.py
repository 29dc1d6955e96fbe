"""The training job of the demonstration: a byte-level GPT under DistributedDataParallel.

It is also the example of how a job adopts everstep. Everything that makes it go on after a kill stands in
:func:`train`, between the comments "everstep 1" to "everstep 4"; the journal is there for the comparison
only.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 -m everstep.demo.train --root runs/gpt --out out
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import everstep
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .corpus import stdlib_text
from .fingerprint import fingerprints
from .journal import Journal
from .loader import ShuffledWindows
from .model import GPT

RANK_TIMEOUT = timedelta(seconds=60)
LINGER_S = 10.0
"""How long the agent outlives an idle run: the demonstration wants no leftovers."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers. Stored with the run: a resume with other settings is refused."""

    steps: int
    width: int = 96
    layers: int = 3
    heads: int = 4
    length: int = 64
    batch: int = 8
    dropout: float = 0.1
    lr: float = 3e-3
    seed: int = 20


@dataclass(frozen=True)
class Places:
    """Where things lie, and how fast they go. None of it decides a number."""

    root: Path
    out: Path
    flush_every: int
    rate_bytes_per_s: float | None
    step_seconds_min: float = 0.0


def train(settings: Settings, places: Places) -> None:
    """One rank's part of the job, from wherever the run stands to its end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(settings.seed)
    # find_unused_parameters: with it DDP never regroups its gradient buckets after the first step, so more
    # than two ranks add each gradient in the same order before and after a resume. Two ranks would not need
    # it.
    model = DistributedDataParallel(
        GPT(
            width=settings.width,
            layers=settings.layers,
            heads=settings.heads,
            length=settings.length,
            dropout=settings.dropout,
        ),
        find_unused_parameters=True,
    )
    torch.manual_seed(settings.seed + 1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=settings.lr, total_steps=settings.steps + 1
    )
    loader = ShuffledWindows(
        stdlib_text(),
        length=settings.length,
        batch=settings.batch,
        rank=rank,
        world=world,
        seed=settings.seed,
    )
    journal = Journal(places.out, rank)

    # everstep 1: say what the state is, once.
    state = everstep.TrainState(
        model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, rng=True, data="stream"
    )
    # everstep 2: open the run. Every step goes to memory, every flush_every-th to disk.
    policy = everstep.Policy(
        snapshot_every=1,
        full_every=places.flush_every,
        rate_bytes_per_s=places.rate_bytes_per_s,
        linger_s=LINGER_S,
    )
    with everstep.Checkpointer(places.root, policy=policy, config=asdict(settings)) as ckpt:
        # everstep 3: go on from the newest step that still exists, in memory or on disk.
        start = ckpt.load(state) or 0
        _note_start(journal, ckpt.recovery, start)
        for step in range(start + 1, settings.steps + 1):
            began = time.monotonic()
            loss = model(next(loader))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            # everstep 4: hand over the step.
            ckpt.step(step, state, metrics={"loss": loss.item()})
            journal.stepped(step, loss.item(), ckpt.agent_pid)
            time.sleep(max(0.0, began + places.step_seconds_min - time.monotonic()))
    journal.ended(fingerprints({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}))


def _note_start(journal: Journal, recovery: everstep.Recovery | None, step: int) -> None:
    if recovery is None:
        journal.started(step=step, tier=None, seconds=0.0)
    else:
        journal.started(
            step=step, tier=recovery.tier, seconds=recovery.seconds, skipped=tuple(recovery.skipped)
        )


def main(argv: list[str] | None = None) -> None:
    """The command line that the launcher starts in every rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="directory of the run")
    parser.add_argument("--out", type=Path, required=True, help="directory of the ranks' journals")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--flush-every", type=int, default=10, help="steps from one disk checkpoint to the next"
    )
    parser.add_argument(
        "--rate", type=float, default=None, help="limit of the writes to disk, bytes per second"
    )
    parser.add_argument("--step-seconds", type=float, default=0.0, help="a step takes at least this long")
    args = parser.parse_args(argv)
    places = Places(args.root, args.out, args.flush_every, args.rate, args.step_seconds)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=RANK_TIMEOUT)
    try:
        train(Settings(steps=args.steps), places)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
