"""The plan of memory says what arenas really take, and where it does not fit what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from everstep import errors
from everstep.memory.arena import Arena
from everstep.memory.directory import find_arenas
from everstep.memory.header import Kind, aligned
from everstep.memory.sizes import arena_bytes, around_bytes, estimated_slot_bytes
from everstep.peers.keeper import Keeper, with_records
from everstep.peers.nodemap import IMAGES_PER_RANK, STATE_BYTES, NodeMap, PeerNode
from everstep.plan.room import Job, Limit, advice, compare, plan, survival
from everstep.policy import Memory
from everstep.sizing import MemoryPlan, plan_memory
from everstep.snapshot.estimate import estimate

from tests.facade.kit import arenas_of, opened, until
from tests.peers.guard_kit import CHUNK as AGENTS_CHUNK
from tests.peers.guard_kit import Job as Agents

CHUNK = 1 << 16


def files(tmp_path: Path, *made: tuple[Kind, int, int, int]) -> int:
    """Bytes of the files of really created arenas: (kind, how many, slots, bytes of a slot)."""
    total = 0
    for kind, count, slots, slot_bytes in made:
        for rank in range(count):
            with Arena.create(
                tmp_path, run_key="key", node="a-node-with-a-name", rank=rank, world=8, slots=slots,
                slot_bytes=slot_bytes, chunk_bytes=CHUNK, populate="no", kind=kind,
            ) as arena:  # fmt: skip
                assert arena.info.path is not None
                total += os.stat(arena.info.path).st_size
                assert os.stat(arena.info.path).st_blocks * 512 == arena.info.nbytes, "all of it is reserved"
                arena.unlink()
    return total


def job(slot_bytes: int = 1 << 20, **changes: Any) -> Job:
    given: dict[str, Any] = {
        "nodes": 4,
        "ranks_per_node": 2,
        "slot_bytes": slot_bytes,
        "held_bytes": with_records(slot_bytes, CHUNK),
        "small_bytes": with_records(1 << 18, CHUNK),
        "chunk_bytes": CHUNK,
    }
    return Job(**{**given, **changes})


def arena(slots: int, slot_bytes: int) -> int:
    return arena_bytes(slots, slot_bytes, CHUNK)


@pytest.mark.parametrize("slots", [3, 5])
def test_own_slots(tmp_path: Path, slots: int) -> None:
    room = plan(job(slots=slots), arena)
    assert room.node_own == files(tmp_path, (Kind.OWN, 2, slots, 1 << 20)) == 2 * room.rank_own == room.node
    assert room.moved == room.node and room.node_held == room.node_parity == room.spare == 0


@pytest.mark.parametrize(
    ("nodes", "spares", "replicas", "held", "spare"),
    [
        (4, 0, 1, 2, 0),
        (4, 0, 2, 4, 0),
        (5, 0, 1, 2, 0),
        (4, 1, 1, 0, 8),
        (4, 2, 1, 0, 4),
        (4, 1, 2, 2, 8),
        (1, 0, 1, 0, 0),
    ],
)
def test_what_is_held_for_other_nodes(
    tmp_path: Path, nodes: int, spares: int, replicas: int, held: int, spare: int
) -> None:
    given = job(nodes=nodes, spares=spares, replicas=replicas)
    room = plan(given, arena)
    assert room.node_held == files(tmp_path, (Kind.HELD, held, 2, given.held_bytes))
    assert room.spare == files(tmp_path, (Kind.HELD, spare, 2, given.held_bytes))
    assert given.survives == min(replicas, nodes + spares - 1)


def test_a_keeper_s_own_arenas(tmp_path: Path) -> None:
    """What an agent really reserves for two ranks of another node."""
    keeper = Keeper(tmp_path, "key", "n0", "run", lambda rank: None)
    for rank in (0, 1):
        keeper.reserve(rank, 1 << 20, CHUNK)
    taken = sum(info.nbytes for info in find_arenas(tmp_path, Kind.HELD))
    keeper.close()
    assert plan(job(nodes=2, replicas=1), arena).node_held == taken


def test_parity_takes_its_part(tmp_path: Path) -> None:
    given = job(nodes=6, parity=(4, 2), slot_bytes=4 << 20)
    room = plan(given, arena)
    images = 2 * -(-2 * (4 << 20) // 4 // CHUNK) * CHUNK
    assert room.node_held == files(tmp_path, (Kind.HELD, 4, 2, given.small_bytes))
    assert room.node_parity == files(tmp_path, (Kind.PARITY, 1, 2, aligned(images)))
    assert room.node_parity < 0.6 * plan(job(nodes=6, replicas=2, slot_bytes=4 << 20), arena).node_held
    with pytest.raises(errors.BadOption, match="more than 2 nodes"):
        plan(job(nodes=2, parity=(4, 2)), arena)


@pytest.mark.parametrize(("nodes", "per_node", "parity"), [(6, 2, (4, 2)), (3, 1, (4, 2)), (7, 3, (2, 1))])
def test_parity_is_that_of_the_agents_node_map(nodes: int, per_node: int, parity: tuple[int, int]) -> None:
    given = job(
        nodes=nodes, ranks_per_node=per_node, parity=parity,
        parity_spare_chunks=IMAGES_PER_RANK, parity_state_bytes=STATE_BYTES,
    )  # fmt: skip
    some = tuple(
        PeerNode(
            f"n{at}", "h", 1, "", tuple(range(at * per_node, (at + 1) * per_node)), (1 << 20,) * per_node
        )
        for at in range(nodes)
    )
    said = NodeMap(some, parity[1], parity)
    slots = [said.parity_bytes(at, CHUNK) for at in range(nodes)]
    assert plan(given, arena).node_parity == arena(2, max(slots))


def test_what_agents_take_with_parity(tmp_path: Path) -> None:
    """Of other nodes' ranks they keep what is small: no slots as large as the ranks' own."""
    nodes = Agents(tmp_path, 3, 1, 1, parity=(2, 1), slot_bytes=4 << 20)
    try:
        nodes.open().snapshot(1, 20 * AGENTS_CHUNK)
        until(lambda: all(rank.complete == 1 for rank in nodes.ranks), "protection")
        slot = nodes.ranks[0].arena.info.slot_bytes
        for node in nodes.nodes:
            (parity,) = find_arenas(node.arenas, Kind.PARITY)
            assert parity.slot_bytes == nodes.map.parity_bytes(node.index, AGENTS_CHUNK)
            (held,) = find_arenas(node.arenas, Kind.HELD)
            around = aligned(around_bytes(1, 100) + with_records(slot, AGENTS_CHUNK) - slot)
            assert held.slot_bytes <= around < slot / 4
    finally:
        nodes.end()


def test_the_moments_at_which_there_is_more(tmp_path: Path) -> None:
    given = job(
        replicas=1,
        agent_bytes=5,
        load_bytes_node=100,
        load_bytes_rank=10,
        growth=2.0,
        device_slots=1,
        device_bytes=7,
    )
    room = plan(given, arena)
    assert room.recovery == 2 * (room.node_own + room.node_held) + 5 + 120
    larger = files(tmp_path, (Kind.OWN, 2, 3, int((1 << 20) * 2.5)))
    assert room.grown == larger + int(room.node_held * (larger / room.node_own))
    assert room.most == room.node + max(room.grown, room.moved + 120) and room.rank_device == 7
    assert plan(job(), arena).grown == 0


def test_the_estimate_of_a_slot_is_the_checkpointer_s() -> None:
    tensors = [torch.zeros(1000), torch.zeros(77, dtype=torch.int64)]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    assert estimate(tensors, state_bytes=99).nbytes == estimated_slot_bytes(nbytes, 2, 99)


def test_limits_and_advice() -> None:
    room = plan(job(replicas=1, slots=5, agent_bytes=1 << 20), arena)
    enough = compare(room, [Limit("here", room.most, files=True), Limit("there", room.most + 64, 64)])
    assert all(one.fits_recovery for one in enough) and advice(job(), arena, enough) == ()
    tight = compare(room, [Limit("here", room.arenas, files=True), Limit("there", room.node + 63, 64)])
    assert [(one.fits, one.fits_recovery) for one in tight] == [(True, False), (False, False)]
    held = compare(room, [Limit("here", 0, files=True, held=room.arenas)])
    assert held[0].fits, "what the run has already is not taken again"
    said = "\n".join(advice(job(replicas=1, slots=5), arena, tight))
    for word in (f"{tight[0].most:,} bytes", "--shm-size", "slots=3", "parity=(3, 1)", "Memory(path="):
        assert word in said


def test_what_survives_what() -> None:
    def of(given: Job, lost: str, launcher: str) -> str:
        return next(one.goes_on[launcher] for one in survival(given) if lost in one.what)

    for launcher in ("torchrun", "slurm", "kubernetes"):
        assert "memory of the node" in of(job(), "a training process", launcher)
        assert "disk" in of(job(), "a node or pod", launcher)
        assert "other nodes' memory" in of(job(replicas=1), "a node or pod", launcher)
        assert "other nodes' memory" in of(job(nodes=8, parity=(4, 2)), "2 nodes", launcher)
        assert "disk" in of(job(), "2 nodes", launcher)
        assert of(job(), "the agent", launcher)
    assert "emptyDir" in of(job(), "all training processes", "kubernetes")
    assert "cgroup" in of(job(), "all training processes", "slurm")
    assert "job_container" in of(job(), "end", "slurm")
    # Agents of several nodes write nothing when all trainers are gone.
    for lost in ("all training processes", "end"):
        assert ("makes it durable" in of(job(nodes=1), lost, "torchrun")) is True
        assert ("makes it durable" in of(job(nodes=3), lost, "torchrun")) is False


# -- the call


def test_a_run_s_own_slots_are_what_counts(root: Path) -> None:
    state = {"w": torch.zeros(1 << 16), "n": 1}
    ckpt = opened(root)
    ckpt.load(state)
    ckpt.save(1, state).wait()
    (info,) = arenas_of(root)
    found = plan_memory(root)
    assert (found.room.rank_own, found.job.slot_bytes) == (info.nbytes, info.slot_bytes)
    assert "the slots of 1 rank(s)" in found.source
    ckpt.close()
    later = plan_memory(root)
    assert "checkpoint of step 1" in later.source and later.job.nodes == 1
    assert info.slot_bytes <= later.job.slot_bytes <= 1.1 * info.slot_bytes + 8192


def test_parameters() -> None:
    def size(**more: Any) -> MemoryPlan:
        return everstep.plan_memory(parameters=1_000_000, nodes=2, ranks_per_node=2, **more)

    assert size().job.slot_bytes == estimated_slot_bytes(3_000_000, 1000, 0)
    assert size(dtype="bfloat16", optimizer="momentum").job.slot_bytes == estimated_slot_bytes(
        1_000_000, 1000, 0
    )
    ddp = size(replicated=True, memory=Memory(replicas=1, device_slots=1))
    assert ddp.job.slot_bytes == estimated_slot_bytes(6_000_000, 1000, 0)
    assert ddp.room.rank_device == estimated_slot_bytes(12_000_000, 1000, 0)
    exact = everstep.plan_memory(state_bytes=1, memory=Memory(bytes=1 << 20))
    assert exact.job.slot_bytes == 1 << 20


@pytest.mark.parametrize(
    "call",
    [
        lambda: plan_memory(),
        lambda: plan_memory(state_bytes=1, parameters=1),
        lambda: plan_memory(state_bytes=0),
        lambda: plan_memory(parameters=10, dtype="int3"),
        lambda: plan_memory(parameters=10, optimizer="hope"),
        lambda: plan_memory(state_bytes=1, nodes=0, ranks_per_node=-1),
        lambda: plan_memory(state_bytes=1, growth=0.5),
    ],
)
def test_wrong_calls(call: Callable[[], MemoryPlan]) -> None:
    with pytest.raises(errors.BadOption):
        call()
