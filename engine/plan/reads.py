"""Which bytes of which images a rank reads to fill its tensors, whatever the parallelism was at the save."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..errors import Damaged, StateMismatch
from ..format.dtypes import itemsize_bits
from ..format.entries import Box, Entry, Layout, Scope
from .boxes import BoxIndex, blocks, intersect, misfit, subtract
from .problems import Problems

RANKS_TOLD_MAX = 8
"""Most ranks that a message names one by one."""

OWN_HINT = (
    "Each rank stored its own: name the part in TrainState(replicated=...) if all ranks hold the same, "
    'or load with allow={"ranks"}'
)


class Read(NamedTuple):
    """``runs`` runs of ``nbytes`` bytes each, at equal distances: run ``i`` goes from ``image_offset + i *
    image_stride`` of image ``image`` (its name) of ``rank`` to ``dest_offset + i * dest_stride`` in the bytes of
    wanted entry ``entry_index`` (its boxes one behind the other, row-major). A single run has no strides (0);
    else the runs overlap in neither place, so that a stride is ``nbytes`` at least, in one place more."""

    entry_index: int
    rank: int
    image: str
    image_offset: int
    nbytes: int
    dest_offset: int
    runs: int = 1
    image_stride: int = 0
    dest_stride: int = 0

    @property
    def total(self) -> int:
        """Bytes of all runs."""
        return self.nbytes * self.runs

    @property
    def image_end(self) -> int:
        """Where in the image the last run ends."""
        return self.image_offset + (self.runs - 1) * self.image_stride + self.nbytes


def plan_reads(
    wanted: Sequence[Entry],
    layouts: Sequence[Layout],
    rank: int | None = None,
    *,
    equal: Collection[tuple[str, str]] = (),
) -> list[Read]:
    """Plan how ``wanted`` is filled from the images of ``layouts`` (index: rank at the save). Several wanted
    entries may bear one key.

    ``rank`` is the reader's own at the save (None where the number of ranks was another): its images are
    preferred, then those of the lowest rank, by all readers alike, so that ranks of one node read the same
    bytes. A wanted entry of one rank alone comes from that rank's own entry, else from a GLOBAL tensor of that
    name; a GLOBAL one from GLOBAL boxes. Else either comes from the lowest rank's entry where that counts for all
    (FIRST), from the only rank that has it, or from the lowest rank, if its (part, key) is among ``equal``: those
    proved equal on all ranks that have them.

    Reads come in the order of ``wanted`` and of ``dest_offset``, and touch each wanted byte exactly once. For
    each stored box that meets a wanted one there are no more than :func:`.boxes.blocks` says; neighbours in both
    places are one. Raises :class:`StateMismatch` that names every key that is absent, has another dtype or shape,
    or belongs to several ranks none of which is the reader, and :class:`Damaged` for tensors of which elements
    are stored nowhere.
    """
    planner = _Planner(wanted, layouts, rank, frozenset(equal))
    reads: list[Read] = []
    for index, entry in enumerate(wanted):
        reads += planner.entry(index, entry)
    hint = OWN_HINT if planner.several_own else None
    planner.mismatches.raise_if_any(
        StateMismatch, "the checkpoint does not have what is to be loaded", hint=hint
    )
    planner.gaps.raise_if_any(
        Damaged, "elements of the checkpoint's tensors are stored nowhere", name="layouts"
    )
    return reads


def clip(read: Read, begin: int, end: int) -> Iterator[Read]:
    """What ``read`` takes from bytes ``begin`` to ``end`` of the image, as reads: three at most, in order."""
    at, nbytes, count, stride = read.image_offset, read.nbytes, read.runs, read.image_stride
    if begin <= at and read.image_end <= end:
        yield read
        return
    if count == 1:
        yield from _run(read, 0, begin, end)
        return
    # Runs that meet the range, and of these the ones that lie inside it.
    first = max(0, (begin - at - nbytes) // stride + 1)
    last = min(count, -((at - end) // stride))
    inner_first = max(first, -((at - begin) // stride))
    inner_last = min(last, (end - nbytes - at) // stride + 1)
    if inner_first >= inner_last:
        inner_first = inner_last = last
    for index in range(first, inner_first):
        yield from _run(read, index, begin, end)
    if inner_first < inner_last:
        inner = inner_last - inner_first
        strides = (stride, read.dest_stride) if inner > 1 else (0, 0)
        start, dest = at + inner_first * stride, read.dest_offset + inner_first * read.dest_stride
        yield Read(read.entry_index, read.rank, read.image, start, nbytes, dest, inner, *strides)
    for index in range(inner_last, last):
        yield from _run(read, index, begin, end)


def _run(read: Read, index: int, begin: int, end: int) -> Iterator[Read]:
    """The part of run ``index`` between ``begin`` and ``end``, if there is one."""
    start = read.image_offset + index * read.image_stride
    low, high = max(start, begin), min(start + read.nbytes, end)
    if low < high:
        dest = read.dest_offset + index * read.dest_stride + low - start
        yield Read(read.entry_index, read.rank, read.image, low, high - low, dest)


Range = tuple[int, int]
"""Bytes of an image: (begin, end)."""


def chunk_ranges(reads: Iterable[Read], chunk_bytes: int, nbytes: int, head: int = 0) -> list[Range]:
    """The whole chunks of one image of ``nbytes`` that ``reads`` (all of it) need, and those of its first
    ``head`` bytes, as maximal ranges in ascending order. Chunks between the runs of a read are not needed."""
    found: list[Range] = [(0, head)] if head else []
    for _, _, _, at, length, _, runs, stride, _ in reads:
        end = at + (runs - 1) * stride + length
        if stride - length < chunk_bytes:  # no chunk lies between two runs
            found.append((at, end))
        else:
            found += [(start, start + length) for start in range(at, end, stride)]
    found.sort()
    ranges: list[Range] = []
    begin = end = 0
    for low, high in found:
        if low == high:
            continue
        low = low // chunk_bytes * chunk_bytes
        if low > end:
            if begin < end:
                ranges.append((begin, end))
            begin = low
        end = max(end, min(-(-high // chunk_bytes) * chunk_bytes, nbytes))
    if begin < end:
        ranges.append((begin, end))
    return ranges


class _Stored(NamedTuple):
    """A box in an image: ``offset`` is that of its first byte."""

    rank: int
    image: str
    box: Box
    offset: int


Source = tuple[int, Entry]
"""A rank at the save, and its entry."""


Kind = tuple[str, tuple[int, ...]]
"""Dtype and shape."""

_NO_KINDS: Mapping[Kind, int] = {}


class _Key:
    """What the ranks have under one key, the reader's own first, then by rank: GLOBAL entries that are stored,
    and what each rank has for itself. ``kinds`` are the dtypes and shapes of GLOBAL entries, stored or not, two at
    most, each with the first rank that has it. ``stored`` are the boxes of the GLOBAL ones, once
    they are looked for."""

    __slots__ = ("common", "kinds", "lookup", "private", "stored")

    def __init__(self) -> None:
        # Most keys need one of these: there may be a hundred thousand.
        self.common: Sequence[Source] = ()
        self.private: Sequence[Source] = ()
        self.kinds: Mapping[Kind, int] = _NO_KINDS
        self.stored: Sequence[_Stored] = ()
        self.lookup: BoxIndex | None = None


class _Planner:
    """State of one planning: the sources by key, and what went wrong."""

    def __init__(
        self,
        wanted: Sequence[Entry],
        layouts: Sequence[Layout],
        rank: int | None,
        equal: frozenset[tuple[str, str]],
    ) -> None:
        self._layouts = layouts
        self._rank = rank
        self._equal = equal
        self.mismatches = Problems()
        self.gaps = Problems()
        self.several_own = False
        self._keys = {(entry.part, entry.key): _Key() for entry in wanted}
        order = list(range(len(layouts)))
        if rank is not None and rank < len(layouts):
            order.remove(rank)
            order.insert(0, rank)
        for source in order:
            self._add(source, layouts[source])

    def _add(self, rank: int, layout: Layout) -> None:
        keys = self._keys
        for entry in layout.entries:
            key = keys.get((entry.part, entry.key))
            if key is None:
                continue
            if entry.scope is Scope.GLOBAL:
                kind = entry.dtype, entry.shape
                if kind not in key.kinds and len(key.kinds) < 2:  # two are a mismatch, whatever is wanted
                    key.kinds = {**key.kinds, kind: rank}
                if entry.image is not None:
                    key.common = _with(key.common, (rank, entry))
            elif entry.image is not None:
                key.private = _with(key.private, (rank, entry))

    def entry(self, index: int, entry: Entry) -> list[Read]:
        """Reads of one wanted entry; problems are noted."""
        key = self._keys[entry.part, entry.key]
        source = self._private(key, entry)
        kinds: Mapping[Kind, int]
        if source is not None:
            fits = source[1].dtype == entry.dtype and source[1].shape == entry.shape
            kinds = {} if fits else {(source[1].dtype, source[1].shape): source[0]}
        else:
            kinds = key.kinds
            if not kinds:
                self._note_absent(key, entry)
                return []
            fits = len(kinds) == 1 and (entry.dtype, entry.shape) in kinds
        if not fits:
            self._note_other(entry, kinds)
            return []
        first = source or (key.common[0] if key.common else None)
        if first is not None and first[1].boxes == entry.boxes:  # as it was saved: all boxes lie in one piece
            rank, stored = first
            whole = Read(index, rank, self._image(rank, stored), stored.offset, stored.nbytes, 0)
            return [whole] if stored.nbytes else []
        return self._pieces(index, entry, key, source)

    def _private(self, key: _Key, entry: Entry) -> Source | None:
        """One rank's own entry that fills ``entry``; None if the GLOBAL ones do, or nothing does."""
        private = key.private
        if entry.scope is not Scope.GLOBAL and private and private[0][0] == self._rank:
            return private[0]
        if key.kinds or not private:
            return None
        lowest = min(private, key=lambda source: source[0])
        if lowest[1].scope is Scope.FIRST or len(private) == 1 or (entry.part, entry.key) in self._equal:
            return lowest
        return None

    def _note_other(self, entry: Entry, kinds: Mapping[Kind, int]) -> None:
        wanted = entry.dtype, entry.shape
        (dtype, shape), rank = next(item for item in kinds.items() if item[0] != wanted)
        found = f"{dtype}{list(shape)} stored by rank {rank}"
        self.mismatches.add(entry.part, entry.key, f"{found}, {entry.dtype}{list(entry.shape)} wanted")

    def _note_absent(self, key: _Key, entry: Entry) -> None:
        if not key.private:
            self.mismatches.add(entry.part, entry.key, "not in the checkpoint")
            return
        self.several_own = True
        ranks = sorted(rank for rank, _ in key.private)
        more = len(ranks) - RANKS_TOLD_MAX
        told = f"{ranks[:RANKS_TOLD_MAX]}" + (f" and {more} more" if more > 0 else "")
        self.mismatches.add(entry.part, entry.key, f"stored only as the own tensor of ranks {told}")

    def _image(self, rank: int, source: Entry) -> str:
        assert source.image is not None
        return self._layouts[rank].images[source.image].name

    def _stored(self, sources: Iterable[Source]) -> list[_Stored]:
        """The boxes of ``sources``, those with equal box (replicas) once."""
        found: dict[Box, _Stored] = {}
        for rank, source in sources:
            bits = itemsize_bits(source.dtype)
            image, offset = self._image(rank, source), source.offset
            for box in source.boxes:
                if box not in found:
                    found[box] = _Stored(rank, image, box, offset)
                offset += (bits * box.volume + 7) // 8
        return list(found.values())

    def _pieces(self, index: int, entry: Entry, key: _Key, source: Source | None) -> list[Read]:
        """Reads of an entry whose boxes are not those of one source."""
        stored: Sequence[_Stored]
        if source is not None:
            stored = self._stored([source])
            lookup = BoxIndex([one.box for one in stored])
        else:
            if key.lookup is None:
                key.stored = self._stored(key.common)
                key.lookup = BoxIndex([one.box for one in key.stored])
            stored, lookup = key.stored, key.lookup
        bits = itemsize_bits(entry.dtype)
        reads: list[Read] = []
        dest = 0
        for box in entry.boxes:
            regions, left = _choose(box, [stored[i] for i in lookup.near(box)])
            if left:
                self.gaps.add(entry.part, entry.key, f"element {left[0].offsets} of shape {entry.shape}")
                return []
            if bits % 8 and not all(region == one.box == box for region, one in regions):
                self.mismatches.add(
                    entry.part, entry.key, f"{entry.dtype} shares bytes and cannot be cut anew"
                )
                return []
            reads += _runs(index, box, regions, bits, dest)
            dest += (bits * box.volume + 7) // 8
        return _merged(reads)


