"""A chunk comes back bit for bit, is never longer than it was, and what is no payload of it is refused."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from everstep.codec.chunk import BLOCK, TABLE, decode_chunk, encode_chunk
from everstep.codec.constants import (
    BLOCK_BYTES,
    DIFFERENCE_PLANES,
    FLOAT_CLASSES,
    FLOAT_DIFFERENCE,
    GROUPED,
    IN_ORDER,
    PLAIN,
    PLANES,
    SPARSE,
    XOR_PLANES,
    ZSTD,
)
from everstep.codec.planes import split
from everstep.codec.scratch import SCRATCH_BYTES
from everstep.codec.segments import Kind, Segment
from everstep.codec.streams import pack
from everstep.errors import Damaged, UsageError

KINDS: tuple[tuple[int, Kind], ...] = (
    (1, "bytes"),
    *((item, kind) for item in (1, 2, 4, 8) for kind in ("float", "int")),  # type: ignore[misc]
)
FLOATS = {2: np.float16, 4: np.float32, 8: np.float64}
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 5e-324, 1e-45, -1e-45, 1.0, -1.0]


def through(new: bytes, base: bytes | None, segments: list[Segment]) -> tuple[int, bytes]:
    """Encoding and payload, proved to give ``new`` again, and not to be longer."""
    other = None if base is None else memoryview(base)
    encoding, parts = encode_chunk(memoryview(new), other, segments)
    payload = b"".join(parts)
    assert len(payload) <= len(new)
    assert (encoding, payload) == (encoding, b"".join(encode_chunk(memoryview(new), other, segments)[1]))
    out = memoryview(bytearray(b"\xa5" * len(new)))
    decode_chunk(encoding, memoryview(payload), other if encoding > PLANES else None, out)
    assert out == new
    return encoding, payload


def noise(seed: int, nbytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def weights(seed: int, count: int, dtype: type = np.float32, scale: float = 0.02) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(count) * scale).astype(dtype)


def bfloat(values: np.ndarray) -> bytes:
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def bases(new: bytes, seed: int) -> Iterator[bytes | None]:
    """No base, the same, other bytes, few changed bytes, and all of them changed a little."""
    rng = np.random.default_rng(seed)
    yield None
    yield new
    yield noise(seed, len(new))
    few = np.frombuffer(new, np.uint8).copy()
    few[rng.random(len(new)) < 0.01] ^= 1
    yield few.tobytes()
    yield (np.frombuffer(new, np.uint8) + rng.integers(0, 3, len(new), np.uint8)).tobytes()


@pytest.mark.parametrize(("item", "kind"), KINDS)
@pytest.mark.parametrize("nbytes", [0, 1, 3, 7, 8, 9, 63, 1000, 4096, 70_001])
def test_every_length_of_every_item_comes_back(item: int, kind: Kind, nbytes: int) -> None:
    for name, new in {
        "noise": noise(nbytes, nbytes),
        "zeros": bytes(nbytes),
        "equal": b"\x7f" * nbytes,
        "a pattern": (bytes(range(256)) * (nbytes // 256 + 1))[:nbytes],
        "numbers": weights(1, nbytes // 4 + 1).tobytes()[:nbytes],
    }.items():
        for base in bases(new, nbytes + item):
            encoding, payload = through(new, base, [Segment(nbytes, item, kind)])
            if name in ("zeros", "equal") and nbytes >= 1000:
                assert len(payload) < 100, (name, encoding)


@pytest.mark.parametrize("item", [2, 4, 8])
def test_every_float_and_every_jump_between_two_comes_back(item: int) -> None:
    special = np.array(SPECIAL, FLOATS[item])
    values = np.concatenate(
        [special, -np.array([np.nan], FLOATS[item]), np.finfo(FLOATS[item]).max * special[9:]]
    )
    new = np.repeat(values, values.size)
    base = np.tile(values, values.size)
    repeated = 40
    for kind in ("float", "int"):
        through(
            np.tile(new, repeated).tobytes(),
            np.tile(base, repeated).tobytes(),
            [Segment(new.nbytes * repeated, item, kind)],  # type: ignore[arg-type]
        )


def test_every_pair_of_bits_of_one_and_two_bytes_comes_back() -> None:
    for item in (1, 2):
        bits = 8 * min(item, 2)
        words = np.arange(1 << bits, dtype=f"<u{item}")
        for shift in (1, 2, 1 << (bits - 1), (1 << bits) - 1):
            base = (words + shift).astype(f"<u{item}")
            for kind in ("float", "int"):
                segment = Segment(words.nbytes, item, kind)  # type: ignore[arg-type]
                through(words.tobytes(), base.tobytes(), [segment])


def test_random_chunks_of_many_segments_come_back() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(60):
        segments, pieces = [], []
        for _ in range(rng.randrange(1, 8)):
            item, kind = rng.choice(KINDS)
            nbytes = rng.choice([1, 5, 64, 3000, 20_000]) + rng.randrange(9)
            source = rng.choice(
                [noise(rng.randrange(1000), nbytes), weights(rng.randrange(1000), nbytes).tobytes()]
            )
            segments.append(Segment(nbytes, item, kind))
            pieces.append(source[:nbytes])
        new = b"".join(pieces)
        for base in bases(new, rng.randrange(1000)):
            through(new, base, segments)


def test_a_chunk_of_several_blocks_whose_ends_cut_an_item() -> None:
    values = weights(3, 2 * BLOCK_BYTES // 4 + 10)
    new, base = (values * np.float32(1.0001)).tobytes()[:-3], values.tobytes()[:-3]
    segments = [Segment(3, 1, "bytes"), Segment(len(new) - 3, 4, "float")]
    encoding, payload = through(b"abc" + new[:-3], b"abd" + base[:-3], segments)
    assert encoding == DIFFERENCE_PLANES
    assert len(payload) < 0.75 * len(new)


def test_chunks_larger_than_what_a_thread_keeps() -> None:
    """No block's parts are overwritten by a later one, wherever the thread's memory ends."""
    count = 2 * SCRATCH_BYTES // 4
    values = np.tile(weights(24, count // 16), 16)
    near = (values * np.float32(1.0001)).tobytes()
    few = values.copy()
    few.reshape(-1, 64)[::7] *= np.float32(1.01)
    for new in (near, few.tobytes()):
        through(new, values.tobytes(), [Segment(values.nbytes, 4, "float")])


def test_views_of_any_alignment_are_read_and_written() -> None:
    values = weights(4, 5000)
    new, base = values.tobytes(), (values * np.float32(1.001)).tobytes()
    segment = [Segment(len(new), 4, "float")]
    encoding, parts = encode_chunk(memoryview(b"?" + new)[1:], memoryview(b"???" + base)[3:], segment)
    payload = b"".join(parts)
    whole = bytearray(len(new) + 2)
    decode_chunk(
        encoding, memoryview(b"?" + payload)[1:], memoryview(b"?" + base)[1:], memoryview(whole)[1:-1]
    )
    assert whole == b"\0" + new + b"\0"


# ------------------------------------------------------------------------------------------------- what it saves


def test_each_kind_of_change_gets_its_encoding() -> None:
    values = weights(5, 1 << 18)
    size, base = values.nbytes, values.tobytes()
    near = (values + weights(6, values.size, scale=1e-6)).tobytes()
    floats = [Segment(size, 4, "float")]
    cases = {
        "nothing to gain": (noise(1, size), noise(2, size), floats, PLAIN, 1.0),
        "no base": (base, None, floats, PLANES, 0.87),
        "a base that tells nothing": (base, noise(2, size), floats, PLANES, 0.87),
        "a step": (near, base, floats, DIFFERENCE_PLANES, 0.62),
        "text": (b"all work and no play " * 5000, None, [Segment(105_000, 1, "bytes")], ZSTD, 0.01),
        "few of the bits": (
            (values.view(np.uint32) ^ (1 << np.arange(values.size) % 8 * 2).astype(np.uint32)).tobytes(),
            base,
            [Segment(size, 4, "int")],
            XOR_PLANES,
            0.5,
        ),
    }
    for name, (new, other, segments, expected, most) in cases.items():
        encoding, payload = through(new, other, segments)
        assert encoding == expected, name
        assert len(payload) <= most * len(new), (name, len(payload) / len(new))


def test_counters_are_taken_as_whole_numbers() -> None:
    base = np.random.default_rng(7).integers(-(2**62), 2**62, 1 << 14)
    encoding, payload = through((base + 250).tobytes(), base.tobytes(), [Segment(base.nbytes, 8, "int")])
    assert encoding == DIFFERENCE_PLANES
    assert len(payload) < 100


def test_changed_rows_of_a_table_cost_little_more_than_themselves() -> None:
    table = weights(8, 1 << 18).reshape(-1, 16)
    new = table.copy()
    rows = np.random.default_rng(9).choice(len(table), len(table) // 25, replace=False)
    new[rows] = weights(10, rows.size * 16).reshape(-1, 16)
    _, payload = through(new.tobytes(), table.tobytes(), [Segment(table.nbytes, 4, "float")])
    assert len(payload) < 1.1 * new[rows].nbytes


def test_bfloat16_that_hardly_moved() -> None:
    """A step of an optimizer is as large for small weights as for large ones."""
    values = weights(11, 1 << 18)
    moved = values + weights(12, values.size, scale=1e-5)
    _, payload = through(bfloat(moved), bfloat(values), [Segment(values.size * 2, 2, "float")])
    assert len(payload) < 0.08 * values.size * 2, len(payload) / values.size / 2


def test_a_difference_costs_its_entropy() -> None:
    """Steps of one size, of numbers of many sizes: what is known of the base is not paid for."""
    values = weights(17, 1 << 18)
    step = 1e-4
    moved = (values + np.random.default_rng(18).uniform(-step, step, values.size)).astype(np.float32)
    ulps = 2 * step / np.spacing(np.abs(values).astype(np.float32))
    entropy = np.log2(np.maximum(ulps, 1)).mean() / 32
    _, payload = through(moved.tobytes(), values.tobytes(), [Segment(values.nbytes, 4, "float")])
    assert entropy * 0.99 < len(payload) / values.nbytes < entropy * 1.03


def test_where_numbers_changed_is_no_part_of_what_they_are() -> None:
    """Rows of a table that moved a little: the others cost next to nothing, and these what they would cost alone."""
    table = weights(19, 1 << 18).reshape(-1, 32)
    new = table.copy()
    rows = np.sort(np.random.default_rng(20).choice(len(table), len(table) // 8, replace=False))
    new[rows] += weights(21, rows.size * 32, scale=1e-5).reshape(-1, 32)
    _, payload = through(new.tobytes(), table.tobytes(), [Segment(table.nbytes, 4, "float")])
    _, alone = through(new[rows].tobytes(), table[rows].tobytes(), [Segment(new[rows].nbytes, 4, "float")])
    assert len(payload) < 1.03 * len(alone) + len(table) / 8


# ---------------------------------------------------------------------------------------------- what is refused


def samples() -> dict[str, tuple[int, bytes, bytes, bytes]]:
    """By name: encoding, payload, base and chunk, of each encoding and every way to store a plane."""
    values = weights(13, 700)
    base = values.tobytes()
    sparse = values.copy()
    sparse[::9] *= np.float32(1.01)
    halves = weights(15, 1100)
    wide = weights(22, 4096, np.float64)
    rows = wide.copy()
    rows[512:2048] += weights(23, 1536, np.float64, 1e-9)
    chunks = {
        "text": (b"to be or not to be, " * 140, base, [Segment(2800, 1, "bytes")]),
        "planes": (base, noise(1, 2800), [Segment(2800, 4, "float")]),
        "near": ((values * np.float32(1.0002)).tobytes(), base, [Segment(2800, 4, "float")]),
        "sparse": (sparse.tobytes(), base, [Segment(2800, 4, "float")]),
        "classes": (
            bfloat(halves + weights(16, 1100, scale=1e-4)),
            bfloat(halves),
            [Segment(2200, 2, "float")],
        ),
        "rows": (rows.tobytes(), wide.tobytes(), [Segment(wide.nbytes, 8, "float")]),
        "flipped": ((values.view(np.uint32) ^ 0x10101).tobytes(), base, [Segment(2800, 4, "float")]),
        "mixed": (
            base[:1400] + (values[350:] * np.float32(1.0002)).tobytes(),
            base,
            [Segment(1400, 4, "float"), Segment(700, 2, "int"), Segment(700, 8, "int")],
        ),
    }
    found = {
        name: (*through(new, other, segments), other, new) for name, (new, other, segments) in chunks.items()
    }
    new, other = bfloat(halves * np.float32(1.01)), bfloat(halves)
    return {**found, "grouped": (DIFFERENCE_PLANES, grouped(new, other), other, new)}


def grouped(new: bytes, base: bytes) -> bytes:
    """The payload of a block as it was written up to format version 4: items in the order of the base's exponents."""
    views = [np.frombuffer(data, np.uint8) for data in (new, base)]
    table, parts = BLOCK.pack(len(new), 2, FLOAT_DIFFERENCE, GROUPED), list[bytes]()
    for plane in split(*views, FLOAT_DIFFERENCE, 2, True):
        entry, stored = pack(plane, noise=False, sparse=False, text=False)
        table += entry
        parts += [bytes(part) for part in stored]
    return TABLE.pack(len(table)) + table + b"".join(parts)


