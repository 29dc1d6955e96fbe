"""Flushes through a real agent process: commit, one verdict for all ranks, rotation."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from everstep.agent.client import AgentClient
from everstep.errors import AgentError, SaveAbandoned, StorageFull, from_wire
from everstep.plan.retention import Retention

from .agent_kit import Place, Trainer, TrainerProcess, until

Start = Callable[..., TrainerProcess]
Special = Callable[..., "subprocess.Popen[str]"]


def stages(client: AgentClient, step: int) -> list[str]:
    return [news.stage for news in client.poll() if news.step == step]


def test_two_ranks_commit_through_one_agent(place: Place, start: Start) -> None:
    place.incarnation(world=2)
    ranks = [start(rank, 2) for rank in range(2)]
    for trainer in ranks:
        trainer.send("connect")  # both at once: one agent is elected
    for trainer in ranks:
        trainer.answer()
    for trainer in ranks:
        trainer.call("save", 3)
    assert [trainer.call("verdict", 3)[0] for trainer in ranks] == ["committed", "committed"]
    place.check(1, 3, world=2)
    heard = [stage for stage, _, _ in ranks[0].call("poll")]
    assert heard.count("queued") == 2 and heard.count("voted") == 2 and heard[-1] == "committed"
    agent = place.agent()
    assert agent is not None and place.log().count("serving") == 1
    for trainer in ranks:
        trainer.call("bye", True)
    until(lambda: not agent.alive(), "the agent's end after it has lingered")
    assert not (place.settings.runtime_dir / "agent.sock").exists()


def test_slots_are_let_go_once_written(place: Place) -> None:
    """With three slots, a flush of every step never runs out of room."""
    place.incarnation()
    trainer = Trainer.make(place, slots=3).connect()
    for step in range(1, 9):
        trainer.save(step)
        assert trainer.verdict(step).stage == "committed"
    assert place.durable() == [(1, step) for step in range(1, 9)]
    trainer.agent.bye(timeout_s=10)


def test_rotation_keeps_the_last_ones(place: Place) -> None:
    place.with_settings(retention=Retention(keep_last=2, keep_every=4)).incarnation()
    trainer = Trainer.make(place).connect()
    for step in range(1, 8):
        trainer.save(step)
        assert trainer.verdict(step).stage == "committed"
    until(lambda: place.durable() == [(1, 4), (1, 6), (1, 7)], "the rotation")
    assert "rotated" in until(lambda: stages(trainer.agent, -1), "news of the rotation")
    trainer.agent.bye(timeout_s=10)


@pytest.mark.parametrize("op", ["writer.write", "create"])
def test_full_disk_fails_for_all_ranks_and_the_step_can_be_saved_again(
    place: Place, special_agent: Special, op: str
) -> None:
    place.incarnation(world=2)
    name = "rank-00001" if op == "writer.write" else "rank-00001.vote"
    special_agent(faults=[{"op": op, "name": name, "error": "NoSpace"}])
    ranks = [Trainer.make(place, rank, 2).connect() for rank in range(2)]
    for trainer in ranks:
        trainer.save(7)
    for trainer in ranks:
        verdict = trainer.verdict(7)
        assert verdict.stage == "failed" and verdict.error is not None
        error = from_wire(verdict.error)
        assert isinstance(error, StorageFull) and (error.step, error.rank) == (7, 1)
    assert place.durable() == [] and place.decisions(7) == ["abort"]
    attempt = Path(place.settings.root) / "checkpoints/000000007/0001/a1"
    until(lambda: not list(attempt.rglob("*.*")), "the removal of what was half done")
    for trainer in ranks:
        trainer.flush(7)
    assert [trainer.verdict(7).stage for trainer in ranks] == ["committed", "committed"]
    assert [trainer.verdict(7).attempt for trainer in ranks] == [2, 2]
    place.check(1, 7, world=2)
    for trainer in ranks:
        trainer.agent.bye(timeout_s=10)


def test_what_may_pass_is_tried_again(place: Place, special_agent: Special) -> None:
    place.incarnation()
    special_agent(
        faults=[
            {"op": "writer.commit", "times": 2, "error": "Retryable"},
            {"op": "create", "name": "manifest", "times": 2, "error": "Retryable"},
            {"op": "list_names", "nth": 4, "error": "Retryable"},
        ]
    )
    trainer = Trainer.make(place).connect()
    trainer.save(1)
    assert trainer.verdict(1).stage == "committed"
    place.check(1, 1, world=1)
    trainer.agent.bye(timeout_s=10)


def test_a_rank_that_fails_late_gets_the_verdict_of_the_others(place: Place, special_agent: Special) -> None:
    """Rank 1 asks after rank 0's failure has ended the attempt: no new attempt is opened for it alone."""
    place.incarnation(world=2)
    special_agent(faults=[{"op": "writer.write", "name": "rank-00000", "error": "Permanent"}])
    first, second = (Trainer.make(place, rank, 2).connect() for rank in range(2))
    second.snapshot(5)
    first.save(5)
    assert first.verdict(5).stage == "failed"
    second.flush(5)
    verdict = second.verdict(5)
    assert verdict.stage == "failed" and verdict.attempt == 1 and verdict.error is not None
    assert "rank 0" in str(from_wire(verdict.error))
    assert place.decisions(5) == ["abort"]
    for trainer in (first, second):
        trainer.agent.bye(timeout_s=10)


