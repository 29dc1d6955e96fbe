"""Who may write, what a run may start from, and what a wrong call is told."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import everstep
import pytest
import torch
from everstep import errors
from everstep.format.sealed import seal
from everstep.peers.listener import Listener

from .kit import Forked, arenas_of, forget_memory, opened, steps_on_disk, until


def one_step_run(root: Path, value: int = 1, step: int = 1, **options: object) -> None:
    with opened(root, **options) as ckpt:
        ckpt.load({"n": 0})
        ckpt.save(step, {"n": value}).wait()


def incarnation(root: Path, number: int) -> dict[str, object]:
    return dict(json.loads((root / "incarnations" / f"{number:04d}.json").read_text()))


# -- one writer


def hold_open(root: Path) -> Callable[[Callable[..., None]], None]:
    """A trainer that writes step 1 and then waits to be told to go on by a file."""

    def train(say: Callable[..., None]) -> None:
        ckpt = opened(root, agent="process", policy={"linger_s": 0.5})
        ckpt.load({"n": 0})
        ckpt.save(1, {"n": 1}).wait()
        say("open")
        until((root.parent / "go").exists, "the word to go on")
        try:
            ckpt.save(2, {"n": 2}).wait()
            say("went on")
        except errors.EverstepError as error:
            say(type(error).__name__)
        until((root.parent / "close").exists, "the word to close")
        try:
            ckpt.close()
            say("closed")
        except errors.EverstepError as error:
            say(type(error).__name__)
        until((root.parent / "end").exists, "the word to end")

    return train


def test_a_second_process_is_refused_while_the_first_one_writes_and_only_then(
    root: Path, forked: Callable[..., Forked]
) -> None:
    child = forked(hold_open(root))
    assert child.line() == "open"
    ckpt = opened(root)
    state = {"n": 0}
    assert ckpt.load(state) == 1, "reading is free"
    with pytest.raises(errors.RunInUse, match="take_over"):
        ckpt.save(2, {"n": 5})
    with pytest.raises(errors.RunInUse):
        everstep.save(root, 9, {"n": 9})
    assert len(list((root / "incarnations").iterdir())) == 1, "nothing was written"
    (root.parent / "go").touch()
    assert child.line() == "went on", "and the first one is not disturbed"
    (root.parent / "close").touch()
    assert child.line() == "closed"
    with opened(root) as ckpt:  # it lives, but it writes no more
        assert ckpt.load(state) == 2
        ckpt.save(3, {"n": 3}).wait()
    (root.parent / "end").touch()
    assert child.end()[0] == 0


def test_take_over_supersedes_the_living_writer(root: Path, forked: Callable[..., Forked]) -> None:
    def train(say: Callable[..., None]) -> None:
        ckpt = opened(root, agent="process", policy={"linger_s": 0.5})
        ckpt.load({"n": 0})
        ckpt.save(1, {"n": 1}).wait()
        say("open")
        until((root.parent / "go").exists, "the word to go on")
        for call in ("step", "save", "close"):
            try:
                for step in range(10, 1000):
                    if call == "close":
                        ckpt.close()
                        break
                    getattr(ckpt, call)(step, {"n": step})
                    time.sleep(0.01)
                say("no error")
            except errors.EverstepError as error:
                say(type(error).__name__)

    child = forked(train)
    assert child.line() == "open"
    ckpt = opened(root, agent="process", take_over=True)
    assert ckpt.load({"n": 0}) == 1
    ckpt.save(5, {"n": 5}).wait()
    (root.parent / "go").touch()
    assert child.end() == (0, ["Superseded", "Superseded", "Superseded"])
    ckpt.save(6, {"n": 6}).wait()
    ckpt.close()
    forget_memory(root)
    assert everstep.load(root)["n"] == 6
    assert steps_on_disk(root) == [1, 5, 6], "the superseded one added nothing"


def test_what_an_earlier_incarnation_left_is_not_taken_for_ones_own(
    root: Path, forked: Callable[..., Forked]
) -> None:
    """The agent is still at work for a killed trainer when the next one, from an earlier step, comes to a step of
    the same number."""

    def train(say: Callable[..., None]) -> None:
        ckpt = opened(root, agent="process", policy={"rate_bytes_per_s": 2e5})
        ckpt.load({"n": 0, "w": torch.zeros(100_000)})
        ckpt.save(1, {"n": 1, "w": torch.zeros(10)}).wait()
        ckpt.save(5, {"n": 5, "w": torch.zeros(100_000)})
        say("saving")
        os.kill(os.getpid(), signal.SIGKILL)

    child = forked(train)
    assert child.line() == "saving"
    child.end()
    state = {"n": 0, "w": torch.ones(10)}
    with opened(root, agent="process", policy={"keep_last": 9}) as ckpt:
        assert ckpt.load(state, step=1) == 1
        handle = ckpt.save(5, {"n": 50, "w": state["w"]})
        handle.wait()
        for step in range(6, 30):
            ckpt.step(step, {"n": step, "w": state["w"]})
            time.sleep(0.01)
        assert everstep.load(root, step=5)["n"] == 50
        assert handle.error is None
    assert everstep.load(root)["n"] == 29


def test_a_dead_writer_is_no_writer(root: Path, forked: Callable[..., Forked]) -> None:
    child = forked(hold_open(root))
    assert child.line() == "open"
    os.kill(child.pid, signal.SIGKILL)
    child.end()
    with opened(root) as ckpt:
        assert ckpt.load({"n": 0}) == 1
        ckpt.save(2, {"n": 2}).wait()


def test_in_one_process_the_second_opening_closes_the_first(root: Path) -> None:
    first = opened(root)
    first.load({"n": 0})
    first.step(1, {"n": 1})
    second = opened(root)
    assert steps_on_disk(root) == [1], "closing made the newest snapshot durable"
    with pytest.raises(errors.Closed, match="another was made for its run"):
        first.step(2, {"n": 2})
    assert second.load({"n": 0}) == 1
    second.step(2, {"n": 2})
    with pytest.raises(errors.RunInUse):
        everstep.save(root, 9, {"n": 9})
    second.close()
    with pytest.raises(errors.Closed, match=r"was closed\. Make a new one"):
        second.step(3, {"n": 3})
    everstep.save(root, 9, {"n": 9})
    assert everstep.load(root)["n"] == 9


def test_a_copied_run_is_a_run_of_its_own(root: Path, forked: Callable[..., Forked]) -> None:
    """Also while the original is being written."""
    child = forked(hold_open(root))
    assert child.line() == "open"
    copy = root.parent / "copy"
    shutil.copytree(root, copy)
    state = {"n": 0}
    with opened(copy, agent="process") as ckpt:
        assert ckpt.load(state) == 1 and ckpt.recovery is not None and ckpt.recovery.tier == "disk"
        ckpt.save(7, {"n": 7}).wait()
    (root.parent / "go").touch()
    assert child.line() == "went on"
    (root.parent / "close").touch()
    assert child.line() == "closed"
    (root.parent / "end").touch()
    child.end()
    assert everstep.load(root)["n"] == 2 and everstep.load(copy)["n"] == 7
    assert steps_on_disk(copy) == [1, 7] and steps_on_disk(root) == [1, 2]


@pytest.mark.parametrize("agent", ["inline", "process"])
def test_deleting_a_run_and_starting_anew_at_its_root_works_at_once(
    root: Path, forked: Callable[..., Forked], agent: str
) -> None:
    def train(say: Callable[..., None]) -> None:
        ckpt = opened(root, agent=agent, policy={"linger_s": 5.0, "rate_bytes_per_s": 1e5})
        ckpt.load({"n": 0, "w": torch.zeros(100_000)})
        for step in (1, 2):
            ckpt.step(step, {"n": step, "w": torch.zeros(100_000)})
        ckpt.save(3, {"n": 3, "w": torch.zeros(100_000)})
        say("saving")
        os.kill(os.getpid(), signal.SIGKILL)

    child = forked(train)
    assert child.line() == "saving"
    child.end()
    old = arenas_of(root)
    assert old
    shutil.rmtree(root, ignore_errors=True)  # the old agent is still at it
    shutil.rmtree(root, ignore_errors=True)
    state = {"n": 0, "w": torch.ones(100_000)}
    ckpt = opened(root, agent=agent)
    assert ckpt.load(state) is None, "nothing of the deleted run is taken for this one's"
    last = 0

    def given_back() -> bool:
        """The old agent reads a slot until it notices; whatever step comes after that gives the memory back."""
        nonlocal last
        last += 1
        ckpt.step(last, {"n": 10 * last, "w": state["w"]})
        return {info.path for info in old}.isdisjoint(info.path for info in arenas_of(root))

    until(given_back, "the deleted run's memory is given back", 60)
    ckpt.close()
    forget_memory(root)
    assert everstep.load(root)["n"] == 10 * last
    assert steps_on_disk(root) == [last]


def test_a_run_deleted_under_its_trainer_is_told_and_a_new_one_can_be_opened(root: Path) -> None:
    ckpt = opened(root)
    ckpt.load({"n": 0})
    ckpt.save(1, {"n": 1}).wait()
    shutil.rmtree(root)
    with pytest.raises(errors.EverstepError):
        ckpt.save(2, {"n": 2}).wait(timeout_s=10)
    with pytest.warns(RuntimeWarning, match="former checkpointer"):
        again = opened(root)
    assert again.load({"n": 0}) is None
    again.save(1, {"n": 7}).wait()
    again.close()
    assert everstep.load(root) == {"n": 7}


# -- what a run starts from


def test_writing_without_having_loaded_is_refused_unless_fresh_says_why(root: Path) -> None:
    one_step_run(root)
    ckpt = opened(root)
    with pytest.raises(errors.NotLoaded, match="newest of step 1"):
        ckpt.step(2, {"n": 2})
    ckpt.close()
    assert len(list((root / "incarnations").iterdir())) == 1
    ckpt = opened(root, fresh="new learning rate")
    assert ckpt.load({"n": 0}) is None
    ckpt.save(1, {"n": 100}).wait()
    ckpt.close()
    assert incarnation(root, 2)["fresh"] == "new learning rate"
    assert everstep.load(root)["n"] == 100
    with pytest.raises(errors.BadOption):
        opened(root, fresh="  ")


def test_a_changed_configuration_is_an_error_that_shows_it_or_a_recorded_reason(root: Path) -> None:
    one_step_run(root, config={"lr": 0.1, "model": {"width": 8, "act": "gelu"}})
    ckpt = opened(root, config={"lr": 0.2, "model": {"width": 8}})
    with pytest.raises(errors.ConfigChanged) as caught:
        ckpt.load({"n": 0})
    assert "lr: 0.1 -> 0.2" in str(caught.value) and "model.act" in str(caught.value)
    with pytest.raises(errors.NotLoaded):
        ckpt.save(2, {"n": 2})
    assert ckpt.load({"n": 0}, config_reason="warm-up is over") == 1
    ckpt.save(2, {"n": 2}).wait()
    ckpt.close()
    record = incarnation(root, 2)
    assert record["config_reason"] == "warm-up is over"
    assert record["config_changes"]["lr"] == [0.1, 0.2]  # type: ignore[index]
    assert record["adopted_step"] == 1 and record["parent"] == 1
    with opened(root, config={"model": {"width": 8}, "lr": 0.2}) as ckpt:
        assert ckpt.load({"n": 0}) == 2, "the order of keys is no change"


def test_loosening_is_recorded(root: Path) -> None:
    with opened(root) as ckpt:
        ckpt.load({"n": 0})
        ckpt.save(1, {"n": 1, "gone": torch.zeros(3)}).wait()
    ckpt = opened(root)
    with pytest.raises(errors.StateMismatch, match="gone"):
        ckpt.load({"n": 0})
    assert ckpt.load({"n": 0}, allow=("unexpected",)) == 1
    ckpt.save(2, {"n": 2}).wait()
    ckpt.close()
    assert any("gone" in text for text in incarnation(root, 2)["loosened"])  # type: ignore[attr-defined]


# -- wrong calls


def test_steps_go_up(root: Path) -> None:
    ckpt = opened(root)
    ckpt.load({"n": 0})
    ckpt.step(5, {"n": 5})
    for call in (ckpt.step, ckpt.save):
        with pytest.raises(errors.StepOrder, match="expected: more than 5"):
            call(4, {"n": 4})
        for bad in (-1, True, 1.5, "6"):
            with pytest.raises(errors.StepOrder):
                call(bad, {"n": 4})
    with pytest.raises(errors.StepOrder):
        ckpt.step(5, {"n": 5})
    ckpt.step(6, {"n": 6})
    ckpt.close()
    ckpt = opened(root)
    assert ckpt.load({"n": 0}) == 6
    with pytest.raises(errors.StepOrder, match="more than 6"):
        ckpt.step(6, {"n": 6})
    ckpt.close()


def test_a_closed_checkpointer_says_so(root: Path) -> None:
    ckpt = opened(root)
    ckpt.load({"n": 0})
    ckpt.close()
    ckpt.close()
    for call in (ckpt.step, ckpt.save):
        with pytest.raises(errors.Closed):
            call(1, {"n": 1})
    with pytest.raises(errors.Closed):
        ckpt.load({"n": 0})
    with pytest.raises(errors.Closed):
        ckpt.status()
    assert not root.exists(), "nothing was written, so there is no run"


def test_a_closed_checkpointer_that_wrote_says_so(root: Path) -> None:
    ckpt = opened(root)
    ckpt.load({"n": 0})
    ckpt.step(1, {"n": 1})
    ckpt.close()
    with pytest.raises(errors.Closed):
        ckpt.status()


def test_load_after_the_first_step_is_refused(root: Path) -> None:
    ckpt = opened(root)
    ckpt.load({"n": 0})
    ckpt.step(1, {"n": 1})
    with pytest.raises(errors.BadOption, match="load after"):
        ckpt.load({"n": 0})
    ckpt.close()


@pytest.mark.parametrize(
    "options",
    [
        {"agent": "thread"},
        {"config": 3},
        {"config": {"f": object()}},
        {"mesh": {"data": 2}},
    ],
)
def test_options_that_cannot_be_used(root: Path, options: dict[str, object]) -> None:
    with pytest.raises(errors.BadOption):
        ckpt = opened(root, **options)
        ckpt.load({"n": 0})
        ckpt.step(1, {"n": 1})
    assert not (root / "incarnations").exists()


def test_roots_that_are_no_run(root: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.NotARun, match="does not exist"):
        everstep.load(root)
    root.mkdir()
    with pytest.raises(errors.NotARun):
        everstep.load(root)
    (root / "notes.txt").write_text("mine")
    with pytest.raises(errors.NotARun):
        everstep.load(root)
    with opened(root) as ckpt:  # a directory that holds other things may become a run
        assert ckpt.load({"n": 0}) is None
        ckpt.step(1, {"n": 1})
    assert (root / "notes.txt").read_text() == "mine"
    file = tmp_path / "file"
    file.write_text("")
    for call in (
        lambda: everstep.load(file),
        lambda: opened(file).load({"n": 0}) or opened(file).step(1, {"n": 1}),
    ):
        with pytest.raises((errors.NotARun, errors.BadOption)):
            call()
    for bad in ("", "s3:/bucket", "ftp://x/y"):
        with pytest.raises(errors.EverstepError):
            opened(bad)


def test_a_run_of_a_newer_format_is_refused_and_left_alone(root: Path) -> None:
    one_step_run(root)
    record = json.loads((root / "run.json").read_text())
    body = {key: value for key, value in record.items() if key not in ("everstep", "hash", "format")}
    newer = seal("run", {**body, "required": ["time-travel"]})
    (root / "run.json").write_bytes(newer)
    before = sorted(str(path) for path in root.rglob("*"))
    with pytest.raises(errors.UnknownFormat, match="time-travel"):
        everstep.load(root)
    ckpt = opened(root, fresh="over my dead body")
    with pytest.raises(errors.UnknownFormat):
        ckpt.load({"n": 0})
        ckpt.step(2, {"n": 2})
    text = (root / "run.json").read_text().replace('"format": 3', '"format": 7')
    (root / "run.json").write_text(text)
    with pytest.raises(errors.RunError):
        opened(root).load({"n": 0})
    assert sorted(str(path) for path in root.rglob("*")) == before


# -- forks


def test_a_forked_child_cannot_use_it_and_does_not_disturb_it(
    root: Path, forked: Callable[..., Forked]
) -> None:
    ckpt = opened(root, agent="process")
    ckpt.load({"n": 0})
    ckpt.step(1, {"n": 1})
    handle = ckpt.save(2, {"n": 2})

    def use(say: Callable[..., None]) -> None:
        for call in (
            lambda: ckpt.step(3, {"n": 3}),
            lambda: ckpt.save(3, {"n": 3}),
            lambda: ckpt.load({"n": 0}),
        ):
            try:
                call()
            except errors.Closed as error:
                say(error.message)
        ckpt.close()  # does nothing here
        values = everstep.load(root, step=2) if handle else None
        say(values)

    handle.wait()
    code, lines = forked(use).end()
    assert code == 0
    assert lines == ["this checkpointer belongs to another process"] * 3 + ["{'n': 2}"]
    ckpt.step(3, {"n": 3})
    ckpt.close()
    assert everstep.load(root)["n"] == 3


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*")
@pytest.mark.parametrize("agent", ["inline", "process"])
def test_data_loaders_with_forked_workers_beside_it(root: Path, agent: str) -> None:
    ckpt = opened(root, agent=agent)
    ckpt.load({"n": 0})
    loader = torch.utils.data.DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork")
    for epoch in range(2):
        seen = []
        for step, batch in enumerate(loader):
            seen.append(int(batch))
            ckpt.step(epoch * 8 + step, {"n": epoch * 8 + step})
        assert seen == list(range(8))
    ckpt.save(16, {"n": 16}).wait()
    ckpt.close()
    assert everstep.load(root)["n"] == 16


def test_a_file_of_the_secret_that_is_not_there_is_told_on_one_node_too(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("EVERSTEP_SECRET", raising=False)
    monkeypatch.setenv("EVERSTEP_SECRET_FILE", str(tmp_path / "nothing"))
    ckpt = opened(root)
    with pytest.raises(errors.BadOption, match=r"EVERSTEP_SECRET_FILE cannot be read.*nothing"):
        ckpt.save(1, {"n": 1})
    ckpt.close()
    assert arenas_of(root) == []


@pytest.mark.parametrize("there", [False, True])
def test_a_spare_node_that_is_down_or_has_another_secret_keeps_no_job_from_starting(
    root: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.setenv("EVERSTEP_SECRET", "the secret of this very job")
    one_step_run(root)
    with contextlib.ExitStack() as stack:
        if there:
            spare = stack.enter_context(Listener("127.0.0.1", 0, b"another secret", "run", {}, me="spare"))
            address = f"127.0.0.1:{spare.port}"
        else:
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            monkeypatch.setattr("everstep.guarding.SPARE_S", 0.5)
        memory = everstep.Memory(replicas=1, spares=[address])  # type: ignore[arg-type]
        ckpt = opened(root, memory=memory, agent="process", policy={"linger_s": 0.5})
        with pytest.warns(RuntimeWarning, match=f"cannot be reached, and keep nothing: .*{address}"):
            ckpt.load({"n": 0})
        ckpt.step(2, {"n": 1})
        assert ckpt.status()["guarded"] is False
        ckpt.close()
    assert steps_on_disk(root) == [1, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"replicas": 1, "parity": (2, 1)},
        {"parity": (0, 1)},
        {"parity": (2, 1, 1)},
        {"parity": (True, 1)},
        {"parity": (30, 3)},
        {"spares": ["host:1"]},
        {"replicas": 1, "spares": "host:1"},
        {"replicas": 1, "spares": ["host"]},
        {"replicas": 1, "spares": ["host:99999"]},
        {"replicas": 1, "replica_rate_bytes_per_s": 1000},
        {"replicas": 1, "replica_timeout_s": 0},
        {"replicas": 1, "domain": 7},
        {"device_slots": 2},
        {"device_slots": True},
    ],
    ids=str,
)
def test_wrong_wishes_of_memory_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(errors.BadOption):
        everstep.Memory(**wrong)  # type: ignore[arg-type]
