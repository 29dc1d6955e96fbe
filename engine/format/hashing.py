"""Hashes of format version 1: XXH3 with 128 bits, in its canonical (big-endian) byte order.

They find every accident (a flipped bit, a torn or swapped block); they are no defence against a forger.
The functions hold no state. Those that hash a whole chunk release the interpreter lock while they do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import xxhash

from .constants import HASH_BYTES, HASH_DIGITS

if TYPE_CHECKING:
    from .vote import ImageRecord

_HASH_TEXT = re.compile(rf"[0-9a-f]{{{HASH_DIGITS}}}")


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """The 16 bytes of the hash of ``data``."""
    value: bytes = xxhash.xxh3_128_digest(data)
    return value


def hexdigest(data: bytes | bytearray | memoryview) -> str:
    """The hash of ``data`` as 32 lower-case hexadecimal digits."""
    value: str = xxhash.xxh3_128_hexdigest(data)
    return value


def is_hash(text: object) -> bool:
    """Whether ``text`` is a hash in text form."""
    return isinstance(text, str) and _HASH_TEXT.fullmatch(text) is not None


def all_hashes(texts: Sequence[str]) -> bool:
    """Whether all of ``texts`` are hashes in text form; quick for many."""
    digits = "".join(texts)
    return all(len(text) == HASH_DIGITS for text in texts) and not digits.strip("0123456789abcdef")


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    """Number of chunks of an image of ``nbytes``: the last one may be short, an empty image has none."""
    return -(-nbytes // chunk_bytes)


def chunk_hashes(view: memoryview, chunk_bytes: int) -> bytes:
    """Hashes of the consecutive chunks of ``view`` (a flat view of bytes), 16 bytes each, joined.

    The last chunk is short where ``chunk_bytes`` does not divide the length. Nothing for an empty view.
    """
    one = xxhash.xxh3_128_digest
    return b"".join([one(view[start : start + chunk_bytes]) for start in range(0, len(view), chunk_bytes)])


def chunk_hashes_of(parts: Sequence[memoryview], chunk_bytes: int) -> bytes:
    """As :func:`chunk_hashes` of the views one behind the other."""
    hasher = ChunkHasher(chunk_bytes)
    for part in parts:
        hasher.update(part)
    return hasher.finish()


class ChunkHasher:
    """As :func:`chunk_hashes` of what comes piece by piece."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._found: list[bytes] = []
        self._hasher = xxhash.xxh3_128()
        self._left = chunk_bytes
        self.nbytes = 0
        """Bytes so far."""

    def update(self, view: memoryview) -> None:
        """The bytes that come next."""
        self.nbytes += len(view)
        at = 0
        while at < len(view):
            piece = view[at : at + self._left]
            at += len(piece)
            if len(piece) == self._chunk_bytes:
                self._found.append(xxhash.xxh3_128_digest(piece))
                continue
            self._hasher.update(piece)
            self._left -= len(piece)
            if self._left == 0:
                self._close()

    def finish(self) -> bytes:
        """The hashes of all chunks, joined; nothing comes behind."""
        if self._left < self._chunk_bytes:
            self._close()
        return b"".join(self._found)

    def _close(self) -> None:
        self._found.append(self._hasher.digest())
        self._hasher, self._left = xxhash.xxh3_128(), self._chunk_bytes


def image_root(nbytes: int, chunks: bytes) -> bytes:
    """Binds the size of an image and the hashes of all its chunks (as from :func:`chunk_hashes`)."""
    return digest(b"everstep image\0" + nbytes.to_bytes(8, "little") + chunks)


def rank_root(records: Sequence[ImageRecord]) -> bytes:
    """Binds name, size and root of every image of one rank, in the order given.

    Each name is preceded by its length, so that no two lists of images run together to the same bytes.
    """
    pieces = [b"everstep rank\0", len(records).to_bytes(4, "little")]
    for record in records:
        assert len(record.root) == HASH_BYTES, "a root is one hash"
        name = record.name.encode()
        pieces += (len(name).to_bytes(4, "little"), name, record.nbytes.to_bytes(8, "little"), record.root)
    return digest(b"".join(pieces))
