"""A snapshot is of one moment: no later change of the live state reaches it, and saves never mix."""

from __future__ import annotations

import os
import resource
import signal
import warnings
from pathlib import Path
from typing import Any

import everstep
import numpy as np
import pytest
import torch
from everstep.backends.faults import Fault

from .kit import Storage, Training, forget_memory, opened, same_bits, steps_on_disk, until


def live() -> dict[str, Any]:
    return {
        "tensor": torch.arange(100_000.0),
        "small": torch.zeros(3),
        "array": np.arange(100_000.0),
        "little": np.arange(3),
        "nested": {"list": [1, [2, {"deep": [3]}]], "text": "before"},
        "bytes": bytearray(b"before"),
    }


def spoil(state: dict[str, Any]) -> None:
    state["tensor"].fill_(-1)
    state["small"].data.fill_(-1)
    state["array"][:] = -1
    state["little"][:] = -1
    state["nested"]["list"][1][1]["deep"].append(4)
    state["nested"]["list"].clear()
    state["nested"]["text"] = "after"


@pytest.mark.parametrize("call", ["step", "save"])
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_changes_after_the_call_do_not_reach_the_checkpoint(root: Path, tier: str, call: str) -> None:
    state = live()
    del state["bytes"]
    ckpt = opened(root, policy={"full_every": 1})
    ckpt.load(live())
    getattr(ckpt, call)(1, state)
    spoil(state)
    ckpt.close(flush=tier == "disk")
    if tier == "disk":
        forget_memory(root)
    found = everstep.load(root)
    expected = live()
    assert torch.equal(found["tensor"], expected["tensor"]) and torch.equal(found["small"], expected["small"])
    assert np.array_equal(found["array"], expected["array"]) and np.array_equal(
        found["little"], expected["little"]
    )
    assert found["nested"] == expected["nested"]


def test_new_tensor_objects_and_changes_through_data_are_seen_every_time(root: Path) -> None:
    """Nothing is taken for unchanged by its identity, address or version counter."""
    kept = torch.zeros(5000)
    state = {"kept": kept, "new": torch.zeros(5000)}
    ckpt = opened(root, policy={"keep_last": 10})
    ckpt.load(state)
    for step in (1, 2, 3):
        kept.data.fill_(step)  # no version counter moves
        state["new"] = torch.full((5000,), float(step))
        ckpt.save(step, state).wait()
    storage = kept.untyped_storage().nbytes()
    kept.untyped_storage().resize_(0)
    kept.untyped_storage().resize_(storage)
    kept.data.fill_(4)
    ckpt.save(4, state).wait()
    ckpt.close()
    for step in (1, 2, 3, 4):
        found = everstep.load(root, step=step)
        assert found["kept"].eq(step).all() and found["new"].eq(min(step, 3)).all()


def test_saves_faster_than_storage_never_mix(root: Path) -> None:
    ckpt = opened(root, policy={"rate_bytes_per_s": 4e6, "keep_last": 20})
    state = {"a": torch.zeros(50_000), "b": torch.zeros(50_000)}
    ckpt.load(state)
    handles = []
    for step in range(1, 9):
        state["a"].fill_(step)
        state["b"].fill_(step)
        handles.append(ckpt.save(step, state))
    found = everstep.load(root)  # from memory, while flushes are on their way
    assert found["a"].eq(8).all() and found["b"].eq(8).all()
    ckpt.close()
    assert all(handle.done() for handle in handles)
    for step in range(1, 9):
        found = everstep.load(root, step=step)
        assert found["a"].eq(step).all() and found["b"].eq(step).all()


def test_a_snapshot_that_is_to_be_flushed_stays_until_the_agent_comes_to_it(root: Path) -> None:
    ckpt = opened(root, agent="process")
    ckpt.load({"n": 0})
    ckpt.save(1, {"n": 1}).wait()
    agent = ckpt.agent_pid
    assert agent is not None
    os.kill(agent, signal.SIGSTOP)
    try:
        handle = ckpt.save(2, {"n": 2})
        for step in range(3, 12):
            ckpt.step(step, {"n": step})
    finally:
        os.kill(agent, signal.SIGCONT)
    handle.wait()
    ckpt.close()
    assert everstep.load(root, step=2)["n"] == 2 and everstep.load(root)["n"] == 11


def test_resident_memory_stays_flat_over_many_saves(root: Path) -> None:
    state = {"w": torch.zeros(1 << 20), "more": [torch.zeros(1 << 18) for _ in range(4)]}
    nbytes = 8 << 20
    with opened(root, policy={"keep_last": 1}) as ckpt:
        ckpt.load(state)
        for step in range(1, 11):
            ckpt.save(step, state).wait()
        before = resident()
        for step in range(11, 61):
            ckpt.save(step, state).wait()
        assert resident() - before < nbytes, "one checkpoint's worth grew over 50 saves"


def resident() -> int:
    """Private resident bytes: what shared memory holds is counted by its size, not by its touches."""
    with open("/proc/self/statm") as file:
        fields = file.read().split()
    return (int(fields[1]) - int(fields[2])) * resource.getpagesize()


# -- late copies


def overlapping(root: Path, training: Training, steps: int = 3, **more: Any) -> everstep.Checkpointer:
    """A checkpointer whose late copies have begun to be used."""
    ckpt = opened(root, memory=everstep.Memory(copy="overlap"), **more)
    ckpt.load(training.state)
    for step in range(1, steps + 1):
        training.step()
        ckpt.step(step, training.state)
    return ckpt


