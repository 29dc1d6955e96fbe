"""The parity of one snapshot in the making: what members of the group send is proved, and added up exactly once.

Bytes come in any order of members and stripes, some of them twice (a connection broke, and the next one begins where
it is told to). Of each member's block of each stripe a counter says how many chunks were added: the chunks and the
counter change under the stripe's lock, after the chunks' hashes were compared with the owner's. So a block is resumed,
never counted twice, and never counted damaged. Whatever kills this process leaves a slot that is not published.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from everstep.errors import Damaged, EverstepError, PeerLost
from everstep.format.constants import HASH_BYTES
from everstep.format.hashing import chunk_hashes
from everstep.format.vote import STATE_IMAGE, ImageRecord
from everstep.memory.control import IMAGE_PREFIX
from everstep.plan import galois
from everstep.plan.parity import ParityGroup, Part

from .described import DESCRIPTOR_VERSION, Described, ImageOf, Seat, group_of, parity_image

Records = Mapping[tuple[int, str], ImageRecord]
"""Of one member: by rank and image, in the order in which its images lie behind one another."""

Key = tuple[int, int]
"""(incarnation, step)."""


_ZEROS = bytes(1 << 20)


class Stripe:
    """One parity block: the sum of what was added so far. ``view`` are its bytes in the slot."""

    def __init__(self, row: int, view: memoryview, chunk_bytes: int) -> None:
        self.row = row
        self.lock = threading.Lock()
        """Held while anything is added, and while the counters of the stripe change."""
        self._view = view
        self._chunk_bytes = chunk_bytes
        self._begun = bytearray(len(view) // chunk_bytes)
        """By chunk whether anything was added: till then a slot holds an older parity there."""

    def add(self, chunk: int, data: memoryview, factor: int) -> None:
        """``data``, whole chunks, from chunk ``chunk`` of the block on. Under the lock."""
        size = self._chunk_bytes
        for at in range(chunk, chunk + len(data) // size):
            if not self._begun[at]:
                for start in range(at * size, (at + 1) * size, len(_ZEROS)):
                    self._view[start : min(start + len(_ZEROS), (at + 1) * size)] = _ZEROS[:size]
                self._begun[at] = 1
        into = self._view[chunk * size : chunk * size + len(data)]
        galois.accumulate(into, data, factor, galois.unit_of(size))


class Building:
    """Parity of one snapshot that one node (at ``position`` of the group) makes of what the others send.

    Any thread may call: :meth:`join` for each connection of a member; :meth:`start` once, when all members have joined;
    :meth:`add` then. ``error`` is why it was given up, after which nothing is added any more."""

    def __init__(self, key: Key, seats: tuple[Seat, ...], m: int, position: int, chunk_bytes: int) -> None:
        self.key = key
        self.seats = seats
        self.m = m
        self.position = position
        self.chunk_bytes = chunk_bytes
        self.error: EverstepError | None = None
        self.root: bytes | None = None
        """Of the whole, once it is published and sealed."""
        self._lock = threading.Lock()
        """Guards who takes part."""
        self._group: ParityGroup | None = None
        self._records: dict[int, Records] = {}
        self._turns: dict[int, int] = {}
        self._stripes: dict[int, Stripe] = {}
        self._next: dict[tuple[int, int], int] = {}
        """By member and stripe the chunks of its block that were added; under the stripe's lock."""

    # -- members

    def join(self, position: int, records: Records) -> int:
        """A member begins, or begins again: its turn, which ends those before. Damaged if it has another snapshot than
        it said before: then what was added up is of no use, and nothing more is."""
        with self._lock:
            known = self._records.setdefault(position, dict(records))
            if list(known.items()) != list(records.items()):
                self.give_up(
                    Damaged(
                        f"node {self.seats[position].name} sends another snapshot of step {self.key[1]} than before",
                        found=[one.root.hex() for one in records.values()][:4],
                        expected=[one.root.hex() for one in known.values()][:4],
                    )
                )
            self.check()
            self._turns[position] = self._turns.get(position, 0) + 1
            return self._turns[position]

    @property
    def waits_for(self) -> list[str]:
        """Names of the members that have not come yet."""
        return [
            seat.name for at, seat in enumerate(self.seats) if at != self.position and at not in self._records
        ]

    def images(self) -> tuple[tuple[ImageOf, ...], ...]:
        """What parity is made of, by position."""
        return tuple(
            tuple(
                ImageOf(rank, image, record.nbytes, record.root)
                for (rank, image), record in self._records.get(at, {}).items()
            )
            for at in range(len(self.seats))
        )

    def described(self) -> bytes:
        """The slot's state region."""
        return Described(
            DESCRIPTOR_VERSION, self.m, self.position, self.chunk_bytes, self.seats, self.images()
        ).encode()

    def regions(self) -> list[tuple[str, int]]:
        """Of the slot, with sizes; all members have joined."""
        group = group_of(self.seats, self.m, self.chunk_bytes, self.images())
        blocks = [
            (IMAGE_PREFIX + parity_image(stripe), group.parity_chunks(stripe) * self.chunk_bytes)
            for stripe, _ in group.code.held(self.position)
        ]
        return [*blocks, (STATE_IMAGE, len(self.described()))]

    def start(self, views: Mapping[str, memoryview]) -> None:
        """All members have joined, and the slot's regions are ``views``."""
        group = group_of(self.seats, self.m, self.chunk_bytes, self.images())
        views[STATE_IMAGE][:] = self.described()
        for stripe, row in group.code.held(self.position):
            view = views[IMAGE_PREFIX + parity_image(stripe)]
            self._stripes[stripe] = Stripe(row, view, self.chunk_bytes)
        self._group = group

    @property
    def group(self) -> ParityGroup:
        assert self._group is not None, "members are asked for bytes after the start"
        return self._group

    @property
    def started(self) -> bool:
        return self._group is not None

    # -- bytes

    def wanted(self, position: int) -> list[tuple[int, int]]:
        """(stripe, chunk) from which on a member sends, in the order in which it does: its block's chunks before were
        added already."""
        found = []
        for stripe, built in sorted(self._stripes.items()):
            if position in self.group.code.givers(stripe):
                with built.lock:
                    found.append((stripe, self._next.get((position, stripe), 0)))
        return found

    def parts(self, position: int, stripe: int, chunk: int) -> list[Part]:
        """What a member sends to a stripe, from chunk ``chunk`` of its block on."""
        block = self.group.block(position, stripe)
        rest = range(block.start + chunk, block.stop)
        return list(self.group.members[position].parts(rest, self.chunk_bytes))

    def add(self, position: int, turn: int, stripe: int, part: Part, data: memoryview) -> None:
        """The next bytes of a member's block: ``part``, in ``data``, which is as many whole chunks as they begin; what
        is behind them in it becomes zeros. Damaged (and nothing is added) if a chunk does not have its owner's hash;
        PeerLost if the member has begun again meanwhile; else ``error``."""
        self._prove(position, part, data[: part.nbytes])
        data[part.nbytes :] = bytes(len(data) - part.nbytes)
        code, built = self.group.code, self._stripes[stripe]
        factor = galois.generator(code.k, code.m)[built.row][code.givers(stripe).index(position)]
        with built.lock:
            self.check()
            if self._turns[position] != turn:
                raise PeerLost(f"node {self.seats[position].name} began again on another connection")
            chunk = self._next.get((position, stripe), 0)
            try:
                built.add(chunk, data, factor)
            except BaseException as error:  # half added: nobody could say what it holds
                self.give_up(Damaged(f"parity of step {self.key[1]} could not be added up", found=error))
                raise
            self._next[position, stripe] = chunk + len(data) // self.chunk_bytes

    def _prove(self, position: int, part: Part, data: memoryview) -> None:
        record = self._records[position][part.rank, part.image]
        first = part.offset // self.chunk_bytes * HASH_BYTES
        found = chunk_hashes(data, self.chunk_bytes)
        expected = record.chunks[first : first + len(found)]
        for at in range(0, len(found), HASH_BYTES):
            one, other = found[at : at + HASH_BYTES], expected[at : at + HASH_BYTES]
            if one != other:
                name = f"image {part.image!r} of rank {part.rank}"
                raise Damaged(
                    f"{name} came damaged from node {self.seats[position].name}",
                    found=one.hex(),
                    expected=other.hex(),
                    name=name,
                    offset=part.offset + at // HASH_BYTES * self.chunk_bytes,
                )

    @property
    def moved(self) -> int:
        """Goes up with what members do."""
        return sum(self._next.copy().values()) + sum(self._turns.copy().values())

    def has_all_of(self, position: int) -> bool:
        """Whether all that a member gives was added."""
        return self.started and all(
            done == len(self.group.block(position, stripe)) for stripe, done in self.wanted(position)
        )

    @property
    def is_whole(self) -> bool:
        """Whether all that all members give was added."""
        return self.started and all(
            self.has_all_of(at) for at in range(len(self.seats)) if at != self.position
        )

    # -- the end

    def give_up(self, error: EverstepError) -> None:
        """Nothing more is added. The first reason counts."""
        if self.error is None:
            self.error = error

    def check(self) -> None:
        """Raises why it was given up, if it was."""
        if self.error is not None:
            raise self.error

    def quiesce(self) -> None:
        """After :meth:`give_up`: wait until nobody is writing to the slot any more."""
        for built in self._stripes.values():
            with built.lock:
                pass
