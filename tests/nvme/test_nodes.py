"""Several nodes, each with a tier of its own: what lies whole in all of them together is never lost."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import everstep
import everstep.agent.inline
import everstep.agent.uploads
import pytest
import torch
from everstep.agent.inline import InlineAgent
from everstep.backends.faults import Faulty
from everstep.backends.open import open_backend
from everstep.connecting import agent_settings
from everstep.places import locate, with_tiers
from everstep.store.blocking import run_blocking
from everstep.store.runs import open_run

from tests.exchange.kit import WAIT_S, Job, contents, erase, state_with
from tests.facade.kit import forget_memory, opened, policy, steps_on_disk, until

from .kit import denied, near, staged, voted

Say = Callable[..., None]


class Cluster(Job):
    """Ranks on nodes with tiers of their own."""

    def __init__(self, root: Path, base: Path) -> None:
        super().__init__(root)
        self._base = base

    def tier(self, node: str) -> Path:
        return self._base / f"nvme-{node}"

    def _rank_body(
        self,
        rank: int,
        places: Sequence[str],
        body: Callable[[int, everstep.Checkpointer, Say], object],
        options: dict[str, Any],
    ) -> Callable[[Say], object]:
        def with_tier(rank: int, ckpt: everstep.Checkpointer, say: Say) -> object:
            ckpt._close(flush=False, keep=False)
            return body(rank, opened(self.root, tiers=[near(self.tier(places[rank]))], **options), say)

        return super()._rank_body(rank, places, with_tier, options)


@pytest.fixture
def cluster(root: Path, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(root, tmp_path)
    yield made
    made.end()


@pytest.fixture
def names(node: str) -> Iterator[list[str]]:
    yield [f"{node}-a", f"{node}-b"]


def root_fails(root: Path) -> None:
    """For this process's agents from now on."""
    url = locate(root).url

    def open_place(place: str, options: Any = None) -> Faulty:
        backend = Faulty(open_backend(place, shared=True))
        if place == url:
            backend.script = [denied("open_writer")]
        return backend

    everstep.agent.uploads.PAUSE_FIRST_S = 0.05
    everstep.agent.inline.InlineAgent = functools.partial(InlineAgent, open_backend=open_place)  # type: ignore


