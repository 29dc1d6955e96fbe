"""Owners: balanced, sticky, the same everywhere."""

from __future__ import annotations

import random

import pytest
from everstep.plan.owners import Owners
from hypothesis import given
from hypothesis import strategies as st

KEYS = st.lists(
    st.tuples(st.sampled_from("mo"), st.text("abc", max_size=4), st.integers(0, 1000)),
    unique_by=lambda item: item[:2],
    max_size=30,
)


def loads(owners: dict[tuple[str, str], int], items: list[tuple[str, str, int]], world: int) -> list[int]:
    found = [0] * world
    for part, key, nbytes in items:
        found[owners[part, key]] += nbytes
    return found


@given(KEYS, st.integers(1, 5), st.randoms(use_true_random=False))
def test_ranks_agree_whatever_the_order(
    items: list[tuple[str, str, int]], world: int, rng: random.Random
) -> None:
    shuffled = list(items)
    rng.shuffle(shuffled)
    found = Owners(world).assign(items)
    assert found == Owners(world).assign(shuffled)
    assert set(found) == {item[:2] for item in items}
    assert all(0 <= rank < world for rank in found.values())


@given(KEYS, st.integers(1, 5))
def test_no_rank_has_more_than_the_least_and_one_entry(items: list[tuple[str, str, int]], world: int) -> None:
    found = loads(Owners(world).assign(items), items, world)
    assert max(found) - min(found) <= max((nbytes for _, _, nbytes in items), default=0)


@given(KEYS, KEYS, st.integers(1, 5))
def test_late_entries_move_nobody(
    first: list[tuple[str, str, int]], second: list[tuple[str, str, int]], world: int
) -> None:
    owners = Owners(world)
    before = owners.assign(first)
    late = [item for item in second if item[:2] not in before]
    after = owners.assign([*late, *first])
    assert {key: after[key] for key in before} == before
    grown = [(part, key, nbytes + 7) for part, key, nbytes in [*first, *late]]
    assert owners.assign(grown) == after


def test_late_entries_go_to_who_has_least() -> None:
    owners = Owners(2)
    assert owners.assign([("m", "big", 10), ("m", "small", 1)]) == {("m", "big"): 0, ("m", "small"): 1}
    assert owners.assign([("m", "big", 10), ("m", "small", 1), ("m", "new", 1)])["m", "new"] == 1


def test_vanished_entries_are_forgotten() -> None:
    owners = Owners(2)
    owners.assign([("m", f"{i}", 1) for i in range(100)])
    assert owners.assign([("m", "0", 1)]) == {("m", "0"): 0}
    assert len(owners._owner) == 1


def test_a_world_has_a_rank() -> None:
    with pytest.raises(ValueError):
        Owners(0)
