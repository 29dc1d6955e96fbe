"""Small models, training that can be gone on with, and saving and loading by way of the public functions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import everstep
import torch
from everstep import TrainState
from everstep.state.names import parameter_names
from torch import nn


class Net(nn.Module):
    """Two layers of one shape, so that what is mistaken for each other still fits."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.b(torch.tanh(self.a(x))))
        return out


NAMES = ["a.weight", "a.bias", "b.weight", "b.bias", "head.weight"]


def train(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], steps: int, first: int = 0) -> None:
    """Some steps on data that depend on the step alone."""
    optimizers = list(optimizers)
    for step in range(first, first + steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = (model(x) - x.sum()).square().mean()
            loss.backward()
            return loss

        closure()
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)
            else:
                optimizer.step()


def save_and_load(path: Path, source: Any, target: Any, **options: Any) -> Any:
    """``source`` saved to a new run, and loaded into ``target``."""
    root = path / f"run-{len(list(path.iterdir()))}"
    everstep.save(root, 1, source)
    return everstep.load(root, into=target, **options)


def by_name(state: TrainState) -> dict[str, dict[str, Any]]:
    """{name of a parameter: what the optimizers of ``state`` hold for it, and the options of its group}."""
    names = parameter_names(state)
    found: dict[str, dict[str, Any]] = {}
    for optimizer in state.optimizers():
        for group in optimizer.param_groups:
            options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            for parameter in group["params"]:
                found[names[id(parameter)]] = {
                    "options": options,
                    "state": optimizer.state.get(parameter, {}),
                }
    return found


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Equal to the bit."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for mine, other in zip(a, b, strict=True):
            assert_same(mine, other, where)
    else:
        assert a == b, where
