"""The schedule: who decides what, ahead of time."""

from __future__ import annotations

import random
from typing import Any

import pytest
from everstep.errors import BadOption
from everstep.plan.schedule import ON_SLOW, Decision, Every, Schedule, merge, parse_every
from hypothesis import given
from hypothesis import strategies as st


def run(
    schedule: Schedule, steps: int, seconds: float = 1.0, unfinished: int = 0, room: int = 1
) -> list[Decision]:
    """All decisions of ``steps`` steps of a trainer that starts at step 1."""
    found = []
    for step in range(1, steps + 1):
        found += schedule.extend(step + schedule.lookahead, step * seconds, unfinished, room)
    return found


def flushed(decisions: list[Decision]) -> list[int]:
    return [decision.step for decision in decisions if decision.flush]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (1, Every(steps=1)),
        (500, Every(steps=500)),
        ("30m", Every(seconds=1800.0)),
        ("90s", Every(seconds=90.0)),
        ("2h", Every(seconds=7200.0)),
        ("1.5 h", Every(seconds=5400.0)),
        (" 250ms ", Every(seconds=0.25)),
        ("1d", Every(seconds=86400.0)),
        (Every(steps=3), Every(steps=3)),
    ],
)
def test_intervals_are_read(value: Any, expected: Every | None) -> None:
    assert parse_every(value, "full_every") == expected


@pytest.mark.parametrize(
    "value", [0, -1, True, 1.5, "", "30", "0s", "m", "-5m", "5 minutes", "1e3s", b"5s", []]
)
def test_bad_intervals_name_the_option(value: Any) -> None:
    with pytest.raises(BadOption, match="full_every") as caught:
        Schedule(1, value, 0)
    assert "30m" in str(caught.value)


def test_other_bad_options() -> None:
    with pytest.raises(BadOption, match="on_slow"):
        Schedule(1, 1, 0, "panic")  # type: ignore[arg-type]
    for lookahead in (-1, True, 1.0):
        with pytest.raises(BadOption, match="lookahead"):
            Schedule(1, 1, lookahead)  # type: ignore[arg-type]


def test_every_step_is_decided_once_and_ahead() -> None:
    schedule = Schedule(1, 5, 3)
    assert schedule.decided is None
    first = schedule.extend(4, 0.0, 0, 1)
    assert [decision.step for decision in first] == [1, 2, 3, 4]
    assert schedule.extend(4, 0.0, 0, 1) == [] and schedule.extend(2, 0.0, 0, 1) == []
    assert schedule.decided == 4
    assert [decision.step for decision in schedule.extend(5, 0.0, 0, 1)] == [5]


def test_the_first_step_is_snapshotted_and_flushed() -> None:
    for start in (1, 7, 12001):
        (first,) = Schedule(100, "30m", 0).extend(start, 5.0, 0, 1)
        assert first == Decision(start, True, True)


def test_step_intervals_are_multiples_of_the_step() -> None:
    decisions = run(Schedule(5, 10, 2), 25)
    assert [d.step for d in decisions if d.snapshot] == [1, 5, 10, 15, 20, 25]
    assert flushed(decisions) == [1, 10, 20]


def test_time_intervals() -> None:
    decisions = run(Schedule(1, "10s", 0), 35)
    assert flushed(decisions) == [1, 11, 21, 31]
    assert all(decision.snapshot for decision in decisions)


def test_never() -> None:
    assert all(not (d.snapshot or d.flush) for d in run(Schedule(None, None, 1), 20))
    only_full = run(Schedule(None, 10, 0), 20)
    assert [d.step for d in only_full if d.snapshot] == flushed(only_full) == [1, 10, 20]


def test_steps_that_are_passed_over_lose_nothing() -> None:
    schedule = Schedule(1, 10, 1)
    schedule.extend(2, 0.0, 0, 1)
    decisions = schedule.extend(10**9 + 5, 0.0, 0, 1)  # the trainer jumps
    assert [d.step for d in decisions] == [10**9 + 4, 10**9 + 5]
    assert flushed(decisions) == [10**9 + 4]
    passed = [Decision(3, True, False), Decision(4, True, True, wait=True), Decision(5, False, False)]
    assert merge(passed) == Decision(5, True, True, wait=True)
    assert merge([]) is None


def test_wait() -> None:
    decisions = run(Schedule(1, 5, 0, "wait"), 10, unfinished=1, room=1)
    assert [(d.step, d.wait) for d in decisions if d.flush] == [(1, True), (5, True), (10, True)]


def test_skip() -> None:
    schedule = Schedule(5, 5, 0, "skip")
    decisions = run(schedule, 14, unfinished=1, room=1)
    assert flushed(decisions) == [] and [d.step for d in decisions if d.snapshot] == [1, 5, 10]
    assert flushed(schedule.extend(15, 15.0, 0, 1)) == [15]


def test_supersede_is_not_repeated_before_a_flush_has_finished() -> None:
    schedule = Schedule(1, 1, 0, "supersede")
    unfinished = [0, 1, 1, 1, 0, 1, 1]
    decisions = [schedule.extend(s, 0.0, u, 1)[0] for s, u in enumerate(unfinished, 1)]
    assert [(d.flush, d.supersede) for d in decisions] == [
        (True, False),
        (True, True),
        (False, False),
        (False, False),
        (True, False),
        (True, True),
        (False, False),
    ]


def test_flushes_decided_in_one_call_count_as_unfinished() -> None:
    decisions = Schedule(1, 1, 4, "skip").extend(5, 0.0, 0, 2)
    assert flushed(decisions) == [1, 2]


@given(st.randoms(use_true_random=False), st.sampled_from(ON_SLOW), st.integers(0, 3), st.integers(1, 3))
def test_rules_that_always_hold(rng: random.Random, on_slow: Any, lookahead: int, room: int) -> None:
    """A simulated agent finishes flushes when it likes; superseded ones are given up."""
    schedule = Schedule(rng.choice([None, 1, 3, "2s"]), rng.choice([1, 2, "3s"]), lookahead, on_slow)
    unfinished, finished_since, now, step = 0, True, 0.0, 0
    last = 0
    for _ in range(60):
        step += rng.choice([1, 1, 1, 2])
        now += rng.random() * 3
        if unfinished and rng.random() < 0.3:
            unfinished -= 1
            finished_since = True
        decisions = schedule.extend(step + lookahead, now, unfinished, room)
        assert len(decisions) <= lookahead + 1
        for decision in decisions:
            assert decision.step > last
            last = decision.step
            assert decision.snapshot or not decision.flush
            assert not (decision.wait or decision.supersede) or decision.flush
            if decision.supersede:
                assert on_slow == "supersede" and finished_since
                finished_since = False
            elif decision.flush:
                assert decision.wait or unfinished < room
                unfinished = min(unfinished, room - 1) + 1  # waiting ends with room for it
        assert schedule.decided == step + lookahead
