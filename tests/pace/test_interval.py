"""The interval between saves: Young's and Daly's formulas, and what a save is measured to cost."""

from __future__ import annotations

import math

import pytest
from everstep.plan.interval import FLUSHES_APART, SaveCost, daly_interval_s, interval_s
from hypothesis import given
from hypothesis import strategies as st


def lost(interval: float, cost: float, mtbf: float) -> float:
    """Daly's expected time for one second of work, restarts aside (equation 20 of his paper)."""
    return mtbf * math.expm1((interval + cost) / mtbf) / interval


@given(cost=st.floats(0.01, 600), mtbf=st.floats(600, 1e6))
def test_no_interval_nearby_loses_much_less(cost: float, mtbf: float) -> None:
    found = daly_interval_s(cost, mtbf)
    if cost < mtbf / 2:
        best = min(lost(found * 1.05**n, cost, mtbf) for n in range(-60, 61))
        assert lost(found, cost, mtbf) <= best * 1.005


@given(cost=st.floats(0.001, 10), mtbf=st.floats(1e5, 1e7))
def test_it_is_youngs_where_saves_are_cheap(cost: float, mtbf: float) -> None:
    assert daly_interval_s(cost, mtbf) == pytest.approx(math.sqrt(2 * cost * mtbf), rel=0.02)


@given(cost=st.floats(0, 1e5), flush=st.floats(0, 1e5), mtbf=st.floats(1, 1e6))
def test_clamped_by_flush_and_failures(cost: float, flush: float, mtbf: float) -> None:
    found = interval_s(cost, flush, mtbf)
    assert found >= FLUSHES_APART * flush
    assert found <= max(mtbf, FLUSHES_APART * flush)


def test_a_save_that_costs_more_than_failures_leave_is_made_once_in_that_time() -> None:
    assert daly_interval_s(100.0, 50.0) == 50.0


def train(cost: SaveCost, durations: list[tuple[float, bool]], now: float = 0.0) -> float:
    for seconds, flushing in durations:
        now += seconds
        cost.stepped(now, flushing)
    return now


def test_the_cost_is_what_steps_took_longer_while_flushing() -> None:
    cost = SaveCost()
    flush = [(3.0, True)] + [(1.2, True)] * 9
    now = train(cost, [(1.0, False)] * 20)
    assert cost.measured() is None and cost.interval_s(3600) is None, "nothing was flushed yet"
    now = train(cost, flush + [(1.0, False)] * 20, now)
    measured = cost.measured()
    assert measured is not None
    assert measured == pytest.approx((3.0 + 1.2 * 9 - 10, 3.0 + 1.2 * 9))
    assert cost.interval_s(6 * 3600) == pytest.approx(math.sqrt(2 * measured[0] * 6 * 3600), rel=0.02)
    train(cost, [(600.0, True), (1.0, False)] + (flush + [(1.0, False)] * 20) * 3, now)
    assert cost.measured() == pytest.approx(measured), "an evaluation during one flush is not what saves cost"


def test_flushes_without_end_or_undisturbed_steps_say_nothing() -> None:
    cost = SaveCost()
    train(cost, [(1.0, True)] * 100)
    assert cost.measured() is None
    train(cost, [(1.0, False)] * 3, 100.0)
    assert cost.measured() is None
