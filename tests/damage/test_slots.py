"""No change of a sealed slot, or of its arena, gives wrong values: recovery goes to the disk, and says so."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import everstep.oneshot
import pytest
from everstep.memory.arena import Arena
from everstep.memory.header import CHANGING_OFFSET, SLOT_PAGE_BYTES, TABLE_BYTES
from everstep.places import locate

from tests.damage.journey import NEW, OLD, Answer, read, sealed_steps, write

SAMPLED = 15
LARGE_BYTES, STRIDE = 2048, 7
"""Of larger parts the long run changes every 7th byte."""
FLIPS = (0x01, 0x80, 0xFF)
PROVED = ("image:model", "image:optimizer", "state", "layout", "meta")
"""Regions of which every byte is proved."""


@dataclass(frozen=True)
class Place:
    """A run whose newest step is in memory alone; ``parts`` says where the parts of its slot lie in the arena's
    file."""

    run: Path
    arena: Path
    good: bytes
    parts: dict[str, range]
    older: dict[str, range]
    """The same of the slot of the step before."""

    def change(self, changes: dict[int, int]) -> None:
        data = bytearray(self.good)
        for place, flip in changes.items():
            data[place] ^= flip
        self.put(bytes(data))

    def put(self, data: bytes) -> None:
        self.arena.write_bytes(data)

    def read(self) -> Answer:
        return read(self.run)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    base = tmp_path_factory.mktemp("slots")
    memory = base / "memory"
    memory.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVERSTEP_RUNTIME_DIR", str(base / "runtime"))
        patch.setattr(everstep.oneshot, "SHARED_MEMORY", memory)
        arena = write(base / "run", memory)
        assert arena.parent == memory / f"everstep-{os.getuid()}" / locate(base / "run").run_key
        assert sealed_steps(arena) == [OLD, NEW]
        shutil.rmtree(base / "run" / "checkpoints" / f"{NEW:09}")
        yield Place(base / "run", arena, arena.read_bytes(), parts_of(arena, NEW), parts_of(arena, OLD))


def parts_of(path: Path, step: int) -> dict[str, range]:
    with Arena.attach(path) as arena:
        (info,) = (info for info in arena.snapshots() if info.step == step)
        fixed = arena._fixed
        control, data = fixed.control_offset(info.index), fixed.data_offset(info.index)
        parts = {
            "fixed header": range(0, 480),
            "owner": range(CHANGING_OFFSET, CHANGING_OFFSET + 4096),
            "slot's page": range(control, control + SLOT_PAGE_BYTES),
            "region table": range(control + SLOT_PAGE_BYTES, control + SLOT_PAGE_BYTES + 120),
            "hashes": range(
                control + SLOT_PAGE_BYTES + TABLE_BYTES, control + SLOT_PAGE_BYTES + TABLE_BYTES + 200
            ),
        }
        with arena.pin(info.index, info.generation) as pinned:
            for region in pinned._regions:
                parts[region.name] = range(data + region.offset, data + region.offset + region.nbytes)
    return parts


PARTS = ["fixed header", "owner", "slot's page", "region table", "hashes", *PROVED]


def test_untouched_it_is_loaded_from_memory(place: Place) -> None:
    place.change({})
    assert place.read() == Answer(NEW, None, "")
    assert set(place.parts) == set(PARTS)


def look(place: Place, part: str, at: int, flip: int) -> bool:
    """Whether the change was found; never wrong values (``read`` raises on those)."""
    place.change({at: flip})
    answer = place.read()
    assert answer.error is None, f"byte {at} of {part}: {answer.error}"
    if part in PROVED:
        assert answer.step == OLD, f"byte {at} ^ {flip:#x} of {part} was accepted"
        assert "slot" in answer.told, f"byte {at} of {part}: nobody was told where: {answer.told!r}"
    return answer.step == OLD


@pytest.mark.parametrize("part", PARTS)
def test_some_changed_bytes(place: Place, part: str) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    numbers = random.Random(seed)
    where = place.parts[part]
    places = [where[0], where[-1], *(numbers.choice(where) for _ in range(SAMPLED - 2))]
    for at in places:
        look(place, part, at, numbers.choice(FLIPS))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", PARTS)
def test_every_changed_byte(place: Place, part: str) -> None:
    where = place.parts[part]
    stride = 1 if len(where) < LARGE_BYTES else STRIDE
    begin = random.randrange(stride)
    print("begin", begin)
    found = [look(place, part, at, FLIPS[at % 3]) for at in where[begin::stride]]
    if part in ("hashes", "region table"):
        assert all(found[:100])


@pytest.mark.parametrize("part", PROVED)
def test_with_the_disk_behind_it_nothing_is_lost(
    place: Place, part: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same step on disk serves what the slot no longer can."""
    base = tmp_path_factory.mktemp("both")
    memory = base / "memory"
    memory.mkdir(mode=0o700)
    monkeypatch.setattr(everstep.oneshot, "SHARED_MEMORY", memory)
    arena = write(base / "run", memory)
    where = parts_of(arena, NEW)[part]
    data = bytearray(arena.read_bytes())
    data[where[len(where) // 2]] ^= 0x10
    arena.write_bytes(bytes(data))
    answer = read(base / "run")
    assert answer.step == NEW and answer.error is None
    assert "slot" in answer.told


@pytest.mark.parametrize("change", [-4096, -1, 1])
def test_an_arena_of_another_size(place: Place, change: int) -> None:
    place.put(place.good[:change] if change < 0 else place.good + b"\0" * change)
    answer = place.read()
    assert answer.step == OLD and answer.error is None


@pytest.mark.parametrize("part", ["image:model", "state", "hashes", "region table"])
def test_a_part_of_the_slot_before(place: Place, part: str) -> None:
    """Bytes that were good, of another step."""
    where, other = place.parts[part], place.older[part]
    data = bytearray(place.good)
    data[where[0] : where[-1] + 1] = place.good[other[0] : other[-1] + 1]
    place.put(bytes(data))
    answer = place.read()
    assert answer.error is None
    # Both steps have regions of the same sizes.
    assert answer.step == (NEW if part == "region table" else OLD)
