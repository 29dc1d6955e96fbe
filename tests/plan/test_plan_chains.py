"""Deltas in the schedule: what they stand on, when a full is due instead, and when one is merged."""

from __future__ import annotations

import random
from typing import Any

import pytest
from everstep import Policy
from everstep.errors import BadOption, Damaged
from everstep.plan.chains import DELTA, FULL, KNOWN_MAX, Chains, Delta, Key, chain_of, next_bases
from everstep.plan.schedule import Decision, Schedule, merge


def chains(base: Any = "full", max_chain: int = 3, durable: dict[Key, Key | None] | None = None) -> Chains:
    return Chains(base, max_chain, 1, durable or {})


def train(
    schedule: Schedule, known: Chains, steps: range, *, fails: frozenset[int] = frozenset()
) -> list[Decision]:
    """The flushes of a trainer whose flushes are durable at once; merging is done with the flush."""
    found = []
    for step in steps:
        for decision in schedule.extend(step + schedule.lookahead, float(step), 0, 1):
            if not decision.flush:
                continue
            found.append(decision)
            if decision.step in fails:
                known.lost(decision.step)
                continue
            known.add((1, decision.step), decision.base)
            if decision.merge:
                known.add((1, decision.step), None)
    return found


def kinds(decisions: list[Decision]) -> list[tuple[int, str]]:
    return [(decision.step, decision.kind) for decision in decisions]


def test_the_first_flush_is_a_full_and_a_full_wins_where_both_are_due() -> None:
    known = chains(max_chain=16)
    schedule = Schedule(1, 20, 0, delta_every=5, chains=known)
    found = train(schedule, known, range(1, 31))
    assert kinds(found) == [
        (1, FULL),
        (5, DELTA),
        (10, DELTA),
        (15, DELTA),
        (20, FULL),
        (25, DELTA),
        (30, DELTA),
    ]
    assert [d.base for d in found] == [None, (1, 1), (1, 1), (1, 1), None, (1, 20), (1, 20)]


def test_without_fulls_the_first_is_one_and_every_third_delta_is_merged() -> None:
    known = chains(max_chain=3)
    schedule = Schedule(1, None, 0, delta_every=1, chains=known)
    found = train(schedule, known, range(1, 9))
    assert [d.kind for d in found] == [FULL] + [DELTA] * 7
    assert [d.step for d in found if d.merge] == [4, 7]
    assert [d.base for d in found][1:] == [(1, 1)] * 3 + [(1, 4)] * 3 + [(1, 7)]


def test_a_previous_base_is_never_further_than_the_bound_from_a_full() -> None:
    known = chains("previous", 3)
    schedule = Schedule(1, None, 0, delta_every=1, chains=known)
    parents: dict[Key, Key | None] = {}
    for step in range(1, 40):  # no merge ever comes to its end
        (decision,) = schedule.extend(step, 0.0, 0, 1)
        assert decision.flush
        parents[1, step] = decision.base
        known.add((1, step), decision.base)
        assert len(chain_of((1, step), parents)) <= 3
    assert parents[1, 2] == (1, 1) and parents[1, 4] == (1, 3) and parents[1, 5] == (1, 3)


@pytest.mark.parametrize("base", ["full", "previous"])
def test_one_full_is_enough_to_begin_with(base: str) -> None:
    known = chains(base)
    schedule = Schedule(1, None, 2, delta_every=1, chains=known)
    found = [d for step in (1, 2) for d in schedule.extend(step + 2, 0.0, step - 1, 5)]
    assert kinds(found) == [(1, FULL), (2, DELTA), (3, DELTA), (4, DELTA)]
    assert [d.base for d in found[1:]] == [(1, 1)] * 3  # it is written before them
    known.add((1, 1), None)
    known.add((1, 2), (1, 1))
    (later,) = schedule.extend(5, 0.0, 2, 5)
    assert (later.kind, later.base) == (DELTA, (1, 1) if base == "full" else (1, 2))


def test_after_a_first_full_that_came_to_nothing_there_is_another() -> None:
    known = chains()
    schedule = Schedule(1, None, 0, delta_every=1, chains=known)
    found = [*schedule.extend(1, 0.0, 0, 5), *schedule.extend(2, 0.0, 0, 5)]
    known.lost(1)
    found += [*schedule.extend(3, 0.0, 0, 5), *schedule.extend(4, 0.0, 0, 5)]
    assert kinds(found) == [(1, FULL), (2, DELTA), (3, FULL), (4, DELTA)] and found[3].base == (1, 3)
    known.spoil(2)  # there was no base for it
    assert schedule.extend(5, 0.0, 0, 5)[0].base == (1, 3)


