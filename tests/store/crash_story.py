"""The story that the crash tests interrupt, on its own so that a child process can run it.

A run with steps 1 and 2 saves step 3, one rank of which is a delta of step 2, and rotates to the last two, twice (the
second time removes tombstones).
"""

from __future__ import annotations

import asyncio
import sys

from everstep.backends.api import Backend
from everstep.backends.files import LocalBackend
from everstep.format.manifest import Manifest
from everstep.store.catalog import list_step
from everstep.store.rotate import rotate
from everstep.store.sources import DurableSource

from tests.store import store_kit as kit

OLD = frozenset({(1, 1), (1, 2)})
BOTH = frozenset({(1, 1), (1, 2), (1, 3)})
NEW = frozenset({(1, 2), (1, 3)})
"""What can be loaded before, between commit and rotation, and after it."""


async def before(backend: Backend) -> None:
    await kit.start_run(backend)
    await kit.save(backend, 1)
    await kit.save(backend, 2)


async def story(backend: Backend) -> None:
    run = await kit.start_run(backend)
    base = await kit.read_decision(backend, await list_step(backend, 2, 1))
    assert isinstance(base, Manifest)
    saved = await kit.save(backend, 3, base=DurableSource(backend, base, run.chunk_bytes))
    assert saved.kind == "delta"
    for wait_s in (3600.0, 0.0):
        plan = await kit.plan_for(backend, 2)
        await rotate(backend, plan, is_superseded=kit.not_superseded, tombstone_wait_s=wait_s)


async def run(root: str) -> None:
    backend = LocalBackend(root)
    await story(backend)
    await backend.close()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1]))
    print("finished")
