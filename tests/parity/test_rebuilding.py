"""Images of lost nodes out of arenas: every pattern of loss, and damage of what is left."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from everstep.errors import Damaged
from everstep.format.hashing import chunk_hashes, image_root
from everstep.format.vote import ImageRecord
from everstep.memory.slots import Pinned
from everstep.peers.described import PARITY_RANK, Seat, decode_described, group_of
from everstep.plan.parity import ParityGroup
from everstep.rebuilding import RebuiltSource

from .kit import CHUNK, Contents, Key, Node, group, images_of, protect

KEY = (1, 10)


class Given:
    """A source over plain bytes; ``mapped`` or read."""

    kind = "own"
    incarnation, step, world, chunk_bytes = 1, 10, 9, CHUNK

    def __init__(
        self,
        data: Mapping[tuple[int, str], Any],
        records: Mapping[tuple[int, str], ImageRecord],
        mapped: bool,
    ) -> None:
        self.label = "given"
        self._data = dict(data)
        self._records = records
        self._mapped = mapped
        self.ranks = frozenset(rank for rank, _ in records)

    def has(self, rank: int, image: str) -> bool:
        return (rank, image) in self._data

    async def records(self, rank: int) -> dict[str, ImageRecord]:
        return {image: record for (of, image), record in self._records.items() if of == rank}

    async def read_into(self, rank: int, image: str, offset: int, view: memoryview) -> None:
        view[:] = self._data[rank, image][offset : offset + len(view)]

    def mapped(self, rank: int, image: str) -> memoryview | None:
        return memoryview(self._data[rank, image]) if self._mapped else None

    def locate(self, rank: int, image: str) -> str:
        return f"given rank {rank}, {image}"


def record_of(name: str, data: bytes) -> ImageRecord:
    hashes = chunk_hashes(memoryview(data), CHUNK)
    return ImageRecord(name, len(data), image_root(len(data), hashes), hashes)


class Saved:
    """What nodes made of one step: the images, and the parity slots as sources, by node."""

    def __init__(self, nodes: Sequence[Node], contents: Contents, key: Key, mapped: bool) -> None:
        self.contents = {at: data for at, data in contents.items() if "+" not in at[1]}
        self.records = {at: record_of(at[1], data) for at, data in self.contents.items()}
        self.mapped = mapped
        self.parity: dict[int, tuple[dict[int, int], dict[str, bytearray], dict[str, ImageRecord]]] = {}
        images: dict[int, Any] = {}
        for node in nodes:
            pin = pin_parity(node, key)
            described = decode_described(bytes(pin.view("state")), "slot")
            images |= {at: own for at, own in enumerate(described.images) if at != described.position}
            sealed = {record.name: record for record in pin.sealed() or ()}
            data = {name: bytearray(pin.view("image:" + name)) for name in sealed if name != "state"}
            self.parity[node.position] = {}, data, sealed
            pin.release()
        seats, m = nodes[0].seats, nodes[0].m
        self.group = group_of(seats, m, CHUNK, [images[at] for at in range(len(seats))])
        for position, (rows, _, _) in self.parity.items():
            rows.update(self.group.code.held(position))

    def without(self, lost: set[int], images: Contents | None = None) -> RebuiltSource:
        """As if the nodes at ``lost`` were gone; ``images`` are what is left of the others'."""
        gone = {rank for at in lost for rank in self.group.members[at].ranks}
        left = {at: d for at, d in (images or self.contents).items() if at[0] not in gone}
        blocks = {}
        for position, (rows, data, sealed) in self.parity.items():
            if position not in lost:
                records = {(PARITY_RANK, name): record for name, record in sealed.items()}
                of_slot = {(PARITY_RANK, name): one for name, one in data.items()}
                source = Given(of_slot, records, self.mapped)
                blocks |= {(stripe, row): [source] for stripe, row in rows.items()}
        return RebuiltSource(self.group, blocks, [Given(left, self.records, self.mapped)])

    def check(self, lost: set[int], source: RebuiltSource) -> None:
        gone = {rank for at in lost for rank in self.group.members[at].ranks}
        for (rank, image), data in self.contents.items():
            if rank in gone:
                assert source.has(rank, image)
                assert read(source, rank, image, 0, len(data)) == data


def pin_parity(node: Node, key: Key) -> Pinned:
    assert node.keeper is not None
    [(arena, info)] = [
        (arena, info) for arena in node.keeper.arenas() for info in arena.snapshots() if info.key == key
    ]
    return arena.pin(info.index, info.generation)


def read(source: RebuiltSource, rank: int, image: str, offset: int, nbytes: int) -> bytes:
    view = bytearray(nbytes)
    asyncio.run(source.read_into(rank, image, offset, memoryview(view)))
    return bytes(view)


def make(
    directory: Path,
    source: random.Random,
    k: int,
    m: int,
    mapped: bool,
    images: Callable[[Sequence[Seat], random.Random], Contents] = images_of,
) -> Saved:
    with ExitStack() as stack:
        groups = group(directory, k + m, m, source)
        stack.callback(groups.close)
        nodes = next(groups)
        contents = images(nodes[0].seats, source)
        for node in nodes:
            node.save(KEY, contents)
        assert all(isinstance(root, bytes) for root in protect(nodes, KEY).values())
        return Saved(nodes, contents, KEY, mapped)


