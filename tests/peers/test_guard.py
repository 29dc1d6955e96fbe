"""Agents of several nodes protect a job's snapshots: what is protected, W, and what happens when one is lost."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from everstep.errors import MemoryTooSmall

from .guard_kit import CHUNK, SOON_S, Job, until
from .proxy import Fault, Proxy

Start = Callable[..., Job]

GONE_S = 1.5
"""After how long training goes on without a peer, where a test has one go."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def begin(*args: Any, **options: Any) -> Job:
        job = Job(tmp_path, *args, **options)
        jobs.append(job)
        return job.open()

    yield begin
    for job in jobs:
        job.end()


def occupy(sock: socket.socket, address: str) -> bool:
    """Listen there, once a dying process has let go of it."""
    host, _, port = address.rpartition(":")
    try:
        sock.bind((host, int(port)))
    except OSError:
        return False
    sock.listen()
    return True


@pytest.mark.parametrize(("nodes", "per_node", "copies"), [(2, 1, 1), (2, 2, 1), (3, 1, 2)])
def test_w_is_what_is_protected_on_all_nodes(start: Start, nodes: int, per_node: int, copies: int) -> None:
    job = start(nodes, per_node, copies)
    assert {rank.complete for rank in job.ranks} == {-1}
    for step in (3, 4, 7):
        job.snapshot(step)
        job.await_complete(step)
        assert {rank.protected for rank in job.ranks} == {step}
    for index, kept_by in enumerate(job.map.holders()):
        for holder in kept_by:
            for rank in job.nodes[index].ranks:
                assert job.nodes[holder].held()[rank.rank] == {(1, 4), (1, 7)}
                job.nodes[holder].check_held(rank.rank, (1, 7), 3 * CHUNK)
    status = job.nodes[0].status()
    assert (status["complete"], status["protected"], status["unprotected"]) == (7, 7, [])
    assert {one["protected"] for one in status["nodes"].values()} == {7}
    assert not {stage for rank in job.ranks for stage in rank.stages()} & {"peer_failed", "unprotected"}


def test_w_waits_for_every_rank(start: Start) -> None:
    job = start(2, 2)
    job.snapshot(1)
    job.await_complete(1)
    for rank in job.ranks[:3]:
        rank.snapshot(2)
    until(lambda: job.nodes[0].ranks[0].protected == 2, "the first node's snapshot at the second's")
    assert not job.complete_is(2) and job.nodes[1].ranks[0].protected == 1
    job.ranks[3].snapshot(2)
    job.await_complete(2)


def test_a_peers_agent_is_killed_in_mid_transfer(start: Start) -> None:
    """Training goes on, the older replica stays usable, the error is told, and protection comes back."""
    env = {1: {"EVERSTEP_AGENT_POINTS": "kill:keeper.begun:2"}}
    job = start(2, 1, env=env, slots=4)
    job.snapshot(1)
    job.await_complete(1)
    killed = job.nodes[1].agent()
    job.snapshot(2)
    until(lambda: killed is None or not killed.alive(), "the death of the agent")
    assert job.nodes[1].held() == {0: {(1, 1)}}
    job.snapshot(3)
    job.await_complete(3)
    job.nodes[1].check_held(0, (1, 3), 3 * CHUNK)
    assert job.nodes[0].status()["unprotected"] == []
    assert "agent_lost" in job.ranks[1].stages()


def test_a_node_without_an_agent_holds_nobody_up(start: Start) -> None:
    """The hub goes on without it, aloud; when it is back, W waits for it again."""
    job = start(3, 1, timeout_s=GONE_S)
    job.snapshot(1)
    job.await_complete(1)
    job.await_protected(1)
    agent = job.nodes[1].agent()
    assert agent is not None
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        job.snapshot(2)
        rank = job.ranks[0]

        def is_told() -> bool:
            rank.stages()  # hears what there is
            told = [one.error for one in rank.heard if one.stage == "unprotected"]
            return any(
                "n1" in error["message"] for error in told if error
            )  # a busy machine has others late, too

        until(lambda: is_told() and rank.complete == 2, "W without it")
        assert rank.protected == 1 and "peer_failed" not in rank.stages()
        job.ranks[0].snapshot(3)
        job.ranks[2].snapshot(3)
        until(lambda: rank.complete == 3, "W without it")
    finally:
        os.kill(agent.pid, signal.SIGCONT)
    job.ranks[1].snapshot(3)
    for step in (4, 5, 6):
        job.snapshot(step)
        job.await_complete(step)
    until(lambda: "protected" in rank.stages(), "word that it is back")
    until(lambda: {one.protected for one in job.ranks} == {6}, "protection of the newest step")
    until(lambda: job.nodes[0].status()["unprotected"] == [], "the hub's word that nobody is missing")


