"""Who reads what several ranks need: against sets of chunks."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

from everstep.plan.reads import Range, Read
from everstep.plan.shares import Clipper, ImageKey, common_ranges, deal, mostly_needed, without
from hypothesis import given, settings
from hypothesis import strategies as st

CHUNK = 64


def chunks_of(ranges: list[Range]) -> set[int]:
    return {chunk for begin, end in ranges for chunk in range(begin // CHUNK, -(-end // CHUNK))}


def some_ranges(rng: random.Random, nbytes: int) -> list[Range]:
    """Maximal ranges of random chunks of an image; the last chunk may be short."""
    count = -(-nbytes // CHUNK)
    chosen = sorted(rng.sample(range(count), rng.randint(0, count)))
    ranges: list[Range] = []
    for chunk in chosen:
        begin, end = chunk * CHUNK, min((chunk + 1) * CHUNK, nbytes)
        if ranges and ranges[-1][1] == begin:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((begin, end))
    return ranges


@given(st.randoms(use_true_random=False), st.integers(1, 5), st.integers(1, 20 * CHUNK))
@settings(max_examples=200, deadline=None)
def test_every_common_chunk_is_dealt_once(rng: random.Random, readers: int, round_bytes: int) -> None:
    images = [ImageKey(rank, "i", rng.randint(1, 900), "root") for rank in range(rng.randint(1, 4))]
    needs = [{image: some_ranges(rng, image.nbytes) for image in images} for _ in range(readers)]
    common = common_ranges(needs)
    for image in images:
        counts = Counter(chunk for some in needs for chunk in chunks_of(some[image]))
        twice = {chunk for chunk, count in counts.items() if count > 1}
        assert chunks_of(common.get(image, [])) == twice
        assert all(a[1] < b[0] for a, b in pairwise(common.get(image, []))), "maximal, ascending"
        for some in needs:
            assert chunks_of(without(some[image], common.get(image, []))) == chunks_of(some[image]) - twice
    rounds = deal(common, readers, CHUNK, round_bytes)
    dealt = [
        (share.image, chunk) for one in rounds for share in one for chunk in sorted(chunks_of([share[2:4]]))
    ]
    assert dealt == [(image, chunk) for image in common for chunk in sorted(chunks_of(common[image]))]
    for one in rounds:
        total = sum(share.end - share.begin for share in one)
        assert 0 < total <= max(round_bytes, CHUNK)
        at = 0
        for share in one:  # in memory as in the image
            assert share.at == at and share.begin % CHUNK == 0 and 0 <= share.reader < readers
            at += share.end - share.begin
        for reader in range(readers):
            own = sum(share.end - share.begin for share in one if share.reader == reader)
            assert abs(own - total / readers) < 2 * CHUNK
    for one in rounds[:-1]:
        assert sum(share.end - share.begin for share in one) > max(round_bytes, CHUNK) - 2 * CHUNK, "full"


@given(st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_reads_are_clipped_to_ascending_ranges(rng: random.Random) -> None:
    reads = []
    for index in range(rng.randint(0, 5)):
        nbytes, count = rng.randint(1, 50), rng.randint(1, 5)
        strides = (nbytes + rng.randint(0, 99), nbytes) if count > 1 else (0, 0)
        reads.append(Read(index, 0, "i", rng.randint(0, 500), nbytes, 0, count, *strides))

    def places(some: list[Read]) -> Counter[tuple[int, int, int]]:
        return Counter(
            (r.entry_index, r.image_offset + i * r.image_stride + b, r.dest_offset + i * r.dest_stride + b)
            for r in some
            for i in range(r.runs)
            for b in range(r.nbytes)
        )

    ranges = some_ranges(rng, 900)
    clipper = Clipper(reads)
    taken = [part for begin, end in ranges for part in clipper.take(begin, end)]
    inside = {at for begin, end in ranges for at in range(begin, end)}
    assert places(taken) == Counter({k: n for k, n in places(reads).items() if k[1] in inside})


def test_shares_that_are_mostly_needed() -> None:
    """More than half of a rank's images, by what the readers need together: what two of them need counts once."""
    sizes = {0: 100, 1: 100, 2: 100}
    first = {ImageKey(0, "a", 60, ""): [(0, 40)], ImageKey(1, "a", 100, ""): [(0, 50)]}
    second = {ImageKey(0, "b", 40, ""): [(0, 11)], ImageKey(1, "a", 100, ""): [(10, 50)]}
    third = {ImageKey(1, "a", 100, ""): [(99, 100)], ImageKey(2, "a", 100, ""): [(0, 100)]}
    assert mostly_needed([first], sizes) == []
    assert mostly_needed([first, second], sizes) == [0]
    assert mostly_needed([first, second, third], sizes) == [0, 1, 2]
    assert mostly_needed([{}], sizes) == []
