"""Copying committed checkpoints to another place: the same bytes under the same names.

To mirror a checkpoint: the records, then each rank's layout, images and state, every chunk compared with the vote's
hash on its way, then its vote. When all votes are there, the source's decision is created, if absent, at the same
name, last of all: so a half-mirrored checkpoint neither lists nor loads. Doing it again sends only what is not there.
Giving a mirror up creates an abort record at that name, so exactly one of the two happens, whoever asks.

Each rank may be mirrored by another process, the same one by several at once: they write equal bytes. A place without
``atomic_create`` cannot decide: it has no abort records, and the manifest is simply put there.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass

from everstep.backends.api import Backend, Notes
from everstep.backends.errors import Conflict, NotFound, Permanent
from everstep.backends.points import reach
from everstep.errors import Damaged, EverstepError, NoCheckpoint, NotARun, RunError, SaveAbandoned, SaveFailed
from everstep.format import names
from everstep.format.layout import proved
from everstep.format.manifest import (
    Abort,
    Manifest,
    Quarantine,
    RankRecord,
    Tombstone,
    decision_number,
    decode_decision,
    encode_decision,
)
from everstep.format.records import RunRecord
from everstep.format.vote import ImageRecord, Vote

from .asking import each, reading, writing
from .catalog import list_step, read_decision, read_decision_at, read_numbered, read_vote
from .commit import abort_attempt
from .proving import check_record
from .runs import incarnation_numbers, open_run, read_incarnations
from .sources import DurableSource
from .streaming import ReadInto, Streaming

IMAGES_PARALLEL = 2
"""Images of one rank that are copied side by side, each with memory as :mod:`.streaming` says."""

SMALL_BYTES_MAX = 256 << 20
"""Votes are the largest of what is copied in one piece."""

Told = Callable[[int], None]
"""Hears of bytes that have been written."""


async def copy_records(source: Backend, target: Backend) -> RunRecord:
    """Make ``target`` the same run: run.json and the incarnations' records, in their order, created if absent.

    Raises what :func:`~.runs.open_run` does of the source; RunError where another run, or another history of this
    one, lies at ``target``; SaveFailed, StorageFull, CannotTell.
    """
    run = await open_run(source)
    try:
        there = await open_run(target)
    except NotARun as error:
        if error.expected != names.RUN:
            raise
    else:
        if there.run_id != run.run_id:
            raise RunError(
                f"{target.url}: another run is there",
                found=f"run {there.run_id}",
                expected=f"nothing, or run {run.run_id} as at {source.url}",
                hint="Choose another place; nothing was written",
                name=names.RUN,
            )
    await _copy_record(source, target, names.RUN)
    known = set(await incarnation_numbers(target))
    records = await read_incarnations(source)

    async def compare(number: int) -> None:
        await _copy_record(source, target, names.incarnation(number))

    await each([record.number for record in records if record.number in known], compare)
    for record in records:  # one after the other: a gap would be damage
        if record.number not in known:
            await compare(record.number)
    return run


async def mirror_rank(
    source: Backend,
    target: Backend,
    manifest: Manifest,
    rank: int,
    *,
    run: RunRecord,
    pool: Executor,
    notes: Callable[[str], Notes] | None = None,
    told: Told | None = None,
) -> int:
    """Copy ``rank``'s share of the checkpoint, its vote last; the bytes that were sent. What is there with its right
    size is not sent again. The records must be there (:func:`copy_records`). ``pool`` hashes; ``notes`` gives, by an
    object's name, what its writer remembers over a crash.

    Raises Damaged (of the source, naming object and chunk), Pruned (rotation removed it there meanwhile),
    SaveAbandoned (given up or removed at ``target``), SaveFailed, StorageFull, CannotTell. Nothing counts then, and
    calling again goes on.
    """
    stood = await standing(target, manifest)
    if isinstance(stood, Abort):
        raise SaveAbandoned(
            f"step {manifest.step} was given up at {target.url}",
            found=stood.reason,
            step=manifest.step,
            tier=target.url,
            rank=rank,
        )
    if stood is not None:
        return 0
    share = _Share(source, target, manifest, rank, run.chunk_bytes, pool, notes, told)
    return await share.copy()


async def mend_rank(
    source: Backend, target: Backend, manifest: Manifest, rank: int, *, run: RunRecord, pool: Executor
) -> int:
    """Make ``rank``'s share at ``target`` what it is at ``source``: every byte there is read and proved, and what is
    damaged or missing is written again; the bytes that were sent. Raises as :func:`mirror_rank`."""
    stood = await standing(target, manifest)
    if isinstance(stood, Abort):
        return 0
    return await _Share(
        source, target, manifest, rank, run.chunk_bytes, pool, None, None, mending=True
    ).copy()


async def missing_ranks(target: Backend, manifest: Manifest) -> list[int]:
    """The ranks of which not everything lies at ``target``: the vote, and images that come to the right size."""
    directory = names.attempt_dir(manifest.step, manifest.incarnation, manifest.attempt)
    found: defaultdict[tuple[int, names.Kind], int] = defaultdict(int)
    sizes: dict[str, int] = {}
    with reading(target, directory):
        async for item in target.list(directory):
            parsed = names.parse(item.name)
            if parsed is not None and parsed.rank is not None:
                found[parsed.rank, parsed.kind] += item.nbytes
                sizes[item.name] = item.nbytes

    async def lacks(record: RankRecord) -> bool:
        if found[record.rank, names.Kind.VOTE] != record.vote_nbytes:
            return True
        images = found[record.rank, names.Kind.IMAGE], found[record.rank, names.Kind.STATE]
        if images[0] <= record.stored_nbytes or images[1] != record.state_nbytes:
            return images != (record.stored_nbytes, record.state_nbytes)
        # More than there should be: another try stored an image in another way. The vote tells which ones count.
        place = manifest.step, manifest.incarnation, manifest.attempt, record.rank
        try:
            vote = (await read_vote(target, *place))[1]
        except (NotFound, Damaged):
            return True
        return any(sizes.get(image.object_name(*place)) != image.object.nbytes for image in vote.images)

    missing = await each(manifest.ranks, lacks)
    return [record.rank for record, is_missing in zip(manifest.ranks, missing, strict=True) if is_missing]


async def conclude(source: Backend, target: Backend, manifest: Manifest) -> Manifest | Abort | None:
    """Publish the source's manifest at ``target`` if all ranks are there; None while some are missing. Whatever stands
    there already counts and is returned: an abort record, or a removal, as an Abort. Any process may call it, any
    number of times.

    Raises NoCheckpoint (a delta's base is not at ``target``), Pruned, Damaged, SaveFailed, StorageFull, CannotTell.
    """
    stood = await standing(target, manifest)
    if isinstance(stood, Abort):
        return stood
    number = decision_number(manifest)
    lower = await _lower(source, target, manifest)
    if stood is None:
        await require_parent(target, manifest)
        if await missing_ranks(target, manifest):
            return None
        # Abort records below are true at any time. Anything else below says more than the manifest that counts.
        await each(
            [n for n, is_abort in lower if is_abort], lambda n: _copy_decision(source, target, manifest, n)
        )
        name = names.decision(manifest.step, manifest.incarnation, number)
        reach("mirror.manifest.before", name)
        await _copy_decision(source, target, manifest, number)
        reach("mirror.manifest.after", name)
        stood = await standing(target, manifest)
    if isinstance(stood, Manifest):
        await each([n for n, _ in lower], lambda n: _copy_decision(source, target, manifest, n))
    return stood


async def give_up(target: Backend, manifest: Manifest, reason: str) -> Manifest | Abort | None:
    """Decide that the checkpoint is not mirrored to ``target``, unless it is already; what stands is returned. None:
    ``target`` cannot decide, and nothing stands there."""
    stood = await standing(target, manifest)
    if stood is not None or not target.capabilities.atomic_create:
        return stood
    number = decision_number(manifest)
    return await abort_attempt(target, manifest.step, manifest.incarnation, number, reason=reason)


async def standing(target: Backend, manifest: Manifest) -> Manifest | Abort | None:
    """What is decided at ``target`` of the checkpoint that ``manifest`` says counts; None if nothing is."""
    number = decision_number(manifest)
    found = await list_step(target, manifest.step, manifest.incarnation)
    if not found.decisions:
        return None
    numbered = await read_numbered(target, found)
    # A tombstone with a lower number counts, too: what it removes may be half gone.
    if numbered is not None and (numbered[0] >= number or isinstance(numbered[1], Tombstone)):
        stood = numbered[1]
        if isinstance(stood, (Tombstone, Quarantine)):
            why = "was removed" if isinstance(stood, Tombstone) else "is in quarantine"
            reason = f"the checkpoint {why}: {stood.reason}"
            return Abort(manifest.step, manifest.incarnation, number, reason)
        return stood
    at = await read_decision_at(target, manifest.step, manifest.incarnation, number)
    return at if isinstance(at, Abort) else None


async def require_parent(target: Backend, manifest: Manifest) -> None:
    """A delta's base must stand where the delta is to go. Raises NoCheckpoint."""
    parent = manifest.parent_key
    if parent is None:
        return
    incarnation, step = parent
    decision = await read_decision(target, await list_step(target, step, incarnation))
    if isinstance(decision, Manifest):
        return
    raise NoCheckpoint(
        f"{target.url}: the base of step {manifest.step} is not there",
        found="nothing that counts",
        expected=f"step {step} of incarnation {incarnation}",
        hint="Copy the base first",
        step=manifest.step,
    )


# -- one rank


@dataclass(slots=True)
class _Share:
    """One rank's share, being copied."""

    source: Backend
    target: Backend
    manifest: Manifest
    rank: int
    chunk_bytes: int
    pool: Executor
    notes: Callable[[str], Notes] | None
    told: Told | None
    mending: bool = False
    """What is there is not believed."""

    async def copy(self) -> int:
        place = self.manifest.step, self.manifest.incarnation, self.manifest.attempt, self.rank
        durable = DurableSource(self.source, self.manifest, self.chunk_bytes)
        data, vote = await self._vote(durable)
        sent = await self._layout(durable, vote.layout_hash)
        images = [image for image in vote.images if image.nbytes]  # those without bytes are no object
        streaming = Streaming(
            self.chunk_bytes, self.pool, self.told, lambda name: reach("mirror.image.piece", name)
        )
        sent += sum(
            await each(images, lambda image: self._image(durable, image, streaming), limit=IMAGES_PARALLEL)
        )
        name = names.vote(*place)
        reach("mirror.vote.before", name)
        try:
            new = await put_new(self.target, name, data)
        except Conflict:
            if self.mending:
                with writing(self.target, name, step=self.manifest.step, rank=self.rank):
                    await self.target.write(name, data)
                return sent + len(data)
            raise SaveFailed(
                f"{self.target.url}: another vote of rank {self.rank} is there",
                found="other bytes",
                expected=f"the vote that lies at {self.source.url}",
                hint="Choose another place, or remove what lies there",
                name=name,
                step=self.manifest.step,
                tier=self.target.url,
                rank=self.rank,
            ) from None
        reach("mirror.vote.after", name)
        return sent + (len(data) if new else 0)

    async def _vote(self, durable: DurableSource) -> tuple[bytes, Vote]:
        """The manifest proves it, wherever it lies."""
        if self.mending:
            with suppress(EverstepError):
                return await DurableSource(self.target, self.manifest, self.chunk_bytes).vote(self.rank)
        return await durable.vote(self.rank)

    async def _layout(self, durable: DurableSource, hash_text: str) -> int:
        """Layouts are shared by all checkpoints: one that is there stays, unless it is damaged."""
        name = names.layout(hash_text)
        if await self._has_layout(hash_text):
            return 0
        data = await durable.explained(read_small(self.source, name))
        await asyncio.to_thread(proved, data, hash_text, name)
        try:
            await put_new(self.target, name, data)
        except Conflict:
            if not await self._has_layout(hash_text):
                with writing(self.target, name):
                    await self.target.write(name, data)
        return len(data)

    async def _has_layout(self, hash_text: str) -> bool:
        try:
            data = await read_small(self.target, names.layout(hash_text))
        except NotFound:
            return False
        return await asyncio.to_thread(_is_layout, data, hash_text)

    async def _image(self, durable: DurableSource, image: ImageRecord, streaming: Streaming) -> int:
        """Copy the object of one image, as it is stored, unless it is there. The writer publishes it whole or not at
        all."""
        place = self.manifest.step, self.manifest.incarnation, self.manifest.attempt, self.rank
        name, stored = image.object_name(*place), image.object
        check_record(image, self.chunk_bytes, name)
        if await _size(self.target, name) == stored.nbytes and (
            not self.mending or await self._is_good(image, name, streaming)
        ):
            return 0
        with writing(self.target, name, step=self.manifest.step, rank=self.rank):
            notes = self.notes(name) if self.notes is not None else None
            writer = await self.target.open_writer(name, stored.nbytes, notes)
            try:
                await streaming.copy(self._reading(durable, image), stored, name, writer)
                await writer.commit()
            except BaseException:
                await writer.abort()
                raise
        reach("mirror.image.done", name)
        return stored.nbytes

    def _reading(self, durable: DurableSource, image: ImageRecord) -> ReadInto:
        async def read(offset: int, view: memoryview) -> None:
            await durable.read_object(self.rank, image, offset, view)

        return read

    async def _is_good(self, image: ImageRecord, name: str, streaming: Streaming) -> bool:
        """Whether every chunk of the object at the target is what the vote says."""
        durable = DurableSource(self.target, self.manifest, self.chunk_bytes)
        try:
            await streaming.prove(self._reading(durable, image), image.object, name)
        except Damaged:
            return False
        return True


def _is_layout(data: bytes, hash_text: str) -> bool:
    try:
        proved(data, hash_text, names.layout(hash_text))
    except Damaged:
        return False
    return True


# -- decisions and records


async def _lower(source: Backend, target: Backend, manifest: Manifest) -> list[tuple[int, bool]]:
    """The decisions below the one that counts which ``target`` lacks, and whether each is an abort record. All numbers
    up to the highest are there, or one would seem lost."""
    number, place = decision_number(manifest), (manifest.step, manifest.incarnation)
    if number == 1:
        return []
    there = (await list_step(target, *place)).decisions
    found = []
    for below in (await list_step(source, *place)).decisions:
        if below < number and below not in there:
            decision = await read_decision_at(source, *place, below)
            if decision is not None:
                found.append((below, isinstance(decision, Abort)))
    return found


async def _copy_decision(source: Backend, target: Backend, manifest: Manifest, number: int) -> None:
    """Create decision ``number`` of the source at ``target``; what stands there counts."""
    name = names.decision(manifest.step, manifest.incarnation, number)
    data = await DurableSource(source, manifest, 1).explained(read_small(source, name))
    decision = decode_decision(data, name)
    # By their bytes: a metric that is NaN differs from itself.
    if number == decision_number(manifest) and encode_decision(decision) != encode_decision(manifest):
        raise Damaged(f"{name}: another manifest than the one that was read before", name=name)
    with suppress(Conflict):
        await put_new(target, name, data)


async def _copy_record(source: Backend, target: Backend, name: str) -> None:
    """Create a record of the source at ``target``. Raises RunError if another one has its name."""
    try:
        data = await read_small(source, name)
    except NotFound:
        raise Damaged(f"{name} is missing", found="nothing", expected="a record", name=name) from None
    try:
        await put_new(target, name, data)
    except Conflict:
        raise RunError(
            f"{target.url}: {name} is another one than at {source.url}",
            found="a run that was gone on with otherwise",
            expected="a copy of the same run, or nothing",
            hint="Choose another place",
            name=name,
        ) from None


async def put_new(target: Backend, name: str, data: bytes) -> bool:
    """Put a small object unless it is there; whether it was not. Raises Conflict where other bytes have its name,
    SaveFailed, StorageFull, CannotTell. Where ``target`` cannot create atomically, whoever is last wins a race."""
    try:
        there = await read_small(target, name)
    except NotFound:
        with writing(target, name):
            await _put(target, name, data)
        return True
    if there != data:
        raise Conflict(name, "exists already, with other bytes")
    return False


async def _put(target: Backend, name: str, data: bytes) -> None:
    if target.capabilities.atomic_create:
        try:
            await target.create(name, data)
            return
        except Permanent:
            if target.capabilities.atomic_create:
                raise
            # The storage found out only now that it cannot.
    await target.write(name, data)


async def read_small(backend: Backend, name: str) -> bytes:
    """A small object. Raises NotFound, CannotTell."""
    with reading(backend, name):
        return await backend.read(name, SMALL_BYTES_MAX)


async def _size(backend: Backend, name: str) -> int | None:
    try:
        with reading(backend, name):
            return await backend.size(name)
    except NotFound:
        return None
