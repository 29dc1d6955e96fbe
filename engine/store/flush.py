"""Making one rank's snapshot durable: layout, images, state, and last the vote.

Every piece is hashed from the slot's own bytes before it leaves, one piece ahead of the write. The slot is
sealed with those hashes, and still holds the same snapshot, before the vote is written. A vote stands for
images that are durable: its order on the backend is layout, images, state, vote.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from everstep.backends.api import Backend, Notes, Writer
from everstep.backends.errors import Conflict, NotFound
from everstep.backends.points import reach
from everstep.errors import BadOption, CannotTell, Damaged, Pruned, SaveAbandoned, SaveFailed
from everstep.format import names
from everstep.format.constants import HASH_BYTES
from everstep.format.hashing import chunk_hashes, digest, image_root, rank_root
from everstep.format.layout import Layout, decode, decompress, layout_hash
from everstep.format.layout import compress as compressed
from everstep.format.manifest import Abort
from everstep.format.plain import from_plain, to_plain
from everstep.format.records import RunRecord
from everstep.format.vote import DELTA, STATE_IMAGE, ImageRecord, Vote, encode_vote

from .asking import SMALL_BYTES_MAX, each, reading, writing
from .catalog import read_decision_at, read_vote
from .equality import HASHES, entry_hashes
from .packing import Base, write_packed

if TYPE_CHECKING:
    from everstep.memory.slots import Pinned

    from .sources import DurableSource

log = logging.getLogger("everstep.store")

PIECE_BYTES = 8 << 20
"""One write. Two pieces are in use per image: one being hashed, one being written."""
MAPPED_PIECE_BYTES = 32 << 20
"""One write of an image that lies in memory already: between two writes of an image the disk has nothing to do."""
FIRST_PIECE_BYTES = 4 << 20
"""The first write of an image; the next ones are twice as large each, up to those above: the disk is to begin soon."""

IMAGES_PARALLEL = 2
IMAGES_PARALLEL_FLAT = 4
"""Images of one rank that are written side by side; more of them where each is a request and takes its time."""

LAYOUT_REGION = "layout"
META_REGION = "meta"
IMAGE_REGION = "image:"
"""Names of a slot's regions; an image's region is this and the image's name."""


UNBASED = "unbased"
"""In what a vote says of its rank: a share of a delta for which no base could be used. In a manifest's facts: the ranks
that say so."""

NotesOf = Callable[[str], Notes]
"""What is remembered of an object's upload, by the object's name."""


@dataclass(frozen=True, slots=True)
class FlushJob:
    """One rank's share of one attempt."""

    step: int
    incarnation: int
    attempt: int
    rank: int
    world: int


@dataclass(frozen=True, slots=True)
class _Source:
    """One image to write: its name in the vote, its region in the slot, its object's name where it is plain."""

    image: str
    region: str
    name: str


class Pieces(Protocol):
    """What an image is written from, front to back."""

    @property
    def nbytes(self) -> int: ...

    def piece(self, start: int, end: int) -> memoryview:
        """The bytes ``start`` to ``end``. Pieces are asked for in order, one at a time, on any thread; one stays valid
        until the next but one is asked for."""
        ...