@pytest.mark.parametrize("base", ["full", "previous"])
def test_a_merge_that_never_comes_to_its_turn_is_not_waited_for(base: str) -> None:
    """Chains stay as short as they are to be, and so does what stands on one full."""
    known = chains(base, 4)
    schedule = Schedule(1, None, 2, delta_every=1, chains=known)
    parents: dict[Key, Key | None] = {}
    behind: list[Decision] = []
    for step in range(1, 60):
        behind += schedule.extend(step + 2, 0.0, 0, 99)
        if len(behind) > 5:  # flushes are always under way
            done = behind.pop(0)
            parents[1, done.step] = done.base
            known.add((1, done.step), done.base)
            assert len(chain_of((1, done.step), parents)) <= (1 if base == "full" else 4)
    fulls = [key for key, parent in parents.items() if parent is None]
    roots = [(chain_of(key, parents) or [key])[-1] for key in parents]
    assert len(fulls) == 7 and max(map(roots.count, fulls)) == 1 + 2 * 4


@pytest.mark.parametrize("base", ["full", "previous"])
def test_where_fulls_come_to_nothing_the_one_that_is_there_serves_on(base: str) -> None:
    """As on a disk without room for a second one. It is tried again and again, and one that comes ends it."""
    known = chains(base, 4)
    schedule = Schedule(1, None, 0, delta_every=1, chains=known)
    parents: dict[Key, Key | None] = {}
    tried = []
    for step in range(1, 60):
        (one,) = schedule.extend(step, 0.0, 0, 1)
        if one.kind == FULL and 1 < step < 40:
            tried.append(step)
            known.lost(step)
            continue
        parents[1, step] = one.base
        known.add((1, step), one.base)
        assert len(chain_of((1, step), parents)) <= (1 if base == "full" else 4)
        if one.merge:
            known.lost(step)
    assert tried == [10, 15, 20, 25, 30, 35]
    assert [step for _, step in parents if parents[1, step] is None] == [1, 40, 49, 58]


def test_a_run_that_goes_on_stands_on_what_is_durable() -> None:
    durable: dict[Key, Key | None] = {(1, 100): None, (1, 110): (1, 100), (2, 120): (1, 100)}
    known = chains(durable=durable)
    (first,) = Schedule(1, "30m", 0, delta_every=10, chains=known).extend(121, 5.0, 0, 1)
    assert (first.kind, first.base) == (DELTA, (1, 100))
    known = chains("previous", 3, durable=durable)
    overdue = Schedule(1, 100, 0, delta_every=10, chains=known)
    assert [overdue.extend(step, 0.0, 0, 1)[0].kind for step in (199, 200)] == [DELTA, FULL]
    late = Schedule(1, 100, 0, delta_every=10, chains=chains(durable=durable))
    assert late.extend(205, 0.0, 0, 1)[0].kind == FULL
    assert Schedule(1, "30m", 0, delta_every=10, chains=chains()).extend(121, 5.0, 0, 1)[0].kind == FULL


def test_times() -> None:
    known = chains(max_chain=16)
    schedule = Schedule(1, "30s", 0, delta_every="10s", chains=known)
    assert kinds(train(schedule, known, range(1, 62))) == [
        (1, FULL), (11, DELTA), (21, DELTA), (31, FULL), (41, DELTA), (51, DELTA), (61, FULL)
    ]  # fmt: skip


def test_a_full_that_was_skipped_takes_the_next_deltas_place() -> None:
    known = chains(max_chain=16)
    known.add((1, 1), None)
    schedule = Schedule(1, 10, 0, "skip", delta_every=2, chains=known)
    found = [schedule.extend(step, 0.0, step == 10, 1)[0] for step in range(1, 15)]
    assert kinds([d for d in found if d.flush]) == [
        (1, DELTA), (2, DELTA), (4, DELTA), (6, DELTA), (8, DELTA), (12, FULL), (14, DELTA)
    ]  # fmt: skip


def test_a_delta_supersedes_deltas_alone() -> None:
    known = chains(durable={(1, 1): None})
    for unfinished, deltas, step, expected in ((1, 0, 7, False), (1, 1, 7, True), (1, 0, 10, True)):
        schedule = Schedule(1, 10, 0, "supersede", delta_every=7, chains=known)
        schedule.extend(2, 0.0, 0, 1)
        (decision,) = schedule.extend(step, 0.0, unfinished, 1, deltas)
        assert decision.flush == decision.supersede == expected


