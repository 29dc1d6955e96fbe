"""The network between agents breaks while snapshots are on their way: training goes on, what a holder had stays usable,
and the trainers are told."""

from __future__ import annotations

import pytest
from everstep.memory.header import Kind

from .cluster import Cluster
from .conftest import Make
from .proxy import MODES, Proxies, proxies
from .schedules import undisturbed

PLACES = (0, 1, 2, 3)
LOST, HOLDER = 0, 2
"""Of four nodes the first and the third keep each other's snapshots."""
BREAK_AT = 5
STEPS = 16
MID_BYTES = 6000
"""On their way to the holder before the network breaks: less than a snapshot."""


def begin(nodes: Cluster, bad: Proxies, *, timeout_s: float, **life: object) -> None:
    """A life that stops after a step; when this returns, that step is protected."""
    memory = {"replicas": 1, "replica_timeout_s": timeout_s}
    out = nodes.start(
        PLACES, kind="ddp", steps=STEPS, memory=memory, inner=bad.enter(), stops=(BREAK_AT,), **life
    )
    bad.watch(out)
    nodes.await_step(BREAK_AT, len(PLACES))
    nodes.until(
        lambda: (LOST, 1, BREAK_AT) in nodes.nodes[HOLDER].snapshots(Kind.HELD), "the holder has the snapshot"
    )


@pytest.mark.parametrize("mode", [MODES[0], *(pytest.param(m, marks=pytest.mark.long) for m in MODES[1:])])
def test_a_node_lost_in_mid_replication_comes_back_from_the_older_replica(cluster: Make, mode: str) -> None:
    nodes = cluster(len(PLACES))
    with proxies(len(PLACES)) as bad:
        begin(nodes, bad, timeout_s=12.0)
        bad.all[HOLDER].misbehave(mode, MID_BYTES)
        nodes.go(BREAK_AT)
        nodes.await_step(BREAK_AT + 1, len(PLACES))
        nodes.until(lambda: bad.all[HOLDER].hurt, "the network breaks in the middle of a snapshot")
        assert (LOST, 1, BREAK_AT) in nodes.nodes[HOLDER].snapshots(Kind.HELD)
        nodes.kill_node(LOST, PLACES)
        nodes.finish()
    nodes.nodes[LOST].lose(renamed=True)
    lived = nodes.live(PLACES, kind="ddp", steps=STEPS, memory={"replicas": 1})
    assert [(one.loaded or {})["step"] for one in lived] == [BREAK_AT] * 4
    assert {(one.loaded or {})["tier"] for one in lived} == {"memory"}
    assert [one.hashes for one in lived] == undisturbed("ddp", len(PLACES), STEPS)
    assert nodes.durable() == []


@pytest.mark.parametrize("mode", [MODES[1], *(pytest.param(m, marks=pytest.mark.long) for m in MODES[::2])])
def test_training_goes_on_and_is_protected_again(cluster: Make, mode: str) -> None:
    nodes = cluster(len(PLACES))
    with proxies(len(PLACES)) as bad:
        memory = {"replicas": 1, "replica_timeout_s": 1.5}
        stops = (BREAK_AT, STEPS - 4)
        out = nodes.start(PLACES, kind="ddp", steps=STEPS, memory=memory, inner=bad.enter(), stops=stops)
        bad.watch(out)
        nodes.await_step(BREAK_AT, len(PLACES))
        bad.all[HOLDER].misbehave(mode, MID_BYTES)
        nodes.go(BREAK_AT)
        nodes.await_step(STEPS - 4, len(PLACES))
        for rank in range(len(PLACES)):
            told = nodes.warnings(rank)
            assert any("protect" in text for text in told), (rank, told)
        bad.all[HOLDER].behave()
        nodes.until(
            lambda: (LOST, 1, STEPS - 4) in nodes.nodes[HOLDER].snapshots(Kind.HELD), "it is protected again"
        )
        nodes.go(STEPS - 4)
        nodes.await_step(STEPS - 2, len(PLACES))
        nodes.kill_node(LOST, PLACES)
        former = nodes.finish()
    nodes.nodes[LOST].lose(renamed=False)
    lived = nodes.live(PLACES, kind="ddp", steps=STEPS, memory={"replicas": 1})
    newest = max(one.newest for one in former)
    assert all((one.loaded or {})["step"] >= newest - 1 for one in lived)
    assert {(one.loaded or {})["tier"] for one in lived} == {"memory"}
    assert [one.hashes for one in lived] == undisturbed("ddp", len(PLACES), STEPS)
    assert nodes.durable() == []
