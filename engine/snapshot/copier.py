"""Copies a rank's tensors into a slot, all in one fused call, and lays down what stands around them."""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from everstep.errors import StateMismatch
from everstep.format.entries import path_of
from everstep.format.layout import Entry, Layout
from everstep.memory import points
from everstep.memory.arena import Arena
from everstep.memory.control import COPY_PREFIX, IMAGE_PREFIX, STATE_REGION
from everstep.memory.copying import COMPILED, Words
from everstep.memory.slots import WriteSlot

from .late import LateCopy, versions_of
from .moving import Runs, move
from .views import Expected, build_destinations, carrier, expect

LAYOUT_REGION = "layout"
META_REGION = "meta"


_shape_of = operator.attrgetter("shape")
_dtype_of = operator.attrgetter("dtype")
_is_cpu = operator.attrgetter("is_cpu")


@dataclass(frozen=True)
class Plan:
    """A layout as the copier needs it: with its canonical bytes and their hash. Made once per structure. ``copied``:
    entries (positions in the layout) of which there are second copies, on whatever ranks."""

    layout: Layout
    encoded: bytes
    layout_hash: str
    copied: frozenset[int] = frozenset()

    def regions(self, state_nbytes: int, meta_nbytes: int) -> list[tuple[str, int]]:
        """Regions of a snapshot. What a layout fixes comes first, so that it keeps its place when the state's
        size changes."""
        found = [(IMAGE_PREFIX + image.name, image.nbytes) for image in self.layout.images]
        found += [(COPY_PREFIX + image.name, image.nbytes) for image in self.layout.copies]
        found.append((LAYOUT_REGION, len(self.encoded)))
        return [*found, (STATE_REGION, state_nbytes), (META_REGION, meta_nbytes)]


@dataclass
class _Sources:
    """What one copy reads, with where it goes and which entries it is of; dropped when it is done."""

    indices: list[int] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    into: list[torch.Tensor] = field(default_factory=list)
    arrays: list[tuple[np.ndarray[Any, Any], torch.Tensor]] = field(default_factory=list)
    runs: Runs | None = None
    """The same as addresses, where all of ``tensors`` are known to be runs of host memory."""
    versions: list[int] = field(default_factory=list)
    """Of ``tensors``, where they are copied late."""

    def some(self, wanted: Collection[int]) -> _Sources:
        """Those of the entries ``wanted``; no arrays."""
        mask = list(map(wanted.__contains__, self.indices))
        runs = self.runs
        if runs is not None:
            words = [array("Q", itertools.compress(w, mask)) for w in (runs.into, runs.sources, runs.sizes)]
            runs = Runs(*words)
        return _Sources(
            list(itertools.compress(self.indices, mask)),
            list(itertools.compress(self.tensors, mask)),
            list(itertools.compress(self.into, mask)),
            runs=runs,
        )


@dataclass(frozen=True)
class _Views:
    """Of one slot: destinations by one layout, and their addresses."""

    token: int
    layout_hash: str
    tensors: list[torch.Tensor]
    addresses: Words


