"""Snapshots whose contents follow from their key, so that a torn read can be told."""

from __future__ import annotations

import random
from collections.abc import Mapping

from everstep.memory.arena import Arena
from everstep.memory.slots import Pinned, WriteSlot

SIZES = (("image:model", 20_000), ("image:optimizer", 9000), ("layout", 100), ("state", 700), ("meta", 40))
LAYOUT_HASH = "ab" * 16


def contents(incarnation: int, step: int, sizes: tuple[tuple[str, int], ...] = SIZES) -> dict[str, bytes]:
    source = random.Random(incarnation << 32 | step)
    return {name: source.randbytes(nbytes) for name, nbytes in sizes}


def fill(views: Mapping[str, memoryview], data: Mapping[str, bytes]) -> None:
    for name, view in views.items():
        view[:] = data[name]


def write(arena: Arena, incarnation: int, step: int, complete: tuple[int, int] | None) -> WriteSlot:
    """One whole snapshot."""
    slot = arena.begin(incarnation, step, complete=complete)
    assert slot is not None
    fill(slot.place(SIZES), contents(incarnation, step))
    slot.publish(LAYOUT_HASH)
    return slot


def read(pinned: Pinned) -> dict[str, bytes]:
    return {name: bytes(pinned.view(name)) for name in pinned.regions}


def matches(pinned: Pinned) -> bool:
    return read(pinned) == contents(*pinned.info.key)


def keys(arena: Arena) -> list[tuple[int, int]]:
    return [found.key for found in arena.snapshots()]


def pin_step(arena: Arena, incarnation: int, step: int) -> Pinned:
    [info] = [found for found in arena.snapshots() if found.key == (incarnation, step)]
    return arena.pin(info.index, info.generation)
