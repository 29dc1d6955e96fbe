"""What goes wrong in the background is told, ends nothing by itself, loses nothing, and can be tried again."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import everstep
import everstep.memorytier
import pytest
import torch
from everstep import errors
from everstep.agent import link
from everstep.backends.errors import Permanent
from everstep.backends.faults import Fault

from .kit import Forked, Storage, arenas_of, forget_memory, opened, steps_on_disk, until

DENIED = Fault(op="open_writer", times=10**9, error=lambda name: Permanent(name, "scripted: denied"))


def test_a_failed_write_is_told_on_the_handle_and_at_the_next_call(root: Path, storage: Storage) -> None:
    state = {"n": 1}
    ckpt = opened(root)
    ckpt.load(state)
    ckpt.save(1, state).wait()
    storage.fail(DENIED)
    handle = ckpt.save(2, state)
    until(lambda: handle.error, "the failure")
    assert isinstance(handle.error, errors.SaveFailed) and "denied" in str(handle.error)
    assert handle.error.step == 2 and not handle.done()
    with pytest.warns(RuntimeWarning, match="step 2.*denied"):
        ckpt.step(3, state)
    assert steps_on_disk(root) == [1], "the failed step is in no list"
    storage.heal()
    ckpt.close()
    assert steps_on_disk(root) == [1, 3]


def test_the_same_step_can_be_saved_again(root: Path, storage: Storage) -> None:
    state = {"n": 1}
    ckpt = opened(root)
    ckpt.load(state)
    storage.fail(DENIED)
    with pytest.raises(errors.SaveFailed, match="denied"):
        ckpt.save(1, state).wait()
    storage.heal()
    state["n"] = 5  # the snapshot of step 1 was taken before
    handle = ckpt.save(1, state)
    handle.wait()
    assert handle.done() and handle.error is None
    ckpt.close()
    assert everstep.load(root, step=1)["n"] == 1


def test_policy_raise_raises_at_the_next_call_and_goes_on(root: Path, storage: Storage) -> None:
    state = {"n": 1}
    ckpt = opened(root, policy={"on_failure": "raise", "full_every": 1, "on_slow": "wait"})
    ckpt.load(state)
    storage.fail(DENIED)
    handle = ckpt.step(1, state)
    until(lambda: handle.error, "the failure")
    with pytest.raises(errors.SaveFailed, match="denied"):
        ckpt.step(2, state)
    storage.heal()
    ckpt.step(2, state)  # the same call again
    ckpt.close()
    assert steps_on_disk(root)[-1] == 2


def test_failures_in_a_row_escalate(root: Path, storage: Storage) -> None:
    state = {"n": 1}
    ckpt = opened(root, policy={"full_every": 1, "on_slow": "wait", "failures_max": 3})
    ckpt.load(state)
    storage.fail(DENIED)
    told = []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in range(1, 10):
            try:
                handle = ckpt.step(step, state)
            except errors.SaveFailed as error:
                told.append((step, error))
                break
            until(lambda handle=handle: handle.error, "the failure")
    assert [step for step, _ in told] == [4], "two warnings, then an error"
    assert (
        sum("did not become durable" in str(one.message) or "denied" in str(one.message) for one in heard)
        >= 2
    )
    storage.heal()
    ckpt.step(4, state)
    ckpt.close()


def test_close_tells_what_is_not_durable_and_keeps_it_in_memory(root: Path, storage: Storage) -> None:
    state = {"n": 7}
    ckpt = opened(root)
    ckpt.load(state)
    ckpt.step(1, state)
    storage.fail(DENIED)
    with pytest.raises(errors.SaveFailed, match="denied"):
        ckpt.close()
    ckpt.close()  # again: nothing
    storage.heal()
    assert steps_on_disk(root) == []
    assert everstep.load(root) == {"n": 7}, "the snapshot is still in memory"
    with opened(root) as again:
        assert again.load(state) == 1
    assert steps_on_disk(root) == [1] or everstep.load(root) == {"n": 7}


def test_with_block_shows_the_original_error(root: Path, storage: Storage) -> None:
    storage.fail(DENIED)
    with pytest.raises(ZeroDivisionError):
        with opened(root) as ckpt:
            ckpt.load({"n": 1})
            ckpt.step(1, {"n": 1})
            raise ZeroDivisionError


def test_a_handle_tells_after_close_and_reports_timeouts(root: Path) -> None:
    state = {"w": torch.zeros(100_000)}
    ckpt = opened(root, policy={"rate_bytes_per_s": 4e5})
    ckpt.load(state)
    handle = ckpt.save(1, state)
    with pytest.raises(errors.SaveFailed, match="in time"):
        handle.wait(timeout_s=0.05)
    assert handle.error is None and not handle.done()
    ckpt.close()
    assert handle.done() and handle.error is None and "durable" in repr(handle)
    handle.wait()


def test_nothing_older_goes_before_the_new_one_is_durable(root: Path, storage: Storage) -> None:
    ckpt = opened(root, policy={"keep_last": 1, "failures_max": None})
    ckpt.load({"n": 0})
    ckpt.save(1, {"n": 1}).wait()
    storage.fail(Fault(op="create", name="manifest", times=10**9, error=lambda name: Permanent(name, "no")))
    for step in (2, 3):
        with pytest.raises(errors.SaveFailed):
            ckpt.save(step, {"n": step}).wait()
        assert steps_on_disk(root) == [1]
        assert everstep.load(root, step=1)["n"] == 1
    storage.heal()
    ckpt.save(4, {"n": 4}).wait()
    ckpt.close()
    assert steps_on_disk(root) == [4]


def test_trouble_with_a_value_is_told_before_anything_is_written(root: Path) -> None:
    ckpt = opened(root, policy={"full_every": 1})
    ckpt.load({"n": 0})
    ckpt.save(1, {"n": 1}).wait()
    before = sorted(path.name for path in (root / "checkpoints").iterdir())
    for bad, where in [
        ({"f": {"deep": [lambda: 0]}}, "f"),
        ({"lock": __import__("threading").Lock()}, "lock"),
    ]:
        for call in (ckpt.step, ckpt.save):
            with pytest.raises(errors.UnsupportedValue) as caught:
                call(2, bad)
            assert where in str(caught.value)
    with pytest.raises(errors.UnsupportedValue, match="meta"):
        ckpt.step(2, {"w": torch.zeros(3, device="meta")})
    assert sorted(path.name for path in (root / "checkpoints").iterdir()) == before
    assert ckpt.step(2, {"n": 2}) is not None, "the very step can still be made, and flushed as was decided"
    ckpt.close()
    assert everstep.load(root, step=2) == {"n": 2}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(mount)], check=False).returncode:
        pytest.skip("no right to mount a small file system")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk_is_told_clearly_and_costs_nothing(small_disk: Path) -> None:
    root = small_disk / "run"
    state = {"w": torch.zeros(1 << 18)}  # 1 MiB
    ckpt = opened(root, policy={"keep_last": 1})
    ckpt.load(state)
    state["w"].fill_(1)
    ckpt.save(1, state).wait()
    ballast = small_disk / "ballast"
    with ballast.open("wb") as file:
        file.write(bytes(int(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize - (600 << 10))))
    state["w"].fill_(2)
    with pytest.raises((errors.StorageFull, errors.SaveFailed)) as caught:
        ckpt.save(2, state).wait()
    assert "StorageFull" in type(caught.value).__name__ + str(caught.value)
    assert steps_on_disk(root) == [1]
    assert everstep.load(root, step=1)["w"].eq(1).all()
    ballast.unlink()
    state["w"].fill_(3)
    ckpt.save(3, state).wait()
    ckpt.close()
    forget_memory(root)
    assert everstep.load(root)["w"].eq(3).all()


def test_a_run_cannot_come_into_being_on_a_full_disk(small_disk: Path) -> None:
    with (small_disk / "ballast").open("wb") as file:
        with pytest.raises(OSError):
            while True:
                file.write(bytes(1 << 16))
                file.flush()
    ckpt = opened(small_disk / "run")
    ckpt.load({"n": 0})
    with pytest.raises((errors.StorageFull, errors.NotARun)):
        ckpt.save(1, {"n": 1})


# -- the agent's process


def lose_agents(ckpt: everstep.Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the agent, of which no other is started then."""
    monkeypatch.setattr(link, "STARTS_MAX", 0)
    agent = ckpt.agent_pid
    assert agent is not None
    os.kill(agent, signal.SIGKILL)


