"""Which parity slots lie in the memory of which nodes, what can be rebuilt with them, and reading them."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .errors import Damaged, EverstepError
from .exchange.protocol import Proof, encode_records
from .exchange.server import Shelf
from .format.hashing import rank_root
from .memory.arena import Arena
from .memory.errors import ArenaGone, SlotGone
from .memory.header import Kind
from .memory.slots import Pinned
from .peers.described import PARITY_RANK, Described, ImageOf, Seat, decode_described, group_of
from .plan.parity import ParityGroup
from .rebuilding import RebuiltSource
from .store.blocking import run_blocking
from .store.holdings import Key, Slot
from .store.sources import HELD, ArenaSource, Source

NODES_TOLD_MAX = 128
"""Up to so many nodes tell each other of all their parity, so that a damaged chunk of a snapshot that is there can be
rebuilt, too; more of them tell only what lost snapshots need."""

LABEL = "parity slot"

Place = tuple[str, int]
"""A node, and which of its parity slots of the step."""

Lacking = Mapping[int, frozenset[str]]
"""By saved rank of which any node knows, the images that no node has."""


class Found(NamedTuple):
    """One parity slot on this node, and whose parity it holds."""

    key: Key
    number: int
    slot: Slot
    described: Described


def look_for_parity(arenas: Sequence[Arena], run_id: str) -> list[Found]:
    """All parity of the run in ``arenas``. What cannot be read is left out, with a warning."""
    found: list[Found] = []
    counts: Counter[Key] = Counter()
    for arena in arenas:
        info = arena.info
        if info.run_id != run_id or info.kind is not Kind.PARITY:
            continue
        for one in arena.snapshots():
            slot = Slot(arena, one.index, one.generation)
            try:
                with slot.pin() as pin:
                    state = run_blocking(_source(pin, info.chunk_bytes).state(PARITY_RANK))
                described = decode_described(state, f"{LABEL} {one.index} in {info.path or 'memory'}")
            except (SlotGone, ArenaGone):  # of a run that goes on meanwhile
                continue
            except (Damaged, KeyError) as error:
                told = (
                    f"everstep: parity of step {one.step} in {info.path or 'memory'}: {error}; it is left out"
                )
                warnings.warn(told, RuntimeWarning, stacklevel=2)
                continue
            found.append(Found(one.key, counts[one.key], slot, described))
            counts[one.key] += 1
    return found


def _source(pin: Pinned, chunk_bytes: int) -> ArenaSource:
    """A parity slot, as the snapshot of a rank that is none."""
    return ArenaSource({PARITY_RANK: pin}, chunk_bytes, LABEL, kind=HELD)


@dataclass
class _Group:
    """Nodes that share parity of one step, put together from what their slots say. ``images`` by position: None where
    no slot says."""

    m: int
    seats: tuple[Seat, ...]
    chunk_bytes: int
    images: list[tuple[ImageOf, ...] | None]
    holders: dict[tuple[int, int], list[Place]] = field(default_factory=dict)
    """By (stripe, row) who has the parity block."""

    def takes(self, described: Described) -> bool:
        """Whether it speaks of the same snapshots."""
        of = described.seats, described.m, described.chunk_bytes
        return of == (self.seats, self.m, self.chunk_bytes) and all(
            known is None or at == described.position or known == own
            for at, (known, own) in enumerate(zip(self.images, described.images, strict=True))
        )

    def add(self, described: Described, place: Place) -> None:
        for at, own in enumerate(described.images):
            if at != described.position:
                self.images[at] = own
        for block in self.map.code.held(described.position):
            self.holders.setdefault(block, []).append(place)

    @property
    def map(self) -> ParityGroup:
        return group_of(self.seats, self.m, self.chunk_bytes, [own or () for own in self.images])

    def lost(self, lacking: Lacking) -> set[int]:
        """Positions of the nodes of whose images no node has all."""
        return {
            at
            for at, own in enumerate(self.images)
            if any(one.rank not in lacking or one.image in lacking[one.rank] for one in own or ())
        }

    def rebuilt(self, lacking: Lacking) -> dict[int, set[str]]:
        """By rank of lost nodes the images that follow from what is left."""
        found: dict[int, set[str]] = defaultdict(set)
        for at in self.map.rebuildable(self.lost(lacking), self.holders):
            for one in self.images[at] or ():
                found[one.rank].add(one.image)
        return found

    def told(self, lacking: Lacking) -> str | None:
        """Why some of its nodes cannot be rebuilt; None where all can."""
        lost = self.lost(lacking)
        if lost <= self.map.rebuildable(lost, self.holders):
            return None
        names = ", ".join(self.seats[at].name for at in sorted(lost))
        return (
            f"{len(lost)} of the {len(self.seats)} nodes of a parity group are lost, of which any {self.m} may be "
            f"({names}; parity of {len(self.holders)} of {self.m * len(self.seats)} blocks is left)"
        )


class ParityStanding:
    """Who has parity of what, the same on all ranks."""

    def __init__(self) -> None:
        self._groups: dict[Key, list[_Group]] = defaultdict(list)

    def add(self, node: str, told: Sequence[Sequence[Any]]) -> None:
        """``told`` is :func:`told_of` of what was found there."""
        for incarnation, step, number, data in told:
            described = decode_described(data, f"{LABEL} of another node")
            groups = self._groups[incarnation, step]
            group = next((one for one in groups if one.takes(described)), None)
            if group is None:
                nothing: list[tuple[ImageOf, ...] | None] = [None] * len(described.seats)
                group = _Group(described.m, described.seats, described.chunk_bytes, nothing)
                groups.append(group)
            group.add(described, (node, number))

    def lacking(self, key: Key, before: Lacking) -> dict[int, frozenset[str]]:
        """What is missing still once all is rebuilt that can be."""
        found = dict(before)
        for group in self._groups.get(key, ()):
            for rank, images in group.rebuilt(before).items():
                if rank in found:
                    found[rank] -= images
        return found

    def told(self, key: Key, lacking: Lacking) -> str:
        """Why not all of ``key`` can be rebuilt; empty where there is no parity of it."""
        return "; ".join(filter(None, (group.told(lacking) for group in self._groups.get(key, ()))))

    def sources(
        self, key: Key, data: Sequence[Source], read: Callable[[Place], Source | None]
    ) -> list[RebuiltSource]:
        """What can be computed from ``data`` and parity; ``read`` gives a parity slot as the snapshot of
        ``PARITY_RANK``, or None if it cannot be read."""
        found = []
        slots: dict[Place, Source | None] = {}
        for group in self._groups.get(key, ()):
            blocks: dict[tuple[int, int], list[Source]] = {}
            for block, places in group.holders.items():
                for place in places:
                    if place not in slots:
                        slots[place] = read(place)
                    if (source := slots[place]) is not None:
                        blocks.setdefault(block, []).append(source)
            if data and blocks:
                found.append(RebuiltSource(group.map, blocks, data))
        return found


def worth_telling(found: Sequence[Found], nodes: int, lacking: Callable[[Key], Lacking]) -> list[list[Any]]:
    """What a node's first rank tells of its parity, as plain values: all, or, among many nodes, what lost snapshots
    need."""

    def wanted(one: Found) -> bool:
        known = lacking(one.key)
        ranks = [rank for seat in one.described.seats for rank in seat.ranks]
        return nodes <= NODES_TOLD_MAX or any(known.get(rank) for rank in ranks)

    return [[*one.key, one.number, one.described.encode()] for one in found if wanted(one)]


def pin_parity(
    found: Sequence[Found], key: Key, stack: ExitStack, chunk_bytes: int
) -> dict[int, ArenaSource]:
    """This node's parity slots of ``key`` by number, pinned until ``stack`` ends. What went away is left out."""
    sources = {}
    for one in found:
        if one.key == key and one.described.chunk_bytes == chunk_bytes:
            with contextlib.suppress(SlotGone, ArenaGone, Damaged):
                sources[one.number] = _source(stack.enter_context(one.slot.pin()), chunk_bytes)
    return sources


async def prove_parity(source: ArenaSource, number: int, problems: list[str]) -> tuple[Proof, Shelf] | None:
    """A parity slot as it is offered to other nodes; None, and a problem, where it cannot be proved."""
    try:
        records = await source.records(PARITY_RANK)
    except EverstepError as error:
        problems.append(f"{source.label}: {error}")
        return None
    views = {name: source.mapped(PARITY_RANK, name) for name in records}
    ordered = list(records.values())
    empty = memoryview(b"")
    proof = Proof(PARITY_RANK, 0, "", rank_root(ordered), b"", number)
    return proof, Shelf(empty, empty, memoryview(encode_records(ordered)), views)
