"""A job that is killed and started again under another mesh finds the newest step that must still exist, and exactly
that, on every rank.

A failing seed is run again by ``WORLDS_SEEDS=17 pytest tests/matrix``; several are separated by commas.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .worlds import AGENT_POINTS, POINTS, SMALL, Plan, run_seed, told

GIVEN = [int(text) for text in os.environ.get("WORLDS_SEEDS", "").split(",") if text]
SHORT = {20: 3}
"""Seeds of the normal suite, and how many lives of each."""
LONG = range(100, 130)


def hold(seed: int, base: Path, *, lives: int | None = None) -> None:
    print(f"WORLDS_SEEDS={seed}")
    run = run_seed(seed, base, lives=lives, small=lives is not None)
    assert not run.problems, f"WORLDS_SEEDS={seed}\n{told(run)}"


@pytest.mark.parametrize("seed", SHORT)
def test_another_world_finds_what_the_former_left(tmp_path: Path, seed: int) -> None:
    hold(seed, tmp_path, lives=SHORT[seed])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", LONG)
def test_many_worlds(tmp_path: Path, seed: int) -> None:
    hold(seed, tmp_path)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not GIVEN, reason="no seed is asked for by WORLDS_SEEDS")
@pytest.mark.parametrize("seed", GIVEN)
def test_given_seeds(tmp_path: Path, seed: int) -> None:
    hold(seed, tmp_path)


def test_seeds_are_themselves_and_cover_everything() -> None:
    plans = [Plan.of(seed) for seed in range(400)]
    assert plans == [Plan.of(seed) for seed in range(400)]
    lives = [life for plan in plans for life in plan.lives]
    after = [one for plan in plans for one in plan.after]
    assert {life.mesh for life in lives} >= set(SMALL) and {life.agent for life in lives} == {
        "process",
        "inline",
    }
    points = {fate.point for life in lives for fate in life.fates}
    assert points >= set(POINTS) and points & set(AGENT_POINTS)
    assert {life.agent_point.partition(":")[0] for life in lives} >= set(AGENT_POINTS)
    assert {one.damage for one in after} == {None, "flip", "shorten", "remove"}
    assert {one.erase for one in after} == {"", "all", "some"}
    assert any(len(set(life.nodes)) > 1 for life in lives)
