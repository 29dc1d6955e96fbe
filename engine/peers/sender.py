"""Sending one sealed snapshot to another node's agent, for it to keep."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.errors import BadOption, PeerLost
from everstep.format.hashing import rank_root
from everstep.format.records_table import encode_records
from everstep.format.vote import ImageRecord
from everstep.memory import points
from everstep.memory.control import IMAGE_PREFIX, STATE_REGION
from everstep.memory.sealing import record_name
from everstep.memory.slots import Pinned

from .link import Link
from .messages import Again, Failed, Kept, M, Message, Mode, Need, Offer, Sent, expect
from .rate import Rate

LAYOUT_REGION = "layout"
META_REGION = "meta"
SMALL_REGIONS = (LAYOUT_REGION, META_REGION, STATE_REGION)
"""Of every snapshot, and always sent; in this order, before the images."""

AGAIN_TIMES_MAX = 1
"""What came damaged is asked for once more."""
NEED_S = 60.0
"""How long the answer to an offer may take, besides what follows from the snapshot's size: the other side may have to
wait for a slot, or for the same step of a rank of its own."""
KEPT_S = 30.0
"""How long the other side may take, after the last word, to seal what it has."""
ROOM_BYTES_PER_S = 256 << 20
"""At least so fast the other side makes room, or hashes what it has."""


def send_snapshot(
    link: Link,
    pinned: Pinned,
    records: Sequence[ImageRecord],
    *,
    run_id: str,
    world: int,
    slot_bytes: int,
    mode: Mode = "full",
    rate: Rate | None = None,
) -> None:
    """Have the other side keep the snapshot; when this returns it has proved it, and sealed it.

    ``records`` are its sealed ones (images, then the state). Raises the other side's error (MemoryTooSmall, Superseded,
    Damaged, ...), PeerLost, SlotGone if the slot was reused meanwhile (nothing is kept then), Closed if the rate was
    closed. After PeerLost, SlotGone and Closed the link is closed; after the others it can be used again.
    """
    regions = _regions(pinned, records)
    offer = Offer(
        run_id=run_id,
        incarnation=pinned.info.incarnation,
        step=pinned.info.step,
        rank=pinned.rank,
        world=world,
        chunk_bytes=pinned.chunk_bytes,
        slot_bytes=slot_bytes,
        layout_hash=pinned.info.layout_hash,
        regions=regions,
        records=encode_records(records),
        mode=mode,
    )
    link.send(offer)
    points.reach("peers.offered", str(offer.step))
    answer = link.receive(NEED_S + slot_bytes / ROOM_BYTES_PER_S)
    if isinstance(answer, Kept):  # from an earlier try
        return _check_root(link, answer, records)
    pieces = _needed(link, _answered(link, answer, Need), regions)
    for again in range(AGAIN_TIMES_MAX + 1):
        _send_pieces(link, pinned, pieces, rate)
        answer = link.receive(KEPT_S)
        if not isinstance(answer, Again) or again == AGAIN_TIMES_MAX:
            break
        pieces = _asked(link, answer, dict(regions))
    _check_root(link, _answered(link, answer, Kept), records)


def _regions(pinned: Pinned, records: Sequence[ImageRecord]) -> list[tuple[str, int]]:
    """What is offered, in the order in which it would be sent."""
    images = [(name, nbytes) for name, nbytes in pinned.regions.items() if name.startswith(IMAGE_PREFIX)]
    missing = [name for name in SMALL_REGIONS if name not in pinned.regions]
    named = [
        (record_name(name), nbytes)
        for name, nbytes in [*images, (STATE_REGION, pinned.regions.get(STATE_REGION))]
    ]
    if missing or named != [(record.name, record.nbytes) for record in records]:
        raise BadOption(
            "the records are not those of the snapshot that is to be sent",
            found=[record.name for record in records],
            expected=[name for name, _ in named],
            step=pinned.info.step,
        )
    return [*((name, pinned.regions[name]) for name in SMALL_REGIONS), *images]


Piece = tuple[str, int, int]
"""Region, offset, size in bytes."""


def _needed(link: Link, need: Need, regions: list[tuple[str, int]]) -> list[Piece]:
    wanted = {IMAGE_PREFIX + name for name in need.images}
    unknown = wanted - {name for name, _ in regions}
    if unknown:
        raise _violated(link, "images that were not offered", sorted(unknown))
    return [(name, 0, nbytes) for name, nbytes in regions if name in SMALL_REGIONS or name in wanted]


def _asked(link: Link, again: Again, sizes: dict[str, int]) -> list[Piece]:
    for name, offset, nbytes in again.pieces:
        if offset < 0 or nbytes < 0 or offset + nbytes > sizes.get(name, -1):
            raise _violated(link, "a piece that was not offered", (name, offset, nbytes))
    return again.pieces


def _send_pieces(link: Link, pinned: Pinned, pieces: Sequence[Piece], rate: Rate | None) -> None:
    for name, offset, nbytes in pieces:
        points.reach("peers.sending", name)
        link.send_bytes(pinned.view(name)[offset : offset + nbytes], rate)
    points.reach("peers.sent.before", str(pinned.info.step))
    try:
        pinned.check()
    except BaseException:
        link.close()  # before the word on which it would be kept
        raise
    link.send(Sent())


def _answered(link: Link, answer: Message, kind: type[M]) -> M:
    if isinstance(answer, (kind, Failed)):
        return expect(answer, kind)
    raise _violated(link, "another message", type(answer).__name__)


def _check_root(link: Link, kept: Kept, records: Sequence[ImageRecord]) -> None:
    if kept.root != rank_root(records):
        raise _violated(link, "another snapshot under the same step", kept.root.hex())


def _violated(link: Link, message: str, found: object) -> PeerLost:
    link.close()
    return PeerLost(f"node {link.peer} answered with {message}", found=found, node=link.peer)
