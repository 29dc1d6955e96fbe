"""Synthetic fulls: durable deltas that are made fulls in the background, so that chains stay short without the trainer.

A delta that is to be merged says so from the beginning, on all ranks, and the journal remembers it when the delta is
durable. Each agent writes the shares of its own ranks, from the nearest holder, as the attempt behind the delta's: no
node has to read, or send, what others wrote. The attempt is committed as any other, or given up by an abort record, so
that all nodes give up the same; there is one try for each delta, and another delta is merged where it came to nothing.
What counts meanwhile is the delta. It is done at the urgency of mirrors, and not at all while a trainer loads.
Everything here runs on the agent's loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from everstep.backends.api import Backend, Notes
from everstep.backends.errors import BackendError
from everstep.backends.limit import Limit
from everstep.backends.points import reach
from everstep.errors import Damaged, EverstepError, Pruned, SaveAbandoned, StorageFull
from everstep.format import names
from everstep.format.manifest import Abort, Manifest
from everstep.format.records import RunRecord
from everstep.plan.chains import FULL
from everstep.store.catalog import look_at, read_decision_at, require_standing
from everstep.store.commit import abort_attempt, try_commit
from everstep.store.flush import FlushJob
from everstep.store.merge import merge_rank

from .basing import rank_source
from .behind import POLL_FIRST_S, THREADS, WAITING_MAX
from .flushes import logged
from .journal import JobEntry, MergeEntry
from .storage import Fence, in_our_words, may_pass, patiently
from .values import Progress
from .verdict import GIVEN_UP, error_of

log = logging.getLogger("everstep.agent")

TRIES_MAX = 5
"""Of one merge, where storage fails; then it is given up."""
PAUSE_S = 5.0
"""Between tries."""
POLL_MAX_S = 5.0
"""Between looks whether the other nodes' shares are there."""
LOOK_AFTER_S = 2.0
"""Without a new share, after which the other nodes' beacons are looked at."""
WAIT_S = 3600.0
"""For the next share of another node that says that it is at work: it may be slow, for this goes behind all else."""
LOOK_S = 0.25
"""Between looks whether a trainer still loads."""

Key = tuple[int, int]


class Owner(Protocol):
    """What merging needs of the service around it."""

    def report(self, progress: Progress) -> None: ...

    def rotate(self, incarnation: int) -> None: ...

    async def merged(self, entry: MergeEntry, manifest: Manifest | None) -> None:
        """It is over; with ``manifest`` the checkpoint is a full, which its further tiers are owed."""
        ...

    def notes(self, entry: MergeEntry, name: str) -> Notes: ...

    def is_recovering(self) -> bool:
        """Whether a trainer of this node loads."""
        ...

    async def lost_elsewhere(self, incarnation: int, missing: list[int]) -> tuple[list[int], str]:
        """Those of ``missing`` ranks whose nodes will do nothing more for that incarnation, and why."""
        ...

    def at_work_elsewhere(self, missing: list[int]) -> bool:
        """Whether the nodes of ``missing`` have something under way, as was seen last."""
        ...

    @property
    def patience_s(self) -> float:
        """For how long nothing may come from a node that does not say that it is at work."""
        ...

    @property
    def near(self) -> Backend | None:
        """The node's own tier."""
        ...


class Quiet:
    """A gate that is shut while a trainer loads; then ``inner`` lets through what it does."""

    def __init__(self, owner: Owner, inner: Limit) -> None:
        self._owner = owner
        self._inner = inner

    @property
    def nbytes_max(self) -> int:
        return self._inner.nbytes_max

    async def take(self, nbytes: int) -> None:
        await quiet(self._owner)
        await self._inner.take(nbytes)


async def quiet(owner: Owner) -> None:
    """Until no trainer of this node loads."""
    while owner.is_recovering():
        await asyncio.sleep(LOOK_S)


