"""Deciding an attempt: a manifest when all votes are in and agree, an abort record when it is given up.

Both are created-if-absent at one name, so exactly one of them happens, whoever publishes and however often. A
lost race, and a lost answer, are settled by reading back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from everstep.backends.api import Backend
from everstep.backends.errors import BackendError, Conflict, NotFound
from everstep.backends.points import reach
from everstep.errors import Damaged, StateMismatch, UsageError
from everstep.format import names
from everstep.format.hashing import digest
from everstep.format.manifest import (
    Abort,
    Decision,
    Manifest,
    Quarantine,
    RankRecord,
    Tombstone,
    encode_decision,
)
from everstep.format.records import IncarnationRecord
from everstep.format.vote import Parent, Vote, VoteHeader, vote_hash
from everstep.plan.lineage import Lineage

from .asking import each, writing
from .catalog import Standing, list_step, look_at, read_decision, read_decision_at, read_numbered, read_vote
from .equality import equality_facts
from .flush import UNBASED
from .runs import now, read_incarnations
from .votes import check_layouts, read_headers

COVERED_MAX = 64
"""Sets of layouts remembered as covering their tensors."""

NAMED_MAX = 8
"""Ranks that an abort record's reason names; more are counted."""

SAYINGS_MAX = 16
"""Ways of being at odds with rank 0 that are read to be told apart, and ranks without a base for a delta that are."""

NONE_READ: Mapping[int, Vote] = MappingProxyType({})

_covered: OrderedDict[bytes, None] = OrderedDict()
"""Digests of sets of layouts that were found to cover; touched between awaits only, from whatever loop."""


async def next_attempt(backend: Backend, step: int, incarnation: int) -> tuple[int, Manifest | None]:
    """The attempt to work on (one above the highest decided), and the manifest that already counts, if
    any."""
    found = await list_step(backend, step, incarnation)
    number = max(found.decisions, default=0) + 1
    counting = await read_numbered(backend, found)
    return number, counting[1] if counting and isinstance(counting[1], Manifest) else None


async def try_commit(
    backend: Backend,
    step: int,
    incarnation: int,
    attempt: int,
    world: int,
    *,
    standing: Standing | None = None,
    known: dict[int, IncarnationRecord] | None = None,
) -> Manifest | Abort | None:
    """Decide the attempt if all votes are in; None while some are missing. Any process may call it, any
    number of times; whichever decision stands is returned. ``standing`` was seen just now, ``known`` are the
    incarnations that were read before.

    Votes that disagree, or that do not cover every tensor, an attempt above a newer incarnation's cut, and deltas
    whose base does not count any more, end in an abort record that says so. Raises CannotTell, SaveFailed, StorageFull:
    not decided, try again.
    """
    standing = standing or await look_at(backend, step, incarnation, attempt)
    found, ranks = standing.names, standing.ranks
    if attempt in found.decisions:
        return await _standing(backend, step, incarnation, attempt)
    if attempt > 1 and max(found.decisions, default=0) < attempt - 1:
        raise UsageError(
            f"attempt {attempt} of step {step} cannot be decided yet",
            found=f"decisions {list(found.decisions)}",
            expected=f"a decision on attempt {attempt - 1}",
        )
    if not set(ranks).issuperset(range(world)):
        return None
    try:
        votes: dict[int, Vote] = {}
        headers = await read_headers(backend, step, incarnation, attempt, ranks, standing.gathers, votes)
        first = await _vote_of(backend, headers[0], votes)
        reason = await objection_to(backend, headers, world)
        facts, differing = ({}, None) if reason is not None else await _equality(backend, headers, votes)
    except NotFound:
        return await _decided_meanwhile(backend, step, incarnation, attempt)
    except Damaged as error:
        rank = names.parse(str(error.fields.get("name", "")))
        return await abort_attempt(
            backend, step, incarnation, attempt, reason=str(error), rank=rank.rank if rank else None
        )
    if reason is None:
        reason = await _superseded(backend, step, incarnation, known) or differing
    parent = _parent_of(headers)
    if reason is None and parent is not None:
        reason = await _baseless(backend, parent)
    if reason is not None:
        return await abort_attempt(backend, step, incarnation, attempt, reason=reason[1], rank=reason[0])
    if parent is not None:
        facts |= await _unbased(backend, headers, votes)
    manifest = make_manifest(first, headers, "shared" if backend.capabilities.shared else "node", facts)
    reach("manifest.before", names.decision(step, incarnation, attempt))
    decision = await _publish(backend, manifest, attempt)
    reach("manifest.after", names.decision(step, incarnation, attempt))
    if parent is not None and isinstance(decision, Manifest):
        decision = await _look_at_base(backend, decision, parent)
    await tidy(backend, names.attempt_dir(step, incarnation, attempt))
    return decision


