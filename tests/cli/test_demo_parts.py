"""The demonstration's parts, without a job: text, loader, journals, comparison."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from cli_kit import everstep
from everstep.demo.compare import compare_ends, compare_losses
from everstep.demo.corpus import stdlib_text
from everstep.demo.journal import Journal, journal_path, read_lives
from everstep.demo.story import STEPS_MIN, Plan
from everstep.errors import BadOption
from everstep.memory.process import Process


def test_the_text_is_the_same_each_time_and_bounded() -> None:
    assert stdlib_text() == stdlib_text()
    assert len(stdlib_text(1000)) == 1000
    assert stdlib_text(5000).startswith(stdlib_text(1000))


def test_the_loader_goes_on_where_it_was() -> None:
    import torch
    from everstep.demo.loader import ShuffledWindows

    def loader(rank: int = 0) -> ShuffledWindows:
        return ShuffledWindows(stdlib_text(6000), length=32, batch=8, rank=rank, world=2, seed=3)

    one = loader()
    batches = [next(one) for _ in range(30)]
    assert not torch.equal(batches[0], next(loader(rank=1)))
    for position in (0, 1, 10, 11, 12, 29):
        first = loader()
        for _ in range(position):
            next(first)
        second = loader()
        next(second)
        second.load_state_dict(first.state_dict())
        for expected in batches[position:]:
            assert torch.equal(next(second), expected)


def test_every_window_comes_once_per_epoch() -> None:
    from everstep.demo.loader import ShuffledWindows

    text = stdlib_text(32 * 16 + 1)
    loader = ShuffledWindows(text, length=32, batch=4, rank=0, world=1, seed=1)
    seen = [bytes(row.tolist()) for _ in range(4) for row in next(loader)]
    assert sorted(seen) == sorted(text[at : at + 33] for at in range(0, len(text) - 1, 32))


def test_a_journal_with_a_torn_end(tmp_path: Path) -> None:
    first = Journal(tmp_path, 0)
    first.started(step=0, tier=None, seconds=0.0)
    first.stepped(1, 0.1, 4711)
    first.stepped(2, math.nan, 4711)
    second = Journal(tmp_path, 0)
    second.started(step=1, tier="memory", seconds=0.5, skipped=("why",))
    second.stepped(2, 0.2, None)
    with journal_path(tmp_path, 0).open("ab") as file:
        file.write(b'{"kind": "step", "st')
    lives = read_lives(tmp_path, 0)
    assert [(life.start_step, life.tier, life.newest) for life in lives] == [(0, None, 2), (1, "memory", 2)]
    assert lives[0].losses == {1: (0.1).hex(), 2: "nan"}
    assert lives[0].agent_pid == 4711
    assert lives[1].skipped == ["why"]
    assert lives[0].process == Process.current()
    assert read_lives(tmp_path, 1) == []


def write(out: Path, losses: list[dict[int, float]], weight: str = "aa") -> None:
    """A rank's journal: one process for each of ``losses``; the last one ends."""
    for life in losses:
        journal = Journal(out, 0)
        journal.started(step=min(life) - 1, tier=None, seconds=0.0)
        for step, loss in life.items():
            journal.stepped(step, loss, None)
    journal.ended({"/model/w": weight, "/optimizer/m": "bb"})


@pytest.mark.parametrize(
    ("lives", "weight", "equal"),
    [
        ([{1: 0.5, 2: 0.25}, {2: 0.25, 3: 0.125}], "aa", (True, True)),
        ([{1: 0.5, 2: 0.25}, {2: 0.2500001, 3: 0.125}], "aa", (False, True)),
        ([{1: 0.5, 2: 0.75}, {2: 0.25, 3: 0.125}], "aa", (False, True)),
        ([{1: 0.5}, {3: 0.125}], "aa", (False, True)),
        ([{1: 0.5, 2: 0.25, 3: 0.125}], "ab", (True, False)),
    ],
)
def test_any_difference_is_seen(
    tmp_path: Path, lives: list[dict[int, float]], weight: str, equal: tuple[bool, bool]
) -> None:
    write(tmp_path / "reference", [{1: 0.5, 2: 0.25, 3: 0.125}])
    write(tmp_path / "disturbed", lives, weight)
    reference, disturbed = ([read_lives(tmp_path / run, 0)] for run in ("reference", "disturbed"))
    losses = compare_losses(reference, disturbed, 3)
    ends = compare_ends(reference, disturbed, "/model", "final weights")
    assert (losses.equal, ends.equal) == equal
    assert compare_ends(reference, disturbed, "/optimizer", "state").equal
    assert not compare_ends(reference, disturbed, "/nothing", "nothing").equal
    assert losses.again == (1 if 2 in lives[0] and len(lives) > 1 else 0)


def test_fingerprints_count_bits() -> None:
    import torch
    from everstep.demo.fingerprint import fingerprints

    value = {"w": torch.tensor([0.0, 1.0]), "list": [1, 2.5, {"x": None}], "empty": {}}
    assert set(fingerprints(value)) == {"/w", "/list/0", "/list/1", "/list/2/x", "/empty"}
    minus = {**value, "w": torch.tensor([-0.0, 1.0])}
    assert torch.equal(minus["w"], value["w"])
    assert fingerprints(minus)["/w"] != fingerprints(value)["/w"]
    assert fingerprints(torch.zeros(2, 1)) != fingerprints(torch.zeros(1, 2))


def test_a_plan_has_room_for_three_incidents() -> None:
    plan = Plan.make(2, STEPS_MIN)
    assert 0 < plan.rank_killed_at < plan.node_killed_at < STEPS_MIN - plan.flush_every
    for ranks, steps in ((0, 100), (99, 100), (2, STEPS_MIN - 1)):
        with pytest.raises(BadOption):
            Plan.make(ranks, steps)


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    said = everstep("demo", "--keep", tmp_path)
    assert said.code == 1
    assert "empty directory" in said.err
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_whole_story(tmp_path: Path, ranks: int) -> None:
    said = everstep("demo", "--ranks", str(ranks), "--steps", "40", "--keep", tmp_path / "kept", "--json")
    assert said.code == 0, said.err + said.out
    story = said.json
    assert story["good"] is True
    assert all(check["holds"] for check in story["checks"])
    assert [i["tier"] for i in story["incidents"]] == ["memory", "disk", "disk"]
    assert story["incidents"][0]["steps_lost"] == 0
    assert everstep("fsck", tmp_path / "kept" / "disturbed" / "run").code == 0
