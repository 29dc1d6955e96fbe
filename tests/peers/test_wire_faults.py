"""Whatever the network does, or another agent says: nothing wrong is kept, the former snapshot stays, it ends in
bounded time, and the next try works."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from everstep.errors import Damaged, EverstepError, PeerLost
from everstep.format.records_table import decode_records, encode_records
from everstep.format.vote import ImageRecord
from everstep.memory.slots import Pinned
from everstep.peers import greeting
from everstep.peers.link import connect
from everstep.peers.listener import Listener
from everstep.peers.messages import (
    AGAIN_MAX,
    Again,
    Kept,
    Need,
    Offer,
    Sent,
    encode_frame,
    expect,
    unexpected,
)
from everstep.peers.sender import SMALL_REGIONS

from .kit import CHUNK, RUN, SECRET, SLOT_BYTES, SOON_S, Holder, Owner, contents, held, send
from .proxy import Direction, Fault, Proxy, What

Make = Callable[..., Holder]
Own = Callable[..., Owner]

IO_S = 0.6
IMAGE = 100_000
SIZES = {"model": IMAGE}
GREETING_DOWN = 42 + 1 + len("holder") + 32
"""Bytes of the listener's greeting."""
SMALL = 60 + 300 + 56 + 700
"""Less than what goes before the image's bytes, beside the offer."""


def whole(step: int) -> dict[str, bytes]:
    return contents(1, step, SIZES)


@pytest.fixture
def there(holder: Make, owner: Own) -> tuple[Holder, Owner]:
    """A holder that has step 1 of the rank."""
    made, rank = holder(io_s=IO_S), owner()
    with made.link() as link:
        send(link, rank.write(1, regions=whole(1)))
    return made, rank


def still_good(there: Holder, rank: Owner, directory: Path, step: int) -> None:
    """Step 1 is held as it was, nothing wrong of ``step``, and sending works."""
    found = held(directory)
    for key in found:
        found[key].pop("records")
    assert found[1, 1] == whole(1) and found.get((1, step), whole(step)) == whole(step)
    with there.link(io_s=SOON_S) as link:
        send(link, rank.write(step + 1, regions=whole(step + 1)))
    assert held(directory)[1, step + 1]["image:model"] == whole(step + 1)["image:model"]


