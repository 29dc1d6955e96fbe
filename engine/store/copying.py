"""Copying a run, or some of its checkpoints, from one place to another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from everstep.backends.api import Backend
from everstep.errors import (
    Damaged,
    EverstepError,
    NoCheckpoint,
    Pruned,
    SaveAbandoned,
    SaveFailed,
    UnknownFormat,
)
from everstep.format import names
from everstep.format.manifest import Abort, Manifest, RankRecord
from everstep.format.records import RunRecord
from everstep.plan.lineage import Lineage

from .asking import each
from .catalog import StepNames, list_step, list_steps, read_decision, read_layout
from .mirror import (
    IMAGES_PARALLEL,
    conclude,
    copy_records,
    give_up,
    mend_rank,
    mirror_rank,
    missing_ranks,
    require_parent,
    standing,
)
from .rotate import RotationReport, delete_attempt
from .runs import open_run, read_incarnations

RANKS_PARALLEL = 2
"""Ranks that are copied side by side, each with memory as :mod:`.mirror` says."""

Key = tuple[int, int]
"""(incarnation, step)"""

Progress = Callable[[int, int], None]
"""Called with the bytes that are there by now, and with how many are to be there."""


@dataclass(slots=True)
class CopyReport:
    """What :func:`copy_run` came to, by (incarnation, step).

    ``copied`` now stand at the target, ``present`` stood there before, and ``resent`` are those of them of which
    objects were missing there, or cut, and were sent again. ``pruned`` were removed at the source meanwhile.
    ``refused`` were given up or removed at the target: what stands there counts. ``failed`` are damaged at the source
    (or at the target, by their sizes, and the source has another attempt), or deltas whose base is missing.
    ``sent_bytes`` were sent of ranks that were copied whole.
    """

    run_id: str
    copied: list[Key] = field(default_factory=list)
    present: list[Key] = field(default_factory=list)
    resent: list[Key] = field(default_factory=list)
    pruned: list[Key] = field(default_factory=list)
    refused: list[tuple[Key, str]] = field(default_factory=list)
    failed: list[tuple[Key, EverstepError]] = field(default_factory=list)
    sent_bytes: int = 0


async def copy_run(
    source: Backend,
    target: Backend,
    *,
    steps: Collection[int] | None = None,
    newest: int | None = None,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy checkpoints of the run's lineage to ``target``: those of ``steps``, the ``newest`` ones, or all; the bases
    of deltas with them. May run beside a live run, and be called again: what is there is not sent again. What could
    not be copied of one checkpoint does not hold up the others.

    Raises NotARun, NoCheckpoint (a step that is not there; nothing was written then), RunError (another run is at
    ``target``), UnknownFormat, CannotTell, SaveFailed, StorageFull: what was copied stays.
    """
    run = await open_run(source)
    report = CopyReport(run.run_id)
    lineage = Lineage(await read_incarnations(source))
    found = [one for one in await list_steps(source) if lineage.counts(*one.key)]
    if steps is not None:
        found = [one for one in found if one.step in steps]
    manifests = await _manifests(source, found, report)
    if newest is not None:
        manifests = dict(list(manifests.items())[-newest:])
        report.failed = [one for one in report.failed if one[0] > min(manifests, default=one[0])]
    await _add_parents(source, manifests)
    _require(source, steps, manifests, report)
    await copy_records(source, target)
    copying = _Copying(source, target, run, report, progress)
    copying.total = sum(record.objects_nbytes for manifest in manifests.values() for record in manifest.ranks)
    with ThreadPoolExecutor(RANKS_PARALLEL * IMAGES_PARALLEL, thread_name_prefix="everstep-copy") as pool:
        for key in sorted(manifests, key=lambda key: (key[1], key[0])):
            await copying.checkpoint(manifests[key], pool)
    return report


async def _manifests(source: Backend, found: Iterable[StepNames], report: CopyReport) -> dict[Key, Manifest]:
    """Those that count, oldest first; what cannot be read is noted."""

    async def read(one: StepNames) -> Manifest | None:
        try:
            decision = await read_decision(source, one)
        except (Damaged, UnknownFormat) as error:
            report.failed.append((one.key, error))
            return None
        return decision if isinstance(decision, Manifest) else None

    decisions = await each(found, read)
    return {(one.incarnation, one.step): one for one in decisions if one is not None}


async def _add_parents(source: Backend, manifests: dict[Key, Manifest]) -> None:
    """The bases that the chosen ones need, and theirs."""
    todo = list(manifests.values())
    while todo:
        key = todo.pop().parent_key
        if key is not None and key not in manifests:
            decision = await read_decision(source, await list_step(source, key[1], key[0]))
            if isinstance(decision, Manifest):
                manifests[key] = decision
                todo.append(decision)


