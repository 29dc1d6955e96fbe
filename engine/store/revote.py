"""Making a lost vote again. What is made here is a guess until its hash is the one that the manifest names."""

from __future__ import annotations

import asyncio
import itertools
import mmap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from everstep.backends.api import Backend
from everstep.backends.errors import NotFound
from everstep.errors import (
    CannotTell,
    Damaged,
    EverstepError,
    Pruned,
    RunError,
    UnknownFormat,
    UnsupportedValue,
)
from everstep.format import names
from everstep.format.hashing import ChunkHasher, image_root, rank_root
from everstep.format.manifest import Manifest, RankRecord
from everstep.format.vote import (
    DELTA,
    PACKED,
    STATE_IMAGE,
    ImageRecord,
    StoredRecord,
    Vote,
    encode_vote,
    vote_of_index,
)

from .asking import reading
from .bases import Bases, PackedObject, open_table
from .catalog import list_steps, read_layout, read_vote
from .flush import UNBASED
from .memories import Memory, Snapshot
from .mirror import read_small
from .sources import bases_at

PIECE_BYTES = 8 << 20
"""One read of an image whose hashes are taken anew."""

NEIGHBOURS_MAX = 4
"""Votes, of other ranks and of other steps, after whose pattern the lost one is made."""

FOUND_LATER = ("equal", "audit", "disagreements", UNBASED)
"""Facts that a manifest has of comparing votes, and no vote."""

Place = tuple[int, int, int, int]
"""(step, incarnation, attempt, rank)"""


async def remade_votes(
    target: Backend,
    manifest: Manifest,
    record: RankRecord,
    memory: Memory,
    chunk_bytes: int,
    others: Sequence[Backend] = (),
) -> AsyncIterator[tuple[bytes, str]]:
    """Bytes that may be the vote of the rank of ``record``, and of what they were made: from the vote's own index where
    only its header is damaged; from the snapshot in this node's memory; from the images, whose hashes are taken anew
    (of packed ones decoded, with their bases, which ``others`` may have, too), and what the manifest and neighbouring
    votes say; from snapshots in other nodes' memory. The caller proves them. Raises CannotTell."""
    place = manifest.step, manifest.incarnation, manifest.attempt, record.rank
    with suppress(NotFound, Damaged, UnsupportedValue):  # the last: what it says cannot be of this place
        data = await read_small(target, names.vote(*place))
        vote = vote_of_index(data, place, manifest.world, record.layout_hash, names.vote(*place))
        yield encode_vote(vote), "its header, from its index"
    async for found in _of_snapshots(await memory.here(manifest), manifest, record):
        yield found
    with suppress(NotFound, Damaged, UnknownFormat):
        hashing = _Hashing(
            target, manifest, record.rank, chunk_bytes, bases_at([target, *others], chunk_bytes)
        )
        images = await hashing.all_of(record)
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
        kind=DELTA if any(image.base is not None for image in images) else "full",
        layout_hash=record.layout_hash,
        root=rank_root(images),
        images=images,
        meta=meta,
    )
    return encode_vote(vote)