def attempt(encoding: int, payload: bytes, base: bytes, nbytes: int) -> bytes | None:
    """What it decodes to; None if it is refused."""
    out = bytearray(nbytes)
    try:
        decode_chunk(encoding, memoryview(payload), memoryview(base), memoryview(out))
    except Damaged:
        return None
    return bytes(out)


def test_the_samples_are_of_every_encoding() -> None:
    found = {name: sample[0] for name, sample in samples().items()}
    assert set(found.values()) == {ZSTD, PLANES, XOR_PLANES, DIFFERENCE_PLANES}, found
    blocks = {name: BLOCK.unpack_from(sample[1], TABLE.size) for name, sample in samples().items()}
    assert blocks["grouped"][2:] == (FLOAT_DIFFERENCE, GROUPED)
    assert blocks["classes"][2:] == (FLOAT_CLASSES, IN_ORDER)
    assert blocks["rows"][2:] == (FLOAT_CLASSES, SPARSE)
    _, payload, base, new = samples()["grouped"]
    assert attempt(DIFFERENCE_PLANES, payload, base, len(new)) == new


def test_every_truncation_and_growth_is_found() -> None:
    for name, (encoding, payload, base, new) in samples().items():
        for at in range(len(payload)):
            assert attempt(encoding, payload[:at], base, len(new)) is None, (name, at)
        for tail in (b"\0", payload[-1:], payload):
            assert attempt(encoding, payload + tail, base, len(new)) is None, (name, tail)
        for nbytes in (0, 1, len(new) - 4, len(new) + 4):
            assert attempt(encoding, payload, base[:1] * nbytes, nbytes) is None, (name, nbytes)


