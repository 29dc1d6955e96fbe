"""Writing an image packed: chunk by chunk what it takes beside its base, streaming.

The slot's bytes are hashed first. A chunk with the hash that the base's vote has there is a reference, and the base is
not read for it; the others are coded on the pool, with the base's chunk where it can be had and is right. What comes
out is gathered and hashed, for the vote, on its way to the object.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from everstep.backends.aligned import aligned_buffer
from everstep.backends.api import Backend, Notes, Writer
from everstep.backends.points import reach
from everstep.codec.chunk import encode_chunk
from everstep.codec.segments import segments_of
from everstep.format.constants import HASH_BYTES
from everstep.format.entries import Layout
from everstep.format.hashing import ChunkHasher, chunk_hashes, digest, image_root
from everstep.format.packed import PLAIN, REFERENCE, WITH_BASE, encode_tail, tail_bytes
from everstep.format.vote import DELTA, PACKED, ImageRecord, StoredRecord

from .asking import each, writing
from .bases import RUNS_PARALLEL, UNSERVED, copy_bytes, lacking, runs_of

if TYPE_CHECKING:
    from .flush import FlushJob
    from .sources import DurableSource

log = logging.getLogger("everstep.store")

PIECE_BYTES = 4 << 20
"""What is hashed, and coded, at once (whole chunks), and one write: little enough for what one step leaves to be in the
caches when the next one wants it."""

PIECES_AHEAD = 1
"""Pieces of an image that are coded while another one is written. So an image takes two buffers of ``PIECE_BYTES`` that
are written, and one for the base's chunks and one for what comes out for each piece that is coded; besides, each thread
of the pool keeps the codec's scratch."""

SPARE_BYTES = 48 << 20
"""Buffers that are kept for the next images, and flushes: those of two images at a time. Fresh memory has to be cleared
first, which takes longer than coding what it holds."""

SMALL_BYTES = 32 << 10
"""Less is copied while the interpreter's lock is held: to have it back takes longer."""

_SPARE: list[memoryview] = []
_SPARE_LOCK = threading.Lock()

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Base:
    """What an image is coded against: its record in the base's vote, and who has it."""

    source: DurableSource
    record: ImageRecord

    def named(self) -> dict[str, Any]:
        """As the vote of a delta names it."""
        manifest = self.source.manifest
        return {
            "incarnation": manifest.incarnation,
            "step": manifest.step,
            "attempt": manifest.attempt,
            "root": self.record.root.hex(),
        }


async def write_packed(
    backend: Backend,
    job: FlushJob,
    image: str,
    name: str,
    view: memoryview,
    chunk_bytes: int,
    pool: Executor,
    *,
    layout: Layout,
    base: Base | None,
    check: Callable[[int, bytes], None],
    notes: Notes | None = None,
) -> ImageRecord:
    """Write ``view`` as the packed object ``name``; ``image`` is its name in the vote, not empty. ``check`` sees the
    hashes of each piece, from its first chunk's number on, before it leaves. Raises SaveFailed, StorageFull."""
    packing = _Packing(job, image, view, chunk_bytes, pool, layout, base)
    most = len(view) + tail_bytes(len(view), chunk_bytes)
    pending = deque(_pieces(len(view), chunk_bytes))
    ahead: deque[asyncio.Task[_Coded]] = deque()
    hashes: list[bytes] = []
    rows: list[tuple[int, int]] = []
    with writing(backend, name, step=job.step, rank=job.rank):
        writer = await backend.open_writer(name, most, notes, at_most=True)
        output = _Output(writer, chunk_bytes, pool)
        try:
            while pending or ahead:
                while pending and len(ahead) <= PIECES_AHEAD:
                    ahead.append(asyncio.ensure_future(packing.code(*pending.popleft())))
                coded = await ahead[0]
                ahead.popleft()
                check(len(rows), coded.hashes)
                hashes.append(coded.hashes)
                rows += coded.rows
                await output.put(coded.parts)
                packing.done(coded)
                if len(hashes) == 1:
                    reach("flush.image.first", name)
            await output.put([encode_tail(len(view), chunk_bytes, rows)])
            stored = await output.finish()
            packing.finish()
            reach("flush.packed.before", name)
            await writer.commit()
        except BaseException:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)
            await output.stop()
            await writer.abort()
            raise
    reach("flush.image.done", name)
    used = base if any(code in WITH_BASE for code, _ in rows) else None
    return _record(image, len(view), b"".join(hashes), stored, used)


