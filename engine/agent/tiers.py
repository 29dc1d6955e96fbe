"""The agent's further tiers: which there are, the node's own among them, what is owed to them, and what the journal
knows of that."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from everstep.backends.api import Backend, Notes
from everstep.errors import EverstepError
from everstep.format.manifest import Manifest
from everstep.format.records import RunRecord

from .guard import SameRun
from .journal import JobEntry, MergeEntry, MirrorEntry
from .merging import Merges, Quiet, merge_of
from .mirrors import Key, Mirrors
from .root import link_of, open_gated
from .staging import Staging
from .turnstile import Lane, Urgency
from .values import Progress, TierSettings

if TYPE_CHECKING:
    from .service import Service

log = logging.getLogger("everstep.agent")

MERGES = "synthetic fulls"
"""Name of the lane of merging; no tier is called so."""


class Tiers:
    """One agent's. Used from its loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._run: RunRecord | None = None
        self._mirrors: Mirrors | None = None
        self._merges: Merges | None = None
        self._lanes: dict[str, Lane] = {}
        self._stagings: list[Staging] = []
        """The node's tier, and what it was before the settings changed: what is staged there is still uploaded."""
        self._unplaced: list[MirrorEntry] = []
        """Journaled by a former agent, of tiers that no trainer has named yet: how to open them, secrets included, is
        known from trainers only."""

    @property
    def busy(self) -> bool:
        merging = self._merges is not None and self._merges.busy
        return merging or (self._mirrors is not None and self._mirrors.busy)

    def owed(self) -> set[Key]:
        """(incarnation, step) of the checkpoints that the root must keep."""
        waiting = {(entry.incarnation, entry.step) for entry in self._unplaced}
        waiting |= self._merges.owed() if self._merges is not None else set()
        return waiting | (self._mirrors.owed() if self._mirrors is not None else set())

    def status(self) -> list[dict[str, Any]]:
        pipeline = self._service.pipeline
        own = [] if pipeline is None or pipeline.staging is None else [pipeline.staging.status()]
        return [{**one, **pipeline.uploads.status()} for one in own if pipeline is not None] + (
            self._mirrors.status() if self._mirrors is not None else []
        )

    def merging(self) -> list[int]:
        """Steps whose checkpoints are to be made fulls."""
        return self._merges.status() if self._merges is not None else []

    def is_merging(self, incarnation: int) -> bool:
        """Whether a checkpoint of that incarnation is to be made a full."""
        return self._merges is not None and any(one == incarnation for one, _ in self._merges.owed())

    async def open(self, root: Backend, run: RunRecord) -> None:
        """The run is open, or another one is."""
        await self.close()
        self._run = run
        self._mirrors = Mirrors(self, root, run, self._service.fence)
        self.follow()

    def follow(self, *, anew: bool = False) -> None:
        """The trainers' settings may have changed; ``anew``: the environment with which storage is opened did. What
        was owed to a tier that the newest ones do not have is let go of."""
        if self._mirrors is None:
            return
        self._mirrors.follow(self._service.settings.tiers, anew=anew)
        if anew and self._merges is not None:
            self._service.keep(self._reopen_merges(self._merges))
        self._follow_node()
        unplaced, self._unplaced = self._mirrors.owe(self._unplaced), []
        if not self._service.members.newest:
            self._unplaced = unplaced
            return
        for entry in unplaced:
            log.warning("step %d is not mirrored to %s, which is no tier any more", entry.step, entry.tier)
            self._service.keep(self.forget_mirror(entry))

    def make_way(self) -> None:
        """The root is full: nothing is made a full there."""
        if self._merges is not None:
            self._merges.make_way()

    def _merge(self, entries: Sequence[MergeEntry]) -> None:
        if self._merges is None and entries:
            self._merges = self._open_merges()
        if self._merges is not None:
            self._merges.owe(entries)

    def _open_merges(self) -> Merges:
        """Merging goes to the root by a lane of its own, behind flushes."""
        service, run, settings = self._service, self._run, self._service.settings
        assert run is not None, "merged is what was committed to the run"
        lane = self._lane(MERGES, settings.rate_bytes_per_s, settings.root, Urgency.MIRROR)
        root = open_gated(service.open_backend, settings.root, settings.options, Quiet(self, lane))
        return Merges(self, SameRun(root, run, service.run_is_gone), run, service.fence)

    async def _reopen_merges(self, former: Merges) -> None:
        """The storage is opened otherwise now."""
        self._merges = self._open_merges()
        await former.close()
        self._merge(former.rest())

    def _follow_node(self) -> None:
        """Where flushes are staged from now on."""
        pipeline, run = self._service.pipeline, self._run
        if pipeline is None or run is None:
            return
        tier = next((tier for tier in self._service.settings.tiers if tier.node), None)
        if tier is None:
            pipeline.staging = None
        elif pipeline.staging is None or pipeline.staging.tier != tier:
            pipeline.staging = Staging(tier, self.open_tier(tier), run, self._service.notes)
            self._stagings.append(pipeline.staging)

    async def resume(self, journaled: Sequence[MirrorEntry]) -> None:
        """What a former agent left. The run is open."""
        if not journaled or self._mirrors is None or self._run is None:
            return
        for entry in journaled:
            if entry.run_id != self._run.run_id:
                log.warning("step %d of another run is not mirrored", entry.step)
                await self.forget_mirror(entry)
        mine = [entry for entry in journaled if entry.run_id == self._run.run_id]
        self._unplaced += self._mirrors.owe(mine)

    def resume_merges(self, journaled: Sequence[MergeEntry]) -> None:
        """What a former agent left. The run is open."""
        if self._run is not None:
            self._merge([entry for entry in journaled if entry.run_id == self._run.run_id])

    async def settle(self, entries: Sequence[JobEntry], manifest: Manifest | None) -> None:
        """The jobs are over: the journal drops them and remembers what they made owed; then the tiers hear of it."""
        owed = [] if manifest is None else self._owed_of(entries, manifest)
        to_merge = None if manifest is None else merge_of(entries, manifest)
        await self._service.journaled(self._service.journal.drop_jobs, list(entries), owed, to_merge)
        if self._mirrors is not None:
            self._unplaced += self._mirrors.owe(owed)
        if to_merge is not None and self._run is not None:
            self._merge([to_merge])

    def _owed_of(self, entries: Sequence[JobEntry], manifest: Manifest) -> list[MirrorEntry]:
        ranks: dict[str, list[int]] = {}
        for entry in entries:
            for name in entry.tiers:
                ranks.setdefault(name, []).append(entry.rank)
        run_id = entries[0].run_id if entries else ""
        place = run_id, manifest.incarnation, manifest.step, manifest.attempt
        base = manifest.parent_key
        return [MirrorEntry(name, *place, tuple(sorted(some)), base) for name, some in ranks.items()]

    async def close(self) -> None:
        if self._merges is not None:
            await self._merges.close()
            self._merges = None
        if self._mirrors is not None:
            await self._mirrors.close()
            self._mirrors = None
        for staging in self._stagings:
            await staging.close()
        self._stagings.clear()

    # -- for the lines

    def report(self, progress: Progress) -> None:
        self._service.report(progress)

    async def forget_mirror(self, entry: MirrorEntry) -> None:
        try:
            await self._service.journaled(self._service.journal.drop_mirror, entry)
        except EverstepError as error:
            log.error("step %d: %s", entry.step, error)

    def notes(self, entry: MirrorEntry | MergeEntry, name: str) -> Notes:
        return self._service.notes(entry, name)

    def open_tier(self, tier: TierSettings) -> Backend:
        urgency = Urgency.ONLY_COPY if tier.node else Urgency.MIRROR
        lane = self._lane(tier.name, tier.rate, tier.url, urgency)
        return open_gated(self._service.open_backend, tier.url, tier.options, lane)

    def _lane(self, name: str, rate: float | str | None, url: str, urgency: Urgency) -> Lane:
        former = self._lanes.get(name)
        if former is not None:
            former.close()
        lane = self._service.pacing.lane(name, rate, link=link_of(url), urgency=urgency)
        self._lanes[name] = lane
        return lane

    def has_first_rank(self) -> bool:
        return 0 in self._service.members.arenas()

    # -- for merging

    def rotate(self, incarnation: int) -> None:
        self._service.rotate(incarnation)

    def is_recovering(self) -> bool:
        return self._service.pacing.turnstile.recovering

    async def lost_elsewhere(self, incarnation: int, missing: list[int]) -> tuple[list[int], str]:
        if incarnation < self._service.members.newest:
            # Nodes whose ranks came back go on with what they owed; of others nothing can be seen any more.
            return [], ""
        return await self._service.lost_elsewhere(incarnation, missing)

    def at_work_elsewhere(self, missing: list[int]) -> bool:
        return self._service.at_work_elsewhere(missing)

    @property
    def near(self) -> Backend | None:
        pipeline = self._service.pipeline
        return pipeline.staging.backend if pipeline is not None and pipeline.staging is not None else None

    async def merged(self, entry: MergeEntry, manifest: Manifest | None) -> None:
        """A full has to go where the delta went: others stand on it, and their chains are to be short there, too."""
        owed = []
        if manifest is not None:
            place = entry.run_id, entry.incarnation, entry.step, manifest.attempt
            owed = [MirrorEntry(name, *place, entry.ranks) for name in entry.tiers]
        await self._service.journaled(self._service.journal.drop_merge, entry, owed)
        if self._mirrors is not None:
            self._unplaced += self._mirrors.owe(owed)
        for staging in self._stagings if manifest is not None else ():
            # The full counts, and is at the root alone: what is here would only keep what it stands on.
            await staging.sweep(entry.step, entry.incarnation, entry.attempt - 1)

    @property
    def patience_s(self) -> float:
        return self._service.settings.commit_timeout_s
