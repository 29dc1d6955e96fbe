"""Opening a run for writing: the run's record, the next incarnation, and who may not."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .agent.spawn import Standby
from .backends.api import Backend
from .config import config_hash
from .discovery import find_run
from .errors import BadOption, NotARun, NotLoaded, RunInUse
from .format.constants import CHUNK_BYTES
from .format.records import IncarnationRecord, RunRecord, Writer
from .memory.process import Process
from .places import Place
from .policy import Policy
from .session import agent_settings
from .store.blocking import run_blocking
from .store.catalog import list_steps
from .store.mirror import copy_records
from .store.runs import add_incarnation, create_run, now, open_run, read_incarnations, require_records
from .writers import ENDING_S_MAX, Lookout, await_end, ending_s, is_writing, mark, unmark

NOTHING_TO_LOAD = "there was no checkpoint to load"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an incarnation starts from: the checkpoint that was loaded, or the reason for a fresh start.

    ``looked`` says that a load was tried; a load that found nothing is a fresh start by itself. ``reason``: why a
    running job went back to it.
    """

    looked: bool = False
    incarnation: int | None = None
    step: int | None = None
    fresh: str | None = None
    config_changes: dict[str, Any] = field(default_factory=dict)
    config_reason: str | None = None
    loosened: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def adopted(self) -> tuple[int, int] | None:
        if self.incarnation is None or self.step is None:
            return None
        return self.incarnation, self.step


def this_writer() -> Writer:
    """This process, as an incarnation's record names it."""
    me = Process.current()
    return Writer(host=socket.gethostname(), boot=me.boot, pid=me.pid, start_time=me.start_time)


def begin_incarnation(
    backend: Backend,
    place: Place,
    origin: Origin,
    *,
    world: int,
    mesh: dict[str, int],
    config: dict[str, Any] | None,
    take_over: bool,
    lookout: Lookout | None = None,
    farther: Sequence[Backend] = (),
    known: dict[int, IncarnationRecord] | None = None,
    patience_s: float = ENDING_S_MAX,
    found: Callable[[RunRecord], None] = lambda run: None,
) -> tuple[RunRecord, IncarnationRecord]:
    """Create the run if absent and add the next incarnation, which is marked as being written until ``unmark``.
    Called by one rank. ``lookout`` has begun to look for a writer on another host already; a writer on this node that
    only ends is waited for, at most ``patience_s``. Records that are ``known`` are not read again. ``found`` is called
    with the run before the incarnation's record is written.
    Raises NotLoaded, RunInUse and Damaged; nothing is written then.
    """
    _restore_records(backend, farther)
    records = _existing(backend, known)
    if records:
        _refuse_unloaded(backend, origin)
        if not take_over:
            if await_end(place, records[-1], patience_s):
                records = _existing(backend, known)  # meanwhile another may have come
            _refuse_second(place, records[-1], lookout or Lookout(backend))
    run = run_blocking(create_run(backend, chunk_bytes=CHUNK_BYTES))
    found(run)
    record_id = secrets.token_hex(8)
    mark(place, record_id)

    def build(number: int) -> IncarnationRecord:
        return IncarnationRecord(
            number=number,
            id=record_id,
            parent=origin.incarnation,
            adopted_incarnation=origin.incarnation,
            adopted_step=origin.step,
            fresh=None if origin.adopted else origin.fresh or NOTHING_TO_LOAD,
            world=world,
            mesh=mesh,
            config_hash=config_hash(config),
            config=config,
            config_changes=origin.config_changes,
            config_reason=origin.config_reason,
            loosened=origin.loosened,
            writer=this_writer(),
            created=now(),
            reason=origin.reason,
        )

    try:
        return run, run_blocking(add_incarnation(backend, build))
    except BaseException:
        unmark(place, record_id)
        raise


def wake(standby: Standby | None, place: Place, policy: Policy, run: RunRecord) -> None:
    """What stands by becomes the run's agent while the incarnation's record is written: the disk is waited for."""
    if standby is not None:
        standby.become_early(agent_settings(place, policy, run.run_id, run.chunk_bytes))


def see_run(backend: Backend, run: RunRecord) -> None:
    """Raises NotARun unless ``backend`` has this very run."""
    seen = run_blocking(open_run(backend))
    if seen.run_id != run.run_id:
        raise NotARun(
            "this rank sees another run at this root than rank 0",
            found=seen.run_id,
            expected=run.run_id,
            hint="The root must be on storage that all ranks share.",
        )


def check_mesh(mesh: Mapping[str, int], world: int) -> None:
    """Raises BadOption unless the axes multiply to the number of ranks."""
    size = 1
    for length in mesh.values():
        size *= length
    if size != world:
        raise BadOption(
            "mesh= does not fit the number of ranks", found=dict(mesh), expected=f"a product of {world}"
        )


def _refuse_second(place: Place, newest: IncarnationRecord, lookout: Lookout) -> None:
    host, pid, age = newest.writer.host, newest.writer.pid, ""
    hint = "Stop it first, or pass take_over=True: the other one then gets Superseded."
    if is_writing(place, newest):
        left_s = ending_s(place, newest)
        if left_s is not None:
            age = (
                f"; it is ending: it waits up to {left_s:.0f} s more for its last snapshot to become durable"
            )
            hint = (
                "Start again when it has ended, or pass take_over=True: what it waits for is then given up."
            )
    else:
        seen = lookout.sees(newest)
        if seen is None:
            return
        host, pid = seen.host, seen.pid
        age = "" if seen.age_s is None else f", seen alive there, its last beat {seen.age_s:.1f} s old"
    raise RunInUse(
        "another process writes to this run",
        found=f"process {pid} on {host}, incarnation {newest.number}{age}",
        expected="no living writer",
        hint=hint,
        pid=pid,
        host=host,
        incarnation=newest.number,
    )


def _restore_records(backend: Backend, farther: Sequence[Backend]) -> None:
    """A root that has lost its run gets its records back from the nearest of the ``farther`` tiers that has it: what
    was loaded from there is gone on with."""
    if not farther or find_run(backend) is not None:
        return
    for tier in farther:
        if find_run(tier) is not None:
            run_blocking(copy_records(tier, backend))
            return


def _existing(backend: Backend, known: dict[int, IncarnationRecord] | None) -> list[IncarnationRecord]:
    records = run_blocking(read_incarnations(backend, known))
    require_records(records, {names.incarnation for names in run_blocking(list_steps(backend))})
    return records


def _refuse_unloaded(backend: Backend, origin: Origin) -> None:
    if origin.looked or origin.fresh:
        return
    steps = run_blocking(list_steps(backend))
    raise NotLoaded(
        "this run was written before, and nothing was loaded from it",
        found=f"{len(steps)} checkpoint(s), the newest of step {steps[-1].step}"
        if steps
        else "earlier incarnations",
        expected="load(...) before the first step or save",
        hint='To start again from nothing and keep what is there listed, pass fresh="why".',
    )
