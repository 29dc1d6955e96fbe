"""What a TrainState gathers: wrappers, scopes, gradients, late tensors, descriptions; speed of flattening."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from everstep.errors import BadOption, StateError, StateMismatch
from everstep.format.layout import Box, Scope
from everstep.state.compare import equal_states
from everstep.state.tensors import DTYPES, as_bytes_view, bytes_of, copy_into, empty, writable_bytes
from everstep.state.trainstate import BARE_PART, PARTS_MAX, TrainState
from everstep.state.tree import flatten
from kit import random_tensor, restore
from torch import nn


class Inner(nn.Module):
    """A submodule called ``module``, which is no wrapper's and must keep its name."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.module(x))


KEYS = [
    "module.weight",
    "module.bias",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
]


@pytest.fixture
def group(tmp_path: Any) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _ddp(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def _compile(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPPED = {
    "bare": lambda: Inner(),
    "ddp": lambda: _ddp(Inner()),
    "compiled": lambda: _compile(Inner()),
    "compiled ddp": lambda: _compile(_ddp(Inner())),
    "ddp of compiled": lambda: _ddp(_compile(Inner())),
}


def test_wrappers_leave_no_trace_in_the_keys(group: None) -> None:
    for name, make in WRAPPED.items():
        source = TrainState(make(), rng=False)
        flat = source.flatten()
        assert [leaf.key for leaf in flat.leaves] == KEYS, name
        for other in WRAPPED.values():
            target = TrainState(other(), rng=False)
            assert restore(target, flat) == []
            assert equal_states(target, source) == []


def test_wrappers_inside_a_model(group: None) -> None:
    def wrapped() -> nn.Module:
        model = nn.ModuleDict({"a": _ddp(_compile(Inner())), "b": Inner()})
        model.b.module = _compile(model.b.module)
        return model

    bare = TrainState(nn.ModuleDict({"a": Inner(), "b": Inner()}), rng=False)
    target = TrainState(wrapped(), rng=False)
    flat = bare.flatten()
    assert [leaf.key for leaf in target.flatten().leaves] == [leaf.key for leaf in flat.leaves]
    assert restore(target, flat) == []
    assert equal_states(target, bare) == []
    # A hook makes the module load by its own method, which knows the wrappers' names.
    target = TrainState(wrapped(), rng=False)
    target.model.register_load_state_dict_post_hook(lambda module, keys: None)
    assert restore(target, flat) == []
    assert equal_states(target, bare) == []


def test_structure_says_what_is_replicated(group: None) -> None:
    model = _ddp(Inner())
    extra = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*extra.parameters(), *model.parameters()])
    for parameter in [*extra.parameters(), *model.parameters()]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = TrainState(model, [optimizer], rng=False, grads=True, head=extra, micro_step=1)
    scopes = {f"{leaf.part}/{leaf.key}": leaf.scope for leaf in state.flatten().leaves}
    found = {key for key, scope in scopes.items() if scope == Scope.GLOBAL}
    moments = {
        f"optimizer/[0]/state/{key}/{name}" for key in KEYS[:4] for name in ("step", "exp_avg", "exp_avg_sq")
    }
    assert found == {f"model/{key}" for key in KEYS[:4]} | moments
    assert "grads/grads/module.weight" in scopes and "optimizer/[0]/state/head.weight/exp_avg" in scopes


def test_ignored_parameters_are_this_ranks_own(group: None) -> None:
    inner = Inner()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["module.weight"])
    scopes = {leaf.key: leaf.scope for leaf in TrainState(_ddp(inner), rng=False).flatten().leaves}
    assert scopes["module.weight"] == Scope.RANK and scopes["module.bias"] == Scope.GLOBAL


