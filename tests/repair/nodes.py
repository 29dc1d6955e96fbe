"""Nodes of a run that are mended from: each has snapshots in arenas, an agent's ear for other nodes, and a beacon."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from everstep.format import names
from everstep.format.beacon import Beacon, encode_beacon
from everstep.format.hashing import hexdigest
from everstep.memory.arena import Arena
from everstep.memory.process import Process
from everstep.memory.slots import Pinned, Purpose
from everstep.peers.address import joined_address
from everstep.peers.described import Seat
from everstep.peers.keeper import Keeper
from everstep.peers.lending import Lender
from everstep.peers.link import Link, connect
from everstep.peers.listener import Listener
from everstep.peers.loans import Borrow
from everstep.peers.messages import Mode, Offer
from everstep.peers.parity import ParityDuty, ParityOffer
from everstep.peers.paritykeeper import ParityKeeper
from everstep.peers.sender import send_snapshot

from tests.store import store_kit as kit

SECRET = "of this run's agents alone"
SLOTS = 3
SLOT_BYTES = 256 << 10
SOON_S = 10.0


def regions_of(step: int, rank: int) -> dict[str, bytearray]:
    """Of the snapshot that the run's checkpoint was flushed from."""
    return kit.snapshot(step, rank).data


class Node:
    """Serves until :meth:`close`. ``asked`` are the messages that were served."""

    def __init__(self, root: Path, base: Path, name: str, run_id: str, secret: str = SECRET) -> None:
        self.root, self.name, self.run_id = root, name, run_id
        self.directory = base / name
        self.directory.mkdir()
        self.asked: list[Any] = []
        self.known: list[tuple[str, str, int]] = []
        self._arenas: list[Arena] = []
        self._pins: list[Pinned] = []
        self.keeper = Keeper(self.directory, "key", name, run_id, lambda rank: None)
        self.parity = ParityKeeper(self.directory, "key", name, run_id, wait_s=SOON_S)
        self.lender = Lender(self.directory, run_id, list, lambda: self.known, lambda: None)
        self._end = threading.Event()
        self.listener = Listener(
            "127.0.0.1",
            0,
            secret.encode(),
            run_id,
            {Borrow: self._serve, Offer: self.keeper.receive, ParityOffer: self.parity.receive},
            me=name,
            io_s=SOON_S,
        )
        self.serve: Callable[[Link, Borrow], None] = self.lender.serve

    def _serve(self, link: Link, borrow: Borrow) -> None:
        self.asked.append(borrow)
        self.serve(link, borrow)

    @property
    def address(self) -> str:
        return joined_address(self.listener.host, self.listener.port)

    def beacon(self, address: str | None = "") -> None:
        """Lay it under the run, with its own address unless another one is given."""
        at = self.address if address == "" else address
        made = Beacon(
            self.name, "host", f"boot of {self.name}", 1, 2, 1, 5.0, 20.0, 1, kit.WORLD, (), None, None, None,
            0, at,
        )  # fmt: skip
        path = self.root / names.beacon(self.name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode_beacon(made))

    def has(
        self, step: int, rank: int, *, seal: bool = True, regions: Mapping[str, bytes] | None = None
    ) -> Pinned:
        """A snapshot of a rank that ran there."""
        data = regions if regions is not None else regions_of(step, rank)
        arena = Arena.create(
            self.directory,
            run_key="key",
            node=self.name,
            rank=rank,
            world=kit.WORLD,
            slots=SLOTS,
            slot_bytes=SLOT_BYTES,
            chunk_bytes=kit.CHUNK,
        )
        self._arenas.append(arena)
        arena.take(Process.current(), run_id=self.run_id, incarnation=1, world=kit.WORLD)
        slot = arena.begin(1, step, complete=None)
        assert slot is not None
        for name, view in slot.place([(name, len(value)) for name, value in data.items()]).items():
            view[:] = data[name]
        slot.publish(hexdigest(data["layout"]))
        pin = arena.pin(slot.index, slot.generation, purpose=Purpose.REPLICATE)
        self._pins.append(pin)
        if seal:
            pin.seal(pin.compute())
        return pin

    def keeps(self, other: Node, pin: Pinned, mode: Mode = "full") -> None:
        """Have ``other`` keep that snapshot of this node's."""
        at = other.listener
        with connect(at.host, at.port, SECRET.encode(), self.run_id, me=self.name, timeout_s=SOON_S) as link:
            send_snapshot(
                link,
                pin,
                pin.sealed() or (),
                run_id=self.run_id,
                world=kit.WORLD,
                slot_bytes=SLOT_BYTES,
                mode=mode,
            )

    def tells(self, other: Node, pin: Pinned) -> None:
        """Have ``other`` keep what is small of that snapshot, as with parity."""
        self.keeps(other, pin, mode="meta")

    def gives(
        self, other: Node, step: int, pins: Mapping[int, Pinned], seats: tuple[Seat, ...], at: int, to: int
    ) -> None:
        """Have ``other`` make parity of this node's snapshots; by place in the group, one of which may be lost."""
        listener, secret = other.listener, SECRET.encode()

        def link() -> Link:
            return connect(listener.host, listener.port, secret, self.run_id, me=self.name, timeout_s=SOON_S)

        duty = ParityDuty(
            link, seats, 1, at, to, run_id=self.run_id, world=kit.WORLD, chunk_bytes=kit.CHUNK, wait_s=SOON_S
        )
        duty.protect((1, step), pins)

    def spoil_parity(self) -> None:
        """A bit of every chunk of its parity blocks, whose hashes stay what they were."""
        for arena in self.parity.arenas():
            path = arena.info.path
            assert path is not None
            data = bytearray(path.read_bytes())
            for info in arena.snapshots():
                with arena.pin(info.index, info.generation) as pin:
                    blocks = [bytes(pin.view(name)) for name in pin.regions if name.startswith("image:")]
                for block in filter(None, blocks):
                    begin = data.index(block)
                    for at in range(begin, begin + len(block), kit.CHUNK):
                        data[at] ^= 1
            with path.open("r+b") as file:
                file.write(data)

    def reuse(self) -> None:
        """Newer snapshots take the place of what its own ranks had."""
        for pin in self._pins:
            pin.release()
        self._pins = []
        for arena in self._arenas:
            [newest] = [one.step for one in arena.snapshots()]
            for step in range(newest + 1, newest + 1 + SLOTS):
                slot = arena.begin(1, step, complete=(1, step - 1))
                assert slot is not None
                slot.place([("meta", 8)])
                slot.publish("")
            assert newest not in [one.step for one in arena.snapshots()]

    def slow(self) -> None:
        """From now on it is not the nearest."""

        def serve(link: Link, borrow: Borrow) -> None:
            self._end.wait(0.2)
            self.lender.serve(link, borrow)

        self.serve = serve

    def forget(self) -> None:
        """What its own ranks had is gone."""
        for pin in self._pins:
            pin.release()
        for arena in self._arenas:
            arena.unlink()
            arena.close()
        self._pins, self._arenas = [], []

    def stall(self) -> None:
        """From now on it says what it has, and gives nothing of it."""
        self.lender._give = lambda link, lots, take: self._wait()  # type: ignore[method-assign]

    def _wait(self) -> None:
        self._end.wait(SOON_S)

    def close(self) -> None:
        self._end.set()
        self.keeper.close()
        self.parity.close()
        self.listener.close()
        self.forget()
