"""Where the agent reads a delta's base: in the node's own tier, where its rank's share is whole there, else at the
root, whose manifest says what counts."""

from __future__ import annotations

import logging

from everstep.backends.api import Backend
from everstep.backends.errors import BackendError
from everstep.errors import EverstepError
from everstep.format.manifest import Manifest
from everstep.format.records import RunRecord
from everstep.format.vote import STATE_IMAGE, Vote
from everstep.store.bases import Bases
from everstep.store.catalog import list_step, read_decision, require_standing
from everstep.store.sources import DurableSource, Source
from everstep.store.staged import near_source

from .storage import patiently

log = logging.getLogger("everstep.agent")

Key = tuple[int, int]
"""(incarnation, step)"""


async def base_of(
    key: Key, rank: int, root: Backend, near: Backend | None, run: RunRecord
) -> DurableSource | None:
    """The checkpoint that a delta of ``rank`` is to stand on; None, with the reason in the log, where it cannot."""
    try:
        return await rank_source(key, rank, root, near, run)
    except (BackendError, EverstepError) as error:
        log.warning("rank %d: stored full, without its base, step %d: %s", rank, key[1], error)
        return None


async def rank_source(
    key: Key, rank: int, root: Backend, near: Backend | None, run: RunRecord
) -> DurableSource:
    """The nearest holder of that rank's share; what it is based on itself is looked for at both places. Raises Pruned,
    Damaged, CannotTell."""
    incarnation, step = key
    manifest = await patiently(lambda: require_standing(root, step, incarnation))
    bases = Bases()

    async def at_root(below: Key) -> Source | None:
        decision = await read_decision(root, await list_step(root, below[1], below[0]))
        if not isinstance(decision, Manifest):
            return None
        return DurableSource(root, decision, run.chunk_bytes, bases=bases)

    async def near_by(below: Key) -> Source | None:
        if near is None:
            return None
        decision = await read_decision(root, await list_step(root, below[1], below[0]))
        found = await near_source(near, decision, run) if isinstance(decision, Manifest) else None
        if found is not None:
            found.bases = bases
        return found

    bases.add(at_root)
    if near is not None:
        bases.add(near_by, nearest=True)
        found = await near_by(key)
        if found is not None and rank in found.ranks and isinstance(found, DurableSource):
            return found
    return DurableSource(root, manifest, run.chunk_bytes, bases=bases)


def is_based(vote: Vote) -> bool:
    """Whether the share is stored against its base, or has nothing that could be."""
    return vote.parent is not None or all(
        not image.nbytes for image in vote.images if image.name != STATE_IMAGE
    )
