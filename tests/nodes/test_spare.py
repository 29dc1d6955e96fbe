"""A hot spare: a node without ranks keeps every rank's snapshots, and takes over a lost node's ranks from its own
memory."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from everstep.memory.header import Kind

from .cluster import Cluster
from .conftest import Make
from .schedules import undisturbed
from .test_losses import DIED, PLACES, STEPS, loads, train

LOST, SPARE = 1, 4


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextmanager
def spare(nodes: Cluster, port: int, secret: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """``everstep spare`` on the fifth node, for as long as the block runs."""
    place = nodes.nodes[SPARE].place
    command = [sys.executable, "-m", "everstep.cli", "spare", str(nodes.root)]
    command += ["--listen", f"127.0.0.1:{port}", "--memory", place.arenas]
    environment = {
        **os.environ,
        **secret,
        "EVERSTEP_NODE": place.name,
        "EVERSTEP_RUNTIME_DIR": place.runtime,
    }
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        finally:
            process.kill()
            process.communicate()


def begin_run(nodes: Cluster) -> None:
    """A run that a spare can be of: made, with nothing in it that counts."""
    lived = nodes.live(PLACES, kind="ddp", steps=1, memory={})
    assert all(one.closed for one in lived), [one.error for one in lived]
    for number in PLACES:
        nodes.nodes[number].lose(renamed=False)


def test_a_spare_takes_over_from_its_own_memory(cluster: Make) -> None:
    nodes = cluster(5)
    begin_run(nodes)
    port, secret = free_port(), {"EVERSTEP_SECRET": secrets.token_hex(32)}
    memory = {"replicas": 1, "spares": (f"127.0.0.1:{port}",)}
    with spare(nodes, port, secret):
        train(nodes, (LOST,), memory=memory, policy={"linger_s": 5.0}, environment=secret)
        held = nodes.nodes[SPARE].snapshots(Kind.HELD)
        assert {rank for rank, _, _ in held} == {0, 1, 2, 3}
    places = (0, SPARE, 2, 3)
    lived = nodes.live(places, kind="ddp", steps=STEPS, memory={"replicas": 1})
    assert len(set(loads(lived))) == 1 and loads(lived)[0] in ((DIED, "memory"), (DIED - 1, "memory"))
    sources = (lived[1].loaded or {})["sources"]
    assert sources.get("held", 0) > 0 and not sources.get("peer") and not sources.get("disk"), sources
    assert [one.hashes for one in lived] == undisturbed("ddp", 4, STEPS)
    assert nodes.durable() == []
