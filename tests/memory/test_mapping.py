"""Mappings: huge pages, where the kernel gives them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from everstep.memory.arena import Arena
from everstep.memory.mapping import HUGE_BYTES, Mapping

from .contents import matches, pin_step, write

_MADV_COLLAPSE = 25

Make = Callable[..., Arena]


def collapses() -> bool:
    """Whether this kernel makes pages of shared memory huge by request."""
    fd = os.memfd_create("everstep-test")
    try:
        os.posix_fallocate(fd, 0, HUGE_BYTES)
        pages = Mapping(fd, HUGE_BYTES)
        return ctypes.CDLL(None).madvise(ctypes.c_void_p(pages.address), HUGE_BYTES, _MADV_COLLAPSE) == 0
    finally:
        os.close(fd)


def huge_bytes(address: int) -> int:
    """Bytes of the mapping at ``address`` that are mapped as huge pages."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            kib = next(one for one in lines if one.startswith("ShmemPmdMapped:")).split()[1]
            return int(kib) * 1024
    raise LookupError(f"nothing is mapped at {address:x}")


def test_a_mapping_begins_at_a_huge_page_and_ends_with_its_file(make: Make) -> None:
    arena = make(slot_bytes=3 << 20)
    address, nbytes = arena.mapped
    assert address % HUGE_BYTES == 0
    ends = {line.split()[0].split("-")[1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert f"{address + -(-nbytes // 4096) * 4096:x}" in ends


def test_populating_makes_pages_huge_and_leaves_contents_alone(make: Make) -> None:
    if not collapses():
        pytest.skip("this kernel does not collapse shared memory")
    arena = make(slot_bytes=4 << 20, populate="no")
    write(arena, 1, 1, None)
    arena.populate("now")
    assert huge_bytes(arena.mapped[0]) >= 4 * HUGE_BYTES
    with pin_step(arena, 1, 1) as pinned:
        assert matches(pinned)
    path = arena.info.path
    assert path is not None
    with Arena.attach(path) as other:
        with pin_step(other, 1, 1) as pinned:
            assert matches(pinned)
        view = other._control.mapping.view
        assert not any(view[at] for at in range(len(view) - 2 * HUGE_BYTES, len(view), HUGE_BYTES))
        assert huge_bytes(other.mapped[0]) > 0, "whoever maps it has them too"