def test_a_flipped_bit_is_found_and_that_chunk_asked_for_again(
    there: tuple[Holder, Owner], directory: Path
) -> None:
    holder, rank = there
    snapshot = rank.write(2, regions=whole(2))
    with Proxy(holder.listener.host, holder.listener.port, [Fault("flip", IMAGE // 2)]) as proxy:
        with holder.link(proxy.port) as link:
            send(link, snapshot)
        assert proxy.struck == 1
        assert IMAGE + SMALL < proxy.carried["up"] < IMAGE + 3 * CHUNK  # that chunk alone
    still_good(holder, rank, directory, 2)


@pytest.mark.parametrize("region", ["layout", "meta", "state"])
def test_the_small_regions_are_proved_too(
    region: str, there: tuple[Holder, Owner], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, rank = there
    snapshot = rank.write(2, regions=whole(2))
    with holder.link() as link:
        spoil(monkeypatch, region, times=1)
        send(link, snapshot)
    assert held(directory)[1, 2][region] == whole(2)[region]
    with holder.link() as link:
        third = rank.write(3, regions=whole(3))
        spoil(monkeypatch, region, times=2)
        with pytest.raises(
            Damaged, match=rf"rank 0, step 3: {region} came damaged from node owner, from byte 0"
        ):
            send(link, third)
    assert (1, 3) not in held(directory)


def spoil(monkeypatch: pytest.MonkeyPatch, region: str, *, times: int, at: int = 0) -> None:
    """The sender's memory gives a wrong byte, so many times."""
    left = times
    view_of = Pinned.view

    def view(pinned: Pinned, name: str) -> memoryview:
        nonlocal left
        data = view_of(pinned, name)
        if name != region or left == 0:
            return data
        left -= 1
        wrong = bytearray(data)
        wrong[at] ^= 1
        return memoryview(wrong)

    monkeypatch.setattr(Pinned, "view", view)


def test_what_comes_damaged_twice_is_not_kept_and_named(
    there: tuple[Holder, Owner], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, rank = there
    snapshot = rank.write(2, regions=whole(2))
    with holder.link() as link:
        with monkeypatch.context() as spoiled:
            spoil(spoiled, "image:model", times=2, at=5 * CHUNK + 7)
            with pytest.raises(
                Damaged, match=rf"image:model came damaged .*from byte {5 * CHUNK} on"
            ) as caught:
                send(link, snapshot)
        assert (caught.value.rank, caught.value.step, caught.value.offset) == (0, 2, 5 * CHUNK)
        assert list(held(directory)) == [(1, 1)]
        send(link, snapshot)  # over the same connection
    still_good(holder, rank, directory, 2)


def test_too_much_damage_is_not_asked_for_again(
    holder: Make, owner: Own, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, rank = holder(), owner(slot_bytes=8 << 20)
    chunks = AGAIN_MAX + 1
    snapshot = rank.write(1, regions=contents(1, 1, {"model": chunks * CHUNK}))
    monkeypatch.setattr(Pinned, "view", lambda pinned, name: memoryview(bytes(pinned.regions[name])))
    with there.link() as link, pytest.raises(Damaged, match="came damaged"):
        send(link, snapshot)


FAULTS: list[tuple[What, Direction]] = [
    ("flip", "up"), ("flip", "down"), ("lose", "up"), ("lose", "down"),
    ("stall", "up"), ("stall", "down"), ("close", "up"), ("close", "down"),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("what", "direction"), FAULTS)
def test_a_bad_network_costs_time_and_nothing_else(
    what: What,
    direction: Direction,
    seed: int,
    there: tuple[Holder, Owner],
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(greeting, "GREETING_S", 1.0)
    holder, rank = there
    snapshot = rank.write(2, regions=whole(2))
    end = IMAGE if direction == "up" else 150
    at = random.Random(f"{what} {direction} {seed}").randrange(0, end)
    print("fault at", at)
    with Proxy(holder.listener.host, holder.listener.port, [Fault(what, at, direction)]) as proxy:
        began = time.monotonic()
        try:
            with holder.link(proxy.port, io_s=IO_S) as link:
                link_answers_soon(link, snapshot)
        except PeerLost as error:
            print(error)
        assert time.monotonic() - began < SOON_S
        assert proxy.struck == 1
        if what == "stall":
            proxy.release()
    still_good(holder, rank, directory, 2)


def link_answers_soon(link: Any, snapshot: Any) -> None:
    """As in :func:`send`, but no answer is waited for longer than a moment."""
    receive = link.receive
    link.receive = lambda timeout_s: receive(min(timeout_s, 2 * IO_S))
    send(link, snapshot)


def test_a_lost_answer_is_made_up_for_by_asking_again(there: tuple[Holder, Owner], directory: Path) -> None:
    """It is held, but the sender did not hear so."""
    holder, rank = there
    snapshot = rank.write(2, regions=whole(2))
    at = GREETING_DOWN + len(encode_frame(Need(["model"])))
    with Proxy(holder.listener.host, holder.listener.port, [Fault("close", at, "down")]) as proxy:
        with holder.link(proxy.port) as link, pytest.raises(PeerLost):
            send(link, snapshot)
        assert (1, 2) in held(directory) and proxy.struck == 1
        up = proxy.carried["up"]
        with holder.link(proxy.port) as link:
            send(link, snapshot)
        assert proxy.carried["up"] - up < IMAGE / 2  # nothing was sent again
    still_good(holder, rank, directory, 2)


# -- agents that say what they should not


def offered(snapshot: tuple[Pinned, tuple[ImageRecord, ...]], **changed: Any) -> Offer:
    pinned, records = snapshot
    images = [(name, nbytes) for name, nbytes in pinned.regions.items() if name.startswith("image:")]
    given: dict[str, Any] = {
        "run_id": RUN,
        "incarnation": 1,
        "step": pinned.info.step,
        "rank": 0,
        "world": 4,
        "chunk_bytes": CHUNK,
        "slot_bytes": SLOT_BYTES,
        "layout_hash": pinned.info.layout_hash,
        "regions": [*((name, pinned.regions[name]) for name in SMALL_REGIONS), *images],
        "records": encode_records(records),
    }
    return Offer(**{**given, **changed})


def changed_record(records: bytes, **changes: Any) -> bytes:
    first, *rest = decode_records(records)
    return encode_records([dataclasses.replace(first, **changes), *rest])


WRONG: dict[str, Callable[[Offer], dict[str, Any]]] = {
    "another run": lambda o: {"run_id": "run-2"},
    "no incarnation": lambda o: {"incarnation": 0},
    "a negative step": lambda o: {"step": -1},
    "a huge step": lambda o: {"step": 1 << 50},
    "a huge incarnation": lambda o: {"incarnation": 1 << 30},
    "a rank outside the world": lambda o: {"rank": 4},
    "a negative rank": lambda o: {"rank": -1},
    "no chunk size": lambda o: {"chunk_bytes": 0},
    "another chunk size": lambda o: {"chunk_bytes": 2 * CHUNK},
    "records that are none": lambda o: {"records": b"\xc1"},
    "records of nothing": lambda o: {"records": encode_records([])},
    "one record too few": lambda o: {"records": encode_records(decode_records(o.records)[1:])},
    "records in another order": lambda o: {"records": encode_records(decode_records(o.records)[::-1])},
    "a changed root": lambda o: {"records": changed_record(o.records, root=bytes(16))},
    "a changed hash": lambda o: {"records": changed_record(o.records, chunks=bytes(25 * 16))},
    "a hash missing": lambda o: {"records": changed_record(o.records, chunks=b"")},
    "no regions": lambda o: {"regions": []},
    "a region missing": lambda o: {"regions": o.regions[1:]},
    "a region twice": lambda o: {"regions": [*o.regions, o.regions[-1]]},
    "a foreign region": lambda o: {"regions": [*o.regions, ("copy:1/model", 10)]},
    "a region called records": lambda o: {"regions": [*o.regions, ("records", 10)]},
    "another size": lambda o: {"regions": [*o.regions[:-1], (o.regions[-1][0], 5)]},
    "a negative size": lambda o: {"regions": [("layout", -5), *o.regions[1:]]},
    "a huge layout": lambda o: {"regions": [("layout", 1 << 60), *o.regions[1:]]},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_offer_that_cannot_be_right_is_refused(
    wrong: str, there: tuple[Holder, Owner], directory: Path
) -> None:
    holder, rank = there
    offer = offered(rank.write(2, regions=whole(2)))
    with holder.link() as link:
        link.send(msgspec.structs.replace(offer, **WRONG[wrong](offer)))
        with pytest.raises(EverstepError) as caught:
            expect(link.receive(SOON_S), Need)
        assert not isinstance(caught.value, PeerLost)
        link.send(offer)
        assert link.receive(SOON_S) == Need(["model"])  # the right one is taken, over the same connection
    still_good(holder, rank, directory, 2)


def test_a_sender_that_goes_away_instead_of_sending_leaves_nothing(
    there: tuple[Holder, Owner], directory: Path
) -> None:
    holder, rank = there
    offer = offered(rank.write(2, regions=whole(2)))
    for _ in range(3):
        with holder.link() as link:
            link.send(offer)
            expect(link.receive(SOON_S), Need)
    still_good(holder, rank, directory, 2)


def test_a_message_in_place_of_the_last_word_ends_the_connection(
    there: tuple[Holder, Owner], directory: Path
) -> None:
    holder, rank = there
    snapshot = rank.write(2, regions=whole(2))
    offer = offered(snapshot)
    with holder.link() as link:
        link.send(offer)
        expect(link.receive(SOON_S), Need)
        for name, _ in offer.regions:
            link.send_bytes(snapshot[0].view(name))
        link.send(Need([]))
        with pytest.raises(PeerLost):
            link.receive(SOON_S)
    assert list(held(directory)) == [(1, 1)]
    still_good(holder, rank, directory, 2)


@pytest.mark.parametrize(
    "answers",
    [
        [Need(["optimizer"])],
        [Sent()],
        [Kept(bytes(16))],
        [Need(["model"]), Kept(bytes(16))],
        [Need(["model"]), Again([("image:model", 0, 1 << 40)])],
        [Need(["model"]), Again([("image:none", 0, 1)])],
        [Need(["model"]), Again([("image:model", -1, 1)])],
        [Need(["model"]), Again([("image:model", 0, 1)]), Again([("image:model", 0, 1)])],
        [Need(["model"]), Need(["model"])],
    ],
)
def test_a_holder_that_answers_otherwise_is_lost(answers: list[Any], owner: Own) -> None:
    """So that nothing counts as protected that is not."""

    def serve(link: Any, offer: Offer) -> None:
        sizes = dict(offer.regions)
        want = 0
        for answer in answers:
            if want:
                link.receive_into(memoryview(bytearray(want)))
                link.receive(SOON_S)
            link.send(answer)
            if isinstance(answer, Need):
                want = sum(sizes.values())
            elif isinstance(answer, Again):
                want = sum(nbytes for _, _, nbytes in answer.pieces)
        link.receive(SOON_S)

    with Listener("127.0.0.1", 0, SECRET, RUN, {Offer: serve}, me="false") as listener:
        with connect("127.0.0.1", listener.port, SECRET, RUN, me="owner", timeout_s=SOON_S) as link:
            with pytest.raises(PeerLost, match="node false answered with"):
                send(link, owner().write(1, regions=whole(1)))
            assert link.closed


def test_unexpected_names_both() -> None:
    assert str(unexpected(Sent(), "Kept")).endswith("found: Sent; expected: Kept")
