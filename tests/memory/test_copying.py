"""Copies past the caches: every byte, and no other."""

from __future__ import annotations

import ctypes
import random

import pytest
from everstep.memory import copying

SIZES = [0, 1, 63, 64, 4095, 4096, 4097, 70_001]


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


@pytest.mark.skipif(not copying.COMPILED, reason="there was no compiler")
def test_many_at_once() -> None:
    sources = [bytes([n % 251]) * n for n in SIZES]
    targets = [ctypes.create_string_buffer(n + 1) for n in SIZES]
    rows = [
        (ctypes.addressof(target), ctypes.cast(source, ctypes.c_void_p).value or 0, len(source))
        for target, source in zip(targets, sources, strict=True)
    ]
    copying.copy_each(rows)
    assert [target.raw for target in targets] == [source + b"\0" for source in sources]


@pytest.mark.skipif(not copying.COMPILED, reason="there was no compiler")
def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(TypeError):
        copying.copy_each([("here", 0, 1)])  # type: ignore[list-item]
