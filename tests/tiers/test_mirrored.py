"""Checkpoints reach further tiers behind the trainer's back: whole or not at all, each with its own schedule, retention
and truth about what is durable."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import everstep
import pytest
from click.testing import CliRunner
from everstep import errors
from everstep.backends.errors import Permanent
from everstep.backends.faults import Fault
from everstep.cli.main import main
from everstep.places import locate

from tests.facade.kit import (
    Forked,
    Storage,
    Training,
    opened,
    policy,
    run_ranks,
    same_bits,
    steps_on_disk,
    until,
)
from tests.nvme.kit import Places, denied


def tree(root: Path) -> dict[str, bytes]:
    """Everything of a run but what its writers say of themselves."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.relative_to(root).parts[0] not in ("events", "beacons")
    }


def train(ckpt: everstep.Checkpointer, training: Training, first: int, last: int) -> dict[int, Any]:
    handles = {}
    for step in range(first, last + 1):
        training.step()
        handle = ckpt.step(step, training.state)
        if handle is not None:
            handles[step] = handle
            handle.wait()
    return handles


@pytest.mark.parametrize("agent", ["inline", "process"])
def test_the_very_same_bytes_are_there(root: Path, tmp_path: Path, agent: str) -> None:
    training = Training()
    tier = everstep.Tier(tmp_path / "far", name="far")
    ckpt = opened(root, tiers=[tier], agent=agent)
    ckpt.load(training.state)
    train(ckpt, training, 1, 2)
    handle = ckpt.save(2, training.state)
    handle.wait("far")
    assert handle.done() and handle.done("far")
    weights = training.weights()
    assert tree(tmp_path / "far") == tree(root)
    assert [one["newest"] for one in ckpt.status()["tiers"]] == [2]
    if agent == "process":
        told = json.loads(CliRunner().invoke(main, ["status", str(root), "--json"]).output)
        assert [(one["name"], one["newest"], one["owed"]) for one in told["farther"]] == [("far", 2, [])]
    ckpt.close()
    again = Training(seed=5)
    with opened(tmp_path / "far") as other:
        assert other.load(again.state) == 2
    assert same_bits(again.weights(), weights)


def test_each_tier_has_its_own_share_and_retention(root: Path, tmp_path: Path) -> None:
    training = Training()
    tiers = [
        everstep.Tier(tmp_path / "all", name="all", keep_last=2),
        everstep.Tier(tmp_path / "third", name="third", every=3, keep_last=10),
    ]
    ckpt = opened(root, tiers=tiers, policy={"full_every": 1, "keep_last": 1, "on_slow": "wait"})
    ckpt.load(training.state)
    for step in range(1, 8):
        training.step()
        handle = ckpt.step(step, training.state)
        assert handle is not None
        handle.wait("all")
        if step % 3 == 1:
            handle.wait("third")
        else:
            with pytest.raises(errors.BadOption, match="does not go to tier 'third'"):
                handle.wait("third")
    ckpt.close()
    until(lambda: steps_on_disk(root) == [7], "rotation of the root")
    assert steps_on_disk(tmp_path / "all") == [6, 7]
    assert steps_on_disk(tmp_path / "third") == [1, 4, 7]


def test_the_last_step_goes_to_all_tiers_at_close(root: Path, tmp_path: Path) -> None:
    """Whether its flush was asked for before or not."""
    for name, flush_every in (("asked", 1), ("not asked", None)):
        training = Training()
        place, far = tmp_path / name, tmp_path / f"{name} far"
        ckpt = opened(place, tiers=[everstep.Tier(far, every=100)], policy={"full_every": flush_every})
        ckpt.load(training.state)
        train(ckpt, training, 1, 3)
        ckpt.close()
        assert steps_on_disk(far)[-1:] == [3], name


def test_names_and_places_are_compared(root: Path, tmp_path: Path) -> None:
    one = everstep.Tier(tmp_path / "one")
    for tiers, match in (
        ([one, everstep.Tier(tmp_path / "two")], "one name"),
        ([one, everstep.Tier(tmp_path / "one", name="b")], "not two places"),
        ([everstep.Tier(root)], "the root"),
        ([everstep.Tier(root / "within")], "the root"),
        (["s3://bucket/run"], "everstep.Tier"),
    ):
        with pytest.raises(errors.BadOption, match=match):
            everstep.Checkpointer(root, tiers=tiers)  # type: ignore[arg-type]
    with pytest.raises(errors.BadOption, match="every"):
        everstep.Tier(tmp_path, every=0)
    assert "hidden" not in repr(everstep.Tier("s3://b/r", storage_options={"secret": "hidden"}))


