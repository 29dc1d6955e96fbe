"""The writer queue: flushes of all local ranks, one rank's images after the other, then the commit of the
step.

A *flush* is one attempt at one step; each local rank adds a *job* to it. Jobs are written one at a time, in
the order of their acceptance (the disk is one); commits of several flushes may wait for votes side by side.
A flush ends with one verdict for all ranks. Everything here runs on the agent's loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from everstep.backends.api import Backend, Notes
from everstep.backends.errors import BackendError
from everstep.backends.points import reach
from everstep.errors import AgentError, EverstepError, SaveFailed, StorageFull
from everstep.format import names
from everstep.format.hashing import rank_root
from everstep.format.manifest import Abort, Decision, Manifest
from everstep.format.records import RunRecord
from everstep.memory.errors import SlotGone
from everstep.memory.slots import Pinned
from everstep.store.catalog import Standing, look_at, read_decision_at
from everstep.store.commit import abort_attempt, next_attempt, try_commit
from everstep.store.flush import FlushJob, flush_rank
from everstep.store.votes import GATHER_WORLD_MIN, gather_votes

from .journal import VOTED, JobEntry
from .storage import Fence, in_our_words, patiently
from .values import Progress
from .verdict import GIVEN_UP, error_of, findings, given_up, ranks_missing, stage_of, superseded

log = logging.getLogger("everstep.agent")

POLL_FIRST_S = 0.02
POLL_MAX_S = 1.0
POLL_FLAT_MAX_S = 3.0
"""Where each look is a request that costs money."""
POLL_PAUSES = 4.0
"""A pause is at least so many times as long as the look before it."""
LAYOUTS_S = 600.0
LAYOUTS_MAX = 4096
"""For how long, and how many, layouts that were found right are not looked at again."""
LOOK_AFTER_S = 2.0
"""Without a new vote, after which the other nodes' beacons are looked at: most votes come sooner."""
FLUSHES_MAX = 1024
"""Flushes without a verdict; more are refused."""
ATTEMPTS_MAX = 1000
"""A step that was tried so often is refused: something is wrong that trying does not mend."""


@dataclass
class Job:
    """One rank's part. ``pinned`` is None once its vote is there (the bytes are durable); ``pin`` made it,
    and keeps the arena open."""

    entry: JobEntry
    pin: Callable[[], Pinned]
    pinned: Pinned | None = None
    accepted: float = field(default_factory=time.monotonic)


@dataclass
class Flush:
    """One attempt at one step by the ranks of this node. ``ending`` is why it is to end early, once known."""

    incarnation: int
    step: int
    attempt: int
    world: int
    jobs: dict[int, Job] = field(default_factory=dict)
    opened: bool = False
    ending: tuple[EverstepError, str, int | None] | None = None
    settled: bool = False
    gathered: bool = False
    """Whether the node's votes were gathered, or are not to be."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    voter: asyncio.Task[None] | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the flush is forgotten: its verdict is decided, journaled, and about to be told."""

    @property
    def key(self) -> tuple[int, int]:
        return self.incarnation, self.step

    def unwritten(self) -> list[int]:
        return [rank for rank, job in self.jobs.items() if job.entry.stage != VOTED]


class Owner(Protocol):
    """What the pipeline needs of the service around it."""

    def report(self, progress: Progress) -> None: ...

    def rotate(self, incarnation: int) -> None: ...

    async def remember(self, entry: JobEntry) -> None: ...

    async def forget(self, entries: list[JobEntry]) -> None: ...

    def notes(self, entry: JobEntry, name: str) -> Notes:
        """On the upload of an object of the job."""
        ...

    def local_ranks(self, incarnation: int) -> set[int]:
        """The ranks of that incarnation that registered on this node."""
        ...

    async def stand_in(self, flush: Flush, missing: list[int]) -> list[int]:
        """Add the jobs of dead trainers whose arenas hold the step. Those of ``missing`` that can never
        vote: their trainers are dead, without that snapshot."""
        ...

    async def lost_elsewhere(self, flush: Flush, missing: list[int]) -> tuple[list[int], str]:
        """Those of ``missing`` on other nodes that can never vote, and why."""
        ...


