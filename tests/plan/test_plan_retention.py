"""Retention: what stays, what goes, and why."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import pytest
from everstep.errors import BadOption
from everstep.format.manifest import Manifest
from everstep.plan.lineage import Lineage
from everstep.plan.retention import (
    Facts,
    Key,
    Retention,
    RetentionPlan,
    facts_of,
    plan_retention,
    seconds_of,
)
from hypothesis import example, given, note
from hypothesis import strategies as st

from .test_plan_lineage import record

ONE = Lineage([record(1)])
HOUR = 3600.0


def steps(*numbers: int, incarnation: int = 1) -> list[Key]:
    return [(incarnation, step) for step in numbers]


def kept(plan: RetentionPlan) -> list[int]:
    return [key[1] for key, _ in plan.keep]


def lossy(*losses: float, first: int = 1) -> dict[Key, Facts]:
    return {(1, step): Facts(metrics={"loss": loss}) for step, loss in enumerate(losses, first)}


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


def test_pinned_ones_stay_and_say_why() -> None:
    pinned = {(1, 1): "paper", (2, 9): "given up, and yet", (1, 7): "not there"}
    lineage = Lineage([record(1), record(2, (1, 2)), record(3, (1, 2))])
    plan = plan_retention([*steps(1, 2), (2, 9), (3, 30)], Retention(1), lineage, pinned=pinned)
    assert plan.keep == (
        ((1, 1), "pinned: paper"),
        ((2, 9), "pinned: given up, and yet"),
        ((3, 30), "newest"),
    )


# -- best by a metric


def test_a_metric_that_gets_worse_every_step() -> None:
    facts = lossy(1.0, 2.0, 3.0, 4.0)
    for limit, expected in ((1, [1, 4]), (2, [1, 2, 4]), (3, [1, 2, 3, 4])):
        retention = Retention(1, keep_best=limit, best="min:loss")
        assert kept(plan_retention(list(facts), retention, ONE, facts=facts)) == expected
    retention = Retention(1, keep_best=1, best="max:loss")
    assert kept(plan_retention(list(facts), retention, ONE, facts=facts)) == [4]


def test_keep_one_and_the_best_over_a_whole_run() -> None:
    """Rotated after each save: the best stays, whenever it came; the newest always; the rest goes."""
    retention = Retention(1, keep_best=1, best="min:loss")
    facts: dict[Key, Facts] = {}
    for step, loss in enumerate([5.0, 3.0, math.nan, 4.0, 3.0, 9.0, 2.0, 2.5], 1):
        facts[1, step] = Facts(metrics={"loss": loss})
        plan = plan_retention(list(facts), retention, ONE, facts=facts)
        facts = {key: facts[key] for key, _ in plan.keep}
    assert sorted(facts) == steps(7, 8)


def test_equal_ones_the_newer_stays_and_nan_or_nothing_never_wins() -> None:
    facts = lossy(2.0, 1.0, 1.0, math.nan, -math.inf)
    facts[1, 6] = Facts(metrics={"other": 0.0})
    facts[1, 7] = Facts()
    retention = Retention(1, keep_best=2, best="min:loss")
    plan = plan_retention([*facts, (1, 8)], retention, ONE, facts=facts)
    assert plan.keep == (
        ((1, 2), "best 2 by min:loss"),
        ((1, 3), "best 2 by min:loss"),
        ((1, 8), "newest"),
    )
    retention = Retention(1, keep_best=1, best="min:loss")
    assert kept(plan_retention([*facts, (1, 8)], retention, ONE, facts=facts)) == [3, 8]
    greatest = Retention(1, keep_best=9, best="max:loss")
    assert kept(plan_retention([*facts, (1, 8)], greatest, ONE, facts=facts)) == [1, 2, 3, 8]


def test_the_best_of_what_was_given_up_is_not_the_best() -> None:
    lineage = Lineage([record(1), record(2, (1, 2))])
    facts = {**lossy(3.0, 2.0, 0.1), (2, 9): Facts(metrics={"loss": 5.0})}
    retention = Retention(1, keep_best=1, best="min:loss")
    assert plan_retention(list(facts), retention, lineage, facts=facts).remove == ((1, 1), (1, 3))


# -- time


def test_one_in_each_interval() -> None:
    facts = {(1, step): Facts(created_s=1e9 + step * HOUR / 2) for step in range(20)}
    retention = Retention(2, keep_interval="3h")
    plan = plan_retention(list(facts), retention, ONE, facts=facts)
    assert kept(plan) == [0, 6, 12, 18, 19] and plan.keep[0] == ((1, 0), "one in 3h")


def test_clocks_that_jump_cost_one_more_and_no_gap() -> None:
    year = 365 * 24 * HOUR
    times = [1e9 + step * HOUR for step in range(30)]
    for wrong in (range(8, 9), range(8, 12)):  # a leap into the future, for a moment or a while
        moved = [time + (year if step in wrong else 0) for step, time in enumerate(times)]
        facts = {(1, step): Facts(created_s=time) for step, time in enumerate(moved)}
        found = kept(plan_retention(list(facts), Retention(1, keep_interval="4h"), ONE, facts=facts))
        assert found == sorted({0, 4, 8, wrong.stop, *range(wrong.stop + 4, 30, 4), 29})
        assert all(later - earlier <= 4 for earlier, later in itertools.pairwise(found))
    back = {(1, step): Facts(created_s=1e9 - (step >= 10) * year + step * HOUR) for step in range(30)}
    found = kept(plan_retention(list(back), Retention(1, keep_interval="4h"), ONE, facts=back))
    assert found == [0, 4, 8, 10, 14, 18, 22, 26, 29]


def test_a_time_that_cannot_be_read_keeps() -> None:
    facts = {(1, 1): Facts(created_s=1e9), (1, 2): Facts(), (1, 3): Facts(created_s=1e9 + 5)}
    assert kept(plan_retention([*facts, (1, 4)], Retention(1, keep_interval="1h"), ONE, facts=facts)) == [
        1,
        2,
        4,
    ]
    assert seconds_of("2026-01-01T00:00:00Z") == 1767225600.0
    assert seconds_of("") is None and seconds_of("yesterday") is None


# -- incarnations and what was given up


def test_the_newest_of_each_of_the_last_incarnations() -> None:
    lineage = Lineage([record(1), record(2, (1, 10)), record(3, (1, 10)), record(4, (3, 12))])
    keys = [*steps(5, 10, 20), (2, 11), (2, 13), (3, 12), (4, 30)]
    plan = plan_retention(keys, Retention(1, keep_incarnations=3), lineage)
    assert plan.keep == (
        ((3, 12), "newest of its incarnation"),
        ((2, 13), "newest of its incarnation"),
        ((4, 30), "newest"),
    )
    assert (1, 20) in {
        key for key, _ in plan_retention(keys, Retention(1, keep_incarnations=4), lineage).keep
    }


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


# -- chains


def test_bases_of_what_stays_stay() -> None:
    parents = {2: 1, 3: 2, 5: 4, 6: 4}
    facts = {(1, step): Facts(parent=(1, base)) for step, base in parents.items()}
    keys = steps(1, 2, 3, 4, 5, 6)
    plan = plan_retention(keys, Retention(1), ONE, facts=facts)
    assert plan.keep == (((1, 4), "base of step 6"), ((1, 6), "newest"))
    plan = plan_retention(keys, Retention(1), ONE, {(1, 3)}, facts=facts)
    assert kept(plan) == [1, 2, 3, 4, 6] and plan.keep[0] == ((1, 1), "base of step 2")
    best = {**facts, (1, 3): Facts(parent=(1, 2), metrics={"loss": 0.0})}
    plan = plan_retention(keys, Retention(1, keep_best=1, best="min:loss"), ONE, facts=best)
    assert kept(plan) == [1, 2, 3, 4, 6]


def test_a_delta_without_its_base_is_no_newest() -> None:
    """Somebody removed the base by hand: the full one below is all that can be loaded."""
    facts = {(1, 4): Facts(parent=(1, 3)), (1, 5): Facts(parent=(1, 4)), (1, 6): Facts(parent=(1, 0))}
    plan = plan_retention(steps(1, 2, 4, 5, 6), Retention(1), ONE, facts=facts)
    assert plan.remove == ((1, 1),) and plan.keep[0] == ((1, 2), "newest")
    assert "lacks a base" in plan.keep[1][1]
    # Once a good one is above them, they are of no use to anybody.
    plan = plan_retention(steps(1, 2, 4, 5, 6, 7), Retention(1), ONE, facts=facts)
    assert kept(plan) == [7]


def test_a_chain_that_never_ends_is_broken() -> None:
    facts = {(1, 2): Facts(parent=(1, 3)), (1, 3): Facts(parent=(1, 2)), (1, 4): Facts(parent=(1, 4))}
    plan = plan_retention(steps(1, 2, 3, 4), Retention(1), ONE, facts=facts)
    assert plan.keep[0] == ((1, 1), "newest") and not plan.remove


def test_a_base_that_was_given_up_is_a_base_all_the_same() -> None:
    lineage = Lineage([record(1), record(2, (1, 10))])
    plan = plan_retention(
        [(1, 10), (1, 11), (2, 12)], Retention(1), lineage, facts={(2, 12): Facts(parent=(1, 11))}
    )
    assert plan.remove == ((1, 10),) and plan.keep[0] == ((1, 11), "base of step 12")


# -- what a manifest says


def of_manifest(**changes: Any) -> Facts:
    fields: dict[str, Any] = {
        "step": 7,
        "incarnation": 1,
        "attempt": 1,
        "kind": "full",
        "world": 1,
        "mesh": {},
        "ranks": (),
        "parts": {},
        "config_hash": None,
        "libraries": {},
    }
    return facts_of(Manifest(**{**fields, **changes}))


def test_facts_are_those_of_the_manifest() -> None:
    metrics = {
        "loss": 0.5,
        "n": 10**400,
        "nan": math.nan,
        "inf": math.inf,
        "ok": True,
        "text": "1",
        "map": {},
    }
    found = of_manifest(metrics=metrics, created="1970-01-02T00:00:00Z")
    assert found == Facts(None, 86400.0, {"loss": 0.5, "n": 10**400})
    assert of_manifest(kind="delta", parent={"incarnation": 1, "step": 5, "attempt": 1}).parent == (1, 5)


# -- options


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "3", None])
def test_counts_are_checked(bad: Any) -> None:
    with pytest.raises(BadOption, match="keep_last"):
        Retention(bad)
    if bad is not None:
        for name in ("keep_every", "keep_incarnations"):
            with pytest.raises(BadOption, match=name):
                Retention(1, **{name: bad})
        with pytest.raises(BadOption, match="keep_best"):
            Retention(1, keep_best=bad, best="min:loss")


@pytest.mark.parametrize("bad", ["loss", "-loss", "best:loss", "min:", ":loss", 3, ""])
def test_best_says_which_way_is_better(bad: Any) -> None:
    with pytest.raises(BadOption, match="best cannot be used") as caught:
        Retention(1, keep_best=1, best=bad)
    assert caught.value.fields["option"] == "best"


def test_best_and_how_many_belong_together() -> None:
    with pytest.raises(BadOption, match="best cannot"):
        Retention(1, keep_best=2)
    with pytest.raises(BadOption, match="keep_best cannot"):
        Retention(1, best="min:loss")
    assert Retention(1, keep_best=2, best="max:val:acc/top 5").best == "max:val:acc/top 5"


@pytest.mark.parametrize("bad", [6, "6", "", "soon", "-1h", "0h"])
def test_intervals_are_durations(bad: Any) -> None:
    with pytest.raises(BadOption, match="keep_interval"):
        Retention(1, keep_interval=bad)


def test_there_and_back_again() -> None:
    retention = Retention(2, 10, "6h", 3, "max:acc", 4)
    assert Retention(**retention.to_wire()) == retention


# -- against a plain model


def model(
    keys: list[Key],
    retention: Retention,
    lineage: Lineage,
    protected: set[Key],
    facts: dict[Key, Facts],
    pinned: dict[Key, str],
) -> set[Key]:
    """What stays, by the rules' words, each by brute force."""
    of = {key: facts.get(key, Facts()) for key in keys}

    def chain(key: Key) -> list[Key] | None:
        """A checkpoint and its bases; None if that leads nowhere."""
        found = [key]
        while (parent := of[found[-1]].parent) is not None:
            if parent not in of or len(found) > len(keys):
                return None
            found.append(parent)
        return found

    whole = [key for key in keys if chain(key) is not None]
    good = [key for key in whole if lineage.counts(*key)]
    stays = {key for key in good if sum(other > key for other in good) < retention.keep_last}
    if len(good) < retention.keep_last:
        return set(keys)
    lowest = min(step for _, step in stays)
    stays |= {key for key in keys if key not in good and key[1] >= lowest}
    stays |= {key for key in keys if key in protected or key in pinned}
    if retention.keep_every is not None:
        stays |= {key for key in good if key[1] % retention.keep_every == 0}
    if retention.interval_s is not None:
        at = None
        for key in sorted(good):
            time = of[key].created_s
            if time is None:
                stays.add(key)
            elif at is None or abs(time - at) >= retention.interval_s:
                stays.add(key)
                at = time
    if retention.keep_best is not None and retention.best is not None:
        sign = 1 if retention.best.startswith("min") else -1
        loss = {key: sign * of[key].metrics["loss"] for key in good if "loss" in of[key].metrics}
        loss = {key: value for key, value in loss.items() if math.isfinite(value)}
        better = {
            key: sum(loss[o] < loss[key] or (loss[o] == loss[key] and o > key) for o in loss) for key in loss
        }
        stays |= {key for key, ahead in better.items() if ahead < retention.keep_best}
    if retention.keep_incarnations is not None:
        ends = [key for key in whole if not any(o[0] == key[0] and o > key for o in whole)]
        stays |= {key for key in ends if sum(o > key for o in ends) < retention.keep_incarnations}
    # Bases, also of what is broken as far as they are there.
    grown = True
    while grown:
        more = {of[key].parent for key in stays} - stays
        grown = bool(more & set(keys))
        stays |= {key for key in more if key is not None and key in of}
    return stays


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    adopted = [record(1), record(2, (1, draw(st.integers(1, 20))))]
    kind = draw(st.integers(0, 2))
    adopted.append(record(3, fresh="why") if kind == 0 else record(3, (kind, draw(st.integers(1, 25)))))
    keys = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 25)), unique=True, max_size=16))
    values = st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf])
    facts = {}
    for key in keys:
        base = draw(st.none() | st.sampled_from(keys) | st.just((1, 99)))
        created = draw(st.none() | st.integers(0, 40).map(float))
        metrics = draw(st.fixed_dictionaries({}, optional={"loss": values}))
        facts[key] = Facts(base if base is None or draw(st.booleans()) else None, created, metrics)
    best = draw(st.none() | st.sampled_from(["min:loss", "max:loss"]))
    retention = Retention(
        draw(st.integers(1, 4)),
        draw(st.none() | st.integers(1, 6)),
        draw(st.none() | st.sampled_from(["4s", "10s"])),
        None if best is None else draw(st.integers(1, 3)),
        best,
        draw(st.none() | st.integers(1, 3)),
    )
    some = st.sets(st.sampled_from(keys)) if keys else st.just(set[Key]())
    pinned = dict.fromkeys(draw(some), "why") if draw(st.booleans()) else {}
    protected = draw(some) if draw(st.booleans()) else set()
    return {
        "keys": keys,
        "retention": retention,
        "lineage": Lineage(adopted),
        "protected": protected,
        "facts": facts,
        "pinned": pinned,
    }


