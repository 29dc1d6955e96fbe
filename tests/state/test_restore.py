"""Restoring into live objects: in place, exactly, or not at all."""

from __future__ import annotations

import collections
import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from everstep.errors import BadOption, StateError, StateMismatch
from everstep.state.codec import StateImage
from everstep.state.compare import equal_states
from everstep.state.restore import fill_from, values
from everstep.state.trainstate import BARE_PART, TrainState
from kit import Config, Frozen, Point, entries_of, flat_of, planned, restore
from torch import nn


class Net(nn.Module):
    """Batch norm (buffers that forward changes), tied weights, and a parameter of no dimension."""

    def __init__(self, width: int = 6, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, dtype=dtype)
        self.norm = nn.BatchNorm1d(width, dtype=dtype)
        self.last = nn.Linear(width, width, bias=False, dtype=dtype)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu()) * self.scale


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4], 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 7),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 5)),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "warm restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [3],
    ),
}


class Loader:
    """A loader whose position matters."""

    def __init__(self) -> None:
        self.epoch, self.at = 0, 0

    def next(self) -> torch.Tensor:
        self.at += 1
        return torch.randn(8, 6)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at, "order": [3, 1, 2]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


def trainer(seed: int = 0, optimizer: str = "adamw", scheduler: str = "cosine", **options: Any) -> TrainState:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = Net()
    made = OPTIMIZERS[optimizer](model.parameters())
    loader = Loader()
    return TrainState(
        model, made, SCHEDULERS[scheduler](made), loader=loader, extra={"epoch": 0, "best": None}, **options
    )


