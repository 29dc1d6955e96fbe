"""The first save says what ranks store though all hold the same."""

from __future__ import annotations

from pathlib import Path

import everstep
import torch
from click.testing import CliRunner
from everstep.cli.main import main

from .kit import Forks, Rank, facts, job


def test_equal_tensors_are_told_once_with_what_marking_them_would_save(forked: Forks, root: Path) -> None:
    def body(one: Rank) -> None:
        model = {"w": torch.arange(300_000.0), "b": torch.ones(10)}
        mixed = {"same": torch.zeros(100), "own": torch.full((100,), float(one.rank))}
        own = {"t": torch.full((500,), float(one.rank))}
        state = everstep.TrainState(model=model, mixed=mixed, own=own)
        for step in (1, 2):
            one.save(step, state)
        model["more"] = torch.zeros(5)
        one.save(3, state)

    told = job(forked, root, body, policy={"keep_last": 9})
    about = facts(root, 1)["equal"]
    assert about["parts"] == {
        "model": {"tensors": 2, "nbytes": 1_200_040, "whole": True},
        "mixed": {"tensors": 1, "nbytes": 400, "whole": False},
    }
    assert about["world"] == 3 and about["saves"] == 2 * 1_200_040
    assert "equal" not in facts(root, 2), "the structure is known"
    assert facts(root, 3)["equal"]["parts"]["model"]["tensors"] == 3
    texts = told[0]["heard"]
    assert len(texts) == 2, "one for each structure"
    assert "model (all: 2 tensors, 1.1 MiB)" in texts[0] and "mixed (some: 1 tensor" in texts[0]
    assert "TrainState(replicated={'model'}) saves 2.3 MiB per checkpoint" in texts[0]
    assert told[1]["heard"] == told[2]["heard"] == [], "rank 0 tells it"
    shown = CliRunner().invoke(main, ["show", str(root), "1"])
    assert shown.exit_code == 0 and "replicated={'model'}" in shown.output
    assert any('"equal"' in path.read_text() for path in root.glob("events/*.jsonl"))


def test_a_snapshot_that_is_saved_later_says_it_too(forked: Forks, root: Path) -> None:
    def body(one: Rank) -> None:
        state = everstep.TrainState(model={"w": torch.ones(300_000)})
        for step in (1, 2, 3):
            one.ckpt.step(step, state)
            one.meet()
        one.save(3, state)

    memory = everstep.Memory(bytes=4 << 20)
    told = job(forked, root, body, world=2, memory=memory)
    assert facts(root, 3)["equal"]["saves"] == 1_200_000
    assert len(told[0]["heard"]) == 1


def test_nothing_is_said_of_what_differs(forked: Forks, root: Path) -> None:
    def body(one: Rank) -> None:
        one.save(1, everstep.TrainState(own={"t": torch.full((500_000,), float(one.rank))}))

    told = job(forked, root, body, world=2)
    assert [rank["heard"] for rank in told] == [[], []]
    assert facts(root, 1) == {}


def test_one_rank_alone_is_asked_nothing(root: Path) -> None:
    from tests.facade.kit import opened

    with opened(root) as ckpt:
        ckpt.save(1, everstep.TrainState(model={"w": torch.zeros(5000)}, replicated=("model",))).wait()
    assert facts(root, 1) == {}
