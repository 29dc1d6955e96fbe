"""How large a slot must be, said before the first step: the optimizer's state appears only after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from everstep.memory.header import aligned
from everstep.memory.sizes import SLACK, around_bytes
from everstep.state.sharded import held_by

SCALAR_BYTES = 4
"""A step counter is a float32 of no axes."""


@dataclass(frozen=True)
class Estimate:
    """Bytes that one snapshot of a rank will take, and what was assumed of what is not there yet.

    ``leaves_bytes`` exist now, ``optimizer_bytes`` are expected to come, ``other_bytes`` are headers, layout,
    plain values and slack. ``assumed`` is one sentence for each optimizer.
    """

    leaves_bytes: int
    optimizer_bytes: int
    other_bytes: int
    assumed: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Size for a slot, a multiple of 4 KiB."""
        return aligned(self.leaves_bytes + self.optimizer_bytes + self.other_bytes)


def whole(parameter: torch.Tensor) -> float:
    """A tensor like ``parameter`` is stored by this rank, whole."""
    return parameter.nbytes


def estimate(
    leaves: Iterable[Any],
    optimizers: Iterable[Any] = (),
    *,
    state_bytes: int = 0,
    slack: float = SLACK,
    share: Callable[[torch.Tensor], float] = whole,
) -> Estimate:
    """``leaves`` are the tensors and arrays that a snapshot would store now; ``optimizers`` the torch
    optimizers whose state belongs to it (state that exists already is among the leaves); ``state_bytes`` the
    size of the plain values now; ``share`` how many bytes this rank will store, in the mean, of a tensor like
    the parameter given."""
    sizes = [leaf.nbytes for leaf in leaves]
    optimizer_bytes, tensors = 0, 0
    assumed = []
    for optimizer in optimizers:
        expected = _expected(optimizer, share)
        optimizer_bytes += expected.nbytes
        tensors += expected.tensors
        assumed.append(expected.assumed)
    other = around_bytes(len(sizes) + tensors, state_bytes)
    other += int(slack * (sum(sizes) + optimizer_bytes))
    return Estimate(sum(sizes), optimizer_bytes, other, tuple(assumed))


def device_bytes(pieces: Iterable[torch.Tensor], optimizers: Iterable[Any] = ()) -> dict[torch.device, int]:
    """By device the bytes that ``pieces``, all that this rank holds of its tensors, and the state that the optimizers
    will have, come to: room for a snapshot beside them. Step counters of optimizers may lie on the host or beside
    their parameters, and are counted on both."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for piece in pieces:
        by_device.setdefault(piece.device, []).append(piece)
    optimizers = list(optimizers)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                by_device.setdefault(
                    _local(parameter)[0].device if _local(parameter) else parameter.device, []
                )
    found = {}
    for device, some in by_device.items():

        def share(parameter: torch.Tensor, device: torch.device = device) -> float:
            return sum(piece.nbytes for piece in _local(parameter) if piece.device == device)

        found[device] = estimate(some, optimizers, share=share).nbytes
    return found


def _local(parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What this rank holds of a parameter."""
    held = held_by(parameter)
    return (parameter,) if held is None else tuple(held.pieces)


@dataclass(frozen=True)
class _Expected:
    nbytes: int
    tensors: int
    assumed: str


def _expected(optimizer: Any, share: Callable[[torch.Tensor], float]) -> _Expected:
    """State still to come: for each parameter that has none yet."""
    nbytes = tensors = parameters = 0
    rules = set()
    for group in optimizer.param_groups:
        rule, copies = _copies(optimizer, group)
        rules.add(rule)
        for parameter in group["params"]:
            if optimizer.state.get(parameter) or not parameter.requires_grad:
                continue
            parameters += 1
            nbytes += int(copies * share(parameter)) + SCALAR_BYTES
            tensors += int(copies) + 1
    name = type(optimizer).__name__
    if not parameters:
        return _Expected(0, 0, f"{name}: its state is complete")
    return _Expected(nbytes, tensors, f"{name}: {' or '.join(sorted(rules))}, for {parameters} parameters")


def _copies(optimizer: Any, group: Mapping[str, Any]) -> tuple[str, float]:
    """(what is assumed, state per parameter in sizes of the parameter)."""
    for name, count in _KNOWN.items():
        known = getattr(torch.optim, name, None)
        if known is not None and isinstance(optimizer, known):
            copies = count + sum(
                extra for option, extra in _OPTIONS.get(name, {}).items() if group.get(option)
            )
            return f"{copies:g} tensors as large as each parameter, and a step counter", copies
    if isinstance(optimizer, torch.optim.LBFGS):
        copies = 2 * int(group.get("history_size", 100)) + 3
        return f"{copies} tensors as large as each parameter (its full history)", copies
    return "unknown optimizer, taken as 2 tensors as large as each parameter", 2


_KNOWN: dict[str, int] = {
    "Adafactor": 1,  # factored for matrices, so an upper bound
    "Muon": 1,
    "SparseAdam": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adam": 2,  # AdamW too, which is one
    "AdamW": 2,
    "Adadelta": 2,
    "Adagrad": 1,
    "ASGD": 1,
    "RMSprop": 1,
    "Rprop": 2,
    "SGD": 0,
}
_OPTIONS: dict[str, dict[str, int]] = {
    "Adam": {"amsgrad": 1},
    "AdamW": {"amsgrad": 1},
    "RMSprop": {"momentum": 1, "centered": 1},
    "SGD": {"momentum": 1},
}
