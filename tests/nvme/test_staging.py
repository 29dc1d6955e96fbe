"""A tier of the node's own: flushes are durable there at once, and get to the root from there, whatever fails."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import everstep
import pytest
from everstep import errors
from everstep.agent import merging
from everstep.backends.errors import NoSpace
from everstep.backends.faults import Fault

from tests.facade.kit import Training, forget_memory, opened, same_bits, steps_on_disk, until

from .kit import DENIED, Places, denied, near, staged, voted


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Places:
    return Places(monkeypatch)


def shares(root: Path) -> dict[str, bytes]:
    """All objects of checkpoints but decisions."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.glob("checkpoints/**/*")
        if path.is_file() and "manifest" not in path.name
    }


@pytest.mark.parametrize("agent", ["inline", "process"])
def test_the_very_same_bytes_pass_the_node_and_reach_the_root(root: Path, tmp_path: Path, agent: str) -> None:
    training = Training()
    ckpt = opened(root, tiers=[near(tmp_path / "nvme")], agent=agent)
    ckpt.load(training.state)
    for step in (1, 2):
        training.step()
        handle = ckpt.save(step, training.state)
        handle.wait("nvme")
        assert handle.done("nvme")
        handle.wait()
    weights = training.weights()
    status = ckpt.status()["tiers"][0]
    assert (status["name"], status["newest"], status["owed"]) == ("nvme", 2, [])
    ckpt.close()
    assert shares(tmp_path / "nvme") == shares(root) and staged(tmp_path / "nvme") == [1, 2]
    again = Training(seed=5)
    forget_memory(root)
    with opened(root) as other:
        assert other.load(again.state) == 2
    assert same_bits(again.weights(), weights)


def test_a_root_that_fails_holds_up_no_step_and_loses_nothing(
    root: Path, tmp_path: Path, places: Places
) -> None:
    """More flushes than there are slots become durable on the node; when the root is back, the newest reaches it, and
    the oldest that waited do not."""
    nvme, training = tmp_path / "nvme", Training()
    ckpt = opened(
        root,
        tiers=[near(nvme, keep_last=100)],
        policy={"full_every": 1, "on_slow": "wait", "failures_max": None, "keep_last": 100},
    )
    ckpt.load(training.state)
    training.step()
    ckpt.save(1, training.state).wait()
    places.fail(root, denied("open_writer"), denied("create", ".vote"))
    handles = []
    with pytest.warns(RuntimeWarning, match="denied.*tried again"):
        for step in range(2, 10):
            training.step()
            handle = ckpt.step(step, training.state)
            assert handle is not None
            handle.wait("nvme")
            handles.append(handle)
        until(lambda: ckpt.status()["tiers"][0]["upload_failures"] > 3, "some tries")
        ckpt._session.hear()  # type: ignore[union-attr]
    assert steps_on_disk(root) == [1] and {8, 9} <= set(staged(nvme))
    places.heal(root)
    for handle in handles[-2:]:
        handle.wait()
    dropped = {handle.step: handle.error for handle in handles if handle.error is not None}
    assert len(dropped) >= 4
    assert all(isinstance(error, errors.SaveAbandoned) for error in dropped.values())
    ckpt.close()
    there = set(steps_on_disk(root))
    assert {8, 9} <= there and not there & dropped.keys()


def test_node_writes_do_not_wait_for_uploads(root: Path, tmp_path: Path) -> None:
    """The rate of the root does not bound what goes to the node; the one that is being uploaded is not given up."""
    training = Training()
    ckpt = opened(root, tiers=[near(tmp_path / "nvme")], policy={"rate_bytes_per_s": 3000.0})
    ckpt.load(training.state)
    handles = []
    for step in range(1, 6):
        training.step()
        handles.append(ckpt.save(step, training.state))
        handles[-1].wait("nvme")
    assert not any(handle.done() for handle in handles)
    until(lambda: handles[1].error and handles[2].error, "the end of those that waited longest")
    assert [handle.step for handle in handles if handle.error is None] == [1, 4, 5]
    assert ckpt.status()["tiers"][0]["owed"] == [1, 4, 5]
    ckpt.close(flush=False)