class Copier:
    """Copies into the slots of one arena. One thread at a time.

    Kept between calls are only views of slots, by slot and layout hash, never anything of the sources: every
    call is told which tensors to read. Of each slot only the newest layout's views are kept. They keep the
    arena mapped until :meth:`forget`.
    """

    def __init__(self) -> None:
        self._views: dict[int, _Views] = {}
        self._expected: tuple[str, Expected, Words] | None = None

    def forget(self) -> None:
        """Drop all views, so that a closed arena's memory can go."""
        self._views.clear()

    def prepare(self, arena: Arena, plan: Plan) -> None:
        """Have what the first copy by ``plan`` needs, into the slot that comes first. MemoryTooSmall."""
        token, places = arena.foresee(0, plan.regions(0, 0))
        self._build(0, token, plan, places)

    def copy(
        self,
        slot: WriteSlot,
        plan: Plan,
        leaves: Sequence[Any],
        *,
        state: bytes,
        meta: bytes,
        late: Collection[int] = (),
        addresses: Sequence[int] | None = None,
    ) -> LateCopy | None:
        """Copy a snapshot into ``slot``; the caller publishes or abandons it.

        ``leaves`` are tensors or numpy arrays in the order of the layout's entries (those stored elsewhere
        may be None); for an entry of several boxes a tuple of tensors, one per box. Entries whose index is in
        ``late`` are only begun: they are read by a thread, and the caller must ask the returned
        :class:`LateCopy` before it publishes. Everything else is copied when this returns. ``addresses`` of the
        leaves' memory say that all were seen to be tensors of the shapes and dtypes in the layout, without bits to
        resolve. StateMismatch if a leaf is not what the layout says; MemoryTooSmall if the slot is.
        """
        if len(leaves) != len(plan.layout.entries):
            raise StateMismatch(
                "number of leaves", found=len(leaves), expected=f"{len(plan.layout.entries)} of the layout"
            )
        places = slot.place(plan.regions(len(state), len(meta)))
        expected, sizes = self._expect(plan)
        into = self._destinations(slot, plan, places)
        sources = _runs(expected, sizes, into, leaves, addresses)
        if sources is None:
            sources = _match(plan.layout, expected, into.tensors, leaves)
        if not late:
            _lay_around(slot, plan, places, state, meta)
            _copy_now(slot, sources)
            return None
        now, later = _split(sources, late)
        _lay_around(slot, plan, places, state, meta)
        _copy_now(slot, now)
        entries, indices = plan.layout.entries, later.indices

        def names() -> list[str]:
            return [_name(entries[index]) for index in indices]

        return LateCopy(slot, names, later.tensors, later.into, later.runs, later.versions)

    def lay_around(
        self, slot: WriteSlot, plan: Plan, *, state: bytes, meta: bytes
    ) -> Mapping[str, memoryview]:
        """Lay down everything but the tensors; the slot's regions, for whoever copies these. MemoryTooSmall."""
        places = slot.place(plan.regions(len(state), len(meta)))
        _lay_around(slot, plan, places, state, meta)
        return places

    def _expect(self, plan: Plan) -> tuple[Expected, Words]:
        """What ``plan`` expects, and the sizes as words."""
        if self._expected is None or self._expected[0] != plan.layout_hash:
            expected = expect(plan.layout)
            self._expected = plan.layout_hash, expected, array("Q", expected.sizes)
        return self._expected[1:]

    def _destinations(self, slot: WriteSlot, plan: Plan, places: Mapping[str, memoryview]) -> _Views:
        known = self._views.get(slot.index)
        if known is not None and known.token == slot.arena_token and known.layout_hash == plan.layout_hash:
            return known
        return self._build(slot.index, slot.arena_token, plan, places)

    def _build(self, index: int, token: int, plan: Plan, places: Mapping[str, memoryview]) -> _Views:
        made = build_destinations(plan.layout, self._expect(plan)[0], places)
        addresses = array("Q", list(map(torch.Tensor.data_ptr, made)))
        self._views[index] = _Views(token, plan.layout_hash, made, addresses)
        return self._views[index]


def _runs(
    expected: Expected, sizes: Words, into: _Views, leaves: Sequence[Any], addresses: Sequence[int] | None
) -> _Sources | None:
    """Sources that are copied as runs of bytes, all of them; None where some are not, or not known to be."""
    if addresses is None or not COMPILED or not expected.plain or expected.boxed:
        return None
    tensors = leaves if isinstance(leaves, list) else list(leaves)
    if len(expected.indices) < len(leaves):
        tensors, addresses = ([some[index] for index in expected.indices] for some in (leaves, addresses))
    if not (all(map(_is_cpu, tensors)) and all(map(torch.Tensor.is_contiguous, tensors))):
        return None
    return _Sources(
        expected.indices, tensors, into.tensors, runs=Runs(into.addresses, array("Q", addresses), sizes)
    )


def _match(layout: Layout, expected: Expected, into: list[torch.Tensor], leaves: Sequence[Any]) -> _Sources:
    """Sources with their destinations, each compared with the layout: a copy between unequal shapes would
    broadcast, and one between unequal dtypes convert, without a word."""
    wanted = [leaves[index] for index in expected.indices]
    if expected.boxed:
        wanted = _piecewise(layout, expected, wanted)
    if expected.plain and _alike(wanted, expected):
        return _Sources(expected.indices, wanted, into)
    found = _Sources()
    for number, (leaf, destination) in enumerate(zip(wanted, into, strict=True)):
        _match_one(layout, expected, number, leaf, destination, found)
    return found


def _piecewise(layout: Layout, expected: Expected, wanted: Sequence[Any]) -> list[Any]:
    """``wanted``, which has an entry's leaf for each of its boxes, with the box's own piece instead."""
    found = []
    for index, number, leaf in zip(expected.indices, expected.boxes, wanted, strict=True):
        entry = layout.entries[index]
        pieces = leaf if type(leaf) is tuple else (leaf,)
        if len(pieces) != len(entry.boxes):
            raise StateMismatch(
                f"{_name(entry)} is not what the layout says",
                found=f"{len(pieces)} tensors",
                expected=f"{len(entry.boxes)} boxes",
                hint="Its sharding changed: make the layout anew",
                key=entry.key,
            )
        found.append(pieces[number])
    return found


