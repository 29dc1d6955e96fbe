"""Opening a run for writing: the run's record, the next incarnation, and who may not."""

from __future__ import annotations

import functools
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .agent.client import AgentClient
from .agent.spawn import Standby
from .backends.api import Backend
from .config import config_hash
from .connecting import agent_settings
from .connecting import connect as connect_agent
from .discovery import find_run
from .errors import BadOption, NotARun, NotLoaded, RunInUse
from .format.constants import CHUNK_BYTES
from .format.records import (
    IncarnationRecord,
    RunRecord,
    Writer,
    decode_incarnation,
    decode_run,
    encode_incarnation,
    encode_run,
)
from .memory.process import Process
from .memorytier import MemoryTier
from .places import Place
from .policy import Policy
from .ranks import Ranks
from .store.blocking import run_blocking
from .store.catalog import list_steps
from .store.mirror import copy_records
from .store.runs import (
    add_incarnation,
    now,
    open_run,
    read_incarnation,
    read_incarnations,
    require_records,
    run_to_be,
    write_incarnation,
    write_run,
)
from .writers import ENDING_S_MAX, Lookout, await_end, ending_s, is_writing, mark, unmark

NOTHING_TO_LOAD = "there was no checkpoint to load"
OPENING = "opening the run"
INTERRUPTED_S = 10.0
"""How long an interrupted opening waits for its records, which are under way."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an incarnation starts from: the checkpoint that was loaded, or the reason for a fresh start.

    ``looked`` says that a load was tried; a load that found nothing is a fresh start by itself. ``reason``: why a
    running job went back to it. ``attempts``: the ids of incarnations that were to start from here; the records of
    those that failed hold nothing to be loaded.
    """

    looked: bool = False
    incarnation: int | None = None
    step: int | None = None
    fresh: str | None = None
    config_changes: dict[str, Any] = field(default_factory=dict)
    config_reason: str | None = None
    loosened: tuple[str, ...] = ()
    reason: str | None = None
    attempts: frozenset[str] = frozenset()

    def tried(self, record_id: str) -> Origin:
        """With one more of ``attempts``."""
        return replace(self, attempts=self.attempts | {record_id})

    @property
    def adopted(self) -> tuple[int, int] | None:
        if self.incarnation is None or self.step is None:
            return None
        return self.incarnation, self.step


def this_writer() -> Writer:
    """This process, as an incarnation's record names it."""
    me = Process.current()
    return Writer(host=socket.gethostname(), boot=me.boot, pid=me.pid, start_time=me.start_time)


@dataclass(frozen=True, slots=True)
class Claim:
    """What this process is about to write: the run's record, if it ``is_new``, and the next incarnation's; ``former``
    are the ids of those before it."""

    backend: Backend
    place: Place
    run: RunRecord
    is_new: bool
    record: IncarnationRecord
    former: frozenset[str] = frozenset()

    def write(
        self, found: Callable[[RunRecord], None], *, exactly: bool
    ) -> tuple[RunRecord, IncarnationRecord]:
        """Create the run if absent and add the incarnation, which is marked as being written until ``unmark``.
        ``found`` is called with the run before the incarnation's record is written. Where others were faster theirs
        is the run, and the incarnation the next free one; with ``exactly`` that is RunInUse, and no incarnation is
        added. Raises what :func:`~.store.runs.create_run` and :func:`~.store.runs.add_incarnation` do.
        """
        run = run_blocking(write_run(self.backend, self.run)) if self.is_new else self.run
        if exactly and run.run_id != self.run.run_id:
            raise self._overtaken(f"run {run.run_id}")
        found(run)
        mark(self.place, self.record.id, self.former)
        try:
            if not exactly:
                return run, run_blocking(
                    add_incarnation(self.backend, lambda number: replace(self.record, number=number))
                )
            if not run_blocking(write_incarnation(self.backend, self.record)):
                writer = run_blocking(read_incarnation(self.backend, self.record.number)).writer
                raise self._overtaken(
                    f"process {writer.pid} on {writer.host}, incarnation {self.record.number}"
                )
            return run, self.record
        except BaseException:
            unmark(self.place, self.record.id)
            raise

    def _overtaken(self, found: str) -> RunInUse:
        return RunInUse(
            "another process has opened this run at the same moment",
            found=found,
            expected="one writer",
            hint="Stop one of them, or pass take_over=True: the other one then gets Superseded.",
        )


