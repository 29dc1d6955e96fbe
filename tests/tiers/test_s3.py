"""A further tier in an object store, on a real server."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import everstep
import pytest

from tests.facade.kit import Training, forget_memory, opened, same_bits, steps_on_disk, until
from tests.s3.server import S3Server


def far(server: S3Server, url: str, **options: Any) -> everstep.Tier:
    return everstep.Tier(url, name="far", storage_options=server.storage_options, **options)


@pytest.mark.parametrize("agent", ["inline", "process"])
def test_what_was_mirrored_is_gone_on_with_when_the_root_is_lost(
    root: Path, s3_server: S3Server, agent: str
) -> None:
    url, training = s3_server.url(), Training()
    with opened(root, tiers=[far(s3_server, url)], agent=agent) as ckpt:
        ckpt.load(training.state)
        for step in (1, 2):
            training.step()
            ckpt.save(step, training.state).wait("far")
    weights = training.weights()
    forget_memory(root)
    shutil.rmtree(root)
    again = Training(seed=5)
    with opened(root, tiers=[far(s3_server, url)], agent=agent) as ckpt:
        assert ckpt.load(again.state) == 2
        assert same_bits(again.weights(), weights)
        again.step()
        ckpt.save(3, again.state).wait("far")
    reader = Training(seed=6)
    step = everstep.load(url, into=reader.state, storage_options=s3_server.storage_options)
    assert step == 3 or same_bits(reader.weights(), again.weights())
    assert same_bits(reader.weights(), again.weights())


def test_secrets_are_nowhere(root: Path, tmp_path: Path, s3_server: S3Server) -> None:
    """Neither in what is stored, nor in the agent's directory."""
    url, training = s3_server.url(), Training()
    with opened(root, tiers=[far(s3_server, url)], agent="process") as ckpt:
        ckpt.load(training.state)
        training.step()
        ckpt.save(1, training.state).wait("far")
        secret = str(s3_server.secret).encode()
        places = [*root.rglob("*"), *(tmp_path / "runtime").rglob("*")]
        files = [path for path in places if path.is_file()]
        assert any(path.name == "data.mdb" for path in files)
        assert [path for path in files if secret in path.read_bytes()] == []


@pytest.mark.long
def test_going_back_in_a_running_job(root: Path, tmp_path: Path, s3_server: S3Server) -> None:
    """With a tier in an object store, and one of the node: to a step that only the far one has, and to the newest. What
    was written after it is chosen nowhere again."""
    url, training = s3_server.url(), Training()
    nvme = everstep.Tier(tmp_path / "nvme", scope="node", keep_last=1)
    tiers = [nvme, far(s3_server, url, keep_last=10)]
    weights = {}
    with opened(root, tiers=tiers, policy={"keep_last": 1}) as ckpt:
        ckpt.load(training.state)
        for step in (1, 2, 3, 4):
            training.step()
            weights[step] = training.weights()
            ckpt.save(step, training.state).wait("far")
        until(lambda: steps_on_disk(root) == [4], "rotation at the root")
        assert ckpt.rollback(1, reason="loss spike") == 1
        assert same_bits(training.weights(), weights[1])
        assert ckpt.recovery is not None and set(ckpt.recovery.sources) == {"tier"}
        training.step()
        ckpt.save(2, training.state).wait("far")
        again = training.weights()
        training.step()
        assert ckpt.rollback(reason="another one") == 2
        assert same_bits(training.weights(), again)
        training.step()
        ckpt.save(3, training.state).wait("far")
        weights[3] = training.weights()
    forget_memory(root)
    for lost in (tmp_path / "nvme", root):
        shutil.rmtree(lost)
        resumed = Training(seed=5)
        with opened(root, tiers=tiers) as ckpt:
            assert ckpt.load(resumed.state) == 3
            assert ckpt.recovery is not None and ckpt.recovery.incarnation == 3
        assert same_bits(resumed.weights(), weights[3])
        forget_memory(root)