def _require(
    source: Backend,
    steps: Collection[int] | None,
    manifests: dict[Key, Manifest],
    report: CopyReport,
) -> None:
    """NoCheckpoint where what was asked for is not there."""
    there = {step for _, step in manifests} | {step for (_, step), _ in report.failed}
    missing = sorted(set(steps or ()) - there)
    if missing or not there:
        asked = f"steps {missing}" if missing else "checkpoints"
        raise NoCheckpoint(
            f"{source.url} has no {asked}",
            found=f"steps {sorted(there)}" if there else "nothing that counts",
            expected="committed checkpoints of the run's lineage",
            hint="See everstep ls; nothing was copied",
        )


class _Copying:
    """One call of :func:`copy_run`."""

    def __init__(
        self,
        source: Backend,
        target: Backend,
        run: RunRecord,
        report: CopyReport,
        progress: Progress | None,
    ) -> None:
        self.total = 0
        self._done = 0
        self._layouts: set[str] = set()
        """That are right at the target."""
        self._source = source
        self._target = target
        self._run = run
        self._report = report
        self._progress = progress

    async def checkpoint(self, manifest: Manifest, pool: ThreadPoolExecutor) -> None:
        """Copy one checkpoint; its end goes into the report."""
        key = (manifest.incarnation, manifest.step)
        report = self._report
        due = self._done + sum(record.objects_nbytes for record in manifest.ranks)
        try:
            before = await standing(self._target, manifest)
            if before is None:
                await self._ranks(manifest, pool)
            elif isinstance(before, Manifest):
                await self._there(manifest, before, pool)
            stood = await conclude(self._source, self._target, manifest)
        except Pruned:
            await self._drop(manifest)
            report.pruned.append(key)
        except SaveAbandoned as error:
            report.refused.append((key, str(error.found)))
        except (Damaged, UnknownFormat, NoCheckpoint) as error:
            report.failed.append((key, error))
        else:
            if isinstance(stood, Abort):
                report.refused.append((key, stood.reason))
            elif stood is None:
                raise SaveFailed(
                    f"{self._target.url}: what was copied of step {manifest.step} is not there any more",
                    found=f"ranks {await missing_ranks(self._target, manifest)} missing",
                    hint="Something removes it; copy again",
                    step=manifest.step,
                    tier=self._target.url,
                )
            else:
                (report.copied if before is None else report.present).append(key)
        self._tell(due - self._done)

    async def _ranks(self, manifest: Manifest, pool: ThreadPoolExecutor) -> None:
        await require_parent(self._target, manifest)
        missing = set(await missing_ranks(self._target, manifest))

        async def one(record: RankRecord) -> None:
            sent = await mirror_rank(
                self._source,
                self._target,
                manifest,
                record.rank,
                run=self._run,
                pool=pool,
                told=self._tell,
            )
            self._report.sent_bytes += sent

        await each([record for record in manifest.ranks if record.rank in missing], one, limit=RANKS_PARALLEL)

    async def _there(self, manifest: Manifest, stood: Manifest, pool: ThreadPoolExecutor) -> None:
        """What counts at the target must be there with its sizes. Of a rank of which it is not, everything is proved
        there, and sent again where it is not right."""
        missing = set(await missing_ranks(self._target, stood))
        missing |= {record.rank for record in stood.ranks if not await self._has_layout(record.layout_hash)}
        if not missing or not isinstance(await standing(self._target, manifest), Manifest):
            return  # removed meanwhile
        if stood.attempt != manifest.attempt:
            name = names.attempt_dir(stood.step, stood.incarnation, stood.attempt)
            raise Damaged(
                f"{self._target.url}: step {stood.step} is damaged there",
                found=f"objects of ranks {sorted(missing)} missing or cut, of attempt {stood.attempt}",
                expected=f"what its manifest names; {self._source.url} has attempt {manifest.attempt}",
                hint="everstep fsck DST --repair --tier SRC",
                name=name,
            )
        for rank in sorted(missing):
            self._report.sent_bytes += await mend_rank(
                self._source, self._target, manifest, rank, run=self._run, pool=pool
            )
        self._report.resent.append((manifest.incarnation, manifest.step))

    async def _has_layout(self, hash_text: str) -> bool:
        """Whether the target has it right. Each is read once."""
        if hash_text not in self._layouts:
            try:
                await read_layout(self._target, hash_text)
            except Damaged:
                return False
            self._layouts.add(hash_text)
        return True

    async def _drop(self, manifest: Manifest) -> None:
        """What was copied of a checkpoint that the source no longer has can never be finished."""
        stood = await give_up(self._target, manifest, "it was removed at the source while it was copied")
        if not isinstance(stood, Manifest):
            place = manifest.step, manifest.incarnation
            await delete_attempt(self._target, place, manifest.attempt, RotationReport())

    def _tell(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None and nbytes:
            self._progress(self._done, self.total)
