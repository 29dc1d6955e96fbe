"""Proving a run: every record, decision, vote, layout and chunk against what points at it.

Reads only, with bounded memory, and may run beside a live run: what rotation removes or a commit finishes
meanwhile is no damage.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from everstep.backends.api import Backend
from everstep.backends.errors import NotFound
from everstep.backends.wrap import Wrapper
from everstep.errors import CannotTell, Damaged, EverstepError, NoCheckpoint, UnknownFormat
from everstep.format import names
from everstep.format.manifest import Abort, Decision, Manifest, Quarantine, Tombstone
from everstep.format.records import IncarnationRecord
from everstep.plan.lineage import Lineage

from .asking import each, reading
from .catalog import (
    StepNames,
    complete_undecided,
    list_step,
    list_steps,
    read_decision,
    read_decision_at,
    read_layout,
)
from .findings import Finding, Kind, Severity
from .fsck_images import Extent, Images
from .pins import Held, list_pins
from .runs import incarnation_numbers, open_run, read_incarnation
from .votes import read_gather

WHOLE = Extent()
"""Every byte is read."""

DECISION_WAIT_S = 1.0
"""How long an attempt that has all its votes is given to be committed by a run that is alive."""

Progress = Callable[[int, int], None]
"""Called with the bytes proved so far and the bytes to prove in all."""


@dataclass(slots=True)
class _Checkpoint:
    """One checkpoint's directory with what could be read of its decisions."""

    found: StepNames
    decisions: dict[int, Decision]
    unreadable: dict[int, EverstepError]

    @property
    def standing(self) -> Manifest | Tombstone | Quarantine | None:
        """The decision that counts; None also where an unreadable one hides it."""
        bad = set(self.found.decisions) - set(self.decisions)
        for number in reversed(self.found.decisions):
            if number in bad:
                return None
            decision = self.decisions[number]
            if not isinstance(decision, Abort):
                return decision
        return None


