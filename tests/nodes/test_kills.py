"""Whole nodes are killed with SIGKILL and their memory erased, at moments drawn from seeds: the run goes on from the
memory of the others, and ends with the very bits of the undisturbed run.

A failing seed is run again by ``NODES_SEEDS=17 pytest tests/nodes/test_kills.py``; several are separated by commas.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .schedules import AGENT_POINTS, POINTS, Schedule, run_schedule, told

GIVEN = [int(text) for text in os.environ.get("NODES_SEEDS", "").split(",") if text]
SHORT = {14: 2, 20: 2}
"""Seeds of the normal suite, and how many nodes die in each."""
LONG = range(100, 160)


def hold(seed: int, base: Path, *, deaths: int | None = None) -> None:
    print(f"NODES_SEEDS={seed}")
    run = run_schedule(Schedule.of(seed, deaths=deaths), base)
    assert not run.problems, f"NODES_SEEDS={seed}\n{told(run)}"


@pytest.mark.parametrize("seed", SHORT)
def test_lost_nodes_cost_a_step(tmp_path: Path, seed: int) -> None:
    hold(seed, tmp_path, deaths=SHORT[seed])


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", LONG)
def test_many_schedules(tmp_path: Path, seed: int) -> None:
    hold(seed, tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not GIVEN, reason="no seed is asked for by NODES_SEEDS")
@pytest.mark.parametrize("seed", GIVEN)
def test_given_seeds(tmp_path: Path, seed: int) -> None:
    hold(seed, tmp_path)


def test_schedules_are_themselves_and_cover_everything() -> None:
    plans = [Schedule.of(seed) for seed in range(300)]
    assert plans == [Schedule.of(seed) for seed in range(300)]
    deaths = [death for plan in plans for death in plan.deaths]
    assert {plan.kind for plan in plans} == {"ddp", "fsdp"} and {plan.shape for plan in plans} == {
        "4x1",
        "2x2",
    }
    assert {plan.copy for plan in plans} == {"eager", "overlap"} and {plan.replicas for plan in plans} == {
        1,
        2,
    }
    assert {death.fate.where for death in deaths} == {"after", "before", "point", "agent", "load"}
    assert {death.fate.point for death in deaths} >= {*POINTS, *AGENT_POINTS}
    assert {death.fate.node for death in deaths} == {0, 1, 2, 3}
    assert {death.renamed for death in deaths} == {death.erased for death in deaths} == {True, False}
    assert any(death.moved != tuple(sorted(death.moved)) for death in deaths)