def _with(some: Sequence[Source], one: Source) -> list[Source]:
    """``some`` with ``one`` at its end; in place from the second on."""
    if isinstance(some, list):
        some.append(one)
        return some
    return [one]


def _choose(box: Box, near: Sequence[_Stored]) -> tuple[list[tuple[Box, _Stored]], list[Box]]:
    """Disjoint regions of ``box`` with a source for each (earlier ones preferred), and what has no source."""
    if not box.volume:
        return [], []
    regions = [(region, source) for source in near if (region := intersect(box, source.box)) is not None]
    tiled = sum(region.volume for region, _ in regions) == box.volume
    if tiled and misfit([region for region, _ in regions], box) is None:
        return regions, []
    chosen: list[tuple[Box, _Stored]] = []
    left = [box]
    for _, source in regions:
        rest: list[Box] = []
        for piece in left:
            region = intersect(piece, source.box)
            if region is None:
                rest.append(piece)
            else:
                chosen.append((region, source))
                rest += subtract(piece, region)
        left = rest
        if not left:
            break
    return chosen, left


def _runs(index: int, box: Box, regions: Iterable[tuple[Box, _Stored]], bits: int, dest: int) -> list[Read]:
    """Reads of ``regions`` of wanted ``box``, whose bytes begin at ``dest``."""
    if bits % 8:
        nbytes = (bits * box.volume + 7) // 8
        return [Read(index, source.rank, source.image, source.offset, nbytes, dest) for _, source in regions]
    size = bits // 8
    return [
        Read(
            index,
            source.rank,
            source.image,
            source.offset + block.source_at * size,
            block.length * size,
            dest + block.target_at * size,
            block.runs,
            block.source_step * size,
            block.target_step * size,
        )
        for region, source in regions
        for block in blocks(region, source.box, box)
    ]


