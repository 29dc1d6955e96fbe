"""Filling tensors from images, every chunk proved before a byte of it is copied.

Pieces of whole chunks travel through a few reused page-aligned buffers (or stay where they are, when the
source has them in memory): read, hash, compare, copy. A chunk that is not what its record says, or that
cannot be read, is fetched from the next source that holds the same image.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from everstep.backends.aligned import aligned_buffer
from everstep.errors import CannotTell, Damaged, EverstepError, Pruned, StateMismatch
from everstep.format.vote import ImageRecord
from everstep.plan.reads import Range, Read, chunk_ranges

from .ahead import Ahead, Early
from .asking import each
from .bases import UNSERVED, lacking
from .pieces import (
    Bad,
    InFlight,
    Piece,
    buffer_bytes,
    copy_reads,
    dealt,
    in_flight,
    nbytes_of,
    scattered,
    step_of,
    unpack_and_copy,
    verify_and_copy,
)
from .proving import bad_chunks, changed_chunk, check_record
from .sources import Fetching, Scattering, Source

MAPPED_PIECE_BYTES = 16 << 20
"""A piece of what lies in memory already: it takes no buffer, and fewer are handed from thread to thread."""

FALLBACKS_MAX = 256
"""Fallbacks that a report tells one by one."""

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Fallback:
    """Bytes that one source could not give rightly, and who gave them instead."""

    rank: int
    image: str
    offset: int
    nbytes: int
    source: str
    error: EverstepError
    served_by: str


@dataclass(slots=True)
class FillReport:
    """``nbytes`` were copied into targets; ``read_bytes`` were read rightly (or hashed in place), by source, and
    ``kind_bytes`` are the same by kind of source. Of the ``fallbacks_count`` fallbacks the first ``FALLBACKS_MAX`` are
    kept."""

    nbytes: int = 0
    pieces: int = 0
    read_bytes: dict[str, int] = field(default_factory=dict)
    kind_bytes: dict[str, int] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)
    fallbacks_count: int = 0

    def add(self, other: FillReport) -> None:
        """Take in what another filling did."""
        self.nbytes += other.nbytes
        self.pieces += other.pieces
        for mine, more in ((self.read_bytes, other.read_bytes), (self.kind_bytes, other.kind_bytes)):
            for name, nbytes in more.items():
                mine[name] = mine.get(name, 0) + nbytes
        for fallback in other.fallbacks:
            self.fell_back(fallback)
        self.fallbacks_count += other.fallbacks_count - len(other.fallbacks)

    def count(self, source: Source, nbytes: int) -> None:
        self.read_bytes[source.label] = self.read_bytes.get(source.label, 0) + nbytes
        self.kind_bytes[source.kind] = self.kind_bytes.get(source.kind, 0) + nbytes

    def fell_back(self, fallback: Fallback) -> None:
        self.fallbacks_count += 1
        if len(self.fallbacks) < FALLBACKS_MAX:
            self.fallbacks.append(fallback)


async def fill(
    sources: Sequence[Source],
    reads: Sequence[Read],
    targets: Mapping[int, memoryview],
    *,
    most: InFlight | None = None,
    headers: bool = True,
    ahead: Ahead | None = None,
) -> FillReport:
    """Do the ``reads`` into ``targets`` (writable flat views by entry index), from ``sources`` of one
    checkpoint, best first.

    The headers of the images that are used are proved too, unless ``headers`` is False. In memory are at most as many
    pieces as ``ahead`` says, where some are read ahead, else ``most``; by default :func:`.pieces.in_flight` of the
    sources. On an error the targets hold a mixture, of what was proved, what was read straight into them and was not,
    and what was there before. Raises Damaged (naming object, offset, found, expected) when no source has a chunk right,
    Pruned, CannotTell, SlotGone.
    """
    _check_sources(sources)
    report = FillReport()
    ahead = ahead or Ahead(most)
    most = ahead.most or in_flight(sources)
    images = await images_of(sources, reads, report, headers=headers)
    pieces = iter(await ahead.first(list(_pieces(images, most.piece_bytes))))
    with ThreadPoolExecutor(_threads(most.pieces), thread_name_prefix="everstep-fill") as pool:
        workers = [
            asyncio.ensure_future(_work(pieces, ahead, targets, pool, report, most.piece_bytes))
            for _ in range(most.pieces)
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    for source in sources:
        if source.label in report.read_bytes:
            await source.confirm()
    return report


def _threads(parallel: int) -> int:
    """For hashing and copying, which a core does one of at a time. Reading waits elsewhere."""
    return min(parallel, len(os.sched_getaffinity(0)))


def _check_sources(sources: Sequence[Source]) -> None:
    found = {(source.incarnation, source.step, source.chunk_bytes) for source in sources}
    if len(found) != 1:
        raise StateMismatch(
            "the sources are not of one checkpoint",
            found=sorted(found),
            expected="one (incarnation, step, chunk size)",
        )


@dataclass(slots=True)
class Image:
    """What is read of one image: who has it, best first, its record, and the reads, by offset. The first holder gave
    the record; what the others say is asked when one of them is needed. ``head`` are the bytes at its begin that are
    proved whether or not a read needs them."""

    holders: tuple[Source, ...]
    rank: int
    name: str
    record: ImageRecord
    head: int
    reads: list[Read]

    def ranges(self) -> list[Range]:
        """The whole chunks that are needed. StateMismatch where a read lies outside the image."""
        nbytes = self.record.nbytes
        for read in self.reads:
            if read.image_offset < 0 or read.image_end > nbytes:
                raise StateMismatch(
                    f"a read lies outside image {self.name!r} of rank {self.rank}",
                    found=f"bytes {read.image_offset}..{read.image_end}",
                    expected=f"at most {nbytes}",
                )
        return chunk_ranges(self.reads, self.holders[0].chunk_bytes, nbytes, self.head)


async def images_of(
    sources: Sequence[Source], reads: Sequence[Read], report: FillReport, *, headers: bool = True
) -> list[Image]:
    """The reads by image. Raises as :func:`fill` does where no source has one; fallbacks are reported."""
    by_image: defaultdict[tuple[int, str], list[Read]] = defaultdict(list)
    for read in reads:
        by_image[read.rank, read.image].append(read)

    async def one(item: tuple[tuple[int, str], list[Read]]) -> Image:
        (rank, image), some = item
        holders, record = await _holders(sources, rank, image, report)
        some.sort(key=lambda read: read.image_offset)
        head = await _header_bytes(holders, rank, image) if headers else 0
        return Image(holders, rank, image, record, head, some)

    return await each(by_image.items(), one)


async def _header_bytes(holders: Sequence[Source], rank: int, image: str) -> int:
    """Size of the image's header. No tensor needs its chunks, but a load that uses an image proves it all."""
    failed: list[tuple[Source, EverstepError]] = []
    for source in holders:
        try:
            layout = await source.layout(rank)
        except UNSERVED as error:
            failed.append((source, error))
        else:
            return next(len(spec.header) for spec in layout.images if spec.name == image)
    raise _worst(failed)


