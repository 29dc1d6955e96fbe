"""Random stories of a run, against a model in plain dicts."""

from __future__ import annotations

import random

import pytest
from everstep.store import fsck
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from .machine import Checkpoints

FAST_EXAMPLES, FAST_STEPS = 6, 14
LONG_EXAMPLES, LONG_STEPS = 150, 40


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is at work who might decide an attempt meanwhile."""
    monkeypatch.setattr(fsck, "DECISION_WAIT_S", 0.0)


def tell(examples: int, steps: int) -> None:
    number = random.randrange(2**32)
    print(f"seed {number}")
    run_state_machine_as_test(
        seed(number)(Checkpoints),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=False,
            print_blob=True,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(110)
def test_some_stories() -> None:
    tell(FAST_EXAMPLES, FAST_STEPS)


@pytest.mark.long
@pytest.mark.timeout(1700)
def test_many_stories() -> None:
    tell(LONG_EXAMPLES, LONG_STEPS)
