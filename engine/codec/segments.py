"""What lies where in a chunk: runs of numbers of one size, which the codec takes apart into byte planes."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple

from ..errors import UsageError
from ..format.dtypes import lookup
from ..format.entries import Layout

Kind = Literal["float", "int", "bytes"]

SEGMENT_BYTES_MIN = 64 << 10
"""Neighbours of one kind make one segment until it has this size: a small tensor is not worth a table of its own, and
a large one is coded by itself."""


class Segment(NamedTuple):
    """``nbytes`` bytes of items of ``item`` bytes (1, 2, 4 or 8). ``kind``: "float" is a sign, an exponent and a
    mantissa from the highest bit down (of complex numbers, two), "int" one whole number, "bytes" anything else. Where
    ``nbytes`` is no multiple of ``item``, what is over is the beginning of an item."""

    nbytes: int
    item: int
    kind: Kind


class _Run(NamedTuple):
    """A segment of a whole image, which begins at byte ``begin``."""

    begin: int
    end: int
    item: int
    kind: Kind


def segments_of(layout: Layout, image: str, start: int, end: int) -> list[Segment]:
    """What lies in bytes ``start`` to ``end`` of the image called ``image``, without gaps: the sizes of the segments
    add up to ``end - start``. The header, and what follows the last tensor, are "bytes"; so are the first bytes where
    the range begins within an item.

    Raises :class:`UsageError` if there is no such image, or no such range in it.
    """
    runs, begins = _runs(_Same(layout), image)
    nbytes = runs[-1].end if runs else 0
    if not 0 <= start <= end <= nbytes:
        raise UsageError("a range outside the image", found=f"{start} to {end}", expected=f"0 to {nbytes}")
    found: list[Segment] = []
    for run in runs[max(bisect.bisect_right(begins, start) - 1, 0) :]:
        if run.begin >= end:
            break
        here, to = max(run.begin, start), min(run.end, end)
        # Where the range begins within an item, the rest of that item stands for itself.
        cut = min(-(here - run.begin) % run.item, to - here)
        if cut:
            found.append(Segment(cut, 1, "bytes"))
        if to > here + cut:
            found.append(Segment(to - here - cut, run.item, run.kind))
    return found


class _Same:
    """A layout as a key of a cache: it is itself, and nothing else; its hash would be that of all its entries."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.layout is other.layout

    def __hash__(self) -> int:
        return id(self.layout)


@functools.lru_cache(maxsize=16)
def _runs(key: _Same, image: str) -> tuple[list[_Run], list[int]]:
    """The segments of a whole image, and where each begins."""
    runs: list[_Run] = []
    for run in _unmerged(key.layout, image):
        last = runs[-1] if runs else None
        same = last is not None and (last.item, last.kind) == (run.item, run.kind)
        if last is not None and same and last.end - last.begin < SEGMENT_BYTES_MIN:
            runs[-1] = last._replace(end=run.end)
        else:
            runs.append(run)
    return runs, [run.begin for run in runs]


def _unmerged(layout: Layout, image: str) -> Iterator[_Run]:
    """Header, tensors and the rest of one image, in the order of their bytes, empty ones left out."""
    index = next((i for i, spec in enumerate(layout.images) if spec.name == image), None)
    if index is None:
        names = ", ".join(spec.name for spec in layout.images)
        raise UsageError("the layout has no such image", found=image, expected=names)
    spec = layout.images[index]
    at = len(spec.header)
    yield _Run(0, at, 1, "bytes")
    entries = [entry for entry in layout.entries if entry.image == index and entry.nbytes]
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.offset > at:
            yield _Run(at, entry.offset, 1, "bytes")
        at = entry.offset + entry.nbytes
        yield _Run(entry.offset, at, *item_of(entry.dtype))
    if spec.nbytes > at:
        yield _Run(at, spec.nbytes, 1, "bytes")


@functools.cache
def item_of(dtype: str) -> tuple[int, Kind]:
    """Item size in bytes and kind of the numbers of a dtype; a complex number is two floats."""
    row = lookup(dtype)
    is_complex = dtype.startswith("complex")
    item = max(row.bits // (16 if is_complex else 8), 1)
    # Two 4-bit floats share a byte, which has no order as a whole.
    is_float = is_complex or (dtype.startswith(("float", "bfloat")) and not dtype.endswith("_x2"))
    return item, "float" if is_float else "int"
