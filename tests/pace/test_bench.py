"""``everstep bench pace`` runs, small; numbers of this size mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from everstep.benchmarks import pace
from everstep.cli.bench import _pace_text

MIB = 1 << 20


def test_all_modes_are_measured_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "STAGE_S": 0.4,
        "SETTLE_S": 0.0,
        "DATA_BYTES": 16 * MIB,
        "READ_S": 0.005,
        "COMPUTE_S": 0.005,
    }.items():
        monkeypatch.setattr(pace, name, value)
    told: list[str] = []
    found = pace.run_pace(4, 2, tmp_path, told.append)
    assert told == ["making the data", "warming up", "repeat 1", "repeat 2"]
    assert [mode["name"] for mode in found["modes"]] == ["no limit", "fixed", "adaptive"]
    for mode in found["modes"]:
        assert mode["flushed_bytes_per_s"] > 0
        assert mode["slowdown_min"] <= mode["slowdown"] <= mode["slowdown_max"]
        assert found[f"slowdown_{mode['name'].replace(' ', '_')}"] == mode["slowdown"]
    assert found["repeats"] == 2 and found["step_alone_s"] > 0
    assert list(tmp_path.iterdir()) == []
    text = _pace_text(found)
    assert "adaptive" in text and "2 repeats" in text
