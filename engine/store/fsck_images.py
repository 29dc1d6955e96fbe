"""The part of fsck that reads much: votes, layouts, states and every chunk of every image of a checkpoint."""

from __future__ import annotations

import asyncio
import mmap
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from everstep.backends.api import Backend
from everstep.errors import CannotTell, Damaged, EverstepError, Pruned, RunError, StateMismatch
from everstep.format import names
from everstep.format.layout import Layout
from everstep.format.manifest import Manifest, RankRecord
from everstep.format.table import TableReader
from everstep.format.vote import STATE_IMAGE, ImageRecord, StoredRecord
from everstep.plan.coverage import check_coverage

from .asking import each
from .catalog import read_layout
from .proving import bad_chunks, changed_chunk, check_record
from .sources import DurableSource, bases_at
from .streaming import ReadInto

IMAGES_PARALLEL = 4
"""Images read side by side; with ``PIECE_BYTES`` this bounds the memory."""

PIECE_BYTES = 16 << 20

COVERED_MAX = 64


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
        quick: bool,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.backend = backend
        self.chunk_bytes = chunk_bytes
        self.quick = quick or chunk_bytes is None
        self.named: set[str] = set()
        self.bases = bases_at([backend], chunk_bytes or 1)
        self._progress = progress
        self._done = 0
        self._total = 0
        self._buffers: list[mmap.mmap] = []
        self._covered: OrderedDict[tuple[str, ...], None] = OrderedDict()

    def expect(self, manifest: Manifest) -> None:
        """Count the bytes of a checkpoint that will be checked."""
        self._total += sum(record.objects_nbytes for record in manifest.ranks)

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
            # Without hashes at least what is there can be said.
            found.images = await self._expected(record)
        self.named.update(source.locate(record.rank, image.name) for image in found.images)
        if found.errors:
            return found
        try:
            found.layout = await source.layout(record.rank)
        except Pruned:
            raise
        except RunError as error:
            found.errors.append(error)
        return found

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
                    await self._object(source, rank, record, name)
                    await self._chunks(source, rank, record, name)
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

    async def _size_alone(self, source: DurableSource, record: ImageRecord, name: str) -> None:
        found = await source.size(name)
        if found != record.nbytes:
            raise Damaged(
                f"{name}: wrong size", found=f"{found} bytes", expected=f"{record.nbytes} bytes", name=name
            )

    async def _object(self, source: DurableSource, rank: int, record: ImageRecord, name: str) -> None:
        """Read a packed image's object as it is stored: bytes that decoding does not need may be damaged, too."""
        if record.stored is None:
            return

        async def read(offset: int, view: memoryview) -> None:
            await source.read_object(rank, record, offset, view)

        await self._read(read, record.stored, name)

    async def _chunks(self, source: DurableSource, rank: int, record: ImageRecord, name: str) -> None:
        """Read all of the image, with what it is based on."""

        async def read(offset: int, view: memoryview) -> None:
            await source.read_into(rank, record.name, offset, view)

        await self._read(read, record, name)

    async def _read(self, read: ReadInto, record: ImageRecord | StoredRecord, name: str) -> None:
        """Read all; Damaged names the first bad chunk and counts the others."""
        assert self.chunk_bytes is not None
        check_record(record, self.chunk_bytes, name)
        step = max(PIECE_BYTES // self.chunk_bytes, 1) * self.chunk_bytes
        buffer = self._buffers.pop() if self._buffers else mmap.mmap(-1, step)
        bad: list[tuple[int, bytes]] = []
        try:
            for start in range(0, record.nbytes, step):
                view = memoryview(buffer)[: min(step, record.nbytes - start)]
                await read(start, view)
                first = start // self.chunk_bytes
                bad += await asyncio.to_thread(bad_chunks, view, first, record, self.chunk_bytes)
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
            raise error
