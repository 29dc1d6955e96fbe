"""What the policy says of rates, intervals and what may hang on memory alone, to what the user hears of it."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
import torch.distributed as dist
from everstep import decisions as decisions_module
from everstep import errors
from everstep.backends.errors import Permanent
from everstep.backends.faults import Fault
from everstep.decisions import AUTO_FIRST_S, LOOKAHEAD_STEPS, Decisions
from everstep.plan.chains import DELTA, FULL, Chains
from everstep.plan.schedule import Decision, Every, Schedule, Unsaved, merge
from everstep.ranks import Ranks
from hypothesis import given
from hypothesis import strategies as st

from tests.facade.kit import Storage, opened, policy, steps_on_disk, until
from tests.matrix import launch

DENIED = Fault(op="write", name="rank-", times=10**9, error=lambda name: Permanent(name, "denied"))
CREATE_DENIED = Fault(op="create", name="vote", times=10**9, error=lambda name: Permanent(name, "denied"))


@pytest.mark.parametrize(
    "options",
    [
        {"rate_bytes_per_s": "fast"},
        {"rate_bytes_per_s": 0},
        {"rate_bytes_per_s": True},
        {"full_every": "auto"},
        {"mtbf": "6h"},
        {"full_every": "auto", "mtbf": 100},
        {"full_every": "auto", "mtbf": "soon"},
        {"full_every": "10m", "max_unsaved": "10m"},
        {"full_every": 100, "max_unsaved": 50},
        {"max_unsaved": 0},
        {"max_unsaved": "long"},
    ],
)
def test_wrong_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(errors.BadOption, match="Policy"):
        everstep.Policy(**options)


def test_right_options() -> None:
    everstep.Policy(full_every="auto", mtbf="6h", rate_bytes_per_s="adaptive", max_unsaved="1h")
    everstep.Policy(full_every=100, max_unsaved="1s", rate_bytes_per_s="50%")
    everstep.Policy(full_every=None, max_unsaved=1)


# -- what hangs on memory


@given(st.integers(0, 2**32))
def test_what_is_too_much_is_told_soon_and_seldom(seed: int) -> None:
    rng = random.Random(seed)
    bound = rng.choice([1, 7, 100])
    unsaved, told, steps = Unsaved(Every(steps=bound)), 0, 0
    for _ in range(2000):
        steps += rng.choice([1, 1, 3])
        if rng.random() < 0.002:
            steps, told = 0, 0
        due = unsaved.due(steps, 0.0)
        told += due
        if steps >= bound:
            assert told >= 1, "at once"
        else:
            assert not due
        assert told <= 2 + max(0.0, steps / bound).__ceil__().bit_length()


def test_time_counts_too_and_what_became_durable_since_begins_anew() -> None:
    unsaved = Unsaved(Every(seconds=60.0))
    assert [unsaved.due(0, s) for s in (59, 60, 61, 119, 120, 200, 240)] == [
        False,
        True,
        False,
        False,
        True,
        False,
        True,
    ]
    assert [unsaved.due(0, s) for s in (70, 75, 139, 140)] == [True, False, False, True]


def test_trouble_is_not_lost_where_steps_are_passed_over() -> None:
    passed = [Decision(3, True, False, trouble="late", fatal=True), Decision(4, False, False)]
    assert merge(passed) == Decision(4, True, False, trouble="late", fatal=True)


def test_all_ranks_hear_of_trouble_at_the_same_step_and_once() -> None:
    store = dist.HashStore()
    first, second = (
        Decisions(Ranks(rank, 2, store, prefix="p"), policy(full_every=5), start=0, unfinished_max=1)
        for rank in (0, 1)
    )
    heard: list[list[tuple[int, str, bool]]] = [[], []]
    for step in range(1, 20):
        for rank, one in enumerate((first, second)):
            found = one.of(step, lambda: 0, lambda step: ("too late", True) if step == 7 else ("", False))
            if found.trouble:
                heard[rank].append((step, found.trouble, found.fatal))
                one.told(step)
                assert one.of(step, lambda: 0).trouble == "", "the same step again"
            one.passed(step)
    assert heard == [[(7 + LOOKAHEAD_STEPS, "too late", True)]] * 2


def simulated(monkeypatch: pytest.MonkeyPatch, seconds: int, **options: Any) -> list[tuple[int, str]]:
    """Flushes of a training with steps of a second, by time: a full takes 10 s, in which 4 steps take a second more; a
    delta 2 s, in which a step takes half a second more."""
    now = 0.0
    monkeypatch.setattr("everstep.decisions.time.monotonic", lambda: now)
    chains = Chains("full", 10**6, 1)
    ranks = Ranks(0, 1, dist.HashStore(), prefix="p")
    wish = policy(full_every="auto", mtbf="6h", snapshot_every=None, **options)
    made = Decisions(ranks, wish, start=0, unfinished_max=9, incarnation=1, chains=chains)
    found: list[tuple[int, str]] = []
    under_way: list[tuple[float, Decision]] = []
    for step in itertools.count(1):
        if now > seconds:
            return found
        for one in [one for one in under_way if one[0] <= now]:
            under_way.remove(one)
            chains.add((1, one[1].step), one[1].base)
        kinds = [one.kind for _, one in under_way]
        counts = len(kinds), kinds.count(DELTA)
        asked = made.of(step, partial(int, counts[0]), deltas=partial(int, counts[1]))
        fulls = [end for end, one in under_way if one.kind == FULL]
        now += 1 + (1 if fulls and min(fulls) - now > 4 else 0.5 * (DELTA in kinds))
        if asked.flush:
            found.append((int(now), asked.kind))
            under_way.append((now + (10 if asked.kind == FULL else 2), asked))
        made.passed(step)
    raise AssertionError("unreachable")


def gaps(found: list[tuple[int, str]], kind: str) -> list[int]:
    times = [at for at, one in found if one == kind]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_deltas_do_not_change_the_interval_between_fulls(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = gaps(simulated(monkeypatch, 9000), FULL)
    found = simulated(monkeypatch, 9000, delta_every="60s")
    with_deltas = gaps(found, FULL)
    assert 300 < alone[-1] < 450 and abs(with_deltas[-1] - alone[-1]) < 0.15 * alone[-1], (alone, with_deltas)
    assert 60 <= min(gaps(found, DELTA)) <= 63
    kinds = "".join(kind[0] for _, kind in found)
    assert set(kinds.split("f")[3:-1]) <= {"d" * 5, "d" * 6, "d" * 4}, kinds  # the same again and again
    assert {kind for _, kind in simulated(monkeypatch, 3000, delta_every="15m")} == {FULL}


def trouble_told(ckpt: everstep.Checkpointer, state: dict[str, Any], steps: range) -> list[int]:
    """The steps at which max_unsaved was told, as a warning or an error."""
    told = []
    for step in steps:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                ckpt.step(step, state)
            except errors.SaveFailed as error:
                if "max_unsaved" in str(error):
                    told.append(step)
                ckpt.step(step, state)  # the same call again goes on
        told += [step for one in heard if "max_unsaved" in str(one.message)]
    return told


@pytest.mark.parametrize("on_failure", ["warn", "raise"])
def test_a_flush_that_never_ends_and_those_skipped_behind_it(root: Path, on_failure: str) -> None:
    state = {"w": torch.zeros(50_000)}
    options = {"full_every": 2, "max_unsaved": 4, "rate_bytes_per_s": 2000.0, "close_timeout_s": 0.2}
    ckpt = opened(root, policy={**options, "on_failure": on_failure})
    ckpt.load(state)
    assert trouble_told(ckpt, state, range(1, 20)) == [4, 8, 16]
    assert steps_on_disk(root) == []
    ckpt.close(flush=False)


def test_failing_flushes_are_told_until_one_is_durable(root: Path, storage: Storage) -> None:
    state = {"n": 1}
    ckpt = opened(root, policy={"full_every": 1, "on_slow": "wait", "max_unsaved": 3, "failures_max": None})
    ckpt.load(state)
    storage.fail(CREATE_DENIED)
    assert trouble_told(ckpt, state, range(1, 6)) == [3]
    storage.heal()
    handle = ckpt.save(6, state)
    handle.wait()
    assert trouble_told(ckpt, state, range(7, 9)) == []
    ckpt.close()


def _failing(rank: int, world: int, root: Path, given: dict[str, str]) -> tuple[int, str]:
    os.environ.update(given)
    store = Storage()
    import functools

    from everstep.agent import inline

    inline.InlineAgent = functools.partial(inline.InlineAgent, open_backend=store.open)  # type: ignore[assignment, misc]
    if rank == 1:
        store.fail(CREATE_DENIED)
    rules = policy(full_every=1, on_slow="wait", failures_max=2, rank_timeout_s=60.0)
    ckpt = everstep.Checkpointer(root, policy=rules, agent="inline")
    state = {"n": 1}
    ckpt.load(state)
    warnings.simplefilter("ignore")
    for step in range(1, 40):
        try:
            handle = ckpt.step(step, state)
        except errors.SaveFailed as error:
            ckpt.close(flush=False)
            return step, type(error).__name__
        if handle is not None and rank == 1:  # rank 0 hears of it a step later
            until(lambda handle=handle: handle.error, "the failure")
    return 0, ""


def test_failures_end_training_on_all_ranks_at_the_same_step(root: Path) -> None:
    """What one rank's storage refuses, both hear at different moments."""
    given = {name: os.environ[name] for name in ("EVERSTEP_NODE", "EVERSTEP_RUNTIME_DIR")}
    found = launch.run(2, _failing, root, given)
    assert found[0] == found[1] and 3 <= found[0][0] < 40, found


