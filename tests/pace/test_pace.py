"""The controllers on simulated links and disks: bounded, quick to back off, never starving, and quick to come back."""

from __future__ import annotations

import random
import statistics

import pytest
from everstep.errors import BadOption
from everstep.plan.pace import (
    FLOOR_BYTES_PER_S,
    FLOOR_SHARE,
    Adaptive,
    LinkMeter,
    Rate,
    Share,
    parse_rate,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from .kit import Disk

MIB = float(1 << 20)


def test_what_a_rate_may_be() -> None:
    assert parse_rate(None, "x") == Rate()
    assert parse_rate(5, "x") == Rate(bytes_per_s=5.0)
    assert parse_rate("adaptive", "x") == Rate(adaptive=True)
    assert parse_rate(" 12.5 % ", "x") == Rate(share=0.125)
    for wrong in (0, -1, True, float("nan"), float("inf"), "0%", "101%", "fast", "", b"50%"):
        with pytest.raises(BadOption, match="some_rate"):
            parse_rate(wrong, "some_rate")  # type: ignore[arg-type]


# -- the link


def drive(governor: Share, can: float, seconds: float, now: float = 50.0, buffer: float = 0.0) -> list[float]:
    """Send through a link of ``can`` bytes/s behind a ``buffer``, as fast as allowed. Bytes of each second."""
    sent = [0.0] * int(seconds)
    began, queued, tick = now, 0.0, 0.01
    while now - began < seconds:
        rate = governor.rate(now)
        room = max(0.0, buffer - queued) + can * tick
        nbytes = int(room if rate is None else min(room, rate * tick))
        queued = max(0.0, queued + nbytes - can * tick)
        if nbytes:
            governor.sent(now, nbytes)
        sent[min(int(now - began), len(sent) - 1)] += nbytes
        now += tick
    return sent


@settings(max_examples=25, deadline=None)
@given(can=st.floats(1e6, 1e9), share=st.floats(0.1, 0.9), buffered=st.floats(0, 0.4))
def test_a_share_holds_on_average_and_is_used(can: float, share: float, buffered: float) -> None:
    sent = drive(Share(share), can, 120, buffer=can * buffered)
    assert sum(sent[20:110]) <= 90 * share * can * 1.06
    assert sum(sent[20:110]) >= 90 * share * can * 0.9
    assert sum(1 for one in sent if one > share * can * 1.05) <= 6  # the bursts that measure


def test_a_link_that_changes_is_measured_anew() -> None:
    governor = Share(0.5)
    drive(governor, 1e8, 20)
    faster = drive(governor, 4e8, 100, now=70.0)
    assert statistics.median(faster[80:]) == pytest.approx(2e8, rel=0.05)


def test_short_transfers_are_no_way_around_a_share() -> None:
    governor = Share(0.5)
    drive(governor, 1e8, 5)
    sent = [sum(drive(governor, 1e8, 1, now=60.0 + 5 * number)) for number in range(12)]
    assert sum(1 for one in sent if one > 0.55e8) <= 2


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 10**9), max_size=200),
    gaps=st.lists(st.floats(0, 5), min_size=1, max_size=9),
)
def test_a_meter_never_says_more_than_went_through(sizes: list[int], gaps: list[float]) -> None:
    meter = LinkMeter()
    now, passed = 10.0, []
    for number, nbytes in enumerate(sizes):
        now += gaps[number % len(gaps)]
        meter.sent(now, nbytes)
        passed.append((now, nbytes))
    most = max(
        (sum(n for at, n in passed if start <= at <= start + 6) for start, _ in passed),
        default=0,
    )
    assert (meter.bytes_per_s or 0) <= most


# -- adaptive