@dataclass(frozen=True, slots=True)
class _Hashing:
    """Takes the hashes of one rank's images anew."""

    target: Backend
    manifest: Manifest
    rank: int
    chunk_bytes: int
    bases: Bases

    async def all_of(self, record: RankRecord) -> tuple[ImageRecord, ...]:
        """The records of the rank's images as they lie there, good or not. Raises NotFound, Damaged, UnknownFormat."""
        layout = await read_layout(self.target, record.layout_hash)
        found = [await self._image(spec.name, spec.nbytes) for spec in layout.images]
        found.append(await self._plain(STATE_IMAGE, record.state_nbytes, names.state(*self._place)))
        return tuple(found)

    @property
    def _place(self) -> Place:
        return self.manifest.step, self.manifest.incarnation, self.manifest.attempt, self.rank

    async def _image(self, image: str, nbytes: int) -> ImageRecord:
        try:
            return await self._packed(image, nbytes, names.packed(*self._place, image))
        except NotFound:
            return await self._plain(image, nbytes, names.image(*self._place, image))

    async def _plain(self, image: str, nbytes: int, name: str) -> ImageRecord:
        there = await self._size(name)
        if there < nbytes:
            raise Damaged(f"{name}: ends too early", found=there, expected=nbytes, name=name)
        chunks = await self._hashes(nbytes, lambda offset, view: self._read(name, offset, view))
        return ImageRecord(image, nbytes, image_root(nbytes, chunks), chunks)

    async def _packed(self, image: str, nbytes: int, name: str) -> ImageRecord:
        size = await self._size(name)

        async def read(offset: int, view: memoryview) -> None:
            await self._read(name, offset, view)

        chunks = await self._hashes(size, read)
        stored = StoredRecord(size, image_root(size, chunks), chunks)
        record = ImageRecord(image, nbytes, b"", b"", PACKED, None, stored)
        table = await open_table(PackedObject(name, self.rank, record, self.chunk_bytes, read))
        try:
            if table.needs_base:
                record = replace(record, encoding=DELTA, base=await self._base(image, name))
            packed = PackedObject(name, self.rank, record, self.chunk_bytes, read)
            chunks = await self._hashes(
                nbytes, lambda offset, view: self.bases.read_into(packed, table, offset, view)
            )
        except (CannotTell, Pruned) as error:
            raise Damaged(f"{name}: its base cannot be read", found=str(error), name=name) from error
        return replace(record, root=image_root(nbytes, chunks), chunks=chunks)

    async def _base(self, image: str, name: str) -> dict[str, Any]:
        """What the vote of a delta says of its base: the one that the manifest names, by the image's root there."""
        parent = self.manifest.parent
        if parent is None:
            raise Damaged(
                f"{name} refers to a base, and has none", found="no base", expected="one", name=name
            )
        for source in await self.bases.sources((parent["incarnation"], parent["step"])):
            with suppress(RunError):
                root = (await source.records(self.rank))[image].root
                of = {key: parent[key] for key in ("incarnation", "step", "attempt")}
                return {**of, "root": root.hex()}
        raise Damaged(f"{name}: its base's vote cannot be read", found="no holder", expected="one", name=name)

    async def _size(self, name: str) -> int:
        with reading(self.target, name):
            return await self.target.size(name)

    async def _read(self, name: str, offset: int, view: memoryview) -> None:
        with reading(self.target, name):
            await self.target.read_into(name, offset, view)

    async def _hashes(self, nbytes: int, read: Callable[[int, memoryview], Awaitable[None]]) -> bytes:
        hasher = ChunkHasher(self.chunk_bytes)
        step = max(PIECE_BYTES // self.chunk_bytes, 1) * self.chunk_bytes
        room = mmap.mmap(-1, step)
        for start in range(0, nbytes, step):
            view = memoryview(room)[: min(step, nbytes - start)]
            await read(start, view)
            await asyncio.to_thread(hasher.update, view)
        return hasher.finish()


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
    last = {UNBASED: True} if rank in manifest.facts.get(UNBASED, ()) else {}
    patterns: list[dict[str, Any]] = [vote.meta for vote in neighbours] + [said]
    for pattern in patterns:
        own = next((vote for vote in neighbours if vote.meta is pattern and vote.rank == rank), None)
        of_rank = {} if own is None else {"coordinates": own.meta.get("coordinates")}
        order = [key for key in pattern if key != UNBASED]
        here = {**pattern, **{key: {**said, **of_rank}[key] for key in order if key in said}}
        for data, metrics in itertools.product((said["data"], pattern.get("data")), (said["metrics"], {})):
            yield {key: {**here, "data": data, "metrics": metrics}[key] for key in order} | last


def _coordinates(mesh: dict[str, int], rank: int) -> dict[str, int]:
    """The rank's place in the mesh, row-major as torch numbers ranks."""
    found, left, sizes = {}, rank, list(mesh.items())
    for at, (dim, size) in enumerate(sizes):
        below = prod(size for _, size in sizes[at + 1 :])
        found[dim] = left // below % size
        left %= below
    return found
