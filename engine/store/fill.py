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
from everstep.plan.reads import Range, Read, chunk_ranges, clip

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

    def add(self, other: FillReport) -> None:
        """Take in what another filling did."""
        self.nbytes += other.nbytes
        self.pieces += other.pieces
        for label, nbytes in other.read_bytes.items():
            self.read_bytes[label] = self.read_bytes.get(label, 0) + nbytes
        more = other.fallbacks_count - len(other.fallbacks)
        for fallback in other.fallbacks:
            self.fell_back(fallback)
        self.fallbacks_count += more

    def count(self, source: Source, nbytes: int) -> None:
        self.read_bytes[source.label] = self.read_bytes.get(source.label, 0) + nbytes

    def fell_back(self, fallback: Fallback) -> None:
        self.fallbacks_count += 1
        if len(self.fallbacks) < FALLBACKS_MAX:
            self.fallbacks.append(fallback)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive chunks of one image, and the reads that lie inside them."""

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
) -> FillReport:
    """Do the ``reads`` into ``targets`` (writable flat views by entry index), from ``sources`` of one
    checkpoint, best first.

    The headers of the images that are used are proved too, unless ``headers`` is False. At most ``parallel``
    pieces of ``piece_bytes`` are in memory. On an error the targets hold a mixture: what was copied was
    proved, the rest is untouched. Raises Damaged (naming object, offset, found, expected) when no source has a
    chunk right, Pruned, CannotTell, SlotGone.
    """
    _check_sources(sources)
    report = FillReport()
    pieces = _pieces(await images_of(sources, reads, report, headers=headers), piece_bytes)
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
class Image:
    """What is read of one image: who has it, best first, its record, and the reads, by offset. ``head`` are the
    bytes at its begin that are proved whether or not a read needs them."""

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
    images = []
    for (rank, image), some in by_image.items():
        holders, record = await _holders(sources, rank, image, report)
        some.sort(key=lambda read: read.image_offset)
        head = await _header_bytes(holders, rank, image) if headers else 0
        images.append(Image(holders, rank, image, record, head, some))
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


def _pieces(images: Sequence[Image], piece_bytes: int) -> Iterator[_Piece]:
    for image in images:
        chunk_bytes = image.holders[0].chunk_bytes
        step = max(piece_bytes // chunk_bytes, 1) * chunk_bytes
        spans = [(at, min(at + step, end)) for begin, end in image.ranges() for at in range(begin, end, step)]
        yield from _with_reads(image, spans)


def _with_reads(image: Image, spans: Sequence[Range]) -> Iterator[_Piece]:
    """Pieces with what they serve; a read over several pieces is clipped to each of them."""
    starts = [start for start, _ in spans]
    served: list[list[Read]] = [[] for _ in spans]
    for read in image.reads:
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
    for (start, stop), some in zip(spans, served, strict=True):
        yield _Piece(image.holders, image.rank, image.name, image.record, start, stop - start, some)


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
        report.nbytes += sum([read.nbytes * read.runs for read in piece.reads])


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
        _copy(piece, view, targets)
    return bad


def _copy(piece: _Piece, view: memoryview, targets: Mapping[int, memoryview]) -> None:
    for index, _, _, offset, nbytes, dest, count, image_stride, dest_stride in piece.reads:
        start = offset - piece.offset
        if count > 1:
            strides = image_stride, dest_stride
            _copy_runs(targets[index][dest:], view[start:], nbytes, count, strides)
        elif nbytes < LARGE_COPY_BYTES:
            targets[index][dest : dest + nbytes] = view[start : start + nbytes]
        else:
            _copy_large(targets[index][dest : dest + nbytes], view[start : start + nbytes])


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
    await loop.run_in_executor(pool, _copy, piece, whole, targets)


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