@dataclass(slots=True)
class _Run:
    """What the checks share. ``chunk_bytes`` is None where run.json cannot be read; ``lineage`` where records
    are missing or damaged."""

    backend: Backend
    chunk_bytes: int | None = None
    records: frozenset[int] | None = None
    lineage: Lineage | None = None
    newest: tuple[int, int] = (-1, -1)
    sizes: dict[str, int] = field(default_factory=dict)
    files: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Names in ``sizes`` by the directory in which they lie."""
    layouts_seen: set[str] = field(default_factory=set)
    standing: dict[tuple[int, int], Manifest] = field(default_factory=dict)


@dataclass(slots=True)
class Seen:
    """What a check has seen, once it is done: the checkpoints that count, by (incarnation, step), those of them that
    the lineage reaches, and the bytes of images that were proved, and left unread."""

    manifests: dict[tuple[int, int], Manifest] = field(default_factory=dict)
    counted: set[tuple[int, int]] = field(default_factory=set)
    proved_bytes: int = 0
    unread_bytes: int = 0
    whole: bool = False
    """Whether every byte was read, so that what is wrong with a base was told of each delta that needs it."""


async def check(
    backend: Backend,
    *,
    step: int | None = None,
    extent: Extent = WHOLE,
    progress: Progress | None = None,
    decision_wait_s: float | None = None,
    seen: Seen | None = None,
) -> AsyncIterator[Finding]:
    """Check the run, or only the checkpoints of ``step``. ``extent`` says how much of the images' bytes is read; their
    sizes, and all hashes of everything else, are checked. Yields findings as they come; ``seen`` is filled.

    Raises NotARun, UnknownFormat (of the run itself), NoCheckpoint (no directory of ``step``).
    """
    run = _Run(backend)
    async for finding in _records(run):
        yield finding
    try:
        steps = [found for found in await list_steps(backend) if step is None or found.step == step]
        await _list_all(run, step)
    except CannotTell as error:
        yield _cannot_tell(error, names.CHECKPOINTS)
        return
    if step is not None and not steps:
        raise NoCheckpoint(f"{backend.url}: nothing of step {step} is there", found="nothing", step=step)
    run.newest = max((found.key for found in steps), default=run.newest)
    checkpoints = await each(steps, lambda found: _read(run, found))
    if not extent.whole:
        checkpoints.reverse()  # where not all is read, the newest is what matters most
    images = Images(_Listed(backend, run.sizes), run.chunk_bytes, extent, progress)
    for checkpoint in checkpoints:
        if isinstance(checkpoint.standing, Manifest):
            images.expect(checkpoint.standing)
            run.standing[checkpoint.found.key] = checkpoint.standing
    for checkpoint in checkpoints:
        async for finding in _checkpoint(run, checkpoint, images):
            yield finding
    if seen is not None:
        _fill(seen, run, images)
    wait_s = DECISION_WAIT_S if decision_wait_s is None else decision_wait_s
    async for finding in _undecided(run, checkpoints, wait_s):
        yield finding
    async for finding in _rest(run, checkpoints, step):
        yield finding
    if step is None:
        async for finding in _pins(run):
            yield finding


class _Listed(Wrapper):
    """The place, of whose objects a listing has told the sizes: they are not asked for one by one."""

    def __init__(self, inner: Backend, sizes: Mapping[str, int]) -> None:
        super().__init__(inner)
        self._sizes = sizes

    async def size(self, name: str) -> int:
        found = self._sizes.get(name)
        return await self.inner.size(name) if found is None else found


def _fill(seen: Seen, run: _Run, images: Images) -> None:
    seen.manifests = dict(run.standing)
    seen.counted = {key for key in run.standing if run.lineage is None or run.lineage.counts(*key)}
    seen.proved_bytes, seen.unread_bytes = images.proved_bytes, images.unread_bytes
    seen.whole = not images.quick and not images.unread_bytes


def hurts(found: StepNames) -> str:
    return f"step {found.step} of incarnation {found.incarnation} cannot be loaded"


def _damage(error: EverstepError, name: str, found: StepNames | None, hurt: str) -> Finding:
    """An error of reading as a finding: the object that it names, else ``name``."""
    missing = "is missing" in error.message
    at = str(error.fields.get("name") or name)
    return Finding(
        Severity.DAMAGE,
        Kind.MISSING if missing else Kind.DAMAGED,
        at,
        found.step if found else None,
        found.incarnation if found else None,
        str(error).removeprefix(f"{at}: "),
        hurt,
    )


def finding_of(error: EverstepError, manifest: Manifest) -> Finding:
    """The error of a checkpoint's object, as a finding."""
    found = StepNames(manifest.step, manifest.incarnation, (), ())
    return _damage(error, names.checkpoint_dir(*found.place), found, hurts(found))


def _cannot_tell(error: EverstepError, name: str, found: StepNames | None = None) -> Finding:
    at = str(error.fields.get("name") or name)
    return Finding(
        Severity.CANNOT_TELL,
        Kind.CANNOT_TELL,
        at,
        found.step if found else None,
        found.incarnation if found else None,
        str(error).removeprefix(f"{at}: "),
        "whether it is good is not known",
    )


async def _records(run: _Run) -> AsyncIterator[Finding]:
    """run.json and the incarnations' records; fills ``chunk_bytes`` and ``lineage``."""
    try:
        run.chunk_bytes = (await open_run(run.backend)).chunk_bytes
    except Damaged as error:
        yield _damage(error, names.RUN, None, "no checkpoint of the run can be loaded")
    except CannotTell as error:
        yield _cannot_tell(error, names.RUN)
    try:
        numbers = await incarnation_numbers(run.backend)
    except CannotTell as error:
        yield _cannot_tell(error, names.INCARNATIONS)
        return
    records: list[IncarnationRecord] = []
    for number in range(1, max(numbers, default=0) + 1):
        name = names.incarnation(number)
        try:
            records.append(await read_incarnation(run.backend, number))
        except (Damaged, UnknownFormat) as error:
            yield _damage(error, name, None, "which checkpoints count cannot be decided")
        except CannotTell as error:
            yield _cannot_tell(error, name)
    run.records = frozenset(numbers)
    # A record leads back only, so where none is missing they make a lineage.
    run.lineage = Lineage(records) if len(records) == max(numbers, default=0) else None


async def _list_all(run: _Run, step: int | None) -> None:
    prefix = "" if step is None else names.step_dir(step)
    with reading(run.backend, prefix):
        async for item in run.backend.list(prefix):
            run.sizes[item.name] = item.nbytes
            run.files[item.name.rpartition("/")[0]].append(item.name)


