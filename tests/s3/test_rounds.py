"""Agents that are killed while they upload: the next one ends what they began, sends no finished part again, and leaves
nothing behind."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import everstep
import pytest
import torch
from everstep.agent.mirrors import WAITING_MAX
from everstep.store.findings import Severity

from . import rounds_kit as rounds
from . import run_kit as kit
from .proxy import S3Proxy
from .rounds_kit import Kill, Round, Stage
from .server import S3Server

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ROUNDS = int(os.environ.get("EVERSTEP_ROUNDS", "100"))
"""Of the long suite."""

COMPLETIONS = (
    Kill(0, held=True, operation="CompleteMultipartUpload"),
    Kill(0, held=True, operation="CompleteMultipartUpload"),
)
"""The server completes the first one, and hears the next agent's, if there is one, for the next checkpoint."""


@pytest.fixture(scope="module")
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server.endpoint) as running:
        yield running


def look(stage: Stage, last: int) -> None:
    """Everything that a round must leave behind, and nothing else."""
    server, url, plan = stage.server, stage.url, stage.plan
    assert rounds.sent_again(stage.proxy.requests, stage.killer.struck) == []
    seen = kit.url_with_endpoint(server, url)
    stage.proxy.release()  # what was held since an earlier life comes now
    stage.proxy.wait_quiet()
    for place in {seen, stage.root if plan.where == "tier" else seen}:
        code, said = kit.command(server, "gc", place, "--older-than", "0s")
        assert code == 0, said
    assert kit.uploads(server, url) == []
    there, counting = rounds.at_server(server, url), rounds.manifests(url, server)
    assert rounds.orphans(there, counting) == []
    assert counting[-1].step == last, "the last step is there"
    if plan.where == "tier":
        here = rounds.files(Path(stage.root))
        assert {(one.step, one.incarnation) for one in rounds.manifests(stage.root)} == {
            (one.step, one.incarnation) for one in counting
        }
        assert [name for name, data in there.items() if here.get(name) != data] == [], "the same bytes"
        assert plan.trainers_too or there.keys() == here.keys()
        code, said = kit.command(server, "fsck", stage.root)
        assert (code, damage(said)) == (0, [])
    code, said = kit.command(server, "fsck", seen)
    assert (code, damage(said)) == (0, [])
    for rank in range(plan.world):
        values = everstep.load(url, rank=rank, storage_options=server.storage_options)
        assert torch.equal(values["w"], rounds.weights(stage.seed, rank, last))


def damage(said: dict[str, Any]) -> list[Any]:
    return [one for one in said["findings"] if one["severity"] == Severity.DAMAGE.value]


def play(
    server: S3Server,
    proxy: S3Proxy,
    directory: Path,
    seed: int,
    *,
    patience_s: float | None = None,
    **given: Any,
) -> None:
    plan = Round.of(random.Random(seed), **given)
    print(plan)
    with rounds.staged(server, proxy, directory, plan, seed) as stage:
        look(stage, stage.play(patience_s=patience_s))


@pytest.mark.parametrize(
    "given",
    [
        {"where": "tier", "world": 1, "kills": (Kill(3, held=True),)},
        {"where": "root", "world": 1, "kills": (Kill(2, held=True),)},
        {"trainers_too": True},
        pytest.param({"where": "root", "world": 1, "kills": COMPLETIONS}, marks=pytest.mark.long),
        pytest.param({"where": "tier", "world": 1, "kills": COMPLETIONS}, marks=pytest.mark.long),
    ],
    ids=["tier", "root", "with its trainers", "root, completed", "tier, completed"],
)
def test_an_agent_that_is_killed_is_followed_by_one_that_goes_on(
    s3_server: S3Server, proxy: S3Proxy, tmp_path: Path, given: dict[str, Any]
) -> None:
    play(
        s3_server,
        proxy,
        tmp_path,
        rounds.seed_of(0),
        **{"trainers_too": False, "name": rounds.NAMES[2], **given},
    )


@pytest.mark.long
def test_what_was_owed_before_is_not_dropped_for_a_restart(
    s3_server: S3Server, proxy: S3Proxy, tmp_path: Path
) -> None:
    """One checkpoint under way and as many waiting as may wait, when the agent is killed."""
    steps = 1 + WAITING_MAX
    play(
        s3_server,
        proxy,
        tmp_path,
        rounds.seed_of(0),
        where="tier",
        world=1,
        kills=(Kill(1, held=True),),
        trainers_too=False,
        steps=steps,
        saved_before=steps,
    )


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_agents_killed_at_any_request(
    s3_server: S3Server, proxy: S3Proxy, tmp_path: Path, number: int
) -> None:
    play(s3_server, proxy, tmp_path, rounds.seed_of(number))


@pytest.mark.long
@pytest.mark.parametrize("where", ["tier", "root"])
def test_an_agent_that_is_stopped_is_replaced(
    s3_server: S3Server, proxy: S3Proxy, tmp_path: Path, where: str
) -> None:
    stop = (Kill(2, held=True, number=signal.SIGSTOP),)
    play(
        s3_server,
        proxy,
        tmp_path,
        rounds.seed_of(0),
        patience_s=1.0,
        where=where,
        kills=stop,
        world=1,
        trainers_too=False,
    )