def test_another_delta_is_merged_where_one_came_to_nothing() -> None:
    known = chains(max_chain=3)
    schedule = Schedule(1, None, 0, delta_every=1, chains=known)
    found = train(schedule, known, range(1, 7), fails=frozenset({4}))
    assert [d.step for d in found if d.merge] == [4, 5]
    known = chains(max_chain=2, durable={(1, 1): None, (1, 2): (1, 1)})
    assert known.delta(3) == Delta((1, 1), True)
    known.add((1, 3), (1, 1))
    assert known.delta(4) == Delta((1, 1), False)  # under way
    known.lost(3)
    assert known.delta(5) == Delta((1, 1), True)


def test_what_could_not_be_stored_as_a_delta_makes_a_full_due() -> None:
    known = chains(durable={(1, 1): None})
    known.spoil(2)
    assert known.base() is None and known.delta(2) is None
    known.add((1, 2), (1, 1))
    assert known.base() is None
    known.full(3)
    assert known.base() == (1, 3)
    known.spoil(3)
    assert known.base() is None
    known.add((1, 3), None)
    assert known.base() == (1, 3)
    known.spoil(2)  # late news
    assert known.base() == (1, 3)


def test_of_an_unknown_base_the_chain_may_be_long() -> None:
    known = chains("previous", 3, {(1, 5): (1, 4)})
    assert known.base() is None


def test_little_is_remembered() -> None:
    known = chains("previous", 32)
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for step in range(1, 3 * KNOWN_MAX):
        known.add((1, step), None if rng.random() < 0.1 or step == 1 else known.base())
    assert len(known._known) == KNOWN_MAX, seed


def test_what_a_key_needs() -> None:
    parents: dict[Key, Key | None] = {(1, 3): (1, 2), (1, 2): (1, 1), (1, 1): None}
    assert chain_of((1, 3), parents) == [(1, 2), (1, 1)] and chain_of((1, 1), parents) == []
    with pytest.raises(Damaged, match="back"):
        chain_of((1, 1), {(1, 1): (1, 2), (1, 2): (1, 1)})


def test_what_the_next_deltas_may_stand_on() -> None:
    parents: dict[Key, Key | None] = {(1, 1): None, (1, 2): None, (1, 3): None, (1, 4): (1, 2)}
    assert next_bases(parents) == {(1, 2), (1, 3)}
    assert next_bases(parents, goes_on=False) == {(1, 3)}
    assert next_bases({**parents, (2, 5): (1, 3)}) == {(1, 3)}
    assert next_bases({}) == set() and next_bases({(1, 4): (1, 2)}) == set()


def test_steps_that_were_passed_over() -> None:
    delta = Decision(2, True, True, kind=DELTA, base=(1, 1), merge=True)
    nothing = Decision(3, True, False)
    assert merge([delta, nothing]) == Decision(3, True, True, kind=DELTA, base=(1, 1), merge=True)
    newer = Decision(4, True, True, kind=DELTA, base=(1, 3))
    assert merge([delta, newer]) == Decision(4, True, True, kind=DELTA, base=(1, 3), merge=True)
    assert merge([Decision(1, True, True), newer, nothing]) == Decision(3, True, True)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"delta_every": 10, "full_every": 10}, "fulls"),
        ({"delta_every": "2h", "full_every": "1h"}, "fulls"),
        ({"delta_every": 0}, "delta_every"),
        ({"delta_base": "newest"}, "delta_base"),
        ({"max_chain": 0}, "max_chain"),
        ({"max_chain": True}, "max_chain"),
        ({"max_chain": 33}, "max_chain"),
        ({"compress": "gzip"}, "compress"),
        ({"delta_every": "20m", "full_every": "2h", "max_unsaved": "20m"}, "max_unsaved"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], word: str) -> None:
    with pytest.raises(BadOption, match=word):
        Policy(**options)


def test_options_that_can_be_used() -> None:
    Policy(delta_every="2m", full_every="30m", delta_base="previous", max_chain=32, compress="zstd")
    Policy(delta_every=10, full_every="30m", max_unsaved="20m")
    Policy(delta_every=10, full_every=None)
    Policy(delta_every="2m", full_every="1h", max_unsaved="30m")