class Pipeline:
    """``tier`` is the url that progress speaks of. Commit time-outs and the backend may be changed at any
    time."""

    def __init__(
        self, owner: Owner, run: RunRecord, backend: Backend, *, queue_max: int, commit_timeout_s: float
    ) -> None:
        self.backend = backend
        self.commit_timeout_s = commit_timeout_s
        self._owner = owner
        self._run = run
        self._queue_max = queue_max
        self._flushes: dict[tuple[int, int], Flush] = {}
        self._queue: deque[tuple[Flush, Job]] = deque()
        self._wake = asyncio.Event()
        self._writing: tuple[Flush, asyncio.Task[None]] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._layouts: set[str] = set()
        self._layouts_since = 0.0
        self.fence = Fence(backend)

    @property
    def busy(self) -> bool:
        return bool(self._flushes or self._closing)

    def find(self, incarnation: int, step: int) -> Flush | None:
        """The flush of that step that has no verdict yet."""
        return self._flushes.get((incarnation, step))

    def flushes(self) -> list[Flush]:
        return list(self._flushes.values())

    # -- what the service asks for

    async def add(self, entry: JobEntry, pin: Callable[[], Pinned]) -> None:
        """Accept a job: pinned and in the journal before this returns. A repeated request joins what is
        there."""
        flush = await self._under_way(entry)
        if flush is None:
            return
        if entry.rank in flush.jobs:
            self._say(flush, "queued", rank=entry.rank)
            return
        job = flush.jobs[entry.rank] = Job(entry, pin)  # the flush's end lets go of its pin and its entry
        try:
            self._check_room(entry)
            if entry.stage != VOTED:
                await self._pin(flush, job)
            if flush.ending is None:
                await self._owner.remember(job.entry)
        except Exception as error:
            self._fail(flush, error, entry.rank)
            return
        reach("agent.accepted", str(entry.step))
        if flush.ending is not None or flush.settled:
            return
        if entry.stage != VOTED:
            self._queue.append((flush, job))
            self._wake.set()
        if flush.voter is None:
            flush.voter = asyncio.ensure_future(self._conclude(flush))
        flush.changed.set()
        self._say(flush, "queued", rank=entry.rank)

    def give_up(self, incarnation: int, step: int, attempt: int, reason: str, world: int) -> None:
        """End the attempt without a checkpoint, unless it is one already. All ranks hear the same. Raises
        AgentError when too many flushes are under way."""
        if (incarnation, step) not in self._flushes and len(self._flushes) >= FLUSHES_MAX:
            raise AgentError("too many flushes are under way", found=len(self._flushes), expected=FLUSHES_MAX)
        flush = self._flush_for(incarnation, step, attempt, world)
        if flush.attempt == attempt:
            self._end(flush, *given_up(step, reason, self.backend.url))

    async def fence_off(self) -> None:
        """End the flushes that a newer incarnation has made pointless."""
        for flush in self.flushes():
            if not flush.settled and not await self.fence.allows(*flush.key):
                self._end(flush, *superseded(*flush.key, self.fence.newest))

    async def run(self) -> None:
        """Write jobs until cancelled."""
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            flush, job = self._queue.popleft()
            if flush.ending is not None or flush.settled:
                continue
            task = asyncio.ensure_future(self._write(flush, job))
            self._writing = flush, task
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                # The storage is closed next: what was begun is taken back before, one piece's write at most.
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise
            finally:
                self._writing = None
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fail(flush, error, job.entry.rank)

    async def close(self) -> None:
        """Stop waiting for votes; jobs stay in the journal for the next agent. Pins are let go."""
        tasks = [flush.voter for flush in self._flushes.values() if flush.voter] + list(self._closing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for flush in self._flushes.values():
            _unpin(flush)

    # -- one flush

    def _flush_for(self, incarnation: int, step: int, attempt: int, world: int) -> Flush:
        flush = self._flushes.get((incarnation, step))
        if flush is None:
            flush = self._flushes[incarnation, step] = Flush(incarnation, step, attempt, world)
        return flush

    async def _under_way(self, entry: JobEntry) -> Flush | None:
        """The flush that the job belongs to. A request for an older attempt gets that one's verdict, and
        None is returned; a newer attempt ends the older one first."""
        while (flush := self._flushes.get((entry.incarnation, entry.step))) is not None:
            if flush.ending is not None or flush.settled:
                await flush.over.wait()  # storage calls are bounded, so this is
            elif entry.attempt == flush.attempt:
                return flush
            elif entry.attempt > flush.attempt:
                self._end(flush, *given_up(entry.step, "asked for again", self.backend.url))
            else:
                decision = await patiently(lambda: self._stands(entry.incarnation, entry.step, entry.attempt))
                error = None if isinstance(decision, Manifest) else error_of(decision, self.backend.url)
                told = Flush(entry.incarnation, entry.step, entry.attempt, entry.world)
                self._say(told, "committed" if error is None else stage_of(error), error=error)
                return None
        return self._flush_for(entry.incarnation, entry.step, entry.attempt, entry.world)

    async def _pin(self, flush: Flush, job: Job) -> None:
        """Pin the job's slot, in a thread: a stopped trainer may hold the arena's lock for some seconds."""
        pinned: Pinned | None = await asyncio.to_thread(job.pin)
        assert pinned is not None
        try:
            job.entry = _checked(job.entry, pinned)
            if flush.ending is None and not flush.settled:
                job.pinned, pinned = pinned, None
        finally:
            if pinned is not None:
                pinned.release()

    def _check_room(self, entry: JobEntry) -> None:
        if len(self._queue) >= self._queue_max or len(self._flushes) > FLUSHES_MAX:
            raise AgentError(
                "the agent's queue is full",
                found=f"{len(self._queue)} jobs of {len(self._flushes)} steps",
                expected=f"at most {self._queue_max} jobs of {FLUSHES_MAX} steps",
                hint="Flush less often, or give up unfinished flushes",
            )
        if entry.attempt > ATTEMPTS_MAX:
            raise AgentError(
                f"step {entry.step} was tried too often", found=entry.attempt, expected=ATTEMPTS_MAX
            )

    async def _write(self, flush: Flush, job: Job) -> None:
        """One rank: open the attempt, write images and vote."""
        assert job.pinned is not None
        entry, pinned = job.entry, job.pinned
        reach("agent.begun", str(entry.step))
        if not flush.opened:
            decision = await patiently(lambda: self._open(flush))
            if decision is not None:
                self._settle(flush, decision)
                return
            flush.opened = True
        work = FlushJob(entry.step, entry.incarnation, entry.attempt, entry.rank, entry.world, entry.kind)
        vote = await patiently(
            lambda: flush_rank(
                self.backend,
                work,
                pinned,
                chunk_bytes=self._run.chunk_bytes,
                run=self._run,
                layouts=self._known_layouts(),
                notes=functools.partial(self._owner.notes, entry),
            )
        )
        reach("agent.voted", str(entry.step))
        nbytes = sum(image.nbytes for image in vote.images)
        self._say(flush, "written", rank=entry.rank, nbytes=nbytes)
        job.entry = replace(entry, stage=VOTED, root=vote.root)
        job.pinned = None
        pinned.release()
        await self._owner.remember(job.entry)
        flush.changed.set()
        self._say(flush, "voted", rank=entry.rank, nbytes=nbytes)

    def _known_layouts(self) -> set[str] | None:
        """Where each look is a request, a layout that was found right is trusted for a while."""
        if not self.backend.capabilities.flat:
            return None
        now = time.monotonic()
        if now - self._layouts_since > LAYOUTS_S or len(self._layouts) > LAYOUTS_MAX:
            self._layouts_since, self._layouts = now, set()
        return self._layouts

    async def _open(self, flush: Flush) -> Decision | None:
        """Make ``flush.attempt`` the open one. A decision: the step has one already that settles it."""
        number, manifest = await next_attempt(self.backend, flush.step, flush.incarnation)
        if manifest is not None:
            return manifest
        if number > flush.attempt:
            return await self._stands(flush.incarnation, flush.step, flush.attempt)
        for earlier in range(number, flush.attempt):
            reason = GIVEN_UP + "a later attempt was asked for"
            decision = await abort_attempt(
                self.backend, flush.step, flush.incarnation, earlier, reason=reason
            )
            if isinstance(decision, Manifest):
                return decision
        return None

    async def _stands(self, incarnation: int, step: int, attempt: int) -> Manifest | Abort:
        """What was decided; an attempt that was left undecided is given up now."""
        return await abort_attempt(
            self.backend, step, incarnation, attempt, reason=GIVEN_UP + "left unfinished"
        )

    async def _conclude(self, flush: Flush) -> None:
        """See the flush to its verdict: wait for the votes, then commit."""
        try:
            while flush.ending is None and not flush.settled:
                flush.changed.clear()
                if not any(job.entry.stage == VOTED for job in flush.jobs.values()):
                    await flush.changed.wait()
                    continue
                decision = await self._await_votes(flush)
                if decision is not None:
                    self._settle(flush, decision)
        except Exception as error:
            self._fail(flush, error, None)

    async def _await_votes(self, flush: Flush) -> Decision | None:
        """Poll with growing pauses until something is decided; None when the flush is to end otherwise. The
        time-out starts anew with each vote that comes in, and does not run while ranks of ours are being
        written."""
        pause = POLL_FIRST_S
        place = flush.step, flush.incarnation, flush.attempt
        seen: list[int] = []
        since = time.monotonic()
        while flush.ending is None and not flush.settled:
            flush.changed.clear()
            await self._gather(flush)
            began = time.monotonic()
            standing = await patiently(functools.partial(look_at, self.backend, *place))
            voted = list(standing.ranks)
            decision = await patiently(functools.partial(self._decide, flush, standing))
            if decision is not None or flush.ending is not None:
                return decision
            if voted != seen:
                seen, since, pause = voted, time.monotonic(), POLL_FIRST_S
            if flush.unwritten():
                since = time.monotonic()
            await self._check_missing(flush, voted, since)
            pause = max(pause, POLL_PAUSES * (time.monotonic() - began))  # a slow store is asked more seldom
            try:
                await asyncio.wait_for(flush.changed.wait(), pause)
            except asyncio.TimeoutError:
                pause = min(2 * pause, POLL_FLAT_MAX_S if self.backend.capabilities.flat else POLL_MAX_S)
        return None

    async def _gather(self, flush: Flush) -> None:
        """Put the votes of the node's ranks together once all are there: in a large job that spares whoever
        commits from reading each. Nothing depends on it."""
        ranks = sorted([rank for rank, job in flush.jobs.items() if job.entry.stage == VOTED])
        everyone = self._owner.local_ranks(flush.incarnation).issubset(ranks)
        if flush.gathered or flush.world < GATHER_WORLD_MIN or not everyone or len(ranks) < 2:
            return
        flush.gathered = True
        try:
            await gather_votes(self.backend, flush.step, flush.incarnation, flush.attempt, ranks)
        except (BackendError, EverstepError) as error:
            log.warning("step %d: the node's votes could not be gathered: %s", flush.step, error)

    async def _decide(self, flush: Flush, standing: Standing) -> Decision | None:
        """What someone else decided, or, once all votes are in and no newer incarnation forbids it, our
        own."""
        place = flush.step, flush.incarnation, flush.attempt
        if flush.attempt in standing.names.decisions:
            return await read_decision_at(self.backend, *place)
        if len(standing.ranks) < flush.world:
            return None
        if not await self.fence.allows(*flush.key):
            self._end(flush, *superseded(*flush.key, self.fence.newest))
            return None
        reach("agent.commit.before", str(flush.step))
        decision = await try_commit(
            self.backend, *place, flush.world, standing=standing, known=self.fence.known
        )
        if decision is not None:
            reach("agent.committed", str(flush.step))
        return decision

    async def _check_missing(self, flush: Flush, voted: list[int], since: float) -> None:
        """End the flush when ranks will not vote any more, or have had their time."""
        missing = sorted(set(range(flush.world)) - set(voted) - set(flush.unwritten()))
        lost = await self._owner.stand_in(flush, missing) if missing else []
        why = "died without a snapshot of it"
        if missing and not lost and time.monotonic() - since > LOOK_AFTER_S:
            lost, why = await self._owner.lost_elsewhere(flush, missing)
        if not lost and missing and time.monotonic() - since > self.commit_timeout_s:
            lost, why = missing, f"did not vote within {self.commit_timeout_s:g} s"
        if lost:
            self._end(flush, *ranks_missing(flush.step, flush.world, voted, lost, why, self.backend.url))

    # -- the end

    def _fail(self, flush: Flush, error: BaseException, rank: int | None) -> None:
        if not isinstance(error, (BackendError, EverstepError, OSError)):
            log.error("step %d: a flush failed unexpectedly", flush.step, exc_info=error)
            error = SaveFailed(
                f"step {flush.step}: the agent failed", found=f"{type(error).__name__}: {error}"
            )
        words = in_our_words(error, step=flush.step, rank=rank, tier=self.backend.url)
        self._end(flush, words, str(words), rank)

    def _end(self, flush: Flush, error: EverstepError, reason: str, rank: int | None = None) -> None:
        """Have the flush end with ``error`` unless it became a checkpoint after all. The first cause
        counts."""
        if flush.ending is not None or flush.settled:
            return
        flush.ending = error, reason, rank
        flush.changed.set()
        if self._writing is not None and self._writing[0] is flush:
            self._writing[1].cancel()
        self._in_background(self._abort(flush, error, reason, rank))

    async def _abort(self, flush: Flush, error: EverstepError, reason: str, rank: int | None) -> None:
        while self._writing is not None and self._writing[0] is flush:
            await asyncio.wait({self._writing[1]})
            await asyncio.sleep(0)
        decision: Decision | None = None
        try:
            decision = await patiently(lambda: self._decide_abort(flush, reason, rank))
        except (BackendError, EverstepError) as second:
            log.warning("step %d: the abort record could not be written: %s", flush.step, second)
        if isinstance(decision, Abort) and (decision.reason, decision.rank) != (reason, rank):
            error = error_of(decision, self.backend.url)
        log.warning("step %d of incarnation %d, attempt %d: %s", *flush.key[::-1], flush.attempt, error)
        self._settle(flush, decision, error)
        if isinstance(decision, Abort):
            await self._sweep(flush)

    async def _decide_abort(self, flush: Flush, reason: str, rank: int | None) -> Decision:
        decision = None if flush.opened else await self._open(flush)
        if decision is not None:
            return decision
        return await abort_attempt(
            self.backend, flush.step, flush.incarnation, flush.attempt, reason=reason, rank=rank
        )

    async def _sweep(self, flush: Flush) -> None:
        """Remove what an aborted attempt of ours has written: after a full disk the room is needed."""
        directory = names.attempt_dir(flush.step, flush.incarnation, flush.attempt)
        try:
            items = [item.name async for item in self.backend.list(directory)]
            await self.backend.delete(items)
        except BackendError as error:
            log.warning("%s could not be removed: %s", directory, error)

    def _settle(self, flush: Flush, decision: Decision | None, error: EverstepError | None = None) -> None:
        """The verdict. ``error`` counts where nothing better was decided."""
        if flush.settled:
            return
        flush.settled = True
        flush.changed.set()
        _unpin(flush)
        if isinstance(decision, Manifest):
            stage, error = "committed", None
            for about, said in findings(decision, self.backend.url):
                log.warning("step %d: %s", flush.step, said)
                self._say(flush, about, error=said)
        else:
            error = error or error_of(decision, self.backend.url)
            stage = stage_of(error)
        self._in_background(self._publish(flush, stage, error))

    async def _publish(self, flush: Flush, stage: str, error: EverstepError | None) -> None:
        """Forget the jobs, then tell everyone; whoever asks again meanwhile finds the flush still there."""
        try:
            await self._owner.forget([job.entry for job in flush.jobs.values()])
        except AgentError as problem:
            log.error("step %d: %s", flush.step, problem)
        reach("agent.settled", str(flush.step))
        if self._flushes.get(flush.key) is flush:
            del self._flushes[flush.key]
        flush.over.set()
        self._say(flush, stage, error=error)
        if stage == "committed" or isinstance(error, StorageFull):
            self._owner.rotate(flush.incarnation)

    def _say(
        self, flush: Flush, stage: str, *, rank: int = -1, nbytes: int = 0, error: EverstepError | None = None
    ) -> None:
        began = min((job.accepted for job in flush.jobs.values()), default=time.monotonic())
        self._owner.report(
            Progress(
                step=flush.step,
                incarnation=flush.incarnation,
                attempt=flush.attempt,
                tier=self.backend.url,
                stage=stage,
                error=None if error is None else error.to_wire(),
                seconds=time.monotonic() - began,
                nbytes=nbytes,
                rank=rank,
            )
        )

    def _in_background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(_awaited(work))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _awaited(work: Awaitable[None]) -> None:
    try:
        await work
    except Exception:
        log.exception("a task of the queue failed")


def _unpin(flush: Flush) -> None:
    for job in flush.jobs.values():
        if job.pinned is not None:
            job.pinned.release()
            job.pinned = None


def _checked(entry: JobEntry, pinned: Pinned) -> JobEntry:
    """The entry, with the slot's root if it is sealed. The slot must hold the entry's snapshot, and must be
    sealed as it was when the entry was made."""
    info = pinned.info
    if (info.incarnation, info.step) != (entry.incarnation, entry.step):
        raise SlotGone(
            f"slot {entry.slot} of rank {entry.rank} holds another snapshot",
            found=f"step {info.step} of incarnation {info.incarnation}",
            expected=f"step {entry.step} of incarnation {entry.incarnation}",
        )
    records = pinned.sealed()
    root = b"" if records is None else rank_root(records)
    if entry.root and root != entry.root:
        raise SlotGone(
            f"slot {entry.slot} of rank {entry.rank} is not what was sealed",
            found=root.hex() or "not sealed",
            expected=entry.root.hex(),
        )
    return replace(entry, root=root)
