"""Removing checkpoints that retention gave up, and what given-up attempts left behind.

Announce, then look: a tombstone is published first, then dependents are looked for; whoever comes to depend
on a checkpoint publishes that first and then re-reads the checkpoint. One of the two always sees the other.
Dependents are incarnations that adopted it, pins, and deltas that stand on it, by their manifests, or by the votes of
attempts that are not decided. What is needed comes back by its manifest at the next number; what goes gets a second
tombstone at that same number first, so that of several processes, however they are cut off, all come to the same.
Order within a checkpoint: tombstone, second tombstone, votes, images, decisions, and long after, the second tombstone;
of several that go together all tombstones come first, those of deltas before those of their bases, then one look for
all. A crash anywhere leaves tombstones, and the next rotation finishes. Names that are not ours are never removed.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from everstep.backends.api import Backend, Item
from everstep.backends.points import reach
from everstep.errors import CannotTell, Damaged, EverstepError, UnknownFormat
from everstep.format import names
from everstep.format.manifest import Abort, Decision, Manifest, Tombstone
from everstep.plan.lineage import Lineage
from everstep.plan.retention import Facts, RetentionPlan, facts_of, seconds_of, whole_chains

from .asking import each, reading, writing
from .catalog import (
    StepNames,
    complete_undecided,
    list_step,
    list_steps,
    read_decision,
    read_decision_at,
    voted_ranks,
)
from .commit import abort_attempt, publish_decision
from .pins import remove_pins
from .runs import now, read_incarnations
from .shelf import Look, Seen, Shelf, buried_under

TOMBSTONE_WAIT_S = 3600.0
"""A tombstone outlives every commit that may still be under way: a late manifest then lies below it and
counts for nothing. By the wall clocks of two machines, hence the margin over any commit's own bound."""

PUBLISH_TRIES_MAX = 8
"""How often the next decision number is tried when others take it."""

TOGETHER_MAX = 32
"""Checkpoints that go with one look, and with few requests where many objects are removed by one. The names of all
their objects are in memory."""

Key = tuple[int, int]
"""(incarnation, step)"""


@dataclass(slots=True)
class RotationReport:
    """What a rotation did. ``kept`` says of each checkpoint that was to go why it stayed; ``waiting`` are
    removed ones whose tombstone must still stand; ``foreign`` are names that were left where they lie;
    ``pins`` are ids of expired pins that were removed."""

    removed: list[Key] = field(default_factory=list)
    kept: list[tuple[Key, str]] = field(default_factory=list)
    waiting: list[Key] = field(default_factory=list)
    collected: list[tuple[Key, int]] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    pins: list[str] = field(default_factory=list)
    superseded: bool = False


def _nobody_is_gone(incarnation: int) -> bool:
    return False


def _nothing_held() -> Collection[Key]:
    return ()


def _all(found: StepNames) -> bool:
    return True


async def rotate(
    backend: Backend,
    plan: RetentionPlan,
    *,
    is_superseded: Callable[[], Awaitable[bool]],
    is_gone: Callable[[int], bool] = _nobody_is_gone,
    among: Callable[[StepNames], bool] = _all,
    tombstone_wait_s: float = TOMBSTONE_WAIT_S,
    clock: Callable[[], float] = time.time,
    shelf: Shelf | None = None,
    look: Look | None = None,
    held: Callable[[], Collection[Key]] = _nothing_held,
) -> RotationReport:
    """Remove what ``plan`` removes, finish what an earlier rotation began, collect leftover attempts.

    ``is_superseded`` is asked again before every removal: a superseded writer deletes nothing. ``is_gone``
    says of an incarnation that its writer is provably dead; only then are its undecided attempts given up.
    ``among`` says which checkpoints' directories are looked at. ``shelf`` remembers what was read before; ``look`` is
    the one that the plan comes from: its expired pins are collected, and nothing is listed again. ``held`` are what
    this process needs at the moment, as the bases of flushes under way: asked before each tombstone, and behind it.
    Raises CannotTell, SaveFailed: what was done stays done, the rest is for the next rotation.
    """
    report = RotationReport()
    work = _Rotation(
        backend, report, shelf or Shelf(clock=clock), is_superseded, tombstone_wait_s, clock, held
    )
    steps = await list_steps(backend, empty=True) if look is None else look.steps
    keep = {key for key, _ in plan.keep}
    remove = set(plan.remove) - keep
    graves: list[StepNames] = []
    wanted: list[StepNames] = []
    standing: dict[StepNames, Seen] = {}
    # What the plan keeps has been read for it, and there is nothing else.
    simple = [found for found in steps if len(found.attempts) == 1 and found.attempts == found.decisions]
    passed = {found for found in simple if found.key in keep}
    some = [found for found in steps if among(found) and found not in passed]
    await work.shelf.read(backend, some)
    for found in some:
        seen = standing[found] = work.shelf.seen[found]
        if seen.tombstone is not None:
            if work.only_waits(found, seen.tombstone):
                report.waiting.append(found.key)
                del standing[found]
            else:
                graves.append(found)
        elif found.key in remove and seen.error is not None:
            report.kept.append((found.key, f"its decision cannot be read: {seen.error}"))
        elif found.key in remove and seen.stands:
            wanted.append(found)
    if not (await work.finish(graves) and await work.remove(wanted)) or await is_superseded():
        report.superseded = True
    else:
        await _collect(backend, standing, keep, is_gone, report, held)
        if look is not None and look.expired:
            await remove_pins(backend, look.expired)
            report.pins.extend(look.expired)
    for keys in (report.removed, report.waiting):
        keys.sort()
    return report


