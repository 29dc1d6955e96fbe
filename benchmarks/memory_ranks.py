"""One rank of ``bench memory``: trains, sends its snapshots to the other node, or gets them back.

Called by :mod:`.memory_tier` as ``python -m everstep.benchmarks.memory_ranks CONFIG``; rank 0 leaves what it found in a
file. Rank 0 has the whole state; rank 1, on the other node, next to nothing: what moves goes one way.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import everstep
import torch
import torch.distributed as dist
from everstep.memory.arena import Arena
from everstep.memory.directory import find_arenas
from everstep.memory.header import Kind
from everstep.places import locate
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .common import Mismatch, Samples, in_turn
from .floors import Buffer, CopyFloor
from .state import BenchState, hashes, require_equal

NODES = ("a", "b")
TIMEOUT = timedelta(minutes=30)
WARM_UP = 4
"""Snapshots before the first that counts: each slot is written once, on both nodes, and one again."""
SMALL_BYTES = 1 << 20
SEED = 11
MEET_S = 120.0
MEET_POLL_S = 0.01
PROTECTED_S = 120.0
POLL_S = 0.0005
PIECE_BYTES = 8 << 20
CORE, ENGINE_CORE = 0, 1
LOOP_STEPS = 6
WIDTH = 1024
BATCH = 64
"""Rows a step: far fewer than in any real training, whose steps compute much more for each parameter."""
ADAM_BYTES = 12


@dataclass(frozen=True)
class Config:
    """What one launch does. ``expected``: the hashes of what is to come back."""

    mode: str
    directory: str
    shared: str
    store: str
    rank: int
    nbytes: int
    repeats: int
    expected: list[str] = field(default_factory=list)


@dataclass
class Result:
    """What rank 0 found: samples in seconds, and single numbers."""

    mode: str
    nbytes: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    hashes: list[str] = field(default_factory=list)


class Rank:
    """What all launches share."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.result = Result(config.mode)
        self.samples: dict[str, Samples] = {}
        self.root = Path(config.directory) / f"run-{'train' if config.mode == 'train' else 'pair'}"
        self.node = Path(config.shared) / NODES[config.rank]

    def sampled(self, name: str) -> Samples:
        return self.samples.setdefault(name, Samples())

    def timed(self, name: str, work: Callable[[], Any]) -> None:
        """Run ``work``, on all ranks from the same moment on, and keep rank 0's seconds."""
        dist.barrier()
        self.sampled(name).time(work)

    def open(self, **memory: Any) -> everstep.Checkpointer:
        policy = everstep.Policy(snapshot_every=1, full_every=None, linger_s=60.0)
        return everstep.Checkpointer(
            self.root, memory=everstep.Memory(path=self.node, **memory), policy=policy
        )

    def own_arena(self) -> Path:
        """The file of this rank's own arena."""
        directory = self.node / f"everstep-{os.getuid()}" / locate(self.root).run_key
        (info,) = find_arenas(directory, Kind.OWN)
        if info.path is None:
            raise FileNotFoundError(f"no arena in {directory}")
        return info.path

    def tell_agent(self, pid: int | None) -> int:
        """Leave the agent's process id for whoever ends it."""
        if pid is None:
            raise RuntimeError("there is no agent")
        Path(f"{self.config.store}.agent-{self.config.rank}").write_text(str(pid))
        return pid

    def leave(self) -> None:
        if self.config.rank == 0:
            self.result.seconds = {name: samples.seconds for name, samples in self.samples.items()}
            Path(f"{self.config.store}.json").write_text(json.dumps(asdict(self.result)))


