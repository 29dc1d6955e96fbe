"""``bench dcp`` runs, small, and compares what comes back; numbers of this size mean nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from everstep.benchmarks.dcp import LOAD_RANKS, STAGES, run_dcp
from everstep.cli import bench

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_it_measures_all_ways(tmp_path: Path) -> None:
    told: list[str] = []
    found = run_dcp(4, 1, tmp_path, told.append, small_tensors=20)
    assert len(told) == STAGES == bench.STAGES["dcp"] and os.listdir(tmp_path) == []
    for prefix in ("", "small_"):
        for name in ("blocking", "durable", *(f"load_{world}" for world in LOAD_RANKS)):
            for way in ("stock", "dcp", "checkpointer"):
                assert found[f"{prefix}{way}_{name}"]["median_s"] > 0
            for way in ("dcp", "checkpointer"):
                assert found[f"{prefix}{way}_{name}_vs_stock"] > 0
    assert found["size_bytes"] == 4 << 20
