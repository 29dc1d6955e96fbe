"""Where the agent reads a delta's base: in the node's own tier, where its rank's share is whole there, else at the
root, whose manifest says what counts."""

from __future__ import annotations

import logging

from everstep.backends.api import Backend
from everstep.backends.errors import BackendError
from everstep.errors import EverstepError
from everstep.format.records import RunRecord
from everstep.store.catalog import require_standing
from everstep.store.sources import DurableSource
from everstep.store.staged import bases_near, near_source

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
    if near is not None:
        bases = bases_near(near, [root], run)
        found = await near_source(near, manifest, run, bases)
        if found is not None and rank in found.ranks:
            return found
        return DurableSource(root, manifest, run.chunk_bytes, bases=bases)
    return DurableSource(root, manifest, run.chunk_bytes)