async def _holders(
    sources: Sequence[Source], rank: int, image: str, report: FillReport
) -> tuple[tuple[Source, ...], ImageRecord]:
    """Who has the image, and its record as the first of them has it that can prove it."""
    failed: list[tuple[Source, EverstepError]] = []
    able = [source for source in sources if rank in source.ranks and source.has(rank, image)]
    for position, source in enumerate(able):
        try:
            record = await _record(source, rank, image)
        except UNSERVED as error:
            failed.append((source, error))
            continue
        for former, problem in failed:
            report.fell_back(Fallback(rank, image, 0, record.nbytes, former.label, problem, source.label))
        return tuple(able[position:]), record
    if failed:
        raise _worst(failed)
    raise StateMismatch(f"no source holds image {image!r} of rank {rank}", found="nothing", rank=rank)


async def _record(source: Source, rank: int, image: str) -> ImageRecord:
    """What the source can prove that it knows of the image. Raises where it has not the image, too."""
    name = source.locate(rank, image)
    record = (await source.records(rank)).get(image)
    if record is None:
        raise Damaged(f"{name} is in no vote", found="nothing", expected="a record", name=name)
    check_record(record, source.chunk_bytes, name)
    await source.check_image(rank, image)
    return record


def _worst(failed: Sequence[tuple[Source, EverstepError]]) -> EverstepError:
    """The error to raise when no source could serve. "Cannot tell" and "pruned" speak for a retry or another
    step, so one of them anywhere keeps the verdict from being "damaged"."""
    errors = [error for _, error in failed]
    for kind in (CannotTell, Pruned):
        for error in errors:
            if isinstance(error, kind):
                return error
    return errors[0]


