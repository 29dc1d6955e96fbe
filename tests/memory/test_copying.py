"""Copies past the caches: every byte, and no other."""

from __future__ import annotations

import ctypes
import itertools
import random
from array import array

import pytest
import xxhash
from everstep.format.hashing import chunk_hashes
from everstep.memory import copying
from everstep.plan.reads import Read

SIZES = [0, 1, 63, 64, 4095, 4096, 4097, 70_001]
CHUNK = 4096
compiled = pytest.mark.skipif(not copying.COMPILED, reason="there was no compiler")


@pytest.fixture(params=["compiled", "plain"])
def copy_with(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        monkeypatch.setattr(copying, "_copying", None)
    elif not copying.COMPILED:
        pytest.skip("there was no compiler")


@pytest.mark.usefixtures("copy_with")
@pytest.mark.parametrize("nbytes", SIZES)
def test_every_byte_and_no_other(nbytes: int) -> None:
    source = random.Random(nbytes).randbytes(nbytes + 8)
    for at in (0, 1, 15, 16, 63):
        target = bytearray(b"\xa5" * (nbytes + 128))
        copying.copy(memoryview(target)[at : at + nbytes], memoryview(source)[3 : 3 + nbytes])
        assert target == b"\xa5" * at + source[3 : 3 + nbytes] + b"\xa5" * (128 - at)


@pytest.mark.usefixtures("copy_with")
@pytest.mark.parametrize("nbytes", [1, 4096, 8192])
def test_another_size_is_refused(nbytes: int) -> None:
    target = bytearray(5000)
    with pytest.raises(ValueError, match=f"{nbytes} bytes into 5000"):
        copying.copy(memoryview(target), memoryview(b"x" * nbytes))
    assert not any(target)


@compiled
def test_many_at_once() -> None:
    sources = [bytes([n % 251]) * n for n in SIZES]
    targets = [ctypes.create_string_buffer(n + 1) for n in SIZES]
    froms = array("Q", [ctypes.cast(source, ctypes.c_void_p).value or 0 for source in sources])
    sizes = array("Q", SIZES)
    intos = array("Q", map(ctypes.addressof, targets))
    begin = 0
    while begin < sum(SIZES):  # in ranges that end anywhere
        end = begin + 1 + begin % 9973
        copying.copy_range(intos, froms, sizes, begin, end)
        begin = end
    assert [target.raw for target in targets] == [source + b"\0" for source in sources]


@compiled
def test_a_range_touches_nothing_else() -> None:
    sources = [bytes([65 + n]) * 10 for n in range(5)]
    targets = [ctypes.create_string_buffer(b"." * 10, 10) for _ in sources]
    froms = array("Q", [ctypes.cast(source, ctypes.c_void_p).value or 0 for source in sources])
    copying.copy_range(array("Q", map(ctypes.addressof, targets)), froms, array("Q", [10] * 5), 13, 32)
    assert b"".join(target.raw for target in targets) == b"." * 13 + b"B" * 7 + b"C" * 10 + b"DD" + b"." * 18


@compiled
def test_what_is_no_address_is_refused() -> None:
    one = array("Q", [1])
    with pytest.raises(TypeError):
        copying.copy_range(["here"], one, one, 0, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="as many targets"):
        copying.copy_range(one, one, array("Q", [1, 2]), 0, 1)


@compiled
@pytest.mark.parametrize("nbytes", [241, 255, 256, 1023, 1024, 1025, 1088, 2047, 2048, 2049, 70_001, 1 << 20])
def test_the_hash_is_the_one_of_the_format(nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    assert copying._copying.digest(data) == xxhash.xxh3_128_digest(data)
    assert (
        copying._copying.digest(memoryview(data)[1:]) == xxhash.xxh3_128_digest(data[1:])
        if nbytes > 241
        else True
    )


@compiled
def test_the_hash_of_few_bytes_is_not_offered() -> None:
    with pytest.raises(ValueError, match="240 bytes"):
        copying._copying.digest(bytes(240))


@compiled
@pytest.mark.parametrize("chunk", [CHUNK, 7 * CHUNK + 100])  # rows of a larger one pass by the caches
@pytest.mark.parametrize("seed", range(8))
def test_what_is_proved_is_copied_and_nothing_of_a_bad_chunk(seed: int, chunk: int) -> None:
    random_ = random.Random(seed)
    print(f"seed {seed}")
    offset, nbytes = (
        random_.randrange(3) * chunk,
        random_.choice([chunk, 3 * chunk + 7, 5 * chunk + 1000, 9 * chunk]),
    )
    piece = random_.randbytes(nbytes)
    expected = chunk_hashes(memoryview(piece), chunk)
    cuts = sorted({0, nbytes, *(random_.randrange(nbytes) for _ in range(random_.randrange(40)))})
    reads, targets, truth = [], {}, {}
    for index, (begin, end) in enumerate(itertools.pairwise(cuts)):
        if random_.random() < 0.2:
            continue  # bytes that nobody wants
        to = random_.randrange(5)
        reads.append(Read(index, 0, "model", offset + begin, end - begin, to))
        targets[index] = memoryview(bytearray(b"\xa5" * (to + end - begin + 3)))
        truth[index] = begin, end, to
    count = len(expected) // 16
    bad = set(random_.sample(range(count), random_.randrange(min(3, count))))
    damaged = bytearray(piece)
    for number in bad:
        damaged[number * chunk] ^= 1
    found = copying.prove_and_copy(memoryview(damaged), offset, chunk, expected, reads, targets)
    assert found == chunk_hashes(memoryview(damaged), chunk)
    for index, (begin, end, to) in truth.items():
        arrived = [piece[at] if at // chunk not in bad else 0xA5 for at in range(begin, end)]
        assert targets[index].tobytes() == b"\xa5" * to + bytes(arrived) + b"\xa5" * 3


@compiled
def test_what_only_python_can_do_is_left_to_it_untouched() -> None:
    data, room = memoryview(bytes(2 * CHUNK)), {0: memoryview(bytearray(b"\1" * 2 * CHUNK))}
    expected = chunk_hashes(data, CHUNK)
    strided = [Read(0, 0, "model", 0, 8, 0, 4, 16, 8)]
    behind = [Read(0, 0, "model", 64, 8, 0), Read(0, 0, "model", 0, 8, 8)]
    for reads in (strided, behind):
        assert copying.prove_and_copy(data, 0, CHUNK, expected, reads, room) is None
    plain = [Read(0, 0, "model", 0, 8, 0)]
    assert copying.prove_and_copy(data, 0, CHUNK, expected[16:], plain, room) is None, "a hash is missing"
    assert copying.prove_and_copy(data[:480], 0, 240, chunk_hashes(data[:480], 240), plain, room) is None
    assert set(room[0]) == {1}


@compiled
@pytest.mark.parametrize("read", [(2 * CHUNK - 4, 8, 0), (-8, 8, 0), (0, 8, 93), (0, 8, -1), (0, -1, 0)])
def test_reads_outside_are_refused(read: tuple[int, int, int]) -> None:
    data, target = memoryview(bytes(2 * CHUNK)), memoryview(bytearray(b"\1" * 100))
    with pytest.raises(ValueError, match="outside"):
        copying.prove_and_copy(
            data, 0, CHUNK, chunk_hashes(data, CHUNK), [Read(0, 0, "model", *read)], {0: target}
        )
    assert set(target) == {1}