async def _read(run: _Run, found: StepNames) -> _Checkpoint:
    """Read all decisions of one checkpoint."""
    checkpoint = _Checkpoint(found, {}, {})
    for number in found.decisions:
        try:
            decision = await read_decision_at(run.backend, found.step, found.incarnation, number)
        except (Damaged, UnknownFormat, CannotTell) as error:
            checkpoint.unreadable[number] = error
        else:
            if decision is not None:
                checkpoint.decisions[number] = decision
    if len(checkpoint.decisions) + len(checkpoint.unreadable) < len(found.decisions):
        again = await list_step(run.backend, found.step, found.incarnation)  # rotation is at work
        checkpoint.found = again
        checkpoint.decisions = {n: d for n, d in checkpoint.decisions.items() if n in again.decisions}
    return checkpoint


async def _checkpoint(run: _Run, checkpoint: _Checkpoint, images: Images) -> AsyncIterator[Finding]:
    found, standing = checkpoint.found, checkpoint.standing
    gone = not any(_files(run, found, attempt) for attempt in found.attempts)
    for number, error in checkpoint.unreadable.items():
        yield _unreadable(checkpoint, number, error, gone)
    if isinstance(standing, Quarantine):
        yield _quarantine(found, standing)
    only_aborts = all(isinstance(one, Abort) for one in checkpoint.decisions.values())
    # A mirror that was given up has the abort record alone, whatever the attempt's number was.
    removed = isinstance(standing, Tombstone) or (checkpoint.unreadable and gone)
    if not removed and (checkpoint.unreadable or not only_aborts):
        for number in sorted(set(range(1, max(found.decisions, default=0) + 1)) - set(found.decisions)):
            name = names.decision(found.step, found.incarnation, number)
            yield _missing(found, name, "a higher decision is there", "")
    record = names.incarnation(found.incarnation)
    if run.records is not None and found.incarnation not in run.records:
        yield _missing(found, record, "checkpoints of that incarnation are there", hurts(found))
    if isinstance(standing, Tombstone):
        yield _tombstone(run, found, standing)
    elif isinstance(standing, Manifest):
        async for finding in _manifest(run, found, standing, images):
            yield finding
    for attempt, decision in sorted(checkpoint.decisions.items()):
        files = _files(run, found, attempt)
        replaced = isinstance(standing, Manifest) and standing.attempt > attempt
        if files and (isinstance(decision, Abort) or (replaced and isinstance(decision, Manifest))):
            name = names.attempt_dir(found.step, found.incarnation, attempt)
            how = (
                f"given up ({decision.reason})" if isinstance(decision, Abort) else "replaced by a later one"
            )
            why = f"attempt {attempt} was {how}; {len(files)} files remain"
            yield Finding(Severity.INFO, Kind.LEFTOVER, name, found.step, found.incarnation, why)


def _unreadable(checkpoint: _Checkpoint, number: int, error: EverstepError, gone: bool) -> Finding:
    """A decision that cannot be read. It hurts only where none that counts lies above it, and where it may be more than
    what a removal left behind. ``gone``: of the checkpoint's attempts nothing is there."""
    found = checkpoint.found
    name = names.decision(found.step, found.incarnation, number)
    if isinstance(error, CannotTell):
        return _cannot_tell(error, name, found)
    harmless = checkpoint.standing is not None or gone
    return _damage(error, name, found, "" if harmless else hurts(found))


def _missing(found: StepNames, name: str, why: str, hurt: str) -> Finding:
    message = f"{name} is missing, but {why}"
    return Finding(Severity.DAMAGE, Kind.MISSING, name, found.step, found.incarnation, message, hurt)


def _files(run: _Run, found: StepNames, attempt: int) -> list[str]:
    return run.files.get(names.attempt_dir(found.step, found.incarnation, attempt), [])


def _tombstone(run: _Run, found: StepNames, tombstone: Tombstone) -> Finding:
    name = names.decision(found.step, found.incarnation, tombstone.number)
    left = sum(len(_files(run, found, attempt)) for attempt in found.attempts)
    others = len(found.decisions) - 1
    if left or others:
        rest = f"{left} files and {others} decisions remain for the next rotation"
        message = f"removed ({tombstone.reason}), but {rest}"
        return Finding(Severity.WARNING, Kind.TOMBSTONE, name, found.step, found.incarnation, message)
    message = f"removed ({tombstone.reason}); the tombstone waits for late commits"
    return Finding(Severity.INFO, Kind.TOMBSTONE, name, found.step, found.incarnation, message)


