"""The object of a packed image: the payloads of its chunks, the table that says what each is, and a footer.

Pure: how a payload is encoded says :mod:`everstep.codec`; here is only where it lies. The chunks are those of the
image (its hashes are of the same ones); a reference has no payload, it is the same chunk of the base's image.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..errors import Damaged, UnknownFormat
from .constants import FORMAT_VERSION, HASH_BYTES
from .hashing import chunk_count, digest
from .sealed import UPGRADE_HINT
from .typed import decoding, encoding, need

REFERENCE = 0
PLAIN = 1
ZSTD = 2
PLANES = 3
XOR = 4
DIFFERENCE = 5
"""Encodings of a chunk: the base's chunk; its bytes; zstandard; byte planes; byte planes of XOR with the base's chunk;
byte planes of the ordered integers' difference from the base's. Never renumbered."""
ENCODINGS = (REFERENCE, PLAIN, ZSTD, PLANES, XOR, DIFFERENCE)
WITH_BASE = frozenset((REFERENCE, XOR, DIFFERENCE))
"""Those that need the base's chunk."""

_MAGIC = b"EVSTPACK"
_FOOTER = struct.Struct("<8sIIQQQQ16s")
"""magic, version, 0, chunk size, image size, number of chunks, bytes of the table, hash of the table. The hash of
these follows."""
FOOTER_BYTES = _FOOTER.size + HASH_BYTES
_ROW_BYTES = 5
_FIRST_VERSION = 4
"""Format version that brought packed images."""


@dataclass(frozen=True, slots=True)
class Table:
    """What the chunks of a packed image are: by chunk its encoding, and where its payload begins in the object
    (one more than there are chunks: where the last one ends)."""

    nbytes: int
    chunk_bytes: int
    encodings: bytes
    begins: array[int]

    def span(self, first: int, end: int) -> tuple[int, int]:
        """Where the payloads of the chunks ``first`` to ``end`` lie: one behind the other."""
        return self.begins[first], self.begins[end]

    @property
    def needs_base(self) -> bool:
        """Whether any chunk needs the base's."""
        return any(code in WITH_BASE for code in self.encodings)


def tail_bytes(nbytes: int, chunk_bytes: int) -> int:
    """Size of table and footer together, of an image of ``nbytes``."""
    return chunk_count(nbytes, chunk_bytes) * _ROW_BYTES + FOOTER_BYTES


def encode_tail(nbytes: int, chunk_bytes: int, rows: Sequence[tuple[int, int]]) -> bytes:
    """Table and footer of an image of ``nbytes``; ``rows`` are (encoding, bytes of the payload) of its chunks, in
    order. Raises UnsupportedValue where they cannot be those."""

    def check() -> None:
        need(len(rows) == chunk_count(nbytes, chunk_bytes), f"{len(rows)} chunks for {nbytes} bytes")
        for index, (code, length) in enumerate(rows):
            _check_row(code, length, min(chunk_bytes, nbytes - index * chunk_bytes), index)

    encoding("packed image", check)
    lengths = array("I", [length for _, length in rows])
    table = bytes([code for code, _ in rows]) + _little(lengths).tobytes()
    footer = _FOOTER.pack(
        _MAGIC, FORMAT_VERSION, 0, chunk_bytes, nbytes, len(rows), len(table), digest(table)
    )
    return table + footer + digest(footer)


def decode_tail(tail: bytes, nbytes: int, chunk_bytes: int, stored: int, name: str) -> Table:
    """The table in the last :func:`tail_bytes` bytes of an object of ``stored`` bytes, which is to be an image of
    ``nbytes``. Raises Damaged and UnknownFormat, naming ``name``."""
    _check_footer(tail[-FOOTER_BYTES:], nbytes, chunk_bytes, name)
    count = chunk_count(nbytes, chunk_bytes)
    table = tail[:-FOOTER_BYTES]
    written = _FOOTER.unpack(tail[-FOOTER_BYTES:-HASH_BYTES])[-1]
    if len(table) != count * _ROW_BYTES or digest(table) != written:
        found = digest(table).hex()
        raise Damaged(f"{name}: the table's hash is wrong", found=found, expected=written.hex(), name=name)
    lengths = array("I")
    lengths.frombytes(table[count:])
    lengths = _little(lengths)
    codes = table[:count]

    def check() -> None:
        for index, (code, length) in enumerate(zip(codes, lengths, strict=True)):
            _check_row(code, length, min(chunk_bytes, nbytes - index * chunk_bytes), index)

    decoding(name, check)
    begins = array("Q", accumulate(lengths, initial=0))
    if begins[-1] + len(tail) != stored:
        raise Damaged(
            f"{name}: the payloads do not end where the table begins",
            found=f"{begins[-1]} bytes of payloads",
            expected=f"{stored - len(tail)}",
            name=name,
        )
    return Table(nbytes, chunk_bytes, codes, begins)


def _check_footer(footer: bytes, nbytes: int, chunk_bytes: int, name: str) -> None:
    if len(footer) != FOOTER_BYTES or footer[: len(_MAGIC)] != _MAGIC:
        raise Damaged(f"{name}: no footer of a packed image", found=footer[:8], expected=_MAGIC, name=name)
    found, written = digest(footer[: _FOOTER.size]), footer[_FOOTER.size :]
    if found != written:
        raise Damaged(
            f"{name}: the footer's hash is wrong", found=found.hex(), expected=written.hex(), name=name
        )
    _, version, zero, *sizes, _ = _FOOTER.unpack(footer[: _FOOTER.size])
    if not _FIRST_VERSION <= version <= FORMAT_VERSION or zero:
        raise UnknownFormat(
            f"{name}: a packed image of another format version",
            found=version,
            expected=f"{_FIRST_VERSION} to {FORMAT_VERSION}",
            hint=UPGRADE_HINT,
            name=name,
        )
    count = chunk_count(nbytes, chunk_bytes)
    expected = [chunk_bytes, nbytes, count, count * _ROW_BYTES]
    if sizes != expected:
        raise Damaged(f"{name}: another image than the vote's", found=sizes, expected=expected, name=name)


def _check_row(code: int, length: int, chunk: int, index: int) -> None:
    """A payload is never longer than its chunk, and what is plain is just that long."""
    need(code in ENCODINGS, f"encoding {code} of chunk {index}")
    fits = {REFERENCE: length == 0, PLAIN: length == chunk}.get(code, 0 < length <= chunk)
    need(fits, f"{length} bytes for chunk {index} of {chunk} bytes, in encoding {code}")


def _little(words: array[int]) -> array[int]:
    """Little-endian, or from it."""
    if sys.byteorder == "big":
        words = array(words.typecode, words)
        words.byteswap()
    return words
