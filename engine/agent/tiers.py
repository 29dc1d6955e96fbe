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

from .journal import JobEntry, MirrorEntry
from .mirrors import Key, Mirrors
from .root import link_of, open_gated
from .staging import Staging
from .turnstile import Lane, Urgency
from .values import Progress, TierSettings

if TYPE_CHECKING:
    from .service import Service

log = logging.getLogger("everstep.agent")


class Tiers:
    """One agent's. Used from its loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._run: RunRecord | None = None
        self._mirrors: Mirrors | None = None
        self._lanes: dict[str, Lane] = {}
        self._stagings: list[Staging] = []
        """The node's tier, and what it was before the settings changed: what is staged there is still uploaded."""
        self._unplaced: list[MirrorEntry] = []
        """Journaled by a former agent, of tiers that no trainer has named yet: how to open them, secrets included, is
        known from trainers only."""

    @property
    def busy(self) -> bool:
        return self._mirrors is not None and self._mirrors.busy

    def owed(self) -> set[Key]:
        """(incarnation, step) of the checkpoints that the root must keep."""
        waiting = {(entry.incarnation, entry.step) for entry in self._unplaced}
        return waiting | (self._mirrors.owed() if self._mirrors is not None else set())

    def status(self) -> list[dict[str, Any]]:
        pipeline = self._service.pipeline
        own = [] if pipeline is None or pipeline.staging is None else [pipeline.staging.status()]
        return [{**one, **pipeline.uploads.status()} for one in own if pipeline is not None] + (
            self._mirrors.status() if self._mirrors is not None else []
        )

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
        self._follow_node()
        unplaced, self._unplaced = self._mirrors.owe(self._unplaced), []
        if not self._service.members.newest:
            self._unplaced = unplaced
            return
        for entry in unplaced:
            log.warning("step %d is not mirrored to %s, which is no tier any more", entry.step, entry.tier)
            self._service.keep(self.forget_mirror(entry))

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

    async def settle(self, entries: Sequence[JobEntry], manifest: Manifest | None) -> None:
        """The jobs are over: the journal drops them and remembers what they made owed; then the tiers hear of it."""
        owed = [] if manifest is None else self._owed_of(entries, manifest)
        await self._service.journaled(self._service.journal.drop_jobs, list(entries), owed)
        if self._mirrors is not None:
            self._unplaced += self._mirrors.owe(owed)

    def _owed_of(self, entries: Sequence[JobEntry], manifest: Manifest) -> list[MirrorEntry]:
        ranks: dict[str, list[int]] = {}
        for entry in entries:
            for name in entry.tiers:
                ranks.setdefault(name, []).append(entry.rank)
        run_id = entries[0].run_id if entries else ""
        place = run_id, manifest.incarnation, manifest.step, manifest.attempt
        return [MirrorEntry(name, *place, tuple(sorted(some))) for name, some in ranks.items()]

    async def close(self) -> None:
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

    def notes(self, entry: MirrorEntry, name: str) -> Notes:
        return self._service.notes(entry, name)

    def open_tier(self, tier: TierSettings) -> Backend:
        former = self._lanes.get(tier.name)
        if former is not None:
            former.close()
        urgency = Urgency.ONLY_COPY if tier.node else Urgency.MIRROR
        lane = self._service.pacing.lane(tier.name, tier.rate, link=link_of(tier.url), urgency=urgency)
        self._lanes[tier.name] = lane
        return open_gated(self._service.open_backend, tier.url, tier.options, lane)

    def has_first_rank(self) -> bool:
        return 0 in self._service.members.arenas()

    @property
    def patience_s(self) -> float:
        return self._service.settings.commit_timeout_s
