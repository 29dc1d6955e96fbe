"""Flushes on their way, as the writer queue and the uploads know them, and what these need of the service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from everstep.errors import EverstepError
from everstep.format.hashing import rank_root
from everstep.format.manifest import Manifest
from everstep.memory.errors import SlotGone
from everstep.memory.slots import Pinned

from .journal import VOTED, JobEntry
from .staging import Staging
from .values import Progress


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

    def unwritten(self) -> list[int]:
        return [rank for rank, job in self.jobs.items() if job.entry.stage != VOTED]

    @property
    def ended(self) -> bool:
        """Whether it has its verdict, or is about to."""
        return self.settled or self.ending is not None


class Owner(Protocol):
    """What the writer queue needs of the service around it."""

    def report(self, progress: Progress) -> None: ...

    def rotate(self, incarnation: int) -> None: ...

    async def remember(self, entry: JobEntry) -> None: ...

    async def forget(self, entries: list[JobEntry], manifest: Manifest | None = None) -> None:
        """They are over; with ``manifest`` as a checkpoint, which is owed to their further tiers from now on."""
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

    def at_work_elsewhere(self, missing: list[int]) -> bool:
        """Whether the nodes of ``missing`` have flushes under way, as was seen last."""
        ...


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
