"""What changed between two checkpoints of a run: by tensor, whatever the parallelism was at either.

Bytes whose chunks have the same hashes in both, at the same places, are equal without being read. The rest is read
in pieces of bounded size, proved as a load proves it, and compared.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from everstep.format.constants import HASH_BYTES
from everstep.format.dtypes import itemsize_bits
from everstep.format.entries import Box, Entry, Layout, Scope
from everstep.format.vote import ImageRecord
from everstep.plan.reads import Read, plan_reads
from msgspec import structs

from .asking import each
from .fill import fill
from .numbers import Change, compare, count_same, is_numeric
from .sources import DurableSource

SLAB_BYTES = 1 << 20
"""Pieces of a tensor that are found equal by hashes, or compared: about a chunk. A larger row is one piece."""

BATCH_BYTES = 64 << 20
"""Most bytes that are read at once, of either checkpoint."""

Records = dict[int, dict[str, ImageRecord]]


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """A tensor of the job (``rank`` is -1), or a rank's own."""

    part: str
    key: str
    rank: int = -1


@dataclass(frozen=True, slots=True)
class Kind:
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(slots=True)
class Changes:
    """``only_before`` and ``only_after`` are in one of the two alone; ``retyped`` have another dtype or shape in
    each; all others are in ``tensors``, in the order of the later one's layouts."""

    tensors: dict[Name, tuple[Kind, Change]] = field(default_factory=dict)
    only_before: dict[Name, Kind] = field(default_factory=dict)
    only_after: dict[Name, Kind] = field(default_factory=dict)
    retyped: dict[Name, tuple[Kind, Kind]] = field(default_factory=dict)
    read_bytes: int = 0
    """Read of either of the two."""


@dataclass(slots=True)
class _Side:
    source: DurableSource
    layouts: list[Layout]
    records: Records
    tensors: dict[Name, Entry]


@dataclass(frozen=True, slots=True)
class _Slab:
    """A piece of a tensor, to be compared: ``entry`` has its box alone."""

    name: Name
    entry: Entry
    nbytes: int


async def changes_between(
    before: DurableSource,
    after: DurableSource,
    *,
    parts: Collection[str] | None = None,
    told: Callable[[int, int], None] | None = None,
) -> Changes:
    """Compare two checkpoints, or ``parts`` of them. ``told`` hears the bytes that were compared since, and all.

    Raises Damaged, Pruned, CannotTell, UnknownFormat.
    """
    old, new = await _side(before, parts), await _side(after, parts)
    found = Changes()
    for name, entry in old.tensors.items():
        if name not in new.tensors:
            found.only_before[name] = _kind(entry)
    both: list[Name] = []
    for name, entry in new.tensors.items():
        kind = _kind(entry)
        former = old.tensors.get(name)
        if former is None:
            found.only_after[name] = kind
        elif _kind(former) != kind:
            found.retyped[name] = _kind(former), kind
        else:
            found.tensors[name] = kind, Change(numeric=is_numeric(kind.dtype))
            both.append(name)
    total = sum(_nbytes(new.tensors[name]) for name in both)
    async for nbytes in _compare_all(old, new, both, found):
        if told is not None:
            told(nbytes, total)
    return found


async def _side(source: DurableSource, parts: Collection[str] | None) -> _Side:
    ranks = sorted(source.ranks)
    layouts = list(await each(ranks, source.layout))
    records = dict(zip(ranks, await each(ranks, source.records), strict=True))
    tensors: dict[Name, Entry] = {}
    for rank, layout in zip(ranks, layouts, strict=True):
        for entry in layout.entries:
            if parts is not None and entry.part not in parts:
                continue
            if entry.scope is Scope.GLOBAL:
                tensors.setdefault(Name(entry.part, entry.key), entry)
            elif entry.image is not None:
                tensors[Name(entry.part, entry.key, rank)] = entry
    return _Side(source, layouts, records, tensors)


def _kind(entry: Entry) -> Kind:
    return Kind(entry.dtype, entry.shape)


def _nbytes(entry: Entry) -> int:
    return (itemsize_bits(entry.dtype) * Box.full(entry.shape).volume + 7) // 8


