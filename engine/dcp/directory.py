"""One ``checkpoint_id``: a directory that is a run of its own with one checkpoint, which nothing outside it knows.

Trainers delete such directories themselves. A save is an attempt at the directory's one step; the attempt before counts
until the new one is committed, and is removed then. The coordinator opens the attempt; the other ranks read from the
storage which one is open, so that nothing of one save hides in plans, which torch keeps from save to save.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..backends.api import Backend, Item
from ..backends.errors import BackendError
from ..backends.open import local_path, open_backend
from ..backends.publish import TEMPORARY_PREFIX
from ..backends.retry import Retrying
from ..errors import EverstepError, NotARun, RunInUse, SaveFailed, StorageFull, UsageError
from ..format import names
from ..format.constants import CHUNK_BYTES, NUMBER_MAX
from ..format.manifest import Abort, Manifest
from ..format.records import IncarnationRecord, RunRecord
from ..memory.process import Process
from ..opening import this_writer
from ..plan.lineage import Lineage
from ..plan.retention import RetentionPlan
from ..store.asking import reading, writing
from ..store.catalog import StepNames, list_step, list_steps, read_decision, read_decision_at
from ..store.commit import abort_attempt
from ..store.rotate import rotate
from ..store.runs import add_incarnation, create_run, now, open_run, read_incarnations, require_records
from ..writers import process_alive

MARKER = ".metadata"
"""Trainers take a directory for a finished checkpoint if it has a file of this name."""

MARKER_TEXT = (
    json.dumps(
        {"everstep": "DCP checkpoint", "list": "everstep ls DIRECTORY", "check": "everstep fsck DIRECTORY"}
    )
    + "\n"
)
"""Says that the checkpoint is complete; nothing is read from it."""

_OURS = b'{"everstep"'
"""How a marker of any release begins."""

KIND = "dcp"
"""Key of an incarnation's ``extra`` that tells such a run from a training run."""

_LAST_NUMBER = re.compile(r"(\d+)$")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class Attempt:
    """One save, as its ranks know it."""

    run: RunRecord
    step: int
    incarnation: int
    number: int
    world: int

    @property
    def place(self) -> tuple[int, int, int]:
        return self.step, self.incarnation, self.number


def open_directory(path: str) -> Backend:
    """The storage of one directory; what may pass is tried again."""
    return Retrying(open_backend(path, shared=True))


def step_of(path: str) -> int:
    """The number that the directory's name ends in, as a step; 0 without one."""
    found = _LAST_NUMBER.search(os.path.basename(os.path.abspath(path)))
    return min(int(found.group(1)), NUMBER_MAX) if found else 0


def rank_directory(path: str, rank: int) -> str:
    """Where one rank saves for itself, without the others."""
    return os.path.join(path, f"__{rank}")


def is_stock(path: str) -> bool:
    """Whether a checkpoint of torch's own writer lies there."""
    try:
        with open(os.path.join(path, MARKER), "rb") as file:
            return file.read(len(_OURS)) != _OURS
    except OSError:
        return False


async def standing(backend: Backend) -> Manifest | None:
    """The checkpoint that counts in the directory; None if there is none. Raises Damaged, CannotTell."""
    try:
        await open_run(backend)
    except NotARun:
        return None
    records = await read_incarnations(backend)
    return await _newest(backend, Lineage(records), await list_steps(backend))


async def _newest(backend: Backend, lineage: Lineage, steps: list[StepNames]) -> Manifest | None:
    for found in reversed(steps):
        if lineage.counts(*found.key):
            decision = await read_decision(backend, found)
            if isinstance(decision, Manifest):
                return decision
    return None


async def begin(backend: Backend, path: str, world: int) -> Attempt:
    """Open the next attempt; the coordinator's part. What earlier ones left that were given up is removed.

    Raises UsageError for a directory of a training run, RunInUse while another process saves to it, NotARun where no
    run can be made, StorageFull, CannotTell, Damaged.
    """
    run = await create_run(backend, chunk_bytes=CHUNK_BYTES)
    records = await read_incarnations(backend)
    steps = await list_steps(backend, empty=True)
    require_records(records, {found.incarnation for found in steps})
    _refuse_training_run(path, records)
    record = records[-1] if records else None
    for found in steps:
        await _give_up(backend, found, records[found.incarnation - 1])
    if record is None or record.writer != this_writer() or record.world != world:
        adopted = await _newest(backend, Lineage(records), [found for found in steps if found.decisions])
        record = await add_incarnation(backend, lambda number: _record(number, path, world, adopted))
    step = int(record.extra[KIND]["step"])
    found = await list_step(backend, step, record.number)
    for attempt in found.attempts:
        if isinstance(await read_decision_at(backend, step, record.number, attempt), Abort):
            await _remove_attempt(backend, found, attempt)
    return Attempt(run, step, record.number, max(found.decisions, default=0) + 1, world)


def _refuse_training_run(path: str, records: list[IncarnationRecord]) -> None:
    if all(KIND in record.extra for record in records):
        return
    raise UsageError(
        f"{path} is the run of a training job",
        found="a run of everstep.Checkpointer",
        expected="a directory for one DCP checkpoint",
        hint="Choose another directory; the run's checkpoints would be lost",
    )


