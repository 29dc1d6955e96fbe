"""Checkpoints on their way from the root to further tiers.

Each tier has a *line* of its own: what is owed to it, in the order of commits. A line sees one checkpoint through at a
time: this node's ranks, then, once all ranks' votes are there, the manifest; it tries as long as it takes. When more
than ``WAITING_MAX`` wait behind it, the oldest of these is dropped, a delta before a full, by an abort record at the
tier where the tier can hold one, so that all nodes drop the same; the newest never is, nor what another one stands on.
A delta goes behind what it stands on: of that a line sees through first what the tier does not have. Everything here
runs on the agent's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from everstep.backends.api import Backend, Notes
from everstep.backends.errors import BackendError
from everstep.backends.points import reach
from everstep.errors import EverstepError, Pruned, SaveAbandoned
from everstep.format import names
from everstep.format.manifest import Abort, Manifest
from everstep.format.records import RunRecord
from everstep.store.bases import CHAIN_MAX
from everstep.store.catalog import list_step, read_decision, require_standing
from everstep.store.commit import tidy
from everstep.store.mirror import conclude, copy_records, give_up, mirror_rank, missing_ranks, standing
from everstep.store.rotate import RotationReport

from .behind import POLL_FIRST_S, THREADS, WAITING_MAX
from .flushes import logged
from .journal import MirrorEntry
from .rotation import Rotator
from .storage import Fence, in_our_words, patiently
from .values import Progress, TierSettings
from .waiting import happened

log = logging.getLogger("everstep.agent")

PAUSE_FIRST_S = 1.0
PAUSE_MAX_S = 60.0
"""Between tries of a tier that fails."""
POLL_MAX_S = 2.0
"""Between looks whether the other nodes' ranks are there."""

Key = tuple[int, int]


class Owner(Protocol):
    """What a line needs of the service around it."""

    def report(self, progress: Progress) -> None: ...

    async def forget_mirror(self, entry: MirrorEntry) -> None: ...

    def notes(self, entry: MirrorEntry, name: str) -> Notes: ...

    def open_tier(self, tier: TierSettings) -> Backend: ...

    def has_first_rank(self) -> bool:
        """Whether rank 0 is on this node, which is the one that deletes."""
        ...

    @property
    def patience_s(self) -> float:
        """How long other nodes' ranks may take without a sign of getting on, before this one sees to them."""
        ...


class Mirrors:
    """All lines of a run. ``root`` is what they copy from."""

    def __init__(self, owner: Owner, root: Backend, run: RunRecord, fence: Fence) -> None:
        self._owner = owner
        self._root = root
        self._run = run
        self._fence = fence
        self._lines: dict[str, Line] = {}
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="everstep-mirror")
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        return any(line.busy for line in self._lines.values())

    def owed(self) -> set[Key]:
        """(incarnation, step) that the root must keep."""
        return {key for line in self._lines.values() for key in line.owed()}

    def follow(self, tiers: Sequence[TierSettings], *, anew: bool = False) -> None:
        """These are the tiers now, ``anew`` to be opened in any case; what is owed to one that is none any more is let
        go of."""
        named = {tier.name: tier for tier in tiers if not tier.node}
        for name in list(self._lines):
            line = self._lines[name]
            if anew or named.get(name) != line.tier:
                rest = self._lines.pop(name).leave()
                task = asyncio.ensure_future(logged(line.close()))
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
                if name in named and named[name].url == line.tier.url:
                    self._open(named[name], after=task).owe(rest)
        for name in named:
            if name not in self._lines:
                self._open(named[name])

    def owe(self, entries: Sequence[MirrorEntry]) -> list[MirrorEntry]:
        """Take these on. Those of tiers that nobody knows (any more) are given back."""
        unknown = []
        for entry in entries:
            line = self._lines.get(entry.tier)
            if line is None:
                unknown.append(entry)
            else:
                line.owe([entry])
        return unknown

    def knows(self) -> list[str]:
        return list(self._lines)

    async def close(self) -> None:
        for line in self._lines.values():
            line.leave()
            await line.close()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        self._pool.shutdown()

    def status(self) -> list[dict[str, Any]]:
        return [line.status() for line in self._lines.values()]

    def _open(self, tier: TierSettings, after: asyncio.Task[None] | None = None) -> Line:
        line = Line(self._owner, self._root, tier, self._run, self._fence, self._pool, after)
        self._lines[tier.name] = line
        return line