@dataclass(frozen=True, slots=True)
class _Grave:
    """A checkpoint under its tombstone. ``manifest`` is what counted before, None where it cannot come back: a second
    tombstone says so, or votes of it are gone."""

    found: StepNames
    tombstone: Tombstone
    manifest: Manifest | None


@dataclass(slots=True)
class _Rotation:
    """One call of :func:`rotate`."""

    backend: Backend
    report: RotationReport
    shelf: Shelf
    is_superseded: Callable[[], Awaitable[bool]]
    tombstone_wait_s: float
    clock: Callable[[], float]
    held: Callable[[], Collection[Key]]

    def only_waits(self, found: StepNames, tombstone: Tombstone) -> bool:
        """Whether nothing is left but the tombstone, which still has to stand."""
        return not found.attempts and found.decisions == (tombstone.number,) and not self._is_old(tombstone)

    def _is_old(self, tombstone: Tombstone) -> bool:
        """Whether it has stood long enough. Where its time cannot be read, it simply stays."""
        created_s = seconds_of(tombstone.created)
        return created_s is not None and self.clock() - created_s >= self.tombstone_wait_s

    async def finish(self, graves: Sequence[StepNames]) -> bool:
        """Go on where earlier rotations stopped; False if superseded. They may have stopped before they looked for
        dependents, but then nothing was deleted yet."""
        for lot in _lots(sorted(graves, key=lambda found: found.key, reverse=True)):
            if await self.is_superseded():
                return False
            if not await self._bring_to_an_end(await each(lot, self._old_grave), "", fresh=False):
                return False
        return True

    async def remove(self, wanted: Sequence[StepNames]) -> bool:
        """Tombstones, one look, second tombstones and deletion; or, where something depends on one, its manifest again
        above the tombstone. False if superseded. Deltas go before what they stand on."""
        for lot in _lots(sorted(wanted, key=lambda found: found.key, reverse=True)):
            graves: list[_Grave] = []
            superseded = False
            for found in lot:
                superseded = await self.is_superseded()
                if superseded:
                    break
                grave = await self._bury(found)
                graves += [grave] if grave is not None else []
            left = not await self._bring_to_an_end(graves, "retention", fresh=True) if graves else False
            if superseded or left:
                return False
        return True

    async def _bury(self, found: StepNames) -> _Grave | None:
        kept = self.report.kept
        in_flight = [attempt for attempt in found.attempts if attempt > max(found.decisions)]
        if in_flight or found.key in self.held():
            why = f"attempt {in_flight[0]} is not decided" if in_flight else "it is in use"
            kept.append((found.key, why))
            return None
        try:
            manifest = await read_decision(self.backend, found)
        except (Damaged, UnknownFormat) as error:
            kept.append((found.key, f"its decision cannot be read: {error}"))
            return None
        number = max(found.decisions) + 1
        tombstone = Tombstone(*found.place, number, "retention", created=now())
        if (
            not isinstance(manifest, Manifest)
            or await publish_decision(self.backend, tombstone, number) is not None
        ):
            kept.append((found.key, "another process decided something about it"))
            return None
        reach("rotate.tombstoned", names.checkpoint_dir(*found.place))
        return _Grave(found, tombstone, manifest)

    async def _old_grave(self, found: StepNames) -> _Grave:
        tombstone = self.shelf.seen[found].tombstone
        assert tombstone is not None
        manifest = await buried_under(self.backend, found, tombstone)
        if manifest is not None:
            manifest = manifest if await self._has_votes(manifest) else None
        return _Grave(found, tombstone, manifest)

    async def _has_votes(self, manifest: Manifest) -> bool:
        """Whether all votes are there, which go first."""
        ranks = await voted_ranks(self.backend, manifest.step, manifest.incarnation, manifest.attempt)
        return ranks == [record.rank for record in manifest.ranks]

    async def _bring_to_an_end(self, graves: Sequence[_Grave], why: str, *, fresh: bool) -> bool:
        """Put back those that something depends on, delete the others; False if superseded, with all put back that
        can be. ``fresh``: their tombstones are ours."""
        whole = {grave.found.key: grave for grave in graves if grave.manifest is not None}
        needed: dict[Key, str] = {}
        superseded = False
        if whole:
            try:
                needed = needed_by(await self.shelf.look(self.backend), _facts(whole), self.held())
                superseded = fresh and await self.is_superseded()
            except EverstepError:
                await self._put_back(whole.values())  # what cannot be seen may be there
                raise
            reach("rotate.looked", names.checkpoint_dir(*graves[0].found.place))
        if superseded:
            needed = {**dict.fromkeys(whole, "a newer incarnation writes the run"), **needed}
        back = await self._put_back([whole[key] for key in needed])
        self.report.kept += sorted((key, why) for key, why in needed.items() if key in back)
        await self._delete(await self._settled([grave for grave in graves if grave.found.key not in needed]))
        return not superseded

    async def _settled(self, graves: Sequence[_Grave]) -> list[_Grave]:
        """Those that go now, deltas before their bases. What another process put back keeps what it stands on."""
        going: list[_Grave] = []
        needed: dict[Key, str] = {}
        for grave in graves:
            settled = await self._settle(grave) if grave.found.key not in needed else None
            if settled is not None:
                going.append(settled)
            elif grave.manifest is not None and grave.manifest.parent_key is not None:
                needed[grave.manifest.parent_key] = f"step {grave.found.step} stands on it"
        back = await self._put_back([grave for grave in graves if grave.found.key in needed])
        self.report.kept += sorted((key, why) for key, why in needed.items() if key in back)
        return going

    async def _put_back(self, graves: Iterable[_Grave]) -> set[Key]:
        """Publish the manifests again, as revisions above the tombstones: bases before what stands on them. Which of
        them count again; the others another process removes."""
        back: set[Key] = set()
        for grave in sorted(graves, key=lambda grave: grave.found.key):
            if grave.manifest is None:
                continue
            _, stands = await _decide_above(self.backend, grave.tombstone, grave.manifest)
            reach("rotate.put_back", names.checkpoint_dir(*grave.found.place))
            if not isinstance(stands, Manifest):
                continue
            if self.backend.capabilities.atomic_create or await self._has_votes(grave.manifest):
                back.add(grave.found.key)
            else:  # another process settled that it goes, at the same moment
                await self._bury_again(await list_step(self.backend, *grave.found.place))
        return back

    async def _settle(self, grave: _Grave) -> _Grave | None:
        """The grave once nobody can put it back: under a second tombstone. None where another process was first."""
        if grave.manifest is None:
            return grave
        second = replace(grave.tombstone, created=now())
        number, stands = await _decide_above(self.backend, grave.tombstone, second)
        reach("rotate.settled", names.checkpoint_dir(*grave.found.place))
        if not isinstance(stands, Tombstone):
            self.report.kept.append((grave.found.key, "another process decided something about it"))
            return None
        above = range(grave.tombstone.number, number + 1)
        found = replace(grave.found, decisions=tuple(sorted({*grave.found.decisions, *above})))
        return replace(grave, found=found, tombstone=stands)

    async def _bury_again(self, found: StepNames) -> Tombstone | None:
        """A tombstone above the manifest of a checkpoint that was put back and whose votes are gone: the one that is on
        top then, None where others decide faster."""
        for _ in range(PUBLISH_TRIES_MAX):
            number = max(found.decisions)
            top = await read_decision_at(self.backend, *found.place, number)
            if isinstance(top, Tombstone):
                return top
            tombstone = Tombstone(*found.place, number + 1, "another process deleted it", created=now())
            if await publish_decision(self.backend, tombstone, number + 1) is None:
                return tombstone
            found = await list_step(self.backend, *found.place)
        return None

    async def _still_buried(self, graves: Sequence[_Grave]) -> list[_Grave]:
        """The graves, whose votes are deleted, as they are now. Where two may create one name, another process may have
        put one back, for it saw it whole: it is buried again."""
        if self.backend.capabilities.atomic_create:
            return list(graves)
        there = {found.place: found for found in await list_steps(self.backend)} if graves else {}
        result = []
        for grave in graves:
            found = there.get(grave.found.place)
            if found is None or max(found.decisions, default=0) <= grave.tombstone.number:
                result.append(grave)
                continue
            tombstone = await self._bury_again(found)
            if tombstone is not None:
                result.append(replace(grave, found=found, tombstone=tombstone))
        return result

    async def _delete(self, graves: Sequence[_Grave]) -> None:
        """Votes, images and states of all attempts below the tombstones, then the decisions below them; tombstones
        that have stood long enough."""
        attempts = [
            (*grave.found.place, attempt)
            for grave in graves
            for attempt in grave.found.attempts
            if attempt <= grave.tombstone.number
        ]
        rests = await delete_attempts(self.backend, attempts, self.report)
        graves = await self._still_buried(graves)
        decisions = [
            names.decision(*grave.found.place, number)
            for grave in graves
            for number in grave.found.decisions
            if number < grave.tombstone.number
        ]
        if not graves:
            return
        directory = names.checkpoint_dir(*graves[0].found.place)
        with writing(self.backend, directory):
            await self.backend.delete(decisions)
        reach("rotate.deleted.decisions", directory)
        done = (one.found for one in graves if one.manifest is not None or one.found.place in rests)
        self.report.removed += [found.key for found in done]
        for grave in graves:
            later = [attempt for attempt in grave.found.attempts if attempt > grave.tombstone.number]
            if later or not self._is_old(grave.tombstone):
                self.report.waiting.append(grave.found.key)
                continue
            directory = names.checkpoint_dir(*grave.found.place)
            with writing(self.backend, directory):
                await self.backend.discard_leftovers(await self.backend.leftovers(directory))
                await self.backend.delete([names.decision(*grave.found.place, grave.tombstone.number)])
            reach("rotate.deleted.tombstone", directory)


