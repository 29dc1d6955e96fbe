"""The agent's pacing: trainers' step times out of their arenas, and who loads goes first."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from everstep.agent import pacing as pacing_module
from everstep.agent.asking import ask_status
from everstep.agent.pacing import Pacing
from everstep.agent.values import AgentSettings
from everstep.loading import Loader
from everstep.memory.arena import Arena
from everstep.memory.process import Process
from everstep.plan.pace import Adaptive, Fixed, Share

from tests.facade.kit import Forked, opened, until

SOON_S = 20.0


@dataclass
class Trainer:
    """As much of a member as pacing looks at."""

    rank: int
    arena: Arena
    here: bool = True


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    arena = Arena.create(
        tmp_path, run_key="0123456789abcdef", node="n", rank=0, world=1, slot_bytes=4096, chunk_bytes=4096
    )
    yield Trainer(0, arena)
    arena.close()


def adaptive(pacing: Pacing) -> Adaptive:
    found = pacing.root.governor
    assert isinstance(found, Adaptive)
    return found


def test_step_times_are_read_out_of_the_arena(trainer: Trainer) -> None:
    pacing = Pacing(lambda: [trainer], "adaptive")  # type: ignore[list-item]
    governor, seen = adaptive(pacing), []
    governor.stepped = lambda now, took: seen.append((now, took))  # type: ignore[method-assign]

    def look(took: float | None = None, at: int | None = None) -> None:
        if at is not None:
            trainer.arena.took(took)
            trainer.arena.stepped((1, at), at * 10**9)
        pacing._look([governor])

    look()
    assert governor.waited_for, "it has made no step"
    look(0.0, 5)
    assert not governor.waited_for and seen == [], "what its first step took is not known"
    look(0.25, 6)
    look()
    assert seen == [(6.0, 0.25)], "each step once"
    trainer.arena.took(None)
    look()
    assert governor.waited_for and seen == [(6.0, 0.25)]
    look(0.5, 9)
    assert not governor.waited_for and seen[1:] == [(9.0, 0.5)]
    trainer.here = False
    look()
    assert governor.waited_for, "nobody trains"


def test_the_rate_follows_the_newest_settings() -> None:
    pacing = Pacing(list, None)
    assert isinstance(pacing.root.governor, Fixed) and pacing.root.governor.rate(0.0) is None
    pacing.follow("adaptive")
    governor = adaptive(pacing)
    pacing.follow("adaptive")
    assert pacing.root.governor is governor, "what it has learnt stays"
    pacing.follow(5e6)
    assert pacing.root.governor.rate(0.0) == 5e6
    assert isinstance(pacing.lane("mirror").governor, Share), "half of the link, unless it is said"
    assert isinstance(pacing.lane("other", None).governor, Fixed)


def test_a_loader_holds_others_up_until_it_is_done_dies_or_its_time_is_over(
    forked: Callable[..., Forked], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(say: Callable[..., None]) -> None:
        say("ready")
        time.sleep(SOON_S)

    child = forked(sleep)
    assert child.line() == "ready"
    process = Process.of(child.pid)
    assert process is not None

    async def main() -> None:
        pacing = Pacing(list, None)
        me = Process.current()
        pacing.loading(me)
        pacing.loading(process)
        pacing.loaded(me)
        assert pacing.turnstile.recovering, "the other one still loads"
        os.kill(child.pid, signal.SIGKILL)
        await asyncio.wait_for(gone(pacing), SOON_S)
        monkeypatch.setattr(pacing_module, "LOAD_S_MAX", 0.05)
        pacing.loading(me)
        assert pacing.turnstile.recovering
        await asyncio.wait_for(gone(pacing), SOON_S)
        pacing.loading(me)
        pacing.close()
        assert not pacing.turnstile.recovering

    async def gone(pacing: Pacing) -> None:
        while pacing.turnstile.recovering:
            await asyncio.sleep(0.005)

    asyncio.run(main())


def test_a_load_tells_the_nodes_agent(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.zeros(1000)}
    ckpt = opened(root, agent="process", policy={"linger_s": 30.0})
    ckpt.load(state)
    ckpt.step(1, state)
    ckpt.close()
    seen: list[Any] = []
    load = Loader.load

    def looking(self: Loader, *args: Any, **options: Any) -> Any:
        settings = again._agent_of_run()
        assert isinstance(settings, AgentSettings)
        seen.append(recovering(settings))
        return load(self, *args, **options)

    monkeypatch.setattr(Loader, "load", looking)
    again = opened(root, agent="process", policy={"linger_s": 0.2})
    assert again.load(state) == 1
    settings = again._agent_of_run()
    assert settings is not None
    assert seen == [[os.getpid()]] and recovering(settings) == []
    again.step(2, state)
    again.close()


def recovering(settings: AgentSettings) -> Any:
    said = ask_status(settings)
    assert said is not None
    return said["pace"]["recovering"]


def test_adaptive_flushes_end_and_do_not_dawdle_while_they_are_waited_for(root: Path) -> None:
    """64 MiB at the floor of 1 MiB/s would take a minute."""
    state = {"w": torch.zeros(16 << 20)}
    ckpt = opened(root, policy={"rate_bytes_per_s": "adaptive"})
    ckpt.load(state)
    for step in range(1, 4):
        ckpt.step(step, state)
    began = time.monotonic()
    ckpt.save(4, state).wait()
    assert time.monotonic() - began < SOON_S
    lanes = ckpt.status()["agent"]["pace"]["lanes"]
    assert lanes[0]["name"] == "root" and lanes[0]["bytes"] > 64 << 20
    ckpt.close()


def test_the_time_of_the_engine_is_not_the_steps(root: Path) -> None:
    """What training waits for a slow flush is no reason to make it slower still."""
    state = {"w": torch.zeros(200_000)}
    ckpt = opened(root, policy={"full_every": 1, "on_slow": "wait", "rate_bytes_per_s": 2e6})
    ckpt.load(state)
    for step in range(1, 5):
        last = ckpt.step(step, state)
    assert ckpt._tier is not None
    arena = ckpt._tier.arena
    found = arena.step_time()
    assert found is not None and found[1] < 0.2, "each flush takes 0.4 s, the steps between them nothing"
    assert last is not None
    until(last.done, "the flush")
    began = time.monotonic()
    time.sleep(0.05)
    took = time.monotonic() - began
    ckpt.step(5, state)
    found = arena.step_time()
    assert found is not None and found[1] >= took, "what the training did itself"
    handle = ckpt.save(6, state)
    handle.wait()
    assert arena.step_time() is None, "it does nothing but wait"
    until(lambda: handle.done(), "the flush")
    ckpt.close()
