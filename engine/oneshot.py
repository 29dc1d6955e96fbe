"""Without a training loop: read a run, or write one checkpoint, in one call."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from .backends.api import Backend
from .config import plain_config, plain_metrics, plain_step
from .describing import describe
from .discovery import Proposals, find_run, open_arenas
from .errors import (
    BadOption,
    EverstepError,
    NoCheckpoint,
    NotARun,
    RunInUse,
    SaveAbandoned,
    StepOrder,
    UnsupportedValue,
)
from .format.constants import ALIGN_BYTES
from .format.entries import path_of
from .format.manifest import Abort
from .format.records import IncarnationRecord, RunRecord
from .loading import Loader
from .memory.arena import Arena
from .memory.process import Process
from .memory.slots import Pinned
from .opened import is_open_here
from .opening import Origin, claim_incarnation
from .places import Place, locate
from .planning import LayoutPlanner
from .policy import SHARED_MEMORY
from .ranks import Ranks
from .reading import as_values, into_state
from .snapshot.copier import Copier, Plan
from .state.trainstate import TrainState
from .state.tree import FlatState
from .store.blocking import run_blocking
from .store.commit import abort_attempt, try_commit
from .store.flush import FlushJob, flush_rank
from .store.runs import open_run
from .writers import unmark

RANK_TIMEOUT_S = 60.0
SINGLE = {"data": 1}


def load(
    root: str | os.PathLike[str],
    *,
    step: int | None = None,
    parts: Collection[str] | None = None,
    keys: Collection[str] | None = None,
    rank: int | None = None,
    into: TrainState | Mapping[str, Any] | None = None,
    allow: Collection[str] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """The state at ``step`` (default: the newest) as plain nested values on the CPU: {part: value}, or the value
    itself where a bare one was saved. Reads only; the run may be live, and have been written by any number of ranks.

    Tensors of the whole job (sharded or replicated) come whole, and the parts of pipeline stages as one. What is
    each rank's own comes from ``rank`` (default: 0). ``parts`` selects parts; ``keys`` glob patterns over "part/key"
    (``"model/layers.0.*"``; ``*`` crosses slashes): dicts keep what matches, lists stay whole.

    ``storage_options`` are those of the root's storage, as for the Checkpointer.

    With ``into`` live objects are filled in place instead, and the result is None: as a job of one rank, or with
    ``rank`` as that rank of the job that saved; ``allow`` as for :meth:`Checkpointer.load`.
    Raises NotARun, NoCheckpoint, Damaged, CannotTell, StateMismatch.
    """
    if into is not None and keys is not None:
        raise BadOption("keys= selects values", found="into= too", hint="Use parts= and allow= with into=.")
    place = locate(root, options=storage_options)
    if into is None:
        read = as_values(rank or 0, parts, keys)
    else:
        read = into_state(TrainState.of(into), allow, parts=parts, rank=rank)
    with _closing(place.open()) as backend, open_arenas(_arenas_of(place)) as arenas:
        found = Loader(backend, Ranks.alone(), arenas, timeout_s=RANK_TIMEOUT_S).load(read, step=step)
        if found is None:
            raise _nothing_there(place, backend)
    return found[1].values


@contextlib.contextmanager
def _closing(backend: Backend) -> Iterator[Backend]:
    try:
        yield backend
    finally:
        run_blocking(backend.close())


def _arenas_of(place: Place) -> Path:
    """Where this node's arenas of the run lie; not made, for reading."""
    return SHARED_MEMORY / f"everstep-{os.getuid()}" / place.run_key


