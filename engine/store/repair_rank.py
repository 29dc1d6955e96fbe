"""Mending one rank's share of a checkpoint: its vote, which proves the rest, and its images, chunk by chunk."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from everstep.backends.api import Backend
from everstep.backends.errors import BackendError, NotFound
from everstep.backends.points import reach
from everstep.errors import EverstepError, RunError
from everstep.format import names
from everstep.format.constants import HASH_BYTES
from everstep.format.hashing import chunk_hashes
from everstep.format.manifest import Manifest, RankRecord
from everstep.format.vote import ImageRecord, StoredRecord, Vote, decode_vote, vote_hash

from .asking import writing
from .bases import lacking
from .catalog import list_step, read_decision
from .memories import Images, Memory
from .mirror import read_small
from .repair_base import make_way
from .revote import remade_votes
from .sources import DurableSource, bases_at

PIECE_BYTES = 8 << 20
"""One read and one write; at least a chunk."""

Read = Callable[[int, memoryview], Awaitable[None]]
"""Fills the view with an object's bytes from an offset on."""


@dataclass(frozen=True, slots=True)
class _Holder:
    label: str
    read: Read


class _Holders:
    """Who may have an object's bytes, in the order in which they are asked. Those of ``further`` are looked for, once,
    when nobody before them was right."""

    def __init__(
        self, known: Sequence[_Holder], further: Sequence[Callable[[], Awaitable[list[_Holder]]]]
    ) -> None:
        self._known = list(known)
        self._further = list(further)

    async def at(self, number: int) -> _Holder | None:
        """None where there are no more."""
        while number >= len(self._known) and self._further:
            self._known += await self._further.pop(0)()
        return self._known[number] if number < len(self._known) else None


