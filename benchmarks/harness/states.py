"""The states that the workloads save: tensors in a module and its optimizer, or plain ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..state import StillAdam, gpt_shapes, hashes, random, scramble
from .shapes import Family, Shapes, moe_shapes, scaled

ADAM_BYTES = 12
MIXED_BYTES = 14
"""bf16: the parameter; fp32: its master copy and Adam's two moments."""
SMALL_BYTES = 256


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``, which may be a DTensor."""
    of_this_rank = getattr(tensor, "to_local", None)
    found: Tensor = of_this_rank() if of_this_rank is not None else tensor.detach()
    return found


class TensorsState:
    """Named tensors: what all states have in common. ``scale``: by what a public model's shapes were divided."""

    def __init__(
        self,
        named: Mapping[str, Tensor],
        module: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scale: dict[str, Any] | None = None,
    ) -> None:
        self.module, self.optimizer, self.scale = module, optimizer, scale
        self._named = dict(named)
        self.local = [local(tensor) for tensor in self._named.values()]
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in self.local)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._named)

    def tree(self) -> dict[str, Any]:
        return {"state": self.tensors()}

    def change(self) -> None:
        with torch.no_grad():
            torch._foreach_add_(
                [t.view(-1)[:1] for t in self.local if t.is_floating_point() and t.numel()], 1
            )

    def scramble(self) -> None:
        scramble(self.local)

    def hashes(self) -> list[str]:
        return hashes(self.local)


class ModelState(TensorsState):
    """A module and its optimizer; entries are named as DCP names them: "model.NAME", "optimizer.state.NAME.KEY"."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, scale: dict[str, Any] | None = None
    ) -> None:
        names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        self._model: dict[str, Tensor] = {
            name: tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items()
        }
        self._moments: dict[str, dict[str, Tensor]] = {
            names[parameter]: {key: value for key, value in state.items() if isinstance(value, Tensor)}
            for parameter, state in optimizer.state.items()
        }
        self._groups = [
            {**group, "params": [names[parameter] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        named = {f"model.{name}": tensor for name, tensor in self._model.items()}
        for name, state in self._moments.items():
            named |= {f"optimizer.state.{name}.{key}": value for key, value in state.items()}
        super().__init__(named, module, optimizer, scale)

    def tree(self) -> dict[str, Any]:
        moments = {name: dict(state) for name, state in self._moments.items()}
        groups = [dict(group) for group in self._groups]
        return {"model": dict(self._model), "optimizer": {"state": moments, "param_groups": groups}}


def parameters(shapes: Shapes, dtype: torch.dtype = torch.float32) -> nn.ParameterDict:
    """Random parameters of these names (without dots) and shapes."""
    return nn.ParameterDict({name: nn.Parameter(random(shape).to(dtype)) for name, shape in shapes})


def adam_state(module: nn.Module, scale: dict[str, Any] | None = None) -> ModelState:
    """``module`` and Adam's two moments for each parameter, in fp32."""
    return ModelState(module, StillAdam(module.parameters()), scale)


def mixed_state(module: nn.Module, scale: dict[str, Any] | None = None) -> ModelState:
    """``module`` in bf16, and for each parameter a master copy in fp32 and Adam's two moments."""
    optimizer = StillAdam(module.parameters())
    for parameter, state in optimizer.state.items():
        state["master"] = local(parameter).float()
    return ModelState(module, optimizer, scale)


def gpt(nbytes: int) -> ModelState:
    """fp32 and Adam."""
    return adam_state(parameters(gpt_shapes(nbytes)))


def gpt_mixed(nbytes: int) -> ModelState:
    """bf16, fp32 masters and Adam."""
    return mixed_state(parameters(gpt_shapes(nbytes * ADAM_BYTES // MIXED_BYTES), torch.bfloat16))


def moe(nbytes: int) -> ModelState:
    """Experts of uneven sizes; bf16, fp32 masters and Adam."""
    return mixed_state(parameters(moe_shapes(nbytes // MIXED_BYTES), torch.bfloat16))


def llama(family: Family) -> Callable[[int], ModelState]:
    """The family's shapes, made smaller; bf16, fp32 masters and Adam."""

    def build(nbytes: int) -> ModelState:
        shapes, scale = scaled(family, nbytes // MIXED_BYTES)
        return mixed_state(parameters(shapes, torch.bfloat16), scale)

    return build


def small(count: int) -> Callable[[int], TensorsState]:
    """``count`` tensors of 256 bytes, or as many as ``nbytes`` has room for."""

    def build(nbytes: int) -> TensorsState:
        number = max(1, min(count, nbytes // SMALL_BYTES))
        block = random((number, SMALL_BYTES // 4))
        return TensorsState({f"t{i}": one.clone() for i, one in enumerate(block)})

    return build


def huge(nbytes: int) -> TensorsState:
    """One tensor in fp32."""
    return TensorsState({"tensor": random((max(1, nbytes // 4),))})


__all__ = [
    "ModelState",
    "TensorsState",
    "adam_state",
    "gpt",
    "gpt_mixed",
    "huge",
    "llama",
    "local",
    "mixed_state",
    "moe",
    "parameters",
    "small",
]
