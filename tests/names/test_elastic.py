"""Random numbers and data positions where another number of ranks goes on."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from everstep import TrainState
from everstep.errors import BadOption, StateError, StateMismatch
from everstep.state.elastic import check_data, derive_rng, reshard_loader_state
from everstep.state.rng import RandomState


def drawn(state: dict[str, Any]) -> dict[str, list[float]]:
    """What each generator gives first."""
    RandomState().load_state_dict(state)
    return {
        "python": [random.random() for _ in range(4)],
        "numpy": np.random.rand(4).tolist(),
        "torch": torch.rand(4, dtype=torch.float64).tolist(),
    }


@pytest.fixture(autouse=True)
def own_random_state() -> Any:
    before = RandomState().state_dict()
    yield
    RandomState().load_state_dict(before)


def stored(seed: int = 1) -> dict[str, Any]:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    np.random.standard_normal()
    return RandomState().state_dict()


def test_random_numbers_are_the_same_at_each_load_and_others_on_each_rank() -> None:
    state = stored()
    before = copy.deepcopy(state)
    found = {
        (world, rank): drawn(derive_rng(state, world, rank)) for world in (2, 3) for rank in range(world)
    }
    again = drawn(derive_rng(stored(), 3, 1))
    assert again == found[3, 1]
    for kind in ("python", "numpy", "torch"):
        draws = [tuple(one[kind]) for one in found.values()]
        assert len(set(draws)) == len(draws), f"{kind}: each number of ranks and each rank its own"
    assert len({one[0] for draws in found.values() for one in draws.values()}) == 3 * len(found)
    assert repr(state) == repr(before)


def test_every_generator_of_the_saved_rank_counts() -> None:
    first = stored()
    reference = drawn(derive_rng(first, 2, 0))
    for kind in ("python", "numpy", "torch"):
        other = {**first, kind: stored(2)[kind]}
        changed = drawn(derive_rng(other, 2, 0))
        assert all(changed[name] != reference[name] for name in reference), kind
    late = list(first["numpy"])
    late[2] += 1
    assert drawn(derive_rng({**first, "numpy": tuple(late)}, 2, 0)) != reference


def test_the_derivation_is_this_one() -> None:
    """It is stated in the docs: a run gone on with later must draw the same numbers."""
    state = {
        "python": (3, tuple(range(625)), None),
        "numpy": ("MT19937", np.arange(624, dtype=np.uint32), 7, 0, 0.0),
        "torch": bytes(range(200)),
        "cuda": [],
    }
    found = drawn(derive_rng(state, 4, 1))
    assert {kind: values[0] for kind, values in found.items()} == DERIVED


DERIVED = {"python": 0.7223638242601667, "numpy": 0.5859819219762363, "torch": 0.39059744658814666}


def test_what_is_derived_fits_the_generators() -> None:
    state = derive_rng(stored(), 5, 4)
    assert state.keys() == RandomState().state_dict().keys()
    assert len(state["torch"]) == len(torch.get_rng_state()) and state["cuda"] == []
    with pytest.raises(StateMismatch, match="no state of the random number generators"):
        derive_rng({"python": 1}, 2, 0)


def test_finite_data_and_a_stream_are_not_each_other() -> None:
    for live in (None, "finite", "stream"):
        for other in (None, "finite", "stream"):
            if live and other and live != other:
                with pytest.raises(StateMismatch, match="data of another kind") as caught:
                    check_data(live, other)
                assert live in str(caught.value) and other in str(caught.value)
            else:
                check_data(live, other)


def test_the_users_function_divides_the_loaders_states() -> None:
    def divide(states: list[Any], rank: int, world: int) -> Any:
        return {"at": sum(one["at"] for one in states) // world, "rank": rank}

    states = [{"at": 4}, {"at": 8}]
    assert reshard_loader_state(TrainState(reshard_loader=divide), states, 2, 3) == {"at": 4, "rank": 2}
    kept = TrainState(reshard_loader=lambda states, rank, world: states.clear())
    assert reshard_loader_state(kept, states, 0, 3) is None and len(states) == 2


def test_without_it_the_error_says_what_to_do() -> None:
    with pytest.raises(StateMismatch, match="reshard_loader=fn") as caught:
        reshard_loader_state(TrainState(), [{}, {}], 0, 3)
    assert 'allow={"loader"}' in str(caught.value) and "2 ranks" in str(caught.value)

    def fails(states: list[Any], rank: int, world: int) -> Any:
        raise KeyError("at")

    with pytest.raises(StateError, match=r"failed for rank 1 of 3: KeyError: 'at'"):
        reshard_loader_state(TrainState(reshard_loader=fails), [{}], 1, 3)
    with pytest.raises(BadOption, match="reshard_loader="):
        TrainState(reshard_loader=3)  # type: ignore[arg-type]
