"""Pieces of images, and what is done with their bytes: proved, decoded, copied to where they are wanted.

Nothing here waits: who reads the bytes (:mod:`.fill`, :mod:`.ahead`) has threads for this.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.backends.aligned import aligned_buffer
from everstep.errors import Damaged
from everstep.format.constants import HASH_BYTES
from everstep.format.vote import ImageRecord
from everstep.memory.copying import COMPILED, copy, prove_and_copy
from everstep.plan.reads import Range, Read, clip

from .bases import Fetched, fetched_room
from .proving import bad_chunks, differing
from .sources import DurableSource, Source

HOT_BYTES = 1 << 20
"""Hashed and then copied at once (whole chunks): what a core's cache holds."""

LARGE_COPY_BYTES = 64 << 10
"""From here on a copy is worth giving up the interpreter lock for."""


PACKED_PIECE_BYTES = 4 << 20
"""At most so much of a packed image is one piece, as it needs its base and its payloads beside it."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """How many pieces a filling has in memory at once, and how many bytes one has (one chunk, where chunks are
    larger)."""

    pieces: int
    piece_bytes: int

    @property
    def nbytes(self) -> int:
        return self.pieces * self.piece_bytes


FROM_FILES = InFlight(6, 4 << 20)
"""Two more than a backend reads at once: while some are hashed and copied, others are read."""
FROM_OTHERS = InFlight(8, 8 << 20)
"""Where each read is a request, to an object store or another node, and waits for its answer."""


def in_flight(sources: Sequence[Source]) -> InFlight:
    """What filling from ``sources`` has in memory at most."""
    files = all(
        isinstance(source, DurableSource) and not source.backend.capabilities.flat for source in sources
    )
    return FROM_FILES if files else FROM_OTHERS


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive chunks of one image, and the reads that lie inside them. Holders as in :class:`Image`."""

    holders: tuple[Source, ...]
    rank: int
    image: str
    record: ImageRecord
    offset: int
    nbytes: int
    reads: list[Read]

    @property
    def place(self) -> tuple[int, str, int, int]:
        return self.rank, self.image, self.offset, self.nbytes


