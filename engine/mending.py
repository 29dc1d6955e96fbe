"""A load that is asked to makes the nearer durable tiers whole first, from farther ones, and then reads from these: so
what is far is downloaded once.

Places that all nodes share get whatever they lack of the checkpoint, or have damaged. A node's own tier gets whole
shares: those of its ranks, where as many ranks load as saved, and all others of which its ranks need most.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from .agent.values import TierSettings
from .backends.api import Backend
from .backends.errors import BackendError
from .discovery import Candidate, Key, is_durable
from .errors import EverstepError, StorageFull
from .format import names
from .format.manifest import Manifest
from .format.records import RunRecord
from .phases import Phases
from .plan.lineage import Lineage
from .plan.shares import Needs, mostly_needed
from .ranks import Ranks
from .store.bases import CHAIN_MAX
from .store.blocking import run_blocking
from .store.catalog import list_step, list_steps, read_decision
from .store.mirror import conclude, copy_records, mend_rank, standing
from .store.runs import read_incarnations
from .store.sources import DurableSource, Source
from .store.staged import NodeSource, claim, discard, near_source, retain

log = logging.getLogger("everstep")

THREADS = 2
WHAT = "mending the nearer tiers"

_FAILURES = (EverstepError, BackendError, OSError)
"""Of a tier: it is told, and the load reads from what there is."""


class Mending:
    """What one load does so. ``near`` is the node's own tier, if there is one, and ``tier`` its settings; ``timeout_s``
    bounds each wait for another rank, downloads included. All ranks make the same calls. What cannot be mended is told
    as a warning, and is read from where it is."""

    def __init__(self, near: Backend | None, tier: TierSettings | None, *, timeout_s: float) -> None:
        self._near = near
        self._retention = tier.retention if tier is not None else None
        self._timeout_s = timeout_s
        self._run: RunRecord | None = None
        """Of the checkpoint that is about to be read, if any of it is to be brought into the node's tier."""
        self._own = False
        self._able = False

    def mend_shared(self, ranks: Ranks, places: Sequence[Backend], candidate: Candidate) -> Candidate:
        """Write again, at every one of ``places`` (nearest first) but the farthest, what is not as it was committed, of
        the checkpoint and of those that it is based on;
        what retention removed somewhere stays removed there. ``candidate``, with the places that have it now."""
        if len(places) == 1 or not candidate.places:
            return candidate

        def share() -> int:
            return run_blocking(_mend_chain(places, candidate.key, ranks.rank, ranks.world))

        try:
            sent = ranks.together(WHAT, share, timeout_s=self._timeout_s)
        except _FAILURES as error:
            _warn(f"step {candidate.step} could not be mended: {error}")
        else:
            if sent:
                log.info(
                    "everstep: step %d: %d bytes were mended by rank %d", candidate.step, sent, ranks.rank
                )
        found, problem = ranks.from_first(
            WHAT, lambda: _conclude_all(places, candidate), timeout_s=self._timeout_s
        )
        if problem is not None:
            _warn(f"step {candidate.step} could not be mended: {problem}")
        return replace(candidate, places=tuple(found))

    def begin(self, phases: Phases, run: RunRecord, candidate: Candidate, sources: Sequence[Source]) -> None:
        """Before anything else is read of ``candidate``: this rank's own share, whole, into the node's tier.
        ``sources``: the durable tiers that have it. Nothing is downloaded of what lies in memory."""
        self._run = None
        if self._near is None or candidate.in_memory or not candidate.places:
            return
        self._run = run
        self._own = candidate.world == phases.world
        self._able = self._claim(self._near, run)
        mine = [phases.rank] if self._own else []
        phases.each(lambda: self._fetch(sources, mine), timeout_s=self._timeout_s)

    def bring(
        self, phases: Phases, sources: Sequence[Source], needs: Sequence[Needs], members: Sequence[int]
    ) -> Sequence[Source]:
        """The other shares of which the node's ranks need most, dealt out among them (``members``; ``needs`` in the
        same order). ``sources``, and what the node's tier has now in its place among them."""
        if self._near is None or self._run is None:
            return sources
        near, run = self._near, self._run
        farther = _farther(sources)[0]
        sizes = {record.rank: record.images_nbytes for record in farther.manifest.ranks}
        done = members if self._own else ()
        shares = [rank for rank in mostly_needed(needs, sizes) if rank not in done]
        me = members.index(phases.rank)

        def fetch() -> None:
            self._fetch(sources, shares[me :: len(members)])
            if me == 0:
                self._tidy(farther)

        phases.each(fetch, timeout_s=self._timeout_s)
        return phases.each(lambda: with_near(near, sources, run))

    def _claim(self, near: Backend, run: RunRecord) -> bool:
        try:
            run_blocking(claim(near, run))
        except _FAILURES as error:
            _warn(f"nothing is brought into the node's tier: {error}")
            return False
        return True

    def _fetch(self, sources: Sequence[Source], shares: Sequence[int]) -> None:
        """Bring these ranks' shares, one after the other."""
        durable = _farther(sources)
        if self._near is None or self._run is None or not self._able or not durable:
            return
        with ThreadPoolExecutor(THREADS, thread_name_prefix="everstep-mend") as pool:
            for rank in shares:
                pairs = [(source.backend, source.manifest) for source in durable]
                try:
                    sent = run_blocking(_mend_one(pairs, self._near, rank, self._run, pool))
                except _FAILURES as error:
                    self._give_up(durable[0].manifest, rank, error)
                else:
                    log.info("everstep: %d bytes of rank %d were brought to %s", sent, rank, self._near.url)

    def _give_up(self, manifest: Manifest, rank: int, error: Exception) -> None:
        _warn(
            f"the share of rank {rank} of step {manifest.step} could not be brought into the node's tier: {error}"
        )
        if isinstance(error, StorageFull) and self._near is not None:
            directory = names.attempt_dir(manifest.step, manifest.incarnation, manifest.attempt)
            try:
                run_blocking(discard(self._near, directory, rank))
            except _FAILURES as second:
                log.warning("everstep: %s of rank %d could not be removed: %s", directory, rank, second)

    def _tidy(self, root: DurableSource) -> None:
        """What the node's tier has beyond its retention goes: a job that only loads has no agent that would see to
        it. As ever nothing newer than the newest checkpoint at the root does, nor what was just brought."""
        if self._near is None or self._retention is None or not self._able:
            return
        mine = (root.incarnation, root.step)
        try:
            there = [found.key for found in run_blocking(list_steps(self._near))]
            if len(there) <= self._retention.keep_last:
                return
            newer = (key for key in reversed(there) if key > mine and is_durable(root.backend, key))
            lineage = Lineage(run_blocking(read_incarnations(root.backend)))
            newest = next(newer, mine)
            run_blocking(retain(self._near, self._retention, lineage, newest, protected=[mine]))
        except _FAILURES as error:
            log.warning("everstep: %s: nothing is removed there now: %s", self._near.url, error)


