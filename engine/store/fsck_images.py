"""The part of fsck that reads much: votes, layouts, states and every chunk of every image of a checkpoint."""

from __future__ import annotations

import asyncio
import mmap
import random
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field

from everstep.backends.api import Backend
from everstep.backends.limit import TokenBucket
from everstep.errors import CannotTell, Damaged, EverstepError, Pruned, RunError, StateMismatch
from everstep.format import names
from everstep.format.layout import Layout
from everstep.format.manifest import Manifest, RankRecord
from everstep.format.table import TableReader
from everstep.format.vote import STATE_IMAGE, ImageRecord, StoredRecord
from everstep.plan.coverage import check_coverage

from .asking import each
from .bases import Bases, Key, lacking
from .catalog import list_step, read_decision, read_layout
from .proving import bad_chunks, changed_chunk, check_images, check_record
from .sources import DurableSource
from .streaming import ReadInto

IMAGES_PARALLEL = 4
"""Images read side by side; with ``PIECE_BYTES`` this bounds the memory."""

PIECE_BYTES = 16 << 20

COVERED_MAX = 64

LAYOUTS_MAX = 64
"""Layouts that are remembered: mostly all checkpoints have those of one."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of the images' bytes is read: none if ``quick``; else each piece of ``PIECE_BYTES`` with a chance of
    ``sample`` (the same pieces for the same ``seed``), at no more than ``bytes_per_s``, until ``seconds`` are over."""

    quick: bool = False
    sample: float = 1.0
    seed: int = 0
    bytes_per_s: float | None = None
    seconds: float | None = None

    @property
    def whole(self) -> bool:
        """Whether every byte is read."""
        return not self.quick and self.sample >= 1 and self.seconds is None


@dataclass(slots=True)
class _Rank:
    """What is known of one rank; ``layout`` is None where it, or the vote, is bad."""

    rank: int
    layout: Layout | None = None
    images: list[ImageRecord] = field(default_factory=list)
    errors: list[EverstepError] = field(default_factory=list)


