"""The writer queue: flushes of all local ranks, one rank's images after the other, then the commit of the
step.

A *flush* is one attempt at one step; each local rank adds a *job* to it. Jobs are written one at a time, in
the order of their acceptance (the disk is one), a delta behind the verdict on its base; commits of several flushes may
wait for votes side by side. With a tier of the node's own (:mod:`.staging`) they are written there, and uploaded from
there by a queue of their own (:mod:`.uploads`). A flush ends with one verdict for all ranks. Everything here runs on
the agent's loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from everstep.backends.api import Backend
from everstep.backends.errors import BackendError
from everstep.backends.points import reach
from everstep.errors import AgentError, EverstepError, SaveFailed, StorageFull
from everstep.format.manifest import Abort, Decision, Manifest
from everstep.format.records import RunRecord
from everstep.format.vote import Vote
from everstep.memory.slots import Pinned
from everstep.store.catalog import Standing, look_at, read_decision_at
from everstep.store.commit import abort_attempt, try_commit
from everstep.store.flush import UNBASED, FlushJob, flush_rank
from everstep.store.sources import DurableSource

from .attempts import open_attempt, sweep, what_stands
from .basing import ArenaOf, Basing, no_arena
from .flushes import Flush, Job, KnownLayouts, Owner, checked, gather, logged, unpin
from .journal import QUEUED, STAGED, VOTED, JobEntry
from .staging import Staging
from .storage import Fence, in_our_words, patiently
from .uploads import Uploads, is_the_roots, pause_after
from .values import Progress
from .verdict import error_of, findings, given_up, ranks_missing, stage_of, superseded
from .waiting import happened
from .writing import Jobs

log = logging.getLogger("everstep.agent")

POLL_FIRST_S = 0.02
POLL_MAX_S = 1.0
POLL_FLAT_MAX_S = 3.0
"""Where each look is a request that costs money."""
POLL_PAUSES = 4.0
"""A pause is at least so many times as long as the look before it."""
LOOK_AFTER_S = 2.0
"""Without a new vote, after which the other nodes' beacons are looked at: most votes come sooner."""
FLUSHES_MAX = 1024
"""Flushes without a verdict; more are refused."""
ATTEMPTS_MAX = 1000
"""A step that was tried so often is refused: something is wrong that trying does not mend."""


