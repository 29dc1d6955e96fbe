"""What tests of agents share: snapshots of some kilobytes in arenas, as a rank would put them there, records of
incarnations, and the process that is the agent."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from everstep.agent.link import Link, State
from everstep.agent.values import AgentSettings
from everstep.backends.files import LocalBackend
from everstep.format.layout import Box, EntrySpec, build_layout, encode, layout_hash
from everstep.format.records import IncarnationRecord, Writer
from everstep.memory.arena import Arena
from everstep.memory.process import Process
from everstep.memory.slots import SnapshotInfo
from everstep.store.blocking import run_blocking
from everstep.store.flush import write_meta
from everstep.store.runs import add_incarnation

CHUNK = 4096
SOON_S = 40.0
"""Far more than anything here takes, also where agents, which are of low priority, get little of the machine; what is
awaited is an event, never the time itself."""


def until(look: Callable[[], Any], what: str, timeout_s: float = SOON_S) -> Any:
    """The first true value of ``look``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def payload(incarnation: int, step: int, rank: int, nbytes: int = 3 * CHUNK) -> bytes:
    return random.Random(f"{incarnation} {step} {rank}").randbytes(nbytes)


def put_snapshot(
    arena: Arena, slot: Any, rank: int, world: int, incarnation: int, step: int, nbytes: int = 3 * CHUNK
) -> SnapshotInfo:
    """Fill ``slot``, which ``arena.begin`` gave, with the rank's payload of ``step``."""
    data = payload(incarnation, step, rank, nbytes)
    spec = EntrySpec("model", "w", "uint8", (len(data),), (Box((0,), (len(data),)),))
    layout = build_layout([spec])
    encoded = encode(layout)
    meta = {
        "mesh": {"dp": world},
        "coordinates": {"dp": rank},
        "parts": {"model": {"class": "Net", "settings": {}}},
        "data": None,
        "rng": [],
        "metrics": {},
        "config_hash": None,
        "libraries": {},
        "facts": {},
    }
    contents = {
        f"image:{layout.images[0].name}": layout.images[0].header + data,
        "state": f"step {step} rank {rank}".encode(),
        "meta": write_meta(meta),
        "layout": encoded,
    }
    views = slot.place([(name, len(value)) for name, value in contents.items()])
    for name, value in contents.items():
        views[name][:] = value
    slot.publish(layout_hash(encoded))
    return next(found for found in arena.snapshots() if found.step == step)


def open_incarnation(backend: LocalBackend, world: int, adopted: tuple[int, int] | None = None) -> int:
    """The number of a new incarnation, whose writer is this process."""

    def build(number: int) -> IncarnationRecord:
        me = Process.current()
        return IncarnationRecord(
            number=number,
            id=f"id{number}",
            parent=number - 1 if adopted else None,
            adopted_incarnation=adopted[0] if adopted else None,
            adopted_step=adopted[1] if adopted else None,
            fresh="test" if adopted is None and number > 1 else None,
            world=world,
            mesh={"dp": world},
            config_hash=None,
            config=None,
            config_changes={},
            config_reason=None,
            loosened=(),
            writer=Writer("here", me.boot, me.pid, me.start_time),
            created="2026-01-01T00:00:00Z",
        )

    return run_blocking(add_incarnation(backend, build)).number


def agent_of(settings: AgentSettings) -> Process | None:
    """The process that is the agent now; it is not woken up or kept by being asked."""
    link = Link(settings, None, up=lambda: None, lost=lambda why: None)
    try:
        deadline = time.monotonic() + SOON_S  # where there is none, that is known at once
        while link.state not in (State.UP, State.DOWN) and time.monotonic() < deadline:
            link.advance()
            link.wait(0.1)
        return link.agent
    finally:
        link.close()
