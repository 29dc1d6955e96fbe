"""Ranks of jobs of several sizes, one after the other in the same processes. What became of each case is written to
<case>.<rank> in a directory."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import everstep
import torch
import torch.distributed as dist
from everstep import errors
from everstep.state.objects import is_plain_module
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.facade.kit import policy

TIMEOUT = timedelta(seconds=60)


class Net(nn.Module):
    """Sizes that do not divide by 4, fewer rows than ranks in one layer, a scalar, tied weights."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7) if norm else nn.Identity()
        self.middle = nn.Linear(7, 3)
        self.last = nn.Linear(3, 6, bias=False)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.norm(self.first(x)).relu())) * self.scale


class Half(nn.Module):
    """A stage of a pipeline, with the names of the whole."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(at): nn.Linear(4, 4) for at in layers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


Shape = Callable[[nn.Module], nn.Module]


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in (model.first, model.last):
        fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(model: nn.Module) -> nn.Module:
    return model


def trainer(shape: Shape, seed: int, steps: int = 0, **options: Any) -> everstep.TrainState:
    """A trained model and its AdamW; equal on all ranks but for its shards."""
    torch.manual_seed(seed)
    model = shape(options.pop("model", None) or Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(seed)
    for _ in range(steps):
        model(torch.rand(5, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return everstep.TrainState(model, optimizer, **{"rng": False, **options})


def full(value: Any) -> Any:
    found = value.full_tensor() if isinstance(value, DTensor) else value
    return found.detach().clone() if isinstance(found, torch.Tensor) else found


def contents(state: everstep.TrainState) -> dict[str, torch.Tensor]:
    """Everything by name, whole."""
    model = state.model.module if isinstance(state.model, DistributedDataParallel) else state.model
    found = {name: full(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            found[f"{name}:{key}"] = full(value)
    return found


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


class Job:
    """One rank. ``run`` runs a case at a number of ranks, in a process group of its own."""

    def __init__(self, rank: int, ranks: int, port: int, out: Path) -> None:
        self.rank, self.out = rank, out
        self.store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, timeout=TIMEOUT)
        self.failed = False

    def run(self, name: str, world: int, case: Callable[[Job], None], *, group: bool = True) -> None:
        if self.rank < world:
            try:
                if group:
                    store = dist.PrefixStore(name, self.store)
                    dist.init_process_group(
                        "gloo", store=store, rank=self.rank, world_size=world, timeout=TIMEOUT
                    )
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    case(self)
                said = "ok"
            except BaseException:
                said = traceback.format_exc()
            finally:
                if group:
                    dist.destroy_process_group()
            (self.out / f"{name}.{self.rank}").write_text(said)
        self._meet(name)

    def _meet(self, name: str) -> None:
        """All processes, idle ones too, have ended the case."""
        total = int(self.store.add(f"ended/{name}", 1))
        if total == RANKS:
            self.store.set(f"all/{name}", "1")
        self.store.wait([f"all/{name}"], TIMEOUT)

    def root(self, name: str) -> Path:
        return self.out / name

    @contextlib.contextmanager
    def checkpointer(self, name: str, **options: Any) -> Iterator[everstep.Checkpointer]:
        with everstep.Checkpointer(
            self.root(name), policy=policy(), agent="inline", **{"memory": None, **options}
        ) as opened:
            yield opened

    def save(self, name: str, state: everstep.TrainState, **options: Any) -> None:
        with self.checkpointer(name, **options) as ckpt:
            ckpt.load(state) if (self.root(name) / "run.json").exists() else None
            ckpt.save((ckpt.recovery.step if ckpt.recovery else 0) + 1, state).wait()
        self.keep(name, contents(state))

    def keep(self, name: str, values: dict[str, torch.Tensor]) -> None:
        if self.rank == 0:
            torch.save(values, self.out / f"{name}.pt")

    def kept(self, name: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.out / f"{name}.pt")
        return found

    def load(self, name: str, state: everstep.TrainState, **options: Any) -> everstep.Recovery:
        """Load and compare with what was saved, but for what was ``changed`` by so much."""
        changed = options.pop("changed", {})
        with self.checkpointer(name, memory=options.pop("memory", None)) as ckpt:
            assert ckpt.load(state, **options) is not None
            assert ckpt.recovery is not None
            kept = self.kept(name)
            same(contents(state), {**kept, **{key: kept[key] + more for key, more in changed.items()}})
            return ckpt.recovery


# -- the cases


def ddp_saves(job: Job) -> None:
    state = trainer(ddp, 1, 3, model=Net(norm=True))
    buffer = state.model.module.norm.running_mean
    buffer += job.rank  # DDP broadcasts rank 0's at the next forward pass
    job.save("ddp", state)


def ddp_loads(job: Job) -> None:
    state = trainer(ddp if dist.get_world_size() > 1 else whole, 2, 1, model=Net(norm=True))
    # As many ranks as saved: each has its own buffers back. Elsewhere rank 0's count.
    own = job.rank if dist.get_world_size() == 2 else 0
    job.load("ddp", state, changed={"norm.running_mean": float(own)})


def fsdp_saves(job: Job) -> None:
    job.save("fsdp", trainer(fsdp, 1, 3))


def fsdp_loads(job: Job) -> None:
    """Into a fresh optimizer, whose state does not exist yet, and into one that has taken steps."""
    for steps in (0, 2):
        state = trainer(fsdp, 2, steps)
        assert is_plain_module(state.model)  # its memory is filled in place
        job.load("fsdp", state)
        moment = state.optimizer.state[state.model.first.weight]["exp_avg"]
        assert isinstance(moment, DTensor) and moment.placements == state.model.first.weight.placements
        assert moment.to_local().shape == state.model.first.weight.to_local().shape
        assert not isinstance(state.optimizer.state[state.model.first.weight]["step"], DTensor)


def fsdp_goes_on(job: Job) -> None:
    """Loads, saves again at this number of ranks, and its steps are those of the ranks before."""
    state = trainer(fsdp, 3)
    with job.checkpointer("fsdp") as ckpt:
        assert ckpt.load(state) == 1
        same(contents(state), job.kept("fsdp"))
        state.model(torch.rand(5, 6)).square().mean().backward()
        state.optimizer.step()
        ckpt.save(2, state).wait()
    job.keep("fsdp", contents(state))


def plain_loads(job: Job) -> None:
    """Without a process group: sharded tensors into whole ones."""
    for steps in (0, 1):
        state = trainer(whole, 4, steps)
        everstep.load(job.root("fsdp"), into=state)
        same(contents(state), job.kept("fsdp"))
    found = everstep.load(job.root("fsdp"), keys="model/*.weight")
    assert found["model"].keys() == {"first.weight", "middle.weight", "last.weight"}
    assert all(torch.equal(value, job.kept("fsdp")[name]) for name, value in found["model"].items())


def memory_saves(job: Job) -> None:
    state = trainer(fsdp, 5, 2)
    with contextlib.suppress(KeyError), job.checkpointer("memory", memory=everstep.Memory()) as ckpt:
        ckpt.load(state)
        ckpt.step(1, state)
        job.keep("memory", contents(state))
        raise KeyError("as one that is started again: its memory is left")


def memory_loads(job: Job) -> None:
    state = trainer(fsdp if dist.get_world_size() > 1 else whole, 6)
    assert job.load("memory", state, memory=everstep.Memory()).tier == "memory"


def stages_save(job: Job) -> None:
    half = Half(range(job.rank * 2, job.rank * 2 + 2))
    torch.manual_seed(7 + job.rank)
    optimizer = torch.optim.AdamW(half.parameters(), lr=1e-2)
    half(torch.rand(3, 4)).sum().backward()
    optimizer.step()
    state = everstep.TrainState(half, optimizer, rng=False)
    with job.checkpointer("stages") as ckpt:
        ckpt.save(1, state).wait()
    torch.save(contents(state), job.out / f"stage{job.rank}.pt")


def stages_load(job: Job) -> None:
    """Into one process, into three with other cuts, and back into two."""
    expected = {**torch.load(job.out / "stage0.pt"), **torch.load(job.out / "stage1.pt")}
    world = dist.get_world_size()
    cuts = {1: [0, 4], 2: [0, 3, 4], 3: [0, 1, 3, 4]}[world]
    half = Half(range(cuts[job.rank], cuts[job.rank + 1]))
    state = everstep.TrainState(half, torch.optim.AdamW(half.parameters(), lr=1e-2), rng=False)
    with job.checkpointer("stages" if world != 2 else "one") as ckpt:
        assert ckpt.load(state) == 1
    names = {
        name
        for at in range(cuts[job.rank], cuts[job.rank + 1])
        for name in expected
        if f"layers.{at}." in name
    }
    same(contents(state), {name: expected[name] for name in names})
    if world == 1:
        everstep.save(job.root("one"), 1, state)


def stages_lack(job: Job) -> None:
    """A stage that nobody takes, and one that nobody has, are named on all ranks."""
    half = Half([range(4), range(4, 5), range(2)][job.rank])
    state = everstep.TrainState(half, rng=False)
    with job.checkpointer("stages") as ckpt:
        try:
            ckpt.load(state, allow={"unexpected"})
            raise AssertionError("a layer that is not there was loaded")
        except errors.StateMismatch as error:
            assert job.rank == 1 and "layers.4.weight" in str(error), error
        except errors.RankError as error:
            assert job.rank != 1 and "layers.4.weight" in str(error) and error.fields["ranks"] == [1], error


def damaged_on_one(job: Job) -> None:
    """The newest step is damaged where only one rank reads it: all fall back to the older one together."""
    state = trainer(fsdp, 8)
    with job.checkpointer("damaged") as ckpt:
        ckpt.save(1, state).wait()
        job.keep("damaged", contents(state))
        state.optimizer.zero_grad()
        with torch.no_grad():
            state.model.scale.add_(1)
        ckpt.save(2, state).wait()
    dist.barrier()
    if job.rank == 0:
        [image] = (job.root("damaged") / "checkpoints").glob("*2/*/a1/rank-00001.model.safetensors")
        data = bytearray(image.read_bytes())
        data[-1] ^= 1
        image.unlink()
        image.write_bytes(data)


def falls_back(job: Job) -> None:
    state = trainer(fsdp, 9)
    recovery = job.load("damaged", state)
    assert recovery.step == 1 and "step 2" in recovery.skipped[0], recovery


CASES: list[tuple[str, int, Callable[[Job], None], bool]] = [
    ("ddp saves at 2", 2, ddp_saves, True),
    ("ddp loads at 1", 1, ddp_loads, True),
    ("ddp loads at 2", 2, ddp_loads, True),
    ("ddp loads at 3", 3, ddp_loads, True),
    ("fsdp saves at 2", 2, fsdp_saves, True),
    ("fsdp loads at 2", 2, fsdp_loads, True),
    ("fsdp loads at 3", 3, fsdp_loads, True),
    ("fsdp goes on at 4", 4, fsdp_goes_on, True),
    ("fsdp loads at 1", 1, fsdp_loads, True),
    ("plain loads what was sharded", 1, plain_loads, False),
    ("memory saves at 2", 2, memory_saves, True),
    ("memory loads at 3", 3, memory_loads, True),
    ("memory loads at 1", 1, memory_loads, True),
    ("stages save at 2", 2, stages_save, True),
    ("stages load at 1", 1, stages_load, True),
    ("stages load at 2", 2, stages_load, True),
    ("stages load at 3", 3, stages_load, True),
    ("stages lack at 3", 3, stages_lack, True),
    ("a damaged step saves at 2", 2, damaged_on_one, True),
    ("a damaged step is passed over at 3", 3, falls_back, True),
]
RANKS = max(world for _, world, _, _ in CASES)


def main(rank: int, port: int, out: Path) -> None:
    torch.set_num_threads(1)
    job = Job(rank, RANKS, port, out)
    for name, world, case, group in CASES:
        job.run(name, world, case, group=group)
