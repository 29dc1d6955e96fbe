"""Reading packed images: chunks are decoded where they are wanted, with what their base has there.

The base of a delta is another checkpoint, which may be a delta itself. It is looked for in several places, the nearest
first; each of its chunks that is used is proved by its own vote, and one that is wrong is fetched from the next holder.
Two buffers of a piece are enough for a chain of any length: what a level decodes into is where the level below it puts
its own base meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from everstep.backends.aligned import BLOCK, aligned_buffer, round_down, round_up
from everstep.backends.parallel import both, heard
from everstep.codec.chunk import decode_chunk
from everstep.errors import CannotTell, Damaged, EverstepError, Pruned
from everstep.format import names
from everstep.format.packed import PLAIN, REFERENCE, WITH_BASE, Table, decode_tail, tail_bytes
from everstep.format.vote import ImageRecord
from everstep.memory.errors import ArenaGone, SlotGone

from .asking import each
from .proving import bad_chunks, changed_chunk

if TYPE_CHECKING:
    from .sources import Source

log = logging.getLogger("everstep.store")

CHAIN_MAX = 64
"""Longest chain of bases that is followed."""

PIECE_BYTES = 8 << 20
"""What is decoded at once, or one chunk where chunks are larger: one read of payloads, one of the base."""

PIECES_MAX = 8
"""Most pieces that are decoded side by side by all readers of one :class:`Bases`. Each takes three times
``PIECE_BYTES``: the base's chunks, payloads, and those of the levels below (one at a time)."""

KEPT_MAX = 64
"""Checkpoints whose holders, with the votes that they have read, are remembered."""

CHECKED_MAX = 1 << 16
"""Images that are known to be there."""

RUNS_PARALLEL = 4
"""Stretches of one piece that are read from the base side by side."""

UNSERVED = (Damaged, CannotTell, Pruned, SlotGone, ArenaGone)
"""Errors of one holder that another may make good."""

LACKING = "lacking"
"""Field of an error: the numbers of an image's chunks whose base nobody has right. All others of what was to be read
were decoded."""


Key = tuple[int, int]
"""(incarnation, step)"""

Finder = Callable[[Key], Awaitable["Source | None"]]
"""One place: its holder of a checkpoint, None if it has none. May raise what holders do."""


@dataclass(frozen=True, slots=True)
class PackedObject:
    """The object of one packed image; ``read`` fills a view with its bytes from an offset on."""

    name: str
    rank: int
    record: ImageRecord
    chunk_bytes: int
    read: Callable[[int, memoryview], Awaitable[None]]


@runtime_checkable
class Chained(Protocol):
    """A holder whose images may be packed themselves."""

    async def read_chained(
        self, rank: int, image: str, offset: int, view: memoryview, spare: memoryview, depth: int
    ) -> None:
        """As ``read_into``, of whole chunks; ``spare`` is as long, and free to use."""
        ...


