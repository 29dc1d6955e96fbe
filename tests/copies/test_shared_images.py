"""Jobs on several nodes: what ranks of the holders copy is byte for byte what is stored, and proved by its hashes; and
a checkpoint of such a job loads in any other world."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
import torch.distributed as dist
from everstep.format import layout as layouts
from everstep.format.constants import CHUNK_BYTES
from everstep.format.hashing import chunk_hashes
from everstep.format.layout import Layout
from everstep.format.names import copied_from, copy_region, shared_with
from everstep.memory.arena import Arena
from everstep.memory.directory import find_arenas
from everstep.memory.header import Kind
from everstep.plan.placement import holders, node_map
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tests.exchange.kit import WAIT_S, Job, directory_of

from .test_copies_kept import AUDITED, fsck, saved

Say = Callable[..., None]
Make = Callable[[int, int, int], dict[str, Any]]
"""The parts of the state of a rank of a world at a step."""


class Slot:
    """What lies in one rank's slot of a step."""

    def __init__(self, arena: Arena, index: int, generation: int) -> None:
        with arena.pin(index, generation) as pin:
            self.layout: Layout = layouts.decode(bytes(pin.view("layout")))
            self.regions = {name: bytes(pin.view(name)) for name in pin.regions}
            self.records = {record.name: record for record in pin.compute()}

    def keys(self, image: str) -> set[str]:
        """Of the entries in an image."""
        names = [one.name for one in self.layout.images]
        return {
            f"{e.part}/{e.key}"
            for e in self.layout.entries
            if e.image is not None and names[e.image] == image
        }


def slots(root: Path, nodes: Sequence[str], step: int) -> dict[int, Slot]:
    """By rank."""
    found = {}
    for node in dict.fromkeys(nodes):
        for info in find_arenas(directory_of(root, node), Kind.OWN):
            assert info.path is not None
            with Arena.attach(info.path) as arena:
                for one in arena.snapshots():
                    if one.step == step:
                        found[info.rank] = Slot(arena, one.index, one.generation)
    return found


def check_shared(
    root: Path, places: Sequence[str], step: int, copies: int
) -> dict[int, tuple[set[str], set[str]]]:
    """Every copy is a shared image of its rank, every shared image has its copies, on the nodes that are to have
    them; by rank the stored entries that are shared and those that are not."""
    found = slots(root, places, step)
    assert sorted(found) == list(range(len(places)))
    nodes = list(dict.fromkeys(places))
    keepers = holders(node_map(places), copies)
    told: dict[int, tuple[set[str], set[str]]] = {}
    wanted = set()
    for rank, slot in found.items():
        shared, own = told.setdefault(rank, (set(), set()))
        for image in slot.layout.images:
            partners = shared_with(image.name)
            (shared if partners else own).update(slot.keys(image.name))
            if partners:
                there = {nodes.index(places[partner]) for partner in partners}
                assert there == set(keepers[nodes.index(places[rank])]) and len(there) == len(partners)
            for partner in partners:
                region = copy_region(rank, image.name)
                wanted.add((partner, region))
                copy, stored = found[partner].regions[region], slot.records[image.name]
                assert copy == slot.regions[f"image:{image.name}"]
                assert chunk_hashes(memoryview(copy), CHUNK_BYTES) == stored.chunks, "proved by its hashes"
        assert all(copied_from(copy.name) for copy in slot.layout.copies)
    assert wanted == {
        (rank, region)
        for rank, slot in found.items()
        for region in slot.regions
        if region.startswith("copy:")
    }, "nothing else is copied"
    return told


def run(
    root: Path, job: Job, places: Sequence[str], make: Make, copies: int, *, grouped: bool = False
) -> dict[int, tuple[set[str], set[str]]]:
    """Step 1 is made durable, step 2 lies in memory alone; all ranks are killed, and the slots looked at."""

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        if grouped:
            group(root, rank, len(places))
        for step in (1, 2):
            state = everstep.TrainState(rng=False, **make(rank, len(places), step))
            if step == 1:
                say(*saved(ckpt, step, state))
            else:
                ckpt.step(step, state)
        say("there")
        threading.Event().wait(WAIT_S)

    memory = everstep.Memory(replicas=copies)
    for rank in job.start(places, body, memory=memory, agent="process", policy=AUDITED):
        assert rank.line() == "durable" and rank.line() == "there"
    job.kill()
    first, second = (check_shared(root, places, step, copies) for step in (1, 2))
    assert first == second and fsck(root) == []
    return second


def group(root: Path, rank: int, world: int) -> None:
    """A process group, for the modules and tensors that need one."""
    dist.init_process_group("gloo", init_method=f"file://{root.parent}/group", rank=rank, world_size=world)


def shards(
    whole: torch.Tensor, begin: int, end: int, members: Sequence[int] | None, factor: int
) -> everstep.Shards:
    """Rows of a tensor times ``factor``."""
    piece = whole[begin:end] * factor
    box = ((begin, *[0] * (whole.dim() - 1)), tuple(piece.shape))
    return everstep.Shards(tuple(whole.shape), [box], [piece], holders=members)


W, NORM, ODD = torch.arange(24.0).view(8, 3), torch.arange(100.0, 110.0), torch.arange(200.0, 205.0)
WHOLE = {"w": W, "norm": NORM, "odd": ODD}


