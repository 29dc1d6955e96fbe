"""Flattening with recipes of former flattenings is the same as without, whatever has changed in between."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from everstep.errors import UnsupportedValue
from everstep.state import recipes
from everstep.state.recipes import MISSES_MAX, Recipes
from everstep.state.steady import Steady
from everstep.state.trainstate import TrainState
from everstep.state.tree import FlatState, flatten
from hypothesis import HealthCheck, given, settings
from kit import trees

COUNT = 20


def same(found: FlatState, expected: FlatState) -> None:
    assert found.state == expected.state
    assert found.sharded == expected.sharded
    assert [leaf.spec() for leaf in found.leaves] == [leaf.spec() for leaf in expected.leaves]
    for leaf, other in zip(found.leaves, expected.leaves, strict=True):
        if leaf.tensor is not other.tensor:  # made anew at each flattening
            assert leaf.tensor.data_ptr() == other.tensor.data_ptr() or leaf.tensor.equal(other.tensor)


def tree() -> dict[str, Any]:
    """As a model and its optimizer: one dict of tensors, and one of dicts of tensors and numbers."""
    model = {f"w{i}": torch.full((2, 3), float(i)) for i in range(COUNT)}
    moments = {
        f"w{i}": {"step": torch.tensor(1.0), "avg": torch.zeros(2, 3), "seen": 3, "rate": 0.5, "note": "a"}
        for i in range(COUNT)
    }
    groups = [{"lr": 0.1, "params": [f"w{i}" for i in range(COUNT)]}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}, "steps": 7}


def _replace(state: Any, key: str, value: Any) -> None:
    state[key] = value


def _swap(state: Any) -> None:
    state["w3"], state["w4"] = state["w4"], state["w3"]


def _first_last(state: Any) -> None:
    state["w0"] = state.pop("w0")


def _alias(part: dict[str, Any]) -> None:
    part["state"]["w3"] = part["state"]["w2"]


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing": lambda tree: None,
    "values": lambda tree: tree["model"]["w1"].add_(1),
    "key added": lambda tree: _replace(tree["model"], "more", torch.ones(2)),
    "key gone": lambda tree: tree["model"].pop("w5"),
    "key renamed": lambda tree: _replace(tree["model"], "x5", tree["model"].pop("w5")),
    "order of keys": lambda tree: _first_last(tree["model"]),
    "inner key renamed": lambda tree: _replace(
        tree["optimizer"]["state"]["w1"], "sum", tree["optimizer"]["state"]["w1"].pop("avg")
    ),
    "key of another type": lambda tree: _replace(tree["model"], 5, torch.ones(2)),  # type: ignore[arg-type]
    "tensors swapped": lambda tree: _swap(tree["model"]),
    "tensor replaced": lambda tree: _replace(tree["model"], "w2", torch.ones(2, 3)),
    "dtype": lambda tree: _replace(tree["model"], "w2", torch.ones(2, 3, dtype=torch.bfloat16)),
    "dtype through data": lambda tree: setattr(tree["model"]["w2"], "data", torch.ones(2, 3).double()),
    "shape": lambda tree: _replace(tree["model"], "w2", torch.ones(3, 2)),
    "shape in place": lambda tree: tree["model"]["w7"].resize_(6),
    "storage": lambda tree: setattr(tree["model"]["w2"], "data", torch.ones(2, 3)),
    "strides": lambda tree: setattr(tree["model"]["w2"], "data", torch.ones(3, 2).t()),
    "requires gradients": lambda tree: tree["model"]["w2"].requires_grad_(),
    "a parameter": lambda tree: _replace(tree["model"], "w2", torch.nn.Parameter(torch.ones(2, 3))),
    "a still parameter": lambda tree: _replace(
        tree["model"], "w2", torch.nn.Parameter(torch.ones(2, 3), requires_grad=False)
    ),
    "no leaf of autograd": lambda tree: _replace(
        tree["model"], "w2", torch.nn.Parameter(torch.ones(2, 3)) * 2
    ),
    "negative view": lambda tree: _replace(
        tree["model"], "w2", torch.ones(2, 3, dtype=torch.complex64).conj().imag
    ),
    "complex": lambda tree: _replace(tree["model"], "w2", torch.ones(2, 3, dtype=torch.complex64)),
    "conjugate": lambda tree: _replace(tree["model"], "w2", torch.full((2, 3), 1j).conj()),
    "empty": lambda tree: _replace(tree["model"], "w2", torch.ones(0, 3)),
    "tied": lambda tree: _replace(tree["model"], "w3", tree["model"]["w2"]),
    "tied by a view": lambda tree: _replace(tree["model"], "w3", tree["model"]["w2"].view(2, 3)),
    "same address, other shape": lambda tree: _replace(tree["model"], "w3", tree["model"]["w2"].view(6)),
    "same address, other strides": lambda tree: _replace(
        tree["model"], "w3", tree["model"]["w2"].as_strided((2, 3), (1, 2))
    ),
    "tied to another part": lambda tree: _replace(
        tree["optimizer"]["state"]["w1"], "avg", tree["model"]["w2"]
    ),
    "a dict once more": lambda tree: _alias(tree["optimizer"]),
    "a dict of another part once more": lambda tree: _replace(
        tree, "again", tree["optimizer"]["state"]["w4"]
    ),
    "a number": lambda tree: _replace(tree["optimizer"]["state"]["w1"], "seen", 4),
    "a number of another type": lambda tree: _replace(tree["optimizer"]["state"]["w1"], "seen", 3.0),
    "a truth": lambda tree: _replace(tree["optimizer"]["state"]["w1"], "seen", True),
    "a text": lambda tree: _replace(tree["optimizer"]["state"]["w1"], "note", "b"),
    "a text that is none": lambda tree: _replace(tree["optimizer"]["state"]["w1"], "note", "\ud800"),
    "zero": lambda tree: _replace(tree["optimizer"]["state"]["w1"], "rate", 0.0),
    "minus zero": lambda tree: _replace(tree["optimizer"]["state"]["w1"], "rate", -0.0),
    "not a number": lambda tree: _replace(tree["optimizer"]["state"]["w1"], "rate", math.nan),
    "a large number": lambda tree: _replace(tree["optimizer"]["state"]["w1"], "seen", 1 << 70),
    "nothing for a number": lambda tree: _replace(tree["optimizer"]["state"]["w1"], "seen", None),
    "a list": lambda tree: _replace(tree["optimizer"]["state"]["w1"], "seen", [1]),
    "a learning rate": lambda tree: _replace(tree["optimizer"]["param_groups"][0], "lr", 0.2),
    "leaves before it": lambda tree: _replace(tree["model"], "w0", 1.0),
    "an inner dict deeper": lambda tree: _replace(
        tree["optimizer"]["state"], "w1", {"a": {"b": {"c": torch.ones(1)}}}
    ),
    "another mapping": lambda tree: _replace(tree, "model", collections.OrderedDict(tree["model"])),
}


@pytest.mark.parametrize(
    "first", ["nothing", "tied", "same address, other strides", "a parameter", "complex"]
)
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(first: str, change: str) -> None:
    state, known = tree(), Recipes()
    CHANGES[first](state)
    for _ in range(3):
        same(flatten(state, recipes=known), flatten(state))
    CHANGES[change](state)
    for _ in range(2):
        same(flatten(state, recipes=known), flatten(state))


def test_one_change_after_another() -> None:
    known = Recipes()
    state = tree()
    for change in CHANGES.values():
        for now in (state, tree()):
            try:
                change(now)
            except (KeyError, RuntimeError, TypeError):  # a change before has taken away what this one is of
                continue
            same(flatten(now, recipes=known), flatten(now))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(trees, trees)
def test_any_states(first: Any, second: Any) -> None:
    """One state after another at the same place, both walked and by recipe."""
    known, before = Recipes(), recipes.ITEMS_MIN
    recipes.ITEMS_MIN = 1
    try:
        for value in (first, first, second, {"a": first, "b": second}, {"a": first, "b": second}, first):
            same(flatten({"part": value}, recipes=known), flatten({"part": value}))
    finally:
        recipes.ITEMS_MIN = before


def test_a_known_structure_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes it fast: tensors are not encoded one by one, nor leaves told apart one by one."""
    state, known = tree(), Recipes()
    expected = flatten(state)
    first = flatten(state, recipes=known)
    monkeypatch.setattr("everstep.state.tree.TreeEncoder.leaf", None)
    again = flatten(state, recipes=known)
    same(again, expected)
    assert again.signature() == first.signature() and len(again.signature()) == 2
    assert all(
        tensor is not leaf.tensor
        for _, recipe in again.known
        for tensor in recipe.at
        for leaf in again.leaves
    )


