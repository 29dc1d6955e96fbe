"""Filling tensors from images, every chunk proved before a byte of it is copied.

Pieces of whole chunks travel through a few reused page-aligned buffers (or stay where they are, when the
source has them in memory): read, hash, compare, copy. A chunk that is not what its record says, or that
cannot be read, is fetched from the next source that holds the same image.
"""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from everstep.backends.aligned import aligned_buffer
from everstep.errors import CannotTell, Damaged, EverstepError, Pruned, StateMismatch
from everstep.format.constants import HASH_BYTES
from everstep.format.vote import ImageRecord
from everstep.memory.copying import COMPILED, copy, prove_and_copy
from everstep.plan.reads import Range, Read, chunk_ranges, clip

from .ahead import Ahead, Early
from .asking import each
from .bases import UNSERVED, lacking
from .proving import bad_chunks, changed_chunk, check_record, differing
from .sources import Scattering, Source

PARALLEL = 8
"""Pieces in flight, more than a backend reads at once: while some are hashed and copied, others are
read. With
``PIECE_BYTES`` this bounds the memory."""

PIECE_BYTES = 8 << 20
"""One read of a durable tier; one chunk where chunks are larger."""

MAPPED_PIECE_BYTES = 16 << 20
"""A piece of what lies in memory already: it takes no buffer, and fewer are handed from thread to thread."""

HOT_BYTES = 1 << 20
"""Hashed and then copied at once (whole chunks): what a core's cache holds."""

