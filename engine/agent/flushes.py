"""Flushes on their way, as the writer queue and the uploads know them, and what these need of the service."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from everstep.backends.api import Backend, Notes
from everstep.backends.errors import BackendError
from everstep.errors import EverstepError
from everstep.format.hashing import rank_root
from everstep.format.manifest import Manifest
from everstep.memory.errors import SlotGone
from everstep.memory.slots import Pinned
from everstep.store.votes import GATHER_WORLD_MIN, gather_votes

from .journal import VOTED, JobEntry
from .staging import Staging
from .values import Progress

LAYOUTS_S = 600.0
LAYOUTS_MAX = 4096
"""For how long, and how many, layouts that were found right are not looked at again."""

log = logging.getLogger("everstep.agent")


@dataclass
class Job:
    """One rank's part. ``pinned`` is None once its share is staged, or its vote there (the bytes are durable); ``pin``
    made it, and keeps the arena open."""

    entry: JobEntry
    pin: Callable[[], Pinned]
    pinned: Pinned | None = None
    staging: Staging | None = None
    """Where its share lies, once it is staged."""
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

    @property
    def is_delta(self) -> bool:
        """Whether it was asked for as a delta."""
        return any(job.entry.base is not None for job in self.jobs.values())

    def unwritten(self) -> list[int]:
        return [rank for rank, job in self.jobs.items() if job.entry.stage != VOTED]

    @property
    def ended(self) -> bool:
        """Whether it has its verdict, or is about to."""
        return self.settled or self.ending is not None


class Owner(Protocol):
    """What the writer queue needs of the service around it."""

    def report(self, progress: Progress) -> None: ...

    def rotate(self, incarnation: int, *, full: bool = False) -> None:
        """Soon; ``full``: the root is, and whatever else would write there makes way."""
        ...

    async def remember(self, entry: JobEntry) -> None: ...

    async def forget(self, entries: list[JobEntry], manifest: Manifest | None = None) -> None:
        """They are over; with ``manifest`` as a checkpoint, which is owed to their further tiers from now on."""
        ...

    def notes(self, entry: JobEntry, name: str) -> Notes:
        """What is remembered of the upload of object ``name``."""
        ...

    def local_ranks(self, incarnation: int) -> set[int]:
        """The ranks of that incarnation that registered on this node."""
        ...

    async def stand_in(self, flush: Flush, missing: list[int]) -> list[int]:
        """Add the jobs of dead trainers whose arenas hold the step. Those of ``missing`` that can never
        vote: their trainers are dead, without that snapshot."""
        ...

    async def lost_elsewhere(self, incarnation: int, missing: list[int]) -> tuple[list[int], str]:
        """Those of ``missing`` ranks on other nodes that can never vote, and why."""
        ...

    def at_work_elsewhere(self, missing: list[int]) -> bool:
        """Whether the nodes of ``missing`` have flushes under way, as was seen last."""
        ...


def bases_of(flushes: Iterable[Flush]) -> set[tuple[int, int]]:
    """(incarnation, step) that deltas under way stand on."""
    entries = [job.entry for flush in flushes for job in flush.jobs.values()]
    return {entry.base for entry in entries if entry.base is not None}


def unpin(flush: Flush) -> None:
    for job in flush.jobs.values():
        if job.pinned is not None:
            job.pinned.release()
            job.pinned = None


def checked(entry: JobEntry, pinned: Pinned) -> JobEntry:
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


async def gather(backend: Backend, flush: Flush, everyone: set[int]) -> None:
    """Put the votes of the node's ranks together once ``everyone``'s are there: in a large job that spares whoever
    commits from reading each. Nothing depends on it."""
    ranks = sorted([rank for rank, job in flush.jobs.items() if job.entry.stage == VOTED])
    if flush.gathered or flush.world < GATHER_WORLD_MIN or not everyone.issubset(ranks) or len(ranks) < 2:
        return
    flush.gathered = True
    try:
        await gather_votes(backend, flush.step, flush.incarnation, flush.attempt, ranks)
    except (BackendError, EverstepError) as error:
        log.warning("step %d: the node's votes could not be gathered: %s", flush.step, error)


class KnownLayouts:
    """Where each look is a request, a layout that was found right is trusted for a while."""

    def __init__(self) -> None:
        self._hashes: set[str] = set()
        self._since = 0.0

    def known(self) -> set[str]:
        """Their hashes; who finds another one right adds it."""
        now = time.monotonic()
        if now - self._since > LAYOUTS_S or len(self._hashes) > LAYOUTS_MAX:
            self._since, self._hashes = now, set()
        return self._hashes


async def logged(work: Awaitable[None]) -> None:
    """What goes wrong is only logged."""
    try:
        await work
    except Exception:
        log.exception("a task of the queue failed")
