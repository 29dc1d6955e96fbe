"""Guarded jobs as users run them: checkpointers in processes of their own on simulated nodes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import everstep
import pytest
from everstep.agent import link
from everstep.errors import AgentError, BadOption
from everstep.memory.arena import Arena
from everstep.memory.directory import find_arenas
from everstep.memory.header import Kind
from everstep.memorytier import MemoryTier, Room
from everstep.places import locate

from tests.exchange.conftest import job, nodes, root
from tests.exchange.kit import WAIT_S, Job, contents, directory_of, state_with

__all__ = ["job", "nodes", "root"]

Say = Callable[..., None]
ONE = everstep.Memory(replicas=1)


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("EVERSTEP_SECRET", raising=False)
    monkeypatch.delenv("EVERSTEP_SECRET_FILE", raising=False)
    yield


def met(ckpt: everstep.Checkpointer) -> None:
    assert ckpt._ranks is not None
    ckpt._ranks.agree("meeting", None, timeout_s=WAIT_S)


def kept(root: Path, node: str) -> set[int]:
    """The ranks of which the node keeps something."""
    return {info.rank for info in find_arenas(directory_of(root, node), Kind.HELD)}


def await_true(look: Callable[[], object]) -> None:
    until = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_job_knows_what_is_protected(root: Path, nodes: list[str], job: Job) -> None:
    """Two nodes with two ranks each. At the end nothing stays in memory."""

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        values = contents(rank, 0)
        state = state_with(values)
        for step in (1, 2, 3):
            values.update(contents(rank, step))
            ckpt.step(step, state)
        await_true(lambda: ckpt.status()["newest_protected"] == 3)
        await_true(lambda: ckpt.status()["newest_complete_in_memory"] == 3)
        status = ckpt.status()
        peers = status["peers"]
        held = sorted(int(other) for other in peers["held"])
        say(status["guarded"], peers["unprotected"], held, json.dumps(peers["holders"]))
        met(ckpt)
        ckpt.close()

    places = [nodes[0], nodes[0], nodes[1], nodes[1]]
    said = job.run(places, body, memory=ONE, agent="process")
    short = nodes[1], nodes[0]
    for rank, (line,) in enumerate(said):
        others = [2, 3] if rank < 2 else [0, 1]
        holder = json.dumps({short[rank // 2]: {"step": 3, "error": None}})
        assert line == f"True [] {others} {holder}"
    await_true(lambda: not any(kept(root, node) for node in nodes[:2]))
    assert everstep.load(root)["own"]["n"] == 30


def test_one_node_alone_is_not_guarded(root: Path, nodes: list[str], job: Job) -> None:
    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        for step in range(1, 6):
            ckpt.step(step, state_with(contents(rank, step)))
        say(ckpt.status()["guarded"], ckpt.status()["peers"])
        met(ckpt)
        ckpt.close(flush=False)

    said = job.run([nodes[0]] * 2, body, memory=ONE, policy={"rank_timeout_s": 60.0})
    assert said == [["False None"]] * 2


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        (everstep.Memory(replicas=1), everstep.Memory(), r"\(replicas=\) differs"),
        (
            everstep.Memory(replicas=1),
            everstep.Memory(parity=(1, 1)),
            r"\(replicas=\) and Memory\(parity=\) differ between.*parity.*\[1, 1\]",
        ),
        (everstep.Memory(parity=(1, 1)), everstep.Memory(parity=(2, 1)), r"\(parity=\) differs"),
        (everstep.Memory(replicas=1), everstep.Memory(replicas=1, spares=("h:1",)), r"\(spares=\) differs"),
    ],
)
def test_ranks_that_want_different_protection_hear_so(
    root: Path, nodes: list[str], job: Job, first: everstep.Memory, second: everstep.Memory, name: str
) -> None:
    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        ckpt._memory = (first, second)[rank]
        with pytest.raises(BadOption, match=rf"Memory{name}"):
            ckpt.save(1, state_with(contents(rank, 1)))
        say("refused")

    assert job.run(nodes[:2], body, memory=ONE) == [["refused"]] * 2


def test_an_inline_agent_cannot_protect_several_ranks(root: Path, nodes: list[str], job: Job) -> None:
    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        with pytest.raises(BadOption, match="process"):
            ckpt.save(1, state_with(contents(rank, 1)))
        say("refused")

    assert job.run([nodes[0], nodes[0], nodes[1]], body, memory=ONE) == [["refused"]] * 3


def test_inline_agents_protect_one_rank_each(root: Path, nodes: list[str], job: Job) -> None:
    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        for step in range(1, 5):
            ckpt.step(step, state_with(contents(rank, step)))
        await_true(lambda: ckpt.status()["newest_protected"] == 4)
        say("protected")
        met(ckpt)
        ckpt.close(flush=False)

    assert job.run(nodes[:2], body, memory=ONE) == [["protected"]] * 2


def test_a_secret_on_some_ranks_only_is_an_error(root: Path, nodes: list[str], job: Job) -> None:
    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        if rank == 0:
            os.environ["EVERSTEP_SECRET"] = "a secret of enough bytes"
        with pytest.raises(BadOption, match="some ranks only"):
            ckpt.save(1, state_with(contents(rank, 1)))
        say("refused")

    assert job.run(nodes[:2], body, memory=ONE) == [["refused"]] * 2


def test_different_secrets_are_an_error(root: Path, nodes: list[str], job: Job) -> None:
    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        os.environ["EVERSTEP_SECRET"] = f"a secret of enough bytes, of rank {rank}"
        with pytest.raises(BadOption, match=r"differs between the ranks.*rank\(s\) \[1\]") as caught:
            ckpt.save(1, state_with(contents(rank, 1)))
        say("refused", "enough" in str(caught.value))

    assert job.run(nodes[:2], body, memory=ONE) == [["refused False"]] * 2


def test_spares_need_a_secret(root: Path, nodes: list[str], job: Job) -> None:
    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        with pytest.raises(BadOption, match="secret"):
            ckpt.save(1, state_with(contents(rank, 1)))
        say("refused")

    memory = everstep.Memory(replicas=1, spares=("127.0.0.1:9",))
    assert job.run(nodes[:2], body, memory=memory) == [["refused"]] * 2


@pytest.mark.long
def test_a_spare_that_is_not_there_when_a_new_run_begins_is_told_and_stops_nobody(
    root: Path, nodes: list[str], job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for first: it may have waited for the run."""
    monkeypatch.setenv("EVERSTEP_SECRET", "a secret of enough bytes")

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in (1, 2, 3):
                ckpt.save(step, state_with(contents(rank, step))).wait()
        say(any("127.0.0.1:9" in str(one.message) for one in told), ckpt.status()["guarded"])
        met(ckpt)
        ckpt.close()

    memory = everstep.Memory(replicas=1, spares=("127.0.0.1:9",), replica_timeout_s=1.0)
    assert job.run(nodes[:2], body, memory=memory, agent="process") == [["True True"]] * 2