def cpu_seconds(pid: int) -> float:
    """Processor time of ``pid`` so far, all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Loop:
    """Matrix products forward and backward, and AdamW; the same numbers each time it is begun anew."""

    def __init__(self, nbytes: int) -> None:
        layers = max(1, nbytes // ADAM_BYTES // WIDTH**2)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.empty(BATCH, WIDTH)
        self.begin()
        self.step()
        self.state = everstep.TrainState(model=self.model, optimizer=self.optimizer, rng=False)

    def tensors(self) -> list[torch.Tensor]:
        moments = [self.optimizer.state[p] for p in self.model.parameters() if p in self.optimizer.state]
        return [p.data for p in self.model.parameters()] + [one[k] for one in moments for k in sorted(one)]

    @torch.no_grad()
    def begin(self) -> None:
        """Everything as at the first step."""
        generator = torch.Generator().manual_seed(SEED)
        for parameter in self.model.parameters():
            parameter.uniform_(-0.03, 0.03, generator=generator)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.batch.uniform_(generator=generator)

    def step(self) -> None:
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


class Training(Rank):
    """A loop on one core, with a snapshot every step and without any, in turn; the engine has the other core."""

    def run(self) -> None:
        torch.set_num_threads(1)
        self._cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {self._cores[CORE]})
        loop = Loop(self.config.nbytes)
        floor = CopyFloor(loop.tensors())
        floor.fused()
        copy = Samples()
        copy.time(floor.fused)
        del floor
        policy = everstep.Policy(snapshot_every=1, full_every=None, linger_s=5.0)
        memory = everstep.Memory(path=self.node, copy="overlap")
        step = 0
        with everstep.Checkpointer(self.root, memory=memory, policy=policy) as ckpt:
            ckpt.load(loop.state)

            def snapshot() -> None:
                nonlocal step
                step += 1
                ckpt.step(step, loop.state)

            for _ in range(WARM_UP):
                self._one(loop, snapshot)
            self._pin(self.tell_agent(ckpt.agent_pid), {self._cores[min(ENGINE_CORE, len(self._cores) - 1)]})
            for turn in range(self.config.repeats):
                ends: dict[str, list[str]] = {}
                in_turn(
                    turn,
                    [
                        partial(self._run, loop, "loop_with_snapshots", snapshot, ends),
                        partial(self._run, loop, "loop_without", lambda: None, ends),
                    ],
                )
                require_equal(ends["loop_with_snapshots"], ends["loop_without"], "training with snapshots")
            ckpt.close(flush=False)
        self.result.nbytes = sum(t.numel() * t.element_size() for t in loop.tensors())
        self.result.numbers = {"copy_by_one_thread_seconds": copy.median}
        self.result.numbers["step_seconds"] = self.sampled("loop_without").median / LOOP_STEPS
        self.leave()

    def _run(self, loop: Loop, name: str, after: Callable[[], Any], ends: dict[str, list[str]]) -> None:
        loop.step()  # ends a copy that the run before began
        loop.begin()
        self._one(loop, after)

        def work() -> None:
            for _ in range(LOOP_STEPS):
                self._one(loop, after)

        self.sampled(name).time(work)
        ends[name] = hashes(loop.tensors())

    def _one(self, loop: Loop, after: Callable[[], Any]) -> None:
        """A step on one core. The call is not pinned: threads that it starts may run on the other."""
        loop.step()
        os.sched_setaffinity(0, self._cores)
        after()
        os.sched_setaffinity(0, {self._cores[CORE]})

    @staticmethod
    def _pin(pid: int, cores: set[int]) -> None:
        for task in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(task), cores)


def _store(config: Config) -> TCPStore:
    """The job's store, as launchers have it: over TCP. One in a file makes whoever waits sleep for 10 ms each time."""
    path = Path(config.store)
    if config.rank == 0:
        store = TCPStore("127.0.0.1", 0, len(NODES), True, TIMEOUT, wait_for_workers=False)
        unfinished = path.with_name(f"{path.name}.new")
        unfinished.write_text(str(store.port))
        unfinished.rename(path)
        return store
    until = time.monotonic() + MEET_S
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"rank 0 told no port within {MEET_S:g} s")
        time.sleep(MEET_POLL_S)
    return TCPStore("127.0.0.1", int(path.read_text()), len(NODES), False, TIMEOUT)


