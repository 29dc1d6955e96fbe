"""Snapshots go from one node's agent to another's: held, proved, sealed, and the former one stays till then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from everstep.errors import CapacityError, Closed, EverstepError, MemoryTooSmall, PeerLost, Superseded
from everstep.format.hashing import hexdigest
from everstep.memory import points
from everstep.memory.arena import Arena
from everstep.memory.directory import find_arenas
from everstep.memory.errors import SlotGone
from everstep.memory.header import Kind
from everstep.memory.process import Process
from everstep.peers.rate import Rate

from .kit import CHUNK, RUN, SIZES, SLOT_BYTES, SOON_S, Holder, Owner, contents, held, send

Make = Callable[..., Holder]
Own = Callable[..., Owner]
LARGE = {"model": 300_000, "optimizer": 500_000}


def arenas(directory: Path) -> list[int]:
    """Slot sizes of all held arenas there."""
    return [info.slot_bytes for info in find_arenas(directory, Kind.HELD)]


def at_point(name: str, then: Callable[[], None]) -> None:
    """Have ``then`` called, once, when the point is reached; on the thread that reaches it."""

    def hook(reached: str, detail: str) -> None:
        if reached == name:
            points.hook = None
            then()

    points.hook = hook


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


# -- what is kept


def test_a_snapshot_is_kept_as_it_was_sent(holder: Make, owner: Own, directory: Path) -> None:
    there, rank = holder(), owner(2)
    snapshot = rank.write(7)
    with there.link() as link:
        send(link, snapshot)
        found = held(directory, 2)
        assert list(found) == [(1, 7)]
        records = found[1, 7].pop("records")
        assert found[1, 7] == contents(1, 7) and records
        send(link, snapshot)  # once more: it is there
        assert list(held(directory, 2)) == [(1, 7)]
        send(link, rank.write(8))
        send(link, rank.write(9))
    assert list(held(directory, 2)) == [(1, 8), (1, 9)]
    [arena] = there.keeper.arenas().values()
    assert arena.info.slots == 2 and arena.info.rank == 2 and arena.info.owner == Process.current()


def test_ranks_are_kept_side_by_side(holder: Make, owner: Own, directory: Path) -> None:
    there = holder()
    owners = [owner(rank) for rank in range(3)]
    snapshots = {(rank.rank, step): rank.write(step) for rank in owners for step in (1, 2, 3)}

    def all_of(rank: int) -> None:
        with there.link() as link:
            for step in (1, 2, 3):
                send(link, snapshots[rank, step])

    started = [in_background(lambda rank=rank: all_of(rank)) for rank in range(3)]  # type: ignore[misc]
    for thread, errors in started:
        thread.join(SOON_S)
        assert not errors
    for rank in range(3):
        assert list(held(directory, rank)) == [(1, 2), (1, 3)]


def test_an_empty_image_and_no_image(holder: Make, owner: Own, directory: Path) -> None:
    there, rank = holder(), owner()
    with there.link() as link:
        send(link, rank.write(1, regions=contents(1, 1, {"model": 0})))
        send(link, rank.write(2, regions=contents(1, 2, {})))
    found = held(directory)
    assert found[1, 1]["image:model"] == b"" and not [n for n in found[1, 2] if n.startswith("image:")]


def test_without_images_only_what_is_small_is_sent(holder: Make, owner: Own, directory: Path) -> None:
    there, rank = holder(), owner()
    snapshot = rank.write(1)
    with there.link() as link:
        send(link, snapshot, mode="meta")
        small = held(directory)[1, 1]
        assert sorted(small) == ["layout", "meta", "records", "state"]
        send(link, snapshot, mode="meta")
        send(link, snapshot, mode="full")  # protection was changed: now the images are wanted too
        full = held(directory)[1, 1]
        assert full["image:model"] == contents(1, 1)["image:model"] and full["records"] == small["records"]


def test_sending_keeps_to_the_rate(holder: Make, owner: Own) -> None:
    there, rank = holder(), owner(slot_bytes=2 << 20)
    snapshot = rank.write(1, regions=contents(1, 1, {"model": 1_500_000}))
    with there.link() as link:
        began = time.monotonic()
        send(link, snapshot, rate=Rate(4 << 20))
        assert time.monotonic() - began > (1_500_000 - (4 << 20) * 0.1) / (4 << 20)


def test_a_closed_rate_ends_sending(holder: Make, owner: Own, directory: Path) -> None:
    there, rank = holder(), owner(slot_bytes=4 << 20)
    rate = Rate(1 << 20)
    at_point("keeper.piece", rate.close)
    with there.link() as link, pytest.raises(Closed):
        send(link, rank.write(1, regions=contents(1, 1, {"model": 3_000_000})), rate=rate)
    assert link.closed and not held(directory)


# -- which one may be overwritten


def test_an_older_incarnation_is_refused(holder: Make, owner: Own) -> None:
    there, rank = holder(), owner()
    former = rank.write(5)
    with there.link() as link:
        send(link, former)
        send(link, rank.write(3, incarnation=2))
        with pytest.raises(Superseded, match="older incarnation"):
            send(link, former)
        send(link, rank.write(4, incarnation=2))
    assert list(held(there.directory)) == [(2, 3), (2, 4)]


def test_an_older_incarnation_than_the_agent_has_heard_of_is_refused(holder: Make, owner: Own) -> None:
    there, rank = holder(), owner()
    there.keeper.completed((2, 7))
    with there.link() as link, pytest.raises(Superseded):
        send(link, rank.write(5))


def test_another_snapshot_of_the_same_step_is_refused(holder: Make, owner: Own, directory: Path) -> None:
    there, rank = holder(), owner()
    other = owner(0)
    with there.link() as link:
        send(link, rank.write(5))
        with pytest.raises(EverstepError, match="holds another snapshot of that step"):
            send(link, other.write(5, regions=contents(9, 9)))
        send(link, rank.write(6))
    assert held(directory)[1, 5]["state"] == contents(1, 5)["state"]


def test_w_is_not_overwritten_before_w_moves(holder: Make, owner: Own, directory: Path) -> None:
    there, rank = holder(), owner(slots=6)
    with there.link() as link:
        for step in (10, 11):
            send(link, rank.write(step))
        there.keeper.completed((1, 10))
        third = rank.write(12)
        thread, errors = in_background(lambda: send(link, third))
        thread.join(0.3)
        assert thread.is_alive() and list(held(directory)) == [(1, 10), (1, 11)]
        there.keeper.completed((1, 11))
        thread.join(SOON_S)
        assert not thread.is_alive() and not errors
    assert sorted(held(directory)) == [(1, 11), (1, 12)]


def test_waiting_for_w_is_bounded(holder: Make, owner: Own, directory: Path) -> None:
    there, rank = holder(slot_wait_s=0.2), owner(slots=6)
    with there.link() as link:
        for step in (10, 11):
            send(link, rank.write(step))
        there.keeper.completed((1, 10))
        third = rank.write(12)
        with pytest.raises(CapacityError, match="no free slot for snapshots of rank 0"):
            send(link, third)
        there.keeper.completed((1, 11))
        send(link, third)  # over the same connection
    assert sorted(held(directory)) == [(1, 11), (1, 12)]


def test_what_was_adopted_outlives_the_newer_one_that_was_cut_off(
    holder: Make, owner: Own, directory: Path
) -> None:
    there, rank = holder(), owner()
    with there.link() as link:
        for step in (5, 6):
            send(link, rank.write(step))
        there.keeper.completed((1, 5))
        send(link, rank.write(6, incarnation=2))
        assert sorted(held(directory)) == [(1, 5), (2, 6)]
        there.keeper.completed((2, 6))
        send(link, rank.write(7, incarnation=2))
    assert sorted(held(directory)) == [(2, 6), (2, 7)]


def test_the_newest_stays_where_w_was_passed_over_here(holder: Make, owner: Own, directory: Path) -> None:
    """The job went on without this holder: what it has is older than W, and still its newest."""
    there, rank = holder(slot_wait_s=0.2), owner(slots=6)
    with there.link() as link:
        for step in (3, 4):
            send(link, rank.write(step))
        there.keeper.completed((1, 20))
        [arena] = there.keeper.arenas().values()
        with pinned_at(arena, 3):
            with pytest.raises(CapacityError):
                send(link, rank.write(21))
        send(link, rank.write(22))
    assert sorted(held(directory)) == [(1, 4), (1, 22)]


def pinned_at(arena: Arena, step: int) -> Any:
    [found] = [one for one in arena.snapshots() if one.step == step]
    return arena.pin(found.index, found.generation)


# -- room


def test_larger_snapshots_get_a_larger_arena_and_the_former_stays_till_then(
    holder: Make, owner: Own, directory: Path
) -> None:
    there, rank = holder(), owner()
    there.keeper.reserve(0, SLOT_BYTES, CHUNK)
    larger = owner(0, slot_bytes=2 << 20)
    seen: list[list[tuple[int, int]]] = []
    with there.link() as link:
        send(link, rank.write(1))
        assert len(arenas(directory)) == 1
        large = larger.write(2, regions=contents(1, 2, LARGE))
        at_point("slot.publish.before", lambda: seen.append(list(held(directory))))
        send(link, large, slot_bytes=2 << 20)
        assert seen == [[(1, 1)]]
        assert list(held(directory)) == [(1, 2)] and len(arenas(directory)) == 1
        assert 800_000 < arenas(directory)[0] < 1_200_000  # what it needs and some more
        send(link, larger.write(3, regions=contents(1, 3, LARGE)), slot_bytes=2 << 20)
    assert sorted(held(directory)) == [(1, 2), (1, 3)]


def test_an_outgrown_arena_with_w_stays_till_w_moves(holder: Make, owner: Own, directory: Path) -> None:
    there, rank, larger = holder(), owner(), owner(0, slots=6, slot_bytes=2 << 20)
    with there.link() as link:
        send(link, rank.write(1))
        there.keeper.completed((1, 1))
        send(link, larger.write(2, regions=contents(1, 2, LARGE)))
        send(link, larger.write(3, regions=contents(1, 3, LARGE)))
        assert sorted(held(directory)) == [(1, 1), (1, 2), (1, 3)]
        there.keeper.completed((1, 2))
        third = in_background(lambda: send(link, larger.write(4, regions=contents(1, 4, LARGE))))
        there.keeper.completed((1, 3))
        third[0].join(SOON_S)
        assert not third[1]
    assert sorted(held(directory)) == [(1, 3), (1, 4)] and len(arenas(directory)) == 1


def test_memory_that_is_too_small_is_told_to_the_sender(
    holder: Make, owner: Own, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, rank, larger = holder(), owner(), owner(0, slot_bytes=2 << 20)
    with pytest.raises(MemoryTooSmall):
        there.keeper.reserve(0, 1 << 46, 1 << 20)
    with there.link() as link:
        send(link, rank.write(1))

        def none(cls: Any, *args: Any, **options: Any) -> Any:
            raise MemoryTooSmall("no room for the snapshot slots", needed=1, free=0)

        monkeypatch.setattr(Arena, "create", classmethod(none))
        with pytest.raises(MemoryTooSmall, match="no room") as caught:
            send(link, larger.write(2, regions=contents(1, 2, LARGE)))
        assert caught.value.needed == 1
        send(link, rank.write(3))  # what fits is still kept
    assert sorted(held(directory)) == [(1, 1), (1, 3)]


def test_room_is_made_in_advance_and_only_once(holder: Make, owner: Own, directory: Path) -> None:
    there, rank = holder(), owner()
    for _ in range(2):
        there.keeper.reserve(0, SLOT_BYTES, CHUNK)
    before = arenas(directory)
    with there.link() as link:
        send(link, rank.write(1))
    assert arenas(directory) == before and len(before) == 1
    there.keeper.reserve(0, 4 * SLOT_BYTES, CHUNK)
    assert sorted(arenas(directory))[0] == before[0] and len(arenas(directory)) == 2  # the former has step 1
    with there.link() as link:
        send(link, rank.write(2))
    assert len(arenas(directory)) == 1 and list(held(directory)) == [(1, 2)]


# -- agents that follow one another


def test_what_a_former_agent_left_is_taken_over(holder: Make, owner: Own, directory: Path) -> None:
    first, rank = holder(), owner()
    with first.link() as link:
        for step in (1, 2):
            send(link, rank.write(step))
    first.close()
    [path] = [info.path for info in find_arenas(directory, Kind.HELD)]
    second = holder()
    second.keeper.reserve(0, SIZES["optimizer"], CHUNK)
    assert sorted(held(directory)) == [(1, 1), (1, 2)]
    [arena] = second.keeper.arenas().values()
    assert arena.info.path == path and arena.info.owner == Process.current()
    with second.link() as link:
        send(link, rank.write(3))
    assert sorted(held(directory)) == [(1, 2), (1, 3)]


def test_what_a_former_agent_left_too_small_stays_till_it_is_replaced(
    holder: Make, owner: Own, directory: Path
) -> None:
    first, rank = holder(), owner()
    with first.link() as link:
        send(link, rank.write(1))
    first.close()
    second = holder()
    second.keeper.reserve(0, 4 * SLOT_BYTES, CHUNK)
    assert list(held(directory)) == [(1, 1)] and len(arenas(directory)) == 2
    with second.link() as link:
        send(link, rank.write(2))
    assert list(held(directory)) == [(1, 2)] and len(arenas(directory)) == 1


def test_what_is_not_sealed_was_never_kept(holder: Make, owner: Own, directory: Path) -> None:
    first, rank = holder(), owner()
    with first.link() as link:
        send(link, rank.write(1))
    first.close()
    [info] = find_arenas(directory, Kind.HELD)
    assert info.path is not None
    with Arena.attach(info.path) as arena:  # as if killed between publishing and sealing
        arena.take(Process.current(), run_id=RUN, incarnation=1, world=4)
        slot = arena.begin(1, 2, complete=(1, 1))
        assert slot is not None
        slot.place([("state", 10)])
        slot.publish(hexdigest(b""))
    second = holder()
    second.keeper.reserve(0, CHUNK, CHUNK)
    [arena] = second.keeper.arenas().values()
    assert [found.key for found in arena.snapshots()] == [(1, 1)]


def test_what_another_run_left_goes(holder: Make, owner: Own, directory: Path) -> None:
    first, rank = holder(run_id=RUN), owner()
    with first.link() as link:
        send(link, rank.write(1, incarnation=5))
    first.close()
    second = holder(run_id="run-2")
    second.keeper.reserve(0, CHUNK, CHUNK)
    assert len(arenas(directory)) == 1 and not held(directory)
    other = owner(0)  # of the new run, which is at its first incarnation
    with second.link(run_id="run-2") as link:
        send(link, other.write(1), run_id="run-2")
    assert list(held(directory)) == [(1, 1)]


def test_what_is_not_sent_any_more_is_dropped(holder: Make, owner: Own, directory: Path) -> None:
    there = holder()
    with there.link() as link:
        send(link, owner(0).write(9))
        send(link, owner(1).write(1, incarnation=2))
    there.keeper.reserve(2, CHUNK, CHUNK)
    there.keeper.drop((2, 1))
    assert sorted(there.keeper.arenas()) == [1, 2] and not held(directory, 0) and held(directory, 1)


def test_at_the_end_arenas_stay_unless_they_are_not_needed(holder: Make, owner: Own, directory: Path) -> None:
    there = holder()
    with there.link() as link:
        send(link, owner(0).write(9))
    there.keeper.close()
    [info] = find_arenas(directory, Kind.HELD)
    assert info.owner is None and list(held(directory)) == [(1, 9)]
    again = holder()
    again.keeper.reserve(0, CHUNK, CHUNK)
    again.keeper.close(remove=True)
    again.keeper.close()
    assert not arenas(directory)
    with again.link() as link, pytest.raises(Closed, match="is ending"):
        send(link, owner(0).write(10))


# -- what happens meanwhile


def test_a_slot_that_is_reused_while_it_is_sent_is_never_kept(
    holder: Make, owner: Own, directory: Path
) -> None:
    there, rank = holder(), owner(slots=3)
    with there.link() as link:
        send(link, rank.write(1))
        snapshot = rank.write(2)

        def reuse() -> None:
            snapshot[0].release()
            for step in (3, 4, 5):
                rank.write(step)[0].release()

        at_point("peers.sent.before", reuse)
        with pytest.raises(SlotGone):
            send(link, snapshot)
        assert link.closed
    with there.link() as link:
        send(link, rank.write(6))
    assert sorted(held(directory)) == [(1, 1), (1, 6)]


def test_a_newer_connection_takes_over_from_one_that_is_stuck(
    holder: Make, owner: Own, directory: Path
) -> None:
    """The sender's node lost its network, and is back before the old connection has ended."""
    there, rank = holder(io_s=60), owner()
    first, second = there.link(), there.link()
    began, go_on = threading.Event(), threading.Event()

    def stuck() -> None:
        began.set()
        go_on.wait(SOON_S)

    snapshot = rank.write(1)
    at_point("peers.sending", stuck)
    thread, errors = in_background(lambda: send(first, snapshot))
    assert began.wait(SOON_S)
    with second:
        send(second, snapshot)
    assert list(held(directory)) == [(1, 1)]
    go_on.set()
    thread.join(SOON_S)
    assert len(errors) == 1 and isinstance(errors[0], PeerLost)


def test_closing_ends_what_is_being_received(holder: Make, owner: Own, directory: Path) -> None:
    there, rank = holder(io_s=60), owner()
    began, go_on = threading.Event(), threading.Event()
    snapshot = rank.write(1)

    def stuck() -> None:
        began.set()
        go_on.wait(SOON_S)

    at_point("peers.sending", stuck)
    with there.link() as link:
        thread, errors = in_background(lambda: send(link, snapshot))
        assert began.wait(SOON_S)
        before = time.monotonic()
        there.close()
        assert time.monotonic() - before < SOON_S / 2
        go_on.set()
        thread.join(SOON_S)
    assert isinstance(errors[0], PeerLost) and not held(directory)
