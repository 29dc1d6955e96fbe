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
from everstep.codec import planes
from everstep.codec.chunk import decode_chunk, encode_chunk
from everstep.codec.constants import FLOAT_DIFFERENCE, INT_DIFFERENCE, NONE, XOR
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
        lambda: KERNEL.split(bytes_[::2], None, NONE, 1, False, room[:8]),
    ]
    for call in wrong:
        with pytest.raises(ValueError):
            call()
    assert KERNEL.fill(room[:1], room[:0], bytes_.copy()) is False
