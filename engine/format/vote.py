"""A rank's vote: what it stored for one attempt, with every chunk's hash."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zstandard

from ..errors import Damaged, UnknownFormat
from . import names
from .constants import FORMAT_VERSION, HASH_BYTES, VOTE_INDEX_BYTES_MAX
from .hashing import digest, hexdigest, image_root, rank_root
from .plain import from_plain, to_plain
from .sealed import UPGRADE_HINT
from .typed import Broken, decoding, encoding, need, need_hash, need_number, need_size
from .zstd import inflate

STATE_IMAGE = "state"
"""Name of the image that holds a rank's plain values and the structure of its parts (msgpack)."""


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One stored image: its size, the hashes of its chunks (16 bytes each, joined) and their root.

    ``encoding`` is "plain" for a full image; ``base`` names the base of a delta (None here).
    """

    name: str
    nbytes: int
    root: bytes
    chunks: bytes
    encoding: str = "plain"
    base: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank says of one attempt. ``root`` binds all its images; ``meta`` is what the manifest gathers
    from the rank: coordinates, data position, RNG kinds, metrics, parts, library versions."""

    step: int
    incarnation: int
    attempt: int
    rank: int
    world: int
    kind: str
    layout_hash: str
    root: bytes
    images: tuple[ImageRecord, ...]
    entry_hashes: dict[str, str] | None = None
    meta: dict[str, Any] = field(default_factory=dict)


_MAGIC = b"EVSTVOTE"
_HEADER = struct.Struct("<8sIIQQQQQ8s16s16sQQ16s")
"""magic, version, features, step, incarnation, attempt, rank, world, kind, layout hash, root, bytes of the
index as stored and decompressed, hash of the index as stored. The header's own hash follows."""
HEADER_BYTES = _HEADER.size + HASH_BYTES
_KIND_BYTES = 8
_LEVEL = 1


