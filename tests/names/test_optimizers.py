"""Optimizers restored by the names of their parameters, in whatever order and groups they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from everstep import TrainState
from everstep.errors import StateError, StateMismatch
from everstep.state.names import parameter_names
from everstep.state.optim import is_named, merge_states, named_content
from torch import nn

from .kit import NAMES, Net, assert_same, by_name, save_and_load, train

Make = Callable[[Any], torch.optim.Optimizer]

KINDS: dict[str, Make] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True, foreach=False),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "tensor rate": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01), foreach=False),
}

GROUPINGS: dict[str, Sequence[Sequence[int]]] = {
    "as it was": [[0, 1, 2, 3, 4]],
    "reversed": [[4, 3, 2, 1, 0]],
    "layers changed": [[2, 3, 0, 1, 4]],
    "two groups": [[2, 0], [3, 4, 1]],
    "one each": [[1], [4], [0], [3], [2]],
}


def grouped(model: nn.Module, groups: Sequence[Sequence[int]], make: Make) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return make([{"params": [parameters[at] for at in group]} for group in groups])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_a_regrouped_run_goes_on_as_the_unbroken_one(tmp_path: Path, kind: str, grouping: str) -> None:
    model = Net()
    source = TrainState(model, grouped(model, [[0, 1, 2, 3, 4]], KINDS[kind]))
    train(model, source.optimizers(), 3)
    other = Net(seed=7)
    target = TrainState(other, grouped(other, GROUPINGS[grouping], KINDS[kind]))
    save_and_load(tmp_path, source, target)
    assert_same(by_name(target), by_name(source))
    for state in (source, target):
        train(state.model, state.optimizers(), 3, first=3)
    assert_same(dict(other.named_parameters()), dict(model.named_parameters()))
    assert_same(by_name(target), by_name(source))


def test_warm_state_is_filled_in_place(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=7)
    source = TrainState(model, torch.optim.AdamW(model.parameters()))
    target = TrainState(other, grouped(other, GROUPINGS["layers changed"], torch.optim.AdamW))
    for state in (source, target):
        train(state.model, state.optimizers(), 2, first=5)
    before = [leaf.tensor.data_ptr() for leaf in target.flatten().leaves]
    save_and_load(tmp_path, source, target)
    assert_same(by_name(target), by_name(source))
    assert [leaf.tensor.data_ptr() for leaf in target.flatten().leaves] == before


def test_keys_are_names(tmp_path: Path) -> None:
    model = Net()
    state = TrainState(model, torch.optim.AdamW(model.parameters()))
    train(model, state.optimizers(), 1)
    everstep.save(tmp_path / "run", 1, state)
    stored = everstep.load(tmp_path / "run")["optimizer"]
    assert list(stored["state"]) == stored["param_groups"][0]["params"] == NAMES
    assert_same(stored["state"]["b.weight"], dict(state.optimizer.state[model.b.weight]))
    # torch takes it too: the names stand for positions.
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(stored)
    assert_same(fresh.state_dict(), state.optimizer.state_dict())


def test_options_go_with_their_parameters(tmp_path: Path) -> None:
    def make(seed: int, order: str) -> TrainState:
        model = Net(seed)
        weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        biases = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        groups = {"w": {"params": weights}, "b": {"params": biases}, "h": {"params": [weights.pop()]}}
        return TrainState(model, torch.optim.AdamW([groups[letter] for letter in order], lr=1.0))

    source, target = make(0, "wbh"), make(1, "hbw")
    for number, group in enumerate(source.optimizer.param_groups):
        group.update(lr=0.1 * (number + 1), weight_decay=0.0 if number == 1 else 0.3)
    train(source.model, source.optimizers(), 2)
    save_and_load(tmp_path, source, target)
    assert_same(by_name(target), by_name(source))
    assert [group["lr"] for group in target.optimizer.param_groups] == [0.1 * 3, 0.1 * 2, 0.1]


def test_one_group_cannot_have_two_options(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=1)
    source = TrainState(model, grouped(model, [[0, 2, 4], [1, 3]], torch.optim.AdamW))
    target = TrainState(other, torch.optim.AdamW(other.parameters()))
    source.optimizer.param_groups[1]["weight_decay"] = 0.5
    source.optimizer.param_groups[1]["initial_lr"] = 1.0
    train(model, source.optimizers(), 1)
    before = copy.deepcopy(target.optimizer.state_dict())
    with pytest.raises(StateMismatch) as caught:
        save_and_load(tmp_path, source, target)
    found = caught.value.mismatches
    assert [text.partition(": one group")[0] for text in found] == [
        "options: optimizer/param_groups/[0]/initial_lr",
        "options: optimizer/param_groups/[0]/weight_decay",
    ]
    assert "0.01 for a.weight, 0.5 for a.bias" in found[1] and "nothing for a.weight" in found[0]
    assert_same(target.optimizer.state_dict(), before)


def test_tensor_options_are_compared_once_they_are_read(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=1)
    make = KINDS["tensor rate"]
    source = TrainState(model, grouped(model, [[0, 2, 4], [1, 3]], make))
    train(model, source.optimizers(), 1)
    for group in source.optimizer.param_groups:
        group["lr"] = torch.tensor(0.5)
    target = TrainState(other, make(other.parameters()))
    save_and_load(tmp_path, source, target)
    assert target.optimizer.param_groups[0]["lr"] == torch.tensor(0.5)
    source.optimizer.param_groups[1]["lr"] = torch.tensor(0.25)
    with pytest.raises(StateMismatch, match=r"/lr: one group.* for a\.weight, .* for a\.bias"):
        save_and_load(tmp_path, source, target)


def test_an_option_that_is_not_stored_is_named(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=1)
    source = TrainState(model, torch.optim.AdamW(model.parameters()))
    train(model, source.optimizers(), 1)
    del source.optimizer.param_groups[0]["amsgrad"]
    target = TrainState(other, torch.optim.AdamW(other.parameters(), amsgrad=True))
    with pytest.raises(
        StateMismatch, match=r"missing: optimizer/param_groups/\[0\]/amsgrad: .*for a\.weight"
    ):
        save_and_load(tmp_path, source, target)
    save_and_load(tmp_path, source, target, allow={"missing"})
    assert target.optimizer.param_groups[0]["amsgrad"] is True


def test_missing_parameters_are_named_and_keep_what_they_have(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=1)
    source = TrainState(model, torch.optim.AdamW([*model.a.parameters(), *model.head.parameters()], lr=0.5))
    target = TrainState(other, torch.optim.AdamW(other.parameters()))
    train(model, source.optimizers(), 1)
    train(other, target.optimizers(), 2)
    before = copy.deepcopy(by_name(target))
    with pytest.raises(StateMismatch) as caught:
        save_and_load(tmp_path, source, target)
    assert sorted(caught.value.mismatches) == [
        f"missing: optimizer/state/{name}: in the target, not in the checkpoint"
        for name in ("b.bias", "b.weight")
    ]
    save_and_load(tmp_path, source, target, allow={"missing"})
    found, stored = by_name(target), by_name(source)
    for name in NAMES:
        assert_same(
            found[name]["state"], (before if name in ("b.weight", "b.bias") else stored)[name]["state"]
        )
        assert found[name]["options"]["lr"] == 0.5


def test_unexpected_parameters_are_named(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=1)
    source = TrainState(model, torch.optim.AdamW(model.parameters()))
    target = TrainState(other, torch.optim.AdamW([*other.head.parameters(), *other.a.parameters()]))
    train(model, source.optimizers(), 2)
    with pytest.raises(StateMismatch) as caught:
        save_and_load(tmp_path, source, target)
    assert sorted(caught.value.mismatches) == [
        f"unexpected: optimizer/state/{name}: in the checkpoint, not in the target"
        for name in ("b.bias", "b.weight")
    ]
    save_and_load(tmp_path, source, target, allow={"unexpected"})
    stored = by_name(source)
    assert_same(by_name(target), {name: stored[name] for name in ("head.weight", "a.weight", "a.bias")})


def test_none_of_the_parameters_is_an_error_even_when_loosened(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=1)
    source = TrainState(model, torch.optim.AdamW(model.a.parameters()))
    target = TrainState(other, torch.optim.AdamW(other.b.parameters()))
    train(model, source.optimizers(), 1)
    with pytest.raises(StateMismatch, match="nothing: optimizer: none of 2 parameters"):
        save_and_load(tmp_path, source, target, allow={"missing", "unexpected"})


def test_parameters_without_state_stay_without(tmp_path: Path) -> None:
    def make(seed: int) -> TrainState:
        model = Net(seed)
        model.b.requires_grad_(False)
        return TrainState(model, torch.optim.AdamW(reversed(list(model.parameters()))))

    source, target = make(0), make(1)
    train(source.model, source.optimizers(), 2)
    save_and_load(tmp_path, source, target)
    assert len(target.optimizer.state) == 3
    assert_same(by_name(target), by_name(source))
    # Also where the target had some.
    target.model.b.requires_grad_(True)
    train(target.model, target.optimizers(), 1)
    assert len(target.optimizer.state) == 5
    save_and_load(tmp_path, source, target)
    assert_same(by_name(target), by_name(source))


def test_several_optimizers_share_the_names_of_one_model(tmp_path: Path) -> None:
    def make(seed: int, order: slice) -> TrainState:
        model = Net(seed)
        matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2][order]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1][order]
        sgd, adam = torch.optim.SGD(matrices, lr=0.01, momentum=0.9), torch.optim.AdamW(vectors)
        return TrainState(model, {"matrices": sgd, "vectors": adam})

    source, target = make(0, slice(None)), make(1, slice(None, None, -1))
    train(source.model, source.optimizers(), 3)
    save_and_load(tmp_path, source, target)
    assert_same(by_name(target), by_name(source))


def test_named_groups_keep_their_names(tmp_path: Path) -> None:
    """torch's own names of parameters go with them, and need not be ours."""
    model, other = Net(), Net(seed=1)
    source = TrainState(model, torch.optim.AdamW([(f"my.{n}", p) for n, p in model.named_parameters()]))
    train(model, source.optimizers(), 1)
    named = list(reversed([(f"my.{n}", p) for n, p in other.named_parameters()]))
    target = TrainState(other, torch.optim.AdamW(named))
    save_and_load(tmp_path, source, target)
    assert target.optimizer.param_groups[0]["param_names"] == [name for name, _ in named]
    assert_same(by_name(target), by_name(source))
    bare = TrainState(other, torch.optim.AdamW(reversed(list(other.parameters()))))
    save_and_load(tmp_path, source, bare)
    assert bare.optimizer.param_groups[0]["param_names"] == [name for name, _ in named]


