"""Fully qualified names of parameters, and the state of optimizers by these names.

A name is what the module's own state calls the parameter (without what wrappers add), behind ``<part>.`` for
modules of other parts than "model", and behind the place in the part for modules in a dict or list:
``layers.0.weight``, ``critic.layers.0.weight``. Tied parameters have the first of their names.

Names are found anew at each save: a parameter may be replaced at any time, and an id be given to another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import objects
from .chunks import ChunkOptimizers, Chunks, two_of_one_name
from .optim import named_content, united_content

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
        # Backwards, and what was known before last: the first name of each parameter stays.
        found = dict(zip(map(id, reversed(parameters)), reversed(texts), strict=True))
        found.update(names)
        if len(set(found.values())) < len(found):
            _drop_second(found, names, part in chunks)
        names = found
    return names


def _drop_second(found: dict[int, str], names: dict[int, str], chunk: bool) -> None:
    """Take out of ``found`` what has the name of something in ``names``, or of another one in ``found``."""
    owners = {name: owner for owner, name in names.items()}
    for owner, name in list(found.items()):
        if owners.setdefault(name, owner) == owner:
            continue
        if chunk:
            raise two_of_one_name(name)
        del found[owner]


class Asker:
    """Asks objects for their state during one save: torch optimizers by the names of their parameters."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._names: dict[int, str] | None = None

    @property
    def names(self) -> dict[int, str]:
        """:func:`parameter_names`, found when first asked for."""
        if self._names is None:
            self._names = parameter_names(self._state)
        return self._names

    def __call__(self, value: Any, where: str) -> Any:
        """As :func:`objects.state_of`."""
        if isinstance(value, ChunkOptimizers):
            return united_content(value.optimizers, self.names, where)
        content = objects.state_of(value, where)
        if isinstance(value, torch.optim.Optimizer):
            return named_content(value, content, self.names)
        return content