def test_a_tier_that_fails_is_told_and_reached_later(
    root: Path, tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.agent.mirrors.PAUSE_FIRST_S", 0.01)
    denied = Fault("create", "run.json", times=10**6, error=lambda name: Permanent(name, "denied"))
    training = Training()
    ckpt = opened(root, tiers=[everstep.Tier(tmp_path / "far")])
    ckpt.load(training.state)
    training.step()
    storage.fail(denied)
    handle = ckpt.save(1, training.state)
    handle.wait()
    with pytest.warns(RuntimeWarning, match="denied.*tried again"):
        until(lambda: ckpt.status()["tiers"][0]["failures"] > 2, "some tries")
        ckpt.step(2, training.state)
    assert not handle.done("file") and steps_on_disk(tmp_path / "far") == []
    storage.heal()
    handle.wait("file")
    ckpt.close()
    assert 1 in steps_on_disk(tmp_path / "far")


def test_what_is_superseded_is_dropped_by_all_and_the_newest_never(
    root: Path, tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.agent.mirrors.PAUSE_FIRST_S", 0.01)
    training = Training()
    ckpt = opened(root, tiers=[everstep.Tier(tmp_path / "far")], policy={"failures_max": None})
    ckpt.load(training.state)
    storage.fail(Fault("create", "run.json", times=10**6, error=lambda name: Permanent(name, "denied")))
    handles: list[everstep.SaveHandle] = []

    def dropped() -> set[int]:
        return {one.step for one in handles if one._watched.outcome(one.step, "file")[0]}

    with pytest.warns(RuntimeWarning, match="will not reach"):
        for step in range(1, 8):
            training.step()
            handles.append(ckpt.save(step, training.state))
            handles[-1].wait()
        until(lambda: len(dropped()) >= 3, "three that were dropped")
        ckpt.step(8, training.state)
    assert 7 not in dropped()
    gone = min(dropped())
    with pytest.raises(errors.SaveAbandoned, match="will not reach file"):
        handles[gone - 1].wait("file")
    storage.heal()
    handles[-1].wait("file")
    lost = {step for step in dropped() if not handles[step - 1].done("file")}
    ckpt.close()
    there = steps_on_disk(tmp_path / "far")
    assert 7 in there and len(lost) >= 3 and not lost & set(there)


def test_the_root_keeps_what_is_owed(root: Path, tmp_path: Path, storage: Storage) -> None:
    training = Training()
    ckpt = opened(root, tiers=[everstep.Tier(tmp_path / "far")], policy={"keep_last": 1})
    ckpt.load(training.state)
    storage.fail(Fault("create", "run.json", times=10**6, error=lambda name: Permanent(name, "denied")))
    handles = []
    for step in (1, 2, 3):
        training.step()
        handles.append(ckpt.save(step, training.state))
        handles[-1].wait()
    assert steps_on_disk(root) == [1, 2, 3]
    storage.heal()
    for handle in handles:
        handle.wait("file")
    training.step()
    ckpt.save(4, training.state).wait("file")
    until(lambda: steps_on_disk(root) == [4], "rotation of the root")
    ckpt.close()


def saves_twice(root: Path, far: Path, point: str) -> Callable[[Callable[..., None]], None]:
    """The first agent dies at the ``point``; said are its process and the last one's."""

    def body(say: Callable[..., None]) -> None:
        training = Training()
        os.environ["EVERSTEP_AGENT_POINTS"] = f"kill:{point}"
        tier = everstep.Tier(far, name="far")
        ckpt = everstep.Checkpointer(root, policy=policy(linger_s=2.0), tiers=[tier])
        ckpt.load(training.state)
        for step in (1, 2):
            training.step()
            handle = ckpt.save(step, training.state)
            os.environ.pop("EVERSTEP_AGENT_POINTS", None)
            if step == 1:
                say(ckpt.agent_pid)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                handle.wait()
                handle.wait("far")
        say(ckpt.agent_pid)
        ckpt.close()

    return body


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("mirror.image.piece", marks=pytest.mark.long),
        "mirror.vote.before",
        "mirror.manifest.before",
        "mirror.manifest.after",
        "mirror.ranks",
        pytest.param("mirror.settled", marks=pytest.mark.long),
    ],
)
def test_an_agent_that_is_killed_is_followed_by_one_that_goes_on(
    root: Path, tmp_path: Path, forked: Callable[..., Forked], point: str
) -> None:
    code, said = forked(saves_twice(root, tmp_path / "far", point)).end()
    assert code == 0 and len(said) == 2
    assert said[0] != said[1], "the agent was not killed"
    assert tree(tmp_path / "far") == tree(root)
    assert steps_on_disk(tmp_path / "far") == [1, 2]


ONE_BY_ONE = """
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
tier = everstep.Tier(sys.argv[2], name="far", every=100)
ckpt = everstep.Checkpointer(
    root, tiers=[tier], policy=policy(full_every=1, on_slow="wait", commit_timeout_s=300.0, linger_s=1.0)
)
state = {"x": torch.full((1000,), float(rank))}
ckpt.load(state)
for step in (1, 2):
    state["x"] += 1
    ckpt.step(step, state).wait()
until(lambda: ckpt.status()["tiers"][0]["newest"] == 1, "the first")
torch.distributed.barrier()
if rank == 1:  # the tier waits for this rank by then
    until(lambda: ckpt.status()["tiers"][0]["owed"] == [2], "the other rank's last step")
ckpt.close()
"""


def test_ranks_that_ask_one_after_the_other_do_not_wait_for_each_other(root: Path, tmp_path: Path) -> None:
    far = tmp_path / "far"
    run_ranks(ONE_BY_ONE, root, far)
    until(lambda: steps_on_disk(far) == [1, 2], "the last step", timeout_s=60)


def test_a_wait_for_a_tier_that_is_down_ends_and_says_why(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, places, training = tmp_path / "far", Places(monkeypatch), Training()
    monkeypatch.setattr("everstep.agent.mirrors.PAUSE_FIRST_S", 0.05)
    with opened(root, tiers=[everstep.Tier(far)]) as ckpt:
        ckpt.load(training.state)
        training.step()
        places.fail(far, denied("open_writer"))
        handle = ckpt.save(1, training.state)
        handle.wait()
        with pytest.raises(errors.SaveFailed, match="still on its way") as caught:
            handle.wait("file", timeout_s=3.0)
        assert locate(far).url in str(caught.value) and "the last try failed" in str(caught.value)
        assert "denied" in str(caught.value) and not handle.done("file") and handle.error is None
        places.heal(far)
        handle.wait("file")
