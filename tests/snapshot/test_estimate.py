from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from everstep.snapshot.estimate import estimate

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("AdamW", {"fused": True}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adamax", {}),
    ("Adagrad", {}),
    ("Adadelta", {}),
    ("ASGD", {}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Rprop", {}),
    ("Adafactor", {}),
    ("Muon", {}),
]


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(300, 400, bias=False), torch.nn.Linear(400, 300, bias=False))


def tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=str)
def test_what_is_expected_comes(name: str, options: dict[str, Any]) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    net = model()
    optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.01, **options)
    early = tensors(optimizer)  # some make their state at once
    before = estimate([*net.parameters(), *early], [optimizer])
    net(torch.randn(2, 300)).sum().backward()
    optimizer.step()
    state = sum(tensor.nbytes for tensor in tensors(optimizer))
    leaves = sum(parameter.nbytes for parameter in net.parameters())
    assert before.leaves_bytes == leaves + sum(tensor.nbytes for tensor in early)
    assert before.nbytes >= leaves + state
    assert before.leaves_bytes + before.optimizer_bytes <= state + 2 * leaves + 100, "a copy too much"
    assert before.nbytes % 4096 == 0
    assert name in before.assumed[0]
    after = estimate([*net.parameters(), *tensors(optimizer)], [optimizer])
    if state:
        assert after.optimizer_bytes == 0
        assert "complete" in after.assumed[0]


def test_every_optimizer_of_torch_is_known_or_said_to_be_unknown() -> None:
    for name, cls in inspect.getmembers(torch.optim, inspect.isclass):
        if issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer:
            try:
                optimizer = cls([torch.nn.Parameter(torch.zeros(3, 3))], lr=0.1)
            except TypeError:
                optimizer = cls([torch.nn.Parameter(torch.zeros(3, 3))])
            [assumed] = estimate([], [optimizer]).assumed
            assert name in assumed
            assert "unknown" not in assumed


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


def test_an_unknown_optimizer_is_taken_for_two_copies() -> None:
    net = model()
    found = estimate(net.parameters(), [Lion(net.parameters())])
    assert found.optimizer_bytes >= 2 * found.leaves_bytes
    assert "unknown" in found.assumed[0]


def test_frozen_parameters_get_no_state() -> None:
    net = model()
    net[0].requires_grad_(False)
    half = estimate([], [torch.optim.Adam(net.parameters())]).optimizer_bytes
    net[0].requires_grad_(True)
    assert estimate([], [torch.optim.Adam(net.parameters())]).optimizer_bytes == 2 * half


def test_many_small_tensors_have_room_for_their_names() -> None:
    leaves = [torch.zeros(1) for _ in range(10_000)]
    assert estimate(leaves, []).other_bytes >= 10_000 * 256
    assert estimate([], []).nbytes > 0
    assert estimate([], [], state_bytes=1 << 20).other_bytes >= 1 << 20
