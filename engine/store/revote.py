"""Making a lost vote again. What is made here is a guess until its hash is the one that the manifest names."""

from __future__ import annotations

import asyncio
import itertools
import mmap
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any

from everstep.backends.api import Backend
from everstep.backends.errors import NotFound
from everstep.errors import Damaged, EverstepError, RunError, UnsupportedValue
from everstep.format import names
from everstep.format.hashing import ChunkHasher, image_root, rank_root
from everstep.format.manifest import Manifest, RankRecord
from everstep.format.vote import STATE_IMAGE, ImageRecord, Vote, encode_vote, vote_of_index

from .asking import reading
from .catalog import list_steps, read_layout, read_vote
from .memories import Memory, Snapshot
from .mirror import read_small

PIECE_BYTES = 8 << 20
"""One read of an image whose hashes are taken anew."""

NEIGHBOURS_MAX = 4
"""Votes, of other ranks and of other steps, after whose pattern the lost one is made."""

FOUND_LATER = ("equal", "audit", "disagreements", "unbased")
"""Facts that a manifest has of comparing votes, and no vote."""

Place = tuple[int, int, int, int]
"""(step, incarnation, attempt, rank)"""


async def remade_votes(
    target: Backend,
    manifest: Manifest,
    record: RankRecord,
    memory: Memory,
    chunk_bytes: int,
) -> AsyncIterator[tuple[bytes, str]]:
    """Bytes that may be the vote of the rank of ``record``, and of what they were made: from the vote's own index where
    only its header is damaged; from the snapshot in this node's memory; from the images, whose hashes are taken anew,
    and what the manifest and neighbouring votes say; from snapshots in other nodes' memory. The caller proves them.
    Raises CannotTell."""
    place = manifest.step, manifest.incarnation, manifest.attempt, record.rank
    with suppress(NotFound, Damaged, UnsupportedValue):  # the last: what it says cannot be of this place
        data = await read_small(target, names.vote(*place))
        vote = vote_of_index(data, place, manifest.world, record.layout_hash, names.vote(*place))
        yield encode_vote(vote), "its header, from its index"
    async for found in _of_snapshots(await memory.here(manifest), manifest, record):
        yield found
    with suppress(NotFound, Damaged):
        images = await _hashed(target, record, place, chunk_bytes)
        if sum(image.nbytes for image in images) == record.nbytes:
            neighbours = await _neighbours(target, manifest, record.rank)
            for meta in _metas(manifest, record.rank, neighbours):
                yield _encoded(manifest, record, images, meta), "from its images, and what the manifest says"
    async for found in _of_snapshots(await memory.elsewhere(manifest), manifest, record):
        yield found


async def _of_snapshots(
    snapshots: Sequence[Snapshot], manifest: Manifest, record: RankRecord
) -> AsyncIterator[tuple[bytes, str]]:
    for snapshot in snapshots:
        if record.rank in snapshot.ranks:
            with suppress(EverstepError):
                images = tuple((await snapshot.records(record.rank)).values())
                meta = await snapshot.meta(record.rank)
                yield _encoded(manifest, record, images, meta), f"from {snapshot.label}"


def _encoded(
    manifest: Manifest, record: RankRecord, images: tuple[ImageRecord, ...], meta: dict[str, Any]
) -> bytes:
    vote = Vote(
        step=manifest.step,
        incarnation=manifest.incarnation,
        attempt=manifest.attempt,
        rank=record.rank,
        world=manifest.world,
        kind="full",
        layout_hash=record.layout_hash,
        root=rank_root(images),
        images=images,
        meta=meta,
    )
    return encode_vote(vote)


async def _hashed(
    target: Backend, record: RankRecord, place: Place, chunk_bytes: int
) -> tuple[ImageRecord, ...]:
    """The records of the rank's plain images as they lie there, good or not. Raises NotFound, Damaged."""
    layout = await read_layout(target, record.layout_hash)
    images = [(spec.name, spec.nbytes, names.image(*place, spec.name)) for spec in layout.images]
    images.append((STATE_IMAGE, record.state_nbytes, names.state(*place)))
    return tuple([await _record(target, *image, chunk_bytes) for image in images])


async def _record(target: Backend, image: str, nbytes: int, name: str, chunk_bytes: int) -> ImageRecord:
    hasher = ChunkHasher(chunk_bytes)
    room = mmap.mmap(-1, PIECE_BYTES)
    with reading(target, name):
        there = await target.size(name)
        if there < nbytes:
            raise Damaged(f"{name}: ends too early", found=there, expected=nbytes, name=name)
        for start in range(0, nbytes, PIECE_BYTES):
            view = memoryview(room)[: min(PIECE_BYTES, nbytes - start)]
            await target.read_into(name, start, view)
            await asyncio.to_thread(hasher.update, view)
    chunks = hasher.finish()
    return ImageRecord(image, nbytes, image_root(nbytes, chunks), chunks)


async def _neighbours(target: Backend, manifest: Manifest, rank: int) -> list[Vote]:
    """Votes that say much the same: of this rank at the nearest steps, and of other ranks at this one."""
    found: list[Vote] = []
    places: list[Place] = [
        (manifest.step, manifest.incarnation, manifest.attempt, other.rank)
        for other in manifest.ranks
        if other.rank != rank
    ][: NEIGHBOURS_MAX // 2]
    steps = [one for one in await list_steps(target) if one.incarnation == manifest.incarnation]
    steps.sort(key=lambda one: abs(one.step - manifest.step))
    places += [
        (one.step, one.incarnation, max(one.attempts), rank)
        for one in steps[: NEIGHBOURS_MAX + 1]
        if one.attempts and one.step != manifest.step
    ]
    for place in places:
        if len(found) == NEIGHBOURS_MAX:
            break
        with suppress(NotFound, RunError):
            found.append(replace((await read_vote(target, *place))[1], images=()))
    return found


def _metas(manifest: Manifest, rank: int, neighbours: Sequence[Vote]) -> Iterator[dict[str, Any]]:
    """What the rank may have said, most likely first. The order of the fields is a neighbour's, or the usual one."""
    facts = {key: value for key, value in manifest.facts.items() if key not in FOUND_LATER}
    said: dict[str, Any] = {
        "mesh": dict(manifest.mesh),
        "coordinates": _coordinates(manifest.mesh, rank),
        "parts": dict(manifest.parts),
        "data": manifest.data,
        "rng": list(manifest.rng),
        "metrics": dict(manifest.metrics),
        "config_hash": manifest.config_hash,
        "libraries": dict(manifest.libraries),
        "facts": facts,
    }
    patterns: list[dict[str, Any]] = [vote.meta for vote in neighbours] + [said]
    for pattern in patterns:
        own = next((vote for vote in neighbours if vote.meta is pattern and vote.rank == rank), None)
        of_rank = {} if own is None else {"coordinates": own.meta.get("coordinates")}
        here = {key: {**said, **of_rank}[key] for key in pattern if key in said}
        rest = {key: value for key, value in pattern.items() if key not in said}
        for data, metrics in itertools.product((said["data"], pattern.get("data")), (said["metrics"], {})):
            yield {key: {**here, **rest, "data": data, "metrics": metrics}[key] for key in pattern}


def _coordinates(mesh: dict[str, int], rank: int) -> dict[str, int]:
    """The rank's place in the mesh, row-major as torch numbers ranks."""
    found, left, sizes = {}, rank, list(mesh.items())
    for at, (dim, size) in enumerate(sizes):
        below = prod(size for _, size in sizes[at + 1 :])
        found[dim] = left // below % size
        left %= below
    return found