def _merged(reads: list[Read]) -> list[Read]:
    """``reads`` of one entry in the order of their destination; one that goes on where another ends, in both
    places and with the same runs, is joined with it."""
    merged: list[Read] = []
    ends: dict[tuple[int, str, int, int, int, int, int], int] = {}
    for read in sorted(reads, key=lambda read: read.dest_offset):
        one = read.runs == 1
        # A single run of any length may follow a single run; rows follow rows of the same kind.
        kind = (0, 0, 0) if one else (read.nbytes, read.image_stride, read.dest_stride)
        at = ends.pop((read.rank, read.image, *kind, read.image_offset, read.dest_offset), None)
        if at is None:
            at = len(merged)
            merged.append(read)
        elif one:
            merged[at] = merged[at]._replace(nbytes=merged[at].nbytes + read.nbytes)
        else:
            merged[at] = merged[at]._replace(runs=merged[at].runs + read.runs)
        last = merged[at]
        image_step, dest_step = (last.nbytes, last.nbytes) if one else (last.image_stride, last.dest_stride)
        image_end = last.image_offset + last.runs * image_step
        dest_end = last.dest_offset + last.runs * dest_step
        end = (last.rank, last.image, *kind, image_end, dest_end)
        ends[end] = at
    return merged


__all__ = ["Range", "Read", "chunk_ranges", "clip", "plan_reads"]
