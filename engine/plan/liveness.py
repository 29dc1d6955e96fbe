"""From signs of life to verdicts. Pure: whoever looks gathers the signs, and says how.

One sign alone is never enough: a process may be busy, a network may stall, a clock may be wrong. A rank is suspected
only when it has missed several beats *and* something else speaks against it too.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class State(enum.Enum):
    """ALIVE: gives signs of life. LATE: one sign is missing. SUSPECT: beats are missed, and a second sign agrees.
    UNKNOWN: nothing is known of it."""

    ALIVE = "alive"
    LATE = "late"
    SUSPECT = "suspect"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Signs:
    """What is known of one rank; None: not known.

    ``beat_age_s`` is how old its last beat is at least, by the clock of its own node and the time for which the one
    who looks has seen nothing new. ``process`` is whether its process runs, ``beacon`` whether its node's beacon goes
    on between two looks, ``storage`` whether the shared tier answers its node.
    """

    beat_age_s: float | None = None
    process: bool | None = None
    beacon: bool | None = None
    storage: bool | None = None


def judge(signs: Signs, timeout_s: float) -> tuple[State, str]:
    """The verdict on a rank, and why: "" where all is well."""
    age = signs.beat_age_s
    missed = age is not None and age >= timeout_s
    against = []
    if signs.process is False:
        against.append("its process is gone")
    if signs.beacon is False:
        against.append("its node's beacon stands still")
    if missed and signs.storage is False:
        against.append("its node cannot reach the shared tier")
    if missed and against:
        return State.SUSPECT, f"no beat for {age:.0f} s, and {' and '.join(against)}"
    if missed:
        return State.LATE, f"no beat for {age:.0f} s"
    if against:
        return State.LATE, " and ".join(against)
    if age is None and not signs.process:
        return State.UNKNOWN, "no sign of it"
    return State.ALIVE, ""


class Health(enum.Enum):
    """Of a whole run. YOUNG is said by whoever knows when it began."""

    HEALTHY = "healthy"
    NOTHING = "nothing is running"
    SUSPECT = "a rank is suspect"
    CANNOT_TELL = "cannot tell"
    YOUNG = "just begun"


def health(states: Mapping[int, tuple[State, Signs]], world: int | None) -> Health:
    """Of the ranks that something is known of. NOTHING where no rank may be alive: each is suspect, or its process is
    seen to be gone. ``world`` None: how many there should be is not known."""
    if not any(_may_live(state, signs) for state, signs in states.values()):
        return Health.NOTHING
    if any(state is State.SUSPECT for state, _ in states.values()):
        return Health.SUSPECT
    missing = world is None or any(rank not in states for rank in range(world))
    if missing or any(state is State.UNKNOWN for state, _ in states.values()):
        return Health.CANNOT_TELL
    return Health.HEALTHY


def _may_live(state: State, signs: Signs) -> bool:
    return state is not State.SUSPECT and signs.process is not False


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a beacon: whose it is (its agent's process), and its count. None for both: it is not there."""

    agent: tuple[int, int, str] | None
    count: int


STEPS_TO_PROVE = 2
"""A beacon may have been on its way when its ranks died. One that is two counts further was made after the one before
it had arrived, and so after the first look."""


def goes_on(looks: Sequence[Look]) -> bool:
    """Whether the looks, in their order, prove that the beacon was made anew after the first of them."""
    first: Look | None = None
    for look in looks:
        if look.agent is None:
            first = None
        elif first is None or look.agent != first.agent:
            first = look  # another agent counts anew
        elif look.count >= first.count + STEPS_TO_PROVE:
            return True
    return False