async def _compare_all(old: _Side, new: _Side, both: Sequence[Name], found: Changes) -> AsyncIterator[int]:
    """Compare batch by batch; gives the bytes of each."""
    groups: defaultdict[int, list[_Slab]] = defaultdict(list)
    for name in both:
        groups[name.rank] += _slabs(name, new.tensors[name])
    for rank, slabs in groups.items():
        reader = rank if rank >= 0 else None
        entries = [slab.entry for slab in slabs]
        reads = [_by_entry(plan_reads(entries, side.layouts, reader), len(entries)) for side in (old, new)]
        batch: list[int] = []
        size = 0
        for at, slab in enumerate(slabs):
            change = found.tensors[slab.name][1]
            if _equal_unread(old, new, reads[0][at], reads[1][at]):
                count_same(change, slab.nbytes, itemsize_bits(slab.entry.dtype))
                yield slab.nbytes
                continue
            if batch and size + slab.nbytes > BATCH_BYTES:
                await _compare(old, new, slabs, reads, batch, found)
                yield size
                batch, size = [], 0
            batch.append(at)
            size += slab.nbytes
        if batch:
            await _compare(old, new, slabs, reads, batch, found)
            yield size


def _slabs(name: Name, entry: Entry) -> Iterator[_Slab]:
    """The tensor in pieces along its first axis; sub-byte elements, and what has no axes, in one."""
    bits = itemsize_bits(entry.dtype)
    whole = Box.full(entry.shape)
    rows = entry.shape[0] if entry.shape else 1
    nbytes = _nbytes(entry)
    each_rows = rows
    if bits % 8 == 0 and nbytes > SLAB_BYTES and rows > 1:
        each_rows = max(SLAB_BYTES * rows // nbytes, 1)
    if not nbytes:
        return
    for first in range(0, rows, each_rows):
        box = whole
        if each_rows < rows:
            count = min(each_rows, rows - first)
            box = Box((first, *whole.offsets[1:]), (count, *whole.lengths[1:]))
        size = (bits * box.volume + 7) // 8
        yield _Slab(name, structs.replace(entry, boxes=(box,), nbytes=size), size)


def _by_entry(reads: Sequence[Read], count: int) -> list[list[Read]]:
    found: list[list[Read]] = [[] for _ in range(count)]
    for read in reads:
        found[read.entry_index].append(read)
    return found


def _equal_unread(old: _Side, new: _Side, before: Sequence[Read], after: Sequence[Read]) -> bool:
    """Whether the reads are of the same places, in images of the same size, whose chunks there have the same hashes."""
    if before != after or old.source.chunk_bytes != new.source.chunk_bytes:
        return False
    chunk_bytes = new.source.chunk_bytes
    for read in after:
        was, now = old.records[read.rank].get(read.image), new.records[read.rank].get(read.image)
        if was is None or now is None or was.nbytes != now.nbytes:
            return False
        low = read.image_offset // chunk_bytes * HASH_BYTES
        high = -(-read.image_end // chunk_bytes) * HASH_BYTES
        if was.chunks[low:high] != now.chunks[low:high]:
            return False
    return True


async def _compare(
    old: _Side,
    new: _Side,
    slabs: Sequence[_Slab],
    reads: Sequence[Sequence[Sequence[Read]]],
    batch: Sequence[int],
    found: Changes,
) -> None:
    """Read the slabs of ``batch`` of both checkpoints, and compare them."""
    filled: list[list[memoryview]] = []
    for side, planned in zip((old, new), reads, strict=True):
        views = [memoryview(bytearray(slabs[at].nbytes)) for at in batch]
        some = [read._replace(entry_index=place) for place, at in enumerate(batch) for read in planned[at]]
        report = await fill([side.source], some, dict(enumerate(views)))
        found.read_bytes += report.nbytes
        filled.append(views)

    def count() -> None:
        for place, at in enumerate(batch):
            slab = slabs[at]
            change = found.tensors[slab.name][1]
            bits = itemsize_bits(slab.entry.dtype)
            compare(change, slab.entry.dtype, bits, filled[0][place], filled[1][place])

    await asyncio.to_thread(count)