def save_and_die(
    cluster: Cluster, names: Sequence[str], failing: Collection[int], steps: Sequence[int]
) -> None:
    """The first step gets to the root, the others to the nodes' tiers alone where the root fails; then all nodes die,
    and their memory is lost."""

    def first(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        with ckpt:
            ckpt.load(state_with(contents(rank, 0)))
            ckpt.save(1, state_with(contents(rank, 1)))

    def later(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        if rank in failing:
            root_fails(cluster.root)
        values = contents(rank, 1)
        state = state_with(values)
        assert ckpt.load(state) == 1
        for step in steps:
            values.update(contents(rank, step))
            ckpt.save(step, state).wait("nvme")
        say("staged")
        threading.Event().wait(WAIT_S)

    cluster.run(names, first)
    for rank in cluster.start(names, later):
        assert rank.line() == "staged"
    if len(failing) < len(names):
        until(lambda: len(voted(cluster.root, steps[-1])) == len(names) - len(failing), "the others' votes")
    cluster.kill()
    for name in names:
        erase(cluster.root, name)
    assert steps_on_disk(cluster.root) == [1]


def load(cluster: Cluster, names: Sequence[str], step: int) -> list[set[str]]:
    """All ranks load, and have every bit of ``step``; whence by rank."""

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        values = contents(rank, 0)
        say(ckpt.load(state_with(values)))
        wanted = contents(rank, step)
        say(torch.equal(values["w"], wanted["w"]) and values["n"] == wanted["n"])
        say(" ".join(sorted(ckpt.recovery.sources)) if ckpt.recovery else "")

    said = cluster.run(names, body)
    assert [lines[:2] for lines in said] == [[str(step), "True"]] * len(names), said
    return [set(lines[2].split()) for lines in said]


@pytest.mark.parametrize(("nodes", "failing"), [("ab", (0, 1)), ("ab", (1,)), ("aa", (0, 1))])
def test_what_lies_whole_on_the_nodes_is_finished_and_loaded(
    cluster: Cluster, node: str, nodes: str, failing: tuple[int, ...]
) -> None:
    names = [f"{node}-{letter}" for letter in nodes]
    save_and_die(cluster, names, failing, [2, 3])
    with opened(cluster.root) as reader:  # without the tiers nothing is finished
        assert reader.load(state_with(contents(0, 0)), allow={"ranks", "unexpected"}, step=1) == 1
    assert steps_on_disk(cluster.root) == [1]
    assert load(cluster, names, 3) == [{"node"}, {"node"}]
    assert steps_on_disk(cluster.root) == [1, 3]
    assert load(cluster, names, 3) == [{"node"}, {"node"}]


def test_ranks_on_other_nodes_read_from_the_root(cluster: Cluster, names: list[str]) -> None:
    save_and_die(cluster, names, (0, 1), [2])
    assert load(cluster, names[::-1], 2) == [{"disk"}, {"disk"}]
    shutil.rmtree(cluster.tier(names[1]))
    assert load(cluster, names, 2) == [{"node"}, {"disk"}]


def test_what_is_damaged_on_a_node_comes_from_the_root(cluster: Cluster, names: list[str]) -> None:
    save_and_die(cluster, names, (0, 1), [2])
    load(cluster, names, 2)
    image = next(cluster.tier(names[0]).glob("checkpoints/000000002/**/*.safetensors"))
    data = bytearray(image.read_bytes())
    data[-3] ^= 1
    image.write_bytes(data)
    assert load(cluster, names, 2) == [{"disk"}, {"node"}]


def test_what_lost_a_node_with_its_tier_is_not_finished(cluster: Cluster, names: list[str]) -> None:
    save_and_die(cluster, names, (0, 1), [2])
    shutil.rmtree(cluster.tier(names[1]))
    assert load(cluster, names, 1) == [{"node"}, {"disk"}]
    assert steps_on_disk(cluster.root) == [1]


@pytest.mark.long
def test_a_slow_upload_of_another_node_is_no_time_out(cluster: Cluster, names: list[str]) -> None:
    """Its node says that flushes are under way there, so the step waits for it longer than for a vote that does not
    come."""

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        if rank == 1:
            root_fails(cluster.root)
        with ckpt:
            ckpt.load(state_with(contents(rank, 0)))
            handle = ckpt.save(1, state_with(contents(rank, 1)))
            handle.wait("nvme")
            if rank == 1:
                began = time.monotonic()
                until(lambda: time.monotonic() - began > 6.0 or handle.error, "the other's time-out")
                for made in heal:
                    made.script.clear()
            handle.wait()
            say("durable")

    heal: list[Faulty] = []
    original = Faulty.__init__

    def remember(self: Faulty, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        heal.append(self)

    Faulty.__init__ = remember  # type: ignore[method-assign]
    try:
        said = cluster.run(names, body, policy={"commit_timeout_s": 3.0, "heartbeat_s": 0.2})
    finally:
        Faulty.__init__ = original  # type: ignore[method-assign]
    assert said == [["durable"], ["durable"]]


STAGED_THEN_KILLED = """
os.environ["EVERSTEP_AGENT_POINTS"] = "kill:agent.upload"  # each agent, as long as this trainer lives
training = Training()
nvme = everstep.Tier(sys.argv[2], scope="node")
ckpt = everstep.Checkpointer(root, policy=policy(), tiers=[nvme])
ckpt.load(training.state)
training.step()
handle = ckpt.save(1, training.state)
handle.wait("nvme")
say("staged")
time.sleep(100)
"""


def test_a_rebooted_node_goes_on_from_its_tier(root: Path, tmp_path: Path, script: Any) -> None:
    """Trainer, agent and slots are gone; journal and tier are there."""
    nvme = tmp_path / "nvme"
    job = script(STAGED_THEN_KILLED, root, nvme)
    assert job.line() == "staged"
    job.signal(signal.SIGKILL)
    job.end()
    forget_memory(root)
    assert staged(nvme) == [1] and voted(root, 1) == []
    run = run_blocking(open_run(open_backend(locate(root).url)))
    place = with_tiers(locate(root), [near(nvme)])
    settings = tmp_path / "settings.json"
    settings.write_text(agent_settings(place, policy(), run.run_id, run.chunk_bytes).to_json())
    command = [sys.executable, "-m", "everstep.agent.main", "--foreground", "--settings", str(settings)]
    agent = subprocess.Popen(
        command, env={k: v for k, v in os.environ.items() if k != "EVERSTEP_AGENT_POINTS"}
    )
    try:
        until(lambda: steps_on_disk(root) == [1], "the upload")
    finally:
        agent.kill()
        agent.wait()
