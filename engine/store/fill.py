"""Filling tensors from images, every chunk proved before a byte of it is copied.

Pieces of whole chunks travel through a few reused page-aligned buffers (or stay where they are, when the
source has them in memory): read, hash, compare, copy. A chunk that is not what its record says, or that
cannot be read, is fetched from the next source that holds the same image.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from everstep.backends.aligned import aligned_buffer
from everstep.errors import CannotTell, Damaged, EverstepError, Pruned, StateMismatch
from everstep.format.vote import ImageRecord
from everstep.memory.errors import ArenaGone, SlotGone
from everstep.plan.reads import Read

from .sources import Source, bad_chunks, changed_chunk, check_record

PARALLEL = 8
"""Pieces in flight, more than a backend reads at once: while some are hashed and copied, others are
read. With
``PIECE_BYTES`` this bounds the memory."""

PIECE_BYTES = 8 << 20
"""One read of a durable tier; one chunk where chunks are larger."""

LARGE_COPY_BYTES = 64 << 10
"""From here on a copy is worth giving up the interpreter lock for."""


FALLBACKS_MAX = 256
"""Fallbacks that a report tells one by one."""

_UNSERVED = (Damaged, CannotTell, Pruned, SlotGone, ArenaGone)
"""Errors of one source that another may make good."""


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
    """``nbytes`` were copied into targets; ``read_bytes`` were read (or hashed in place), by source. Of the
    ``fallbacks_count`` fallbacks the first ``FALLBACKS_MAX`` are kept."""

    nbytes: int = 0
    pieces: int = 0
    read_bytes: dict[str, int] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)
    fallbacks_count: int = 0

    def count(self, source: Source, nbytes: int) -> None:
        self.read_bytes[source.label] = self.read_bytes.get(source.label, 0) + nbytes

    def fell_back(self, fallback: Fallback) -> None:
        self.fallbacks_count += 1
        if len(self.fallbacks) < FALLBACKS_MAX:
            self.fallbacks.append(fallback)


Copy = tuple[int, int, int, int]
"""(entry index, offset in the target, offset in the piece, number of bytes)"""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive chunks of one image, and what is to be copied out of them."""

    holders: tuple[Source, ...]
    rank: int
    image: str
    record: ImageRecord
    offset: int
    nbytes: int
    copies: list[Copy]


