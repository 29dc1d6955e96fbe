"""A rank's vote: what it stored for one attempt, with every chunk's hash.

The header is of fixed size and has all that a commit needs of each rank: it proves the index, which has the
hashes of the chunks, by its hash. So whoever commits reads headers alone, and a manifest names votes by theirs.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import zstandard

from ..errors import Damaged, UnknownFormat
from . import names
from .constants import FORMAT_VERSION, HASH_BYTES, NUMBER_MAX, READABLE_VERSIONS, VOTE_INDEX_BYTES_MAX
from .hashing import digest, hexdigest, image_root, rank_root
from .plain import from_plain, to_plain
from .sealed import UPGRADE_HINT
from .typed import Broken, decoding, encoding, need, need_hash, need_number, need_size, need_sizes
from .zstd import inflate

Parent = tuple[int, int, int]
"""Incarnation, step and attempt of the checkpoint that deltas are based on."""

STATE_IMAGE = "state"
"""Name of the image that holds a rank's plain values and the structure of its parts (msgpack)."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """The object of an image that is not its own bytes: its size, the hashes of its chunks and their root, so that it
    is copied, checked and repaired without being decoded. The chunks are of the run's size, as an image's are."""

    nbytes: int
    root: bytes
    chunks: bytes


PLAIN, PACKED, DELTA = "plain", "packed", "delta"
"""How an image is stored: as it is; as a table and payloads (:mod:`.packed`); as these, with a base."""


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One image: its size, the hashes of its chunks (16 bytes each, joined) and their root, all of the snapshot's own
    bytes.

    ``encoding`` says how it is stored. ``base`` names the base of a delta: ``incarnation``, ``step`` and ``attempt``
    of the checkpoint, ``root`` (hex) of its image of that rank and name. ``stored`` is the object of an image that is
    not plain.
    """

    name: str
    nbytes: int
    root: bytes
    chunks: bytes
    encoding: str = PLAIN
    base: dict[str, Any] | None = None
    stored: StoredRecord | None = None

    @property
    def object(self) -> StoredRecord:
        """The object's size and hashes, however the image is stored."""
        return self.stored or StoredRecord(self.nbytes, self.root, self.chunks)

    @property
    def base_key(self) -> tuple[int, int] | None:
        """(incarnation, step) of the base."""
        return None if self.base is None else (self.base["incarnation"], self.base["step"])

    def object_name(self, step: int, incarnation: int, attempt: int, rank: int) -> str:
        """The object's name in that attempt of that rank."""
        place = step, incarnation, attempt, rank
        if self.name == STATE_IMAGE:
            return names.state(*place)
        return names.image(*place, self.name) if self.stored is None else names.packed(*place, self.name)

    def plain(self) -> ImageRecord:
        """The same image stored as it is: what a slot says of it."""
        return replace(self, encoding=PLAIN, base=None, stored=None)


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

    @property
    def parent(self) -> Parent | None:
        """The base of its deltas, one for all of them."""
        for record in self.images:
            if record.base is not None:
                return record.base["incarnation"], record.base["step"], record.base["attempt"]
        return None


@dataclass(frozen=True, slots=True)
class VoteHeader:
    """What a vote's header says. ``hash`` names the vote in manifests; ``nbytes`` is the size of the whole vote.

    ``agreement`` is equal on ranks that say alike what all ranks must (:func:`agreement_of`).
    ``images_nbytes`` is the size of all images but the state's together, ``stored_nbytes`` that of their objects.
    ``parent`` is the base of its deltas.
    """

    step: int
    incarnation: int
    attempt: int
    rank: int
    world: int
    kind: str
    layout_hash: str
    root: bytes
    agreement: bytes
    images_nbytes: int
    state_nbytes: int
    stored_nbytes: int
    parent: Parent | None
    has_entry_hashes: bool
    nbytes: int
    hash: str


_MAGIC = b"EVSTVOTE"
_HEADER = struct.Struct("<8sIIQQQQQ8s16s16s16sQQQQQQQQ16s")
"""magic, version, flags, step, incarnation, attempt, rank, world, kind, layout hash, root, agreement, bytes of
all images but the state's, bytes of the state image, bytes of the objects of the former, the parent's incarnation,
step and attempt (all 0 where there is none), bytes of the index as stored and decompressed, hash of the index as
stored. The header's own hash follows."""
HEADER_BYTES = _HEADER.size + HASH_BYTES
_HEADER_V2 = struct.Struct("<8sIIQQQQQ8s16s16s16sQQQQ16s")
"""As in versions 2 and 3: no objects' bytes, no parent."""
_HEADER_V1 = struct.Struct("<8sIIQQQQQ8s16s16sQQ16s")
"""As in version 1: no agreement, no sizes; flags are features, none defined."""
_FORMS = {1: _HEADER_V1, 2: _HEADER_V2, 3: _HEADER_V2}
_PREFIX = struct.Struct("<8sI")
_ENTRY_HASHES = 1
"""Flag: the index has hashes of entries."""
_NO_PARENT = (0, 0, 0)
_KIND = re.compile("[a-z]{1,8}")
_LEVEL = 1


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    nbytes: int
    root: bytes
    chunks: bytes