class _Mapped:
    """An image that lies in memory already."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.nbytes = len(view)

    def piece(self, start: int, end: int) -> memoryview:
        return self._view[start:end]


async def flush_rank(
    backend: Backend,
    job: FlushJob,
    pinned: Pinned,
    *,
    chunk_bytes: int,
    run: RunRecord,
    layouts: set[str] | None = None,
    notes: NotesOf | None = None,
    base: DurableSource | None = None,
    compress: str | None = None,
    delta: bool = False,
) -> Vote:
    """Write the pinned snapshot as ``job``'s share and vote. Doing it again, after a crash at any point, ends
    in the same vote. ``layouts`` are hashes of those that were found right on the backend before; this one is added.
    ``notes`` gives, by an object's name, what its writer remembers over a crash. With ``base``, an older checkpoint,
    images are stored as deltas of its images (:mod:`.packing`), with ``compress="zstd"`` packed without one where there
    is none; state images are always plain. A base that cannot be read, or has another layout, is done without; where
    the checkpoint is to be a ``delta``, the vote says so then (:data:`UNBASED`).

    Raises SaveFailed or StorageFull (nothing counts; the same attempt may be tried again), SaveAbandoned (the
    attempt was given up), SlotGone (the slot was reused), Damaged (the slot's bytes changed after sealing),
    CannotTell.
    """
    if chunk_bytes != run.chunk_bytes:
        raise BadOption(
            "the arena and the run differ in chunk size", found=chunk_bytes, expected=run.chunk_bytes
        )
    encoded = _layout_of(job, pinned)
    await refuse_decided(backend, job)
    images = [
        _Source(image, IMAGE_REGION + image, names.image(*_place(job), image))
        for image in image_names(pinned)
    ]
    images.append(_Source(STATE_IMAGE, STATE_IMAGE, names.state(*_place(job))))
    former = await _former_vote(backend, job, pinned, images)
    if former is not None:
        return former
    packing = await _packing_for(job, pinned, encoded, base, compress)
    if layouts is None or pinned.info.layout_hash not in layouts:
        await store_layout(backend, pinned.info.layout_hash, encoded)
    if layouts is not None:
        layouts.add(pinned.info.layout_hash)
    parallel = IMAGES_PARALLEL_FLAT if backend.capabilities.flat else IMAGES_PARALLEL
    with ThreadPoolExecutor(2 * parallel, thread_name_prefix="everstep-hash") as pool:
        records = tuple(
            await each(
                images,
                lambda image: _write_image(backend, job, pinned, image, chunk_bytes, pool, notes, packing),
                limit=parallel,
            )
        )
    said: dict[str, Any] = {UNBASED: True} if delta and _is_unbased(packing, records) else {}
    return await publish_vote(backend, job, await _seal(job, pinned, encoded, records, said))


async def _seal(
    job: FlushJob,
    pinned: Pinned,
    encoded: bytes,
    records: tuple[ImageRecord, ...],
    said: dict[str, Any],
) -> Vote:
    """Seal the slot with the hashes of what was written; the vote, which says what the slot does, and ``said``."""
    meta = read_meta(bytes(pinned.view(META_REGION)), f"slot of rank {job.rank}, meta")
    hashes = (
        await asyncio.to_thread(entry_hashes, pinned, encoded, meta, job.world) if HASHES in meta else None
    )
    pinned.seal(tuple([record.plain() for record in records]))
    pinned.check()
    meta.pop(HASHES, None)
    return _vote(job, pinned, records, hashes, {**meta, **said})


def _place(job: FlushJob) -> tuple[int, int, int, int]:
    return job.step, job.incarnation, job.attempt, job.rank


def image_names(pinned: Pinned) -> list[str]:
    """The images in the slot, in the layout's order."""
    return [region[len(IMAGE_REGION) :] for region in pinned.regions if region.startswith(IMAGE_REGION)]


def _layout_of(job: FlushJob, pinned: Pinned) -> bytes:
    """The canonical bytes of the slot's layout, proved by hash. The slot must hold what ``job`` says."""
    info = pinned.info
    if (info.step, info.incarnation) != (job.step, job.incarnation):
        raise SaveFailed(
            "the slot holds another snapshot than the one to flush",
            found=f"step {info.step} of incarnation {info.incarnation}",
            expected=f"step {job.step} of incarnation {job.incarnation}",
            step=job.step,
            rank=job.rank,
        )
    encoded = bytes(pinned.view(LAYOUT_REGION))
    found = layout_hash(encoded)
    if found != info.layout_hash:
        name = f"slot of rank {job.rank}, layout"
        raise Damaged(
            f"{name}: not the layout that was put there", found=found, expected=info.layout_hash, name=name
        )
    return encoded


async def refuse_decided(backend: Backend, job: FlushJob) -> None:
    """Raises SaveAbandoned where the attempt was given up."""
    decision = await read_decision_at(backend, job.step, job.incarnation, job.attempt)
    if isinstance(decision, Abort):
        raise SaveAbandoned(
            f"attempt {job.attempt} of step {job.step} was given up",
            found=decision.reason,
            step=job.step,
            tier=backend.url,
            rank=job.rank,
        )


async def _former_vote(backend: Backend, job: FlushJob, pinned: Pinned, images: list[_Source]) -> Vote | None:
    """This rank's vote of an earlier try, if it stands for this very slot: then all images are durable. It
    also forbids writing other bytes under names that a manifest may be about to prove by it."""
    try:
        _, vote = await read_vote(backend, *_place(job))
    except NotFound:
        return None
    regions = [image.region for image in images]
    records = await asyncio.to_thread(pinned.compute, regions)
    pinned.check()
    found = [(record.nbytes, record.root) for record in vote.images]
    if found != [(record.nbytes, record.root) for record in records]:
        raise SaveFailed(
            f"rank {job.rank} has voted for other bytes in attempt {job.attempt} of step {job.step}",
            found=f"root {vote.root.hex()}",
            expected="the vote of this snapshot",
            hint="Give the attempt up and make a new one",
            step=job.step,
            tier=backend.url,
            rank=job.rank,
        )
    pinned.seal(tuple([record.plain() for record in vote.images]))
    return vote if await _is_whole(backend, job, vote) else None


async def _is_whole(backend: Backend, job: FlushJob, vote: Vote) -> bool:
    """Whether all objects of the vote's images are there, by their sizes."""

    async def size(record: ImageRecord) -> int:
        name = record.object_name(*_place(job))
        try:
            with reading(backend, name):
                return await backend.size(name)
        except NotFound:
            return -1

    return await each(vote.images, size) == [record.object.nbytes for record in vote.images]


@dataclass(frozen=True, slots=True)
class _PackingFor:
    """How the images of one flush are packed: in the slot's layout; by image, what it is coded against."""

    layout: Layout
    bases: dict[str, Base]
    all_of_them: bool

    def packs(self, image: str) -> bool:
        return image != STATE_IMAGE and (self.all_of_them or image in self.bases)


async def _packing_for(
    job: FlushJob, pinned: Pinned, encoded: bytes, base: DurableSource | None, compress: str | None
) -> _PackingFor | None:
    """None where the images are to be plain."""
    if compress not in (None, "zstd"):
        raise BadOption("images cannot be compressed so", found=compress, expected="None or 'zstd'")
    bases = await _bases_of(job, pinned, base) if base is not None else {}
    if not bases and compress is None:
        return None
    layout = await asyncio.to_thread(decode, encoded)
    return _PackingFor(layout, bases, compress is not None)


def _is_unbased(packing: _PackingFor | None, records: Sequence[ImageRecord]) -> bool:
    """Whether there was no base for anything, though there is something to store."""
    return not (packing is not None and packing.bases) and any(
        record.nbytes for record in records if record.name != STATE_IMAGE
    )


async def _bases_of(job: FlushJob, pinned: Pinned, base: DurableSource) -> dict[str, Base]:
    """The base's images of this rank, by name; none where its layout is another or it cannot be read."""
    step = f"step {base.step} of incarnation {base.incarnation}"
    if (base.incarnation, base.step) >= (job.incarnation, job.step) or job.rank not in base.ranks:
        log.info("step %d, rank %d: stored full, for %s is no base of it", job.step, job.rank, step)
        return {}
    try:
        vote = await base.vote_of(job.rank)
        if vote.layout_hash != pinned.info.layout_hash:
            log.info("step %d, rank %d: stored full, for %s has another layout", job.step, job.rank, step)
            return {}
        records = [record for record in vote.images if record.name != STATE_IMAGE]
        for record in records:
            await base.check_image(job.rank, record.name)
    except (Damaged, Pruned, CannotTell) as error:
        log.warning("step %d, rank %d: stored full, without its base: %s", job.step, job.rank, error)
        return {}
    return {record.name: Base(base, record) for record in records if record.nbytes}


async def store_layout(backend: Backend, hash_text: str, encoded: bytes) -> None:
    """The layout object, created if absent and verified if present. A damaged one is put right: the right
    bytes are at hand, and every checkpoint that names it needs them."""
    name = names.layout(hash_text)
    try:
        with reading(backend, name):
            stored = await backend.read(name, SMALL_BYTES_MAX)
    except NotFound:
        try:
            with writing(backend, name):
                await backend.create(name, compressed(encoded))
            return
        except Conflict:
            with reading(backend, name):
                stored = await backend.read(name, SMALL_BYTES_MAX)
    try:
        if layout_hash(decompress(stored)) == hash_text:
            return
    except Damaged:
        pass
    log.warning("%s: %s is damaged; writing it again", backend.url, name)
    with writing(backend, name):
        await backend.write(name, compressed(encoded))


async def _write_image(
    backend: Backend,
    job: FlushJob,
    pinned: Pinned,
    image: _Source,
    chunk_bytes: int,
    pool: ThreadPoolExecutor,
    notes: NotesOf | None,
    packing: _PackingFor | None,
) -> ImageRecord:
    """Write one image out of the slot."""
    sealed = {record.name: record for record in pinned.sealed() or ()}

    def check(first: int, chunks: bytes) -> None:
        _check_sealed(job, image, sealed, first, chunks, chunk_bytes)

    view = pinned.view(image.region)
    if packing is not None and len(view) and packing.packs(image.image):
        name = names.packed(*_place(job), image.image)
        return await write_packed(
            backend,
            job,
            image.image,
            name,
            view,
            chunk_bytes,
            pool,
            layout=packing.layout,
            base=packing.bases.get(image.image),
            check=check,
            notes=notes(name) if notes is not None else None,
        )
    return await write_image(
        backend,
        job,
        image.image,
        image.name,
        _Mapped(view),
        chunk_bytes,
        pool,
        check,
        notes,
        piece_bytes=MAPPED_PIECE_BYTES,
    )


async def write_image(
    backend: Backend,
    job: FlushJob,
    image: str,
    name: str,
    source: Pieces,
    chunk_bytes: int,
    pool: ThreadPoolExecutor,
    check: Callable[[int, bytes], None] | None = None,
    notes: NotesOf | None = None,
    *,
    piece_bytes: int = PIECE_BYTES,
) -> ImageRecord:
    """Write ``source`` as the object ``name``, each piece hashed before it leaves; ``image`` is its name in the vote.
    ``check`` sees the hashes of each piece, from its first chunk's number on, before that. The writer publishes the
    image whole or not at all. No piece has more than ``piece_bytes``, or one chunk."""
    loop = asyncio.get_running_loop()
    pieces = list(_pieces(source.nbytes, chunk_bytes, piece_bytes))
    chunks: list[bytes] = []

    def hash_piece(start: int, end: int) -> tuple[memoryview, bytes]:
        view = source.piece(start, end)
        return view, chunk_hashes(view, chunk_bytes)

    def hashed(index: int) -> asyncio.Future[tuple[memoryview, bytes]]:
        return loop.run_in_executor(pool, hash_piece, *pieces[index])

    with writing(backend, name, step=job.step, rank=job.rank):
        ahead = hashed(0) if pieces else None
        writer: Writer | None = None
        try:
            told = notes(name) if notes is not None else None
            writer = await backend.open_writer(name, source.nbytes, told)
            for index, (start, _) in enumerate(pieces):
                assert ahead is not None
                view, found = await ahead
                chunks.append(found)
                if check is not None:
                    check(start // chunk_bytes, found)
                ahead = hashed(index + 1) if index + 1 < len(pieces) else None
                await writer.write(view)
                if index == 0:
                    reach("flush.image.first", name)
            await writer.commit()
        except BaseException:
            if ahead is not None:
                await asyncio.wait([ahead])
            if writer is not None:
                await writer.abort()
            raise
    reach("flush.image.done", name)
    joined = b"".join(chunks)
    return ImageRecord(image, source.nbytes, image_root(source.nbytes, joined), joined)


def _pieces(nbytes: int, chunk_bytes: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of whole chunks, from about ``FIRST_PIECE_BYTES`` to about ``piece_bytes``; the last one is what is
    left."""
    start, step = 0, min(FIRST_PIECE_BYTES, piece_bytes)
    while start < nbytes:
        end = min(start + max(step // chunk_bytes, 1) * chunk_bytes, nbytes)
        yield start, end
        start, step = end, min(2 * step, piece_bytes)


def _check_sealed(
    job: FlushJob, image: _Source, sealed: dict[str, ImageRecord], first: int, chunks: bytes, chunk_bytes: int
) -> None:
    """A sealed slot's bytes must still have the sealed hashes before they leave."""
    record = sealed.get(image.image)
    if record is None:
        return
    expected = record.chunks[first * HASH_BYTES : first * HASH_BYTES + len(chunks)]
    if chunks == expected:
        return
    for at in range(0, len(chunks), HASH_BYTES):
        if chunks[at : at + HASH_BYTES] != expected[at : at + HASH_BYTES]:
            offset = (first + at // HASH_BYTES) * chunk_bytes
            name = f"slot of rank {job.rank}, {image.region}"
            raise Damaged(
                f"{name}: bytes changed after the slot was sealed, in the chunk at {offset}",
                found=chunks[at : at + HASH_BYTES].hex(),
                expected=expected[at : at + HASH_BYTES].hex(),
                name=name,
                offset=offset,
                step=job.step,
                rank=job.rank,
            )


def _vote(
    job: FlushJob,
    pinned: Pinned,
    records: tuple[ImageRecord, ...],
    hashes: dict[str, str] | None,
    meta: dict[str, Any],
) -> Vote:
    return Vote(
        step=job.step,
        incarnation=job.incarnation,
        attempt=job.attempt,
        rank=job.rank,
        world=job.world,
        kind=DELTA if any(record.base is not None for record in records) else "full",
        layout_hash=pinned.info.layout_hash,
        root=rank_root(records),
        images=records,
        entry_hashes=hashes,
        meta=meta,
    )


def write_meta(meta: dict[str, Any]) -> bytes:
    """A slot's ``meta`` region: the hash of what follows, and the map in msgpack; what that lacks is tagged as in a
    vote. The seal covers images and state only, and this has to be proved before it goes into a vote, too."""
    data = msgspec.msgpack.encode(to_plain(meta, "meta"))
    return digest(data) + data


def read_meta(region: bytes, name: str) -> dict[str, Any]:
    """The map of a slot's ``meta`` region. Raises Damaged."""
    data = region[HASH_BYTES:]
    if digest(data) != region[:HASH_BYTES]:
        found, expected = digest(data).hex(), region[:HASH_BYTES].hex()
        raise Damaged(f"{name} is damaged", found=found, expected=expected, name=name)
    try:
        meta: dict[str, Any] = from_plain(msgspec.msgpack.decode(data, type=dict[str, Any]))
        return meta
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Damaged(f"{name}: not a map", found=str(error), expected="msgpack", name=name) from error


async def publish_vote(backend: Backend, job: FlushJob, vote: Vote) -> Vote:
    """Create the vote, and return the one that stands. Another try of the same attempt finds equal bytes, or a vote
    that stores the same images in another way, whose objects are there; other bytes are never replaced."""
    name = names.vote(*_place(job))
    reach("vote.before", name)
    try:
        with writing(backend, name, step=job.step, rank=job.rank):
            await backend.create(name, encode_vote(vote))
    except Conflict:
        _, stored = await read_vote(backend, *_place(job))
        if (
            stored.root != vote.root
            or stored.layout_hash != vote.layout_hash
            or not _agree(job, stored, vote)
            or not await _is_whole(backend, job, stored)
        ):
            raise SaveFailed(
                f"{name}: another vote of this rank is there",
                found=f"root {stored.root.hex()}",
                expected=f"root {vote.root.hex()}",
                hint="Give the attempt up and make a new one",
                step=job.step,
                tier=backend.url,
                rank=job.rank,
            ) from None
        vote = stored
    reach("vote.after", name)
    return vote


def _agree(job: FlushJob, stored: Vote, vote: Vote) -> bool:
    """Whether objects of one name are the same in both."""
    objects = {record.object_name(*_place(job)): record.object for record in stored.images}
    mine = {record.object_name(*_place(job)): record.object for record in vote.images}
    return all(objects[name] == mine[name] for name in objects.keys() & mine.keys())
