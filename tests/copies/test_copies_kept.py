"""Second copies in a job of two simulated nodes with two ranks each."""

from __future__ import annotations

import asyncio
import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from everstep.backends.files import LocalBackend
from everstep.errors import EverstepError
from everstep.format import layout as layouts
from everstep.memory.arena import Arena
from everstep.memory.control import COPY_PREFIX, IMAGE_PREFIX
from everstep.memory.directory import find_arenas
from everstep.memory.header import Kind
from everstep.places import locate
from everstep.store.fsck import check
from torch import nn

from tests.agree.kit import facts
from tests.agree.test_audit import flip
from tests.exchange.kit import WAIT_S, Job, directory_of

Say = Callable[..., None]
KEYS = 8
SIZE = 300
KEPT = everstep.Memory(replicas=1)
AUDITED = {"audit_every": None, "full_every": None}


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((SIZE,), float(100 * step + i)) for i in range(KEYS)}


def state_of(model: dict[str, torch.Tensor], rank: int) -> everstep.TrainState:
    own = {"o": torch.full((4,), float(rank))}
    return everstep.TrainState(rng=False, replicated=("model",), model=model, own=own)


def in_slots(root: Path, nodes: list[str], step: int) -> dict[str, list[tuple[int, str, bytes]]]:
    """By key of the part "model": rank, kind of region and bytes of each place in the slots of ``step``."""
    found: dict[str, list[tuple[int, str, bytes]]] = {}
    for node in nodes:
        for info in find_arenas(directory_of(root, node), Kind.OWN):
            assert info.path is not None
            with Arena.attach(info.path) as arena:
                for one in arena.snapshots():
                    if one.step == step:
                        with arena.pin(one.index, one.generation) as pin:
                            layout = layouts.decode(bytes(pin.view("layout")))
                            names = [IMAGE_PREFIX + image.name for image in layout.images]
                            names += [COPY_PREFIX + image.name for image in layout.copies]
                            assert set(names) <= set(pin.regions)
                            for place in layout.places():
                                entry, region = layout.entries[place.entry], names[place.image]
                                data = bytes(pin.view(region))[place.offset : place.offset + entry.nbytes]
                                if entry.part == "model":
                                    found.setdefault(entry.key, []).append((info.rank, region, data))
    return found


def check_slots(root: Path, nodes: list[str], step: int, wanted: dict[str, torch.Tensor]) -> None:
    """Each tensor lies in two ranks' slots on different nodes, once as a copy, with the right bytes."""
    found = in_slots(root, nodes, step)
    assert found.keys() == wanted.keys()
    loads = [0] * 4
    for key, places in found.items():
        (stored, image), (copied, copy) = sorted(
            ((rank, region) for rank, region, _ in places), key=lambda x: x[1][0] == "c"
        )
        assert image == f"image:model+{copied}" and copy == f"copy:{stored}/model+{copied}"
        assert {stored // 2, copied // 2} == {0, 1}, "one on each node"
        for rank, _, data in places:
            assert data == wanted[key].numpy().tobytes()
            loads[rank] += len(data)
    largest = max(tensor.nbytes for tensor in wanted.values())
    assert max(loads) - min(loads) <= 2 * largest, loads


def fsck(root: Path) -> list[str]:
    async def go() -> list[str]:
        backend = LocalBackend(root)
        found = [str(one) async for one in check(backend, decision_wait_s=0)]
        await backend.close()
        return found

    return asyncio.run(go())


def stored_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("checkpoints/*/*/a1/*.safetensors"))


