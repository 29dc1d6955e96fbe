"""Deaths: of the agent at every point, of all trainers, of both. What was acknowledged becomes durable."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import pytest
from everstep.agent import link, places, spawn
from everstep.agent.values import AgentSettings
from everstep.errors import AgentError
from everstep.memory.process import Process

from .agent_kit import Place, Trainer, TrainerProcess, until, verdicts

Start = Callable[..., TrainerProcess]

POINTS = ["agent.accepted", "vote.after", "manifest.after"]
MORE_POINTS = [
    "agent.begun",
    "flush.image.first",
    "agent.settled",
    "flush.image.done",
    "vote.before",
    "agent.voted",
    "agent.commit.before",
    "manifest.before",
    "agent.committed",
    "agent.rotate.before",
    "fsync.before",
    "fsync.after",
    "link.before",
    "link.after",
    "rename.before",
    "rename.after",
    "fsyncdir.before",
]


@pytest.mark.parametrize("point", [*POINTS, *(pytest.param(p, marks=pytest.mark.long) for p in MORE_POINTS)])
def test_agent_killed_at(place: Place, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """Both ranks hear that it was lost, and then that their step is durable."""
    place.incarnation(world=2)
    monkeypatch.setenv("EVERSTEP_AGENT_POINTS", f"kill:{point}")
    ranks = [Trainer.make(place, rank, 2, slots=3).connect() for rank in range(2)]
    monkeypatch.delenv("EVERSTEP_AGENT_POINTS")
    first = Process.of(ranks[0].agent.status()["pid"])
    assert first is not None
    for trainer in ranks:
        trainer.save(3)
    until(lambda: not first.alive(), f"the agent's death at {point}")
    assert [verdict.stage for verdict in verdicts(ranks, 3)] == ["committed", "committed"]
    place.check(1, 3, world=2)
    for trainer in ranks:
        assert "agent_lost" in [news.stage for news in trainer.agent.poll()]
    status = ranks[0].agent.status()
    assert status["epoch"] == 2 and status["pid"] != first.pid
    for step in range(4, 8):  # no pin was left behind: the slots go round
        for trainer in ranks:
            trainer.save(step)
        assert [verdict.stage for verdict in verdicts(ranks, step)] == ["committed", "committed"]
    for trainer in ranks:
        trainer.agent.bye(timeout_s=10)


@pytest.mark.parametrize("point", ["agent.accepted", pytest.param("vote.after", marks=pytest.mark.long)])
def test_the_journal_alone_goes_on(place: Place, start: Start, point: str) -> None:
    """Agent and trainers die; an agent that nobody talks to finishes step 3, and W on top of it."""
    place.incarnation(world=1)
    trainer = start(EVERSTEP_AGENT_POINTS=f"kill:{point}")
    trainer.call("connect")
    trainer.call("snapshot", 4)
    agent = place.agent()
    assert agent is not None
    trainer.call("snapshot", 5)
    trainer.call("flush", 4)
    until(lambda: not agent.alive(), f"the agent's death at {point}")
    trainer.kill()
    assert place.durable() == []
    begun = spawn.start(place.settings)
    assert until(begun.look, "the next agent") == spawn.READY
    begun.close()
    until(lambda: place.durable() == [(1, 4), (1, 5)], "the journal's step and W")
    place.check(1, 4, world=1)


@pytest.mark.long
def test_a_journaled_job_whose_slot_is_gone_is_dropped(place: Place, start: Start) -> None:
    place.with_settings(linger_s=30.0).incarnation(world=1)
    trainer = start(EVERSTEP_AGENT_POINTS="kill:agent.accepted")
    trainer.call("connect")
    agent = place.agent()
    assert agent is not None
    trainer.call("save", 1)
    until(lambda: not agent.alive(), "the agent's death")
    for step in range(2, 7):
        trainer.call("snapshot", step)  # nobody pins the slot of step 1 any more
    trainer.call("poll")
    assert trainer.call("verdict", 1)[0] == "failed"
    assert place.decisions(1) == ["abort"]
    trainer.call("flush", 6)
    assert trainer.call("verdict", 6)[0] == "committed"


def test_all_trainers_of_a_smaller_world_killed(place: Place, start: Start) -> None:
    """The arena of a rank that is no more hides nothing: each W counts by its own number of ranks."""
    place.with_settings(linger_s=30.0).incarnation(world=3)
    former = [start(rank, 3) for rank in range(3)]
    for trainer in former:
        trainer.call("connect")
        trainer.call("snapshot", 5)
    for trainer in former:
        trainer.kill()
    until(lambda: place.durable() == [(1, 5)], "the former world's W")
    place.incarnation(adopted=(1, 5), world=2)
    present = [start(rank, 2, 2) for rank in range(2)]
    for trainer in present:
        trainer.call("connect")
        trainer.call("snapshot", 6)
    for trainer in present:
        trainer.kill()
    until(lambda: place.durable() == [(1, 5), (2, 6)], "the present world's W")
    place.check(2, 6, world=2)


def test_all_trainers_killed(place: Place, start: Start) -> None:
    """W is the newest step that both hold: 5, though rank 0 was at 6 already."""
    place.incarnation(world=2)
    ranks = [start(rank, 2) for rank in range(2)]
    for trainer in ranks:
        trainer.call("connect")
        for step in (4, 5):
            trainer.call("snapshot", step)
    ranks[0].call("snapshot", 6)
    agent = place.agent()
    assert agent is not None
    ranks[0].kill()
    time.sleep(0.2)
    assert place.durable() == [], "one rank still lives: nothing is decided over its head"
    ranks[1].kill()
    until(lambda: not agent.alive(), "the agent's end after its last work")
    assert place.durable() == [(1, 5)]
    place.check(1, 5, world=2)


def test_all_trainers_killed_while_the_flush_is_under_way(place: Place, start: Start) -> None:
    place.with_settings(rate_bytes_per_s=20_000.0).incarnation(world=2)
    ranks = [start(rank, 2) for rank in range(2)]
    for trainer in ranks:
        trainer.call("connect")
    for trainer in ranks:
        trainer.call("save", 5)
    for trainer in ranks:
        trainer.kill()
    until(lambda: place.durable() == [(1, 5)], "the step")
    assert place.decisions(5) == ["manifest"]


@pytest.mark.parametrize("flush", [True, False])
def test_goodbye_is_no_death(place: Place, start: Start, flush: bool) -> None:
    place.incarnation(world=1)
    trainer = start()
    trainer.call("connect")
    trainer.call("snapshot", 5)
    agent = place.agent()
    assert agent is not None
    trainer.call("bye", flush)
    trainer.kill()
    until(lambda: not agent.alive(), "the agent's end")
    assert place.durable() == []


@pytest.mark.long
def test_one_without_goodbye_is_enough_but_not_against_a_wish(place: Place, start: Start) -> None:
    place.incarnation(world=2)
    ranks = [start(rank, 2) for rank in range(2)]
    for trainer in ranks:
        trainer.call("connect")
        trainer.call("snapshot", 5)
    agent = place.agent()
    assert agent is not None
    ranks[0].call("bye", False)
    ranks[1].kill()
    until(lambda: not agent.alive(), "the agent's end")
    assert place.durable() == []


@pytest.mark.long
def test_a_closed_socket_is_no_death(place: Place) -> None:
    place.incarnation(world=1)
    trainer = Trainer.make(place).connect()
    trainer.snapshot(1)
    trainer.agent.close()
    time.sleep(5 * place.settings.linger_s)
    agent = place.agent()
    assert agent is not None and agent.alive() and place.durable() == []


def test_a_stopped_agent_does_not_stop_the_trainer(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PING_S", 0.1)
    monkeypatch.setattr(link, "SILENCE_S_MAX", 0.3)
    place.incarnation(world=1)
    trainer = Trainer.make(place).connect()
    pid = trainer.agent.status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        trainer.save(1)
        trainer.agent.poll()
        assert time.monotonic() - began < 1.0
        until(lambda: "agent_lost" in [n.stage for n in trainer.agent.poll()], "news of the silence")
        began = time.monotonic()
        with pytest.raises(AgentError, match="still not durable"):
            trainer.agent.wait(1, timeout_s=0.2)
        assert time.monotonic() - began < 2.0
    finally:
        os.kill(pid, signal.SIGCONT)
    assert trainer.verdict(1).stage == "committed"
    assert trainer.agent.status()["pid"] == pid
    trainer.agent.bye(timeout_s=10)


def test_an_agent_that_stays_stopped_is_replaced(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PING_S", 0.1)
    monkeypatch.setattr(link, "SILENCE_S_MAX", 0.3)
    monkeypatch.setattr(link, "STOPPED_S_MAX", 0.8)
    place.incarnation(world=1)
    trainer = Trainer.make(place).connect()
    agent = place.agent()
    assert agent is not None
    os.kill(agent.pid, signal.SIGSTOP)
    trainer.save(1)
    assert trainer.verdict(1).stage == "committed"
    assert trainer.agent.status()["pid"] != agent.pid and not agent.alive()
    trainer.agent.bye(timeout_s=10)


def test_an_agent_that_is_killed_while_it_starts_is_followed_by_another(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[spawn.Start] = []
    begin = spawn.start

    def start(settings: AgentSettings, standby: spawn.Standby | None = None) -> spawn.Start:
        starts.append(begin(settings, standby))
        if len(starts) == 1:
            os.killpg(starts[0]._process.pid, signal.SIGKILL)
        return starts[-1]

    monkeypatch.setattr(spawn, "start", start)
    place.incarnation(world=1)
    trainer = Trainer.make(place).connect()
    trainer.save(1)
    assert trainer.verdict(1).stage == "committed" and len(starts) == 2
    trainer.agent.bye(timeout_s=10)


def test_an_agent_outlives_whoever_started_it(place: Place) -> None:
    """Also one that died before it could say that it serves."""
    place.with_settings(linger_s=30.0).incarnation(world=1)
    begun = spawn.start(place.settings)
    os.close(begun._pipe)
    log = place.settings.runtime_dir / places.LOG
    until(lambda: log.exists() and "serving" in log.read_text(), "an agent")
    found = re.search(r"agent (\d+) INFO serving", log.read_text())
    trainer = Trainer.make(place).connect()
    assert found is not None and trainer.agent.status()["pid"] == int(found[1])
    trainer.agent.bye(timeout_s=10)


def test_an_agent_that_is_lost_again_and_again_is_given_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AgentError once; then every flush fails at once, and the trainer goes on."""
    monkeypatch.setattr(link, "STARTS_MAX", 2)
    monkeypatch.setenv("EVERSTEP_AGENT_POINTS", "kill:agent.accepted")
    place.incarnation(world=1)
    trainer = Trainer.make(place).connect()
    trainer.save(1)
    heard: list[str] = []
    with pytest.raises(AgentError, match="again and again"):
        until(lambda: heard.extend(n.stage for n in trainer.agent.poll()), "the error")
    assert heard.count("agent_lost") >= 2 and heard[-1] == "failed"
    trainer.save(2)
    assert [n.stage for n in trainer.agent.poll()] == ["failed"]
    assert trainer.verdict(2, 0.1).stage == "failed"
    trainer.agent.bye(timeout_s=1)