def test_training_goes_on_without_an_agent(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"n": 0}
    ckpt = opened(root, agent="process")
    ckpt.load(state)
    ckpt.save(1, {"n": 1}).wait()
    lose_agents(ckpt, monkeypatch)
    steps = itertools.count(2)

    def step() -> bool:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            ckpt.step(next(steps), state)
        return any("lost again and again" in str(one.message) for one in heard)

    until(step, "the warning")
    last = next(steps)
    ckpt.step(last, {"n": last})
    with pytest.raises(errors.EverstepError, match="again and again"):
        ckpt.save(last, {"n": last}).wait()
    ckpt._close(flush=False, keep=True)
    ckpt = opened(root, agent="inline")
    assert ckpt.load(state) == last and state["n"] == last, "from memory"
    ckpt.close()


def test_losing_the_agent_is_an_error_where_failures_are(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = opened(root, agent="process", policy={"on_failure": "raise"})
    ckpt.load({"n": 0})
    ckpt.save(1, {"n": 1}).wait()
    lose_agents(ckpt, monkeypatch)
    steps = itertools.count(2)
    with pytest.raises(errors.AgentError, match="again and again"):
        until(lambda: ckpt.step(next(steps), {"n": 1}), "the error")
    ckpt.close(flush=False)


def test_an_opening_that_fails_leaves_no_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERSTEP_SECRET", raising=False)
    monkeypatch.delenv("EVERSTEP_SECRET_FILE", raising=False)
    ckpt = opened(root, memory=everstep.Memory(replicas=1, spares=("127.0.0.1:9",)), agent="process")
    ckpt.load({"n": 0})
    assert arenas_of(root)
    with pytest.raises(errors.BadOption, match="secret"):
        ckpt.step(1, {"n": 1})
    ckpt.close()
    assert arenas_of(root) == []


def test_a_killed_agent_is_told_replaced_and_its_save_completes(root: Path) -> None:
    state = {"w": torch.zeros(300_000), "n": 0}
    ckpt = opened(root, agent="process", policy={"rate_bytes_per_s": 1.5e6})
    ckpt.load(state)
    ckpt.save(1, state).wait()
    state["n"] = 2
    handle = ckpt.save(2, state)
    first = ckpt.agent_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    longest = 0.0
    with pytest.warns(RuntimeWarning, match="agent died"):
        for step in range(3, 12):
            state["n"] = step
            began = time.monotonic()
            ckpt.step(step, state)
            longest = max(longest, time.monotonic() - began)
        handle.wait()
    assert handle.done() and longest < 5, "training goes on meanwhile"
    assert ckpt.agent_pid != first
    ckpt.close()
    assert everstep.load(root, step=2)["n"] == 2 and everstep.load(root)["n"] == 11


def test_without_room_in_shared_memory_snapshots_survive_the_trainer_in_the_agent(
    root: Path, forked: Callable[..., Forked], monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(*args: object, **options: object) -> None:
        raise errors.MemoryTooSmall("shared memory is too small")

    monkeypatch.setattr(everstep.memorytier.Arena, "create", small)

    def train(say: Callable[..., None]) -> None:
        ckpt = opened(root, agent="process", policy={"linger_s": 20.0})
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            ckpt.load({"n": 0})
        say(any("shared with the agent only" in str(one.message) for one in heard))
        for step in (1, 2, 3):
            ckpt.step(step, {"n": step})
        os.kill(os.getpid(), signal.SIGKILL)

    child = forked(train)
    assert child.line() == "True"
    assert child.end()[0] == -signal.SIGKILL
    state = {"n": 0}
    ckpt = opened(root, agent="process", policy={"linger_s": 0.5})
    assert ckpt.load(state) == 3 and state["n"] == 3
    assert ckpt.recovery is not None and ckpt.recovery.tier == "memory"
    ckpt.save(4, {"n": 4}).wait()
    ckpt.close()
    assert everstep.load(root)["n"] == 4


def test_memory_that_was_asked_for_by_name_and_is_too_small_is_an_error_before_training(
    root: Path, small_disk: Path
) -> None:
    ckpt = opened(root, memory=everstep.Memory(path=small_disk))
    with pytest.raises(errors.MemoryTooSmall) as caught:
        ckpt.load({"w": torch.zeros(1 << 20)})
    assert "Memory" in str(caught.value)
    assert not root.exists(), "nothing was written"


def test_memory_that_killed_runs_left_is_named_where_it_is_missing(
    root: Path, tmp_path: Path, small_disk: Path, forked: Callable[..., Forked]
) -> None:
    memory, state = everstep.Memory(path=small_disk), {"w": torch.ones(300_000)}

    def train(say: Callable[..., None]) -> None:
        ckpt = opened(tmp_path / "other", memory=memory)
        ckpt.load(state)
        ckpt.step(1, state)
        os.kill(os.getpid(), signal.SIGKILL)

    forked(train).end()
    (left,) = small_disk.glob("*/*/*.arena")
    nbytes = left.stat().st_blocks * 512
    ckpt = opened(root, memory=memory)
    with pytest.raises(errors.MemoryTooSmall) as caught:
        ckpt.load(state)
    command = f"clean-memory --all --memory {small_disk}"
    assert f"{nbytes:,} bytes are snapshots of other runs" in str(caught.value)
    assert f"everstep {command}" in str(caught.value)
    subprocess.run([sys.executable, "-m", "everstep.cli", *command.split()], check=True, timeout=60)
    with opened(root, memory=memory) as ckpt:
        ckpt.load(state)
        ckpt.step(1, state)
    ckpt = opened(tmp_path / "third", memory=memory)
    with pytest.raises(errors.MemoryTooSmall, match="no room") as caught:
        ckpt.load({"w": torch.ones(1 << 20)})
    assert "clean-memory" not in str(caught.value)


def test_waits_for_the_agent_are_bounded(root: Path, storage: Storage) -> None:
    """All slots taken by flushes that cannot end: the trainer waits as long as it said, and hears why."""
    state = {"w": torch.zeros(200_000)}
    ckpt = opened(root, policy={"rate_bytes_per_s": 1e5, "slot_timeout_s": 0.5, "close_timeout_s": 0.5})
    ckpt.load(state)
    began = time.monotonic()
    with pytest.raises(errors.CapacityError, match="no slot became free"):
        for step in range(1, 6):
            ckpt.save(step, state)
    assert time.monotonic() - began < 5
    with pytest.raises(errors.SaveFailed):
        ckpt.close()
