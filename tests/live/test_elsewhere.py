"""What an agent concludes from other nodes' beacons of ranks whose votes it waits for."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from everstep.agent import elsewhere
from everstep.agent.elsewhere import ENDED, SILENT, Elsewhere
from everstep.backends.errors import BackendError
from everstep.backends.files import LocalBackend
from everstep.format.beacon import Beacon, BeaconRank
from everstep.memory.process import Process

from .kit import put

BEAT_S = 0.05
SETTLED_S = elsewhere.SETTLED_INTERVALS * BEAT_S
ME = Process.current()


class Far:
    """An agent of this node, which has rank 0, and what it sees of the node that has rank 1."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.backend = LocalBackend(str(root))
        self.settings = self
        self.heartbeat_s = BEAT_S
        self._looks = Elsewhere(cast(Any, self))

    def local_ranks(self, incarnation: int) -> set[int]:
        return {0}

    def say(self, count: int, **changes: Any) -> None:
        one = BeaconRank(1, 7, 7, changes.pop("alive", True), 3, 0.1, 1.0, 0.1, 3, None)
        made = Beacon(
            "far", "far-host", "far-boot", 7, 7, count, BEAT_S, 4 * BEAT_S, 1, 2, (one,), None, None, None, 0,
        )  # fmt: skip
        put(self.root, dataclasses.replace(made, **changes))

    async def looks(self) -> tuple[list[int], str]:
        await asyncio.sleep(BEAT_S)
        return await self._looks.lost(1, [1])

    async def until_lost(self, each: Callable[[int], object] = lambda count: None) -> tuple[str, float]:
        """Why rank 1 is lost, and how long that took; ``each`` is called before each look."""
        began = time.monotonic()
        for count in range(1, 1000):
            each(count)
            lost, why = await self.looks()
            if lost:
                assert lost == [1]
                return why, time.monotonic() - began
        raise AssertionError("it is still waited for")

    async def waits(self, each: Callable[[int], object] = lambda count: None, looks: int = 12) -> None:
        for count in range(1, looks + 1):
            each(count)
            assert (await self.looks())[0] == [], count


def go(far: Far, body: Callable[[Far], Awaitable[None]]) -> None:
    async def run() -> None:
        try:
            await body(far)
        finally:
            await far.backend.close()

    asyncio.run(run())


@pytest.fixture
def far(root: Path) -> Far:
    root.mkdir()
    return Far(root)


def test_a_rank_whose_agent_says_that_it_has_ended_is_not_waited_for(far: Far) -> None:
    async def body(far: Far) -> None:
        why, took = await far.until_lost(lambda count: far.say(count, alive=False))
        assert why == ENDED and took >= SETTLED_S, "a request may have been on its way"

    go(far, body)


def test_so_is_one_that_an_agent_without_other_ranks_names_once(far: Far) -> None:
    async def body(far: Far) -> None:
        far.say(1, alive=False)
        assert (await far.until_lost())[0] == ENDED

    go(far, body)


@pytest.mark.parametrize("taken_back", [True, False])
def test_one_that_has_said_goodbye_is_not_waited_for(far: Far, taken_back: bool) -> None:
    async def body(far: Far) -> None:
        far.say(1)
        await far.looks()
        if taken_back:
            (far.root / "live" / "far.json").unlink()
        else:
            far.say(2, ranks=())
        assert (await far.until_lost())[0] == ENDED

    go(far, body)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"alive": False, "queue": 1},
        {"alive": False, "incarnation": 2},
        {"ranks": ()},
    ],
    ids=["lives", "its agent still writes", "another incarnation", "never named"],
)
def test_who_may_still_vote_is_waited_for(far: Far, changes: dict[str, Any]) -> None:
    go(far, lambda far: far.waits(lambda count: far.say(count, **changes)))


def test_a_flush_that_comes_to_light_later_is_waited_for(far: Far) -> None:
    """What the rank asked for just before its death."""

    async def body(far: Far) -> None:
        far.say(1, alive=False)
        await far.looks()
        await far.waits(lambda count: far.say(1 + count, alive=False, queue=1))
        assert (await far.until_lost(lambda count: far.say(99 + count, alive=False)))[0] == ENDED

    go(far, body)


def test_a_node_that_is_silent_for_long_is_lost_and_one_that_is_slow_is_not(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "SILENT_S_MIN", 0.8)

    async def body(far: Far) -> None:
        await far.waits(lambda count: far.say(count // 8), looks=24)
        why, took = await far.until_lost()
        assert why == SILENT and took >= 0.3

    go(far, body)
    assert elsewhere.SILENT_S_MIN == 0.8 and 3 * 4 * BEAT_S < 0.8


def test_nothing_is_concluded_while_storage_does_not_answer(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not have answered the other node either."""
    monkeypatch.setattr(elsewhere, "SILENT_S_MIN", 0.6)
    answers = LocalBackend.list_names

    async def no_answer(self: LocalBackend, prefix: str) -> list[str]:
        raise BackendError("no answer")

    async def body(far: Far) -> None:
        far.say(1)
        for _ in range(4):
            await far.waits(looks=3)
            monkeypatch.setattr(LocalBackend, "list_names", no_answer)
            await far.waits(looks=2)
            monkeypatch.setattr(LocalBackend, "list_names", answers)
        assert (await far.until_lost())[0] == SILENT

    go(far, body)


def test_processes_of_this_machine_are_looked_at(far: Far) -> None:
    """A rank that took its agent along: nobody says so, but the kernel does."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    other = Process.of(child.pid)
    assert other is not None
    one = BeaconRank(1, other.pid, other.start_time, True, 3, 0.1, 1.0, 0.1, 3, None)
    here = {"host": socket.gethostname(), "boot": ME.boot, "ranks": (one,)}
    here |= {"agent_pid": other.pid, "agent_start": other.start_time}

    async def body(far: Far) -> None:
        far.say(1, **here)
        await far.waits()
        child.communicate(b"\n")
        why, _ = await far.until_lost()
        assert why == ENDED
        far.say(2, **{**here, "agent_pid": os.getpid(), "agent_start": ME.start_time})
        await far.waits()
        far.say(3, **{**here, "host": "a-container"})
        await far.waits()

    go(far, body)
