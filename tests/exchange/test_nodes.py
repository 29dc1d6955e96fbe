"""Snapshots in the arenas of several nodes, and ranks that are started again elsewhere, or in another number."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import everstep
import pytest
import torch

from tests.facade.kit import Forked

from .kit import (
    Job,
    contents,
    digests_in_slots,
    erase,
    held,
    load_on,
    manifests,
    state_with,
)

Say = Callable[..., None]


def restore(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
    """Load into another state than the saved one, and say whether every bit is the saved one's."""
    values = contents(rank, 0)
    step = ckpt.load(state_with(values))
    recovery = ckpt.recovery
    if step is None or recovery is None:
        say("fresh", None, True)
        return
    wanted = contents(rank, step)
    same = values["n"] == wanted["n"] and all(torch.equal(values[k], wanted[k]) for k in ("w", "b"))
    say(step, recovery.tier, same, *recovery.skipped)


@pytest.mark.parametrize(
    "places",
    ["abab", "bbaa", "ccdd", *(pytest.param(p, marks=pytest.mark.long) for p in ("baba", "aaab", "ccab"))],
    ids="{0[0]}{0[1]}{0[2]}{0[3]}".format,
)
def test_ranks_find_their_snapshots_on_whatever_node_they_lie(
    root: Path, nodes: list[str], job: Job, places: str
) -> None:
    a, b = nodes[:2]
    job.save_and_die([a, a, b, b], [1, 2, 3])
    there = [nodes["abcd".index(letter)] for letter in places]
    said = job.run(there, restore)
    if {"a", "b"} <= set(places):
        assert said == [["3 memory True"]] * 4
    else:
        assert said == [["fresh None True"]] * 4, "no rank runs where the snapshots are"
    assert manifests(root) == [], "nothing was on disk, and nothing was written"


@pytest.mark.parametrize(
    "places", ["ba", "aaba", *(pytest.param(p, marks=pytest.mark.long) for p in ("ab", "abb", "bbbbaa"))]
)
def test_another_number_of_ranks_reads_every_byte_of_all_saved_ranks(
    root: Path, nodes: list[str], job: Job, places: str
) -> None:
    a, b = nodes[:2]
    job.save_and_die([a, a, b, b], [1, 2])
    expected = digests_in_slots(root, [a, b], (1, 2))
    assert {rank for rank, _ in expected} == {0, 1, 2, 3}
    results = load_on(root, [nodes["ab".index(letter)] for letter in places])
    for result in results:
        assert result.error is None and result.recovery is not None
        assert (result.recovery.step, result.recovery.tier) == (2, "memory")
        assert result.values == expected
    assert manifests(root) == []


@pytest.mark.parametrize("world", [1, 3, 6])
def test_one_node_serves_any_number_of_ranks_from_the_arenas_of_four(
    root: Path, nodes: list[str], job: Job, world: int
) -> None:
    job.save_and_die([nodes[0]] * 4, [5])
    expected = digests_in_slots(root, nodes[:1], (1, 5))
    results = load_on(root, [nodes[0]] * world)
    assert [result.values for result in results] == [expected] * world


def test_the_newest_step_that_all_ranks_have_counts(root: Path, nodes: list[str], job: Job) -> None:
    """One rank of one node is a step ahead of the others."""
    a, b = nodes[:2]

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        values = contents(rank, 0)
        state = state_with(values)
        ckpt.load(state)
        for step in (1, 2, 3) if rank in (0, 3) else (1, 2):
            values.update(contents(rank, step))
            ckpt.step(step, state)
        say("saved")
        threading.Event().wait(30)

    ranks: list[Forked] = job.start([a, a, b, b], body)
    assert [rank.line() for rank in ranks] == ["saved"] * 4
    job.kill()
    assert {rank for rank, _, step in held(root, a) | held(root, b) if step == 3} == {0, 3}
    assert job.run([b, a, a, b], restore) == [["2 memory True"]] * 4


def test_a_node_that_lost_its_memory_sends_all_ranks_to_disk(root: Path, nodes: list[str], job: Job) -> None:
    a, b = nodes[:2]

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        values = contents(rank, 0)
        state = state_with(values)
        ckpt.load(state)
        for step in (1, 2, 3):
            values.update(contents(rank, step))
            ckpt.step(step, state)
            if step == 2:
                ckpt.save(2, state).wait()
        say("saved")
        threading.Event().wait(30)

    ranks = job.start([a, a, b, b], body)
    assert [rank.line() for rank in ranks] == ["saved"] * 4
    job.kill()
    erase(root, b)
    said = job.run([a, a, b, b], restore)
    told = "step 3 (incarnation 1): no node's memory has rank(s) [2, 3] of it"
    assert said == [[f"2 disk True {told}"]] * 4


def test_with_nothing_on_disk_a_lost_node_is_told(root: Path, nodes: list[str], job: Job) -> None:
    a, b = nodes[:2]
    job.save_and_die([a, b], [1])
    erase(root, a)
    results = load_on(root, [a, b])
    assert [(result.recovery, result.error) for result in results] == [(None, None)] * 2
    assert any("no node's memory has rank(s) [0] of it" in text for text in results[0].warned)


def test_readers_of_one_node_do_not_take_a_part_for_the_whole(root: Path, nodes: list[str], job: Job) -> None:
    a, b = nodes[:2]
    job.save_and_die([a, a, b, b], [1])
    results = load_on(root, [a])
    assert results[0].recovery is None and results[0].error is None
