"""Lineage: which steps of which incarnations count."""

from __future__ import annotations

import dataclasses
import random

import pytest
from everstep.errors import Damaged
from everstep.format.records import IncarnationRecord, Writer
from everstep.plan.lineage import NOTHING, Lineage
from hypothesis import given
from hypothesis import strategies as st


def record(
    number: int, adopted: tuple[int, int] | None = None, fresh: str | None = None
) -> IncarnationRecord:
    return IncarnationRecord(
        number=number,
        id=f"id{number}",
        parent=number - 1 if number > 1 and fresh is None else None,
        adopted_incarnation=adopted[0] if adopted else None,
        adopted_step=adopted[1] if adopted else None,
        fresh=fresh,
        world=1,
        mesh={},
        config_hash=None,
        config=None,
        config_changes={},
        config_reason=None,
        loosened=(),
        writer=Writer("h", "b", 1, 1),
        created="",
    )


def test_a_run_without_incarnations_counts_nothing() -> None:
    lineage = Lineage([])
    assert lineage.newest is None and lineage.chain == ()
    assert not lineage.counts(1, 1)


def test_what_was_written_beyond_the_adopted_step_was_given_up() -> None:
    lineage = Lineage([record(2, (1, 8)), record(1)])
    assert (lineage.newest, lineage.chain) == (2, (2, 1))
    assert lineage.counts(1, 8) and not lineage.counts(1, 9)
    assert lineage.counts(2, 9) and lineage.counts(2, 10**12)
    assert (lineage.cut(2), lineage.cut(1), lineage.cut(7)) == (None, 8, NOTHING)


def test_an_ancestor_counts_up_to_the_least_cut_on_the_way() -> None:
    lineage = Lineage([record(1), record(2, (1, 8)), record(3, (2, 20)), record(4, (1, 5))])
    assert lineage.chain == (4, 1)
    assert (lineage.cut(1), lineage.cut(2), lineage.cut(3)) == (5, NOTHING, NOTHING)
    deep = Lineage([record(1), record(2, (1, 30)), record(3, (2, 20))])
    assert (deep.cut(2), deep.cut(1)) == (20, 20)


def test_an_incarnation_beside_the_chain_does_not_count() -> None:
    lineage = Lineage([record(1), record(2, (1, 3)), record(3, (1, 8))])
    assert not lineage.counts(2, 4) and lineage.counts(1, 8)


def test_nothing_before_a_fresh_start_counts() -> None:
    lineage = Lineage([record(1), record(2, fresh="other data"), record(3, (2, 4))])
    assert lineage.chain == (3, 2) and not lineage.counts(1, 1)


def test_a_missing_record_is_damage_not_a_shorter_history() -> None:
    with pytest.raises(Damaged, match="missing") as caught:
        Lineage([record(3, (2, 4))])
    assert caught.value.name == "incarnations/0002.json"
    Lineage([record(3, (1, 4)), record(1)])  # 2 is nobody's ancestor


def test_an_adoption_never_leads_forward() -> None:
    loop = dataclasses.replace(record(1), adopted_incarnation=2, adopted_step=1)
    with pytest.raises(Damaged, match="later one"):
        Lineage([loop, record(2, (1, 8))])


@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_against_following_the_adoptions(rng: random.Random, count: int) -> None:
    """A step counts if, and only if, the newest state descends from it: histories are replayed."""
    history: dict[int, list[tuple[int, int]]] = {}
    records = []
    for number in range(1, count + 1):
        choices = [key for keys in history.values() for key in keys]
        adopted = rng.choice(choices) if choices and rng.random() < 0.85 else None
        records.append(record(number, adopted))
        past: list[tuple[int, int]] = []
        if adopted is not None:
            line = history[adopted[0]]
            past = line[: line.index(adopted) + 1]
        start = adopted[1] if adopted else 0
        history[number] = [*past, *((number, start + i) for i in range(1, rng.randint(2, 5)))]
    lineage = Lineage(records)
    mine = set(history[count])
    for number in range(1, count + 1):
        for step in range(0, 45):
            written = (number, step) in history[number]
            if written:
                assert lineage.counts(number, step) == ((number, step) in mine)
