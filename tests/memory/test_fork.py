"""What a forked child has of its parent's arenas: nothing."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from everstep.memory.arena import Arena
from everstep.memory.directory import clean, mapped_by
from everstep.memory.errors import ArenaGone
from everstep.memory.process import Process

from . import children
from .conftest import SOON_S, Reserving
from .contents import SIZES, keys, matches, pin_step, write

Make = Callable[..., Arena]

# A trainer whose loader worker is forked in mid snapshot, with a pin held, and then outlives it.
TRAINER = """
arena = Arena.attach(path)
arena.take(Process.current(), run_id="run", incarnation=2, world=1)
write(arena, 2, 1, (1, 1))
pinned = pin_step(arena, 2, 1)
slot = arena.begin(2, 2, complete=(2, 1))
views = slot.place(SIZES)
worker = os.fork()
if worker == 0:
    os.close(0), os.close(1)
    time.sleep(60)
    os._exit(0)
print(worker, flush=True)
ready()
"""


def test_a_loader_worker_that_outlives_the_trainer_holds_nothing(make: Make, directory: Path) -> None:
    arena = make(slot_bytes=4 << 20)
    path, nbytes = arena.info.path, arena.info.nbytes
    assert path is not None
    arena.close()
    child = children.start(path, TRAINER)
    assert child.stdout is not None
    worker = int(child.stdout.readline())
    try:
        children.wait_ready(child)
        assert mapped_by(path) == [child.pid]
        children.kill(child)
        assert Process.of(worker) is not None, "the worker lives"
        assert mapped_by(path) == []
        assert not [
            link
            for link in (os.readlink(f"/proc/{worker}/fd/{fd}") for fd in os.listdir(f"/proc/{worker}/fd"))
            if path.name in link
        ]
        with Arena.attach(path) as heir:
            heir.take(Process.current(), run_id="run", incarnation=3, world=1)
            assert keys(heir) == [(2, 1)]
            write(heir, 3, 2, (2, 1))
            write(heir, 3, 3, (2, 1))
            write(heir, 3, 4, (3, 3))  # the pin of the dead trainer is void
            assert keys(heir) == [(3, 2), (3, 3), (3, 4)]
        before = free(directory)
        assert clean(directory, keep=lambda info: False) == [path]
        assert free(directory) - before >= nbytes // 2, "its memory came back"
    finally:
        os.kill(worker, signal.SIGKILL)


def free(directory: Path) -> int:
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def in_child(work: Callable[[], None]) -> int:
    """Exit status of a forked child that does ``work``; 0 if it did, negative a signal: SIGALRM where it hung."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.setitimer(signal.ITIMER_REAL, SOON_S)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_the_objects_are_dead_in_the_child_and_alive_in_the_parent(make: Make) -> None:
    arena = make()
    write(arena, 1, 1, None)
    pinned = pin_step(arena, 1, 1)
    slot = arena.begin(1, 2, complete=None)
    assert slot is not None
    views = slot.place(SIZES)

    def child() -> None:
        for call in (
            lambda: arena.info,
            lambda: arena.snapshots(),
            lambda: pinned.view("state"),
            pinned.check,
            lambda: slot.publish("x"),
            lambda: arena.begin(1, 3, complete=None),
        ):
            with pytest.raises(ArenaGone):
                call()
        pinned.release()
        slot.abandon()
        arena.close()
        with Arena.attach(path) as own:  # a child may open it anew
            assert keys(own) == [(1, 1)]

    path = arena.info.path
    assert path is not None
    assert in_child(child) == 0
    assert len(arena._control.living_pins(pinned.info.index)) == 1, (
        "the parent's pin is not the child's to release"
    )
    pinned.check()
    assert matches(pinned)
    views["state"][:] = bytes(len(views["state"]))
    slot.publish("x")
    assert keys(arena) == [(1, 1), (1, 2)]


def test_a_child_forked_while_memory_is_reserved_does_not_wait_for_it(reserving: Reserving) -> None:
    arena = reserving.arena()
    assert reserving.begun.wait(SOON_S)

    def child() -> None:
        for call in (lambda: arena.begin(1, 1, complete=None), lambda: arena.info):
            with pytest.raises(ArenaGone):
                call()
        arena.close()

    assert in_child(child) == 0
    reserving.may.set()
    write(arena, 1, 1, None)
    assert keys(arena) == [(1, 1)], "the parent's comes as ever"


def test_a_stale_view_faults_in_the_child(make: Make) -> None:
    arena = make()
    view = write_view(arena)

    def touch() -> None:
        faulthandler.disable()
        view[0] = 1

    assert in_child(touch) == -signal.SIGSEGV
    view[0] = 7


def write_view(arena: Arena) -> memoryview:
    slot = arena.begin(1, 1, complete=None)
    assert slot is not None
    return slot.place([("state", 10)])["state"]


def test_dropping_a_mapping_in_the_child_takes_nothing_else_along(make: Make) -> None:
    arenas = [make()]

    def child() -> None:
        assert not re.findall(r"\.arena", Path("/proc/self/maps").read_text())
        blocks = [bytearray(1 << 20) for _ in range(50)]  # would land where the mapping was
        arenas.clear()
        assert all(block == bytes(1 << 20) for block in blocks)

    assert in_child(child) == 0
