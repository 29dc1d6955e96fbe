"""Parity over six nodes, four parts and two of parity: whichever two are lost, the run goes on from memory."""

from __future__ import annotations

import itertools
import random

import pytest

from .conftest import Make
from .schedules import undisturbed
from .test_losses import DIED, STEPS, loads, train

PLACES = (0, 1, 2, 3, 4, 5)
MEMORY = {"parity": (4, 2)}
PAIRS = list(itertools.combinations(PLACES, 2))
SHORT = (1, 4)
LONG = random.Random(4).sample([pair for pair in PAIRS if pair != SHORT], 6)


@pytest.mark.parametrize(
    "lost", [SHORT, *(pytest.param(pair, marks=pytest.mark.long) for pair in LONG)], ids="{0[0]}{0[1]}".format
)
def test_two_of_six(cluster: Make, lost: tuple[int, int]) -> None:
    nodes = cluster(6)
    kind = "fsdp" if sum(lost) % 2 else "ddp"
    train(nodes, lost, kind=kind, places=PLACES, memory=MEMORY)
    lived = nodes.live(PLACES, kind=kind, steps=STEPS, memory=MEMORY)
    assert len(set(loads(lived))) == 1 and loads(lived)[0] in ((DIED, "memory"), (DIED - 1, "memory"))
    sources = [(one.loaded or {})["sources"] for one in lived]
    assert any(one.get("rebuilt") for one in sources), sources
    assert [one.hashes for one in lived] == undisturbed(kind, 6, STEPS)
    assert nodes.durable() == []


@pytest.mark.long
def test_three_of_six_are_too_many(cluster: Make) -> None:
    nodes = cluster(6)
    train(nodes, (0, 2, 5), places=PLACES, memory=MEMORY, save_at=(3,))
    lived = nodes.live(PLACES, kind="ddp", steps=STEPS, memory=MEMORY)
    assert loads(lived) == [(3, "disk")] * 6
    assert [one.hashes for one in lived] == undisturbed("ddp", 6, STEPS)
