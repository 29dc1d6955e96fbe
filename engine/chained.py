"""What rank 0 knows of chains of deltas: from the run's manifests when it opens the run, from the agent afterwards."""

from __future__ import annotations

import logging

from .agent.values import Progress
from .backends.api import Backend
from .errors import CannotTell, Damaged, UnknownFormat
from .format.manifest import Manifest
from .format.records import IncarnationRecord
from .plan.chains import DELTA, Chains, Key
from .plan.lineage import Lineage
from .policy import Policy
from .store.asking import each
from .store.blocking import run_blocking
from .store.catalog import StepNames, list_steps, read_decision
from .store.runs import read_incarnations

log = logging.getLogger("everstep")


def known_chains(backend: Backend, policy: Policy, record: IncarnationRecord) -> Chains | None:
    """Of the checkpoints that ``record``'s incarnation goes on from, as far as as many ranks wrote them: from others'
    layouts no delta can be made. None where the policy has no deltas. What cannot be read now is no base."""
    if policy.delta_every is None:
        return None
    try:
        durable = run_blocking(_durable(backend, record.world, 2 * policy.max_chain))
    except (CannotTell, Damaged) as error:
        log.warning(
            "everstep: the first flush is a full, for the checkpoints there cannot be read: %s", error
        )
        durable = {}
    return Chains(policy.delta_base, policy.max_chain, record.number, durable)


async def _durable(backend: Backend, world: int, most: int) -> dict[Key, Key | None]:
    """The ``most`` newest ones, with what they stand on."""
    lineage = Lineage(await read_incarnations(backend))
    counted = [found for found in await list_steps(backend) if lineage.counts(*found.key)]

    async def read(found: StepNames) -> Manifest | None:
        try:
            decision = await read_decision(backend, found)
        except (Damaged, UnknownFormat):
            return None
        return decision if isinstance(decision, Manifest) and decision.world == world else None

    newest = sorted(counted, key=lambda found: found.place)[-most:]
    manifests = [one for one in await each(newest, read) if one is not None]
    return {(one.incarnation, one.step): one.parent_key for one in manifests}


def take_in(chains: Chains, progress: Progress, incarnation: int) -> None:
    """What the agent said, as far as it is of chains; ``incarnation`` is the one being written."""
    key = progress.incarnation, progress.step
    if progress.stage == "merged":
        if chains.knows(key):
            chains.add(key, None)
    elif progress.incarnation != incarnation:
        return
    elif progress.stage == "committed" and progress.kind:
        chains.add(key, progress.base if progress.kind == DELTA else None)
    elif progress.stage in ("failed", "abandoned", "superseded", "unmerged"):
        chains.lost(progress.step)
    elif progress.stage == "unbased":
        chains.spoil(progress.step)