def test_without_any_agent_training_goes_on_unguarded(root: Path, nodes: list[str], job: Job) -> None:
    """Told on all ranks; and guarded again once there is one."""

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        link.DOWN_S = 0.5
        step = 0
        said: list[str] = []

        def train(good: Callable[[], object]) -> None:
            """Together, until it is good on rank 1."""
            nonlocal step
            until = time.monotonic() + WAIT_S
            assert ckpt._ranks is not None or step == 0
            while step == 0 or not ckpt._ranks.agree("looking", bool(good()), timeout_s=WAIT_S)[1]:  # type: ignore[union-attr]
                assert time.monotonic() < until
                step += 1
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    try:
                        ckpt.step(step, state_with(contents(rank, step)))
                    except AgentError:  # raised once, before anything was done
                        ckpt.step(step, state_with(contents(rank, step)))
                said.extend(str(one.message) for one in caught)

        def told(text: str) -> bool:
            return any(text in one for one in said)

        train(lambda: step == 3)
        python = sys.executable
        if rank == 1:
            sys.executable = "/bin/false"
            assert ckpt.agent_pid is not None
            os.kill(ckpt.agent_pid, signal.SIGKILL)
        session = ckpt._session
        assert session is not None
        train(lambda: not session._tier.guarded)
        say(session._tier.guarded, told("not protected against the loss of this node"))
        at = step
        train(lambda: step > at + 5)
        sys.executable = python
        train(lambda: session._tier.guarded and (session._tier.arena.protected or (1, 0))[1] > at)
        met(ckpt)
        session.hear()
        say(session._tier.guarded, rank == 1 or told(f"node {nodes[1]}"))
        ckpt.close(flush=False)

    memory = everstep.Memory(replicas=1, replica_timeout_s=1.0)
    said = job.run(nodes[:2], body, memory=memory, agent="process")
    assert said == [["True False", "True True"], ["False True", "True True"]]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("stopped", "flushes"), [(0, False), (0, True), (1, False)])