def test_late_tensors_are_the_optimizers_alone() -> None:
    model = Inner()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    ema = {name: value.clone() for name, value in model.state_dict().items()}
    view = model.module.weight.detach()[:1]
    state = TrainState(
        model, optimizer, rng=False, ema=ema, grads=True, extra={"view": view, "n": torch.ones(1)}
    )
    flat = state.flatten()
    late = {
        f"{flat.leaves[index].part}/{flat.leaves[index].key}" for index in state.late_tensors(flat.leaves)
    }
    moments = {
        f"optimizer/state/{key}/{name}" for key in KEYS[:4] for name in ("step", "exp_avg", "exp_avg_sq")
    }
    assert late == {f"model/{key}" for key in KEYS[:4]} | moments
    assert state.optimizers() == [optimizer]


def test_late_tensors_are_found_anew_each_time() -> None:
    """By the very tensor or by its memory, and only while an optimizer owns it."""
    parameter = nn.Parameter(torch.randn(3, 2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    momentum = optimizer.state[parameter]["momentum_buffer"]
    extra = {"same": momentum.detach(), "part": momentum[1:], "turned": momentum.t(), "own": momentum.clone()}
    state = TrainState(optimizer=optimizer, extra=extra, rng=False, weight=parameter.detach())

    def late() -> set[str]:
        leaves = state.flatten().leaves
        return {f"{leaves[index].part}/{leaves[index].key}" for index in state.late_tensors(leaves)}

    held = {"optimizer/state/#0/momentum_buffer", "weight/~root"}
    assert late() == held

    def detach(optimizer: torch.optim.Optimizer, content: dict[str, Any]) -> dict[str, Any]:
        states = {at: {k: v.detach() for k, v in one.items()} for at, one in content["state"].items()}
        return {**content, "state": states}

    optimizer.register_state_dict_post_hook(detach)
    assert late() == held  # other tensors, of the same memory
    del optimizer.state[parameter]["momentum_buffer"]
    assert late() == {"weight/~root"}
    state.optimizer = None
    assert late() == set()


def test_gradients_between_two_optimizer_steps() -> None:
    def make(seed: int) -> TrainState:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), grads=True, micro_step=0)

    def micro(state: TrainState) -> None:
        state.model(torch.randn(2, 3)).square().sum().backward()
        state.micro_step = (state.micro_step + 1) % 3
        if state.micro_step == 0:
            state.optimizer.step()
            state.optimizer.zero_grad()

    source = make(1)
    for _ in range(5):
        micro(source)
    flat = source.flatten()
    kept = [leaf.tensor.clone() for leaf in flat.leaves]
    for _ in range(4):
        micro(source)
    for leaf, tensor in zip(flat.leaves, kept, strict=True):
        leaf.tensor = tensor
    for warm in (0, 1):
        target = make(2)
        for _ in range(warm):
            micro(target)
        restore(target, flat)
        assert target.micro_step == 2
        for _ in range(4):
            micro(target)
        assert equal_states(target, source) == []


def test_gradients_that_were_not_there_are_dropped() -> None:
    source, target = (TrainState(nn.Linear(2, 2), rng=False, grads=True, micro_step=n) for n in (0, 1))
    target.model(torch.ones(1, 2)).sum().backward()
    restore(target, source.flatten())
    assert target.model.weight.grad is None and target.micro_step == 0


def test_a_save_that_would_lose_gradients_is_refused() -> None:
    model = nn.Linear(2, 2)
    state = TrainState(model, micro_step=1)
    state.parts()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(StateError, match="micro_step=1 with gradients"):
        state.parts()
    state.micro_step = 0
    state.parts()
    with pytest.raises(StateMismatch, match="unexpected: grads"):
        restore(state, TrainState(model, grads=True).flatten())


def test_sparse_gradients_are_refused_by_path() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(StateError, match="grads/grads/weight"):
        TrainState(model, grads=True).flatten()