def _record(number: int, path: str, world: int, adopted: Manifest | None) -> IncarnationRecord:
    incarnation = adopted.incarnation if adopted is not None else None
    step = adopted.step if adopted is not None else None
    return IncarnationRecord(
        number=number,
        id=secrets.token_hex(8),
        parent=incarnation,
        adopted_incarnation=incarnation,
        adopted_step=step,
        fresh=None if adopted else "a DCP checkpoint",
        world=world,
        mesh={"rank": world},
        config_hash=None,
        config=None,
        config_changes={},
        config_reason=None,
        loosened=(),
        writer=this_writer(),
        created=now(),
        extra={KIND: {"step": step_of(path)}},
    )


async def _give_up(backend: Backend, found: StepNames, record: IncarnationRecord) -> None:
    """Decide against attempts that nobody finishes any more."""
    for attempt in found.attempts:
        if attempt in found.decisions:
            continue
        if process_alive(record.writer):
            raise RunInUse(
                "another process saves to this directory, or could not end a save that failed",
                found=f"process {record.writer.pid} on {record.writer.host}",
                expected="no other living writer",
                hint="Wait for it, or end it",
                pid=record.writer.pid,
            )
        await abort_attempt(
            backend, *found.place, attempt, reason="the save before was not finished; another one follows"
        )


async def join(backend: Backend) -> Attempt:
    """The attempt that the coordinator opened."""
    run = await open_run(backend)
    records = await read_incarnations(backend)
    record = records[-1] if records else None
    if record is None or KIND not in record.extra:
        raise SaveFailed(
            f"{backend.url}: this rank does not see the save that the coordinator opened",
            found=f"incarnations {[one.number for one in records]}",
            expected="an incarnation of a DCP checkpoint",
            hint="The directory must be one that all ranks share",
        )
    step = int(record.extra[KIND]["step"])
    found = await list_step(backend, step, record.number)
    return Attempt(run, step, record.number, max(found.decisions, default=0) + 1, record.world)


async def give_up(backend: Backend, attempt: Attempt, reason: str, rank: int) -> None:
    """This rank cannot finish: the attempt is decided against, so that it stands in nobody's way."""
    with suppress(EverstepError):
        await abort_attempt(backend, *attempt.place, reason=reason, rank=rank)


async def remove_former(backend: Backend, attempt: Attempt) -> None:
    """Remove what stood before ``attempt``, which is committed. Raises what storage raises; the next save goes on."""
    found = await list_step(backend, attempt.step, attempt.incarnation)
    for number in found.attempts:
        if number < attempt.number:
            await _remove_attempt(backend, found, number)
    steps = await list_steps(backend, empty=True)
    key = (attempt.incarnation, attempt.step)
    others = tuple(one.key for one in steps if one.key != key)
    if not others:
        return
    records = {record.number: record for record in await read_incarnations(backend)}

    async def never() -> bool:
        return False

    def is_gone(incarnation: int) -> bool:
        return incarnation != attempt.incarnation and not process_alive(records[incarnation].writer)

    plan = RetentionPlan(keep=((key, "the directory's checkpoint"),), remove=others)
    await rotate(backend, plan, is_superseded=never, is_gone=is_gone)


async def _remove_attempt(backend: Backend, found: StepNames, attempt: int) -> None:
    """The files of an attempt that does not count; votes first. Names that are not ours stay."""
    directory = names.attempt_dir(*found.place, attempt)
    votes: list[Item] = []
    others: list[Item] = []
    with reading(backend, directory):
        async for item in backend.list(directory):
            parsed = names.parse(item.name)
            if parsed is not None:
                (votes if parsed.kind is names.Kind.VOTE else others).append(item)
        temporaries = await backend.leftovers(directory)
    with writing(backend, directory):
        await backend.delete([item.name for item in votes])
        await backend.delete([item.name for item in others] or [names.vote(*found.place, attempt, 0)])
        await backend.discard_leftovers(temporaries)


def write_marker(path: str, rank: int | None = None) -> None:
    """Durably put the marker that says "complete"; ``rank``: of one rank that saved for itself. Raises SaveFailed,
    StorageFull."""
    directory = Path(local_path(path))
    name = MARKER if rank is None else f"__{rank}{MARKER}"
    target = directory / name
    temporary = (
        directory / f"{TEMPORARY_PREFIX}{name.lstrip('.')}.{Process.current().pid}.{secrets.token_hex(6)}"
    )
    try:
        if target.is_file() and target.read_bytes() == MARKER_TEXT.encode():
            return
        with open(temporary, "xb") as file:
            file.write(MARKER_TEXT.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        kind = StorageFull if error.errno in _FULL else SaveFailed
        raise kind(
            f"{path}: the checkpoint is complete, but its marker {name} could not be written",
            found=error.strerror,
            hint="Save again",
        ) from error


async def close(backend: Backend) -> None:
    """Close without a complaint: whatever mattered has been said."""
    with suppress(BackendError):
        await backend.close()
