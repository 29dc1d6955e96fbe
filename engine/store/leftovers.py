"""What crashed writers left in a run: unfinished temporaries and uploads, attempts that were given up or that nobody
finishes.

The rules are those of rotation, whose code this uses: an abort record first, then a look, then deletion. So whatever is
taken for dead and is not ends in an error of its writer, never in half a checkpoint. Age only spares living writers
that error; it is taken by the clocks of this machine and of the store.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from everstep.backends.api import Backend, Item, Items, Notes, Writer
from everstep.backends.errors import Permanent
from everstep.backends.wrap import Wrapper
from everstep.format import names
from everstep.plan.retention import RetentionPlan

from .asking import reading, writing
from .catalog import list_steps
from .rotate import Key, rotate
from .runs import open_run, read_incarnations

OLDER_THAN_S = 3600.0
"""What was written to later than this is left alone by default; longer than any commit may take."""

YOUNG = "it was written to not long ago"
LIVING = "its incarnation may be at work"


@dataclass(slots=True)
class Collected:
    """What :func:`collect_leftovers` removed. ``attempts`` are (incarnation, step) and the attempt's number;
    ``removed`` are checkpoints whose removal by rotation had broken off. ``kept`` says of what is unfinished and was
    left, why."""

    attempts: list[tuple[Key, int]] = field(default_factory=list)
    removed: list[Key] = field(default_factory=list)
    temporaries: list[Item] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    freed_bytes: int = 0


async def collect_leftovers(
    backend: Backend,
    *,
    living: Collection[int] = (),
    older_than_s: float = OLDER_THAN_S,
    dry_run: bool = False,
    clock: Callable[[], float] = time.time,
) -> Collected:
    """Remove what was last written to at least ``older_than_s`` ago and can be of no use any more.

    ``living`` are incarnations that somebody may still write: of these no open attempt is touched, whatever its age.
    With ``dry_run`` nothing is changed, and the report says what would be. Raises NotARun, Damaged (the incarnations'
    records), CannotTell, SaveFailed: what was done stays done.
    """
    await open_run(backend)
    records = {record.number for record in await read_incarnations(backend)}
    report = Collected()
    judged = _Judged(living, clock() - older_than_s, whatever_the_age=older_than_s <= 0)
    await judged.look(backend, records, report)

    async def never() -> bool:
        return False

    target = _Pretending(backend) if dry_run else backend
    done = await rotate(
        target,
        RetentionPlan((), ()),
        is_superseded=never,
        is_gone=lambda incarnation: incarnation in records and incarnation not in living,
        among=lambda found: found.place in judged.old,
    )
    report.attempts, report.removed, report.freed_bytes = done.collected, done.removed, done.freed_bytes
    report.kept += [(names.checkpoint_dir(key[1], key[0]), why) for key, why in done.kept]
    await _discard(target, report, judged)
    return report


class _Judged:
    """What may be touched. ``old`` are checkpoints, by (step, incarnation), that may; ``spared`` says why others may
    not."""

    def __init__(self, living: Collection[int], limit: float, *, whatever_the_age: bool) -> None:
        self.old: set[tuple[int, int]] = set()
        self.spared: dict[tuple[int, int], str] = {}
        self._decided: set[tuple[int, int, int | None]] = set()
        self._living = living
        self._limit = limit
        self._whatever_the_age = whatever_the_age

    async def look(self, backend: Backend, records: Collection[int], report: Collected) -> None:
        """Look at all checkpoints; open attempts that are left alone go into the report."""
        written = await self._written(backend)
        for found in await list_steps(backend, empty=True):
            self._decided.update((*found.place, number) for number in found.decisions)
            is_open = [attempt for attempt in found.attempts if attempt not in found.decisions]
            if found.incarnation not in records:
                self.spared[found.place] = "the record of its incarnation is missing"
            elif written.get(found.place, -math.inf) > self._limit:
                self.spared[found.place] = YOUNG
            elif found.incarnation in self._living and is_open:
                self.spared[found.place] = LIVING
            why = self.spared.get(found.place)
            if why is None and is_open and not backend.capabilities.atomic_create:
                why = "this storage cannot give it up: it has no atomic create-if-absent"
            if why is None:
                self.old.add(found.place)
            else:
                report.kept += [(names.attempt_dir(*found.place, attempt), why) for attempt in is_open]

    async def _written(self, backend: Backend) -> dict[tuple[int, int], float]:
        """When something was last written to each checkpoint, by (step, incarnation)."""
        found: dict[tuple[int, int], float] = {}

        def see(item: Item) -> None:
            place = _place(item.name)
            if place is not None:
                found[place[:2]] = max(found.get(place[:2], -math.inf), self._at(item))

        with reading(backend, names.CHECKPOINTS):
            async for item in backend.list(names.CHECKPOINTS):
                see(item)
            for item in await backend.leftovers(names.CHECKPOINTS):
                see(item)
        return found

    def why_kept(self, item: Item) -> str:
        """Why a temporary or an upload stays; "" if it need not."""
        place = _place(item.name)
        if place is not None and place[:2] in self.spared:
            return self.spared[place[:2]]
        if place is not None and place[1] in self._living and place not in self._decided:
            return LIVING  # on object stores unfinished uploads may be all there is of an attempt
        return YOUNG if self._at(item) > self._limit else ""

    def _at(self, item: Item) -> float:
        """When ``item`` was written; where the store does not say, it is never old, but where age does not matter."""
        if item.modified is not None:
            return item.modified
        return -math.inf if self._whatever_the_age else math.inf


def _place(name: str) -> tuple[int, int, int | None] | None:
    """The checkpoint, as (step, incarnation), and the attempt if there is one, in whose directory ``name`` lies."""
    pieces = name.split("/")
    if len(pieces) < 4 or pieces[0] != names.CHECKPOINTS:
        return None
    step, incarnation = names.parse_step(pieces[1]), names.parse_incarnation(pieces[2])
    return (
        None if step is None or incarnation is None else (step, incarnation, names.parse_attempt(pieces[3]))
    )


async def _discard(backend: Backend, report: Collected, judged: _Judged) -> None:
    """Remove temporaries and uploads, but for those that there is a reason to keep."""
    with reading(backend, ""):
        items = await backend.leftovers("")
    for item in items:
        why = judged.why_kept(item)
        if why:
            report.kept.append((item.name, why))
        else:
            report.temporaries.append(item)
    with writing(backend, ""):
        await backend.discard_leftovers(report.temporaries)
    report.freed_bytes += sum(item.nbytes for item in report.temporaries)


class _Pretending(Wrapper):
    """Does as if it changed what it is asked to change."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._discarded: set[str] = set()

    async def open_writer(
        self, name: str, nbytes: int, notes: Notes | None = None, *, at_most: bool = False
    ) -> Writer:
        raise Permanent(name, "nothing is written here")

    async def write(self, name: str, data: bytes) -> None:
        raise Permanent(name, "nothing is written here")

    async def create(self, name: str, data: bytes) -> None:
        """Done, for all that is seen of it."""

    async def delete(self, names: Iterable[str]) -> None:
        """Done, for all that is seen of it."""

    async def leftovers(self, prefix: str = "") -> Items:
        return [item for item in await self.inner.leftovers(prefix) if item.name not in self._discarded]

    async def discard_leftovers(self, items: Iterable[Item]) -> None:
        self._discarded.update(item.name for item in items)
