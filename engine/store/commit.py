"""Deciding an attempt: a manifest when all votes are in and agree, an abort record when it is given up.

Both are created-if-absent at one name, so exactly one of them happens, whoever publishes and however often. A
lost race, and a lost answer, are settled by reading back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from everstep.backends.api import Backend
from everstep.backends.errors import BackendError, Conflict, NotFound
from everstep.backends.points import reach
from everstep.errors import Damaged, StateMismatch, UsageError
from everstep.format import names
from everstep.format.manifest import Abort, Decision, Manifest, RankRecord, Tombstone, encode_decision
from everstep.format.vote import Vote, vote_hash
from everstep.plan.coverage import check_coverage
from everstep.plan.lineage import Lineage

from .asking import each, writing
from .catalog import list_step, read_decision_at, read_layouts, read_numbered, read_vote, voted_ranks
from .equality import equality_facts
from .runs import now, read_incarnations

COVERED_MAX = 64
"""Sets of layouts remembered as covering their tensors."""

NAMED_MAX = 8
"""Ranks that an abort record's reason names; more are counted."""

_covered: OrderedDict[tuple[str, ...], None] = OrderedDict()
"""Sets of layouts that were found to cover; touched between awaits only, from whatever loop."""


async def next_attempt(backend: Backend, step: int, incarnation: int) -> tuple[int, Manifest | None]:
    """The attempt to work on (one above the highest decided), and the manifest that already counts, if
    any."""
    found = await list_step(backend, step, incarnation)
    number = max(found.decisions, default=0) + 1
    counting = await read_numbered(backend, found)
    return number, counting[1] if counting and isinstance(counting[1], Manifest) else None


async def try_commit(
    backend: Backend, step: int, incarnation: int, attempt: int, world: int
) -> Manifest | Abort | None:
    """Decide the attempt if all votes are in; None while some are missing. Any process may call it, any
    number of times; whichever decision stands is returned.

    Votes that disagree, or that do not cover every tensor, and an attempt above a newer incarnation's cut,
    end in an abort record that says so. Raises CannotTell, SaveFailed, StorageFull: not decided, try again.
    """
    found = await list_step(backend, step, incarnation)
    if attempt in found.decisions:
        return await _standing(backend, step, incarnation, attempt)
    if attempt > 1 and max(found.decisions, default=0) < attempt - 1:
        raise UsageError(
            f"attempt {attempt} of step {step} cannot be decided yet",
            found=f"decisions {list(found.decisions)}",
            expected=f"a decision on attempt {attempt - 1}",
        )
    ranks = await voted_ranks(backend, step, incarnation, attempt)
    if not set(ranks).issuperset(range(world)):
        return None

    async def one(rank: int) -> tuple[bytes, Vote]:
        return await read_vote(backend, step, incarnation, attempt, rank)

    try:
        votes = await each(ranks, one)
    except NotFound:
        return await _decided_meanwhile(backend, step, incarnation, attempt)
    except Damaged as error:
        rank = names.parse(str(error.fields.get("name", "")))
        return await abort_attempt(
            backend, step, incarnation, attempt, reason=str(error), rank=rank.rank if rank else None
        )
    reason = await _objection(backend, [vote for _, vote in votes], world)
    if reason is None:
        reason = await _superseded(backend, step, incarnation)
    facts: dict[str, Any] = {}
    if reason is None:
        try:
            facts, reason = await equality_facts(backend, [vote for _, vote in votes])
        except Damaged as error:
            reason = None, str(error)
    if reason is not None:
        return await abort_attempt(backend, step, incarnation, attempt, reason=reason[1], rank=reason[0])
    manifest = _manifest(votes, "shared" if backend.capabilities.shared else "node", facts)
    reach("manifest.before", names.decision(step, incarnation, attempt))
    decision = await _publish(backend, manifest, attempt)
    reach("manifest.after", names.decision(step, incarnation, attempt))
    await _tidy(backend, names.attempt_dir(step, incarnation, attempt))
    return decision


async def _tidy(backend: Backend, directory: str) -> None:
    """Remove what crashed writers left in a decided attempt; no writer of it can be of use any more. Rotation
    removes what this cannot."""
    with suppress(BackendError):
        await backend.discard_leftovers(await backend.leftovers(directory))


async def abort_attempt(
    backend: Backend, step: int, incarnation: int, attempt: int, *, reason: str, rank: int | None = None
) -> Manifest | Abort:
    """Give the attempt up, unless it is decided already; whichever decision stands is returned."""
    return await _publish(backend, Abort(step, incarnation, attempt, reason, rank), attempt)


async def _publish(backend: Backend, decision: Manifest | Abort, number: int) -> Manifest | Abort:
    stood = await publish_decision(backend, decision, number)
    return decision if stood is None else _as_attempt(stood, number)


async def publish_decision(backend: Backend, decision: Decision, number: int) -> Decision | None:
    """Create decision ``number``; None if it stands, else the one that was there first."""
    name = names.decision(decision.step, decision.incarnation, number)
    try:
        with writing(backend, name, step=decision.step):
            await backend.create(name, encode_decision(decision))
    except Conflict:
        stood = await read_decision_at(backend, decision.step, decision.incarnation, number)
        if stood is None:
            raise Damaged(f"{name} vanished", found="nothing", expected="a decision", name=name) from None
        return stood
    return None