def claim_incarnation(
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
) -> Claim:
    """The next incarnation, once nothing speaks against it. Called by one rank. ``lookout`` has begun to look for a
    writer on another host already; a writer on this node that only ends is waited for, at most ``patience_s``. Records
    that are ``known`` are not read again. Raises NotLoaded, RunInUse and Damaged; nothing is written then.
    """
    _restore_records(backend, farther)
    records = _existing(backend, known)
    if records and not take_over:
        if await_end(place, records[-1], patience_s):
            records = _existing(backend, known)  # meanwhile another may have come
        _refuse_second(place, records[-1], lookout or Lookout(backend))
    if any(record.id not in origin.attempts for record in records):
        _refuse_unloaded(backend, origin)
    run, is_new = run_blocking(run_to_be(backend, chunk_bytes=CHUNK_BYTES))
    record = IncarnationRecord(
        number=len(records) + 1,
        id=secrets.token_hex(8),
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
    return Claim(backend, place, run, is_new, record, frozenset(one.id for one in records))


class Opening:
    """An incarnation that is being begun by all ranks. ``run`` and ``record`` are the same on all of them.

    ``beside``: the records are written, on a thread of rank 0, beside what the ranks do next for themselves. They are
    what they will be, or :meth:`finish` raises: until that has returned nothing may count that stands on them.
    """

    def __init__(
        self,
        ranks: Ranks,
        backend: Backend,
        claim: Callable[[], Claim],
        *,
        place: Place,
        policy: Policy,
        standby: Standby | None,
        beside: bool,
    ) -> None:
        """``claim`` is called on rank 0. All ranks raise what it raises, or else the writing of the records.
        ``standby`` becomes the run's agent, and is closed at the end."""
        self._ranks, self._backend, self._place, self._policy = ranks, backend, place, policy
        self._standby = standby
        self._claim: Claim | None = None
        self._connect: Callable[[], AgentClient] | None = None
        self._writing: Future[AgentClient | None] | None = None
        self.beside = beside

        def first() -> list[bytes]:
            self._claim = claim()
            run, record = self._claim.run, self._claim.record
            if not beside:
                run, record = self._claim.write(self._wake, exactly=False)
            return [encode_run(run), encode_incarnation(record)]

        run, record = ranks.from_first(OPENING, first, timeout_s=policy.rank_timeout_s)
        self.run = decode_run(run, "run.json")
        self.record = decode_incarnation(record, f"incarnation of {place.url}")

    def start(self, tier: MemoryTier, agent: Literal["process", "inline"], nodes: Sequence[str]) -> None:
        """This rank's snapshots lie in the ``tier``; ``nodes`` of all ranks. Have the records written, if they are not
        yet; where this is the only rank, its agent is connected then."""
        self._connect = connect = functools.partial(
            connect_agent,
            self._place,
            self._policy,
            self._ranks,
            tier,
            self.run,
            self.record,
            agent=agent,
            nodes=nodes,
            standby=self._standby,
        )
        claim, alone = self._claim, self._ranks.world == 1
        if not self.beside or claim is None:
            return
        writing = self._writing = Future()

        def write() -> None:
            try:
                claim.write(self._wake, exactly=True)
                writing.set_result(connect() if alone else None)
            except BaseException as error:
                writing.set_exception(error)

        threading.Thread(target=write, name="everstep-opening", daemon=True).start()

    def finish(self) -> AgentClient:
        """This rank's line to the agent, once the records are durable and every rank has its own. Called once, by all
        ranks; one's failure is every rank's. Raises what :meth:`Claim.write` and :func:`~.connecting.connect` do, and
        NotARun where this rank sees another run than rank 0."""
        timeout_s = self._policy.rank_timeout_s
        try:
            if self.beside:
                self._ranks.from_first(OPENING, self._await_written, timeout_s=timeout_s)
            return self._ranks.together(OPENING, self._join, timeout_s=timeout_s)
        finally:
            if self._standby is not None:
                self._standby.close()

    def _await_written(self) -> bool:
        """Raises what kept the records from being written. An interrupt waits, bounded, for the writing to end."""
        writing = self._writing
        assert writing is not None, "started before, on this rank"
        try:
            writing.result()
        except BaseException:
            if (
                wait([writing], INTERRUPTED_S).done
                and writing.exception() is None
                and (client := writing.result())
            ):
                client.close()
            raise
        return True

    def _join(self) -> AgentClient:
        assert self._connect is not None, "started before"
        client = self._writing.result() if self._writing is not None else None
        if client is not None:
            return client
        if self._ranks.rank != 0:
            _see_run(self._backend, self.run)
        return self._connect()

    def _wake(self, run: RunRecord) -> None:
        """What stands by becomes the run's agent while the incarnation's record is written: the disk is waited for."""
        if self._standby is not None:
            self._standby.become_early(agent_settings(self._place, self._policy, run.run_id, run.chunk_bytes))


def _see_run(backend: Backend, run: RunRecord) -> None:
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