def save(
    root: str | os.PathLike[str],
    step: int,
    state: TrainState | Any,
    *,
    config: Any = None,
    metrics: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write ``state`` as the checkpoint of ``step`` and return when it is durable. One process, no memory tier, no
    agent; each call is an incarnation of its own, after the newest checkpoint.

    Raises StepOrder unless ``step`` is newer than all that the run has, RunInUse while a trainer writes to it,
    UnsupportedValue, StorageFull, SaveFailed.
    """
    place, step = locate(root, options=storage_options), plain_step(step)
    trained, plain = TrainState.of(state), plain_config(config)
    facts = plain_metrics(metrics)
    if is_open_here(place.url):
        raise RunInUse(
            "this process writes to the run with a Checkpointer",
            expected="no open Checkpointer",
            hint="Use its save(), or close it first.",
        )
    flat = trained.flatten()
    _refuse_regions(flat)
    plan = LayoutPlanner(0, 1).plan(flat)
    with _closing(place.open_root()) as backend:
        claim = claim_incarnation(
            backend,
            place,
            _after_newest(backend, step),
            world=1,
            mesh=SINGLE,
            config=plain,
            take_over=False,
        )
        run, record = claim.write(lambda run: None, exactly=False)
        try:
            _write(backend, place, run, record, step, flat, plan, describe(trained, record, 0, facts))
        finally:
            unmark(place, record.id)


def _refuse_regions(flat: FlatState) -> None:
    for index in flat.sharded:
        leaf = flat.leaves[index]
        name = path_of(leaf.part, leaf.key)
        if sum(box.volume for box in leaf.boxes) < math.prod(leaf.shape):
            raise UnsupportedValue(
                f"{name}: this process holds only a part of it, and everstep.save is for one process",
                found=f"{len(leaf.boxes)} regions",
                expected=f"all of shape {list(leaf.shape)}",
                hint="Save with a Checkpointer on all ranks, or give the full tensor.",
                path=name,
            )


def _write(
    backend: Backend,
    place: Place,
    run: RunRecord,
    record: IncarnationRecord,
    step: int,
    flat: FlatState,
    plan: Plan,
    meta: bytes,
) -> None:
    """Through a private slot, as every snapshot."""
    need = sum(-(-size // ALIGN_BYTES) * ALIGN_BYTES for _, size in plan.regions(len(flat.state), len(meta)))
    arena = Arena.create_memfd(
        run_key=place.run_key,
        node=place.node,
        rank=0,
        world=1,
        slots=1,
        slot_bytes=need,
        chunk_bytes=run.chunk_bytes,
    )
    with arena:
        arena.take(Process.current(), run_id=run.run_id, incarnation=record.number, world=1)
        slot = arena.begin(record.number, step, complete=None)
        assert slot is not None, "a new arena has a free slot"
        copier = Copier()
        copier.copy(slot, plan, flat.sources(), state=flat.state, meta=meta)
        slot.publish(plan.layout_hash)
        copier.forget()
        with arena.pin(slot.index, slot.generation) as pinned:
            run_blocking(_commit(backend, run, FlushJob(step, record.number, 1, 0, 1), pinned))


async def _commit(backend: Backend, run: RunRecord, job: FlushJob, pinned: Pinned) -> None:
    try:
        await flush_rank(backend, job, pinned, chunk_bytes=run.chunk_bytes, run=run)
        decided = await try_commit(backend, job.step, job.incarnation, job.attempt, job.world)
    except EverstepError as error:
        with contextlib.suppress(EverstepError):
            await abort_attempt(backend, job.step, job.incarnation, job.attempt, reason=str(error), rank=0)
        raise
    if isinstance(decided, Abort):
        raise SaveAbandoned(f"step {job.step} was given up: {decided.reason}", step=job.step)


def _after_newest(backend: Backend, step: int) -> Origin:
    """Adopts the newest checkpoint that counts. Raises StepOrder unless ``step`` comes after it."""
    if find_run(backend) is None:
        return Origin(looked=True)
    newest = Proposals([backend], {}, step=None, writes=True).next()
    if newest is None:
        return Origin(looked=True)
    if step <= newest.step:
        raise StepOrder(
            "the run has this step, or a newer one, already",
            found=step,
            expected=f"more than {newest.step}",
            step=step,
        )
    return Origin(looked=True, incarnation=newest.incarnation, step=newest.step)


def _nothing_there(place: Place, backend: Backend) -> EverstepError:
    try:
        run_blocking(open_run(backend))
    except NotARun as error:
        return error
    return NoCheckpoint(f"the run at {place.url} has no checkpoint yet", hint="`everstep fsck` says more.")
