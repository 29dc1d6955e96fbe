"""From signs to verdicts: one sign alone is never enough."""

from __future__ import annotations

import itertools

import pytest
from everstep.plan.liveness import Health, Look, Signs, State, goes_on, health, judge

TIMEOUT_S = 20.0
FRESH, OLD = 1.0, 20.0


@pytest.mark.parametrize(
    ("signs", "state", "why"),
    [
        (Signs(FRESH, True), State.ALIVE, ""),
        (Signs(FRESH, True, None, False), State.ALIVE, ""),
        (Signs(FRESH, None, True), State.ALIVE, ""),
        (Signs(19.9, True, True, True), State.ALIVE, ""),
        (Signs(None, True), State.ALIVE, ""),
        (Signs(OLD, True), State.LATE, "no beat for 20 s"),
        (Signs(1e6, True, True, True), State.LATE, "no beat for 1000000 s"),
        (Signs(OLD), State.LATE, "no beat for 20 s"),
        (Signs(FRESH, False), State.LATE, "its process is gone"),
        (Signs(FRESH, None, False), State.LATE, "its node's beacon stands still"),
        (Signs(None, False), State.LATE, "its process is gone"),
        (Signs(OLD, False), State.SUSPECT, "no beat for 20 s, and its process is gone"),
        (Signs(OLD, None, False), State.SUSPECT, "no beat for 20 s, and its node's beacon stands still"),
        (Signs(OLD, True, None, False), State.SUSPECT, "cannot reach the shared tier"),
        (Signs(OLD, False, False), State.SUSPECT, "its process is gone and its node's beacon stands still"),
        (Signs(), State.UNKNOWN, "no sign of it"),
    ],
)
def test_verdicts(signs: Signs, state: State, why: str) -> None:
    found, text = judge(signs, TIMEOUT_S)
    assert found is state and why in text and bool(text) == bool(why)


def test_nobody_is_suspected_for_one_sign() -> None:
    for age, process, beacon, storage in itertools.product(
        (None, FRESH, OLD), (None, True, False), (None, True, False), (None, True, False)
    ):
        signs = Signs(age, process, beacon, storage)
        against = [age == OLD, process is False, beacon is False, storage is False]
        if judge(signs, TIMEOUT_S)[0] is State.SUSPECT:
            assert against[0] and sum(against) >= 2, signs


ALIVE = State.ALIVE, Signs(FRESH, True)
LATE = State.LATE, Signs(OLD, True)
GONE = State.LATE, Signs(FRESH, False)
SUSPECT = State.SUSPECT, Signs(OLD, False)
UNKNOWN = State.UNKNOWN, Signs()


@pytest.mark.parametrize(
    ("ranks", "world", "verdict"),
    [
        ([], None, Health.NOTHING),
        ([], 4, Health.NOTHING),
        ([ALIVE, ALIVE], 2, Health.HEALTHY),
        ([ALIVE, LATE], 2, Health.HEALTHY),
        ([ALIVE, GONE], 2, Health.HEALTHY),
        ([ALIVE, SUSPECT], 2, Health.SUSPECT),
        ([ALIVE, SUSPECT], 9, Health.SUSPECT),
        ([GONE, GONE], 2, Health.NOTHING),
        ([SUSPECT, GONE], 2, Health.NOTHING),
        ([SUSPECT, SUSPECT], 4, Health.NOTHING),
        ([ALIVE, ALIVE], 3, Health.CANNOT_TELL),
        ([ALIVE], None, Health.CANNOT_TELL),
        ([ALIVE, UNKNOWN], 2, Health.CANNOT_TELL),
        ([UNKNOWN, UNKNOWN], 2, Health.CANNOT_TELL),
    ],
)
def test_of_a_run(ranks: list[tuple[State, Signs]], world: int | None, verdict: Health) -> None:
    assert health(dict(enumerate(ranks)), world) is verdict


A, B = (1, 10, "boot"), (2, 20, "boot")
NONE = Look(None, 0)


@pytest.mark.parametrize(
    ("looks", "proved"),
    [
        ([], False),
        ([Look(A, 5)], False),
        ([Look(A, 5), Look(A, 5), Look(A, 6)], False),
        ([Look(A, 5), Look(A, 7)], True),
        ([Look(A, 5), Look(A, 6), Look(A, 7)], True),
        ([Look(A, 5), Look(B, 9)], False),
        ([Look(A, 5), Look(B, 1), Look(B, 3)], True),
        ([Look(A, 5), NONE, Look(A, 7)], False),
        ([NONE, Look(A, 5), Look(A, 7)], True),
    ],
)
def test_a_beacon_goes_on(looks: list[Look], proved: bool) -> None:
    assert goes_on(looks) is proved