def _record(image: str, nbytes: int, chunks: bytes, stored: StoredRecord, base: Base | None) -> ImageRecord:
    encoding = PACKED if base is None else DELTA
    named = None if base is None else base.named()
    return ImageRecord(image, nbytes, image_root(nbytes, chunks), chunks, encoding, named, stored)


@dataclass(slots=True)
class _Coded:
    """One piece: the hashes of its chunks, (encoding, bytes) of each, the payloads, and the buffers that it took, which
    are free as soon as the payloads are written."""

    hashes: bytes
    rows: list[tuple[int, int]]
    parts: list[memoryview]
    buffers: list[memoryview]


def _take(nbytes: int) -> memoryview:
    """A buffer with anything in it."""
    with _SPARE_LOCK:
        for at, spare in enumerate(_SPARE):
            if len(spare) == nbytes:
                return _SPARE.pop(at)
    return aligned_buffer(nbytes)


def _give(buffers: Sequence[memoryview]) -> None:
    """Nobody reads or writes them any more."""
    with _SPARE_LOCK:
        for buffer in buffers:
            if sum(map(len, _SPARE)) + len(buffer) <= SPARE_BYTES:
                _SPARE.append(buffer)


class _Packing:
    """One image, being coded."""

    def __init__(
        self,
        job: FlushJob,
        image: str,
        view: memoryview,
        chunk_bytes: int,
        pool: Executor,
        layout: Layout,
        base: Base | None,
    ) -> None:
        self._rank = job.rank
        self._image = image
        self._view = view
        self._chunk_bytes = chunk_bytes
        self._pool = pool
        self._layout = layout
        self._base = base
        self._free: list[memoryview] = []

    async def code(self, start: int, end: int) -> _Coded:
        """The chunks in the bytes ``start`` to ``end`` of the image."""
        size = self._chunk_bytes
        first = start // size
        hashes = await self._run(chunk_hashes, self._view[start:end], size)
        count = len(hashes) // HASH_BYTES
        changed = [at for at in range(count) if not self._is_same(first + at, hashes, at)]
        if not changed:
            return _Coded(hashes, [(REFERENCE, 0)] * count, [], [])
        buffers = [self._buffer()]
        there = set[int]()
        if self._base is not None:
            buffers.append(self._buffer())
            there = await self._read_base(self._base, first, changed, buffers[1][: end - start])

        async def one(at: int) -> tuple[int, memoryview]:
            room, *base = (buffer[at * size : at * size + size] for buffer in buffers)
            return await self._run(self._encode, first + at, base[0] if at in there else None, room)

        coded = dict(zip(changed, await each(changed, one), strict=True))
        rows: list[tuple[int, int]] = []
        parts: list[memoryview] = []
        for at in range(count):
            code, payload = coded.get(at, (REFERENCE, memoryview(b"")))
            rows.append((code, len(payload)))
            parts.append(payload)
        return _Coded(hashes, rows, parts, buffers)

    def _buffer(self) -> memoryview:
        """For the base's chunks of a piece, or what comes out; the same few again and again."""
        return self._free.pop() if self._free else _take(max(PIECE_BYTES, self._chunk_bytes))

    def done(self, coded: _Coded) -> None:
        """The piece was written."""
        self._free += coded.buffers

    def finish(self) -> None:
        """All of them were."""
        _give(self._free)

    def _is_same(self, index: int, hashes: bytes, at: int) -> bool:
        if self._base is None:
            return False
        mine = hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]
        return mine == self._base.record.chunks[index * HASH_BYTES : (index + 1) * HASH_BYTES]

    async def _read_base(self, base: Base, first: int, changed: Sequence[int], into: memoryview) -> set[int]:
        """The base's chunks where they have changed, into their places; which could be read. The others are coded
        without: nothing is wrong with the snapshot."""
        size = self._chunk_bytes
        there: set[int] = set()

        async def read(run: tuple[int, int]) -> None:
            low, high = run
            part = into[low * size : high * size]
            try:
                await base.source.read_into(self._rank, self._image, (first + low) * size, part)
            except UNSERVED as error:
                log.warning("rank %d, %s: coded without its base: %s", self._rank, self._image, error)
                lost = lacking(error)
                there.update(at for at in range(low, high) if lost and first + at not in lost)
            else:
                there.update(range(low, high))

        await each(list(runs_of(changed)), read, limit=RUNS_PARALLEL)
        return there

    def _encode(self, index: int, base: memoryview | None, room: memoryview) -> tuple[int, memoryview]:
        """Encoding and payload of a chunk: in ``room``, unless it is the chunk itself."""
        start = index * self._chunk_bytes
        chunk = self._view[start : start + self._chunk_bytes]
        if base is not None and self._base is not None:
            base = base[: len(chunk)]
            if digest(base) != self._base.record.chunks[index * HASH_BYTES : (index + 1) * HASH_BYTES]:
                name = self._base.source.locate(self._rank, self._image)
                log.warning("%s: damaged in the chunk at offset %d; coded without", name, start)
                base = None
        code, parts = encode_chunk(
            chunk, base, segments_of(self._layout, self._image, start, start + len(chunk))
        )
        if code == PLAIN:
            return code, chunk
        end = 0
        for part in parts:
            if len(part) < SMALL_BYTES:
                room[end : end + len(part)] = part
            else:
                copy_bytes(room[end : end + len(part)], memoryview(part))
            end += len(part)
        return code, room[:end]

    async def _run(self, act: Callable[..., R], *args: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._pool, act, *args)