def test_a_missing_vote_ends_in_a_verdict_that_names_the_rank(place: Place) -> None:
    place.with_settings(commit_timeout_s=0.5).incarnation(world=3)
    ranks = [Trainer.make(place, rank, 3).connect() for rank in range(3)]
    for trainer in ranks:
        trainer.snapshot(2)
    for trainer in (ranks[0], ranks[2]):
        trainer.flush(2)
    began = time.monotonic()
    for trainer in (ranks[0], ranks[2]):
        verdict = trainer.verdict(2)
        assert verdict.stage == "failed" and verdict.error is not None
        assert verdict.error["fields"]["ranks"] == "1" and "did not vote within" in verdict.error["message"]
    assert time.monotonic() - began < 10
    assert place.decisions(2) == ["abort"]
    for trainer in ranks:
        trainer.agent.bye(timeout_s=10)


def test_a_rank_that_dies_without_the_snapshot_is_named_at_once(place: Place, start: Start) -> None:
    place.with_settings(commit_timeout_s=600.0).incarnation(world=2)
    dying = start(1, 2)
    trainer = Trainer.make(place, 0, 2).connect()
    dying.call("connect")
    trainer.save(2)
    dying.kill()
    verdict = trainer.verdict(2)
    assert verdict.stage == "failed" and verdict.error is not None and verdict.error["fields"]["ranks"] == "1"
    trainer.agent.bye(timeout_s=10)


def test_a_rank_that_dies_with_the_snapshot_does_not_stop_the_commit(place: Place, start: Start) -> None:
    place.incarnation(world=2)
    dying = start(1, 2)
    trainer = Trainer.make(place, 0, 2).connect()
    dying.call("connect")
    dying.call("snapshot", 2)
    trainer.save(2)
    dying.kill()
    assert trainer.verdict(2).stage == "committed"
    place.check(1, 2, world=2)
    trainer.agent.bye(timeout_s=10)


def test_giving_up_is_one_verdict_for_all(place: Place) -> None:
    place.incarnation(world=2)
    ranks = [Trainer.make(place, rank, 2).connect() for rank in range(2)]
    ranks[0].save(4)
    ranks[1].snapshot(4)
    ranks[0].agent.give_up(4, "a newer step is wanted")
    assert ranks[0].verdict(4).stage == "abandoned"
    ranks[1].flush(4)  # too late
    verdict = ranks[1].verdict(4)
    assert verdict.stage == "abandoned" and verdict.error is not None
    error = from_wire(verdict.error)
    assert isinstance(error, SaveAbandoned) and "a newer step is wanted" in str(error)
    for trainer in ranks:
        trainer.agent.bye(timeout_s=10)


@pytest.mark.long
def test_a_rank_that_cannot_take_part_gives_up_for_all(place: Place) -> None:
    """It never asked for the step itself."""
    place.incarnation(world=2)
    ranks = [Trainer.make(place, rank, 2).connect() for rank in range(2)]
    ranks[0].save(4)
    ranks[1].agent.give_up(4, "no snapshot here")
    assert ranks[0].verdict(4).stage == "abandoned"
    assert place.decisions(4) == ["abort"]
    for trainer in ranks:
        trainer.agent.bye(timeout_s=10)


