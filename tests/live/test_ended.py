"""A job of which a rank has ended: the others do not wait for its vote, and a restart waits for who only ends."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import everstep
import pytest
from everstep import errors, writers

from tests.exchange.conftest import job, nodes, root
from tests.exchange.kit import Job, contents, held, state_with
from tests.facade.kit import Forked, forget_memory, opened, until

from .kit import BEAT_S, QUICK, beacons

__all__ = ["job", "nodes", "root"]

LONG_S = 300.0
"""Nobody is to wait that long."""
SOON_S = 25.0
WAITS = {**QUICK, "commit_timeout_s": LONG_S, "close_timeout_s": LONG_S}


def await_beacons(root: Path, count: int) -> None:
    until(lambda: len(beacons(root)) == count, "the beacons")


@pytest.mark.parametrize(("agent", "other"), [("process", 0), ("process", 1), ("inline", 1)])
def test_a_survivor_does_not_wait_for_a_rank_that_has_died(
    root: Path, nodes: list[str], job: Job, agent: str, other: int
) -> None:
    """On its own node or on another, in the middle of a step; what is given up stays in memory, and the job resumes
    from it."""
    places = [nodes[0], nodes[other]]

    def body(rank: int, ckpt: everstep.Checkpointer, say: Callable[..., None]) -> None:
        ckpt.step(1, state_with(contents(rank, 1)))
        say("stepped")
        if rank == 1:
            threading.Event().wait(LONG_S)
        until((root.parent / "died").exists, "its death")
        ckpt.step(2, state_with(contents(rank, 2)))
        began = time.monotonic()
        with pytest.raises(errors.SaveFailed, match=r"rank 1 (ended|died) without .*stays there") as caught:
            ckpt.close()
        assert "resumes" in str(caught.value)
        say(round(time.monotonic() - began))

    ranks = job.start(places, body, policy=WAITS, agent=agent)
    assert [rank.line() for rank in ranks] == ["stepped"] * 2
    await_beacons(root, 1 + other)
    ranks[1].stop()
    (root.parent / "died").touch()
    code, (took,) = ranks[0].end()
    assert code == 0 and int(took) < SOON_S
    assert held(root, nodes[0]) >= {(0, 1, 1), (0, 1, 2)}

    def again(rank: int, ckpt: everstep.Checkpointer, say: Callable[..., None]) -> None:
        say(ckpt.load(state_with(contents(rank, 0))), ckpt.recovery.tier if ckpt.recovery else None)
        ckpt.close(flush=False)

    assert job.run(places, again, agent=agent) == [["1 memory"]] * 2


def test_a_slow_rank_is_waited_for_and_a_restart_hears_that_the_first_only_ends(
    root: Path, nodes: list[str], job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(rank: int, ckpt: everstep.Checkpointer, say: Callable[..., None]) -> None:
        ckpt.step(1, state_with(contents(rank, 1)))
        say("stepped")
        if rank == 1:
            until((root.parent / "go").exists, "the word to go on")
        ckpt.close()
        say("closed")

    ranks = job.start([nodes[0]] * 2, body, policy=WAITS, agent="process")
    assert [rank.line() for rank in ranks] == ["stepped"] * 2
    monkeypatch.setenv("EVERSTEP_NODE", nodes[0])
    until(lambda: ends(root), "the drain")
    ckpt = opened(root, agent="process", policy={"rank_timeout_s": 10 * BEAT_S}, fresh="a second one")
    with (
        pytest.warns(RuntimeWarning, match="is ending: waiting up to 1 s"),
        pytest.raises(errors.RunInUse, match=r"it is ending: it waits up to \d+ s more.*take_over") as caught,
    ):
        ckpt.step(2, {"n": 2})
    assert caught.value.pid == ranks[0].pid
    (root.parent / "go").touch()
    assert [rank.end() for rank in ranks] == [(0, ["closed"])] * 2
    assert everstep.load(root)["own"]["n"] == 10


def ends(root: Path) -> list[Path]:
    found = (Path(os.environ["EVERSTEP_RUNTIME_DIR"]) / f"everstep-{os.getuid()}").glob("**/writers/*")
    return [path for path in found if b'"ends_at":null' not in path.read_bytes()]


def test_a_restart_waits_for_a_writer_that_only_ends(
    root: Path, forked: Callable[..., Forked], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(say: Callable[..., None]) -> None:
        ckpt = opened(root, agent="process", policy=QUICK)
        ckpt.load({"n": 0})
        ckpt.save(1, {"n": 1}).wait()
        assert ckpt._session is not None
        writers.ending(ckpt._place, ckpt._session.record_id, within_s=LONG_S)
        say("ends")
        until((root.parent / "go").exists, "the word to go on")
        ckpt.close()

    child = forked(train)
    assert child.line() == "ends"
    looks: list[bool] = []
    look = writers.is_writing

    def counted(*args: object) -> bool:
        looks.append(look(*args))  # type: ignore[arg-type]
        if len(looks) == 3:
            assert all(looks)
            (root.parent / "go").touch()
        return looks[-1]

    monkeypatch.setattr(writers, "is_writing", counted)
    with opened(root, agent="process", policy=QUICK) as ckpt:
        assert ckpt.load({"n": 0}) == 1
        with pytest.warns(RuntimeWarning, match=rf"process {child.pid}, .* is ending"):
            ckpt.step(2, {"n": 2})
    assert len(looks) > 3 and child.end()[0] == 0 and everstep.load(root)["n"] == 2


def test_one_that_ends_and_is_killed_holds_nobody_up(root: Path, forked: Callable[..., Forked]) -> None:
    def train(say: Callable[..., None]) -> None:
        ckpt = opened(root, agent="process", policy=QUICK)
        ckpt.load({"n": 0})
        ckpt.save(1, {"n": 1}).wait()
        assert ckpt._session is not None
        writers.ending(ckpt._place, ckpt._session.record_id, within_s=LONG_S)
        say("ends")
        threading.Event().wait(LONG_S)

    child = forked(train)
    assert child.line() == "ends"
    os.kill(child.pid, signal.SIGKILL)
    child.end()
    with warnings.catch_warnings(), opened(root, agent="process", policy=QUICK) as ckpt:
        warnings.simplefilter("error", RuntimeWarning)
        assert ckpt.load({"n": 0}) == 1
        ckpt.step(2, {"n": 2})


def test_a_rank_that_closes_leaves_the_mark_of_the_one_that_writes(
    root: Path, forked: Callable[..., Forked]
) -> None:
    """The ranks of a node have one mark, that of rank 0."""
    with opened(root) as ckpt:
        ckpt.load({"n": 0})
        ckpt.step(1, {"n": 1})
        session = ckpt._session
        assert session is not None

        def other(say: Callable[..., None]) -> None:
            writers.ending(ckpt._place, session.record_id, within_s=1.0)
            writers.unmark(ckpt._place, session.record_id)
            say(
                writers.is_writing(ckpt._place, session._record),
                writers.ending_s(ckpt._place, session._record),
            )

        assert forked(other).end() == (0, ["True None"])
    forget_memory(root)