class Merges:
    """One agent's. ``backend`` is the root, by a gate of its own."""

    def __init__(self, owner: Owner, backend: Backend, run: RunRecord, fence: Fence) -> None:
        self._owner = owner
        self._backend = backend
        self._run = run
        self._fence = fence
        self._waiting: deque[MergeEntry] = deque()
        self._now: MergeEntry | None = None
        self._wake = asyncio.Event()
        self._merging: asyncio.Task[Manifest | Abort] | None = None
        self._yields = False
        """Whether what is merged now makes way."""
        self._dropping: set[asyncio.Task[None]] = set()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="everstep-merge")
        self._task = asyncio.ensure_future(self._work())

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._now or self._dropping)

    def owed(self) -> set[Key]:
        """(incarnation, step) of what is merged, or will be: it stays."""
        return {(entry.incarnation, entry.step) for entry in self._all()}

    def status(self) -> list[int]:
        """Steps that are to be made fulls."""
        return [entry.step for entry in self._all()]

    def _all(self) -> list[MergeEntry]:
        return [*([self._now] if self._now is not None else []), *self._waiting]

    def owe(self, entries: Sequence[MergeEntry]) -> None:
        for entry in entries:
            if entry.key not in [known.key for known in self._all()]:
                self._waiting.append(entry)
        while len(self._waiting) > WAITING_MAX:
            entry = self._waiting.popleft()
            why = f"step {entry.step} stays a delta: newer ones are to be made fulls"
            self._drop(entry, SaveAbandoned(why, step=entry.step))
        self._wake.set()

    def make_way(self) -> None:
        """The root is full: flushes need the room that fulls would take, and that of what is held for them."""
        while self._waiting:
            entry = self._waiting.popleft()
            self._drop(entry, _no_room(entry))
        self._yields = True
        if self._merging is not None:
            self._merging.cancel()

    def rest(self) -> list[MergeEntry]:
        """What is left."""
        return self._all()

    async def close(self) -> None:
        """Stop; what is left is in the journal."""
        for task in (self._task, *self._dropping):
            task.cancel()
        await asyncio.gather(self._task, *self._dropping, return_exceptions=True)
        self._pool.shutdown()
        await self._backend.close()

    async def _work(self) -> None:
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            self._now, self._yields = self._waiting.popleft(), False
            await self._see_through(self._now)
            self._now = None

    # -- one after the other

    async def _see_through(self, entry: MergeEntry) -> None:
        began = time.monotonic()
        for left in range(TRIES_MAX - 1, -1, -1):
            try:
                await self._end(entry, began, await self._try(entry))
                return
            except Exception as error:
                if not isinstance(error, (BackendError, EverstepError, OSError)):
                    log.error("step %d: merging failed unexpectedly", entry.step, exc_info=error)
                words = in_our_words(error, step=entry.step, rank=None, tier=self._backend.url)
                if left == 0 or not may_pass(error):
                    await self._give_up(entry, began, words)
                    return
                log.warning("step %d could not be made a full: %s", entry.step, words)
            await asyncio.sleep(PAUSE_S * random.uniform(0.5, 1.0))

    async def _try(self, entry: MergeEntry) -> Manifest | Abort:
        """As :meth:`_merge`, until it makes way: StorageFull."""
        if self._yields:
            raise _no_room(entry)
        self._merging = task = asyncio.ensure_future(self._merge(entry))
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        finally:
            self._merging = None
        if task.cancelled():
            raise _no_room(entry)
        return task.result()

    async def _merge(self, entry: MergeEntry) -> Manifest | Abort:
        """The decision on the attempt. Pruned: the checkpoint is not there any more."""
        await quiet(self._owner)
        place = entry.step, entry.incarnation
        standing = await patiently(lambda: require_standing(self._backend, *place))
        if standing.kind == FULL:
            return standing
        decided = await patiently(lambda: read_decision_at(self._backend, *place, entry.attempt))
        if isinstance(decided, Abort):
            return decided
        if decided is not None:
            reason = f"attempt {entry.attempt} was taken by another decision"
            return Abort(*place, entry.attempt, reason)
        reach("merge.begun", str(entry.step))
        for rank in entry.ranks:
            await quiet(self._owner)
            await self._rank(entry, rank)
            reach("merge.voted", str(entry.step))
        return await self._conclude(entry)

    async def _rank(self, entry: MergeEntry, rank: int) -> None:
        try:
            await self._write(entry, rank, self._owner.near)
        except Damaged as error:
            if self._owner.near is None:
                raise
            log.info(
                "step %d: the root's share is taken: %s", entry.step, error
            )  # the node's may just have gone
            await self._write(entry, rank, None)

    async def _write(self, entry: MergeEntry, rank: int, near: Backend | None) -> None:
        key = entry.incarnation, entry.step
        source = await rank_source(key, rank, self._backend, near, self._run)
        work = FlushJob(entry.step, entry.incarnation, entry.attempt, rank, entry.world)
        await patiently(
            lambda: merge_rank(
                self._backend,
                work,
                source,
                run=self._run,
                pool=self._pool,
                notes=functools.partial(self._owner.notes, entry),
            )
        )

    async def _conclude(self, entry: MergeEntry) -> Manifest | Abort:
        """Commit, once all nodes' shares are there."""
        place = entry.step, entry.incarnation, entry.attempt
        seen: tuple[int, ...] = ()
        since, pause = time.monotonic(), POLL_FIRST_S
        while True:
            standing = await patiently(lambda: look_at(self._backend, *place))
            decision = await patiently(
                functools.partial(
                    try_commit,
                    self._backend,
                    *place,
                    entry.world,
                    standing=standing,
                    known=self._fence.known,
                )
            )
            if decision is not None:
                reach("merge.decided", str(entry.step))
                return decision
            if standing.ranks != seen:
                seen, since, pause = standing.ranks, time.monotonic(), POLL_FIRST_S
            elif reason := await self._why_not(entry, seen, time.monotonic() - since):
                return await abort_attempt(self._backend, *place, reason=GIVEN_UP + reason)
            await asyncio.sleep(pause)
            pause = min(2 * pause, POLL_MAX_S)

    async def _why_not(self, entry: MergeEntry, seen: tuple[int, ...], seconds: float) -> str:
        """Why the other nodes' shares are not waited for any longer, as for votes of a flush; "" if they are.
        ``seconds``: since the last one came."""
        missing = sorted(set(range(entry.world)) - set(seen))
        if not missing or seconds < LOOK_AFTER_S:
            return ""
        lost, why = await self._owner.lost_elsewhere(entry.incarnation, missing)
        if lost:
            return f"ranks {lost}: {why}"
        patience_s = WAIT_S if self._owner.at_work_elsewhere(missing) else self._owner.patience_s
        return f"the shares of ranks {missing} did not come within {patience_s:g} s" * (seconds > patience_s)

    # -- ends

    def _drop(self, entry: MergeEntry, error: EverstepError) -> None:
        task = asyncio.ensure_future(logged(self._give_up(entry, time.monotonic(), error)))
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def _give_up(self, entry: MergeEntry, began: float, error: EverstepError) -> None:
        """For all nodes, unless it is a full already."""
        place = entry.step, entry.incarnation, entry.attempt
        reason = f"{GIVEN_UP}{error}"
        decided = None if isinstance(error, Pruned) else await self._abort(entry, reason)
        # Without the record another node might commit the attempt yet.
        if isinstance(decided, Abort) and isinstance(error, StorageFull):
            await self._sweep(names.attempt_dir(*place))
        await self._end(entry, began, decided or Abort(*place, reason), error)

    async def _abort(self, entry: MergeEntry, reason: str) -> Manifest | Abort | None:
        """The decision on the attempt; None where none could be written. On a full disk there is room for one as soon
        as a flush has failed."""
        for left in range(TRIES_MAX - 1, -1, -1):
            try:
                place = entry.step, entry.incarnation, entry.attempt
                return await abort_attempt(self._backend, *place, reason=reason)
            except (BackendError, EverstepError) as error:
                log.warning("step %d: the abort record could not be written: %s", entry.step, error)
            if left:
                await asyncio.sleep(PAUSE_S * random.uniform(0.5, 1.0))
        return None

    async def _sweep(self, directory: str) -> None:
        try:
            await self._backend.delete([item.name async for item in self._backend.list(directory)])
        except BackendError as error:
            log.warning("%s could not be removed: %s", directory, error)

    async def _end(
        self,
        entry: MergeEntry,
        began: float,
        decision: Manifest | Abort,
        error: EverstepError | None = None,
    ) -> None:
        full = decision if isinstance(decision, Manifest) and decision.kind == FULL else None
        wire = None
        if full is None and isinstance(error, Pruned):
            # Asked for, by a prune say: nothing stays a delta.
            log.info("step %d is not made a full: it was removed", entry.step)
        elif full is None:
            words = error or error_of(decision, self._backend.url)
            log.warning("step %d stays a delta: %s", entry.step, words)
            wire = words.to_wire()
        # Told first: what is forgotten, and was not told, nobody would hear of.
        self._owner.report(
            Progress(
                entry.step,
                entry.incarnation,
                entry.attempt,
                self._backend.url,
                "unmerged" if full is None else "merged",
                wire,
                time.monotonic() - began,
                kind="" if full is None else FULL,
            )
        )
        reach("merge.told", str(entry.step))
        await self._owner.merged(entry, full)
        reach("merge.settled", str(entry.step))
        self._owner.rotate(entry.incarnation)  # what was held for it may go


def _no_room(entry: MergeEntry) -> StorageFull:
    return StorageFull(f"step {entry.step} makes way: a flush found no room", step=entry.step)


def merge_of(entries: Sequence[JobEntry], manifest: Manifest) -> MergeEntry | None:
    """What this node owes of a checkpoint that its jobs made and that is to be a full; None if it need not be."""
    if manifest.kind == FULL or not any(entry.merge for entry in entries):
        return None
    return MergeEntry(
        entries[0].run_id,
        manifest.incarnation,
        manifest.step,
        manifest.attempt + 1,
        manifest.world,
        tuple(sorted(entry.rank for entry in entries)),
        tuple(dict.fromkeys(tier for entry in entries for tier in entry.tiers)),
    )