@settings(max_examples=40, deadline=None)
@given(
    can=st.floats(20 * MIB, 4000 * MIB),
    alone_s=st.floats(0.05, 5.0),
    reads=st.floats(0.0, 1.0),
    noise=st.floats(0.0, 0.3),
    seed=st.integers(0, 1000),
)
def test_the_rate_is_bounded_and_a_flush_always_ends(
    can: float, alone_s: float, reads: float, noise: float, seed: int
) -> None:
    disk = Disk(can, alone_s, reads * alone_s, noise=noise, seed=seed)
    disk.steps(20, 0)
    left = nbytes = 60 * can
    began = disk.now
    while left > 0:
        left = disk.steps(1, left)
        rate, known = disk.pace.rate(disk.now), disk.pace.link_bytes_per_s
        if rate is not None:
            assert known is not None
            assert max(FLOOR_BYTES_PER_S, FLOOR_SHARE * known) <= rate < known
        assert disk.now - began <= 1.2 * nbytes / (FLOOR_SHARE * can) + 10 * alone_s, "it starved"


def test_it_backs_off_where_training_is_disturbed_and_comes_back() -> None:
    can = 1000 * MIB
    disk = Disk(can, 0.2, 0.1, noise=0.02, seed=1)
    disk.steps(40, 0)
    disk.steps(300, 1e15)
    slow = statistics.fmean(disk.took[-150:]) / statistics.fmean(disk.took[:40])
    assert slow < 1.15, "without a limit it is several times that"
    settled = statistics.fmean(disk.rates[-100:])
    assert settled < 0.4 * can

    disk.reads_s = 0.0  # the training does not read any more
    disk.alone_s = 0.2
    disk.steps(300, 1e15)
    assert statistics.fmean(disk.rates[-50:]) > 2 * settled


def test_a_training_that_does_not_read_is_no_reason_to_go_slowly() -> None:
    disk = Disk(500 * MIB, 0.1, 0.0, noise=0.05, seed=2)
    disk.steps(30, 0)
    disk.steps(600, 1e15)
    assert statistics.fmean(disk.rates[-300:]) > 0.5 * disk.can


def test_training_that_becomes_slower_by_itself_has_a_new_baseline() -> None:
    disk = Disk(500 * MIB, 0.1, 0.0, noise=0.02, seed=3)
    disk.steps(30, 0)
    disk.steps(100, 1e15)
    disk.alone_s = 0.2
    disk.steps(40, 1e15)
    assert disk.rates[-1] < 0.5 * disk.can, "taken for its own doing at first"
    disk.steps(600, 1e15)
    assert disk.pace.baseline_s == pytest.approx(0.2, rel=0.1)
    assert statistics.fmean(disk.rates[-100:]) > 0.5 * disk.can


def test_stalls_in_few_steps_are_seen_and_one_odd_step_is_not() -> None:
    can = 100 * MIB

    def judged(stalls: int) -> float:
        """The mean rate of a training that stalls in every so many steps, as soon as much is sent."""
        pace, now, rates = Adaptive(), 100.0, []
        draw = random.Random(4)
        for number in range(600):
            rate = pace.rate(now)
            rates.append(can if rate is None else min(rate, can))
            took = 0.1 * draw.gauss(1, 0.02)
            if number > 40 and rates[-1] > can / 10 and number % stalls == 0:
                took += 0.3
            for part in range(10):
                if number > 40:
                    pace.sent(now + took * part / 10, int(rates[-1] * took / 10))
            now += took
            pace.stepped(now, took)
        return statistics.fmean(rates[300:])

    assert judged(4) < 0.2 * can
    assert judged(200) > 0.6 * can


def test_it_measures_begins_at_the_floor_and_has_no_limit_while_it_is_waited_for() -> None:
    pace = Adaptive()
    assert pace.rate(0.0) is None, "the link is not known"
    for number in range(100):
        pace.sent(10.0 + number / 50, 2_000_000)
    for number in range(4):  # no baseline yet: the first step is flushed at once
        pace.sent(12.0 + number, 1000)
        pace.stepped(12.5 + number, 1.0)
    assert pace.rate(20.0) == pytest.approx(100_000_000 * FLOOR_SHARE, rel=0.05)
    pace.waited_for = True
    assert pace.rate(20.0) is None