def test_a_commit_that_the_root_refuses_is_tried_again(root: Path, tmp_path: Path, places: Places) -> None:
    training = Training()
    ckpt = opened(root, tiers=[near(tmp_path / "nvme")])
    ckpt.load(training.state)
    places.fail(root, denied("create", "manifest"))
    handle = ckpt.save(1, training.state)
    until(lambda: voted(root, 1), "the vote")
    with pytest.warns(RuntimeWarning, match="denied.*tried again"):
        until(lambda: ckpt._session.outcomes._findings or ckpt._session._hear_quietly(), "news")  # type: ignore[union-attr]
        ckpt._session.hear()  # type: ignore[union-attr]
    assert handle.error is None and not handle.done()
    places.heal(root)
    handle.wait()
    ckpt.close()


def test_a_node_tier_that_is_full_is_told_and_passed_by(root: Path, tmp_path: Path, places: Places) -> None:
    nvme, training = tmp_path / "nvme", Training()
    ckpt = opened(root, tiers=[near(nvme)])
    ckpt.load(training.state)
    places.fail(
        nvme, Fault("writer.commit", "state", times=DENIED, error=lambda name: NoSpace(name, "disk full"))
    )
    training.step()
    handle = ckpt.save(1, training.state)
    handle.wait()
    with pytest.raises(errors.SaveFailed, match="no room"):
        handle.wait("nvme")
    assert steps_on_disk(root) == [1]
    assert not [path for path in nvme.glob("checkpoints/**/*") if path.is_file()]
    with pytest.warns(RuntimeWarning, match="disk full.*straight to the root"):
        training.step()
        ckpt.step(2, training.state)
    places.heal(nvme)
    handle = ckpt.save(2, training.state)
    handle.wait("nvme")
    handle.wait()
    ckpt.close()
    assert staged(nvme) == [2] and steps_on_disk(root) == [1, 2]


def test_the_directory_of_another_run_is_not_touched(root: Path, tmp_path: Path) -> None:
    nvme, training = tmp_path / "nvme", Training()
    with opened(tmp_path / "other", tiers=[near(nvme)]) as other:
        other.save(1, training.state).wait()
    before = shares(nvme)
    with opened(root, tiers=[near(nvme)]) as ckpt:
        handle = ckpt.save(1, training.state)
        handle.wait()
        with pytest.raises(errors.SaveFailed, match="another run"):
            handle.wait("nvme")
        with pytest.warns(RuntimeWarning, match="another run"):
            ckpt.step(2, training.state)
    assert shares(nvme) == before


def test_the_node_keeps_what_its_retention_says_and_all_that_is_not_at_the_root(
    root: Path, tmp_path: Path, places: Places
) -> None:
    nvme, training = tmp_path / "nvme", Training()
    ckpt = opened(root, tiers=[near(nvme, keep_last=2)], policy={"keep_last": 10, "failures_max": None})
    ckpt.load(training.state)
    for step in (1, 2, 3, 4):
        training.step()
        ckpt.save(step, training.state).wait()
    until(lambda: staged(nvme) == [3, 4], "retention on the node")
    places.fail(root, denied("open_writer"))
    for step in (5, 6):  # as many as are never given up
        training.step()
        handle = ckpt.save(step, training.state)
        handle.wait("nvme")
    assert staged(nvme) == [3, 4, 5, 6]
    places.heal(root)
    handle.wait()
    ckpt.close()
    until(lambda: staged(nvme) == [5, 6], "retention on the node")
    assert steps_on_disk(root) == [1, 2, 3, 4, 5, 6]