def test_signature_tells_structures_apart() -> None:
    state, known = tree(), Recipes()
    before = flatten(state, recipes=known).signature()
    state["model"]["w3"] = torch.ones(4)
    assert flatten(state, recipes=known).signature() != before
    other = Recipes()
    whole = {**tree(), "last": torch.ones(1)}
    before = flatten(whole, recipes=other).signature()
    whole["last"] = torch.ones(2)
    assert flatten(whole, recipes=other).signature() != before


def test_numbers_that_always_change_are_walked_without_more_ado() -> None:
    state, known = tree(), Recipes()
    for step in range(MISSES_MAX + 3):
        for moments in state["optimizer"]["state"].values():
            moments["seen"] = step
        found = flatten(state, recipes=known)
        same(found, flatten(state))
    assert [part for part, _ in found.known] == ["model"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, 3, device="meta"),
        lambda: torch.ones(2, 3).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.ones(2, 3).to_mkldnn(),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_stored_is_refused_as_ever(make: Callable[[], torch.Tensor]) -> None:
    state, known = tree(), Recipes()
    flatten(state, recipes=known)
    state["model"]["w4"] = make()
    for _ in range(2):
        with pytest.raises(UnsupportedValue, match="model/w4"):
            flatten(state, recipes=known)
    state["model"]["w4"] = torch.ones(2, 3)
    same(flatten(state, recipes=known), flatten(state))


