"""What an agent does for its trainers: registration, flushes, rotation, and an orderly end.

One loop, one run. The service owns the members, the queue and the journal; connections call
:meth:`Service.handle`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from everstep.backends.api import Backend, Notes
from everstep.backends.errors import BackendError
from everstep.backends.limit import RateLimited
from everstep.backends.open import is_local
from everstep.errors import AgentError, EverstepError
from everstep.format.manifest import Manifest
from everstep.format.records import RunRecord
from everstep.memory.arena import Arena
from everstep.memory.control import Purpose
from everstep.memory.process import Process
from everstep.memory.slots import Pinned
from everstep.plan.chains import FULL
from everstep.store.events import EventLog
from everstep.store.rotate import RotationReport
from everstep.store.runs import open_run

from .beacon import Beacons
from .elsewhere import Elsewhere
from .flushes import Flush, bases_of
from .guard import SameRun
from .journal import GuardEntry, JobEntry, Journal, NoJournal, Notebook, Uploading
from .members import FLUSHED, KEPT, Member, Members, find_snapshot, open_arena
from .news import event_of, gone_news, news_of, superseded_news
from .orphans import Orphans
from .pacing import Pacing
from .pipeline import Pipeline
from .protection import Protection
from .protocol import (
    ArenasAnswer,
    ArenasRequest,
    Bye,
    FlushRequest,
    GiveUpRequest,
    Goodbye,
    Guarding,
    Listen,
    Loading,
    PeersRequest,
    Register,
    Request,
    StatusAnswer,
    StatusRequest,
    Taken,
    Welcome,
)
from .resuming import resume
from .root import OpenBackend, Root, link_of, take_environment
from .rotation import Rotator
from .server import Peer
from .status import describe
from .storage import Fence, patiently
from .tiers import Tiers
from .values import NO_STEP, AgentSettings, Progress

log = logging.getLogger("everstep.agent")

IDLE_LOOK_S = 0.2
FIRST_CLIENT_S = 20.0
"""How long a new agent waits for its first client at least."""
EVENTS_PAUSE_S = 2.0
EVENTS_FLAT_PAUSE_S = 10.0
"""Events are written at most this often; on a store where each write is a request that costs money, more seldom."""


class Service:
    """``root`` and ``run_key`` never change; the other settings follow the newest incarnation's trainers."""

    def __init__(self, settings: AgentSettings, journal: Journal, open_backend: OpenBackend) -> None:
        self.settings = settings
        self.stopped = asyncio.Event()
        self.members = Members(self._died)
        self.pipeline: Pipeline | None = None
        self.journal = journal
        self._journal_thread = ThreadPoolExecutor(1, thread_name_prefix="everstep-journal")
        self.open_backend = open_backend
        self.pacing = Pacing(self.members.of_newest, settings.rate_bytes_per_s, link_of(settings.root))
        on_wire = None if is_local(settings.root) else self.pacing.root
        self._backend = Root(settings.root, settings.options, open_backend, on_wire)
        self._guarded: Backend = self._backend
        """For whatever writes or deletes: only while it is this run's."""
        self._run: RunRecord | None = None
        self._run_lock = asyncio.Lock()
        self._rotator: Rotator | None = None
        self._events: EventLog | None = None
        self._orphans = Orphans(self)
        self.protection = Protection(self)
        self.tiers = Tiers(self)
        self.beacons = Beacons(self)
        self._elsewhere = Elsewhere(self)
        self._registered: set[Peer] = set()
        self._anew = False
        """Whether the storage's environment was changed."""
        self._order = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._handling = 0
        self._draining = False
        self.stays = False
        """Whether it serves on though nobody comes: on a spare node."""
        self._started = time.monotonic()
        self._last_events = 0.0

    # -- life

    def start(self) -> None:
        """Go on with what the journal holds, in the background."""
        if self.journal.repaired:
            log.error("the journal was damaged and has been set aside: %s", self.journal.repaired)
        self.keep(resume(self))
        self.keep(self._linger())
        self.keep(self.beacons.run())
        self.keep(self.pacing.run())

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.protection.close()
        if self._rotator is not None:
            await self._rotator.close()
        if self.pipeline is not None:
            await self.pipeline.close()
        await self.tiers.close()
        await self._write_events()
        await self.beacons.close()
        self.pacing.close()
        self.members.close()
        self._journal_thread.shutdown()
        self.journal.close()
        await self._backend.close()

    @property
    def idle(self) -> bool:
        """Nobody is served and nothing is left to do."""
        busy = self.pipeline is not None and self.pipeline.busy
        rotating = self._rotator is not None and self._rotator.busy
        busy = busy or rotating or self._orphans.busy or self.protection.busy or self.tiers.busy
        return not (self.members.anyone_here or busy or self._handling)

    def leave(self) -> None:
        self.stopped.set()

    def drain(self) -> None:
        """End as soon as nothing is left to do (SIGTERM), also where it stays without trainers."""
        self.stays = False
        self._draining = True

    def gone(self, peer: Peer) -> None:
        """A closed connection is only a hint; the process is what counts."""
        self._registered.discard(peer)

    async def _linger(self) -> None:
        since = time.monotonic()
        while not self.stopped.is_set():
            await asyncio.sleep(IDLE_LOOK_S)
            self.members.let_go()
            if not self.idle:
                since = time.monotonic()
            elif self._draining or (not self.stays and time.monotonic() - since >= self._linger_s):
                self.leave()

    @property
    def _linger_s(self) -> float:
        return self.settings.linger_s if self.members.newest else max(self.settings.linger_s, FIRST_CLIENT_S)

    # -- requests

    async def handle(self, peer: Peer, request: Request) -> None:
        """One request of one client. Raises EverstepError where the client is to be refused."""
        with self.working():
            if isinstance(request, Register):
                await self._register(peer, request)
            elif isinstance(request, StatusRequest):
                peer.send(StatusAnswer(request.number, self.status()))
            elif isinstance(request, ArenasRequest):
                self._send_arenas(peer, request)
            elif isinstance(request, PeersRequest):
                peer.send(self.protection.peers(request))
            elif isinstance(request, Loading):
                self.pacing.hear(peer, request)
            elif peer.member is None:
                raise AgentError("register first", found=type(request).__name__)
            elif isinstance(request, FlushRequest):
                await self._flush(peer.member, request)
            elif isinstance(request, GiveUpRequest):
                member = peer.member
                self._pipeline.give_up(
                    member.incarnation, request.step, request.attempt, request.reason, member.world
                )
            elif isinstance(request, Listen):
                await self.protection.listen(peer, peer.member, request)
            elif isinstance(request, Guarding):
                await self.protection.guard(peer, peer.member, request)
            elif isinstance(request, Taken):
                self.protection.taken(request)
            elif isinstance(request, Bye):
                await self._bye(peer, peer.member, request)

    async def _register(self, peer: Peer, hello: Register) -> None:
        fd = None if hello.arena else peer.take_fd()
        try:
            member = await self._admit(hello, fd)
        finally:
            if fd is not None:
                os.close(fd)
        self.members.add(member)
        self.pacing.loaded(member.process)
        self.protection.joined(member)
        if hello.arena:
            await self.journaled(self.journal.put_member, member.entry())
        if hello.incarnation >= self.members.newest:
            self._follow(AgentSettings.from_wire(hello.settings))
        peer.member = member
        if peer.open:
            self._registered.add(peer)
        self.beacons.changed()
        peer.send(Welcome(self.journal.epoch))
        self.keep(self._check_incarnations())

    async def _admit(self, hello: Register, fd: int | None) -> Member:
        """The trainer as a member, once everything that it says of itself was checked. Raises AgentError,
        RunInUse, and what opening the run and the arena raises."""
        theirs = AgentSettings.from_wire(hello.settings)
        process = Process(hello.pid, hello.start_time, hello.boot)
        if (theirs.root, theirs.run_key) != (self.settings.root, self.settings.run_key):
            raise AgentError(
                "this agent serves another run",
                found=self.settings.root,
                expected=theirs.root,
                hint="Set another runtime_dir",
            )
        if hello.incarnation >= self.members.newest:
            self._anew = take_environment(theirs)
            await self._backend.renew(theirs.options, anew=self._anew)
        await self.ensure_run(hello.run_id)
        self.members.check(hello.incarnation, hello.rank, process)
        arena = await asyncio.to_thread(self.arena_of, hello.arena, fd, hello.rank)
        return Member(
            hello.run_id,
            hello.rank,
            hello.world,
            hello.incarnation,
            hello.adopted,
            process,
            arena,
            hello.arena,
        )

    def arena_of(self, path: str, fd: int | None, rank: int) -> Arena:
        known = self.members.arena(rank)
        return open_arena(path, fd, rank=rank, run_key=self.settings.run_key, known=known)

    def _follow(self, theirs: AgentSettings) -> None:
        """The newest incarnation's wishes count."""
        self.settings = theirs
        self._pipeline.commit_timeout_s = theirs.commit_timeout_s
        self._pipeline.compress = theirs.compress
        self.pacing.follow(theirs.rate_bytes_per_s)
        if self._rotator is not None:
            self._rotator.retention = theirs.retention
            self._rotator.deltas = theirs.deltas
        self.tiers.follow(anew=self._anew)
        self._anew = False

    async def _flush(self, member: Member, request: FlushRequest) -> None:
        entry = self.entry_of(
            member,
            request.step,
            request.slot,
            request.generation,
            request.attempt,
            request.kind,
            tiers=request.tiers,
            base=request.base,
            merge=request.merge,
        )
        await self._pipeline.add(entry, self.pin_of(member, request.slot, request.generation))

    async def _bye(self, peer: Peer, member: Member, request: Bye) -> None:
        self.members.leave(member, FLUSHED if request.flush else KEPT, safe=request.safe)
        self.protection.left()
        await self.journaled(self.journal.drop_member, member.entry())
        self.beacons.changed()
        peer.send(Goodbye(request.number))
        self.keep(self._orphans.look())
        if self.settings.deltas and request.flush and not self.members.anyone_here:
            self.rotate(member.incarnation)  # what further deltas might have stood on may go

    def _send_arenas(self, peer: Peer, request: ArenasRequest) -> None:
        """Where each rank's arena is; those without a path only to whoever takes their descriptors."""
        known: list[dict[str, Any]] = []
        fds: list[int] = []
        own, kept = self.members.arenas(), self.protection.kept()
        nameless = [(rank, arena) for rank, arena in kept.items() if arena.info.path is None]
        for rank, arena in [*own.items(), *nameless]:
            path = arena.info.path
            if path is None and not request.descriptors:
                continue
            known.append({"rank": rank, "incarnation": arena.info.incarnation, "path": str(path or "")})
            if path is None:
                fds.append(arena.fileno())
        peer.send(ArenasAnswer(request.number, known), fds)

    def status(self) -> dict[str, Any]:
        """For people who look, and for tests: plain values."""
        return describe(self, self.journal.epoch, time.monotonic() - self._started)

    # -- for the queue, the orphans and the beacon

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def run_record(self) -> RunRecord | None:
        return self._run

    @property
    def inline(self) -> bool:
        """Whether this is the agent of one trainer, within it."""
        return isinstance(self.journal, NoJournal)

    async def superseded(self, incarnation: int) -> bool:
        """Whether a newer incarnation writes the run, or that cannot be told."""
        return await self._pipeline.fence.superseded(incarnation)

    @property
    def fence(self) -> Fence:
        return self._pipeline.fence

    @property
    def _pipeline(self) -> Pipeline:
        if self.pipeline is None:
            raise AgentError("the run is not open")
        return self.pipeline

    async def open_pipeline(self) -> Pipeline:
        """The queue, with the run opened if it is not yet."""
        await self.ensure_run(None)
        return self._pipeline

    def entry_of(
        self,
        member: Member,
        step: int,
        slot: int,
        generation: int,
        attempt: int,
        kind: str,
        *,
        tiers: Sequence[str] | None = None,
        base: tuple[int, int] | None = None,
        merge: bool = False,
    ) -> JobEntry:
        """``tiers``: the further ones that are to have it; None: all."""
        self._order += 1
        return JobEntry(
            incarnation=member.incarnation,
            step=step,
            rank=member.rank,
            run_id=member.run_id,
            world=member.world,
            arena=member.arena_path,
            slot=slot,
            generation=generation,
            kind=kind,
            attempt=attempt,
            order=self._order,
            process=(member.process.pid, member.process.start_time, member.process.boot),
            tiers=tuple([t.name for t in self.settings.tiers if not t.node] if tiers is None else tiers),
            base=base,
            merge=merge,
        )

    @staticmethod
    def pin_of(member: Member, slot: int, generation: int) -> Callable[[], Pinned]:
        return functools.partial(member.arena.pin, slot, generation, purpose=Purpose.FLUSH)

    def local_ranks(self, incarnation: int) -> set[int]:
        return {member.rank for member in self.members.all() if member.incarnation == incarnation}

    async def stand_in(self, flush: Flush, missing: list[int]) -> list[int]:
        lost = []
        for rank in missing:
            member = self.members.find(flush.incarnation, rank)
            if member is None or member.here:
                continue
            snapshot = find_snapshot(member.arena, flush.incarnation, flush.step)
            if snapshot is None or member.farewell == KEPT:
                lost.append(rank)
                continue
            log.info("step %d: flushing for rank %d, which has ended", flush.step, rank)
            asked = next((job.entry for job in flush.jobs.values()), None)
            entry = self.entry_of(
                member,
                flush.step,
                snapshot.index,
                snapshot.generation,
                flush.attempt,
                FULL if asked is None else asked.kind,
                base=None if asked is None else asked.base,
                merge=asked is not None and asked.merge,
            )
            await self._pipeline.add(entry, self.pin_of(member, snapshot.index, snapshot.generation))
        return lost

    async def lost_elsewhere(self, incarnation: int, missing: list[int]) -> tuple[list[int], str]:
        return await self._elsewhere.lost(incarnation, missing)

    def at_work_elsewhere(self, missing: list[int]) -> bool:
        return self._elsewhere.at_work(missing)

    def run_is_gone(self, found: str) -> None:
        """The run was deleted, or replaced by another: there is nothing left to serve."""
        if self.stopped.is_set():
            return
        root = self.settings.root
        log.error("the run under %s is gone (%s is there); leaving", root, found)
        expected = self._run.run_id if self._run is not None else "a run"
        for peer in list(self._registered):
            peer.send(gone_news(self.members.newest, root, found, expected))
        self.leave()

    def report(self, progress: Progress) -> None:
        """Tell every registered trainer, and the run's events."""
        for peer in list(self._registered):
            peer.send(news_of(progress))
        if progress.stage == "committed":
            self.beacons.committed(progress.incarnation, progress.step)
        if progress.stage != "queued" and self._events is not None:
            self._events.append(progress.stage, **event_of(progress))
            self.keep(self._write_events())

    def rotate(self, incarnation: int, *, full: bool = False) -> None:
        """After a commit, and when the storage was full: what retention gives up, or gave up since it was changed,
        is the room that the next flush needs. On the node that has rank 0."""
        self.tiers.make_way() if full else None
        if incarnation == self.members.newest:
            self.members.let_go(nameless=True)
        if self._rotator is not None and 0 in self.members.arenas():
            self._rotator.want(max(incarnation, self.members.newest))

    async def remember(self, entry: JobEntry) -> None:
        await self.journaled(self.journal.put_job, entry)

    async def forget(self, entries: list[JobEntry], manifest: Manifest | None = None) -> None:
        await self.tiers.settle(entries, manifest)

    def notes(self, entry: Uploading, name: str) -> Notes:
        return Notebook(self.journal, self.journaled, entry, name)

    async def journaled_guard(self, entry: GuardEntry) -> None:
        await self.journaled(self.journal.put_guard, entry)

    async def forget_member(self, member: Member) -> None:
        await self.journaled(self.journal.drop_member, member.entry())

    # -- inside

    async def ensure_run(self, run_id: str | None) -> RunRecord:
        """The run under the root, opened at first need. AgentError if it is not the one that is meant."""
        async with self._run_lock:
            if self._run is None or (run_id is not None and self._run.run_id != run_id):
                record = await patiently(lambda: open_run(self._backend))
                if run_id is not None and record.run_id != run_id:
                    raise AgentError("another run lies under the root", found=record.run_id, expected=run_id)
                if self.pipeline is not None and not self.pipeline.busy:
                    await self.pipeline.close()
                elif self.pipeline is not None:
                    raise AgentError(
                        "the agent still works for a former run under this root", found=self._run
                    )
                await self._open(record)
            assert self._run is not None
            return self._run

    async def _open(self, record: RunRecord) -> None:
        self._run = record
        self._guarded = SameRun(self._backend, record, self.run_is_gone)
        self.pipeline = Pipeline(
            self,
            record,
            RateLimited(self._guarded, self.pacing.root) if is_local(self.settings.root) else self._guarded,
            queue_max=self.settings.queue_max,
            commit_timeout_s=self.settings.commit_timeout_s,
            arena_of=self.members.arena,
        )
        self.pipeline.compress = self.settings.compress
        self._rotator = Rotator(
            self._guarded,
            self.pipeline.fence,
            self.settings.retention,
            self._in_use,
            self._rotated,
            lambda: self.tiers.owed() | bases_of(self._pipeline.flushes()),
            lambda: self.members.anyone_here,
        )
        self._rotator.deltas = self.settings.deltas
        await self.tiers.open(self._guarded, record)
        me = Process.current()
        self._events = EventLog(
            self._guarded, f"agent-{self.settings.run_key}-{self.journal.epoch}-{me.start_time}"
        )
        self.keep(self.pipeline.run())

    async def _check_incarnations(self) -> None:
        """A trainer came: what it has made pointless ends, and older trainers hear that they are
        superseded."""
        try:
            await self._pipeline.fence_off()
            await self._pipeline.fence.look()
        except (BackendError, EverstepError) as error:
            log.warning("the incarnations cannot be read now: %s", error)
        newest = max(self._pipeline.fence.newest, self.members.newest)
        for peer in list(self._registered):
            if peer.member is not None and peer.member.incarnation < newest:
                peer.send(superseded_news(peer.member.incarnation, newest, self.settings.root))
        for member in self.members.retire():
            await self.forget_member(member)

    def _died(self, member: Member) -> None:
        log.info("rank %d of incarnation %d has ended without goodbye", member.rank, member.incarnation)
        self.beacons.changed()
        for flush in [] if self.pipeline is None else self.pipeline.flushes():
            flush.changed.set()
        self.keep(self._orphans.look())

    def _in_use(self, incarnation: int) -> bool:
        flushes = any(flush.incarnation == incarnation for flush in self._pipeline.flushes())
        return flushes or self.tiers.is_merging(incarnation)

    def _rotated(
        self, incarnation: int, report: RotationReport | None, error: EverstepError | BackendError | None
    ) -> None:
        if error is not None and not isinstance(error, EverstepError):
            error = AgentError("rotation failed", found=f"{type(error).__name__}: {error}")
        wire = None if error is None else error.to_wire()
        self.report(Progress(NO_STEP, incarnation, 0, self.settings.root, "rotated", wire))

    async def _write_events(self) -> None:
        """Best effort, and seldom: what is appended meanwhile goes along."""
        if self._events is None:
            return
        interval = EVENTS_FLAT_PAUSE_S if self._backend.capabilities.flat else EVENTS_PAUSE_S
        pause = self._last_events + interval - time.monotonic()
        if pause > 0 and not self.stopped.is_set():
            self._last_events += interval
            await asyncio.sleep(pause)
        self._last_events = time.monotonic()
        try:
            await self._events.flush()
        except (BackendError, EverstepError) as error:
            log.warning("events could not be written: %s", error)

    async def journaled(self, work: Callable[..., Any], *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._journal_thread, functools.partial(work, *args))

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """It is not idle meanwhile."""
        self._handling += 1
        try:
            yield
        finally:
            self._handling -= 1

    def count_from(self, order: int) -> None:
        """Jobs accepted from now on come after those numbered up to ``order``."""
        self._order = max(self._order, order)

    def keep(self, work: Awaitable[None]) -> None:
        """Run beside everything else; what goes wrong is logged."""
        task = asyncio.ensure_future(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _logged(work: Awaitable[None]) -> None:
    try:
        await work
    except Exception:
        log.exception("a task of the agent failed")
