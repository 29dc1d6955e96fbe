"""The map of stripes: every byte in one block, blocks alike, and what can be rebuilt. Whole groups as plain bytes."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from everstep.errors import BadOption
from everstep.plan import galois
from everstep.plan.parity import Code, Member, ParityGroup, fit, parity_bytes_max
from everstep.plan.placement import Node
from hypothesis import given, settings
from hypothesis import strategies as st

CHUNK = 256
CODES = [(2, 1), (4, 2), (3, 3), (6, 2)]


def random_group(source: random.Random, k: int, m: int, chunk_bytes: int = CHUNK) -> ParityGroup:
    """Nodes with one or two ranks of no to four images, some of them empty."""
    ranks = iter(range(1000))
    members = []
    for position in range(k + m):
        own = tuple(next(ranks) for _ in range(source.randint(1, 2)))
        images = [
            (
                rank,
                f"part{number}",
                source.choice([0, 1, source.randint(1, 9 * chunk_bytes), 3 * chunk_bytes]),
            )
            for rank in own
            for number in range(source.randint(0, 4))
        ]
        members.append(Member(f"node{position}", own, tuple(images)))
    return ParityGroup(Code(k, m), chunk_bytes, tuple(members))


def contents(source: random.Random, group: ParityGroup) -> dict[tuple[int, str], bytes]:
    return {(r, image): source.randbytes(n) for member in group.members for r, image, n in member.images}


def block_bytes(
    group: ParityGroup, images: dict[tuple[int, str], bytes], stripe: int, column: int
) -> bytearray:
    """A data block as the map puts it together, padded to the length of the stripe."""
    whole = bytearray(group.parity_chunks(stripe) * group.chunk_bytes)
    for part in group.parts(stripe, column, range(group.parity_chunks(stripe))):
        piece = images[part.rank, part.image][part.offset : part.offset + part.nbytes]
        assert len(piece) == part.nbytes and not any(whole[part.at : part.at + part.nbytes])
        whole[part.at : part.at + part.nbytes] = piece
    return whole


def encode(group: ParityGroup, images: dict[tuple[int, str], bytes]) -> dict[tuple[int, int], bytes]:
    """All parity blocks by (stripe, row)."""
    found = {}
    code = group.code
    for stripe in range(code.n):
        data = [block_bytes(group, images, stripe, column) for column in range(code.k)]
        for row, factors in enumerate(galois.generator(code.k, code.m)):
            block = bytearray(group.parity_chunks(stripe) * group.chunk_bytes)
            for factor, one in zip(factors, data, strict=True):
                galois.accumulate(memoryview(block), memoryview(one), factor, group.chunk_bytes)
            found[stripe, row] = bytes(block)
    return found


def rebuild(
    group: ParityGroup,
    images: dict[tuple[int, str], bytes],
    parity: dict[tuple[int, int], bytes],
    lost: set[int],
    rank: int,
    image: str,
    nbytes: int,
) -> bytes:
    """An image of a lost node from what the others have."""
    code = group.code
    found = bytearray(nbytes)
    for span in group.spans(rank, image, 0, nbytes):
        givers = code.givers(span.stripe)
        missing = [column for column in range(code.k) if givers[column] in lost]
        rows = [row for row in range(code.m) if (span.stripe, row) in parity][: len(missing)]
        by_row, by_column = galois.solve(code.k, code.m, missing, rows, span.column)
        block = bytearray(group.parity_chunks(span.stripe) * group.chunk_bytes)
        for row, factor in by_row.items():
            galois.accumulate(
                memoryview(block), memoryview(parity[span.stripe, row]), factor, group.chunk_bytes
            )
        for column, factor in by_column.items():
            other = block_bytes(group, images, span.stripe, column)
            galois.accumulate(memoryview(block), memoryview(other), factor, group.chunk_bytes)
        found[span.at : span.at + span.nbytes] = block[span.offset : span.offset + span.nbytes]
    return bytes(found)


@pytest.mark.parametrize(("k", "m"), CODES)
def test_every_pattern_of_lost_nodes_is_rebuilt(k: int, m: int) -> None:
    seed = random.randrange(1 << 30)
    source = random.Random(seed)
    group = random_group(source, k, m)
    images = contents(source, group)
    parity = encode(group, images)
    for size in range(1, m + 1):
        for lost in map(set, itertools.combinations(range(k + m), size)):
            left = {at: b for at, b in parity.items() if group.code.holders(at[0])[at[1]] not in lost}
            assert group.rebuildable(lost, left) == lost, seed
            of_lost = {rank for position in lost for rank in group.members[position].ranks}
            others = {key: data for key, data in images.items() if key[0] not in of_lost}
            for (rank, image), data in images.items():
                if rank in of_lost:
                    assert rebuild(group, others, left, lost, rank, image, len(data)) == data, (seed, lost)


@pytest.mark.parametrize(("k", "m"), CODES)
def test_more_lost_nodes_than_parity_are_not(k: int, m: int) -> None:
    member = Member("", (0,), ((0, "x", 100 * CHUNK),))
    group = ParityGroup(Code(k, m), CHUNK, (member,) * (k + m))
    for lost in map(set, itertools.combinations(range(k + m), m + 1)):
        left = {
            (stripe, row)
            for stripe in range(k + m)
            for row in range(m)
            if group.code.holders(stripe)[row] not in lost
        }
        assert group.rebuildable(lost, left) == set()


def test_parity_that_is_gone_without_its_node_is_counted() -> None:
    member = Member("", (0,), ((0, "x", 100 * CHUNK),))
    group = ParityGroup(Code(2, 1), CHUNK, (member,) * 3)
    parity = {(stripe, 0) for stripe in range(3)}
    assert group.rebuildable({0}, parity) == {0}
    assert group.rebuildable({0}, parity - {(2, 0)}) == set(), "node 0 gives to stripes 1 and 2"
    assert group.rebuildable({0}, parity - {(0, 0)}) == {0}
    empty = ParityGroup(Code(2, 1), CHUNK, (Member("", (0,), ()), member, member))
    assert empty.rebuildable({0}, ()) == {0}, "nothing to rebuild"
    assert empty.rebuildable({0, 1}, {(0, 0), (2, 0)}) == {0, 1}, "who gives nothing is not missed"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 5), st.randoms(use_true_random=False))
def test_each_byte_is_protected_once_and_blocks_are_alike(k: int, m: int, source: random.Random) -> None:
    group = random_group(source, k, m)
    code = group.code
    seen: Counter[tuple[int, str, int]] = Counter()
    for stripe in range(code.n):
        assert sorted((*code.holders(stripe), *code.givers(stripe))) == list(range(code.n))
        for column in range(k):
            end = 0
            for part in group.parts(stripe, column, range(group.parity_chunks(stripe))):
                assert part.at % CHUNK == 0 and part.at >= end, "one behind the other, from chunk to chunk"
                end = part.at + part.nbytes
                assert part.offset % CHUNK == 0
                for chunk in range(part.offset // CHUNK, -(-(part.offset + part.nbytes) // CHUNK)):
                    seen[part.rank, part.image, chunk] += 1
    wanted = {
        (rank, image, chunk)
        for member in group.members
        for rank, image, nbytes in member.images
        for chunk in range(-(-nbytes // CHUNK))
    }
    assert set(seen) == wanted and set(seen.values()) <= {1}
    for position in range(code.n):
        blocks = [len(group.block(position, stripe)) for stripe, _ in code.given(position)]
        assert len(blocks) == k and max(blocks) - min(blocks) <= 1
        assert sum(blocks) == group.members[position].chunks(CHUNK)
        assert len(code.held(position)) == m
        held = sum(group.parity_chunks(stripe) for stripe, _ in code.held(position)) * CHUNK
        chunks = [member.chunks(CHUNK) for member in group.members]
        assert held <= parity_bytes_max(code, chunks, CHUNK)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_spans_and_parts_are_inverse(k: int, m: int, source: random.Random) -> None:
    group = random_group(source, k, m)
    for member in group.members:
        for rank, image, nbytes in member.images:
            offset = source.randint(0, nbytes)
            length = source.randint(0, nbytes - offset)
            at = 0
            for span in group.spans(rank, image, offset, length):
                assert span.at == at
                chunk = span.offset // CHUNK
                parts = group.parts(span.stripe, span.column, range(chunk, chunk + 1))
                [part] = [part for part in parts if (part.rank, part.image) == (rank, image)]
                assert part.offset + span.offset % CHUNK == offset + at
                at += span.nbytes
            assert at == length


def test_an_unknown_image_is_told() -> None:
    group = ParityGroup(Code(1, 1), CHUNK, (Member("a", (0,), ((0, "x", 5),)), Member("b", (1,), ())))
    with pytest.raises(KeyError):
        group.spans(0, "y", 0, 1)
    with pytest.raises(KeyError):
        group.spans(7, "x", 0, 1)


def nodes(count: int, spares: int = 0) -> list[Node]:
    return [Node(f"n{at}", ranks=(at,)) for at in range(count)] + [Node("s", spare=True)] * spares


def test_groups_take_all_nodes() -> None:
    found = fit(nodes(14, spares=1), 4, 2)
    assert [len(group) for group in found.groups] == [7, 7] and found.warning is None
    assert found.codes == (Code(5, 2),) * 2
    assert sorted(at for group in found.groups for at in group) == list(range(14))
    assert fit(nodes(6), 4, 2).codes == (Code(4, 2),)


def test_fewer_nodes_than_a_group_are_warned_of_or_refused() -> None:
    few = fit(nodes(4), 4, 2)
    assert few.codes == (Code(2, 2),) and few.groups == ((0, 1, 2, 3),)
    assert few.warning is not None and "2/2" in few.warning and "2/4" in few.warning
    assert fit(nodes(3), 4, 2).codes == (Code(1, 2),)
    for count in (0, 1, 2):
        with pytest.raises(BadOption, match="more than 2 nodes") as caught:
            fit(nodes(count, spares=1), 4, 2)
        assert str(count) in str(caught.value.found)
