"""An arena that was replaced by a larger one stays until the newest complete snapshot lies in the new one."""

from __future__ import annotations

from pathlib import Path

from everstep.memory.slots import WriteSlot
from everstep.memorytier import MemoryTier, Room
from everstep.places import locate

CHUNK = 1 << 20


def write(tier: MemoryTier, step: int, nbytes: int) -> None:
    slot: WriteSlot = tier.begin(step, nbytes, timeout_s=5, waiting=lambda: None)
    slot.place([("state", nbytes)])
    slot.publish("layout")


def test_w_is_not_dropped_with_the_arena_that_was_outgrown(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    place = locate(tmp_path / "run")
    tiers = [MemoryTier(place, Room(memory, slots=3, required=True), rank) for rank in (0, 1)]
    for tier in tiers:
        tier.reserve(8192, chunk_bytes=CHUNK, adopted=None, run_id="run", held=[])
        tier.local_ranks = 2
        tier.open(run_id="run", incarnation=1, adopted=None, world=2)
    first, second = tiers
    for tier in tiers:
        write(tier, 1, 4096)
    assert first.complete() == (1, 1)
    before = first.arena
    write(first, 2, 1 << 20)  # does not fit: a larger arena
    assert first.arena is not before
    first.drop_outgrown()
    assert first.complete() == (1, 1), "the other rank has not come to step 2"
    path = before.info.path
    assert path is not None and path.exists(), "it holds W"
    write(second, 2, 4096)
    first.drop_outgrown()
    assert first.complete() == (1, 2)
    assert not path.exists()
    for tier in tiers:
        tier.close(remove=True)
