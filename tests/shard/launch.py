"""Ranks of a small job as children of the test's process: one launch serves many cases."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120.0

Body = Callable[[int], Any]
"""What a rank does; its result (plain values) comes back to the test."""


def launch(body: Body, ranks: int, directory: Path) -> list[Any]:
    """Run ``body`` on so many ranks with a gloo process group; their results. AssertionError with the traceback of
    the first rank that failed, or with the names of those that did not end in time."""
    torch.set_num_threads(1)
    pids = [_fork(body, rank, ranks, directory) for rank in range(ranks)]
    left = _wait(dict(enumerate(pids)))
    for rank in range(ranks):
        failed = directory / f"failed-{rank}"
        assert not failed.exists(), f"rank {rank}: {failed.read_text()}"
    assert not left, f"ranks {sorted(left)} did not end within {TIMEOUT_S:g} s"
    return [json.loads((directory / f"result-{rank}").read_text()) for rank in range(ranks)]


def _fork(body: Body, rank: int, ranks: int, directory: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
        store = dist.FileStore(str(directory / "store"), ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
        )
        result = json.dumps(body(rank))
        (directory / f"result-{rank}").write_text(result)
        dist.barrier()
        code = 0
    except BaseException:
        (directory / f"failed-{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _wait(pids: dict[int, int]) -> dict[int, int]:
    """Wait for all; one that fails ends the others, which would wait for it. Those that had to be ended."""
    left, late = dict(pids), {}
    deadline = time.monotonic() + TIMEOUT_S
    while left and not late:
        for rank, pid in list(left.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del left[rank]
                if status:
                    deadline = min(deadline, time.monotonic() + 5)
        if time.monotonic() > deadline:
            late = dict(left)
        time.sleep(0.01)
    for pid in left.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return late
