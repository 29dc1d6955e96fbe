"""Simulated nodes on this machine, each with its agent in a process of its own, its arenas and its runtime directory;
trainers are objects of the test's process, and train nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.agent.client import AgentClient
from everstep.agent.places import LOG
from everstep.agent.protocol import Guarding
from everstep.agent.values import AgentSettings, Hello, Progress
from everstep.backends.files import LocalBackend
from everstep.memory.arena import Arena
from everstep.memory.directory import find_arenas
from everstep.memory.header import Kind
from everstep.memory.process import Process
from everstep.memory.slots import SnapshotInfo
from everstep.peers.nodemap import NodeMap, PeerNode, encode_map
from everstep.plan.retention import Retention
from everstep.store.blocking import run_blocking
from everstep.store.runs import create_run

from tests.small_run import CHUNK, SOON_S, agent_of, open_incarnation, payload, put_snapshot, until

SLOT_BYTES = 512 << 10
SECRET = b"a secret of thirty-two bytes ...."


@dataclass
class Node:
    """One simulated node, and the ranks of the newest incarnation on it."""

    job: Job
    index: int
    ranks: list[Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.base = self.job.base / f"n{self.index}"
        self.base.mkdir(exist_ok=True)
        self.arenas = self.base / "arenas"
        self.arenas.mkdir(mode=0o700, exist_ok=True)
        self.settings = AgentSettings(
            root=str(self.job.base / "run"),
            run_key=f"{self.index:016x}",
            node=f"n{self.index}",
            runtime_dir=self.base / "agent",
            retention=Retention(keep_last=100, keep_every=None),
            linger_s=self.job.linger_s,
            commit_timeout_s=20.0,
            chunk_bytes=CHUNK,
        )

    @property
    def name(self) -> str:
        return self.settings.node

    def status(self) -> dict[str, Any]:
        """What the agent says of its guard."""
        return dict(self.ranks[0].client.status()["guard"] or {})

    def agent(self) -> Process | None:
        """See :func:`agent_of`."""
        return agent_of(self.settings)

    def kill_agent(self, number: int = signal.SIGKILL) -> Process | None:
        agent = self.agent()
        if agent is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent.pid, number)
        return agent

    def log(self) -> str:
        path = self.settings.runtime_dir / LOG
        return path.read_text() if path.exists() else ""

    def held(self) -> dict[int, set[tuple[int, int]]]:
        """By rank what is kept here of it: (incarnation, step)."""
        found: dict[int, set[tuple[int, int]]] = {}
        for info in find_arenas(self.arenas, Kind.HELD):
            assert info.path is not None
            with contextlib.suppress(FileNotFoundError), Arena.attach(info.path) as arena:
                found.setdefault(info.rank, set()).update(one.key for one in arena.snapshots())
        return found

    def check_held(self, rank: int, key: tuple[int, int], nbytes: int) -> None:
        """What is kept are the rank's bytes."""
        for info in find_arenas(self.arenas, Kind.HELD):
            assert info.path is not None
            if info.rank != rank:
                continue
            with Arena.attach(info.path) as arena:
                one = next(one for one in arena.snapshots() if one.key == key)
                with arena.pin(one.index, one.generation) as pin:
                    assert pin.sealed() is not None
                    (name,) = [name for name in pin.regions if name.startswith("image:")]
                    assert bytes(pin.view(name)).endswith(payload(key[0], key[1], rank, nbytes))
                    return
        raise AssertionError(f"nothing is kept of rank {rank}")


@dataclass
class Rank:
    """One rank: its arena, and its client."""

    node: Node
    rank: int
    world: int
    incarnation: int
    arena: Arena
    client: AgentClient = field(init=False)
    heard: list[Progress] = field(default_factory=list)
    alive: bool = True

    def hear(self) -> list[Progress]:
        if self.alive:
            self.heard += self.client.poll()
        return self.heard

    def stages(self) -> list[str]:
        return [one.stage for one in self.hear()]

    @property
    def complete(self) -> int:
        """W, as the agent says; -1 before."""
        said = self.arena.complete
        return said[1] if said is not None and said[0] == self.incarnation else -1

    @property
    def protected(self) -> int:
        said = self.arena.protected
        return said[1] if said is not None and said[0] == self.incarnation else -1

    def snapshot(self, step: int, nbytes: int = 3 * CHUNK) -> SnapshotInfo:
        """Put the snapshot of ``step`` into a slot, and say so."""
        slot = until(
            lambda: (
                self.hear() is not None
                and self.arena.begin(self.incarnation, step, complete=self.arena.complete)
            ),
            "a free slot",
        )
        info = put_snapshot(self.arena, slot, self.rank, self.world, self.incarnation, step, nbytes)
        self.client.taken(step, slot=slot.index, generation=slot.generation)
        return info


