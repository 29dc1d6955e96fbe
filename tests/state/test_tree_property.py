"""Any state tree comes back equal in type, structure, order, dtype and bits; saved again it is the same."""

from __future__ import annotations

from typing import Any

import pytest
from everstep.state.codec import StateImage
from everstep.state.compare import equal_states
from everstep.state.restore import fill_from, values
from everstep.state.tree import flatten
from hypothesis import HealthCheck, given, settings
from kit import entries_of, round_trip, trees

_HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large]


def _check(tree: Any) -> None:
    flat = flatten({"part": tree})
    keys = [leaf.key for leaf in flat.leaves]
    assert len(set(keys)) == len(keys)
    found = values(StateImage(flat.state), entries_of(flat), fill_from(flat.leaves))["part"]
    assert equal_states(tree, found) == []
    again = flatten({"part": found})
    assert again.state == flat.state
    assert [leaf.spec() for leaf in again.leaves] == [leaf.spec() for leaf in flat.leaves]


@settings(max_examples=250, deadline=None, suppress_health_check=_HEALTH)
@given(trees)
def test_round_trip(tree: Any) -> None:
    _check(tree)


@pytest.mark.long
@settings(max_examples=10000, deadline=None, suppress_health_check=_HEALTH)
@given(trees)
def test_round_trip_long(tree: Any) -> None:
    _check(tree)


@settings(max_examples=60, deadline=None, suppress_health_check=_HEALTH)
@given(trees, trees)
def test_comparing_tells_different_trees_apart(first: Any, second: Any) -> None:
    """The comparison that the round trip relies on must not be blind: trees of other bytes are told apart."""
    a, b = flatten({"part": first}), flatten({"part": second})
    if a.state != b.state:
        assert equal_states(round_trip(first), round_trip(second)) != []
