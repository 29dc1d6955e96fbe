from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from everstep.errors import (
    BadOption,
    CapacityError,
    Damaged,
    MemoryTooSmall,
    StepOrder,
    Superseded,
    UsageError,
)
from everstep.format.hashing import chunk_hashes, image_root
from everstep.memory import control
from everstep.memory.arena import Arena
from everstep.memory.errors import TooManyPins
from everstep.memory.process import Process
from everstep.memory.slots import SlotGone, SlotState

from .contents import LAYOUT_HASH, SIZES, contents, fill, keys, matches, pin_step, read, write

Make = Callable[..., Arena]


def test_a_snapshot_is_seen_when_it_is_published(make: Make) -> None:
    arena = make()
    assert arena.newest(1) is None
    slot = arena.begin(1, 7, complete=None)
    assert slot is not None
    views = slot.place(SIZES)
    assert {name: len(view) for name, view in views.items()} == dict(SIZES)
    fill(views, contents(1, 7))
    assert arena.snapshots() == []
    slot.publish(LAYOUT_HASH)
    [found] = arena.snapshots()
    assert (found.key, found.state, found.layout_hash) == ((1, 7), SlotState.VALID, LAYOUT_HASH)
    assert arena.newest(1) == 7
    assert arena.newest(2) is None
    with arena.pin(found.index, found.generation) as pinned:
        assert read(pinned) == contents(1, 7)
        pinned.check()


def test_another_opening_sees_the_same(make: Make) -> None:
    arena = make()
    write(arena, 1, 1, None)
    path = arena.info.path
    assert path is not None
    with Arena.attach(path) as other:
        assert keys(other) == [(1, 1)]
        with pin_step(other, 1, 1) as pinned:
            assert matches(pinned)
        with pytest.raises(UsageError):
            other.begin(1, 2, complete=None)


def test_regions_are_aligned_and_keep_their_places(make: Make) -> None:
    arena = make(slots=1)
    mapping = arena._control.mapping
    places = []
    for step in (1, 2):
        slot = arena.begin(1, step, complete=(1, 9))
        assert slot is not None
        views = slot.place([("image:a", 5000), ("layout", 10), ("state", 100 * step), ("image:empty", 0)])
        places.append({name: _address(view) - mapping.address for name, view in views.items() if len(view)})
        slot.publish(LAYOUT_HASH)
    assert places[0] == places[1]
    assert all(place % 4096 == 0 for place in places[0].values())
    with pin_step(arena, 1, 2) as pinned:
        assert len(pinned.view("image:a")) == 5000
        assert len(pinned.view_padded("image:a")) == 8192
        assert pinned.view("image:a").readonly
        assert len(pinned.view("image:empty")) == 0


def _address(view: memoryview) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_w_and_what_comes_after_it_stay(make: Make) -> None:
    arena = make()
    for step in (1, 2, 3):
        write(arena, 1, step, None)
    assert arena.begin(1, 4, complete=(1, 1)) is None
    assert arena.begin(1, 4, complete=None) is None
    write(arena, 1, 4, (1, 2))
    assert keys(arena) == [(1, 2), (1, 3), (1, 4)]


def test_a_pin_of_a_living_process_protects(make: Make) -> None:
    arena = make()
    for step in (1, 2, 3):
        write(arena, 1, step, None)
    with pin_step(arena, 1, 1) as pinned:
        write(arena, 1, 4, (1, 3))
        assert matches(pinned)
        assert keys(arena) == [(1, 1), (1, 3), (1, 4)]
        assert arena.begin(1, 5, complete=(1, 3)) is None
    write(arena, 1, 5, (1, 3))
    with pytest.raises(SlotGone):
        pinned.check()


def test_a_dropped_pin_releases_itself(make: Make) -> None:
    arena = make(slots=1)
    write(arena, 1, 1, None)
    pinned = pin_step(arena, 1, 1)
    assert arena.begin(1, 2, complete=(1, 2)) is None
    del pinned
    gc.collect()
    assert arena.begin(1, 2, complete=(1, 2)) is not None


