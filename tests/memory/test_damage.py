"""Every changed byte of a sealed slot, or of the header, that means anything is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from everstep.errors import Damaged, EverstepError, UnknownFormat
from everstep.memory.arena import Arena
from everstep.memory.control import _IDENTITY, _IDENTITY_OFFSET, _SEAL, _SEAL_OFFSET, _SEALED_OFFSET
from everstep.memory.header import (
    _FIXED_SUM_OFFSET,
    OWNER_BYTES,
    OWNER_OFFSETS,
    SLOT_PAGE_BYTES,
    WORD_OWNER,
)
from everstep.memory.info import read_info
from everstep.memory.slots import SlotGone, SnapshotInfo

from .contents import SIZES, pin_step, write

Make = Callable[..., Arena]


@pytest.fixture
def sealed(make: Make) -> Iterator[tuple[Arena, SnapshotInfo]]:
    arena = make()
    write(arena, 1, 1, None)
    with pin_step(arena, 1, 1) as pinned:
        pinned.seal(pinned.compute())
    [info] = arena.snapshots()
    yield arena, info


def trust(arena: Arena, info: SnapshotInfo) -> None:
    """What a careful reader does, in full; raises if anything is wrong."""
    with arena.pin(info.index, info.generation) as pinned:
        records = pinned.sealed()
        if records is None or pinned.info.key != info.key or pinned.info.layout_hash != info.layout_hash:
            raise Damaged("not what it was")
        pinned.seal(pinned.compute())
        pinned.check()


def table_bytes() -> int:
    return 4 + sum(12 + len(name) for name, _ in SIZES)


def changed(arena: Arena, places: Iterator[int] | range, flip: int) -> Iterator[int]:
    """Each place in turn with its byte changed; put back afterwards."""
    view = arena._control.mapping.view
    for place in places:
        view[place] ^= flip
        try:
            yield place
        finally:
            view[place] ^= flip


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_byte_of_a_slots_control_block(sealed: tuple[Arena, SnapshotInfo], flip: int) -> None:
    arena, info = sealed
    start = arena._fixed.control_offset(info.index)
    parts = {
        "state word": range(0, 8),
        "identity": range(_IDENTITY_OFFSET, _IDENTITY_OFFSET + _IDENTITY.size + 16),
        "hash header": range(_SEAL_OFFSET, _SEAL_OFFSET + _SEAL.size),
        "region table": range(SLOT_PAGE_BYTES, SLOT_PAGE_BYTES + table_bytes()),
        "hashes": range(_SEALED_OFFSET, _SEALED_OFFSET + 8 + 3 * 24 + (5 + 3 + 1) * 16),
    }
    trust(arena, info)
    for part, places in parts.items():
        for place in changed(arena, range(start + places[0], start + places[-1] + 1), flip):
            with pytest.raises((Damaged, SlotGone)):
                trust(arena, info)
                pytest.fail(f"byte {place - start} of the {part} was changed, and nobody noticed")
            assert len(arena.problems()) == 1, f"byte {place - start} of the {part}"
            assert f"slot {info.index}" in str(arena.problems()[0].name)
    trust(arena, info)
    assert arena.problems() == []


def test_every_byte_of_a_slots_data(sealed: tuple[Arena, SnapshotInfo]) -> None:
    arena, info = sealed
    offset = 0
    for name, nbytes in SIZES:
        start = arena._fixed.data_offset(info.index) + offset
        places = range(start, start + nbytes, 977)
        for place in changed(arena, places, 0x10):
            if name in ("layout", "meta"):
                continue  # proved by what names them: the layout's hash, the vote
            with pytest.raises(Damaged, match="changed since it was sealed"):
                trust(arena, info)
                pytest.fail(f"byte {place - start} of {name}")
        offset += -(-nbytes // 4096) * 4096
    trust(arena, info)


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_byte_of_the_header(make: Make, flip: int) -> None:
    arena = make()
    path = arena.info.path
    assert path is not None
    for place in changed(arena, range(_FIXED_SUM_OFFSET + 16), flip):
        for look in (read_info, Arena.attach):
            with pytest.raises((Damaged, UnknownFormat)) as caught:
                look(path)
                pytest.fail(f"byte {place}")
            assert caught.type is Damaged, f"byte {place}: a changed byte is no other version"
    owner = OWNER_OFFSETS[arena._control.words[WORD_OWNER]]
    for place in changed(arena, range(owner, owner + OWNER_BYTES), flip):
        with pytest.raises(Damaged):
            read_info(path)
            pytest.fail(f"byte {place}")
        with Arena.attach(path) as other, pytest.raises(Damaged):
            _ = other.info
    read_info(path)


@pytest.mark.parametrize("change", [-4096, -1, 1])
def test_a_file_of_another_size(make: Make, change: int) -> None:
    arena = make()
    info = arena.info
    assert info.path is not None
    arena.close()
    with open(info.path, "r+b") as file:
        file.truncate(info.nbytes + change)
    with pytest.raises(Damaged, match="size of arena"):
        Arena.attach(info.path)


@pytest.mark.parametrize("data", [b"", b"EVERAREN", b"\0" * 8192, b"text\n" * 2000])
def test_files_that_are_no_arena(directory: Path, data: bytes) -> None:
    path = directory / "rank-00000.00.arena"
    path.write_bytes(data)
    with pytest.raises(Damaged):
        Arena.attach(path)
    with pytest.raises(Damaged):
        read_info(path)


def test_a_damaged_slot_is_skipped_and_used_again(sealed: tuple[Arena, SnapshotInfo]) -> None:
    arena, info = sealed
    write(arena, 1, 2, None)
    arena._control.mapping.view[arena._fixed.control_offset(info.index) + 5] ^= 1
    assert [found.key for found in arena.snapshots()] == [(1, 2)]
    assert arena.newest(1) == 2
    with pytest.raises(EverstepError):
        arena.pin(info.index, info.generation)
    write(arena, 1, 3, None)
    write(arena, 1, 4, None)
    assert arena.problems() == []