@pytest.mark.long
def test_an_agent_whose_place_was_cleaned_makes_room(place: Place) -> None:
    """Someone empties the runtime directory (a cleaner of temporary files): trainers find a new agent."""
    place.incarnation(world=1)
    trainer = Trainer.make(place).connect()
    agent = place.agent()
    assert agent is not None
    for name in ("agent.sock", "agent.lock"):
        (place.settings.runtime_dir / name).unlink()
    until(lambda: not agent.alive(), "the end of the agent that nobody can find")
    trainer.save(1)
    assert trainer.verdict(1).stage == "committed"
    trainer.agent.bye(timeout_s=10)


def test_an_arena_without_a_path_survives_the_agent_through_its_trainer(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.incarnation(world=1)
    monkeypatch.setenv("EVERSTEP_AGENT_POINTS", "kill:flush.image.first")
    trainer = Trainer.make(place, memfd=True).connect()
    monkeypatch.delenv("EVERSTEP_AGENT_POINTS")
    trainer.save(1)
    assert trainer.verdict(1).stage == "committed"
    assert trainer.agent.status()["epoch"] == 2
    place.check(1, 1, world=1)
    trainer.agent.bye(timeout_s=10)


@pytest.mark.long
def test_sigterm_ends_an_agent_only_after_its_work(place: Place, start: Start) -> None:
    place.with_settings(linger_s=600.0, rate_bytes_per_s=50_000.0).incarnation(world=1)
    trainer = start()
    trainer.call("connect")
    trainer.call("save", 1)
    agent = place.agent()
    assert agent is not None
    os.kill(agent.pid, signal.SIGTERM)
    trainer.call("bye", False)
    until(lambda: not agent.alive(), "the agent's end")
    assert place.durable() == [(1, 1)]