def test_what_changes_on_the_node_is_not_committed(root: Path, tmp_path: Path, places: Places) -> None:
    nvme, training = tmp_path / "nvme", Training()
    ckpt = opened(root, tiers=[near(nvme)], policy={"failures_max": None})
    ckpt.load(training.state)
    places.fail(root, denied("list_names"))
    training.step()
    handle = ckpt.save(1, training.state)
    handle.wait("nvme")
    image = next(nvme.glob("checkpoints/**/*.safetensors"))
    data = bytearray(image.read_bytes())
    data[len(data) // 2] ^= 1
    image.write_bytes(data)
    places.heal(root)
    with pytest.raises(errors.SaveFailed, match="damaged in the chunk"):
        handle.wait()
    training.step()
    ckpt.save(2, training.state).wait()
    ckpt.close()
    assert steps_on_disk(root) == [2]


def test_options_are_compared(root: Path, tmp_path: Path) -> None:
    for given, match in (
        ({"url": tmp_path, "scope": "rack"}, "scope"),
        ({"url": "s3://bucket/x", "scope": "node"}, "local directory"),
        ({"url": tmp_path, "scope": "node", "every": 2}, "every"),
    ):
        with pytest.raises(errors.BadOption, match=match):
            everstep.Tier(**given)  # type: ignore[arg-type]
    with pytest.raises(errors.BadOption, match="one tier of its own"):
        everstep.Checkpointer(root, tiers=[near(tmp_path / "a"), near(tmp_path / "b", name="b")])
    assert near(tmp_path).name == "nvme"


KILLED = """
training = Training()
os.environ["EVERSTEP_AGENT_POINTS"] = sys.argv[2]
nvme = everstep.Tier(sys.argv[3], scope="node")
ckpt = everstep.Checkpointer(root, policy=policy(linger_s=2.0, full_every=1), tiers=[nvme])
ckpt.load(training.state)
training.step()
handle = ckpt.save(1, training.state)
os.environ.pop("EVERSTEP_AGENT_POINTS", None)
say(ckpt.agent_pid)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    handle.wait()
    for step in range(2, 6):  # the slot of step 1 is another's by now
        training.step()
        ckpt.step(step, training.state)
    say(ckpt.agent_pid)
    handle.wait("nvme")
    ckpt.close()
say("closed")
"""


@pytest.mark.parametrize(
    "point",
    [
        "agent.staged",
        pytest.param("agent.upload", marks=pytest.mark.long),
        pytest.param("vote.after", marks=pytest.mark.long),
        pytest.param("mirror.image.piece", marks=pytest.mark.long),
        pytest.param("mirror.vote.before", marks=pytest.mark.long),
        pytest.param("mirror.vote.after", marks=pytest.mark.long),
        pytest.param("agent.commit.before", marks=pytest.mark.long),
        pytest.param("agent.settled", marks=pytest.mark.long),
    ],
)
def test_an_agent_that_is_killed_is_followed_by_one_that_uploads(
    root: Path, tmp_path: Path, script: Any, point: str
) -> None:
    job = script(KILLED, root, f"kill:{point}", tmp_path / "nvme")
    assert job.line() != job.line(), "the agent was not killed"
    assert job.line() == "closed", job.end()
    assert job.end()[0] == 0
    assert 5 in steps_on_disk(root)


def test_a_run_goes_on_without_the_node_tier(root: Path, tmp_path: Path) -> None:
    """What the tier had is at the root; the directory may go."""
    training = Training()
    with opened(root, tiers=[near(tmp_path / "nvme")]) as ckpt:
        ckpt.load(training.state)
        training.step()
        ckpt.save(1, training.state)
    shutil.rmtree(tmp_path / "nvme")
    forget_memory(root)
    again = Training(seed=3)
    with opened(root, tiers=[near(tmp_path / "nvme")]) as ckpt:
        assert ckpt.load(again.state) == 1
        assert ckpt.recovery is not None and set(ckpt.recovery.sources) == {"disk"}
    assert same_bits(again.weights(), training.weights())


def test_a_merge_whose_share_just_went_from_the_node_takes_the_roots(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    kinds: list[str] = []

    async def merge(backend: Any, job: Any, source: Any, **more: Any) -> Any:
        kinds.append(source.kind)
        if source.kind == "node":
            raise errors.Damaged("an object is missing", name="an object")
        return await merge_rank(backend, job, source, **more)

    merge_rank = merging.merge_rank
    monkeypatch.setattr(merging, "merge_rank", merge)
    training = Training()
    policy = {"delta_every": 1, "max_chain": 2, "keep_last": 9, "on_slow": "wait"}
    ckpt = opened(root, tiers=[near(tmp_path / "nvme", keep_last=9)], policy=policy)
    ckpt.load(training.state)
    for step in range(1, 6):
        training.step()
        handle = ckpt.step(step, training.state)
        assert handle is not None
        handle.wait()
    until(lambda: kinds and not ckpt.status()["agent"]["merging"], "it is merged")
    ckpt.close()
    assert kinds[:2] == ["node", "disk"]
    assert not [one for one in recwarn if "stays a delta" in str(one.message)]
