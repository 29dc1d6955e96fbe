"""Agents of a group make parity of each other's snapshots: right bytes, exactly once, whatever breaks."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from everstep.errors import (
    AgentError,
    Damaged,
    EverstepError,
    MemoryTooSmall,
    PeerLost,
    StepOrder,
    Superseded,
)
from everstep.format.hashing import chunk_hashes, image_root
from everstep.format.vote import ImageRecord
from everstep.memory.arena import Arena
from everstep.memory.slots import SlotState
from everstep.peers import parity
from everstep.peers.described import ImageOf, Seat, decode_described, group_of
from everstep.peers.link import Link
from everstep.peers.messages import Kept, expect
from everstep.peers.parity import ParityOffer
from everstep.peers.stripes import Building
from everstep.plan.parity import ParityGroup, Part

from .kit import CHUNK, RUN, Contents, Key, Node, group, images_of, parity_blocks, protect
from .test_stripes import encode

KEY = (1, 10)


def map_of(nodes: list[Node], contents: Contents) -> ParityGroup:
    images = [
        [
            ImageOf(rank, name, len(data), bytes(16))
            for rank in seat.ranks
            for (of, name), data in contents.items()
            if of == rank and "+" not in name
        ]
        for seat in nodes[0].seats
    ]
    return group_of(nodes[0].seats, nodes[0].m, CHUNK, images)


def expected(nodes: list[Node], contents: Contents) -> dict[tuple[int, int], bytes]:
    return encode(map_of(nodes, contents), contents)


def check(nodes: list[Node], key: Key, contents: Contents) -> None:
    """Every node's parity is what plain arithmetic makes of everybody's images."""
    wanted = expected(nodes, contents)
    found = {}
    for node in nodes:
        rows = dict(map_of(nodes, contents).code.held(node.position))
        found |= {(stripe, rows[stripe]): data for stripe, data in parity_blocks(node, key).items()}
    assert found == wanted


def save(nodes: list[Node], key: Key, source: random.Random) -> Contents:
    contents = images_of(nodes[0].seats, source)
    for node in nodes:
        node.save(key, contents)
    return contents


@pytest.fixture
def source(record_property: Any) -> random.Random:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    return random.Random(seed)


@pytest.fixture
def three(directory: Path, source: random.Random) -> Iterator[list[Node]]:
    yield from group(directory, 3, 1, source)


@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 1), (3, 2), (1, 2)])
def test_all_nodes_hold_parity_of_the_others(directory: Path, source: random.Random, k: int, m: int) -> None:
    with contextlib.closing(group(directory, k + m, m, source)) as groups:
        nodes = next(groups)
        for node in nodes:
            assert node.keeper is not None
            node.keeper.reserve(64 * CHUNK, CHUNK)
        for step in range(10, 14):
            contents = save(nodes, (1, step), source)
            roots = protect(nodes, (1, step))
            assert all(isinstance(root, bytes) for root in roots.values()), roots
            for node in nodes:
                node.completed((1, step))
                assert node.keeper is not None
                assert (
                    len({roots[other.position, node.position] for other in nodes if other is not node}) == 1
                )
            check(nodes, (1, step), contents)
        assert sorted(step for _, step in keys(nodes[0])) == [12, 13], "the older one stays"


def keys(node: Node) -> list[Key]:
    assert node.keeper is not None
    return [info.key for arena in node.keeper.arenas() for info in arena.snapshots()]


def test_the_slot_says_whose_parity_it_is(three: list[Node], source: random.Random) -> None:
    contents = save(three, KEY, source)
    protect(three, KEY)
    assert three[1].keeper is not None
    [arena] = three[1].keeper.arenas()
    [info] = arena.snapshots()
    assert info.state is SlotState.SEALED
    with arena.pin(info.index, info.generation) as pin:
        described = decode_described(bytes(pin.view("state")), "slot")
    assert (described.m, described.position, described.seats) == (1, 1, three[0].seats)
    assert described.images[1] == ()
    for position in (0, 2):
        names = {(one.rank, one.image): one.nbytes for one in described.images[position]}
        ranks = three[0].seats[position].ranks
        assert names == {at: len(d) for at, d in contents.items() if at[0] in ranks and "+" not in at[1]}


def test_sending_again_what_is_kept_is_answered_at_once(three: list[Node], source: random.Random) -> None:
    save(three, KEY, source)
    roots = protect(three, KEY)
    assert protect(three, KEY, [(0, 1)])[0, 1] == roots[0, 1]


class Cut(Link):
    """A link that breaks before it has sent more than ``allowed`` bytes."""

    allowed = 0

    def send_bytes(self, view: memoryview, rate: Any = None) -> None:
        room = max(0, self.allowed - self.sent)
        super().send_bytes(view[:room], rate)
        self.sent += min(room, len(view))
        if len(view) > room:
            self.close()
            raise PeerLost("cut")

    sent = 0


def cutting(one: Node, other: Node, allowed: int) -> Any:
    def make() -> Link:
        link = one.link(other)
        link.__class__ = type("Cut", (Cut,), {"allowed": allowed})
        return link

    return make


def test_a_broken_connection_is_gone_on_with_and_nothing_counts_twice(
    three: list[Node], source: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "PIECE_BYTES", CHUNK)
    contents = {at: source.randbytes(11 * CHUNK + 7) for at in images_of(three[0].seats, source)}
    for node in three:
        node.save(KEY, contents)
    found: dict[Any, Any] = {}
    rest = threading.Thread(target=lambda: found.update(protect(three, KEY, [(1, 0)])))
    rest.start()
    for allowed in (0, 100, CHUNK, 2 * CHUNK + 1, 3 * CHUNK):
        with pytest.raises(PeerLost):
            three[2].duty(three[0], cutting(three[2], three[0], allowed)).protect(KEY, three[2].pins(KEY))
    found |= protect(three, KEY, [(2, 0)])
    rest.join()
    assert isinstance(found[1, 0], bytes) and found[2, 0] == found[1, 0]
    wanted = expected(three, contents)
    assert parity_blocks(three[0], KEY) == {at[0]: data for at, data in wanted.items() if at[0] == 0}


def test_a_block_is_resumed_where_it_broke_off(source: random.Random) -> None:
    seats = (Seat("a", (0,)), Seat("b", (1,)))
    data = source.randbytes(5 * CHUNK + 9)
    hashes = chunk_hashes(memoryview(data), CHUNK)
    record = ImageRecord("model", len(data), image_root(len(data), hashes), hashes)
    building = Building(KEY, seats, 1, 0, CHUNK)
    first = building.join(1, {(1, "model"): record})
    views = {name: memoryview(bytearray(b"\xee" * nbytes)) for name, nbytes in building.regions()}
    building.start(views)
    [(stripe, chunk)] = building.wanted(1)
    [part] = building.parts(1, stripe, chunk)
    assert (chunk, part.nbytes, len(views[f"image:parity-{stripe}"])) == (0, len(data), 6 * CHUNK)
    send(building, first, stripe, Part(1, "model", 0, 2 * CHUNK, 0), data)
    with pytest.raises(Damaged):
        send(building, first, stripe, Part(1, "model", 2 * CHUNK, CHUNK, 0), bytes(len(data)))
    assert building.wanted(1) == [(stripe, 2)]
    second = building.join(1, {(1, "model"): record})
    with pytest.raises(PeerLost, match="another connection"):
        send(building, first, stripe, Part(1, "model", 2 * CHUNK, CHUNK, 0), data)
    [rest] = building.parts(1, stripe, 2)
    assert (rest.offset, rest.nbytes) == (2 * CHUNK, 3 * CHUNK + 9)
    assert not building.is_whole
    send(building, second, stripe, rest, data)
    assert building.is_whole
    assert bytes(views[f"image:parity-{stripe}"]) == data + bytes(CHUNK - 9), "the sum of one is itself"
    with pytest.raises(Damaged, match="another snapshot"):
        building.join(1, {(1, "model"): ImageRecord("model", len(data), bytes(16), hashes)})


def send(building: Building, turn: int, stripe: int, part: Part, data: bytes) -> None:
    chunks = -(-part.nbytes // CHUNK)
    buffer = bytearray(b"\xaa" * (chunks * CHUNK))
    buffer[: part.nbytes] = data[part.offset : part.offset + part.nbytes]
    building.add(1, turn, stripe, part, memoryview(buffer))


def test_bytes_damaged_on_the_way_are_asked_for_again(three: list[Node], source: random.Random) -> None:
    contents = save(three, KEY, source)
    spoiled = []

    class Spoiling(Link):
        """Turns one bit of what it sends, once."""

        def send_bytes(self, view: memoryview, rate: Any = None) -> None:
            data = bytearray(view)
            if not spoiled and data:
                data[len(data) // 2] ^= 4
                spoiled.append(len(data))
            super().send_bytes(memoryview(data), rate)

    found: dict[Any, Any] = {}
    rest = threading.Thread(target=lambda: found.update(protect(three, KEY, [(1, 0)])))
    rest.start()
    found[2, 0] = (
        three[2]
        .duty(three[0], lambda: spoiling(three[2].link(three[0]), Spoiling))
        .protect(KEY, three[2].pins(KEY))
    )
    rest.join()
    assert spoiled and isinstance(found[1, 0], bytes)
    wanted = expected(three, contents)
    assert parity_blocks(three[0], KEY) == {at[0]: data for at, data in wanted.items() if at[0] == 0}


def spoiling(link: Link, kind: type[Link]) -> Link:
    link.__class__ = kind
    return link


def test_an_image_that_changed_since_it_was_sealed_is_never_added(
    three: list[Node], source: random.Random
) -> None:
    save(three, KEY, source)
    rank = three[2].seats[2].ranks[0]
    pins = three[2].pins(KEY)
    pins[rank].seal(pins[rank].compute())
    arena = three[2].arenas[rank]
    slot = pins[rank].info.index
    place = next(region for region in pins[rank]._regions if region.name == "image:optimizer")
    arena._control.data(slot, place.offset, 1)[0] ^= 1
    found = protect(three, KEY)
    [bad] = [to for (of, to), answer in found.items() if of == 2 and not isinstance(answer, bytes)]
    for (_, to), answer in found.items():
        assert isinstance(answer, Damaged if to == bad else bytes), answer
        if isinstance(answer, Damaged):
            assert f"of rank {rank}" in str(answer) and "node2" in str(answer)
    assert [keys(node) for node in three] == [[] if node.position == bad else [KEY] for node in three]


def test_others_that_do_not_come_are_named_and_may_come_later(directory: Path, source: random.Random) -> None:
    with contextlib.closing(group(directory, 3, 1, source)) as groups:
        nodes = next(groups)
        nodes[0].end()
        nodes[0].serve(wait_s=1.0)
        contents = save(nodes, KEY, source)
        told = protect(nodes, KEY, [(1, 0)])[1, 0]
        assert isinstance(told, AgentError) and "node2" in str(told.found)
        found = protect(nodes, KEY, [(2, 0), (1, 0)])
        assert all(isinstance(root, bytes) for root in found.values()), found
        wanted = expected(nodes, contents)
        assert parity_blocks(nodes[0], KEY) == {at[0]: data for at, data in wanted.items() if at[0] == 0}


def test_the_older_parity_stays_until_the_newer_is_whole(three: list[Node], source: random.Random) -> None:
    contents = {}
    for step in (10, 11):
        contents[step] = {at: source.randbytes(5 * CHUNK) for at in images_of(three[0].seats, source)}
        for node in three:
            node.save((1, step), contents[step])
    assert all(isinstance(root, bytes) for root in protect(three, (1, 10)).values())
    three[0].completed((1, 10))
    with pytest.raises(PeerLost):
        three[2].duty(three[0], cutting(three[2], three[0], CHUNK)).protect(
            (1, 11), begun(three, (1, 11), three[2])
        )
    assert keys(three[0]) == [(1, 10)]
    wanted = expected(three, contents[10])
    assert parity_blocks(three[0], (1, 10)) == {at[0]: data for at, data in wanted.items() if at[0] == 0}


def begun(nodes: list[Node], key: Key, of: Node) -> Any:
    """The pins of one node, while another has begun to send to the first."""
    threading.Thread(target=protect, args=(nodes, key, [(1, 0)]), daemon=True).start()
    return of.pins(key)


def test_w_is_never_overwritten(directory: Path, source: random.Random) -> None:
    with contextlib.closing(group(directory, 2, 1, source)) as groups:
        nodes = next(groups)
        assert nodes[0].keeper is not None
        nodes[0].keeper.reserve(64 * CHUNK, CHUNK)
        for step in (10, 11):
            save(nodes, (1, step), source)
            assert isinstance(protect(nodes, (1, step), [(1, 0)])[1, 0], bytes)
        nodes[0].end()
        keeper = nodes[0].serve(wait_s=0.6)
        keeper.reserve(CHUNK, CHUNK)
        nodes[0].completed((1, 10))
        save(nodes, (1, 12), source)
        told = protect(nodes, (1, 12), [(1, 0)])[1, 0]
        assert isinstance(told, AgentError) and "not begun" in str(told)
        assert keys(nodes[0]) == [(1, 10), (1, 11)]
        nodes[0].completed((1, 11))
        assert isinstance(protect(nodes, (1, 12), [(1, 0)])[1, 0], bytes)
        assert keys(nodes[0]) == [(1, 11), (1, 12)]


def test_a_member_that_goes_on_ends_what_it_left_unfinished(three: list[Node], source: random.Random) -> None:
    for step in (10, 11):
        save(three, (1, step), source)
    found: dict[Any, Any] = {}
    first = threading.Thread(target=lambda: found.update(protect(three, (1, 10), [(1, 0)])))
    first.start()
    wait_for_member(three[0], "node2")
    newer = protect(three, (1, 11), [(1, 0), (2, 0)])
    first.join()
    assert isinstance(found[1, 0], Superseded) and "step 10" in str(found[1, 0])
    assert all(isinstance(root, bytes) for root in newer.values()), newer
    late = protect(three, (1, 10), [(2, 0)])[2, 0]
    assert isinstance(late, StepOrder), late


def wait_for_member(node: Node, missing: str) -> None:
    """Until only ``missing`` has not come."""
    keeper = node.keeper
    assert keeper is not None
    with keeper._changed:
        assert keeper._changed.wait_for(
            lambda: keeper._building is not None and keeper._building.waits_for == [missing], 10
        )


def test_a_closing_agent_tells_who_waits(three: list[Node], source: random.Random) -> None:
    save(three, KEY, source)
    found: dict[Any, Any] = {}
    first = threading.Thread(target=lambda: found.update(protect(three, KEY, [(1, 0)])))
    first.start()
    wait_for_member(three[0], "node2")
    three[0].end()
    first.join()
    assert isinstance(found[1, 0], PeerLost)


def test_a_new_agent_takes_what_the_former_left(three: list[Node], source: random.Random) -> None:
    save(three, KEY, source)
    roots = protect(three, KEY)
    three[0].end()
    keeper = three[0].serve()
    keeper.reserve(CHUNK, CHUNK)
    assert keys(three[0]) == [KEY]
    assert protect(three, KEY, [(1, 0)])[1, 0] == roots[1, 0]


def test_parity_of_another_snapshot_of_the_same_step_goes(three: list[Node], source: random.Random) -> None:
    contents = save(three, KEY, source)
    protect(three, KEY)
    other = Node(three[2].directory / "other", three[2].seats, 1, 2)
    contents |= {at: data + b"!" for at, data in contents.items() if at[0] in three[2].seats[2].ranks}
    other.save(KEY, contents)
    nodes = [*three[:2], other]
    found: dict[Any, Any] = {}
    changed = threading.Thread(target=lambda: found.update(protect(nodes, KEY, [(2, 0)])))
    changed.start()
    wait_for_member(three[0], "node1")
    assert keys(three[0]) == [], "it is of no use to anybody"
    found |= protect(nodes, KEY, [(1, 0)])
    changed.join()
    assert isinstance(found[1, 0], bytes) and found[1, 0] == found[2, 0]
    wanted = expected(nodes, contents)
    assert parity_blocks(three[0], KEY) == {at[0]: data for at, data in wanted.items() if at[0] == 0}
    other.close()


def test_too_little_memory_is_told_to_all(three: list[Node], source: random.Random, monkeypatch: Any) -> None:
    def refuse(*args: Any, **options: Any) -> Arena:
        raise MemoryTooSmall("no room", found=1, expected=2)

    save(three, KEY, source)
    monkeypatch.setattr(Arena, "create", refuse)
    found = protect(three, KEY, [(1, 0), (2, 0)])
    assert all(isinstance(error, MemoryTooSmall) for error in found.values()), found


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"run_id": "other"}, EverstepError),
        ({"to": 2}, Damaged),
        ({"position": 7}, Damaged),
        ({"m": 3}, Damaged),
        ({"chunk_bytes": 5000}, Damaged),
        ({"records": [(0, b"")]}, Damaged),
        ({"seats": (Seat("a", (0,)), Seat("b", (0,)))}, Damaged),
    ],
)
def test_offers_that_cannot_be_are_refused(
    three: list[Node], changes: dict[str, Any], kind: type[EverstepError]
) -> None:
    given = {
        "run_id": RUN,
        "incarnation": 1,
        "step": 1,
        "world": 3,
        "chunk_bytes": CHUNK,
        "m": 1,
        "seats": three[0].seats,
        "position": 2,
        "to": 0,
        "records": [],
    }
    with three[2].link(three[0]) as link, pytest.raises(kind):
        link.send(ParityOffer(**{**given, **changes}))
        expect(link.receive(5), Kept)
