"""What lies in a node's own tier on its way from memory to the root: shares of attempts, under the root's names.

Such a tier has what this node's ranks flushed, images first and the vote last, and no decisions: these stand at the
root alone. It belongs to one node, so what is removed there needs no announcement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from everstep.backends.api import Backend, Notes
from everstep.backends.errors import Conflict, NotFound
from everstep.errors import Damaged, Pruned, RunError
from everstep.format import names
from everstep.format.manifest import Manifest
from everstep.format.records import RunRecord, decode_run, encode_run
from everstep.format.vote import Vote, header_of
from everstep.plan.chains import next_bases
from everstep.plan.lineage import Lineage
from everstep.plan.retention import Facts, Retention, plan_retention

from .asking import each, reading, writing
from .bases import Bases
from .catalog import StepNames, list_step, list_steps, read_decision, read_vote, voted_ranks
from .commit import make_manifest
from .mirror import mirror_rank, missing_ranks
from .shelf import base_of_attempt
from .sources import NODE, DurableSource, Source, bases_at

STAGED_MAX = 16
"""Of the checkpoints in a node's tier, how many of the newest are told of."""

Key = tuple[int, int]
"""(incarnation, step)"""


@dataclass(frozen=True, slots=True)
class Staged:
    """One attempt, and the ranks whose shares of it are whole in a node's tier."""

    incarnation: int
    step: int
    attempt: int
    world: int
    ranks: tuple[int, ...]


class NodeSource(DurableSource):
    """The shares of a committed checkpoint that lie in the node's own tier, proved by the root's manifest."""

    kind = NODE

    def __init__(
        self,
        near: Backend,
        manifest: Manifest,
        chunk_bytes: int,
        ranks: Collection[int],
        bases: Bases | None = None,
    ) -> None:
        super().__init__(near, manifest, chunk_bytes, bases=bases)
        self.ranks = frozenset(ranks)

    async def _raise_if_pruned(self) -> None:
        """No decisions are here: what the node removed is missing, and another holder has it."""


async def claim(near: Backend, run: RunRecord) -> None:
    """Make ``near`` a tier of ``run``. Raises RunError if it is another run's, SaveFailed, StorageFull, CannotTell."""
    there = await _run_at(near)
    if there is None:
        try:
            with writing(near, names.RUN):
                await near.create(names.RUN, encode_run(run))
            return
        except Conflict:
            there = await _run_at(near)
    if there is None or there.run_id != run.run_id:
        raise RunError(
            f"{near.url}: another run is there",
            found="nothing" if there is None else f"run {there.run_id}",
            expected=f"nothing, or run {run.run_id}",
            hint="Choose another directory for the node's tier, or remove that one",
            name=names.RUN,
        )


async def upload_rank(
    near: Backend,
    root: Backend,
    place: tuple[int, int, int, int],
    *,
    run: RunRecord,
    pool: Executor,
    notes: Callable[[str], Notes] | None = None,
) -> Vote:
    """Copy one staged share (step, incarnation, attempt, rank) to the root, every chunk proved on its way, its vote
    last. What is there already is not sent again.

    Raises Damaged (what was staged is not whole any more), SaveAbandoned (the attempt was given up), SaveFailed,
    StorageFull, CannotTell.
    """
    rank = place[3]
    try:
        data, vote = await read_vote(near, *place)
        manifest = make_manifest(
            vote, [header_of(vote, data)], "node"
        )  # of this share alone; never published
        await mirror_rank(near, root, manifest, rank, run=run, pool=pool, notes=notes)
    except (NotFound, Pruned) as error:
        name = names.vote(*place)
        raise Damaged(
            f"{near.url}: what was staged of rank {rank} is not whole any more",
            found=str(error),
            expected=f"the share that {name} is the vote of",
            name=name,
        ) from error
    return vote


async def list_staged(near: Backend, run: RunRecord) -> list[Staged]:
    """Of the newest steps in a node's tier the highest attempt of which a share is whole there, oldest first. Raises
    CannotTell, Damaged."""
    there = await _run_at(near)
    if there is None or there.run_id != run.run_id:
        return []

    async def of(found: StepNames) -> Staged | None:
        for attempt in reversed(found.attempts):
            ranks = await voted_ranks(near, found.step, found.incarnation, attempt)
            if ranks:
                _, vote = await read_vote(near, found.step, found.incarnation, attempt, ranks[0])
                return Staged(found.incarnation, found.step, attempt, vote.world, tuple(ranks))
        return None

    return [one for one in await each((await list_steps(near))[-STAGED_MAX:], of) if one is not None]