class _Output:
    """The object's bytes on their way: gathered in two buffers, of which one is written while the other fills."""

    def __init__(self, writer: Writer, chunk_bytes: int, pool: Executor) -> None:
        self._writer = writer
        self._pool = pool
        self._hasher = ChunkHasher(chunk_bytes)
        self._buffers = [_take(PIECE_BYTES), _take(PIECE_BYTES)]
        self._filled = 0
        self._writing: asyncio.Future[None] | None = None

    async def put(self, parts: Sequence[bytes | memoryview]) -> None:
        """Take ``parts``; they may be reused when this returns."""
        todo = deque(memoryview(part) for part in parts if len(part))
        while todo:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._fill, todo)
            if self._filled == PIECE_BYTES:
                await self._send()

    def _fill(self, todo: deque[memoryview]) -> None:
        buffer = self._buffers[0]
        while todo and self._filled < PIECE_BYTES:
            part = todo.popleft()
            target = buffer[self._filled : self._filled + len(part)]
            copy_bytes(target, part[: len(target)])
            self._hasher.update(target)
            self._filled += len(target)
            if len(target) < len(part):
                todo.appendleft(part[len(target) :])

    async def _send(self) -> None:
        await self._wait()
        view = self._buffers[0][: self._filled]
        self._writing = asyncio.ensure_future(self._writer.write(view))
        self._buffers.reverse()
        self._filled = 0

    async def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def finish(self) -> StoredRecord:
        """Write what is left; the object's size and hashes."""
        if self._filled:
            await self._send()
        await self._wait()
        _give(self._buffers)
        chunks = self._hasher.finish()
        nbytes = self._hasher.nbytes
        return StoredRecord(nbytes, image_root(nbytes, chunks), chunks)

    async def stop(self) -> None:
        """Wait for what is being written, whatever comes of it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await asyncio.wait([writing])
            if not writing.cancelled():
                writing.exception()


def _pieces(nbytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    step = max(PIECE_BYTES // chunk_bytes, 1) * chunk_bytes
    return [(start, min(start + step, nbytes)) for start in range(0, nbytes, step)]