async def fill(
    sources: Sequence[Source],
    reads: Sequence[Read],
    targets: Mapping[int, memoryview],
    *,
    parallel: int = PARALLEL,
    piece_bytes: int = PIECE_BYTES,
) -> FillReport:
    """Do the ``reads`` into ``targets`` (writable flat views by entry index), from ``sources`` of one
    checkpoint, best first.

    At most ``parallel`` pieces of ``piece_bytes`` are in memory. On an error the targets hold a mixture: what
    was copied was proved, the rest is untouched. Raises Damaged (naming object, offset, found, expected) when
    no source has a chunk right, Pruned, CannotTell, SlotGone.
    """
    _check_sources(sources)
    report = FillReport()
    pieces = _pieces(await _images(sources, reads, report), targets, piece_bytes)
    with ThreadPoolExecutor(parallel, thread_name_prefix="everstep-fill") as pool:
        workers = [
            asyncio.ensure_future(_work(pieces, targets, pool, report, piece_bytes)) for _ in range(parallel)
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


def _check_sources(sources: Sequence[Source]) -> None:
    found = {(source.incarnation, source.step, source.chunk_bytes) for source in sources}
    if len(found) != 1:
        raise StateMismatch(
            "the sources are not of one checkpoint",
            found=sorted(found),
            expected="one (incarnation, step, chunk size)",
        )


@dataclass(slots=True)
class _Image:
    holders: tuple[Source, ...]
    rank: int
    image: str
    record: ImageRecord
    header_bytes: int
    reads: list[Read]


async def _images(sources: Sequence[Source], reads: Sequence[Read], report: FillReport) -> list[_Image]:
    """The reads by image, each image with its record and its holders, best first."""
    by_image: defaultdict[tuple[int, str], list[Read]] = defaultdict(list)
    for read in reads:
        by_image[read.rank, read.image].append(read)
    images = []
    for (rank, image), some in by_image.items():
        holders, record = await _holders(sources, rank, image, report)
        some.sort(key=lambda read: read.image_offset)
        header_bytes = await _header_bytes(holders, rank, image)
        images.append(_Image(holders, rank, image, record, header_bytes, some))
    return images


async def _header_bytes(holders: Sequence[Source], rank: int, image: str) -> int:
    """Size of the image's header. No tensor needs its chunks, but a load that uses an image proves it all."""
    failed: list[tuple[Source, EverstepError]] = []
    for source in holders:
        try:
            layout = await source.layout(rank)
        except _UNSERVED as error:
            failed.append((source, error))
        else:
            return next(len(spec.header) for spec in layout.images if spec.name == image)
    raise _worst(failed)


async def _holders(
    sources: Sequence[Source], rank: int, image: str, report: FillReport
) -> tuple[tuple[Source, ...], ImageRecord]:
    """Who has the image, as the first of them that can prove it knows it; the others must know it by the same
    root."""
    holders: list[Source] = []
    record: ImageRecord | None = None
    failed: list[tuple[Source, EverstepError]] = []
    for source in sources:
        if rank not in source.ranks:
            continue
        try:
            own = (await source.records(rank))[image]
            check_record(own, source.chunk_bytes, source.locate(rank, image))
            await source.check_image(rank, image)
        except KeyError:
            name = source.locate(rank, image)
            failed.append(
                (source, Damaged(f"{name} is in no vote", found="nothing", expected="a record", name=name))
            )
        except _UNSERVED as error:
            failed.append((source, error))
        else:
            if record is None:
                record = own
            if (own.root, own.nbytes) == (record.root, record.nbytes):
                holders.append(source)
    if record is None:
        if failed:
            raise _worst(failed)
        raise StateMismatch(f"no source holds image {image!r} of rank {rank}", found="nothing", rank=rank)
    for source, problem in failed:
        report.fell_back(Fallback(rank, image, 0, record.nbytes, source.label, problem, holders[0].label))
    return tuple(holders), record


def _worst(failed: Sequence[tuple[Source, EverstepError]]) -> EverstepError:
    """The error to raise when no source could serve. "Cannot tell" and "pruned" speak for a retry or another
    step, so one of them anywhere keeps the verdict from being "damaged"."""
    errors = [error for _, error in failed]
    for kind in (CannotTell, Pruned):
        for error in errors:
            if isinstance(error, kind):
                return error
    return errors[0]


def _pieces(
    images: Sequence[_Image], targets: Mapping[int, memoryview], piece_bytes: int
) -> Iterator[_Piece]:
    for image in images:
        chunk_bytes = image.holders[0].chunk_bytes
        step = max(piece_bytes // chunk_bytes, 1) * chunk_bytes
        spans = _spans(image, chunk_bytes, step)
        yield from _with_copies(image, spans)


def _spans(image: _Image, chunk_bytes: int, step: int) -> list[tuple[int, int]]:
    """Ranges of consecutive needed chunks, each at most ``step`` bytes; reads are sorted by offset."""
    nbytes = image.record.nbytes
    spans: list[tuple[int, int]] = []
    start, end = 0, min(-(-image.header_bytes // chunk_bytes) * chunk_bytes, nbytes)
    for read in image.reads:
        if read.nbytes == 0:
            continue
        stop = read.image_offset + read.nbytes
        if read.image_offset < 0 or stop > nbytes:
            raise StateMismatch(
                f"a read lies outside image {read.image!r} of rank {read.rank}",
                found=f"bytes {read.image_offset}..{stop}",
                expected=f"at most {nbytes}",
            )
        first = read.image_offset // chunk_bytes * chunk_bytes
        if first > end:
            spans.extend(_cut(start, end, step))
            start = first
        end = max(end, min(-(-stop // chunk_bytes) * chunk_bytes, nbytes))
    spans.extend(_cut(start, end, step))
    return spans


def _cut(start: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    for at in range(start, end, step):
        yield at, min(at + step, end)


def _with_copies(image: _Image, spans: Sequence[tuple[int, int]]) -> Iterator[_Piece]:
    """Pieces with the copies that they serve; a read over several pieces becomes several copies."""
    starts = [start for start, _ in spans]
    copies: list[list[Copy]] = [[] for _ in spans]
    for read in image.reads:
        at, end = read.image_offset, read.image_offset + read.nbytes
        index = bisect_right(starts, at) - 1
        while at < end:
            start, stop = spans[index]
            count = min(end, stop) - at
            copies[index].append(
                (read.entry_index, read.dest_offset + at - read.image_offset, at - start, count)
            )
            at += count
            index += 1
    for (start, stop), some in zip(spans, copies, strict=True):
        yield _Piece(image.holders, image.rank, image.image, image.record, start, stop - start, some)


async def _work(
    pieces: Iterator[_Piece],
    targets: Mapping[int, memoryview],
    pool: ThreadPoolExecutor,
    report: FillReport,
    piece_bytes: int,
) -> None:
    """Take pieces until none is left. The buffer is made when a piece first needs one."""
    loop = asyncio.get_running_loop()
    buffer: memoryview | None = None
    for piece in pieces:
        source = piece.holders[0]
        whole = source.mapped(piece.rank, piece.image)
        error: EverstepError | None = None
        if whole is not None:
            view = whole[piece.offset : piece.offset + piece.nbytes]
        else:
            if buffer is None or len(buffer) < piece.nbytes:
                buffer = aligned_buffer(max(piece_bytes, piece.nbytes))
            view = buffer[: piece.nbytes]
            error = await _try_read(source, piece, view)
        bad: list[tuple[int, bytes]] = []
        if error is None:
            bad = await loop.run_in_executor(pool, _verify_and_copy, piece, view, targets)
            report.count(source, piece.nbytes)
        if error is not None or bad:
            await _repair(piece, view, bad, error, targets, pool, report)
        report.pieces += 1
        report.nbytes += sum(copy[3] for copy in piece.copies)


async def _try_read(source: Source, piece: _Piece, view: memoryview) -> EverstepError | None:
    try:
        await source.read_into(piece.rank, piece.image, piece.offset, view)
    except _UNSERVED as error:
        return error
    return None


def _verify_and_copy(
    piece: _Piece, view: memoryview, targets: Mapping[int, memoryview]
) -> list[tuple[int, bytes]]:
    """Copy the piece's bytes if every chunk is right; else copy nothing and return the bad chunks."""
    source = piece.holders[0]
    bad = bad_chunks(view, piece.offset // source.chunk_bytes, piece.record, source.chunk_bytes)
    if not bad:
        _copy(piece.copies, view, targets)
    return bad


def _copy(copies: Sequence[Copy], view: memoryview, targets: Mapping[int, memoryview]) -> None:
    for index, at, start, count in copies:
        if count < LARGE_COPY_BYTES:
            targets[index][at : at + count] = view[start : start + count]
        else:
            _copy_large(targets[index][at : at + count], view[start : start + count])


def _copy_large(target: memoryview, source: memoryview) -> None:
    """A copy without the interpreter lock."""
    import numpy  # here, since fsck and the agent live without it

    numpy.copyto(numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8))


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
    loop = asyncio.get_running_loop()
    chunk_bytes = piece.holders[0].chunk_bytes
    whole = memoryview(bytearray(view)) if view.readonly else view
    wanted: dict[int, bytes | None] = dict(bad)
    if error is not None:
        wanted = dict.fromkeys(
            range(piece.offset // chunk_bytes, -(-(piece.offset + piece.nbytes) // chunk_bytes))
        )
    for index, found in wanted.items():
        at = index * chunk_bytes - piece.offset
        chunk = whole[at : at + chunk_bytes]
        failed: list[tuple[Source, EverstepError]] = []
        source = piece.holders[0]
        if found is not None:
            name = source.locate(piece.rank, piece.image)
            failed.append((source, changed_chunk(name, piece.record, index, found, chunk_bytes)))
        elif error is not None:
            failed.append((source, error))
        server = await _from_another(piece, index, chunk, failed, pool)
        report.count(server, len(chunk))
        for former, problem in failed:
            report.fell_back(
                Fallback(
                    piece.rank,
                    piece.image,
                    index * chunk_bytes,
                    len(chunk),
                    former.label,
                    problem,
                    server.label,
                )
            )
    await loop.run_in_executor(pool, _copy, piece.copies, whole, targets)


async def _from_another(
    piece: _Piece,
    index: int,
    chunk: memoryview,
    failed: list[tuple[Source, EverstepError]],
    pool: ThreadPoolExecutor,
) -> Source:
    """Read one chunk rightly from a holder other than the first; ``failed`` gathers those who could not."""
    loop = asyncio.get_running_loop()
    for source in piece.holders[1:]:
        try:
            await source.read_into(piece.rank, piece.image, index * source.chunk_bytes, chunk)
        except _UNSERVED as error:
            failed.append((source, error))
            continue
        bad = await loop.run_in_executor(pool, bad_chunks, chunk, index, piece.record, source.chunk_bytes)
        if not bad:
            return source
        name = source.locate(piece.rank, piece.image)
        failed.append((source, changed_chunk(name, piece.record, *bad[0], source.chunk_bytes)))
    raise _worst(failed)