def test_the_hub_is_killed(start: Start) -> None:
    """Its trainer starts it anew; it listens on the same port, and W goes on."""
    job = start(3, 1)
    job.snapshot(1)
    job.await_complete(1)
    address = job.nodes[0].status()["address"]
    first = job.nodes[0].kill_agent()
    until(lambda: first is None or not first.alive(), "the death of the hub")
    job.snapshot(2)
    job.await_complete(2)
    status = job.nodes[0].status()
    assert status["address"] == address and status["complete"] == 2
    job.nodes[1].check_held(0, (1, 2), 3 * CHUNK)


def test_without_a_hub_each_node_goes_on_alone(start: Start) -> None:
    job = start(3, 1, timeout_s=GONE_S)
    job.snapshot(1)
    job.await_complete(1)
    agent = job.nodes[0].agent()
    assert agent is not None
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        for rank in job.ranks[1:]:
            rank.snapshot(2)
        until(lambda: all(rank.complete == 2 for rank in job.ranks[1:]), "W of each node alone")
        for rank in job.ranks[1:]:
            told = [one.error["message"] for one in rank.hear() if one.stage == "unprotected" and one.error]
            assert any("n0" in text for text in told), told
    finally:
        os.kill(agent.pid, signal.SIGCONT)
    job.ranks[0].snapshot(2)
    job.snapshot(3)
    job.await_complete(3)
    until(lambda: all("protected" in rank.stages() for rank in job.ranks[1:]), "word that the hub is back")


def test_an_agent_that_starts_anew_goes_on_from_its_journal(start: Start) -> None:
    """Nobody but its journal tells it what to do; its port is taken, so it tells the others where it is now."""
    job = start(2, 1, linger_s=30.0, timeout_s=SOON_S)
    job.snapshot(1)
    job.await_complete(1)
    node = job.nodes[1]
    address = node.status()["address"]
    first = node.kill_agent()
    until(lambda: first is None or not first.alive(), "the death of the agent")
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        until(lambda: occupy(taken, address), "the port")
        job.snapshot(2)
        job.await_complete(2)
        assert node.status()["address"] != address
    node.check_held(0, (1, 2), 3 * CHUNK)


def test_the_agent_of_a_dead_trainer_sends_and_keeps_on(start: Start) -> None:
    job = start(2, 1, linger_s=30.0, mortal={1})
    job.snapshot(1)
    job.await_complete(1)
    job.ranks[1].snapshot(2)
    job.die(1)
    job.ranks[0].snapshot(2)
    job.await_complete(2)
    assert {rank.protected for rank in job.ranks} == {2}
    for holder, rank in ((0, 1), (1, 0)):
        job.nodes[holder].check_held(rank, (1, 2), 3 * CHUNK)
    assert job.nodes[1].agent() is not None


def test_a_holder_without_memory_is_told_before_the_first_step(start: Start) -> None:
    with pytest.raises(MemoryTooSmall):
        start(2, 1, told_bytes=1 << 50)


def test_a_flushing_goodbye_of_all_frees_what_is_held(start: Start) -> None:
    job = start(2, 2)
    job.snapshot(1)
    job.await_complete(1)
    first, second, *others = job.ranks
    first.client.bye(timeout_s=SOON_S, flush=True, safe=True)
    assert set(job.nodes[0].held()) == {2, 3}, "one of two ranks is still there"
    second.client.bye(timeout_s=SOON_S, flush=True, safe=True)
    until(lambda: job.nodes[0].held() == {}, "the end of what the first node held")
    assert set(job.nodes[1].held()) == {0, 1}
    for rank in others:
        rank.client.bye(timeout_s=SOON_S, flush=True, safe=True)
    until(lambda: job.nodes[1].held() == {}, "the end of what the second node held")


def test_an_unsafe_goodbye_frees_nothing(start: Start) -> None:
    job = start(2, 1, linger_s=0.3)
    job.snapshot(1)
    job.await_complete(1)
    agents = [node.agent() for node in job.nodes]
    for rank in job.ranks:
        rank.client.bye(timeout_s=SOON_S, flush=False)
    for agent in agents:
        until(lambda agent=agent: agent is None or not agent.alive(), "the end of an agent")
    assert job.nodes[0].held() == {1: {(1, 1)}} and job.nodes[1].held() == {0: {(1, 1)}}


