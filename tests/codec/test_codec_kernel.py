"""The loops in C and those in numpy are the same functions."""

from __future__ import annotations

import itertools
import random
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from everstep.codec import classes, planes, probe
from everstep.codec.chunk import decode_chunk, encode_chunk
from everstep.codec.constants import (
    CONTEXTS_MAX,
    FLOAT_CLASSES,
    FLOAT_DIFFERENCE,
    INT_CLASSES,
    INT_DIFFERENCE,
    NONE,
    SCALE_BITS,
    XOR,
)
from everstep.codec.scratch import reuse
from everstep.codec.segments import Segment

KERNEL = planes._kernel
COUNTS = (0, 1, 7, 8, 63, 64, 65, 2047, 2048, 2049, 10_000)
needs_kernel = pytest.mark.skipif(KERNEL is None, reason="compiled without")


def test_it_is_there_where_it_could_be_compiled() -> None:
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.is_file() or shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]) is None:
        pytest.skip("no compiler, or no headers of Python")
    assert KERNEL is not None, "install everstep again (make install): its loops in C are missing"


def both(monkeypatch: pytest.MonkeyPatch, call: object) -> tuple[object, object]:
    """What ``call()`` gives with the kernel, and without."""
    assert callable(call)
    monkeypatch.setattr(planes, "_kernel", KERNEL)
    fast = call()
    monkeypatch.setattr(planes, "_kernel", None)
    return fast, call()


