"""What a nearer durable tier lacks, or has damaged, is written again from a farther one: when a load is asked to."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from .backends.api import Backend
from .backends.errors import BackendError
from .errors import EverstepError
from .format.manifest import Manifest
from .format.records import RunRecord
from .ranks import Ranks
from .store.bases import CHAIN_MAX
from .store.blocking import run_blocking
from .store.catalog import list_step, read_decision
from .store.mirror import conclude, copy_records, mend_rank, standing

log = logging.getLogger("everstep")

THREADS = 2


def mend(ranks: Ranks, places: Sequence[Backend], key: tuple[int, int], *, timeout_s: float) -> None:
    """Of the checkpoint ``key``, and of those that it is based on, at every place but the farthest, whatever is not as
    it was committed. ``places`` are the durable tiers, nearest first; what retention removed somewhere stays removed
    there. All ranks call it, each sees to its share; no tier is the worse for a failure, which is raised by all."""

    def share() -> int:
        return run_blocking(_mend_chain(places, key, ranks.rank, ranks.world))

    sent = ranks.together("mending the nearer tiers", share, timeout_s=timeout_s)
    if sent:
        log.info("everstep: step %d: %d bytes were mended by rank %d", key[1], sent, ranks.rank)
    ranks.from_first(
        "mending the nearer tiers", lambda: run_blocking(_conclude_chain(places, key)), timeout_s=timeout_s
    )


async def _chain(places: Sequence[Backend], key: tuple[int, int]) -> list[tuple[int, int]]:
    """The checkpoint and what it is based on, the latter first."""
    found = [key]
    while len(found) <= CHAIN_MAX:
        manifests = [await _at(place, found[0]) for place in places]
        parent = next((one.parent_key for one in manifests if one is not None), None)
        if parent is None:
            break
        found.insert(0, parent)
    return found


async def _mend_chain(places: Sequence[Backend], key: tuple[int, int], rank: int, world: int) -> int:
    return sum([await _mend(places, one, rank, world) for one in await _chain(places, key)])


async def _conclude_chain(places: Sequence[Backend], key: tuple[int, int]) -> None:
    for one in await _chain(places, key):
        await _conclude(places, one)


async def _mend(places: Sequence[Backend], key: tuple[int, int], rank: int, world: int) -> int:
    sent = 0
    with ThreadPoolExecutor(THREADS, thread_name_prefix="everstep-mend") as pool:
        for at, target in enumerate(places[:-1]):
            sources = [(place, found) for place in places[at + 1 :] if (found := await _at(place, key))]
            if not sources:
                continue
            run = await copy_records(sources[0][0], target)
            for number in range(rank, sources[0][1].world, world):
                sent += await _mend_one(sources, target, number, run, pool)
    return sent


async def _mend_one(
    sources: Sequence[tuple[Backend, Manifest]],
    target: Backend,
    rank: int,
    run: RunRecord,
    pool: ThreadPoolExecutor,
) -> int:
    """From the nearest source that is not damaged itself."""
    for number, (source, manifest) in enumerate(sources):
        try:
            return await mend_rank(source, target, manifest, rank, run=run, pool=pool)
        except (BackendError, EverstepError):
            if number == len(sources) - 1:
                raise
    return 0


async def _conclude(places: Sequence[Backend], key: tuple[int, int]) -> None:
    for at, target in enumerate(places[:-1]):
        for source in places[at + 1 :]:
            manifest = await _at(source, key)
            if manifest is not None:
                if await standing(target, manifest) is None:
                    await conclude(source, target, manifest)
                break


async def _at(place: Backend, key: tuple[int, int]) -> Manifest | None:
    """The manifest that counts there."""
    decision = await read_decision(place, await list_step(place, key[1], key[0]))
    return decision if isinstance(decision, Manifest) else None
