"""Ranks of one job go back together: all from their devices, or all from elsewhere, or all fail alike."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from everstep import errors
from everstep.memory.arena import Arena
from everstep.memory.directory import find_arenas
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.facade.kit import arena_directory, policy
from tests.matrix import launch, meshes


@pytest.fixture(autouse=True)
def own_node(node: str) -> Iterator[None]:
    """The ranks are forked off a process that was started with another environment."""
    yield


class Rank:
    """A rank of a DDP job, with a tensor and numbers of its own."""

    def __init__(self, rank: int, root: Path, environment: dict[str, str], **memory: Any) -> None:
        os.environ.update(environment)
        torch.manual_seed(0)
        self.rank, self.root = rank, root
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        torch.manual_seed(100 + rank)
        self.own: dict[str, Any] = {"tensor": torch.full((3,), float(rank)), "n": 0}
        self.state = everstep.TrainState(model=self.model, optimizer=self.optimizer, extra=self.own)
        given = {"full_every": None, "rank_timeout_s": 60.0, "on_slow": "wait", **memory.pop("policy", {})}
        self.ckpt = everstep.Checkpointer(
            root, memory=everstep.Memory(**memory), policy=policy(**given), agent="inline"
        )
        self.ckpt.load(self.state)

    def train(self, first: int, last: int, *, save: bool = True) -> None:
        for step in range(first, last + 1):
            self.optimizer.zero_grad()
            self.model(torch.rand(4, 32)).pow(2).mean().backward()
            self.optimizer.step()
            self.own["n"] = step
            self.own["tensor"] += 1
            if save:
                self.ckpt.step(step, self.state)

    def values(self) -> dict[str, Any]:
        found = {name: value.tolist() for name, value in self.model.state_dict().items()}
        for at, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{at}.{name}": value.tolist() for name, value in state.items()}
        return found | {"tensor": self.own["tensor"].tolist(), "n": self.own["n"]}

    @property
    def tier(self) -> str:
        assert self.ckpt.recovery is not None
        return self.ckpt.recovery.tier


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in ("EVERSTEP_NODE", "EVERSTEP_RUNTIME_DIR")}


def _all_from_devices(rank: int, world: int, root: Path, given: dict[str, str]) -> list[Any]:
    one = Rank(rank, root, given, device_slots=1)
    one.train(1, 4)
    wanted = one.values()
    one.train(5, 6, save=False)
    step = one.ckpt.rollback(reason="a spike")
    back = one.values() == wanted, one.tier
    one.train(5, 7)
    final = one.values()
    one.ckpt.close()
    return [step, *back, final["n"], one.ckpt.recovery.incarnation if one.ckpt.recovery else None]


def test_all_ranks_have_it_on_their_devices(root: Path) -> None:
    """Each rank has the tensors that others store, too."""
    found = launch.run(2, _all_from_devices, root, environment())
    assert found == [[4, True, "device", 7, 1]] * 2


def _one_has_it_not(rank: int, world: int, root: Path, given: dict[str, str]) -> list[Any]:
    one = Rank(rank, root, given, device_slots=1)
    one.train(1, 4)
    wanted = one.values()
    if rank == 1:
        one.ckpt._rollbacks.device.forget()  # type: ignore[union-attr]
    one.train(5, 5, save=False)
    step = one.ckpt.rollback(reason="a spike")
    found = [step, one.tier, one.values() == wanted]
    one.train(5, 6)
    one.ckpt.close()
    return found


def test_one_rank_has_it_not_so_all_take_it_from_memory(root: Path) -> None:
    assert launch.run(2, _one_has_it_not, root, environment()) == [[4, "memory", True]] * 2


def _one_slot_is_damaged(
    rank: int, world: int, root: Path, given: dict[str, str], durable: bool
) -> list[Any]:
    one = Rank(rank, root, given, slots=4)
    one.train(1, 2)
    if durable:
        one.ckpt.save(2, one.state).wait()
    wanted = one.values()
    one.train(3, 4)
    one.ckpt._ranks.agree("before the damage", None, timeout_s=60)  # type: ignore[union-attr]
    if rank == 1:
        damage(root, rank, 2 if durable else None)
    one.ckpt._ranks.agree("after the damage", None, timeout_s=60)  # type: ignore[union-attr]
    try:
        step = one.ckpt.rollback(2 if durable else 3, reason="a spike")
        return [step, one.tier, one.values() == wanted]
    except errors.EverstepError as error:
        return [type(error).__name__]


def damage(root: Path, rank: int, step: int | None) -> None:
    """Flip bits of the first tensor of ``rank``'s snapshots of ``step`` (None: of every step), once they are sealed."""
    for info in find_arenas(arena_directory(root)):
        if info.rank != rank:
            continue
        assert info.path is not None
        with Arena.attach(info.path) as arena:
            for found in arena.snapshots():
                if step in (None, found.step):
                    with arena.pin(found.index, found.generation) as pinned:
                        if pinned.sealed() is None:
                            pinned.seal(pinned.compute())
                        begin = pinned._places["image:extra"].offset
                        view = arena._control.data(found.index, begin, 4200)
                        view[4100] ^= 0xFF