@needs_kernel
@pytest.mark.parametrize("item", [1, 2, 4, 8])
@pytest.mark.parametrize("transform", [NONE, XOR, FLOAT_DIFFERENCE, INT_DIFFERENCE])
def test_splitting_and_joining(monkeypatch: pytest.MonkeyPatch, item: int, transform: int) -> None:
    rng = np.random.default_rng(item)
    for count, grouped in itertools.product(COUNTS, (False, True)[: 1 + (transform != NONE)]):
        new, base = rng.integers(0, 256, (2, count * item), np.uint8)
        base[: count // 2] = new[: count // 2]
        fast, plain = both(
            monkeypatch,
            lambda new=new, base=base, grouped=grouped: planes.split(new, base, transform, item, grouped),
        )
        np.testing.assert_array_equal(fast, plain)
        parts = [*np.asarray(plain)]
        for equal in (False, True):
            if equal:
                parts[-1] = 0x81

            def joined(
                parts: Any = parts, base: Any = base, size: int = new.size, grouped: bool = grouped
            ) -> Any:
                out = np.empty(size, np.uint8)
                planes.join(parts, base, transform, item, grouped, out)
                return out

            fast, plain = both(monkeypatch, joined)
            np.testing.assert_array_equal(fast, plain)
            if not equal:
                np.testing.assert_array_equal(fast, new)


@needs_kernel
@pytest.mark.parametrize("share", [0, 0.01, 0.3, 1])
def test_thinning_filling_and_weighing(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    rng = np.random.default_rng(5)
    for count in COUNTS[1:]:
        plane = np.where(rng.random(count) < share, rng.integers(1, 256, count), 0).astype(np.uint8)
        fast, slow = both(monkeypatch, lambda plane=plane: planes.thin(plane))
        for one, other in zip(fast, slow, strict=True):  # type: ignore[call-overload]
            np.testing.assert_array_equal(one, other)
        map_, values = slow  # type: ignore[misc]
        for filled in both(monkeypatch, lambda m=map_, v=values, n=count: planes.fill(m, v, n)):
            np.testing.assert_array_equal(filled, plane)
        for wrong in (np.append(values, np.uint8(1)), values[:-1] if len(values) else plane):
            found = both(monkeypatch, lambda m=map_, v=wrong, n=count: planes.fill(m, v, n))
            assert found == (None, None)
        if count % 8:
            beyond = map_.copy()
            beyond[-1] |= 0x80  # behind the plane's end, so it stands for nothing
            for filled in both(monkeypatch, lambda m=beyond, v=values, n=count: planes.fill(m, v, n)):
                np.testing.assert_array_equal(filled, plane)
        weights = np.arange(count + 1, dtype=np.int64) ** 2
        fast, slow = both(monkeypatch, lambda p=plane, w=weights: planes.weigh(p.reshape(1, -1), w))
        assert fast == slow


@needs_kernel
@pytest.mark.parametrize("item", [1, 2, 4, 8])
@pytest.mark.parametrize("transform", [FLOAT_CLASSES, INT_CLASSES])
def test_classes(monkeypatch: pytest.MonkeyPatch, item: int, transform: int) -> None:
    """Differences of every size, of numbers with every exponent, in whole rows of lanes and less."""
    rng = np.random.default_rng(item)
    for count in (*COUNTS[1:], 100_003):
        base = rng.integers(0, 256, count * item, np.uint8)
        words = base.view(f"<u{item}") + (
            rng.integers(0, 1 << 63, count) >> rng.integers(0, 64, count)
        ).astype(f"<u{item}")
        new = np.where(rng.random(count) < 0.3, base.view(f"<u{item}"), words).view(np.uint8)
        low, contexts = int(rng.integers(256)), int(rng.integers(1, CONTEXTS_MAX + 1))
        setting = classes.Setting(transform, item, classes.SHIFTS[item], low, contexts)
        fast, plain = both(monkeypatch, lambda n=new, b=base, s=setting: coded(n, b, s))
        assert fast == plain
        most, weights, words, bits = plain  # type: ignore[misc]
        table = np.zeros((contexts, 256), np.uint8)
        table[:, : most + 1] = np.frombuffer(weights, np.uint8).reshape(contexts, most + 1)
        frequencies = classes.frequencies_of(table)
        stream, bits = np.frombuffer(words, np.uint8), np.frombuffer(bits, np.uint8)
        for damage in (None, 3, stream.size - 1):  # the low bytes of a state may say another class, too
            given = stream.copy()
            if damage is not None:
                given[damage] ^= 1
            told = bits, frequencies, base, setting, new.size
            found = both(monkeypatch, lambda given=given, told=told: decoded(given, *told))
            for whole, out in found:  # type: ignore[misc]
                assert whole == (damage is None)
                assert damage is not None or (out == new).all()


def coded(new: Any, base: Any, setting: Any) -> tuple[Any, ...]:
    """All that becomes of a block."""
    reuse()
    most, *parts = classes.code(new, base, setting)
    return most, *(part.tobytes() for part in parts)


def decoded(
    stream: Any, bits: Any, frequencies: Any, base: Any, setting: Any, nbytes: int
) -> tuple[bool, Any]:
    out = np.empty(nbytes, np.uint8)
    return classes.declassify(stream, bits, frequencies, base, setting, out), out


@needs_kernel
@pytest.mark.parametrize("item", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [100, 5008, 40_003, 600_001])
def test_bits_that_end_early_or_late(monkeypatch: pytest.MonkeyPatch, item: int, count: int) -> None:
    """Numbers near the end of the bits are read, and what lies behind it is none of them."""
    rng = np.random.default_rng(count)
    base = rng.integers(0, 256, count * item, np.uint8)
    new = (base.view(f"<u{item}") + rng.integers(0, 1 << (5 * item), count).astype(f"<u{item}")).view(
        np.uint8
    )
    setting = classes.Setting(INT_CLASSES, item, 0, 0, 1)
    most, weights, words, bits = coded(new, base, setting)
    table = np.zeros((1, 256), np.uint8)
    table[0, : most + 1] = np.frombuffer(weights, np.uint8)
    told = classes.frequencies_of(table), base, setting, new.size
    stream = np.frombuffer(words, np.uint8)
    whole, out = decoded(stream, np.frombuffer(bits, np.uint8), *told)
    assert whole and (out == new).all()
    for given in (b"", bits[:-70], bits[:-1], bits + b"\0"):
        some = np.frombuffer(given, np.uint8)
        for found, _ in both(monkeypatch, lambda some=some: decoded(stream, some, *told)):  # type: ignore[misc]
            assert not found


@needs_kernel
@pytest.mark.parametrize("count", [3, 20_003, 40_003, 600_001])
def test_contexts_without_frequencies(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Nobody writes numbers of such; read, they have class 0 and take all of a state's slots."""
    rng = np.random.default_rng(count)
    lanes = classes.lanes_of(count)
    states, left = np.full(lanes, classes.STATE_LOW, np.uint32), []
    for row in range((count - 1) // lanes * lanes, -1, -lanes):
        state = states[: min(lanes, count - row)]
        full = state >> 19 > 0
        left.append(state[full].astype(np.uint16))
        state[full] >>= 16
        state[...] = state << SCALE_BITS | rng.integers(0, 1 << SCALE_BITS, state.size).astype(np.uint32)
    stream = np.concatenate([states.view(np.uint16), *left[::-1]]).view(np.uint8)
    base = rng.integers(0, 256, count * 4, np.uint8)
    setting = classes.Setting(FLOAT_CLASSES, 4, 23, 0, 3)
    told = np.empty(0, np.uint8), np.zeros((3, 256), np.uint16), base, setting, base.size
    for whole, out in both(monkeypatch, lambda: decoded(stream, *told)):  # type: ignore[misc]
        assert whole and (out == base).all()


@needs_kernel
@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_looks(monkeypatch: pytest.MonkeyPatch, item: int) -> None:
    """At blocks of less than a sample, of just one, and of more; with and without classes."""
    rng = np.random.default_rng(item)
    for count, share in itertools.product((*COUNTS[1:], 100_003), (0.01, 0.5, 1)):
        base = rng.integers(0, 256, count * item, np.uint8)
        other = base.view(f"<u{item}") + rng.integers(1, 200, count).astype(f"<u{item}")
        new = np.where(rng.random(count) < share, other, base.view(f"<u{item}")).view(np.uint8)
        for setting in (None, probe._setting(item, "int"), probe._setting(item, "float")):
            fast, plain = both(monkeypatch, lambda n=new, b=base, s=setting: probe._look(n, b, item, s))
            assert fast == plain


@needs_kernel
@pytest.mark.parametrize(("total", "each"), list(itertools.product(range(54, 59), (2, 4, 8))))
def test_neighbours_whose_bits_just_fit(monkeypatch: pytest.MonkeyPatch, total: int, each: int) -> None:
    """Two, four or eight numbers have about as many bits together as the kernel puts at once."""
    rng = np.random.default_rng(total)
    count = 20_003
    lengths = np.resize([(total + i) // each for i in range(each)], count)
    base = rng.integers(0, 256, count * 4, np.uint8)
    words = base.view("<u4") + (rng.integers(1 << 31, 1 << 32, count) >> (29 - lengths)).astype("<u4")
    setting = classes.Setting(INT_CLASSES, 4, 0, 0, 1)
    fast, plain = both(monkeypatch, lambda: coded(words.view(np.uint8), base, setting))
    assert fast == plain


@needs_kernel
def test_frequencies_of_any_weights_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of such as nobody writes: each context's sum up, and none is lost."""
    rng = np.random.default_rng(7)
    rows = [rng.integers(0, 256, 256), np.full(256, 63), np.eye(1, 256)[0] * 9, np.zeros(256)]
    rows += [np.where(rng.random(256) < share, rng.integers(0, 64, 256), 0) for share in (0.01, 0.5, 1)]
    weights = np.array(rows).astype(np.uint8)
    fast, plain = both(monkeypatch, lambda: classes.frequencies_of(weights))
    np.testing.assert_array_equal(fast, plain)
    sums = np.asarray(plain).sum(axis=1)
    assert set(sums.tolist()) == {0, 1 << SCALE_BITS}
    assert ((np.asarray(plain) > 0) == ((weights & 63) > 0)).all()


@needs_kernel
@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_changed_items_are_picked_and_placed(monkeypatch: pytest.MonkeyPatch, item: int) -> None:
    rng = np.random.default_rng(item)
    for count, share in itertools.product(COUNTS, (0, 0.01, 0.5, 1)):
        base = rng.integers(0, 256, count * item, np.uint8)
        other = base.view(f"<u{item}") + rng.integers(1, 200, count).astype(f"<u{item}")
        new = np.where(rng.random(count) < share, other, base.view(f"<u{item}")).view(np.uint8)
        fast, plain = both(monkeypatch, lambda n=new, b=base: planes.changed(n, b, item))
        (map_, many), (same, also) = fast, plain  # type: ignore[misc]
        np.testing.assert_array_equal(map_, same)
        assert many == also == np.count_nonzero(new.view(f"<u{item}") != base.view(f"<u{item}"))
        for some in both(monkeypatch, lambda n=new, m=same, k=also: planes.pick(n, m, item, k)):
            for kernel in (KERNEL, None):
                monkeypatch.setattr(planes, "_kernel", kernel)
                out = base.copy()
                planes.place(some, same, item, out)
                np.testing.assert_array_equal(out, new)
        wrong = both(monkeypatch, lambda n=new, m=same, k=also: planes.pick(n, m, item, k + 1))
        assert wrong == (None, None)


@needs_kernel
def test_chunks_are_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    for item, kind in ((1, "int"), (2, "float"), (4, "float"), (4, "int"), (8, "float")):
        base = (rng.standard_normal(40_003) * 0.02).astype(np.float32)
        new = base * (1 + rng.standard_normal(base.size) * rng.choice([1e-2, 1e-4, 1e-6])).astype(np.float32)
        new[::3] = base[::3]
        segments = [Segment(3, 1, "bytes"), Segment(new.nbytes - 3, item, kind)]  # type: ignore[arg-type]
        fast, plain = both(
            monkeypatch,
            lambda new=new, base=base, s=segments: encode_chunk(new.data.cast("B"), base.data.cast("B"), s),
        )
        assert fast[0] == plain[0] and b"".join(fast[1]) == b"".join(plain[1])  # type: ignore[index]
        out = bytearray(new.nbytes)
        payload = memoryview(b"".join(plain[1]))  # type: ignore[index]
        decode_chunk(plain[0], payload, base.data.cast("B"), memoryview(out))  # type: ignore[index]
        assert out == new.tobytes()


@needs_kernel
def test_the_kernel_looks_at_sizes_itself() -> None:
    """A wrong call is an exception, never a read or a write outside."""
    bytes_ = np.zeros(16, np.uint8)
    room = np.zeros(15, np.uint8)
    symbols, even = np.zeros(CONTEXTS_MAX << SCALE_BITS, np.uint8), np.full(256, 16, np.uint16)
    wrong = [
        lambda: KERNEL.split(bytes_, None, XOR, 4, False, bytes_.copy()),
        lambda: KERNEL.split(bytes_, room, XOR, 4, False, bytes_.copy()),
        lambda: KERNEL.split(bytes_, None, NONE, 4, False, room),
        lambda: KERNEL.split(bytes_, None, NONE, 3, False, bytes_.copy()),
        lambda: KERNEL.split(bytes_, bytes_, 4, 4, False, bytes_.copy()),
        lambda: KERNEL.split(bytes_, bytes_, -1, 4, False, bytes_.copy()),
        lambda: KERNEL.split(room, None, NONE, 4, False, room.copy()),
        lambda: KERNEL.split(bytes_, None, NONE, 4, True, bytes_.copy()),
        lambda: KERNEL.join([bytes_], None, NONE, 2, False, bytes_.copy()),
        lambda: KERNEL.join([room, room], None, NONE, 2, False, bytes_.copy()),
        lambda: KERNEL.join([0, 256], None, NONE, 2, False, bytes_.copy()),
        lambda: KERNEL.join([bytes_], None, XOR, 1, False, bytes_.copy()),
        lambda: KERNEL.thin(bytes_, room[:1], bytes_.copy()),
        lambda: KERNEL.thin(bytes_, room[:2], room.copy()),
        lambda: KERNEL.weigh(bytes_, 2, np.zeros(8, np.int64)),
        lambda: KERNEL.weigh(bytes_, False, np.zeros(99, np.int64)),
        lambda: KERNEL.changed(bytes_, room, 1, room[:2].copy()),
        lambda: KERNEL.changed(bytes_, bytes_, 1, room[:1].copy()),
        lambda: KERNEL.changed(bytes_, bytes_, 3, room[:1].copy()),
        lambda: KERNEL.frequencies(np.zeros(256, np.uint8), np.zeros(255, np.uint16)),
        lambda: KERNEL.declassify(bytes_, 8, room, even, bytes_, 5, 4, 23, 0, 1, symbols, bytes_.copy()),
        lambda: KERNEL.declassify(symbols, 8, room, even, room, 5, 4, 23, 0, 1, symbols, bytes_.copy()),
        lambda: KERNEL.declassify(symbols, 8, room, even, bytes_, 5, 4, 23, 0, 2, symbols, bytes_.copy()),
        lambda: KERNEL.declassify(symbols, 8, room, even, bytes_, 5, 4, 23, 0, 1, symbols[1:], bytes_.copy()),
        lambda: KERNEL.split(bytes_[::2], None, NONE, 1, False, room[:8]),
    ]
    for call in wrong:
        with pytest.raises(ValueError):
            call()
    assert KERNEL.fill(room[:1], room[:0], bytes_.copy()) is False
    assert KERNEL.pick(bytes_, room[:1], 1, room[:0].copy()) is False
    assert KERNEL.place(bytes_, room[:1], 1, bytes_.copy()) is False


@needs_kernel
def test_looking_and_coding_look_at_sizes_too() -> None:
    bytes_, room = np.zeros(16, np.uint8), np.zeros(15, np.uint8)
    rows, table, marks, out = (
        np.zeros(99, np.int64),
        np.zeros(256, np.uint8),
        np.zeros(8, np.uint8),
        np.zeros(72, np.uint8),
    )
    looked, coded = KERNEL.look, KERNEL.code
    assert coded(bytes_, bytes_, 5, 4, 23, 0, 1, 8, table, marks, marks.copy(), out) == (0, 0, 32)
    wrong = [
        lambda: looked(bytes_, room, 5, 4, 23, 1, 8, 256, rows),
        lambda: looked(bytes_, bytes_, 5, 4, 32, 1, 8, 256, rows),
        lambda: looked(bytes_, bytes_, 5, 4, 23, 17, 8, 256, rows),
        lambda: looked(bytes_, bytes_, 2, 4, 23, 1, 8, 256, rows),
        lambda: looked(bytes_, bytes_, 0, 3, 23, 1, 8, 256, rows),
        lambda: looked(bytes_, bytes_, 0, 4, 23, 1, 9, 256, rows),
        lambda: looked(bytes_, bytes_, 0, 4, 23, 1, 0, 256, rows),
        lambda: looked(bytes_, bytes_, 0, 4, 23, 1, 8, 256, rows[:4]),
        lambda: coded(bytes_, room, 5, 4, 23, 0, 1, 8, table, marks, marks, out),
        lambda: coded(bytes_, bytes_, 5, 4, 23, 0, 17, 8, table, marks, marks, out),
        lambda: coded(bytes_, bytes_, 2, 4, 23, 0, 1, 8, table, marks, marks, out),
        lambda: coded(bytes_, bytes_, 5, 4, 23, 256, 1, 8, table, marks, marks, out),
        lambda: coded(bytes_, bytes_, 5, 4, 23, 0, 1, 9, table, marks, marks, out),
        lambda: coded(bytes_, bytes_, 5, 4, 23, 0, 2, 8, table, marks, marks, out),
        lambda: coded(bytes_, bytes_, 5, 4, 23, 0, 1, 8, table, marks[1:], marks, out),
        lambda: coded(bytes_, bytes_, 5, 4, 23, 0, 1, 8, table, marks, marks[1:], out),
        lambda: coded(bytes_, bytes_, 5, 4, 23, 0, 1, 8, table, marks, marks, out[1:]),
    ]
    for call in wrong:
        with pytest.raises(ValueError):
            call()
