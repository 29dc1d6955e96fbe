"""Whether the ranks of a job together store every global tensor, each element exactly once.

Layouts come one after the other and are kept as plain arrays of boxes, so that a job of many thousand ranks
needs little more memory than its boxes have numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import StateMismatch
from ..format.entries import Box, Scope
from ..format.hashing import digest
from ..format.table import SCHEMAS_MAX, SchemaTable, Table
from .boxes import CUT_AXES_MAX, contains, is_valid, misfit
from .problems import Problems

Array = Any
"""A numpy array. The module is imported where arrays are made, for it is not needed everywhere."""

CORNERS_MAX = 1 << 24
"""Corners of one tensor's boxes that are counted with arrays; more are counted one by one."""

SHAPES_MAX = 64
"""Ways of holding the entries of one schema (how many boxes of each) that are remembered."""

_WIDE = 1 << 32

_REPLICAS = (
    " (if that is one tensor that they all hold, they must know of each other: take their meshes from one "
    "init_device_mesh, or say holders= in everstep.Shards)"
)


def check_coverage(ranks: Iterable[Table]) -> None:
    """Check the layouts of all ranks (in the order of ranks) against each other.

    Every GLOBAL key has one dtype and one shape on all ranks that have it, is GLOBAL on all of them, and its
    stored boxes cover each element exactly once; a key of an empty tensor is stored by some rank. Keys may be
    absent on some ranks (stages of a pipeline). Cost: n log n in the number of entries and boxes.

    Raises one :class:`StateMismatch` that names every key concerned, the element and the ranks.
    """
    coverage = Coverage()
    for table in ranks:
        coverage.add(table)
    coverage.check()


@dataclass(slots=True)
class _Known:
    """A schema's entries as numbers of global keys (-1: none, or at odds with another rank), and the ways in
    which ranks held its boxes."""

    schema: SchemaTable
    ids: list[int]
    shapes: dict[bytes, _Rows] = field(default_factory=dict)


@dataclass(slots=True)
class _Rows:
    """How the boxes of one rank become rows: one for each box of a global entry, ``axes`` wide.

    ``entry`` and ``key`` of each row; where the numbers of boxes that are not whole go (``row``, ``axis``) and
    come from (``source`` of ``count``); offsets and lengths with those of whole tensors filled in."""

    entry: Array
    key: Array
    row: Array
    axis: Array
    source: Array
    count: int
    offsets: Array
    lengths: Array


class Coverage:
    """As :func:`check_coverage`, for ranks that are added one by one, from rank 0 on."""

    def __init__(self) -> None:
        self._ranks = 0
        self._problems = Problems()
        self._ids: dict[tuple[str, str], int] = {}
        self._first: list[tuple[int, str, tuple[int, ...]]] = []
        """By number of a global key: the first rank that has it, its dtype and shape."""
        self._private: dict[tuple[str, str], int] = {}
        self._known: dict[int, _Known] = {}
        self._chunks: list[tuple[int, Array, Array, Array]] = []
        """Rank, and for each box that it stores: number of the key, offsets, lengths."""

    def add(self, table: Table) -> None:
        """The next rank's layout."""
        rank = self._ranks
        self._ranks += 1
        known = self._known.get(id(table.schema))
        if known is None or known.schema is not table.schema:
            if len(self._known) >= SCHEMAS_MAX:
                self._known.clear()
            known = self._known[id(table.schema)] = self._meet(table.schema, rank)
        if not table.schema.has_global:
            return
        rows = known.shapes.get(table.own.boxes)
        if rows is None:
            if len(known.shapes) >= SHAPES_MAX:
                known.shapes.clear()
            rows = known.shapes[table.own.boxes] = _rows(table, known.ids)
        taken = table.stored()[rows.entry]
        offsets, lengths = rows.offsets, rows.lengths
        if rows.count:
            cut_offsets, cut_lengths = table.cuts(rows.count)
            wide = max(cut_offsets.itemsize, cut_lengths.itemsize, offsets.itemsize)
            offsets = offsets.astype(f"u{wide}")
            lengths = lengths.astype(f"u{wide}")
            offsets[rows.row, rows.axis] = cut_offsets[rows.source]
            lengths[rows.row, rows.axis] = cut_lengths[rows.source]
        self._chunks.append((rank, rows.key[taken], offsets[taken], lengths[taken]))

    def _meet(self, schema: SchemaTable, rank: int) -> _Known:
        """Number the global keys of a schema that was not met before (or not lately)."""
        ids = []
        entries = zip(schema.names, schema.dtypes, schema.scopes, schema.shapes, strict=True)
        for name, dtype, scope, shape in entries:
            if scope != Scope.GLOBAL:
                self._private.setdefault(name, rank)
                ids.append(-1)
                continue
            number = self._ids.setdefault(name, len(self._first))
            if number == len(self._first):
                self._first.append((rank, dtype, shape))
            first, first_dtype, first_shape = self._first[number]
            if (dtype, shape) != (first_dtype, first_shape):
                number = -1
                here, there = f"{dtype}{list(shape)}", f"{first_dtype}{list(first_shape)}"
                self._problems.add(*name, f"{there} on rank {first}, {here} on rank {rank}")
            ids.append(number)
        return _Known(schema, ids)

    def check(self) -> None:
        """Raises as :func:`check_coverage` does, for all that was added."""
        problems = self._problems
        for name in sorted(self._private.keys() & self._ids.keys()):
            first = self._first[self._ids[name]][0]
            own = self._private[name]
            problems.add(*name, f"one tensor of the job on rank {first}, rank {own}'s own there")
        if self._ids:
            stored = _Stored(self._chunks, len(self._ids))
            good: set[tuple[tuple[int, ...], int, bytes]] = set()
            for (name, number), (_, _, shape) in zip(self._ids.items(), self._first, strict=True):
                wrong = _misfit(shape, *stored.of(number, len(shape)), good)
                if wrong is not None:
                    problems.add(*name, wrong)
        problems.raise_if_any(StateMismatch, "the ranks do not store every tensor of the job exactly once")