async def _standing(backend: Backend, step: int, incarnation: int, attempt: int) -> Manifest | Abort | None:
    decision = await read_decision_at(backend, step, incarnation, attempt)
    return None if decision is None else _as_attempt(decision, attempt)


def _as_attempt(decision: Decision, number: int) -> Manifest | Abort:
    """What a decision says of attempt ``number``: a tombstone, or a revision of an earlier manifest, took
    it."""
    if isinstance(decision, Tombstone):
        return Abort(
            decision.step, decision.incarnation, number, f"the checkpoint was removed: {decision.reason}"
        )
    return decision


async def _decided_meanwhile(
    backend: Backend, step: int, incarnation: int, attempt: int
) -> Manifest | Abort | None:
    """A listed vote is gone: someone decided against the attempt and collected it; None if nobody did."""
    return await _standing(backend, step, incarnation, attempt)


async def _superseded(backend: Backend, step: int, incarnation: int) -> tuple[None, str] | None:
    records = await read_incarnations(backend)
    if not any(record.number == incarnation for record in records):
        name = names.incarnation(incarnation)
        raise Damaged(f"{name} is missing", found="nothing", expected="the writer's own record", name=name)
    lineage = Lineage(records)
    if lineage.counts(incarnation, step):
        return None
    return None, f"superseded: incarnation {lineage.newest} went on from an earlier step"


async def _objection(backend: Backend, votes: Sequence[Vote], world: int) -> tuple[int | None, str] | None:
    """Why the votes make no checkpoint: (rank at fault where one is known, reason); None if they do."""
    objection = _headers(votes, world) or _agreement(votes)
    if objection is not None:
        return objection
    hashes = tuple(vote.layout_hash for vote in votes)
    if hashes in _covered:
        _covered.move_to_end(hashes)
    else:
        try:
            by_hash = await read_layouts(backend, set(hashes))
        except Damaged as error:
            return None, str(error)
        try:
            check_coverage([by_hash[one].entries for one in hashes])
        except StateMismatch as error:
            return None, str(error)
        _remember(hashes)
    return None


def _remember(hashes: tuple[str, ...]) -> None:
    _covered[hashes] = None
    while len(_covered) > COVERED_MAX:
        _covered.popitem(last=False)


def _headers(votes: Sequence[Vote], world: int) -> tuple[int | None, str] | None:
    beyond = [vote.rank for vote in votes if vote.rank >= world]
    if beyond:
        return beyond[0], f"votes of {_ranks(beyond)} in a world of {world}"
    wrong = [vote.rank for vote in votes if vote.world != world]
    if wrong:
        return wrong[0], f"{_ranks(wrong)} voted for another world than {world}"
    return _split("kind of checkpoint", {vote.rank: vote.kind for vote in votes})


def _agreement(votes: Sequence[Vote]) -> tuple[int | None, str] | None:
    """What all ranks must say alike."""
    for field in ("mesh", "config_hash"):
        objection = _split(field, {vote.rank: vote.meta.get(field) for vote in votes})
        if objection is not None:
            return objection
    return _split("parts", {vote.rank: sorted(vote.meta.get("parts") or {}) for vote in votes})


def _split(what: str, values: dict[int, Any]) -> tuple[int, str] | None:
    """An objection where ranks differ from rank 0."""
    first = values[0]
    others = [rank for rank, value in values.items() if value != first]
    if not others:
        return None
    return others[0], (
        f"the ranks differ in {what}: {_ranks(others)} {'has' if len(others) == 1 else 'have'} "
        f"{values[others[0]]!r}, rank 0 has {first!r}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    some = ", ".join(str(rank) for rank in ranks[:NAMED_MAX])
    more = len(ranks) - NAMED_MAX
    return f"rank{'s' if len(ranks) > 1 else ''} {some}" + (f" and {more} more" if more > 0 else "")


def _manifest(votes: Sequence[tuple[bytes, Vote]], scope: str, facts: dict[str, Any]) -> Manifest:
    """The manifest that the votes (by rank) make; run-wide values are rank 0's. ``facts``: found by comparing."""
    first = votes[0][1]
    meta = first.meta
    return Manifest(
        step=first.step,
        incarnation=first.incarnation,
        attempt=first.attempt,
        kind=first.kind,
        world=first.world,
        mesh=dict(meta.get("mesh") or {}),
        ranks=tuple(_rank_record(data, vote) for data, vote in votes),
        parts=dict(meta.get("parts") or {}),
        config_hash=meta.get("config_hash"),
        libraries=dict(meta.get("libraries") or {}),
        metrics=dict(meta.get("metrics") or {}),
        facts={**(meta.get("facts") or {}), **facts},
        created=now(),
        scope=scope,
    )


def _rank_record(data: bytes, vote: Vote) -> RankRecord:
    return RankRecord(
        rank=vote.rank,
        vote_hash=vote_hash(data),
        vote_nbytes=len(data),
        layout_hash=vote.layout_hash,
        images={record.name: record.nbytes for record in vote.images},
        coordinates=dict(vote.meta.get("coordinates") or {}),
        data=vote.meta.get("data"),
        rng=tuple(vote.meta.get("rng") or ()),
    )
