"""Chunk hashes and the roots that bind them."""

from __future__ import annotations

import dataclasses
import random

import pytest
from everstep.format import hashing
from everstep.format.vote import ImageRecord
from hypothesis import given
from hypothesis import strategies as st

DATA = random.Random(3).randbytes(10240)


def test_digests_are_the_canonical_ones() -> None:
    assert hashing.hexdigest(b"") == "99aa06d3014798d86001c324468d497f"
    assert hashing.digest(b"").hex() == hashing.hexdigest(b"")
    assert hashing.is_hash(hashing.hexdigest(b""))
    assert not hashing.is_hash("99AA06D3014798D86001C324468D497F")
    assert (
        not hashing.is_hash(None) and not hashing.is_hash("0" * 31) and not hashing.is_hash("0" * 32 + "\n")
    )


@given(st.binary(max_size=300), st.integers(1, 64))
def test_one_hash_for_each_chunk(data: bytes, chunk_bytes: int) -> None:
    chunks = hashing.chunk_hashes(memoryview(data), chunk_bytes)
    assert len(chunks) == 16 * hashing.chunk_count(len(data), chunk_bytes)
    for index in range(len(chunks) // 16):
        piece = data[index * chunk_bytes : (index + 1) * chunk_bytes]
        assert chunks[16 * index : 16 * index + 16] == hashing.digest(piece)


def test_a_flip_changes_the_hash_of_its_chunk_only() -> None:
    before = hashing.chunk_hashes(memoryview(DATA), 4096)
    for at in range(0, len(DATA), 97):
        flipped = bytearray(DATA)
        flipped[at] ^= 1
        after = hashing.chunk_hashes(memoryview(flipped), 4096)
        differ = [
            i for i in range(len(before) // 16) if before[16 * i : 16 * i + 16] != after[16 * i : 16 * i + 16]
        ]
        assert differ == [at // 4096]


def test_a_root_binds_size_and_chunks() -> None:
    chunks = hashing.chunk_hashes(memoryview(DATA), 4096)
    swapped = chunks[16:32] + chunks[:16] + chunks[32:]
    roots = {
        hashing.image_root(len(DATA), chunks),
        hashing.image_root(len(DATA) - 1, chunks),
        hashing.image_root(len(DATA), swapped),
        hashing.image_root(len(DATA), chunks[:-16]),
        hashing.digest(DATA),
    }
    assert len(roots) == 5


def record(name: str, nbytes: int, root: bytes) -> ImageRecord:
    return ImageRecord(name, nbytes, root, b"")


def test_the_rank_root_binds_names_sizes_roots_and_order() -> None:
    a, b = record("a", 1, b"A" * 16), record("b", 2, b"B" * 16)
    lists = [
        [a, b],
        [b, a],
        [a],
        [],
        [a, b, b],
        [dataclasses.replace(a, name="b"), dataclasses.replace(b, name="a")],
        [dataclasses.replace(a, nbytes=2), b],
        [dataclasses.replace(a, root=b"C" * 16), b],
        [record("ab", 1, b"A" * 16), record("", 2, b"B" * 16)],
    ]
    assert len({hashing.rank_root(records) for records in lists}) == len(lists)


def test_a_root_that_is_no_hash_is_a_mistake() -> None:
    with pytest.raises(AssertionError):
        hashing.rank_root([record("a", 1, b"short")])
