"""A trainer that is killed in mid snapshot leaves the snapshots before it whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from everstep.memory.arena import Arena
from everstep.memory.process import Process
from everstep.snapshot.copier import Copier

from .plans import leaves_of, plan_of
from .test_copier import snapshot, stored

ArenaFor = Callable[..., Arena]

TRAINER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
from everstep.memory.arena import Arena
from everstep.memory.process import Process
from everstep.snapshot.copier import Copier
from snapshot.plans import leaves_of, plan_of
arena = Arena.attach(Path(sys.argv[1]))
arena.take(Process.current(), run_id="run", incarnation=2, world=1)
parts = {{"model": {{"a": torch.full((1000,), 2.0), "b": torch.full((200_000,), 2.0)}}}}
plan = plan_of(parts)
slot = arena.begin(2, 2, complete=(1, 1))
late = Copier().copy(slot, plan, leaves_of(parts), state=b"state", meta=b"meta", late={late})
if late is not None:
    late.wait(10)
slot.publish(plan.layout_hash)
"""


@pytest.mark.parametrize(
    ("point", "late"),
    [("slot.mid_copy", ()), ("slot.copied", ()), ("slot.copied", (0, 1)), ("slot.publish.locked", (1,))],
)
def test_killed_at(arena_for: ArenaFor, point: str, late: tuple[int, ...]) -> None:
    parts = {"model": {"a": torch.full((1000,), 1.0), "b": torch.full((200_000,), 1.0)}}
    plan = plan_of(parts)
    arena, copier = arena_for(plan), Copier()
    snapshot(arena, copier, plan, leaves_of(parts), 1)
    expected = stored(arena, plan, 1)
    path = arena.info.path
    assert path is not None
    arena.close()
    copier.forget()
    body = TRAINER.format(tests=str(Path(__file__).parent.parent), late=late)
    env = {**os.environ, "EVERSTEP_POINTS": f"kill:{point}"}
    assert subprocess.run([sys.executable, "-c", body, str(path)], env=env).returncode == -signal.SIGKILL
    with Arena.attach(path) as heir:
        assert [found.key for found in heir.snapshots()] == [(1, 1)]
        assert stored(heir, plan, 1) == expected
        heir.take(Process.current(), run_id="run", incarnation=3, world=1)
        for step in (2, 3):
            slot = heir.begin(3, step, complete=(1, 1))
            assert slot is not None
            assert slot.layout_hash_before == ""
            Copier().copy(slot, plan, leaves_of(parts), state=b"state", meta=b"meta")
            slot.publish(plan.layout_hash)
            assert stored(heir, plan, step) == expected
        assert stored(heir, plan, 1) == expected