def _quarantine(found: StepNames, record: Quarantine) -> Finding:
    name = names.decision(found.step, found.incarnation, record.number)
    message = f"set aside as damaged, nothing of it is removed: {record.reason}"
    return Finding(Severity.WARNING, Kind.QUARANTINE, name, found.step, found.incarnation, message)


async def _chain(run: _Run, found: StepNames, manifest: Manifest) -> Finding | None:
    """A delta's base must count."""
    key = manifest.parent_key
    if key is None or key in run.standing:
        return None
    try:
        decision = await read_decision(run.backend, await list_step(run.backend, key[1], key[0]))
    except Damaged:
        decision = None
    if isinstance(decision, Manifest):
        return None
    name = names.checkpoint_dir(key[1], key[0])
    message = f"the base of step {found.step}, step {key[1]} of incarnation {key[0]}, does not count"
    return Finding(Severity.DAMAGE, Kind.CHAIN, name, found.step, found.incarnation, message, hurts(found))


async def _manifest(
    run: _Run, found: StepNames, manifest: Manifest, images: Images
) -> AsyncIterator[Finding]:
    """Votes, layouts, states and images of a checkpoint that counts."""
    source = await images.source(manifest)
    run.layouts_seen.update(record.layout_hash for record in manifest.ranks)
    reported: set[str] = set()
    broken = await _chain(run, found, manifest)
    if broken is not None:
        reported.add(broken.name)
        yield broken
    async for error in images.check(source):
        if isinstance(error, CannotTell):
            finding = _cannot_tell(error, names.checkpoint_dir(found.step, found.incarnation), found)
        else:
            hurt = "" if error.fields.get("name") in images.passed_by else hurts(found)
            finding = _damage(error, names.checkpoint_dir(found.step, found.incarnation), found, hurt)
        if finding.name not in reported:
            reported.add(finding.name)
            yield finding
    for name in _files(run, found, manifest.attempt):
        parsed = names.parse(name)
        if parsed is not None and parsed.kind is names.Kind.GATHER and parsed.rank is not None:
            finding_of_gather = await _gather(run, found, manifest, parsed.rank)
            if finding_of_gather is not None:
                yield finding_of_gather
        elif (
            parsed is not None
            and name not in images.named
            and (*found.place, parsed.rank) not in images.unnamed
        ):
            yield Finding(
                Severity.INFO,
                Kind.FOREIGN,
                name,
                found.step,
                found.incarnation,
                "no vote of the manifest names it",
            )


async def _gather(run: _Run, found: StepNames, manifest: Manifest, rank: int) -> Finding | None:
    """Gathered votes must be those that the manifest names. Nothing needs them any more."""
    name = names.gather(found.step, found.incarnation, manifest.attempt, rank)
    try:
        headers = await read_gather(run.backend, found.step, found.incarnation, manifest.attempt, rank)
    except NotFound:
        return None  # rotation is at work
    except (Damaged, UnknownFormat) as error:
        return _damage(error, name, found, "")
    except CannotTell as error:
        return _cannot_tell(error, name, found)
    hashes = {record.rank: record.vote_hash for record in manifest.ranks}
    odd = [header.rank for header in headers if hashes.get(header.rank) != header.hash]
    if not odd:
        return None
    others = Damaged(f"{name}: other votes than the manifest's", found=f"ranks {odd}", name=name)
    return _damage(others, name, found, "")


