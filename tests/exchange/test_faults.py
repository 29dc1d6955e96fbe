"""A peer that dies, stalls or lies in the middle of a load: the disk serves, else the step is passed over by all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import everstep
import everstep.nodes
import pytest
import torch
from everstep.errors import Damaged
from everstep.exchange.protocol import Line, Reply, Request
from everstep.exchange.server import Server
from everstep.reading import into_state

from .kit import WAIT_S, Job, Loaded, contents, load_on, state_with

Say = Callable[..., None]
IO_S = 2.0


class Faulty(Server):
    """Serves rightly, but for the newest of the steps that are offered (``only_first``) or for all of them."""

    only_first = False
    made = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        type(self).made += 1
        self._right = self.only_first and self.made > 1
        super().__init__(*args, **options)

    def _answer(self, line: Line, request: Request) -> None:
        if self._right or request.what not in self.spoils():
            super()._answer(line, request)
        else:
            self.spoil(line, request)

    @staticmethod
    def spoils() -> tuple[str, ...]:
        return ("read",)

    def spoil(self, line: Line, request: Request) -> None:
        raise NotImplementedError


class Dies(Faulty):
    def spoil(self, line: Line, request: Request) -> None:
        line.abort()


class Stalls(Faulty):
    def spoil(self, line: Line, request: Request) -> None:
        line.send_frame(Reply(request.nbytes))
        line.receive_into(memoryview(bytearray(1)), idle_s=WAIT_S)


class Flips(Faulty):
    """One bit of every image."""

    def spoil(self, line: Line, request: Request) -> None:
        data = bytearray(self._shelves[request.rank, request.copy].find(request))
        data[len(data) // 2] ^= 1
        line.send_frame(Reply(len(data)))
        line.send(data)


class Confuses(Faulty):
    """Gives another rank's layout and records, or none."""

    @staticmethod
    def spoils() -> tuple[str, ...]:
        return ("layout", "records")

    def spoil(self, line: Line, request: Request) -> None:
        other = next((rank for rank, _ in self._shelves if rank != request.rank), 99)
        Server._answer(self, line, Request(request.what, other))


class Deaf:
    """Cannot serve at all."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise OSError("no address for that")


FAULTS = [Stalls, Flips, *(pytest.param(kind, marks=pytest.mark.long) for kind in (Dies, Confuses))]


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def spoil(kind: type, *, only_first: bool = False) -> None:
        class Made(kind):  # type: ignore[misc]
            pass

        Made.only_first, Made.made = only_first, 0
        monkeypatch.setattr(everstep.nodes, "Server", Made)
        if kind is Stalls:
            monkeypatch.setattr(everstep.nodes, "IO_S", IO_S)

    return spoil


def restored(root: Path, places: list[str]) -> tuple[list[Loaded], list[dict[str, Any]]]:
    values = [contents(rank, 0) for rank in range(len(places))]
    return load_on(root, places, lambda rank: into_state(state_with(values[rank]))), values


def are_of(values: list[dict[str, Any]], step: int) -> bool:
    return all(
        found["n"] == wanted["n"] and all(torch.equal(found[k], wanted[k]) for k in ("w", "b"))
        for found, wanted in zip(values, (contents(rank, step) for rank in range(len(values))), strict=True)
    )


def save_with_disk(job: Job, places: list[str], steps: list[int], durable: int) -> None:
    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        values = contents(rank, 0)
        state = state_with(values)
        ckpt.load(state)
        for step in steps:
            values.update(contents(rank, step))
            ckpt.step(step, state)
            if step == durable:
                ckpt.save(step, state).wait()
        say("saved")
        threading.Event().wait(WAIT_S)

    for rank in job.start(places, body):
        assert rank.line() == "saved"
    job.kill()


@pytest.mark.parametrize("kind", [Dies, Stalls, Flips, Confuses], ids=lambda kind: kind.__name__.lower())
def test_the_disk_serves_what_a_peer_does_not(
    root: Path, nodes: list[str], job: Job, spoilt: Callable[..., None], kind: type
) -> None:
    a, b = nodes[:2]
    save_with_disk(job, [a, b], [1, 2], durable=2)
    spoilt(kind)
    began = time.monotonic()
    results, values = restored(root, [b, a])
    assert [result.error for result in results] == [None, None]
    assert [result.recovery and result.recovery.step for result in results] == [2, 2]
    assert are_of(values, 2)
    assert any("memory" in text for text in results[0].warned), "what went wrong is told"
    assert time.monotonic() - began < WAIT_S


@pytest.mark.parametrize("kind", [*FAULTS, Deaf], ids=lambda kind: kind.__name__.lower())
def test_a_step_that_no_one_else_has_is_passed_over_by_all_ranks(
    root: Path, nodes: list[str], job: Job, spoilt: Callable[..., None], kind: type
) -> None:
    """Newer snapshots lie in memory alone; the durable one is older."""
    a, b = nodes[:2]
    save_with_disk(job, [a, b], [1, 2, 3], durable=1)
    spoilt(kind)
    results, values = restored(root, [b, b, a][1:])
    assert [result.error for result in results] == [None, None]
    for result in results:
        assert result.recovery is not None
        assert (result.recovery.step, result.recovery.skipped[0].split(" ")[:2]) == (1, ["step", "3"])
    assert results[0].recovery == results[1].recovery or (
        results[0].recovery.skipped == results[1].recovery.skipped  # type: ignore[union-attr]
    )
    assert are_of(values, 1)


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__.lower())
def test_an_older_step_in_memory_is_next(
    root: Path, nodes: list[str], job: Job, spoilt: Callable[..., None], kind: type
) -> None:
    """With one node serving both ranks' snapshots to the other, and wrongly the first time only."""
    a, b = nodes[:2]
    job.save_and_die([a, a], [1, 2])
    spoilt(kind, only_first=True)
    results, values = restored(root, [a, b])
    for result in results:
        assert result.error is None and result.recovery is not None
        assert (result.recovery.step, result.recovery.tier) == (1, "memory")
    assert are_of(values, 1)


