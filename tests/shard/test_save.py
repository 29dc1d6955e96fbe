"""Saving sharded tensors end to end: two ranks, one checkpoint, whose images other tools can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import everstep
import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from click.testing import CliRunner
from everstep.cli.main import main
from everstep.format import names
from everstep.planning import LayoutPlanner, expected_slot_bytes
from everstep.state.tree import FlatState, ShardedLeaf
from torch import nn

from tests.facade.kit import policy, steps_on_disk

from .launch import launch

LAST = 4


def made(rank: int) -> tuple[nn.Module, torch.optim.Optimizer, everstep.TrainState]:
    """Two layers with uneven and empty shards, replicas, regions by hand, and a tensor of one rank of the two."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    mesh, second = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1])
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(7)
    whole, flat = torch.rand(6, 4, generator=generator), torch.rand(30, generator=generator)
    replicas = {
        f"r{i}": distribute_tensor(torch.full((256, 4), float(i)), mesh, [Replicate()]) for i in range(6)
    }
    columns = [((0, rank), (6, 1)), ((0, rank + 2), (6, 1))]
    hand = everstep.Shards((6, 4), columns, [whole[:, rank : rank + 1], whole[:, rank + 2 : rank + 3]])
    start, end = (0, 11) if rank == 0 else (11, 30)
    ranges = everstep.flat_range((5, 3, 2), start, flat[start:end])
    lonely = distribute_tensor(torch.arange(3.0), second, [Shard(0)], src_data_rank=None)
    state = everstep.TrainState(
        model=model,
        optimizer=optimizer,
        replicas=replicas,
        hand={"columns": hand, "flat": ranges, "again": hand, "lonely": lonely},
        own={"rank": torch.tensor([rank])},
    )
    return model, optimizer, state


def described(flat: FlatState) -> list[Any]:
    """What the images must hold, by part, name and value, with who may store it."""
    found = []
    for leaf in flat.leaves:
        if not isinstance(leaf, ShardedLeaf):
            continue
        for box, piece in zip(leaf.boxes, leaf.pieces, strict=True):
            text = leaf.key
            if len(leaf.boxes) > 1:
                text += "@" + ",".join(map(str, box.offsets))
            found.append([leaf.part, text, piece.tolist(), leaf.holders])
    return found


def trained(rank: int, root: Path) -> Any:
    model, optimizer, state = made(rank)
    memory = everstep.Memory(copy="overlap")
    ckpt = everstep.Checkpointer(
        root, policy=policy(full_every=1, keep_last=10, on_slow="wait"), memory=memory
    )
    assert ckpt.load(state) is None
    expected = {}
    handle = None
    for step in range(1, LAST + 1):
        model(torch.rand(3, 4)).pow(2).mean().backward()
        optimizer.step()
        if handle is not None:
            handle.wait()
        flat = state.flatten()
        expected[step] = described(flat)
        late = state.late_tensors(flat.leaves)
        if step < LAST:
            handle = ckpt.step(step, state)
        else:
            ckpt.save(step, state).wait()
        optimizer.zero_grad()
    ckpt.close()
    sharded = {leaf.key: index for index, leaf in enumerate(flat.leaves) if isinstance(leaf, ShardedLeaf)}
    weights = [index for key, index in sharded.items() if flat.leaves[index].part in ("model", "optimizer")]
    held = [index for index in weights if flat.leaves[index].boxes]
    assert set(held) <= late, "what the optimizer owns may be copied late"
    assert not {index for _, index in sharded.items() if flat.leaves[index].part == "hand"} & late
    plan = LayoutPlanner(rank, 2).plan(flat)
    assert expected_slot_bytes(state, 2) >= sum(image.nbytes for image in plan.layout.images)
    return expected


@pytest.mark.timeout(300)
def test_two_ranks_save_what_they_hold(root: Path, tmp_path: Path) -> None:
    expected = launch(lambda rank: trained(rank, root), 2, tmp_path)
    assert steps_on_disk(root) == [*range(1, LAST + 1)]
    for step in range(1, LAST + 1):
        images: list[dict[tuple[str, str], Any]] = []
        for rank in range(2):
            found = {}
            for part in ("model", "optimizer", "replicas", "hand"):
                path = root / names.image(step, 1, 1, rank, part)
                if path.exists():
                    for name, value in safetensors.torch.load_file(path).items():
                        found[part, name] = value.tolist()
            images.append(found)
        for rank in range(2):
            for part, name, value, holders in expected[rank][str(step)]:
                stored = [other for other in holders or [rank] if (part, name) in images[other]]
                assert len(stored) == 1, (step, part, name, holders)
                assert images[stored[0]][part, name] == value, (step, rank, part, name)
    model = [json.dumps(expected[0][str(step)]) for step in range(1, LAST + 1)]
    assert len(set(model)) == LAST, "each step has weights of its own"
    _check_replicas_are_balanced(images)
    assert {name for part, name in images[0] if part == "hand"} >= {"columns@0,0", "columns@0,2"}
    assert ("hand", "lonely") in images[1] and ("hand", "lonely") not in images[0]
    assert not any("again" in name for _, name in images[0]), "the same shards twice are stored once"
    said = CliRunner().invoke(main, ["fsck", str(root), "--json"])
    assert said.exit_code == 0 and json.loads(said.stdout)["findings"] == [], said.output


def _check_replicas_are_balanced(images: list[dict[tuple[str, str], Any]]) -> None:
    counts = [sum(part == "replicas" for part, _ in found) for found in images]
    assert counts == [3, 3]


def after_a_refusal(rank: int, root: Path) -> None:
    """Rank 1 cannot make the second save, for which rank 0 found an owner of what was new. They find different
    owners at the third then, which must not commit, and the same ones at the next."""
    shared, own = {"tiny": torch.zeros(1)}, {"bad": None}
    state = everstep.TrainState(rng=False, replicated=["shared"], shared=shared, own=own)
    ckpt = everstep.Checkpointer(root, policy=policy(commit_timeout_s=5.0))
    ckpt.load(state)
    ckpt.save(1, state).wait()
    shared["small"] = torch.zeros(1)
    if rank == 1:
        own["bad"] = lambda: 0
    with pytest.raises(everstep.errors.EverstepError, match="bad"):
        ckpt.save(2, state).wait()
    dist.barrier()
    own["bad"], shared["large"] = None, torch.zeros(5)
    with pytest.raises(everstep.errors.SaveFailed, match="exactly once"):
        ckpt.save(3, state).wait()
    dist.barrier()
    ckpt.save(4, state).wait()
    ckpt.close()


@pytest.mark.timeout(300)
def test_a_refused_save_does_not_part_the_ranks(root: Path, tmp_path: Path) -> None:
    launch(lambda rank: after_a_refusal(rank, root), 2, tmp_path)
    assert steps_on_disk(root) == [1, 4]
