"""Names of parameters: as the modules' own state has them, whatever is wrapped around."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from everstep import TrainState
from everstep.errors import StateError
from everstep.format.layout import Scope
from everstep.state import objects
from everstep.state.names import parameter_names
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from .kit import NAMES, Net, assert_same, by_name, save_and_load, train


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def names_of(state: TrainState) -> list[str]:
    return list(parameter_names(state).values())


def _ddp(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def _inside(wrap: Any) -> nn.Module:
    model = Net()
    model.a, model.head = wrap(model.a), wrap(model.head)
    return model


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPPED = {
    "bare": Net,
    "ddp": lambda: _ddp(Net()),
    "data parallel": lambda: nn.DataParallel(Net()),
    "compiled": lambda: _compiled(Net()),
    "compiled ddp": lambda: _compiled(_ddp(Net())),
    "checkpointed": lambda: checkpoint_wrapper(Net()),
    "checkpointed inside": lambda: _ddp(_inside(checkpoint_wrapper)),
    "compiled inside": lambda: _inside(_compiled),
    "compiled in checkpointed": lambda: _inside(lambda module: checkpoint_wrapper(_compiled(module))),
    "ddp inside": lambda: _inside(_ddp),
    "fsdp": lambda: FullyShardedDataParallel(
        _inside(checkpoint_wrapper), use_orig_params=True, device_id=torch.device("cpu")
    ),
    "fsdp2": lambda: fully_shard(_inside(fully_shard)),
}


@pytest.mark.filterwarnings("ignore:FSDP is switching", "ignore:When using ``NO_SHARD``")
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_wrappers_leave_no_trace_in_the_names(group: None, wrapper: str) -> None:
    model = WRAPPED[wrapper]()
    assert sorted(names_of(TrainState(model))) == sorted(NAMES)
    assert sorted(objects.named_parameters(model)) == sorted(NAMES)
    assert sorted(objects.state_of(model, "model")) == sorted(NAMES), "the state has the same names"


@pytest.mark.parametrize("wrapper", [name for name in WRAPPED if "fsdp" not in name])
def test_optimizer_state_passes_between_wrapped_and_bare(group: None, tmp_path: Path, wrapper: str) -> None:
    def make(model: nn.Module) -> TrainState:
        return TrainState(model, torch.optim.AdamW(model.parameters()), rng=False)

    source, target = make(Net()), make(WRAPPED[wrapper]())
    train(source.model, source.optimizers(), 2)
    save_and_load(tmp_path, source, target)
    assert_same(by_name(target), by_name(source))
    back = make(Net(seed=5))
    save_and_load(tmp_path, target, back)
    assert_same(by_name(back), by_name(source))


def test_moments_of_sharded_parameters_keep_their_dtype(group: None, tmp_path: Path) -> None:
    """torch casts optimizer state to its parameter's dtype, that of DTensors too; a fresh optimizer's state is made
    as the parameters are sharded."""

    def make(seed: int, cold: bool) -> TrainState:
        model = fully_shard(Net(seed).bfloat16())
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters() if not cold else ():
            moment = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
            optimizer.state[parameter] = {
                "step": torch.tensor(3.0),
                "exp_avg": moment,
                "exp_avg_sq": moment / 3,
            }
        return TrainState(model, optimizer, rng=False)

    source = make(0, cold=False)
    for cold in (True, False):
        target = make(1, cold)
        save_and_load(tmp_path, source, target)
        found, stored = by_name(target), by_name(source)
        assert found.keys() == stored.keys() == set(NAMES)
        for name in NAMES:
            for key in ("exp_avg", "exp_avg_sq"):
                mine, other = found[name]["state"][key], stored[name]["state"][key]
                assert type(mine) is DTensor and mine.dtype == torch.float32
                assert mine.placements == other.placements
                assert_same(mine.to_local(), other.to_local())
        assert_same(target.model.a.weight.to_local(), source.model.a.weight.to_local())


def test_tied_parameters_have_their_first_name() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 3), "out": nn.Linear(3, 3, bias=False)})
    model.out.weight = model.embed.weight
    assert names_of(TrainState(model)) == ["embed.weight"]
    shared = nn.Linear(2, 2)
    assert names_of(TrainState(nn.Sequential(shared, nn.ReLU(), shared))) == ["0.weight", "0.bias"]
    # A module met again in another part is what it was in the model.
    names = parameter_names(TrainState(model, rng=False, ema=copy.deepcopy(model), head=model.out))
    assert sorted(names.values()) == ["ema.embed.weight", "embed.weight"]


def test_other_parts_and_places_have_prefixes() -> None:
    state = TrainState(
        {"g": nn.Linear(1, 1, bias=False), "d": [nn.Linear(1, 1, bias=False)]},
        critic=nn.Linear(1, 1, bias=False),
        several=(nn.Linear(1, 1, bias=False),),
    )
    assert names_of(state) == ["g.weight", "d.0.weight", "critic.weight", "several.0.weight"]
    assert names_of(TrainState.of({"model": nn.Linear(1, 1), "x": 1})) == ["weight", "bias"]
    assert names_of(TrainState.of(nn.Linear(1, 1))) == ["bare_value.weight", "bare_value.bias"]


def test_of_two_parameters_with_one_name_the_second_has_none(tmp_path: Path) -> None:
    """Then its optimizer is stored by position."""

    def make(seed: int) -> TrainState:
        torch.manual_seed(seed)
        model, ema = nn.ModuleDict({"ema": nn.Linear(2, 2, bias=False)}), nn.Linear(2, 2, bias=False)
        optimizers = {
            "model": torch.optim.Adam(model.parameters()),
            "ema": torch.optim.Adam(ema.parameters()),
        }
        for parameter in (*model.parameters(), *ema.parameters()):
            parameter.grad = torch.rand_like(parameter)
        for optimizer in optimizers.values():
            optimizer.step()
        return TrainState(model, optimizers, ema=ema, rng=False)

    source, target = make(1), make(2)
    assert names_of(source) == ["ema.weight"]
    keys = [leaf.key for leaf in source.flatten().leaves if leaf.part == "optimizer"]
    assert "model/state/ema.weight/exp_avg" in keys and "ema/state/#0/exp_avg" in keys
    save_and_load(tmp_path, source, target)
    for which in ("model", "ema"):
        assert_same(target.optimizer[which].state_dict(), source.optimizer[which].state_dict())


def test_names_follow_parameters_that_are_replaced() -> None:
    """Nothing is kept between saves: an id may be given to another parameter."""
    model = Net()
    state = TrainState(model, rng=False)
    first = parameter_names(state)
    for _ in range(20):
        model.a, model.b = nn.Linear(4, 4), model.a
        found = parameter_names(state)
        assert [found[id(parameter)] for parameter in model.parameters()] == list(first.values())
        assert len(found) == len(first)


def test_wrappers_that_make_two_parameters_one_are_refused(group: None) -> None:
    inner = _compiled(nn.Linear(2, 2))
    inner._parameters["bias"] = nn.Parameter(torch.zeros(2))
    model = nn.ModuleDict({"x": inner})
    with pytest.raises(StateError, match=r"x\.bias"):
        objects.named_parameters(model)


@pytest.mark.parametrize("broadcast", [True, False])
def test_of_buffers_that_ddp_broadcasts_rank_0s_count(group: None, broadcast: bool) -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["1.running_var"])
    model = nn.parallel.DistributedDataParallel(inner)
    model.broadcast_buffers = broadcast
    other = nn.BatchNorm1d(2)
    scopes = {
        leaf.key: leaf.scope for leaf in TrainState({"m": model, "o": other}, rng=False).flatten().leaves
    }
    expected = Scope.FIRST if broadcast else Scope.RANK
    assert scopes["m/1.running_mean"] == scopes["m/1.num_batches_tracked"] == expected
    assert scopes["m/1.running_var"] == scopes["o/running_mean"] == Scope.RANK
    assert scopes["m/0.weight"] == Scope.GLOBAL and scopes["o/weight"] == Scope.RANK
