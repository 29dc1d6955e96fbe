"""Who can give bytes of a checkpoint's images: a durable tier, or slots in shared memory.

A source proves what it gives: layouts, states and records are verified here, the images' chunks by whoever
reads them (:mod:`.fill`, fsck) against the records. All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, runtime_checkable

from everstep.backends.api import Backend
from everstep.backends.errors import NotFound, ShortRead
from everstep.errors import Damaged, Pruned, RunError
from everstep.format import names
from everstep.format.layout import Layout, decode, layout_hash
from everstep.format.manifest import Manifest, Quarantine
from everstep.format.packed import Table
from everstep.format.vote import STATE_IMAGE, ImageRecord, Vote

from .asking import SMALL_BYTES_MAX, reading
from .bases import Bases, Fetched, Finder, Key, PackedObject, open_table
from .catalog import decode_layout, list_step, open_vote, read_decision, read_layout_bytes, read_numbered
from .flush import IMAGE_REGION, LAYOUT_REGION, META_REGION, image_names, read_meta
from .proving import check_chunks, check_images, check_record, check_size, check_vote

if TYPE_CHECKING:
    from everstep.memory.joined import AnyPin
    from everstep.memory.slots import Pinned


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


OWN = "own"
HELD = "held"
PEER = "peer"
REBUILT = "rebuilt"
NODE = "node"
DISK = "disk"
TIER = "tier"
KINDS = (OWN, HELD, PEER, REBUILT, NODE, DISK, TIER)
"""Where bytes of a load come from: this node's own ranks' slots, what it holds for other nodes, another node's memory,
parity, the node's own tier, the run's root, a further tier."""


class Mapped(Protocol):
    """An image in memory, or the parts of it that are: sliced by offsets in the image."""

    def __getitem__(self, where: slice, /) -> memoryview: ...


class Source(Protocol):
    """One holder of one checkpoint's images.

    ``ranks`` are those of which it knows all but what :meth:`has` denies; the methods are called for these only.
    ``kind`` says where the bytes lie (one of ``KINDS``). All raise Damaged with
    the object's name, Pruned where rotation removed the checkpoint meanwhile, CannotTell where nothing
    answered, SlotGone where a slot was reused.
    """

    label: str
    kind: str
    step: int
    incarnation: int
    world: int
    chunk_bytes: int
    ranks: frozenset[int]

    async def meta(self, rank: int) -> dict[str, Any]:
        """What the rank said of its snapshot (mesh, coordinates, parts, data, rng, metrics, ...)."""
        ...

    async def layout(self, rank: int) -> Layout: ...

    async def records(self, rank: int) -> dict[str, ImageRecord]:
        """Hash records of all the rank's images by name, the state image included."""
        ...

    async def state(self, rank: int) -> bytes:
        """The rank's state image, verified."""
        ...

    def has(self, rank: int, image: str) -> bool:
        """Whether it can give that image of one of its ranks, as far as it knows without looking."""
        ...

    async def check_image(self, rank: int, image: str) -> None:
        """Whether the image is there with its right size; raises if not. Its bytes are not read."""
        ...

    async def read_into(self, rank: int, image: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` from the image; not verified. Raises Damaged also where the image ends too early."""
        ...

    def mapped(self, rank: int, image: str) -> Mapped | None:
        """The image where it lies in memory already, else None."""
        ...

    def locate(self, rank: int, image: str) -> str:
        """The image's name for people."""
        ...

    async def confirm(self) -> None:
        """Called after reading: raises if what was read may have been replaced meanwhile."""
        ...


@runtime_checkable
class Scattering(Protocol):
    """A source that can read straight to where the bytes are wanted."""

    async def read_parts(self, rank: int, image: str, offset: int, parts: Sequence[memoryview]) -> None:
        """As :meth:`Source.read_into`, into several views one behind the other."""
        ...


@runtime_checkable
class Fetching(Protocol):
    """A source that can give a packed image as it is stored."""

    async def fetch(self, rank: int, image: str, offset: int, nbytes: int, buffer: memoryview) -> Fetched:
        """What the whole chunks from ``offset`` on are decoded from, in ``buffer``, which is page-aligned and of
        :func:`.bases.fetched_room`. Raises as :meth:`Source.read_into` does."""
        ...


class DurableSource:
    """A checkpoint on a backend, as its manifest names it."""

    kind: str = DISK

    def __init__(
        self,
        backend: Backend,
        manifest: Manifest,
        chunk_bytes: int,
        label: str | None = None,
        bases: Bases | None = None,
    ) -> None:
        """``bases`` finds what deltas are based on; by default on the same backend."""
        self.backend = backend
        self.manifest = manifest
        self.label = label or backend.url
        self.step = manifest.step
        self.incarnation = manifest.incarnation
        self.world = manifest.world
        self.chunk_bytes = chunk_bytes
        self.ranks = frozenset(record.rank for record in manifest.ranks)
        self._by_rank = {record.rank: record for record in manifest.ranks}
        self._votes: dict[int, asyncio.Task[Vote]] = {}
        self._layouts: dict[str, asyncio.Task[Layout]] = {}
        self._tables: dict[tuple[int, str], asyncio.Task[Table]] = {}
        self._expected: dict[int | str, asyncio.Task[bytes]] = {}
        self._sizes: dict[str, asyncio.Task[int]] = {}
        self.bases = bases or bases_at([backend], chunk_bytes)

    async def meta(self, rank: int) -> dict[str, Any]:
        return (await self._vote(rank)).meta

    async def layout(self, rank: int) -> Layout:
        """The rank's layout; its images must be those of the rank's record."""
        record = self._by_rank[rank]
        key = record.layout_hash
        layout = await once(self._layouts, key, lambda: self._read_layout(key))
        check_images(layout, await self.records(rank), names.layout(record.layout_hash))
        return layout

    async def records(self, rank: int) -> dict[str, ImageRecord]:
        return {record.name: record for record in (await self._vote(rank)).images}

    async def state(self, rank: int) -> bytes:
        expected = self._expected.pop(rank, None)
        return await (expected or self._read_state(rank))

    async def expect(self, rank: int) -> None:
        """Read what a load looks at before it reads images, each for the next call that asks for it, which raises what
        fails: the rank's vote, state image, layout, and its objects' sizes. Nothing large is decoded yet."""
        key = self._by_rank[rank].layout_hash
        self._expected[key] = _started(read_layout_bytes(self.backend, key))
        records = await self.records(rank)
        self._expected[rank] = _started(self._read_state(rank))
        images = records.keys() - {STATE_IMAGE}
        for image in images:
            name = self.locate(rank, image)
            self._sizes[name] = _started(self._read_size(name))
        # What decodes an image, if it is packed: its table, and its base's vote.
        tables = [_started(self._packed(rank, image)) for image in images]
        bases = [
            _started(self.explained(self.bases.check(records[image], rank, self.locate(rank, image))))
            for image in images
            if records[image].base is not None
        ]
        await asyncio.wait([*self._expected.values(), *self._sizes.values(), *tables, *bases])

    async def _read_layout(self, key: str) -> Layout:
        async def read() -> Layout:
            data = await (self._expected.pop(key, None) or read_layout_bytes(self.backend, key))
            return await decode_layout(data, key)

        return await self.explained(read())

    async def _read_state(self, rank: int) -> bytes:
        record, name = (await self.records(rank))[STATE_IMAGE], self.locate(rank, STATE_IMAGE)
        data = await self.explained(_read_whole(self.backend, name, record.nbytes))
        check_chunks(memoryview(data), 0, record, self.chunk_bytes, name)
        return data

    def has(self, rank: int, image: str) -> bool:
        return True

    async def check_image(self, rank: int, image: str) -> None:
        record = (await self.records(rank))[image]
        name = self.locate(rank, image)
        check_size(name, await self.size(name), record.object.nbytes)
        if record.base is not None:
            await self.explained(self.bases.check(record, rank, name))

    async def size(self, name: str) -> int:
        """Size of one of the checkpoint's objects."""
        expected = self._sizes.pop(name, None)
        return await (expected or self._read_size(name))

    async def _read_size(self, name: str) -> int:
        return await self.explained(_size(self.backend, name))

    async def read_into(self, rank: int, image: str, offset: int, view: memoryview) -> None:
        packed = await self._packed(rank, image)
        if packed is None:
            await self._read_plain(rank, image, offset, view)
        else:
            await self.explained(self.bases.read_into(*packed, offset, view))

    async def fetch(self, rank: int, image: str, offset: int, nbytes: int, buffer: memoryview) -> Fetched:
        packed = await self._packed(rank, image)
        assert packed is not None  # who has the record has seen that
        return await self.explained(self.bases.fetch(*packed, offset, nbytes, buffer))

    async def read_chained(
        self, rank: int, image: str, offset: int, view: memoryview, spare: memoryview, depth: int
    ) -> None:
        """As :meth:`read_into`, for a delta that this one's image is the base of (:mod:`.bases`)."""
        packed = await self._packed(rank, image)
        if packed is None:
            await self._read_plain(rank, image, offset, view)
        else:
            await self.explained(self.bases.decode(*packed, offset, view, spare, depth))

    async def read_object(self, rank: int, image: ImageRecord, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes of the image's object as it is stored; not verified."""
        name = image.object_name(self.step, self.incarnation, self.manifest.attempt, rank)
        await self.explained(_read_into(self.backend, name, offset, view))

    async def _read_plain(self, rank: int, image: str, offset: int, view: memoryview) -> None:
        await self.explained(_read_into(self.backend, self.locate(rank, image), offset, view))

    async def table(self, rank: int, image: str) -> Table | None:
        """What the chunks of a packed image are; None if it is plain."""
        packed = await self._packed(rank, image)
        return packed[1] if packed is not None else None

    async def _packed(self, rank: int, image: str) -> tuple[PackedObject, Table] | None:
        """A packed image's object and table; None if it is plain."""
        record = (await self.records(rank)).get(image)
        if record is None or record.stored is None:
            return None
        of = record

        async def read(offset: int, view: memoryview) -> None:
            await self.read_object(rank, of, offset, view)

        packed = PackedObject(self.locate(rank, image), rank, record, self.chunk_bytes, read)
        return packed, await once(self._tables, (rank, image), lambda: self.explained(open_table(packed)))

    def mapped(self, rank: int, image: str) -> memoryview | None:
        return None

    def locate(self, rank: int, image: str) -> str:
        """The object's name; as long as the rank's vote was not read, that of a plain image."""
        place = self.step, self.incarnation, self.manifest.attempt, rank
        vote = self._votes.get(rank)
        if vote is not None and vote.done() and not vote.cancelled() and vote.exception() is None:
            for record in vote.result().images:
                if record.name == image:
                    return record.object_name(*place)
        return names.state(*place) if image == STATE_IMAGE else names.image(*place, image)

    async def confirm(self) -> None:
        """Nothing to ask: objects are immutable, and every byte was verified."""

    async def vote_of(self, rank: int) -> Vote:
        """The rank's vote, read once."""
        return await self._vote(rank)

    async def vote(self, rank: int) -> tuple[bytes, Vote]:
        """The rank's vote, proved: as stored, and decoded."""
        return await self.explained(self._read_vote(rank))

    async def _vote(self, rank: int) -> Vote:
        async def read() -> Vote:
            return (await self.vote(rank))[1]

        return await once(self._votes, rank, read)

    async def _read_vote(self, rank: int) -> tuple[bytes, Vote]:
        record, attempt = self._by_rank[rank], self.manifest.attempt
        name = names.vote(self.step, self.incarnation, attempt, rank)
        data = await _read_whole(self.backend, name, record.vote_nbytes)
        vote = open_vote(data, name, (self.step, self.incarnation, attempt, rank))
        check_vote(data, vote, record, self.manifest, name)
        return data, vote

    async def explained(self, reading: Coroutine[Any, Any, V]) -> V:
        """The result of reading one of the checkpoint's objects. A missing object is Pruned where rotation removes the
        checkpoint, else Damaged by its name."""
        try:
            return await reading
        except NotFound as error:
            await self._raise_if_pruned()
            name = error.name
            raise Damaged(f"{name} is missing", found="nothing", expected="an object", name=name) from error
        except Damaged:
            await self._raise_if_pruned()
            raise

    async def _raise_if_pruned(self) -> None:
        try:
            found = await list_step(self.backend, self.step, self.incarnation)
            counting = await read_numbered(self.backend, found) if found.decisions else None
        except RunError:
            return
        standing = counting[1] if counting is not None else None
        if isinstance(standing, Manifest) and standing.attempt == self.manifest.attempt:
            return
        if isinstance(standing, Quarantine):  # nothing of it is removed: what is missing is damage
            return
        raise Pruned(
            f"step {self.step} of incarnation {self.incarnation} was removed by rotation while it was read",
            found=getattr(standing, "reason", None) or "another decision, or none",
            expected=f"the manifest of attempt {self.manifest.attempt}",
            hint="Load again: a newer checkpoint is there",
            step=self.step,
        )


def bases_at(backends: Sequence[Backend], chunk_bytes: int) -> Bases:
    """Finds bases at these places, nearest first."""
    bases = Bases()

    def finder_at(backend: Backend) -> Finder:
        async def find(key: Key) -> Source | None:
            decision = await read_decision(backend, await list_step(backend, key[1], key[0]))
            if isinstance(decision, Manifest):
                return DurableSource(backend, decision, chunk_bytes, bases=bases)
            return None

        return find

    for backend in backends:
        bases.add(finder_at(backend))
    return bases


class ArenaSource:
    """A checkpoint in pinned slots of this node's arenas. A slot that is only VALID is sealed first, so that
    its bytes have hashes to be checked against. The caller keeps the pins."""

    def __init__(
        self,
        pins: Mapping[int, AnyPin],
        chunk_bytes: int,
        label: str = "memory",
        *,
        world: int | None = None,
        kind: str = OWN,
        lacks: Mapping[int, Collection[str]] | None = None,
    ) -> None:
        """``pins`` by rank, at least one, all of one step and incarnation; ``world`` is the number of ranks that
        wrote it (default: all of them are given). ``lacks``: images, by rank, that are not in the slots."""
        first = next(iter(pins.values()))
        self.label = label
        self.kind = kind
        self._lacks = lacks or {}
        self.step = first.info.step
        self.incarnation = first.info.incarnation
        self.chunk_bytes = chunk_bytes
        self.ranks = frozenset(pins)
        self.world = len(pins) if world is None else world
        self._pins = dict(pins)
        self._records: dict[int, asyncio.Task[dict[str, ImageRecord]]] = {}
        self._layouts: dict[str, asyncio.Task[Layout]] = {}
        found = {(pin.info.incarnation, pin.info.step) for pin in pins.values()}
        if len(found) > 1:
            raise Damaged(
                "slots of different snapshots",
                found=sorted(found),
                expected="one (incarnation, step)",
                name=label,
            )

    async def meta(self, rank: int) -> dict[str, Any]:
        pinned = self._pins[rank]
        meta = read_meta(bytes(pinned.view(META_REGION)), f"slot of rank {rank}, meta")
        pinned.check()
        return meta

    async def layout(self, rank: int) -> Layout:
        pinned, name = self._pins[rank], f"slot of rank {rank}, layout"
        encoded = await self.layout_bytes(rank)
        found = layout_hash(encoded)
        if found != pinned.info.layout_hash:
            raise Damaged(f"{name} is damaged", found=found, expected=pinned.info.layout_hash, name=name)
        layout = await once(self._layouts, found, lambda: asyncio.to_thread(decode, encoded))
        check_images(layout, await self.records(rank), name)
        return layout

    async def layout_bytes(self, rank: int) -> bytes:
        """The layout as it lies in the slot; not verified."""
        encoded = bytes(self._pins[rank].view(LAYOUT_REGION))
        self._pins[rank].check()
        return encoded

    async def records(self, rank: int) -> dict[str, ImageRecord]:
        return await once(self._records, rank, lambda: asyncio.to_thread(self._seal, rank))

    def _seal(self, rank: int) -> dict[str, ImageRecord]:
        pinned = self._pins[rank]
        records = pinned.sealed()
        if records is None:
            pin = cast("Pinned", pinned)  # what is held for others is sealed
            regions = [IMAGE_REGION + image for image in image_names(pin)]
            records = pin.compute([*regions, STATE_IMAGE])
            pin.seal(records)
        pinned.check()
        for record in records:
            check_record(record, self.chunk_bytes, self.locate(rank, record.name))
        return {record.name: record for record in records}

    def has(self, rank: int, image: str) -> bool:
        return image not in self._lacks.get(rank, ())

    async def state(self, rank: int) -> bytes:
        record = (await self.records(rank))[STATE_IMAGE]
        await self.check_image(rank, STATE_IMAGE)
        data = bytes(self._pins[rank].view(STATE_IMAGE))
        check_chunks(memoryview(data), 0, record, self.chunk_bytes, self.locate(rank, STATE_IMAGE))
        self._pins[rank].check()
        return data

    async def check_image(self, rank: int, image: str) -> None:
        expected = (await self.records(rank))[image].nbytes
        found = self._pins[rank].regions.get(_region(image))
        if found != expected:
            name = self.locate(rank, image)
            raise Damaged(f"{name}: wrong size", found=found, expected=expected, name=name)

    async def read_into(self, rank: int, image: str, offset: int, view: memoryview) -> None:
        whole = self.mapped(rank, image)
        if len(whole) < offset + len(view):
            name = self.locate(rank, image)
            raise Damaged(f"{name}: ends too early", found=len(whole), expected=offset + len(view), name=name)
        view[:] = whole[offset : offset + len(view)]

    def mapped(self, rank: int, image: str) -> memoryview:
        return self._pins[rank].view(_region(image))

    def locate(self, rank: int, image: str) -> str:
        return f"{'held ' if self.kind == HELD else ''}slot of rank {rank}, {_region(image)}"

    async def confirm(self) -> None:
        for pinned in self._pins.values():
            pinned.check()


async def once(tasks: dict[K, asyncio.Task[V]], key: K, make: Callable[[], Coroutine[Any, Any, V]]) -> V:
    """The result of ``make``, made once per key for all who ask; an error is not remembered."""
    task = tasks.get(key)
    if task is None:
        task = tasks[key] = _started(make())
    try:
        return await asyncio.shield(task)
    except Exception:
        if tasks.get(key) is task:
            del tasks[key]
        raise


def _started(reading: Coroutine[Any, Any, V]) -> asyncio.Task[V]:
    """``reading``, begun; its error is raised where it is awaited, if ever."""
    task = asyncio.ensure_future(reading)
    task.add_done_callback(_heard)
    return task


def _heard(task: asyncio.Task[Any]) -> None:
    """Whoever asked may have been cancelled meanwhile: then nobody is left to hear of an error."""
    if not task.cancelled():
        task.exception()


def _region(image: str) -> str:
    return STATE_IMAGE if image == STATE_IMAGE else IMAGE_REGION + image


async def _size(backend: Backend, name: str) -> int:
    with reading(backend, name):
        return await backend.size(name)


async def _read_into(backend: Backend, name: str, offset: int, view: memoryview) -> None:
    try:
        with reading(backend, name):
            await backend.read_into(name, offset, view)
    except RunError as error:
        if isinstance(error.__cause__, ShortRead):
            raise Damaged(
                f"{name}: ends too early",
                found=error.__cause__.cause,
                expected=f"{offset + len(view)} bytes at least",
                name=name,
                offset=offset,
            ) from error
        raise


async def _read_whole(backend: Backend, name: str, nbytes: int) -> bytes:
    """An object that must have ``nbytes``, in one request."""
    with reading(backend, name):
        data = await backend.read(name, max(SMALL_BYTES_MAX, 2 * nbytes))
    check_size(name, len(data), nbytes)
    return data
