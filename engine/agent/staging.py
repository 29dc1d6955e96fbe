"""The node's own tier, between memory and the root: what lies there needs no slot, and waits for its upload."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from everstep.backends.api import Backend, Notes
from everstep.backends.errors import BackendError, NotFound
from everstep.errors import EverstepError
from everstep.format import names
from everstep.format.records import RunRecord
from everstep.format.vote import Vote
from everstep.memory.slots import Pinned
from everstep.store.catalog import StepNames, read_vote
from everstep.store.flush import FlushJob, flush_rank
from everstep.store.sources import DurableSource
from everstep.store.staged import Key, claim, discard, retain, upload_rank

from .behind import THREADS
from .journal import JobEntry
from .storage import Fence, patiently
from .values import TierSettings

log = logging.getLogger("everstep.agent")


class Staging:
    """One node's tier, opened for one run. ``notes`` keeps what an upload knows over a crash."""

    def __init__(
        self, tier: TierSettings, backend: Backend, run: RunRecord, notes: Callable[[JobEntry, str], Notes]
    ) -> None:
        self.tier = tier
        self._backend = backend
        self._run = run
        self._notes = notes
        self._claimed = False
        self._stood: dict[StepNames, Key | None] = {}
        self._newest: int | None = None
        self._failures = 0
        self._error: str | None = None
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="everstep-upload")

    @property
    def backend(self) -> Backend:
        """To read from."""
        return self._backend

    @property
    def url(self) -> str:
        return self.tier.url

    async def find(self, entry: JobEntry) -> Vote | None:
        """The vote of that very share, if it is staged: a former agent, or this one, came so far."""
        try:
            await self._claim()
            return (await read_vote(self._backend, *_place(entry)))[1]
        except NotFound:
            return None
        except (BackendError, EverstepError) as error:
            log.warning("step %d: what is staged cannot be seen: %s", entry.step, error)
            return None

    async def put(
        self,
        work: FlushJob,
        pinned: Pinned,
        base: DurableSource | None = None,
        compress: str | None = None,
        *,
        delta: bool = False,
    ) -> Vote:
        """Write the pinned snapshot; its vote. Raises what flush_rank does, and RunError; nothing of it stays then."""
        try:
            await self._claim()
            vote = await patiently(
                lambda: flush_rank(
                    self._backend,
                    work,
                    pinned,
                    chunk_bytes=self._run.chunk_bytes,
                    run=self._run,
                    base=base,
                    compress=compress,
                    delta=delta,
                )
            )
        except (BackendError, EverstepError, OSError) as error:
            self._failures += 1
            self._error = str(error)
            await self._sweep(names.attempt_dir(work.step, work.incarnation, work.attempt), work.rank)
            raise
        self._newest, self._failures, self._error = work.step, 0, None
        return vote

    async def upload(self, root: Backend, entry: JobEntry) -> Vote:
        """Copy a staged share to the root; its vote. Raises what :func:`upload_rank` does."""
        return await upload_rank(
            self._backend,
            root,
            _place(entry),
            run=self._run,
            pool=self._pool,
            notes=functools.partial(self._notes, entry),
        )

    async def sweep(self, step: int, incarnation: int, attempt: int) -> None:
        """The attempt was given up, or another one counts: its room is needed."""
        await self._sweep(names.attempt_dir(step, incarnation, attempt), None)

    async def retain(self, fence: Fence, newest: Key, in_use: Collection[Key]) -> None:
        """Remove what retention gives up, now that ``newest`` is at the root."""
        try:
            await self._claim()
            lineage = await fence.look()
            await retain(self._backend, self.tier.retention, lineage, newest, in_use, stood=self._stood)
        except (BackendError, EverstepError) as error:
            log.warning("%s: nothing is removed there now: %s", self.tier.name, error)

    def status(self) -> dict[str, Any]:
        return {
            "name": self.tier.name,
            "url": self.tier.url,
            "newest": self._newest,
            "failures": self._failures,
            "error": self._error,
        }

    async def close(self) -> None:
        await self._backend.close()
        self._pool.shutdown()

    async def _claim(self) -> None:
        if not self._claimed:
            await claim(self._backend, self._run)
            self._claimed = True

    async def _sweep(self, directory: str, rank: int | None) -> None:
        try:
            if self._claimed:  # else nothing there is ours
                await discard(self._backend, directory, rank)
        except (BackendError, EverstepError) as error:
            log.warning("%s: %s could not be removed: %s", self.tier.name, directory, error)


def _place(entry: JobEntry) -> tuple[int, int, int, int]:
    return entry.step, entry.incarnation, entry.attempt, entry.rank
