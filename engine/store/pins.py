"""Pins: records in the run that say of a checkpoint that it is not to be removed.

Announce, then look, as for incarnations that adopt: a pin is published first, then the checkpoint is read again;
whoever removes a checkpoint publishes the tombstone first, then looks for pins. One of the two always sees the other.
A pin for a stated time ends by the clock of whoever looks, a margin later than it says.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone

from everstep.backends.api import Backend
from everstep.backends.errors import NotFound
from everstep.backends.points import reach
from everstep.errors import BadOption, Damaged, EverstepError, NoCheckpoint, UnknownFormat
from everstep.format import names
from everstep.format.constants import TIME_FORMAT
from everstep.format.manifest import Manifest
from everstep.format.pin import PIN_BYTES_MAX, Pin, decode_pin, encode_pin
from everstep.plan.lineage import Lineage
from everstep.plan.retention import seconds_of

from .asking import each, reading, writing
from .catalog import list_step, read_decision, require_standing
from .runs import now, read_incarnations

PIN_MARGIN_S = 300.0
"""How much longer than it says a pin holds: the clocks of two machines differ."""

PIN_FOR_S_MAX = 100 * 365 * 86400.0
"""What is to stay for longer is pinned without a time."""

_TOKEN_BYTES = 4

Key = tuple[int, int]
"""(incarnation, step)"""


@dataclass(frozen=True, slots=True)
class Held:
    """One pin that lies in a run. ``pin`` is None where it cannot be read, and ``error`` says why: it holds what its
    name says."""

    id: str
    key: Key
    pin: Pin | None
    error: EverstepError | None = None

    def expired(self, at_s: float) -> bool:
        """Whether it holds no more, ``at_s`` seconds after the epoch."""
        if self.pin is None or self.pin.expires is None:
            return False
        until = seconds_of(self.pin.expires)
        return until is not None and until + PIN_MARGIN_S <= at_s

    @property
    def why(self) -> str:
        """For people: until when, and the reason."""
        if self.pin is None:
            return f"{names.pin(self.id)} cannot be read"
        said = [self.pin.reason, f"until {self.pin.expires}" if self.pin.expires is not None else ""]
        return ", ".join(one for one in said if one)


async def list_pins(backend: Backend, known: dict[str, Held] | None = None) -> list[Held]:
    """All pins, expired ones too, by their ids. Those in ``known`` are not read again, and what is read is added there:
    pins never change. Raises CannotTell."""
    with reading(backend, names.PINS):
        children = await backend.list_names(names.PINS)
    ours = sorted(child for child in children if names.parse(f"{names.PINS}/{child}") is not None)
    cache = {} if known is None else known

    async def one(child: str) -> Held | None:
        pin_id = child.removesuffix(".json")
        if pin_id not in cache:
            held = await _read(backend, pin_id)
            if held is None or held.pin is None:  # what is damaged may be mended
                return held
            cache[pin_id] = held
        return cache[pin_id]

    return [held for held in await each(ours, one) if held is not None]


async def _read(backend: Backend, pin_id: str) -> Held | None:
    name = names.pin(pin_id)
    parsed = names.parse(name)
    assert parsed is not None, name
    assert parsed.incarnation is not None, name
    assert parsed.step is not None, name
    key = parsed.incarnation, parsed.step
    try:
        with reading(backend, name):
            return Held(pin_id, key, decode_pin(await backend.read(name, PIN_BYTES_MAX), name))
    except NotFound:
        return None
    except (Damaged, UnknownFormat) as error:
        return Held(pin_id, key, None, error)


def holding(pins: Iterable[Held], at_s: float) -> dict[Key, str]:
    """The checkpoints that are pinned at that time, with why."""
    found: dict[Key, list[str]] = {}
    for held in pins:
        if not held.expired(at_s):
            found.setdefault(held.key, []).append(held.why)
    return {key: "; ".join(dict.fromkeys(filter(None, whys))) for key, whys in found.items()}


async def add_pin(
    backend: Backend,
    key: Key,
    *,
    for_s: float | None = None,
    reason: str = "",
    who: str = "",
    clock: Callable[[], float] = time.time,
) -> Pin:
    """Pin the checkpoint, for ``for_s`` seconds or until the pin is removed.

    Raises Pruned (removed meanwhile, or never there; the pin is gone again then), BadOption, Damaged, CannotTell,
    SaveFailed, StorageFull.
    """
    expires = None
    if for_s is not None:
        if isinstance(for_s, bool) or not isinstance(for_s, (int, float)) or not 0 < for_s <= PIN_FOR_S_MAX:
            raise BadOption(
                "a pin cannot last for that time",
                found=repr(for_s),
                expected=f"above 0, at most {PIN_FOR_S_MAX:.0f} s",
            )
        expires = datetime.fromtimestamp(clock() + for_s, timezone.utc).strftime(TIME_FORMAT)
    incarnation, step = key
    pin_id = names.pin_id(step, incarnation, secrets.token_hex(_TOKEN_BYTES))
    pin = Pin(pin_id, step, incarnation, reason, who, now(), expires)
    with writing(backend, names.pin(pin_id)):
        await backend.create(names.pin(pin_id), encode_pin(pin))
    reach("pin.published", pin_id)
    try:
        await require_standing(backend, step, incarnation)
    except EverstepError:
        with suppress(EverstepError):
            await remove_pins(backend, [pin_id])
        raise
    return pin


async def find_step(backend: Backend, step: int, incarnation: int | None = None) -> Key:
    """The checkpoint at ``step``: of ``incarnation``, or the one that a load of that step would take. Raises
    NoCheckpoint, CannotTell, Damaged (the incarnations' records)."""
    lineage = Lineage(await read_incarnations(backend))
    with reading(backend, names.step_dir(step)):
        children = await backend.list_names(names.step_dir(step))
    there = sorted(number for child in children if (number := names.parse_incarnation(child)) is not None)
    asked = [number for number in there if incarnation in (None, number)]
    for number in reversed(asked):
        if incarnation is None and not lineage.counts(number, step):
            continue
        decision = await read_decision(backend, await list_step(backend, step, number))
        if isinstance(decision, Manifest):
            return number, step
    raise NoCheckpoint(
        f"{backend.url} has no checkpoint at step {step}"
        + (f" of incarnation {incarnation}" if incarnation else ""),
        found=f"directories of incarnations {there}" if there else "nothing",
        expected="a committed checkpoint" + ("" if incarnation else " of the run's lineage"),
        hint="See everstep ls; one that was given up is named with its incarnation, too",
        step=step,
    )


async def remove_pins(backend: Backend, pin_ids: Iterable[str]) -> None:
    """Remove pins by their ids; those that are not there are no error. Raises SaveFailed."""
    with writing(backend, names.PINS):
        await backend.delete([names.pin(pin_id) for pin_id in pin_ids])
