"""What a parity slot says of itself: whose images its parity is made of. It lies in the slot's state region."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from everstep.errors import Damaged
from everstep.format.constants import HASH_BYTES
from everstep.plan.parity import Code, Member, ParityGroup

DESCRIPTOR_VERSION = 1
PARITY_RANK = -1
"""As whose snapshot a parity slot is read and served; its images are the parity blocks."""
NODES_MAX = 64
"""In one group: twice as many as can be asked for, less one, which is what uneven numbers of nodes lead to."""
IMAGES_MAX = 1 << 16
"""Of one member's ranks together."""


class Seat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member of a group, as the node map has it."""

    name: str
    ranks: tuple[int, ...]


class ImageOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What parity is made of: an image of a rank, its size in bytes, and the root of its hashes."""

    rank: int
    image: str
    nbytes: int
    root: bytes


Images = Sequence[Sequence[ImageOf]]
"""By position in the group."""


class Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose parity a slot holds, any ``m`` of whom may be lost. ``images`` are by position; those of ``position``,
    where the slot is, are unknown, and not needed: it gives nothing to the stripes of which it holds parity."""

    version: int
    m: int
    position: int
    chunk_bytes: int
    seats: tuple[Seat, ...]
    images: tuple[tuple[ImageOf, ...], ...]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def group_of(seats: Sequence[Seat], m: int, chunk_bytes: int, images: Images) -> ParityGroup:
    """The map of stripes over ``seats``."""
    members = [
        Member(seat.name, seat.ranks, tuple((one.rank, one.image, one.nbytes) for one in own))
        for seat, own in zip(seats, images, strict=True)
    ]
    return ParityGroup(Code(len(seats) - m, m), chunk_bytes, tuple(members))


def parity_image(stripe: int) -> str:
    """Name of a parity block, as an image of a parity slot."""
    return f"parity-{stripe}"


def decode_described(data: bytes, name: str) -> Described:
    """The state region of a parity slot. Damaged."""
    try:
        found = msgspec.msgpack.decode(data, type=Described)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"{name}: no description of parity", found=error, name=name) from None
    if found.version != DESCRIPTOR_VERSION:
        raise Damaged(
            f"{name}: parity of another release", found=found.version, expected=DESCRIPTOR_VERSION, name=name
        )
    check_group(found.seats, found.m, found.position, name)
    if len(found.images) != len(found.seats):
        raise Damaged(
            f"{name}: images of other members", found=len(found.images), expected=len(found.seats), name=name
        )
    for seat, own in zip(found.seats, found.images, strict=True):
        check_images_of(seat, own, name)
    return found


def check_group(seats: Sequence[Seat], m: int, position: int, name: str) -> None:
    """Damaged unless it is a group that can be, with a member at ``position``."""
    ranks = [rank for seat in seats for rank in seat.ranks]
    fits = 0 < m < len(seats) <= NODES_MAX and 0 <= position < len(seats)
    if not fits or len(set(ranks)) != len(ranks) or min(ranks, default=0) < 0:
        raise Damaged(
            f"{name}: no parity group",
            found=f"{len(seats)} members, {m} of them may be lost, position {position}, ranks {ranks[:NODES_MAX]}",
            expected="different ranks, more members than may be lost",
            name=name,
        )


def check_images_of(seat: Seat, images: Sequence[ImageOf], name: str) -> None:
    """Damaged unless all are of the member's ranks, and none comes twice."""
    names = {(one.rank, one.image) for one in images}
    sane = all(one.nbytes >= 0 and len(one.root) == HASH_BYTES for one in images)
    if not sane or len(names) != len(images) or not {rank for rank, _ in names} <= set(seat.ranks):
        raise Damaged(
            f"{name}: images of other ranks than node {seat.name}'s, or one twice",
            found=sorted({rank for rank, _ in names})[:NODES_MAX],
            expected=seat.ranks[:NODES_MAX],
            name=name,
        )
    if len(images) > IMAGES_MAX:
        raise Damaged(
            f"{name}: too many images", found=len(images), expected=f"at most {IMAGES_MAX}", name=name
        )