def _lots(steps: Sequence[StepNames]) -> Iterator[Sequence[StepNames]]:
    for start in range(0, len(steps), TOGETHER_MAX):
        yield steps[start : start + TOGETHER_MAX]


def _facts(graves: Mapping[Key, _Grave]) -> dict[Key, Facts]:
    return {key: facts_of(grave.manifest) for key, grave in graves.items() if grave.manifest is not None}


def needed_by(look: Look, buried: Mapping[Key, Facts], held: Collection[Key] = ()) -> dict[Key, str]:
    """Which of the checkpoints under tombstones (of which all is there still) must come back, and why: those that are
    pinned, or ``held``; what a delta stands on that is not among them, or may; the newest that counts, where nothing
    newer can be loaded instead of it, so that whoever adopted it (or will load next) needs it; and the bases of all
    these."""
    standing = {key: facts for key, facts in look.facts.items() if key not in buried}
    needed = {key: f"pinned: {look.pinned[key]}" for key in buried if key in look.pinned}
    needed |= {key: "it is in use" for key in buried if key in held and key not in needed}
    leaning = [(facts.parent, key) for key, facts in standing.items() if facts.parent is not None]
    leaning += [(base, key) for base, key in look.leaning if key not in buried]
    for base, key in leaning:
        if base in buried:
            needed.setdefault(base, f"step {key[1]} stands on it")
    facts = {**standing, **buried}
    newest = max((key for key in whole_chains(list(facts), facts) if look.lineage.counts(*key)), default=None)
    if newest in buried and newest is not None:
        needed.setdefault(newest, _nothing_newer(look, newest))
    for key in list(needed):
        at = key
        while (parent := buried[at].parent) is not None and parent in buried and parent not in needed:
            needed[parent] = f"step {at[1]} stands on it"
            at = parent
    return needed


