"""Small runs with real agents: arenas with a few kilobytes, trainers in this process or in their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from everstep.agent.client import AgentClient
from everstep.agent.places import LOG
from everstep.agent.values import AgentSettings, Hello, Progress
from everstep.backends.files import LocalBackend
from everstep.errors import AgentError
from everstep.format.manifest import Manifest
from everstep.memory.arena import Arena
from everstep.memory.process import Process
from everstep.memory.slots import SnapshotInfo
from everstep.plan.retention import Retention
from everstep.store.blocking import run_blocking
from everstep.store.catalog import list_steps, read_decision
from everstep.store.runs import create_run
from everstep.store.sources import DurableSource

from tests.small_run import CHUNK, SOON_S, agent_of, open_incarnation, payload, put_snapshot, until

SLOT_BYTES = 256 << 10
RUN_KEY = "0123456789abcdef"


@dataclass
class Place:
    """A run's root, arenas and runtime directory under one temporary directory."""

    base: Path
    run_id: str = ""
    settings: AgentSettings = field(init=False)

    def __post_init__(self) -> None:
        self.settings = AgentSettings(
            root=str(self.base / "run"),
            run_key=RUN_KEY,
            node="n0",
            runtime_dir=self.base / "agent",
            retention=Retention(keep_last=100, keep_every=None),
            linger_s=0.3,
            commit_timeout_s=20.0,
            chunk_bytes=CHUNK,
        )

    @property
    def arenas(self) -> Path:
        path = self.base / "arenas"
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def with_settings(self, **changes: Any) -> Place:
        self.settings = replace(self.settings, **changes)
        return self

    # -- storage

    def backend(self) -> LocalBackend:
        return LocalBackend(self.settings.root)

    def create(self) -> Place:
        record = run_blocking(create_run(self.backend(), chunk_bytes=CHUNK))
        self.run_id = record.run_id
        return self

    def incarnation(self, adopted: tuple[int, int] | None = None, world: int = 1) -> int:
        return open_incarnation(self.backend(), world, adopted)

    def durable(self) -> list[tuple[int, int]]:
        """(incarnation, step) of all checkpoints."""

        async def look() -> list[tuple[int, int]]:
            backend = self.backend()
            found = []
            for names in await list_steps(backend):
                if isinstance(await read_decision(backend, names), Manifest):
                    found.append(names.key)
            return found

        return run_blocking(look())

    def decisions(self, step: int, incarnation: int = 1) -> list[str]:
        """Kinds of all decisions on a step."""
        directory = Path(self.settings.root) / "checkpoints" / f"{step:09d}" / f"{incarnation:04d}"
        return [
            json.loads(path.read_bytes())["everstep"] for path in sorted(directory.glob("manifest-*.json"))
        ]

    def check(self, incarnation: int, step: int, world: int) -> None:
        """Every rank's bytes of the checkpoint are the ones that were put into its slot."""

        async def look() -> None:
            backend = self.backend()
            for names in await list_steps(backend):
                decision = await read_decision(backend, names)
                if names.key == (incarnation, step):
                    assert isinstance(decision, Manifest) and decision.world == world
                    for rank in range(world):
                        await self._check_rank(
                            DurableSource(backend, decision, CHUNK), incarnation, step, rank
                        )
                    return
            raise AssertionError(f"step {step} is not there")

        run_blocking(look())

    @staticmethod
    async def _check_rank(source: DurableSource, incarnation: int, step: int, rank: int) -> None:
        layout = await source.layout(rank)
        image = bytearray(layout.images[0].nbytes)
        await source.read_into(rank, layout.images[0].name, 0, memoryview(image))
        assert bytes(image[len(layout.images[0].header) :]) == payload(incarnation, step, rank)

    # -- the agent

    def agent(self) -> Process | None:
        """See :func:`agent_of`."""
        return agent_of(self.settings)

    def log(self) -> str:
        path = self.settings.runtime_dir / LOG
        return path.read_text() if path.exists() else ""


@dataclass
class Trainer:
    """One rank: its arena, and its client once it has registered."""

    place: Place
    rank: int
    world: int
    incarnation: int
    arena: Arena
    client: AgentClient | None = None

    @classmethod
    def make(
        cls,
        place: Place,
        rank: int = 0,
        world: int = 1,
        incarnation: int = 1,
        *,
        memfd: bool = False,
        slots: int = 4,
    ) -> Trainer:
        same: dict[str, Any] = {
            "run_key": RUN_KEY,
            "node": "n0",
            "rank": rank,
            "world": world,
            "slots": slots,
            "slot_bytes": SLOT_BYTES,
            "chunk_bytes": CHUNK,
        }
        arena = Arena.create_memfd(**same) if memfd else Arena.create(place.arenas, **same)
        arena.take(Process.current(), run_id=place.run_id, incarnation=incarnation, world=world)
        return cls(place, rank, world, incarnation, arena)

    def hello(self) -> Hello:
        where: Path | int = self.arena.info.path or self.arena.fileno()
        return Hello(
            self.place.run_id, self.rank, self.world, self.incarnation, None, Process.current(), where
        )

    def connect(self, **more: Any) -> Trainer:
        self.client = AgentClient.connect(self.place.settings, self.hello(), **more)
        return self

    @property
    def agent(self) -> AgentClient:
        assert self.client is not None
        return self.client

    def snapshot(self, step: int) -> SnapshotInfo:
        """Put the snapshot of ``step`` into a slot."""
        complete = max(((s.incarnation, s.step) for s in self.arena.snapshots()), default=None)
        slot = until(lambda: self.arena.begin(self.incarnation, step, complete=complete), "a free slot")
        return put_snapshot(self.arena, slot, self.rank, self.world, self.incarnation, step)

    def flush(self, step: int) -> None:
        info = next(f for f in self.arena.snapshots() if (f.incarnation, f.step) == (self.incarnation, step))
        self.agent.flush(step, slot=info.index, generation=info.generation)

    def save(self, step: int) -> None:
        self.snapshot(step)
        self.flush(step)

    def fork_sleeper(self) -> None:
        """A child that keeps all descriptors open, for as long as the test may take."""
        if os.fork() == 0:
            time.sleep(2 * SOON_S)
            os._exit(0)

    def verdict(self, step: int, timeout_s: float = SOON_S) -> Progress:
        return self.agent.wait(step, timeout_s=timeout_s)


class TrainerProcess:
    """A trainer of its own process: ``call("save", 3)`` runs ``Trainer.save(3)`` there. ``stages`` of what
    it polled."""

    def __init__(self, place: Place, rank: int = 0, world: int = 1, incarnation: int = 1, **env: str) -> None:
        given = {"base": str(place.base), "run_id": place.run_id, "settings": place.settings.to_wire()}
        given |= {"rank": rank, "world": world, "incarnation": incarnation}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.agent.trainer", json.dumps(given)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )

    def send(self, name: str, *args: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *args]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the trainer has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def call(self, name: str, *args: Any) -> Any:
        self.send(name, *args)
        return self.answer()

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(SOON_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(SOON_S)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


def verdicts(trainers: list[Trainer], step: int) -> list[Progress]:
    """Every rank's verdict; all of them are at work meanwhile, as separate trainers would be."""

    def look() -> list[Progress] | None:
        found = []
        for trainer in trainers:
            try:
                found.append(trainer.agent.wait(step, timeout_s=0.0))
            except AgentError as error:
                assert "still not durable" in str(error)
        return found if len(found) == len(trainers) else None

    return until(look, f"verdicts on step {step}")
