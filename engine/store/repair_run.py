"""fsck with repair: check, mend, check again, and set aside what nobody has right."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from everstep.backends.api import Backend, Item, Names
from everstep.backends.wrap import Wrapper
from everstep.errors import NoCheckpoint, SaveFailed, StorageFull
from everstep.format import names
from everstep.format.manifest import Manifest

from .catalog import list_step
from .findings import Finding, Kind, Severity
from .fsck import WHOLE, Progress, Seen, check, finding_of
from .fsck_images import Extent
from .memories import NO_MEMORY, Memory
from .repair import Repair, quarantine, release, repair
from .repair_pins import drop_pins
from .repair_records import counting_below

log = logging.getLogger("everstep.store")

REASON_CHARS_MAX = 500

SET_ASIDE = "set aside: nobody has it right"

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
    """By the findings and, where not every byte was read, the deltas' bases: what stands on one whose images are
    damaged may be lost. What else a base stores no delta needs."""
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
    spoiled = set() if mended.seen.whole else {key for key in map(_image_of, hurt) if key is not None}
    for key in sorted(manifests, key=lambda key: (key[1], key[0])):
        if manifests[key].parent_key in spoiled:
            lost.add(key)
            spoiled.add(key)
    ordered = sorted({*manifests, *lost}, key=lambda key: (key[1] or 0, key[0] or 0))
    return Verdict(
        tuple([key for key in ordered if key not in lost]),
        tuple([(inc, step) for inc, step in ordered if (inc, step) in lost]),
    )


def _image_of(finding: Finding) -> Key | None:
    """The checkpoint whose image the finding is about, which deltas may need."""
    parsed = names.parse(finding.name)
    if parsed is None or parsed.kind is not names.Kind.IMAGE:
        return None
    return None if parsed.step is None or parsed.incarnation is None else (parsed.incarnation, parsed.step)


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

    What cannot be written, as on a read-only file system, is told among the failed. Raises as :func:`~.fsck.check` and
    :func:`~.repair.repair`.
    """
    mended = await check_only(place, step=step, extent=extent, progress=progress)
    for _ in range(PASSES_MAX):
        report = await repair(place, mended.after, others=others, memory=memory)
        mended.failed = report.failed
        report.done += await _release(place, mended, others, memory)
        if not report.done:
            break
        mended.done += report.done
        # What was mended proves more: with its vote, a rank's images.
        mended.seen = Seen()
        mended.after = await _check_again(place, step, extent, mended.seen)
    if await _set_aside(place, mended, extent):
        await _after_setting_aside(place, mended, step)
    try:
        dropped = await drop_pins(place, mended.after, others)
    except (SaveFailed, StorageFull) as error:
        dropped, mended.failed[names.PINS] = [], str(error)
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


async def _after_setting_aside(place: Backend, mended: Mended, step: int | None) -> None:
    """The findings as they are now. Images are not read again: what was wrong with one that still counts, is."""
    now = Seen()
    found = await _check_again(place, step, Extent(quick=True), now)
    told = {(finding.kind, finding.name, finding.step, finding.incarnation) for finding in found}
    mended.after = found + [
        finding
        for finding in mended.after
        if finding.severity in (Severity.DAMAGE, Severity.CANNOT_TELL)
        and (finding.incarnation, finding.step) in now.manifests
        and (finding.kind, finding.name, finding.step, finding.incarnation) not in told
    ]
    mended.seen.manifests, mended.seen.counted = now.manifests, now.counted


async def _set_aside(place: Backend, mended: Mended, extent: Extent) -> bool:
    """Put the checkpoints that are still damaged in quarantine; whether there were any. Deltas go before what they
    stand on: cut off in between, nothing counts whose base does not."""
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
    needed = _needed(manifests, [key for key in manifests if key not in damaged])
    aside = False
    for key, findings in sorted(damaged.items(), reverse=True):
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
        elif key in needed:
            mended.failed[name] = "left as it is: deltas that are whole stand on it"
        else:
            try:
                done = await quarantine(place, manifest, _reason(findings))
            except (SaveFailed, StorageFull) as error:
                mended.failed[name] = f"not set aside: {error}"
                break
            if done:
                aside = True
                mended.failed[name] = SET_ASIDE
    return aside


