"""What the arenas of this node hold of a run: its own ranks' snapshots, and those that it keeps for other nodes."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from everstep.errors import Damaged, Pruned
from everstep.format.names import copy_region, shared_with
from everstep.format.vote import STATE_IMAGE, ImageRecord
from everstep.memory.arena import Arena
from everstep.memory.control import IMAGE_PREFIX, STATE_REGION, Purpose
from everstep.memory.errors import ArenaGone
from everstep.memory.header import Kind
from everstep.memory.joined import AnyPin, Joined, records_of
from everstep.memory.slots import Pinned, SlotGone, SnapshotInfo

from .flush import LAYOUT_REGION, META_REGION
from .proving import check_record

Key = tuple[int, int]
"""(incarnation, step)"""

COMPLETE: frozenset[str] = frozenset()
"""What a snapshot lacks of which everything is there."""


class Slot(NamedTuple):
    """A snapshot's place: the arena, the slot in it and the slot's generation."""

    arena: Arena
    number: int
    generation: int

    def pin(self) -> Pinned:
        return self.arena.pin(self.number, self.generation, purpose=Purpose.RECOVER)


@dataclass(frozen=True, slots=True)
class Found:
    """One rank's snapshot on this node: in its own arena, or held for another node. How many ranks wrote it, the
    incarnation's record says: an arena's header speaks of its present owner.

    ``elsewhere`` are the images of a held one that lie in other slots of this node (with the region there), ``lacks``
    those that lie nowhere here.
    """

    incarnation: int
    step: int
    rank: int
    kind: Kind
    slot: Slot
    layout_hash: str
    elsewhere: Mapping[str, tuple[Slot, str]] = field(default_factory=dict)
    lacks: frozenset[str] = COMPLETE

    @property
    def key(self) -> Key:
        return self.incarnation, self.step

    def pin(self, pins: Pins) -> AnyPin:
        """Pins on all slots that it lies in. SlotGone, ArenaGone, Damaged."""
        slot = pins.on(self.slot)
        if self.kind is not Kind.HELD:
            return slot
        return Joined(slot, {image: (pins.on(at), region) for image, (at, region) in self.elsewhere.items()})


class Pins:
    """One pin on each slot, until ``stack`` ends: several snapshots may have images in one."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._pins: dict[Slot, Pinned] = {}

    def on(self, slot: Slot) -> Pinned:
        if slot not in self._pins:
            self._pins[slot] = self._stack.enter_context(slot.pin())
        return self._pins[slot]


def look_in_memory(arenas: Sequence[Arena], run_id: str) -> list[Found]:
    """All snapshots of the run in ``arenas``, own ones first. What cannot be read is left out, with a warning."""
    looked = _Looked(run_id)
    for arena in arenas:
        looked.add(arena)
    return [*looked.own(), *looked.held()]


class _Seen(NamedTuple):
    """A snapshot, and the sizes of its slot's regions."""

    rank: int
    slot: Slot
    info: SnapshotInfo
    regions: Mapping[str, int]
    records: tuple[ImageRecord, ...]