def _pieces(images: Sequence[Image], piece_bytes: int) -> Iterator[Piece]:
    for image in images:
        holder = image.holders[0]
        mapped = holder.mapped(image.rank, image.name) is not None
        chunk_bytes = holder.chunk_bytes
        step = step_of(image.record, MAPPED_PIECE_BYTES if mapped else piece_bytes, chunk_bytes)
        spans = [(at, min(at + step, end)) for begin, end in image.ranges() for at in range(begin, end, step)]
        yield from _with_reads(image, spans)


def _with_reads(image: Image, spans: Sequence[Range]) -> Iterator[Piece]:
    """Pieces with what they serve."""
    for (start, stop), some in zip(spans, dealt(image.reads, spans), strict=True):
        yield Piece(image.holders, image.rank, image.name, image.record, start, stop - start, some)


async def _work(
    pieces: Iterator[Piece],
    ahead: Ahead,
    targets: Mapping[int, memoryview],
    pool: ThreadPoolExecutor,
    report: FillReport,
    piece_bytes: int,
) -> None:
    """Take pieces until none is left. The buffer is made when a piece first needs one, or comes with a piece that is
    read ahead."""
    buffer: memoryview | None = None
    for piece in pieces:
        whole = piece.holders[0].mapped(piece.rank, piece.image)
        if whole is not None:
            view = whole[piece.offset : piece.offset + piece.nbytes]
            error, bad = None, await _in(pool, verify_and_copy, piece, view, targets)
        else:
            early = ahead.take(piece)
            needed = buffer_bytes(piece.record, piece.nbytes)
            if early is not None:
                buffer = early.buffer
            elif buffer is None or len(buffer) < needed:
                buffer = aligned_buffer(max(piece_bytes, needed))
            view = buffer[: piece.nbytes]
            error, bad = await _read(piece, early, buffer, targets, pool)
        if error is None or lacking(error):
            report.count(piece.holders[0], piece.nbytes - nbytes_of(bad, piece))
        if error is not None or bad:
            await _repair(piece, view, bad, error, targets, pool, report)
        report.pieces += 1
        report.nbytes += sum([read.nbytes * read.runs for read in piece.reads])


async def _in(pool: ThreadPoolExecutor, act: Callable[..., R], *args: Any) -> R:
    return await asyncio.get_running_loop().run_in_executor(pool, act, *args)


async def _read(
    piece: Piece,
    early: Early | None,
    buffer: memoryview,
    targets: Mapping[int, memoryview],
    pool: ThreadPoolExecutor,
) -> tuple[EverstepError | None, Bad]:
    """Read the piece from its first holder, and have its reads done if every chunk is right. Else ``buffer`` begins
    with what was read: all but the bad chunks, where these are told beside an error."""
    source, view = piece.holders[0], buffer[: piece.nbytes]
    if piece.record.stored is not None and isinstance(source, Fetching):
        if await _unpacked(source, piece, early, buffer, targets, pool):
            return None, []
        early = None
    straight = scattered(piece, view, targets) if isinstance(source, Scattering) else None
    try:
        if straight is None:
            reading = early.reading if early is not None else None
            await (reading or source.read_into(piece.rank, piece.image, piece.offset, view))
            return None, await _in(pool, verify_and_copy, piece, view, targets)
        await cast(Scattering, source).read_parts(piece.rank, piece.image, piece.offset, straight.parts)
    except UNSERVED as error:
        return error, await _in(pool, verify_and_copy, piece, view, targets) if lacking(error) else []
    return None, await _in(pool, straight.verify)


async def _unpacked(
    source: Fetching,
    piece: Piece,
    early: Early | None,
    buffer: memoryview,
    targets: Mapping[int, memoryview],
    pool: ThreadPoolExecutor,
) -> bool:
    """Have the reads of a piece of a packed image done. What it is decoded from is not proved: that its chunks are
    right says all. False where one is not, or something could not be read: then what is wrong is found by reading it
    with a proof of everything."""
    try:
        fetched = await (early.reading if early is not None else source.fetch(*piece.place, buffer))
    except UNSERVED:
        return False
    return fetched is not None and await _in(pool, unpack_and_copy, piece, fetched, targets)


