"""Removing checkpoints that retention gave up, and what given-up attempts left behind.

Announce, then look: a tombstone is published first, then dependents are looked for; whoever comes to depend
on a checkpoint publishes that first and then re-reads the checkpoint. One of the two always sees the other.
Order within a checkpoint: tombstone, votes, images, decisions, and long after, the tombstone. A crash
anywhere leaves a tombstone, and the next rotation finishes. Names that are not ours are never removed.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from types import MappingProxyType

from everstep.backends.api import Backend, Item
from everstep.backends.points import reach
from everstep.errors import CannotTell, Damaged, EverstepError, UnknownFormat
from everstep.format import names
from everstep.format.constants import TIME_FORMAT
from everstep.format.manifest import Abort, Decision, Manifest, Tombstone
from everstep.format.records import IncarnationRecord
from everstep.plan.lineage import Lineage
from everstep.plan.retention import RetentionPlan

from .asking import reading, writing
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
from .runs import now, read_incarnations

TOMBSTONE_WAIT_S = 3600.0
"""A tombstone outlives every commit that may still be under way: a late manifest then lies below it and
counts for nothing. By the wall clocks of two machines, hence the margin over any commit's own bound."""

PUBLISH_TRIES_MAX = 8
"""How often the next decision number is tried when others take it."""

NONE_KNOWN: Mapping[StepNames, Tombstone] = MappingProxyType({})

Key = tuple[int, int]
"""(incarnation, step)"""


@dataclass(slots=True)
class RotationReport:
    """What a rotation did. ``kept`` says of each checkpoint that was to go why it stayed; ``waiting`` are
    removed ones whose tombstone must still stand; ``foreign`` are names that were left where they lie."""

    removed: list[Key] = field(default_factory=list)
    kept: list[tuple[Key, str]] = field(default_factory=list)
    waiting: list[Key] = field(default_factory=list)
    collected: list[tuple[Key, int]] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    superseded: bool = False


def _nobody_is_gone(incarnation: int) -> bool:
    return False


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
    tombstones: Mapping[StepNames, Tombstone] = NONE_KNOWN,
    known: dict[int, IncarnationRecord] | None = None,
) -> RotationReport:
    """Remove what ``plan`` removes, finish what an earlier rotation began, collect leftover attempts.

    ``is_superseded`` is asked again before every removal: a superseded writer deletes nothing. ``is_gone``
    says of an incarnation that its writer is provably dead; only then are its undecided attempts given up.
    ``among`` says which checkpoints' directories are looked at. ``tombstones`` were read before, under these very
    names, ``known`` are records of incarnations: these are not read again.
    Raises CannotTell, SaveFailed: what was done stays done, the rest is for the next rotation.
    """
    report = RotationReport()
    keep = {key for key, _ in plan.keep}
    remove = set(plan.remove) - keep
    steps = [found for found in await list_steps(backend, empty=True) if among(found)]
    standing: dict[Key, Manifest | Tombstone | None] = {}
    for found in steps:
        if found.key in keep and len(found.attempts) == 1 and found.attempts == found.decisions:
            continue  # the plan has read its manifest, and there is nothing else
        wanted = found.key in remove
        buried = tombstones.get(found)
        if buried is not None and _is_only_waiting(found, buried, tombstone_wait_s, clock):
            report.waiting.append(found.key)
            continue
        decision = standing[found.key] = await _standing(backend, found, report, wanted=wanted)
        if (wanted or isinstance(decision, Tombstone)) and await is_superseded():
            report.superseded = True
            return report
        if isinstance(decision, Tombstone):
            await _finish(backend, found, decision, report, tombstone_wait_s, clock, known)
        elif isinstance(decision, Manifest) and wanted:
            await _remove(backend, found, decision, report, is_superseded, known)
    if await is_superseded():
        report.superseded = True
        return report
    await _collect(
        backend, [found for found in steps if found.key in standing], standing, keep, is_gone, report
    )
    return report


async def _standing(
    backend: Backend, found: StepNames, report: RotationReport, *, wanted: bool
) -> Manifest | Tombstone | None:
    """The decision that counts; None also where it cannot be read: what is damaged is not ours to remove."""
    if not found.decisions:
        return None
    try:
        return await read_decision(backend, found)
    except (Damaged, UnknownFormat) as error:
        if wanted:
            report.kept.append((found.key, f"its decision cannot be read: {error}"))
        return None