class Job:
    """Nodes with ``per_node`` ranks each, protected by ``copies``."""

    def __init__(
        self,
        base: Path,
        nodes: int = 2,
        per_node: int = 1,
        copies: int = 1,
        *,
        slots: int = 3,
        timeout_s: float = SOON_S,
        limit_s: float = SOON_S,
        linger_s: float = 5.0,
        slot_bytes: int = SLOT_BYTES,
        spares: Sequence[str] = (),
        places: dict[int, tuple[str, int]] | None = None,
        env: dict[int, dict[str, str]] | None = None,
        told_bytes: int | None = None,
        mortal: Collection[int] = (),
        parity: tuple[int, int] | None = None,
        rate: float | None = None,
    ) -> None:
        """``timeout_s``: when training goes on without protection that makes no progress, by default never in a test;
        ``places``: addresses under which others know a node's agent, if not its own; ``env`` of its agent;
        ``told_bytes``: what ranks say of their slots, if it is not the truth;
        ``mortal``: nodes whose trainers can :meth:`die`."""
        self.base = base
        self.linger_s = linger_s
        self.copies = copies
        self.per_node = per_node
        self.slots = slots
        self.timeout_s = timeout_s
        self.limit_s = limit_s
        self.slot_bytes = slot_bytes
        self.spares = spares
        self.places = places or {}
        self.env = env or {}
        self.told_bytes = told_bytes
        self.mortal = mortal
        self.parity = parity
        self.rate = rate
        self._bodies: dict[int, subprocess.Popen[bytes]] = {}
        self.incarnation = 0
        self.run_id = run_blocking(create_run(LocalBackend(base / "run"), chunk_bytes=CHUNK)).run_id
        self.nodes = [Node(self, index) for index in range(nodes)]
        self._all = self.nodes
        self._former: list[Rank] = []

    @property
    def ranks(self) -> list[Rank]:
        return [rank for node in self.nodes for rank in node.ranks]

    def open(self) -> Job:
        """The next incarnation: all ranks register, the agents listen, and guard."""
        world = self.per_node * len(self.nodes)
        self.incarnation = open_incarnation(LocalBackend(self.base / "run"), world)
        for node in self.nodes:
            node.ranks = [
                self._rank(node, node.index * self.per_node + at, world) for at in range(self.per_node)
            ]
        peers = []
        for node in self.nodes:
            host, port = node.ranks[0].client.listen_for_peers("127.0.0.1", SECRET, timeout_s=SOON_S)
            host, port = self.place_of(node.index, host, port)
            rooms = tuple(self.told_bytes or rank.arena.info.slot_bytes for rank in node.ranks)
            peers.append(PeerNode(node.name, host, port, "", tuple(r.rank for r in node.ranks), rooms))
        for spare in self.spares:
            host, _, text = spare.rpartition(":")
            peers.append(PeerNode(spare, host, int(text), spare=True))
        self.map = NodeMap(tuple(peers), self.copies, self.parity)
        for node in self.nodes:
            self.guard(node)
        return self

    def place_of(self, index: int, host: str, port: int) -> tuple[str, int]:
        """Where others are to look for the agent that listens at ``host:port``."""
        return self.places.get(index, (host, port))

    def guard(self, node: Node) -> None:
        wish = Guarding(
            number=0,
            nodes=encode_map(self.map),
            me=node.index,
            incarnation=self.incarnation,
            arenas=str(node.arenas),
            chunk_bytes=CHUNK,
            rate_bytes_per_s=self.rate,
            timeout_s=self.timeout_s,
            limit_s=self.limit_s,
        )
        node.ranks[0].client.guard(wish, timeout_s=SOON_S)

    def snapshot(self, step: int, nbytes: int = 3 * CHUNK) -> None:
        for rank in self.ranks:
            rank.snapshot(step, nbytes)

    def complete_is(self, step: int) -> bool:
        for rank in self.ranks:
            rank.hear()
        return all(rank.complete >= step for rank in self.ranks)

    def await_complete(self, step: int, timeout_s: float = SOON_S) -> None:
        until(lambda: self.complete_is(step), f"W = {step}", timeout_s)

    def await_protected(self, step: int) -> None:
        """W may have gone on without that."""
        until(lambda: all(rank.protected >= step for rank in self.ranks), f"protection of step {step}")

    def reopen(self, nodes: int) -> Job:
        """The next incarnation, on the first ``nodes`` nodes."""
        former = self.ranks
        for rank in former:
            rank.client.close()
        self.nodes = self.nodes[:nodes]
        self.open()
        self._former += former
        return self

    def die(self, index: int) -> None:
        """The trainers of that node end without a word."""
        for rank in self.nodes[index].ranks:
            rank.client.close()
            rank.alive = False
            body = self._bodies[rank.rank]
            body.kill()
            body.wait()

    def end(self) -> None:
        """Agents die, whatever they do."""
        for body in self._bodies.values():
            body.kill()
            body.wait()
        for rank in self.ranks:
            rank.client.close()
        agents = [node.kill_agent() for node in self._all]
        for agent in agents:
            until(lambda agent=agent: agent is None or not agent.alive(), "the end of an agent")
        for rank in [*self.ranks, *self._former]:
            rank.arena.close()

    def _rank(self, node: Node, rank: int, world: int) -> Rank:
        arena = Arena.create(
            node.arenas,
            run_key=node.settings.run_key,
            node=node.name,
            rank=rank,
            world=world,
            slots=self.slots,
            slot_bytes=self.slot_bytes,
            chunk_bytes=CHUNK,
        )
        arena.take(Process.current(), run_id=self.run_id, incarnation=self.incarnation, world=world)
        made = Rank(node, rank, world, self.incarnation, arena)
        assert arena.info.path is not None
        hello = Hello(
            self.run_id, rank, world, self.incarnation, None, self._process(node, rank), arena.info.path
        )
        env = self.env.get(node.index, {})
        before = {name: os.environ.get(name) for name in env}
        os.environ.update(env)
        try:
            made.client = AgentClient.connect(node.settings, hello)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        return made

    def _process(self, node: Node, rank: int) -> Process:
        """Whom the agent takes for the trainer."""
        if node.index not in self.mortal:
            return Process.current()
        self._bodies[rank] = subprocess.Popen(["sleep", "600"])
        found = Process.of(self._bodies[rank].pid)
        assert found is not None
        return found
