"""An error of a node's own memory is an answer with its reason, never a lost connection; and nobody stays for what
cannot be kept."""

from __future__ import annotations

import errno
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from everstep.errors import AgentError, CapacityError, EverstepError, PeerLost
from everstep.memory import points
from everstep.peers.guard import Guard, Terms
from everstep.peers.keeper import Keeper
from everstep.peers.link import Link, connect
from everstep.peers.listener import Listener
from everstep.peers.messages import Complete, Failed, Message, expect
from everstep.peers.nodemap import NodeMap, PeerNode
from everstep.peers.paritykeeper import ParityKeeper
from everstep.peers.shelf import Place

from .guard_kit import Job, until
from .kit import CHUNK, RUN, SECRET, SOON_S, Holder, Owner, held, send

Make = Callable[..., Holder]
Own = Callable[..., Owner]

ENDS_S = 15.0
"""Within so long agents without trainers end, for which nothing gets on; they linger for a fraction of a second."""


def failing(number: int) -> Callable[..., Any]:
    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(number, "made to fail")

    return fail


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, AgentError),
        (errno.EACCES, AgentError),
        (errno.EIO, AgentError),
        (errno.ENOSPC, CapacityError),
        (errno.EMFILE, CapacityError),
    ],
)
def test_an_error_of_the_holders_memory_is_an_answer(
    holder: Make, owner: Own, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[EverstepError]
) -> None:
    """With its reason; the connection is as good as before."""
    there = holder()
    snapshot = owner().write(1)
    with there.link() as link:
        with monkeypatch.context() as patch:
            patch.setattr(Place, "create", failing(number))
            with pytest.raises(kind, match=r"node holder fails by itself.*step 1 of rank 0.*made to fail"):
                send(link, snapshot)
        assert not link.closed
        send(link, snapshot)
    assert set(held(there.directory)) == {(1, 1)}


@pytest.mark.parametrize("error", [OSError(errno.EIO, "a disk"), EOFError("a file"), ValueError("a slip")])
def test_any_error_of_a_handler_is_told_before_the_end(error: Exception) -> None:
    def handle(link: Link, message: Message) -> None:
        raise error

    with Listener("127.0.0.1", 0, SECRET, RUN, {Complete: handle}, me="holder", io_s=SOON_S) as listener:
        with connect("127.0.0.1", listener.port, SECRET, RUN, me="owner", timeout_s=SOON_S) as link:
            link.send(Complete(1, 1))
            answer = link.receive(SOON_S)
            assert isinstance(answer, Failed)
            with pytest.raises(AgentError, match=f"node holder fails by itself.*{error.args[-1]}"):
                expect(answer, Complete)
            with pytest.raises(PeerLost, match="is gone"):
                link.receive(SOON_S)


def test_a_directory_that_vanished_is_made_anew(holder: Make, owner: Own) -> None:
    there = holder()
    shutil.rmtree(there.directory)
    with there.link() as link:
        send(link, owner().write(1))
    assert set(held(there.directory)) == {(1, 1)}
    assert stat.S_IMODE(there.directory.stat().st_mode) == 0o700


def test_what_lay_in_a_directory_that_vanished_does_not_count(holder: Make, owner: Own) -> None:
    """A restart would not find it."""
    there, mine = holder(), owner()
    with there.link() as link:
        first = mine.write(1)
        send(link, first)
        shutil.rmtree(there.directory)
        send(link, first)
        assert set(held(there.directory)) == {(1, 1)}
        shutil.rmtree(there.directory)
        send(link, mine.write(2))
    assert set(held(there.directory)) == {(1, 2)}


def test_what_is_removed_in_mid_reception_is_not_kept(holder: Make, owner: Own) -> None:
    there, mine = holder(), owner()
    snapshot = mine.write(1)

    def hook(reached: str, detail: str) -> None:
        if reached == "keeper.begun":
            points.hook = None
            shutil.rmtree(there.directory)

    points.hook = hook
    with there.link() as link:
        with pytest.raises(AgentError, match="lies in a file that was removed"):
            send(link, snapshot)
        send(link, snapshot)
    assert set(held(there.directory)) == {(1, 1)}


def test_an_error_of_the_senders_own_memory_is_not_the_peers(shm: Path) -> None:
    nodes = NodeMap((PeerNode("here", "127.0.0.1", 1, "", (0,), (1,)), PeerNode("there", "127.0.0.1", 2)), 1)
    terms = Terms(nodes, 0, RUN, 1, SECRET, CHUNK, None, 1.0, 1.0)
    heard: list[Any] = []
    keeper = Keeper(shm, "key", "here", RUN, lambda rank: None)
    guard = Guard(terms, keeper, ParityKeeper(shm, "key", "here", RUN), lambda *what: heard.append(what))
    (post,) = guard._posts
    guard._failed(post, 3, OSError(errno.EMFILE, "made to fail"))
    guard._failed(post, 3, OSError(errno.EMFILE, "made to fail"))
    ((stage, step, error),) = heard  # once, not at each try
    assert (stage, step, error["type"]) == ("peer_failed", 3, "CapacityError")
    assert "node here fails by itself" in error["message"] and error["fields"]["node"] == "here"
    assert "made to fail" in guard.status()["holders"]["there"]["error"]
    guard.close()
    keeper.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, 2, 1, linger_s=0.3)
    yield made.open()
    made.end()


def nothing_can_be_kept(job: Job) -> list[Any]:
    """The nodes, once step 1 is kept and the first has heard why step 2 is not."""
    job.snapshot(1)
    job.await_complete(1)
    sender, keeper = job.nodes
    shutil.rmtree(keeper.arenas)
    keeper.arenas.write_text("no directory")
    job.ranks[0].snapshot(2)
    until(lambda: "not a directory" in (sender.status()["holders"]["n1"]["error"] or ""), "the reason")
    return [sender, keeper]


@pytest.mark.timeout(120)
def test_agents_without_trainers_end_though_nothing_can_be_kept(job: Job) -> None:
    """Neither the one that tries to send, nor the one that says why it cannot keep."""
    sender, _ = nothing_can_be_kept(job)
    assert sender.status()["protected"] == 1
    agents = [node.agent() for node in job.nodes]
    for rank in job.ranks:
        rank.client.bye(timeout_s=SOON_S, flush=False)
        rank.client.close()
    since = time.monotonic()
    for agent in agents:
        until(lambda agent=agent: agent is None or not agent.alive(), "the end of an agent", ENDS_S)
    assert time.monotonic() - since < ENDS_S
    told = [line for line in sender.log().splitlines() if "not a directory" in line]
    assert 1 <= len(told) <= 8, told


@pytest.mark.timeout(120)
def test_an_agent_that_cannot_keep_does_not_stay_for_those_who_go_on_sending(job: Job) -> None:
    sender, keeper = nothing_can_be_kept(job)
    agent = keeper.agent()
    job.ranks[1].client.bye(timeout_s=SOON_S, flush=False)
    job.ranks[1].client.close()
    until(lambda: agent is None or not agent.alive(), "the end of the agent", ENDS_S)
    assert sender.agent() is not None
