"""``bench memory`` runs, small, between two simulated nodes, and compares what comes back; numbers of this size mean
nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from everstep.benchmarks import memory_tier
from everstep.benchmarks.common import Mismatch, workspace
from everstep.benchmarks.memory_ranks import NODES, Config

FIELDS = (
    "eager_blocking_vs_copy", "overlap_blocking_vs_copy", "replication_vs_sockets", "replication_vs_gloo",
    "own_arena_recovery_vs_copy", "peer_recovery_vs_receive",
)  # fmt: skip


@pytest.mark.timeout(300)
def test_it_measures_everything_and_leaves_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    before = set(os.listdir("/dev/shm"))
    found = memory_tier.run_memory(4, 1, tmp_path, told.append)
    assert os.listdir(tmp_path) == []
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("everstep-bench-")]
    for name in FIELDS:
        assert found[name] > 0, name
    assert found["step_slowdown"] > -1
    for name in ("trainer_cpu_s", "agent_cpu_s", "holder_cpu_s"):
        assert found[name] >= 0, name
    for name in ("replication", "sockets", "gloo", "own_arena", "peer", "receive", "loop_without"):
        assert 0 < found[name]["min_s"] <= found[name]["median_s"] <= found[name]["max_s"]
    assert abs(found["size_bytes"] - (4 << 20)) < 0.05 * (4 << 20)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_comes_back_changed_does_not_count(tmp_path: Path) -> None:
    with workspace(tmp_path) as work, memory_tier._shared_directory() as shared:
        config = Config("replicate", str(work), str(shared), "", 0, 1 << 20, 1)
        sent = memory_tier._launch(config, len(NODES))
        wrong = [sent.hashes[1], sent.hashes[0], *sent.hashes[2:]]
        with pytest.raises(Mismatch, match="2 of"):
            memory_tier._launch(replace(config, mode="recover", expected=wrong), len(NODES))