async def _remove(
    backend: Backend,
    found: StepNames,
    manifest: Manifest,
    report: RotationReport,
    is_superseded: Callable[[], Awaitable[bool]],
    known: dict[int, IncarnationRecord] | None,
) -> None:
    """Tombstone, look, delete; or, seeing a dependent, put the manifest back above the tombstone."""
    in_flight = [attempt for attempt in found.attempts if attempt > max(found.decisions)]
    if in_flight:
        report.kept.append((found.key, f"attempt {in_flight[0]} is not decided"))
        return
    tombstone = await _bury(backend, found, "retention")
    if tombstone is None:
        report.kept.append((found.key, "another process decided something about it"))
        return
    reach("rotate.tombstoned", names.checkpoint_dir(*found.place))
    try:
        need = await _needed(backend, found.key, known)
        if need is None and await is_superseded():
            report.superseded = True
            need = "a newer incarnation writes the run"
    except EverstepError:
        await _restore(backend, manifest, tombstone.number + 1)  # what cannot be seen may be there
        raise
    if need is not None:
        await _restore(backend, manifest, tombstone.number + 1)
        report.kept.append((found.key, need))
        return
    await _delete_files(backend, found, tombstone, report)
    report.removed.append(found.key)
    report.waiting.append(found.key)


async def _bury(backend: Backend, found: StepNames, reason: str) -> Tombstone | None:
    number = max(found.decisions) + 1
    tombstone = Tombstone(*found.place, number, reason, created=now())
    stood = await publish_decision(backend, tombstone, number)
    return tombstone if stood is None else None


async def _needed(backend: Backend, key: Key, known: dict[int, IncarnationRecord] | None) -> str | None:
    """Why a checkpoint under a fresh tombstone must come back: by what incarnations say *now*, nothing newer
    that counts is there to load instead of it, so that whoever adopted it (or will load next) needs it."""
    records = await read_incarnations(backend, known)
    lineage = Lineage(records)
    if not lineage.counts(*key):
        return None
    for found in reversed(await list_steps(backend)):
        if found.key == key:
            break
        if not lineage.counts(*found.key):
            continue
        with suppress(Damaged, UnknownFormat):  # what cannot be read cannot be loaded instead
            if isinstance(await read_decision(backend, found), Manifest):
                return None
    adopters = [
        record.number for record in records if (record.adopted_incarnation, record.adopted_step) == key
    ]
    who = f"incarnation {adopters[-1]} adopted it" if adopters else "it is the newest that counts"
    return f"{who}, and nothing newer is complete"


async def _restore(backend: Backend, manifest: Manifest, number: int) -> None:
    """Publish the manifest again, as a revision above the tombstone."""
    for above in range(number, number + PUBLISH_TRIES_MAX):
        stood = await publish_decision(backend, replace(manifest, revision=above), above)
        if stood is None or isinstance(stood, Manifest):
            return
    name = names.checkpoint_dir(manifest.step, manifest.incarnation)
    raise CannotTell(
        f"{name}: the manifest could not be put back above its tombstone",
        found=f"{PUBLISH_TRIES_MAX} times another decision was there first",
        hint="Rotate again",
        name=name,
    )


async def _finish(
    backend: Backend,
    found: StepNames,
    tombstone: Tombstone,
    report: RotationReport,
    tombstone_wait_s: float,
    clock: Callable[[], float],
    known: dict[int, IncarnationRecord] | None,
) -> None:
    """Go on where an earlier rotation stopped. It may have stopped before it looked for dependents, but then
    nothing was deleted yet."""
    manifest = await _intact(backend, found, tombstone)
    need = await _needed(backend, found.key, known) if manifest is not None else None
    if manifest is not None and need is not None:
        await _restore(backend, manifest, tombstone.number + 1)
        report.kept.append((found.key, need))
        return
    await _delete_files(backend, found, tombstone, report)
    if manifest is not None:
        report.removed.append(found.key)
    later = [attempt for attempt in found.attempts if attempt > tombstone.number]
    if later or _age_s(tombstone.created, clock) < tombstone_wait_s:
        report.waiting.append(found.key)
        return
    directory = names.checkpoint_dir(*found.place)
    with writing(backend, directory):
        await backend.discard_leftovers(await backend.leftovers(directory))
        await backend.delete([names.decision(*found.place, tombstone.number)])
    reach("rotate.deleted.tombstone", directory)


