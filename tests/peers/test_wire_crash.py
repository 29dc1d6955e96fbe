"""Sender or holder is killed at any point of sending: the former snapshot stays, nothing half is found, the next agent
goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from everstep.errors import PeerLost
from everstep.memory.directory import clean, find_arenas
from everstep.memory.header import Kind
from everstep.peers.link import connect

from .kit import CHUNK, RUN, SECRET, SOON_S, Holder, Owner, contents, held, send
from .node import Process

Make = Callable[..., Holder]
Own = Callable[..., Owner]
LARGE = {"model": 300_000, "optimizer": 500_000}

BEFORE_SEALED = [
    "slot.begin:2",
    "keeper.begun:2",
    "keeper.piece:state:2",
    "keeper.piece:image:4",
    "slot.publish.before:2",
    "slot.publish.locked:2",
    "slot.publish.after:2",
    "seal.before:2",
    "seal.locked:2",
]
AFTER_SEALED = ["keeper.sealed:2", "keeper.kept.before:2"]
GROWING = [
    "arena.reserve.before::2",
    "arena.name.before::2",
    "take.locked:1:2",
    "keeper.grown::2",
    "seal.locked:2",
]
GROWN = ["keeper.outgrown", "keeper.sealed:2"]


def good(directory: Path, *, large: bool = False) -> set[int]:
    """The steps that are held, each as it was sent."""
    found = held(directory)
    for (_, step), regions in found.items():
        regions.pop("records")
        assert regions == contents(
            1, step, LARGE if large and step > 1 else {"model": 20_000, "optimizer": 9 * CHUNK}
        )
    return {step for _, step in found}


@pytest.mark.parametrize("point", [*BEFORE_SEALED, *AFTER_SEALED])
def test_a_holder_that_is_killed_has_the_former_snapshot(
    point: str, holder: Make, owner: Own, directory: Path
) -> None:
    rank = owner()
    first = rank.write(1)
    with Process("keep", directory, points=f"kill:{point}") as there:
        port = there.line()
        with connect("127.0.0.1", port, SECRET, RUN, me="owner", timeout_s=SOON_S) as link:
            send(link, first)
            second = rank.write(2)
            with pytest.raises(PeerLost):
                send(link, second)
        assert there.wait() == -signal.SIGKILL
    assert good(directory) == ({1, 2} if point in AFTER_SEALED else {1})
    again = holder()  # the next agent
    again.keeper.reserve(0, CHUNK, CHUNK)
    with again.link() as link:
        send(link, second)
        assert good(directory) == {1, 2}
        send(link, rank.write(3))
    assert good(directory) == {2, 3}
    assert len(find_arenas(directory, Kind.HELD)) == 1


@pytest.mark.parametrize("point", [*GROWING, *GROWN])
def test_a_holder_that_is_killed_while_it_makes_more_room(
    point: str, holder: Make, owner: Own, directory: Path
) -> None:
    rank = owner(slot_bytes=1 << 20)
    first = rank.write(1)
    with Process("keep", directory, points=f"kill:{point}") as there:
        port = there.line()
        with connect("127.0.0.1", port, SECRET, RUN, me="owner", timeout_s=SOON_S) as link:
            send(link, first)
            second = rank.write(2, regions=contents(1, 2, LARGE))
            with pytest.raises(PeerLost):
                send(link, second, slot_bytes=1 << 20)
        assert there.wait() == -signal.SIGKILL
    found = good(directory, large=True)
    assert found == {1} if point in GROWING else 2 in found
    again = holder()
    with again.link() as link:
        send(link, second)
        assert 2 in good(directory, large=True)
        send(link, rank.write(3, regions=contents(1, 3, LARGE)))
    assert good(directory, large=True) == {2, 3}
    again.close()
    clean(directory, keep=lambda info: True)
    assert len(list(directory.iterdir())) == 1  # nor is anything half made left


@pytest.mark.parametrize(
    "point", ["peers.offered:2", "peers.sending:layout:2", "peers.sending:optimizer:2", "peers.sent.before:2"]
)
def test_a_sender_that_is_killed_leaves_the_former_snapshot(
    point: str, holder: Make, owner: Own, shm: Path, directory: Path
) -> None:
    there = holder()
    with Process("send", shm, there.listener.port, 1, 2, points=f"kill:{point}") as sender:
        assert sender.line() == 1
        assert sender.wait() == -signal.SIGKILL
    assert good(directory) == {1}
    rank = owner()
    with there.link() as link:  # at once: what was being received gives way
        send(link, rank.write(2))
    assert good(directory) == {1, 2}


def test_a_holder_that_is_stopped_is_lost_in_bounded_time(owner: Own, directory: Path) -> None:
    """It is there, its connections stand, and it does nothing."""
    rank = owner(slots=1, slot_bytes=49 << 20)
    large = contents(1, 1, {"model": 48 << 20})
    with Process("keep", directory, points="stall:keeper.begun") as there:
        port = there.line()
        with connect("127.0.0.1", port, SECRET, RUN, me="owner", timeout_s=SOON_S, io_s=0.5) as link:
            began = time.monotonic()
            with pytest.raises(PeerLost, match="does not answer"):
                send(link, rank.write(1, regions=large))
            assert time.monotonic() - began < SOON_S


def test_both_nodes_as_processes(directory: Path, shm: Path) -> None:
    with Process("keep", directory) as there, Process("send", shm, there.line(), 1, 2, 3) as sender:
        assert [sender.line() for _ in range(3)] == [1, 2, 3]
        assert sender.wait() == 0
        assert good(directory) == {2, 3}