def _rows(table: Table, ids: list[int]) -> _Rows:
    import numpy as np

    schema = table.schema
    counts, whole = table.counts()
    axes_of = np.array([len(shape) for shape in schema.shapes], np.int64)
    numbers = np.where(whole, 0, counts * axes_of)  # of each entry in the columns of cut boxes
    begins = np.cumsum(numbers) - numbers
    key_of = np.array(ids, np.int32)
    counts = np.where(key_of < 0, 0, counts)
    entry = np.repeat(np.arange(len(ids)), counts)
    within = np.arange(len(entry)) - np.repeat(np.cumsum(counts) - counts, counts)
    width = max([len(shape) for shape, one in zip(schema.shapes, ids, strict=True) if one >= 0], default=0)
    wide = any(size >= _WIDE for shape in schema.shapes for size in shape)
    full = np.zeros((len(ids), width), "u8" if wide else "u4")
    for at, (shape, one) in enumerate(zip(schema.shapes, ids, strict=True)):
        if one >= 0 and shape:
            full[at, : len(shape)] = shape
    cut = np.flatnonzero(~whole[entry])
    axes = axes_of[entry[cut]]
    axis = np.arange(axes.sum()) - np.repeat(np.cumsum(axes) - axes, axes)
    first = begins[entry[cut]] + within[cut] * axes
    return _Rows(
        entry=entry,
        key=key_of[entry],
        row=np.repeat(cut, axes),
        axis=axis,
        source=np.repeat(first, axes) + axis,
        count=int(numbers.sum()),
        offsets=np.zeros((len(entry), width), full.dtype),
        lengths=full[entry],
    )


class _Stored:
    """All stored boxes of a job, by key."""

    def __init__(self, chunks: list[tuple[int, Array, Array, Array]], keys: int) -> None:
        """``chunks`` is emptied."""
        import numpy as np

        total = sum([len(chunk[1]) for chunk in chunks])
        width = max([chunk[2].shape[1] for chunk in chunks], default=0)
        numbers = "u8" if any(chunk[2].itemsize == 8 for chunk in chunks) else "u4"
        # Keys of 16 bits are sorted in linear time.
        self._key = np.empty(total, np.uint16 if keys <= 1 << 16 else np.int32)
        self._rank = np.empty(total, np.int32)
        self._offsets = np.zeros((total, width), numbers)
        self._lengths = np.zeros((total, width), numbers)
        end = total
        while chunks:
            rank, key, offsets, lengths = chunks.pop()
            begin = end - len(key)
            self._key[begin:end] = key
            self._rank[begin:end] = rank
            self._offsets[begin:end, : offsets.shape[1]] = offsets
            self._lengths[begin:end, : offsets.shape[1]] = lengths
            end = begin
        self._order = np.argsort(self._key, kind="stable")
        self._ends = np.cumsum(np.bincount(self._key, minlength=keys))

    def of(self, number: int, axes: int) -> tuple[Array, Array, Array]:
        """Ranks, offsets and lengths of the boxes stored of one key, by rank."""
        begin = self._ends[number - 1] if number else 0
        rows = self._order[begin : self._ends[number]]
        return self._rank[rows], self._offsets[rows][:, :axes], self._lengths[rows][:, :axes]


