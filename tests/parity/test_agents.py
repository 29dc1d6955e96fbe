"""Parity made by agents in processes of their own, some of them killed while they send or receive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from everstep.memory.arena import Arena
from everstep.memory.directory import find_arenas
from everstep.memory.header import Kind
from everstep.memory.slots import SlotState
from everstep.peers.described import ImageOf, decode_described, group_of
from everstep.plan.parity import ParityGroup

from tests.peers.guard_kit import CHUNK, Job, Node, until

from .test_stripes import encode

Start = Callable[..., Job]
NBYTES = 40 * CHUNK + 77
MIB = 1 << 20


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def begin(*args: Any, **options: Any) -> Job:
        jobs.append(Job(tmp_path, *args, **options))
        return jobs[-1].open()

    yield begin
    for job in jobs:
        job.end()


def kept(node: Node) -> set[tuple[int, int]]:
    """(incarnation, step) of the parity in the node's memory."""
    found: set[tuple[int, int]] = set()
    for info in find_arenas(node.arenas, Kind.PARITY):
        assert info.path is not None
        with Arena.attach(info.path) as arena:
            found |= {one.key for one in arena.snapshots()}
    return found


def check(job: Job, step: int) -> None:
    """All parity of the step is what plain arithmetic makes of the ranks' images, and sealed."""
    key = (job.incarnation, step)
    images, found = {}, {}
    known: dict[int, tuple[ImageOf, ...]] = {}
    group: ParityGroup | None = None
    for rank in job.ranks:
        one = next(one for one in rank.arena.snapshots() if one.key == key)
        with rank.arena.pin(one.index, one.generation) as pin:
            images |= {
                (rank.rank, name.removeprefix("image:")): bytes(pin.view(name))
                for name in pin.regions
                if name.startswith("image:")
            }
    for node in job.nodes:
        for info in find_arenas(node.arenas, Kind.PARITY):
            assert info.path is not None
            with Arena.attach(info.path) as arena:
                for one in arena.snapshots():
                    if one.key == key:
                        with arena.pin(one.index, one.generation) as pin:
                            assert pin.sealed() == pin.compute()
                            said = decode_described(bytes(pin.view("state")), "slot")
                            known |= {at: own for at, own in enumerate(said.images) if at != said.position}
                            found[said.position] = {
                                n: bytes(pin.view(n)) for n in pin.regions if n != "state"
                            }
    seats = said.seats
    group = group_of(seats, said.m, CHUNK, [known[at] for at in range(len(seats))])
    assert len(images) == sum(len(member.images) for member in group.members)
    wanted = encode(group, images)
    assert found == {
        at: {f"image:parity-{stripe}": wanted[stripe, row] for stripe, row in group.code.held(at)}
        for at in range(len(seats))
    }


@pytest.mark.parametrize(("nodes", "per_node", "parity"), [(3, 1, (2, 1)), (4, 2, (2, 2)), (2, 1, (3, 1))])
def test_w_is_what_parity_was_made_of(
    start: Start, nodes: int, per_node: int, parity: tuple[int, int]
) -> None:
    job = start(nodes, per_node, parity[1], parity=parity)
    for step in (3, 4, 7):
        job.snapshot(step, NBYTES)
        job.await_complete(step)
        assert {rank.protected for rank in job.ranks} == {step}
        check(job, step)
    assert {frozenset(kept(node)) for node in job.nodes} == {frozenset({(1, 4), (1, 7)})}
    for index, kept_by in enumerate(job.map.holders()):
        assert len(kept_by) == min(parity[1], nodes - 1)
        for holder in kept_by:
            for rank in job.nodes[index].ranks:
                assert job.nodes[holder].held()[rank.rank] == {(1, 4), (1, 7)}
    assert job.nodes[0].status()["parity"] == [1, 7]
    assert not {stage for rank in job.ranks for stage in rank.stages()} & {"peer_failed", "unprotected"}


@pytest.mark.parametrize("index", [0, 2])
def test_an_agent_is_killed_in_mid_stripe(start: Start, index: int) -> None:
    """It sends, and receives: what it had added up is gone, and all send that anew; what it had sent counts once."""
    job = start(3, 1, 1, parity=(2, 1), timeout_s=15.0, slot_bytes=4 << 20, rate=2.0 * MIB)
    job.snapshot(1, 3 * MIB)
    until(lambda: writing(job.nodes[0]) and writing(job.nodes[1]), "stripes in the making")
    agent = job.nodes[index].kill_agent()
    assert agent is not None and not kept(job.nodes[index])
    job.await_complete(1)
    check(job, 1)
    job.snapshot(2, NBYTES)
    job.await_complete(2)
    check(job, 2)
    former = find_arenas(job.nodes[index].arenas, Kind.PARITY)
    assert len(former) == 1, "the next agent took the arena"


def writing(node: Node) -> bool:
    """Whether parity is being made there."""
    for info in find_arenas(node.arenas, Kind.PARITY):
        assert info.path is not None
        with Arena.attach(info.path) as arena:
            if any(arena._control.read_word(at)[1] is SlotState.WRITING for at in range(info.slots)):
                return True
    return False


def test_the_next_incarnation_makes_parity_of_its_own(start: Start) -> None:
    job = start(3, 1, 1, parity=(2, 1))
    job.snapshot(1, NBYTES)
    job.await_complete(1)
    job.reopen(2)
    job.snapshot(2, NBYTES)
    job.await_complete(2)
    check(job, 2)
    until(lambda: all((2, 2) in kept(node) for node in job.nodes), "parity of the new incarnation")
