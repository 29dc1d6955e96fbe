"""Receiving a snapshot's regions straight into a slot, and proving them by what was offered as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everstep.errors import Damaged
from everstep.format.constants import HASH_BYTES
from everstep.format.hashing import chunk_hashes, digest
from everstep.format.layout import layout_hash
from everstep.format.vote import ImageRecord
from everstep.memory import points
from everstep.memory.control import STATE_REGION, region_of

from .link import Link
from .messages import AGAIN_MAX, Again, Offer, Sent, expect
from .sender import LAYOUT_REGION, META_REGION, Piece

PIECE_BYTES = 1 << 20
"""Received and hashed at once (whole chunks, at least one): small enough to be hashed while it is in the cache."""
SENT_S = 30.0
"""How long the other side may take, after its last byte, to look whether its slot was reused."""


class Prover:
    """Receives the regions of ``views`` of one offer, whose ``records`` are proved already, from ``link``."""

    def __init__(
        self, link: Link, offer: Offer, records: Sequence[ImageRecord], views: Mapping[str, memoryview]
    ) -> None:
        self._link = link
        self._offer = offer
        self._records = {region_of(records, at): record for at, record in enumerate(records)}
        self._views = views

    def receive(self, regions: Sequence[str]) -> None:
        """All of ``regions``, in this order; what comes damaged is asked for once more. Damaged if it does again, then
        the link can still be used; PeerLost."""
        bad = [piece for name in regions for piece in self._receive((name, 0, len(self._views[name])))]
        self._sent()
        if not bad:
            return
        if len(bad) > AGAIN_MAX:
            raise self._damaged(bad)
        self._link.send(Again(bad))
        bad = [piece for asked in bad for piece in self._receive(asked)]
        self._sent()
        if bad:
            raise self._damaged(bad)

    def _receive(self, piece: Piece) -> list[Piece]:
        """What of it is not as it should be."""
        name, offset, nbytes = piece
        view = self._views[name][offset : offset + nbytes]
        record = self._records.get(name)
        if record is None:
            self._link.receive_into(view)
            return [] if self._is_right(name, view) else [piece]
        chunk_bytes = self._offer.chunk_bytes
        step = max(1, PIECE_BYTES // chunk_bytes) * chunk_bytes
        bad = []
        for start in range(0, nbytes, step):
            part = view[start : start + step]
            self._link.receive_into(part)
            points.reach("keeper.piece", name)
            first = (offset + start) // chunk_bytes * HASH_BYTES
            found = chunk_hashes(part, chunk_bytes)
            if found != record.chunks[first : first + len(found)]:
                bad += self._bad(
                    name, offset + start, len(part), found, record.chunks[first : first + len(found)]
                )
        return bad

    def _bad(self, name: str, offset: int, nbytes: int, found: bytes, expected: bytes) -> list[Piece]:
        chunk_bytes = self._offer.chunk_bytes
        return [
            (name, offset + start, min(chunk_bytes, nbytes - start))
            for at, start in enumerate(range(0, nbytes, chunk_bytes))
            if found[at * HASH_BYTES : (at + 1) * HASH_BYTES]
            != expected[at * HASH_BYTES : (at + 1) * HASH_BYTES]
        ]

    def _is_right(self, name: str, view: memoryview) -> bool:
        """Layout and meta are proved as wholes."""
        if name == LAYOUT_REGION:
            return layout_hash(bytes(view)) == self._offer.layout_hash
        return name == META_REGION and digest(view[HASH_BYTES:]) == bytes(view[:HASH_BYTES])

    def _sent(self) -> None:
        try:
            expect(self._link.receive(SENT_S), Sent)
        except BaseException:
            self._link.close()
            raise

    def _damaged(self, bad: Sequence[Piece]) -> Damaged:
        name, offset, _ = bad[0]
        offer = self._offer
        return Damaged(
            f"rank {offer.rank}, step {offer.step}: {name} came damaged from node {self._link.peer}, from byte "
            f"{offset} on",
            found=f"{len(bad)} pieces that do not have their hash, sent twice",
            expected="the bytes whose hashes were sealed",
            hint="The memory of that node may be faulty, or the network in between",
            rank=offer.rank,
            step=offer.step,
            image=name,
            offset=offset,
        )


def state_last(records: Sequence[ImageRecord]) -> bool:
    """Whether the state's record is there, behind those of the images."""
    return bool(records) and region_of(records, len(records) - 1) == STATE_REGION
