"""Going back in a running job: bit for bit, from the nearest place; then the job goes on as a new incarnation."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from everstep import errors
from everstep.backends.open import open_backend
from everstep.memory.header import WORD_BEAT_NS
from everstep.store.blocking import run_blocking
from everstep.store.runs import read_incarnations

from tests.facade.kit import (
    Forked,
    Storage,
    Training,
    forget_memory,
    in_memory,
    opened,
    same_bits,
    steps_on_disk,
    undisturbed,
    until,
)

KINDS = {
    "device": everstep.Memory(device_slots=1),
    "device, overlap": everstep.Memory(device_slots=1, copy="overlap"),
    "eager": everstep.Memory(),
    "overlap": everstep.Memory(copy="overlap"),
}

ForkOf = Callable[[Callable[..., object]], Forked]


def records(root: Path) -> list[tuple[int | None, int | None, str | None]]:
    """By incarnation: what it adopted, and why it was gone back to."""

    async def read() -> Any:
        backend = open_backend(str(root), shared=True)
        try:
            return await read_incarnations(backend)
        finally:
            await backend.close()

    return [(one.adopted_incarnation, one.adopted_step, one.reason) for one in run_blocking(read())]


def train(ckpt: everstep.Checkpointer, training: Training, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last + 1):
        losses.append(training.step())
        ckpt.step(step, training.state)
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_back_and_on_is_as_if_nothing_had_been(root: Path, kind: str) -> None:
    losses, weights = undisturbed(12)
    training = Training()
    ckpt = opened(root, memory=KINDS[kind])
    ckpt.load(training.state)
    seen = train(ckpt, training, 1, 7)
    for _ in range(3):
        training.step()  # a loss spike, not one step of which was handed in
    assert ckpt.rollback(reason="loss spike") == 7
    assert ckpt.recovery is not None
    assert ckpt.recovery.tier == ("device" if "device" in kind else "memory")
    seen += train(ckpt, training, 8, 12)
    ckpt.close()
    assert seen == losses and same_bits(training.weights(), weights)
    assert records(root) == [(None, None, None), (1, 7, "loss spike")]


@pytest.mark.parametrize("kind", ["device", "overlap"])
def test_back_to_an_earlier_step_in_the_arena_alone(root: Path, kind: str) -> None:
    losses, weights = undisturbed(10)
    training = Training()
    ckpt = opened(root, memory=KINDS[kind])
    ckpt.load(training.state)
    train(ckpt, training, 1, 7)
    assert steps_on_disk(root) == []
    assert ckpt.rollback(6, reason="one too far") == 6
    assert ckpt.recovery is not None and ckpt.recovery.tier == "memory"
    seen = train(ckpt, training, 7, 10)
    ckpt.close()
    assert seen == losses[6:] and same_bits(training.weights(), weights)


def test_back_to_a_step_on_disk(root: Path) -> None:
    losses, _ = undisturbed(9)
    training = Training()
    ckpt = opened(root, memory=KINDS["device"])
    ckpt.load(training.state)
    train(ckpt, training, 1, 2)
    ckpt.save(2, training.state).wait()
    train(ckpt, training, 3, 9)
    assert 2 not in in_memory(root)
    assert ckpt.rollback(2, reason="far back") == 2
    assert ckpt.recovery is not None and ckpt.recovery.tier == "disk"
    assert train(ckpt, training, 3, 9) == losses[2:]
    ckpt.close()
    assert records(root)[1:] == [(1, 2, "far back")]


def test_each_is_an_incarnation_of_its_own(root: Path) -> None:
    losses, weights = undisturbed(9)
    training = Training()
    ckpt = opened(root, memory=KINDS["device"])
    ckpt.load(training.state)
    train(ckpt, training, 1, 7)
    for _ in range(2):
        training.step()
        assert ckpt.rollback(reason="first") == 7
        assert ckpt.recovery is not None and ckpt.recovery.tier == "device"
    assert ckpt.rollback(6, reason="further") == 6
    training.step()
    # Nothing followed it: back where that one went, not forward to what it had gone back from.
    assert ckpt.rollback(reason="again") == 6
    assert len(records(root)) == 5
    assert train(ckpt, training, 7, 8) == losses[6:8]
    assert ckpt.rollback(7, reason="once more") == 7
    assert train(ckpt, training, 8, 9) == losses[7:]
    ckpt.close()
    assert same_bits(training.weights(), weights)
    assert records(root) == [
        (None, None, None),
        (1, 7, "first"),
        (1, 7, "first"),
        (1, 6, "further"),
        (1, 6, "again"),
        (5, 7, "once more"),
    ]


def test_slots_of_steps_that_were_cut_off_are_reused(root: Path) -> None:
    training = Training()
    ckpt = opened(root)
    ckpt.load(training.state)
    train(ckpt, training, 1, 7)
    ckpt.rollback(5, reason="back")
    train(ckpt, training, 6, 6)
    assert sorted(in_memory(root)) in (
        [5, 6, 6],
        [5, 6, 7],
    )  # what was gone back to, one cut off, the new one
    train(ckpt, training, 7, 8)
    assert in_memory(root) == [6, 7, 8]
    ckpt.close(flush=False)


def test_the_new_incarnation_schedules_anew(root: Path) -> None:
    """What was decided ahead before the rollback says nothing of the steps after it."""
    state = {"x": torch.zeros(3)}
    ckpt = opened(root, policy={"full_every": 5, "on_slow": "wait"})
    ckpt.load(state)
    handles = {}
    for step in range(1, 5):
        if handle := ckpt.step(step, state):
            handles[step] = handle
    handles[1].wait()
    ckpt.rollback(3, reason="back", state=state)
    flushed = [step for step in range(4, 12) if ckpt.step(step, state) is not None]
    assert flushed == [4, 5, 10]  # the first of an incarnation, and the multiples
    ckpt.close()


# -- what is on its way


def test_flushes_up_to_there_go_on_and_later_ones_are_given_up(root: Path, storage: Storage) -> None:
    training = Training()
    ckpt = opened(
        root, memory=everstep.Memory(slots=6, device_slots=1), policy={"rate_bytes_per_s": 20_000.0}
    )
    ckpt.load(training.state)
    train(ckpt, training, 1, 2)
    before = ckpt.save(2, training.state)
    train(ckpt, training, 3, 4)
    later = ckpt.save(4, training.state)
    assert ckpt.rollback(3, reason="a spike") == 3
    with pytest.raises(errors.SaveAbandoned, match="went back to step 3: a spike"):
        later.wait()
    before.wait()
    assert before.done() and not later.done()
    train(ckpt, training, 4, 5)
    ckpt.close()
    assert [step for step in steps_on_disk(root) if step < 5] == [2]


def test_closing_right_after_makes_it_durable(root: Path) -> None:
    training = Training()
    ckpt = opened(root, memory=KINDS["device"])
    ckpt.load(training.state)
    train(ckpt, training, 1, 4)
    weights = training.weights()
    training.step()
    ckpt.rollback(reason="the end")
    ckpt.close()
    forget_memory(root)
    again = Training(seed=7)
    with opened(root) as ckpt:
        assert ckpt.load(again.state) == 4
    assert same_bits(again.weights(), weights)


def test_closing_after_it_was_trained_on_leaves_it_in_memory(root: Path) -> None:
    """What no step was called for is not stored as the step that was gone back to."""
    training = Training()
    ckpt = opened(root, memory=KINDS["device"])
    ckpt.load(training.state)
    train(ckpt, training, 1, 4)
    weights = training.weights()
    ckpt.rollback(reason="a last look")
    training.step()
    with pytest.warns(RuntimeWarning, match="step 4 stays in memory alone"):
        ckpt.close()
    assert 4 not in steps_on_disk(root)
    again = Training(seed=7)
    with opened(root) as ckpt:
        assert ckpt.load(again.state) == 4
        assert same_bits(again.weights(), weights)


def test_what_keeps_the_record_from_being_written_is_told_and_it_can_be_called_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, _ = undisturbed(7)
    training = Training()
    ckpt = opened(root, memory=KINDS["device"])
    ckpt.load(training.state)
    train(ckpt, training, 1, 6)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise errors.SaveFailed("the store is full")

    with monkeypatch.context() as patch:
        patch.setattr("everstep.checkpointer.claim_incarnation", refuse)
        with pytest.raises(errors.SaveFailed, match="the store is full"):
            ckpt.rollback(5, reason="back")
    assert ckpt.rollback(reason="once more") == 5
    assert train(ckpt, training, 6, 7) == losses[5:]
    ckpt.close()
    assert records(root)[1:] == [(1, 5, "once more")]


def test_signs_of_life_go_on_and_end_at_close(root: Path) -> None:
    """After a rollback a trainer may evaluate for long before it goes on."""

    def threads() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name == "everstep-heartbeat"]

    training = Training()
    ckpt = opened(root, policy={"heartbeat_s": 0.02})
    ckpt.load(training.state)
    train(ckpt, training, 1, 2)
    ckpt.rollback(reason="back")
    assert ckpt._tier is not None
    words = ckpt._tier.arena._control.words
    before = words[WORD_BEAT_NS]
    until(lambda: words[WORD_BEAT_NS] != before, "a further beat")
    train(ckpt, training, 3, 3)
    assert len(threads()) == 1
    ckpt.rollback(reason="back again")
    ckpt.close(flush=False)
    assert threads() == []


# -- crashes


def _rolled_back_and_killed(root: Path, *, steps_after: int) -> Callable[[Callable[..., None]], None]:
    def body(say: Callable[..., None]) -> None:
        training = Training()
        ckpt = opened(root, memory=KINDS["device"])
        ckpt.load(training.state)
        train(ckpt, training, 1, 7)
        ckpt.rollback(6, reason="back")
        train(ckpt, training, 7, 6 + steps_after)
        ckpt._session and ckpt._session.settle_quietly()  # type: ignore[func-returns-value]
        os.kill(os.getpid(), signal.SIGKILL)

    return body


@pytest.mark.parametrize("steps_after", [0, 1, 3])
def test_a_crash_resumes_what_is_newest_of_the_lineage(root: Path, forked: ForkOf, steps_after: int) -> None:
    """Never what it went back from, however soon it ends."""
    losses, weights = undisturbed(10)
    code, _ = forked(_rolled_back_and_killed(root, steps_after=steps_after)).end()
    assert code == -signal.SIGKILL
    expected = 6 + steps_after
    training = Training(seed=3)
    ckpt = opened(root)
    assert ckpt.load(training.state) == expected
    assert ckpt.recovery is not None and ckpt.recovery.incarnation == (2 if steps_after else 1)
    assert records(root)[1:] == [(1, 6, "back")]
    seen = train(ckpt, training, expected + 1, 10)
    ckpt.close()
    assert seen == losses[expected:] and same_bits(training.weights(), weights)


def test_a_kill_during_the_drain_leaves_the_step_before(root: Path, forked: ForkOf) -> None:
    def body(say: Callable[..., None]) -> None:
        training = Training()
        ckpt = opened(root, memory=KINDS["device"])
        ckpt.load(training.state)
        train(ckpt, training, 1, 4)
        os.environ["EVERSTEP_POINTS"] = ""
        from everstep.memory import points

        points.hook = points.hook_from("kill:slot.publish.before:5")
        train(ckpt, training, 5, 6)

    code, _ = forked(body).end()
    assert code == -signal.SIGKILL
    training = Training(seed=3)
    with opened(root) as ckpt:
        assert ckpt.load(training.state) == 4


# -- what is asked


def test_a_reason_is_asked_for(root: Path) -> None:
    state = everstep.TrainState(rng=False, own={"x": torch.zeros(2)})
    with opened(root) as ckpt:
        ckpt.load(state)
        ckpt.step(1, state)
        for reason in ("", "  ", "x" * 5000, 3):
            with pytest.raises(errors.BadOption, match="why"):
                ckpt.rollback(reason=reason)  # type: ignore[arg-type]
        ckpt.step(2, state)  # nothing has happened


def test_a_state_that_is_gone_has_to_be_given(root: Path) -> None:
    tensor = torch.zeros(2)
    with opened(root) as ckpt:
        ckpt.load({"x": tensor})
        tensor.fill_(1)
        ckpt.step(1, {"x": tensor})
        tensor.fill_(2)
        gc.collect()
        with pytest.raises(errors.BadOption, match="state="):
            ckpt.rollback(reason="back")
        assert ckpt.rollback(reason="back", state={"x": tensor}) == 1
        assert tensor.tolist() == [1, 1]


def test_the_state_is_not_kept_alive(root: Path) -> None:
    import weakref

    training = Training()
    with opened(root, memory=KINDS["device"]) as ckpt:
        ckpt.load(training.state)
        train(ckpt, training, 1, 2)
        alive = weakref.ref(training.model)
        del training
        gc.collect()
        assert alive() is None


def test_a_step_that_is_nowhere_changes_nothing(root: Path) -> None:
    training = Training()
    ckpt = opened(root, memory=KINDS["device"])
    ckpt.load(training.state)
    train(ckpt, training, 1, 4)
    before = training.weights()
    with pytest.raises(errors.NoCheckpoint, match=r"step 77.* can be loaded: 4, 3, 2"):
        ckpt.rollback(77, reason="too far")
    assert same_bits(training.weights(), before)
    train(ckpt, training, 5, 5)
    assert ckpt.rollback(reason="right") == 5
    ckpt.close()
    assert len(records(root)) == 2


def test_with_nothing_there_is_nothing_to_go_back_to(root: Path) -> None:
    state = {"x": torch.zeros(2)}
    with opened(root) as ckpt:
        ckpt.load(state)
        with pytest.raises(errors.NoCheckpoint, match="nothing to go back to"):
            ckpt.rollback(reason="why not", state=state)


def test_after_a_load_it_goes_back_before_what_was_loaded(root: Path) -> None:
    state = {"x": torch.zeros(2)}
    with opened(root) as ckpt:
        ckpt.load(state)
        for step in (1, 2, 3):
            state["x"].fill_(step)
            ckpt.save(step, state).wait()
    with opened(root) as ckpt:
        assert ckpt.load(state) == 3
        assert ckpt.rollback(2, reason="not this one", state=state) == 2
        assert state["x"].tolist() == [2, 2]
        ckpt.step(3, state)
    assert records(root)[1:] == [(1, 2, "not this one")]


def test_without_a_memory_tier(root: Path) -> None:
    state = {"x": torch.zeros(2)}
    ckpt = opened(root, memory=None)
    ckpt.load(state)
    for step in (1, 2, 3):
        state["x"].fill_(step)
        ckpt.save(step, state).wait()
    assert ckpt.rollback(1, reason="back", state=state) == 1
    assert state["x"].tolist() == [1, 1]
    state["x"].fill_(9)
    ckpt.save(2, state).wait()
    ckpt.close()
    assert torch.equal(everstep.load(root)["x"], torch.full((2,), 9.0))


def test_a_changed_structure_on_the_device_falls_back(root: Path) -> None:
    """What the buffer has does not fit any more; what was saved does not either, and says so."""
    state = {"x": torch.zeros(4)}
    ckpt = opened(root, memory=KINDS["device"])
    ckpt.load(state)
    ckpt.step(1, state)
    with pytest.raises(errors.StateMismatch, match="x"):
        ckpt.rollback(reason="back", state={"x": torch.zeros(5)})
    ckpt.close(flush=False)


def test_room_that_is_gone_later_is_told_and_training_goes_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everstep.snapshot import device as device_module

    state: dict[str, Any] = {"x": torch.zeros(4)}
    ckpt = opened(root, memory=everstep.Memory(device_slots=1, bytes=64 << 20))
    ckpt.load(state)
    ckpt.step(1, state)

    def refuse(nbytes: int, directory: Path | None) -> None:
        raise errors.MemoryTooSmall("no room", free=1)

    monkeypatch.setattr(device_module, "check_room", refuse)
    state["y"] = torch.ones(2_000_000)
    with pytest.warns(RuntimeWarning, match="straight to the host"):
        ckpt.step(2, state)
    ckpt.step(3, state)
    state["y"].zero_()
    assert ckpt.rollback(reason="back", state=state) == 3
    assert ckpt.recovery is not None and ckpt.recovery.tier == "memory"
    assert bool(state["y"].all())
    ckpt.step(4, state)
    ckpt.close(flush=False)
