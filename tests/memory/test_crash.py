"""A real process is killed at each named point; what it left is looked at first, then that life goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from everstep.memory.arena import Arena
from everstep.memory.directory import clean, find_arenas
from everstep.memory.process import Process
from everstep.memory.slots import SlotState

from . import children
from .contents import keys, matches, pin_step, write

Make = Callable[..., Arena]

TRAINER = """
arena = Arena.attach(path)
arena.take(Process.current(), run_id="run", incarnation=2, world=1)
from everstep.memory import points
slot = arena.begin(2, 9, complete=(1, 1))
views = slot.place(SIZES)
half = contents(2, 9)
views["image:model"][:] = half["image:model"]
points.reach("slot.mid_copy")
fill(views, half)
slot.publish(LAYOUT_HASH)
"""
AGENT = """
arena = Arena.attach(path)
pinned = pin_step(arena, 1, 1)
pinned.seal(pinned.compute())
"""
WRITING = {"slot.begin", "slot.mid_copy", "slot.publish.before", "slot.publish.locked"}


def killed(path: Path, body: str, point: str) -> None:
    child = children.start(path, body, f"kill:{point}")
    assert children.end(child) == -signal.SIGKILL, f"{point} was not reached"


def states(arena: Arena) -> list[SlotState | None]:
    return [arena._control.read_word(index)[1] for index in range(arena.info.slots)]


@pytest.mark.parametrize("point", ["take.locked", "owner.locked", *sorted(WRITING), "slot.publish.after"])
def test_a_trainer_killed_at(make: Make, point: str) -> None:
    arena = make()
    write(arena, 1, 1, None)
    path = arena.info.path
    assert path is not None
    arena.close()
    killed(path, TRAINER, point)
    with Arena.attach(path) as heir:
        owner = heir.info.owner
        if point in ("take.locked", "owner.locked"):
            assert owner is None, "the new owner was not yet written"
        else:
            assert owner is not None
            assert not owner.alive()
        assert (SlotState.WRITING in states(heir)) == (point in WRITING)
        expected = [(1, 1), (2, 9)] if point == "slot.publish.after" else [(1, 1)]
        assert keys(heir) == expected
        heir.take(Process.current(), run_id="run", incarnation=3, world=1)
        assert SlotState.WRITING not in states(heir)
        assert keys(heir) == expected
        for key in expected:
            with pin_step(heir, *key) as pinned:
                assert matches(pinned)
        # W stays; both other slots can be written; then there is no room until W moves.
        write(heir, 3, 10, (1, 1))
        write(heir, 3, 11, (1, 1))
        assert keys(heir) == [(1, 1), (3, 10), (3, 11)]
        assert heir.begin(3, 12, complete=(1, 1)) is None
        write(heir, 3, 12, (3, 10))
        assert heir.problems() == []


@pytest.mark.parametrize("point", ["pin.locked", "seal.before", "seal.locked", "seal.after"])
def test_an_agent_killed_at(make: Make, point: str) -> None:
    arena = make(slots=1)
    write(arena, 1, 1, None)
    path = arena.info.path
    assert path is not None
    killed(path, AGENT, point)
    assert states(arena) == [SlotState.SEALED if point == "seal.after" else SlotState.VALID]
    with pin_step(arena, 1, 1) as pinned:
        assert matches(pinned)
        records = pinned.compute()
        assert pinned.sealed() == (records if point == "seal.after" else None)
        pinned.seal(records)
        assert pinned.sealed() == records
    assert arena.problems() == []
    write(arena, 1, 2, (1, 2))
    assert keys(arena) == [(1, 2)]


@pytest.mark.parametrize("point", ["arena.reserve.before", "owner.locked", "arena.name.before"])
def test_a_maker_killed_at(directory: Path, point: str) -> None:
    body = 'Arena.create(path, run_key="k", node="n", rank=0, world=1, slot_bytes=8192, chunk_bytes=4096)'
    killed(directory, body, point)
    [left] = os.listdir(directory)
    assert left.endswith(".new")
    assert find_arenas(directory) == []
    assert clean(directory, keep=lambda info: True) == [directory / left]
    assert os.listdir(directory) == []


def test_an_arena_in_the_making_is_not_cleaned_up(directory: Path) -> None:
    body = 'Arena.create(path, run_key="k", node="n", rank=0, world=1, slot_bytes=8192, chunk_bytes=4096)'
    child = children.start(directory, body, "stall:arena.name.before")
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status) and os.listdir(directory)
    assert clean(directory, keep=lambda info: False) == []
    child.send_signal(signal.SIGCONT)
    assert children.end(child) == 0
    assert len(find_arenas(directory)) == 1
    assert len(clean(directory, keep=lambda info: False)) == 1
