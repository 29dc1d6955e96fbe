"""A rank's signs of life in its arena."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from everstep.heartbeat import Heartbeat
from everstep.memory.arena import Arena

from tests.facade.kit import Forked, arenas_of, opened, until

from .kit import QUICK

SETTINGS: dict[str, Any] = {
    "run_key": "key",
    "node": "n0",
    "rank": 0,
    "world": 1,
    "slot_bytes": 4096,
    "chunk_bytes": 4096,
}
BEAT_S = 0.02


@pytest.fixture
def arenas() -> Iterator[list[Arena]]:
    made = [Arena.create_memfd(**SETTINGS), Arena.create_memfd(**SETTINGS)]
    yield made
    for arena in made:
        arena.close()


def beats_again(arena: Arena) -> bool:
    """Whether a new beat came."""

    def age() -> float:
        beat = arena.heartbeat()
        return float("inf") if beat is None else beat[0]

    before = age()
    return bool(until(lambda: age() < before, "the next beat"))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "everstep-heartbeat"]


def test_it_beats_and_says_the_last_step(arenas: list[Arena]) -> None:
    arena = arenas[0]
    heart = Heartbeat(lambda: arena, 3, interval_s=BEAT_S)
    assert arena.heartbeat() is not None, "at once"
    assert arena.last_step() is None
    assert beats_again(arena)
    heart.stepped(7)
    heart.stepped(9)
    key, age = arena.last_step() or ((0, 0), -1.0)
    assert key == (3, 9) and 0 <= age < 10
    heart.close()
    heart.close()
    assert not threads()


def test_a_trainer_that_hangs_still_beats_while_its_step_grows_old(arenas: list[Arena]) -> None:
    arena = arenas[0]
    heart = Heartbeat(lambda: arena, 1, interval_s=BEAT_S)
    heart.stepped(1)
    for _ in range(3):
        before = (arena.last_step() or (None, -1.0))[1]
        assert beats_again(arena)
        assert (arena.last_step() or (None, -1.0))[1] > before
    heart.close()


def test_it_follows_a_replaced_arena_and_outlives_a_closed_one(arenas: list[Arena]) -> None:
    now = [arenas[0]]
    heart = Heartbeat(lambda: now[0], 1, interval_s=BEAT_S)
    heart.stepped(4)
    arenas[0].close()
    time.sleep(3 * BEAT_S)  # beats into nothing
    assert threads()
    now[0] = arenas[1]
    until(lambda: arenas[1].last_step(), "the new arena hears of it")
    assert (arenas[1].last_step() or ((0, 0), 0))[0] == (1, 4) and beats_again(arenas[1])
    heart.close()


def test_a_step_s_length_is_a_mean(arenas: list[Arena], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10**9]
    monkeypatch.setattr("everstep.heartbeat.time.monotonic_ns", lambda: clock[0])
    heart = Heartbeat(lambda: arenas[0], 1, interval_s=3600)
    for step, seconds in ((1, 0), (2, 2), (4, 4), (5, 10)):
        clock[0] += seconds * 10**9
        heart.stepped(step)
    heart._beat()
    assert (arenas[0].heartbeat() or (0, 0))[1] == 3.0, "2, 2, then an eighth of the way to 10"
    heart.close()


def test_a_session_beats_for_as_long_as_it_lives_through_growth(root: Path) -> None:
    ckpt = opened(root, policy=QUICK)
    ckpt.load({"w": torch.zeros(10)})
    ckpt.step(1, {"w": torch.zeros(10)})
    assert len(threads()) == 1
    before = [info.path for info in arenas_of(root)]
    ckpt.step(2, {"w": torch.zeros(1 << 20)})
    paths = [info.path for info in arenas_of(root)]
    assert paths != before, "a larger arena"
    with Arena.attach(paths[-1]) as arena:
        assert (arena.last_step() or ((0, 0), 0))[0] == (1, 2)
        assert beats_again(arena)
    ckpt.close()
    assert not threads()


def test_after_a_rollback_one_heart_beats_for_the_new_incarnation(root: Path) -> None:
    ckpt = opened(root, policy={**QUICK, "heartbeat_s": BEAT_S})
    state = everstep.TrainState(n={"n": 0})
    ckpt.load(state)
    for step in (1, 2, 3):
        ckpt.step(step, state)
    (path,) = [info.path for info in arenas_of(root)]
    ckpt.rollback(2, reason="a spike", state=state)
    with Arena.attach(path) as arena:
        assert beats_again(arena), "the process is still at work"
        ckpt.step(3, state)
        until(lambda: len(threads()) == 1, "the end of the former")
        assert beats_again(arena) and (arena.last_step() or ((0, 0), 0))[0] == (2, 3)
    ckpt.close()
    assert not threads()


def test_a_forked_child_does_not_beat(root: Path, forked: Callable[..., Forked]) -> None:
    ckpt = opened(root, policy=QUICK)
    ckpt.load({"n": 0})
    ckpt.step(1, {"n": 1})

    def look(say: Callable[..., None]) -> None:
        say(len(threads()))
        ckpt.close()
        say("closed")

    assert forked(look).end() == (0, ["0", "closed"])
    assert len(threads()) == 1, "and the parent's goes on"
    ckpt.close()


def test_it_knows_nothing_of_torch() -> None:
    code = "import sys, everstep.heartbeat; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.strip() == "False"
