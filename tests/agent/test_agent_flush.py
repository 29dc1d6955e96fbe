"""Flushes through a real agent process: commit, one verdict for all ranks, rotation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from agent_kit import Place, Trainer, TrainerProcess, until
from everstep.errors import from_wire

Start = Callable[..., TrainerProcess]


def test_two_ranks_commit_through_one_agent(place: Place, start: Start) -> None:
    place.incarnation(world=2)
    ranks = [start(rank, 2) for rank in range(2)]
    for trainer in ranks:
        trainer.send("connect")
    for trainer in ranks:
        trainer.answer()
    for trainer in ranks:
        trainer.call("save", 3)
    assert [trainer.call("verdict", 3)[0] for trainer in ranks] == ["committed", "committed"]
    place.check(1, 3, world=2)
    stages = [stage for stage, _, _ in ranks[0].call("poll")]
    assert stages.count("queued") == 2 and stages.count("voted") == 2 and stages[-1] == "committed"
    for trainer in ranks:
        trainer.call("bye", True)
    agent = place.agent()
    until(lambda: place.agent() is None, "the agent's end after it has lingered")
    assert agent is None or not agent.alive()
    assert not (place.settings.runtime_dir / "agent.sock").exists()
