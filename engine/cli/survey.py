"""Everything that a run's storage says of its checkpoints, read once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep.backends.api import Backend
    from everstep.errors import EverstepError
    from everstep.format.manifest import Manifest
    from everstep.format.records import IncarnationRecord, RunRecord
    from everstep.store.catalog import StepNames


@dataclass(frozen=True, slots=True)
class Listed:
    """One checkpoint: its manifest, and whether the run's lineage reaches it."""

    manifest: Manifest
    in_lineage: bool

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.manifest)


@dataclass
class Survey:
    """A run. ``undecided`` were begun and not committed (or given up), ``removing`` bear a tombstone and are not wholly
    removed, of the ``removed`` nothing but that is left, ``aside`` were found damaged and set aside; none of these are
    checkpoints. ``unreadable`` cannot be judged: the name of the directory, and why."""

    url: str
    run: RunRecord
    incarnations: list[IncarnationRecord]
    checkpoints: list[Listed] = field(default_factory=list)
    undecided: list[StepNames] = field(default_factory=list)
    removing: list[StepNames] = field(default_factory=list)
    removed: list[StepNames] = field(default_factory=list)
    aside: list[StepNames] = field(default_factory=list)
    unreadable: list[tuple[str, EverstepError]] = field(default_factory=list)

    def counts(self, incarnation: int, step: int) -> bool:
        """Whether the run's lineage reaches that step."""
        from everstep.plan.lineage import Lineage

        return Lineage(self.incarnations).counts(incarnation, step)

    def cuts(self) -> list[str]:
        """What running jobs went back from, and why, in words."""
        return [
            f"incarnation {record.number} went back to step {record.adopted_step} of incarnation "
            f"{record.adopted_incarnation}: {record.reason}"
            for record in self.incarnations
            if record.reason is not None
        ]

    def newest(self) -> Listed | None:
        """The checkpoint that a load takes: the newest of the lineage."""
        return next((one for one in reversed(self.checkpoints) if one.in_lineage), None)


def survey(run: str) -> Survey:
    """Read ``run``, a path or URL. Raises NotARun, Damaged (its records), UnknownFormat, CannotTell."""
    from everstep.places import locate
    from everstep.store.blocking import run_blocking

    async def read() -> Survey:
        backend = locate(run).open()
        try:
            return await read_survey(backend)
        finally:
            await backend.close()

    return run_blocking(read())


async def read_survey(backend: Backend) -> Survey:
    """As :func:`survey`, of an open backend."""
    from everstep.errors import RunError
    from everstep.format import names
    from everstep.format.manifest import Manifest, Quarantine
    from everstep.plan.lineage import Lineage
    from everstep.store.asking import each
    from everstep.store.catalog import list_steps, read_decision
    from everstep.store.runs import open_run, read_incarnations

    run = await open_run(backend)
    incarnations = await read_incarnations(backend)
    found = Survey(backend.url, run, incarnations)
    lineage = Lineage(incarnations)

    async def one(step: StepNames) -> None:
        try:
            decision = await read_decision(backend, step)
        except RunError as error:
            found.unreadable.append((names.checkpoint_dir(step.step, step.incarnation), error))
            return
        if isinstance(decision, Manifest):
            counts = lineage.counts(step.incarnation, step.step)
            found.checkpoints.append(Listed(decision, counts))
        elif decision is None:
            found.undecided.append(step)
        elif isinstance(decision, Quarantine):
            found.aside.append(step)
        else:
            left = step.attempts or len(step.decisions) > 1
            (found.removing if left else found.removed).append(step)

    await each(await list_steps(backend), one)
    found.checkpoints.sort(key=lambda x: (x.manifest.incarnation, x.manifest.step))
    return found


def stored_bytes(manifest: Manifest) -> int:
    """Bytes of all images of all ranks, as they are stored."""
    return sum(record.objects_nbytes for record in manifest.ranks)


def choose(found: Survey, step: int | None) -> Listed | None:
    """The checkpoint of ``step`` that a load takes, else the last written; None: the newest, or None for a run without
    any. Raises NoCheckpoint."""
    from everstep.errors import NoCheckpoint

    if step is None:
        return found.newest()
    candidates = [one for one in found.checkpoints if one.manifest.step == step]
    if not candidates:
        there = [one.manifest.step for one in found.checkpoints]
        for name, error in found.unreadable:
            if f"/{step:09d}/" in f"{name}/":
                raise error
        raise NoCheckpoint(
            f"{found.url} has no checkpoint of step {step}",
            found=f"{len(there)} checkpoints, steps {min(there)} to {max(there)}"
            if there
            else "no checkpoint",
            hint="everstep ls lists them.",
            step=step,
        )
    return next((one for one in reversed(candidates) if one.in_lineage), candidates[-1])
