"""Rollback where other nodes keep snapshots: what they keep of steps that were gone back from never wins."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import everstep
import pytest
import torch
from everstep.memory.header import Kind

from tests.exchange.conftest import job, nodes, root
from tests.exchange.kit import WAIT_S, Job, erase, load_on
from tests.facade.kit import until
from tests.recover.kit import contents, pins, state_with, update

__all__ = ["job", "nodes", "root"]

Say = Callable[..., None]
OTHER = 100
"""What is saved of a step after the rollback has the contents of that many steps later."""


@pytest.mark.parametrize("device_slots", [0, 1])
def test_a_lost_node_comes_back_to_the_new_incarnations_step(
    root: Path, nodes: list[str], job: Job, device_slots: int
) -> None:
    a, b = nodes[:2]

    def protected(ckpt: everstep.Checkpointer, step: int) -> object:
        def look() -> bool:
            assert ckpt._session is not None
            ckpt._session.hear()
            return bool(ckpt.status()["newest_protected"] == step)

        return until(look, f"protection of step {step}")

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        values = contents(rank, 0)
        state = state_with(values)
        ckpt.load(state)
        for step in range(1, 5):
            update(values, contents(rank, step))
            ckpt.step(step, state)
        protected(ckpt, 4)
        say(ckpt.rollback(3, reason="a spike"))
        assert torch.equal(values["own"]["w"], contents(rank, 3)["own"]["w"])
        update(values, contents(rank, 4 + OTHER))
        ckpt.step(4, state)
        protected(ckpt, 4)
        say("protected")
        threading.Event().wait(WAIT_S)

    memory = everstep.Memory(replicas=1, device_slots=device_slots)
    for rank in job.start([a, b], body, memory=memory):
        assert (rank.line(), rank.line()) == ("3", "protected")
    job.kill()
    with pins(root, b, Kind.HELD) as held:
        assert {pin.info.key for _, pin in held} >= {(2, 4)}
    erase(root, a)
    found = load_on(root, [a, b])
    assert [(one.recovery.incarnation, one.recovery.step) for one in found if one.recovery] == [(2, 4)] * 2