class Share:
    """What one rank stored of a checkpoint. ``places``: the one to mend, then the others, nearest first. ``mended``
    says of each object that was written anew its name, from whom, and its bytes."""

    def __init__(
        self,
        places: Sequence[Backend],
        manifest: Manifest,
        record: RankRecord,
        memory: Memory,
        chunk_bytes: int | None,
    ) -> None:
        self.mended: list[tuple[str, str, int]] = []
        self._target, *self._others = places
        self._manifest = manifest
        self._record = record
        self._memory = memory
        self._chunk_bytes = chunk_bytes
        self._place = manifest.step, manifest.incarnation, manifest.attempt, record.rank

    async def mend(self, wanted: set[str]) -> dict[str, str]:
        """Put the objects ``wanted`` right, the vote first; why not, by name, of those that nobody has right. Raises
        CannotTell, SaveFailed, StorageFull where the place itself does not answer."""
        if self._chunk_bytes is None:
            return dict.fromkeys(wanted, "the run's chunk size is not known: its record is damaged")
        name = names.vote(*self._place)
        vote = await self._vote(name, self._chunk_bytes)
        if vote is None:
            why = "no other place has it, and it cannot be made again"
            return {**dict.fromkeys(wanted, "without its vote nothing proves it"), name: why}
        failed = {}
        for image in vote.images:
            object_name = image.object_name(*self._place)
            if object_name in wanted and image.object.nbytes:
                why = await self._image(image, object_name, self._chunk_bytes)
                if why:
                    failed[object_name] = why
        return failed

    async def _vote(self, name: str, chunk_bytes: int) -> Vote | None:
        """The vote that the manifest names, put right if it is not; None where nobody has it."""
        for holder in (self._target, *self._others):
            with suppress(NotFound, RunError):
                data = await read_small(holder, name)
                vote = self._proved(data, name)
                if vote is not None:
                    if holder is not self._target:
                        await self._put(name, data, f"from {holder.url}")
                    return vote
        async for data, how in remade_votes(
            self._target, self._manifest, self._record, self._memory, chunk_bytes, self._others
        ):
            vote = self._proved(data, name)
            if vote is not None:
                await self._put(name, data, how)
                return vote
        return None

    def _proved(self, data: bytes, name: str) -> Vote | None:
        """The vote in ``data`` if it is the one that the manifest names."""
        if len(data) != self._record.vote_nbytes or vote_hash(data) != self._record.vote_hash:
            return None
        with suppress(RunError):
            return decode_vote(data, name)
        return None

    async def _put(self, name: str, data: bytes, how: str) -> None:
        await make_way(self._target, name)
        reach("repair.put.before", name)
        with writing(self._target, name):
            await self._target.write(name, data)
        reach("repair.put.after", name)
        self.mended.append((name, how, len(data)))

    async def _image(self, image: ImageRecord, name: str, chunk_bytes: int) -> str:
        """Write the object anew, each chunk from the first holder that has it right; why not, "" if it is."""
        stored = image.object
        holders = self._holders(image, name, chunk_bytes)
        step = max(PIECE_BYTES // chunk_bytes, 1) * chunk_bytes
        used: dict[str, None] = {}
        room = mmap.mmap(-1, step)
        with writing(self._target, name, step=self._manifest.step, rank=self._record.rank):
            writer = await self._target.open_writer(name, stored.nbytes)
            try:
                for start in range(0, stored.nbytes, step):
                    view = memoryview(room)[: min(step, stored.nbytes - start)]
                    lost = await _fill_right(holders, start, view, stored, chunk_bytes, used)
                    if lost is not None:
                        await writer.abort()
                        return f"nobody has the chunk at offset {lost} right"
                    await writer.write(view)
                    reach("repair.image.piece", name)
                if list(used) == [self._target.url] and await self._target.size(name) == stored.nbytes:
                    await writer.abort()
                    return "its bytes are those that were written: what is wrong with it was wrong then"
                await make_way(self._target, name)
                await writer.commit()
            except BaseException:
                await writer.abort()
                raise
        reach("repair.image.done", name)
        self.mended.append((name, "from " + ", ".join(used), stored.nbytes))
        return ""

    def _holders(self, image: ImageRecord, name: str, chunk_bytes: int) -> _Holders:
        """Who may have the object's bytes: the places, and, where it is the image's own bytes, places that have another
        attempt of the checkpoint, which may be a delta, this node's memory, and that of other nodes."""
        places = [_Holder(place.url, _of_place(place, name)) for place in (self._target, *self._others)]
        if image.stored is not None:
            return _Holders(places, [])

        async def attempts() -> list[_Holder]:
            return self._having(image, await self._other_attempts(chunk_bytes))

        async def here() -> list[_Holder]:
            return self._having(image, await self._memory.here(self._manifest))

        async def elsewhere() -> list[_Holder]:
            return self._having(image, await self._memory.elsewhere(self._manifest))

        return _Holders(places, [attempts, here, elsewhere])

    def _having(self, image: ImageRecord, holders: Sequence[Images]) -> list[_Holder]:
        rank = self._record.rank
        return [
            _Holder(one.label, _of_images(one, rank, image.name))
            for one in holders
            if rank in one.ranks and one.has(rank, image.name)
        ]

    async def _other_attempts(self, chunk_bytes: int) -> list[DurableSource]:
        """The other places at which another attempt counts: before a synthetic full, say, or after it."""
        bases = bases_at([*self._others, self._target], chunk_bytes)
        found = []
        for place in self._others:
            with suppress(RunError):
                names_there = await list_step(place, self._manifest.step, self._manifest.incarnation)
                decision = await read_decision(place, names_there)
                if isinstance(decision, Manifest) and decision.attempt != self._manifest.attempt:
                    found.append(DurableSource(place, decision, chunk_bytes, bases=bases))
        return [source for source in found if self._record.rank in source.ranks]


def _of_place(place: Backend, name: str) -> Read:
    async def read(offset: int, view: memoryview) -> None:
        await place.read_into(name, offset, view)

    return read


def _of_images(images: Images, rank: int, image: str) -> Read:
    async def read(offset: int, view: memoryview) -> None:
        await images.read_into(rank, image, offset, view)

    return read


async def _fill_right(
    holders: _Holders,
    start: int,
    view: memoryview,
    stored: StoredRecord,
    chunk_bytes: int,
    used: dict[str, None],
) -> int | None:
    """Fill ``view`` with the object's bytes from ``start`` on, chunk by chunk from whoever has them right; ``used``
    gets who it was. Gives the offset of a chunk that nobody has right."""
    wanted = list(range(start, start + len(view), chunk_bytes))
    whole = True
    number = 0
    while wanted and (holder := await holders.at(number)) is not None:
        number += 1
        if whole:  # one read, as long as nothing of it is right yet
            wanted_now = await _try(holder, start, view, stored, chunk_bytes)
            whole = len(wanted_now) == len(wanted)
            if not whole:
                used[holder.label] = None
            wanted = wanted_now
        else:
            left = []
            for offset in wanted:
                part = view[offset - start : offset - start + chunk_bytes]
                if await _try(holder, offset, part, stored, chunk_bytes):
                    left.append(offset)
                else:
                    used[holder.label] = None
            wanted = left
    return wanted[0] if wanted else None


async def _try(
    holder: _Holder, start: int, view: memoryview, stored: StoredRecord, chunk_bytes: int
) -> list[int]:
    """Read from ``holder``; the offsets of the chunks that are not right."""
    every = list(range(start, start + len(view), chunk_bytes))
    try:
        await holder.read(start, view)
    except (BackendError, EverstepError) as error:
        if isinstance(error, BackendError) or not lacking(error):
            return every
    found = await asyncio.to_thread(chunk_hashes, view, chunk_bytes)
    first = start // chunk_bytes * HASH_BYTES
    expected = stored.chunks[first : first + len(found)]
    return [
        offset
        for at, offset in zip(range(0, len(found), HASH_BYTES), every, strict=True)
        if found[at : at + HASH_BYTES] != expected[at : at + HASH_BYTES]
    ]
