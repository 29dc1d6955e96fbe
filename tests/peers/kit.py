"""Snapshots of one rank in an arena of its own, and nodes that keep them, all in one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from everstep.errors import EverstepError
from everstep.format.hashing import digest, hexdigest
from everstep.format.vote import ImageRecord
from everstep.memory.arena import Arena
from everstep.memory.header import Kind
from everstep.memory.process import Process
from everstep.memory.slots import Pinned, Purpose, SlotState
from everstep.peers.keeper import Keeper
from everstep.peers.link import Link, connect
from everstep.peers.listener import Listener
from everstep.peers.messages import Offer
from everstep.peers.sender import send_snapshot

SECRET = bytes(range(32))
RUN = "run-1"
CHUNK = 4096
SLOT_BYTES = 256 << 10
SIZES = {"model": 20_000, "optimizer": 9 * CHUNK}
SOON_S = 10.0
"""What a test waits for at most, where it should come at once."""


def contents(
    incarnation: int, step: int, sizes: Mapping[str, int] = SIZES, copies: Mapping[str, bytes] | None = None
) -> dict[str, bytes]:
    """Regions of a snapshot, which follow from its key."""
    source = random.Random(incarnation << 32 | step)
    meta = source.randbytes(40)
    regions = {"layout": source.randbytes(300), "meta": digest(meta) + meta, "state": source.randbytes(700)}
    regions.update({f"image:{name}": source.randbytes(nbytes) for name, nbytes in sizes.items()})
    return {**regions, **(copies or {})}


class Owner:
    """A rank's own arena, as its trainer and agent use it."""

    def __init__(
        self, directory: Path, rank: int = 0, *, slots: int = 4, slot_bytes: int = SLOT_BYTES
    ) -> None:
        self.rank = rank
        self.arena = Arena.create(
            directory,
            run_key="key",
            node=f"owner-{rank}",
            rank=rank,
            world=4,
            slots=slots,
            slot_bytes=slot_bytes,
            chunk_bytes=CHUNK,
        )
        self.incarnation = 0

    def write(
        self, step: int, *, incarnation: int = 1, regions: Mapping[str, bytes] | None = None
    ) -> tuple[Pinned, tuple[ImageRecord, ...]]:
        """A sealed snapshot, pinned, and its records."""
        if incarnation != self.incarnation:
            self.arena.take(Process.current(), run_id=RUN, incarnation=incarnation, world=4)
            self.incarnation = incarnation
        data = dict(regions if regions is not None else contents(incarnation, step))
        newest = self.arena.newest(incarnation)
        slot = self.arena.begin(incarnation, step, complete=None if newest is None else (incarnation, newest))
        assert slot is not None
        for name, view in slot.place([(name, len(value)) for name, value in data.items()]).items():
            view[:] = data[name]
        slot.publish(hexdigest(data["layout"]))
        pinned = self.arena.pin(slot.index, slot.generation, purpose=Purpose.REPLICATE)
        records = pinned.compute()
        pinned.seal(records)
        return pinned, records


def send(link: Link, snapshot: tuple[Pinned, tuple[ImageRecord, ...]], **options: Any) -> None:
    """As an agent does."""
    given: dict[str, Any] = {
        "run_id": RUN,
        "world": 4,
        "slot_bytes": SLOT_BYTES,
        "mode": "full",
        "rate": None,
    }
    send_snapshot(link, *snapshot, **{**given, **options})


class Holder:
    """A node that keeps what others send."""

    def __init__(
        self,
        directory: Path,
        *,
        local: Callable[[int], Arena | None] = lambda rank: None,
        io_s: float = SOON_S,
        run_id: str = RUN,
        **options: Any,
    ) -> None:
        self.directory = directory
        self.said: list[tuple[int, tuple[int, int], EverstepError]] = []
        self.keeper = Keeper(
            directory, "key", "holder", run_id, local, told=lambda *what: self.said.append(what), **options
        )
        self.listener = Listener(
            "127.0.0.1", 0, SECRET, run_id, {Offer: self.keeper.receive}, me="holder", io_s=io_s
        )

    def link(self, port: int | None = None, *, io_s: float = SOON_S, run_id: str = RUN) -> Link:
        at = self.listener.port if port is None else port
        return connect("127.0.0.1", at, SECRET, run_id, me="owner", timeout_s=SOON_S, io_s=io_s)

    def close(self) -> None:
        self.keeper.close()
        self.listener.close()


def held(directory: Path, rank: int = 0) -> dict[tuple[int, int], dict[str, bytes]]:
    """By key the regions of all sealed held snapshots of ``rank``, as anyone reads them, their hashes checked."""
    from everstep.memory.directory import find_arenas

    found = {}
    for info in find_arenas(directory, Kind.HELD):
        if info.rank != rank:
            continue
        assert info.path is not None
        with Arena.attach(info.path) as arena:
            for snapshot in arena.snapshots():
                if snapshot.state is not SlotState.SEALED:
                    continue
                with arena.pin(snapshot.index, snapshot.generation) as pinned:
                    assert pinned.compute() == pinned.sealed()
                    found[snapshot.key] = {name: bytes(pinned.view(name)) for name in pinned.regions}
    return found
