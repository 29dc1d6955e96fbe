"""fsck with repair: check, mend, check again, and set aside what nobody has right."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from everstep.backends.api import Backend
from everstep.errors import CannotTell, NoCheckpoint
from everstep.format import names
from everstep.format.manifest import Manifest

from .findings import Finding, Kind, Severity
from .fsck import WHOLE, Progress, Seen, check, finding_of
from .fsck_images import Extent, Images
from .memories import NO_MEMORY, Memory
from .repair import Repair, counting_manifest, quarantine, release, repair
from .repair_pins import drop_pins
from .runs import open_run
from .sources import DurableSource

log = logging.getLogger("everstep.store")

REASON_CHARS_MAX = 500

PASSES_MAX = 4
"""Rounds of mending: records prove decisions, these votes, these images."""

Key = tuple[int, int]
"""(incarnation, step)"""


@dataclass(slots=True)
class Mended:
    """What became of one place: the findings before and after, what was repaired, and why the rest was not, by name.
    ``seen`` is of the check that came last."""

    before: list[Finding]
    after: list[Finding]
    done: list[Repair] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    seen: Seen = field(default_factory=Seen)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which checkpoints can be loaded, and which are damaged, or set aside; (incarnation, step), oldest first."""

    loadable: tuple[Key, ...]
    lost: tuple[Key, ...]


def verdict(mended: Mended) -> Verdict:
    """By the findings and, for what was not read, the deltas' bases: what stands on a lost one is lost."""
    manifests = mended.seen.manifests
    hurt = [f for f in mended.after if f.severity is Severity.DAMAGE and f.hurts]
    lost = {
        (finding.incarnation, finding.step)
        for finding in hurt
        if finding.incarnation is not None and finding.step is not None
    }
    lost |= {
        (finding.incarnation, finding.step)
        for finding in mended.after
        if finding.kind is Kind.QUARANTINE and finding.incarnation is not None and finding.step is not None
    }
    if any(finding.step is None for finding in hurt):
        lost |= set(manifests)
    for key in sorted(manifests, key=lambda key: (key[1], key[0])):
        if manifests[key].parent_key in lost:
            lost.add(key)
    ordered = sorted({*manifests, *lost}, key=lambda key: (key[1] or 0, key[0] or 0))
    return Verdict(
        tuple([key for key in ordered if key not in lost]),
        tuple([(inc, step) for inc, step in ordered if (inc, step) in lost]),
    )


async def check_only(
    place: Backend, *, step: int | None = None, extent: Extent = WHOLE, progress: Progress | None = None
) -> Mended:
    """As :func:`check_and_mend`, without mending."""
    seen = Seen()
    found = [
        finding async for finding in check(place, step=step, extent=extent, progress=progress, seen=seen)
    ]
    return Mended(found, found, seen=seen)


async def check_and_mend(
    place: Backend,
    *,
    others: Sequence[Backend] = (),
    memory: Memory = NO_MEMORY,
    step: int | None = None,
    extent: Extent = WHOLE,
    progress: Progress | None = None,
) -> Mended:
    """Check ``place`` and mend what is damaged there, from itself, ``others`` and ``memory``. A checkpoint that stays
    damaged is set aside, if another one of the lineage is whole and no delta that counts stands on it; one that was set
    aside before and is whole now counts again. Pins that hold nothing, and never will, are removed. Crash-safe: calling
    it again goes on.

    Raises as :func:`~.fsck.check` and :func:`~.repair.repair`.
    """
    mended = await check_only(place, step=step, extent=extent, progress=progress)
    await _release(place, mended.before, others, memory, mended)
    for _ in range(PASSES_MAX):
        report = await repair(place, mended.after, others=others, memory=memory)
        mended.done += report.done
        mended.failed = report.failed
        if not mended.done:
            break
        # What was mended proves more: with its vote, a rank's images.
        mended.seen = Seen()
        mended.after = await _check_again(place, step, extent, mended.seen)
        if not report.done:
            break
    if await _set_aside(place, mended, extent):
        now = Seen()
        mended.after = await _check_again(place, step, Extent(quick=True), now)
        mended.seen.manifests, mended.seen.counted = now.manifests, now.counted
    dropped = await drop_pins(place, mended.after, others)
    gone = {one.name for one in dropped}
    mended.after = [finding for finding in mended.after if finding.name not in gone]
    mended.failed = {name: why for name, why in mended.failed.items() if name not in gone}
    mended.done += dropped
    return mended