def hybrid(rank: int, world: int, step: int) -> dict[str, Any]:
    """HSDP: two shards, each on every other rank; a tensor that all hold, and one that only rank 0 has, in one part."""
    half = rank % 2
    model: dict[str, Any] = {
        "w": shards(W, 4 * half, 4 * half + 4, range(half, world, 2), step),
        "norm": shards(NORM, 0, 10, range(world), step),
    }
    model["odd"] = (
        shards(ODD, 0, 5, None, step) if rank == 0 else everstep.Shards((5,), [], [], dtype=ODD.dtype)
    )
    return {"model": model}


def whole(rank: int, world: int, step: int) -> dict[str, Any]:
    """All of :func:`hybrid`'s model on every rank."""
    model = {key: shards(tensor, 0, len(tensor), range(world), step) for key, tensor in WHOLE.items()}
    return {"model": model}


def check_loads(root: Path, job: Job, worlds: Sequence[Sequence[str]], step: int, tier: str) -> None:
    """The state of :func:`hybrid` in other worlds, on every rank."""

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        parts = whole(rank, 1, 0)
        found = ckpt.load(everstep.TrainState(rng=False, **parts))
        assert ckpt.recovery is not None
        same = all(torch.equal(parts["model"][key].tensors[0], of * step) for key, of in WHOLE.items())
        say(found, ckpt.recovery.tier, same)

    for places in worlds:
        ends = job.run(places, body, memory=everstep.Memory(replicas=1), agent="process", policy=AUDITED)
        assert ends == [[f"{step} {tier} True"]] * len(places)


def test_hybrid_sharding_over_two_nodes(root: Path, nodes: list[str], job: Job) -> None:
    a, b, c, _ = nodes
    told = run(root, job, [a, a, b, b], hybrid, 1)
    shared = [key for some, _ in told.values() for key in some]
    assert sorted(shared) == ["model/norm", "model/w", "model/w"], "each shard, and what all hold, once"
    assert [own for _, own in told.values()] == [{"model/odd"}, set(), set(), set()]
    check_loads(root, job, [[a, a, b], [b, a]], 2, "memory")
    check_loads(root, job, [[c, c, c]], 1, "disk")
    values = everstep.load(root, step=1)["model"]
    assert all(torch.equal(values[key], of) for key, of in WHOLE.items())


def test_replicas_on_one_node_have_no_copies_elsewhere(root: Path, nodes: list[str], job: Job) -> None:
    """Ranks of a node hold the same shard, those of the other node the other one: its bytes are to be sent."""
    a, b, *_ = nodes
    told = run(root, job, [a, b, a, b], hybrid, 1)
    assert [key for some, _ in told.values() for key in some] == ["model/norm"]
    assert sum("model/w" in own for _, own in told.values()) == 2
    check_loads(root, job, [[a, b]], 2, "memory")


@pytest.mark.parametrize("copies", [1, 2])
def test_data_parallel_on_three_nodes(root: Path, nodes: list[str], job: Job, copies: int) -> None:
    """Modules under DDP: parameters and the optimizer's state are shared, buffers are each rank's own."""

    def make(rank: int, world: int, step: int) -> dict[str, Any]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        model = nn.parallel.DistributedDataParallel(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for number in range(step):
            optimizer.zero_grad()
            model(torch.full((4, 5), float(number)) + torch.arange(20.0).view(4, 5)).square().sum().backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    told = run(root, job, nodes[:3], make, copies, grouped=True)
    shared = [key for some, _ in told.values() for key in some]
    assert len(shared) == len(set(shared)) == 6 + 3 * 6
    buffers = {f"model/1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert all(own == buffers for _, own in told.values())


@pytest.mark.parametrize("across", [False, True])
def test_tensor_parallel_ranks_share_with_their_data_parallel_ones(
    root: Path, nodes: list[str], job: Job, across: bool
) -> None:
    """DTensors on a mesh of two by two. Where tensor parallel ranks are neighbours on a node, each shard has a copy
    on the other one; where they lie on different nodes, only what all hold has."""
    a, b, *_ = nodes
    kinds: dict[str, list[Placement]] = {
        "column": [Replicate(), Shard(1)],
        "row": [Replicate(), Shard(0)],
        "norm": [Replicate(), Replicate()],
    }

    def make(rank: int, world: int, step: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = {}
        for key, kind in kinds.items():
            local = torch.arange(24.0).view(4, 6) * step
            if isinstance(kind[1], Shard):
                local = local.chunk(2, kind[1].dim)[rank % 2].contiguous()
            model[key] = DTensor.from_local(local, mesh, kind, run_check=False)
        return {"model": model}

    told = run(root, job, [a, b, a, b] if across else [a, a, b, b], make, 1, grouped=True)
    shared = sorted(key for some, _ in told.values() for key in some)
    own = sorted(key for _, some in told.values() for key in some)
    pieces = ["model/column", "model/column", "model/row", "model/row"]
    assert (shared, own) == (["model/norm"], pieces) if across else (sorted(["model/norm", *pieces]), [])
    values = everstep.load(root, step=1)["model"]
    assert all(torch.equal(values[key], torch.arange(24.0).view(4, 6)) for key in kinds)
