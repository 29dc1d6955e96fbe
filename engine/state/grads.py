"""Gradients accumulated since the last optimizer step, as one object with state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import StateError
from . import objects
from .chunks import Chunks, as_chunks
from .plan_base import Ledger, Planned, StoredTensor, memory_of
from .sharded import local_of
from .tensors import copy_into

if TYPE_CHECKING:
    from .trainstate import TrainState


class Gradients(Planned):
    """``.grad`` of the parameters of a TrainState's model, by the names of its state dict, and
    ``micro_step``."""

    def __init__(self, owner: TrainState) -> None:
        self._owner = owner

    def state_dict(self) -> dict[str, Any]:
        named = {name: parameter.grad for name, parameter in self._parameters().items()}
        return {
            "micro_step": self._owner.micro_step,
            "grads": {name: grad.detach() for name, grad in named.items() if grad is not None},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Parameters without a stored gradient get None."""
        self._owner.micro_step = state["micro_step"]
        for name, parameter in self._parameters().items():
            grad = state["grads"].get(name)
            if grad is None:
                parameter.grad = None
            elif parameter.grad is not None and parameter.grad.dtype == grad.dtype:
                if parameter.grad is not grad and memory_of(parameter.grad) != memory_of(grad):
                    copy_into(local_of(parameter.grad), local_of(grad))
            else:
                parameter.grad = grad.to(parameter.device)

    def plan(self, ledger: Ledger, stored: Any, where: str) -> None:
        """Compare with the parameters; claim gradients that exist already."""
        if not isinstance(stored, dict) or set(stored) != {"micro_step", "grads"}:
            ledger.differ("type", f"{where}: stored are no gradients")
            return
        parameters = self._parameters()
        for name, value in stored["grads"].items():
            place = f"{where}/grads/{name}"
            parameter = parameters.get(name)
            if parameter is None:
                ledger.unexpected(place, value, "a gradient of a parameter that the model lacks")
            elif isinstance(value, StoredTensor):
                self._plan_one(ledger, parameter, value.index, place)

    def _plan_one(self, ledger: Ledger, parameter: torch.Tensor, index: int, place: str) -> None:
        entry = ledger.entry(index)
        if entry.shape != tuple(parameter.shape):
            ledger.differ(
                "shape", f"{place}: stored {entry.shape}, its parameter is {tuple(parameter.shape)}"
            )
        elif entry.dtype != str(parameter.dtype).removeprefix("torch."):
            ledger.differ("dtype", f"{place}: stored {entry.dtype}, its parameter is {parameter.dtype}")
        elif parameter.grad is None or not ledger.claim_if_free(parameter.grad, index):
            ledger.like(index, parameter)

    def _parameters(self) -> Mapping[str, torch.Tensor]:
        model = as_chunks(objects.unwrap(self._owner.model))
        if isinstance(model, Chunks):
            return model.named_parameters()
        if not isinstance(model, torch.nn.Module):
            raise StateError(
                "gradients are stored for a model that is one nn.Module, or a list of its chunks",
                found=type(model),
                path="grads",
            )
        return objects.named_parameters(model)