async def _check_again(place: Backend, step: int | None, extent: Extent, seen: Seen) -> list[Finding]:
    try:
        return [finding async for finding in check(place, step=step, extent=extent, seen=seen)]
    except NoCheckpoint:  # rotation was faster
        return []


async def _set_aside(place: Backend, mended: Mended, extent: Extent) -> bool:
    """Put the checkpoints that are still damaged in quarantine; whether there were any."""
    if not place.capabilities.atomic_create:
        return False
    damaged: defaultdict[Key, list[Finding]] = defaultdict(list)
    for finding in mended.after:
        if finding.severity is Severity.DAMAGE and finding.hurts:
            parsed = names.parse(finding.name)
            is_record = parsed is not None and parsed.kind is names.Kind.INCARNATION
            if finding.step is None or finding.incarnation is None or is_record:
                return False  # the run itself is damaged: nothing is known of its checkpoints
            damaged[finding.incarnation, finding.step].append(finding)
    manifests = mended.seen.manifests
    whole = [key for key in mended.seen.counted if key not in damaged]
    bases = {manifest.parent_key for key, manifest in manifests.items() if key not in damaged}
    aside = False
    for key, findings in damaged.items():
        manifest = manifests.get(key)
        if manifest is None:
            continue
        name = names.checkpoint_dir(manifest.step, manifest.incarnation)
        if not extent.whole:
            mended.failed[name] = (
                "not set aside: not every byte was read, so it is not known what else is whole"
            )
        elif not whole:
            mended.failed[name] = "left as it is: no other checkpoint is whole, and parts of this one may be"
        elif key in bases:
            mended.failed[name] = "left as it is: deltas that are whole stand on it"
        elif await quarantine(place, manifest, _reason(findings)):
            aside = True
            how = "set aside: nobody has it right"
            mended.done.append(Repair(name, manifest.step, manifest.incarnation, how))
    return aside


def _reason(findings: Sequence[Finding]) -> str:
    told = f"{findings[0].name}: {findings[0].message}"
    more = f"; and {len(findings) - 1} more" if len(findings) > 1 else ""
    return told[: REASON_CHARS_MAX - len(more)] + more


async def _release(
    place: Backend, findings: Sequence[Finding], others: Sequence[Backend], memory: Memory, mended: Mended
) -> None:
    """Mend what is in quarantine, and let it count again once it is whole."""
    for finding in findings:
        if finding.kind is not Kind.QUARANTINE or finding.step is None or finding.incarnation is None:
            continue
        manifest = await counting_manifest(place, (finding.step, finding.incarnation))
        if manifest is None:
            continue
        damage = await _damage_of(place, manifest)
        if damage:
            report = await repair(place, damage, others=others, memory=memory)
            mended.done += report.done
            damage = await _damage_of(place, manifest)
        if not damage and await release(place, manifest):
            how = "whole again: counts as before"
            mended.done.append(Repair(finding.name, finding.step, finding.incarnation, how))


async def _damage_of(place: Backend, manifest: Manifest) -> list[Finding]:
    """Everything that is wrong with a checkpoint, whether or not it counts."""
    run = await open_run(place)
    images = Images(place, run.chunk_bytes, WHOLE, None)
    found = []
    async for error in images.check(DurableSource(place, manifest, run.chunk_bytes)):
        if isinstance(error, CannotTell):
            raise error
        found.append(finding_of(error, manifest))
    return found
