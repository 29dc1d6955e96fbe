"""Which bytes of which images a rank reads to fill its tensors, whatever the parallelism was at the save."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import Damaged, StateMismatch
from ..format.dtypes import itemsize_bits
from ..format.entries import Box, Entry, Layout, Scope
from .boxes import BoxIndex, intersect, misfit, runs, subtract
from .problems import Problems


@dataclass(frozen=True, slots=True)
class Read:
    """One contiguous run of bytes: ``nbytes`` from ``image_offset`` of image ``image`` (its name) of ``rank``
    to ``dest_offset`` in the bytes of wanted entry ``entry_index`` (its boxes one behind the other,
    row-major). ``box`` is the region of the global tensor to which the run's first byte belongs."""

    entry_index: int
    box: Box
    rank: int
    image: str
    image_offset: int
    nbytes: int
    dest_offset: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of whole chunks of one image, ``begin`` to ``end`` in bytes (``end`` may lie beyond the image's
    end, where the last chunk is short), and the reads that it serves, by ``image_offset``."""

    rank: int
    image: str
    begin: int
    end: int
    reads: tuple[Read, ...]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A box in an image: ``offset`` is that of its first byte."""

    rank: int
    image: str
    box: Box
    offset: int


def plan_reads(wanted: Sequence[Entry], layouts: Sequence[Layout], rank: int | None = None) -> list[Read]:
    """Plan how ``wanted`` is filled from the images of ``layouts`` (index: rank at the save).

    ``rank`` is the reader's own: its images are preferred, then those of the lowest rank. A wanted entry of
    one rank alone comes from that rank's own entry, else from a GLOBAL tensor of that name. A wanted GLOBAL
    one comes from GLOBAL boxes, or, if the save had one rank, from that rank's own entry.

    Reads come in the order of ``wanted`` and of ``dest_offset``, touch each wanted byte exactly once, and are
    as few as contiguous runs can be. Raises :class:`StateMismatch` that names every key that is absent or has
    another dtype or shape, and :class:`Damaged` for tensors of which elements are stored nowhere.
    """
    planner = _Planner(wanted, layouts, rank)
    reads: list[Read] = []
    for index, entry in enumerate(wanted):
        reads += planner.entry(index, entry)
    planner.mismatches.raise_if_any(StateMismatch, "the checkpoint does not have what is to be loaded")
    planner.gaps.raise_if_any(
        Damaged, "elements of the checkpoint's tensors are stored nowhere", name="layouts"
    )
    return reads


