"""Real networks: each node in a network namespace of its own; the link between the agents goes down in mid run."""

from __future__ import annotations

import pytest
from everstep.memory.header import Kind

from .conftest import Make
from .netns import networks, why_not
from .schedules import undisturbed

PLACES = (0, 1, 2, 3)
CUT, HOLDER = 0, 2
STOPS = (4, 10)
STEPS = 14


def test_a_link_goes_down_and_comes_back_and_its_node_is_lost(cluster: Make) -> None:
    if reason := why_not():
        pytest.skip(reason)
    nodes = cluster(len(PLACES))
    memory = {"replicas": 1, "replica_timeout_s": 1.5}
    with networks(len(PLACES)) as net:
        for node in nodes.nodes:
            node.address = net.address(node.number)
        enter = net.enter(PLACES)
        nodes.start(PLACES, enter=enter, kind="ddp", steps=STEPS, memory=memory, stops=STOPS)
        nodes.await_step(STOPS[0], len(PLACES))
        net.cut(CUT)
        nodes.go(STOPS[0])
        nodes.await_step(STOPS[1], len(PLACES))
        for rank in PLACES:
            told = nodes.warnings(rank)
            assert any("not protected" in text or "cannot be reached" in text for text in told), (rank, told)
        net.mend(CUT)
        nodes.until(
            lambda: (CUT, 1, STOPS[1]) in nodes.nodes[HOLDER].snapshots(Kind.HELD), "it is protected again"
        )
        nodes.go(STOPS[1])
        nodes.await_step(STOPS[1] + 2, len(PLACES))
        nodes.kill_node(CUT, PLACES)
        newest = max(one.newest for one in nodes.finish())
        nodes.nodes[CUT].lose(renamed=True)
        nodes.start(PLACES, enter=enter, kind="ddp", steps=STEPS, memory=memory)
        lived = nodes.finish()
        assert all((one.loaded or {})["step"] >= newest - 1 for one in lived)
        assert {(one.loaded or {})["tier"] for one in lived} == {"memory"}
        assert [one.hashes for one in lived] == undisturbed("ddp", len(PLACES), STEPS)
        assert nodes.durable() == []
        for node in nodes.nodes:
            node.end()
