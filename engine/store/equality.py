"""Proofs that ranks hold equal bytes: hashes of single entries in the votes, and what their comparison says.

A snapshot's ``meta`` region may hold ``hashes``: what the trainer hashed itself, and what it asks the agent to hash
from the slot. It is answered in the vote's ``entry_hashes`` and left out of the vote's ``meta``. ``audit`` stays in
it: the number of the audit, and what is to happen where replicas differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from everstep.backends.api import Backend
from everstep.errors import Damaged
from everstep.format.columns import pack, unpack
from everstep.format.constants import HASH_DIGITS
from everstep.format.hashing import hexdigest
from everstep.format.layout import Layout, decode
from everstep.format.vote import Vote
from everstep.plan import agreement
from everstep.plan.agreement import Disagreement, name_of

from .catalog import read_layouts

if TYPE_CHECKING:
    from everstep.memory.slots import Pinned

HASHES = "hashes"
AUDIT = "audit"
"""Keys of a snapshot's meta."""
LAYOUTS_MAX = 16
"""Layouts remembered: those of a node's ranks."""


def asked(
    *, stored: Sequence[int], live: Sequence[int], digests: Sequence[bytes], equal: bool
) -> dict[str, Any]:
    """A snapshot's ``meta["hashes"]``. ``stored``: entries (positions in the layout) that the agent is to hash, of
    which the slot holds what is stored or a second copy; ``live``: entries that do not lie in it, with the ``digests``
    of what this rank holds; ``equal``: the rank's own tensors are to be hashed, too."""
    joined = b"".join(digests).hex()
    return {"stored": pack(stored).hex(), "live": list(live), "digests": joined, "equal": equal}


@lru_cache(maxsize=LAYOUTS_MAX)
def _decoded(encoded: bytes) -> Layout:
    return decode(encoded)


def entry_hashes(pinned: Pinned, encoded: bytes, meta: dict[str, Any], world: int) -> dict[str, str] | None:
    """The hashes that ``meta`` has or asks for, by the entries' names; None where there is nothing to say. Reads the
    entries' bytes in the slot, so it belongs into a thread. Raises Damaged for a request that cannot be."""
    asked = meta.get(HASHES)
    if not asked:
        return None
    layout = _decoded(encoded)
    entries = layout.entries
    regions = [f"image:{image.name}" for image in layout.images]
    regions += [f"copy:{image.name}" for image in layout.copies]
    places = {place.entry: place for place in layout.places()}
    stored = _unpacked(asked["stored"])
    wanted = _checked([*stored, *asked["live"]], len(entries))
    live = wanted[len(stored) :]
    if asked["equal"]:
        stored += agreement.own_entries(entries, world)
    found: dict[str, str] = {}
    for index in stored:
        entry, place = entries[index], places.get(index)
        if place is None:
            raise _nonsense(f"entry {index} does not lie here")
        view = pinned.view(regions[place.image])
        found[name_of(entry)] = hexdigest(view[place.offset : place.offset + entry.nbytes])
    digests = str(asked["digests"])
    if len(digests) != len(asked["live"]) * HASH_DIGITS:
        raise _nonsense("digests and entries are not equally many")
    for number, index in enumerate(live):
        found[name_of(entries[index])] = digests[number * HASH_DIGITS : (number + 1) * HASH_DIGITS]
    return found or None


def _unpacked(column: object) -> list[int]:
    try:
        return unpack(bytes.fromhex(str(column)))
    except ValueError as problem:
        raise _nonsense(str(problem)) from None


def _checked(indices: Iterable[Any], count: int) -> list[int]:
    found = list(indices)
    if not all(isinstance(index, int) and 0 <= index < count for index in found):
        raise _nonsense(f"an entry outside the {count} of the layout")
    return found


def _nonsense(found: str) -> Damaged:
    name = "a snapshot's meta"
    return Damaged(f"{name}: it asks for hashes that cannot be", found=found, name=name)


async def equality_facts(
    backend: Backend, votes: Sequence[Vote]
) -> tuple[dict[str, Any], tuple[int | None, str] | None]:
    """What the votes' entry hashes prove, as a manifest's facts; and the objection (rank at fault where one is
    known, reason) where replicas differ and the ranks' policy refuses that. Reads layouts only where there is
    something to say."""
    hashes = {vote.rank: vote.entry_hashes for vote in votes if vote.entry_hashes}
    if not hashes:
        return {}, None
    facts: dict[str, Any] = {}
    first = next((vote for vote in votes if vote.rank == 0), None)
    if first is not None and agreement.all_tell_own(hashes, first.world):
        layout = (await read_layouts(backend, {first.layout_hash}))[first.layout_hash]
        parts = agreement.equal_parts(hashes, first.world, layout.entries)
        if parts:
            facts["equal"] = agreement.equality_facts(parts, first.world)
    found = agreement.disagreements(hashes)
    audit = _audit(votes, hashes)
    if audit is not None:
        facts["audit"] = audit
    if not found:
        return facts, None
    found = await _with_owners(backend, votes, found)
    facts["disagreements"] = agreement.disagreement_facts(found)
    if not any(_policy(vote) == "refuse" for vote in votes):
        return facts, None
    odd = found[0].odd
    return facts, (odd[0] if odd else None, agreement.REFUSED + agreement.disagreements_text(found))


def _policy(vote: Vote) -> object:
    about = vote.meta.get(AUDIT)
    return about.get("on_disagreement") if isinstance(about, dict) else None


def _audit(votes: Sequence[Vote], hashes: agreement.Hashes) -> dict[str, Any] | None:
    """How many replicated entries were compared; and the ranks' counts where they are apart, which makes them look
    at different entries (a rank whose snapshot failed has counted otherwise)."""
    numbers = [vote.meta[AUDIT].get("number") for vote in votes if isinstance(vote.meta.get(AUDIT), dict)]
    if not numbers:
        return None
    found: dict[str, Any] = {"number": numbers[0], "entries": agreement.audited(hashes)}
    if len(set(numbers)) > 1:
        found["apart"] = sorted(set(numbers), key=str)[: agreement.NAMED_MAX]
    return found


async def _with_owners(
    backend: Backend, votes: Sequence[Vote], found: Sequence[Disagreement]
) -> list[Disagreement]:
    """``found`` with the rank whose bytes the checkpoint holds. Layouts are read one after another: of a large job
    they do not fit into memory together."""
    wanted = {(one.part, one.key) for one in found}
    owner: dict[tuple[str, str], int] = {}
    concerned = {rank for one in found for group in one.groups for rank in group}
    for vote in votes:
        if vote.rank not in concerned or len(owner) == len(wanted):
            continue
        layout = (await read_layouts(backend, {vote.layout_hash}))[vote.layout_hash]
        for entry in layout.entries:
            if entry.image is not None and (name := agreement.split_name(name_of(entry))) in wanted:
                owner.setdefault(name, vote.rank)
    return [replace(one, stored=owner.get((one.part, one.key))) for one in found]