@pytest.mark.parametrize("reverse", [False, True])
def test_lbfgs_needs_the_same_order(tmp_path: Path, reverse: bool) -> None:
    """All its state is that of the first parameter, for all of them."""

    def make(seed: int, reverse: bool) -> TrainState:
        model = Net(seed)
        parameters = list(model.parameters())
        return TrainState(model, torch.optim.LBFGS(parameters[::-1] if reverse else parameters, max_iter=4))

    source, target = make(0, False), make(1, reverse)
    train(source.model, source.optimizers(), 2)
    if reverse:
        with pytest.raises(StateMismatch, match="order: optimizer: the state of LBFGS"):
            save_and_load(tmp_path, source, target)
        return
    save_and_load(tmp_path, source, target)
    assert_same(by_name(target), by_name(source))
    for state in (source, target):
        train(state.model, state.optimizers(), 2, first=2)
    assert_same(dict(target.model.named_parameters()), dict(source.model.named_parameters()))


# By position.
def test_without_the_model_state_is_stored_by_position(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=1)
    source = TrainState(optimizer=torch.optim.AdamW(model.parameters()), rng=False)
    train(model, source.optimizers(), 2)
    root = tmp_path / "positions"
    everstep.save(root, 1, source)
    assert list(everstep.load(root)["optimizer"]["state"]) == [0, 1, 2, 3, 4]
    # Such a checkpoint is loaded by position, whether the target has names or not.
    for target in (
        TrainState(optimizer=torch.optim.AdamW(other.parameters()), rng=False),
        TrainState(rng=False, optimizer=torch.optim.AdamW(other.parameters()), ema=other),
    ):
        everstep.load(root, into=target, allow={"missing"} if target.ema else ())
        assert_same(target.optimizer.state_dict(), source.optimizer.state_dict())


