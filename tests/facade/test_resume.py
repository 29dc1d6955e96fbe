"""A run that is interrupted goes on bit for bit: losses, weights, moments, random numbers, data."""

from __future__ import annotations

import itertools
from pathlib import Path

import everstep
import pytest
import torch

from .kit import Training, forget_memory, opened, same_bits, steps_on_disk, undisturbed


@pytest.mark.parametrize("copy", ["eager", "overlap"])
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_losses_and_weights_equal_an_undisturbed_run(root: Path, tier: str, copy: str) -> None:
    losses, weights = undisturbed(12)
    first = Training()
    ckpt = opened(root, memory=everstep.Memory(copy=copy))
    assert ckpt.load(first.state) is None
    seen = []
    for step in range(1, 8):
        seen.append(first.step())
        ckpt.step(step, first.state)
    if tier == "disk":
        ckpt.close()
        forget_memory(root)
    else:
        ckpt._session._snapshots.settle(10)  # the process goes on and would die only after the copy
        ckpt.close(flush=False)

    second = Training(seed=99)
    ckpt = opened(root, memory=everstep.Memory(copy=copy))
    start = ckpt.load(second.state)
    assert start == 7 and ckpt.recovery is not None and ckpt.recovery.tier == tier
    assert seen == losses[:7]
    for step in range(start + 1, 13):
        seen.append(second.step())
        ckpt.step(step, second.state)
    ckpt.close()
    assert seen == losses
    assert same_bits(second.weights(), weights)
    assert second.extra["best"] == min(losses) and second.extra["history"] == losses[-4:]


def test_resume_train_save_and_resume_again_saves_the_live_state(root: Path) -> None:
    """What a load brought in is never what a later save writes."""
    losses, weights = undisturbed(9)
    seen: list[float] = []
    for _ in range(3):
        training = Training(seed=50 + len(seen))
        if not seen:
            training = Training()
        with opened(root) as ckpt:
            start = ckpt.load(training.state) or 0
            for step in range(start + 1, start + 4):
                seen.append(training.step())
                handle = ckpt.save(step, training.state)
            handle.wait()
    assert seen == losses
    assert same_bits(training.weights(), weights)
    assert steps_on_disk(root) == [7, 8, 9]


def test_a_plain_dict_is_restored_values_and_tensors_alike(root: Path) -> None:
    tensor = torch.arange(4.0)
    with opened(root) as ckpt:
        ckpt.load({"w": tensor, "epoch": 0, "name": "", "lr": 0.0})
        ckpt.save(1, {"w": tensor, "epoch": 7, "name": "run", "lr": 0.25})
    target = {"w": torch.zeros(4), "epoch": 0, "name": "", "lr": 0.0}
    held = target["w"]
    with opened(root) as ckpt:
        assert ckpt.load(target) == 1
        assert target["epoch"] == 7 and target["name"] == "run" and target["lr"] == 0.25
        assert target["w"] is held and torch.equal(held, tensor)


def test_a_state_that_gains_a_part_and_optimizer_state_grows_its_slots(root: Path) -> None:
    """Optimizer state appears after the first step, a further part later still: what was reserved is too small."""
    training = Training(width=64)
    ckpt = opened(root, memory=everstep.Memory(bytes=64 << 10))
    ckpt.load(training.state)
    ckpt.step(1, training.state)
    training.step()
    ckpt.step(2, training.state)
    training.state.others["ema"] = {"w": torch.arange(300_000.0)}
    training.step()
    ckpt.step(3, training.state)
    handle = ckpt.save(4, training.state)
    handle.wait()
    ckpt.close(flush=False)
    values = everstep.load(root)
    assert torch.equal(values["ema"]["w"], torch.arange(300_000.0))
    forget_memory(root)
    again = Training(seed=5, width=64)
    again.state.others["ema"] = {"w": torch.zeros(300_000)}
    with opened(root) as ckpt:
        assert ckpt.load(again.state) == 4
    assert same_bits(again.weights(), training.weights())


@pytest.mark.parametrize(
    "trainer", [{"step": [1, 2, 3, 4, 5, 6]}, {"step": [5, 9, 12, 30]}, {"step": [0, 1, 2]}]
)
def test_intervals_of_snapshots_with_steps_that_jump(root: Path, trainer: dict[str, list[int]]) -> None:
    steps = trainer["step"]
    state = {"n": 0}
    ckpt = opened(root, policy={"snapshot_every": 3, "full_every": None})
    ckpt.load(state)
    taken = []
    for step in steps:
        state["n"] = step
        ckpt.step(step, state)
        if ckpt.status()["newest_complete_in_memory"] == step:
            taken.append(step)
    ckpt.close(flush=False)
    # The first, and whenever a multiple of the interval was reached or passed.
    due = [steps[0]] + [b for a, b in itertools.pairwise(steps) if b // 3 > a // 3]
    assert taken == due
    assert everstep.load(root)["n"] == due[-1]


def test_load_of_an_older_step_cuts_off_the_newer_ones(root: Path) -> None:
    state = {"n": 0}
    with opened(root, policy={"keep_last": 10}) as ckpt:
        ckpt.load(state)
        for step in (1, 2, 3):
            ckpt.save(step, {"n": step}).wait()
    with opened(root, policy={"keep_last": 10}) as ckpt:
        assert ckpt.load(state, step=2) == 2 and state["n"] == 2
        ckpt.save(5, {"n": 5}).wait()
    assert everstep.load(root)["n"] == 5
    with pytest.raises(everstep.errors.NoCheckpoint):
        everstep.load(root, step=3)
    with opened(root) as ckpt:
        assert ckpt.load(state) == 5
