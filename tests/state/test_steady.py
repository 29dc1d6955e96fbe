"""What is known of modules and optimizers from former times is the same as asking them, whatever changed in between."""

from __future__ import annotations

import collections
import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from everstep.errors import EverstepError
from everstep.state.recipes import MISSES_MAX
from everstep.state.steady import Steady
from everstep.state.tensors import as_bytes_view
from everstep.state.trainstate import TrainState
from everstep.state.tree import FlatState

WIDTH, BLOCKS = 4, 6


class Block(torch.nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.last = torch.nn.Linear(width, width, bias=False)
        self.register_buffer("mask", torch.ones(width), persistent=False)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.linear(x)) * self.scale)  # type: ignore[no-any-return]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = torch.nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Job:
    """A model with tied weights, its optimizer, and what else a trainer has."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.opt = torch.optim.AdamW(self.net.parameters())
        self.rates = torch.optim.lr_scheduler.StepLR(self.opt, 2)
        self.state = TrainState(self.net, self.opt, self.rates, extra={"count": 0}, rng=False)

    @property
    def block(self) -> Any:
        return self.net.blocks[2]

    @property
    def moments(self) -> dict[str, Any]:
        return self.opt.state[self.block.linear.weight]

    def train(self) -> None:
        self.net(torch.rand(8, WIDTH)).sum().backward()
        self.opt.step()
        self.opt.zero_grad()
        self.rates.step()
        self.state.extra["count"] += 1


def taken(state: TrainState, known: Steady | None) -> tuple[FlatState | None, str]:
    try:
        return state.flatten(known), ""
    except (EverstepError, RuntimeError, KeyError) as error:
        return None, str(error)


def check(state: TrainState, known: Steady) -> FlatState | None:
    """The same is found as without what is known, bit for bit and place for place."""
    (found, problem), (expected, expected_problem) = taken(state, known), taken(state, None)
    assert problem == expected_problem
    if found is None or expected is None:
        return None
    assert found.state == expected.state
    assert [leaf.spec() for leaf in found.leaves] == [leaf.spec() for leaf in expected.leaves]
    for leaf, other in zip(found.leaves, expected.leaves, strict=True):
        a, b = leaf.tensor, other.tensor
        assert a.dtype == b.dtype and a.stride() == b.stride() and a.device == b.device
        assert as_bytes_view(a.detach()).equal(as_bytes_view(b.detach()))
    if found.addresses is not None:
        assert found.addresses == [leaf.tensor.data_ptr() for leaf in found.leaves]
        assert not any(leaf.tensor.is_neg() or leaf.tensor.is_conj() for leaf in found.leaves)
    late = known.late(found.by, lambda: frozenset(state.late_tensors(found.leaves)))
    assert late == frozenset(state.late_tensors(expected.leaves))
    return found


def _sub(value: Any, **more: Any) -> None:
    """``value`` gets a class of its own, with ``more`` in it."""
    value.__class__ = type("Other", (type(value),), more)


def _hook(*_: Any) -> None:
    """Hooks are called, whatever they do."""


def _rename(module: Any, destination: Any, prefix: str, metadata: Any) -> None:
    destination[prefix + "more"] = torch.ones(1)


def _halved(optimizer: Any, content: Any) -> Any:
    return {**content, "param_groups": [{**group, "lr": 0.5} for group in content["param_groups"]]}


def _data(job: Job, value: torch.Tensor) -> None:
    job.block.linear.weight.data = value


def _swap(values: dict[Any, Any]) -> None:
    first = next(iter(values))
    values[first] = values.pop(first)


def _other_model(job: Job) -> None:
    job.state.model = copy.deepcopy(job.net)


def _extra_state(job: Job) -> None:
    job.block.__class__ = type(
        "Extra", (Block,), {"get_extra_state": lambda self: {"a": 1}, "set_extra_state": lambda self, x: None}
    )


def _group(job: Job) -> None:
    job.opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": 0.5})


def _regroup(job: Job) -> None:
    members = job.opt.param_groups[0]["params"]
    job.opt.add_param_group({"params": [members.pop()]})


def _tie(job: Job) -> None:
    job.net.blocks[1].linear.weight = job.net.blocks[0].linear.weight


def _untie(job: Job) -> None:
    job.net.head.weight = torch.nn.Parameter(job.net.first.weight.detach().clone())


def _share(job: Job) -> None:
    job.net.blocks[4] = job.net.blocks[3]


def ones(*shape: int, **how: Any) -> torch.Tensor:
    """As what is replaced, but for the values."""
    return torch.full(shape, 7.5, **how)


CHANGES: dict[str, Callable[[Job], Any]] = {
    "nothing": lambda job: None,
    "values": lambda job: job.block.linear.weight.data.add_(1),
    "data": lambda job: _data(job, ones(WIDTH, WIDTH)),
    "data of another shape": lambda job: _data(job, ones(WIDTH, 2 * WIDTH)),
    "data of another dtype": lambda job: _data(job, ones(WIDTH, WIDTH).double()),
    "data of other strides": lambda job: _data(job, ones(2 * WIDTH, WIDTH)[::2]),
    "data turned": lambda job: _data(job, ones(WIDTH, WIDTH).t()),
    "another shape of the same memory": lambda job: _data(job, job.block.linear.weight.data.view(2, -1)),
    "another dtype of the same memory": lambda job: _data(
        job, job.block.linear.weight.data.view(torch.int32).view(torch.float16)
    ),
    "other strides of the same memory": lambda job: _data(job, job.block.linear.weight.data.t()),
    "empty data": lambda job: _data(job, ones(0, WIDTH)),
    "data of a negative view": lambda job: _data(job, torch._neg_view(ones(WIDTH, WIDTH))),
    "data that others have": lambda job: _data(job, job.net.blocks[0].linear.weight.data),
    "on no device": lambda job: setattr(
        job.block.linear, "weight", torch.nn.Parameter(ones(WIDTH, WIDTH, device="meta"))
    ),
    "set_": lambda job: job.block.linear.weight.data.set_(ones(WIDTH, WIDTH)),
    "resized": lambda job: job.block.scale.resize_(WIDTH // 2),
    "a parameter for another": lambda job: setattr(
        job.block.linear, "weight", torch.nn.Parameter(ones(WIDTH, WIDTH))
    ),
    "no bias": lambda job: setattr(job.block.linear, "bias", None),
    "one more parameter": lambda job: job.block.register_parameter("more", torch.nn.Parameter(ones(1))),
    "a parameter less": lambda job: delattr(job.block.linear, "weight"),
    "requires no gradients": lambda job: job.block.linear.weight.requires_grad_(False),
    "order of parameters": lambda job: _swap(job.block.linear._parameters),
    "sparse": lambda job: setattr(
        job.block.linear, "weight", torch.nn.Parameter(ones(WIDTH, WIDTH).to_sparse())
    ),
    "lazy": lambda job: job.block.add_module("more", torch.nn.LazyLinear(3)),
    "a buffer for another": lambda job: setattr(job.block, "scale", ones(WIDTH)),
    "a complex buffer": lambda job: setattr(job.block, "scale", ones(WIDTH, dtype=torch.complex64)),
    "a conjugate buffer": lambda job: setattr(job.block, "scale", (ones(WIDTH) * 1j).conj()),
    "one more buffer": lambda job: job.block.register_buffer("more", ones(2)),
    "a buffer that is kept": lambda job: job.block._non_persistent_buffers_set.clear(),
    "a buffer that is not": lambda job: job.block._non_persistent_buffers_set.add("scale"),
    "no buffer": lambda job: setattr(job.block, "scale", None),
    "one more module": lambda job: job.net.blocks.append(Block()),
    "a module less": lambda job: job.net.blocks.__delitem__(3),
    "no module": lambda job: job.net.register_module("none", None),
    "a module for another": lambda job: job.net.blocks.__setitem__(2, Block()),
    "a module shared": _share,
    "a class of modules": lambda job: _sub(job.block),
    "a class with a state of its own": lambda job: _sub(
        job.block, state_dict=lambda self, **how: {**torch.nn.Module.state_dict(self, **how), "a": 1}
    ),
    "a class that saves more": lambda job: _sub(
        job.block, _save_to_state_dict=lambda self, into, prefix, keep: into.update({prefix + "a": ones(1)})
    ),
    "extra state": _extra_state,
    "a state dict of its own": lambda job: setattr(
        job.net, "state_dict", lambda **how: {"a": ones(1), **torch.nn.Module.state_dict(job.net, **how)}
    ),
    "a hook": lambda job: job.block._register_state_dict_hook(_rename),
    "a hook before": lambda job: job.block.register_state_dict_pre_hook(_hook),
    "a version": lambda job: setattr(job.block, "_version", 7),
    "tied": _tie,
    "not tied": _untie,
    "loaded": lambda job: job.net.load_state_dict(copy.deepcopy(job.net.state_dict())),
    "loaded by assignment": lambda job: job.net.load_state_dict(
        copy.deepcopy(job.net.state_dict()), assign=True
    ),
    "another precision": lambda job: job.net.to(torch.float64),
    "another model": _other_model,
    "wrapped": lambda job: setattr(job.state, "model", torch.nn.DataParallel(job.net)),
    "compiled inside": lambda job: setattr(job.net, "first", torch.nn.DataParallel(job.net.first)),
    "learning rate": lambda job: job.opt.param_groups[0].update(lr=0.25),
    "learning rate as a tensor": lambda job: job.opt.param_groups[0].update(lr=torch.tensor(0.25)),
    "a new option": lambda job: job.opt.param_groups[0].update(more=[1, {"a": 2}]),
    "a new group": _group,
    "other groups": _regroup,
    "order of members": lambda job: job.opt.param_groups[0]["params"].reverse(),
    "two members changed": lambda job: job.opt.param_groups[0]["params"].__setitem__(
        slice(0, 2), job.opt.param_groups[0]["params"][1::-1]
    ),
    "no state": lambda job: job.opt.state.clear(),
    "state of one parameter less": lambda job: job.opt.state.pop(job.block.linear.weight),
    "order of states": lambda job: _swap(job.opt.state),
    "state of none": lambda job: job.opt.state.__setitem__("all", {"seen": 1}),
    "a moment for another": lambda job: job.moments.update(exp_avg=ones(WIDTH, WIDTH)),
    "a moment's data": lambda job: setattr(job.moments["exp_avg"], "data", ones(WIDTH, WIDTH)),
    "a moment of another dtype": lambda job: job.moments.update(exp_avg=ones(WIDTH, WIDTH).bfloat16()),
    "a moment that records": lambda job: job.moments["exp_avg"].requires_grad_(),
    "a moment that is its parameter": lambda job: job.moments.update(exp_avg=job.block.linear.weight),
    "a number for a moment": lambda job: job.moments.update(step=3),
    "a moment more": lambda job: job.moments.update(more=ones(2)),
    "a dict of moments": lambda job: job.moments.update(more={"a": ones(2)}),
    "order of moments": lambda job: _swap(job.moments),
    "another mapping": lambda job: job.opt.state.__setitem__(
        job.block.linear.weight, collections.OrderedDict(job.moments)
    ),
    "a key of another type": lambda job: job.moments.update({1: ones(2)}),
    "optimizer loaded": lambda job: job.opt.load_state_dict(copy.deepcopy(job.opt.state_dict())),
    "optimizer's hook": lambda job: job.opt.register_state_dict_post_hook(_halved),
    "optimizer's hook before": lambda job: job.opt.register_state_dict_pre_hook(_hook),
    "a class of optimizers": lambda job: _sub(job.opt),
    "a class of optimizers with a state of its own": lambda job: _sub(
        job.opt, state_dict=lambda self: {"state": {}, "param_groups": [], "a": ones(1)}
    ),
    "another optimizer": lambda job: setattr(
        job.state, "optimizer", torch.optim.SGD(job.net.parameters(), momentum=0.9)
    ),
    "no optimizer": lambda job: setattr(job.state, "optimizer", None),
    "a parameter elsewhere": lambda job: job.state.extra.update(w=job.block.linear.weight),
    "moments elsewhere": lambda job: job.state.extra.update(w=job.moments),
    "a part before": lambda job: setattr(job.state, "ema", [ones(2)]),
    "a module before": lambda job: setattr(job.state, "ema", copy.deepcopy(job.net)),
    "a module after": lambda job: job.state.others.update(critic=torch.nn.Linear(2, 2)),
    "modules in a dict": lambda job: job.state.others.update(critics={"a": torch.nn.Linear(2, 2)}),
    "replicated": lambda job: setattr(job.state, "replicated", frozenset({"model"})),
}


def known_of(job: Job) -> Steady:
    known = Steady()
    for _ in range(3):
        job.train()
        flat = check(job.state, known)
    assert flat is not None and flat.by and flat.addresses is not None, "nothing was known"
    return known


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change: str) -> None:
    job = Job()
    known = known_of(job)
    CHANGES[change](job)
    for _ in range(3):
        check(job.state, known)


@pytest.mark.parametrize("seed", range(12))
def test_one_change_after_another(seed: int) -> None:
    chosen = random.Random(seed)
    job, known = Job(), Steady()
    for _ in range(25):
        for _ in range(chosen.choice([0, 1, 1, 2])):
            try:
                CHANGES[chosen.choice(list(CHANGES))](job)
            except Exception:  # a change before has taken away what this one is of
                continue
        if chosen.random() < 0.1:
            job = Job()
        check(job.state, known)


def test_what_changes_at_every_step_is_taken_anew() -> None:
    job = Job()
    known = known_of(job)
    for step in range(5):
        job.train()
        job.opt.param_groups[0]["lr"] = 0.5 / (1 + step)
        flat = check(job.state, known)
        assert flat is not None and flat.by


def test_objects_are_not_asked_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    known = known_of(job)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("asked")

    monkeypatch.setattr("everstep.state.objects.state_of", refuse)
    job.state.scheduler = None
    flat = job.state.flatten(known)
    assert len(flat.by) == 2


@pytest.mark.parametrize(
    "change", ["data of another shape", "a moment more", "one more module", "other groups"]
)
def test_it_is_known_again_after_a_change(change: str) -> None:
    job = Job()
    known = known_of(job)
    CHANGES[change](job)
    for _ in range(2):
        check(job.state, known)
    flat = check(job.state, known)
    assert flat is not None and flat.by


def test_state_that_comes_with_the_first_step() -> None:
    job, known = Job(), Steady()
    for step in range(6):
        flat = check(job.state, known)
        if step == 2:
            job.train()
    assert flat is not None and flat.by


def test_what_is_never_known_is_soon_looked_at_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    job, known = Job(), Steady()
    _sub(job.opt, state_dict=lambda self: {"a": 1})
    job.net.register_state_dict_pre_hook(_hook)
    for _ in range(MISSES_MAX):
        check(job.state, known)
    monkeypatch.setattr("everstep.state.steady.Gathered", None)
    check(job.state, known)


def test_modules_in_a_circle_are_refused_as_without() -> None:
    job = Job()
    known = known_of(job)
    job.block.circle = job.net
    with pytest.raises(RecursionError):
        job.state.flatten()
    with pytest.raises(RecursionError):
        job.state.flatten(known)


def test_nothing_is_kept_alive() -> None:
    job = Job()
    known = known_of(job)
    gone = [weakref.ref(one) for one in (job.net, job.opt, job.block.linear.weight, job.moments["exp_avg"])]
    del job
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
    assert known.modules


@pytest.mark.parametrize("method", ["state_dict", "_save_to_state_dict", "get_extra_state"])
@pytest.mark.parametrize("kind", [Block, torch.nn.Module])
def test_a_method_changed_for_a_whole_class(monkeypatch: pytest.MonkeyPatch, kind: type, method: str) -> None:
    job = Job()
    known = known_of(job)
    real = getattr(torch.nn.Module, method)

    def halved(self: Any, *args: Any, **how: Any) -> Any:
        if method == "get_extra_state":
            return {"a": 1}
        found = real(self, *args, **how)
        into = found if method == "state_dict" else args[0]
        into["more"] = ones(2)
        return found

    monkeypatch.setattr(kind, method, halved)
    for _ in range(2):
        check(job.state, known)


def test_a_name_that_goes_to_another_parameter() -> None:
    """Tied to one that comes before it in the model, a parameter has that one's name."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(20)])
    layers[7].weight = layers[5].weight
    optimizer = torch.optim.SGD([layers[n].weight for n in range(20) if n not in (2, 7)])
    state, known = TrainState(layers, optimizer, rng=False), Steady()
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {"momentum_buffer": torch.rand(2, 2)}
    for _ in range(3):
        flat = check(state, known)
    assert flat is not None and flat.by
    layers[2].weight = layers[5].weight
    check(state, known)


def test_numbers_among_the_moments() -> None:
    job = Job()
    for number, moments in enumerate(job.opt.state.values()):
        moments["seen"] = number
    job.train()
    for number, moments in enumerate(job.opt.state.values()):
        moments["seen"] = number
    known = Steady()
    for _ in range(3):
        flat = check(job.state, known)
    assert flat is not None and flat.by
    for value in (100, 100.0, True, -0.0):
        job.moments["seen"] = value
        check(job.state, known)


def test_a_moment_that_lies_where_a_parameter_does() -> None:
    """Through other objects: the same memory, all keys and kinds as before."""
    job = Job()
    known = known_of(job)
    job.moments["exp_avg"].data = job.block.linear.weight.data
    for _ in range(2):
        check(job.state, known)
