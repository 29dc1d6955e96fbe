"""Jobs that lose nodes and load what parity gives back, through the loader."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from everstep.backends.open import open_backend
from everstep.discovery import find_run
from everstep.errors import Damaged
from everstep.format.hashing import hexdigest
from everstep.memory.directory import find_arenas
from everstep.memory.header import Kind
from everstep.peers.described import Seat
from everstep.peers.link import connect
from everstep.peers.listener import Listener
from everstep.peers.parity import ParityDuty, ParityOffer
from everstep.peers.paritykeeper import ParityKeeper
from everstep.places import locate
from everstep.plan.parity import Code

from tests.exchange.kit import Job, directory_of, erase, load_on, manifests
from tests.recover.kit import BIG, IMAGE, damage, hold, load, pins, save

SECRET = b"s" * 32
WAIT_S = 20.0
IMAGES = ("own", "more")


def protect(root: Path, places: Sequence[str], m: int, step: int) -> None:
    """What the agents of ``places``, rank i on the i-th, would have done: parity of ``step``, and the small things of
    each rank on the next ``m`` nodes."""
    run = find_run(open_backend(locate(root).url, shared=True))
    assert run is not None
    seats = tuple(Seat(node, (rank,)) for rank, node in enumerate(places))
    for at, node in enumerate(places):
        for ahead in range(1, m + 1):
            hold(root, node, places[(at + ahead) % len(places)], steps=[step], without=IMAGES)
    with ExitStack() as stack:
        listeners = []
        for node in places:
            run_key = locate(root, node=node).run_key
            keeper = ParityKeeper(directory_of(root, node), run_key, node, run.run_id, wait_s=WAIT_S)
            handlers = {ParityOffer: keeper.receive}
            listeners.append(
                stack.enter_context(Listener("127.0.0.1", 0, SECRET, run.run_id, handlers, me=node))
            )
            stack.callback(keeper.close)
        threads = [
            threading.Thread(
                target=send, args=(root, seats, m, one, other, listeners[other], run.run_id, step)
            )
            for one, other in itertools.permutations(range(len(places)), 2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
    for node in places:
        assert [info.rank for info in find_arenas(directory_of(root, node), Kind.PARITY)] == [0]


def send(
    root: Path, seats: tuple[Seat, ...], m: int, one: int, other: int, to: Listener, run_id: str, step: int
) -> None:
    with pins(root, seats[one].name, Kind.OWN) as found:
        own = {arena.info.rank: pin for arena, pin in found if pin.info.step == step}
        [info] = {pin.info.key for pin in own.values()}
        duty = ParityDuty(
            lambda: connect(to.host, to.port, SECRET, run_id, me=seats[one].name, timeout_s=WAIT_S),
            seats,
            m,
            one,
            other,
            run_id=run_id,
            world=len(seats),
            chunk_bytes=found[0][0].info.chunk_bytes,
        )
        duty.protect(info, own)


def named(nodes: Sequence[str], count: int) -> list[str]:
    """So many nodes, and names for fresh ones."""
    return [*nodes, *(f"{nodes[0]}-{number}" for number in range(count))][:count]


@pytest.fixture
def three(root: Path, nodes: list[str], job: Job) -> list[str]:
    """Three nodes with steps 1 and 2 of one rank each, and parity of step 2; a fourth has nothing."""
    save(job, nodes[:3], [1, 2], size=BIG)
    protect(root, nodes[:3], 1, 2)
    return nodes


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_node_is_rebuilt_on_a_fresh_one(root: Path, three: list[str], lost: int) -> None:
    places = [three[3] if at == lost else three[at] for at in range(3)]
    erase(root, three[lost])
    loads = load(root, places, size=BIG).check(2)
    assert loads.kinds()[lost] == {"rebuilt"}
    assert [kinds for at, kinds in enumerate(loads.kinds()) if at != lost] == [{"own"}] * 2
    assert loads.fallbacks(lost) == () and manifests(root) == []


def test_a_smaller_world_reads_every_byte(root: Path, three: list[str]) -> None:
    expected = {}
    for node in three[:3]:
        with pins(root, node, Kind.OWN) as found:
            for arena, pin in found:
                if pin.info.step == 2:
                    names = {"state": "state", "own": "image:own", "more": "image:more"}
                    digests = {name: hexdigest(bytes(pin.view(region))) for name, region in names.items()}
                    expected |= {(arena.info.rank, name): digest for name, digest in digests.items()}
    erase(root, three[1])
    for result in load_on(root, [three[0], three[2]]):
        assert result.error is None
        assert result.values == expected


def test_two_lost_nodes_are_too_many_for_one_parity_and_it_says_so(
    root: Path, nodes: list[str], job: Job
) -> None:
    save(job, nodes[:3], [1, 2], durable=[1])
    protect(root, nodes[:3], 1, 2)
    erase(root, nodes[0])
    erase(root, nodes[1])
    loads = load(root, [nodes[3], nodes[3], nodes[2]]).check(1, "disk")
    said = loads.warned
    assert "2 of the 3 nodes of a parity group are lost, of which any 1 may be" in said
    assert nodes[0] in said and nodes[1] in said
    assert "no node's memory has rank(s) [0, 1] of it" in said


@pytest.mark.parametrize("lost", [(0, 1), (0, 2), (2, 3)])
def test_two_of_four_nodes_are_lost(root: Path, nodes: list[str], job: Job, lost: Collection[int]) -> None:
    save(job, nodes, [1, 2])
    protect(root, nodes, 2, 2)
    fresh = named(nodes, 6)[4:]
    for at in lost:
        erase(root, nodes[at])
    places = [fresh.pop() if at in lost else nodes[at] for at in range(4)]
    loads = load(root, places).check(2)
    assert [kinds == {"rebuilt"} for kinds in loads.kinds()] == [at in lost for at in range(4)]


@pytest.mark.parametrize("stripe", [1, 2])
def test_where_parity_is_damaged_too_the_step_is_passed_over(
    root: Path, three: list[str], stripe: int
) -> None:
    """One node is lost, and of one other a chunk of parity is wrong: nothing is left to make it good."""
    erase(root, three[0])
    [holder] = Code(2, 1).holders(stripe)
    damage(root, three[holder], Kind.PARITY, 0, 2, f"image:parity-{stripe}", at=5)
    loads = load(root, [three[3], *three[1:3]], size=BIG)
    assert "cannot be rebuilt at offset" in str(loads.results[0].error)
    assert [result.recovery for result in loads.results] == [None] * 3
    assert all(isinstance(result.error, Damaged) for result in loads.results), loads.results


def test_a_damaged_chunk_of_a_node_that_is_there_is_rebuilt(root: Path, three: list[str]) -> None:
    damage(root, three[1], Kind.OWN, 1, 2)
    loads = load(root, three[:3], size=BIG).check(2)
    assert loads.kinds() == [{"own"}, {"own", "rebuilt"}, {"own"}]
    assert "parity of nodes" in loads.fallbacks(1)[0]


def test_damage_of_a_survivor_with_a_second_parity(root: Path, nodes: list[str], job: Job) -> None:
    save(job, nodes, [1, 2], size=BIG)
    protect(root, nodes, 2, 2)
    erase(root, nodes[0])
    damage(root, nodes[2], Kind.OWN, 2, 2, IMAGE, at=7)
    loads = load(root, [named(nodes, 5)[4], *nodes[1:]], size=BIG).check(2)
    assert loads.kinds()[0] == {"rebuilt"} and loads.kinds()[2] == {"own", "rebuilt"}
