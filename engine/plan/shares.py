"""Which chunks several ranks of one node need, and who of them reads which: each chunk once for all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .reads import Range, Read, clip


class ImageKey(NamedTuple):
    """One image of a checkpoint: its rank, its name, and the size and root of its record (hexadecimal)."""

    rank: int
    name: str
    nbytes: int
    root: str


Needs = Mapping[ImageKey, Sequence[Range]]
"""The bytes that one rank needs, as ranges of whole chunks: ascending, apart from one another."""


class Share(NamedTuple):
    """Bytes ``begin`` to ``end`` of an image, whole chunks, that ``reader`` (its place among the node's ranks)
    puts at ``at`` of the round's memory."""

    reader: int
    image: ImageKey
    begin: int
    end: int
    at: int


Round = tuple[Share, ...]
"""What is in the shared memory at one time; the shares lie one behind the other, by image and offset, so that
chunks that follow one another in an image do so in memory as well."""


def common_ranges(needs: Sequence[Needs], least: int = 2) -> dict[ImageKey, list[Range]]:
    """What ``least`` or more of the ranks need, in the order of images."""
    edges: defaultdict[ImageKey, list[tuple[int, int]]] = defaultdict(list)
    for some in needs:
        for image, ranges in some.items():
            for begin, end in ranges:
                edges[image] += (begin, 1), (end, -1)
    found: dict[ImageKey, list[Range]] = {}
    for image in sorted(edges):
        ranges_found = _over(sorted(edges[image]), least)
        if ranges_found:
            found[image] = ranges_found
    return found


def _over(edges: Sequence[tuple[int, int]], least: int) -> list[Range]:
    """Where at least ``least`` ranges lie over one another; an end sorts before a begin at the same place."""
    ranges: list[Range] = []
    depth = begin = 0
    for at, step in edges:
        if depth == least - 1 and step == 1:
            begin = at
        elif depth == least and step == -1 and begin < at:
            if ranges and ranges[-1][1] == begin:
                ranges[-1] = (ranges[-1][0], at)
            else:
                ranges.append((begin, at))
        depth += step
    return ranges


def mostly_needed(needs: Sequence[Needs], nbytes: Mapping[int, int]) -> list[int]:
    """The ranks at the save of whose images, ``nbytes`` in all, these ranks together need more than half."""
    needed: defaultdict[int, int] = defaultdict(int)
    for image, ranges in common_ranges(needs, 1).items():
        needed[image.rank] += sum(end - begin for begin, end in ranges)
    return [rank for rank in sorted(needed) if 2 * needed[rank] > nbytes[rank]]


def without(ranges: Sequence[Range], holes: Sequence[Range]) -> list[Range]:
    """``ranges`` without ``holes``; both ascending."""
    left: list[Range] = []
    index = 0
    for begin, end in ranges:
        while index < len(holes) and holes[index][1] <= begin:
            index += 1
        at = index
        while at < len(holes) and holes[at][0] < end:
            if begin < holes[at][0]:
                left.append((begin, holes[at][0]))
            begin = max(begin, holes[at][1])
            at += 1
        if begin < end:
            left.append((begin, end))
    return left


def deal(
    common: Mapping[ImageKey, Sequence[Range]], readers: int, chunk_bytes: int, round_bytes: int
) -> list[Round]:
    """Rounds of at most ``round_bytes`` (one chunk at least), each dealt out evenly by bytes, up to a chunk; they
    begin with one reader after the other."""
    capacity = max(round_bytes // chunk_bytes, 1) * chunk_bytes
    rounds: list[Round] = []
    some: list[tuple[ImageKey, int, int]] = []
    room = capacity
    for image, ranges in common.items():
        for begin, end in ranges:
            while begin < end:
                stop = min(end, begin + room // chunk_bytes * chunk_bytes)
                if begin < stop:
                    some.append((image, begin, stop))
                room -= stop - begin
                begin = stop
                if room < chunk_bytes:
                    rounds.append(tuple(_shares(some, readers, chunk_bytes, len(rounds))))
                    some, room = [], capacity
    if some:
        rounds.append(tuple(_shares(some, readers, chunk_bytes, len(rounds))))
    return rounds


def _shares(
    some: Sequence[tuple[ImageKey, int, int]], readers: int, chunk_bytes: int, first: int
) -> Iterator[Share]:
    total = sum(end - begin for _, begin, end in some)
    at = reader = 0
    for image, begin, end in some:
        while begin < end:
            while (room := (reader + 1) * total // readers - at) <= 0:
                reader += 1
            stop = min(end, begin + -(-room // chunk_bytes) * chunk_bytes)
            yield Share((first + reader) % readers, image, begin, stop, at)
            at += stop - begin
            begin = stop


class Clipper:
    """Gives out the parts of reads of one image that lie in ranges asked for in ascending order."""

    def __init__(self, reads: Sequence[Read]) -> None:
        self._coming = sorted((read for read in reads if read.total), key=lambda read: -read.image_offset)
        self._begun: list[Read] = []

    def take(self, begin: int, end: int) -> list[Read]:
        """The parts between ``begin`` and ``end``."""
        while self._coming and self._coming[-1].image_offset < end:
            self._begun.append(self._coming.pop())
        taken = [part for read in self._begun for part in clip(read, begin, end)]
        self._begun = [read for read in self._begun if read.image_end > end]
        return taken