def test_no_flipped_byte_does_harm() -> None:
    """It gives Damaged, or other bytes, which the chunk's hash finds: never anything else."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    refused = tried = 0
    for encoding, payload, base, new in samples().values():
        for at in range(len(payload)):
            for mask in (0x80, rng.randrange(1, 256)):
                damaged = payload[:at] + bytes([payload[at] ^ mask]) + payload[at + 1 :]
                refused += attempt(encoding, damaged, base, len(new)) is None
                tried += 1
    assert 100 < refused < tried


def test_wild_tables_get_little_memory() -> None:
    """Every byte of the table, or of a frame's header, as every power of two that it is not."""
    tracemalloc.start()
    try:
        for encoding, payload, base, new in samples().values():
            for at in range(min(len(payload), 80)):
                for bit in range(8):
                    damaged = payload[:at] + bytes([payload[at] ^ 1 << bit]) + payload[at + 1 :]
                    attempt(encoding, damaged, base, len(new))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_wild_payloads_are_refused() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(3000):
        encoding, payload, base, new = rng.choice(list(samples_once().values()))
        data = bytearray(payload)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(min(len(data), rng.choice([8, 60, len(data)])))
            data[at : at + rng.choice([0, 1, 4])] = rng.choice(
                [b"\xff\xff\xff\xff", b"\0\0\0\0", rng.randbytes(4), len(new).to_bytes(4, "little")]
            )
        attempt(rng.choice([encoding, rng.randrange(256)]), bytes(data), base, len(new))