def test_a_cycle_is_refused_as_ever() -> None:
    state: dict[str, Any] = {f"a{i}": {} for i in range(COUNT)}
    known = Recipes()
    flatten({"part": state}, recipes=known)
    state["a3"]["self"] = state
    with pytest.raises(UnsupportedValue, match="holds itself"):
        flatten({"part": state}, recipes=known)


def test_a_change_of_scope_is_seen() -> None:
    """Whose a tensor is may change though the tensor does not."""
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(COUNT)])
    optimizer = torch.optim.Adam(layers.parameters())
    sum(layer(torch.ones(2)).sum() for layer in layers).backward()  # type: ignore[union-attr]
    optimizer.step()
    state, known = TrainState(layers, optimizer, rng=False), Steady()
    same(state.flatten(known), state.flatten())
    for replicated in ({"model"}, {"model", "optimizer"}, {"optimizer"}, set()):
        state.replicated = frozenset(replicated)
        for _ in range(2):
            same(state.flatten(known), state.flatten())
    part = {leaf.part for leaf in state.flatten(known).leaves if leaf.scope.name == "GLOBAL"}
    assert part == set()


def test_nothing_of_the_state_is_kept() -> None:
    """No tensor and no container lives on in a recipe."""
    import gc
    import weakref

    state, known = tree(), Recipes()
    flat = flatten(state, recipes=known)
    flat = flatten(state, recipes=known)
    alive = [weakref.ref(leaf.tensor) for leaf in flat.leaves]
    del state, flat
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_late_tensors_are_those_of_the_optimizer() -> None:
    layers = torch.nn.ModuleList([torch.nn.BatchNorm1d(4) for _ in range(COUNT)])
    optimizer = torch.optim.Adam(layers.parameters())
    x = torch.rand(3, 4)
    for layer in layers:
        x = layer(x)
    x.sum().backward()
    optimizer.step()
    state, known = TrainState(layers, optimizer, rng=False, copy=torch.ones(3)), Steady()
    for _ in range(2):
        flat = state.flatten(known)
        late = {flat.leaves[index].key for index in state.late_tensors(flat.leaves)}
        assert late == {
            leaf.key
            for leaf in flat.leaves
            if leaf.part == "optimizer" or leaf.key.endswith(("weight", "bias"))
        }
