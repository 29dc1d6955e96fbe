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

from collections.abc import Callable, Iterator, Mapping

from everstep.errors import Damaged
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
    """What one node owes another of its group: blocks of each of its snapshots. Used by one thread at a time."""

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
    ) -> None:
        """``connect`` gives a new link to the node at ``to`` of the group ``seats``, any ``m`` of which may be lost;
        this node is at ``position``. ``wait_s`` as the other side has it."""
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

    def protect(self, key: Key, pins: Mapping[int, Pinned]) -> bytes:
        """Returns when the other node holds parity of the snapshot, together with all others': the root of what it
        holds. ``pins`` are those of all this node's ranks. Errors: PeerLost; AgentError where another member did not
        send in time; what the other node says (MemoryTooSmall, Damaged, StepOrder, ...)."""
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
        with self._connect() as link:
            link.send(offer)
            while True:
                message = link.receive(self._wait_s)
                if isinstance(message, Wanted):
                    self._send(link, message, group, pins)
                elif not isinstance(message, Waits):
                    return expect(message, Kept).root

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
        for stripe, chunk in wanted.stripes:
            block = group.block(self._position, stripe)
            if not 0 <= chunk <= len(block):
                raise Damaged("another node asks for what it was not offered", found=(stripe, chunk))
            rest = range(block.start + chunk, block.stop)
            for part in group.members[self._position].parts(rest, self._chunk_bytes):
                view = pins[part.rank].view(IMAGE_PREFIX + part.image)
                link.send_bytes(view[part.offset : part.offset + part.nbytes], self._rate)
        for pin in pins.values():
            pin.check()