class Pair(Rank):
    """Two ranks on two nodes."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        dist.init_process_group(
            "gloo", store=_store(config), rank=config.rank, world_size=len(NODES), timeout=TIMEOUT
        )
        torch.manual_seed(SEED)
        self.first = config.rank == 0
        self.state = BenchState(config.nbytes if self.first else SMALL_BYTES)
        self.result.nbytes = self.state.nbytes
        self.trained = everstep.TrainState(model=self.state.module, optimizer=self.state.optimizer, rng=False)
        self.wire = self._connect()
        size = torch.tensor([self.state.nbytes])
        dist.broadcast(size, 0)
        self.buffer = Buffer(int(size), shared=True)
        self.tensor = torch.frombuffer(self.buffer.view, dtype=torch.uint8, count=int(size))

    def _connect(self) -> socket.socket:
        """A plain connection between the two."""
        path = Path(f"{self.config.store}.port")
        if self.first:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                path.write_text(str(listener.getsockname()[1]))
                dist.barrier()
                wire, _ = listener.accept()
        else:
            dist.barrier()
            wire = socket.create_connection(("127.0.0.1", int(path.read_text())))
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return wire

    def over_sockets(self, sender: int) -> None:
        """The buffer from one rank to the other, and a word that it is there."""
        view = self.buffer.view[: self.buffer.nbytes]
        if self.config.rank == sender:
            self.wire.sendall(view)
            self.wire.recv(1)
        else:
            got = 0
            while got < len(view):
                got += self.wire.recv_into(view[got : got + PIECE_BYTES])
            self.wire.sendall(b"1")

    def over_gloo(self) -> None:
        if self.first:
            dist.send(self.tensor, 1)
        else:
            dist.recv(self.tensor, 0)
        dist.barrier()


class Replicating(Pair):
    """Snapshots of rank 0 into the other node's memory, until they count as protected."""

    def run(self) -> None:
        ckpt = self.open(replicas=1)
        ckpt.load(self.trained)
        for step in range(1, 1 + WARM_UP):
            self.state.change()
            ckpt.step(step, self.trained)
        agent = self.tell_agent(ckpt.agent_pid)
        self.arena = Arena.attach(self.own_arena())
        self._await_protection(WARM_UP)
        self.step = WARM_UP
        self.cpu = {"trainer_cpu_s": 0.0, "agent_cpu_s": 0.0}
        for turn in range(self.config.repeats):
            self.state.change()
            in_turn(
                turn,
                [
                    partial(self._replicate, ckpt, agent),
                    partial(self.timed, "sockets", partial(self.over_sockets, 0)),
                    partial(self.timed, "gloo", self.over_gloo),
                ],
            )
        told: list[Any] = [None, None]
        dist.all_gather_object(told, {name: cpu / self.config.repeats for name, cpu in self.cpu.items()})
        self.result.numbers = {**told[0], "holder_cpu_s": told[1]["agent_cpu_s"]}
        self.result.hashes = self.state.hashes()
        self.leave()
        dist.barrier()
        os.kill(agent, 9)  # else it would make the newest snapshot durable, beside what is measured next
        os._exit(0)  # the snapshots stay, as if the job had been killed

    def _replicate(self, ckpt: everstep.Checkpointer, agent: int) -> None:
        """The seconds from the call's return until the snapshot is protected."""
        dist.barrier()
        before = time.process_time(), cpu_seconds(agent)
        self.step += 1
        self.sampled("snapshot").time(ckpt.step, self.step, self.trained)
        self.cpu["trainer_cpu_s"] += time.process_time() - before[0]
        self.sampled("replication").time(self._await_protection, self.step)
        dist.barrier()
        self.cpu["agent_cpu_s"] += cpu_seconds(agent) - before[1]

    def _await_protection(self, step: int) -> None:
        until = time.monotonic() + PROTECTED_S
        while (found := self.arena.protected) is None or found[1] < step:
            if time.monotonic() > until:
                raise TimeoutError(f"step {step} is not protected within {PROTECTED_S:g} s: {found}")
            time.sleep(POLL_S)


class Recovering(Pair):
    """The snapshot back from the own arena, and, when that is gone, from the other node."""

    def run(self) -> None:
        floor = CopyFloor(self.state.tensors) if self.first else None
        for turn in range(self.config.repeats + 1):
            measures: list[Callable[[], Any]] = [partial(self._load, "own_arena")]
            if floor is not None:
                measures += [
                    partial(self.sampled("flat_copy").time, floor.flat),
                    partial(self.sampled("fused_copy").time, floor.fused),
                ]
            in_turn(turn, measures)
        del floor
        if self.first:
            self.own_arena().unlink()
        for turn in range(self.config.repeats + 1):
            in_turn(
                turn,
                [
                    partial(self._load, "peer"),
                    partial(self.timed, "receive", partial(self.over_sockets, 1)),
                ],
            )
        for samples in self.samples.values():
            del samples.seconds[0]  # what comes once: pages are mapped, slots sealed
        self.leave()
        dist.barrier()

    def _load(self, name: str) -> None:
        if self.first:
            self.state.scramble()
        ckpt = self.open(replicas=1)
        try:
            dist.barrier()
            self.sampled(f"{name}_call").time(ckpt.load, self.trained)
            found = ckpt.recovery
            if found is None or found.tier != "memory" or found.skipped:
                raise Mismatch(f"{name}: not recovered from memory: {found}")
            self.sampled(name).seconds.append(found.seconds)
        finally:
            ckpt.close(flush=False)
        if self.first:
            require_equal(self.state.hashes(), self.config.expected, f"recovery ({name})")


def main() -> None:
    config = Config(**json.loads(sys.argv[1]))
    kinds = {"train": Training, "replicate": Replicating, "recover": Recovering}
    kinds[config.mode](config).run()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
