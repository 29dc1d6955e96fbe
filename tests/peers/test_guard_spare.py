"""``everstep spare``: a node without ranks keeps the others' snapshots."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from everstep.errors import MemoryTooSmall
from everstep.memory.arena import Arena
from everstep.memory.directory import find_arenas
from everstep.memory.header import Kind
from everstep.places import locate

from .guard_kit import SECRET, SOON_S, Job, until

Spare = Callable[..., "Process"]


class Process:
    """``everstep spare`` of the run in ``base``."""

    def __init__(self, base: Path, *options: str, **env: str) -> None:
        self.memory = base / "memory"
        self.memory.mkdir(exist_ok=True)
        given = {"EVERSTEP_RUNTIME_DIR": str(base / "runtime"), "EVERSTEP_ADDRESS": "127.0.0.1", **env}
        command = "from everstep.cli.main import main; main()"
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                command,
                "spare",
                str(base / "run"),
                "--memory",
                str(self.memory),
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **given},
        )
        self.directory = self.memory / f"everstep-{os.getuid()}" / locate(base / "run", node="spare").run_key

    def address(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening at "), self.end()
        return line.split()[-1]

    def held(self) -> dict[int, set[tuple[int, int]]]:
        found: dict[int, set[tuple[int, int]]] = {}
        for info in find_arenas(self.directory, Kind.HELD):
            assert info.path is not None
            with Arena.attach(info.path) as arena:
                found.setdefault(info.rank, set()).update(one.key for one in arena.snapshots())
        return found

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit code, and what it said of errors."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=SOON_S)
        return self.process.returncode, errors


@pytest.fixture
def spare(tmp_path: Path) -> Iterator[Spare]:
    started: list[Process] = []

    def begin(*options: str, **env: str) -> Process:
        started.append(Process(tmp_path, "--node", "spare", *options, **env))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.communicate()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def begin(*spares: str, nodes: int = 2, **options: object) -> Job:
        made.append(Job(tmp_path, nodes, spares=spares, **options))  # type: ignore[arg-type]
        return made[-1]

    yield begin
    for one in made:
        one.end()


def test_a_spare_node_keeps_what_all_others_send(
    job: Callable[..., Job], spare: Spare, tmp_path: Path
) -> None:
    """It waits for the run, keeps through the next incarnation, and leaves what it has when it is told to end."""
    keeps = spare(EVERSTEP_SECRET=SECRET.decode())
    assert keeps.process.poll() is None
    started = job()
    started.spares = (keeps.address(),)
    started.open()
    assert keeps.held() == {0: set(), 1: set()}, "room is made before the first step"
    for step in (1, 2, 3):
        started.snapshot(step)
        started.await_complete(step)
    assert keeps.held() == {0: {(1, 2), (1, 3)}, 1: {(1, 2), (1, 3)}}
    assert started.nodes[0].held() == {} and {rank.protected for rank in started.ranks} == {3}
    started.reopen(2)
    for step in (4, 5, 6):
        started.snapshot(step)
        started.await_complete(step)
    assert keeps.held() == {0: {(2, 5), (2, 6)}, 1: {(2, 5), (2, 6)}}
    assert keeps.end()[0] == 0
    assert keeps.held() == {0: {(2, 5), (2, 6)}, 1: {(2, 5), (2, 6)}}
    again = spare("--listen", started.spares[0], EVERSTEP_SECRET=SECRET.decode())
    assert again.address() == started.spares[0]
    started.snapshot(7)
    started.await_complete(7)
    until(
        lambda: {rank.protected for rank in started.ranks} == {7},
        "protection by the spare node that came back",
    )
    assert again.end(signal.SIGINT)[0] == 0
    assert {(2, 7)} <= again.held()[0]


def test_ranks_of_a_smaller_job_leave_no_room_behind(job: Callable[..., Job], spare: Spare) -> None:
    started = job(nodes=3)
    keeps = spare(EVERSTEP_SECRET=SECRET.decode())
    started.spares = (keeps.address(),)
    started.open()
    started.snapshot(1)
    started.await_complete(1)
    assert set(keeps.held()) == {0, 1, 2}
    started.reopen(2)
    started.snapshot(2)
    started.await_complete(2)
    assert (1, 1) in keeps.held()[1]
    started.snapshot(3)
    started.await_complete(3)
    until(lambda: set(keeps.held()) == {0, 1}, "the end of what is not needed any more")


def test_a_spare_node_without_memory_is_told_before_the_first_step(
    job: Callable[..., Job], spare: Spare
) -> None:
    started = job(told_bytes=1 << 50)
    keeps = spare(EVERSTEP_SECRET=SECRET.decode())
    started.spares = (keeps.address(),)
    with pytest.raises(MemoryTooSmall):
        started.open()


def test_a_spare_node_with_another_secret_keeps_nothing_and_stops_nobody(
    job: Callable[..., Job], spare: Spare
) -> None:
    """It is told, like one that is down. One that comes there later is used."""
    started = job(timeout_s=0.5)
    stranger = spare(EVERSTEP_SECRET="another secret of enough bytes")
    address = stranger.address()
    started.spares = (address,)
    started.open()
    rank = started.ranks[0]
    until(lambda: "peer_failed" in rank.stages(), "word of it")
    (told, *_) = [one.error for one in rank.heard if one.stage == "peer_failed" and one.error]
    assert address in told["message"] and "EVERSTEP_SECRET" in (told["hint"] or "")
    started.snapshot(1)
    started.await_complete(1)
    assert stranger.held() == {} and {one.protected for one in started.ranks} == {-1}
    (seen,) = started.nodes[0].status()["spares"]
    assert (seen["spare"], seen["reached"], seen["step"]) == (address, False, None) and seen["error"]
    assert stranger.end()[0] == 0
    spare("--listen", address, EVERSTEP_SECRET=SECRET.decode()).address()
    for step in (2, 3, 4):
        started.snapshot(step)
        started.await_complete(step)
    until(lambda: {one.protected for one in started.ranks} == {4}, "protection by the right one")
    (seen,) = started.nodes[0].status()["spares"]
    assert (seen["spare"], seen["reached"], seen["error"]) == (address, True, None)


def test_what_is_missing_is_said(job: Callable[..., Job], spare: Spare) -> None:
    nameless = spare()
    assert nameless.process.wait(SOON_S) == 1 and "EVERSTEP_SECRET" in nameless.end()[1]
    secret = {"EVERSTEP_SECRET": SECRET.decode()}
    waited = spare("--wait", "1ms", **secret)
    assert waited.process.wait(SOON_S) == 1 and "run" in waited.end()[1]
    job()
    first = spare(**secret)
    address = first.address()
    second = spare(**secret)
    assert second.process.wait(SOON_S) == 1 and "another agent" in second.end()[1]
    third = spare("--node", "third", "--listen", address, **secret)
    assert third.process.wait(SOON_S) == 1
    assert re.search(rf"port {address.split(chr(58))[1]} of 127.0.0.1 is taken.*--listen", third.end()[1])
    fourth = spare("--node", "fourth", EVERSTEP_ADDRESS="192.0.2.7", **secret)
    assert fourth.process.wait(SOON_S) == 1 and "192.0.2.7 is no address of this host" in fourth.end()[1]