def _alike(wanted: Sequence[Any], expected: Expected) -> bool:
    try:
        # One by one: a list of all shapes is thousands of new objects, each time, and sets the collector off.
        return all(map(operator.eq, map(_shape_of, wanted), expected.shapes)) and all(
            map(operator.is_, map(_dtype_of, wanted), expected.dtypes)
        )
    except AttributeError:  # a None, or no tensor at all: looked at one by one
        return False


def _match_one(
    layout: Layout, expected: Expected, number: int, leaf: Any, destination: torch.Tensor, found: _Sources
) -> None:
    index = expected.indices[number]
    entry = layout.entries[index]
    shape, size = expected.shapes[number], expected.sizes[number]
    if isinstance(leaf, np.ndarray):
        _check(entry, entry.dtype, leaf.shape, leaf.nbytes, shape, size)
        if leaf.nbytes:
            found.arrays.append((leaf, destination))
        return
    if not isinstance(leaf, torch.Tensor):
        raise StateMismatch(_name(entry), found=type(leaf).__name__, expected="a tensor", key=entry.key)
    dtype = str(leaf.dtype).removeprefix("torch.")
    _check(entry, dtype, leaf.shape, leaf.numel() * leaf.dtype.itemsize, shape, size)
    carried = carrier(leaf.dtype)
    if destination.dtype is not carried:
        # Where the layout has no room for a typed view: a contiguous copy of the source, as bytes.
        leaf = leaf.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    elif leaf.dtype is not carried:
        leaf = leaf.detach().view(carried)
    found.indices.append(index)
    found.tensors.append(leaf)
    found.into.append(destination if leaf.shape == destination.shape else destination.view(leaf.shape))


def _check(
    entry: Entry, dtype: str, shape: Sequence[int], nbytes: int, expected: torch.Size, size: int
) -> None:
    if dtype != entry.dtype or nbytes != size or tuple(shape) != expected:
        raise StateMismatch(
            f"{_name(entry)} is not what the layout says",
            found=f"{dtype} {list(shape)}, {nbytes} bytes",
            expected=f"{entry.dtype} {list(expected)}, {size} bytes",
            hint="Its shape or dtype changed: make the layout anew",
            key=entry.key,
        )


def _name(entry: Entry) -> str:
    return path_of(entry.part, entry.key)


def _split(sources: _Sources, late: Collection[int]) -> tuple[_Sources, _Sources]:
    """(what is copied now, what may be copied late). A tensor without a version counter, or a temporary copy,
    is copied now: that it stays the same could not be seen."""
    late = frozenset(late)
    if late.issuperset(sources.indices):
        now, later = _Sources(), replace(sources, arrays=[])
    else:
        now, later = sources.some(frozenset(sources.indices) - late), sources.some(late)
    try:
        later.versions = versions_of(later.tensors)
    except RuntimeError:  # torch's answer for tensors that were made for inference: they have none
        pairs = zip(later.indices, later.tensors, strict=True)
        return _split(sources, late - {index for index, tensor in pairs if tensor.is_inference()})
    now.arrays = sources.arrays
    return now, later


def _lay_around(
    slot: WriteSlot, plan: Plan, places: Mapping[str, memoryview], state: bytes, meta: bytes
) -> None:
    if slot.layout_hash_before != plan.layout_hash:
        for image in plan.layout.images:
            places[IMAGE_PREFIX + image.name][: len(image.header)] = image.header
        for image in plan.layout.copies:
            places[COPY_PREFIX + image.name][: len(image.header)] = image.header
        places[LAYOUT_REGION][:] = plan.encoded
    places[STATE_REGION][:] = state
    places[META_REGION][:] = meta


def _copy_now(slot: WriteSlot, sources: _Sources) -> None:
    runs = sources.runs
    first = runs.sizes[0] if runs is not None and runs.sizes else 0
    if runs is not None:
        runs.copy(0, first)
    else:
        move(sources.tensors[:1], sources.into[:1])
    points.reach("slot.mid_copy", str(slot.step))
    if runs is not None:
        runs.move(first)
    else:
        move(sources.tensors[1:], sources.into[1:])
    for values, into in sources.arrays:
        target = np.frombuffer(into.reshape(-1).view(torch.uint8).numpy(), dtype=values.dtype)
        np.copyto(target.reshape(values.shape), values, casting="no")
    points.reach("slot.copied", str(slot.step))