def test_pins_are_bounded(make: Make) -> None:
    arena = make(slots=1)
    write(arena, 1, 1, None)
    pins = [pin_step(arena, 1, 1) for _ in range(control.PINS_MAX)]
    with pytest.raises(TooManyPins):
        pin_step(arena, 1, 1)
    pins.pop().release()
    pin_step(arena, 1, 1).release()


def test_a_void_pin_is_found_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader whose process was judged dead goes on reading: the generation tells it."""
    arena = make(slots=1)
    write(arena, 1, 1, None)
    pinned = pin_step(arena, 1, 1)
    pinned.check()
    monkeypatch.setattr(Process, "alive", lambda self: False)
    write(arena, 1, 2, (1, 2))
    with pytest.raises(SlotGone, match="step 1"):
        pinned.check()
    with pytest.raises(SlotGone):
        pinned.sealed()
    with pytest.raises(SlotGone):
        pinned.seal(pinned.compute())
    pinned.release()
    with pytest.raises(SlotGone):
        arena.pin(pinned.info.index, pinned.info.generation)


def test_releasing_a_void_pin_leaves_the_next_one_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = make(slots=1)
    write(arena, 1, 1, None)
    old = pin_step(arena, 1, 1)
    with monkeypatch.context() as dead:
        dead.setattr(Process, "alive", lambda self: False)
        write(arena, 1, 2, (1, 2))
    with pin_step(arena, 1, 2):
        old.release()
        assert arena.begin(1, 3, complete=(1, 3)) is None


def test_sealing(make: Make) -> None:
    arena = make()
    write(arena, 1, 1, None)
    with pin_step(arena, 1, 1) as pinned, ThreadPoolExecutor(2) as pool:
        assert pinned.sealed() is None
        records = pinned.compute()
        assert pinned.compute(pool=pool) == records
        assert [record.name for record in records] == ["model", "optimizer", "state"]
        data = contents(1, 1)
        for record, name in zip(records, ("image:model", "image:optimizer", "state"), strict=True):
            chunks = chunk_hashes(memoryview(data[name]), 4096)
            assert (record.nbytes, record.chunks) == (len(data[name]), chunks)
            assert record.root == image_root(len(data[name]), chunks)
        pinned.seal(records)
        assert pinned.sealed() == records
        pinned.seal(records)
    [found] = arena.snapshots()
    assert found.state is SlotState.SEALED
    assert arena.newest(1) == 1
    with pin_step(arena, 1, 1) as again:
        assert again.sealed() == records


def test_sealing_again_with_other_hashes_is_damage(make: Make) -> None:
    arena = make()
    write(arena, 1, 1, None)
    with pin_step(arena, 1, 1) as pinned:
        pinned.seal(pinned.compute())
        place = arena._fixed.data_offset(pinned.info.index) + 9000
        arena._control.mapping.view[place] ^= 1
        with pytest.raises(Damaged, match=r"'model'.*step 1.*from byte 8192") as caught:
            pinned.seal(pinned.compute())
        assert caught.value.step == 1
        assert pinned.sealed() != pinned.compute()


def test_records_must_be_the_snapshots_own(make: Make) -> None:
    arena = make()
    write(arena, 1, 1, None)
    with pin_step(arena, 1, 1) as pinned:
        model, optimizer, state = pinned.compute()
        for wrong in (
            (model, state),
            (optimizer, model, state),
            (state, model, optimizer),
            (model, optimizer, replace(state, nbytes=state.nbytes + 1)),
            (model, replace(optimizer, chunks=optimizer.chunks[:-16]), state),
            (model, replace(optimizer, root=model.root), state),
            (model, replace(optimizer, encoding="zstd"), state),
        ):
            with pytest.raises(BadOption):
                pinned.seal(wrong)
        assert pinned.sealed() is None


def test_a_part_called_state(make: Make) -> None:
    arena = make()
    slot = arena.begin(1, 1, complete=None)
    assert slot is not None
    views = slot.place([("image:state", 5000), ("state", 10)])
    views["image:state"][:] = b"i" * 5000
    slot.publish(LAYOUT_HASH)
    with pin_step(arena, 1, 1) as pinned:
        records = pinned.compute()
        assert [(record.name, record.nbytes) for record in records] == [("state", 5000), ("state", 10)]
        pinned.seal(records)
        assert pinned.sealed() == records


def test_a_full_slot_of_single_chunks_can_be_sealed(make: Make) -> None:
    arena = make(slot_bytes=256 * 4096)
    slot = arena.begin(1, 1, complete=None)
    assert slot is not None
    slot.place([(f"image:{number}", 4096) for number in range(255)] + [("state", 1)])
    slot.publish(LAYOUT_HASH)
    with pin_step(arena, 1, 1) as pinned:
        records = pinned.compute()
        pinned.seal(records)
        assert pinned.sealed() == records
    assert arena.problems() == []


def test_abandoning_gives_the_slot_back(make: Make) -> None:
    arena = make(slots=1)
    with arena.begin(1, 1, complete=None) or pytest.fail() as slot:
        slot.place(SIZES)
        assert arena.begin(1, 2, complete=None) is None
    assert arena.snapshots() == []
    for call in (lambda: slot.publish(LAYOUT_HASH), lambda: slot.place(SIZES)):
        with pytest.raises(SlotGone):
            call()
    slot.abandon()
    write(arena, 1, 1, None)
    assert keys(arena) == [(1, 1)]


def test_a_forgotten_slot_comes_back(make: Make) -> None:
    arena = make(slots=1)
    slot = arena.begin(1, 1, complete=None)
    assert arena.begin(1, 2, complete=None) is None
    del slot
    gc.collect()
    write(arena, 1, 2, None)


def test_the_layout_that_a_slot_still_has(make: Make) -> None:
    arena = make(slots=1)
    slot = write(arena, 1, 1, None)
    assert slot.layout_hash_before == ""
    with arena.begin(1, 2, complete=(1, 2)) or pytest.fail() as slot:
        assert slot.layout_hash_before == LAYOUT_HASH
    # Abandoned: it may have been written over by half.
    slot = write(arena, 1, 3, None)
    assert slot.layout_hash_before == ""


def test_steps_go_up(make: Make) -> None:
    arena = make()
    write(arena, 1, 5, None)
    for step in (5, 4):
        with pytest.raises(StepOrder):
            arena.begin(1, step, complete=None)


def test_what_does_not_fit(make: Make) -> None:
    arena = make()
    slot = arena.begin(1, 1, complete=None)
    assert slot is not None
    with pytest.raises(MemoryTooSmall) as caught:
        slot.place([("image:model", 60 << 10), ("state", 5000)])
    assert (caught.value.needed, caught.value.free) == (68 << 10, 64 << 10)
    assert pickle.loads(pickle.dumps(caught.value)).needed == 68 << 10  # noqa: S301
    with pytest.raises(CapacityError):
        slot.place([(f"image:{number}", 0) for number in range(257)])
    with pytest.raises(CapacityError):
        slot.place([("image:" + "n" * 70_000, 1)])
    with pytest.raises(BadOption):
        slot.place([("state", 1), ("state", 1)])
    with pytest.raises(BadOption):
        slot.publish(LAYOUT_HASH)
    slot.abandon()
    write(arena, 1, 1, None)


def test_publishing_after_a_takeover_fails(make: Make) -> None:
    arena = make()
    slot = arena.begin(1, 1, complete=None)
    assert slot is not None
    slot.place(SIZES)
    path = arena.info.path
    assert path is not None
    with Arena.attach(path) as second:
        second.take(Process.current(), run_id="run", incarnation=2, world=1)
        with pytest.raises(SlotGone, match="taken over"):
            slot.publish(LAYOUT_HASH)
        with pytest.raises(Superseded):
            arena.begin(1, 2, complete=None)
        write(second, 2, 1, None)
        slot.abandon()
        assert keys(second) == [(2, 1)]


@pytest.mark.parametrize("index", [-1, 3])
def test_a_slot_that_is_not_there(make: Make, index: int) -> None:
    with pytest.raises(BadOption):
        make().pin(index, 0)