class Line:
    """What is owed to one tier."""

    def __init__(
        self,
        owner: Owner,
        root: Backend,
        tier: TierSettings,
        run: RunRecord,
        fence: Fence,
        pool: ThreadPoolExecutor,
        after: asyncio.Task[None] | None = None,
    ) -> None:
        """``after``: the end of a former line to the same place, which takes back what it had begun."""
        self.tier = tier
        self._after = after
        self._owner = owner
        self._root = root
        self._run = run
        self._pool = pool
        self._backend = owner.open_tier(tier)
        self._rotator = Rotator(self._backend, fence, tier.retention, self._in_use, self._rotated)
        self._waiting: deque[MirrorEntry] = deque()
        self._now: MirrorEntry | None = None
        self._wake = asyncio.Event()
        self._more = asyncio.Event()
        """More of the ranks of what is under way asked for it."""
        self._failures = 0
        self._error: str | None = None
        self._newest: Key | None = None
        self._nbytes = 0
        self._dropping: set[asyncio.Task[None]] = set()
        self._task = asyncio.ensure_future(self._work())

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._now or self._dropping or self._rotator.busy)

    def owed(self) -> set[Key]:
        now = [self._now] if self._now is not None else []
        return {(entry.incarnation, entry.step) for entry in [*now, *self._waiting]}

    def owe(self, entries: Sequence[MirrorEntry]) -> None:
        for entry in entries:
            self._add(entry)
        while len(self._waiting) > WAITING_MAX + (self._now is None):
            spare = self._spare()
            if spare is None:
                break
            self._waiting.remove(spare)
            self._drop(spare)
        self._wake.set()

    def _spare(self) -> MirrorEntry | None:
        """What goes first where too many wait: the oldest on which no other one stands, a delta if there is one."""
        needed = {entry.base for entry in self._waiting}
        free = [e for e in list(self._waiting)[:-1] if (e.incarnation, e.step) not in needed]
        return next((entry for entry in free if entry.base is not None), next(iter(free), None))

    def _add(self, entry: MirrorEntry) -> None:
        """After a restart the journal and each of the trainers may name the same one."""
        if self._now is not None and self._now.key == entry.key and self._now.attempt >= entry.attempt:
            self._now = self._now.joined(entry.ranks)
            self._more.set()
            return
        for at, known in enumerate(self._waiting):
            if known.key == entry.key:
                newer = max(known, entry, key=lambda one: one.attempt)
                self._waiting[at] = newer.joined({*known.ranks, *entry.ranks})
                return
        self._waiting.append(entry)

    def leave(self) -> list[MirrorEntry]:
        """Stop; what is still owed."""
        self._task.cancel()
        rest = [self._now] if self._now is not None else []
        return [*rest, *self._waiting]

    async def close(self) -> None:
        """After :meth:`leave`: what was cancelled takes back what it had begun, and is not disturbed in that."""
        for task in self._dropping:
            task.cancel()
        await asyncio.gather(self._task, *self._dropping, return_exceptions=True)
        await self._rotator.close()
        await self._backend.close()

    def status(self) -> dict[str, Any]:
        return {
            "name": self.tier.name,
            "url": self.tier.url,
            "owed": sorted(step for _, step in self.owed()),
            "newest": self._newest[1] if self._newest is not None else None,
            "failures": self._failures,
            "error": self._error,
            "sent_bytes": self._nbytes,
        }

    # -- one checkpoint after the other

    async def _work(self) -> None:
        if self._after is not None:
            await asyncio.wait({self._after})
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            self._now = self._waiting.popleft()
            # What waits longest goes first: it is what the root may not remove.
            await self._see_through(self._now)
            self._now = None

    async def _see_through(self, entry: MirrorEntry) -> None:
        pause, began = PAUSE_FIRST_S, time.monotonic()
        while True:
            try:
                decision = await self._mirror(entry)
                break
            except (Pruned, SaveAbandoned) as error:
                gone = isinstance(error, Pruned)
                told = self._dropped(entry, "it was removed at the root meanwhile") if gone else error
                await self._end(entry, began, "mirror_dropped", told)
                return
            except Exception as error:
                if not isinstance(error, (BackendError, EverstepError, OSError)):
                    log.error("step %d: mirroring failed unexpectedly", entry.step, exc_info=error)
                self._fail(entry, began, error)
            needed = any(other.base == (entry.incarnation, entry.step) for other in self._waiting)
            if len(self._waiting) >= WAITING_MAX and not needed:  # newer ones are there: it has had its time
                self._drop(entry)
                return
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, PAUSE_MAX_S)
        self._failures, self._error = 0, None
        if isinstance(decision, Manifest):
            await tidy(self._backend, names.attempt_dir(entry.step, entry.incarnation, decision.attempt))
            self._newest = max(
                self._newest or (0, 0), (entry.incarnation, entry.step), key=lambda key: key[1]
            )
            await self._end(entry, began, "mirrored", None)
            if self._owner.has_first_rank():
                self._rotator.want(entry.incarnation)
        else:
            why = getattr(decision, "reason", "it was removed")
            await self._end(entry, began, "mirror_dropped", self._dropped(entry, why))

    async def _mirror(self, entry: MirrorEntry) -> object:
        """The decision at the tier, once what the checkpoint stands on is there. Pruned: the root has it no more;
        SaveAbandoned: it was given up at the tier, or what it stands on was."""
        await patiently(lambda: copy_records(self._root, self._backend))
        decision: object = None
        for last in (False, True):
            try:
                for manifest in await patiently(lambda: self._chain(entry)):
                    decision = await self._one(entry, manifest)
                break
            except Pruned:  # a delta that was made a full meanwhile is another attempt now
                if last:
                    raise
        return decision

    async def _chain(self, entry: MirrorEntry) -> list[Manifest]:
        """The checkpoint, behind those below it that the tier lacks, the lowest first; as they stand at the root."""
        found = [await require_standing(self._root, entry.step, entry.incarnation)]
        while (below := found[-1].parent_key) is not None and len(found) <= CHAIN_MAX:
            incarnation, step = below
            base = await require_standing(self._root, step, incarnation)
            stood = await standing(self._backend, base)
            if isinstance(stood, Manifest):
                break
            if isinstance(stood, Abort):
                there = await read_decision(self._backend, await list_step(self._backend, step, incarnation))
                if isinstance(there, Manifest):  # as it was before it was made a full
                    break
                why = f"step {step}, which it stands on, was given up there: {stood.reason}"
                raise self._dropped(entry, why)
            found.append(base)
        return found[::-1]

    async def _one(self, entry: MirrorEntry, manifest: Manifest) -> object:
        """The decision at the tier on one checkpoint."""
        seen: set[int] = set()
        missing: list[int] = []
        since, pause = time.monotonic(), POLL_FIRST_S
        while True:
            # Each rank of this node asks for itself, also when this is under way.
            mine = self._now.ranks if self._now is not None else entry.ranks
            if new := sorted({*mine} - seen):
                await self._ranks(entry, manifest, new)
                seen.update(new)
                reach("mirror.ranks", str(entry.step))
            decision = await patiently(lambda: conclude(self._root, self._backend, manifest))
            if decision is not None:
                return decision
            found = await patiently(lambda: missing_ranks(self._backend, manifest))
            if found != missing:
                missing, since, pause = found, time.monotonic(), POLL_FIRST_S
            elif time.monotonic() - since > self._owner.patience_s:
                log.warning("step %d: mirroring ranks %s of other nodes, too", manifest.step, found)
                await self._ranks(entry, manifest, found)
                since = time.monotonic()
            await happened(self._more, pause)
            self._more.clear()
            pause = min(2 * pause, POLL_MAX_S)

    async def _ranks(self, entry: MirrorEntry, manifest: Manifest, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._nbytes += await mirror_rank(
                self._root,
                self._backend,
                manifest,
                rank,
                run=self._run,
                pool=self._pool,
                notes=lambda name: self._owner.notes(entry, name),
            )
            reach("mirror.rank", str(entry.step))

    # -- ends

    def _drop(self, entry: MirrorEntry) -> None:
        task = asyncio.ensure_future(logged(self._give_up(entry)))
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def _give_up(self, entry: MirrorEntry) -> None:
        why = f"newer checkpoints came before {self.tier.name} had it"
        decision: object = None
        with contextlib.suppress(BackendError, EverstepError):
            manifest = await require_standing(self._root, entry.step, entry.incarnation)
            await copy_records(self._root, self._backend)  # no abort record without its run
            decision = await give_up(self._backend, manifest, why)
        if isinstance(decision, Manifest):
            await self._end(entry, time.monotonic(), "mirrored", None)
        else:
            await self._end(entry, time.monotonic(), "mirror_dropped", self._dropped(entry, why))

    def _dropped(self, entry: MirrorEntry, why: str) -> EverstepError:
        return SaveAbandoned(
            f"step {entry.step} will not reach {self.tier.name}: {why}", step=entry.step, tier=self.tier.url
        )

    def _fail(self, entry: MirrorEntry, began: float, error: Exception) -> None:
        """Told at the first failure, and then each time that there were twice as many."""
        self._failures += 1
        words = in_our_words(error, step=entry.step, rank=None, tier=self.tier.url)
        self._error = str(words)
        if self._failures & (self._failures - 1) == 0:
            log.warning("%s, failure %d: %s", self.tier.name, self._failures, words)
            self._say(entry, began, "mirror_failing", words)

    async def _end(self, entry: MirrorEntry, began: float, stage: str, error: EverstepError | None) -> None:
        if error is not None:
            log.warning("%s", error)
        # Told first: what is forgotten, and was not told, nobody would hear of.
        self._say(entry, began, stage, error)
        reach("mirror.settled", str(entry.step))
        await self._owner.forget_mirror(entry)

    def _say(self, entry: MirrorEntry, began: float, stage: str, error: EverstepError | None) -> None:
        self._owner.report(
            Progress(
                step=entry.step,
                incarnation=entry.incarnation,
                attempt=entry.attempt,
                tier=self.tier.url,
                stage=stage,
                error=None if error is None else error.to_wire(),
                seconds=time.monotonic() - began,
            )
        )

    def _in_use(self, incarnation: int) -> bool:
        return any(key[0] == incarnation for key in self.owed())

    def _rotated(
        self, incarnation: int, report: RotationReport | None, error: EverstepError | BackendError | None
    ) -> None:
        if error is not None:
            log.warning("%s: rotation failed: %s", self.tier.name, error)
