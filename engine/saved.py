"""What the holders of one checkpoint say of it, apart from the tensors' bytes; and reading these."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from .backends.parallel import together
from .discovery import FALL_BACK
from .errors import Damaged, EverstepError
from .format.entries import Entry, Layout
from .memory.errors import ArenaGone, SlotGone
from .phases import Phases
from .plan.reads import Read, plan_reads
from .sharing import Bring, shared_fill
from .state.codec import StateImage
from .state.merge import Saved
from .store.ahead import Ahead
from .store.blocking import run_blocking
from .store.fill import Fallback, FillReport, fill
from .store.sources import DurableSource, Source

PARALLEL = 16
"""Ranks of which something is read at once."""

T = TypeVar("T")
Key = tuple[str, str]
Wanted = Sequence[tuple[Entry, memoryview]]
"""Entries, each with the memory to fill."""


class Checkpoint:
    """One checkpoint as ``sources`` have it, nearest first; each may have some ranks only. What is read of one rank
    comes from the first that has it right. Layouts are read when this is made, all ranks'; state images when they are
    asked for."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._images: dict[int, Saved] = {}
        self._failed: dict[str, None] = {}
        self.step = sources[0].step
        self.world = sources[0].world
        self.tier = "disk" if isinstance(sources[0], DurableSource) else "memory"
        self.layouts: list[Layout] = self._of_each(
            range(self.world), lambda source, rank: source.layout(rank)
        )

    def images(self, ranks: Sequence[int]) -> list[Saved]:
        """The state images of ``ranks``, in that order."""
        missing = [rank for rank in dict.fromkeys(ranks) if rank not in self._images]
        for rank, saved in zip(missing, self.read_images(missing), strict=True):
            self._images[rank] = saved
        return [self._images[rank] for rank in ranks]

    def read_images(self, ranks: Sequence[int]) -> list[Saved]:
        """As :meth:`images`, but not kept."""
        data = self._of_each(ranks, lambda source, rank: source.state(rank))
        return [
            Saved(rank, StateImage(one, name=f"state image of rank {rank}"), self.layouts[rank].entries)
            for rank, one in zip(ranks, data, strict=True)
        ]

    def meta(self, rank: int) -> dict[str, Any]:
        """What the rank said of its snapshot."""
        return self._of_each([rank], lambda source, rank: source.meta(rank))[0]

    def roots(self, images: Collection[tuple[int, str]]) -> dict[tuple[int, str], bytes]:
        """The roots of images by (rank, name)."""
        ranks = sorted({rank for rank, _ in images})
        records = dict(
            zip(ranks, self._of_each(ranks, lambda source, rank: source.records(rank)), strict=True)
        )
        return {(rank, name): records[rank][name].root for rank, name in images}

    def fill(self, wanted: Wanted, readers: Sequence[int | None], equal: Collection[Key] = ()) -> FillReport:
        """Fill ``wanted``, each as the rank at the save that ``readers`` says (see :func:`plan_reads`)."""
        reads = self._reads([entry for entry, _ in wanted], readers, equal)
        return self._told(run_blocking(fill(self._sources, reads, _targets(wanted))))

    @contextlib.contextmanager
    def filling(
        self,
        phases: Phases,
        ask: Callable[[], tuple[Wanted, Sequence[int | None], Collection[Key]]],
        bring: Bring | None = None,
        ahead: Ahead | None = None,
    ) -> Iterator[Callable[[], FillReport]]:
        """As :meth:`fill` of what ``ask`` gives, by all ranks together: what several ranks of a node need is read
        once (see :func:`shared_fill`). Gives the function that fills."""

        def plan() -> tuple[list[Read], dict[int, memoryview]]:
            wanted, readers, equal = ask()
            return self._reads([entry for entry, _ in wanted], readers, equal), _targets(wanted)

        reads, targets = phases.each(plan)
        with shared_fill(phases, self._sources, reads, targets, bring, ahead=ahead) as fill_now:
            yield lambda: self._told(fill_now())

    def _told(self, report: FillReport) -> FillReport:
        """``report``, its fallbacks told as warnings."""
        for text in dict.fromkeys(map(fallback_text, report.fallbacks)):
            self._warn(text)
        return report

    def _reads(
        self, entries: Sequence[Entry], readers: Sequence[int | None], equal: Collection[Key]
    ) -> list[Read]:
        found: list[Read] = []
        for reader in dict.fromkeys(readers):
            some = [at for at, other in enumerate(readers) if other == reader]
            reads = plan_reads([entries[at] for at in some], self.layouts, reader, equal=equal)
            if len(some) < len(entries):
                reads = [read._replace(entry_index=some[read.entry_index]) for read in reads]
            found += reads
        return found

    def _of_each(self, ranks: Iterable[int], read: Callable[[Source, int], Awaitable[T]]) -> list[T]:
        """What ``read`` gives for each rank, bounded in parallel."""

        async def all_of() -> list[T]:
            room = asyncio.Semaphore(PARALLEL)

            async def one(rank: int) -> T:
                async with room:
                    return await self._from_first(rank, read)

            return await together(map(one, ranks))

        problems = len(self._failed)
        found = run_blocking(all_of())
        for text in list(self._failed)[problems:]:
            self._warn(text)
        return found

    async def _from_first(self, rank: int, read: Callable[[Source, int], Awaitable[T]]) -> T:
        holders = [source for source in self._sources if rank in source.ranks]
        if not holders:
            raise Damaged(
                f"nobody has rank {rank} of step {self.step}", found="nothing", expected="a holder", name=""
            )
        for source in holders[:-1]:
            try:
                return await read(source, rank)
            except (*FALL_BACK, SlotGone, ArenaGone) as error:
                self._note(source, error)
        return await read(holders[-1], rank)

    def _note(self, source: Source, error: EverstepError) -> None:
        self._failed.setdefault(f"{source.label}: {error}; another holder was asked")

    def fallbacks(self, report: FillReport) -> tuple[str, ...]:
        """What was read from another holder than the nearest, and why."""
        return tuple(dict.fromkeys((*self._failed, *map(fallback_text, report.fallbacks))))

    @staticmethod
    def _warn(text: str) -> None:
        warnings.warn(f"everstep: {text}", RuntimeWarning, stacklevel=5)


def fallback_text(fallback: Fallback) -> str:
    return f"{fallback.source}: {fallback.error}; the bytes came from {fallback.served_by}"


def _targets(wanted: Wanted) -> dict[int, memoryview]:
    return {at: view for at, (_, view) in enumerate(wanted)}
