"""Before a load: what all nodes together have in their own tiers, whole, and the root not yet, gets there first. So
nothing is lost where the whole cluster died in the middle of an upload."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .backends.api import Backend
from .backends.errors import BackendError
from .discovery import FALL_BACK
from .errors import EverstepError
from .format.manifest import Manifest
from .format.records import IncarnationRecord, RunRecord
from .plan.lineage import Lineage
from .ranks import Ranks
from .store.blocking import run_blocking
from .store.catalog import list_step, read_decision, voted_ranks
from .store.commit import abort_attempt, try_commit
from .store.runs import read_incarnations
from .store.staged import Key, Staged, list_staged, upload_rank

log = logging.getLogger("everstep")

UPLOAD_S_MAX = 3600.0
"""For one checkpoint, all nodes at once; one that takes longer is left where it is, and an older one is loaded."""
THREADS = 2
"""That hash what is uploaded."""
LEFT_OVER = "given up: left unfinished"


def finish_staged(
    root: Backend,
    near: Backend,
    ranks: Ranks,
    run: RunRecord,
    in_memory: Mapping[Key, int],
    *,
    step: int | None,
    node: str,
    timeout_s: float,
    known: dict[int, IncarnationRecord] | None = None,
) -> None:
    """Upload the newest checkpoint (or ``step``) that lies whole in the nodes' tiers and is undecided at the root, and
    commit it; nothing where the root, or memory (``in_memory``: how many ranks it has of what), has a newer one. All
    ranks call it. What fails is logged: the load goes on with what there is. Raises RankError where ranks do not
    answer.
    """
    told = ranks.agree("comparing the nodes' tiers", [node, _look(near, run)], timeout_s=timeout_s)
    staged = [_from_wire(one) for _, some in told for one in some]
    chosen = ranks.from_first(
        "choosing what to upload", lambda: _choose(root, staged, in_memory, step, known), timeout_s=timeout_s
    )
    if chosen is None:
        return
    one = _from_wire(chosen)
    here = {rank for place, some in told if place == node for other in some for rank in _shares(other, one)}
    mine = [rank for rank, (place, _) in enumerate(told) if place == node]
    own = sorted(here)[mine.index(ranks.rank) :: len(mine)]
    problems = ranks.agree(
        f"uploading step {one.step} from the nodes' tiers",
        _upload(root, near, run, one, own),
        timeout_s=timeout_s + UPLOAD_S_MAX,
    )
    if ranks.rank == 0:
        _commit(root, one, [text for text in problems if text])
    ranks.agree(f"committing step {one.step}", None, timeout_s=timeout_s)


def _from_wire(wire: Sequence[Any]) -> Staged:
    incarnation, step, attempt, world, ranks = wire
    return Staged(incarnation, step, attempt, world, tuple(ranks))


def _shares(wire: Sequence[Any], one: Staged) -> Sequence[int]:
    """The ranks whose shares of ``one`` are told of."""
    other = _from_wire(wire)
    same = (other.incarnation, other.step, other.attempt) == (one.incarnation, one.step, one.attempt)
    return other.ranks if same else ()


def _look(near: Backend, run: RunRecord) -> list[list[Any]]:
    """What this node's tier has, as plain values."""
    try:
        found = run_blocking(list_staged(near, run))
    except (EverstepError, BackendError) as error:
        log.warning("everstep: the node's tier cannot be read: %s", error)
        return []
    return [[one.incarnation, one.step, one.attempt, one.world, list(one.ranks)] for one in found]


def _choose(
    root: Backend,
    staged: Sequence[Staged],
    in_memory: Mapping[Key, int],
    step: int | None,
    known: dict[int, IncarnationRecord] | None,
) -> list[Any] | None:
    """The checkpoint to finish, with the ranks whose shares are staged anywhere. Rank 0 finds it."""
    records = run_blocking(read_incarnations(root, known))
    lineage, worlds = Lineage(records), {record.number: record.world for record in records}
    whole = {key for key, count in in_memory.items() if count == worlds.get(key[0]) and lineage.counts(*key)}
    attempts: dict[Key, dict[int, set[int]]] = {}
    for one in staged:
        key = one.incarnation, one.step
        if key[0] in worlds and lineage.counts(*key) and step in (None, one.step):
            attempts.setdefault(key, {}).setdefault(one.attempt, set()).update(one.ranks)
    for key in sorted(attempts, reverse=True):
        if key in whole or (step is None and any(other > key for other in whole)):
            return None
        attempt, world = max(attempts[key]), worlds[key[0]]
        try:
            state = run_blocking(_standing(root, key, attempt))
        except FALL_BACK as error:
            log.warning("everstep: step %d (incarnation %d): %s", key[1], key[0], error)
            continue
        if state is True:
            return None
        if state is not False and attempts[key][attempt] | state >= set(range(world)):
            return [*key, attempt, world, sorted(attempts[key][attempt])]
    return None


async def _standing(root: Backend, key: Key, attempt: int) -> bool | set[int]:
    """Whether the checkpoint is at the root (True), or the attempt was given up (False); else whose votes are there."""
    found = await list_step(root, key[1], key[0])
    if isinstance(await read_decision(root, found), Manifest):
        return True
    return False if attempt in found.decisions else set(await voted_ranks(root, key[1], key[0], attempt))


def _upload(root: Backend, near: Backend, run: RunRecord, one: Staged, ranks: Sequence[int]) -> str | None:
    """Upload these ranks' shares; what went wrong."""

    async def upload(pool: ThreadPoolExecutor) -> None:
        for rank in ranks:
            place = one.step, one.incarnation, one.attempt, rank
            await upload_rank(near, root, place, run=run, pool=pool)

    try:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="everstep-upload") as pool:
            run_blocking(asyncio.wait_for(upload(pool), UPLOAD_S_MAX))
    except (EverstepError, BackendError, OSError, asyncio.TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _commit(root: Backend, one: Staged, problems: Sequence[str]) -> None:
    what = f"step {one.step} (incarnation {one.incarnation}) lay in the nodes' own tiers only"

    async def commit() -> Any:
        found = await list_step(root, one.step, one.incarnation)
        for earlier in range(max(found.decisions, default=0) + 1, one.attempt):
            await abort_attempt(root, one.step, one.incarnation, earlier, reason=LEFT_OVER)
        return await try_commit(root, one.step, one.incarnation, one.attempt, one.world)

    if problems:
        log.warning("everstep: %s, and could not be uploaded: %s", what, "; ".join(problems))
        return
    try:
        decision = run_blocking(commit())
    except (EverstepError, BackendError) as error:
        log.warning("everstep: %s; it was uploaded, and could not be committed: %s", what, error)
        return
    done = "uploaded and committed now" if isinstance(decision, Manifest) else f"uploaded; but: {decision}"
    log.warning("everstep: %s; %s", what, done)