async def _repair(
    piece: Piece,
    view: memoryview,
    bad: Sequence[tuple[int, bytes]],
    error: EverstepError | None,
    targets: Mapping[int, memoryview],
    pool: ThreadPoolExecutor,
    report: FillReport,
) -> None:
    """Get the bad chunks (all, when the piece could not be read) from the other holders, then copy."""
    source, chunk_bytes = piece.holders[0], piece.holders[0].chunk_bytes
    repair = _Repair(piece, memoryview(bytearray(view)) if view.readonly else view, pool)
    lost = lacking(error)
    if error is not None and not lost:
        end = piece.offset + piece.nbytes
        repair.failed(source, range(piece.offset // chunk_bytes, -(-end // chunk_bytes)), error)
    for index, found in bad:
        name = source.locate(piece.rank, piece.image)
        changed = changed_chunk(name, piece.record, index, found, chunk_bytes)
        repair.failed(source, [index], error if error is not None and index in lost else changed)
    for other in piece.holders[1:]:
        if repair.missing:
            await repair.ask(other)
    repair.tell(report)
    await _in(pool, copy_reads, piece.reads, piece.offset, repair.view, targets)


class _Repair:
    """Chunks of one piece that the first holder could not give, and who failed of each."""

    def __init__(self, piece: Piece, view: memoryview, pool: ThreadPoolExecutor) -> None:
        self.view = view
        self.missing: dict[int, list[tuple[Source, EverstepError]]] = {}
        self._served: dict[int, tuple[Source, list[tuple[Source, EverstepError]]]] = {}
        self._piece = piece
        self._pool = pool
        self._chunk_bytes = piece.holders[0].chunk_bytes

    def failed(self, source: Source, chunks: Iterable[int], error: EverstepError) -> None:
        for index in chunks:
            self.missing.setdefault(index, []).append((source, error))

    async def ask(self, source: Source) -> None:
        """What is missing from ``source``, if that knows the image by the same root."""
        piece = self._piece
        try:
            record = await _record(source, piece.rank, piece.image)
        except UNSERVED as error:
            self.failed(source, list(self.missing), error)
            return
        if (record.root, record.nbytes) != (piece.record.root, piece.record.nbytes):
            return
        for run in _runs(sorted(self.missing)):
            await self._read(source, run)

    async def _read(self, source: Source, run: range) -> None:
        piece, chunk_bytes = self._piece, self._chunk_bytes
        begin = run.start * chunk_bytes
        part = self.view[begin - piece.offset : run.stop * chunk_bytes - piece.offset]
        problem: EverstepError | None = None
        try:
            await source.read_into(piece.rank, piece.image, begin, part)
        except UNSERVED as error:
            problem = error
            if not lacking(error):
                self.failed(source, run, error)
                return
        loop = asyncio.get_running_loop()
        bad = dict(
            await loop.run_in_executor(self._pool, bad_chunks, part, run.start, piece.record, chunk_bytes)
        )
        for index in run:
            if index in bad:
                name = source.locate(piece.rank, piece.image)
                changed = changed_chunk(name, piece.record, index, bad[index], chunk_bytes)
                lost = problem is not None and index in lacking(problem)
                self.failed(source, [index], problem if problem is not None and lost else changed)
            else:
                self._served[index] = source, self.missing.pop(index)

    def tell(self, report: FillReport) -> None:
        """Raises where nobody had a chunk right; else reports who failed, in runs of chunks alike."""
        if self.missing:
            raise _worst(self.missing[min(self.missing)])
        last: tuple[Source, list[tuple[Source, EverstepError]]] | None = None
        runs: list[list[int]] = []
        for index in sorted(self._served):
            if last == self._served[index] and runs[-1][-1] == index - 1:
                runs[-1].append(index)
            else:
                runs.append([index])
            last = self._served[index]
        for run in runs:
            server, failed = self._served[run[0]]
            begin = run[0] * self._chunk_bytes
            end = min((run[-1] + 1) * self._chunk_bytes, self._piece.record.nbytes)
            report.count(server, end - begin)
            for former, problem in failed:
                told = former.label, problem, server.label
                report.fell_back(Fallback(self._piece.rank, self._piece.image, begin, end - begin, *told))


def _runs(indexes: Sequence[int]) -> list[range]:
    """Ascending indexes as ranges."""
    runs: list[range] = []
    for index in indexes:
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs
