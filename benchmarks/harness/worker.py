"""One process of a worker: measures one system in one workload, alone in fresh memory.

``python -m everstep.benchmarks.harness.worker`` reads its task as JSON on standard input, and writes what it found as
JSON into the file descriptor that the task names; systems may print what they like. Called by :mod:`.processes`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..common import Mismatch
from . import systems, workloads
from .api import System

TIMEOUT = timedelta(minutes=10)
HOST = "127.0.0.1"
POLL_S = 0.01
FLOOR = "floor"
"""In place of a system's ``module:Class``: what the machine can do."""


@dataclass(frozen=True)
class Task:
    """``system``: its ``module:Class``. ``nbytes``: of the state, all ranks together. ``turn``: the round, from 0.
    ``store``: where rank 0 says how the job's store is reached. ``loads_only``: others have saved, in the same
    directory."""

    system: str
    workload: str
    nbytes: int
    repeats: int
    turn: int
    memory: bool
    directory: str
    rank: int
    world: int
    token: str
    store: str
    result_fd: int
    loads_only: bool = False


def run(task: Task) -> dict[str, Any]:
    """What is measured, as plain values; ``{"wrong": text}`` if bytes came back changed."""
    import torch

    workload = next(one for one in workloads.ALL if one.name == task.workload)
    torch.manual_seed(task.turn + 1)
    if task.world > 1:
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", store=_store(task), rank=task.rank, world_size=task.world, timeout=TIMEOUT
        )
    if task.system == FLOOR:
        from .floor import measure_floors, send_over_gloo

        if task.world > 1:
            return {"floors": send_over_gloo(task.nbytes, task.rank, task.repeats)}
        state = workload.build(task.nbytes, task.rank, task.world)
        return {"floors": measure_floors(state, workload.floors, Path(task.directory), task.repeats)}
    return _of_system(task, workload, systems.load(task.system))


def _store(task: Task) -> Any:
    """The job's store, over TCP as launchers have it (one in a file looks for news every 10 ms). Rank 0 hosts it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    place = Path(task.store)
    if task.rank == 0:
        store = TCPStore(HOST, 0, task.world, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        unfinished = place.with_suffix(".new")
        unfinished.write_text(str(store.port))
        unfinished.rename(place)
        return store
    until = time.monotonic() + TIMEOUT.total_seconds()
    while not place.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"rank 0 has no store at {place}")
        time.sleep(POLL_S)
    return TCPStore(HOST, int(place.read_text()), task.world, is_master=False, timeout=TIMEOUT)


def _of_system(task: Task, workload: workloads.Workload, system: System) -> dict[str, Any]:
    from .measuring import Bench, Found

    state = workload.build(task.nbytes, task.rank, task.world)
    found = Found(tensors=len(state.tensors()), scale=getattr(state, "scale", None), version=system.version())
    bench = Bench(
        system,
        state,
        Path(task.directory),
        rank=task.rank,
        world=task.world,
        repeats=task.repeats,
        turn=task.turn,
        memory=task.memory,
        options={**workload.options, "loads_only": task.loads_only},
        token=task.token,
        found=found,
    )
    found.size_bytes = bench.total(state.nbytes) // workload.copies
    try:
        workload.run(bench)
    except Mismatch as error:
        return {**asdict(found), "wrong": str(error)}
    return asdict(found)


def main() -> None:
    task = Task(**json.loads(sys.stdin.read()))
    os.set_inheritable(task.result_fd, False)
    code = 0
    try:
        found = run(task)
    except BaseException as error:
        traceback.print_exc()
        found, code = {"error": f"{type(error).__name__}: {error}"}, 1
    with open(task.result_fd, "w") as result:
        json.dump(found, result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        code
    )  # threads and atexit handlers that a system leaves hold nobody up; its processes are ended by ours


if __name__ == "__main__":
    main()
