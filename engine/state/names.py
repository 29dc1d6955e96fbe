"""Fully qualified names of parameters, and the state of optimizers by these names.

A name is what the module's own state calls the parameter (without what wrappers add), behind ``<part>.`` for
modules of other parts than "model", and behind the place in the part for modules in a dict or list:
``layers.0.weight``, ``critic.layers.0.weight``. Tied parameters have the first of their names.

Names are found anew at each save: a parameter may be replaced at any time, and an id be given to another one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from . import objects
from .chunks import ChunkOptimizers, Chunks, two_of_one_name
from .optim import named_content, united_content
from .steady import Looker, Steady

if TYPE_CHECKING:
    from .trainstate import TrainState

MODEL = "model"
"""The part whose modules' names have no prefix."""


def parameter_names(state: TrainState) -> dict[int, str]:
    """{id of a parameter: its name}, of all parameters of the modules in ``state``.

    A parameter whose name another one has already gets none. Raises StateError where chunks of a model have
    parameters of one name. Ids hold as long as the parameters live; do not keep them.
    """
    names: dict[int, str] = {}
    chunks = {part for part, value in state.live_parts().items() if isinstance(value, Chunks)}
    for part, path, module in state.modules():
        prefix = "".join(f"{step}." for step in (*(() if part == MODEL else (part,)), *path))
        texts, parameters = objects.all_parameters(module, prefix)
        # Thousands at each save: one by one only where a parameter or a name is met again.
        united = {**names, **dict(zip(map(id, parameters), texts, strict=True))}
        if len(united) < len(names) + len(texts) or len(set(united.values())) < len(united):
            united = _first_names(names, zip(texts, parameters, strict=True), part in chunks)
        names = united
    return names


def _first_names(
    names: dict[int, str], more: Iterable[tuple[str, torch.nn.Parameter]], chunk: bool
) -> dict[int, str]:
    """``names`` and ``more``: the first name of each parameter, the first parameter of each name."""
    found = dict(names)
    owners = {name: owner for owner, name in names.items()}
    for name, parameter in more:
        if id(parameter) in found:
            continue
        if name not in owners:
            owners[name] = id(parameter)
            found[id(parameter)] = name
        elif chunk:
            raise two_of_one_name(name)
    return found


class Asker:
    """Asks objects for their state during one save: torch optimizers by the names of their parameters."""

    def __init__(self, state: TrainState, steady: Steady | None = None) -> None:
        """``steady``: what is known of the state's modules and optimizers from former times."""
        self._state = state
        self._names: dict[int, str] | None = None
        modules = ((part, path, objects.unwrap(module)) for part, path, module in state.modules())
        self.looker = Looker(steady, modules) if steady is not None else None

    @property
    def names(self) -> dict[int, str]:
        """:func:`parameter_names`, found when first asked for."""
        if self._names is None:
            self._names = parameter_names(self._state)
        return self._names

    def of_part(self, part: str, value: Any) -> Any:
        """The state of ``value``, which is all of ``part``: as :meth:`__call__` gives it, or that it is the same."""
        looker = self.looker
        if looker is not None and isinstance(objects.unwrap(value), torch.nn.Module):
            return looker.module(part, lambda: self(value, part))
        if looker is not None and isinstance(value, torch.optim.Optimizer):
            return looker.optimizer(part, value, lambda: self(value, part))
        return self(value, part)

    def __call__(self, value: Any, where: str) -> Any:
        """As :func:`objects.state_of`."""
        if isinstance(value, ChunkOptimizers):
            return united_content(value.optimizers, self.names, where)
        content = objects.state_of(value, where)
        if isinstance(value, torch.optim.Optimizer):
            return named_content(value, content, self.names)
        return content
