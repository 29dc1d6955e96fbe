"""Chunks of one model that lie on one rank (pipeline parallelism): one state, whatever the number of chunks."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import StateError
from . import objects

WHAT_TO_DO = (
    "A list of modules is the chunks of one model, with the names of the whole model. Give modules that are no "
    'such chunks as a dict, model={"a": ..., "b": ...}, or as parts of their own'
)


class Chunks:
    """Several modules whose names are those of one model, as one object with state."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self.modules = modules

    def state_dict(self) -> dict[str, Any]:
        """The states of all chunks, united. Raises StateError if two of them have one name."""
        found: collections.OrderedDict[str, Any] = collections.OrderedDict()
        metadata: collections.OrderedDict[str, Any] = collections.OrderedDict()
        for number, module in enumerate(self.modules):
            content = objects.state_of(module, f"model/[{number}]")
            twice = next((name for name in content if name in found), None)
            if twice is not None:
                raise two_of_one_name(twice)
            found.update(content)
            for name, item in getattr(content, "_metadata", {}).items():
                metadata.setdefault(name, item)
        found._metadata = metadata  # type: ignore[attr-defined]
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each chunk what is its own."""
        for module in self.modules:
            inner = objects.unwrap(module)
            own = objects.state_of(inner, "model").keys()
            content = collections.OrderedDict((name, item) for name, item in state.items() if name in own)
            inner.load_state_dict(objects.with_prefixes(inner, content))

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """As :func:`objects.named_parameters`, of all chunks. Raises StateError if two have one name."""
        found: dict[str, torch.nn.Parameter] = {}
        for module in self.modules:
            for name, parameter in objects.named_parameters(module).items():
                if found.setdefault(name, parameter) is not parameter:
                    raise two_of_one_name(name)
        return found


class ChunkOptimizers:
    """The optimizers of the chunks of one model. Their state is one, by name of parameter."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def state_dict(self) -> dict[str, Any]:
        raise StateError("the optimizers of chunks have a state by names only", path="optimizer")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise StateError("the optimizers of chunks have a state by names only", path="optimizer")


def as_chunks(model: Any) -> Any:
    """``model``, or :class:`Chunks` where it is a list or tuple of modules."""
    if type(model) in (list, tuple) and model and all(isinstance(item, torch.nn.Module) for item in model):
        return Chunks(list(model))
    return model


def as_chunk_optimizers(optimizer: Any) -> Any:
    """``optimizer``, or :class:`ChunkOptimizers` where it is a list or tuple of torch optimizers."""
    if (
        type(optimizer) in (list, tuple)
        and optimizer
        and all(isinstance(item, torch.optim.Optimizer) for item in optimizer)
    ):
        return ChunkOptimizers(list(optimizer))
    return optimizer


def kind_of(value: Any) -> type:
    """The class whose state ``value`` has: its own without wrappers; that of the optimizers of chunks if they
    are of one class."""
    if isinstance(value, ChunkOptimizers):
        kinds = {type(item) for item in value.optimizers}
        return kinds.pop() if len(kinds) == 1 else ChunkOptimizers
    return type(objects.unwrap(value))


def two_of_one_name(name: str) -> StateError:
    return StateError(f"two chunks of the model have a {name!r}", hint=WHAT_TO_DO, path=f"model/{name}")