LARGE_COPY_BYTES = 64 << 10
"""From here on a copy is worth giving up the interpreter lock for."""


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


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive chunks of one image, and the reads that lie inside them. Holders as in :class:`Image`."""

    holders: tuple[Source, ...]
    rank: int
    image: str
    record: ImageRecord
    offset: int
    nbytes: int
    reads: list[Read]


async def fill(
    sources: Sequence[Source],
    reads: Sequence[Read],
    targets: Mapping[int, memoryview],
    *,
    parallel: int = PARALLEL,
    piece_bytes: int = PIECE_BYTES,
    headers: bool = True,
    ahead: Ahead | None = None,
) -> FillReport:
    """Do the ``reads`` into ``targets`` (writable flat views by entry index), from ``sources`` of one
    checkpoint, best first.

    The headers of the images that are used are proved too, unless ``headers`` is False. At most ``parallel``
    pieces of ``piece_bytes`` are in memory: as ``ahead`` says, where pieces are read ahead. On an error the targets
    hold a mixture, of what was proved, what was read straight into them and was not, and what was there before. Raises
    Damaged (naming object, offset, found, expected) when no source has a chunk right, Pruned, CannotTell, SlotGone.
    """
    _check_sources(sources)
    report = FillReport()
    ahead = ahead or Ahead(parallel, piece_bytes)
    parallel, piece_bytes = ahead.pieces, ahead.piece_bytes
    images = await images_of(sources, reads, report, headers=headers)
    pieces = iter(await ahead.first(list(_pieces(images, piece_bytes))))
    with ThreadPoolExecutor(_threads(parallel), thread_name_prefix="everstep-fill") as pool:
        workers = [
            asyncio.ensure_future(_work(pieces, ahead, targets, pool, report, piece_bytes))
            for _ in range(parallel)
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


def _pieces(images: Sequence[Image], piece_bytes: int) -> Iterator[_Piece]:
    for image in images:
        holder = image.holders[0]
        mapped = holder.mapped(image.rank, image.name) is not None
        chunk_bytes = holder.chunk_bytes
        step = max((MAPPED_PIECE_BYTES if mapped else piece_bytes) // chunk_bytes, 1) * chunk_bytes
        spans = [(at, min(at + step, end)) for begin, end in image.ranges() for at in range(begin, end, step)]
        yield from _with_reads(image, spans)


def _with_reads(image: Image, spans: Sequence[Range]) -> Iterator[_Piece]:
    """Pieces with what they serve."""
    for (start, stop), some in zip(spans, _dealt(image.reads, spans), strict=True):
        yield _Piece(image.holders, image.rank, image.name, image.record, start, stop - start, some)


def _dealt(reads: Sequence[Read], spans: Sequence[Range]) -> list[list[Read]]:
    """The reads by span; one over several spans is clipped to each of them."""
    starts = [start for start, _ in spans]
    served: list[list[Read]] = [[] for _ in spans]
    for read in reads:
        if not read.nbytes:
            continue
        index = bisect_right(starts, read.image_offset) - 1
        end = read.image_end
        if end <= spans[index][1]:
            served[index].append(read)
            continue
        while index < len(spans) and starts[index] < end:
            served[index] += clip(read, *spans[index])
            index += 1
    return served


async def _work(
    pieces: Iterator[_Piece],
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
            error, bad = None, await _in(pool, _verify_and_copy, piece, view, targets)
        else:
            early = ahead.take(piece)
            if early is not None:
                buffer = early.buffer
            elif buffer is None or len(buffer) < piece.nbytes:
                buffer = aligned_buffer(max(piece_bytes, piece.nbytes))
            view = buffer[: piece.nbytes]
            error, bad = await _read(piece, early, view, targets, pool)
        if error is None or lacking(error):
            report.count(piece.holders[0], piece.nbytes - _nbytes_of(bad, piece))
        if error is not None or bad:
            await _repair(piece, view, bad, error, targets, pool, report)
        report.pieces += 1
        report.nbytes += sum([read.nbytes * read.runs for read in piece.reads])


async def _in(pool: ThreadPoolExecutor, act: Callable[..., R], *args: Any) -> R:
    return await asyncio.get_running_loop().run_in_executor(pool, act, *args)


Bad = list[tuple[int, bytes]]
"""Chunks that have not their hash, each with the one found."""


async def _read(
    piece: _Piece,
    early: Early | None,
    view: memoryview,
    targets: Mapping[int, memoryview],
    pool: ThreadPoolExecutor,
) -> tuple[EverstepError | None, Bad]:
    """Read the piece from its first holder, and have its reads done if every chunk is right. Else ``view`` holds what
    was read: all but the bad chunks, where these are told beside an error."""
    source = piece.holders[0]
    scattered = _scattered(piece, view, targets) if isinstance(source, Scattering) else None
    try:
        if scattered is None:
            reading = early.reading if early is not None else None
            await (reading or source.read_into(piece.rank, piece.image, piece.offset, view))
            return None, await _in(pool, _verify_and_copy, piece, view, targets)
        await cast(Scattering, source).read_parts(piece.rank, piece.image, piece.offset, scattered.parts)
    except UNSERVED as error:
        return error, await _in(pool, _verify_and_copy, piece, view, targets) if lacking(error) else []
    return None, await _in(pool, scattered.verify)


class _Scattered:
    """A piece that is read straight into the targets, but for what is small there, or wanted nowhere: that goes
    through ``view``, at its own place."""

    def __init__(self, piece: _Piece, view: memoryview) -> None:
        self.parts: list[memoryview] = []
        self._piece = piece
        self._view = view
        self._at = 0
        self._copies: list[tuple[memoryview, memoryview]] = []

    def small(self, begin: int, target: memoryview) -> None:
        """``target`` are the bytes from ``begin`` of the piece on."""
        self._copies.append((target, self._view[begin : begin + len(target)]))

    def large(self, begin: int, target: memoryview) -> None:
        """What comes after the former large one, up to ``begin``, goes through the view."""
        if begin > self._at:
            self.parts.append(self._view[self._at : begin])
        self.parts.append(target)
        self._at = begin + len(target)

    def end(self) -> None:
        if self._at < len(self._view):
            self.parts.append(self._view[self._at :])

    def verify(self) -> Bad:
        """The bad chunks; if there are none, all reads have been done, else the view holds the whole piece."""
        chunk_bytes = self._piece.holders[0].chunk_bytes
        bad = bad_chunks(self.parts, self._piece.offset // chunk_bytes, self._piece.record, chunk_bytes)
        if bad:
            at = 0
            for part in self.parts:
                self._view[at : at + len(part)] = part
                at += len(part)
        else:
            for target, copy in self._copies:
                target[:] = copy
        return bad


def _scattered(piece: _Piece, view: memoryview, targets: Mapping[int, memoryview]) -> _Scattered | None:
    """None where most of it would go through the view anyhow, or a byte is wanted twice."""
    found = _Scattered(piece, view)
    at = large = 0
    for index, _, _, offset, nbytes, dest, count, _, _ in piece.reads:
        begin = offset - piece.offset
        if count > 1 or begin < at:
            return None
        at = begin + nbytes
        target = targets[index][dest : dest + nbytes]
        if len(target) != nbytes:
            return None  # the plain way says what is wrong
        if nbytes < LARGE_COPY_BYTES:
            found.small(begin, target)
        else:
            large += nbytes
            found.large(begin, target)
    found.end()
    return found if 2 * large > piece.nbytes else None


def _nbytes_of(bad: Sequence[tuple[int, bytes]], piece: _Piece) -> int:
    chunk_bytes = piece.holders[0].chunk_bytes
    return sum(min(chunk_bytes, piece.record.nbytes - index * chunk_bytes) for index, _ in bad)


def _verify_and_copy(piece: _Piece, view: memoryview, targets: Mapping[int, memoryview]) -> Bad:
    """Copy the piece's bytes, a little at a time, each right after it was hashed, while it is in the cache. Returns the
    bad chunks; nothing of these is copied."""
    chunk_bytes = piece.holders[0].chunk_bytes
    if COMPILED:
        first = piece.offset // chunk_bytes * HASH_BYTES
        expected = piece.record.chunks[first : first + -(-piece.nbytes // chunk_bytes) * HASH_BYTES]
        hashes = prove_and_copy(view, piece.offset, chunk_bytes, expected, piece.reads, targets)
        if hashes is not None:
            return differing(hashes, expected, piece.offset // chunk_bytes)
    step = max(HOT_BYTES // chunk_bytes, 1) * chunk_bytes
    end = piece.offset + piece.nbytes
    spans = [(at, min(at + step, end)) for at in range(piece.offset, end, step)]
    bad: Bad = []
    for (start, stop), reads in zip(spans, _dealt(piece.reads, spans), strict=True):
        part = view[start - piece.offset : stop - piece.offset]
        found = bad_chunks(part, start // chunk_bytes, piece.record, chunk_bytes)
        bad += found
        if not found:
            _copy(reads, start, part, targets)
    return bad


def _copy(reads: Sequence[Read], at: int, view: memoryview, targets: Mapping[int, memoryview]) -> None:
    """Do ``reads`` from ``view``, which begins at ``at`` of the image."""
    for index, _, _, offset, nbytes, dest, count, image_stride, dest_stride in reads:
        start = offset - at
        if count > 1:
            strides = image_stride, dest_stride
            _copy_runs(targets[index][dest:], view[start:], nbytes, count, strides)
        elif nbytes < LARGE_COPY_BYTES:
            targets[index][dest : dest + nbytes] = view[start : start + nbytes]
        else:
            copy(targets[index][dest : dest + nbytes], view[start : start + nbytes])


def _copy_runs(
    target: memoryview, source: memoryview, nbytes: int, count: int, strides: tuple[int, int]
) -> None:
    """``count`` runs, one element of ``nbytes`` bytes each, without the interpreter lock; strides in ``source``
    and in ``target``. numpy refuses runs outside the views."""
    import numpy

    run = numpy.dtype((numpy.void, nbytes))
    numpy.copyto(
        numpy.ndarray((count,), run, target, 0, strides[1:]),
        numpy.ndarray((count,), run, source, 0, strides[:1]),
    )


async def _repair(
    piece: _Piece,
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
    await _in(pool, _copy, piece.reads, piece.offset, repair.view, targets)


class _Repair:
    """Chunks of one piece that the first holder could not give, and who failed of each."""

    def __init__(self, piece: _Piece, view: memoryview, pool: ThreadPoolExecutor) -> None:
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