def test_state_by_name_into_an_optimizer_without_names_says_what_is_missing(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=1)
    source = TrainState(model, torch.optim.AdamW(model.parameters()), rng=False)
    train(model, source.optimizers(), 1)
    target = TrainState(optimizer=torch.optim.AdamW(other.parameters()), rng=False)
    with pytest.raises(
        StateMismatch, match=r"names: optimizer: .*parameter 0 of group 0, .*give it the modules"
    ):
        save_and_load(tmp_path, source, target, allow={"unexpected"})
    assert not target.optimizer.state


def test_content_that_is_not_of_torchs_form_stays_as_it_is() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    names = parameter_names(TrainState(model))
    content = optimizer.state_dict()
    assert is_named(named_content(optimizer, content, names)) and not is_named(content)
    # State of no parameter keeps its key, and must not pass for a parameter's.
    optimizer.state["shared"] = {"count": 3}  # type: ignore[index]
    assert named_content(optimizer, optimizer.state_dict(), names)["state"]["shared"] == {"count": 3}
    optimizer.state["a.bias"] = {"count": 3}  # type: ignore[index]
    for other in (
        {"anything": 1},
        {"state": {}, "param_groups": {}},
        {**content, "param_groups": []},
        {**content, "param_groups": [{"params": [0]}]},
        {**content, "param_groups": [{"params": list("abcde")}]},
        optimizer.state_dict(),
    ):
        assert named_content(optimizer, other, names) is other