def test_description() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5), momentum=0.9)

    class Loader:
        def state_dict(self) -> dict[str, Any]:
            return {"epoch": 2, "at": 17, "order": [1, 2]}

        def load_state_dict(self, state: Any) -> None: ...

    state = TrainState(model, optimizer, loader=Loader(), data="finite")
    state.parts()
    found = json.loads(json.dumps(state.describe()))
    assert found["parts"]["optimizer"]["class"] == "torch.optim.sgd.SGD"
    assert found["parts"]["optimizer"]["settings"]["lr"] == 0.5
    assert found["parts"]["model"]["class"] == "torch.nn.modules.linear.Linear"
    assert found["data"] == {"kind": "finite", "position": {"epoch": 2, "at": 17}}
    assert TrainState(model).describe()["data"] is None


def test_options() -> None:
    with pytest.raises(BadOption, match="kind of data"):
        TrainState(data="infinite")
    with pytest.raises(BadOption, match="needs a model"):
        TrainState(grads=True)
    with pytest.raises(BadOption, match="exists already"):
        TrainState(**{BARE_PART: 1})
    large = {f"w{number}": torch.ones(1) for number in range(PARTS_MAX + 1)}
    assert list(TrainState.of(large).parts()) == [BARE_PART]
    assert list(TrainState.of({"a": 1, "b": [2]}).parts()) == ["a", "b"]
    state = TrainState(model=None)
    assert TrainState.of(state) is state


def test_several_models_optimizers_and_schedulers() -> None:
    def make(seed: int) -> TrainState:
        torch.manual_seed(seed)
        models = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 1)}
        optimizers = [torch.optim.Adam(model.parameters()) for model in models.values()]
        for optimizer in optimizers:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        schedulers = tuple(torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers)
        return TrainState(
            models,
            optimizers,
            schedulers,
            rng=False,
            averaged=torch.optim.swa_utils.AveragedModel(models["g"]),
        )

    source, target = make(1), make(2)
    source.optimizer[1].step()
    source.scheduler[1].step()
    assert equal_states(source, target)
    assert restore(target, source.flatten()) == []
    assert equal_states(source, target) == []
    assert len(target.optimizers()) == 2


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_bytes_of_every_dtype(name: str) -> None:
    dtype = DTYPES[name]
    for shape in ((), (1,), (0, 3), (3, 4)):
        tensor = random_tensor(shape, dtype, 1)
        data = bytes(bytes_of(tensor))
        assert len(data) == tensor.numel() * dtype.itemsize
        target = empty(shape, dtype)
        view = writable_bytes(target)
        assert view is not None and view.nbytes == len(data) and not view.readonly
        view[:] = data
        assert torch.equal(as_bytes_view(target), as_bytes_view(tensor))
        if len(shape) == 2:
            turned = empty(shape[::-1], dtype).t()
            copy_into(turned, target)
            assert bytes(bytes_of(turned)) == data
            assert writable_bytes(turned) is None or tensor.numel() == 0
    flat = flatten({"p": random_tensor((2, 3), dtype, 2)})
    (leaf,) = flat.leaves
    assert (leaf.dtype, leaf.shape, leaf.boxes) == (name, (2, 3), (Box((0, 0), (2, 3)),))


def test_writable_bytes_is_the_tensors_own_memory() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    view = writable_bytes(parameter)
    assert view is not None
    view[:4] = b"\x00\x00\x80\x3f"
    assert parameter.tolist() == [1.0, 0.0]
    assert writable_bytes(torch.zeros(3, dtype=torch.complex64).conj()) is None
    assert writable_bytes(torch.ones(3)._neg_view()) is None
    for other in (torch.zeros(4)[::2], torch.zeros(2, 3).t(), torch.zeros(3, device="meta")):
        assert writable_bytes(other) is None
    part = torch.zeros(6)[2:4]
    view = writable_bytes(part)
    assert view is not None and view.nbytes == 8
    view[:] = memoryview(b"\x00\x00\x80\x3f" * 2)
    assert part.tolist() == [1.0, 1.0] and part._base is not None and part._base.sum() == 2