class _Planner:
    """State of one planning: the sources by key, and what went wrong."""

    def __init__(self, wanted: Sequence[Entry], layouts: Sequence[Layout], rank: int | None) -> None:
        self._layouts = layouts
        self._rank = rank
        self.mismatches = Problems()
        self.gaps = Problems()
        self._sources: dict[tuple[str, str], list[tuple[int, Entry]]] = {(e.part, e.key): [] for e in wanted}
        order = list(range(len(layouts)))
        if rank is not None and rank < len(layouts):
            order.remove(rank)
            order.insert(0, rank)
        for source in order:
            for entry in layouts[source].entries:
                held = self._sources.get((entry.part, entry.key))
                if held is not None and entry.image is not None:
                    held.append((source, entry))

    def entry(self, index: int, entry: Entry) -> list[Read]:
        """Reads of one wanted entry; problems are noted."""
        sources = self._eligible(entry)
        if not sources:
            return []
        for rank, source in sources:
            if source.dtype != entry.dtype or source.shape != entry.shape:
                found = f"{source.dtype}{list(source.shape)} stored by rank {rank}"
                expected = f"{entry.dtype}{list(entry.shape)} wanted"
                self.mismatches.add(entry.part, entry.key, f"{found}, {expected}")
                return []
        rank, source = sources[0]
        if source.boxes == entry.boxes:  # as it was saved: all boxes lie in one piece
            image = self._image(rank, source)
            whole = Read(index, entry.boxes[0], rank, image, source.offset, source.nbytes, 0)
            return [whole] if source.nbytes else []
        return self._pieces(index, entry, self._stored(sources))

    def _eligible(self, entry: Entry) -> list[tuple[int, Entry]]:
        """The stored entries that may fill ``entry``, preferred first; their absence is noted."""
        sources = self._sources[entry.part, entry.key]
        common = [(rank, source) for rank, source in sources if source.scope is Scope.GLOBAL]
        private = [(rank, source) for rank, source in sources if source.scope is Scope.RANK]
        own = [(rank, source) for rank, source in private if rank == self._rank]
        if entry.scope is Scope.RANK:
            eligible = own or common
        else:
            eligible = common or (private if len(self._layouts) == 1 else [])
        if not eligible:
            ranks = [rank for rank, _ in private]
            text = f"stored only as the own tensor of ranks {ranks[:8]}" if ranks else "not in the checkpoint"
            self.mismatches.add(entry.part, entry.key, text)
        return eligible

    def _image(self, rank: int, source: Entry) -> str:
        assert source.image is not None
        return self._layouts[rank].images[source.image].name

    def _stored(self, sources: Iterable[tuple[int, Entry]]) -> list[_Stored]:
        """The boxes of ``sources``, those with equal box (replicas) once."""
        found: dict[Box, _Stored] = {}
        for rank, source in sources:
            bits = itemsize_bits(source.dtype)
            offset = source.offset
            for box in source.boxes:
                found.setdefault(box, _Stored(rank, self._image(rank, source), box, offset))
                offset += (bits * box.volume + 7) // 8
        return list(found.values())

    def _pieces(self, index: int, entry: Entry, stored: list[_Stored]) -> list[Read]:
        """Reads of an entry whose boxes are not those of one source."""
        lookup = BoxIndex([source.box for source in stored])
        bits = itemsize_bits(entry.dtype)
        reads: list[Read] = []
        dest = 0
        for box in entry.boxes:
            near = [stored[i] for i in lookup.near(box)]
            regions, left = _choose(box, near)
            if left:
                self.gaps.add(entry.part, entry.key, f"element {left[0].offsets} of shape {entry.shape}")
                return []
            whole = all(region == source.box == box for region, source in regions)
            if bits % 8 and not whole:
                self.mismatches.add(
                    entry.part, entry.key, f"{entry.dtype} shares bytes and cannot be cut anew"
                )
                return []
            reads += _runs(index, box, regions, bits, dest)
            dest += (bits * box.volume + 7) // 8
        return _merged(reads)


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
    return chosen, left


def _runs(index: int, box: Box, regions: Iterable[tuple[Box, _Stored]], bits: int, dest: int) -> list[Read]:
    """The contiguous runs of ``regions`` of wanted ``box``, whose bytes begin at ``dest``."""
    if bits % 8:
        nbytes = (bits * box.volume + 7) // 8
        return [
            Read(index, box, source.rank, source.image, source.offset, nbytes, dest) for _, source in regions
        ]
    size = bits // 8
    return [
        Read(index, region, source.rank, source.image, source.offset + a * size, n * size, dest + b * size)
        for region, source in regions
        for a, b, n in runs(region, source.box, box)
    ]


def _merged(reads: list[Read]) -> list[Read]:
    """``reads`` of one entry in the order of their destination, neighbours in both places joined."""
    merged: list[Read] = []
    for read in sorted(reads, key=lambda read: read.dest_offset):
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.rank, last.image) == (read.rank, read.image)
            and last.image_offset + last.nbytes == read.image_offset
            and last.dest_offset + last.nbytes == read.dest_offset
        ):
            nbytes = last.nbytes + read.nbytes
            read = Read(
                last.entry_index, last.box, last.rank, last.image, last.image_offset, nbytes, last.dest_offset
            )
            merged[-1] = read
        else:
            merged.append(read)
    return merged


def segments(reads: Iterable[Read], chunk_bytes: int) -> list[Segment]:
    """The whole chunks that ``reads`` need, as maximal ranges, by rank, image name and position.

    Every read lies in exactly one segment; no chunk is in two. The caller clips the end to the image's size.
    """
    result: list[Segment] = []
    members: list[Read] = []
    begin = end = 0

    def finish() -> None:
        if members:
            result.append(Segment(members[0].rank, members[0].image, begin, end, tuple(members)))

    for read in sorted(reads, key=lambda read: (read.rank, read.image, read.image_offset)):
        first = read.image_offset // chunk_bytes * chunk_bytes
        last = -(-(read.image_offset + read.nbytes) // chunk_bytes) * chunk_bytes
        same = members and (members[0].rank, members[0].image) == (read.rank, read.image)
        if same and first <= end:
            end = max(end, last)
        else:
            finish()
            members, begin, end = [], first, last
        members.append(read)
    finish()
    return result