class Bases:
    """Finds bases, and decodes with them. Belongs to one event loop."""

    def __init__(self) -> None:
        self._finders: list[Finder] = []
        self._found: OrderedDict[Key, asyncio.Task[list[Source]]] = OrderedDict()
        self._checked: set[tuple[Key, int, str, str]] = set()
        # More than two for a core only make more memory be touched for the first time.
        self._room = asyncio.Semaphore(min(PIECES_MAX, 2 * len(os.sched_getaffinity(0))))
        self._free: list[memoryview] = []
        self._told: set[tuple[Key, str]] = set()

    def add(self, finder: Finder, *, nearest: bool = False) -> None:
        """One more place to look at, behind those before, or before them."""
        self._finders.insert(0 if nearest else len(self._finders), finder)

    async def sources(self, key: Key) -> list[Source]:
        """The holders of the checkpoint, nearest first, at least one. Raises Damaged where it is nowhere, CannotTell
        where a place that might have it did not answer."""
        task = self._found.get(key)
        if task is None:
            task = self._found[key] = asyncio.ensure_future(self._look(key))
            task.add_done_callback(heard)
            while len(self._found) > KEPT_MAX:
                self._found.popitem(last=False)
        try:
            return await asyncio.shield(task)
        except EverstepError:
            self._forget(key, task)
            raise

    async def _look(self, key: Key) -> list[Source]:
        found: list[Source] = []
        errors: list[EverstepError] = []
        for finder in self._finders:
            try:
                source = await finder(key)
            except UNSERVED as error:
                errors.append(error)
            else:
                if source is not None:
                    found.append(source)
        if not found:
            raise _missing(key, errors)
        return found

    def _forget(self, key: Key, task: asyncio.Task[list[Source]] | None = None) -> None:
        if task is None or self._found.get(key) is task:
            self._found.pop(key, None)

    async def check(self, delta: ImageRecord, rank: int, name: str) -> None:
        """Whether some holder has the image that ``delta``, called ``name``, is based on, and what that is based on
        itself; no bytes of it are read, and what was there once is not asked for again. Raises Damaged (of the base),
        CannotTell."""
        assert delta.base is not None
        key = delta.base["incarnation"], delta.base["step"]
        asked = key, rank, delta.name, str(delta.base["root"])
        if asked in self._checked:
            return

        async def ask(source: Source) -> None:
            await _record_at(source, delta, rank)
            await source.check_image(rank, delta.name)

        await self._from_one(delta, name, ask)
        if len(self._checked) >= CHECKED_MAX:
            self._checked.clear()
        self._checked.add(asked)

    async def _from_one(
        self, delta: ImageRecord, name: str, ask: Callable[[Source], Coroutine[object, object, None]]
    ) -> None:
        """``ask`` the holders of the base until one does. A base whose attempt was replaced meanwhile, as a synthetic
        full does, is looked for anew, once."""
        key = delta.base_key
        assert key is not None
        for last in (False, True):
            errors: list[EverstepError] = []
            sources = await self.sources(key)
            for source, follows in zip(sources, [*sources[1:], None], strict=True):
                try:
                    await ask(source)
                    return
                except UNSERVED as error:
                    errors.append(error)
                    if follows is not None:
                        self._tell(key, source, error)
            if last or not any(isinstance(error, Pruned) for error in errors):
                raise _worst(delta, name, errors)
            self._forget(key)

    def _tell(self, key: Key, source: Source, error: EverstepError) -> None:
        if (key, source.label) not in self._told:
            self._told.add((key, source.label))
            log.warning("step %d, a base: another holder than %s is asked: %s", key[1], source.label, error)

    # -- decoding

    async def read_into(self, packed: PackedObject, table: Table, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the image's bytes from ``offset`` on. Chunks whose payload cannot be decoded are left
        wrong, for whoever reads compares them with their hashes; Damaged names the object where it ends too early, or
        the base whose chunk nobody has right: then the others are read, and :func:`lacking` tells which are not."""
        chunk_bytes, nbytes = table.chunk_bytes, table.nbytes
        if offset + len(view) > nbytes:
            raise Damaged(
                f"{packed.name}: ends too early",
                found=f"an image of {nbytes} bytes",
                expected=f"{offset + len(view)} bytes at least",
                name=packed.name,
                offset=offset,
            )

        lost = _Lost()

        async def one(piece: tuple[int, int]) -> None:
            first, end = piece
            begin, stop = first * chunk_bytes, min(end * chunk_bytes, nbytes)
            async with self._room:
                # Given back only when all went well: a thread may still be at work in a buffer after a cancellation.
                spare = self._take(stop - begin)
                if offset <= begin and stop <= offset + len(view):
                    out = view[begin - offset : stop - offset]
                    with lost.caught():
                        await self._decode(packed, table, first, end, out, spare, 0)
                else:  # chunks that are wanted in part
                    out = self._take(stop - begin)
                    with lost.caught():
                        await self._decode(packed, table, first, end, out[: stop - begin], spare, 0)
                    low, high = max(begin, offset), min(stop, offset + len(view))
                    view[low - offset : high - offset] = out[low - begin : high - begin]
                    self._give(out)
                self._give(spare)

        await each(_pieces(offset, len(view), chunk_bytes), one, limit=2)
        lost.tell()

    async def decode(
        self,
        packed: PackedObject,
        table: Table,
        offset: int,
        out: memoryview,
        spare: memoryview,
        depth: int,
    ) -> None:
        """As :meth:`read_into`, of whole chunks, and with a buffer as long as ``out`` to use: for a chain's lower
        levels."""
        first = offset // table.chunk_bytes
        end = first + -(-len(out) // table.chunk_bytes)
        await self._decode(packed, table, first, end, out, spare, depth)

    async def _decode(
        self,
        packed: PackedObject,
        table: Table,
        first: int,
        end: int,
        out: memoryview,
        spare: memoryview,
        depth: int,
    ) -> None:
        """The chunks ``first`` to ``end`` into ``out``; ``spare`` is as long at least, and free to use."""
        codes = table.encodings[first:end]
        if all(code == REFERENCE for code in codes):
            await self._base(packed, first, end, out, spare, depth)
            return
        lost = _Lost()
        runs = list(runs_of([first + at for at, code in enumerate(codes) if code in WITH_BASE]))

        async def base(run: tuple[int, int]) -> None:
            low = (run[0] - first) * table.chunk_bytes
            high = min((run[1] - first) * table.chunk_bytes, len(out))
            with lost.caught():
                await self._base(packed, *run, spare[low:high], out[low:high], depth)

        nbytes = _payload_room(table, first, end)
        if depth:  # one level after the other, so that all of them together take no more than one
            await each(runs, base, limit=RUNS_PARALLEL)
            payload = await _read_payload(packed, table, first, end, aligned_buffer(nbytes))
            await asyncio.to_thread(
                _unpack, Fetched(packed, table, first, spare, payload), end, out, lost.chunks
            )
            lost.tell()
            return
        buffer = self._take(nbytes)
        payload, _ = await both(
            _read_payload(packed, table, first, end, buffer), each(runs, base, limit=RUNS_PARALLEL)
        )
        await asyncio.to_thread(_unpack, Fetched(packed, table, first, spare, payload), end, out, lost.chunks)
        self._give(buffer)
        lost.tell()

    # -- fetching

    async def fetch(
        self, packed: PackedObject, table: Table, offset: int, nbytes: int, buffer: memoryview
    ) -> Fetched:
        """What the whole chunks from ``offset`` on are decoded from, in ``buffer`` (of :func:`fetched_room`)."""
        chunk_bytes = table.chunk_bytes
        first = offset // chunk_bytes
        end = first + -(-nbytes // chunk_bytes)
        base, room = buffer[:nbytes], buffer[round_up(nbytes) :]
        codes = table.encodings[first:end]
        runs = list(runs_of([first + at for at, code in enumerate(codes) if code in WITH_BASE]))

        async def read(run: tuple[int, int]) -> None:
            low = (run[0] - first) * chunk_bytes
            await self._fetch_base(packed, *run, base[low : (run[1] - first) * chunk_bytes])

        payload, _ = await both(
            _read_payload(packed, table, first, end, room), each(runs, read, limit=RUNS_PARALLEL)
        )
        return Fetched(packed, table, first, base, payload)

    async def _fetch_base(self, packed: PackedObject, first: int, end: int, out: memoryview) -> None:
        """The base's chunks ``first`` to ``end`` into ``out``: proved only where the base is a delta itself."""
        record, at = packed.record, first * packed.chunk_bytes

        async def ask(source: Source) -> None:
            await _record_at(source, record, packed.rank)
            await source.read_into(packed.rank, record.name, at, out)

        if record.base is None:
            raise _no_base(packed.name)
        await self._from_one(record, packed.name, ask)

    async def _base(
        self, packed: PackedObject, first: int, end: int, out: memoryview, spare: memoryview, depth: int
    ) -> None:
        """The base's chunks ``first`` to ``end`` into ``out``, proved. Damaged says which are :func:`lacking`."""
        record = packed.record
        if record.base is None:
            raise _no_base(packed.name)
        if depth >= CHAIN_MAX:
            raise Damaged(
                f"{packed.name}: a chain of bases that is too long",
                found=f"more than {CHAIN_MAX}",
                expected="a full image before",
                name=packed.name,
            )
        missing = list(range(first, end))

        async def ask(source: Source) -> None:
            base = await _record_at(source, record, packed.rank)
            bad: list[tuple[int, bytes]] = []
            below = _Lost()
            for low, high in list(runs_of(missing)):
                begin = (low - first) * packed.chunk_bytes
                stop = min((high - first) * packed.chunk_bytes, len(out))
                part, free = out[begin:stop], spare[begin:stop]
                at = low * packed.chunk_bytes
                with below.caught():
                    if isinstance(source, Chained):
                        await source.read_chained(packed.rank, record.name, at, part, free, depth + 1)
                    else:
                        await source.read_into(packed.rank, record.name, at, part)
                bad += await asyncio.to_thread(bad_chunks, part, low, base, packed.chunk_bytes)
            missing[:] = [index for index, _ in bad]
            if bad:
                below.tell()
                raise changed_chunk(
                    source.locate(packed.rank, record.name), base, *bad[0], packed.chunk_bytes
                )

        try:
            await self._from_one(record, packed.name, ask)
        except Damaged as error:
            raise _lacking(error, missing) from error

    def _take(self, nbytes: int) -> memoryview:
        """A buffer of ``nbytes`` at least; fresh memory is slow."""
        if self._free and len(self._free[-1]) >= nbytes:
            return self._free.pop()
        return aligned_buffer(max(nbytes, PIECE_BYTES + 2 * BLOCK))

    def _give(self, buffer: memoryview) -> None:
        if len(self._free) < 2 * PIECES_MAX:
            self._free.append(buffer)


class _Lost:
    """Chunks whose base nobody has right, while all others are read."""

    def __init__(self) -> None:
        self.chunks: set[int] = set()
        self._errors: list[Damaged] = []

    @contextmanager
    def caught(self) -> Iterator[None]:
        """An error that tells which chunks are lacking comes later, by :meth:`tell`."""
        try:
            yield
        except Damaged as error:
            if not lacking(error):
                raise
            self._errors.append(error)
            self.chunks.update(lacking(error))

    def tell(self) -> None:
        """Raises the error of the first such chunk, if there is one."""
        if self._errors:
            raise _lacking(min(self._errors, key=lambda error: min(lacking(error))), self.chunks)


def lacking(error: EverstepError | None) -> Collection[int]:
    """The chunks of the image that was read that alone could not be had; none where that is not so of others."""
    return error.fields.get(LACKING, ()) if error is not None else ()


def _lacking(error: Damaged, chunks: Collection[int]) -> Damaged:
    fields = {**error.fields, LACKING: tuple(sorted(chunks))}
    return Damaged(error.message, found=error.found, expected=error.expected, hint=error.hint, **fields)


def _pieces(offset: int, nbytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of chunks, about ``PIECE_BYTES`` each, in which the bytes lie."""
    step = max(PIECE_BYTES // chunk_bytes, 1)
    first, end = offset // chunk_bytes, -(-(offset + nbytes) // chunk_bytes)
    for start in range(first, end, step):
        yield start, min(start + step, end)


def runs_of(indexes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending indexes as ranges."""
    at = 0
    while at < len(indexes):
        begin = end = indexes[at]
        while at < len(indexes) and indexes[at] == end:
            end, at = end + 1, at + 1
        yield begin, end


@dataclass(frozen=True, slots=True)
class Fetched:
    """Chunks of a packed image from ``first`` on, as they were read: their payloads, and what the base has there, where
    they need it. Nothing of it is proved."""

    packed: PackedObject
    table: Table
    first: int
    base: memoryview
    payload: memoryview

    def chunk(self, index: int, room: memoryview) -> memoryview:
        """The bytes of chunk ``index``, in ``room`` (of their size) unless they lie there as they are. Raises Damaged
        where the payload cannot be decoded."""
        table = self.table
        at = (index - self.first) * table.chunk_bytes
        base = self.base[at : at + len(room)]
        code = table.encodings[index]
        if code == REFERENCE:
            return base
        start = table.begins[self.first]
        begin, stop = table.span(index, index + 1)
        payload = self.payload[begin - start : stop - start]
        if code == PLAIN:
            return payload
        decode_chunk(code, payload, base if code in WITH_BASE else None, room)
        return room


def fetched_room(nbytes: int) -> int:
    """What fetching ``nbytes`` of whole chunks takes: their base, and payloads that are no smaller than they are."""
    return 2 * round_up(nbytes) + 2 * BLOCK


def _payload_room(table: Table, first: int, end: int) -> int:
    """Bytes that :func:`_read_payload` needs."""
    begin, stop = table.span(first, end)
    return stop - begin + 2 * BLOCK


async def _read_payload(
    packed: PackedObject, table: Table, first: int, end: int, room: memoryview
) -> memoryview:
    """The payloads of the chunks ``first`` to ``end``, read into ``room``, which is page-aligned: with all of the
    blocks in which they lie, as direct I/O asks for."""
    begin, stop = table.span(first, end)
    low = round_down(begin)
    if stop > begin:
        await packed.read(low, room[: min(round_up(stop), packed.record.object.nbytes) - low])
    return room[begin - low : stop - low]


def _unpack(fetched: Fetched, end: int, out: memoryview, lost: Collection[int]) -> None:
    """Decode the chunks up to ``end`` into ``out``, but for the ``lost`` ones."""
    chunk_bytes = fetched.table.chunk_bytes
    for index in range(fetched.first, end):
        if index in lost:
            continue
        at = (index - fetched.first) * chunk_bytes
        room = out[at : at + chunk_bytes]
        try:
            chunk = fetched.chunk(index, room)
        except Damaged as error:
            name, offset = fetched.packed.name, index * chunk_bytes
            log.warning("%s: the chunk at offset %d cannot be decoded: %s", name, offset, error)
        else:
            if chunk is not room:
                copy_bytes(room, chunk)


async def open_table(packed: PackedObject) -> Table:
    """The table of a packed image, proved by its hash. Raises Damaged, UnknownFormat, and what reading does."""
    record = packed.record
    stored = record.object.nbytes
    size = tail_bytes(record.nbytes, packed.chunk_bytes)
    if stored < size:
        name = packed.name
        raise Damaged(f"{name}: too small for its table", found=stored, expected=size, name=name)
    tail = bytearray(size)
    await packed.read(stored - size, memoryview(tail))
    return await asyncio.to_thread(
        decode_tail, bytes(tail), record.nbytes, packed.chunk_bytes, stored, packed.name
    )


async def _record_at(source: Source, delta: ImageRecord, rank: int) -> ImageRecord:
    """The holder's record of the base's image; Damaged unless it is the very one that ``delta`` names."""
    assert delta.base is not None
    records = await source.records(rank) if rank in source.ranks else {}
    base = records.get(delta.name)
    found = None if base is None else (base.root.hex(), base.nbytes)
    expected = (delta.base["root"], delta.nbytes)
    if base is None or found != expected or not source.has(rank, delta.name):
        name = source.locate(rank, delta.name)
        raise Damaged(f"{name}: not the base that was used", found=found, expected=expected, name=name)
    return base


def _worst(delta: ImageRecord, name: str, errors: Sequence[EverstepError]) -> EverstepError:
    """What to raise when no holder of the base could serve. Where one could not be asked nothing is known to be
    damaged. A base that was removed while its delta stands is damage of that."""
    for error in errors:
        if isinstance(error, CannotTell):
            return error
    damaged = [error for error in errors if isinstance(error, Damaged)]
    if damaged:
        return damaged[0]
    assert delta.base_key is not None
    incarnation, step = delta.base_key
    place = names.checkpoint_dir(step, incarnation)
    return Damaged(
        f"{name}: its base, step {step} of incarnation {incarnation}, cannot be read",
        found=str(errors[0]) if errors else "no holder",
        expected="the base of a delta",
        name=place,
    )


def _missing(key: Key, errors: Sequence[EverstepError]) -> EverstepError:
    """What to raise where no place has the base; what one could not tell, or has damaged, says more."""
    for kind in (CannotTell, Damaged):
        for error in errors:
            if isinstance(error, kind):
                return error
    name = names.checkpoint_dir(key[1], key[0])
    return Damaged(
        f"{name}: the base of a delta is missing",
        found=str(errors[0]) if errors else "nothing that counts",
        expected=f"step {key[1]} of incarnation {key[0]}",
        name=name,
    )


def _no_base(name: str) -> Damaged:
    return Damaged(f"{name} refers to a base, and has none", found="no base", expected="one", name=name)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """A copy without the interpreter lock."""
    import numpy  # here, since fsck and the agent live without it

    numpy.copyto(numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8))
