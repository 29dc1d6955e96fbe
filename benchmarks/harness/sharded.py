"""States of several ranks: a small transformer cut up by FSDP2, or held by each rank of DDP.

With one process they are the whole, for the floors. Imported where torch.distributed is there.
"""

from __future__ import annotations

import math

import torch
from everstep.demo.model import GPT, VOCABULARY
from torch import nn

from ..state import StillAdam
from .states import ADAM_BYTES, ModelState, adam_state

LAYERS = 8
LAYER_SQUARES = 12
"""Parameters of a layer in squares of the width."""
HEADS = 4
LENGTH = 64
LEAST_WIDTH = 8


class PlacedState(ModelState):
    """Contents follow from each number's place in the whole, however many ranks hold it: ranks hold different bytes,
    and any number of them knows what to expect."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> None:
        super().__init__(module, optimizer)
        for number, (whole, own) in enumerate(zip(self.tensors().values(), self.local, strict=True)):
            if own.ndim:  # single numbers are the same on all ranks
                rows = -(-whole.shape[0] // world)
                first = min(rows * rank, whole.shape[0]) * math.prod(whole.shape[1:])
                own.copy_(_contents(first, own, number))


def _contents(first: int, like: torch.Tensor, number: int) -> torch.Tensor:
    """fp32 between 1 and 2 for places from ``first`` on, in the shape of ``like``."""
    bits = torch.arange(first, first + like.numel(), dtype=torch.int32)
    bits.mul_(1664525).add_(number * 7919).bitwise_and_(0x7FFFFF).bitwise_or_(0x3F800000)
    return bits.view(torch.float32).view(like.shape)


def fully_sharded(nbytes: int, rank: int, world: int) -> PlacedState:
    """fp32 and Adam, all ranks together: each layer and the rest are sharded along their first axis."""
    model = transformer(nbytes)
    if world > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return PlacedState(model, StillAdam(model.parameters()), rank, world)


def replicated(nbytes: int, rank: int, world: int) -> ModelState:
    """fp32 and Adam, the same on each rank (whose seeds are the same), in DistributedDataParallel."""
    module: nn.Module = transformer(nbytes)
    if world > 1:
        module = nn.parallel.DistributedDataParallel(module)
    return adam_state(module)


def transformer(nbytes: int) -> GPT:
    """A byte-level GPT that comes, with Adam's moments, to about ``nbytes``."""
    wanted = nbytes // ADAM_BYTES
    others = LENGTH + VOCABULARY
    squares = LAYERS * LAYER_SQUARES
    width = int((math.sqrt(others**2 + 4 * squares * wanted) - others) / (2 * squares))
    width = max(LEAST_WIDTH, width // HEADS * HEADS)
    return GPT(width=width, layers=LAYERS, heads=HEADS, length=LENGTH, dropout=0.0)


__all__ = ["PlacedState", "fully_sharded", "replicated", "transformer"]