async def tidy(backend: Backend, directory: str) -> None:
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
    if isinstance(decision, (Tombstone, Quarantine)):
        why = "was removed" if isinstance(decision, Tombstone) else "is in quarantine"
        return Abort(decision.step, decision.incarnation, number, f"the checkpoint {why}: {decision.reason}")
    return decision


async def _decided_meanwhile(
    backend: Backend, step: int, incarnation: int, attempt: int
) -> Manifest | Abort | None:
    """A listed vote is gone: someone decided against the attempt and collected it; None if nobody did."""
    return await _standing(backend, step, incarnation, attempt)


async def _superseded(
    backend: Backend, step: int, incarnation: int, known: dict[int, IncarnationRecord] | None
) -> tuple[None, str] | None:
    records = await read_incarnations(backend, known)
    if not any(record.number == incarnation for record in records):
        name = names.incarnation(incarnation)
        raise Damaged(f"{name} is missing", found="nothing", expected="the writer's own record", name=name)
    lineage = Lineage(records)
    if lineage.counts(incarnation, step):
        return None
    return None, f"superseded: incarnation {lineage.newest} went on from an earlier step"


async def objection_to(
    backend: Backend, headers: Sequence[VoteHeader], world: int
) -> tuple[int | None, str] | None:
    """Why the votes make no checkpoint: (rank at fault where one is known, reason); None if they do."""
    objection = _headers(headers, world)
    if objection is None:
        objection = await _agreement(backend, headers)
    return objection or await _coverage_objection(backend, [header.layout_hash for header in headers])


async def _coverage_objection(backend: Backend, hashes: list[str]) -> tuple[None, str] | None:
    """Whether the layouts (by rank) cover every tensor; read when one of them is new."""
    key = digest("".join(hashes).encode())
    if key in _covered:
        _covered.move_to_end(key)
        return None
    try:
        await check_layouts(backend, hashes)
    except (Damaged, StateMismatch) as error:
        return None, str(error)
    _covered[key] = None
    while len(_covered) > COVERED_MAX:
        _covered.popitem(last=False)
    return None


def _headers(headers: Sequence[VoteHeader], world: int) -> tuple[int | None, str] | None:
    beyond = [header.rank for header in headers if header.rank >= world]
    if beyond:
        return beyond[0], f"votes of {_ranks(beyond)} in a world of {world}"
    wrong = [header.rank for header in headers if header.world != world]
    if wrong:
        return wrong[0], f"{_ranks(wrong)} voted for another world than {world}"
    return _split("base", {h.rank: h.parent[:2] for h in headers if h.parent is not None})


def _parent_of(headers: Sequence[VoteHeader]) -> Parent | None:
    """What the deltas among the votes are based on. Where its attempt was replaced meanwhile, the later one."""
    return max([header.parent for header in headers if header.parent is not None], default=None)


async def _baseless(backend: Backend, parent: Parent) -> tuple[None, str] | None:
    """An objection where the base does not count any more."""
    incarnation, step, _ = parent
    decision = await read_decision(backend, await list_step(backend, step, incarnation))
    if isinstance(decision, Manifest):
        return None
    return None, f"its base, step {step} of incarnation {incarnation}, is not there any more"


async def _unbased(
    backend: Backend, headers: Sequence[VoteHeader], votes: Mapping[int, Vote]
) -> dict[str, Any]:
    """As a fact, the ranks that had no base for their shares of a delta; of very many only the first are asked."""
    without = [header for header in headers if header.parent is None and header.images_nbytes]
    with suppress(NotFound, Damaged):  # whoever reads the checkpoint will find that
        asked = await each(without[:SAYINGS_MAX], lambda header: _vote_of(backend, header, votes))
        ranks = [vote.rank for vote in asked if UNBASED in vote.meta]
        return {UNBASED: ranks} if ranks else {}
    return {}


async def _look_at_base(backend: Backend, manifest: Manifest, parent: Parent) -> Manifest | Abort:
    """Now that the manifest is published: whoever removes the base has either seen it, or its tombstone is seen here,
    and then the checkpoint goes, too."""
    objection = await _baseless(backend, parent)
    if objection is None:
        return manifest
    place = manifest.step, manifest.incarnation
    number = manifest.attempt + 1
    stood = await publish_decision(backend, Tombstone(*place, number, objection[1], created=now()), number)
    if isinstance(stood, Manifest):  # another attempt was faster: it counts
        return stood
    return Abort(*place, manifest.attempt, objection[1])