def _nothing_newer(look: Look, key: Key) -> str:
    adopters = [
        record.number for record in look.records if (record.adopted_incarnation, record.adopted_step) == key
    ]
    who = f"incarnation {adopters[-1]} adopted it" if adopters else "it is the newest that counts"
    return f"{who}, and nothing newer is complete"


async def _decide_above(
    backend: Backend, tombstone: Tombstone, wanted: Manifest | Tombstone
) -> tuple[int, Decision]:
    """Publish ``wanted`` at the first number above the tombstone at which no attempt was given up; the number, and what
    stands there. Whoever puts a checkpoint back and whoever removes it meet at the same one."""
    for number in range(tombstone.number + 1, tombstone.number + 1 + PUBLISH_TRIES_MAX):
        decision: Decision
        if isinstance(wanted, Manifest):
            decision = replace(wanted, revision=number)
        else:
            decision = replace(wanted, number=number)
        stood = await publish_decision(backend, decision, number)
        if not isinstance(stood, Abort):
            return number, stood or decision
    name = names.checkpoint_dir(tombstone.step, tombstone.incarnation)
    raise CannotTell(
        f"{name}: nothing could be decided above its tombstone",
        found=f"{PUBLISH_TRIES_MAX} attempts were given up there",
        hint="Rotate again",
        name=name,
    )


