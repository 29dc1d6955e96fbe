"""The line between trainer and agent: election, refusals, releases, forks, descriptors, hostile peers."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from everstep.agent import link, main, places, protocol, spawn
from everstep.agent.client import fetch_arenas
from everstep.agent.link import Link, State
from everstep.agent.members import open_arena
from everstep.agent.values import AgentSettings
from everstep.errors import AgentError, RunInUse, SaveFailed
from everstep.memory.arena import Arena
from everstep.memory.process import Process

from .agent_kit import RUN_KEY, Place, Trainer, TrainerProcess, payload, until

Start = Callable[..., TrainerProcess]
Special = Callable[..., "subprocess.Popen[str]"]


def test_of_agents_that_start_at_once_one_serves(place: Place) -> None:
    place.incarnation(world=2)
    starts = [spawn.start(place.settings) for _ in range(4)]
    outcomes = [until(start.look, "an outcome") for start in starts]
    for start in starts:
        start.close()
    assert sorted(outcomes) == [spawn.READY] + 3 * [spawn.TAKEN]
    ranks = [Trainer.make(place, rank, 2).connect() for rank in range(2)]
    assert ranks[0].agent.status()["pid"] == ranks[1].agent.status()["pid"]
    for trainer in ranks:
        trainer.agent.bye(timeout_s=10)


def test_of_processes_that_stand_by_for_a_node_one_serves(place: Place) -> None:
    """One of them has loaded everything when its settings come, the other has only begun."""
    place.incarnation(world=2)
    first = spawn.Standby.begin()
    assert first is not None
    pid = until(lambda: first.pid, "a process that stands by")
    second = spawn.Standby.begin()
    assert second is not None
    starts = [spawn.start(place.settings, standby) for standby in (first, second)]
    assert first.pid is None and second.pid is None and first.become(place.settings, "") is None
    outcomes = [until(start.look, "an outcome") for start in starts]
    for start in starts:
        start.close()
    assert sorted(outcomes) == [spawn.READY, spawn.TAKEN]
    agent = place.agent()
    assert agent is not None and (agent.pid == pid) == (outcomes[0] == spawn.READY)


def test_who_is_patient_leaves_the_start_to_another_process(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.incarnation(world=2)
    begun, looks = [], []
    begin, connect = spawn.start, places.connect

    def start(settings: AgentSettings, standby: spawn.Standby | None = None) -> spawn.Start:
        begun.append(begin(settings, standby))
        return begun[-1]

    def look(directory: Path) -> Any:
        looks.append(directory)
        if len(looks) == 3:  # the other one comes to it
            begin(place.settings)
        return connect(directory)

    monkeypatch.setattr(spawn, "start", start)
    monkeypatch.setattr(places, "connect", look)
    second = Trainer.make(place, 1, 2).connect(patient=True)
    assert begun == [] and second.agent.agent_pid is not None
    second.agent.bye(timeout_s=10)


def test_patience_has_an_end(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.incarnation(world=2)
    monkeypatch.setattr(link, "PATIENCE_S", 0.1)
    began = time.monotonic()
    second = Trainer.make(place, 1, 2).connect(patient=True)
    assert time.monotonic() - began > 0.1 and second.agent.agent_pid is not None
    second.agent.bye(timeout_s=10)


def test_who_stood_by_is_an_agent_in_the_environment_of_then(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.prepare(place.settings.runtime_dir)
    (reading, writing), (said, _) = os.pipe(), os.pipe()
    process: Any = SimpleNamespace(kill=lambda: None, wait=lambda timeout_s: 0)
    monkeypatch.setenv("GONE", "yes")
    standby = spawn.Standby(process, FileIO(writing, "w"), FileIO(said, "r"))
    monkeypatch.delenv("GONE")
    monkeypatch.setenv("COME", "\n\udcff")
    assert standby.become(place.settings, "") is not None
    monkeypatch.undo()
    out = place.settings.runtime_dir / "said"
    child = os.fork()
    if child == 0:  # it replaces its streams
        os.environ["GONE"] = "yes"

        def run(settings: AgentSettings, *, ready: int) -> int:
            out.write_text(repr((os.environ.get("GONE"), os.environ.get("COME"), settings == place.settings)))
            return 0

        main.run = run  # type: ignore[assignment]
        os._exit(main._stand_by(reading, -1))
    assert os.waitpid(child, 0)[1] == 0
    assert out.read_text() == repr((None, "\n\udcff", True))


def test_a_start_is_quick_and_light(place: Place) -> None:
    """No torch, no numpy; ready in well under the time that a trainer would notice."""
    modules = ", ".join(f"everstep.agent.{name}" for name in ("main", "service", "inline", "client"))
    check = (
        f"import sys, {modules};"
        + "print([m for m in ('torch', 'numpy', 'ssl', 'requests') if m in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout
    assert "torch" not in loaded and "numpy" not in loaded
    began = time.monotonic()
    start = spawn.start(place.settings)
    assert time.monotonic() - began < 0.2, "starting is not waited for"
    assert until(start.look, "an outcome") == spawn.READY
    start.close()


def test_the_agent_is_nobodys_child_and_keeps_no_stream(place: Place) -> None:
    start = spawn.start(place.settings)
    until(start.look, "an outcome")
    start.close()
    agent = place.agent()
    assert agent is not None
    stat = Path(f"/proc/{agent.pid}/stat").read_text().rsplit(")", 1)[1].split()
    parent, session, nice = int(stat[1]), int(stat[3]), int(stat[16])
    assert parent != os.getpid() and session != os.getsid(0) and nice >= 10
    assert os.readlink(f"/proc/{agent.pid}/fd/0") == "/dev/null"
    assert os.readlink(f"/proc/{agent.pid}/fd/1") == str(place.settings.runtime_dir / places.LOG)
    assert os.readlink(f"/proc/{agent.pid}/cwd") == "/"


def test_a_start_that_fails_says_why(place: Place) -> None:
    place.settings.runtime_dir.mkdir(mode=0o700)
    (place.settings.runtime_dir / places.SOCKET).mkdir()  # cannot be replaced by a socket
    place.incarnation()
    with pytest.raises(AgentError, match=r"could not be started.*IsADirectoryError"):
        Trainer.make(place).connect()


def test_another_run_is_refused(place: Place) -> None:
    place.incarnation()
    trainer = Trainer.make(place).connect()
    place.run_id = "another"
    with pytest.raises(AgentError, match="another run"):
        Trainer.make(place).connect()
    trainer.agent.bye(timeout_s=10)


def test_a_living_rank_is_not_replaced(place: Place, start: Start) -> None:
    place.incarnation()
    trainer = start()
    trainer.call("connect")
    with pytest.raises(RunInUse, match="registered"):
        Trainer.make(place).connect()
    trainer.kill()
    Trainer.make(place).connect().agent.bye(timeout_s=10, flush=False)


@pytest.mark.long
def test_a_foreign_arena_is_refused(place: Place) -> None:
    place.incarnation()
    trainer = Trainer.make(place, rank=1, world=2)
    trainer.rank = 0
    with pytest.raises(AgentError, match="arena is another rank"):
        trainer.connect()


def test_an_idle_agent_of_an_older_release_makes_room(place: Place, special_agent: Special) -> None:
    place.incarnation()
    old = special_agent(protocol=-1)
    trainer = Trainer.make(place).connect()
    assert old.wait(10) == 0
    assert trainer.agent.status()["protocol"] == protocol.PROTOCOL
    trainer.agent.bye(timeout_s=10)


def test_an_agent_of_a_newer_release_is_respected(place: Place, special_agent: Special) -> None:
    place.incarnation()
    newer = special_agent(protocol=+1)
    with pytest.raises(AgentError, match="another release") as caught:
        Trainer.make(place).connect()
    assert str(protocol.PROTOCOL + 1) in str(caught.value) and newer.poll() is None


@pytest.mark.long
def test_a_busy_agent_of_an_older_release_is_respected(
    place: Place, special_agent: Special, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.incarnation()
    old = special_agent(protocol=-1)
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "PROTOCOL", protocol.PROTOCOL - 1)
        trainer = Trainer.make(place).connect()
    other = Trainer.make(place)
    with pytest.raises(AgentError, match="busy"):
        other.connect()
    assert old.poll() is None
    trainer.agent.bye(timeout_s=10)


def test_a_forked_child_touches_nothing(place: Place) -> None:
    place.incarnation()
    trainer = Trainer.make(place).connect()
    trainer.snapshot(1)
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (
            trainer.agent.poll,
            trainer.agent.status,
            lambda: trainer.agent.flush(1, slot=0, generation=1),
        ):
            try:
                use()
            except AgentError:
                refused += 1
        trainer.agent.close()
        os._exit(0 if refused == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    trainer.flush(1)
    assert trainer.verdict(1).stage == "committed"
    trainer.agent.bye(timeout_s=10)


def test_what_an_agent_let_go_of_closes_nothing_in_a_forked_child(place: Place) -> None:
    """An agent in this process has an arena open; a child, where it is closed, opens its own under that number."""
    path = Trainer.make(place).arena.info.path
    opened: Arena | None = open_arena(str(path), None, rank=0, run_key=RUN_KEY, known=None)
    number = opened.fileno() if opened is not None else -1
    child = os.fork()
    if child == 0:
        code = 1
        try:
            mine: list[Arena] = []
            while not mine or mine[-1].fileno() < number:
                mine.append(Trainer.make(place, rank=len(mine) + 1).arena)
            same = [arena for arena in mine if arena.fileno() == number]
            opened = None
            gc.collect()
            os.fstat(number)
            code = 0 if len(same) == 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_that_outlives_its_trainer_does_not_hide_its_death(place: Place, start: Start) -> None:
    """Forked loader workers keep everything open that they inherit."""
    place.incarnation()
    trainer = start()
    trainer.call("connect")
    trainer.call("fork_sleeper")
    trainer.call("snapshot", 3)
    trainer.kill()
    until(lambda: place.durable() == [(1, 3)], "the flush of W")


def test_the_agent_keeps_an_arena_without_a_path_for_the_next_trainer(place: Place) -> None:
    place.with_settings(linger_s=30.0).incarnation()
    trainer = Trainer.make(place, memfd=True).connect()
    trainer.save(1)
    assert trainer.verdict(1).stage == "committed"
    trainer.snapshot(2)
    trainer.agent.close()
    trainer.arena.close()
    (held,) = fetch_arenas(place.settings)
    assert held.path is None and held.fd is not None and held.rank == 0
    again = Arena.attach_fd(held.fd)
    os.close(held.fd)
    newest = again.snapshots()[-1]
    assert newest.step == 2
    with again.pin(newest.index, newest.generation) as pinned:
        assert bytes(pinned.view("image:model")).endswith(payload(1, 2, 0))
    place.incarnation(adopted=(1, 2))
    again.take(Process.current(), run_id=place.run_id, incarnation=2, world=1)
    following = Trainer(place, 0, 1, 2, again).connect()
    following.save(3)
    assert following.verdict(3).stage == "committed"
    following.agent.bye(timeout_s=10)


def test_where_no_agent_runs_nobody_waits_for_an_answer(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(*args: object) -> None:
        raise AssertionError("waited for an agent that is not there")

    monkeypatch.setattr(Link, "wait", wait)
    assert fetch_arenas(place.settings) == []


@pytest.mark.long
def test_arenas_with_a_path_are_named(place: Place) -> None:
    assert fetch_arenas(place.settings) == []
    place.incarnation()
    trainer = Trainer.make(place).connect()
    (held,) = fetch_arenas(place.settings)
    assert (held.rank, held.path, held.fd) == (0, trainer.arena.info.path, None)
    trainer.agent.bye(timeout_s=10)


def test_hostile_peers_are_hung_up_on_and_harm_nobody(place: Place) -> None:
    place.incarnation()
    trainer = Trainer.make(place).connect()
    ping = protocol.encode(protocol.Ping(1))
    knock = protocol.encode(protocol.Knock(protocol.PROTOCOL))
    register = protocol.encode(
        protocol.Register(
            {}, "x", 0, 1, 1, None, os.getpid(), 0, "", ""
        )  # announces a descriptor; none comes
    )
    framed = [struct.pack(">I", len(one)) + one for one in (ping, knock, register)]
    sent = [
        b"\xff\xff\xff\xff",
        struct.pack(">I", 5) + b"hello",
        struct.pack(">I", 4 << 20),
        framed[0],
        struct.pack(">I", 2) + ping[:2],
        framed[1] + framed[2],
        framed[1] + struct.pack(">I", 3) + b"\xc1\xc1\xc1",
    ]
    for some in sent:
        with socket.socket(socket.AF_UNIX) as hostile:
            hostile.settimeout(10)
            hostile.connect(str(place.settings.runtime_dir / places.SOCKET))
            hostile.sendall(some)
            while hostile.recv(4096):
                pass
    trainer.save(1)
    assert trainer.verdict(1).stage == "committed"
    assert trainer.agent.status()["epoch"] == 1
    trainer.agent.bye(timeout_s=10)


@pytest.mark.long
def test_descriptors_do_not_gather_in_the_agent(place: Place) -> None:
    place.incarnation()
    trainer = Trainer.make(place, memfd=True).connect()
    agent = place.agent()
    assert agent is not None
    trainer.save(1)
    assert trainer.verdict(1).stage == "committed"

    def held_open() -> int:
        paths = []
        for path in Path(f"/proc/{agent.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                paths.append(os.readlink(path))
        return sum(path.startswith(("/memfd", "socket:", "anon_inode:[pidfd]")) for path in paths)

    before = held_open()
    for step in range(2, 12):
        trainer.agent.close()
        trainer.connect()
        for held in fetch_arenas(place.settings):
            assert held.fd is not None
            os.close(held.fd)
        trainer.save(step)
        assert trainer.verdict(step).stage == "committed"
    until(lambda: held_open() <= before, "closed descriptors")
    trainer.agent.bye(timeout_s=10)


def test_a_rank_may_move_to_another_arena(place: Place) -> None:
    place.incarnation()
    trainer = Trainer.make(place).connect()
    trainer.save(1)
    assert trainer.verdict(1).stage == "committed"
    trainer.arena = Trainer.make(place).arena
    path = trainer.arena.info.path
    assert path is not None
    trainer.agent.rearm(path)
    trainer.save(2)
    assert trainer.verdict(2).stage == "committed"
    place.check(1, 2, world=1)
    assert [held.path for held in fetch_arenas(place.settings)] == [path]
    trainer.agent.bye(timeout_s=10)


@pytest.mark.long
def test_who_has_not_registered_cannot_flush(place: Place) -> None:
    place.incarnation()
    trainer = Trainer.make(place).connect()
    link = Link(place.settings, None, up=lambda: None, lost=lambda why: None)
    until(lambda: link.advance() or link.state is State.UP, "an answer")
    link.send(protocol.FlushRequest(1, 0, 1, "full", 1))
    until(lambda: link.advance() or link.state is State.DOWN, "a refusal")
    assert "register" in str(link.error)
    link.close()
    trainer.agent.bye(timeout_s=10)


def test_inline_agent(place: Place) -> None:
    """Each rank has its own; they meet in the storage only."""
    place.incarnation(world=2)
    ranks = [Trainer.make(place, rank, 2).connect(mode="inline") for rank in range(2)]
    for step in (1, 2):
        for trainer in ranks:
            trainer.save(step)
        assert [trainer.verdict(step).stage for trainer in ranks] == ["committed", "committed"]
        place.check(1, step, world=2)
    for trainer in ranks:
        trainer.save(3)
    for trainer in ranks:
        trainer.agent.bye(timeout_s=10)
    assert place.durable() == [(1, 1), (1, 2), (1, 3)]
    assert not (place.settings.runtime_dir / places.LOCK).exists()


def test_inline_goodbye_says_what_is_left(place: Place) -> None:
    place.incarnation(world=2)
    trainer = Trainer.make(place, 0, 2).connect(mode="inline")
    trainer.save(1)
    with pytest.raises(SaveFailed, match="1 flush"):
        trainer.agent.bye(timeout_s=0.5)


def test_inline_agents_share_one_verdict(place: Place) -> None:
    place.with_settings(commit_timeout_s=0.5).incarnation(world=2)
    first, second = (Trainer.make(place, rank, 2).connect(mode="inline") for rank in range(2))
    second.snapshot(1)
    first.save(1)
    assert first.verdict(1).stage == "failed"
    second.flush(1)
    verdict = second.verdict(1)
    assert verdict.stage == "failed" and verdict.error is not None and "rank 1" in verdict.error["message"]
    for trainer in (first, second):
        trainer.agent.bye(timeout_s=5)


def test_a_connection_that_does_not_speak_is_not_waited_for(place: Place) -> None:
    """Something listens but never answers: connecting gives up in time."""
    place.settings.runtime_dir.mkdir(mode=0o700)
    listener = places.listen(place.settings.runtime_dir)
    place.incarnation()
    began = time.monotonic()
    with pytest.raises(AgentError, match="did not answer"):
        Trainer.make(place).connect(timeout_s=0.5)
    assert time.monotonic() - began < 5
    assert select.select([listener], [], [], 0)[0]
    listener.close()
    (place.settings.runtime_dir / places.SOCKET).unlink()