def _needed(manifests: Mapping[Key, Manifest], whole: Iterable[Key]) -> set[Key]:
    """All that the ``whole`` ones stand on."""
    needed: set[Key] = set()
    for key in whole:
        at = manifests[key].parent_key
        while at is not None and at not in needed:
            needed.add(at)
            at = manifests[at].parent_key if at in manifests else None
    return needed


def _reason(findings: Sequence[Finding]) -> str:
    told = f"{findings[0].name}: {findings[0].message}"
    more = f"; and {len(findings) - 1} more" if len(findings) > 1 else ""
    return told[: REASON_CHARS_MAX - len(more)] + more


async def _release(place: Backend, mended: Mended, others: Sequence[Backend], memory: Memory) -> list[Repair]:
    """Mend what is in quarantine, and let it count again once it is whole: bases before what stands on them."""
    aside = {
        (finding.incarnation, finding.step)
        for finding in mended.after
        if finding.kind is Kind.QUARANTINE and finding.step is not None and finding.incarnation is not None
    }
    done: list[Repair] = []
    for incarnation, step in sorted(aside):
        found = await list_step(place, step, incarnation)
        counting = await counting_below(place, found)
        if counting is None:
            continue
        number, manifest = counting
        damage = await _damage_of(place, manifest, number)
        if damage:
            report = await repair(place, damage, others=others, memory=memory)
            done += report.done
            if report.done:
                damage = await _damage_of(place, manifest, number)
        if any(_hinders(finding) for finding in damage):
            mended.failed[names.checkpoint_dir(step, incarnation)] = SET_ASIDE
            continue
        name = names.decision(step, incarnation, max(found.decisions))
        try:
            if await release(place, manifest, found):
                done.append(Repair(name, step, incarnation, "whole again: counts as before"))
        except (SaveFailed, StorageFull) as error:
            mended.failed[name] = str(error)
    return done


def _hinders(finding: Finding) -> bool:
    return finding.severity is Severity.CANNOT_TELL or bool(finding.hurts)


async def _damage_of(place: Backend, manifest: Manifest, number: int) -> list[Finding]:
    """What the check would say of a checkpoint, of its bases, and of the run, did its decision ``number`` count."""
    own = manifest.incarnation, manifest.step
    try:
        return [
            finding
            async for finding in check(_Uncovered(place, manifest, number), step=manifest.step)
            if finding.severity in (Severity.DAMAGE, Severity.CANNOT_TELL)
            and ((finding.incarnation, finding.step) == own or finding.step is None)
        ]
    except NoCheckpoint as error:  # rotation was faster
        return [finding_of(error, manifest)]


class _Uncovered(Wrapper):
    """The place without the decisions of a checkpoint that lie above ``number``."""

    def __init__(self, inner: Backend, manifest: Manifest, number: int) -> None:
        super().__init__(inner)
        self._directory = names.checkpoint_dir(manifest.step, manifest.incarnation)
        self._number = number

    async def list(self, prefix: str = "") -> AsyncIterator[Item]:
        async for item in self.inner.list(prefix):
            directory, _, child = item.name.rpartition("/")
            if directory != self._directory or not self._lies_above(child):
                yield item

    async def list_names(self, prefix: str = "") -> Names:
        found = await self.inner.list_names(prefix)
        if prefix.rstrip("/") != self._directory:
            return found
        return [child for child in found if not self._lies_above(child)]

    def _lies_above(self, child: str) -> bool:
        return (names.parse_decision(child) or 0) > self._number