# -- the interval


class Clock:
    """The decisions' time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_the_interval_follows_from_the_measured_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush takes ten steps of 1.5 s instead of 1 s and costs another 3 s in its call: 8 s, of 18."""
    clock = Clock()
    monkeypatch.setattr(decisions_module, "time", clock)
    one = Decisions(
        Ranks.alone(), policy(full_every="auto", mtbf="2h"), start=0, unfinished_max=1, incarnation=1
    )
    flushed, ends = [], -1
    for step in range(1, 3000):
        clock.now += 1.5 if step <= ends else 1.0
        decision = one.of(step, lambda busy=step <= ends: int(busy))  # type: ignore[misc]
        if decision.flush:
            clock.now += 3.0
            ends = step + 10
            flushed.append(clock.now)
        one.passed(step)
    expected = (2 * 8 * 7200) ** 0.5
    assert one.flush_every_s == pytest.approx(expected, rel=0.15)
    gaps = [b - a for a, b in itertools.pairwise(flushed[2:])]
    assert gaps and all(gap == pytest.approx(expected, rel=0.2) for gap in gaps)
    assert flushed[1] - flushed[0] < AUTO_FIRST_S


def test_an_interval_that_is_set_counts_from_the_last_flush() -> None:
    schedule = Schedule(None, "10m", 0)
    assert schedule.extend(1, 0.0, 0, 1)[0].flush
    assert not schedule.extend(2, 30.0, 0, 1)[0].flush
    schedule.flush_every(40.0)
    assert schedule.extend(3, 41.0, 0, 1)[0].flush