class Images:
    """Checks checkpoints one after the other. ``named`` gathers the objects that votes name."""

    def __init__(
        self,
        backend: Backend,
        chunk_bytes: int | None,
        extent: Extent,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.backend = backend
        self.chunk_bytes = chunk_bytes
        self.quick = extent.quick or chunk_bytes is None
        self.proved_bytes = 0
        """Of images, read and compared with their hashes."""
        self.unread_bytes = 0
        """Of images that were to be read, left out by the sample or for want of time."""
        self._extent = extent
        self._limit = TokenBucket(extent.bytes_per_s)
        self._until = None if extent.seconds is None else time.monotonic() + extent.seconds
        self.named: set[str] = set()
        self.unnamed: set[tuple[int, int, int]] = set()
        """(step, incarnation, rank) where a vote is bad, so that not all that it names is known."""
        self.passed_by: set[str] = set()
        """Damaged objects whose images are read as they were written nevertheless."""
        self.bases = Bases()
        self.bases.add(self._find)
        self._expected_ones: dict[Key, Manifest] = {}
        self._parents: set[Key | None] = set()
        self._progress = progress
        self._done = 0
        self._total = 0
        self._buffers: list[mmap.mmap] = []
        self._covered: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self._layouts: OrderedDict[str, Layout] = OrderedDict()

    def expect(self, manifest: Manifest) -> None:
        """Count the bytes of a checkpoint that will be checked."""
        self._total += sum(record.objects_nbytes for record in manifest.ranks)
        self._expected_ones[manifest.incarnation, manifest.step] = manifest
        self._parents.add(manifest.parent_key)

    async def source(self, manifest: Manifest) -> DurableSource:
        """To check the checkpoint with: the one by which deltas find it, so that votes are read once."""
        key = manifest.incarnation, manifest.step
        if key in self._parents and key in self._expected_ones:
            for found in await self.bases.sources(key):
                if isinstance(found, DurableSource):
                    return found
        return self._source(manifest)

    def _source(self, manifest: Manifest) -> DurableSource:
        return DurableSource(self.backend, manifest, self.chunk_bytes or 1, bases=self.bases)

    async def _find(self, key: Key) -> DurableSource | None:
        """A base. What was expected is believed once: who asks again has found that it was replaced meanwhile."""
        manifest = self._expected_ones.pop(key, None)
        if manifest is None:
            decision = await read_decision(self.backend, await list_step(self.backend, key[1], key[0]))
            manifest = decision if isinstance(decision, Manifest) else None
        return self._source(manifest) if manifest is not None else None

    async def check(self, source: DurableSource) -> AsyncIterator[EverstepError]:
        """The errors of one checkpoint; none where rotation removed it meanwhile."""
        try:
            for error in await self._check(source):
                yield error
        except Pruned:
            return

    async def _check(self, source: DurableSource) -> list[EverstepError]:
        ranks = await each(source.manifest.ranks, lambda record: self._rank(source, record))
        errors = [error for rank in ranks for error in rank.errors]
        layouts = [rank.layout for rank in ranks if rank.layout is not None]
        if len(layouts) == len(ranks):
            errors += self._coverage(source, layouts)
        images = [(rank.rank, record) for rank in ranks for record in rank.images]
        found = await each(images, lambda one: self._image(source, *one), limit=IMAGES_PARALLEL)
        return errors + [error for some in found for error in some]

    async def _rank(self, source: DurableSource, record: RankRecord) -> _Rank:
        """Vote and layout of one rank."""
        found = _Rank(record.rank)
        self.named.add(names.vote(source.step, source.incarnation, source.manifest.attempt, record.rank))
        try:
            found.images = list((await source.records(record.rank)).values())
        except Pruned:
            raise
        except RunError as error:
            found.errors.append(error)
            self.unnamed.add((source.step, source.incarnation, record.rank))
            # Without hashes at least what is there can be said.
            found.images = await self._expected(record)
        self.named.update(source.locate(record.rank, image.name) for image in found.images)
        try:
            if found.errors:  # the layout is needed whatever the vote is
                await source.explained(read_layout(self.backend, record.layout_hash))
            else:
                found.layout = await self._layout(source, record)
        except Pruned:
            raise
        except RunError as error:
            found.errors.append(error)
        return found

    async def _layout(self, source: DurableSource, record: RankRecord) -> Layout:
        """The rank's layout, read once for all checkpoints; its images must be those of the vote."""
        layout = self._layouts.pop(record.layout_hash, None)
        if layout is None:
            layout = await source.layout(record.rank)
        else:
            check_images(layout, await source.records(record.rank), names.layout(record.layout_hash))
        self._layouts[record.layout_hash] = layout
        while len(self._layouts) > LAYOUTS_MAX:
            self._layouts.popitem(last=False)
        return layout

    async def _expected(self, record: RankRecord) -> list[ImageRecord]:
        """The images of a rank whose vote is bad, by its layout; without hashes. None that may be packed: only the
        vote tells which are."""
        state = ImageRecord(STATE_IMAGE, record.state_nbytes, b"", b"")
        if record.stored_nbytes != record.images_nbytes:
            return [state]
        try:
            layout = await read_layout(self.backend, record.layout_hash)
        except RunError:
            return [state]
        return [*(ImageRecord(spec.name, spec.nbytes, b"", b"") for spec in layout.images), state]

    def _coverage(self, source: DurableSource, layouts: list[Layout]) -> list[EverstepError]:
        hashes = tuple(record.layout_hash for record in source.manifest.ranks)
        if hashes in self._covered:
            return []
        reader = TableReader()
        try:
            check_coverage(reader.of(layout) for layout in layouts)
        except StateMismatch as error:
            return [error]
        self._covered[hashes] = None
        while len(self._covered) > COVERED_MAX:
            self._covered.popitem(last=False)
        return []

    async def _image(self, source: DurableSource, rank: int, record: ImageRecord) -> list[EverstepError]:
        """Size of one image, and its chunks against the record (whose hashes are absent with its vote)."""
        name = source.locate(rank, record.name)
        try:
            if record.root:
                await source.check_image(rank, record.name)
                if self.chunk_bytes is not None:
                    check_record(record, self.chunk_bytes, name)
                if not self.quick:
                    return await self._bytes(source, rank, record, name)
            else:
                await self._size_alone(source, record, name)
        except Pruned:
            raise
        except (Damaged, CannotTell) as error:
            return [error]
        finally:
            self._done += record.object.nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)
        return []

    async def _bytes(
        self, source: DurableSource, rank: int, record: ImageRecord, name: str
    ) -> list[EverstepError]:
        """Of an object as it is stored and of the image that it is decoded to. What is wrong with the one alone, loads
        do not see: ``passed_by`` has its name then."""
        of_object = await self._object(source, rank, record, name)
        if of_object and not self._extent.whole:
            return of_object
        try:
            of_image = await self._chunks(source, rank, record, name)
        except Damaged as error:
            of_image = [error]
        if of_object and not of_image:
            self.passed_by.add(name)
        return of_object or of_image

    async def _size_alone(self, source: DurableSource, record: ImageRecord, name: str) -> None:
        found = await source.size(name)
        if found != record.nbytes:
            raise Damaged(
                f"{name}: wrong size", found=f"{found} bytes", expected=f"{record.nbytes} bytes", name=name
            )

    def _takes(self, piece: str) -> bool:
        """Whether that piece of an image is read."""
        if self._until is not None and time.monotonic() >= self._until:
            return False
        extent = self._extent
        return extent.sample >= 1 or random.Random(f"{extent.seed} {piece}").random() < extent.sample

    async def _object(
        self, source: DurableSource, rank: int, record: ImageRecord, name: str
    ) -> list[EverstepError]:
        """Read a packed image's object as it is stored: bytes that decoding does not need may be damaged, too."""
        if record.stored is None:
            return []

        async def read(offset: int, view: memoryview) -> None:
            await source.read_object(rank, record, offset, view)

        return await self._read(read, record.stored, name)

    async def _chunks(
        self, source: DurableSource, rank: int, record: ImageRecord, name: str
    ) -> list[EverstepError]:
        """Read all of the image, with what it is based on; what is wrong with the base."""

        async def read(offset: int, view: memoryview) -> None:
            await source.read_into(rank, record.name, offset, view)

        return await self._read(read, record, name)

    async def _read(
        self, read: ReadInto, record: ImageRecord | StoredRecord, name: str
    ) -> list[EverstepError]:
        """Read all; the error names the first bad chunk and counts the others. Chunks whose base is damaged are none of
        these: the first of them is given back."""
        assert self.chunk_bytes is not None
        check_record(record, self.chunk_bytes, name)
        step = max(PIECE_BYTES // self.chunk_bytes, 1) * self.chunk_bytes
        buffer = self._buffers.pop() if self._buffers else mmap.mmap(-1, step)
        bad: list[tuple[int, bytes]] = []
        of_base: list[EverstepError] = []
        try:
            for start in range(0, record.nbytes, step):
                view = memoryview(buffer)[: min(step, record.nbytes - start)]
                if not self._takes(f"{name}@{start}"):
                    self.unread_bytes += len(view)
                    continue
                await self._limit.take(len(view))
                lost: Collection[int] = ()
                try:
                    await read(start, view)
                except Damaged as lacks:
                    lost = lacking(lacks)
                    if not lost:
                        raise
                    of_base = of_base or [lacks]
                self.proved_bytes += max(len(view) - len(lost) * self.chunk_bytes, 0)
                first = start // self.chunk_bytes
                found = await asyncio.to_thread(bad_chunks, view, first, record, self.chunk_bytes)
                bad += [one for one in found if one[0] not in lost]
        finally:
            self._buffers.append(buffer)
        if bad:
            error = changed_chunk(name, record, *bad[0], self.chunk_bytes)
            if len(bad) > 1:
                error = Damaged(
                    f"{error.message}, and in {len(bad) - 1} more chunks",
                    found=error.found,
                    expected=error.expected,
                    **error.fields,
                )
            return [error, *of_base]
        return of_base