async def _agreement(backend: Backend, headers: Sequence[VoteHeader]) -> tuple[int | None, str] | None:
    """What all ranks must say alike. Where the digests tell that they do not, one vote for each digest is read to
    say in what."""
    sayings = {header.agreement: header for header in reversed(headers)}
    if len(sayings) == 1:
        return None
    speakers = sorted(sayings.values(), key=lambda header: header.rank)[:SAYINGS_MAX]
    votes = await each(speakers, lambda header: _vote_of(backend, header))
    said = {header.agreement: vote.meta for header, vote in zip(speakers, votes, strict=True)}
    known = [header for header in headers if header.agreement in said]
    for field in ("mesh", "config_hash"):
        objection = _split(field, {header.rank: said[header.agreement].get(field) for header in known})
        if objection is not None:
            return objection
    parts = {header.rank: sorted(said[header.agreement].get("parts") or {}) for header in known}
    return _split("parts", parts)


async def _equality(
    backend: Backend, headers: Sequence[VoteHeader], votes: Mapping[int, Vote]
) -> tuple[dict[str, Any], tuple[int | None, str] | None]:
    """What the ranks' hashes of entries prove (:func:`~.equality.equality_facts`). Only votes that say in their
    header that they have such hashes are read whole, and of these no more is kept than is needed."""
    speakers = [header for header in headers if header.has_entry_hashes]

    async def read(header: VoteHeader) -> Vote:
        return replace(await _vote_of(backend, header, votes), images=())

    return await equality_facts(backend, await each(speakers, read))


async def _vote_of(backend: Backend, header: VoteHeader, votes: Mapping[int, Vote] = NONE_READ) -> Vote:
    """The whole vote, unless ``votes`` has what its header was taken from. Raises Damaged where it is not the one that
    ``header`` is of."""
    if header.rank in votes:
        return votes[header.rank]
    place = header.step, header.incarnation, header.attempt, header.rank
    data, vote = await read_vote(backend, *place)
    if vote_hash(data) != header.hash:
        name = names.vote(*place)
        raise Damaged(
            f"{name}: not the vote that was gathered", found=vote_hash(data), expected=header.hash, name=name
        )
    return vote


def _split(what: str, values: dict[int, Any]) -> tuple[int, str] | None:
    """An objection where ranks differ from the first one."""
    if not values:
        return None
    lowest = min(values)
    first = values[lowest]
    others = [rank for rank, value in values.items() if value != first]
    if not others:
        return None
    return others[0], (
        f"the ranks differ in {what}: {_ranks(others)} {'has' if len(others) == 1 else 'have'} "
        f"{values[others[0]]!r}, rank {lowest} has {first!r}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    some = ", ".join(str(rank) for rank in ranks[:NAMED_MAX])
    more = len(ranks) - NAMED_MAX
    return f"rank{'s' if len(ranks) > 1 else ''} {some}" + (f" and {more} more" if more > 0 else "")


def make_manifest(
    first: Vote, headers: Sequence[VoteHeader], scope: str, facts: Mapping[str, Any] | None = None
) -> Manifest:
    """The manifest that the votes make, whose headers are given by rank; run-wide values are those of ``first``,
    the vote of the first of them. ``facts``: found by comparing them."""
    meta = first.meta
    parent = _parent_of(headers)
    return Manifest(
        step=first.step,
        incarnation=first.incarnation,
        attempt=first.attempt,
        kind="full" if parent is None else "delta",
        world=first.world,
        mesh=dict(meta.get("mesh") or {}),
        ranks=tuple([_rank_record(header) for header in headers]),
        parts=dict(meta.get("parts") or {}),
        config_hash=meta.get("config_hash"),
        libraries=dict(meta.get("libraries") or {}),
        metrics=dict(meta.get("metrics") or {}),
        facts={**(meta.get("facts") or {}), **(facts or {})},
        parent=None if parent is None else dict(zip(("incarnation", "step", "attempt"), parent, strict=True)),
        created=now(),
        scope=scope,
        data=meta.get("data"),
        rng=tuple(meta.get("rng") or ()),
    )


def _rank_record(header: VoteHeader) -> RankRecord:
    return RankRecord(
        rank=header.rank,
        vote_hash=header.hash,
        vote_nbytes=header.nbytes,
        layout_hash=header.layout_hash,
        images_nbytes=header.images_nbytes,
        state_nbytes=header.state_nbytes,
        stored_nbytes=header.stored_nbytes,
    )
