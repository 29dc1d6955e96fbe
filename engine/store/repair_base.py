"""Bringing back what a delta stands on, where it is gone and another place has it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from everstep.backends.api import Backend
from everstep.backends.errors import BackendError, Conflict, NotAnObject
from everstep.errors import EverstepError, NoCheckpoint, SaveAbandoned, SaveFailed, StorageFull
from everstep.format import names
from everstep.format.manifest import Manifest
from everstep.format.records import RunRecord

from .asking import writing
from .catalog import list_step, read_decision
from .mirror import conclude, mirror_rank
from .runs import open_run

CHAIN_MAX = 64
"""Bases below each other."""

ASIDE_MAX = 100
"""Damaged objects that are kept of one name."""

Place = tuple[int, int]
"""(step, incarnation)"""


async def make_way(place: Backend, name: str) -> bool:
    """Where something else has the name of an object (a directory), which nobody may remove, move it to where damaged
    objects are kept; whether it was so. Raises SaveFailed where it cannot be moved."""
    try:
        await place.size(name)
        return False
    except NotAnObject:
        pass
    except BackendError:
        return False
    with writing(place, name):
        for number in range(1, ASIDE_MAX + 1):
            with suppress(Conflict):
                await place.displace(name, names.aside(name, number))
                return True
    raise SaveFailed(f"{name}: it cannot be moved away, so many were", found=ASIDE_MAX, name=name)


def directory_of(name: str) -> Place | None:
    """The checkpoint whose directory ``name`` is."""
    top, _, rest = name.partition("/")
    step, _, incarnation = rest.partition("/")
    found = names.parse_step(step), names.parse_incarnation(incarnation)
    return (found[0], found[1]) if top == names.CHECKPOINTS and None not in found else None  # type: ignore[return-value]


async def bring_base(target: Backend, holders: Sequence[Backend], place: Place) -> tuple[str, int] | str:
    """Mirror the checkpoint, and those below it that do not count at ``target``, from the first of ``holders`` that has
    them whole: from whom, and the bytes that were written; or why it cannot be. What was removed at ``target`` while
    its tombstone stands is not brought back.

    Raises SaveFailed, StorageFull of ``target``; CannotTell and Damaged where its run.json cannot be read.
    """
    why = "no other place has it"
    run = await open_run(target)
    for holder in holders:
        try:
            return holder.url, await _bring(target, holder, place, run)
        except EverstepError as error:
            if isinstance(error, (SaveFailed, StorageFull)) and not isinstance(error, SaveAbandoned):
                raise
            why = str(error)
    return why


async def _bring(target: Backend, holder: Backend, place: Place, run: RunRecord) -> int:
    chain: list[Manifest] = []
    at: Place | None = place
    while at is not None and len(chain) < CHAIN_MAX:
        if await _standing(target, at) is not None:
            break
        manifest = await _standing(holder, at)
        if manifest is None:
            raise NoCheckpoint(
                f"{holder.url} has no checkpoint at step {at[0]} of incarnation {at[1]}", step=at[0]
            )
        chain.append(manifest)
        parent = manifest.parent_key
        at = None if parent is None else (parent[1], parent[0])
    nbytes = 0
    with ThreadPoolExecutor(1) as pool:
        for manifest in reversed(chain):
            for record in manifest.ranks:
                nbytes += await mirror_rank(holder, target, manifest, record.rank, run=run, pool=pool)
            stood = await conclude(holder, target, manifest)
            if not isinstance(stood, Manifest):
                raise NoCheckpoint(
                    f"step {manifest.step} does not count at {target.url}",
                    found="nothing" if stood is None else stood.reason,
                    step=manifest.step,
                )
    return nbytes


async def _standing(backend: Backend, place: Place) -> Manifest | None:
    decision = await read_decision(backend, await list_step(backend, *place))
    return decision if isinstance(decision, Manifest) else None
