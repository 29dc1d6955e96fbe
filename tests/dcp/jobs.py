"""What the ranks of a small job do; ``python -m tests.dcp.jobs CASES DIRECTORY STORE`` in each of them."""

from __future__ import annotations

import os
import shutil
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import everstep.dcp as ed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from everstep.backends.api import Backend
from everstep.backends.errors import NoSpace
from everstep.backends.faults import Fault, Faulty
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.dcp.kit import assert_same, blank

CASES: dict[str, Callable[[Path], None]] = {}


def case(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CASES[function.__name__] = function
    return function


def trained(seed: int, steps: int = 2, *, sharded: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with uneven and tiny parameters, and its optimizer after some steps; sharded by FSDP2."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(9, 13), nn.ReLU(), nn.Linear(13, 3), nn.LayerNorm(3))
    model.register_buffer("seen", torch.tensor(float(seed)))
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(4, 9)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def nested(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state, optim = get_state_dict(model, optimizer)
    return {"model": state, "optim": optim}


def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The unsharded state, on rank 0."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state, optim = get_state_dict(model, optimizer, options=options)
    return {"model": state, "optim": optim}


def everyone_raises(work: Callable[[], Any], *words: str) -> BaseException:
    """``work`` fails on this rank (so on all) with all ``words`` in the text."""
    try:
        work()
    except CheckpointException as error:
        text = "".join(traceback.format_exception(error)) + str(error)
        for word in words:
            assert word in text, text
        return error
    raise AssertionError("it did not fail")


class Broken(ed.Writer):
    """A writer whose storage fails on one rank as ``script`` says."""

    def __init__(self, root: Path, rank: int, *script: Fault) -> None:
        super().__init__(root)
        self.faults = script if dist.get_rank() == rank else ()

    def _open(self, path: str) -> Backend:
        return Faulty(super()._open(path), self.faults)


# -- FSDP2


@case
def fsdp_save(where: Path) -> None:
    model, optimizer = trained(1)
    dcp.save(nested(model, optimizer), storage_writer=ed.Writer(where / "fsdp" / "step-7"))
    whole = full(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(whole, where / "reference.pt")
    dist.barrier()


@case
def fsdp_load(where: Path) -> None:
    """At whatever number of ranks this is."""
    model, optimizer = trained(2)
    state = nested(model, optimizer)
    dcp.load(state, storage_reader=ed.Reader(where / "fsdp" / "step-7"))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    whole = full(model, optimizer)
    if dist.get_rank() == 0:
        assert_same(whole, torch.load(where / "reference.pt", weights_only=False))


def saved_in_turn(
    model: nn.Module, optimizer: torch.optim.Optimizer, where: Path, **how: Any
) -> tuple[list[Any], list[Any]]:
    """Three steps, each changed as soon as its save came back: what each was, and the saves' futures."""
    group = dist.new_group(backend="gloo")
    expected, futures = [], []
    for step in (1, 2, 3):
        expected.append(full(model, optimizer))
        futures.append(
            dcp.async_save(
                nested(model, optimizer), checkpoint_id=where / str(step), process_group=group, **how
            )
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    return expected, futures


@case
def async_thread(where: Path) -> None:
    """Staged before the call returns; two saves at once stay apart; one writer for several directories."""
    model, optimizer = trained(3)
    writer = ed.Writer()
    expected, futures = saved_in_turn(model, optimizer, where / "thread", storage_writer=writer)
    for future in futures:
        future.result(timeout=60)
    for step, whole in enumerate(expected, 1):
        state = nested(model, optimizer)
        dcp.load(state, checkpoint_id=where / "thread" / str(step), storage_reader=ed.Reader())
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        assert_same(full(model, optimizer), whole)


@case
def own_stager(where: Path) -> None:
    """Memory that is kept holds one save at a time: what changes meanwhile is in none."""
    model, optimizer = trained(3)
    writer, stager = ed.Writer(), ed.Stager()
    expected, futures = saved_in_turn(
        model, optimizer, where / "staged", storage_writer=writer, async_stager=stager
    )
    assert all(future.done() for future in futures[:2])
    futures[-1].result(timeout=60)
    stager.close()
    for step, whole in enumerate(expected, 1):
        state = nested(model, optimizer)
        dcp.load(state, storage_reader=ed.Reader(where / "staged" / str(step)))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        assert_same(full(model, optimizer), whole)


@case
def async_process(where: Path) -> None:
    model, optimizer = trained(4)
    whole = full(model, optimizer)
    writer = ed.Writer(where / "process" / "a")
    for _ in range(2):  # the second one replaces the first
        future = dcp.async_save(
            nested(model, optimizer),
            storage_writer=writer,
            async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType.PROCESS,
        )
        future.result(timeout=80)
    other, optim = trained(5)
    state = nested(other, optim)
    dcp.load(state, storage_reader=ed.Reader(where / "process" / "a"))
    set_state_dict(other, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert_same(full(other, optim), whole)


@case
def plan_caching(where: Path) -> None:
    """torch keeps plans from save to save; the bytes are those of each save, all the same."""
    model, optimizer = trained(6)
    for step in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        whole = full(model, optimizer)
        dcp.save(
            nested(model, optimizer),
            storage_writer=ed.Writer(where / "cached" / str(step % 2)),
            planner=dcp.DefaultSavePlanner(enable_plan_caching=True),
        )
        other, optim = trained(7)
        state = nested(other, optim)
        dcp.load(state, storage_reader=ed.Reader(where / "cached" / str(step % 2)))
        set_state_dict(other, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        assert_same(full(other, optim), whole)


# -- trainers that build their own storage, or none


def flat_state(step: int) -> dict[str, Any]:
    """As torchtitan keeps it: flat names, a data loader's bytes for each rank, small counters."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(step)
    weight = torch.randn(10, 6)
    return {
        "layers.0.weight": distribute_tensor(weight, mesh, [Shard(0)]),
        "layers.0.bias": distribute_tensor(weight[0].clone(), mesh, [Replicate()]),
        "optim.layers.0.weight.exp_avg": distribute_tensor(weight * 2, mesh, [Shard(0)]),
        "optim.lr": 0.5 * step,
        "train_state": {"step": torch.tensor(step), "tokens": step * 1000},
        "dataloader": {f"dp_rank_{rank}": f"position {step} of {rank}".encode()},
    }


@case
def titan(where: Path) -> None:
    """Finds checkpoints by ``.metadata``, passes only a path, deletes directories of old ones itself."""
    folder = where / "titan"
    ed.install()
    try:
        for step in (1, 2, 3):
            dcp.save(flat_state(step), checkpoint_id=str(folder / f"step-{step}"))
            complete = sorted(path for path in folder.iterdir() if (path / ".metadata").is_file())
            if dist.get_rank() == 0:
                for old in complete[:-2]:
                    shutil.rmtree(old)
            dist.barrier()
        newest = max(folder.iterdir(), key=lambda path: int(path.name.split("-")[1]))
        assert newest.name == "step-3" and len(list(folder.iterdir())) == 2
        expected = flat_state(3)
        state = flat_state(9)
        dcp.load(state, checkpoint_id=str(newest))
    finally:
        ed.uninstall()
    for fqn in ("layers.0.weight", "layers.0.bias", "optim.layers.0.weight.exp_avg"):
        assert_same(state[fqn].full_tensor(), expected[fqn].full_tensor())
    for fqn in ("optim.lr", "train_state", "dataloader"):
        assert_same(state[fqn], expected[fqn])


@case
def installed_writer(where: Path) -> None:
    """A trainer that makes a FileSystemWriter; what torch wrote before loads still."""
    state = flat_state(4)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(where / "stock"))
    ed.install()
    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(where / "ours", thread_count=2, overwrite=True))
        for name in ("stock", "ours"):
            for reader in (None, dcp.FileSystemReader(where / name)):
                found = flat_state(5)
                dcp.load(found, checkpoint_id=where / name, storage_reader=reader)
                assert_same(found["layers.0.weight"].full_tensor(), state["layers.0.weight"].full_tensor())
                assert found["train_state"]["tokens"] == 4000
    finally:
        ed.uninstall()
    assert (where / "ours" / "run.json").is_file() and not (where / "stock" / "run.json").exists()
    assert dcp.FileSystemWriter.__module__.startswith("torch.")


@case
def without_collectives(where: Path) -> None:
    """Each rank for itself."""
    state = {"own": torch.full((5,), float(dist.get_rank())), "n": dist.get_rank()}
    dcp.save(state, storage_writer=ed.Writer(where / "alone"), use_collectives=False)
    found = {"own": torch.zeros(5), "n": -1}
    dcp.load(found, storage_reader=ed.Reader(where / "alone"))
    assert_same(found, state)


# -- what differs between ranks


def differing(rank: int) -> dict[str, Any]:
    torch.manual_seed(100 + rank)
    return {
        "model": {"w": torch.arange(12.0), "big": torch.full((600_000,), 3.0)},
        "rng": torch.get_rng_state(),
        "loader": {"position": 10 + rank, "seen": list(range(rank)), "epoch": 3},
        "pair": (torch.full((2,), float(rank)), "text"),
        "forced": 7,
    }


@case
def per_rank(where: Path) -> None:
    rank = dist.get_rank()
    state = differing(rank)
    for writer in range(2):
        root = where / "per-rank" / str(writer)
        dcp.save(state, storage_writer=ed.Writer(root), planner=ed.SavePlanner(per_rank=["forced"]))
        for planner in (ed.LoadPlanner(), None):
            found = blank(state)
            dcp.load(found, storage_reader=ed.Reader(root), planner=planner)
            assert_same(found, state)
    stock = where / "per-rank" / "stock"
    dcp.save(state, storage_writer=ed.Writer(stock))
    found = blank(state)
    dcp.load(found, storage_reader=ed.Reader(stock))
    kept: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(kept, found["loader"]["position"])
    assert len(set(kept)) == 1, "torch's planner keeps one rank's"


@case
def per_rank_elsewhere(where: Path) -> None:
    """At another number of ranks."""
    rank = dist.get_rank()
    root = where / "per-rank" / "0"
    blanks = blank(differing(rank))
    everyone_raises(
        lambda: dcp.load(blanks, storage_reader=ed.Reader(root)), "another number of ranks", "loader.position"
    )
    found = blank(differing(rank))
    dcp.load(found, storage_reader=ed.Reader(root), planner=ed.LoadPlanner(own="modulo"))
    found["loader"]["seen"] = list(range(rank))  # of another length here: merged by torch element by element
    assert_same(found, differing(rank))
    only = {"model": blank(differing(rank)["model"])}
    dcp.load(only, storage_reader=ed.Reader(root))
    assert_same(only["model"], differing(rank)["model"])


# -- faults


@case
def full_disk(where: Path) -> None:
    """One rank's disk is full: all are told by whom, the checkpoint before stays, and the next save works."""
    root = where / "full"
    before, after = flat_state(1), flat_state(2)
    dcp.save(before, storage_writer=ed.Writer(root))
    for op, name in (("writer.write", "safetensors"), ("create", "vote"), ("writer.commit", "state.msgpack")):
        fault = Fault(op, name, times=99, error=lambda name: NoSpace(name, "scripted: no space left"))
        writer = Broken(root, 1, fault)
        error = everyone_raises(lambda w=writer: dcp.save(after, storage_writer=w), "rank 1", "no space left")
        assert isinstance(error, CheckpointException) and list(error.failures) == [1], error.failures
        found = flat_state(3)
        dcp.load(found, storage_reader=ed.Reader(root))
        assert found["train_state"]["tokens"] == 1000 and (root / ".metadata").is_file()
        assert_same(found["layers.0.weight"].full_tensor(), before["layers.0.weight"].full_tensor())
    dcp.save(after, storage_writer=ed.Writer(root))
    found = flat_state(3)
    dcp.load(found, storage_reader=ed.Reader(root))
    assert_same(found["layers.0.weight"].full_tensor(), after["layers.0.weight"].full_tensor())


class Late(Broken):
    """The ranks that do not fail write only when the failing one has given the save up."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if not self.faults:
            until = time.monotonic() + 60
            while not list(Path(self.path).glob("checkpoints/*/*/manifest-2.json")):
                assert time.monotonic() < until, "nobody gave the save up"
                time.sleep(0.01)
        return super().write_data(plan, planner)


@case
def given_up_before(where: Path) -> None:
    """A save that another rank gave up before this one wrote is that rank's failure, and no other's."""
    root = where / "given-up"
    dcp.save(flat_state(1), storage_writer=ed.Writer(root))
    fault = Fault("create", "vote", times=99, error=lambda name: NoSpace(name, "scripted: no space left"))
    error = everyone_raises(
        lambda: dcp.save(flat_state(2), storage_writer=Late(root, 1, fault)), "rank 1", "no space left"
    )
    assert isinstance(error, CheckpointException) and list(error.failures) == [1], error.failures
    found = flat_state(3)
    dcp.load(found, storage_reader=ed.Reader(root))
    assert found["train_state"]["tokens"] == 1000
    dcp.save(flat_state(2), storage_writer=ed.Writer(root))
    dcp.load(found, storage_reader=ed.Reader(root))
    assert found["train_state"]["tokens"] == 2000


@case
def full_disk_coordinator(where: Path) -> None:
    """The coordinator fails when it decides: nothing of the save is visible."""
    root = where / "coordinator"
    fault = Fault("create", "manifest", times=99, error=lambda name: NoSpace(name, "scripted: no space left"))
    writer = Broken(root, 0, fault)
    everyone_raises(lambda: dcp.save(flat_state(1), storage_writer=writer), "rank 0", "no space left")
    assert not (root / ".metadata").exists()
    dcp.save(flat_state(1), storage_writer=ed.Writer(root))
    found = flat_state(2)
    dcp.load(found, storage_reader=ed.Reader(root))
    assert found["train_state"]["tokens"] == 1000


@case
def refused_values(where: Path) -> None:
    """A value that cannot be stored, on one rank: refused by name, on all ranks, before anything of it is stored."""
    root = where / "refused"
    state = flat_state(1)
    if dist.get_rank() == 1:
        state["hook"] = {"rank": {"callback": print}}
    everyone_raises(lambda: dcp.save(state, storage_writer=ed.Writer(root)), "rank 1", "hook.rank.callback")
    assert not (root / ".metadata").exists()


@case
def other_shapes(where: Path) -> None:
    """A rank plans another tensor than the others."""
    root = where / "shapes"
    state = {"w": torch.ones(4), "x": torch.ones(2)}
    dcp.save(state, storage_writer=ed.Writer(root))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.ones(2 if dist.get_rank() == 0 else 3, 2)
    wrong = DTensor.from_local(local, mesh, [Shard(0)], shape=(9, 2), stride=(2, 1), run_check=False)
    everyone_raises(lambda: dcp.save({"w": wrong}, storage_writer=ed.Writer(root)), "w")
    found = blank(state)
    dcp.load(found, storage_reader=ed.Reader(root))
    assert_same(found, state)


@case
def dies(where: Path) -> None:
    """Saves over a checkpoint; the environment kills a rank in the midst of the second save."""
    root = where / "dies"
    if not (root / ".metadata").exists():
        dcp.save(flat_state(1), storage_writer=ed.Writer(root))
        dist.barrier()
    from everstep.backends import points

    if os.environ.get("KILL_AT"):
        points.hook = points._hook_from(os.environ["KILL_AT"])
    dcp.save(flat_state(2), storage_writer=ed.Writer(root))


@case
def after_death(where: Path) -> None:
    """The first checkpoint is there still, and can be replaced."""
    root = where / "dies"
    found = flat_state(5)
    dcp.load(found, storage_reader=ed.Reader(root))
    assert found["train_state"]["tokens"] == int(os.environ.get("EXPECTED", "1000"))
    dcp.save(flat_state(3), storage_writer=ed.Writer(root))
    dcp.load(found, storage_reader=ed.Reader(root))
    assert found["train_state"]["tokens"] == 3000
    assert_same(found["layers.0.weight"].full_tensor(), flat_state(3)["layers.0.weight"].full_tensor())


def main(names: str, where: Path, store: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for name in names.split(","):
        CASES[name](where)
        print(f"{name}: done", flush=True)
        dist.barrier()
    dist.destroy_process_group()
