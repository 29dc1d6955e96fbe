"""What a job went back from is never loaded again, however late it becomes durable; it stays listed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import everstep
import pytest
from everstep import errors
from everstep.backends.errors import Permanent
from everstep.backends.faults import Fault
from everstep.backends.open import open_backend
from everstep.format.manifest import Abort, Manifest
from everstep.store.blocking import run_blocking
from everstep.store.commit import try_commit

from tests.facade.kit import Storage, Training, forget_memory, in_memory, opened, steps_on_disk, until

WAIT_S = 30.0


def train(ckpt: everstep.Checkpointer, training: Training, first: int, last: int) -> None:
    for step in range(first, last + 1):
        training.step()
        ckpt.step(step, training.state)


def told(*args: str | Path) -> Any:
    main = "from everstep.cli.main import main; main(prog_name='everstep')"
    command = [sys.executable, "-c", main, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout) if "--json" in args else done.stdout


def commit_late(root: Path, step: int, incarnation: int) -> object:
    """As an agent of another node would, that sees all votes: the decision."""

    async def commit() -> object:
        backend = open_backend(str(root), shared=True)
        try:
            return await try_commit(backend, step, incarnation, 1, 1)
        finally:
            await backend.close()

    return run_blocking(commit())


def at_7_undecided(root: Path, storage: Storage) -> tuple[everstep.Checkpointer, Training, Any]:
    """All votes of step 7 are in, and nothing is decided; the values of step 5 come last."""
    training = Training()
    ckpt = opened(root, memory=everstep.Memory(device_slots=1))
    ckpt.load(training.state)
    train(ckpt, training, 1, 5)
    five = training.weights()
    ckpt.save(5, training.state).wait()
    train(ckpt, training, 6, 7)
    denied = Fault("create", "000000007/0001/manifest", times=1000, error=lambda name: Permanent(name, "no"))
    storage.fail(denied)
    with pytest.raises(errors.SaveFailed):
        ckpt.save(7, training.state).wait()
    return ckpt, training, five


def test_a_late_commit_of_a_later_step_is_refused(root: Path, storage: Storage) -> None:
    """From the rollback on, whether or not a step follows it."""
    ckpt, _, _ = at_7_undecided(root, storage)
    ckpt.rollback(5, reason="a loss spike")
    decision = commit_late(root, 7, 1)
    assert isinstance(decision, Abort) and "incarnation 2" in decision.reason
    ckpt.close(flush=False)


def test_a_commit_just_before_the_new_incarnation_is_cut_off(root: Path, storage: Storage) -> None:
    ckpt, training, five = at_7_undecided(root, storage)
    assert isinstance(commit_late(root, 7, 1), Manifest)
    ckpt.rollback(5, reason="a loss spike")
    train(ckpt, training, 6, 6)
    assert steps_on_disk(root) == [5, 7]
    ckpt.close(flush=False)
    forget_memory(root)

    listed = told("ls", root, "--json")
    found = {(one["incarnation"], one["step"]): one["in_lineage"] for one in listed["checkpoints"]}
    assert found == {(1, 5): True, (1, 7): False}
    assert listed["newest"] == 5
    assert listed["rollbacks"] == [
        {"incarnation": 2, "from_incarnation": 1, "step": 5, "reason": "a loss spike"}
    ]
    assert "incarnation 2 went back to step 5 of incarnation 1: a loss spike" in told("ls", root)
    assert "step 5 of 1 (rolled back: a loss spike)" in told("show", root)
    again = Training(seed=9)
    with opened(root) as ckpt:
        assert ckpt.load(again.state) == 5
        assert all(again.weights()[name].equal(value) for name, value in five.items())


def test_what_was_gone_back_from_stays_in_memory_and_never_wins(root: Path) -> None:
    """Slots of later steps are there after a crash; the new incarnation's lower step counts."""
    training = Training()
    ckpt = opened(root, memory=everstep.Memory(slots=6))
    ckpt.load(training.state)
    train(ckpt, training, 1, 5)
    ckpt.rollback(3, reason="back")
    train(ckpt, training, 4, 4)
    assert {4, 5} <= set(in_memory(root))
    listed = told("ls", root, "--json")["memory"]
    assert {(one["incarnation"], one["step"]): one["in_lineage"] for one in listed}[1, 5] is False
    ckpt.close(flush=False)
    again = Training(seed=9)
    with opened(root, memory=everstep.Memory(slots=6)) as ckpt:
        assert ckpt.load(again.state) == 4
        assert ckpt.recovery is not None and ckpt.recovery.incarnation == 2


SLEEPER = """
training = Training()
ckpt = everstep.Checkpointer(root, policy=policy(linger_s=2.0), memory=everstep.Memory(device_slots=1, slots=4))
ckpt.load(training.state)
def train(first, last):
    for step in range(first, last + 1):
        training.step()
        ckpt.step(step, training.state)
train(1, 4)
ckpt.save(4, training.state).wait()
train(5, 6)
say(ckpt.agent_pid)
sys.stdin.readline()
later = ckpt.save(6, training.state)
say(ckpt.rollback(5, reason="a spike"))
train(6, 6)
say("on")
try:
    later.wait(timeout_s=20)
    say("durable")
except everstep.errors.EverstepError as error:
    say(type(error).__name__)
ckpt.save(6, training.state).wait()
ckpt.close()
say("closed")
"""


def test_an_agent_that_slept_through_the_rollback(root: Path, script: Any) -> None:
    """It is stopped with a later step's flush to come, and goes on once the new incarnation's record is there: the
    rollback waits for it."""
    job = script(SLEEPER, root)
    agent = int(job.line())
    os.kill(agent, signal.SIGSTOP)
    try:
        job.go_on()
        until(lambda: (root / "incarnations" / "0002.json").exists(), "the new incarnation's record")
    finally:
        os.kill(agent, signal.SIGCONT)
    assert job.line() == "5"
    assert job.line() == "on"
    assert job.line() in ("SaveAbandoned", "Superseded")
    assert job.line() == "closed", job.end()
    code, _, errors = job.end()
    assert code == 0, errors
    listed = told("ls", root, "--json")
    counting = [(one["incarnation"], one["step"]) for one in listed["checkpoints"] if one["in_lineage"]]
    assert counting == [(1, 4), (2, 6)]
    deadline = time.monotonic() + WAIT_S
    while os.path.exists(f"/proc/{agent}") and time.monotonic() < deadline:
        time.sleep(0.05)
