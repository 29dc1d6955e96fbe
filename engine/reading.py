"""What one rank reads of a checkpoint: into live objects, or as plain values, from the nearest holder."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .discovery import FALL_BACK
from .errors import NoCheckpoint, StateMismatch
from .format.layout import Layout
from .plan.reads import plan_reads
from .state.codec import StateImage
from .state.restore import plan_restore, plan_values
from .state.trainstate import TrainState
from .store.blocking import run_blocking
from .store.fill import FillReport, fill
from .store.sources import DurableSource, Source


@dataclass(frozen=True, slots=True)
class Filled:
    """What one rank's reading gave: the tier, the bytes that were copied, what was loosened, and, where plain
    values were asked for, those."""

    tier: str
    nbytes: int
    loosened: tuple[str, ...] = ()
    values: Any = None


Reading = Callable[[Sequence[Source]], Filled]
"""Reads what a rank needs from the holders of one checkpoint, nearest first."""


def into_state(state: TrainState, rank: int, world: int | None, allow: Collection[str]) -> Reading:
    """Restores ``state`` in place as ``rank``; ``world`` None takes a checkpoint of any number of ranks."""

    def read(sources: Sequence[Source]) -> Filled:
        _check_world(sources[0], rank, world)
        data, layouts = first_good(sources, rank)
        image = StateImage(data, name=f"state image of rank {rank}")
        plan = plan_restore(state, image, layouts[rank].entries, allow=allow)
        report = fill_targets(sources, rank, layouts, plan.views())
        return Filled(_tier(sources), report.nbytes, tuple(plan.finish()))

    return read


def as_values(rank: int, parts: Collection[str] | None) -> Reading:
    """Gives one rank's state as plain nested values on the CPU."""

    def read(sources: Sequence[Source]) -> Filled:
        _check_world(sources[0], rank, None)
        data, layouts = first_good(sources, rank)
        image = StateImage(data, name=f"state image of rank {rank}")
        plan = plan_values(image, layouts[rank].entries, parts=parts)
        report = fill_targets(sources, rank, layouts, plan.views())
        return Filled(_tier(sources), report.nbytes, values=plan.finish())

    return read


def _tier(sources: Sequence[Source]) -> str:
    return "disk" if isinstance(sources[0], DurableSource) else "memory"


def _check_world(source: Source, rank: int, world: int | None) -> None:
    if world is not None and source.world != world:
        raise StateMismatch(
            f"step {source.step} was written by another number of ranks",
            found=f"{source.world} ranks",
            expected=f"{world} ranks",
            hint="Start as many ranks as wrote it.",
        )
    if rank >= source.world:
        raise NoCheckpoint(
            f"step {source.step} has no rank {rank}",
            found=f"{source.world} ranks",
            expected=f"rank {rank}",
            step=source.step,
        )


def first_good(sources: Sequence[Source], rank: int) -> tuple[bytes, list[Layout]]:
    """The rank's state image and all ranks' layouts, from the first source that has them right."""

    async def read(source: Source) -> tuple[bytes, list[Layout]]:
        await source.meta(rank)  # nothing here needs it, but a snapshot is taken whole or not at all
        return await source.state(rank), [await source.layout(r) for r in range(source.world)]

    for source in sources[:-1]:
        try:
            return run_blocking(read(source))
        except FALL_BACK as error:
            warnings.warn(f"everstep: {source.label}: {error}", RuntimeWarning, stacklevel=2)
    return run_blocking(read(sources[-1]))


def fill_targets(
    sources: Sequence[Source], rank: int, layouts: Sequence[Layout], targets: Mapping[int, memoryview]
) -> FillReport:
    """Read the bytes of ``targets`` (by entry index of the rank's layout)."""
    wanted = sorted(targets)
    reads = plan_reads([layouts[rank].entries[index] for index in wanted], layouts, rank)
    report = run_blocking(fill(sources, reads, {at: targets[index] for at, index in enumerate(wanted)}))
    for fallback in report.fallbacks:
        warnings.warn(
            f"everstep: {fallback.source}: {fallback.error}; the bytes came from {fallback.served_by}",
            RuntimeWarning,
            stacklevel=3,
        )
    return report
