"""One rank of ``bench dcp``: saves, or loads, the same sharded tensors in each of the ways that are compared.

Called by :mod:`.dcp` as ``python -m everstep.benchmarks.dcp_ranks CONFIG``; rank 0 leaves the seconds in a file.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import everstep
import torch
import torch.distributed as dist
from everstep.dcp import Reader, Stager, Writer
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from .common import Mismatch, drop_caches, end_run, in_turn

WAYS = ("stock", "dcp", "checkpointer")
COLUMNS = 1024
SMALL_SHAPE = (16, 4)
LARGE_ROWS = 4096
TIMEOUT = timedelta(minutes=30)

Seconds = dict[str, dict[str, list[float]]]
"""Workload, and what was measured, to its samples."""


@dataclass(frozen=True)
class Config:
    """What one launch does."""

    mode: str
    workload: str
    directory: str
    store: str
    rank: int
    world: int
    nbytes: int
    small_tensors: int
    repeats: int


def shapes(workload: str, nbytes: int, small_tensors: int) -> list[tuple[int, int]]:
    """The global shapes of a workload's tensors."""
    if workload == "small":
        return [SMALL_SHAPE] * small_tensors
    rows = max(8, nbytes // (4 * COLUMNS))
    whole, rest = divmod(rows, LARGE_ROWS)
    return [(LARGE_ROWS, COLUMNS)] * whole + ([(rest, COLUMNS)] if rest else [])


class State:
    """fp32 tensors in shards along their first axis, whose contents follow from place and turn alone."""

    def __init__(self, config: Config, mesh: DeviceMesh) -> None:
        self.tensors: dict[str, DTensor] = {}
        self._first: dict[str, int] = {}
        for number, shape in enumerate(shapes(config.workload, config.nbytes, config.small_tensors)):
            rows = -(-shape[0] // config.world)
            first = min(rows * config.rank, shape[0])
            local = torch.zeros(min(rows, shape[0] - first), shape[1])
            name = f"layers.{number}.weight"
            self.tensors[name] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
            )
            self._first[name] = first * shape[1]

    def _contents(self, name: str, number: int, turn: int) -> torch.Tensor:
        local = self.tensors[name].to_local()
        bits = torch.arange(self._first[name], self._first[name] + local.numel(), dtype=torch.int32)
        bits.mul_(1664525).add_(number * 7919 + turn * 104729).bitwise_and_(0x7FFFFF).bitwise_or_(0x3F800000)
        return bits.view(torch.float32).view(local.shape)

    def fill(self, turn: int) -> None:
        """The contents of ``turn``."""
        for number, name in enumerate(self.tensors):
            self.tensors[name].to_local().copy_(self._contents(name, number, turn))

    def clear(self) -> None:
        """Nothing of any turn."""
        for tensor in self.tensors.values():
            tensor.to_local().fill_(-7)

    def require(self, turn: int, what: str) -> None:
        """Raises Mismatch unless all tensors are those of ``turn``."""
        for number, name in enumerate(self.tensors):
            if not torch.equal(self.tensors[name].to_local(), self._contents(name, number, turn)):
                raise Mismatch(f"{what}: {name} came back with other bytes")


class Rank:
    """What all measurements of one launch share."""

    def __init__(self, config: Config) -> None:
        self.config = config
        dist.init_process_group(
            "gloo",
            init_method=f"file://{config.store}",
            rank=config.rank,
            world_size=config.world,
            timeout=TIMEOUT,
        )
        self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.state = State(config, init_device_mesh("cpu", (config.world,)))
        self.root = Path(config.directory) / config.workload
        self.seconds: dict[str, list[float]] = {}

    def note(self, name: str, seconds: float) -> None:
        """One sample: of the slowest rank."""
        slowest = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self.seconds.setdefault(name, []).append(float(slowest))

    def first_only(self, work: Callable[[], Any]) -> None:
        """``work`` on rank 0 while the others wait."""
        if self.config.rank == 0:
            work()
        dist.barrier()


class Saving(Rank):
    """Saves in turn; the first turn, in which everything is made for the first time, does not count."""

    def run(self) -> None:
        self.stager = Stager()
        policy = everstep.Policy(snapshot_every=None, full_every=None, keep_last=1, linger_s=1.0)
        agent = None
        with everstep.Checkpointer(self.root / "checkpointer", policy=policy) as ckpt:
            for turn in range(self.config.repeats + 1):
                self.state.fill(turn)
                in_turn(
                    turn,
                    [
                        partial(self._by_dcp, "stock", turn),
                        partial(self._by_dcp, "dcp", turn),
                        partial(self._by_checkpointer, ckpt, turn),
                    ],
                )
                agent = ckpt.agent_pid
        self.seconds = {name: samples[1:] for name, samples in self.seconds.items()}
        self.first_only(lambda: end_run(self.root / "checkpointer", agent))

    def _by_dcp(self, way: str, turn: int) -> None:
        path = self.root / way / str(turn)
        writer: Any
        if way == "stock":
            writer = FileSystemWriter(path, sync_files=True)
        else:
            writer = Writer(path)
        dist.barrier()
        begun = time.perf_counter()
        future: Any = async_save(dict(self.state.tensors), storage_writer=writer, process_group=self.group)
        blocked = time.perf_counter()
        future.result()
        if way == "stock":
            _fsync_directory(path)
        durable = time.perf_counter()
        self.note(f"{way}_blocking", blocked - begun)
        self.note(f"{way}_durable", durable - begun)
        self.first_only(lambda: shutil.rmtree(self.root / way / str(turn - 1), ignore_errors=True))

    def _by_checkpointer(self, ckpt: everstep.Checkpointer, turn: int) -> None:
        parts = {"model": dict(self.state.tensors)}
        if turn == 0:
            ckpt.load(parts)
        dist.barrier()
        begun = time.perf_counter()
        handle = ckpt.save(turn + 1, parts)
        blocked = time.perf_counter()
        handle.wait()
        durable = time.perf_counter()
        self.note("checkpointer_blocking", blocked - begun)
        self.note("checkpointer_durable", durable - begun)


class Loading(Rank):
    """Cold loads in turn of what was saved last; every one is compared, the first of each does not count."""

    def run(self) -> None:
        for turn in range(self.config.repeats + 1):
            in_turn(turn, [partial(self._load, way) for way in WAYS])
        self.seconds = {name: samples[1:] for name, samples in self.seconds.items()}

    def _load(self, way: str) -> None:
        last = self.config.repeats
        path = self.root / way if way == "checkpointer" else self.root / way / str(last)
        self.state.clear()
        files = [file for file in path.rglob("*") if file.is_file()]
        self.first_only(lambda: drop_caches(files))
        begun = time.perf_counter()
        if way == "checkpointer":
            ckpt = everstep.Checkpointer(path, memory=None, agent="inline")
            ckpt.load({"model": self.state.tensors})
        else:
            reader: Any = FileSystemReader(path) if way == "stock" else Reader(path)
            load(dict(self.state.tensors), storage_reader=reader, process_group=self.group)
        self.note(f"{way}_load", time.perf_counter() - begun)
        self.state.require(last, f"load by {way} at {self.config.world} ranks")
        if way == "checkpointer":
            ckpt.close(flush=False)


def _fsync_directory(path: Path) -> None:
    """torch makes files durable, but not their names."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main() -> None:
    warnings.simplefilter("ignore")
    config = Config(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    rank = (Saving if config.mode == "save" else Loading)(config)
    rank.run()
    if config.rank == 0:
        Path(config.store + ".json").write_text(json.dumps(rank.seconds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
