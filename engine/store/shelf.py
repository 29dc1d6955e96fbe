"""What lies at one place, as whoever removes something there has to see it: checkpoints with what they stand on, pins,
incarnations. What never changes is read once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from everstep.backends.api import Backend
from everstep.backends.errors import NotFound, ShortRead
from everstep.errors import Damaged, RunError, UnknownFormat
from everstep.format import names
from everstep.format.manifest import Manifest, Quarantine, Tombstone
from everstep.format.records import IncarnationRecord
from everstep.format.vote import HEADER_BYTES, decode_header
from everstep.plan.lineage import Lineage
from everstep.plan.retention import Facts, Retention, RetentionPlan, facts_of, plan_retention

from .asking import each, reading
from .catalog import StepNames, list_steps, read_decision, read_decision_at, voted_ranks
from .pins import Held, holding, list_pins
from .runs import read_incarnations

Key = tuple[int, int]
"""(incarnation, step)"""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the decisions of a checkpoint come to; all None: nothing is decided.

    ``attempt`` counts, unless ``tombstone`` stands above it; ``facts`` and ``nbytes`` are those of its manifest.
    ``error``: the decision that counts cannot be read, or sets the checkpoint aside as damaged.
    """

    attempt: int | None = None
    facts: Facts | None = None
    nbytes: int = 0
    tombstone: Tombstone | None = None
    error: RunError | None = None

    @property
    def stands(self) -> bool:
        return self.attempt is not None and self.tombstone is None


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a place. ``steps`` has directories without decisions and attempts, too, and ``seen`` what all of
    them come to. ``leaning``: pairs of a base and of what may stand on it, though no manifest that counts says so:
    attempts that are not decided, checkpoints that are being removed, and those whose manifest is damaged.
    ``pinned``, with why; ``expired`` are the ids of pins that hold no more."""

    steps: tuple[StepNames, ...]
    seen: dict[StepNames, Seen]
    records: tuple[IncarnationRecord, ...]
    lineage: Lineage
    leaning: tuple[tuple[Key, Key], ...]
    pinned: dict[Key, str]
    expired: tuple[str, ...]

    @property
    def facts(self) -> dict[Key, Facts]:
        """Of what stands."""
        return {
            found.key: seen.facts
            for found, seen in self.seen.items()
            if seen.stands and seen.facts is not None
        }

    def plan(self, retention: Retention, protected: Iterable[Key] = ()) -> RetentionPlan:
        """What ``retention`` keeps and gives up of what stands; ``protected`` stay, too."""
        facts = self.facts
        needed = {*protected, *[base for base, _ in self.leaning]}
        return plan_retention(list(facts), retention, self.lineage, needed, facts=facts, pinned=self.pinned)


@dataclass(slots=True)
class Shelf:
    """Remembers what was read of a place, by names that say whether it is the same still."""

    records: dict[int, IncarnationRecord] = field(default_factory=dict)
    seen: dict[StepNames, Seen] = field(default_factory=dict)
    pins: dict[str, Held] = field(default_factory=dict)
    clock: Callable[[], float] = time.time

    async def look(self, backend: Backend, records: Sequence[IncarnationRecord] | None = None) -> Look:
        """The place as it is now; ``records`` are the run's incarnations, None: as they are there. Raises CannotTell,
        Damaged and UnknownFormat of the incarnations' records."""
        pins = await list_pins(backend, self.pins)
        if records is None:
            records = await read_incarnations(backend, self.records)
        steps = await list_steps(backend, empty=True)
        await self.read(backend, steps)
        self.seen = {found: self.seen[found] for found in steps}
        leaning = [
            pair for some in await each(steps, lambda found: self._leaning(backend, found)) for pair in some
        ]
        at_s = self.clock()
        return Look(
            tuple(steps),
            dict(self.seen),
            tuple(records),
            Lineage(records),
            tuple(leaning),
            holding(pins, at_s),
            tuple([held.id for held in pins if held.expired(at_s)]),
        )

    async def read(self, backend: Backend, steps: Iterable[StepNames]) -> None:
        """Have what the decisions of ``steps`` come to in ``seen``. What could not be read is tried again."""
        new = [found for found in steps if found not in self.seen or self.seen[found].error is not None]

        async def one(found: StepNames) -> None:
            self.seen[found] = await see(backend, found)

        await each(new, one)

    async def _leaning(self, backend: Backend, found: StepNames) -> list[tuple[Key, Key]]:
        """The bases that ``found`` may need, though it does not count."""
        seen = self.seen[found]
        parent = seen.facts.parent if seen.facts is not None else None
        bases = {parent} if seen.tombstone is not None and found.attempts and parent is not None else set()
        doubtful = [
            attempt for attempt in found.attempts if seen.error is not None or attempt not in found.decisions
        ]
        for attempt in doubtful:
            base = await base_of_attempt(backend, found, attempt)
            bases |= {base} if base is not None else set()
        return [(base, found.key) for base in bases]


async def see(backend: Backend, found: StepNames) -> Seen:
    """What the decisions of a checkpoint come to. Raises CannotTell."""
    if not found.decisions:
        return Seen()
    try:
        decision = await read_decision(backend, found)
    except (Damaged, UnknownFormat) as error:
        return Seen(error=error)
    if isinstance(decision, Tombstone):
        manifest = await buried_under(backend, found, decision) if found.attempts else None
        return Seen(tombstone=decision) if manifest is None else _seen(manifest, decision)
    if isinstance(decision, Quarantine):
        name = names.checkpoint_dir(*found.place)
        return Seen(error=Damaged(f"{name} is in quarantine", found=decision.reason, name=name))
    return Seen() if decision is None else _seen(decision, None)


def _seen(manifest: Manifest, tombstone: Tombstone | None) -> Seen:
    nbytes = sum(record.objects_nbytes for record in manifest.ranks)
    return Seen(manifest.attempt, facts_of(manifest), nbytes, tombstone)


async def buried_under(backend: Backend, found: StepNames, tombstone: Tombstone) -> Manifest | None:
    """The manifest that counted before the tombstone; None where there is none that can be read, and where this is a
    second tombstone, under which it never comes back."""
    for number in reversed([number for number in found.decisions if number < tombstone.number]):
        try:
            decision = await read_decision_at(backend, *found.place, number)
        except (Damaged, UnknownFormat):
            return None
        if isinstance(decision, Manifest):
            return decision
        if isinstance(decision, Tombstone):
            return None
    return None


async def base_of_attempt(backend: Backend, found: StepNames, attempt: int) -> Key | None:
    """What the votes of an attempt, as far as they are there, say that it is a delta of. All say the same, but those of
    ranks that stored all they have. Raises CannotTell."""
    for rank in await voted_ranks(backend, *found.place, attempt):
        name = names.vote(*found.place, attempt, rank)
        data = bytearray(HEADER_BYTES)
        try:
            with reading(backend, name):
                await _fill(backend, name, data)
            header = decode_header(bytes(data), name)
        except (NotFound, Damaged, UnknownFormat):
            continue
        if header.parent is not None:
            return header.parent[:2]
    return None


async def _fill(backend: Backend, name: str, data: bytearray) -> None:
    """As far as the object goes."""
    with suppress(ShortRead):
        await backend.read_into(name, 0, memoryview(data))
