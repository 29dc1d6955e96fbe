"""The protocol among real processes that are really killed, at random moments, for a few seconds."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from everstep.memory.arena import Arena
from everstep.memory.process import Process

from . import children
from .contents import keys, matches, pin_step, write

Make = Callable[..., Arena]

# Adopts the newest snapshot, then writes one after another; W is the newest, read back as any rank would.
TRAINER = """
from everstep.memory.slots import SlotGone
arena = Arena.attach(path)
incarnation = arena.info.incarnation + 1
arena.take(Process.current(), run_id="run", incarnation=incarnation, world=1)
found = arena.snapshots()
complete = found[-1].key if found else None
step = complete[1] if complete else 0
if found:
    with arena.pin(found[-1].index, found[-1].generation) as pinned:
        pinned.seal(pinned.compute())
        if not matches(pinned):
            print("torn", flush=True)
print("ready", flush=True)
while True:
    step += 1
    deadline = time.monotonic() + 5
    while (slot := arena.begin(incarnation, step, complete=complete)) is None:
        if time.monotonic() > deadline:
            print("stuck", flush=True)
        time.sleep(0.0005)
    fill(slot.place(SIZES), contents(incarnation, step))
    slot.publish(LAYOUT_HASH)
    complete = (incarnation, arena.newest(incarnation))
"""
# Reads any snapshot; what the check accepts must be right.
READER = """
from everstep.memory.slots import SlotGone
arena = Arena.attach(path)
print("ready", flush=True)
done = 0
while True:
    for found in arena.snapshots():
        try:
            with arena.pin(found.index, found.generation) as pinned:
                {seal}
                data = read(pinned)
                pinned.check()
                if data != contents(*found.key):
                    print("torn", flush=True)
        except SlotGone:
            pass
    done += 1
"""
KINDS = {
    "trainer": TRAINER,
    "agent": READER.format(seal="pinned.seal(pinned.compute())"),
    "replicator": READER.format(seal="pass"),
}


class Cast:
    """The parties, each a process that is replaced when it was killed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.running = {kind: children.start(path, body) for kind, body in KINDS.items()}
        self.fresh = set(KINDS)

    def wait_ready(self) -> None:
        for kind in self.fresh:
            children.wait_ready(self.running[kind])
        self.fresh.clear()

    def replace(self, kind: str) -> str:
        """Kill it, start another; what the dead one had to say."""
        child = self.running[kind]
        child.kill()
        said, _ = child.communicate()
        self.running[kind] = children.start(self.path, KINDS[kind])
        self.fresh.add(kind)
        return said

    def end(self) -> None:
        for child in self.running.values():
            child.kill()
            child.communicate()


KILLS_MIN = 10


def stress(path: Path, seed: int, seconds: float) -> int:
    """Kill parties at random for ``seconds``, and at least ``KILLS_MIN`` of them however slow the machine is; the
    number of kills. Fails when any saw something wrong."""
    chance = random.Random(seed)
    deadline = time.monotonic() + seconds
    kills = 0
    cast = Cast(path)
    try:
        while time.monotonic() < deadline or kills < KILLS_MIN:
            cast.wait_ready()
            time.sleep(chance.random() * 0.03)
            for kind in chance.sample(sorted(KINDS), chance.randint(1, 3)):
                said = cast.replace(kind)
                assert said == "", f"the {kind} said {said!r} (seed {seed})"
                kills += 1
    finally:
        cast.end()
    return kills


@pytest.mark.parametrize("seconds", [4.0, pytest.param(300.0, marks=pytest.mark.long)])
def test_killed_at_random(make: Make, seconds: float) -> None:
    seed = int(os.environ.get("EVERSTEP_SEED", random.randrange(1 << 32)))
    print(f"seed {seed}")
    arena = make()
    info = arena.info
    assert info.path is not None
    write(arena, 1, 1, None)
    arena.close()
    assert stress(info.path, seed, seconds) >= KILLS_MIN
    with Arena.attach(info.path) as heir:
        incarnation = heir.info.incarnation + 1
        heir.take(Process.current(), run_id="run", incarnation=incarnation, world=1)
        assert heir.problems() == []
        newest = keys(heir)[-1]
        assert newest[1] > 10, "training went on all the time"
        for key in keys(heir):
            with pin_step(heir, *key) as pinned:
                assert matches(pinned)
        write(heir, incarnation, newest[1] + 1, newest)
        write(heir, incarnation, newest[1] + 2, newest)
        assert newest in keys(heir)
