"""Ranks that should hold equal bytes, and do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.facade.kit import steps_on_disk

from .kit import Forks, Rank, decisions, facts, job

KEYS = 6


def tensors(rank: int = 0) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((256,), float(i)) for i in range(KEYS)}


def flip(tensor: torch.Tensor) -> None:
    """One bit, as a cosmic ray would."""
    tensor.view(torch.int32)[17] ^= 1 << 7


def marked(parts: dict[str, torch.Tensor], **more: Any) -> everstep.TrainState:
    return everstep.TrainState(rng=False, replicated=("model",), model=parts, **more)


def test_one_flipped_bit_is_named_with_its_rank_and_the_checkpoint_says_so(forked: Forks, root: Path) -> None:
    def body(one: Rank) -> None:
        parts = tensors()
        one.save(1, marked(parts))
        if one.rank == 2:
            flip(parts["w3"])
        one.save(2, marked(parts))

    told = job(forked, root, body, policy={"audit_every": 1})
    assert [rank["outcomes"] for rank in told] == [["", ""]] * 3
    for rank in told:
        (text,) = rank["heard"]
        assert "step 2 is durable, but replicas differ" in text and "model/w3" in text
        assert "different on rank 2 than on ranks 0, 1" in text and "w2" not in text
    assert facts(root, 1)["audit"] == {"number": 0, "entries": KEYS}
    assert "disagreements" not in facts(root, 1)
    found = facts(root, 2)["disagreements"]
    assert found["count"] == 1
    (entry,) = found["entries"]
    assert (entry["part"], entry["key"], entry["odd"]) == ("model", "w3", [2])
    assert entry["stored"] in (0, 1, 2)
    assert any("disagreement" in path.read_text() for path in root.glob("events/*.jsonl"))


@pytest.mark.parametrize("memory", [None, everstep.Memory(bytes=1 << 20)], ids=["staging", "memory"])
def test_refused_by_all_ranks_and_saved_again_once_they_agree(
    forked: Forks, root: Path, memory: everstep.Memory | None
) -> None:
    def body(one: Rank) -> None:
        parts = tensors()
        if one.rank == 2:
            flip(parts["w3"])
        one.save(1, marked(parts))
        if one.rank == 2:
            flip(parts["w3"])
        one.save(1, marked(parts))
        one.save(2, marked(parts))

    refusing = {"audit_every": 1, "on_disagreement": "refuse"}
    told = job(forked, root, body, policy=refusing, memory=memory)
    for rank in told:
        first, again, next_one = rank["outcomes"]
        assert first.startswith("ReplicasDiffer: ") and "model/w3" in first and "rank 2" in first
        assert (again, next_one) == ("", "")
    assert len({rank["outcomes"][0] for rank in told}) == 1, "one verdict"
    assert [one["everstep"] for one in decisions(root, 1)] == ["abort", "manifest"]
    assert torch.equal(everstep.load(root, step=1)["model"]["w3"], tensors()["w3"])


def test_all_are_audited_within_the_flushes_that_the_policy_says(forked: Forks, root: Path) -> None:
    def body(one: Rank) -> None:
        parts = tensors()
        for step in range(1, 5):
            one.save(step, marked(parts))

    told = job(forked, root, body, policy={"audit_every": 4, "keep_last": 9}, world=2)
    assert not any(rank["heard"] for rank in told)
    counts = [facts(root, step)["audit"]["entries"] for step in range(1, 5)]
    assert sum(counts) == KEYS and max(counts) == 2
    names: list[str] = []
    for step in range(1, 5):
        names += audited_names(root, step)
    assert sorted(names) == sorted(f"model/w{i}" for i in range(KEYS))


def audited_names(root: Path, step: int) -> list[str]:
    """The names that both ranks' votes have."""
    from everstep.format.vote import decode_vote

    both = []
    for rank in range(2):
        (path,) = root.glob(f"checkpoints/{step:09d}/0001/a1/rank-{rank:05d}.vote")
        vote = decode_vote(path.read_bytes(), str(path.relative_to(root)))
        assert "hashes" not in vote.meta
        both.append(set(vote.entry_hashes or {}))
    assert both[0] == both[1]
    return sorted(both[0])


def test_what_differed_is_looked_at_until_it_agrees(forked: Forks, root: Path) -> None:
    """The window goes on, but who would refuse must not commit the next flush unseen."""

    def body(one: Rank) -> None:
        parts = tensors()
        if one.rank == 1:
            flip(parts["w0"])
        for step in range(1, 8):
            one.save(step, marked(parts))
        if one.rank == 1:
            flip(parts["w0"])
        for step in range(8, 10):
            one.save(step, marked(parts))

    told = job(forked, root, body, world=2, policy={"audit_every": 3, "on_disagreement": "refuse"})
    for rank in told:
        bad = [said.startswith("ReplicasDiffer") for said in rank["outcomes"]]
        found = bad.index(True)
        assert found < 3 and all(bad[found:7]) and not any(bad[7:])
    assert told[0]["outcomes"] == told[1]["outcomes"]
    assert "rank 0 and rank 1" in told[0]["outcomes"][6], "two ranks have no majority"


