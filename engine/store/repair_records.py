"""What is written in the place of a decision that is damaged or missing, where no other place has it.

A record is made up only where it can change nothing that counts: below a decision that does, or hiding what the damaged
one hid already.
"""

from __future__ import annotations

from dataclasses import replace

from everstep.backends.api import Backend
from everstep.backends.errors import NotFound
from everstep.errors import Damaged, EverstepError, UnknownFormat
from everstep.format import names
from everstep.format.gather import decode_gather
from everstep.format.layout import proved
from everstep.format.manifest import Abort, Manifest, Quarantine, Tombstone, decode_decision

from .asking import reading
from .catalog import StepNames, list_step, read_numbered, voted_ranks
from .mirror import read_small
from .runs import now
from .shelf import Shelf

GONE = "nothing else of it is left, and nothing needs it: what a removal left behind"
HIDDEN = "its last decision was damaged"


async def counting_below(place: Backend, found: StepNames) -> tuple[int, Manifest] | None:
    """The manifest that counts, or that the checkpoint's quarantine lies above, with its number; None where there is
    none, or it cannot be read."""
    try:
        numbered = await read_numbered(place, found)
        while numbered is not None and isinstance(numbered[1], Quarantine):
            top = numbered[0]
            found = replace(found, decisions=tuple([number for number in found.decisions if number < top]))
            numbered = await read_numbered(place, found)
    except (Damaged, UnknownFormat):
        return None
    if numbered is None or not isinstance(numbered[1], Manifest):
        return None
    return numbered[0], numbered[1]


async def is_damaged(place: Backend, name: str) -> bool:
    """Whether the decision or layout is there and is not one, nor one that a newer release wrote. Gathered votes were
    found damaged, or others than the manifest's: only those of a newer release are not."""
    parsed = names.parse(name)
    assert parsed is not None
    try:
        data = await read_small(place, name)
        if parsed.kind is names.Kind.DECISION:
            decode_decision(data, name)
        elif parsed.kind is names.Kind.LAYOUT:
            proved(data, str(parsed.hash), name)
        else:
            decode_gather(data, name)
            return True  # right in itself, and of other votes than the manifest's
    except Damaged:
        return True
    except (NotFound, EverstepError):
        return False
    return False


async def passed_record(place: Backend, name: str) -> Manifest | Abort | None:
    """What may stand at ``name``, below a manifest that counts: that manifest itself, where it is of that attempt and
    was published anew since, else that the attempt was given up. None where nothing may."""
    parsed = names.parse(name)
    assert parsed is not None
    assert parsed.step is not None
    assert parsed.incarnation is not None
    assert parsed.attempt is not None
    found = await list_step(place, parsed.step, parsed.incarnation)
    if parsed.attempt in found.decisions and not await is_damaged(place, name):
        return None
    counting = await counting_below(place, found)
    if counting is None or parsed.attempt >= counting[0]:
        return None
    if counting[1].attempt == parsed.attempt:
        return replace(counting[1], revision=None)
    return Abort(
        parsed.step, parsed.incarnation, parsed.attempt, "its record was lost; a later decision counts"
    )


async def hiding_record(place: Backend, name: str) -> Tombstone | Quarantine | None:
    """What may stand at ``name``, where a damaged decision is the last: a tombstone, if nothing else of the checkpoint
    is left, and nothing needs it; a quarantine, if the manifest below has all its votes: what the last one was cannot
    be told, and once what it hides is proved, it may count again. None where nothing may."""
    parsed = names.parse(name)
    assert parsed is not None
    assert parsed.step is not None
    assert parsed.incarnation is not None
    assert parsed.attempt is not None
    found = await list_step(place, parsed.step, parsed.incarnation)
    if parsed.attempt != max(found.decisions, default=0):
        return None
    if not await _has_objects(place, found):
        if await _is_needed(place, found):
            return None
        return Tombstone(*found.place, parsed.attempt, GONE, now())
    if parsed.attempt in found.attempts:
        return None
    below = tuple([number for number in found.decisions if number < parsed.attempt])
    counting = await counting_below(place, replace(found, decisions=below))
    if counting is None:
        return None
    manifest = counting[1]
    if await voted_ranks(place, *found.place, manifest.attempt) != [record.rank for record in manifest.ranks]:
        return None
    return Quarantine(*found.place, parsed.attempt, HIDDEN, now())


async def _has_objects(place: Backend, found: StepNames) -> bool:
    for attempt in found.attempts:
        directory = names.attempt_dir(*found.place, attempt)
        with reading(place, directory):
            async for _ in place.list(directory):
                return True
    return False


async def _is_needed(place: Backend, found: StepNames) -> bool:
    """Whether a pin or a delta names the checkpoint; also where that cannot be told."""
    try:
        look = await Shelf().look(place)
    except (Damaged, UnknownFormat):
        return True
    bases = {facts.parent for facts in look.facts.values()} | {base for base, _ in look.leaning}
    return found.key in bases or found.key in look.pinned