class _Image(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    nbytes: int
    root: bytes
    chunks: bytes
    encoding: str
    base: dict[str, Any] | None


class _Index(msgspec.Struct, forbid_unknown_fields=True):
    images: list[_Image]
    entry_hashes: dict[str, str] | None
    meta: dict[str, Any]


_encoder = msgspec.msgpack.Encoder()


def _no_extension(code: int, data: memoryview) -> Any:
    raise ValueError(f"extension type {code}")


_decoder = msgspec.msgpack.Decoder(_Index, ext_hook=_no_extension)


def vote_hash(data: bytes) -> str:
    """The hash of a vote's bytes, by which a manifest names it."""
    return hexdigest(data)


def encode_vote(vote: Vote) -> bytes:
    """The bytes of ``vote``: a header of fixed size, then the index (zstandard over msgpack).

    Raises :class:`UnsupportedValue` (by path) for meta values that are not plain, or a root that is not that
    of the images.
    """
    encoding("vote", lambda: _check(vote))
    index = _encoder.encode(
        _Index(
            images=[
                _Image(r.name, r.nbytes, r.root, r.chunks, r.encoding, to_plain(r.base, "base"))
                for r in vote.images
            ],
            entry_hashes=vote.entry_hashes,
            meta=to_plain(vote.meta, "meta"),
        )
    )
    frame: bytes = zstandard.ZstdCompressor(level=_LEVEL).compress(index)
    header = _HEADER.pack(
        _MAGIC,
        FORMAT_VERSION,
        0,
        vote.step,
        vote.incarnation,
        vote.attempt,
        vote.rank,
        vote.world,
        vote.kind.encode("ascii"),
        bytes.fromhex(vote.layout_hash),
        vote.root,
        len(frame),
        len(index),
        digest(frame),
    )
    return header + digest(header) + frame


def decode_vote(data: bytes, name: str) -> Vote:
    """The vote in ``data``; step, incarnation, attempt and rank must be those in ``name``.

    Raises :class:`Damaged` for every byte that is not as written, :class:`UnknownFormat` for another version;
    both name the object as ``name``.
    """
    header = _decode_header(data, name)
    (_, _, _, step, incarnation, attempt, rank, world, kind, layout, root, _, index_nbytes, _) = header
    index = inflate(data[HEADER_BYTES:], index_nbytes, VOTE_INDEX_BYTES_MAX, name)

    def make() -> Vote:
        try:
            found = _decoder.decode(index)
            images = tuple(
                ImageRecord(i.name, i.nbytes, i.root, i.chunks, i.encoding, from_plain(i.base))
                for i in found.images
            )
            meta = from_plain(found.meta)
            text = kind.rstrip(b"\0").decode("ascii")
        except (msgspec.DecodeError, ValueError, RecursionError) as problem:
            raise Broken(f"the index cannot be read: {problem}") from None
        vote = Vote(
            step,
            incarnation,
            attempt,
            rank,
            world,
            text,
            layout.hex(),
            root,
            images,
            found.entry_hashes,
            meta,
        )
        _check(vote)
        parsed = names.parse(name)
        if parsed is not None:
            here = (step, incarnation, attempt, rank)
            there = (parsed.step, parsed.incarnation, parsed.attempt, parsed.rank)
            need(parsed.kind is names.Kind.VOTE, "the name is not that of a vote")
            need(here == there, f"step, incarnation, attempt and rank are {here}, by the name {there}")
        return vote

    return decoding(name, make)


def _decode_header(data: bytes, name: str) -> tuple[Any, ...]:
    """The header's fields, header and index proved by their hashes."""
    if len(data) < HEADER_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise Damaged("this is no vote", name=name, found=bytes(data[:8]), expected=_MAGIC)
    written, found = data[_HEADER.size : HEADER_BYTES], digest(data[: _HEADER.size])
    if found != written:
        raise Damaged("the vote's header hash is wrong", name=name, found=found.hex(), expected=written.hex())
    header = _HEADER.unpack(data[: _HEADER.size])
    version, features = header[1:3]
    if version != FORMAT_VERSION or features:
        raise UnknownFormat(
            "the vote has another format version or unknown features",
            name=name,
            found=f"version {version}, features {features:#x}",
            expected=f"version {FORMAT_VERSION}, features 0x0",
            hint=UPGRADE_HINT,
        )
    frame = data[HEADER_BYTES:]
    nbytes, index_hash = header[11], header[13]
    if len(frame) != nbytes:
        raise Damaged("the vote's index has a wrong size", name=name, found=len(frame), expected=nbytes)
    if digest(frame) != index_hash:
        raise Damaged(
            "the vote's index hash is wrong", name=name, found=digest(frame).hex(), expected=index_hash.hex()
        )
    return header


def _check(vote: Vote) -> None:
    for number, least in (("step", 0), ("incarnation", 0), ("attempt", 1), ("world", 1)):
        need_number(number, getattr(vote, number), least)
    need_number("rank", vote.rank, most=vote.world - 1)
    need(bool(re.fullmatch(rf"[a-z]{{1,{_KIND_BYTES}}}", vote.kind)), f"kind is {vote.kind!r}")
    need_hash("layout_hash", vote.layout_hash)
    need(len({record.name for record in vote.images}) == len(vote.images), "an image twice")
    for record in vote.images:
        need_size(f"{record.name}.nbytes", record.nbytes)
        need(record.encoding in ("plain", "delta"), f"encoding of {record.name} is {record.encoding!r}")
        need((record.base is None) == (record.encoding == "plain"), f"{record.name}: a base is for deltas")
        need(len(record.chunks) % HASH_BYTES == 0, f"chunk hashes of {record.name} are cut")
        need(
            (record.nbytes == 0) == (not record.chunks), f"chunk hashes of {record.name} do not fit its size"
        )
        root = image_root(record.nbytes, record.chunks)
        need(record.root == root, f"root of {record.name} is {record.root.hex()}, by its chunks {root.hex()}")
    root = rank_root(vote.images)
    need(vote.root == root, f"root is {vote.root.hex()}, by the images {root.hex()}")