_SAMPLES: dict[str, tuple[int, bytes, bytes, bytes]] = {}


def samples_once() -> dict[str, tuple[int, bytes, bytes, bytes]]:
    if not _SAMPLES:
        _SAMPLES.update(samples())
    return _SAMPLES


def test_a_transform_that_its_encoding_does_not_announce_is_refused() -> None:
    """Who reads decides by the encoding whether to fetch the base."""
    encoding, payload, base, new = samples()["near"]
    assert encoding == DIFFERENCE_PLANES
    assert attempt(PLANES, payload, base, len(new)) is None
    assert attempt(XOR_PLANES, payload, base, len(new)) is None
    encoding, payload, base, new = samples()["planes"]
    assert encoding == PLANES
    assert attempt(DIFFERENCE_PLANES, payload, base, len(new)) is None


def test_wrong_calls_are_told_as_such() -> None:
    new = weights(14, 100).tobytes()
    with pytest.raises(UsageError, match="399 bytes"):
        encode_chunk(memoryview(new), None, [Segment(399, 1, "bytes")])
    with pytest.raises(UsageError, match="a base of 3"):
        encode_chunk(memoryview(new), memoryview(b"abc"), [Segment(400, 4, "float")])
    encoding, payload, _, chunk = samples()["near"]
    for base in (None, memoryview(b"abc")):
        with pytest.raises(UsageError, match="base"):
            decode_chunk(encoding, memoryview(payload), base, memoryview(bytearray(len(chunk))))
