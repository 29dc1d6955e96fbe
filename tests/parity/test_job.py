"""A job with ``Memory(parity=)`` through the public face: nodes are lost with all that is theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import everstep
import pytest
from everstep.errors import BadOption

from tests.exchange.kit import Job, contents, erase, manifests, state_with
from tests.facade.kit import Forked

WAIT_S = 40.0


def train(job: Job, places: Sequence[str], parity: tuple[int, int], last: int) -> list[Forked]:
    """Ranks that load, make the steps up to ``last`` and then wait; each has said from which step it went on, and
    whether that was in memory."""

    def body(rank: int, ckpt: everstep.Checkpointer, say: Callable[..., None]) -> None:
        values = contents(rank, 0)
        state = state_with(values)
        start = ckpt.load(state) or 0
        if start:
            assert values["n"] == start * 10 + rank
            assert (values["w"] == contents(rank, start)["w"]).all()
        tier = ckpt.recovery.tier if ckpt.recovery is not None else "nothing"
        for step in range(start + 1, last + 1):
            values.update(contents(rank, step))
            ckpt.step(step, state)
        say(f"{start} {tier}")
        threading.Event().wait(WAIT_S)

    memory = everstep.Memory(parity=parity, bytes=1 << 20)
    return job.start(places, body, memory=memory, policy={"full_every": None})


@pytest.mark.parametrize(("parity", "lost"), [((2, 1), [1]), ((2, 2), [0, 3])])
def test_lost_nodes_cost_a_step(
    root: Path, nodes: list[str], job: Job, parity: tuple[int, int], lost: list[int]
) -> None:
    places = nodes[: sum(parity)]
    assert [rank.line() for rank in train(job, places, parity, 5)] == ["0 nothing"] * len(places)
    job.kill()
    for at in lost:
        erase(root, places[at])
    fresh = [f"{nodes[0]}-fresh{at}" if at in lost else node for at, node in enumerate(places)]
    said = [rank.line() for rank in train(job, fresh, parity, 8)]
    assert set(said) <= {"4 memory", "5 memory"} and len(set(said)) == 1, said
    assert manifests(root) == []


def test_too_few_nodes_are_refused(root: Path, nodes: list[str], job: Job) -> None:
    def body(rank: int, ckpt: everstep.Checkpointer, say: Callable[..., None]) -> None:
        state = state_with(contents(rank, 0))
        try:
            ckpt.load(state)
            ckpt.step(1, state)
        except BadOption as error:
            say(str(error))

    for rank in job.start(nodes[:2], body, memory=everstep.Memory(parity=(2, 2))):
        assert "needs more than 2 nodes" in rank.line()
