"""An image that a rank of the holder's node has copied from its own tensors is not sent, if its bytes are the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from everstep.errors import ReplicasDiffer
from everstep.format.names import copy_region, shared_image
from everstep.memory import points
from everstep.peers import keeper as keeping

from .kit import Holder, Owner, contents, held, send

Make = Callable[..., Holder]
Own = Callable[..., Owner]

SHARED = shared_image("model", [1])
SIZES = {"optimizer": 30_000, SHARED: 50_000}
REGION = copy_region(0, SHARED)


def owned(step: int) -> dict[str, bytes]:
    return contents(1, step, SIZES)


def copied(step: int, *, wrong_at: int | None = None) -> dict[str, bytes]:
    """What rank 1, on the holder's node, has at ``step``: a state of its own, and the copy."""
    copy = bytearray(owned(step)[f"image:{SHARED}"])
    if wrong_at is not None:
        copy[wrong_at] ^= 1
    return contents(7, step, {"optimizer": 1000}, {REGION: bytes(copy)})


def regions(directory: Path, step: int) -> set[str]:
    return set(held(directory)[1, step])


@pytest.fixture
def pair(holder: Make, owner: Own, copier: Own) -> tuple[Holder, Owner, Owner]:
    """The holder, rank 0 elsewhere, and rank 1 on the holder's node."""
    other = copier(1)
    there = holder(local=lambda rank: other.arena if rank == 1 else None, local_wait_s=20)
    return there, owner(0), other


def test_an_image_that_was_copied_here_is_not_sent(
    pair: tuple[Holder, Owner, Owner], directory: Path
) -> None:
    there, rank, other = pair
    sent: list[str] = []
    other.write(1, regions=copied(1))
    snapshot = rank.write(1, regions=owned(1))
    points.hook = lambda name, detail: sent.append(detail) if name == "peers.sending" else None
    with there.link() as link:
        send(link, snapshot)
        send(link, snapshot)
    assert sent == ["layout", "meta", "state", "image:optimizer"]
    assert regions(directory, 1) == {"layout", "meta", "state", "image:optimizer", "records"}
    assert not there.said


def test_the_local_snapshot_is_waited_for_and_noticed(
    pair: tuple[Holder, Owner, Owner], directory: Path
) -> None:
    there, rank, other = pair
    keeping_poll, keeping.POLL_S = keeping.POLL_S, 60.0  # so that only the word of it helps
    try:
        snapshot = rank.write(2, regions=owned(2))
        with there.link() as link:
            thread = threading.Thread(target=send, args=(link, snapshot))
            thread.start()
            thread.join(0.3)
            assert thread.is_alive() and not held(directory)
            other.write(2, regions=copied(2))
            there.keeper.noticed()
            thread.join(10)
            assert not thread.is_alive()
    finally:
        keeping.POLL_S = keeping_poll
    assert f"image:{SHARED}" not in regions(directory, 2)


def test_it_is_not_waited_for_longer_than_a_bound(
    holder: Make, owner: Own, copier: Own, directory: Path
) -> None:
    other = copier(1)
    there = holder(local=lambda rank: other.arena if rank == 1 else None, local_wait_s=0.2)
    other.write(1, regions=copied(1))
    with there.link() as link:
        began = time.monotonic()
        send(link, owner(0).write(2, regions=owned(2)))
        assert time.monotonic() - began >= 0.2
    assert held(directory)[1, 2][f"image:{SHARED}"] == owned(2)[f"image:{SHARED}"]
    assert not there.said


def test_a_local_rank_that_is_past_the_step_is_not_waited_for(
    pair: tuple[Holder, Owner, Owner], directory: Path
) -> None:
    there, rank, other = pair
    other.write(3, regions=copied(3))
    with there.link() as link:
        began = time.monotonic()
        send(link, rank.write(2, regions=owned(2)))
        assert time.monotonic() - began < 10
    assert f"image:{SHARED}" in regions(directory, 2)


@pytest.mark.parametrize("ranks", [[2], [2, 3]])
def test_an_image_that_only_others_copied_is_sent(
    ranks: list[int], pair: tuple[Holder, Owner, Owner], directory: Path
) -> None:
    """Those ranks are not on the holder's node."""
    there, rank, _ = pair
    name = shared_image("model", ranks)
    with there.link() as link:
        began = time.monotonic()
        send(link, rank.write(1, regions=contents(1, 1, {name: 5000})))
        assert time.monotonic() - began < 10
    assert f"image:{name}" in regions(directory, 1)


def test_an_image_for_several_holders_counts_where_one_of_its_ranks_is(
    pair: tuple[Holder, Owner, Owner], directory: Path
) -> None:
    there, rank, other = pair
    name = shared_image("model", [1, 2])
    data = contents(1, 1, {name: 5000})
    other.write(1, regions=contents(7, 1, {}, {copy_region(0, name): data[f"image:{name}"]}))
    with there.link() as link:
        send(link, rank.write(1, regions=data))
    assert f"image:{name}" not in regions(directory, 1)


@pytest.mark.parametrize("missing", ["region", "size"])
def test_a_local_rank_that_did_not_copy_it_gets_it_sent(
    missing: str, pair: tuple[Holder, Owner, Owner], directory: Path
) -> None:
    there, rank, other = pair
    copies = {} if missing == "region" else {REGION: copied(1)[REGION][:-1]}
    other.write(1, regions=contents(7, 1, {"optimizer": 1000}, copies))
    with there.link() as link:
        send(link, rank.write(1, regions=owned(1)))
    assert f"image:{SHARED}" in regions(directory, 1) and not there.said


def test_a_copy_that_differs_is_sent_and_told(pair: tuple[Holder, Owner, Owner], directory: Path) -> None:
    there, rank, other = pair
    other.write(1, regions=copied(1, wrong_at=9000))
    with there.link() as link:
        send(link, rank.write(1, regions=owned(1)))
    assert held(directory)[1, 1][f"image:{SHARED}"] == owned(1)[f"image:{SHARED}"]
    [(of, key, error)] = there.said
    assert (of, key) == (0, (1, 1)) and isinstance(error, ReplicasDiffer)
    assert "ranks 0 and 1 hold different bytes" in str(error) and "from byte 8192 on" in str(error)


def test_without_images_no_copy_is_looked_at(pair: tuple[Holder, Owner, Owner], directory: Path) -> None:
    there, rank, _ = pair
    with there.link() as link:
        began = time.monotonic()
        send(link, rank.write(1, regions=owned(1)), mode="meta")
        assert time.monotonic() - began < 10
    assert regions(directory, 1) == {"layout", "meta", "state", "records"}