def with_near(near: Backend, sources: Sequence[Source], run: RunRecord) -> list[Source]:
    """``sources`` and, before the durable ones, what the node's own tier has. It may have nothing, and nothing
    depends on it."""
    rest = [source for source in sources if not isinstance(source, NodeSource)]
    farther = _farther(rest)
    if farther:
        manifest = farther[0].manifest
        try:
            found = run_blocking(near_source(near, manifest, run, farther[0].bases))
        except EverstepError as error:
            log.warning("everstep: step %d is read from farther away: %s", manifest.step, error)
        else:
            if found is not None:
                rest.insert(rest.index(farther[0]), found)
    return rest


def _farther(sources: Sequence[Source]) -> list[DurableSource]:
    """The durable ones behind the node's own tier."""
    return [
        source
        for source in sources
        if isinstance(source, DurableSource) and not isinstance(source, NodeSource)
    ]


async def _chain(places: Sequence[Backend], key: Key) -> list[Key]:
    """The checkpoint and what it is based on, the latter first."""
    found = [key]
    while len(found) <= CHAIN_MAX:
        manifests = [await _at(place, found[0]) for place in places]
        parent = next((one.parent_key for one in manifests if one is not None), None)
        if parent is None:
            break
        found.insert(0, parent)
    return found


async def _mend_chain(places: Sequence[Backend], key: Key, rank: int, world: int) -> int:
    return sum([await _mend(places, one, rank, world) for one in await _chain(places, key)])


async def _mend(places: Sequence[Backend], key: Key, rank: int, world: int) -> int:
    """This rank's part of what is to be done at the places that all nodes share."""
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


def _conclude_all(places: Sequence[Backend], candidate: Candidate) -> tuple[list[int], str | None]:
    """The places that have the checkpoint after all ranks' shares were seen to, and what went wrong."""

    async def conclude_all() -> list[int]:
        for one in await _chain(places, candidate.key):
            await _conclude(places, one)
        return [at for at, place in enumerate(places) if await _at(place, candidate.key)]

    try:
        return run_blocking(conclude_all()), None
    except _FAILURES as error:
        return list(candidate.places), str(error)


async def _conclude(places: Sequence[Backend], key: Key) -> None:
    for at, target in enumerate(places[:-1]):
        for source in places[at + 1 :]:
            manifest = await _at(source, key)
            if manifest is not None:
                if await standing(target, manifest) is None:
                    await conclude(source, target, manifest)
                break


async def _at(place: Backend, key: Key) -> Manifest | None:
    """The manifest that counts there."""
    decision = await read_decision(place, await list_step(place, key[1], key[0]))
    return decision if isinstance(decision, Manifest) else None


def _warn(text: str) -> None:
    warnings.warn(f"everstep: {text}", RuntimeWarning, stacklevel=3)
