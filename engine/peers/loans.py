"""What is said where a run is mended from another node's memory: what is there of a checkpoint, and its bytes."""

from __future__ import annotations

from typing import Literal

from .messages import Message

TAKE_BYTES_MAX = 8 << 20
"""Bytes of an image in one answer: they are copied out of the slot first, so that no slot is held while they are
sent."""
SMALL_BYTES_MAX = 64 << 20
"""Of what is given whole: a rank's records, its layout, what it said of its snapshot."""

Key = tuple[int, int]
"""(incarnation, step)."""

What = Literal["image", "records", "meta", "layout"]


class Borrow(Message, frozen=True):
    """Asks what this node's memory has of a checkpoint. What follows over this connection is about that."""

    incarnation: int
    step: int


class Lent(Message, frozen=True):
    """One entry for each sealed snapshot of a rank: the rank, which of the rank's snapshots here it is, and the images
    that it lacks. ``nodes``: of the job's nodes the names and addresses, as far as this agent knows them. ``parity``:
    of each sealed parity slot its number, as a snapshot of the rank that is none, and what it says of itself."""

    snapshots: list[tuple[int, int, list[str]]]
    nodes: list[tuple[str, str, int]]
    parity: list[tuple[int, bytes]] = []


class Take(Message, frozen=True):
    """Of one of these: an image (or the state) from ``offset`` on; or the table of its records, its meta, its
    layout."""

    rank: int
    copy: int
    what: What
    image: str = ""
    offset: int = 0
    nbytes: int = 0


class Given(Message, frozen=True):
    """So many bytes follow."""

    nbytes: int
