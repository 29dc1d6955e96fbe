"""Mending a node's own tier, object by object. Nothing else is written there: it has no decisions, and takes none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from everstep.backends.api import Backend
from everstep.backends.errors import NotFound
from everstep.errors import Damaged, RunError, SaveFailed, StorageFull
from everstep.format import names
from everstep.format.manifest import Manifest
from everstep.format.records import decode_run
from everstep.format.vote import vote_hash

from .asking import writing
from .catalog import list_step, list_steps, read_decision_at
from .findings import Finding, Severity
from .fsck import Progress
from .fsck_images import Extent
from .fsck_near import check_near, shares_at
from .memories import NO_MEMORY, Memory
from .mirror import read_small
from .repair import Repair, repair
from .repair_rank import Share
from .repair_run import Mended
from .runs import open_run

PASSES_MAX = 3
"""Rounds of mending: votes prove images."""


async def look_near(
    near: Backend,
    *,
    others: Sequence[Backend],
    step: int | None = None,
    extent: Extent,
    progress: Progress | None = None,
) -> Mended:
    """What a check of the node's tier finds. Raises as :func:`~.fsck_near.check_near`."""
    mended = Mended([], [])
    found = [
        finding
        async for finding in check_near(
            near, others, step=step, extent=extent, progress=progress, seen=mended.seen
        )
    ]
    mended.before = mended.after = found
    return mended


async def mend_near(
    near: Backend,
    *,
    others: Sequence[Backend],
    memory: Memory = NO_MEMORY,
    step: int | None = None,
    extent: Extent,
    progress: Progress | None = None,
) -> Mended:
    """Check a node's own tier and mend its damaged objects from itself, ``others`` and ``memory``. What nobody has
    right stays as it is: loads take it from the root. Raises as :func:`~.fsck_near.check_near` and
    :func:`~.repair.repair`."""
    mended = await look_near(near, others=others, step=step, extent=extent, progress=progress)
    for _ in range(PASSES_MAX):
        damage = [finding for finding in mended.after if finding.severity is Severity.DAMAGE]
        if not damage:
            break
        done, mended.failed = await _mend(near, others, memory, damage)
        mended.done += done
        if not done:
            break
        again = await look_near(near, others=others, step=step, extent=extent)
        mended.after, mended.seen = again.after, again.seen
    return mended


async def _mend(
    near: Backend, others: Sequence[Backend], memory: Memory, damage: Sequence[Finding]
) -> tuple[list[Repair], dict[str, str]]:
    """What was put right, and why the rest was not, by name."""
    layouts = [one for one in damage if (of := names.parse(one.name)) and of.kind is names.Kind.LAYOUT]
    report = await repair(near, layouts, others=others)
    done, failed = report.done, report.failed
    if any(finding.name == names.RUN for finding in damage):
        mended = None
        with suppress(SaveFailed, StorageFull):
            mended = await _run_record(near, others)
        if mended is None:
            failed[names.RUN] = "no other place has it, and a manifest that names a vote that is here"
        else:
            done.append(mended)
    by_share: dict[tuple[int, int, int, int], set[str]] = {}
    for finding in damage:
        parsed = names.parse(finding.name)
        if parsed is None or parsed.step is None or parsed.incarnation is None:
            continue
        if parsed.attempt is not None and parsed.rank is not None:
            share = parsed.step, parsed.incarnation, parsed.attempt, parsed.rank
            by_share.setdefault(share, set()).add(finding.name)
    chunk_bytes = None
    with suppress(Damaged):
        chunk_bytes = (await open_run(near)).chunk_bytes
    for (step, incarnation, attempt, rank), wanted in by_share.items():
        found = await list_step(near, step, incarnation)
        manifest = (await shares_at(near, others, found, attempt)).manifest
        record = next((one for one in manifest.ranks if one.rank == rank), None) if manifest else None
        if manifest is None or record is None:
            failed.update(dict.fromkeys(wanted, "no place's manifest proves its vote"))
            continue
        mending = Share([near, *others], manifest, record, memory, chunk_bytes)
        try:
            failed.update(await mending.mend(wanted))
        except (SaveFailed, StorageFull) as error:
            failed.update(dict.fromkeys(wanted, str(error)))
        done += [Repair(name, step, incarnation, how, nbytes) for name, how, nbytes in mending.mended]
    return done, failed


async def _run_record(near: Backend, others: Sequence[Backend]) -> Repair | None:
    """run.json, from a place whose manifest names a vote that lies here: that is the same run's."""
    for other in others:
        with suppress(RunError, NotFound):
            data = await read_small(other, names.RUN)
            decode_run(data, names.RUN)
            if await _names_a_vote(other, near):
                with writing(near, names.RUN):
                    await near.write(names.RUN, data)
                return Repair(names.RUN, None, None, f"from {other.url}", len(data))
    return None


async def _names_a_vote(place: Backend, near: Backend) -> bool:
    for found in await list_steps(near):
        for attempt in found.attempts:
            decision = await read_decision_at(place, *found.place, attempt)
            for record in decision.ranks if isinstance(decision, Manifest) else ():
                with suppress(NotFound):
                    data = await read_small(near, names.vote(*found.place, attempt, record.rank))
                    if vote_hash(data) == record.vote_hash:
                        return True
    return False