def test_the_next_incarnation_frees_the_former_ones_snapshots(start: Start) -> None:
    """Not before it has a W of its own."""
    job = start(3, 1)
    job.snapshot(5)
    job.await_complete(5)
    job.reopen(2)
    assert job.nodes[1].held()[0] == {(1, 5)}
    assert job.nodes[0].held() == {1: set(), 2: {(1, 5)}}
    job.snapshot(6)
    job.await_complete(6)
    job.snapshot(7)
    job.await_complete(7)
    until(
        lambda: all(key[0] == 2 for node in job.nodes for keys in node.held().values() for key in keys),
        "room",
    )


class Behind(Job):
    """Others reach the agent of the second node through a network that does what a test asks for."""

    proxy: Proxy

    def place_of(self, index: int, host: str, port: int) -> tuple[str, int]:
        if index != 1:
            return host, port
        self.proxy = Proxy(host, port)
        return self.proxy.host, self.proxy.port

    def end(self) -> None:
        super().end()
        self.proxy.close()


LARGE = 300_000
"""Bytes of a snapshot of which a part comes through, and a part does not."""


def test_a_network_that_stalls_in_mid_transfer(tmp_path: Path) -> None:
    """Training goes on, told; the older replica stays; protection is back once the network is."""
    job = Behind(tmp_path, 2, 1, timeout_s=1.0)
    try:
        job.open()
        job.snapshot(1, LARGE)
        job.await_complete(1)
        job.await_protected(1)
        carried = job.proxy.carried["up"]
        job.proxy.faults.append(Fault("stall", LARGE // 2))
        job.proxy.cut()  # the next connection stalls
        rank = job.ranks[0]
        job.snapshot(2, LARGE)
        assert job.proxy.stalled.wait(SOON_S)
        until(lambda: "unprotected" in rank.stages() and job.complete_is(2), "W without it")
        assert (1, 1) in job.nodes[1].held()[0] and (1, 2) not in job.nodes[1].held()[0]
        job.nodes[1].check_held(0, (1, 1), LARGE)
        told = next(one for one in rank.heard if one.stage == "unprotected")
        assert told.error is not None and "n0" in told.error["message"]
        job.snapshot(3, LARGE)
        job.await_complete(3)
        job.proxy.release()
        until(lambda: rank.protected >= 2 and "protected" in rank.stages(), "protection")
        job.snapshot(4, LARGE)
        until(lambda: job.complete_is(4) and rank.protected == 4, "protection of the newest step")
        job.nodes[1].check_held(0, (1, 4), LARGE)
        assert job.proxy.carried["up"] > carried
    finally:
        job.end()


def test_a_network_that_closes_or_flips_in_mid_transfer(tmp_path: Path) -> None:
    """Tried again: nobody waits long, and what is kept are the right bytes."""
    job = Behind(tmp_path, 2, 1, timeout_s=SOON_S)
    try:
        job.open()
        for step, what in enumerate(("close", "flip", "close"), 1):
            job.proxy.faults.append(Fault(what, LARGE // 2))  # type: ignore[arg-type]
            job.proxy.cut()
            job.snapshot(step, LARGE)
            job.await_complete(step)
            assert job.proxy.struck == step
            job.nodes[1].check_held(0, (1, step), LARGE)
        assert "unprotected" not in job.ranks[0].stages()
        assert job.nodes[0].status()["holders"]["n1"] == {"step": 3, "error": None}
    finally:
        job.end()


def test_a_network_that_refuses_is_told_once_each_time(tmp_path: Path) -> None:
    job = Behind(tmp_path, 2, 1, timeout_s=GONE_S)
    try:
        job.open()
        job.snapshot(1)
        job.await_complete(1)
        job.await_protected(1)
        rank = job.ranks[0]
        for step in (2, 3):
            job.proxy.refusing = True
            job.proxy.cut()
            job.snapshot(step)
            job.await_complete(step)
            until(
                lambda step=step: rank.stages().count("unprotected") == step - 1, "the word that it is gone"
            )
            assert rank.stages().count("peer_failed") == step - 1
            job.proxy.refusing = False
            until(lambda step=step: rank.stages().count("protected") == step - 1, "the word that it is back")
        assert rank.protected == 3
        log = job.nodes[0].log()
        assert "node n1, step 2, try 1:" in log and "try 2:" in log and "try 3:" not in log, (
            "ever more seldom"
        )
    finally:
        job.end()
