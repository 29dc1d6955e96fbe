"""Restoring torch optimizers: state read into the live tensors where they fit, and torch's casts undone."""

from __future__ import annotations

from typing import Any

import torch

from .plan_base import Ledger, StoredTensor
from .tensors import as_bytes_view

_SHAPED_AS_PARAMETER = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "prev",
        "step_size",
        "ax",
    }
)
"""State of torch's own optimizers that has the shape of its parameter."""


def plan_optimizer(ledger: Ledger, optimizer: torch.optim.Optimizer, stored: Any, where: str) -> bool:
    """Compare ``stored`` (a state dict with :class:`StoredTensor` for tensors) and claim what can be filled
    in place. False if it is no optimizer state; then nothing can be loaded."""
    if not isinstance(stored, dict) or not {"state", "param_groups"} <= set(stored):
        ledger.differ("type", f"{where}: stored is no optimizer state")
        return False
    parameters = _compare_groups(ledger, optimizer, stored["param_groups"], where)
    if parameters is None:
        return False
    from_torch = type(optimizer).__module__.startswith("torch.optim.")
    for index, state in stored["state"].items():
        live = parameters.get(index)
        if live is None or not isinstance(state, dict):
            continue
        held = optimizer.state.get(live, {})
        for name, value in state.items():
            if not isinstance(value, StoredTensor):
                continue
            place = f"{where}/state/#{index}/{name}"
            mine = held.get(name)
            if isinstance(mine, torch.Tensor) and not ledger.claim_if_free(mine, value.index):
                _compare_held(ledger, mine, value.index, place)
            elif from_torch and name in _SHAPED_AS_PARAMETER:
                _compare_shape(ledger, live, value.index, place)
    return True


def _compare_groups(
    ledger: Ledger, optimizer: torch.optim.Optimizer, groups: Any, where: str
) -> dict[Any, torch.Tensor] | None:
    """Parameters by their stored index, if the groups agree."""
    live = optimizer.param_groups
    sizes = [len(group["params"]) for group in live]
    stored_sizes = [len(group["params"]) for group in groups]
    if sizes != stored_sizes:
        ledger.differ(
            "shape", f"{where}/param_groups: stored groups of {stored_sizes} parameters, target {sizes}"
        )
        return None
    parameters: dict[Any, torch.Tensor] = {}
    for number, (group, mine) in enumerate(zip(groups, live, strict=True)):
        parameters.update(zip(group["params"], mine["params"], strict=True))
        place = f"{where}/param_groups/[{number}]"
        # torch adds defaults of its own to an optimizer that was loaded into; its groups do not have them.
        for name in sorted((set(optimizer.defaults) & set(mine)) - set(group)):
            ledger.differ("missing", f"{place}/{name}: an option of the target that is not stored")
        names, my_names = group.get("param_names"), mine.get("param_names")
        if names is not None and my_names is not None and list(names) != list(my_names):
            ledger.differ("class", f"{place}/param_names: the parameters are in another order, or others")
    return parameters


def _compare_held(ledger: Ledger, mine: torch.Tensor, index: int, place: str) -> None:
    entry = ledger.entry(index)
    if tuple(mine.shape) != entry.shape:
        ledger.differ("shape", f"{place}: stored {entry.shape}, target {tuple(mine.shape)}")
    elif str(mine.dtype).removeprefix("torch.") != entry.dtype:
        # Loosened, the stored dtype is kept: a cast of moments loses them for good.
        ledger.differ(
            "dtype", f"{place}: stored {entry.dtype}, target {str(mine.dtype).removeprefix('torch.')}"
        )


def _compare_shape(ledger: Ledger, parameter: torch.Tensor, index: int, place: str) -> None:
    entry = ledger.entry(index)
    if tuple(parameter.shape) != entry.shape:
        ledger.differ("shape", f"{place}: stored {entry.shape}, its parameter is {tuple(parameter.shape)}")


def load_optimizer(optimizer: torch.optim.Optimizer, content: dict[str, Any]) -> None:
    """``optimizer.load_state_dict(content)``, exactly: torch casts state to the parameters' dtype and
    rebuilds nested values; whatever it changed so is put back as it was stored, on the device that torch
    chose."""
    optimizer.load_state_dict(content)
    order = [index for group in content["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(order, parameters, strict=True):
        stored, placed = content["state"].get(index), optimizer.state.get(parameter)
        if isinstance(stored, dict) and isinstance(placed, dict):
            for name in stored.keys() & placed.keys():
                placed[name] = _exact(stored[name], placed[name])


def _exact(stored: Any, placed: Any) -> Any:
    if isinstance(stored, torch.Tensor):
        if not isinstance(placed, torch.Tensor) or placed is stored:
            return placed
        if placed.dtype == stored.dtype:
            return placed
        cast = stored.to(device=placed.device, dtype=placed.dtype)
        if cast.shape != placed.shape or not torch.equal(as_bytes_view(cast), as_bytes_view(placed)):
            # No mere cast: the optimizer's own load_state_dict made something else of it on purpose.
            return placed
        return stored.to(device=placed.device)
    if isinstance(stored, dict) and isinstance(placed, dict) and stored.keys() == placed.keys():
        for name, value in stored.items():
            placed[name] = _exact(value, placed[name])
        return placed
    if type(stored) in (list, tuple) and type(placed) is type(stored) and len(placed) == len(stored):
        return type(stored)(_exact(mine, other) for mine, other in zip(stored, placed, strict=True))
    return placed if type(placed) is type(stored) else stored
