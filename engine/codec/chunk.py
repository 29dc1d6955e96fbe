"""One chunk to a payload and back.

A chunk is coded block by block: the probe picks a transform for each, its items are taken apart into planes, and each
plane is stored in its own way. The payload begins with a table that says all this, so it is read without a layout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from ..errors import Damaged, UsageError
from .classes import Setting, code, declassify, frequencies_of
from .constants import (
    BLOCK_BYTES,
    CLASSES,
    CONTEXTS_MAX,
    DIFFERENCE_PLANES,
    ENCODING_OF,
    FLOAT_CLASSES,
    GROUPED,
    GROUPING,
    IN_ORDER,
    INT_CLASSES,
    ITEMS,
    NONE,
    PLAIN,
    PLANES,
    SAME,
    SPARSE,
    STREAM_ZSTD,
    XOR_PLANES,
    ZSTD,
)
from .planes import Bytes, changed, join, pick, place, split
from .probe import NOISE_BITS, SPARSE_SHARE, Verdict, probe
from .scratch import back, kept, reuse, take
from .segments import Kind, Segment
from .streams import STREAM, Cursor, Part, inflate, pack

TABLE = struct.Struct("<I")
"""A payload of planes begins with the size of its table."""
BLOCK = struct.Struct("<IBBB")
"""An entry of the table: bytes of a block, bytes of an item, transform, which items it has. Where those are not all,
their number and the entry of the map follow; then the entries of its planes, or those of its classes."""
COUNT = struct.Struct("<I")
MODEL = struct.Struct("<BBBBII")
"""Of classes: shift, lowest context, number of contexts, highest class, bytes of states and words, bytes of bits. The
entry of the weights follows."""


def encode_chunk(
    new: memoryview, base: memoryview | None, segments: Sequence[Segment]
) -> tuple[int, list[Part]]:
    """Encoding and payload of a chunk, in parts that lie one behind the other; never more bytes than ``new`` has.

    ``base`` is the same chunk of the base, as long as ``new``; ``segments`` say what lies in it. The parts may be views
    of ``new``, and are good until this thread codes another chunk. The same arguments give the same bytes. Raises
    :class:`UsageError` where the sizes differ.
    """
    import numpy as np

    size = sum(segment.nbytes for segment in segments)
    if size != len(new) or (base is not None and len(base) != len(new)):
        found = f"segments of {size} bytes, a base of {None if base is None else len(base)}"
        raise UsageError("sizes differ", found=found, expected=f"{len(new)} bytes each")
    reuse()
    mine = np.frombuffer(new, np.uint8)
    other = None if base is None else np.frombuffer(base, np.uint8)
    encoding, table, parts = PLANES, b"", list[Part]()
    for start, end, item, kind in _blocks(segments):
        block = None if other is None else other[start:end]
        needed, entry, stored = _encode_block(mine[start:end], block, item, kind)
        table += entry
        parts += stored
        encoding = max(encoding, needed)
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
    """Encoding that the chunk has at least, table entries, stored parts."""
    begin = kept()
    verdict = probe(new, base, item, kind)
    back(begin)
    if base is None or not verdict.sparse:
        return _encode_items(new, base, item, kind, verdict, new.size)
    map_, count = changed(new, base, item)
    if count == 0:
        return ENCODING_OF[SAME], BLOCK.pack(new.size, item, SAME, IN_ORDER), []
    if count == new.size // item:
        return _encode_items(new, base, item, kind, verdict, new.size)
    some, other = pick(new, map_, item, count), pick(base, map_, item, count)
    entry, parts = pack(map_, noise=False, sparse=False, text=False)
    begin = kept()
    verdict = probe(some, other, item, kind)
    back(begin)
    needed, entries, stored = _encode_items(some, other, item, kind, verdict, new.size, SPARSE)
    at = BLOCK.size
    return max(needed, XOR_PLANES), entries[:at] + COUNT.pack(count) + entry + entries[at:], parts + stored


def _encode_items(
    new: Bytes,
    base: Bytes | None,
    item: int,
    kind: Kind,
    verdict: Verdict,
    nbytes: int,
    which: int = IN_ORDER,
) -> tuple[int, bytes, list[Part]]:
    """As above, of the items alone that a block of ``nbytes`` has: ``which`` of them."""
    transform = verdict.transform
    entries, parts = BLOCK.pack(nbytes, item, transform, which), list[Part]()
    if verdict.setting is not None:
        assert base is not None
        entry, stored = _encode_classes(new, base, verdict.setting)
        return ENCODING_OF[transform], entries + entry, stored
    # Whole numbers, and bytes, repeat in ways that the entropy of single bytes does not show.
    numbers = kind == "float" or transform != NONE
    for index, plane in enumerate(split(new, base, transform, item)):
        noise = numbers and verdict.bits[index] >= NOISE_BITS
        sparse = verdict.zeros[index] >= SPARSE_SHARE
        entry, stored = pack(plane, noise=noise, sparse=sparse, text=not numbers)
        entries += entry
        parts += stored
    return ENCODING_OF[transform], entries, parts


def _encode_classes(new: Bytes, base: Bytes, setting: Setting) -> tuple[bytes, list[Part]]:
    """Table entries and stored parts of a block of classes."""
    coded = code(new, base, setting)
    entry, parts = pack(coded.weights, noise=False, sparse=False, text=False)
    head = MODEL.pack(*setting[2:], coded.most, coded.words.size, coded.bits.size)
    return head + entry, [*parts, memoryview(coded.words), memoryview(coded.bits)]


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
    reuse()
    cursor = _opened(payload)
    mine = np.frombuffer(out, np.uint8)
    at, needed = 0, PLANES
    while not cursor.at_end:
        nbytes, item, transform, which = cursor.entry(BLOCK)
        possible = item in ITEMS and transform <= INT_CLASSES and which <= SPARSE
        if not possible or not 0 < nbytes <= len(out) - at or nbytes % item or not _fits(transform, which):
            found = f"{nbytes} bytes of {item}, transform {transform}, items {which}"
            raise Damaged("no such block", found=found)
        if ENCODING_OF[transform] > encoding:
            raise Damaged("a transform of another encoding", found=transform, expected=f"one of {encoding}")
        needed = max(needed, ENCODING_OF[transform])
        block: Bytes = None if other is None else other[at : at + nbytes]
        if transform == SAME:
            np.copyto(mine[at : at + nbytes], block)
        elif which == SPARSE:
            if block is None:
                raise Damaged("a sparse block of an encoding without base", found=encoding)
            needed = max(needed, XOR_PLANES)
            _decode_sparse(cursor, block, transform, item, mine[at : at + nbytes])
        else:
            _decode_items(cursor, block, transform, item, which == GROUPED, mine[at : at + nbytes])
        at += nbytes
    cursor.finish()
    if at != len(out) or needed != encoding:
        raise Damaged("blocks of another chunk", found=f"{at} bytes", expected=f"{len(out)} bytes")


def _fits(transform: int, which: int) -> bool:
    """Whether a block of this transform can have those items."""
    return transform in GROUPING if which == GROUPED else which == IN_ORDER or transform != SAME


def _decode_sparse(cursor: Cursor, base: Bytes, transform: int, item: int, out: Bytes) -> None:
    """A block of the items that are not the base's."""
    import numpy as np

    (count,) = cursor.entry(COUNT)
    if not 0 < count < out.size // item:
        raise Damaged("as many items as a block that is not sparse", found=count, expected=out.size // item)
    map_ = cursor.plane_bytes(-(-(out.size // item) // 8))
    other = pick(base, map_, item, count)
    if other is None:
        raise Damaged("another number of items than the map has", found=count)
    some = take(count * item)
    _decode_items(cursor, other, transform, item, False, some)
    np.copyto(out, base)
    place(some, map_, item, out)


def _decode_items(
    cursor: Cursor, base: Bytes | None, transform: int, item: int, grouped: bool, out: Bytes
) -> None:
    """All items of ``out``."""
    import numpy as np

    if transform not in (FLOAT_CLASSES, INT_CLASSES):
        planes = [cursor.plane(out.size // item) for _ in range(item)]
        join(planes, base, transform, item, grouped, out)
        return
    assert base is not None
    shift, low, contexts, most, nbytes, bits = cursor.entry(MODEL)
    if shift >= 8 * item or not 0 < contexts <= CONTEXTS_MAX:
        raise Damaged("no such contexts", found=f"{contexts} at bit {shift}")
    weights = np.zeros((contexts, CLASSES), np.uint8)
    weights[:, : most + 1] = cursor.plane_bytes(contexts * (most + 1)).reshape(contexts, most + 1)
    words, rest = (np.frombuffer(cursor.take(size), np.uint8) for size in (nbytes, bits))
    setting = Setting(transform, item, shift, low, contexts)
    begin = kept()
    good = declassify(words, rest, frequencies_of(weights), base, setting, out)
    back(begin)
    if not good:
        raise Damaged("classes of another block", found=f"{nbytes} and {bits} bytes")


def _opened(payload: memoryview) -> Cursor:
    """The payload's table and what lies behind it."""
    if len(payload) < TABLE.size:
        raise Damaged("the payload ends early", found=len(payload), expected=TABLE.size)
    (size,) = TABLE.unpack(payload[: TABLE.size])
    if size > len(payload) - TABLE.size:
        raise Damaged("the payload ends early", found=len(payload), expected=size + TABLE.size)
    return Cursor(payload[TABLE.size :][:size], payload[TABLE.size + size :])
