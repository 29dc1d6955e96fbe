"""Hashes of format version 1: xxh3-128, stored as its 16 digest bytes (big-endian canonical form)."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

from .vote import ImageRecord


def digest(data: bytes | memoryview) -> bytes:
    """16 bytes."""
    return xxhash.xxh3_128_digest(data)


def hexdigest(data: bytes | memoryview) -> str:
    """32 hex digits."""
    return digest(data).hex()


def chunk_hashes(view: memoryview, chunk_bytes: int) -> bytes:
    """The digests of ``view``'s chunks, one after the other; the last chunk may be short."""
    return b"".join(digest(view[start : start + chunk_bytes]) for start in range(0, len(view), chunk_bytes))


def image_root(nbytes: int, chunks: bytes) -> bytes:
    """Root of one image: binds its size and its chunk hashes."""
    return digest(struct.pack("<Q", nbytes) + chunks)


def rank_root(records: Sequence[ImageRecord]) -> bytes:
    """Root of a rank: binds names, sizes and roots of its images, in the order given."""
    parts = [struct.pack("<I", len(records))]
    for record in records:
        name = record.name.encode()
        parts.append(struct.pack("<I", len(name)) + name + struct.pack("<Q", record.nbytes) + record.root)
    return digest(b"".join(parts))
