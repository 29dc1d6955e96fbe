"""What is lost together, and what replaces it: two nodes at once, a job that goes on with fewer, a hot spare."""

from __future__ import annotations

import pytest
from everstep.memory.header import Kind

from .cluster import Cluster, Lived
from .conftest import Make
from .schedules import undisturbed

PLACES = (0, 1, 2, 3)
GROUPS = ((0, 2), (1, 3))
"""With one replica, four nodes keep each other's snapshots in these pairs."""
STEPS = 12
SAVED, DIED = 3, 8


def train(nodes: Cluster, lost: tuple[int, ...], *, kind: str = "ddp", **life: object) -> list[Lived]:
    """A life that ends with the loss of some nodes while step DIED + 1 is trained; what its ranks said."""
    memory = life.pop("memory", {"replicas": 1})
    places = life.pop("places", PLACES)
    assert isinstance(places, tuple)
    nodes.start(places, kind=kind, steps=STEPS, memory=memory, stops=(DIED,), **life)
    nodes.await_step(DIED, len(places))
    for number in lost:
        nodes.kill_node(number, places)
    lived = nodes.finish()
    for number in lost:
        nodes.nodes[number].lose(renamed=number % 2 == 0)
    assert {one.newest for one in lived} == {DIED}, [(one.newest, one.error) for one in lived]
    return lived


def loads(lived: list[Lived]) -> list[tuple[int, str | None]]:
    return [(one.loaded["step"], one.loaded["tier"]) if one.loaded else (-1, one.error) for one in lived]


def test_two_nodes_of_different_groups(cluster: Make) -> None:
    nodes = cluster(4)
    train(nodes, (0, 1), kind="fsdp")
    lived = nodes.live(PLACES, kind="fsdp", steps=STEPS, memory={"replicas": 1})
    assert len(set(loads(lived))) == 1 and loads(lived)[0] in ((DIED, "memory"), (DIED - 1, "memory"))
    assert [one.hashes for one in lived] == undisturbed("fsdp", 4, STEPS)
    assert nodes.durable() == []


@pytest.mark.parametrize("saved", [True, False])
def test_two_nodes_that_kept_each_others_snapshots(cluster: Make, saved: bool) -> None:
    """Cannot be saved: what is durable counts, and it is said; without anything durable the run begins anew."""
    nodes = cluster(4)
    train(nodes, GROUPS[0], save_at=(SAVED,) if saved else ())
    lived = nodes.live(PLACES, kind="ddp", steps=STEPS, memory={"replicas": 1})
    assert loads(lived) == [(SAVED, "disk") if saved else (0, None)] * 4
    for one in lived:
        told = [*(one.loaded or {})["skipped"], *one.warned]
        assert any("rank(s) [0, 2]" in text for text in told), told
    assert [one.hashes for one in lived] == undisturbed("ddp", 4, STEPS)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_a_job_goes_on_with_fewer_nodes_from_memory(cluster: Make, kind: str) -> None:
    nodes = cluster(4)
    former = train(nodes, (3,), kind=kind, whole=True)
    lived = nodes.live((0, 1, 2), kind=kind, steps=STEPS, memory={"replicas": 1}, whole=True)
    assert len(set(loads(lived))) == 1 and loads(lived)[0] in ((DIED, "memory"), (DIED - 1, "memory"))
    step = loads(lived)[0][0]
    (then,) = [fact["whole"] for fact in former[0].steps if fact["step"] == step]
    assert {(one.loaded or {})["whole"] for one in lived} == {then}
    assert all(one.closed and not one.error for one in lived), [one.error for one in lived]
    assert nodes.durable() == []
    newest = {at for _, incarnation, at in nodes.nodes[0].snapshots(Kind.OWN) if incarnation == 2}
    assert max(newest) == STEPS
