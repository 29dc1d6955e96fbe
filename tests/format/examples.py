"""One small example of every stored object: for worked bytes and the golden files."""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any

from everstep.format import hashing, layout, names, packed, vote
from everstep.format.constants import FORMAT_VERSION
from everstep.format.layout import Box, EntrySpec, Layout, Scope
from everstep.format.manifest import Abort, Manifest, RankRecord, Tombstone
from everstep.format.records import IncarnationRecord, RunRecord, Writer
from everstep.format.vote import ImageRecord, StoredRecord, Vote

CHUNK_BYTES = 4096
STEP, INCARNATION, ATTEMPT = 12000, 3, 1
CREATED = "2026-01-31T12:00:00Z"

RUN = RunRecord(
    run_id="5f0c2a7e9b3d4816",
    format=FORMAT_VERSION,
    required=(),
    hash_id="xxh3-128",
    chunk_bytes=CHUNK_BYTES,
    created=CREATED,
)

RECORD = IncarnationRecord(
    number=INCARNATION,
    id="c0ffee00c0ffee00",
    parent=2,
    adopted_incarnation=2,
    adopted_step=11990,
    fresh=None,
    world=1,
    mesh={"dp": 1},
    config_hash="0123456789abcdef0123456789abcdef",
    config={"lr": 0.1},
    config_changes={"lr": [0.2, 0.1]},
    config_reason="slower",
    loosened=(),
    writer=Writer(host="node-a", boot="7d9a", pid=4242, start_time=987654),
    created=CREATED,
)

ABORT = Abort(STEP, INCARNATION, 2, "rank 0: disk is full", rank=0)
TOMBSTONE = Tombstone(STEP, INCARNATION, 3, "keep_last=2", "2026-01-31T13:00:00Z")


def specs(version: int = FORMAT_VERSION) -> list[EntrySpec]:
    """A tensor, a scalar, one in two boxes, one stored elsewhere, one whose dtype safetensors lacks; since
    version 2 one of which rank 0's counts."""
    two = (Box((0, 0), (1, 2)), Box((3, 0), (1, 2)))
    found = [
        EntrySpec("model", "w", "float32", (2, 3), (Box.full((2, 3)),)),
        EntrySpec("model", "steps", "int64", (), (Box.full(()),)),
        EntrySpec("model", "cut", "bfloat16", (4, 2), two, Scope.GLOBAL),
        EntrySpec("model", "elsewhere", "float32", (5,), (Box.full((5,)),), Scope.GLOBAL, stored=False),
        EntrySpec("optimizer", "z", "complex128", (1,), (Box.full((1,)),)),
    ]
    if version > 1:
        found.append(EntrySpec("model", "mean", "float32", (2,), (Box.full((2,)),), Scope.FIRST))
    return found


def layout_with_copies() -> Layout:
    """Rank 0, which stores two tensors of which rank 1 has second copies, and one of its own, and has a second copy of
    what rank 1 stores."""
    shape, whole = (2,), (Box.full((2,)),)
    shared = [
        EntrySpec("model", key, "float32", shape, whole, Scope.GLOBAL, shared=(1,)) for key in ("w", "b")
    ]
    own = EntrySpec("model", "mean", "float32", shape, whole)
    v = EntrySpec("model", "v", "float32", shape, whole, Scope.GLOBAL, stored=False, shared=(0,), copy_of=1)
    return layout.build_layout([*shared, own, v])


LAYOUTS = {
    1: "457827f3612e6afe1aa2b64f63eaf97b",
    2: "925833f80a12ddf033ea39ff47cd970c",
    3: "31c8ac8fa84e6604f477fb3b08d5d29b",
    4: "67738a01246738238e7c232c21e62920",
}
"""Hashes by former version."""


def example_layout(version: int = FORMAT_VERSION) -> Layout:
    return layout.build_layout(specs(version))


def layout_hash_of(version: int) -> str:
    of = example_layout(version)
    return LAYOUTS.get(version) or layout.layout_hash(layout.encode(of))


def image_bytes(of: Layout) -> dict[str, bytes]:
    """Images by name: the header, then bytes that count up."""
    found = {}
    for spec in of.images:
        size = spec.nbytes - len(spec.header)
        found[spec.name] = spec.header + bytes(i % 256 for i in range(size))
    return found


META: dict[str, Any] = {
    "mesh": {"dp": 1},
    "coordinates": {"dp": 0},
    "parts": {"model": {"class": "GPT"}, "optimizer": {"class": "AdamW"}},
    "config_hash": "0123456789abcdef0123456789abcdef",
    "metrics": {"loss": 0.5, "best": math.inf},
}

STATE = b"\x82\xa1v\x01\xa5parts\x80"
"""A state image: {"v": 1, "parts": {}}."""


def record_of(name: str, data: bytes) -> ImageRecord:
    chunks = hashing.chunk_hashes(memoryview(data), CHUNK_BYTES)
    return ImageRecord(name, len(data), hashing.image_root(len(data), chunks), chunks)


def example_vote(version: int = FORMAT_VERSION) -> Vote:
    of = example_layout(version)
    images = [record_of(name, data) for name, data in image_bytes(of).items()]
    images.append(record_of(vote.STATE_IMAGE, STATE))
    return Vote(
        step=STEP,
        incarnation=INCARNATION,
        attempt=ATTEMPT,
        rank=0,
        world=1,
        kind="full",
        layout_hash=layout_hash_of(version),
        root=hashing.rank_root(images),
        images=tuple(images),
        meta=META if version > 1 else {key: META[key] for key in ("coordinates", "metrics")},
    )


