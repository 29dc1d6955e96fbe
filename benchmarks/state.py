"""The state that is saved: the tensors of a GPT and of its Adam optimizer, with random contents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .common import Mismatch

LAYERS = 12
BYTES_PER_PARAMETER = 12
"""fp32: the parameter and Adam's two moments."""
LAYERS_SHARE = 0.8
"""How much of the parameters lies in the layers; the embedding has the rest."""


class StillAdam(torch.optim.Optimizer):
    """An optimizer with Adam's state whose step changes nothing: what it takes is what its hooks take."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "step": torch.tensor(1.0),
                    "exp_avg": random_like(p),
                    "exp_avg_sq": random_like(p),
                }

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


class BenchState:
    """About ``nbytes`` of fp32 tensors in a module and its optimizer."""

    def __init__(self, nbytes: int) -> None:
        self.module = nn.ParameterDict(
            {name: nn.Parameter(random(shape)) for name, shape in gpt_shapes(nbytes)}
        )
        self.optimizer = StillAdam(self.module.parameters())
        self.tensors: list[Tensor] = [p.data for p in self.module.parameters()]
        for state in self.optimizer.state.values():
            self.tensors += [state["exp_avg"], state["exp_avg_sq"], state["step"]]
        self.nbytes = sum(t.numel() * t.element_size() for t in self.tensors)

    def change(self) -> None:
        """Change every tensor, so that old bytes would be noticed."""
        with torch.no_grad():
            for tensor in self.tensors:
                tensor.view(-1)[:1].add_(1)

    def scramble(self) -> None:
        """See :func:`scramble`."""
        scramble(self.tensors)

    def hashes(self) -> list[str]:
        """A hash of each tensor's bytes."""
        return hashes(self.tensors)


def scramble(tensors: Sequence[Tensor]) -> None:
    """Overwrite everything, so that what is not restored is noticed."""
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(-7)


def hashes(tensors: Sequence[Tensor]) -> list[str]:
    """xxh3-128 of each tensor's bytes."""
    return [
        xxhash.xxh3_128_hexdigest(t.detach().reshape(-1).view(torch.uint8).cpu().numpy().data)
        for t in tensors
    ]


def require_equal(found: list[str], expected: list[str], what: str) -> None:
    """Raises Mismatch unless all hashes are equal."""
    wrong = sum(a != b for a, b in zip(found, expected, strict=True))
    if wrong:
        raise Mismatch(f"{what}: {wrong} of {len(expected)} tensors came back with other bytes")


def random(shape: tuple[int, ...]) -> Tensor:
    """fp32 between 0 and 1; nothing that a file system could compress or leave out."""
    return torch.empty(shape).uniform_()


def random_like(tensor: Tensor) -> Tensor:
    """fp32; of a DTensor another one that is cut up alike."""
    like = torch.empty_like(tensor.detach(), dtype=torch.float32)
    local: Tensor = like.to_local() if isinstance(like, DTensor) else like
    local.uniform_()
    return like


def gpt_shapes(nbytes: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a GPT's parameters that come, with Adam's moments, to about ``nbytes``."""
    wanted = nbytes // BYTES_PER_PARAMETER
    width = max(8, int(math.sqrt(LAYERS_SHARE * wanted / (12 * LAYERS))) // 8 * 8)
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for layer in range(LAYERS):
        shapes += [
            (f"layer{layer}_{name}", shape)
            for name, shape in (
                ("norm1_weight", (width,)),
                ("norm1_bias", (width,)),
                ("qkv_weight", (3 * width, width)),
                ("qkv_bias", (3 * width,)),
                ("out_weight", (width, width)),
                ("out_bias", (width,)),
                ("norm2_weight", (width,)),
                ("norm2_bias", (width,)),
                ("up_weight", (4 * width, width)),
                ("up_bias", (4 * width,)),
                ("down_weight", (width, 4 * width)),
                ("down_bias", (width,)),
            )
        ]
    used = sum(math.prod(shape) for _, shape in shapes)
    return [("embedding", (max(1, (wanted - used) // width), width)), *shapes]
