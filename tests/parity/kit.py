"""A group of nodes in one process, or in several: arenas of their ranks, and agents that make parity of them."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from everstep.errors import EverstepError
from everstep.memory.arena import Arena
from everstep.memory.process import Process
from everstep.memory.slots import Pinned
from everstep.peers.described import Seat
from everstep.peers.link import Link, connect
from everstep.peers.listener import Listener
from everstep.peers.parity import ParityDuty, ParityOffer
from everstep.peers.paritykeeper import ParityKeeper

CHUNK = 4096
RUN = "run"
SECRET = b"s" * 32
SLOT_BYTES = 64 * CHUNK
WAIT_S = 20.0
Key = tuple[int, int]
Contents = dict[tuple[int, str], bytes]
"""By rank and image."""


def seats_of(n: int, source: random.Random, most: int = 2) -> tuple[Seat, ...]:
    """Members with one to ``most`` ranks."""
    ranks = itertools.count()
    return tuple(
        Seat(f"node{at}", tuple(itertools.islice(ranks, source.randint(1, most)))) for at in range(n)
    )


def images_of(seats: Sequence[Seat], source: random.Random) -> Contents:
    """Of uneven sizes; what a name says other ranks copy is no part of parity."""
    found: Contents = {}
    for seat in seats:
        for rank in seat.ranks:
            sizes = {
                "model": source.randint(0, 9 * CHUNK),
                "optimizer": source.choice([1, CHUNK, source.randint(1, 20 * CHUNK)]),
                "model+7": source.randint(1, CHUNK),
            }
            found |= {(rank, name): source.randbytes(nbytes) for name, nbytes in sizes.items()}
    return found


class Node:
    """One simulated node, in a directory of its own: its ranks' arenas, and an agent that keeps parity."""

    def __init__(self, directory: Path, seats: tuple[Seat, ...], m: int, position: int) -> None:
        self.directory = directory
        self.seats = seats
        self.m = m
        self.position = position
        self.world = sum(len(seat.ranks) for seat in seats)
        self.complete: Key | None = None
        self.arenas: dict[int, Arena] = {}
        self.keeper: ParityKeeper | None = None
        self.listener: Listener | None = None
        directory.mkdir(exist_ok=True)

    def save(self, key: Key, contents: Mapping[tuple[int, str], bytes]) -> None:
        """Snapshots of all ranks, in arenas like the trainer's."""
        for rank in self.seats[self.position].ranks:
            arena = self.arenas.get(rank) or self._arena(rank)
            arena.take(Process.current(), run_id=RUN, incarnation=key[0], world=self.world)
            slot = arena.begin(*key, complete=self.complete)
            assert slot is not None
            images = {"image:" + name: data for (of, name), data in contents.items() if of == rank}
            data = images | {"layout": b"layout", "state": b"state%d" % rank, "meta": b"meta"}
            for name, view in slot.place([(name, len(one)) for name, one in data.items()]).items():
                view[:] = data[name]
            slot.publish("ab" * 16)

    def _arena(self, rank: int) -> Arena:
        self.arenas[rank] = Arena.create(
            self.directory,
            run_key="key",
            node=self.seats[self.position].name,
            rank=rank,
            world=self.world,
            slot_bytes=SLOT_BYTES,
            chunk_bytes=CHUNK,
        )
        return self.arenas[rank]

    def pins(self, key: Key) -> dict[int, Pinned]:
        found = {}
        for rank, arena in self.arenas.items():
            for info in arena.snapshots():
                if info.key == key:
                    found[rank] = arena.pin(info.index, info.generation)
        return found

    def completed(self, key: Key) -> None:
        """W has come that far."""
        self.complete = key
        if self.keeper is not None:
            self.keeper.completed(key)

    # -- the agent

    def serve(self, *, wait_s: float = WAIT_S, **options: Any) -> ParityKeeper:
        name = self.seats[self.position].name
        self.keeper = ParityKeeper(self.directory, "key", name, RUN, wait_s=wait_s, **options)
        if self.complete is not None:
            self.keeper.completed(self.complete)
        self.listener = Listener(
            "127.0.0.1", 0, SECRET, RUN, {ParityOffer: self.keeper.receive}, me=name, io_s=wait_s
        )
        return self.keeper

    def duty(self, to: Node, connect_to: Callable[[], Link] | None = None, **options: Any) -> ParityDuty:
        """What this node owes to another."""
        options = {"run_id": RUN, "world": self.world, "chunk_bytes": CHUNK, "wait_s": WAIT_S, **options}
        return ParityDuty(
            connect_to or (lambda: self.link(to)), self.seats, self.m, self.position, to.position, **options
        )

    def link(self, to: Node) -> Link:
        assert to.listener is not None
        name = self.seats[self.position].name
        return connect(
            to.listener.host, to.listener.port, SECRET, RUN, me=name, timeout_s=WAIT_S, io_s=WAIT_S
        )

    def end(self) -> None:
        """The agent goes; arenas stay."""
        if self.keeper is not None:
            self.keeper.close()
        if self.listener is not None:
            self.listener.close()
        self.keeper = self.listener = None

    def close(self) -> None:
        self.end()
        for arena in self.arenas.values():
            arena.close()


def protect(
    nodes: Sequence[Node], key: Key, pairs: Sequence[tuple[int, int]] | None = None
) -> dict[tuple[int, int], bytes | EverstepError]:
    """Each node (or only ``pairs``) sends to each other, all at once: the roots, or why not."""
    found: dict[tuple[int, int], bytes | EverstepError] = {}

    def send(one: int, other: int) -> None:
        with ExitStack() as stack:
            pins = nodes[one].pins(key)
            for pin in pins.values():
                stack.enter_context(pin)
            try:
                duty = nodes[one].duty(nodes[other])
                duty.protect(key, pins)
                found[one, other] = duty.root
            except EverstepError as error:
                found[one, other] = error

    wanted = pairs if pairs is not None else list(itertools.permutations(range(len(nodes)), 2))
    threads = [threading.Thread(target=send, args=pair) for pair in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * WAIT_S)
        assert not thread.is_alive()
    return found


def group(base: Path, n: int, m: int, source: random.Random, most: int = 2) -> Iterator[list[Node]]:
    """Nodes that serve, closed at the end."""
    seats = seats_of(n, source, most)
    nodes = [Node(base / f"node{at}", seats, m, at) for at in range(n)]
    try:
        for node in nodes:
            node.serve()
        yield nodes
    finally:
        for node in nodes:
            node.close()


def parity_blocks(node: Node, key: Key) -> dict[int, bytes]:
    """By stripe what the node's parity slot has of ``key``, sealed and proved."""
    assert node.keeper is not None
    for arena in node.keeper.arenas():
        for info in arena.snapshots():
            if info.key == key:
                with arena.pin(info.index, info.generation) as pin:
                    assert pin.sealed() == pin.compute()
                    return {
                        int(name.removeprefix("image:parity-")): bytes(pin.view(name))
                        for name in pin.regions
                        if name != "state"
                    }
    return {}