def example_manifest(vote_bytes: bytes, version: int = FORMAT_VERSION) -> Manifest:
    of = example_vote(version)
    record = RankRecord(
        rank=0,
        vote_hash=vote.vote_hash(vote_bytes),
        vote_nbytes=len(vote_bytes),
        layout_hash=of.layout_hash,
        images_nbytes=sum(image.nbytes for image in of.images if image.name != vote.STATE_IMAGE),
        state_nbytes=len(STATE),
        stored_nbytes=sum(image.object.nbytes for image in of.images if image.name != vote.STATE_IMAGE),
    )
    return Manifest(
        step=STEP,
        incarnation=INCARNATION,
        attempt=ATTEMPT,
        kind="full",
        world=1,
        mesh={"dp": 1},
        ranks=(record,),
        parts={
            "model": {"class": "GPT", "settings": {}},
            "optimizer": {"class": "AdamW", "settings": {"lr": 0.1}},
        },
        config_hash="0123456789abcdef0123456789abcdef",
        libraries={"everstep": "0.1.0", "torch": "2.13.0"},
        metrics={"loss": 0.5, "best": math.inf},
        created=CREATED,
        data={"kind": "finite", "position": {"epoch": 1, "batch": 17}},
        rng=("python", "torch"),
    )


DELTA_STEP = 12010
"""The first example is its base; of each image the chunk behind the header has changed."""


def delta_images() -> dict[str, tuple[bytes, bytes]]:
    """By name: the image, and its object, a reference and a plain chunk."""
    found = {}
    for name, base in image_bytes(example_layout()).items():
        changed = bytes((value + 1) % 256 for value in base[CHUNK_BYTES:])
        rows = [(packed.REFERENCE, 0), (packed.PLAIN, len(changed))]
        image = base[:CHUNK_BYTES] + changed
        found[name] = image, changed + packed.encode_tail(len(image), CHUNK_BYTES, rows)
    return found


def payload() -> tuple[bytes, bytes, bytes]:
    """Payload of a chunk of eight float32 in encoding 5, the base's chunk, and the chunk: two of its numbers are one
    and two steps of the last bit above the base's, one is one below."""
    base = struct.pack("<8f", *[1.0] * 8)
    chunk = struct.pack("<8I", *[0x3F800000 + step for step in (0, 1, -1, 2, 0, 0, 0, 0)])
    lowest = struct.pack("<BIBIBI", 3, 3, 0, 1, 0, 3)
    table = struct.pack("<IBBB", 32, 4, 2, 0) + lowest + 3 * struct.pack("<BI", 2, 0)
    return struct.pack("<I", len(table)) + table + bytes([0b1110, 2, 1, 4]), base, chunk


def classes() -> tuple[bytes, bytes, bytes]:
    """The same of a chunk whose last two numbers are 3 steps above the base's and 40 below: classes 6 and 35 in one
    context, weighted alike, and three bits of the second, which are 0."""
    base = struct.pack("<8f", *[1.0] * 8)
    chunk = struct.pack("<8I", *[0x3F800000 + step for step in (0, 0, 0, 0, 0, 0, 3, -40)])
    weights = bytes(4 if number in (6, 35) else 0 for number in range(36))
    table = struct.pack("<IBBBIBI", 32, 4, 5, 2, 2, 2, 0b11000000)
    table += struct.pack("<BBBBIIBI", 23, 127, 1, 35, 4 * 8, 1, 0, len(weights))
    # Backwards from 2^15: x becomes 4096 floor(x / f) + x modulo f + s.
    states = [(1 << 15) // f * 4096 + (1 << 15) % f + s for f, s in ((2049, 0), (2047, 2049))]
    states += [1 << 15] * 6
    return (
        struct.pack("<I", len(table)) + table + weights + struct.pack("<8I", *states) + bytes([0]),
        base,
        chunk,
    )


def delta_vote() -> Vote:
    """The vote of :func:`delta_images`."""
    full = example_vote()
    parent = {"incarnation": full.incarnation, "step": full.step, "attempt": full.attempt}
    images = []
    for (name, (image, stored)), base in zip(delta_images().items(), full.images, strict=False):
        plain, of_object = record_of(name, image), record_of(name, stored)
        root = StoredRecord(of_object.nbytes, of_object.root, of_object.chunks)
        images.append(
            dataclasses.replace(
                plain, encoding=vote.DELTA, base={**parent, "root": base.root.hex()}, stored=root
            )
        )
    images.append(record_of(vote.STATE_IMAGE, STATE))
    return dataclasses.replace(
        full, step=DELTA_STEP, kind="delta", images=tuple(images), root=hashing.rank_root(images)
    )


def delta_manifest(vote_bytes: bytes) -> Manifest:
    of = delta_vote()
    full = example_manifest(vote_bytes)
    record = dataclasses.replace(
        full.ranks[0],
        stored_nbytes=sum(image.object.nbytes for image in of.images if image.name != vote.STATE_IMAGE),
    )
    parent = {"incarnation": INCARNATION, "step": STEP, "attempt": ATTEMPT}
    return dataclasses.replace(full, step=DELTA_STEP, kind="delta", parent=parent, ranks=(record,))


DELTA_VOTE_NAME = names.vote(DELTA_STEP, INCARNATION, ATTEMPT, 0)
DELTA_MANIFEST_NAME = names.decision(DELTA_STEP, INCARNATION, ATTEMPT)
VOTE_NAME = names.vote(STEP, INCARNATION, ATTEMPT, 0)
GATHER_NAME = names.gather(STEP, INCARNATION, ATTEMPT, 0)
MANIFEST_NAME = names.decision(STEP, INCARNATION, ATTEMPT)
