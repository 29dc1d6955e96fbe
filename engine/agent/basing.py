"""Where the agent reads a delta's base: in the rank's arena, where its slot still is, in the node's own tier, where its
rank's share is whole there, else at the root, whose manifest says what counts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from everstep.backends.api import Backend
from everstep.backends.errors import BackendError
from everstep.errors import EverstepError
from everstep.format.records import RunRecord
from everstep.format.vote import ImageRecord, Vote
from everstep.memory.arena import Arena
from everstep.memory.control import Purpose
from everstep.memory.slots import SnapshotInfo
from everstep.store.bases import copy_bytes
from everstep.store.catalog import require_standing
from everstep.store.flush import IMAGE_REGION
from everstep.store.proving import bad_chunks
from everstep.store.sources import DurableSource
from everstep.store.staged import bases_near, near_source

from .journal import JobEntry
from .members import find_snapshot
from .storage import patiently

log = logging.getLogger("everstep.agent")

Key = tuple[int, int]
"""(incarnation, step)"""

ArenaOf = Callable[[int], Arena | None]
"""The arena of a rank of this node."""


def no_arena(rank: int) -> Arena | None:
    return None


@dataclass(slots=True)
class ReadOfBases:
    """Bytes of bases that deltas were coded against: out of slots, and from storage."""

    memory: int = 0
    storage: int = 0


class Basing:
    """Finds the bases of one run's flushes."""

    def __init__(self, run: RunRecord, root: Backend, arena_of: ArenaOf) -> None:
        self.read = ReadOfBases()
        self._run = run
        self._root = root
        self._arena_of = arena_of

    async def of(self, entry: JobEntry, near: Backend | None) -> DurableSource | None:
        """The checkpoint that ``entry``'s delta is to stand on; None, with the reason in the log, where it cannot, or
        is to stand on none."""
        key = entry.base
        if key is None:
            return None
        try:
            found = await rank_source(key, entry.rank, self._root, near, self._run)
            arena = self._arena_of(entry.rank)
            snapshot = None if arena is None else await asyncio.to_thread(find_snapshot, arena, *key)
        except (BackendError, EverstepError) as error:
            log.warning("rank %d: stored full, without its base, step %d: %s", entry.rank, key[1], error)
            return None
        return SlotFirst(found, entry.rank, arena, snapshot, self.read)


class SlotFirst(DurableSource):
    """A base whose images of ``rank`` may still lie in the slot from which they were flushed. Each read pins that,
    copies, and compares with the hashes of the base's vote; what is not right there is read from ``durable``. So no
    slot is held up for longer than a piece takes, and nothing is believed."""

    def __init__(
        self,
        durable: DurableSource,
        rank: int,
        arena: Arena | None,
        snapshot: SnapshotInfo | None,
        read: ReadOfBases,
    ) -> None:
        super().__init__(durable.backend, durable.manifest, durable.chunk_bytes, durable.label, durable.bases)
        self.ranks = durable.ranks
        self._durable = durable
        self._rank = rank
        self._arena = arena
        self._snapshot = snapshot
        self._read = read

    async def vote_of(self, rank: int) -> Vote:
        return await self._durable.vote_of(rank)

    async def records(self, rank: int) -> dict[str, ImageRecord]:
        return await self._durable.records(rank)

    async def check_image(self, rank: int, image: str) -> None:
        await self._durable.check_image(rank, image)

    def locate(self, rank: int, image: str) -> str:
        return self._durable.locate(rank, image)

    async def read_into(self, rank: int, image: str, offset: int, view: memoryview) -> None:
        size = self.chunk_bytes
        bad = list(range(offset // size, -(-(offset + len(view)) // size)))
        record = (await self.records(rank)).get(image)
        if rank == self._rank and record is not None and not offset % size:
            bad = await asyncio.to_thread(self._copied, record, offset, view, bad)
        begin = max(bad[0] * size, offset) - offset if bad else len(view)
        part = view[begin : (bad[-1] + 1) * size - offset] if bad else view[begin:]
        self._read.memory += len(view) - len(part)
        self._read.storage += len(part)
        if bad:
            await self._durable.read_into(rank, image, offset + begin, part)

    def _copied(self, record: ImageRecord, offset: int, view: memoryview, chunks: list[int]) -> list[int]:
        """Copy out of the slot; which of ``chunks`` are not right."""
        if self._arena is None or self._snapshot is None:
            return chunks
        place = self._snapshot.index, self._snapshot.generation
        try:
            with self._arena.pin(*place, purpose=Purpose.FLUSH) as pinned:
                whole = pinned.view(IMAGE_REGION + record.name)
                copy_bytes(view, whole[offset : offset + len(view)])
        except (EverstepError, KeyError, ValueError) as error:
            log.debug("step %d is not in memory any more: %s", self.step, error)
            self._snapshot = None
            return chunks
        return [index for index, _ in bad_chunks(view, chunks[0], record, self.chunk_bytes)]


async def rank_source(
    key: Key, rank: int, root: Backend, near: Backend | None, run: RunRecord
) -> DurableSource:
    """The nearest holder of that rank's share; what it is based on itself is looked for at both places. Raises Pruned,
    Damaged, CannotTell."""
    incarnation, step = key
    manifest = await patiently(lambda: require_standing(root, step, incarnation))
    if near is not None:
        bases = bases_near(near, [root], run)
        found = await near_source(near, manifest, run, bases)
        if found is not None and rank in found.ranks:
            return found
        return DurableSource(root, manifest, run.chunk_bytes, bases=bases)
    return DurableSource(root, manifest, run.chunk_bytes)
