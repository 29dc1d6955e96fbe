"""Random stories of a run, against a model in plain dicts."""

from __future__ import annotations

import os
import random

import pytest
from everstep.store import fsck
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from .machine import Checkpoints

FAST_EXAMPLES, FAST_STEPS = 4, 14
LONG_EXAMPLES, LONG_STEPS = 150, 40

GIVEN = os.environ.get("EVERSTEP_MACHINE_SEED")
"""The seed of a run that failed: it is run again, and its story made as short as can be, however long that takes."""


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is at work who might decide an attempt meanwhile."""
    monkeypatch.setattr(fsck, "DECISION_WAIT_S", 0.0)


def tell(examples: int, steps: int) -> None:
    number = int(GIVEN) if GIVEN else random.randrange(2**32)
    print(f"EVERSTEP_MACHINE_SEED={number}")
    run_state_machine_as_test(
        seed(number)(Checkpoints),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=False,
            print_blob=True,
            database=None,
            phases=(Phase.generate, Phase.shrink) if GIVEN else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(600 if GIVEN else 110)
def test_some_stories() -> None:
    tell(FAST_EXAMPLES, FAST_STEPS)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_many_stories() -> None:
    tell(LONG_EXAMPLES, LONG_STEPS)
