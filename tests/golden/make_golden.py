"""Makes the golden runs of the present format version: ``python -m tests.golden.make_golden``, from the top.

Run it for a new format version only: what former versions wrote stays as it is.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import everstep
import torch
from everstep.backends.files import LocalBackend
from everstep.format.constants import FORMAT_VERSION
from everstep.store.blocking import run_blocking
from everstep.store.runs import create_run

from tests.golden import contents

GOLDEN = Path(__file__).parent / f"v{FORMAT_VERSION}"
ALONE, PAIR = GOLDEN / "alone", GOLDEN / "pair"


def begin(root: Path) -> None:
    """A run with small chunks, so that small images have several."""
    run_blocking(create_run(LocalBackend(root), chunk_bytes=contents.CHUNK_BYTES))


def make_alone(root: Path) -> None:
    """Three checkpoints by one process, each an incarnation."""
    begin(root)
    everstep.save(root, contents.FULL_STEP, contents.full(), config=contents.CONFIG, metrics=contents.METRICS)
    everstep.save(root, contents.SMALL_STEP, contents.small())
    everstep.save(root, contents.BARE_STEP, contents.bare())


def pair_state(rank: int, model: torch.nn.Module) -> everstep.TrainState:
    """The state of one of two ranks; ``model`` is wrapped in DDP, but for comparing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    contents.settle(model.state_dict(), 100)
    contents.settle(optimizer.state_dict(), 200)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return everstep.TrainState(
        model=model, optimizer=optimizer, scheduler=schedule, rng=False, extra=contents.of_rank(rank)
    )


PAIR_PARTS = ("model", "optimizer", "scheduler", "extra")


def plain_parts(state: everstep.TrainState) -> dict[str, Any]:
    """What the parts' objects give."""
    return {part: ask(getattr(state, part)) for part in PAIR_PARTS}


def ask(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def pair_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, bias=False))


def make_pair_rank(root: Path) -> None:
    """One rank of the pair, under torchrun; each on a node of its own, so that they share images."""
    torch.distributed.init_process_group("gloo")
    os.environ["EVERSTEP_NODE"] = f"golden-{torch.distributed.get_rank()}"
    memory = everstep.Memory(path=os.environ["EVERSTEP_RUNTIME_DIR"], replicas=1)
    state = pair_state(torch.distributed.get_rank(), torch.nn.parallel.DistributedDataParallel(pair_model()))
    with everstep.Checkpointer(
        root, memory=memory, agent="inline", policy=everstep.Policy(snapshot_every=None)
    ) as ckpt:
        ckpt.load(state)
        ckpt.save(contents.PAIR_STEP, state, metrics={"loss": 0.25}).wait(timeout_s=60)
    torch.distributed.destroy_process_group()


def make_pair(root: Path) -> None:
    begin(root)
    with tempfile.TemporaryDirectory() as runtime:
        environment = {
            **os.environ,
            "EVERSTEP_RUNTIME_DIR": runtime,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
        }
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={contents.PAIR_WORLD}",
        ]
        subprocess.run(
            [*torchrun, "-m", "tests.golden.make_golden", str(root)], check=True, timeout=120, env=environment
        )


if __name__ == "__main__":
    socket.gethostname = lambda: "golden"  # type: ignore[assignment]  (not the maker's machine, for ever)
    if len(sys.argv) > 1:
        make_pair_rank(Path(sys.argv[1]))
    else:
        shutil.rmtree(GOLDEN, ignore_errors=True)
        make_alone(ALONE)
        make_pair(PAIR)
        shutil.rmtree(PAIR / "events", ignore_errors=True)