def test_state_of_no_parameter_is_restored(tmp_path: Path) -> None:
    model, other = Net(), Net(seed=1)
    source = TrainState(model, torch.optim.AdamW(model.parameters()))
    train(model, source.optimizers(), 1)
    source.optimizer.state["shared"] = {"count": 3, "rows": torch.arange(3)}
    target = TrainState(other, torch.optim.AdamW(reversed(list(other.parameters()))))
    save_and_load(tmp_path, source, target)
    assert_same(target.optimizer.state["shared"], source.optimizer.state["shared"])
    assert_same(by_name(target), by_name(source))


def test_states_of_stages_are_united() -> None:
    first = {
        "state": {"a": {"step": 1}, "b": {"step": 2}},
        "param_groups": [{"lr": 1, "params": ["a", "b"]}, {"lr": 2, "params": []}],
        "seen": 1,
    }
    second = {
        "state": {"b": {"step": 9}, "c": {"step": 3}},
        "param_groups": [
            {"lr": 3, "params": ["b"], "param_names": ["B"]},
            {"lr": 4, "params": ["b", "c", "d"], "param_names": ["B", "C", "D"]},
        ],
    }
    assert merge_states([first, second]) == {
        "state": {"a": {"step": 1}, "b": {"step": 2}, "c": {"step": 3}},
        "param_groups": [
            {"lr": 1, "params": ["a", "b"]},
            {"lr": 4, "params": ["c", "d"], "param_names": ["C", "D"]},
        ],
        "seen": 1,
    }
    assert first["param_groups"][1] == {"lr": 2, "params": []}, "the given ones stay as they are"
    with pytest.raises(StateMismatch, match="by position"):
        merge_states([first, {"state": {}, "param_groups": [{"params": [0]}]}])


def test_chunks_of_two_optimizers_cannot_share_a_parameter() -> None:
    model = Net()
    both = [torch.optim.SGD(model.a.parameters()), torch.optim.SGD(model.parameters())]
    with pytest.raises(StateError, match=r"two optimizers have the parameter 'a\.bias'"):
        TrainState([model], both).flatten()
    lone = [torch.optim.SGD(model.parameters()), torch.optim.SGD(nn.Linear(1, 1).parameters())]
    with pytest.raises(StateError, match="optimizer 1 has parameters of no chunk"):
        TrainState([model], lone).flatten()