def saved(ckpt: everstep.Checkpointer, step: int, state: everstep.TrainState) -> list[str]:
    """Outcome and warnings of a save; all ranks leave it together."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ckpt.save(step, state).wait()
            said = ["durable"]
        except EverstepError as error:
            said = [f"{type(error).__name__}: {error}"]
    met(ckpt)
    return said + [str(one.message) for one in caught if "everstep:" in str(one.message)]


def met(ckpt: everstep.Checkpointer) -> None:
    assert ckpt._ranks is not None
    ckpt._ranks.agree("meeting", None, timeout_s=WAIT_S)


def test_copies_lie_on_the_other_node_and_are_not_written(root: Path, nodes: list[str], job: Job) -> None:
    places = [nodes[0], nodes[0], nodes[1], nodes[1]]

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        say(*saved(ckpt, 1, state_of(tensors(1), rank)))
        ckpt.step(2, state_of(tensors(2), rank))  # in memory alone
        say("there")
        threading.Event().wait(WAIT_S)

    for rank in job.start(places, body, memory=KEPT, agent="process", policy=AUDITED):
        assert rank.line() == "durable" and rank.line() == "there"
    job.kill()
    for step in (1, 2):
        check_slots(root, nodes[:2], step, tensors(step))
    assert facts(root, 1)["audit"]["entries"] == KEYS
    headers = sum(1 for _ in root.glob("checkpoints/*/*/a1/*.safetensors")) * 4096
    assert stored_bytes(root) - headers == KEYS * SIZE * 4 + 4 * 16, "each tensor once"
    assert not list(root.glob("checkpoints/*/*/a1/*@*"))
    assert fsck(root) == []
    values = everstep.load(root, step=1)
    assert all(torch.equal(values["model"][key], tensor) for key, tensor in tensors(1).items())

    def again(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        model = tensors(0)
        step = ckpt.load(state_of(model, 9))
        assert ckpt.recovery is not None
        same = all(torch.equal(model[key], tensor) for key, tensor in tensors(2).items())
        say(step, ckpt.recovery.tier, same)
        ckpt.close(flush=False)

    assert job.run(places, again, memory=KEPT, agent="process", policy=AUDITED) == [["2 memory True"]] * 4


@pytest.mark.parametrize("policy", ["warn", "refuse"])
def test_a_flipped_bit_of_a_copys_holder_is_named_at_the_next_flush(
    root: Path, nodes: list[str], job: Job, policy: str
) -> None:
    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        model = tensors(1)
        first = saved(ckpt, 1, state_of(model, rank))
        assert ckpt._session is not None
        owners = ckpt._session._snapshots._planner.owners["model", "w3"]
        if rank == owners[1]:
            flip(model["w3"])
        second = saved(ckpt, 2, state_of(model, rank))
        if rank == owners[1]:
            flip(model["w3"])
        third = saved(ckpt, 3, state_of(model, rank))
        say(json.dumps([list(owners), first, second, third]))
        ckpt.close(flush=False)

    places = [nodes[0], nodes[0], nodes[1], nodes[1]]
    asked = {**AUDITED, "on_disagreement": policy, "keep_last": 9}
    ends = job.run(places, body, memory=KEPT, agent="process", policy=asked)
    for (line,) in ends:
        (stored, copied), first, second, third = json.loads(line)
        assert stored // 2 != copied // 2 and first == ["durable"]
        low, high = sorted((stored, copied))
        text = f"model/w3 is different on rank {low} and rank {high} (stored is that of rank {stored})"
        assert any(text in said for said in [*second, *third]), second
        assert "w4" not in " ".join(second)
        assert second[0].startswith("ReplicasDiffer" if policy == "refuse" else "durable")
        assert third[0] == "durable"
    if policy == "warn":
        (entry,) = facts(root, 2)["disagreements"]["entries"]
        assert sorted(entry["ranks"]) == [[low], [high]] and entry["key"] == "w3"
    assert "disagreements" not in facts(root, 3)


def test_copies_come_late_too_and_grow_with_the_state(root: Path, nodes: list[str], job: Job) -> None:
    """Behind the next step, as what is stored does; tensors that appear later get copies in a larger arena."""

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        parameters = {f"p{i}": nn.Parameter(torch.full((SIZE,), float(i))) for i in range(KEYS)}
        optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
        model: dict[str, Any] = dict(parameters)
        state = everstep.TrainState(rng=False, replicated=("model",), model=model, optimizer=optimizer)
        for step in range(1, 5):
            for parameter in parameters.values():
                parameter.grad = torch.ones(SIZE)
            optimizer.step()
            if step == 4:
                model["late"] = torch.full((300_000,), 7.0)
            ckpt.step(step, state)
        assert ckpt._session is not None
        snapshots = ckpt._session._snapshots
        late = snapshots._copying is not None
        ckpt._session._settle()
        say(late)
        threading.Event().wait(WAIT_S)

    memory = everstep.Memory(replicas=1, copy="overlap", bytes=1 << 20)
    places = [nodes[0], nodes[0], nodes[1], nodes[1]]
    for rank in job.start(places, body, memory=memory, agent="process", policy=AUDITED):
        assert rank.line() == "True"
    job.kill()
    wanted = {f"p{i}": torch.full((SIZE,), float(i - 3)) for i in range(KEYS)}
    found = in_slots(root, nodes[:2], 3)
    for key, tensor in wanted.items():
        assert [data for _, _, data in found[key]] == [tensor.numpy().tobytes()] * 2
    wanted = {key: tensor - 1 for key, tensor in wanted.items()} | {"late": torch.full((300_000,), 7.0)}
    check_slots(root, nodes[:2], 4, wanted)


def test_more_copies_than_other_nodes_are_lowered_aloud(root: Path, nodes: list[str], job: Job) -> None:
    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        model = tensors(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ckpt.load(state_of(model, rank))
            ckpt.save(1, state_of(model, rank)).wait()
        lowered = [one for one in caught if "replicas=3) is lowered to 1" in str(one.message)]
        say(len(lowered), ckpt._copies)
        met(ckpt)
        ckpt.close(flush=False)

    places = [nodes[0], nodes[0], nodes[1], nodes[1]]
    memory = everstep.Memory(replicas=3)
    assert job.run(places, body, memory=memory, agent="process", policy=AUDITED) == [
        ["1 1"],
        ["0 1"],
        ["0 1"],
        ["0 1"],
    ]
    check_slots(root, nodes[:2], 1, tensors(1))
    assert locate(root, node=nodes[0]).run_key != locate(root, node=nodes[1]).run_key


def test_ranks_must_want_the_same_number(root: Path, nodes: list[str], job: Job) -> None:
    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        ckpt._memory = everstep.Memory(replicas=rank)
        with pytest.raises(everstep.errors.BadOption, match="differs between the ranks"):
            ckpt.save(1, state_of(tensors(1), rank))
        say("refused")

    assert job.run(nodes[:2], body, memory=KEPT, agent="process", policy=AUDITED) == [["refused"]] * 2


def test_shards_have_copies_among_those_who_hold_the_same(root: Path, nodes: list[str], job: Job) -> None:
    """Two pieces of one tensor on ranks 0 and 2, two others on 1 and 3, as HSDP replicates across nodes."""

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        half = rank % 2
        pieces = [torch.arange(4.0).view(2, 2) + 10 * half, torch.arange(4.0).view(2, 2) + 100 + 10 * half]
        places = [((4 * half, 0), (2, 2)), ((4 * half + 2, 0), (2, 2))]
        shards = everstep.Shards((8, 2), places, pieces, holders=(half, half + 2))
        state = everstep.TrainState(rng=False, model={"w": shards})
        first = saved(ckpt, 1, state)
        planner = ckpt._session._snapshots._planner  # type: ignore[union-attr]
        owners = planner.owners["model", "w"]
        if half == 1 and rank == owners[1]:
            pieces[1][1, 1] = -1.0
        say(json.dumps([owners, first, saved(ckpt, 2, state)]))
        ckpt.close(flush=False)

    places = [nodes[0], nodes[0], nodes[1], nodes[1]]
    ends = job.run(places, body, memory=KEPT, agent="process", policy=AUDITED)
    for rank, (line,) in enumerate(ends):
        owners, first, _ = json.loads(line)
        assert sorted(owners) == [rank % 2, rank % 2 + 2] and first == ["durable"]
    assert facts(root, 1) == {"audit": {"number": 0, "entries": 2}}
    (entry,) = facts(root, 2)["disagreements"]["entries"]
    assert (entry["key"], entry["ranks"]) == ("w@4,0:2,2+6,0:2,2", [[1], [3]])
    whole = everstep.load(root, step=1)["model"]["w"]
    assert whole[:, 0].tolist() == [0, 2, 100, 102, 10, 12, 110, 112]
    assert fsck(root) == []
