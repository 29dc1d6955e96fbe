"""Retention: what stays, what goes, and why."""

from __future__ import annotations

import random

import pytest
from everstep.errors import BadOption
from everstep.plan.lineage import Lineage
from everstep.plan.retention import Key, Retention, plan_retention
from hypothesis import given
from hypothesis import strategies as st

from .test_plan_lineage import record

ONE = Lineage([record(1)])


def steps(*numbers: int, incarnation: int = 1) -> list[Key]:
    return [(incarnation, step) for step in numbers]


def test_the_last_ones_and_every_hundredth_stay() -> None:
    plan = plan_retention(steps(400, 90, 100, 250, 300, 310, 410), Retention(2, 100), ONE)
    assert plan.keep == (
        ((1, 100), "every 100"),
        ((1, 300), "every 100"),
        ((1, 400), "last 2"),
        ((1, 410), "newest"),
    )
    assert plan.remove == tuple(steps(90, 250, 310))


def test_numbers_are_numbers() -> None:
    plan = plan_retention(steps(10, 9, 100, 99, 10**12, 10000, 9900), Retention(2), ONE)
    assert plan.remove == tuple(steps(9, 10, 99, 100, 9900))


def test_the_only_one_stays() -> None:
    assert plan_retention(steps(5), Retention(1), ONE).remove == ()
    assert plan_retention([], Retention(1), ONE).keep == ()


def test_protected_ones_stay() -> None:
    plan = plan_retention(steps(1, 2, 3), Retention(1), ONE, {(1, 1)})
    assert plan.remove == ((1, 2),) and plan.keep[0] == ((1, 1), "protected")


def test_what_was_given_up_stays_until_the_run_has_passed_it() -> None:
    lineage = Lineage([record(1), record(2, (1, 10))])
    old = steps(5, 10, 20, 30)
    beside = {(1, 20), (1, 30)}
    early = plan_retention([*old, (2, 11)], Retention(2), lineage)
    assert set(early.remove) == {(1, 5)}
    later = plan_retention([*old, (2, 24), (2, 26)], Retention(2), lineage)
    assert set(later.remove) == {(1, 5), (1, 10), (1, 20)}
    past = plan_retention([*old, (2, 31), (2, 32)], Retention(2), lineage)
    assert set(past.remove) >= beside


def test_a_fresh_start_removes_nothing_of_the_old_run_at_first() -> None:
    lineage = Lineage([record(1), record(2, fresh="why")])
    old = steps(100, 200)
    assert plan_retention(old, Retention(1), lineage).remove == ()
    assert plan_retention([*old, (2, 1)], Retention(2), lineage).remove == ()
    assert plan_retention([*old, (2, 1), (2, 2)], Retention(2), lineage).remove == ()
    assert plan_retention([*old, (2, 250)], Retention(2), lineage).remove == ()
    assert plan_retention([*old, (2, 250)], Retention(1), lineage).remove == tuple(old)


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "3", None])
def test_options_are_checked(bad: object) -> None:
    with pytest.raises(BadOption, match="keep_last"):
        Retention(bad)  # type: ignore[arg-type]
    if bad is not None:
        with pytest.raises(BadOption, match="keep_every"):
            Retention(1, bad)  # type: ignore[arg-type]


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.none() | st.integers(1, 5))
def test_rules_that_always_hold(rng: random.Random, last: int, every: int | None) -> None:
    lineage = Lineage([record(1), record(2, (1, 12)), record(3, (1, 6) if rng.random() < 0.5 else (2, 15))])
    keys = {(rng.randint(1, 3), rng.randint(1, 25)) for _ in range(rng.randint(0, 20))}
    protected = {key for key in keys if rng.random() < 0.1}
    plan = plan_retention(list(keys), Retention(last, every), lineage, protected)
    kept = {key for key, _ in plan.keep}
    assert kept | set(plan.remove) == keys and not kept & set(plan.remove)
    counted = sorted((step, inc) for inc, step in keys if lineage.counts(inc, step))
    newest = {(inc, step) for step, inc in counted[-last:]}
    assert newest <= kept and protected <= kept
    if len(counted) < last:
        assert not plan.remove
    for inc, step in plan.remove:
        if lineage.counts(inc, step):
            assert not (every and step % every == 0)
        else:
            assert step < counted[-last][0]
    again = plan_retention(list(kept), Retention(last, every), lineage, protected)
    assert again.remove == ()