async def _intact(backend: Backend, found: StepNames, tombstone: Tombstone) -> Manifest | None:
    """The manifest below the tombstone if none of its votes was deleted yet (they go first)."""
    for number in reversed([number for number in found.decisions if number < tombstone.number]):
        try:
            decision = await read_decision_at(backend, *found.place, number)
        except (Damaged, UnknownFormat):
            return None
        if isinstance(decision, Manifest):
            ranks = await voted_ranks(backend, *found.place, decision.attempt)
            return decision if ranks == [record.rank for record in decision.ranks] else None
    return None


def _is_only_waiting(
    found: StepNames, tombstone: Tombstone, wait_s: float, clock: Callable[[], float]
) -> bool:
    """Whether nothing is left but the tombstone, which still has to stand."""
    alone = not found.attempts and found.decisions == (tombstone.number,)
    return alone and _age_s(tombstone.created, clock) < wait_s


def _age_s(created: str, clock: Callable[[], float]) -> float:
    """Seconds since ``created``; 0 where that is no time: then the tombstone simply stays."""
    try:
        then = datetime.strptime(created, TIME_FORMAT).replace(tzinfo=timezone.utc)
    except ValueError:
        return 0.0
    return clock() - then.timestamp()


async def _delete_files(
    backend: Backend, found: StepNames, tombstone: Tombstone, report: RotationReport
) -> None:
    """Votes, images and states of all attempts below the tombstone, then the decisions below it."""
    directory = names.checkpoint_dir(*found.place)
    attempts = [attempt for attempt in found.attempts if attempt < tombstone.number]
    for attempt in attempts:
        await delete_attempt(backend, found.place, attempt, report)
    decisions = [number for number in found.decisions if number < tombstone.number]
    with writing(backend, directory):
        await backend.delete([names.decision(*found.place, number) for number in decisions])
    reach("rotate.deleted.decisions", directory)


async def delete_attempt(
    backend: Backend, place: tuple[int, int], attempt: int, report: RotationReport
) -> None:
    """Everything in the attempt's directory that is ours; votes first. ``place`` is (step, incarnation). For attempts
    that can count no more."""
    directory = names.attempt_dir(*place, attempt)
    votes: list[Item] = []
    others: list[Item] = []
    with reading(backend, directory):
        async for item in backend.list(directory):
            parsed = names.parse(item.name)
            if parsed is None:
                report.foreign.append(item.name)
            else:
                (votes if parsed.kind is names.Kind.VOTE else others).append(item)
        temporaries = await backend.leftovers(directory)
    with writing(backend, directory):
        await backend.delete([item.name for item in votes])
        reach("rotate.deleted.votes", directory)
        await backend.delete([item.name for item in others])
        reach("rotate.deleted.images", directory)
        await backend.discard_leftovers(temporaries)
        if not (votes or others or temporaries):  # an empty directory, which a crash left: this removes it
            await backend.delete([names.vote(*place, attempt, 0)])
    report.freed_bytes += sum(item.nbytes for item in (*votes, *others, *temporaries))


async def _collect(
    backend: Backend,
    steps: Iterable[StepNames],
    standing: dict[Key, Manifest | Tombstone | None],
    keep: set[Key],
    is_gone: Callable[[int], bool],
    report: RotationReport,
) -> None:
    """Remove attempts that were given up, and give up those whose writer is gone."""
    newest = max(
        keep | {key for key, decision in standing.items() if isinstance(decision, Manifest)}, default=None
    )
    for found in steps:
        if isinstance(standing[found.key], Tombstone):
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
            left = past and not isinstance(standing[found.key], Manifest)
            if attempt not in found.decisions and (gone or left):
                directory = names.attempt_dir(*found.place, attempt)
                if await _drop_empty(backend, directory, names.vote(*found.place, attempt, 0), report):
                    continue
                undecided = True
                if gone:
                    decision = await _give_up(backend, found, attempt, report)
            counting = standing[found.key]
            against = isinstance(decision, Abort) or (
                decision is not None and isinstance(counting, Manifest) and counting.attempt != attempt
            )
            if against and (gone or past or attempt < max(found.decisions, default=0)):
                await delete_attempt(backend, found.place, attempt, report)
                report.collected.append((found.key, attempt))
        # An abort record that was only just made stays: a late commit of that attempt must find it.
        if gone and standing[found.key] is None and not undecided:
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
        await backend.delete([names.decision(*found.place, n) for n in left.decisions])
