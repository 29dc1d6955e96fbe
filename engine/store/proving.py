"""Whether what was read is what its record says: votes against manifests, images and objects against votes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everstep.errors import Damaged
from everstep.format.constants import HASH_BYTES
from everstep.format.hashing import chunk_hashes, chunk_hashes_of, image_root, rank_root
from everstep.format.layout import Layout
from everstep.format.manifest import Manifest, RankRecord
from everstep.format.vote import STATE_IMAGE, ImageRecord, StoredRecord, Vote, header_of


def check_size(name: str, found: int, expected: int) -> None:
    """Damaged unless the object has the size that its record says."""
    if found != expected:
        raise Damaged(f"{name}: wrong size", found=f"{found} bytes", expected=f"{expected} bytes", name=name)


def check_vote(data: bytes, vote: Vote, record: RankRecord, manifest: Manifest, name: str) -> None:
    """Damaged unless the vote is the very one that the manifest names, and its images the very ones."""
    header = header_of(vote, data)
    pairs: list[tuple[str, object, object]] = [
        ("hash", header.hash, record.vote_hash),
        ("layout", vote.layout_hash, record.layout_hash),
        ("world", vote.world, manifest.world),
        ("root", vote.root, rank_root(vote.images)),
        ("size of its images", header.images_nbytes, record.images_nbytes),
        ("size of its state", header.state_nbytes, record.state_nbytes),
        ("size of its objects", header.stored_nbytes, record.stored_nbytes),
    ]
    for what, found, expected in pairs:
        if found != expected:
            raise Damaged(
                f"{name}: another {what} than the manifest's", found=found, expected=expected, name=name
            )


def check_record(record: ImageRecord | StoredRecord, chunk_bytes: int, name: str) -> None:
    """Damaged unless the record has a hash for every chunk of its image, bound by its root."""
    count = -(-record.nbytes // chunk_bytes)
    if len(record.chunks) != count * HASH_BYTES:
        raise Damaged(
            f"{name}: it lacks a hash",
            found=f"{len(record.chunks) // HASH_BYTES} hashes",
            expected=f"{count} chunks of {chunk_bytes} bytes",
            name=name,
        )
    if image_root(record.nbytes, record.chunks) != record.root:
        raise Damaged(
            f"{name}: the hashes do not have their root",
            found="another",
            expected=record.root.hex(),
            name=name,
        )


def check_images(layout: Layout, records: Mapping[str, ImageRecord], name: str) -> None:
    """Damaged unless the records are those of the layout's images, and of the state."""
    found = {record.name: record.nbytes for record in records.values() if record.name != STATE_IMAGE}
    expected = {spec.name: spec.nbytes for spec in layout.images}
    if found != expected or STATE_IMAGE not in records:
        raise Damaged(f"{name}: other images than the vote's", found=found, expected=expected, name=name)


def bad_chunks(
    view: memoryview | Sequence[memoryview],
    first: int,
    record: ImageRecord | StoredRecord,
    chunk_bytes: int,
) -> list[tuple[int, bytes]]:
    """The chunks in ``view`` (which begins with chunk ``first``; or several views, one behind the other) whose hash is
    not the record's, each with the hash found. A chunk for which the record has no hash is bad."""
    if isinstance(view, memoryview):
        found = chunk_hashes(view, chunk_bytes)
    else:
        found = chunk_hashes_of(view, chunk_bytes)
    return differing(found, record.chunks[first * HASH_BYTES : first * HASH_BYTES + len(found)], first)


def differing(found: bytes, expected: bytes, first: int) -> list[tuple[int, bytes]]:
    """The chunks, the first of which is chunk ``first``, whose hash ``found`` is not the ``expected`` one, each with
    the one found."""
    if found == expected:
        return []
    return [
        (first + at // HASH_BYTES, found[at : at + HASH_BYTES])
        for at in range(0, len(found), HASH_BYTES)
        if found[at : at + HASH_BYTES] != expected[at : at + HASH_BYTES]
    ]


def changed_chunk(
    name: str, record: ImageRecord | StoredRecord, index: int, found: bytes, chunk_bytes: int
) -> Damaged:
    """The error for chunk ``index`` of ``record``."""
    return Damaged(
        f"{name}: damaged in the chunk at offset {index * chunk_bytes}",
        found=found.hex(),
        expected=record.chunks[index * HASH_BYTES : (index + 1) * HASH_BYTES].hex() or "a hash",
        name=name,
        offset=index * chunk_bytes,
    )


def check_chunks(view: memoryview, first: int, record: ImageRecord, chunk_bytes: int, name: str) -> None:
    """Damaged if a chunk in ``view`` is not the record's."""
    check_record(record, chunk_bytes, name)
    bad = bad_chunks(view, first, record, chunk_bytes)
    if bad:
        raise changed_chunk(name, record, *bad[0], chunk_bytes)