@pytest.fixture
def source() -> random.Random:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    return random.Random(seed)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(("k", "m"), [(2, 1), (4, 2), (3, 3), (6, 2)])
def test_every_pattern_of_loss(directory: Path, source: random.Random, k: int, m: int, mapped: bool) -> None:
    saved = make(directory, source, k, m, mapped)
    for size in range(1, m + 1):
        for lost in map(set, itertools.combinations(range(k + m), size)):
            saved.check(lost, saved.without(lost))


def images_for_every_stripe(seats: Sequence[Seat], source: random.Random) -> Contents:
    """So large that no node's block is empty: one that is can be lost for nothing."""
    return {(rank, "model"): source.randbytes(9 * CHUNK) for seat in seats for rank in seat.ranks}


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(("k", "m"), [(2, 1), (6, 2)])
def test_one_loss_too_many(directory: Path, source: random.Random, k: int, m: int, mapped: bool) -> None:
    saved = make(directory, source, k, m, mapped, images_for_every_stripe)
    too_many = set(range(m + 1))
    rebuilt = saved.without(too_many)
    rank, image = next(at for at in saved.contents if at[0] in saved.group.members[0].ranks)
    assert not rebuilt.has(rank, image)
    with pytest.raises(Damaged, match="cannot be rebuilt") as caught:
        asyncio.run(rebuilt.check_image(rank, image))
    assert f"at most {m}" in str(caught.value.expected) and f"{m + 1} nodes" in str(caught.value.found)


@pytest.fixture
def four_and_two(directory: Path, source: random.Random) -> Saved:
    return make(directory, source, 4, 2, mapped=bool(source.getrandbits(1)))


def test_any_range_of_an_image(four_and_two: Saved, source: random.Random) -> None:
    saved = four_and_two
    rebuilt = saved.without({1, 4})
    for rank in (*saved.group.members[1].ranks, *saved.group.members[4].ranks):
        data = saved.contents[rank, "optimizer"]
        for _ in range(10):
            offset = source.randint(0, len(data))
            nbytes = source.randint(0, len(data) - offset)
            assert read(rebuilt, rank, "optimizer", offset, nbytes) == data[offset : offset + nbytes]
        with pytest.raises(Damaged, match="ends too early"):
            read(rebuilt, rank, "optimizer", len(data), 1)


def test_one_lost_node_and_damage_of_parity_of_one_other(four_and_two: Saved, source: random.Random) -> None:
    """Two parity blocks each: one of them may be wrong."""
    saved = four_and_two
    for at in range(1, 6):
        blocks = saved.parity[at][1]
        before = {name: bytes(data) for name, data in blocks.items()}
        for data in blocks.values():
            for chunk in range(0, len(data), CHUNK):
                data[chunk + source.randrange(CHUNK)] ^= 0x10
        saved.check({0}, saved.without({0}))
        for name, data in before.items():
            blocks[name][:] = data


def test_one_lost_node_and_damage_of_the_data_of_another(four_and_two: Saved, source: random.Random) -> None:
    saved = four_and_two
    for at in range(1, 6):
        damaged = dict(saved.contents)
        for rank in saved.group.members[at].ranks:
            for of, image in saved.contents:
                if of == rank and damaged[of, image]:
                    spoiled = bytearray(damaged[of, image])
                    for chunk in range(0, len(spoiled), CHUNK):
                        spoiled[min(chunk + source.randrange(CHUNK), len(spoiled) - 1)] ^= 1
                    damaged[of, image] = bytes(spoiled)
        saved.check({0}, saved.without({0}, damaged))


def test_damage_with_right_hashes_of_its_own_is_passed_by(four_and_two: Saved) -> None:
    """Parity that was wrong before it was sealed: no hash of the block tells, the owner's hashes do."""
    saved = four_and_two
    rows, blocks, sealed = saved.parity[1]
    for stripe in rows:
        name = f"parity-{stripe}"
        for chunk in range(0, len(blocks[name]), CHUNK):
            blocks[name][chunk] ^= 1
        sealed[name] = record_of(name, bytes(blocks[name]))
    saved.check({0}, saved.without({0}))


def test_too_much_damage_is_told_and_nothing_wrong_is_given(four_and_two: Saved) -> None:
    saved = four_and_two
    for at in range(1, 6):
        for data in saved.parity[at][1].values():
            data[:] = bytes(byte ^ 1 for byte in data)
    rebuilt = saved.without({0})
    rank = saved.group.members[0].ranks[0]
    with pytest.raises(Damaged, match="cannot be rebuilt at offset 0") as caught:
        read(rebuilt, rank, "optimizer", 0, 1)
    assert "given rank -1, parity-" in str(caught.value)


def test_what_is_there_can_be_rebuilt_too(four_and_two: Saved) -> None:
    """Nothing is lost, but a chunk is damaged in its owner's memory: the others make it good."""
    saved = four_and_two
    rebuilt = saved.without(set())
    for (rank, image), data in saved.contents.items():
        assert rebuilt.has(rank, image)
        assert read(rebuilt, rank, image, 0, len(data)) == data
    assert not rebuilt.has(0, "model+7") and not rebuilt.has(99, "model")


def test_a_group_is_known_by_what_is_left_of_it(four_and_two: Saved) -> None:
    group: ParityGroup = four_and_two.group
    assert four_and_two.without({0, 1}).label == f"parity of nodes {', '.join(m.name for m in group.members)}"
    assert four_and_two.without({0}).ranks == {rank for m in group.members for rank in m.ranks}