def step_of(record: ImageRecord, piece_bytes: int, chunk_bytes: int) -> int:
    """Bytes of an image in one piece."""
    most = piece_bytes if record.stored is None else min(piece_bytes, PACKED_PIECE_BYTES)
    return max(most // chunk_bytes, 1) * chunk_bytes


def buffer_bytes(record: ImageRecord, nbytes: int) -> int:
    """What reading a piece of ``nbytes`` takes."""
    return nbytes if record.stored is None else fetched_room(nbytes)


def dealt(reads: Sequence[Read], spans: Sequence[Range]) -> list[list[Read]]:
    """The reads by span; one over several spans is clipped to each of them."""
    starts = [start for start, _ in spans]
    served: list[list[Read]] = [[] for _ in spans]
    for read in reads:
        if not read.nbytes:
            continue
        index = bisect_right(starts, read.image_offset) - 1
        end = read.image_end
        if end <= spans[index][1]:
            served[index].append(read)
            continue
        while index < len(spans) and starts[index] < end:
            served[index] += clip(read, *spans[index])
            index += 1
    return served


Bad = list[tuple[int, bytes]]
"""Chunks that have not their hash, each with the one found."""


class Scattered:
    """A piece that is read straight into the targets, but for what is small there, or wanted nowhere: that goes
    through ``view``, at its own place."""

    def __init__(self, piece: Piece, view: memoryview) -> None:
        self.parts: list[memoryview] = []
        self._piece = piece
        self._view = view
        self._at = 0
        self._copies: list[tuple[memoryview, memoryview]] = []

    def small(self, begin: int, target: memoryview) -> None:
        """``target`` are the bytes from ``begin`` of the piece on."""
        self._copies.append((target, self._view[begin : begin + len(target)]))

    def large(self, begin: int, target: memoryview) -> None:
        """What comes after the former large one, up to ``begin``, goes through the view."""
        if begin > self._at:
            self.parts.append(self._view[self._at : begin])
        self.parts.append(target)
        self._at = begin + len(target)

    def end(self) -> None:
        if self._at < len(self._view):
            self.parts.append(self._view[self._at :])

    def verify(self) -> Bad:
        """The bad chunks; if there are none, all reads have been done, else the view holds the whole piece."""
        chunk_bytes = self._piece.holders[0].chunk_bytes
        bad = bad_chunks(self.parts, self._piece.offset // chunk_bytes, self._piece.record, chunk_bytes)
        if bad:
            at = 0
            for part in self.parts:
                self._view[at : at + len(part)] = part
                at += len(part)
        else:
            for target, copy in self._copies:
                target[:] = copy
        return bad


def scattered(piece: Piece, view: memoryview, targets: Mapping[int, memoryview]) -> Scattered | None:
    """None where most of it would go through the view anyhow, or a byte is wanted twice."""
    found = Scattered(piece, view)
    at = large = 0
    for index, _, _, offset, nbytes, dest, count, _, _ in piece.reads:
        begin = offset - piece.offset
        if count > 1 or begin < at:
            return None
        at = begin + nbytes
        target = targets[index][dest : dest + nbytes]
        if len(target) != nbytes:
            return None  # the plain way says what is wrong
        if nbytes < LARGE_COPY_BYTES:
            found.small(begin, target)
        else:
            large += nbytes
            found.large(begin, target)
    found.end()
    return found if 2 * large > piece.nbytes else None


def nbytes_of(bad: Sequence[tuple[int, bytes]], piece: Piece) -> int:
    chunk_bytes = piece.holders[0].chunk_bytes
    return sum(min(chunk_bytes, piece.record.nbytes - index * chunk_bytes) for index, _ in bad)


def verify_and_copy(piece: Piece, view: memoryview, targets: Mapping[int, memoryview]) -> Bad:
    """Copy the piece's bytes, a little at a time, each right after it was hashed, while it is in the cache. Returns the
    bad chunks; nothing of these is copied."""
    chunk_bytes = piece.holders[0].chunk_bytes
    if COMPILED:
        first = piece.offset // chunk_bytes * HASH_BYTES
        expected = piece.record.chunks[first : first + -(-piece.nbytes // chunk_bytes) * HASH_BYTES]
        hashes = prove_and_copy(view, piece.offset, chunk_bytes, expected, piece.reads, targets)
        if hashes is not None:
            return differing(hashes, expected, piece.offset // chunk_bytes)
    step = max(HOT_BYTES // chunk_bytes, 1) * chunk_bytes
    end = piece.offset + piece.nbytes
    spans = [(at, min(at + step, end)) for at in range(piece.offset, end, step)]
    bad: Bad = []
    for (start, stop), reads in zip(spans, dealt(piece.reads, spans), strict=True):
        part = view[start - piece.offset : stop - piece.offset]
        found = bad_chunks(part, start // chunk_bytes, piece.record, chunk_bytes)
        bad += found
        if not found:
            copy_reads(reads, start, part, targets)
    return bad


class _Room(threading.local):
    """What chunks are decoded into, one for each thread: a core's cache holds it."""

    def __init__(self) -> None:
        self._buffer: memoryview | None = None

    def of(self, nbytes: int) -> memoryview:
        if self._buffer is None or len(self._buffer) < nbytes:
            self._buffer = aligned_buffer(nbytes)
        return self._buffer[:nbytes]


_ROOM = _Room()
"""Of the threads of a filling, and gone with them."""


def unpack_and_copy(piece: Piece, fetched: Fetched, targets: Mapping[int, memoryview]) -> bool:
    """Decode, hash and copy chunk by chunk, while each is in the cache. False as soon as one is not right."""
    chunk_bytes = piece.holders[0].chunk_bytes
    end = piece.offset + piece.nbytes
    spans = [(at, min(at + chunk_bytes, end)) for at in range(piece.offset, end, chunk_bytes)]
    for (start, stop), reads in zip(spans, dealt(piece.reads, spans), strict=True):
        index = start // chunk_bytes
        try:
            part = fetched.chunk(index, _ROOM.of(stop - start))
        except Damaged:
            return False
        if bad_chunks(part, index, piece.record, chunk_bytes):
            return False
        copy_reads(reads, start, part, targets)
    return True


def copy_reads(reads: Sequence[Read], at: int, view: memoryview, targets: Mapping[int, memoryview]) -> None:
    """Do ``reads`` from ``view``, which begins at ``at`` of the image."""
    for index, _, _, offset, nbytes, dest, count, image_stride, dest_stride in reads:
        start = offset - at
        if count > 1:
            strides = image_stride, dest_stride
            _copy_runs(targets[index][dest:], view[start:], nbytes, count, strides)
        elif nbytes < LARGE_COPY_BYTES:
            targets[index][dest : dest + nbytes] = view[start : start + nbytes]
        else:
            copy(targets[index][dest : dest + nbytes], view[start : start + nbytes])


def _copy_runs(
    target: memoryview, source: memoryview, nbytes: int, count: int, strides: tuple[int, int]
) -> None:
    """``count`` runs, one element of ``nbytes`` bytes each, without the interpreter lock; strides in ``source``
    and in ``target``. numpy refuses runs outside the views."""
    import numpy

    run = numpy.dtype((numpy.void, nbytes))
    numpy.copyto(
        numpy.ndarray((count,), run, target, 0, strides[1:]),
        numpy.ndarray((count,), run, source, 0, strides[:1]),
    )