def _misfit(
    shape: tuple[int, ...],
    ranks: Array,
    offsets: Array,
    lengths: Array,
    good: set[tuple[tuple[int, ...], int, bytes]],
) -> str | None:
    """What is wrong with the boxes stored of one key, in words; None if they tile its shape (then noted in
    ``good``, which saves looking again: most tensors of a job are cut like another one)."""
    if not len(ranks):
        return "stored by no rank"
    pattern = shape, len(ranks), digest(offsets.tobytes() + lengths.tobytes())
    if pattern in good:
        return None
    if not _tiles(shape, offsets, lengths):
        wrong = _in_words(shape, ranks.tolist(), offsets.tolist(), lengths.tolist())
        if wrong is not None:
            return wrong
    good.add(pattern)
    return None


def _in_words(
    shape: tuple[int, ...], ranks: list[int], offsets: list[list[int]], lengths: list[list[int]]
) -> str | None:
    """The exact verdict, box by box."""
    boxes = [
        (Box(tuple(begin), tuple(length)), rank)
        for rank, begin, length in zip(ranks, offsets, lengths, strict=True)
    ]
    for box, rank in boxes:
        if not is_valid(box, shape):
            return f"rank {rank} stores {box.offsets}+{box.lengths}, outside shape {shape}"
    try:
        wrong = misfit([box for box, _ in boxes], Box.full(shape))
    except ValueError as problem:
        return str(problem)
    if wrong is None:
        return None
    point, surplus = wrong
    if surplus < 0:
        return f"element {point} of shape {shape} is stored by no rank"
    there = [(box, rank) for box, rank in boxes if contains(box, point)]
    told = f"element {point} of shape {shape} is stored {surplus + 1} times, by ranks {sorted({r for _, r in there})}"
    return told + (_REPLICAS if len({box for box, _ in there}) == 1 and len(there) > 1 else "")


def _tiles(shape: tuple[int, ...], offsets: Array, lengths: Array) -> bool:
    """Whether boxes (rows) surely tile ``shape``. False is no verdict: :func:`_in_words` gives one."""
    import numpy as np

    sizes = np.array(shape, np.uint64)
    if (offsets > sizes).any() or (lengths > sizes - offsets).any():
        return False
    if 0 in shape:
        return True
    some = (lengths > 0).all(axis=1)
    offsets, lengths = offsets[some].astype(np.int64), lengths[some].astype(np.int64)
    if not len(offsets):
        return False
    axes = [
        axis for axis, size in enumerate(shape) if offsets[:, axis].any() or (lengths[:, axis] != size).any()
    ]
    if not axes:
        return len(offsets) == 1
    if len(axes) == 1:
        return _line(shape[axes[0]], offsets[:, axes[0]], lengths[:, axes[0]])
    if len(axes) > CUT_AXES_MAX or len(offsets) << len(axes) > CORNERS_MAX:
        return False
    return _corners_cancel([shape[axis] for axis in axes], offsets[:, axes], lengths[:, axes])


def _line(size: int, begins: Array, lengths: Array) -> bool:
    """Whether intervals tile 0 .. size."""
    import numpy as np

    ends = begins + lengths
    if (begins[1:] < begins[:-1]).any():
        order = np.argsort(begins)
        begins, ends = begins[order], ends[order]
    return bool(begins[0] == 0 and ends[-1] == size and (begins[1:] == ends[:-1]).all())


def _corners_cancel(sizes: Sequence[int], offsets: Array, lengths: Array) -> bool:
    """As :func:`.boxes.misfit`: the signed corners of all boxes and of the whole must cancel. Each corner is
    one number, of its positions among the distinct coordinates of each axis."""
    import numpy as np

    begins = np.vstack([offsets, np.zeros((1, len(sizes)), np.int64)])
    ends = np.vstack([offsets + lengths, np.array([sizes], np.int64)])
    corners = np.zeros((1, len(begins)), np.int64)
    signs = np.ones((1, len(begins)), np.int8)
    signs[0, -1] = -1
    radix = 1
    for axis in range(len(sizes)):
        distinct, places = np.unique(np.concatenate([begins[:, axis], ends[:, axis]]), return_inverse=True)
        places = places.reshape(2, -1)
        corners = np.vstack([corners + radix * places[0], corners + radix * places[1]])
        signs = np.vstack([signs, -signs])
        radix *= len(distinct)
        if radix > 1 << 62:
            return False
    flat = corners.ravel()
    order = np.argsort(flat)
    flat = flat[order]
    starts = np.flatnonzero(np.concatenate([[True], flat[1:] != flat[:-1]]))
    return not np.add.reduceat(signs.ravel()[order], starts, dtype=np.int64).any()