@pytest.mark.parametrize("durable", [True, False])
def test_one_ranks_slot_is_damaged(root: Path, durable: bool) -> None:
    """The disk has it: all take it from there, or mend by it; nothing has it: all fail alike."""
    found = launch.run(2, _one_slot_is_damaged, root, environment(), durable)
    if durable:
        assert [one[0] for one in found] == [2, 2] and all(one[2] for one in found)
    else:
        assert found[1] == ["Damaged"] and found[0] in (["Damaged"], ["RankError"])


def _ranks_disagree(rank: int, world: int, root: Path, given: dict[str, str]) -> list[str]:
    one = Rank(rank, root, given, device_slots=1)
    one.train(1, 3)
    told = []
    for step, reason in ((2 + rank, "same"), (3, f"reason {rank}"), (3, "" if rank else "a reason")):
        try:
            one.ckpt.rollback(step, reason=reason)
            told.append("went back")
        except errors.BadOption as error:
            told.append(str(error))
    one.train(4, 4)  # nothing has happened
    one.ckpt.close(flush=False)
    return told


def test_ranks_that_ask_for_different_things(root: Path) -> None:
    one, other = launch.run(2, _ranks_disagree, root, environment())
    assert one == other
    assert ["different" in text or "why" in text for text in one] == [True] * 3


def _schedule(rank: int, world: int, root: Path, given: dict[str, str]) -> list[int]:
    one = Rank(rank, root, given, device_slots=1, policy={"full_every": 3})
    one.train(1, 5)
    one.ckpt.rollback(4, reason="a spike")
    flushed = []
    for step in range(5, 10):
        one.train(step, step, save=False)
        if one.ckpt.step(step, one.state) is not None:
            flushed.append(step)
    one.ckpt.close()
    return flushed


def test_ranks_follow_the_new_incarnations_schedule(root: Path) -> None:
    """What rank 0 had decided ahead for the incarnation before, the others have seen already."""
    assert launch.run(2, _schedule, root, environment()) == [[5, 6, 9]] * 2


def pieces_of(state: everstep.TrainState) -> dict[tuple[str, str], list[torch.Tensor]]:
    """Copies of what this rank holds, by part and key."""
    leaves = state.flatten().leaves
    return {(leaf.part, leaf.key): [piece.clone() for piece in leaf.pieces] for leaf in leaves}


def _sharded(rank: int, world: int, root: Path, given: dict[str, str], mesh: str) -> list[Any]:
    os.environ.update(given)
    model, optimizer = meshes.build(mesh, rank, world, filled=True)
    own = everstep.Shards(
        (4, 6), [((2 * rank, 0), (1, 6)), ((2 * rank + 1, 1), (1, 2))], [torch.rand(1, 6), torch.rand(1, 2)]
    )
    state = everstep.TrainState(model=model, optimizer=optimizer, own=own)
    memory = everstep.Memory(device_slots=1)
    ckpt = everstep.Checkpointer(root, memory=memory, policy=policy(rank_timeout_s=60.0), agent="inline")
    ckpt.load(state)
    ckpt.step(1, state)
    wanted = pieces_of(state)
    with torch.no_grad():
        for piece in state.pieces():
            piece.zero_()
    step = ckpt.rollback(reason="all gone")
    found = pieces_of(state)
    equal = found.keys() == wanted.keys() and all(
        torch.equal(mine, theirs)
        for key in wanted
        for mine, theirs in zip(found[key], wanted[key], strict=True)
    )
    expected = meshes.build(mesh, rank, world, filled=True)
    wrong = meshes.differences(model, optimizer, *expected)
    ckpt.close(flush=False)
    assert ckpt.recovery is not None
    return [step, ckpt.recovery.tier, equal, wrong]


@pytest.mark.parametrize("mesh", ["fsdp2", "ddp2"])
def test_sharded_tensors_go_back_in_place(root: Path, mesh: str) -> None:
    world = meshes.MESHES[mesh][0]
    found = launch.run(world, _sharded, root, environment(), mesh)
    assert found == [[1, "device", True, []]] * world
