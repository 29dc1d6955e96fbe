"""The training job of the simulated nodes: small, deterministic, with every kind of state.

Under ``ddp`` the model is replicated (dropout and batch norm make each rank's own state matter), under ``fsdp`` it is
sharded; in both, a table is cut by hand (``everstep.Shards``), and each rank has a stream of batches of its own.
"""

from __future__ import annotations

import hashlib
from typing import Any

import everstep
import torch
import torch.distributed as dist
from everstep.demo.fingerprint import fingerprints
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.batches import Batches

WIDTH = 64
ROWS, COLUMNS = 48, 400
KINDS = ("ddp", "fsdp")


def first_of(states: list[Any], rank: int, world: int) -> Any:
    """How the streams are dealt out anew among another number of ranks."""
    return states[rank % len(states)]


class Training:
    """One rank's live objects."""

    def __init__(self, kind: str, rank: int, world: int) -> None:
        torch.manual_seed(7)
        self.model: Any = _ddp() if kind == "ddp" else _fsdp(world)
        torch.manual_seed(8 + rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.9)
        self.batches = Batches(rank, WIDTH)
        begin, end = rank * ROWS // world, (rank + 1) * ROWS // world
        whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
        self.rows = (whole[begin:end] % 97).clone()
        shards = everstep.Shards((ROWS, COLUMNS), [((begin, 0), (end - begin, COLUMNS))], [self.rows])
        self.state = everstep.TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=self.batches,
            own={"table": shards},
            data="stream",
        )
        self.state.reshard_loader = first_of

    def step(self) -> None:
        batch = self.batches.next()
        loss: Tensor = self.model(batch).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.rows.mul_(0.96875).add_(1.0)  # the same wherever a row lies

    @torch.no_grad()
    def hashes(self) -> dict[str, str]:
        """Of what must be the same in the end, leaf by leaf; DTensors by their local parts."""
        model = getattr(self.model, "module", self.model).state_dict()
        held = {"model": model, "optimizer": self.optimizer.state_dict(), "table": self.rows}
        return fingerprints(
            _local({**held, "scheduler": self.scheduler.state_dict(), "rng": torch.get_rng_state()})
        )

    @torch.no_grad()
    def whole(self) -> str:
        """One hash of model, moments and table put together from all ranks: at any number of ranks. A collective."""
        digest = hashlib.sha256()
        parameters = dict(getattr(self.model, "module", self.model).named_parameters())
        for name in sorted(parameters):
            moments = self.optimizer.state.get(parameters[name], {})
            for one in (
                parameters[name],
                *(moments[key] for key in ("exp_avg", "exp_avg_sq") if key in moments),
            ):
                full = one.full_tensor() if hasattr(one, "full_tensor") else one.detach()
                digest.update(full.contiguous().view(torch.uint8).numpy().tobytes())
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self.rows.numpy().tobytes())
        for part in parts:
            digest.update(part)
        return digest.hexdigest()


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh(), nn.Linear(WIDTH, 37), nn.Linear(37, 4)
    )


def _ddp() -> nn.Module:
    model = _net()
    model.insert(1, nn.BatchNorm1d(WIDTH))  # type: ignore[operator]
    # Unused parameters are looked for so that the buckets stay as they are, before and after a resume.
    return DistributedDataParallel(model, find_unused_parameters=True)


def _fsdp(world: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    model = _net()
    for child in model.children():
        if isinstance(child, nn.Linear):
            fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[no-any-return]


def _local(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _local(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_local(one) for one in value]
    return value.to_local() if hasattr(value, "to_local") else value