def test_training_waits_for_its_own_agent_no_longer_than_it_says(
    root: Path, nodes: list[str], job: Job, stopped: int, flushes: bool
) -> None:
    """One that is stopped, and wakes up again, at rest or while it flushes, the hub's or another's; nor for those of
    other nodes that want it."""
    wait_s = 2.0

    def body(rank: int, ckpt: everstep.Checkpointer, say: Say) -> None:
        values = contents(rank, 0)
        state = state_with(values)
        step, longest = 0, 0.0

        def train(on: Callable[[], object]) -> None:
            nonlocal step, longest
            while not ckpt._ranks or not ckpt._ranks.agree("stepping", on(), timeout_s=WAIT_S)[stopped]:
                step += 1
                values.update(contents(rank, step))
                began = time.monotonic()
                ckpt.step(step, state)
                longest = max(longest, time.monotonic() - began)

        def guarded() -> bool:
            assert ckpt._session is not None
            return ckpt._session._tier.guarded

        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            train(lambda: step >= 3)
            agent = ckpt.agent_pid
            assert agent is not None
            if rank == stopped:
                os.kill(agent, signal.SIGSTOP)
            if flushes:
                ckpt.save(step, state)
            longest = 0.0
            train(lambda: not guarded())
            say(longest > wait_s / 2 and longest < wait_s + 1.5, round(longest, 1))
            at, longest = step, 0.0
            train(lambda: step >= at + 3)
            say(longest < wait_s + 1.5, round(longest, 1))
            if rank == stopped:
                os.kill(agent, signal.SIGCONT)
            train(guarded)
            texts = [str(one.message) for one in heard]
            say(rank != stopped or any("no answer of an agent for 2 s" in text for text in texts), "heard")
        ckpt.close(flush=False)

    memory = everstep.Memory(replicas=1, replica_timeout_s=wait_s)
    policy = {"snapshot_every": 1, "rank_timeout_s": 60.0}
    said = job.run(nodes[:2], body, memory=memory, agent="process", policy=policy)
    assert [line.split()[0] for lines in said for line in lines] == ["True"] * 6, said


def test_the_trainer_waits_for_protection(tmp_path: Path) -> None:
    """At most so many snapshots without it as there are slots above three; late copies let it be one more."""
    place = locate(tmp_path / "run", node="here")
    for slots, lead, wanted in ((3, 0, 1), (3, 1, 2), (5, 0, 3)):
        tier = MemoryTier(place, Room(tmp_path, slots, required=True), 0)
        tier.reserve(1 << 16, chunk_bytes=4096, adopted=None, run_id="r", held=[])
        tier.open(run_id="r", incarnation=1, adopted=None, world=1)
        tier.guarded, tier.lead = True, lead
        taken = 0
        while not tier._ahead():
            taken += 1
            slot = tier.begin(taken, 4096, timeout_s=1.0, waiting=lambda: None)
            slot.place([("state", 4096)])
            slot.publish("")
        assert taken == wanted, (slots, lead)
        assert tier.complete() is None
        looks = []

        def agent(tier: MemoryTier = tier, taken: int = taken, looks: list[int] = looks) -> None:
            looks.append(1)
            if len(looks) == 3:
                tier.arena.complete = (1, taken)

        tier.begin(taken + 1, 4096, timeout_s=WAIT_S, waiting=agent).abandon()
        assert len(looks) == 3 and tier.complete() == (1, taken)
        tier.guarded = False
        assert not tier._ahead()
        tier.close(remove=True)


def test_w_goes_along_into_a_larger_arena(tmp_path: Path) -> None:
    place = locate(tmp_path / "run", node="here")
    tier = MemoryTier(place, Room(tmp_path, 3, required=True), 0)
    tier.reserve(1 << 16, chunk_bytes=4096, adopted=None, run_id="r", held=[])
    tier.open(run_id="r", incarnation=1, adopted=None, world=1)
    tier.guarded = True
    tier.arena.complete = (1, 7)
    former: Arena = tier.arena
    tier.begin(8, 1 << 17, timeout_s=1.0, waiting=lambda: None).abandon()
    assert tier.arena is not former and tier.complete() == (1, 7)
    tier.close(remove=True)
