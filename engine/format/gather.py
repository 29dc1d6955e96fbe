"""The headers of the votes of one node's ranks in one object.

With thousands of ranks a commit reads some of these instead of every vote. They say nothing that the votes do
not say: each header is proved by its own hash, and a gather that is missing or damaged is made up for by votes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ..errors import Damaged, UnknownFormat
from . import names
from .constants import FORMAT_VERSION, HASH_BYTES, READABLE_VERSIONS
from .hashing import digest
from .sealed import UPGRADE_HINT
from .typed import decoding, encoding, need
from .vote import HEADER_BYTES, VoteHeader, decode_header, header_bytes, version_of

_MAGIC = b"EVSTGATH"
_HEAD = struct.Struct("<8sII")
"""magic, version, number of headers. The headers follow, then the hash of all before it."""

_FIRST_VERSION = 2
"""Format version that brought gathers."""

RANKS_MAX = 1 << 20
"""Most votes in one gather."""


def gather_bytes_max() -> int:
    """Size of the largest gather."""
    return _HEAD.size + RANKS_MAX * HEADER_BYTES + HASH_BYTES


def encode_gather(headers: Sequence[bytes]) -> bytes:
    """The gather of these votes (or of their first ``HEADER_BYTES``), by rank; at least one. Raises UnsupportedValue
    where they are not of one attempt, of a former version, or out of order."""
    cut = [header[:HEADER_BYTES] for header in headers]
    found = [decode_header(header, f"header {at}") for at, header in enumerate(cut)]
    versions = {version_of(header) for header in cut}

    def check() -> None:
        need(versions <= {FORMAT_VERSION}, f"votes of versions {versions}")
        _check(found)

    encoding("gather", check)
    data = _HEAD.pack(_MAGIC, FORMAT_VERSION, len(cut)) + b"".join(cut)
    return data + digest(data)


def decode_gather(data: bytes, name: str) -> list[VoteHeader]:
    """The headers in ``data``, by rank; step, incarnation, attempt and lowest rank must be those in ``name``.

    Raises :class:`Damaged` for every byte that is not as written, :class:`UnknownFormat` for another version;
    both name the object as ``name``.
    """
    if len(data) < _HEAD.size + HASH_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise Damaged("this is no gather of votes", name=name, found=bytes(data[:8]), expected=_MAGIC)
    body, written = data[:-HASH_BYTES], data[-HASH_BYTES:]
    if digest(body) != written:
        raise Damaged(
            "the gather's hash is wrong", name=name, found=digest(body).hex(), expected=written.hex()
        )
    _, version, count = _HEAD.unpack_from(body)
    if version not in READABLE_VERSIONS or version < _FIRST_VERSION:
        raise UnknownFormat(
            "the gather has another format version",
            name=name,
            found=version,
            expected=f"{_FIRST_VERSION} to {FORMAT_VERSION}",
            hint=UPGRADE_HINT,
        )

    def make() -> list[VoteHeader]:
        size = header_bytes(version)
        need(len(body) == _HEAD.size + count * size, f"{len(body)} bytes for {count} headers")
        begins = range(_HEAD.size, len(body), size)
        # Their versions may be lower, as versions 2 and 3 have headers of one size.
        headers = [decode_header(body[at : at + size], name) for at in begins]
        _check(headers)
        parsed = names.parse(name)
        if parsed is not None:
            first = headers[0]
            here = (first.step, first.incarnation, first.attempt, first.rank)
            there = (parsed.step, parsed.incarnation, parsed.attempt, parsed.rank)
            need(parsed.kind is names.Kind.GATHER, "the name is not that of a gather")
            need(here == there, f"step, incarnation, attempt and lowest rank are {here}, by the name {there}")
        return headers

    return decoding(name, make)


def _check(headers: Sequence[VoteHeader]) -> None:
    need(0 < len(headers) <= RANKS_MAX, f"{len(headers)} votes")
    places = {(header.step, header.incarnation, header.attempt, header.world) for header in headers}
    need(len(places) == 1, f"votes of several attempts: {sorted(places)[:4]}")
    ranks = [header.rank for header in headers]
    need(ranks == sorted(set(ranks)), "ranks are not in order, each once")
