"""The values of a layout: which entry lies where in one rank's images.

How they become bytes, and the functions to make and check them, is in :mod:`.layout`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

ROOT = "~root"
"""Key of a tensor that is a whole part."""


def path_of(part: str, key: str) -> str:
    """What an entry is called where people read it: as the value that it was saved from."""
    return part if key in ("", ROOT) else f"{part}/{key}"


class Scope(enum.IntEnum):
    """Whose an entry is."""

    RANK = 0
    """One rank's own: the same key on another rank is another thing."""
    GLOBAL = 1
    """One tensor of the whole job: the same key on every rank is the same tensor, replicated or in boxes."""
    FIRST = 2
    """One rank's own, as RANK; where another number of ranks loads, that of the first rank that has it counts for all
    (buffers under DDP, which broadcasts rank 0's)."""


class Box(msgspec.Struct, frozen=True, gc=False):
    """An N-d half-open region of a global tensor; both tuples have the tensor's number of axes."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> Box:
        """The box of a whole tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def volume(self) -> int:
        """Number of elements; 1 without axes."""
        return math.prod(self.lengths)


@dataclass(frozen=True, slots=True)
class EntrySpec:
    """One tensor of a rank's state before it has a place: what :func:`build_layout` takes.

    ``shape`` is the global shape. ``boxes`` are what this rank holds (one full box for a plain tensor).
    ``stored`` is False when another rank stores this (GLOBAL) entry. ``shared`` are the ranks that keep second copies
    of it, ascending; ``copy_of`` is the rank that stores it, on each of these.
    """

    part: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    scope: Scope = Scope.RANK
    stored: bool = True
    shared: tuple[int, ...] = ()
    copy_of: int | None = None


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One tensor of a rank's state with its place.

    ``image`` is an index into ``Layout.images``, or None where another rank stores the entry. ``offset`` is
    the byte offset of the first box from the start of the image (header included); the boxes lie one behind
    the other, each row-major. ``nbytes`` is the size of all boxes together, stored here or not.
    """

    part: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    scope: Scope
    image: int | None
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """One image of a rank: ``name`` is unique in the rank (the part, and the ranks that keep second copies of all its
    tensors where there are any: :func:`~.names.shared_with`), ``header`` the safetensors
    header as stored (8-byte length included, padded to 4 KiB), ``nbytes`` header and data together."""

    name: str
    part: str
    header: bytes
    nbytes: int


class Place(NamedTuple):
    """Where an entry lies: its position in ``Layout.entries``, that of an image, and the offset in it as in
    :class:`Entry`."""

    entry: int
    image: int
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Entries in the order of the state tree (the order that state images refer to by index), and images.

    ``copies`` are images of another kind: each is the second copy of one shared image of another rank, the same bytes
    (:func:`~.names.copied_from` says whose). They lie in slots only, and count for nothing that is durable; ``image``
    is None in their entries. ``copied`` says what lies in them, by entry; ``image`` is an index into ``copies`` there.
    """

    entries: tuple[Entry, ...]
    images: tuple[ImageSpec, ...]
    copies: tuple[ImageSpec, ...] = ()
    copied: tuple[Place, ...] = ()

    def places(self) -> Iterator[Place]:
        """All that a slot holds, by entry; images are counted on from ``images`` into ``copies``."""
        first = len(self.images)
        copied = {one.entry: one for one in self.copied}
        for index, entry in enumerate(self.entries):
            if entry.image is not None:
                yield Place(index, entry.image, entry.offset)
            elif (copy := copied.get(index)) is not None:
                yield Place(index, first + copy.image, copy.offset)
