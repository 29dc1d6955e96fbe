"""Hash records of a snapshot: made from the slot's bytes, and as they are kept in the slot. Pure but for
reading."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from everstep.errors import BadOption, Damaged
from everstep.format.constants import HASH_BYTES
from everstep.format.hashing import chunk_hashes, image_root
from everstep.format.vote import STATE_IMAGE, ImageRecord

from .control import IMAGE_PREFIX, STATE_REGION, Region, region_of

PIECE_BYTES = 8 << 20
"""One task of a pool hashes about this much (whole chunks)."""

_ENTRY = struct.Struct("<Q16s")


def record_name(region: str) -> str:
    """Name of a region's record: the image's own name, or "state"."""
    if region == STATE_REGION:
        return STATE_IMAGE
    if region.startswith(IMAGE_PREFIX):
        return region[len(IMAGE_PREFIX) :]
    raise BadOption("only images and the state have hash records", found=region)


def hash_regions(
    names: Sequence[str], view: Callable[[str], memoryview], chunk_bytes: int, pool: Executor | None
) -> tuple[ImageRecord, ...]:
    """Records of the regions ``names``, in that order; in pieces on ``pool`` where there is one."""
    step = max(1, PIECE_BYTES // chunk_bytes) * chunk_bytes
    work = []
    for name in names:
        whole = view(name)
        pieces = [whole[start : start + step] for start in range(0, len(whole), step)]
        hashes = (
            [pool.submit(chunk_hashes, piece, chunk_bytes).result for piece in pieces]
            if pool is not None
            else [lambda piece=piece: chunk_hashes(piece, chunk_bytes) for piece in pieces]
        )
        work.append((record_name(name), len(whole), hashes))
    records = []
    for name, nbytes, hashes in work:
        chunks = b"".join(result() for result in hashes)
        records.append(ImageRecord(name, nbytes, image_root(nbytes, chunks), chunks))
    return tuple(records)


def check_records(records: Sequence[ImageRecord], regions: Sequence[Region], chunk_bytes: int) -> None:
    """The records are those of all images and the state, in the regions' order, and fit together.
    BadOption."""
    wanted = [
        region for region in regions if region.name == STATE_REGION or region.name.startswith(IMAGE_PREFIX)
    ]
    wanted.sort(key=lambda region: region.name == STATE_REGION)
    named = [(region_of(records, position), record.nbytes) for position, record in enumerate(records)]
    if named != [(region.name, region.nbytes) for region in wanted]:
        raise BadOption("hash records are not those of the snapshot", found=named, expected=wanted)
    for record in records:
        chunks = -(-record.nbytes // chunk_bytes)
        if len(record.chunks) != chunks * HASH_BYTES or record.root != image_root(
            record.nbytes, record.chunks
        ):
            raise BadOption("hash record does not fit together", found=record.name)
        if record.encoding != "plain" or record.base is not None:
            raise BadOption("hash record of a slot is not plain", found=record.encoding)


def encode_records(records: Sequence[ImageRecord]) -> bytes:
    """As kept in a slot; names stand in the region table."""
    head = b"".join(_ENTRY.pack(len(record.chunks), record.root) for record in records)
    return struct.pack("<Q", len(records)) + head + b"".join(record.chunks for record in records)


def decode_records(data: bytes, regions: Sequence[Region], label: str) -> tuple[ImageRecord, ...]:
    """Inverse of :func:`encode_records`; ``data`` was verified. Damaged if it does not fit the regions."""
    wanted = [
        region for region in regions if region.name == STATE_REGION or region.name.startswith(IMAGE_PREFIX)
    ]
    wanted.sort(key=lambda region: region.name == STATE_REGION)
    count = struct.unpack_from("<Q", data)[0]
    if count != len(wanted):
        raise Damaged("number of sealed hash records", name=label, found=count, expected=len(wanted))
    at = 8 + count * _ENTRY.size
    records = []
    for position, region in enumerate(wanted):
        length, root = _ENTRY.unpack_from(data, 8 + position * _ENTRY.size)
        chunks = data[at : at + length]
        at += length
        records.append(ImageRecord(record_name(region.name), region.nbytes, root, chunks))
    return tuple(records)
