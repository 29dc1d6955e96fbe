"""Parity between agents: what a node sends of its snapshots to those that hold parity of them.

A node sends its blocks to each of the other nodes of its group, on one connection per node and snapshot::

    ParityOffer        whose snapshot it is, and the hashes of all its images
                 Waits    every few seconds while other members are waited for
                 Wanted   from which chunk on of which stripes
    bytes              of images, without padding, in the order of ``Member.parts``
                 Wanted   again, where some came damaged
                 Kept     the whole slot, made of what all members sent, is published and sealed

Who receives adds nothing up before all members of the group have made their offers: only then it is known how long the
stripes are (see :mod:`.paritykeeper`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from everstep.errors import PeerLost
from everstep.format.names import shared_with
from everstep.format.records_table import encode_records
from everstep.format.vote import STATE_IMAGE, ImageRecord
from everstep.memory.control import IMAGE_PREFIX
from everstep.memory.slots import Pinned
from everstep.plan.parity import ParityGroup, Part

from .described import ImageOf, Seat, group_of
from .link import Link
from .messages import Kept, Message, expect
from .rate import Rate
from .stripes import Key

if TYPE_CHECKING:
    from .guard import Guard

PIECE_BYTES = 4 << 20
"""Received and added up at once, in whole chunks; one chunk where chunks are larger."""
WAIT_S = 30.0
"""How long a member waits for the others while nothing moves."""


class ParityOffer(Message, frozen=True):
    """What the node at ``position`` of the group has of a snapshot, for the one at ``to`` to make parity of. By rank,
    ``records`` is the table of the hashes of its images (not of those that other nodes copy, nor of the state)."""

    run_id: str
    incarnation: int
    step: int
    world: int
    chunk_bytes: int
    m: int
    seats: tuple[Seat, ...]
    position: int
    to: int
    records: list[tuple[int, bytes]]

    @property
    def key(self) -> Key:
        return self.incarnation, self.step


class Wanted(Message, frozen=True):
    """Send these: stripes, each from a chunk of the member's block on."""

    stripes: list[tuple[int, int]]


class Waits(Message, frozen=True):
    """Others are waited for, by name; none if they are all there, and sending."""

    missing: list[str]


def pieces(part: Part, chunk_bytes: int) -> Iterator[Part]:
    """``part`` in pieces of whole chunks, at most ``PIECE_BYTES`` or one chunk."""
    step = max(chunk_bytes, PIECE_BYTES)
    for start in range(0, part.nbytes, step):
        nbytes = min(step, part.nbytes - start)
        yield Part(part.rank, part.image, part.offset + start, nbytes, part.at + start)


class ParityDuty:
    """What one node owes another of its group: blocks of each of its snapshots. :meth:`protect` is one thread's."""

    def __init__(
        self,
        connect: Callable[[], Link],
        seats: tuple[Seat, ...],
        m: int,
        position: int,
        to: int,
        *,
        run_id: str,
        world: int,
        chunk_bytes: int,
        rate: Rate | None = None,
        wait_s: float = WAIT_S,
        done: Callable[[Link], None] = Link.close,
    ) -> None:
        """``connect`` gives a new link to the node at ``to`` of the group ``seats``, any ``m`` of which may be lost;
        this node is at ``position``. ``wait_s`` as the other side has it; ``done`` takes a link that is not needed any
        more."""
        self.name = f"{seats[to].name} (parity)"
        self.moved = 0
        """Bytes that the other node took, what it was sent again not counted."""
        self.root = b""
        """Of the newest slot that the other node has sealed."""
        self._connect = connect
        self._seats = seats
        self._m = m
        self._position = position
        self._to = to
        self._run_id = run_id
        self._world = world
        self._chunk_bytes = chunk_bytes
        self._rate = rate
        self._wait_s = wait_s
        self._done = done
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._key: Key | None = None
        self._base = 0
        """What had moved before the present snapshot."""

    def protect(self, key: Key, pins: Mapping[int, Pinned]) -> None:
        """Returns when the other node holds parity of the snapshot, with that of all others. ``pins`` are those of all
        this node's ranks. Errors: PeerLost; AgentError where another member did not send in time; what the other node
        says (MemoryTooSmall, Damaged, StepOrder, ...)."""
        if key != self._key:
            self._key, self._base = key, self.moved
        records = {rank: self._records(pins[rank]) for rank in self._seats[self._position].ranks}
        offer = ParityOffer(
            self._run_id,
            *key,
            self._world,
            self._chunk_bytes,
            self._m,
            self._seats,
            self._position,
            self._to,
            [(rank, encode_records(own)) for rank, own in records.items()],
        )
        images = [
            ImageOf(rank, one.name, one.nbytes, one.root) for rank, own in records.items() for one in own
        ]
        group = group_of(
            self._seats,
            self._m,
            self._chunk_bytes,
            [images if at == self._position else () for at in range(len(self._seats))],
        )
        link = self._connect()
        with self._lock:
            self._link = link
        try:
            link.send(offer)
            while True:
                message = link.receive(self._wait_s)
                if isinstance(message, Wanted):
                    self._send(link, message, group, pins)
                elif not isinstance(message, Waits):
                    self.root = expect(message, Kept).root
                    return
        finally:
            self.close()

    def close(self) -> None:
        """From any thread: end what is under way."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            self._done(link)

    def _records(self, pin: Pinned) -> list[ImageRecord]:
        """Of the images that parity is made of: those that no other node copies from its own tensors. The snapshot is
        sealed if it is not yet."""
        records = pin.sealed()
        if records is None:
            records = pin.compute()
            pin.seal(records)
        images = records[:-1] if STATE_IMAGE in pin.regions else records  # the state's comes last
        return [record for record in images if not shared_with(record.name)]

    def _send(self, link: Link, wanted: Wanted, group: ParityGroup, pins: Mapping[int, Pinned]) -> None:
        blocks = [(chunk, group.block(self._position, stripe)) for stripe, chunk in wanted.stripes]
        if not all(0 <= chunk <= len(block) for chunk, block in blocks):
            raise PeerLost("another node asks for what it was not offered", found=wanted.stripes)
        there = sum(chunk for chunk, _ in blocks) * self._chunk_bytes
        for chunk, block in blocks:
            rest = range(block.start + chunk, block.stop)
            for part in group.members[self._position].parts(rest, self._chunk_bytes):
                view = pins[part.rank].view(IMAGE_PREFIX + part.image)
                for piece in pieces(part, self._chunk_bytes):
                    link.send_bytes(view[piece.offset : piece.offset + piece.nbytes], self._rate)
                    there += piece.nbytes
                    self.moved = max(self.moved, self._base + there)
        for pin in pins.values():
            pin.check()


def parity_duties(guard: Guard) -> list[ParityDuty]:
    """What the guard's node owes the others of its parity group; nothing without parity."""
    terms = guard.terms
    found = terms.nodes.parity_group(terms.me)
    if found is None:
        return []
    group, code = found
    seats = tuple(Seat(terms.nodes.nodes[at].name, terms.nodes.nodes[at].ranks) for at in group)
    position = group.index(terms.me)
    return [
        ParityDuty(
            functools.partial(guard.open_link, seat.name),
            seats,
            code.m,
            position,
            to,
            run_id=terms.run_id,
            world=terms.nodes.world,
            chunk_bytes=terms.chunk_bytes,
            rate=guard.rate,
            done=guard.drop_link,
        )
        for to, seat in enumerate(seats)
        if to != position
    ]
