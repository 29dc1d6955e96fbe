"""Removing pins that hold nothing, and never will again."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from everstep.backends.api import Backend
from everstep.backends.points import reach
from everstep.errors import Damaged, RunError, UnknownFormat
from everstep.format import names
from everstep.format.manifest import Manifest, Tombstone

from .catalog import list_step, read_decision, read_numbered, voted_ranks
from .findings import Finding, Kind
from .pins import Held, list_pins, remove_pins
from .repair import Repair
from .runs import incarnation_numbers


async def drop_pins(place: Backend, findings: Collection[Finding], others: Sequence[Backend]) -> list[Repair]:
    """Remove the pins of ``findings`` whose checkpoint is removed, and that have expired, or whose checkpoint cannot
    come back: nothing of it is left here that could count, nor at ``others``. What is damaged, set aside or not
    decided may be mended: its pins stay, as do those of a newer format. When a pin that cannot be read expires is not
    known. Raises CannotTell, SaveFailed."""
    told = {finding.name for finding in findings if finding.kind is Kind.PIN}
    dropped = []
    for held in await list_pins(place) if told else ():
        name, newer = names.pin(held.id), isinstance(held.error, UnknownFormat)
        why = await _why(place, held, others) if name in told and not newer else ""
        if why:
            reach("repair.pin.before", name)
            await remove_pins(place, [held.id])
            dropped.append(Repair(name, held.key[1], held.key[0], f"removed: {why}"))
    return dropped


async def _why(place: Backend, held: Held, others: Sequence[Backend]) -> str:
    """Why the pin may go; "" if it may not."""
    incarnation, step = held.key
    what = f"step {step} of incarnation {incarnation}"
    found = await list_step(place, step, incarnation)
    try:
        numbered = await read_numbered(place, found) if found.decisions else None
    except Damaged:
        return ""
    tombstone = numbered is not None and isinstance(numbered[1], Tombstone)
    if (found.decisions or found.attempts) and not tombstone:
        return ""
    if held.expired(time.time()):
        return f"it had expired, and {what} was removed"
    for attempt in found.attempts:
        if await voted_ranks(place, step, incarnation, attempt):
            return ""  # rotation takes a tombstone back where a pin stands
    if not tombstone and incarnation >= max(await incarnation_numbers(place), default=0):
        return ""  # its writer may be at work
    if await _stands(others, held.key):
        return ""
    return f"{what}, which it pinned, was removed, and cannot come back"


async def _stands(places: Sequence[Backend], key: tuple[int, int]) -> bool:
    """Whether the checkpoint counts at one of these; or may, where that cannot be told."""
    for place in places:
        try:
            decision = await read_decision(place, await list_step(place, key[1], key[0]))
        except RunError:
            return True
        if isinstance(decision, Manifest):
            return True
    return False