def test_after_a_rank_gave_up_the_next_attempt_is_the_same_one_for_all(place: Place) -> None:
    """Whether the others heard of it before, while or after they asked."""
    place.incarnation(world=2)
    ranks = [Trainer.make(place, rank, 2).connect() for rank in range(2)]
    for trainer in ranks:
        trainer.snapshot(4)
    ranks[1].agent.give_up(4, "not yet")
    ranks[1].agent.give_up(4, "not yet, again")
    until(lambda: place.decisions(4) == ["abort"], "the abort record")
    time.sleep(0.1)  # the news lies in the sockets, unread
    ranks[0].flush(4)
    assert ranks[0].verdict(4).stage == "abandoned"
    for trainer in ranks:
        trainer.flush(4)
    assert [trainer.verdict(4).stage for trainer in ranks] == ["committed", "committed"]
    assert place.decisions(4) == ["abort", "manifest"]
    for trainer in ranks:
        trainer.agent.bye(timeout_s=10)


def test_what_happened_is_in_the_runs_events(place: Place) -> None:
    place.incarnation()
    trainer = Trainer.make(place).connect()
    agent = place.agent()
    assert agent is not None
    trainer.save(1)
    trainer.verdict(1)
    trainer.agent.bye(timeout_s=10)
    until(lambda: not agent.alive(), "the agent's end")
    (events,) = (Path(place.settings.root) / "events").glob("*.jsonl")
    happened = [json.loads(line) for line in events.read_text().splitlines()]
    assert [(one["kind"], one["step"]) for one in happened] == [
        ("written", 1),
        ("voted", 1),
        ("committed", 1),
    ]
    assert happened[0]["nbytes"] > 0 and happened[0]["rank"] == 0


def test_a_slot_that_was_reused_fails_the_flush(place: Place) -> None:
    place.incarnation()
    trainer = Trainer.make(place, slots=3)
    old = trainer.snapshot(1)
    for step in range(2, 5):
        trainer.snapshot(step)
    trainer.connect()
    trainer.agent.flush(1, slot=old.index, generation=old.generation)
    verdict = trainer.verdict(1)
    assert verdict.stage == "failed" and verdict.error is not None and verdict.error["type"] == "SlotGone"
    assert place.durable() == []
    trainer.agent.bye(timeout_s=10)


@pytest.mark.long
def test_the_queue_is_bounded(place: Place) -> None:
    place.with_settings(queue_max=1, rate_bytes_per_s=4000.0).incarnation()
    trainer = Trainer.make(place).connect()
    for step in (1, 2, 3):
        trainer.save(step)
    verdict = until(lambda: [n for n in trainer.agent.poll() if n.stage == "failed"], "a refusal")[0]
    assert verdict.error["type"] == "AgentError" and "full" in verdict.error["message"]
    trainer.agent.bye(timeout_s=0.5, flush=False)


@pytest.mark.long
def test_waiting_for_what_was_not_asked_for_is_an_error(place: Place) -> None:
    place.incarnation()
    trainer = Trainer.make(place).connect()
    with pytest.raises(AgentError, match="not asked"):
        trainer.agent.wait(9, timeout_s=1)
    trainer.agent.bye(timeout_s=10)


def test_a_superseding_incarnation(place: Place, start: Start) -> None:
    """What lies above the cut is given up, what lies below still becomes durable, and the old trainers hear
    of it."""
    place.with_settings(commit_timeout_s=600.0).incarnation(world=2)
    old = Trainer.make(place, 0, 2).connect()
    other = Trainer.make(place, 1, 2).connect()
    for step in (2, 3):
        old.save(step)  # neither is complete: rank 1 is missing
        other.snapshot(step)
    place.incarnation(adopted=(1, 2), world=1)
    new = start(0, 1, 2)
    new.call("connect")
    assert old.verdict(3).stage == "superseded"
    other.flush(2)
    assert old.verdict(2).stage == "committed"
    assert place.durable() == [(1, 2)]
    news = old.agent.poll() + other.agent.poll()
    assert {n.step for n in news if n.stage == "superseded"} >= {3, -1}
    new.call("save", 3)
    assert new.call("verdict", 3)[0] == "committed"
    assert place.durable() == [(1, 2), (2, 3)]


def test_a_commit_looks_for_newer_incarnations_itself(place: Place) -> None:
    """The newer one is on another node, so it never says hello here."""
    place.incarnation()
    trainer = Trainer.make(place).connect()
    trainer.save(1)
    assert trainer.verdict(1).stage == "committed"
    place.incarnation(adopted=(1, 1))
    trainer.save(2)
    assert trainer.verdict(2).stage == "superseded"
    assert place.durable() == [(1, 1)]
    trainer.agent.bye(timeout_s=10)