class Pipeline:
    """``staging`` is the node's own tier, where it has one. It, ``compress``, commit time-outs and the backend may be
    changed at any time. ``_at_work`` is what is written and uploaded just now."""

    def __init__(
        self,
        owner: Owner,
        run: RunRecord,
        backend: Backend,
        *,
        queue_max: int,
        commit_timeout_s: float,
        arena_of: ArenaOf = no_arena,
    ) -> None:
        self.backend = backend
        self.staging: Staging | None = None
        self.commit_timeout_s = commit_timeout_s
        self.compress: str | None = None
        self.basing = Basing(run, backend, arena_of)
        self._owner = owner
        self._run = run
        self._queue_max = queue_max
        self._flushes: dict[tuple[int, int], Flush] = {}
        self._queue = Jobs(self._is_awaited)
        self._at_work: dict[asyncio.Task[None], Flush] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._layouts = KnownLayouts()
        self._newest: tuple[int, int] = (0, 0)
        """(incarnation, step) of the newest checkpoint that was committed."""
        self.uploads = Uploads(
            lambda flush, job: self._apart(flush, self._upload(flush, job)),
            failing=self._failing,
            failed=self._fail,
            drop=self._supersede,
        )
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
            await self._add_wishes(flush.jobs[entry.rank], entry)
            self._say(flush, "queued", rank=entry.rank)
            return
        job = flush.jobs[entry.rank] = Job(entry, pin)  # the flush's end lets go of its pin and its entry
        try:
            self._check_room(entry)
            await self._find_share(flush, job)
            if flush.ending is None:
                await self._owner.remember(job.entry)
        except Exception as error:
            self._fail(flush, error, entry.rank)
            return
        reach("agent.accepted", str(entry.step))
        if flush.ending is not None or flush.settled:
            return
        if job.entry.stage == QUEUED:
            self._queue.put(flush, job)
        if flush.voter is None:
            flush.voter = asyncio.ensure_future(self._conclude(flush))
        flush.changed.set()
        self._say(flush, "queued", rank=entry.rank)
        if job.entry.stage == STAGED:
            self._staged(flush, job)

    async def _add_wishes(self, job: Job, asked: JobEntry) -> None:
        more = tuple([tier for tier in asked.tiers if tier not in job.entry.tiers])
        if more or (asked.merge and not job.entry.merge):
            merge = job.entry.merge or asked.merge
            job.entry = replace(job.entry, tiers=job.entry.tiers + more, merge=merge)
            await self._owner.remember(job.entry)

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
        """Write and upload until cancelled."""
        await asyncio.gather(self._write_all(), self.uploads.run())

    async def _write_all(self) -> None:
        while True:
            flush, job = await self._queue.next()
            error = await self._apart(flush, self._write(flush, job))
            if error is not None:
                self._fail(flush, error, job.entry.rank)

    def _is_awaited(self, base: tuple[int, int]) -> bool:
        """Whether a delta is written only once its base has its verdict. Where shares are staged they are not held up
        by the root: there it is stored in full."""
        return self.staging is None and base in self._flushes

    async def _apart(self, flush: Flush, work: Coroutine[Any, Any, None]) -> BaseException | None:
        """Do a part of the flush in a task of its own, which the flush's end cancels; what went wrong."""
        task = asyncio.ensure_future(work)
        self._at_work[task] = flush
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            # The storage is closed next: what was begun is taken back before, one piece's write at most.
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        finally:
            del self._at_work[task]
        return None if task.cancelled() else task.exception()

    async def close(self) -> None:
        """Stop waiting for votes; jobs stay in the journal for the next agent. Pins are let go."""
        tasks = [flush.voter for flush in self._flushes.values() if flush.voter] + list(self._closing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for flush in self._flushes.values():
            unpin(flush)

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
                decision = await patiently(
                    lambda: what_stands(self.backend, entry.incarnation, entry.step, entry.attempt)
                )
                error = None if isinstance(decision, Manifest) else error_of(decision, self.backend.url)
                told = Flush(entry.incarnation, entry.step, entry.attempt, entry.world)
                self._say(told, "committed" if error is None else stage_of(error), error=error)
                return None
        return self._flush_for(entry.incarnation, entry.step, entry.attempt, entry.world)

    async def _find_share(self, flush: Flush, job: Job) -> None:
        """Where the job's bytes are: staged already, as whoever journaled or wrote it knows, or in the slot, which is
        pinned."""
        if job.entry.stage == QUEUED and self.staging is not None:
            vote = await self.staging.find(job.entry)
            if vote is not None:
                job.entry = replace(job.entry, stage=STAGED, root=vote.root)
        if job.entry.stage == QUEUED:
            await self._pin(flush, job)
        elif job.entry.stage == STAGED:
            job.staging = self.staging
            if job.staging is None:
                raise AgentError(
                    f"step {flush.step} was staged, and this node has no tier of its own any more"
                )

    async def _pin(self, flush: Flush, job: Job) -> None:
        """Pin the job's slot, in a thread: a stopped trainer may hold the arena's lock for some seconds."""
        pinned: Pinned | None = await asyncio.to_thread(job.pin)
        assert pinned is not None
        try:
            job.entry = checked(job.entry, pinned)
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
        """One rank: write images and vote, to the node's tier if there is one that does, else to the root, where the
        attempt is opened first."""
        assert job.pinned is not None
        entry, pinned = job.entry, job.pinned
        reach("agent.begun", str(entry.step))
        work = FlushJob(entry.step, entry.incarnation, entry.attempt, entry.rank, entry.world)
        base = await self.basing.of(entry, self.staging.backend if self.staging is not None else None)
        if self.staging is not None and await self._stage(flush, job, self.staging, work, base):
            return
        if not await self._is_open(flush):
            return
        vote = await patiently(
            lambda: flush_rank(
                self.backend,
                work,
                pinned,
                chunk_bytes=self._run.chunk_bytes,
                run=self._run,
                layouts=self._layouts.known() if self.backend.capabilities.flat else None,
                notes=functools.partial(self._owner.notes, entry),
                base=base,
                compress=self.compress,
                delta=entry.base is not None,
            )
        )
        self._compare(flush, entry, vote)
        reach("agent.voted", str(entry.step))
        await self._voted(flush, job, vote)

    def _compare(self, flush: Flush, entry: JobEntry, vote: Vote) -> None:
        """Tell of a share that was to be a delta and is none: the next flush had better be a full."""
        if UNBASED in vote.meta:
            self._say(flush, "unbased", rank=entry.rank)

    async def _stage(
        self, flush: Flush, job: Job, staging: Staging, work: FlushJob, base: DurableSource | None
    ) -> bool:
        """Write the share to the node's tier; whether that could be done. If not, the root has to do."""
        assert job.pinned is not None
        try:
            is_delta = job.entry.base is not None
            vote = await staging.put(work, job.pinned, base, self.compress, delta=is_delta)
        except (BackendError, EverstepError, OSError) as error:
            words = in_our_words(error, step=flush.step, rank=job.entry.rank, tier=staging.url)
            log.warning("%s: %s", staging.tier.name, words)
            self._say(flush, "unstaged", error=words, tier=staging.url)
            return False
        job.staging = staging
        job.entry = replace(job.entry, stage=STAGED, root=vote.root)
        self._compare(flush, job.entry, vote)
        await self._owner.remember(job.entry)
        if job.pinned is not None:
            job.pinned.release()
            job.pinned = None
        reach("agent.staged", str(flush.step))
        self._staged(flush, job)
        return True

    def _staged(self, flush: Flush, job: Job) -> None:
        """The share lies in the node's tier: the slot is free, and the upload waits."""
        assert job.staging is not None
        self._say(flush, "staged", rank=job.entry.rank, tier=job.staging.url)
        done = {rank for rank, other in flush.jobs.items() if other.entry.stage != QUEUED}
        if self._owner.local_ranks(flush.incarnation) <= done:
            self._say(flush, "staged", tier=job.staging.url)
        self.uploads.add(flush, job)

    async def _upload(self, flush: Flush, job: Job) -> None:
        """One staged share, from the node's tier to the root."""
        staging, entry = job.staging, job.entry
        assert staging is not None
        reach("agent.upload", str(flush.step))
        if not await self._is_open(flush):
            return
        vote = await patiently(lambda: staging.upload(self.backend, entry))
        await self._voted(flush, job, vote)

    async def _voted(self, flush: Flush, job: Job, vote: Vote) -> None:
        """The rank's share is durable at the root."""
        nbytes = sum(image.nbytes for image in vote.images)
        self._say(flush, "written", rank=job.entry.rank, nbytes=nbytes)
        job.entry = replace(job.entry, stage=VOTED, root=vote.root)
        if job.pinned is not None:
            job.pinned.release()
            job.pinned = None
        flush.changed.set()  # the journal, which is written meanwhile, keeps its order
        await self._owner.remember(job.entry)
        self._say(flush, "voted", rank=job.entry.rank, nbytes=nbytes)

    async def _is_open(self, flush: Flush) -> bool:
        """Make ``flush.attempt`` the open one at the root. False: the step was settled otherwise."""
        if not flush.opened:
            decision = await patiently(lambda: open_attempt(self.backend, flush))
            if decision is not None:
                self._settle(flush, decision)
                return False
            flush.opened = True
        return True

    async def _conclude(self, flush: Flush) -> None:
        """See the flush to its verdict: wait for the votes, then commit. What is staged survives that the root does
        not answer: then it is asked again and again."""
        failures = 0
        while not flush.ended:
            try:
                flush.changed.clear()
                if not any(job.entry.stage == VOTED for job in flush.jobs.values()):
                    await flush.changed.wait()
                    continue
                decision = await self._await_votes(flush)
                if decision is not None:
                    self._settle(flush, decision)
            except Exception as error:
                failures += 1
                if self.staging is None or not is_the_roots(error):
                    self._fail(flush, error, None)
                    return
                self._failing(flush, None, error, failures)
                await asyncio.sleep(pause_after(failures))

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
            await gather(self.backend, flush, self._owner.local_ranks(flush.incarnation))
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
            if not await happened(flush.changed, pause):
                pause = min(2 * pause, POLL_FLAT_MAX_S if self.backend.capabilities.flat else POLL_MAX_S)
        return None

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
            lost, why = await self._owner.lost_elsewhere(flush.incarnation, missing)
        late = time.monotonic() - since > self.commit_timeout_s and not self._uploads_elsewhere(
            flush, missing
        )
        if not lost and missing and late:
            lost, why = missing, f"did not vote within {self.commit_timeout_s:g} s"
        if lost:
            self._end(flush, *ranks_missing(flush.step, flush.world, voted, lost, why, self.backend.url))

    def _uploads_elsewhere(self, flush: Flush, missing: list[int]) -> bool:
        """With tiers of the nodes' own, a slow upload of another node is no time-out, unless it has passed over the
        step: uploads keep their order."""
        return (
            self.staging is not None and flush.key > self._newest and self._owner.at_work_elsewhere(missing)
        )

    # -- the end

    def _failing(self, flush: Flush, job: Job | None, error: BaseException, failures: int) -> None:
        """The root fails, and is tried again: told each time that there were twice as many failures. Rotation may make
        the room that is needed."""
        if isinstance(error, StorageFull):
            self._owner.rotate(flush.incarnation, full=True)
        if failures & (failures - 1) == 0 and isinstance(error, Exception):
            rank = None if job is None else job.entry.rank
            words = in_our_words(error, step=flush.step, rank=rank, tier=self.backend.url)
            log.warning("failure %d: %s", failures, words)
            self._say(flush, "upload_failing", error=words)

    def _supersede(self, flush: Flush) -> None:
        """Its upload makes way for newer ones."""
        self._end(flush, *given_up(flush.step, "newer steps came before its upload", self.backend.url))

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
        for task in [task for task, other in self._at_work.items() if other is flush]:
            task.cancel()
        self.uploads.look()
        self._in_background(self._abort(flush, error, reason, rank))

    async def _abort(self, flush: Flush, error: EverstepError, reason: str, rank: int | None) -> None:
        while tasks := [task for task, other in self._at_work.items() if other is flush]:
            await asyncio.wait(tasks)
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
            stagings = [self.staging, *(job.staging for job in flush.jobs.values())]
            await sweep(self.backend, flush, stagings)

    async def _decide_abort(self, flush: Flush, reason: str, rank: int | None) -> Decision:
        decision = None if flush.opened else await open_attempt(self.backend, flush)
        if decision is not None:
            return decision
        return await abort_attempt(
            self.backend, flush.step, flush.incarnation, flush.attempt, reason=reason, rank=rank
        )

    def _settle(self, flush: Flush, decision: Decision | None, error: EverstepError | None = None) -> None:
        """The verdict. ``error`` counts where nothing better was decided."""
        if flush.settled:
            return
        flush.settled = True
        flush.changed.set()
        unpin(flush)
        self.uploads.look()
        if isinstance(decision, Manifest):
            stage, error = "committed", None
            self._newest = max(self._newest, flush.key)
            for rank in set(decision.facts.get(UNBASED, ())) - set(flush.jobs):
                self._say(flush, "unbased", rank=rank)
            for about, said in findings(decision, self.backend.url):
                log.warning("step %d: %s", flush.step, said)
                self._say(flush, about, error=said)
        else:
            error = error or error_of(decision, self.backend.url)
            stage = stage_of(error)
        self._in_background(self._publish(flush, stage, error, decision))

    async def _publish(
        self, flush: Flush, stage: str, error: EverstepError | None, decision: Decision | None
    ) -> None:
        """Forget the jobs, then tell everyone; whoever asks again meanwhile finds the flush still there."""
        manifest = decision if isinstance(decision, Manifest) else None
        try:
            await self._owner.forget([job.entry for job in flush.jobs.values()], manifest)
        except AgentError as problem:
            log.error("step %d: %s", flush.step, problem)
        reach("agent.settled", str(flush.step))
        if self._flushes.get(flush.key) is flush:
            del self._flushes[flush.key]
        flush.over.set()
        self._queue.look()
        self._say(flush, stage, error=error, decided=manifest)
        if stage == "committed" or isinstance(error, StorageFull):
            self._owner.rotate(flush.incarnation, full=stage != "committed")
        if stage == "committed" and self.staging is not None:
            await self.staging.retain(self.fence, self._newest, set(self._flushes))

    def _say(
        self,
        flush: Flush,
        stage: str,
        *,
        rank: int = -1,
        nbytes: int = 0,
        error: EverstepError | None = None,
        tier: str | None = None,
        decided: Manifest | None = None,
    ) -> None:
        began = min((job.accepted for job in flush.jobs.values()), default=time.monotonic())
        self._owner.report(
            Progress(
                step=flush.step,
                incarnation=flush.incarnation,
                attempt=flush.attempt,
                tier=self.backend.url if tier is None else tier,
                stage=stage,
                error=None if error is None else error.to_wire(),
                seconds=time.monotonic() - began,
                nbytes=nbytes,
                rank=rank,
                kind="" if decided is None else decided.kind,
                base=None if decided is None else decided.parent_key,
            )
        )

    def _in_background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(logged(work))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