async def delete_attempt(
    backend: Backend, place: tuple[int, int], attempt: int, report: RotationReport
) -> None:
    """Everything in the attempt's directory that is ours; votes first. ``place`` is (step, incarnation). For attempts
    that can count no more."""
    await delete_attempts(backend, [(*place, attempt)], report)


async def delete_attempts(
    backend: Backend, attempts: Sequence[tuple[int, int, int]], report: RotationReport
) -> set[tuple[int, int]]:
    """As :func:`delete_attempt`, of several (step, incarnation, attempt). Of which steps something was there."""
    if not attempts:
        return set()
    listed = await each(attempts, lambda attempt: _list_attempt(backend, attempt))
    first = names.attempt_dir(*attempts[0])
    temporaries = [item for one in listed for item in one.temporaries]
    # A crash leaves empty directories: asking to delete a name in one, which is not there, removes it.
    empty = [names.vote(*one.place, 0) for one in listed if not (one.votes or one.others or one.temporaries)]
    with writing(backend, first):
        await backend.delete([item.name for one in listed for item in one.votes])
        reach("rotate.deleted.votes", first)
        await backend.delete([item.name for one in listed for item in one.others])
        reach("rotate.deleted.images", first)
        await backend.discard_leftovers(temporaries)
        await backend.delete(empty)
    report.foreign += [name for one in listed for name in one.foreign]
    gone = [item for one in listed for item in (*one.votes, *one.others)]
    report.freed_bytes += sum(item.nbytes for item in (*gone, *temporaries))
    return {one.place[:2] for one in listed if one.votes or one.others or one.temporaries}


@dataclass(slots=True)
class _Listed:
    """What lies in an attempt's directory."""

    place: tuple[int, int, int]
    votes: list[Item] = field(default_factory=list)
    others: list[Item] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    temporaries: list[Item] = field(default_factory=list)


async def _list_attempt(backend: Backend, place: tuple[int, int, int]) -> _Listed:
    directory = names.attempt_dir(*place)
    found = _Listed(place)
    with reading(backend, directory):
        async for item in backend.list(directory):
            parsed = names.parse(item.name)
            if parsed is None:
                found.foreign.append(item.name)
            else:
                (found.votes if parsed.kind is names.Kind.VOTE else found.others).append(item)
        found.temporaries = await backend.leftovers(directory)
    return found