EMPTY: dict[str, Any] = {
    "keys": [],
    "retention": Retention(1),
    "lineage": ONE,
    "protected": set(),
    "facts": {},
    "pinned": {},
}


@given(worlds())
@example(EMPTY)
def test_the_plan_is_the_model_s(world: dict[str, Any]) -> None:
    note(f"{world}")
    keys, lineage = world["keys"], world["lineage"]
    rest = {"facts": world["facts"], "pinned": world["pinned"]}
    plan = plan_retention(keys, world["retention"], lineage, world["protected"], **rest)
    stays = {key for key, _ in plan.keep}
    assert stays | set(plan.remove) == set(keys) and not stays & set(plan.remove)
    assert stays == model(**world)
    assert all(why for _, why in plan.keep)
    # Planning again, in any order, with what stays removes nothing more.
    again = plan_retention(
        sorted(stays, reverse=True), world["retention"], lineage, world["protected"], **rest
    )
    assert again.remove == ()


def test_ten_thousand_checkpoints_take_no_time() -> None:
    facts = {
        (1, step): Facts((1, step - 1) if step % 50 else None, step * 60.0, {"loss": 1 / (step + 1)})
        for step in range(10_000)
    }
    retention = Retention(10, 1000, "6h", 5, "min:loss", 3)
    began = time.process_time()
    plan = plan_retention(list(facts), retention, ONE, facts=facts)
    assert time.process_time() - began < 2.0
    assert len(plan.remove) > 9000
