"""Agents of several nodes protect a job's snapshots: what is protected, W, and what happens when one is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from everstep.errors import MemoryTooSmall

from .guard_kit import CHUNK, Job, until

Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def begin(*args: Any, **options: Any) -> Job:
        job = Job(tmp_path, *args, **options)
        jobs.append(job)
        return job.open()

    yield begin
    for job in jobs:
        job.end()


@pytest.mark.parametrize(("nodes", "per_node", "copies"), [(2, 1, 1), (2, 2, 1), (3, 1, 2)])
def test_w_is_what_is_protected_on_all_nodes(start: Start, nodes: int, per_node: int, copies: int) -> None:
    job = start(nodes, per_node, copies)
    assert {rank.complete for rank in job.ranks} == {-1}
    for step in (3, 4, 7):
        job.snapshot(step)
        job.await_complete(step)
        assert {rank.protected for rank in job.ranks} == {step}
    for index, kept_by in enumerate(job.map.holders()):
        for holder in kept_by:
            for rank in job.nodes[index].ranks:
                assert job.nodes[holder].held()[rank.rank] == {(1, 4), (1, 7)}
                job.nodes[holder].check_held(rank.rank, (1, 7), 3 * CHUNK)
    status = job.nodes[0].status()
    assert (status["complete"], status["protected"], status["unprotected"]) == (7, 7, [])
    assert {one["protected"] for one in status["nodes"].values()} == {7}
    assert not {stage for rank in job.ranks for stage in rank.stages()} & {"peer_failed", "unprotected"}


def test_w_waits_for_every_rank(start: Start) -> None:
    job = start(2, 2)
    job.snapshot(1)
    job.await_complete(1)
    for rank in job.ranks[:3]:
        rank.snapshot(2)
    until(lambda: job.nodes[0].ranks[0].protected == 2, "the first node's snapshot at the second's")
    assert not job.complete_is(2) and job.nodes[1].ranks[0].protected == 1
    job.ranks[3].snapshot(2)
    job.await_complete(2)