class _Looked:
    """What was seen in the arenas of one node."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._own: defaultdict[tuple[Key, int], list[_Seen]] = defaultdict(list)
        self._held: defaultdict[tuple[Key, int], list[_Seen]] = defaultdict(list)

    def add(self, arena: Arena) -> None:
        info = arena.info
        if info.run_id != self._run_id or info.kind not in (Kind.OWN, Kind.HELD):
            return
        held = info.kind is Kind.HELD
        for one in arena.snapshots():
            slot = Slot(arena, one.index, one.generation)
            try:
                with slot.pin() as pin:
                    records = _proper(pin, arena.info.chunk_bytes) if held else ()
                    seen = _Seen(info.rank, slot, one, dict(pin.regions), records)
            except (SlotGone, ArenaGone):  # of a run that goes on meanwhile
                continue
            except Damaged as error:
                _warn(f"a snapshot of rank {info.rank}, step {one.step}, in {info.path or 'memory'}: {error}")
                continue
            (self._held if held else self._own)[one.key, info.rank].append(seen)

    def own(self) -> Iterator[Found]:
        for (key, rank), some in sorted(self._own.items(), key=lambda item: item[0]):
            for seen in some:
                yield Found(*key, rank, Kind.OWN, seen.slot, seen.info.layout_hash)

    def held(self) -> Iterator[Found]:
        for (key, rank), some in sorted(self._held.items(), key=lambda item: item[0]):
            for seen in some:
                elsewhere, lacks = self._rest(key, rank, seen)
                place = seen.slot, seen.info.layout_hash
                yield Found(*key, rank, Kind.HELD, *place, elsewhere, frozenset(lacks))

    def _rest(self, key: Key, rank: int, seen: _Seen) -> tuple[dict[str, tuple[Slot, str]], list[str]]:
        """Where the images lie that were not sent, and which lie nowhere on this node."""
        elsewhere: dict[str, tuple[Slot, str]] = {}
        lacks = []
        for record in seen.records:
            if record.name == STATE_IMAGE or seen.regions.get(IMAGE_PREFIX + record.name) == record.nbytes:
                continue
            place = next(self._places(key, rank, record), None)
            if place is None:
                lacks.append(record.name)
            else:
                elsewhere[record.name] = place
        return elsewhere, lacks

    def _places(self, key: Key, rank: int, record: ImageRecord) -> Iterator[tuple[Slot, str]]:
        """Regions of other slots with that image: copies of this node's ranks, and what was held before."""
        region = copy_region(rank, record.name)
        for partner in shared_with(record.name):
            for seen in self._own.get((key, partner), ()):
                if seen.regions.get(region) == record.nbytes:
                    yield seen.slot, region
        region = IMAGE_PREFIX + record.name
        for seen in (*self._own.get((key, rank), ()), *self._held[key, rank]):
            if seen.regions.get(region) == record.nbytes:
                yield seen.slot, region


def _proper(pin: Pinned, chunk_bytes: int) -> tuple[ImageRecord, ...]:
    """The records of a held snapshot, each bound by its root. Damaged."""
    records = records_of(pin)
    for record in records:
        check_record(record, chunk_bytes, f"record of image {record.name!r} in held slot {pin.info.index}")
    for region in (STATE_REGION, LAYOUT_REGION, META_REGION):
        if region not in pin.regions:
            name = f"held slot {pin.info.index}"
            raise Damaged(f"{name} has no {region}", found=sorted(pin.regions), expected=region, name=name)
    return records


class Copies(NamedTuple):
    """Pinned snapshots of one step, at most one of each rank, all of one kind; which of the rank's they are on this
    node, and the images that they lack."""

    kind: Kind
    pins: dict[int, AnyPin]
    numbers: dict[int, int]
    lacks: dict[int, frozenset[str]]


def pin_copies(
    found: Sequence[Found], key: Key, stack: ExitStack, ranks: Collection[int] | None = None
) -> list[Copies]:
    """Pins on the snapshots of ``key`` (of ``ranks``) until ``stack`` ends: own ones first, then held ones; where a
    rank has several of a kind, the others come in sets of their own. Pruned if one went away."""
    copies: list[Copies] = []
    counts: Counter[int] = Counter()
    pins = Pins(stack)
    for one in found:
        if one.key != key or (ranks is not None and one.rank not in ranks):
            continue
        counts[one.rank] += 1
        try:
            pin = one.pin(pins)
        except (SlotGone, ArenaGone) as error:
            raise Pruned(
                f"the snapshot of step {key[1]} left memory while it was looked for", step=key[1]
            ) from error
        except Damaged as error:
            _warn(f"the snapshot of rank {one.rank}, step {one.step}: {error}")
            continue
        for some in copies:
            if some.kind is one.kind and one.rank not in some.pins:
                break
        else:
            some = Copies(one.kind, {}, {}, {})
            copies.append(some)
        some.pins[one.rank] = pin
        some.numbers[one.rank] = counts[one.rank] - 1
        some.lacks[one.rank] = one.lacks
    return copies


def _warn(text: str) -> None:
    warnings.warn(f"everstep: {text}; it is left out", RuntimeWarning, stacklevel=3)