async def _collect(
    backend: Backend,
    standing: Mapping[StepNames, Seen],
    keep: set[Key],
    is_gone: Callable[[int], bool],
    report: RotationReport,
    held: Callable[[], Collection[Key]],
) -> None:
    """Remove attempts that were given up, or that another one took the place of, and give up those whose writer is
    gone. What this process reads of such an attempt, as the base of a flush, it reads to its end; others who do are
    told that it was replaced, and find the other one."""
    newest = max(keep | {found.key for found, seen in standing.items() if seen.stands}, default=None)
    for found, seen in standing.items():
        if seen.tombstone is not None or (seen.stands and found.attempts == (seen.attempt,)):
            continue
        past = newest is not None and found.key < newest
        gone = is_gone(found.incarnation)
        if (past or gone) and not (found.decisions or found.attempts):
            await _drop_empty(
                backend, names.checkpoint_dir(*found.place), names.decision(*found.place, 1), report
            )
            continue
        undecided = False
        for attempt in found.attempts:
            decision = await _decision_of(backend, found, attempt)
            # Above a manifest it may be a full in the making, which takes its time.
            left = past and not seen.stands
            if attempt not in found.decisions and (gone or left):
                directory = names.attempt_dir(*found.place, attempt)
                if await _drop_empty(backend, directory, names.vote(*found.place, attempt, 0), report):
                    continue
                undecided = True
                if gone:
                    decision = await _give_up(backend, found, attempt, report)
            against = isinstance(decision, Abort) or (
                decision is not None and seen.stands and seen.attempt != attempt
            )
            if isinstance(decision, Manifest) and found.key in held():
                continue
            if against and (gone or past or attempt < max(found.decisions, default=0)):
                await delete_attempt(backend, found.place, attempt, report)
                report.collected.append((found.key, attempt))
        # An abort record that was only just made stays: a late commit of that attempt must find it.
        if gone and not seen.stands and not undecided:
            await _forget(backend, found)


async def _drop_empty(backend: Backend, directory: str, some_name: str, report: RotationReport) -> bool:
    """Whether the directory has nothing of ours (but temporaries); it is then removed with these. A crash
    leaves such ones. Asking to delete a name in it, which is not there, removes an empty directory."""
    with reading(backend, directory):
        if await backend.list_names(directory):
            return False
        temporaries = await backend.leftovers(directory)
    with writing(backend, directory):
        await backend.discard_leftovers(temporaries)
        await backend.delete([some_name])
    report.freed_bytes += sum(item.nbytes for item in temporaries)
    return True


async def _holds(backend: Backend, directory: str) -> bool:
    """Whether the directory is there: on flat storage, whether an object lies in it."""
    if not backend.capabilities.flat:
        return True
    with reading(backend, directory):
        async for _ in backend.list(directory):
            return True
    return False


async def _decision_of(backend: Backend, found: StepNames, attempt: int) -> Decision | None:
    if attempt not in found.decisions:
        return None
    try:
        return await read_decision_at(backend, *found.place, attempt)
    except (Damaged, UnknownFormat):
        return None


async def _give_up(
    backend: Backend, found: StepNames, attempt: int, report: RotationReport
) -> Manifest | Abort | None:
    """An abort record for an undecided attempt of a dead writer. One that is complete and that the lineage
    reaches is a checkpoint whose manifest is missing: it is left, to be committed by repair."""
    lineage = Lineage(await read_incarnations(backend))
    if lineage.counts(*found.key) and attempt in await complete_undecided(backend, found):
        report.kept.append((found.key, f"attempt {attempt} is complete but not decided"))
        return None
    return await abort_attempt(backend, *found.place, attempt, reason="its writer is gone")


async def _forget(backend: Backend, found: StepNames) -> None:
    """The abort records of a dead writer's checkpoint of which nothing else is left."""
    left = await list_step(backend, *found.place)
    # Some object stores go on naming directories in which nothing is left.
    attempts = [names.attempt_dir(*found.place, attempt) for attempt in left.attempts]
    if not left.decisions or any([await _holds(backend, directory) for directory in attempts]):
        return
    for number in left.decisions:
        if not isinstance(await _decision_of(backend, left, number), Abort):
            return
    with writing(backend, names.checkpoint_dir(*found.place)):
        # The highest first: a gap below one, where this is cut off, would seem a loss.
        await backend.delete([names.decision(*found.place, n) for n in reversed(left.decisions)])