class _FormerImage(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    nbytes: int
    root: bytes
    chunks: bytes
    encoding: str
    base: dict[str, Any] | None


class _Image(_FormerImage, forbid_unknown_fields=True):
    stored: _Stored | None


class _Index(msgspec.Struct, forbid_unknown_fields=True):
    images: list[_Image]
    entry_hashes: dict[str, str] | None
    meta: dict[str, Any]


class _FormerIndex(msgspec.Struct, forbid_unknown_fields=True):
    images: list[_FormerImage]
    entry_hashes: dict[str, str] | None
    meta: dict[str, Any]


_encoder = msgspec.msgpack.Encoder()


def _no_extension(code: int, data: memoryview) -> Any:
    raise ValueError(f"extension type {code}")


_decoder = msgspec.msgpack.Decoder(_Index, ext_hook=_no_extension)
_former_decoder = msgspec.msgpack.Decoder(_FormerIndex, ext_hook=_no_extension)


def vote_hash(data: bytes) -> str:
    """What names the vote whose bytes are ``data`` in a manifest: the hash of its header without the hash at its
    end. (A vote of version 1: the hash of all its bytes.)"""
    version = version_of(data)
    return hexdigest(data) if version == 1 else hexdigest(data[: _form(version).size])


def version_of(data: bytes) -> int | None:
    """The format version of the vote that ``data`` begins with; None if it is no vote."""
    if len(data) < _PREFIX.size or data[: len(_MAGIC)] != _MAGIC:
        return None
    version: int = _PREFIX.unpack_from(data)[1]
    return version


def header_bytes(version: int) -> int:
    """Size of a vote's header in that format version."""
    return _form(version).size + HASH_BYTES


def _form(version: int | None) -> struct.Struct:
    return _HEADER if version is None else _FORMS.get(version, _HEADER)


def agreement_of(meta: dict[str, Any]) -> bytes:
    """Digest of what all ranks must say alike: mesh, hash of the configuration, names of the parts."""
    mesh = meta.get("mesh")
    said = [
        sorted(mesh.items()) if isinstance(mesh, dict) else mesh,
        meta.get("config_hash"),
        sorted(meta.get("parts") or {}),
    ]
    return digest(b"everstep agreement\0" + _encoder.encode(to_plain(said, "meta")))


def _sizes(images: tuple[ImageRecord, ...]) -> tuple[int, int, int]:
    """Bytes of all images but the state's, of that, and of the former's objects."""
    state = sum([record.nbytes for record in images if record.name == STATE_IMAGE])
    stored = sum([record.object.nbytes for record in images])
    return sum([record.nbytes for record in images]) - state, state, stored - state


def encode_vote(vote: Vote) -> bytes:
    """The bytes of ``vote``: a header of fixed size, then the index (zstandard over msgpack).

    Raises :class:`UnsupportedValue` (by path) for meta values that are not plain, or a root that is not that
    of the images.
    """
    encoding("vote", lambda: _check(vote))
    index = _encoder.encode(
        _Index(
            images=[
                _Image(
                    r.name,
                    r.nbytes,
                    r.root,
                    r.chunks,
                    r.encoding,
                    to_plain(r.base, "base"),
                    None if r.stored is None else _Stored(r.stored.nbytes, r.stored.root, r.stored.chunks),
                )
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
        0 if vote.entry_hashes is None else _ENTRY_HASHES,
        vote.step,
        vote.incarnation,
        vote.attempt,
        vote.rank,
        vote.world,
        vote.kind.encode("ascii"),
        bytes.fromhex(vote.layout_hash),
        vote.root,
        agreement_of(vote.meta),
        *_sizes(vote.images),
        *(vote.parent or _NO_PARENT),
        len(frame),
        len(index),
        digest(frame),
    )
    return header + digest(header) + frame


def decode_header(data: bytes, name: str) -> VoteHeader:
    """The header at the beginning of ``data``, proved by its hash; what is behind it is not looked at. Of a vote
    of version 1, whose header says too little, ``data`` must be all, and all is proved.

    Raises :class:`Damaged` and :class:`UnknownFormat`, naming ``name``.
    """
    if version_of(data) == 1:
        return header_of(decode_vote(data, name), data)
    return decoding(name, lambda: _header(_unpack(data, name)[0], data))


def header_of(vote: Vote, data: bytes) -> VoteHeader:
    """The header of ``vote``, whose bytes are ``data``, as :func:`decode_header` gives it."""
    return VoteHeader(
        vote.step,
        vote.incarnation,
        vote.attempt,
        vote.rank,
        vote.world,
        vote.kind,
        vote.layout_hash,
        vote.root,
        agreement_of(vote.meta),
        *_sizes(vote.images),
        vote.parent,
        vote.entry_hashes is not None,
        len(data),
        vote_hash(data),
    )


def _header(fields: tuple[Any, ...], data: bytes) -> VoteHeader:
    """The unpacked fields of a header of version 2 or later as checked values."""
    (_, version, flags, step, incarnation, attempt, rank, world, kind, layout, root, agreement) = fields[:12]
    images_nbytes, state_nbytes = fields[12:14]
    index_nbytes = fields[-3]
    stored_nbytes, *parent = fields[14:18] if version > 3 else (images_nbytes, *_NO_PARENT)
    end = header_bytes(version)
    try:
        text = kind.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError:
        raise Broken(f"kind is {kind!r}") from None
    header = VoteHeader(
        step,
        incarnation,
        attempt,
        rank,
        world,
        text,
        layout.hex(),
        root,
        agreement,
        images_nbytes,
        state_nbytes,
        stored_nbytes,
        (parent[0], parent[1], parent[2]) if parent[2] else None,
        bool(flags & _ENTRY_HASHES),
        end + index_nbytes,
        data[end - HASH_BYTES : end].hex(),
    )
    _check_numbers(header)
    need(bool(parent[2]) or not any(parent), f"no attempt of the parent {tuple(parent)}")
    need_sizes("sizes", (images_nbytes, state_nbytes, stored_nbytes, index_nbytes))
    return header


def decode_vote(data: bytes, name: str) -> Vote:
    """The vote in ``data``; step, incarnation, attempt and rank must be those in ``name``.

    Raises :class:`Damaged` for every byte that is not as written, :class:`UnknownFormat` for another version;
    both name the object as ``name``.
    """
    fields, frame = _unpack(data, name)
    _check_frame(frame, fields[-3], fields[-1], name)
    index = inflate(frame, fields[-2], VOTE_INDEX_BYTES_MAX, name)

    def make() -> Vote:
        vote = _vote(fields, index)
        _check(vote)
        if fields[1] > 1:
            claimed, header = _header(fields, data), header_of(vote, data)
            need(claimed == header, f"the header says {claimed}, the index {header}")
        parsed = names.parse(name)
        if parsed is not None:
            here = (vote.step, vote.incarnation, vote.attempt, vote.rank)
            there = (parsed.step, parsed.incarnation, parsed.attempt, parsed.rank)
            need(parsed.kind is names.Kind.VOTE, "the name is not that of a vote")
            need(here == there, f"step, incarnation, attempt and rank are {here}, by the name {there}")
        return vote

    return decoding(name, make)


def _vote(fields: tuple[Any, ...], index: bytes) -> Vote:
    """The vote that a header's fields and the index make, unchecked."""
    (_, _, _, step, incarnation, attempt, rank, world, kind, layout, root) = fields[:11]
    try:
        found = (_decoder if fields[1] > 3 else _former_decoder).decode(index)
        images = tuple([_record(image) for image in found.images])
        meta = from_plain(found.meta)
        text = kind.rstrip(b"\0").decode("ascii")
    except (msgspec.DecodeError, ValueError, RecursionError) as problem:
        raise Broken(f"the index cannot be read: {problem}") from None
    hashes = found.entry_hashes
    return Vote(step, incarnation, attempt, rank, world, text, layout.hex(), root, images, hashes, meta)


def _record(image: _FormerImage) -> ImageRecord:
    stored = image.stored if isinstance(image, _Image) else None
    return ImageRecord(
        image.name,
        image.nbytes,
        image.root,
        image.chunks,
        image.encoding,
        from_plain(image.base),
        None if stored is None else StoredRecord(stored.nbytes, stored.root, stored.chunks),
    )


def _unpack(data: bytes, name: str) -> tuple[tuple[Any, ...], bytes]:
    """The header's fields, proved by its hash, and what is behind it."""
    if len(data) < _PREFIX.size or data[: len(_MAGIC)] != _MAGIC:
        raise Damaged("this is no vote", name=name, found=bytes(data[:8]), expected=_MAGIC)
    form = _form(version_of(data))
    end = form.size + HASH_BYTES
    if len(data) < end:
        raise Damaged("the vote is cut", name=name, found=len(data), expected=f"at least {end}")
    written, found = data[form.size : end], digest(data[: form.size])
    if found != written:
        raise Damaged("the vote's header hash is wrong", name=name, found=found.hex(), expected=written.hex())
    fields = form.unpack(data[: form.size])
    version, flags = fields[1:3]
    known = 0 if version == 1 else _ENTRY_HASHES
    if version not in READABLE_VERSIONS or flags & ~known:
        raise UnknownFormat(
            "the vote has another format version or unknown flags",
            name=name,
            found=f"version {version}, flags {flags:#x}",
            expected=f"version {FORMAT_VERSION}, flags of {known:#x}",
            hint=UPGRADE_HINT,
        )
    return fields, data[end:]


def _check_frame(frame: bytes, nbytes: int, index_hash: bytes, name: str) -> None:
    """The index as stored must be the one that the header names."""
    if len(frame) != nbytes:
        raise Damaged("the vote's index has a wrong size", name=name, found=len(frame), expected=nbytes)
    if digest(frame) != index_hash:
        raise Damaged(
            "the vote's index hash is wrong", name=name, found=digest(frame).hex(), expected=index_hash.hex()
        )


def _check_numbers(vote: Vote | VoteHeader) -> None:
    numbers = vote.step, vote.incarnation, vote.attempt, vote.world
    if min(numbers) < 0 or max(numbers) > NUMBER_MAX or not 0 <= vote.rank < vote.world or not vote.attempt:
        for number, least in (("step", 0), ("incarnation", 0), ("attempt", 1), ("world", 1)):
            need_number(number, getattr(vote, number), least)
        need_number("rank", vote.rank, most=vote.world - 1)
    need(_KIND.fullmatch(vote.kind) is not None, "kind is not one word of at most 8 small letters")


def _check(vote: Vote) -> None:
    _check_numbers(vote)
    need_hash("layout_hash", vote.layout_hash)
    need(len({record.name for record in vote.images}) == len(vote.images), "an image twice")
    for record in vote.images:
        _check_hashes(record.name, record)
        need(record.encoding in (PLAIN, PACKED, DELTA), f"encoding of {record.name} is {record.encoding!r}")
        need((record.stored is None) == (record.encoding == PLAIN), f"{record.name}: an object is for packed")
        need((record.base is not None) == (record.encoding == DELTA), f"{record.name}: a base is for deltas")
        if record.stored is not None:
            need(record.name != STATE_IMAGE and record.nbytes > 0, f"{record.name} cannot be packed")
            _check_hashes(f"{record.name}, stored", record.stored)
        if record.base is not None:
            _check_base(record.name, record.base, vote)
    deltas = [record for record in vote.images if record.base is not None]
    need((vote.kind == DELTA) == bool(deltas), f"kind is {vote.kind!r}, with {len(deltas)} deltas")
    root = rank_root(vote.images)
    need(vote.root == root, f"root is {vote.root.hex()}, by the images {root.hex()}")


def _check_hashes(name: str, of: ImageRecord | StoredRecord) -> None:
    need_size(f"{name}.nbytes", of.nbytes)
    need(len(of.chunks) % HASH_BYTES == 0, f"chunk hashes of {name} are cut")
    need((of.nbytes == 0) == (not of.chunks), f"chunk hashes of {name} do not fit its size")
    root = image_root(of.nbytes, of.chunks)
    need(of.root == root, f"root of {name} is {of.root.hex()}, by its chunks {root.hex()}")


def _check_base(name: str, base: dict[str, Any], vote: Vote) -> None:
    """A base is older, so that no chain is a circle, and one for all images."""
    need(set(base) == {"incarnation", "step", "attempt", "root"}, f"the base of {name} is {base}")
    for number, least in (("incarnation", 0), ("step", 0), ("attempt", 1)):
        need(type(base[number]) is int, f"{number} of the base of {name} is {base[number]!r}")
        need_number(f"{name}.base.{number}", base[number], least)
    need_hash(f"{name}.base.root", base["root"])
    key = base["incarnation"], base["step"]
    need(key < (vote.incarnation, vote.step), f"the base of {name}, {key}, is not older")
    parent = base["incarnation"], base["step"], base["attempt"]
    need(parent == vote.parent, f"{name} has another base, {parent}, than {vote.parent}")
