"""Repair out of the memory of another node, whose agent protects a job: two nodes, each with an agent of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from everstep.format import names

from tests.nodes.cluster import Cluster, Node
from tests.repair.damages import flip

STEP = 2
IMAGES = [names.image(STEP, 1, 1, rank, image) for rank in (0, 1) for image in ("model", "optimizer")]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, 2)
    yield made
    print(made.told())
    made.close()


def fsck(nodes: Cluster, at: Node, runtime: Path, memory: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "EVERSTEP_NODE": at.name, "EVERSTEP_RUNTIME_DIR": str(runtime)}
    arguments = ["fsck", str(nodes.root), "--repair", "--json", "--memory", str(memory)]
    return subprocess.run(
        [sys.executable, "-m", "everstep.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
    )


def test_what_is_bad_on_disk_is_mended_from_the_other_nodes_memory(nodes: Cluster, tmp_path: Path) -> None:
    """With the secret that the job made for itself: the node's own agent has it; elsewhere nobody is asked."""
    empty = tmp_path / "empty"
    empty.mkdir()
    nodes.start(
        (0, 1),
        kind="fsdp",
        steps=STEP,
        memory={"replicas": 1},
        policy={"heartbeat_s": 0.2, "full_every": None},
        save_at=(STEP,),
        stops=(STEP,),
    )
    nodes.await_step(STEP, 2)
    nodes.until(lambda: len(list(nodes.root.glob("live/*.json"))) == 2, "both nodes' beacons")
    here = nodes.nodes[0]
    there = [path for path in map(nodes.root.joinpath, IMAGES) if path.exists()]
    good = {path: path.read_bytes() for path in there}
    assert len({path.name.split(".")[0] for path in there}) == 2, there
    for path in there:
        flip(-5)(path)
    said = fsck(nodes, here, empty, empty)
    assert said.returncode == 4, said.stdout + said.stderr
    [told] = [one for one in json.loads(said.stdout)["findings"] if one["kind"] == "peer"]
    assert "the run's secret is not known here" in told["message"]
    said = fsck(nodes, here, here.runtime, empty)
    assert said.returncode == 1, said.stdout + said.stderr
    assert {path: path.read_bytes() for path in there} == good
    found = json.loads(said.stdout)
    assert [one for one in found["findings"] if one["kind"] == "peer"] == []
    assert all(one["how"].endswith(f"memory of node {nodes.nodes[1].name}") for one in found["repaired"])
    nodes.go(STEP)
    assert all(lived.closed and not lived.error for lived in nodes.finish())
