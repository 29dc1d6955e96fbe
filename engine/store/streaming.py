"""From a source to a writer, piece by piece, every chunk compared with its hash on the way."""

from __future__ import annotations

import asyncio
import mmap
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from everstep.backends.api import Writer
from everstep.format.vote import ImageRecord, StoredRecord

from .proving import bad_chunks, changed_chunk, check_record

PIECE_BYTES = 8 << 20
"""One read, one hash and one write; at least a chunk."""

PIECES_AHEAD = 2
"""Pieces that are read while another one is written. So what is streamed takes one more than this times ``PIECE_BYTES``
of memory."""

ReadInto = Callable[[int, memoryview], Awaitable[None]]
"""Fills a view with the bytes from an offset on."""


@dataclass(slots=True)
class Streaming:
    """Streams of one run; ``pool`` hashes. Buffers are used again by the next."""

    chunk_bytes: int
    pool: Executor
    told: Callable[[int], None] | None = None
    """Hears of bytes that have been written."""
    reached: Callable[[str], None] | None = None
    """Called with the name when a piece has been written."""
    _buffers: list[mmap.mmap] = field(default_factory=list)

    @property
    def _step(self) -> int:
        return max(PIECE_BYTES // self.chunk_bytes, 1) * self.chunk_bytes

    async def copy(
        self, read: ReadInto, record: ImageRecord | StoredRecord, name: str, writer: Writer
    ) -> None:
        """Write all that ``record`` is of; it is called ``name`` in errors. Raises Damaged, and what reading and
        writing do; then nothing is read any more. The writer is the caller's to commit or abort."""
        check_record(record, self.chunk_bytes, name)
        nbytes, step = record.nbytes, self._step
        pending = deque((start, min(start + step, nbytes)) for start in range(0, nbytes, step))
        ahead: deque[asyncio.Task[memoryview]] = deque()
        used: deque[mmap.mmap] = deque()
        try:
            while pending or ahead:
                while pending and len(ahead) <= PIECES_AHEAD:
                    used.append(self._buffers.pop() if self._buffers else mmap.mmap(-1, step))
                    piece = self._piece(read, record, name, used[-1], *pending.popleft())
                    ahead.append(asyncio.ensure_future(piece))
                view = await ahead[0]
                ahead.popleft()
                await writer.write(view)
                if self.reached is not None:
                    self.reached(name)
                if self.told is not None:
                    self.told(len(view))
                self._buffers.append(used.popleft())
        except BaseException:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)
            raise

    async def prove(self, read: ReadInto, record: ImageRecord | StoredRecord, name: str) -> None:
        """Read all that ``record`` is of. Raises Damaged, and what reading does."""
        check_record(record, self.chunk_bytes, name)
        step = self._step
        buffer = self._buffers.pop() if self._buffers else mmap.mmap(-1, step)
        try:
            for start in range(0, record.nbytes, step):
                await self._piece(read, record, name, buffer, start, min(start + step, record.nbytes))
        finally:
            self._buffers.append(buffer)

    async def _piece(
        self,
        read: ReadInto,
        record: ImageRecord | StoredRecord,
        name: str,
        buffer: mmap.mmap,
        start: int,
        end: int,
    ) -> memoryview:
        """The bytes ``start`` to ``end``, proved."""
        view = memoryview(buffer)[: end - start]
        await read(start, view)
        loop = asyncio.get_running_loop()
        first = start // self.chunk_bytes
        bad = await loop.run_in_executor(self.pool, bad_chunks, view, first, record, self.chunk_bytes)
        if bad:
            raise changed_chunk(name, record, *bad[0], self.chunk_bytes)
        return view
