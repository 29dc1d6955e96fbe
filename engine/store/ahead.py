"""Reading the beginnings of a rank's images before it is known where their bytes go.

While a load reads the layout and compares it with what it fills, the disk would have nothing to do. What is read
meanwhile is proved and copied as all else, by :mod:`.fill`, in whose place of the first pieces it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from everstep.backends.aligned import aligned_buffer
from everstep.backends.parallel import ended
from everstep.format.vote import STATE_IMAGE, ImageRecord

from .bases import Fetched
from .blocking import run_blocking
from .pieces import InFlight, Piece, buffer_bytes, in_flight, step_of
from .sources import DurableSource, Source

START_S = 0.001
"""Until reading has begun in its threads: whoever decodes and plans in Python meanwhile would keep them from the
interpreter's lock for up to 5 ms each time that they ask for it."""

Key = tuple[int, str, int]
"""Of a piece: rank, image, offset."""


@dataclass(slots=True)
class Early:
    """A piece that is being read. ``buffer`` belongs to whoever took it; it holds the bytes once ``reading`` is
    done, and none that count where that fails. What is read of a packed image is told by the result."""

    buffer: memoryview
    nbytes: int
    reading: asyncio.Task[Fetched | None]


@dataclass(slots=True)
class Ahead:
    """The first pieces of a rank's images: as many, and as large, as a filling has in memory (``most``), so that one
    which takes them over needs no more. Nothing until :meth:`begin`; who made it calls :meth:`end`, whatever
    happens."""

    most: InFlight | None = None
    _source: Source | None = None
    _early: dict[Key, Early] = field(default_factory=dict)
    _starting: asyncio.Task[None] | None = None

    def begin(self, sources: Sequence[Source], rank: int) -> None:
        """Start to read the images of ``rank`` from the first of ``sources`` that has the rank, if that is a
        durable tier. What fails is told to whoever needs it."""
        most = self.most = self.most or in_flight(sources)
        first = next((source for source in sources if rank in source.ranks), None)
        if isinstance(first, DurableSource):
            run_blocking(self._begin(first, rank, most))

    def end(self) -> None:
        """Nothing is read any more, and no memory held, but for what was taken."""
        if self._source is not None:
            run_blocking(self._drop())

    async def first(self, pieces: Sequence[Piece]) -> list[Piece]:
        """``pieces``, first those that are being read. The rest of what is being read is dropped."""
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        found = [piece for piece in pieces if self._has(piece)]
        taken = {_key(piece) for piece in found}
        await self._drop(taken)
        return found + [piece for piece in pieces if _key(piece) not in taken]

    def take(self, piece: Piece) -> Early | None:
        """What is being read of the piece, which is the caller's from now on."""
        return self._early.pop(_key(piece)) if self._early and self._has(piece) else None

    def _has(self, piece: Piece) -> bool:
        early = self._early.get(_key(piece))
        return early is not None and piece.holders[0] is self._source and piece.nbytes <= early.nbytes

    async def _begin(self, source: DurableSource, rank: int, most: InFlight) -> None:
        self._source = source
        self._starting = asyncio.ensure_future(self._start(source, rank, most))
        await asyncio.wait([self._starting])
        await asyncio.sleep(START_S)

    async def _start(self, source: DurableSource, rank: int, most: InFlight) -> None:
        await source.expect(rank)  # what a load looks at before it can plan must not queue behind much
        records = await source.records(rank)
        places = list(islice(_places(records.values(), most.piece_bytes, source.chunk_bytes), most.pieces))
        # All memory first: mapping it would wait for reads that are just getting their pages.
        buffers = [aligned_buffer(buffer_bytes(record, nbytes)) for record, _, nbytes in places]
        for (record, at, nbytes), buffer in zip(places, buffers, strict=True):
            reading = asyncio.ensure_future(_read(source, rank, record, at, nbytes, buffer))
            self._early[rank, record.name, at] = Early(buffer, nbytes, reading)

    async def _drop(self, taken: Collection[Key] = ()) -> None:
        """Give up what is not ``taken``: no thread touches its buffers any more when this returns."""
        if self._starting is not None:
            await ended([self._starting])
        await ended([self._early.pop(key).reading for key in list(self._early) if key not in taken])


async def _read(
    source: DurableSource, rank: int, record: ImageRecord, at: int, nbytes: int, buffer: memoryview
) -> Fetched | None:
    if record.stored is not None:
        return await source.fetch(rank, record.name, at, nbytes, buffer)
    await source.read_into(rank, record.name, at, buffer[:nbytes])
    return None


def _places(
    records: Iterable[ImageRecord], piece_bytes: int, chunk_bytes: int
) -> Iterator[tuple[ImageRecord, int, int]]:
    """Image, offset and size of pieces as a filling makes them of whole images."""
    for record in records:
        if record.name != STATE_IMAGE:
            step = step_of(record, piece_bytes, chunk_bytes)
            for at in range(0, record.nbytes, step):
                yield record, at, min(step, record.nbytes - at)


def _key(piece: Piece) -> Key:
    return piece.rank, piece.image, piece.offset
