"""Chunks of a model on one rank: one state, whatever their number."""

from __future__ import annotations

import copy
from pathlib import Path

import everstep
import pytest
import torch
from everstep import TrainState
from everstep.errors import StateError, StateMismatch
from everstep.state.chunks import Chunks
from everstep.state.codec import StateImage
from everstep.state.names import parameter_names
from everstep.state.optim import is_named
from torch import nn

from .kit import assert_same, save_and_load

LAYERS = 4


class Stage(nn.Module):
    """Some layers of a model, with the names that they have in the whole."""

    def __init__(self, layers: range, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for at in layers:
            torch.manual_seed(100 * seed + at)
            self.layers[str(at)] = nn.Linear(3, 3)
        if layers.stop == LAYERS:
            self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return self.norm(x) if hasattr(self, "norm") else x


def stages(*counts: int, seed: int = 0) -> list[nn.Module]:
    ends = [sum(counts[: at + 1]) for at in range(len(counts))]
    return [Stage(range(end - count, end), seed) for end, count in zip(ends, counts, strict=True)]


def make(*counts: int, seed: int = 0, several: bool = True) -> TrainState:
    """A state of as many chunks as ``counts`` (one: the bare model), with an optimizer for each or one for all."""
    chunks = stages(*counts, seed=seed)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    if len(chunks) == 1:
        return TrainState(chunks[0], torch.optim.AdamW(parameters), rng=False)
    optimizers = [torch.optim.AdamW(chunk.parameters()) for chunk in chunks]
    return TrainState(chunks, optimizers if several else torch.optim.AdamW(parameters), rng=False)


def modules(state: TrainState) -> list[nn.Module]:
    return state.model if isinstance(state.model, list) else [state.model]


def train(state: TrainState, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        for optimizer in state.optimizers():
            optimizer.zero_grad()
        nn.Sequential(*modules(state))(x).sum().square().backward()
        for optimizer in state.optimizers():
            optimizer.step()


def contents(state: TrainState) -> tuple[object, object]:
    names = parameter_names(state)
    model = {name: value for module in modules(state) for name, value in module.state_dict().items()}
    held = [(names[id(key)], dict(value)) for one in state.optimizers() for key, value in one.state.items()]
    return dict(sorted(model.items())), dict(sorted(held))


CHUNKINGS = {
    "whole": lambda seed: make(4, seed=seed),
    "two": lambda seed: make(2, 2, seed=seed),
    "uneven, one optimizer": lambda seed: make(3, 1, seed=seed, several=False),
    "four": lambda seed: make(1, 1, 1, 1, seed=seed),
}


@pytest.mark.parametrize("saved", CHUNKINGS)
@pytest.mark.parametrize("loaded", CHUNKINGS)
def test_any_number_of_chunks_goes_on_from_any_other(tmp_path: Path, saved: str, loaded: str) -> None:
    source, target = CHUNKINGS[saved](0), CHUNKINGS[loaded](1)
    train(source, 2)
    parts = source.live_parts()
    before = [leaf.tensor.data_ptr() for leaf in target.flatten().leaves]
    given = list(modules(target))
    save_and_load(tmp_path, source, target)
    assert source.live_parts().keys() == parts.keys()
    assert [leaf.tensor.data_ptr() for leaf in target.flatten().leaves][: len(before)] == before
    assert all(mine is other for mine, other in zip(modules(target), given, strict=True)), "restored in place"
    assert_same(contents(target), contents(source))
    for state in (source, target):
        train(state, 2, first=2)
    assert_same(contents(target), contents(source))


def test_keys_do_not_say_how_many_chunks_there_were() -> None:
    found = []
    for chunking in CHUNKINGS.values():
        state = chunking(0)
        train(state, 1)
        found.append({(leaf.part, leaf.key) for leaf in state.flatten().leaves})
    assert found[0] == found[1] == found[2] == found[3]
    assert ("optimizer", "state/layers.3.bias/exp_avg") in found[0]
    assert ("model", "norm.running_var") in found[0]


def test_a_mapping_of_parts_may_hold_chunks_too(tmp_path: Path) -> None:
    source, target = make(2, 2), stages(2, 2, seed=1)
    everstep.save(tmp_path / "run", 1, {"model": source.model})
    everstep.load(tmp_path / "run", into={"model": target})
    whole = stages(4, seed=2)
    everstep.load(tmp_path / "run", into={"model": whole[0]})
    for module, other in zip(source.model, target, strict=True):
        assert_same(dict(other.state_dict()), dict(module.state_dict()))
    assert_same(
        dict(sorted(whole[0].state_dict().items())),
        dict(sorted(item for module in source.model for item in module.state_dict().items())),
    )


def test_what_chunks_lack_or_have_too_much_is_named(tmp_path: Path) -> None:
    source, target = make(4), make(1, 2, seed=1)
    train(source, 1)
    target.model[1].extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(StateMismatch) as caught:
        save_and_load(tmp_path, source, target)
    found = caught.value.mismatches
    assert "missing: model/extra: in the target, not in the checkpoint" in found
    assert "unexpected: model/layers.3.weight: in the checkpoint, not in the target" in found
    assert "unexpected: optimizer/state/layers.3.weight: in the checkpoint, not in the target" in found
    assert not any("layers.0" in text for text in found)


def test_modules_of_one_name_are_no_chunks() -> None:
    for state in (
        TrainState([nn.Linear(1, 1), nn.Linear(1, 1)]),
        TrainState([nn.BatchNorm1d(1, affine=False), nn.BatchNorm1d(1, affine=False)]),
    ):
        with pytest.raises(StateError, match=r"two chunks of the model have a .* as a dict"):
            state.flatten()
    with pytest.raises(StateError, match="two chunks of the model have a 'weight'"):
        parameter_names(TrainState([nn.Linear(1, 1), nn.Linear(1, 1)]))


def test_lists_of_anything_else_stay_lists() -> None:
    mixed = TrainState([nn.Linear(1, 1), {"a": torch.ones(1)}], rng=False)
    assert [leaf.key for leaf in mixed.flatten().leaves] == ["[0]/weight", "[0]/bias", "[1]/a"]
    assert TrainState([]).live_parts()["model"] == []
    models = {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}
    optimizers = [torch.optim.SGD(model.parameters(), momentum=0.5) for model in models.values()]
    state = TrainState(models, optimizers, heads=[nn.Linear(1, 1)], rng=False)
    keys = [(leaf.part, leaf.key) for leaf in state.flatten().leaves]
    assert ("model", "a/weight") in keys and ("heads", "[0]/weight") in keys
    assert state.live_parts()["optimizer"] is optimizers


def test_chunks_saved_one_by_one_in_a_list_can_be_loaded(tmp_path: Path) -> None:
    """As lists were, before they were chunks: told from the content."""
    source, target = stages(2, 2), make(2, 2, seed=1)
    everstep.save(tmp_path / "run", 1, {"net": source})
    data = TrainState.of({"net": source}).flatten().state
    assert "net" in StateImage(data).parts
    holder = TrainState.of({"net": Chunks(target.model)})
    everstep.load(tmp_path / "run", into=holder)
    for module, other in zip(source, target.model, strict=True):
        assert_same(dict(other.state_dict()), dict(module.state_dict()))


def test_gradients_of_chunks(tmp_path: Path) -> None:
    def state(seed: int) -> TrainState:
        made = make(2, 2, seed=seed)
        return TrainState(made.model, made.optimizer, rng=False, grads=True, micro_step=0)

    source, target = state(0), state(1)
    nn.Sequential(*source.model)(torch.randn(4, 3)).sum().backward()
    source.micro_step = 3
    save_and_load(tmp_path, source, target)
    assert target.micro_step == 3
    for module, other in zip(source.model, target.model, strict=True):
        for parameter, mine in zip(module.parameters(), other.parameters(), strict=True):
            assert_same(mine.grad, parameter.grad)
    plain = make(2, 2)
    plain.micro_step = 1
    nn.Sequential(*plain.model)(torch.randn(4, 3)).sum().backward()
    with pytest.raises(StateError, match="gradients accumulated"):
        plain.flatten()


def test_state_by_position_says_nothing_of_chunks(tmp_path: Path) -> None:
    source = make(4)
    train(source, 1)
    everstep.save(tmp_path / "run", 1, {"optimizer": source.optimizer})
    assert not is_named(everstep.load(tmp_path / "run")["optimizer"])
    target = make(2, 2)
    with pytest.raises(StateMismatch, match="names: optimizer: stored by position"):
        everstep.load(tmp_path / "run", into=target, allow={"missing"})


def test_another_kind_of_optimizer_is_refused_for_chunks_too(tmp_path: Path) -> None:
    source, target = make(2, 2), make(2, 2, seed=1)
    target.optimizer = [torch.optim.SGD(module.parameters()) for module in target.model]
    with pytest.raises(StateMismatch, match="class: optimizer: state of a AdamW, the target is a SGD"):
        save_and_load(tmp_path, source, target)


def test_the_state_of_chunks_can_be_asked_and_given(tmp_path: Path) -> None:
    chunks, others = Chunks(stages(2, 2)), Chunks(stages(2, 2, seed=1))
    others.load_state_dict(copy.deepcopy(chunks.state_dict()))
    assert_same(dict(others.state_dict()), dict(chunks.state_dict()))
    assert list(chunks.named_parameters())[:2] == ["layers.0.weight", "layers.0.bias"]