def train(state: TrainState, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        noise = random.random() + float(np.random.rand())
        loss = (state.model(state.loader.next()) - noise).square().mean()
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        state.scheduler.step()
        state.extra["epoch"] += 1
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_goes_on_bit_for_bit(optimizer: str) -> None:
    undisturbed = trainer(1, optimizer)
    before = train(undisturbed, 3)
    flat = undisturbed.flatten()
    image, leaves = bytes(flat.state), [leaf.tensor.clone() for leaf in flat.leaves]
    after = train(undisturbed, 4)
    for warm in (0, 2):
        resumed = trainer(99, optimizer)
        train(resumed, warm)
        flat.state = image
        plan = planned(resumed, flat)
        for index, tensor in plan.targets.items():
            tensor.copy_(leaves[index])
        assert plan.finish() == []
        assert resumed.extra["epoch"] == 3
        assert train(resumed, 4) == after
        assert equal_states(resumed, undisturbed) == []
    assert len(set(before + after)) == 7


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_learning_rates_go_on_from_every_step(scheduler: str) -> None:
    def rates(state: TrainState, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            train(state, 1)
            found.append(state.optimizer.param_groups[0]["lr"])
        return found

    for step in (0, 1, 3, 5):
        state = trainer(0, "sgd", scheduler)
        train(state, step)
        flat = state.flatten()
        kept = copy.deepcopy([leaf.tensor for leaf in flat.leaves])
        expected = rates(state, 6)
        resumed = trainer(5, "sgd", scheduler)
        for leaf, tensor in zip(flat.leaves, kept, strict=True):
            leaf.tensor = tensor
        restore(resumed, flat)
        assert rates(resumed, 6) == expected
        assert equal_states(resumed, state) == []


def test_live_tensors_are_filled_in_place_without_a_copy() -> None:
    source, target = trainer(1), trainer(2)
    train(source, 2)
    train(target, 2)
    addresses = [leaf.tensor.data_ptr() for leaf in target.flatten().leaves]
    flat = source.flatten()
    plan = planned(target, flat)
    assert [plan.targets[index].data_ptr() for index in range(len(flat.leaves))] == addresses
    fill_from(flat.leaves)(plan.wanted())
    plan.finish()
    assert [leaf.tensor.data_ptr() for leaf in target.flatten().leaves] == addresses
    assert target.model.last.weight is target.model.first.weight
    assert equal_states(target, source) == []


def test_a_save_after_a_resume_asks_the_live_objects() -> None:
    source, target = trainer(1), trainer(2)
    train(source, 2)
    restore(target, source.flatten())
    train(target, 2)
    third = trainer(3)
    restore(third, target.flatten())
    assert equal_states(third, target) == [] and third.extra["epoch"] == 4
    assert equal_states(third, source) != []


def test_plain_values_of_the_callers_dict_are_updated() -> None:
    inner = {"w": torch.zeros(2), "n": 0}
    history: list[Any] = []
    target = {
        "t": torch.zeros(3),
        "i": 0,
        "f": 0.5,
        "s": "old",
        "n": None,
        "in": inner,
        "h": history,
        "p": (0, inner["w"]),
    }
    w = torch.ones(2)
    source = {
        "t": torch.ones(3),
        "i": 7,
        "f": 2,
        "s": "new",
        "n": [1],
        "in": {"w": w, "n": 5},
        "h": [1, 2],
        "p": (9, w),
    }
    tensor = target["t"]
    restore(target, flat_of(source))
    assert equal_states(target, source) == []
    assert target["t"] is tensor and target["in"] is inner and target["h"] is history
    assert target["p"][1] is inner["w"]


def test_containers_of_other_kinds_are_updated_too() -> None:
    def make(number: float) -> dict[str, Any]:
        made: dict[str, Any] = {
            "c": Config(number),
            "t": Config(torch.full((2,), number)),
            "f": Frozen(int(number)),
        }
        made |= {"s": {number}, "d": collections.deque([number], 3), "b": bytearray([int(number)])}
        made |= {"n": Point(torch.full((), number), number), "a": np.full(3, number), "g": torch.Generator()}
        made |= {
            "o": collections.OrderedDict(x=torch.full((1,), number), y=number),
            "big": np.full(20000, number),
        }
        made["g"].manual_seed(int(number))
        return made

    target, source = make(1), make(2)
    kept = dict(target)
    restore(target, flat_of(source))
    assert equal_states(target, source) == []
    assert [key for key in kept if target[key] is not kept[key]] == ["f", "n"]


def test_unequal_keys_shapes_and_dtypes_are_named_together_before_a_byte_is_written() -> None:
    source = trainer(1)
    target = trainer(2)
    target.model.norm = nn.BatchNorm1d(5)
    target.model.more = nn.Linear(2, 2)
    del target.model.scale
    target.model.first.bias.data = target.model.first.bias.data.double()
    target.extra["new"] = 1
    flat, before = source.flatten(), copy.deepcopy(target.parts())
    with pytest.raises(StateMismatch) as caught:
        planned(target, flat)
    texts = pickle.loads(pickle.dumps(caught.value)).mismatches  # noqa: S301
    for expected in (
        "unexpected: model/scale",
        "missing: model/more.weight",
        "missing: model/more.bias",
        "shape: model/norm.running_mean: stored (6,), target (5,)",
        "dtype: model/first.bias: stored float32, target float64",
        "missing: extra/new",
    ):
        assert any(text.startswith(expected) for text in texts), (expected, texts)
        assert expected in str(caught.value)
    assert equal_states(target.parts(), before) == []


@pytest.mark.parametrize("shape", [(4, 2), (2, 8), (16,), (4, 4, 1), (1, 4, 4), ()])
def test_shapes_must_match_exactly(shape: tuple[int, ...]) -> None:
    with pytest.raises(StateMismatch, match="shape: w"):
        restore(
            {"w": torch.zeros(shape)},
            flat_of({"w": torch.ones(4, 4)}),
            allow={"missing", "unexpected", "dtype"},
        )


@pytest.mark.parametrize(("stored", "target"), [((), (1,)), ((1,), ())])
def test_no_dimension_differs_from_one_element(stored: tuple[int, ...], target: tuple[int, ...]) -> None:
    with pytest.raises(StateMismatch):
        restore({"w": torch.zeros(target)}, flat_of({"w": torch.ones(stored)}))


def test_a_cast_must_be_asked_for_and_is_reported() -> None:
    flat = flat_of({"w": torch.tensor([16777217], dtype=torch.int32)})
    target = {"w": torch.zeros(1)}
    with pytest.raises(StateMismatch, match="dtype: w: stored int32, target float32"):
        restore(target, flat)
    assert target["w"].item() == 0
    assert restore(target, flat, allow={"dtype"}) == ["dtype: w: stored int32, target float32"]
    assert target["w"].item() == 16777216


def test_missing_and_unexpected_can_be_loosened_and_are_reported() -> None:
    target, source = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    bias = target.bias.detach().clone()
    texts = restore(TrainState(target, rng=False), flat_of(TrainState(source, rng=False)), allow="missing")
    assert texts == ["missing: model/bias: in the target, not in the checkpoint"]
    assert torch.equal(target.weight, source.weight) and torch.equal(target.bias, bias)
    texts = restore(
        TrainState(source, rng=False), flat_of(TrainState(nn.Linear(3, 3), rng=False)), allow={"unexpected"}
    )
    assert texts == ["unexpected: model/bias: in the checkpoint, not in the target"]


def test_zero_matches_are_an_error_even_when_loosened() -> None:
    with pytest.raises(StateMismatch, match="none of 2 tensors"):
        restore(
            TrainState(nn.Sequential(nn.Linear(2, 2)), rng=False),
            flat_of(TrainState(nn.Linear(2, 2), rng=False)),
            allow={"missing", "unexpected"},
        )
    with pytest.raises(StateMismatch, match="no part of the target"):
        restore({"a": 1}, flat_of({"b": 1}), allow={"missing", "unexpected"})


def test_parts_that_nobody_takes_or_that_are_not_there() -> None:
    source = trainer(1)
    with pytest.raises(StateMismatch) as caught:
        restore(TrainState(Net(), rng=False, ema=Net()), source.flatten())
    found = {
        text.partition(":")[0] + text.partition(":")[2].split(":")[0] for text in caught.value.mismatches
    }
    assert found == {"missing ema"} | {
        f"unexpected {part}" for part in ("optimizer", "scheduler", "loader", "extra", "rng")
    }
    model = Net()
    assert restore(TrainState(model), source.flatten(), parts=["model"]) == []
    assert equal_states(model, source.model) == []
    with pytest.raises(StateMismatch, match="no part called odel"):
        restore(TrainState(model), source.flatten(), parts=["odel"])
    with pytest.raises(BadOption, match="unknown name"):
        restore(TrainState(model), source.flatten(), allow={"everything"})


def test_another_optimizer_or_scheduler_is_refused() -> None:
    source = trainer(1, "adamw", "cosine")
    train(source, 1)
    with pytest.raises(StateMismatch, match="class: optimizer: state of a AdamW, the target is a SGD"):
        restore(trainer(1, "sgd", "cosine"), source.flatten())
    with pytest.raises(
        StateMismatch, match="class: scheduler: state of a CosineAnnealingLR, the target is a StepLR"
    ):
        restore(trainer(1, "adamw", "step"), source.flatten())


def test_optimizer_groups_and_shapes_are_compared() -> None:
    def state(*groups: int) -> TrainState:
        made = [{"params": [nn.Parameter(torch.ones(size)) for size in (3, 4)][:count]} for count in groups]
        optimizer = torch.optim.Adam(made)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        return TrainState(optimizer=optimizer, rng=False)

    source = state(2)
    source.optimizer.step()
    with pytest.raises(StateMismatch, match=r"groups of \[2\] parameters, target \[1, 1\]"):
        restore(state(1, 1), source.flatten())
    swapped = state(2)
    swapped.optimizer.param_groups[0]["params"].reverse()
    with pytest.raises(StateMismatch, match=r"shape: optimizer/state/#0/exp_avg"):
        restore(swapped, source.flatten())


@pytest.mark.parametrize("warm", [False, True])
def test_moments_keep_their_dtype_under_parameters_of_another(warm: bool) -> None:
    """torch casts optimizer state to the parameters' dtype: fp32 moments of bf16 weights would be rounded."""

    def make(fill: float) -> TrainState:
        model = nn.Linear(4, 4, dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            if fill:
                moments = {
                    "exp_avg": torch.full_like(parameter, fill, dtype=torch.float32),
                    "nested": {"a": [1, 2]},
                }
                moments["exp_avg_sq"] = torch.rand(parameter.shape)
                optimizer.state[parameter] = {"step": torch.tensor(3.0, dtype=torch.float64), **moments}
        return TrainState(model, optimizer, rng=False)

    source, target = make(1 / 3), make(2 / 3 if warm else 0)
    addresses = {leaf.tensor.data_ptr() for leaf in target.flatten().leaves}
    restore(target, source.flatten())
    assert equal_states(target, source) == []
    state = next(iter(target.optimizer.state.values()))
    assert state["exp_avg"].dtype == torch.float32 and state["step"].dtype == torch.float64
    if warm:
        assert {leaf.tensor.data_ptr() for leaf in target.flatten().leaves} == addresses


def test_moments_of_another_dtype_in_the_target_are_an_error() -> None:
    source, target = trainer(1), trainer(2)
    train(source, 1)
    train(target, 1)
    for state in target.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    with pytest.raises(
        StateMismatch, match="dtype: optimizer/state/scale/exp_avg: stored float32, target bfloat16"
    ):
        restore(target, source.flatten())


def test_strided_and_channels_last_targets_are_filled() -> None:
    conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    source = nn.Conv2d(3, 4, 2)
    restore(TrainState(conv, rng=False), flat_of(TrainState(source, rng=False)))
    assert torch.equal(conv.weight, source.weight) and conv.weight.is_contiguous(
        memory_format=torch.channels_last
    )
    base = torch.zeros(4, 6)
    views = {
        "t": base.t()[::2],
        "n": torch.zeros(2, dtype=torch.complex64).conj(),
        "int4": torch.zeros(4, 4, dtype=torch.uint8),
    }
    views["int4"] = views["int4"].view(torch.int4).t()
    new = {
        "t": torch.rand(3, 4),
        "n": torch.rand(2, dtype=torch.complex64),
        "int4": torch.arange(16, dtype=torch.uint8),
    }
    new["int4"] = new["int4"].reshape(4, 4).view(torch.int4)
    restore(views, flat_of(new))
    assert equal_states(views, new) == []
    assert torch.equal(base.t()[::2], new["t"]) and int((base.t()[1::2] != 0).sum()) == 0


def test_targets_that_cannot_be_filled() -> None:
    flat = flat_of({"w": torch.ones(3, 4)})
    with pytest.raises(StateMismatch, match="meta: w"):
        restore({"w": torch.empty(3, 4, device="meta")}, flat)
    with pytest.raises(StateMismatch, match="overlap: w"):
        restore({"w": torch.zeros(4).expand(3, 4)}, flat)
    with pytest.raises(StateMismatch, match="type: w: stored a tensor, target a float"):
        restore({"w": 0.0}, flat)
    with pytest.raises(StateMismatch, match="type: w: stored a int, target a tensor"):
        restore({"w": torch.zeros(())}, flat_of({"w": 3}))
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(StateMismatch, match=r"meta: model/weight.*\n.*meta: model/bias"):
        restore(TrainState(model, rng=False), flat_of(TrainState(nn.Linear(2, 2), rng=False)))


def test_ties_must_agree() -> None:
    one = torch.ones(3)
    tied, apart = {"a": one, "b": one}, {"a": torch.ones(3), "b": torch.zeros(3)}
    with pytest.raises(StateMismatch, match="ties: b: the target shares its memory"):
        restore({"a": (x := torch.zeros(3)), "b": x}, flat_of(apart))
    with pytest.raises(StateMismatch, match="ties: b: stored is one tensor"):
        restore({"a": torch.zeros(3), "b": torch.zeros(3)}, flat_of(tied))
    target = {"a": torch.zeros(3), "b": torch.zeros(3)}
    assert len(restore(target, flat_of(tied), allow={"ties"})) == 1
    assert equal_states(target, tied) == []


def test_tied_weights_are_one_entry() -> None:
    flat = trainer(1).flatten()
    names = [leaf.key for leaf in flat.leaves if leaf.part == "model"]
    assert "first.weight" in names and "last.weight" not in names
    found = values(StateImage(flat.state), entries_of(flat), fill_from(flat.leaves))
    assert found["model"]["last.weight"] is found["model"]["first.weight"]
    assert Net().load_state_dict(found["model"])


def test_a_square_and_its_transpose_are_two() -> None:
    square = torch.arange(4.0).reshape(2, 2)
    flat = flat_of({"a": [square, square.t(), square]})
    assert len(flat.leaves) == 2
    found = values(StateImage(flat.state), entries_of(flat), fill_from(flat.leaves))["a"]
    assert found[1].tolist() == [[0, 2], [1, 3]] and found[2] is found[0]


def test_leaves_have_no_lazy_bits() -> None:
    lazy = torch.complex(torch.rand(2), torch.rand(2)).conj()
    flat = flat_of({"a": [lazy, lazy.imag, lazy]})
    assert len(flat.leaves) == 2
    assert not any(leaf.tensor.is_conj() or leaf.tensor.is_neg() for leaf in flat.leaves)


def test_a_small_view_is_stored_at_its_own_size() -> None:
    base = torch.arange(1000.0)
    flat = flat_of({"rows": [base[:10], base[5:7], base.reshape(10, 100)[3]], "base2": base[:10]})
    assert [leaf.nbytes for leaf in flat.leaves] == [40, 8, 400]


class Hooked(nn.Module):
    """Loading does something of its own: names are mapped, and there is extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.note = "fresh"
        self.loads = 0
        self.register_load_state_dict_post_hook(
            lambda module, keys: setattr(module, "loads", module.loads + 1)
        )

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def test_a_module_with_hooks_is_loaded_by_its_own_method() -> None:
    source, target = Hooked(), Hooked()
    source.note = "trained"
    restore(TrainState(target, rng=False), flat_of(TrainState(source, rng=False)))
    assert target.note == "trained" and target.loads == 1
    assert equal_states(target, source) == []


def test_a_hook_alone_makes_a_module_load_by_its_own_method() -> None:
    for register in ("register_load_state_dict_post_hook", "register_load_state_dict_pre_hook"):
        source, target, seen = nn.Linear(2, 2), nn.Linear(2, 2), []
        getattr(target, register)(lambda *args, seen=seen: seen.append(1))
        restore(TrainState(target, rng=False), flat_of(TrainState(source, rng=False)))
        assert seen and equal_states(target, source) == []


def test_a_bare_value_is_a_state_too() -> None:
    for value in (torch.arange(3), [1, torch.ones(2)], 5, {n: torch.ones(1) for n in range(3)}, {}):
        flat = flat_of(value)
        assert [leaf.part for leaf in flat.leaves] == [BARE_PART] * len(flat.leaves)
        found = values(StateImage(flat.state), entries_of(flat), fill_from(flat.leaves))
        assert equal_states(found, value) == []
    target = torch.zeros(3, dtype=torch.int64)
    restore(target, flat_of(torch.arange(3)))
    assert target.tolist() == [0, 1, 2]
    with pytest.raises(StateError, match="bare int"):
        restore(4, flat_of(5))


def test_random_numbers_go_on() -> None:
    def draw() -> list[Any]:
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
            torch.rand(1).item(),
        ]

    draw()
    flat = flat_of(TrainState())
    assert not flat.leaves
    expected = draw()
    draw()
    restore(TrainState(), flat)
    assert draw() == expected
    assert TrainState().describe()["rng"][:3] == ["python", "numpy", "torch"]