def test_steps_of_the_schedule_are_audited_too(forked: Forks, root: Path) -> None:
    """With late copies and slots in memory; a snapshot that is not flushed is not hashed."""

    def body(one: Rank) -> None:
        parts = tensors()
        parameter = nn.Parameter(torch.ones(256))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        state = marked(parts, optimizer=optimizer, own={"p": parameter})
        for step in range(1, 7):
            parameter.grad = torch.ones(256)
            optimizer.step()
            if one.rank == 1 and step == 3:
                flip(parts["w5"])
            handle = one.ckpt.step(step, state)
            if handle is not None:
                handle.wait()
            one.meet()

    memory = everstep.Memory(bytes=1 << 20, copy="overlap")
    job(
        forked, root, body, world=2, memory=memory, policy={"audit_every": 1, "full_every": 2, "keep_last": 9}
    )
    first, *rest = steps_on_disk(root)
    assert first < 3 and len(rest) == 2
    assert "disagreements" not in facts(root, first) and facts(root, first)["audit"]["entries"] == KEYS
    for number, step in enumerate(rest, 1):
        assert facts(root, step)["disagreements"]["entries"][0]["key"] == "w5"
        assert facts(root, step)["audit"]["number"] == number


def test_an_audit_that_is_off_says_and_costs_nothing(
    forked: Forks, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nothing is to be hashed")

    monkeypatch.setattr("everstep.store.equality.hexdigest", never)
    monkeypatch.setattr("everstep.snapshot.digests._digest", never)

    def body(one: Rank) -> None:
        parts = tensors()
        if one.rank == 1:
            flip(parts["w0"])
        one.save(1, marked(parts))
        one.save(2, marked(parts))

    told = job(forked, root, body, world=2, policy={"audit_every": None})
    assert [rank["heard"] + rank["outcomes"] for rank in told] == [["", ""]] * 2
    assert facts(root, 2) == {}


def test_parameters_under_ddp_are_audited(forked: Forks, root: Path) -> None:
    def body(one: Rank) -> None:
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.rand(4, 64) + one.rank).sum().backward()
        optimizer.step()
        state = everstep.TrainState(model=model, optimizer=optimizer)
        one.save(1, state)
        if one.rank == 1:
            flip(optimizer.state[model.module.weight]["exp_avg"].view(-1))
        one.save(2, state)

    told = job(forked, root, body, world=2, gloo=True, policy={"audit_every": 1})
    assert "disagreements" not in facts(root, 1) and facts(root, 1)["audit"]["entries"] >= 6
    (entry,) = facts(root, 2)["disagreements"]["entries"]
    assert entry["part"] == "optimizer" and "exp_avg" in entry["key"]
    assert entry["ranks"] == [[0], [1]] and entry["odd"] == []
    for rank in told:
        assert any("exp_avg" in text and "replicas differ" in text for text in rank["heard"])


def test_shards_are_compared_among_those_who_hold_the_same(forked: Forks, root: Path) -> None:
    """Halves of one tensor, each held by two ranks, and a tensor of which each rank holds its own quarter."""

    def body(one: Rank) -> None:
        half, peers = one.rank % 2, (one.rank % 2, one.rank % 2 + 2)
        data = torch.arange(8.0).view(4, 2) + 100 * half
        quarter = torch.full((2,), float(one.rank))
        both = everstep.Shards((8, 2), [((4 * half, 0), (4, 2))], [data], holders=peers)
        alone = everstep.Shards((8,), [((2 * one.rank,), (2,))], [quarter])
        state = everstep.TrainState(rng=False, model={"both": both, "alone": alone})
        one.save(1, state)
        if one.rank == 3:
            data[2, 1] = -1.0
        one.save(2, state)

    told = job(forked, root, body, world=4, policy={"audit_every": 1})
    assert [rank["outcomes"] for rank in told] == [["", ""]] * 4
    assert facts(root, 1) == {"audit": {"number": 0, "entries": 2}}
    (entry,) = facts(root, 2)["disagreements"]["entries"]
    assert (entry["key"], entry["ranks"], entry["odd"]) == ("both@4,0:4,2", [[1], [3]], [])
    assert entry["stored"] in (1, 3)


def test_replicas_of_dtensors_are_audited(forked: Forks, root: Path) -> None:
    def body(one: Rank) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        weight = distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Replicate(), Shard(0)])
        state = everstep.TrainState(rng=False, model={"w": weight})
        one.save(1, state)
        if one.rank == 1:
            weight.to_local()[0, 0] += 1
        one.save(2, state)

    job(forked, root, body, world=4, gloo=True, policy={"audit_every": 1, "on_disagreement": "refuse"})
    assert facts(root, 1) == {"audit": {"number": 0, "entries": 2}}
    (refusal,) = decisions(root, 2)
    assert "model/w@3,0:3,2 is different on rank 1 and rank 3" in str(refusal)
