"""Images of lost nodes out of what the others of their parity groups have, decoded while they are read.

A chunk of a lost image is a sum of the chunks at the same place in other blocks of its stripe: data blocks out of other
nodes' snapshots, and parity blocks out of parity slots, wherever they lie. What comes out is compared with the owner's
hashes. Where it differs, each block is compared with its own hashes, those that are wrong are left out, and other
combinations are tried.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from .backends.aligned import aligned_buffer
from .errors import CannotTell, Damaged, EverstepError, Pruned
from .format.layout import Layout
from .format.vote import ImageRecord
from .memory.errors import ArenaGone, SlotGone
from .peers.described import PARITY_RANK, parity_image
from .plan import galois
from .plan.parity import ParityGroup, Part
from .store.proving import bad_chunks, changed_chunk
from .store.sources import REBUILT, Source

PIECE_BYTES = 4 << 20
"""Decoded at once, in whole chunks; one chunk where chunks are larger."""
PIECES_MAX = 8
"""Decoded at the same time; each has room for two pieces."""
COMBINATIONS_MAX = 256
"""Of blocks that are tried for one piece."""

UNSERVED = (Damaged, CannotTell, Pruned, SlotGone, ArenaGone)
"""Errors of one source that another may make good."""

T = TypeVar("T")

Blocks = Mapping[tuple[int, int], Sequence[Source]]
"""By (stripe, row) who has that parity block, as an image of the rank ``PARITY_RANK``."""


class _Block(NamedTuple):
    """One block of a stripe that is there: a parity ``row``, or a data column."""

    is_parity: bool
    number: int


class _Wanted(NamedTuple):
    """Whole chunks of a data block: those of image ``image`` of ``rank`` from ``offset`` on."""

    rank: int
    image: str
    offset: int
    nbytes: int
    stripe: int
    column: int
    chunks: range


class RebuiltSource:
    """What can be computed of a checkpoint: images of all ranks of one parity group.

    ``data`` are the sources of what is left, the nearest first; some of them must know each lost rank (its layout,
    records, meta and state: what its node's agent sent to others). All is proved before it is given, so whoever reads
    proves it a second time.
    """

    kind = REBUILT

    def __init__(self, group: ParityGroup, blocks: Blocks, data: Sequence[Source]) -> None:
        """``data``: at least one source."""
        first = data[0]
        self.step, self.incarnation, self.world = first.step, first.incarnation, first.world
        self.chunk_bytes = group.chunk_bytes
        self.label = f"parity of nodes {', '.join(member.name for member in group.members)}"
        self._group = group
        self._blocks = blocks
        self._data = tuple(data)
        members = {rank for member in group.members for rank in member.ranks}
        self.ranks = frozenset(members & {rank for source in data for rank in source.ranks})
        self._images = {(rank, name) for member in group.members for rank, name, _ in member.images}
        self._lost = {
            at
            for at, member in enumerate(group.members)
            if not all(self._holders(rank, name) for rank, name, _ in member.images)
        }
        self._room = asyncio.Semaphore(PIECES_MAX)

    def _holders(self, rank: int, image: str) -> list[Source]:
        return [source for source in self._data if rank in source.ranks and source.has(rank, image)]

    # -- as a source

    async def meta(self, rank: int) -> dict[str, Any]:
        return await self._from_any(rank, lambda source: source.meta(rank))

    async def layout(self, rank: int) -> Layout:
        return await self._from_any(rank, lambda source: source.layout(rank))

    async def records(self, rank: int) -> dict[str, ImageRecord]:
        return await self._from_any(rank, lambda source: source.records(rank))

    async def state(self, rank: int) -> bytes:
        return await self._from_any(rank, lambda source: source.state(rank))

    async def _from_any(self, rank: int, read: Callable[[Source], Awaitable[T]]) -> T:
        failed: EverstepError | None = None
        for source in self._data:
            if rank in source.ranks:
                try:
                    return await read(source)
                except UNSERVED as error:
                    failed = error
        raise failed or Damaged(f"{self.label}: nobody knows rank {rank}", name=self.label)

    def has(self, rank: int, image: str) -> bool:
        """Whether enough is left: as if its node were lost, even if it is not."""
        position = self._group.position_of(rank)
        if position is None or (rank, image) not in self._images:
            return False
        return position in self._group.rebuildable(self._lost | {position}, self._blocks)

    def lacks(self, rank: int, images: Collection[str]) -> frozenset[str]:
        """Those of a rank's images that it cannot give."""
        return frozenset(image for image in images if not self.has(rank, image))

    async def check_image(self, rank: int, image: str) -> None:
        if not self.has(rank, image):
            raise self._short(rank, image)

    def mapped(self, rank: int, image: str) -> memoryview | None:
        return None

    def locate(self, rank: int, image: str) -> str:
        return f"{self.label}, rank {rank}, {image}"

    async def confirm(self) -> None:
        """Nothing to ask: every byte was verified."""

    def _short(self, rank: int, image: str) -> Damaged:
        name = self.locate(rank, image)
        return Damaged(
            f"{name}: cannot be rebuilt",
            found=f"{len(self._lost)} nodes without their snapshots",
            expected=f"at most {self._group.code.m}, and the parity of the others",
            name=name,
        )

    async def read_into(self, rank: int, image: str, offset: int, view: memoryview) -> None:
        """Verified. Damaged where no combination of blocks gives the bytes."""
        record, size = (await self.records(rank))[image], self.chunk_bytes
        begin, end = offset // size * size, min(-(-(offset + len(view)) // size) * size, record.nbytes)
        if offset + len(view) > record.nbytes or (rank, image) not in self._images:
            name = self.locate(rank, image)
            raise Damaged(
                f"{name}: ends too early", found=record.nbytes, expected=offset + len(view), name=name
            )
        whole = view if (begin, end) == (offset, offset + len(view)) else memoryview(bytearray(end - begin))
        for wanted in self._pieces(rank, image, begin, end - begin):
            at = wanted.offset - begin
            async with self._room:
                await self._decode(wanted, record, whole[at : at + wanted.nbytes])
        if whole is not view:
            view[:] = whole[offset - begin : offset - begin + len(view)]

    def _pieces(self, rank: int, image: str, offset: int, nbytes: int) -> Iterator[_Wanted]:
        size = self.chunk_bytes
        step = max(PIECE_BYTES, size)
        for span in self._group.spans(rank, image, offset, nbytes):
            for at in range(0, span.nbytes, step):
                length = min(step, span.nbytes - at)
                first = (span.offset + at) // size
                chunks = range(first, first - (-length // size))
                yield _Wanted(rank, image, offset + span.at + at, length, span.stripe, span.column, chunks)

    # -- decoding

    async def _decode(self, wanted: _Wanted, record: ImageRecord, out: memoryview) -> None:
        """Fill ``out`` from the first combination of blocks that gives what the record says."""
        nbytes = len(wanted.chunks) * self.chunk_bytes
        total = out if len(out) == nbytes else aligned_buffer(nbytes)[:nbytes]
        scratch = aligned_buffer(nbytes)[:nbytes]
        failed: EverstepError = self._short(wanted.rank, wanted.image)
        bad: set[_Block] = set()
        proving = False
        combinations = self._combinations(wanted, bad)
        for _ in range(COMBINATIONS_MAX):
            choice = next(combinations, None)
            if choice is None:
                break
            try:
                await self._combine(wanted, *choice, total, scratch, proving)
            except _Unusable as error:
                bad.add(error.block)
                failed = error.error
                combinations = self._combinations(wanted, bad)
                continue
            wrong = await asyncio.to_thread(self._wrong, wanted, record, total)
            if wrong is None:
                if total is not out:
                    out[:] = total[: len(out)]
                return
            failed = wrong
            if not proving:  # once more, and now by blocks that have their own hashes
                proving, combinations = True, self._combinations(wanted, bad)
        name = self.locate(wanted.rank, wanted.image)
        raise Damaged(
            f"{name}: cannot be rebuilt at offset {wanted.offset}",
            found=failed,
            expected="blocks of its stripe that give what the owner's hashes say",
            name=name,
            offset=wanted.offset,
        )

    def _combinations(
        self, wanted: _Wanted, bad: Collection[_Block]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(data columns that are not used, as many parity rows): the fewest rows first."""
        code = self._group.code
        rows = [
            row
            for row in range(code.m)
            if (wanted.stripe, row) in self._blocks and _Block(True, row) not in bad
        ]
        there = [
            column
            for column in range(code.k)
            if column != wanted.column and _Block(False, column) not in bad and self._is_there(wanted, column)
        ]
        missing = [column for column in range(code.k) if column not in there]
        for more in range(min(len(rows) - len(missing), len(there)) + 1):
            for unused in itertools.combinations(there, more):
                for chosen in itertools.combinations(rows, len(missing) + more):
                    yield tuple(sorted((*missing, *unused))), chosen

    def _is_there(self, wanted: _Wanted, column: int) -> bool:
        parts = self._group.parts(wanted.stripe, column, wanted.chunks)
        return all(self._holders(part.rank, part.image) for part in parts)

    async def _combine(
        self,
        wanted: _Wanted,
        missing: Sequence[int],
        rows: Sequence[int],
        total: memoryview,
        scratch: memoryview,
        proving: bool,
    ) -> None:
        """Fill ``total``. _Unusable, by its block, if one cannot be read, or is ``proving`` wrong."""
        code = self._group.code
        by_row, by_column = galois.solve(code.k, code.m, missing, rows, wanted.column)
        factors = {_Block(False, column): factor for column, factor in by_column.items()}
        factors |= {_Block(True, row): factor for row, factor in by_row.items()}
        total[:] = bytes(len(total))
        for block, factor in factors.items():
            try:
                read = self._parity if block.is_parity else self._column
                view = await read(wanted, block.number, scratch, proving)
            except UNSERVED as error:
                raise _Unusable(block, error) from error
            if view is not None:
                await asyncio.to_thread(galois.accumulate, total, view, factor, self._unit)

    @property
    def _unit(self) -> int:
        return galois.unit_of(self.chunk_bytes)

    def _wrong(self, wanted: _Wanted, record: ImageRecord, total: memoryview) -> Damaged | None:
        """Why the chunks are not what the owner sealed."""
        part = Part(wanted.rank, wanted.image, wanted.offset, wanted.nbytes, 0)
        return self._differs(total[: wanted.nbytes], part, record, self.locate(wanted.rank, wanted.image))

    def _differs(self, view: memoryview, part: Part, record: ImageRecord, name: str) -> Damaged | None:
        bad = bad_chunks(view, part.offset // self.chunk_bytes, record, self.chunk_bytes)
        return changed_chunk(name, record, *bad[0], self.chunk_bytes) if bad else None

    async def _parity(
        self, wanted: _Wanted, row: int, scratch: memoryview, proving: bool
    ) -> memoryview | None:
        """The chunks of a parity block."""
        image, offset = parity_image(wanted.stripe), wanted.chunks.start * self.chunk_bytes
        part = Part(PARITY_RANK, image, offset, len(scratch), 0)
        return await self._read(self._blocks[wanted.stripe, row], part, scratch, proving)

    async def _column(
        self, wanted: _Wanted, column: int, scratch: memoryview, proving: bool
    ) -> memoryview | None:
        """The chunks of a data block, padded with zeros; None if they are all zeros."""
        parts = self._group.parts(wanted.stripe, column, wanted.chunks)
        if not parts:
            return None
        if len(parts) == 1 and parts[0].nbytes == len(scratch):
            return await self._read(self._holders(parts[0].rank, parts[0].image), parts[0], scratch, proving)
        scratch[:] = bytes(len(scratch))
        for part in parts:
            into = scratch[part.at : part.at + part.nbytes]
            view = await self._read(self._holders(part.rank, part.image), part, into, proving)
            if view is not into:
                into[:] = view
        return scratch

    async def _read(
        self, holders: Sequence[Source], part: Part, into: memoryview, proving: bool
    ) -> memoryview:
        """``part`` of an image from the first of ``holders`` that gives it (rightly, if ``proving``): where it lies in
        memory, or in ``into``."""
        failed: EverstepError | None = None
        for source in holders:
            name = source.locate(part.rank, part.image)
            try:
                whole = source.mapped(part.rank, part.image)
                view = into if whole is None else whole[part.offset : part.offset + part.nbytes]
                if whole is None:
                    await source.read_into(part.rank, part.image, part.offset, into)
                elif len(view) != len(into):
                    raise Damaged(f"{name}: ends too early", found=len(view), expected=len(into), name=name)
                wrong = None
                if proving:
                    record = (await source.records(part.rank))[part.image]
                    wrong = await asyncio.to_thread(self._differs, view, part, record, name)
                if wrong is None:
                    return view
                failed = wrong
            except UNSERVED as error:
                failed = error
            except KeyError:
                failed = Damaged(f"{name}: no such image", found="nothing", expected="a record", name=name)
        raise failed or Damaged(f"nobody has {part.image!r} of rank {part.rank}", name=part.image)


class _Unusable(Exception):
    """A block that cannot be had, and why."""

    def __init__(self, block: _Block, error: EverstepError) -> None:
        super().__init__(block, error)
        self.block = block
        self.error = error
