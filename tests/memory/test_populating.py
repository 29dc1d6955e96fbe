"""Memory that an arena is given beside what its process does: in which order, and when not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from everstep.memory import populating
from everstep.memory.arena import Arena
from everstep.memory.mapping import Mapping

SLOT_BYTES = 8 << 20
PIECE_BYTES = 2 << 20
SOON_S = 20.0

Make = Callable[..., Arena]


class Giving:
    """Records what is given; from byte ``stop_at`` on only when it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_at: int = 1 << 62) -> None:
        self.may, self.stopped = threading.Event(), threading.Event()
        self.given: list[tuple[int, int | None]] = []
        give = Mapping.populate

        def populate(pages: Mapping, begin: int = 0, end: int | None = None) -> None:
            if begin >= stop_at:
                self.stopped.set()
                assert self.may.wait(SOON_S)
            give(pages, begin, end)
            self.given.append((begin, end))

        monkeypatch.setattr(Mapping, "populate", populate)
        monkeypatch.setattr(populating, "PIECE_BYTES", PIECE_BYTES)


def begin(arena: Arena, step: int) -> Any:
    slot = arena.begin(1, step, complete=None)
    assert slot is not None
    return slot


def joined(arena: Arena) -> None:
    arena._populating.join()


def test_every_byte_is_given_once_and_the_first_slots_first(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    giving = Giving(monkeypatch)
    arena = make(populate="background", slot_bytes=SLOT_BYTES)
    joined(arena)
    begins, ends = zip(*giving.given, strict=True)
    assert begins[0] == 0 and begins[1:] == ends[:-1], "no gap, and nothing twice"
    assert ends[-1] >= arena.info.nbytes
    assert any(end >= arena._fixed.data_offset(1) for end in ends[:-1])


def test_who_waits_for_the_first_slot_does_not_wait_for_the_others(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = make(populate="no", slot_bytes=SLOT_BYTES)
    end_of_first = probe._fixed.data_offset(1)
    giving = Giving(monkeypatch, stop_at=end_of_first)
    arena = make(populate="background", slot_bytes=SLOT_BYTES)
    began = time.monotonic()
    arena.await_first_slot(SOON_S)
    assert time.monotonic() - began < SOON_S
    begins, ends = zip(*sorted(giving.given), strict=True)  # two threads give: the last need not end last
    assert begins[0] == 0 and begins[1:] == ends[:-1] and ends[-1] >= end_of_first
    assert giving.stopped.wait(SOON_S) and max(giving.given)[0] < end_of_first, "the others have to wait"
    giving.may.set()
    joined(arena)
    assert giving.given[-1][0] >= end_of_first


def test_the_wait_for_the_first_slot_is_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    giving = Giving(monkeypatch, stop_at=0)
    arena = make(populate="behind", slot_bytes=SLOT_BYTES)
    waits = threading.Thread(target=arena.await_first_slot, args=(0.0,))
    waits.start()
    waits.join(SOON_S)
    assert not waits.is_alive() and giving.given == []
    giving.may.set()


def test_nothing_is_given_while_a_slot_is_written(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populating, "YIELD_S", SOON_S)
    giving = Giving(monkeypatch)
    arena = make(populate="no", slot_bytes=SLOT_BYTES)
    slot = begin(arena, 1)
    arena.populate("background")
    arena._populating._thread.join(0.1)  # type: ignore[union-attr]
    assert giving.given == []
    slot.place([("state", 16)])
    slot.publish("l")
    joined(arena)
    assert giving.given


@pytest.mark.parametrize("end", ["abandoned", "dropped"])
def test_a_slot_that_is_given_up_holds_nothing_up(
    make: Make, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(populating, "YIELD_S", SOON_S)
    giving = Giving(monkeypatch)
    arena = make(populate="no", slot_bytes=SLOT_BYTES)
    slot = begin(arena, 1)
    arena.populate("background")
    if end == "abandoned":
        slot.abandon()
    del slot
    arena._populating._thread.join(SOON_S / 2)  # type: ignore[union-attr]
    assert giving.given


def test_a_slot_that_is_written_for_long_is_not_waited_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(populating, "YIELD_S", 0.2)
    giving = Giving(monkeypatch)
    arena = make(populate="no", slot_bytes=SLOT_BYTES)
    slot = begin(arena, 1)
    began = time.monotonic()
    arena.populate("background")
    joined(arena)
    took = time.monotonic() - began
    assert giving.given and slot.open
    assert 0.2 <= took < 0.2 * len(giving.given), "once, not before each piece"


def test_closing_does_not_wait_for_a_slot_that_is_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(populating, "YIELD_S", 10 * SOON_S)
    giving = Giving(monkeypatch)
    arena = make(populate="no", slot_bytes=SLOT_BYTES)
    slot = begin(arena, 1)
    arena.populate("background")
    closing = threading.Thread(target=arena.close)
    closing.start()
    closing.join(SOON_S)
    assert not closing.is_alive() and giving.given == [] and slot is not None


def test_who_waits_for_the_first_slot_helps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    giving = Giving(monkeypatch, stop_at=0)
    threads: set[str] = set()
    give = Mapping.populate

    def populate(pages: Mapping, begin: int = 0, end: int | None = None) -> None:
        threads.add(threading.current_thread().name)
        if len(threads) == 2:
            giving.may.set()
        give(pages, begin, end)

    monkeypatch.setattr(Mapping, "populate", populate)
    arena = make(populate="background", slot_bytes=SLOT_BYTES)
    arena.await_first_slot(SOON_S)
    assert len(threads) == 2
    joined(arena)
    begins, ends = zip(*sorted(giving.given), strict=True)
    assert begins[0] == 0 and begins[1:] == ends[:-1], "no gap, and nothing twice"


def test_the_first_slot_is_waited_for_also_where_nothing_is_left_to_help_with(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    giving = Giving(monkeypatch)
    give, held, may = Mapping.populate, threading.Event(), threading.Event()

    def populate(pages: Mapping, begin: int = 0, end: int | None = None) -> None:
        if threading.current_thread() is arena._populating._thread and not held.is_set():
            held.set()
            assert may.wait(SOON_S)
        give(pages, begin, end)

    monkeypatch.setattr(Mapping, "populate", populate)
    arena = make(populate="no", slot_bytes=SLOT_BYTES)
    pieces = -(-arena._populating._first_end // PIECE_BYTES)
    arena.populate("background")
    assert held.wait(SOON_S)
    waits = threading.Thread(target=arena.await_first_slot, args=(SOON_S,))
    waits.start()
    until = time.monotonic() + SOON_S
    while len(giving.given) < pieces - 1:
        assert time.monotonic() < until
        waits.join(0.01)
    waits.join(0.2)
    assert waits.is_alive() and len(giving.given) == pieces - 1, "one piece is still being given"
    may.set()
    waits.join(SOON_S)
    assert not waits.is_alive()
    joined(arena)