async def near_source(
    near: Backend, manifest: Manifest, run: RunRecord, bases: Bases | None = None
) -> NodeSource | None:
    """What the node's tier has of the checkpoint; None if that is nothing. ``bases`` finds what deltas are based on.
    Raises CannotTell, Damaged."""
    there = await _run_at(near)
    if there is None or there.run_id != run.run_id:
        return None
    missing = set(await missing_ranks(near, manifest))
    ranks = [record.rank for record in manifest.ranks if record.rank not in missing]
    return NodeSource(near, manifest, run.chunk_bytes, ranks, bases) if ranks else None


def bases_near(near: Backend, places: Sequence[Backend], run: RunRecord) -> Bases:
    """Finds bases in the node's tier, as the first of ``places`` that has one decides, then at these places."""
    bases = bases_at(places, run.chunk_bytes)

    async def find(key: Key) -> Source | None:
        for place in places:
            decision = await read_decision(place, await list_step(place, key[1], key[0]))
            if isinstance(decision, Manifest):
                return await near_source(near, decision, run, bases)
        return None

    bases.add(find, nearest=True)
    return bases


async def discard(near: Backend, directory: str, rank: int | None = None) -> None:
    """Remove what lies in the directory of a checkpoint, or of an attempt; of ``rank``, if one is given. Votes first:
    what is removed in part has none."""
    with reading(near, directory):
        found = [item.name async for item in near.list(directory)]
    parsed = {name: names.parse(name) for name in found}
    mine = [name for name, one in parsed.items() if one is not None and rank in (None, one.rank)]
    votes = [name for name in mine if (one := parsed[name]) is not None and one.kind is names.Kind.VOTE]
    with writing(near, directory):
        await near.delete(votes)
        await near.delete([name for name in mine if name not in votes])
        if rank is None:
            await near.discard_leftovers(await near.leftovers(directory))


async def retain(
    near: Backend,
    retention: Retention,
    lineage: Lineage,
    newest: Key,
    in_use: Collection[Key] = (),
    protected: Collection[Key] = (),
    *,
    stood: dict[StepNames, Key | None] | None = None,
) -> list[Key]:
    """Remove from a node's tier what ``retention`` gives up; what was removed. Of what is newer than ``newest``, the
    newest checkpoint at the root, of what is ``in_use``, and of the ``protected`` nothing goes, nor of what stands
    there below any that stays, or may be the base of the next delta. ``stood`` remembers, from one call to the next,
    what deltas stand on. Raises CannotTell, SaveFailed."""
    steps = await list_steps(near)
    parents = await _parents(near, steps, {} if stood is None else stood)
    there = set(parents)
    staying = [key for key in parents if key > newest or key in in_use]
    needed = {*protected, *[base for key in staying if (base := parents[key]) is not None]}
    if any(parents.values()):
        needed |= next_bases(parents)
    # What is missing here is read from the root: that a base is gone makes no delta worthless.
    facts = {key: Facts(base if base in there else None) for key, base in parents.items()}
    found = [key for key in parents if key not in staying]
    removed = plan_retention(found, retention, lineage, needed, facts=facts).remove
    for incarnation, step in removed:
        await discard(near, names.checkpoint_dir(step, incarnation))
    return list(removed)


async def _parents(
    near: Backend, steps: Sequence[StepNames], stood: dict[StepNames, Key | None]
) -> dict[Key, Key | None]:
    """What the staged shares stand on, by their votes; None: they are full."""

    async def of(found: StepNames) -> None:
        bases = [await base_of_attempt(near, found, attempt) for attempt in found.attempts]
        stood[found] = next((base for base in reversed(bases) if base is not None), None)

    await each([found for found in steps if found not in stood], of)
    for gone in set(stood) - set(steps):
        del stood[gone]
    return {found.key: stood[found] for found in steps}


async def _run_at(near: Backend) -> RunRecord | None:
    try:
        with reading(near, names.RUN):
            return decode_run(await near.read(names.RUN), names.RUN)
    except NotFound:
        return None
