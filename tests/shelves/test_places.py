"""Retention and pins of a run as trainers, readers and operators meet them: a policy, a live run, an object store."""

from __future__ import annotations

from pathlib import Path

import everstep
import pytest
from everstep import errors
from everstep.plan.retention import Retention

from tests.facade.kit import Training, opened, steps_on_disk, until
from tests.s3 import run_kit
from tests.s3.server import S3Server


def saved(root: Path, losses: list[float], first: int = 1, **policy: object) -> None:
    """One durable checkpoint for each loss, rotated after each."""
    training = Training()
    with opened(root, policy={"full_every": None, **policy}) as ckpt:
        ckpt.load(training.state)
        for step, loss in enumerate(losses, first):
            training.step()
            ckpt.save(step, training.state, metrics={"loss": loss}).wait()


def settled(root: Path, expected: list[int]) -> None:
    until(lambda: steps_on_disk(root) == expected, f"{expected}, not {steps_on_disk(root)}")


def test_the_best_is_known_to_the_next_process(root: Path) -> None:
    rules = {"keep_last": 1, "keep_best": 1, "best": "min:loss"}
    saved(root, [3.0, 1.0, 2.0], **rules)
    settled(root, [2, 3])
    saved(root, [float("nan"), 5.0], first=4, **rules)
    settled(root, [2, 5])
    saved(root, [0.5, 6.0], first=6, **rules)
    settled(root, [6, 7])


def test_a_policy_has_its_retention() -> None:
    policy = everstep.Policy(
        keep_last=2, keep_interval="6h", keep_best=3, best="max:acc", keep_incarnations=4
    )
    assert policy.retention == Retention(2, None, "6h", 3, "max:acc", 4)
    tier = everstep.Tier("/far", keep_every=10, keep_best=1, best="min:loss")
    assert tier.retention == Retention(3, 10, None, 1, "min:loss")
    with pytest.raises(errors.BadOption, match=r"Tier\(best="):
        everstep.Tier("/far", keep_best=1)
    with pytest.raises(errors.BadOption, match='scope="node"'):
        everstep.Tier("/nvme", scope="node", keep_interval="6h")


def test_a_reader_holds_what_it_reads(root: Path) -> None:
    training = Training()
    with opened(root, policy={"full_every": None, "keep_last": 1}) as ckpt:
        ckpt.load(training.state)
        ckpt.save(1, training.state).wait()
        with everstep.pin(root, 1, for_s=600, reason="evaluation") as step:
            for later in (2, 3):
                training.step()
                ckpt.save(later, training.state).wait()
            until(lambda: steps_on_disk(root) == [1, 3], "rotation")
            assert everstep.load(root, step=step)["model"]
        training.step()
        ckpt.save(4, training.state).wait()
        until(lambda: steps_on_disk(root) == [4], "rotation")
    with pytest.raises(errors.NoCheckpoint), everstep.pin(root, 1):
        pass
    assert not list((root / "pins").glob("*"))


def test_on_an_object_store(s3_server: S3Server) -> None:
    url = s3_server.url()
    training = Training()
    with run_kit.opened(url, s3_server, policy={"keep_last": 100}, agent="inline") as ckpt:
        ckpt.load(training.state)
        for step in range(1, 7):
            training.step()
            ckpt.save(step, training.state, metrics={"loss": float(step)}).wait()
    code, pin = run_kit.command(s3_server, "pin", url, "3", "--for", "1h")
    assert code == 0
    rules = ("--keep-last", "1", "--keep-best", "1", "--best", "min:loss")
    code, dry = run_kit.command(s3_server, "prune", url, *rules, "--dry-run")
    assert code == 0 and [one["step"] for one in dry["keep"]] == [1, 3, 6]
    code, said = run_kit.command(s3_server, "prune", url, *rules)
    assert code == 0 and said["remove"] == dry["remove"] and run_kit.checkpoints(s3_server, url) == [1, 3, 6]
    code, _ = run_kit.command(s3_server, "unpin", url, "--id", pin["pin"]["id"])
    assert code == 0
    code, said = run_kit.command(s3_server, "prune", url, "--keep-last", "1")
    assert [one["step"] for one in said["remove"]] == [1, 3] and run_kit.checkpoints(s3_server, url) == [6]