async def _undecided(run: _Run, checkpoints: list[_Checkpoint], wait_s: float) -> AsyncIterator[Finding]:
    """Attempts without a decision. One with all its votes is damage, unless a live run decides it
    meanwhile."""
    open_attempts: list[tuple[_Checkpoint, int, bool]] = []
    for checkpoint in checkpoints:
        found = checkpoint.found
        undecided = [a for a in found.attempts if a not in found.decisions and _files(run, found, a)]
        if not undecided or isinstance(checkpoint.standing, Tombstone):
            continue
        try:
            complete = await complete_undecided(run.backend, found)
        except (CannotTell, UnknownFormat) as error:
            yield _cannot_tell(error, names.checkpoint_dir(found.step, found.incarnation), found)
            continue
        open_attempts += [(checkpoint, attempt, attempt in complete) for attempt in undecided]
    if any(is_complete for _, _, is_complete in open_attempts):
        await asyncio.sleep(wait_s)
    for checkpoint, attempt, is_complete in open_attempts:
        found = checkpoint.found
        now = await list_step(run.backend, found.step, found.incarnation)
        if attempt in now.attempts and attempt not in now.decisions:
            yield _open_attempt(run, checkpoint, attempt, is_complete)


def _open_attempt(run: _Run, checkpoint: _Checkpoint, attempt: int, complete: bool) -> Finding:
    found = checkpoint.found
    reached = run.lineage is None or run.lineage.counts(found.incarnation, found.step)
    if complete and reached:
        name = names.decision(found.step, found.incarnation, attempt)
        return Finding(
            Severity.DAMAGE,
            Kind.UNDECIDED,
            name,
            found.step,
            found.incarnation,
            f"{name} is missing: all votes of attempt {attempt} are there, but no decision",
            "" if isinstance(checkpoint.standing, Manifest) else hurts(found),
        )
    name = names.attempt_dir(found.step, found.incarnation, attempt)
    if found.key == run.newest:
        message, severity = f"attempt {attempt} is not finished: in flight, or left behind", Severity.INFO
    else:
        message, severity = f"attempt {attempt} was never finished", Severity.WARNING
    return Finding(severity, Kind.LEFTOVER, name, found.step, found.incarnation, message)


async def _pins(run: _Run) -> AsyncIterator[Finding]:
    """Pins that cannot be read, and those that hold nothing any more: rotation removes the expired ones."""
    try:
        pins = await list_pins(run.backend)
    except CannotTell as error:
        yield _cannot_tell(error, names.PINS)
        return
    for held in pins:
        name, key = names.pin(held.id), held.key
        if held.error is not None:
            newer = isinstance(held.error, UnknownFormat)
            severity = Severity.CANNOT_TELL if newer else Severity.DAMAGE
            yield Finding(severity, Kind.PIN, name, key[1], key[0], _unreadable_pin(held))
            continue
        if held.expired(time.time()):
            why = "the pin has expired"
        elif key not in run.standing:
            why = f"it pins step {key[1]} of incarnation {key[0]}, which does not count"
        else:
            continue
        yield Finding(Severity.INFO, Kind.PIN, name, key[1], key[0], why)


def _unreadable_pin(held: Held) -> str:
    said = str(held.error).removeprefix(f"{names.pin(held.id)}: ")
    return f"{said}; until it is unpinned (--id {held.id}) it holds step {held.key[1]}, whatever it said"


async def _rest(run: _Run, checkpoints: list[_Checkpoint], step: int | None) -> AsyncIterator[Finding]:
    """Layouts that no manifest names, foreign names, temporaries."""
    for name in sorted(run.sizes):
        parsed = names.parse(name)
        if parsed is None:
            yield Finding(
                Severity.INFO, Kind.FOREIGN, name, None, None, "not a name of this format; left alone"
            )
        elif parsed.kind is names.Kind.ASIDE:
            why = "a damaged object, kept when it was made anew; nothing needs it"
            yield Finding(Severity.INFO, Kind.ASIDE, name, None, None, why)
        elif parsed.kind is names.Kind.LAYOUT and parsed.hash not in run.layouts_seen and parsed.hash:
            try:
                await read_layout(run.backend, parsed.hash)
            except (Damaged, UnknownFormat) as error:
                yield _damage(error, name, None, "")
            except CannotTell as error:
                yield _cannot_tell(error, name)
    try:
        prefix = "" if step is None else names.step_dir(step)
        with reading(run.backend, prefix):
            leftovers = await run.backend.leftovers(prefix)
    except CannotTell as error:
        yield _cannot_tell(error, prefix)
        return
    for item in leftovers:
        message = f"{item.nbytes} bytes of a writer that died, or that is at work"
        yield Finding(Severity.INFO, Kind.TEMPORARY, item.name, None, None, message)
