"""One chunk to a payload and back.

A chunk is coded block by block: the probe picks a transform for each, its items are taken apart into planes, and each
plane is stored in its own way. The payload begins with a table that says all this, so it is read without a layout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from ..errors import Damaged, UsageError
from .constants import (
    BLOCK_BYTES,
    DIFFERENCE_PLANES,
    ENCODING_OF,
    GROUPING,
    ITEMS,
    NONE,
    PLAIN,
    PLANES,
    SAME,
    STREAM_ZSTD,
    ZSTD,
)
from .planes import Bytes, join, split
from .probe import NOISE_BITS, SPARSE_SHARE, probe
from .segments import Kind, Segment
from .streams import STREAM, Cursor, Part, inflate, pack

TABLE = struct.Struct("<I")
"""A payload of planes begins with the size of its table."""
BLOCK = struct.Struct("<IBBB")
"""An entry of the table: bytes of a block, bytes of an item, transform, whether its items are grouped (0 or 1). The
entries of its planes follow."""


def encode_chunk(
    new: memoryview, base: memoryview | None, segments: Sequence[Segment]
) -> tuple[int, list[Part]]:
    """Encoding and payload of a chunk, in parts that lie one behind the other; never more bytes than ``new`` has.

    ``base`` is the same chunk of the base, as long as ``new``; ``segments`` say what lies in it. The parts may be views
    of ``new``. The same arguments give the same bytes. Raises :class:`UsageError` where the sizes differ.
    """
    import numpy as np

    size = sum(segment.nbytes for segment in segments)
    if size != len(new) or (base is not None and len(base) != len(new)):
        found = f"segments of {size} bytes, a base of {None if base is None else len(base)}"
        raise UsageError("sizes differ", found=found, expected=f"{len(new)} bytes each")
    mine = np.frombuffer(new, np.uint8)
    other = None if base is None else np.frombuffer(base, np.uint8)
    encoding, table, parts = PLANES, b"", list[Part]()
    for start, end, item, kind in _blocks(segments):
        block = None if other is None else other[start:end]
        transform, entry, stored = _encode_block(mine[start:end], block, item, kind)
        table += entry
        parts += stored
        encoding = max(encoding, ENCODING_OF[transform])
    if len(parts) == 1 and table == BLOCK.pack(len(new), 1, NONE, 0) + STREAM.pack(
        STREAM_ZSTD, len(parts[0])
    ):
        return ZSTD, parts
    parts.insert(0, TABLE.pack(len(table)) + table)
    if sum(map(len, parts)) >= len(new):
        return PLAIN, [new] if new else []
    return encoding, parts


def _blocks(segments: Sequence[Segment]) -> Iterator[tuple[int, int, int, Kind]]:
    """Begin, end, item and kind of each block: whole items, or all that is over of a segment, as bytes."""
    at = 0
    for nbytes, item, kind in segments:
        end = at + nbytes
        whole = end - nbytes % item
        while at < whole:
            step = min(BLOCK_BYTES, whole - at)
            yield at, at + step, item, kind
            at += step
        if at < end:
            yield at, end, 1, "bytes"
            at = end


def _encode_block(new: Bytes, base: Bytes | None, item: int, kind: Kind) -> tuple[int, bytes, list[Part]]:
    """Transform, table entries, stored parts."""
    transform, bits, zeros, grouped = probe(new, base, item, kind)
    if transform != NONE and min(zeros) == 1 and (new == base).all():
        return SAME, BLOCK.pack(new.size, item, SAME, 0), []
    # Whole numbers, and bytes, repeat in ways that the entropy of single bytes does not show.
    numbers = kind == "float" or transform != NONE
    entries, parts = BLOCK.pack(new.size, item, transform, grouped), list[Part]()
    for index, plane in enumerate(split(new, base, transform, item, grouped)):
        noise = numbers and bits[index] >= NOISE_BITS
        entry, stored = pack(plane, noise=noise, sparse=zeros[index] >= SPARSE_SHARE, text=not numbers)
        entries += entry
        parts += stored
    return transform, entries, parts


def decode_chunk(encoding: int, payload: memoryview, base: memoryview | None, out: memoryview) -> None:
    """Fill ``out``, which has the size of the chunk, with what :func:`encode_chunk` was given. ``base`` is the same
    chunk of the base, needed for encodings 4 and 5.

    Raises :class:`Damaged` if the payload is none of this chunk (``out`` may then hold anything), and
    :class:`UsageError` if the base is missing or has another size. Never allocates more than a few times the size of
    ``out``.
    """
    import numpy as np

    if encoding in (PLAIN, ZSTD):
        plain = payload if encoding == PLAIN else inflate(payload, len(out))
        if len(plain) != len(out):
            raise Damaged("a plain chunk of another size", found=len(plain), expected=len(out))
        out[:] = plain
        return
    if not PLANES <= encoding <= DIFFERENCE_PLANES:
        raise Damaged(
            "no such encoding of a chunk", found=encoding, expected=f"{PLAIN} to {DIFFERENCE_PLANES}"
        )
    other = None
    if encoding != PLANES:
        if base is None or len(base) != len(out):
            found = "none" if base is None else f"{len(base)} bytes"
            raise UsageError("the chunk needs its base", found=found, expected=f"{len(out)} bytes")
        other = np.frombuffer(base, np.uint8)
    cursor = _opened(payload)
    mine = np.frombuffer(out, np.uint8)
    at, needed = 0, PLANES
    while not cursor.at_end:
        nbytes, item, transform, grouped = cursor.entry(BLOCK)
        possible = item in ITEMS and transform <= SAME and (grouped <= (transform in GROUPING))
        if not possible or not 0 < nbytes <= len(out) - at or nbytes % item:
            found = f"{nbytes} bytes of {item}, transform {transform}, groups {grouped}"
            raise Damaged("no such block", found=found)
        if ENCODING_OF[transform] > encoding:
            raise Damaged("a transform of another encoding", found=transform, expected=f"one of {encoding}")
        needed = max(needed, ENCODING_OF[transform])
        block: Bytes = None if other is None else other[at : at + nbytes]
        if transform == SAME:
            np.copyto(mine[at : at + nbytes], block)
        else:
            planes = [cursor.plane(nbytes // item) for _ in range(item)]
            join(planes, block, transform, item, grouped == 1, mine[at : at + nbytes])
        at += nbytes
    cursor.finish()
    if at != len(out) or needed != encoding:
        raise Damaged("blocks of another chunk", found=f"{at} bytes", expected=f"{len(out)} bytes")


def _opened(payload: memoryview) -> Cursor:
    """The payload's table and what lies behind it."""
    if len(payload) < TABLE.size:
        raise Damaged("the payload ends early", found=len(payload), expected=TABLE.size)
    (size,) = TABLE.unpack(payload[: TABLE.size])
    if size > len(payload) - TABLE.size:
        raise Damaged("the payload ends early", found=len(payload), expected=size + TABLE.size)
    return Cursor(payload[TABLE.size :][:size], payload[TABLE.size + size :])