def test_with_nothing_else_the_load_fails_and_says_why(
    root: Path, nodes: list[str], job: Job, spoilt: Callable[..., None]
) -> None:
    a, b = nodes[:2]
    job.save_and_die([a, b], [1, 2])
    spoilt(Stalls)
    began = time.monotonic()
    results, _ = restored(root, [b, a])
    for result in results:
        assert isinstance(result.error, Damaged)
        assert "step 2" in str(result.error) and "step 1" in str(result.error)
        assert f"memory of node {a}" in str(result.error) or f"memory of node {b}" in str(result.error)
    assert time.monotonic() - began < WAIT_S


def test_no_socket_stays_open(root: Path, nodes: list[str], job: Job, spoilt: Callable[..., None]) -> None:
    """After good loads and bad ones: what is left open in this process is what was open before."""

    def sockets() -> list[str]:
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                found.append(os.readlink(f"/proc/self/fd/{name}"))
            except FileNotFoundError:
                continue
        return sorted(link for link in found if link.startswith("socket:"))

    a, b = nodes[:2]
    job.save_and_die([a, b], [1])
    restored(root, [a, b])  # whatever lives as long as the process is there now
    before = sockets()
    results, _ = restored(root, [b, a])
    assert results[0].error is None and results[0].recovery is not None
    assert sockets() == before
    spoilt(Dies)
    results, _ = restored(root, [b, a])
    assert results[0].error is not None
    assert sockets() == before


def test_a_rank_that_dies_while_the_others_load_ends_the_load(root: Path, nodes: list[str], job: Job) -> None:
    """Its node serves no more; the others hear of it in bounded time, and are told which rank."""
    a, b = nodes[:2]
    job.save_and_die([a, b], [1])

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        if rank == 1:
            serve = everstep.nodes.Server

            def die(*args: Any, **options: Any) -> Server:
                made = serve(*args, **options)
                threading.Timer(0.3, os._exit, (9,)).start()
                return made

            everstep.nodes.Server = die  # type: ignore[assignment,misc]
            everstep.nodes.run_blocking = lambda work: (work.close(), threading.Event().wait(1))  # type: ignore[attr-defined,assignment]
        values = contents(rank, 0)
        try:
            say(ckpt.load(state_with(values)))
        except everstep.errors.EverstepError as error:
            say(type(error).__name__, "rank(s) [1]" in str(error))

    ranks = job.start([b, a], body, policy={"rank_timeout_s": 3.0})
    began = time.monotonic()
    assert ranks[0].line() == "RankError True"
    assert time.monotonic() - began < WAIT_S
