"""A small network under every parallelism, and its reference, trained unsharded.

Sharded models, and sharded optimizer moments, are made by torch from whole ones: a twin of the network holds a
moment in the place of each parameter, and is sharded the same way. So nothing here depends on what is tested.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = 3
MOMENTS = ("exp_avg", "exp_avg_sq")
NAMES = ("embed", "up", "down", "out")


class Net(nn.Module):
    """Four layers, none of whose sizes is divisible by many ranks, with a buffer. ``only``: a pipeline stage."""

    def __init__(self, only: tuple[str, ...] = NAMES) -> None:
        super().__init__()
        layers: dict[str, Callable[[], nn.Module]] = {
            "embed": lambda: nn.Embedding(13, 8),
            "up": lambda: nn.Linear(8, 14),
            "down": lambda: nn.Linear(14, 7),
            "out": lambda: nn.Linear(7, 5, bias=False),
        }
        for name in only:
            setattr(self, name, layers[name]())
        self.only = only
        if "down" in only:
            self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.only:
            x = getattr(self, name)(x)
            if name == "up":
                x = torch.tanh(x)
            if name == "down":
                x = x * self.scale[0]
        return x


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, biases do not. A pipeline stage may have no biases: the schedule still has two groups."""
    weights = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=0.01)


@functools.cache
def batch() -> torch.Tensor:
    return torch.arange(26).reshape(2, 13) % 13


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(batch()).square().mean()


@functools.cache
def reference() -> dict[str, dict[str, torch.Tensor]]:
    """{"parameters", "exp_avg", "exp_avg_sq", "buffers"} by name, and {"loss": {"": loss}}."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = Net()
        optimizer = make_optimizer(model)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
        model.scale.copy_(torch.tensor([1.5, 2.5, 3.5]))
    named = dict(model.named_parameters())
    return {
        "parameters": {name: p.detach().clone() for name, p in named.items()},
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        **{m: {name: optimizer.state[p][m].clone() for name, p in named.items()} for m in MOMENTS},
        "loss": {"": loss_of(model).detach()},
    }


def _filled(values: dict[str, torch.Tensor] | None, only: tuple[str, ...]) -> Net:
    model = Net(only)
    if values is not None:
        own = model.state_dict()
        model.load_state_dict({**own, **{name: value for name, value in values.items() if name in own}})
    return model


Shard = Callable[[tuple[str, ...], int, int], tuple[tuple[str, ...], Callable[[nn.Module], nn.Module]]]


def _plain(rank: int, world: int) -> Any:
    return NAMES, lambda model: model


def _ddp(rank: int, world: int) -> Any:
    return NAMES, lambda model: nn.parallel.DistributedDataParallel(model)


def _fsdp(rank: int, world: int) -> Any:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    return NAMES, lambda model: _fully(model, mesh)


def _hsdp(rank: int, world: int) -> Any:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "shard"))
    return NAMES, lambda model: _fully(model, mesh)


def _tp(rank: int, world: int) -> Any:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    return NAMES, lambda model: _tensor_parallel(model, mesh)


def _fsdp_tp(rank: int, world: int) -> Any:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    return NAMES, lambda model: _fully(_tensor_parallel(model, mesh["tp"]), mesh["dp"])


def _pp(rank: int, world: int) -> Any:
    """Pipeline stages over all ranks; the embedding and the first layer come first."""
    cuts = {2: [NAMES[:2], NAMES[2:]], 3: [NAMES[:1], NAMES[1:3], NAMES[3:]], 4: [(name,) for name in NAMES]}
    return tuple(cuts[world][rank]), lambda model: model


def _pp_fsdp(rank: int, world: int) -> Any:
    """Two stages, each fully sharded over half of the ranks."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    only = NAMES[:2] if rank < world // 2 else NAMES[2:]
    return only, lambda model: _fully(model, mesh["dp"])


def _pp_fsdp_tp(rank: int, world: int) -> Any:
    """Two stages, fully sharded and tensor parallel on one mesh; each has a layer that is not tensor parallel."""
    mesh = init_device_mesh("cpu", (2, world // 4, 2), mesh_dim_names=("pp", "dp", "tp"))
    only = NAMES[:2] if rank < world // 2 else NAMES[2:]
    return only, lambda model: _fully(_tensor_parallel(model, mesh["tp"]), mesh["dp"])


def _fully(model: nn.Module, mesh: Any) -> nn.Module:
    for child in model.children():
        fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[no-any-return]


def _tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, {name: how for name, how in plan.items() if hasattr(model, name)})


MESHES: dict[str, tuple[int, Callable[[int, int], Any]]] = {
    "one": (1, _plain),
    "ddp2": (2, _ddp),
    "ddp3": (3, _ddp),
    "fsdp2": (2, _fsdp),
    "fsdp3": (3, _fsdp),
    "fsdp4": (4, _fsdp),
    "fsdp8": (8, _fsdp),
    "fsdp16": (16, _fsdp),
    "hsdp2x2": (4, _hsdp),
    "tp2": (2, _tp),
    "fsdp2xtp2": (4, _fsdp_tp),
    "fsdp3xtp2": (6, _fsdp_tp),
    "pp2": (2, _pp),
    "pp4": (4, _pp),
    "pp2xfsdp2": (4, _pp_fsdp),
    "pp2xfsdp2xtp2": (8, _pp_fsdp_tp),
}
"""Name: number of ranks, and (rank, world) -> (layers of this rank, how they are made parallel)."""

FORWARD = ("one", "ddp", "fsdp2", "fsdp3", "fsdp4", "fsdp8", "hsdp")
"""Beginnings of names of those that compute what the reference computes, operation by operation."""


def build(name: str, rank: int, world: int, *, filled: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The network and its optimizer under mesh ``name``: holding the reference, or a fresh one without moments."""
    only, parallel = MESHES[name][1](rank, world)
    if not filled:
        torch.manual_seed(100 + rank)
        model = parallel(_filled(None, only))
        if name.startswith("ddp"):
            dist.barrier()
        return model, make_optimizer(model)
    known = reference()
    model = parallel(_filled({**known["parameters"], **known["buffers"]}, only))
    optimizer = make_optimizer(model)
    for moment in MOMENTS:
        twin = dict(parallel(_filled(known[moment], only)).named_parameters())
        for key, parameter in model.named_parameters():
            state = optimizer.state.setdefault(parameter, {"step": torch.tensor(float(STEPS))})
            state[moment] = twin[key].detach()
    return model, optimizer


def local(tensor: Any) -> torch.Tensor:
    """What this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def differences(
    model: nn.Module, optimizer: torch.optim.Optimizer, other: nn.Module, expected: torch.optim.Optimizer
) -> list[str]:
    """Names of what is not equal bit for bit, between two of one mesh."""
    found = []
    for (name, mine), (_, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        if not torch.equal(local(mine), local(theirs)):
            found.append(name)
        states = optimizer.state[mine], expected.state[theirs]
        if set(states[0]) != set(states[1]):
            found.append(f"{name}: {sorted(states[0])}")
            continue
        for key in states[0]:
            if not torch.equal(local(states[0][key]), local(states[1][key])):
                found.append(f"{name}/{key}")
    for (name, one), (_, two) in zip(model.named_buffers(), other.named_buffers(), strict=True):
        if not torch.equal(one, two):
            found.append(name)
    return found