def test_overlapping_copies_are_really_late_and_end_before_the_optimizer(root: Path) -> None:
    training = Training()
    ckpt = overlapping(root, training)
    at_three = training.weights()
    snapshots = ckpt._session._snapshots
    assert snapshots._copying is not None, "the third step's copy is still open: the hook ends it"
    assert ckpt.status()["newest_complete_in_memory"] == 2
    training.step()
    assert ckpt.status()["newest_complete_in_memory"] == 3
    ckpt.close(flush=False)
    found = Training(seed=7)
    with opened(root) as ckpt:
        assert ckpt.load(found.state) == 3
    assert same_bits(found.weights(), at_three)


def test_a_tensor_that_moves_under_a_late_copy_voids_the_snapshot_loudly(root: Path) -> None:
    training = Training()
    ckpt = overlapping(root, training, policy={"full_every": 1, "on_slow": "wait"})
    with torch.no_grad():
        training.model[0].weight.add_(1)  # outside of the optimizer's step
    with pytest.raises(everstep.errors.StateMismatch, match="step 3 is void") as caught:
        training.step()
    assert "0.weight" in str(caught.value) and caught.value.step == 3
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        until(
            lambda: ckpt._session.outcomes.outcome(3)[0] or ckpt._session._look(0.1), "the verdict on step 3"
        )
        training.step()
        ckpt.step(4, training.state)
    assert any("step 3" in str(one.message) for one in heard), (
        "the flush of the void snapshot is told to fail"
    )
    ckpt.close()
    assert 3 not in steps_on_disk(root) and 4 in steps_on_disk(root)


def test_overlap_without_an_optimizer_is_refused_in_favour_of_eager_copies(root: Path) -> None:
    state = {"w": torch.zeros(10)}
    with opened(root, memory=everstep.Memory(copy="overlap")) as ckpt:
        ckpt.load(state)
        with pytest.warns(RuntimeWarning, match="copies are eager"):
            for step in (1, 2, 3):
                state["w"].fill_(step)
                ckpt.step(step, state)
        state["w"].fill_(-1)
    assert everstep.load(root)["w"].eq(3).all()


def test_an_optimizer_step_that_never_comes_does_not_hang_the_next_save(root: Path) -> None:
    """A skipped step (gradient scaling) fires no hook: the next call itself ends the late copy."""
    training = Training()
    ckpt = overlapping(root, training, policy={"full_every": 1, "on_slow": "wait", "close_timeout_s": 10.0})
    ckpt.step(4, training.state)
    ckpt.step(5, training.state)
    ckpt.save(6, training.state).wait()
    ckpt.close()
    assert everstep.load(root)["loader"] is not None
    assert 6 in steps_on_disk(root)


# -- policies on slow storage


@pytest.mark.parametrize("on_slow", ["wait", "skip", "supersede"])
def test_what_happens_when_flushes_are_slower_than_their_interval(root: Path, on_slow: str) -> None:
    state = {"w": torch.zeros(40_000), "n": 0}
    ckpt = opened(
        root, policy={"full_every": 1, "on_slow": on_slow, "rate_bytes_per_s": 3e5, "keep_last": 99}
    )
    ckpt.load(state)
    handles = {}
    for step in range(1, 7):
        state["n"] = step
        handles[step] = ckpt.step(step, state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ckpt.close()
    durable = steps_on_disk(root)
    assert durable[-1] == 6, "close makes the newest durable whatever the policy"
    if on_slow == "wait":
        assert durable == [1, 2, 3, 4, 5, 6]
    elif on_slow == "skip":
        assert handles[2] is None and 2 not in durable
        assert all(handle.done() for handle in handles.values() if handle is not None)
    else:
        given_up = [h for h in handles.values() if h is not None and h.error is not None]
        assert given_up and all(isinstance(h.error, everstep.errors.SaveAbandoned) for h in given_up)
    for step in durable:
        assert everstep.load(root, step=step)["n"] == step


def test_full_every_in_time(root: Path) -> None:
    state = {"n": 0}
    ckpt = opened(root, policy={"full_every": "150ms"})
    ckpt.load(state)
    step = 0
    flushed = []

    def more() -> bool:
        nonlocal step
        step += 1
        if ckpt.step(step, state) is not None:
            flushed.append(step)
        return len(flushed) >= 3

    until(more, "three flushes")
    ckpt.close()
    assert flushed[0] == 1 and step > 10, "far more snapshots than flushes"


def test_without_a_memory_tier_only_flushes_are_copied(root: Path) -> None:
    state = {"n": 0, "w": torch.zeros(1000)}
    ckpt = opened(root, memory=None, policy={"full_every": 2, "on_slow": "wait", "keep_last": 99})
    ckpt.load(state)
    for step in range(1, 8):
        state["n"] = step
        ckpt.step(step, state)
    ckpt.close()
    assert steps_on_disk(root) == [1, 2, 4, 6]
    with opened(root, memory=None) as ckpt:
        assert ckpt.load(state) == 6 and state["n"] == 6
        assert ckpt.recovery.tier == "disk"


def test_save_after_step_makes_the_same_snapshot_durable(root: Path, storage: Storage) -> None:
    state = {"n": 1}
    ckpt = opened(root)
    ckpt.load(state)
    assert ckpt.step(1, state) is None
    state["n"] = 99  # after the step: not in its snapshot
    handle = ckpt.save(1, state)
    handle.wait()
    assert everstep.load(root, step=1)["n"] == 1
    storage.fail(Fault(times=10**9))
    again = ckpt.save(1, state)  # durable already: nothing is written again
    assert again.done() and again.error is None
    storage.heal()
    ckpt.close()
